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


class Pooled(nn.Module):
    """Asks its pooling for its size, which raises no RuntimeError where another layer is there."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.pool, self.head = nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.pool(self.convolution(inputs))
        outputs: Tensor = self.head((maps * self.pool.kernel_size).flatten(1))
        return outputs


def begin_with_zeros() -> nn.Module:
    """Return a network whose gradients are all zero at first, whatever becomes of its activations."""
    model = convolutions(Residual(), Centres())
    for parameter in model[-1].parameters():  # type: ignore[index]
        nn.init.zeros_(parameter)
    return model


def hook_pooling() -> nn.Module:
    """Return a network that remembers what its pooling gives."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
    model[1].register_forward_hook(lambda module, inputs, outputs: None)
    return model


def hook_relu() -> nn.Module:
    """Return a network that remembers what the ReLU before its pooling gives."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 5))
    model[1].register_forward_hook(lambda module, inputs, outputs: None)
    return model


class SharedRelu(nn.Module):
    """Reads once more what a ReLU in front of a pooling is given."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3), nn.Linear(16, 5)
        self.layers = nn.Sequential(nn.ReLU(), nn.AvgPool2d(2))

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.convolution(inputs)
        pooled = self.layers(maps)
        outputs: Tensor = self.head((pooled + maps[:, :, ::2, ::2].square()).flatten(1))
        return outputs


def convolutions(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("build", "shortcuts"),
    [
        (convolutions, ModelShortcuts(True, True, True)),
        (Views, ModelShortcuts(True, False)),
        (Shuffles, ModelShortcuts(True, False)),
        (lambda: convolutions(Residual()), ModelShortcuts(True, True, False)),
        (begin_with_zeros, ModelShortcuts()),
        (Pooled, ModelShortcuts(True, True, False)),
        (hook_pooling, ModelShortcuts(True, True, False)),
        (hook_relu, ModelShortcuts(True, True, True)),
        (SharedRelu, ModelShortcuts(True, True, False)),
        (lambda: convolutions(Centres()), ModelShortcuts(False, True, True)),
        (lambda: convolutions(nn.BatchNorm2d(4)), ModelShortcuts(False, True, True)),
    ],
    ids=[
        "plain",
        "view",
        "memory order",
        "input of a ReLU",
        "zeros",
        "pooling",
        "hook",
        "hooked ReLU",
        "input of a pooled ReLU",
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
    relus = [module for module in model.modules() if isinstance(module, nn.ReLU)]
    assert all(relu.inplace == shortcuts.reuses_memory for relu in relus)


@pytest.mark.parametrize("pool", [nn.AvgPool2d(2), nn.AvgPool2d(3), nn.AvgPool2d(2, 1), nn.AvgPool2d(2, padding=1)])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("side", [11, 14])
def test_pooling_gives_the_same_bits_in_less_memory(pool: nn.AvgPool2d, activation: type[nn.Module], side: int) -> None:
    """Windows that overlap, and images that they do not cover, too."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), activation(), pool, nn.Flatten(), nn.LazyLinear(5)).train()
    inputs, labels = torch.rand(6, 3, side, side), torch.tensor([0, 1, 2, 3, 4, 0])

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))

    _ = model(inputs)
    expected = gradients()
    tiles = pool.stride == pool.kernel_size and not pool.padding
    assert find_shortcuts(model, SETTINGS, inputs).reuses_memory == (tiles or activation is nn.ReLU)
    assert (model[2] is not pool) == tiles
    model.to(memory_format=torch.contiguous_format)
    assert all(map(torch.equal, gradients(), expected))


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
