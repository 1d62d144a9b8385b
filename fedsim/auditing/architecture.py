"""Functions that build networks, for attacks: they hold no data and can be called in another process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from torch import nn

from fedsim.models.checks import a_network
from fedsim.plugins import registry
from fedsim.randomness import seeded_by
from fedsim.task import Task
from fedsim.training.modes import dropping


@dataclass(frozen=True)
class Architecture:
    """Builds copies of the network that an experiment names.

    Attributes:
        name: of the model, registered or `module:callable`.
        settings: its table.
        task: what it is built for.
        seed: of its fresh weights. It is derived from the seed of the run, which must not be handed to attacks because
            the partition of the data follows from it.
        dropout: whether dropout layers are active while clients train; if not, their rate is 0 in this network.
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
    def module(self) -> str | None:
        """Where its code is, if it is not registered."""
        return _module(self.name)

    @cached_property
    def _network(self) -> nn.Module:
        plugin = registry.build("models", self.name, self.settings, "model")
        with seeded_by(self.seed):
            network = a_network(plugin.build(self.task), self.name)
        for layer in dropping(network) if not self.dropout else ():
            layer.p = 0.0
        return network


@dataclass(frozen=True)
class WrittenOut:
    """Calls what an attack file names as `module:callable`, whose module is imported."""

    reference: str

    def __call__(self) -> nn.Module:
        """What it returns."""
        network: nn.Module = registry.load_object(self.reference)()
        return network

    @property
    def module(self) -> str | None:
        """Where its code is."""
        return _module(self.reference)


def _module(reference: str) -> str | None:
    return reference.partition(":")[0] if ":" in reference else None
