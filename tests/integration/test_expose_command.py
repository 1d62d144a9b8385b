"""`fedsim expose`: what is measured of whom at which states, what is left out, and the pictures."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path

import pytest
import torch

from fedsim.base.errors import RunError
from fedsim.exposure.jacobian_norm import JacobianNorm
from fedsim.exposure.of_clients import COLUMNS
from fedsim.federation.experiment import Experiment
from fedsim.federation.exposure_moments import find_applicable_measures
from fedsim.federation.run_folder import RunFolder, read_exposures
from fedsim.report.exposure import ExposureQuantity, draw_clients, draw_examples, mean_quantities
from tests.support.commands import Call
from tests.support.experiments import make_tiny_config, run_serial

FILE = """
[partition]
samples_per_client = 6

[model]
name = "mlp"
hidden = [8]

[training]
local_steps = 1
batch_size = 4

[strategy]
name = "fedsgd"
learning_rate = 0.1

[federation]
seed = 3
clients = 3
rounds = 2

[states]
rounds = [1]
epochs = [2]

[adversary]
when = "never"
"""


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """`fedsim` in this process, in a folder with an experiment file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(FILE)
    return call


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of clients that measured themselves, and kept a state."""
    config = make_tiny_config(measure=[{"name": "gradient-norm"}], states={"rounds": [1]})
    return run_serial(config, tmp_path_factory.mktemp("run") / "run")


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "exposure.csv").open() as file:
        return list(csv.DictReader(file))


def test_clients_and_each_of_their_examples_at_states_of_training(call: Call, tmp_path: Path) -> None:
    states = ("--state", "round-1", "--state", "epoch-2")
    done = call(
        "expose", "tiny.toml", "--measure", "gradient-norm", "--each", *states, "--client", "2", "--client", "0"
    )
    assert done.returncode == 0
    folder = tmp_path / "runs" / "exposure-tiny"
    found = rows(folder)
    assert list(found[0]) == list(COLUMNS)
    where = {(row["state"], row["round"], row["client"]) for row in found}
    assert where == {(s, n, c) for s, n in (("round-1", "2"), ("epoch-2", "1")) for c in ("0", "2")}
    assert {row["state"] + row["client"]: 0 for row in found if not row["example"]}.keys() == {
        "round-12", "round-10", "epoch-22", "epoch-20",
    }  # fmt: skip
    # In round 2 the 2 that are left of 6 are the mini-batch; after epochs of central training it is that of round 1.
    assert sum(bool(row["example"]) for row in found) == 2 * (2 + 4)
    assert sorted(path.name for path in folder.glob("*.png")) == [
        "clients-epoch-2.png",
        "clients-round-1.png",
        "examples-epoch-2-gradient-norm.png",
        "examples-round-1-gradient-norm.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    assert "Exposure at round-1" in done.stdout
    assert "most exposed" in done.stdout


def test_what_is_computed_is_what_clients_measure_in_the_loop(call: Call, run: RunFolder, tmp_path: Path) -> None:
    assert call("expose", run.path, "--round", "1", "--round", "2", "--out", tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "exposure.csv").read_text() == run.exposure.read_text()
    assert call("expose", run.path, "--state", "round-1", "--out", tmp_path / "state").returncode == 0
    assert rows(tmp_path / "state") == [row for row in read_exposures(run) if row["round"] == "2"]


def test_a_run_keeps_it_beside_its_own_files_and_stays_intact(call: Call, run: RunFolder) -> None:
    assert call("expose", run.path).returncode == 0
    assert (run.path / "exposure" / "exposure.csv").is_file()
    assert call("inspect", run.path).returncode == 0
    again = call("expose", run.path)
    assert again.returncode == 2
    table = run.path / "exposure" / "exposure.csv"
    assert again.stderr == f"fedsim: {table}: is there already; choose another --out, or pass --overwrite\n"
    assert call("expose", run.path, "--overwrite", "--client", "1").returncode == 0
    assert [row["client"] for row in rows(run.path / "exposure")] == ["1"]


def test_a_setting_of_a_measure_may_be_changed_and_nothing_else_of_a_run(
    call: Call, run: RunFolder, tmp_path: Path
) -> None:
    own = ("--set", "measure.gradient-norm.label=mine", "--out", tmp_path / "out")
    assert call("expose", run.path, *own).returncode == 0
    assert {row["measure"] for row in rows(tmp_path / "out")} == {"mine"}
    done = call("expose", run.path, "--set", "federation.seed=1")
    assert (done.returncode, "the settings of a run cannot change" in done.stderr) == (2, True)


def test_a_measure_that_does_not_apply_is_named_and_the_others_go_on(
    call: Call, run: RunFolder, tmp_path: Path
) -> None:
    done = call("expose", run.path, "--each", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr == (
        "fedsim: gradient-norm was not measured (round 1, client 0, and 3 more): in an update of several "
        "steps no example has a share of its own; measure the whole update, or the gradient of a batch\n"
    )
    found = rows(tmp_path / "out")
    assert sum(bool(row["value"]) for row in found) == 4
    assert sum(bool(row["failure"]) for row in found) == 4


def test_without_a_choice_all_that_apply_are_measured(call: Call, tmp_path: Path) -> None:
    override = ("--set", 'strategy={name="fedavg"}', "--set", "training.optimizer=adam")
    done = call("expose", "tiny.toml", *override)
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    assert "gradient-norm is left out: of what optimizer 'adam' sends there is no measure yet" in said
    assert "no measure applies to this experiment" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_rows_of_clients_that_are_done_are_kept(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = Experiment.model_with_state
    calls: list[int] = []

    def interrupted(self: Experiment, state: dict[str, torch.Tensor]) -> torch.nn.Module:
        calls.append(1)
        if len(calls) == 2:
            raise RunError("no more memory")
        return filled(self, state)

    monkeypatch.setattr(Experiment, "model_with_state", interrupted)
    done = call("expose", "tiny.toml", "--measure", "gradient-norm")
    assert done.returncode == 1
    assert done.stderr.endswith("fedsim: no more memory\n")
    assert [row["client"] for row in rows(tmp_path / "runs" / "exposure-tiny")] == ["0"]


def test_a_measure_that_is_done_is_kept_though_the_next_is_interrupted(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def interrupted(self: JacobianNorm, sent: object) -> None:
        raise Killed

    monkeypatch.setattr(JacobianNorm, "_compute", interrupted)
    with contextlib.suppress(Killed):
        call("expose", "tiny.toml", "--measure", "gradient-norm", "--measure", "jacobian-norm")
    assert [row["measure"] for row in rows(tmp_path / "runs" / "exposure-tiny")] == ["gradient-norm"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["tiny.toml", "--round", "1"],
            "--round: tiny.toml is not a run and has no recorded rounds; use --state",
        ),
        (
            ["tiny.toml", "--measure", "gradient-nrom"],
            "measures: nothing is called 'gradient-nrom', did you mean 'gradient-norm'?",
        ),
        (["tiny.toml", "--client", "7"], "--client 7: is not among the 3 clients of round-0; name another"),
        (
            ["tiny.toml", "--state", "round-7"],
            "--state round-7: expected a safetensors file, or a state that is kept (round-1, epoch-2); [states] says "
            "which are",
        ),
        (["tiny.toml", "--state", "no.safetensors"], "--state no.safetensors: no.safetensors is not a readable"),
        (["tiny.toml", "--state", "round-1", "--state", "round-1"], "expose: round-1 is asked for 2 times; name each"),
        (["RUN", "--round", "7"], "expose: round 7 is not recorded; recorded: [1, 2]"),
        (["RUN", "--client", "9", "--round", "1"], "--client 9: is not among the 4 clients of round 1; name another"),
        (
            ["tiny.toml", "--set", "algorithm.name=fedper", "--set", "strategy={name='fedavg'}"],
            "expose: it measures messages of plain local training, and 'fedper' trains otherwise; name an",
        ),
        (["nothing.toml"], "nothing.toml: cannot be read (No such file or directory)"),
        (["tiny.toml", "--out", "RUN"], "is a run, whose own files stay as it wrote them; choose another --out"),
        (["."], "has no experiment file, so its clients' data are unknown; name a run of fedsim"),
    ],
)
def test_wrong_requests_are_one_sentence(
    call: Call, run: RunFolder, tmp_path: Path, words: list[str], says: str
) -> None:
    words = words if "--measure" in words else [*words, "--measure", "gradient-norm", "--overwrite"]
    done = call("expose", *(str(run.path) if word == "RUN" else word for word in words))
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("exposure.csv"))


def row(client: int, value: str, *, example: str = "", larger: str = "more", number: int = 1) -> dict[str, str]:
    told = {"round": str(number), "client": str(client), "example": example, "value": value, "larger_means": larger}
    return {"measure": "m", "quantity": "q", "failure": "", **told}


def test_the_most_exposed_come_first_whichever_way_the_measure_goes() -> None:
    values = [row(0, "1.0"), row(1, "3.0"), row(2, "nan"), row(3, "2.0"), row(0, "4.0", number=2)]
    (found,) = mean_quantities(values)
    assert [client for client, _ in found.ranking] == [1, 0, 3]
    assert found.values[0, ""] == 2.5  # mean over rounds
    assert found.undefined == [(2, "")]
    (found,) = mean_quantities([item | {"larger_means": "less"} for item in values])
    assert [client for client, _ in found.ranking] == [3, 0, 1]


def test_of_many_examples_a_picture_shows_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[str]] = []

    def noted(rows: list[object]) -> bytes:
        shown.extend(list(row.captions) for row in rows)  # type: ignore[attr-defined]
        return b""

    monkeypatch.setattr("fedsim.report.figures.gallery", noted)
    found = mean_quantities([row(0, str(place), example=str(place)) for place in range(50)], of_examples=True)
    draw_examples(found, lambda who: torch.zeros(1, 4, 4))
    assert [len(captions) for captions in shown] == [24, 12]
    assert shown[0][0] == "49\nclient 0: 49"
    assert shown[1][-1] == "0\nclient 0: 0"


def test_a_picture_of_clients_takes_values_of_any_size() -> None:
    values = {(client, ""): float(10**client) for client in range(6)}
    item = ExposureQuantity(measure="m", name="q", larger_means="more", values=values, undefined=[])
    negative = ExposureQuantity(measure="m", name="p", larger_means="less", values={(0, ""): -1.0}, undefined=[])
    assert draw_clients([item, negative]).startswith(b"\x89PNG")


def test_a_measure_without_a_choice_that_says_nothing_of_single_examples_says_the_rest(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsim.federation.exposure_moments.registry.registered_names", lambda _: ["gradient-norm"])
    caplog.set_level("INFO", logger="fedsim")
    (schedule,) = find_applicable_measures(Experiment(make_tiny_config()), each=True)
    assert not schedule.per_example
    assert "of single examples gradient-norm is left out: in an update of several steps" in caplog.text
