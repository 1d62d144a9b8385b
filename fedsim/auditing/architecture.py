"""Functions that build networks, for attacks: they hold no data and can be called in another process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.models.checks import a_network
from fedsim.plugins import registry
from fedsim.randomness import seeded_by
from fedsim.task import Task
from fedsim.wire.payloads import WORKING_TYPE


@dataclass(frozen=True)
class Architecture:
    """Builds copies of the network that an experiment names.

    Attributes:
        name: of the model, registered or `module:callable`.
        settings: its table.
        task: what it is built for.
        seed: of its fresh weights. It is derived from the seed of the run, which must not be handed to attacks because
            the partition of the data follows from it.
        dropout: whether layers draw while clients train, as dropout does; the network says so as `draws_in_training`.
    """

    name: str
    settings: Mapping[str, Any]
    task: Task
    seed: int
    dropout: bool = True

    def __call__(self) -> nn.Module:
        """A new copy of the network for each caller, with the same fresh weights."""
        return deepcopy(self._network)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def modules(self) -> tuple[str, ...]:
        """Where its code is, if it is not registered."""
        return _modules(self.name)

    @cached_property
    def _network(self) -> nn.Module:
        plugin = registry.build("models", self.name, self.settings, "model")
        with seeded_by(self.seed):
            network = a_network(plugin.build(self.task), self.name).to(WORKING_TYPE)
        vars(network)["draws_in_training"] = self.dropout
        return network


@dataclass(frozen=True)
class WrittenOut:
    """Calls what an attack file names as `module:callable`, whose module is imported.

    Attributes:
        reference: of a function that builds the network.
        outputs: of a function of what the network returns and of its inputs, which gives the logits; empty where it
            returns them.
        frozen: whether parameters that need no gradient are not sent; they keep the values that they are built with.
        binary: whether the network gives one logit, of the second of two classes; the other one becomes 0.
    """

    reference: str
    outputs: str = ""
    frozen: bool = False
    binary: bool = False

    def __call__(self) -> nn.Module:
        """The network that it returns."""
        network: nn.Module = registry.load_object(self.reference)()
        if not isinstance(network, nn.Module):
            return network
        network = network.to(WORKING_TYPE)
        if self.frozen:
            _freeze(network)
        if self.outputs:
            network.register_forward_hook(_Reading(self.outputs))
        if self.binary:
            network.register_forward_hook(_both_logits)
        return network

    @property
    def modules(self) -> tuple[str, ...]:
        """Where its code is."""
        return _modules(self.reference, self.outputs)


@dataclass(frozen=True)
class WrittenLoss:
    """Calls the loss that an attack file names as `module:callable`."""

    reference: str

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of these outputs."""
        loss: Tensor = registry.load_object(self.reference)(outputs, labels)
        return loss

    @property
    def modules(self) -> tuple[str, ...]:
        """Where its code is."""
        return _modules(self.reference)


@dataclass(frozen=True)
class _Reading:
    """A hook that makes logits of what a network returns."""

    reference: str

    def __call__(self, network: nn.Module, inputs: tuple[Any, ...], returned: Any) -> Any:
        return registry.load_object(self.reference)(returned, *inputs)


def _both_logits(network: nn.Module, inputs: tuple[Any, ...], returned: Any) -> Any:
    """Logits of two classes. Their cross-entropy is the binary cross-entropy of the one that the network gives."""
    if not isinstance(returned, Tensor):
        return returned  # the check of the model says what is wrong with it
    logit = returned.reshape(len(returned), -1)
    return torch.cat([torch.zeros_like(logit), logit], 1)


def _freeze(network: nn.Module) -> None:
    """Make constants of the parameters that need no gradient; they are in no message."""
    for name, parameter in list(network.named_parameters()):
        if not parameter.requires_grad:
            home, _, leaf = name.rpartition(".")
            owner = network.get_submodule(home)
            delattr(owner, leaf)
            owner.register_buffer(leaf, parameter.detach(), persistent=False)


def _modules(*references: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reference.partition(":")[0] for reference in references if ":" in reference))
