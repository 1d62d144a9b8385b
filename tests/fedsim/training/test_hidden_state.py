"""Networks that keep what no message holds, so that clients and attacks would compute with different ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedsim
from fedsim.audit.threat_model import check_hidden_state
from fedsim.base.errors import ConfigError, PluginError
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.interfaces.knowledge import Knowledge
from fedsim.training.hidden_state import has_hidden_state
from fedsim.training.settings import LocalTraining

TRAINING = LocalTraining(local_steps=1)


class Shifted(nn.Module):
    """Linear network of inputs minus a running mean that is no persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * rows.detach().mean(0)
        outputs: Tensor = self.layer(rows - self.mean)
        return outputs


class Counting(nn.Module):
    """Linear network whose outputs fall with the number of its passes, an integer that is not sent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        outputs: Tensor = self.layer(inputs.flatten(1)) / self.passes
        return outputs


class DataDependent(nn.Module):
    """Linear network whose shift is set by the first batch that it sees (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift, self.is_set = nn.Linear(64, 10), nn.Parameter(torch.zeros(64)), False

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1)
        if not self.is_set:
            self.shift.data.copy_(-rows.mean(0))
            self.is_set = True
        outputs: Tensor = self.layer(rows + self.shift)
        return outputs


class RandomFeatures(nn.Module):
    """Linear network of a random projection that is an attribute, drawn anew for each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.projection = nn.Linear(32, 10), torch.randn(64, 32)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(torch.sin(inputs.flatten(1) @ self.projection))
        return outputs


def plain() -> nn.Module:
    layers = nn.Linear(64, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10)
    return nn.Sequential(nn.Flatten(), *layers)


@pytest.mark.parametrize("build", [Shifted, Counting, DataDependent, RandomFeatures, plain])
def test_what_no_message_holds_is_noticed(build: Callable[[], nn.Module]) -> None:
    used, new = build(), build()
    used(torch.rand(4, 1, 8, 8))
    assert has_hidden_state(used, new, TRAINING, torch.rand(4, 1, 8, 8)) == (build is not plain)


def experiment(build: Callable[[], nn.Module]) -> dict[str, object]:
    tables: dict[str, object] = {"partition": {"name": "iid", "samples_per_client": 4}, "model": build()}
    return tables | {"federation": {"clients": 2}, "training": {"local_steps": 1}}


def test_such_a_network_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model: of '.*', two copies with the same weights compute different outputs"
    ):
        fedsim.run(experiment(Shifted), tmp_path / "run")


def test_parameters_that_are_no_real_numbers_are_refused(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, dtype=torch.complex64))

    with pytest.raises(ConfigError, match=r"the parameter '1\.weight' of torch\.complex64, expected real numbers"):
        fedsim.run(experiment(build), tmp_path / "run")


def test_a_network_of_an_attack_file_is_refused_too() -> None:
    adversary = AdversaryTable.model_validate({"knowledge": {"model": "tests.of_an_app:build"}})
    check_hidden_state(adversary, Knowledge(model=plain, input_shape=(1, 8, 8)))
    with pytest.raises(PluginError, match=r"of tests\.of_an_app:build, two copies with the same"):
        check_hidden_state(adversary, Knowledge(model=RandomFeatures, input_shape=(1, 8, 8)))
