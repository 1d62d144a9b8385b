"""Model builders that attacks are granted: they hold no data and work in another process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.base.randomness import seed_globals_with
from fedsim.base.task import Task
from fedsim.plugins import registry
from fedsim.recording.payloads import WORKING_TYPE
from fedsim.training.models.checks import check_network


@dataclass(frozen=True)
class Architecture:
    """Builder of copies of the network that an experiment names.

    Attributes:
        seed: of its fresh weights. It is derived from the seed of the run, which attacks must not
            get because the partition of the data follows from it.
        dropout: whether layers draw random numbers while clients train, as dropout does; the
            network gets this as its attribute `draws_in_training`.
    """

    name: str
    settings: Mapping[str, Any]
    task: Task
    seed: int
    dropout: bool = True

    def __call__(self) -> nn.Module:
        """Return a new copy of the network, each time with the same fresh weights."""
        return deepcopy(self._network)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules with its code; empty where it is registered."""
        return _module_names(self.name)

    @cached_property
    def _network(self) -> nn.Module:
        plugin = registry.build("models", self.name, self.settings, "model")
        with seed_globals_with(self.seed):
            network = check_network(plugin.build(self.task), self.name).to(WORKING_TYPE)
        vars(network)["draws_in_training"] = self.dropout
        return network


@dataclass(frozen=True)
class ReferencedModel:
    """Builder of the network that an attack file names as `module:callable`.

    Attributes:
        outputs: of a function that makes logits from what the network returns and from its inputs;
            empty where the network returns logits.
        frozen: whether parameters that need no gradient are not sent; they keep the values that
            they are built with.
        binary: whether the network returns one logit, that of the second of two classes; the logit
            of the first one becomes 0.
    """

    reference: str
    outputs: str = ""
    frozen: bool = False
    binary: bool = False

    def __call__(self) -> nn.Module:
        """Return the network that the named function builds."""
        network: nn.Module = registry.load_object(self.reference)()
        if not isinstance(network, nn.Module):
            return network
        network = network.to(WORKING_TYPE)
        if self.frozen:
            _freeze(network)
        if self.outputs:
            network.register_forward_hook(_OutputHook(self.outputs))
        if self.binary:
            network.register_forward_hook(_add_zero_logit)
        return network

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules with its code."""
        return _module_names(self.reference, self.outputs)


@dataclass(frozen=True)
class ReferencedLoss:
    """Loss that an attack file names as `module:callable`."""

    reference: str

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of these outputs."""
        loss: Tensor = registry.load_object(self.reference)(outputs, labels)
        return loss

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules with its code."""
        return _module_names(self.reference)


@dataclass(frozen=True)
class _OutputHook:
    """Forward hook that makes logits from what a network returns."""

    reference: str

    def __call__(self, network: nn.Module, inputs: tuple[Any, ...], returned: Any) -> Any:
        return registry.load_object(self.reference)(returned, *inputs)


def _add_zero_logit(network: nn.Module, inputs: tuple[Any, ...], returned: Any) -> Any:
    """Put a logit 0 of the first class before the logit of the second one that the network returns.

    The cross-entropy of both is the binary cross-entropy of the returned logit.
    """
    if not isinstance(returned, Tensor):
        return returned  # the check of the model says what is wrong with it
    logit = returned.reshape(len(returned), -1)
    return torch.cat([torch.zeros_like(logit), logit], 1)


def _freeze(network: nn.Module) -> None:
    """Turn parameters that need no gradient into buffers that are in no message."""
    for name, parameter in list(network.named_parameters()):
        if not parameter.requires_grad:
            layer_name, _, parameter_name = name.rpartition(".")
            layer = network.get_submodule(layer_name)
            delattr(layer, parameter_name)
            layer.register_buffer(parameter_name, parameter.detach(), persistent=False)


def _module_names(*references: str) -> tuple[str, ...]:
    names = [reference.partition(":")[0] for reference in references if ":" in reference]
    return tuple(dict.fromkeys(names))
