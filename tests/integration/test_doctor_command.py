"""`fedsim doctor` says what is there, what is missing and what is broken, and ends with 1 for the last alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedsim.api import doctor
from fedsim.base.errors import DataError
from fedsim.data.cache import find_source_files
from fedsim.data.tables import Adult
from fedsim.plugins import registry
from tests.support.commands import call_fedsim

Call = Callable[..., tuple[int, dict[str, str], str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """The exit code, what is said by name, and what is on the standard error."""
    monkeypatch.delenv("FEDSIM_DATA", raising=False)

    def run(*words: str | Path) -> tuple[int, dict[str, str], str]:
        done = call_fedsim("doctor", *words, capfd=capfd)
        lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line and not line.endswith(":")]
        return done.returncode, dict(lines), done.stderr

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plug-ins are loaded, which takes seconds."""
    monkeypatch.setattr(doctor, "_plugins", lambda: iter(()))


def test_all_is_well_here(call: Call) -> None:
    code, told, err = call()
    assert (code, err) == (0, "")
    assert told["python"] == sys.version.split()[0]
    assert told["torch"] == torch.__version__.split("+")[0] or told["torch"] == torch.__version__
    assert int(told["cores"]) >= 1
    assert float(told["memory"].split()[0]) > 0
    assert told["folder"] == "none; set FEDSIM_DATA, or give --data-dir DIR"
    assert told["load"] == str(sum(len(registry.registered_names(group)) for group in registry.GROUPS))
    assert ("cuda:0" in told) is torch.cuda.is_available()
    assert set(registry.registered_names("datasets")) <= set(told)
    assert told["mnist"] == "not searched for, because no folder is set; `fedsim data mnist --download` fetches it"
    assert told["digits"] == "there, it comes with scikit-learn and needs no file"
    assert told["csv"] == "reads your own files; set data.path"
    assert told["LPIPS"].startswith("missing, so no LPIPS is computed: $FEDSIM_DATA/weights/")


@pytest.mark.usefixtures("quick")
def test_data_sets_are_found_without_being_read(call: Call, tmp_path: Path) -> None:
    (tmp_path / "adult").mkdir()
    for name in ("adult.data", "adult.test"):
        (tmp_path / "adult" / name).touch()
    code, told, _ = call("--data-dir", tmp_path)
    assert code == 0
    assert told["folder"] == str(tmp_path)
    assert told["adult"] == "there, 2 files"
    assert f"missing: {tmp_path}/att_faces/s1/1.pgm: no such file; get " in told["att-faces"]
    assert f"`fedsim data svhn --download --data-dir {tmp_path}` fetches it" in told["svhn"]
    with pytest.raises(DataError):  # what is asked for afterwards is read
        Adult().load(tmp_path)
    assert len(find_source_files(Adult(), tmp_path)) == 2


@pytest.mark.usefixtures("quick")
def test_every_data_set_at_hand_is_there(call: Call) -> None:
    if not (data := Path(__file__).parents[3] / "shared" / "data").is_dir():
        pytest.skip("the real data are not here")
    told = call("--data-dir", data)[1]
    names = ("adult", "att-faces", "cifar10", "cifar100", "flight-prices", "mnist", "reuters-r8")
    assert [name for name in names if not told[name].startswith("there, ")] == []
    assert told["LPIPS"] == f"there, {data}/weights/squeezenet1_1-imagenet1k.pth"
    assert 'set data.files = "test"' in told["emnist"]


@pytest.mark.usefixtures("quick")
def test_a_folder_that_is_not_there_and_weights_that_are_damaged_are_told(call: Call, tmp_path: Path) -> None:
    assert call("--data-dir", tmp_path / "x")[1]["folder"] == f"{tmp_path}/x; there is no such folder"
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "squeezenet1_1-imagenet1k.pth").write_bytes(b"PK")
    code, told, _ = call("--data-dir", tmp_path)
    assert code == 0
    assert "is not a readable file of weights" in told["LPIPS"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("needed", "code", "sentence"),
    [
        ("not-a-package>=1", 1, "is missing; pip install 'fedsim-curious'"),
        (
            "not-a-package>=1; extra == 'federation'",
            0,
            "no federation be run; pip install 'fedsim-curious[federation]'",
        ),
        ("not-a-package>=1; extra == 'dev'", 0, ""),
        ("torch<1", 1, "and fedsim wants <1; pip install 'torch<1'"),
        ("flwr<1; extra == 'federation'", 0, "and fedsim wants <1; pip install 'flwr<1'"),
    ],
)
def test_a_package_that_is_missing_or_of_another_version_is_told(
    needed: str, code: int, sentence: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what the core needs is an error."""
    monkeypatch.setattr(doctor, "requires", lambda _: [needed])
    got, told, err = call()
    assert got == code
    name = needed.split(";")[0].rstrip("<>=1")
    assert sentence in told.get(name, "")
    assert (f"fedsim: {name}: {told.get(name)}" in err) is bool(code)


def test_plugins_that_do_not_load_are_told_and_only_ours_are_an_error(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entries(owner: str) -> dict[str, tuple[Any, ...]]:
        entry = EntryPoint("dim", "a_module_that_nobody_has:Dim", "fedsim.attacks")
        vars(entry)["dist"] = type("Distribution", (), {"name": owner})()
        return {"dim": (entry,)}

    for owner, code in (("somebody", 0), ("fedsim-curious", 1)):
        monkeypatch.setattr(
            registry, "_entry_points", lambda group, owner=owner: entries(owner) if group == "attacks" else {}
        )
        got, told, err = call()
        assert got == code
        assert f"(a_module_that_nobody_has:Dim, from {owner}) does not load: ModuleNotFoundError" in told["dim"]
        assert ("does not load" in err) is bool(code)
        assert told["load"] == "0"


def test_without_torch_it_says_so_and_looks_at_nothing_that_needs_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['fedsim', 'doctor']; "
        "from fedsim.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 1
    assert "does not import (ModuleNotFoundError" in result.stdout
    assert result.stderr.startswith("fedsim: torch: does not import")
    assert "machine:" not in result.stdout


def test_a_gpu_that_cannot_compute_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="A card", total_memory=8 * 10**9)
    )
    if not torch.version.cuda or not Path("/dev/nvidia0").exists():
        [told] = doctor._gpus()
        assert told.name == "cuda:0"
        assert told.text.startswith("A card, 8 GB; nothing can be computed on it: ")
    monkeypatch.setattr(doctor, "_explain_unusable_gpu", lambda _: "")
    assert [told.text for told in doctor._gpus()] == ["A card, 8 GB"]
