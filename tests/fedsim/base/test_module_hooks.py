"""A network that calls its layers by keyword gives every hook what a network that calls them by position gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from adversaries.text.embedding import find_token_embedding
from fedsim.federation.tested_examples import ExampleWatch
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.batch_norm import copy_with_batch_statistics
from fedsim.inversion.labels.last_layer import output_layer
from fedsim.training.features import forward_with_features, outputs_with_features
from fedsim.training.first_layer import InputLayer, find_first_layer
from fedsim.training.modes import normalise_by_instance


class Network(nn.Module):
    """Network that calls each layer by position, or by keyword."""

    def __init__(self, by_keyword: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_keyword = by_keyword
        self.body, self.norm, self.head = nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, images: Tensor) -> Tensor:
        layers = self.body, self.norm, nn.Unflatten(1, (2, 4)), self.instance, nn.Flatten(), self.head
        values = images.flatten(1)
        for layer in layers:
            values = layer(input=values) if self.by_keyword else layer(values)
        return values


INPUTS = torch.rand((3, 1, 4, 4), generator=torch.Generator().manual_seed(1))


def count_tested(network: nn.Module) -> Tensor:
    watch = ExampleWatch()
    with watch.watch(), torch.no_grad():
        network(images=INPUTS)
    return torch.tensor(watch.count())


def outputs_of_instances(network: nn.Module) -> Tensor:
    normalise_by_instance(network, {}, {})
    outputs: Tensor = network.eval()(INPUTS)
    return outputs


FIRST_LAYER = InputLayer("body.weight", bias_is_used_once=True)
HOOKS: dict[str, Callable[[nn.Module], Tensor]] = {
    "output layer": lambda network: output_layer(network.eval(), INPUTS)[1],
    "first layer": lambda network: torch.tensor(find_first_layer(network.eval(), INPUTS) == FIRST_LAYER),
    "features": lambda network: forward_with_features(network.eval(), INPUTS)[1],
    "replaced features": lambda network: outputs_with_features(network.eval(), INPUTS, lambda x, _: 2 * x),
    "batch statistics": lambda network: copy_with_batch_statistics(network.eval())(INPUTS),
    "instance statistics": outputs_of_instances,
    "tested examples": count_tested,
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_see_what_layers_are_given_by_keyword(name: str) -> None:
    by_position, by_keyword = (HOOKS[name](Network(by_keyword)) for by_keyword in (False, True))
    torch.testing.assert_close(by_keyword, by_position)
    assert name != "tested examples" or by_keyword.tolist() == [3, 0]
    assert name != "first layer" or by_keyword


class Texts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        outputs: Tensor = self.head(input=self.tokens(input=ids).mean(1))
        return outputs


def test_an_embedding_that_is_given_tokens_by_keyword_is_found() -> None:
    _, layer = find_token_embedding(Knowledge(model=Texts, input_shape=(5,)))
    assert layer == "tokens"
