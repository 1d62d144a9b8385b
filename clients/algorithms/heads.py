"""Algorithms whose clients share the body of the network, and keep a head of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedsim.base.errors import ConfigError, did_you_mean
from fedsim.interfaces.algorithm import ClientAlgorithm
from fedsim.training.features import find_last_linear

BODY, HEAD = "body", "head"


@dataclass(frozen=True, kw_only=True)
class BodySharing(ClientAlgorithm):
    """Base of algorithms that send the body, and keep the head.

    Args:
        head: names of the layers or blocks of the model that stay with the client, such as
            `["classifier"]`; empty for the last linear layer.
    """

    head: tuple[str, ...] = ()

    private_parts: ClassVar[frozenset[str]] = frozenset({HEAD})
    personal: ClassVar[bool] = True
    keeps: ClassVar[str] = "the head of its model"
    sends: ClassVar[str] = "the body of its model"

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the names of the tensors in body and head."""
        return divide_into_body_and_head(network, self.head)


def divide_into_body_and_head(network: nn.Module, head: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the names of the tensors in the body and in the head of `network`.

    Args:
        head: names of the layers or blocks that are the head; empty for the last linear layer. A
            tensor that two of them hold is named twice.

    Raises:
        ConfigError: the network has no such layer, or no last linear one.
    """
    names = [name for name, tensor in network.state_dict().items() if tensor.is_floating_point()]
    if not head:
        named_layer = find_last_linear(network)
        if named_layer is None:
            raise ConfigError(
                "algorithm.head: the last matrix of the model belongs to no linear layer; name the layers of the head"
            )
        head = [named_layer[0]]
    modules = [name for name, _ in network.named_modules() if name]
    head_names: list[str] = []
    for module in head:
        if module not in modules:
            raise ConfigError(f"algorithm.head: the model has no part '{module}', {did_you_mean(module, modules)}")
        head_names += [name for name in names if name.startswith(f"{module}.")]
    return {BODY: [name for name in names if name not in head_names], HEAD: head_names}
