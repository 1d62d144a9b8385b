"""Shortcuts in the gradients of batches are taken where a model gives the same without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation.model_shortcuts import ModelShortcuts, find_shortcuts
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

SETTINGS = LocalTraining(local_epochs=1, batch_size=4, learning_rate=0.5)


class Views(nn.Module):
    """Reshapes outputs of a convolution as only one layout allows."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(64, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.convolution(inputs).view(len(inputs), -1))
        return outputs


class Shuffles(nn.Module):
    """Reads numbers in the order in which they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(64, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.convolution(inputs)
        outputs: Tensor = self.head(torch.as_strided(maps, (len(maps), 64), (64, 1)))
        return outputs


class Centres(nn.Module):
    """Takes the mean of the batch from each example."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class Residual(nn.Module):
    """Reads the input of a ReLU once more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.relu = nn.Parameter(torch.ones(1)), nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        scaled = self.scale * inputs
        outputs: Tensor = self.relu(scaled) + scaled.square()
        return outputs


def begin_with_zeros() -> nn.Module:
    """Return a network whose gradients are all zero at first, whatever becomes of its activations."""
    model = convolutions(Residual(), Centres())
    for parameter in model[-1].parameters():  # type: ignore[index]
        nn.init.zeros_(parameter)
    return model


def convolutions(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("build", "shortcuts"),
    [
        (convolutions, ModelShortcuts(True, True)),
        (Views, ModelShortcuts(True, False)),
        (Shuffles, ModelShortcuts(True, False)),
        (begin_with_zeros, ModelShortcuts()),
        (lambda: convolutions(Centres()), ModelShortcuts(False, True)),
        (lambda: convolutions(nn.BatchNorm2d(4)), ModelShortcuts(False, True)),
    ],
    ids=[
        "plain",
        "view",
        "memory order",
        "zeros",
        "batch mean",
        "batch norm",
    ],
)
def test_a_shortcut_is_taken_where_the_model_allows_it(build: type[nn.Module], shortcuts: ModelShortcuts) -> None:
    model, inputs = build(), torch.rand(4, 3, 6, 6)
    model.train()
    assert find_shortcuts(model, SETTINGS, inputs) == shortcuts
    is_last = [p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.shape[-1:] == (3,)]
    assert all(is_last) == shortcuts.lays_channels_last


def test_nothing_is_tried_where_modes_are_not_known() -> None:
    assert find_shortcuts(convolutions(), None, torch.rand(4, 3, 6, 6)) == ModelShortcuts()


@pytest.mark.parametrize("build", [convolutions, Views, Shuffles, lambda: convolutions(Centres())])
def test_similarities_are_the_same_without_shortcuts(build: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the examples are equal."""
    model, labels = build(), torch.tensor([0, 1, 2, 1])
    before = copy_state(model)
    after = {name: tensor - 0.05 * torch.randn(tensor.shape) for name, tensor in before.items()}
    data = torch.rand(2, 3, 6, 6)[[0, 1, 0, 1]]

    def similarity() -> float:
        unit = torch.zeros(3), torch.ones(3)
        sent = AttackedUpdate(
            model=model, loss=cross_entropy, update=build_update(before, after), value_range=unit, settings=SETTINGS
        )
        return sent.similarity_at_broadcast(data, labels)

    with_shortcuts = similarity()
    monkeypatch.setattr(
        "fedsim.audit.evaluation.similarity.find_shortcuts", lambda model, settings, inputs: ModelShortcuts()
    )
    assert with_shortcuts == pytest.approx(similarity(), abs=1e-6)
