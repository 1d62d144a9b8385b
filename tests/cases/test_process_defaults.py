"""Code of one client that changes what all code of the process shares is named, and changes nothing for others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import fedsim
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import PluginError, RunError
from fedsim.base.process_defaults import protect_defaults
from fedsim.interfaces.local_context import LocalContext

CHANGES: Mapping[str, Callable[[], object]] = {
    "torch's default dtype from torch.float32 to torch.float64": lambda: torch.set_default_dtype(torch.float64),
    "torch's default device from cpu to meta": lambda: torch.set_default_device("meta"),
    "whether torch records gradients from True to False": lambda: torch.set_grad_enabled(False),
    "torch's number of threads from 1 to 2": lambda: torch.set_num_threads(2),
}


@dataclass(frozen=True)
class Changing(fedsim.Defense):
    """Changes a default of the process."""

    what: str

    paper: ClassVar[fedsim.Paper] = UpdateNoise.paper

    def on_update(self, update: Mapping[str, Tensor], context: LocalContext) -> Mapping[str, Tensor]:
        del context
        CHANGES[self.what]()
        return update


@pytest.mark.parametrize("what", CHANGES)
def test_a_defense_that_changes_a_default_is_told_of_and_the_default_put_back(tmp_path: Path, what: str) -> None:
    experiment = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [8]},
        "federation": {"engine": "serial", "clients": 3, "rounds": 1},
        "defense": [Changing(what=what)],
    }
    before = torch.get_num_threads()
    with pytest.raises(RunError, match="all 3 clients failed") as caught:
        fedsim.run(experiment, out=tmp_path / "run")
    assert f"a defense or a measure) changed {what}, which all code of the process shares" in str(caught.value)
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == before


def test_a_folder_that_is_gone_keeps_nothing_else_from_being_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path)

    def change() -> None:
        with protect_defaults("a client"):
            torch.set_default_dtype(torch.float64)
            monkeypatch.chdir(gone)
            gone.rmdir()

    with pytest.raises(PluginError, match="a client changed torch's default dtype"):
        change()
    assert torch.get_default_dtype() == torch.float32
    assert Path.cwd() == tmp_path


def test_a_precision_by_its_new_name_is_no_error() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        with protect_defaults("a client"):
            pass
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
