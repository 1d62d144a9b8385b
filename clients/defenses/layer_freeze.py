"""Some layers are never sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch

from fedsim.attacks import Paper
from fedsim.defense import Defense, Setting
from fedsim.errors import ConfigError
from fedsim.wire.messages import State
from fedsim.wire.payloads import Payload


@dataclass(frozen=True, kw_only=True)
class LayerFreeze(Defense):
    """Never send the update of some layers; the server's model keeps what it has there.

    No formal guarantee: all other layers are sent as they are.

    Args:
        layers: names of tensors of the model, or patterns of names with `*` and `?`, as `"1.*"` or `"*.bias"`.

    Raises:
        ConfigError: nothing is named, a name or a pattern matches nothing in the model, or they match all of it.

    References:
        Arivazhagan et al.: Federated Learning with Personalization Layers, 2019 (layers that stay at the client).
        Differs: the client trains these layers in each round from where the server's model has them, and does not keep
        what they learned.
    """

    layers: tuple[str, ...] = ()

    against: ClassVar[str] = "a server that needs the layers that are not sent; all others it sees as they are"
    cost: ClassVar[str] = "accuracy: these layers never learn; saves the bytes of these layers"
    encodes: ClassVar[bool] = True
    paper: ClassVar[Paper] = Paper(
        title="Federated Learning with Personalization Layers",
        authors="Arivazhagan, Aggarwal, Singh, Choudhary",
        venue="arXiv",
        year=2019,
        url="https://arxiv.org/abs/1912.00818",
    )

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError('layers: nothing is named, so nothing would be kept; name tensors, as in ["*.bias"]')

    @property
    def summable(self) -> bool:
        """See Defense; all clients keep the same layers."""
        return True

    def check(self, setting: Setting) -> None:
        """See Defense."""
        self._kept(list(setting.update))

    def on_update(self, update: State, *, rng: torch.Generator) -> Payload:
        """See Defense. A tensor that is not sent takes no bytes."""
        del rng
        kept = {name: torch.zeros_like(update[name]) for name in self._kept(list(update))}
        return Payload.dense(update) | Payload.sparse(kept)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """See Defense. Layers that are never sent are zero."""
        del sent
        return {name: torch.zeros_like(t) if self._keeps(name) else t for name, t in gradient.items()}

    def _kept(self, names: Sequence[str]) -> list[str]:
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"layers: '{pattern}' matches nothing in the model; it has {', '.join(names)}")
        kept = [name for name in names if self._keeps(name)]
        if len(kept) == len(names):
            raise ConfigError("layers: they are the whole model, so nothing would be sent; name fewer")
        return kept

    def _keeps(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.layers)
