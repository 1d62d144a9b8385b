"""What is sent as a function of one example: without the others where they only add a constant, with them otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedsim.base.task import squared_error
from fedsim.training.message_function import ClientMessage
from fedsim.training.settings import LocalTraining

LOSS: Any = nn.functional.cross_entropy


def make_message(*layers: nn.Module, training: LocalTraining | None = None) -> ClientMessage:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), *layers, nn.Tanh(), nn.Linear(6, 3)).double()
    return ClientMessage.create(
        model, LOSS, torch.randn(4, 5, dtype=torch.double), torch.tensor([0, 2, 1, 1]), training=training
    )


@pytest.mark.parametrize(
    ("whole", "computed"),
    [
        (make_message(), 1),
        (make_message(nn.BatchNorm1d(6).eval()), 1),
        (make_message(nn.BatchNorm1d(6)), 4),
        (make_message(nn.Dropout()), 4),
        (make_message(training=LocalTraining(local_steps=3, batch_size=2)), 4),
    ],
    ids=["plain", "batch norm in eval mode", "batch norm in train mode", "dropout", "update"],
)
def test_an_example_by_itself_is_what_it_is_among_the_others(whole: ClientMessage, computed: int) -> None:
    alone, among = whole.vary_one_example(2), replace(whole, varying=(2,))
    assert len(alone.inputs) == computed
    other = torch.randn(1, 5, dtype=torch.double)
    torch.testing.assert_close(alone.unknown_inputs, among.unknown_inputs)
    torch.testing.assert_close(alone.vector, among.vector)
    torch.testing.assert_close(alone(other), among(other))
    torch.testing.assert_close(alone.to_double()(other), among(other))
    torch.testing.assert_close(
        alone.jacobian.push_forward(other.flatten()), among.jacobian.push_forward(other.flatten())
    )
    torch.testing.assert_close(alone.jacobian.pull_back(among.vector), among.jacobian.pull_back(among.vector))
    if whole.training is None:
        torch.testing.assert_close(alone.gradient_share, among.gradient_share)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False).eval()])
def test_where_outputs_do_not_show_that_examples_mix_they_do_all_the_same(norm: nn.Module) -> None:
    """A head of zeros gives the same outputs whatever it gets, and equal examples are their own mean."""
    silent, equal = make_message(norm), make_message(norm)
    nn.init.zeros_(silent.model[-1].weight)
    nn.init.zeros_(silent.model[-1].bias)
    equal = replace(equal, inputs=equal.inputs[:1].expand(4, -1), labels=equal.labels[:1].expand(4))
    for whole in (silent, equal):
        assert len(whole.vary_one_example(2).inputs) == 4


def test_a_head_of_zeros_leaves_open_whether_examples_mix() -> None:
    class Centred(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs - inputs.mean(0)

    whole = make_message(Centred())
    nn.init.zeros_(whole.model[-1].weight)
    nn.init.zeros_(whole.model[-1].bias)
    assert len(whole.vary_one_example(2).inputs) == 4


@pytest.mark.parametrize("layer", [nn.RReLU(), nn.Dropout1d(), nn.LSTM(6, 6, num_layers=2, dropout=0.5)])
def test_whatever_layer_draws_draws_the_same_each_time(layer: nn.Module) -> None:
    class Only(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            found = self.layer(inputs)
            return found[0] if isinstance(found, tuple) else found

    whole = make_message(Only())
    torch.testing.assert_close(whole(whole.unknown_inputs), whole(whole.unknown_inputs), rtol=0, atol=0)
    assert len(whole.vary_one_example(2).inputs) == 4


def test_a_share_is_not_lost_in_the_rounding_of_the_others() -> None:
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    inputs, targets = torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.tensor([1e6, 1e-6])
    share = ClientMessage.create(model, squared_error, inputs, targets).vary_one_example(1).gradient_share
    assert share.norm().item() == pytest.approx(1e-6 * 26**0.5)


def test_an_example_that_adds_nothing_has_nothing_to_read_among_others_that_do() -> None:
    model = nn.Linear(2, 1)
    inputs = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        targets = model(inputs)[:, 0] + torch.tensor([0.0, 1.0, 2.0])
    whole = ClientMessage.create(model, squared_error, inputs, targets)
    assert [whole.vary_one_example(example).is_zero for example in range(3)] == [True, False, False]
    assert not whole.is_zero
