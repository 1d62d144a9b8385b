"""Layer freezing: the updates of some layers are never sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch

from fedsim.base.errors import ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Setting
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts, constant_deviations
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class LayerFreeze(Defense):
    """Never send the update of some layers; there, the server's model stays as it is.

    No formal guarantee: all other layers are sent exactly.

    Args:
        layers: names of tensors of the model, or patterns of names with `*` and `?`, as `"1.*"` or
            `"*.bias"`.

    Raises:
        ConfigError: nothing is named, a name or a pattern matches nothing in the model, or they
            match all of it.

    References:
        [Arivazhagan2019] (layers that stay at the client).
        Differs: the client trains these layers in each round from the values in the server's model,
        and discards the result.
    """

    layers: tuple[str, ...] = ()

    against: ClassVar[str] = "a server that needs the layers that are not sent; all others it sees as they are"
    cost: ClassVar[str] = "accuracy: these layers never learn; saves the bytes of these layers"
    encodes: ClassVar[bool] = True
    paper: ClassVar[Paper] = cite("Arivazhagan2019")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layers:
            raise ConfigError('layers: nothing is named, so nothing would be kept; name tensors, as in ["*.bias"]')

    @property
    def summable(self) -> bool:
        """Return True: all clients freeze the same layers."""
        return True

    def check(self, setting: Setting) -> None:
        """Check that the patterns match some of the model's tensors, but not all."""
        self._frozen_names(list(setting.update))

    def on_update(self, update: State, context: LocalContext) -> Payload:
        """Return the update with frozen tensors as sparse zeros, which take no bytes."""
        frozen = {name: torch.zeros_like(update[name]) for name in self._frozen_names(list(update))}
        return Payload.from_dense(update) | Payload.from_sparse(frozen)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return the gradient with zeros in frozen layers."""
        del sent
        return {name: torch.zeros_like(t) if self._is_frozen(name) else t for name, t in gradient.items()}

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise:
        """Return that frozen layers were left out."""
        del facts
        frozen = {name: tensor for name, tensor in sent.items() if self._is_frozen(name)}
        return MessageNoise(deviations=constant_deviations(frozen, math.inf))

    def _frozen_names(self, names: Sequence[str]) -> list[str]:
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"layers: '{pattern}' matches nothing in the model; it has {', '.join(names)}")
        frozen = [name for name in names if self._is_frozen(name)]
        if len(frozen) == len(names):
            raise ConfigError("layers: they are the whole model, so nothing would be sent; name fewer")
        return frozen

    def _is_frozen(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.layers)
