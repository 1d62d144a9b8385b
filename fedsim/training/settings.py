"""Settings of local training, which also check an experiment file; they do not import torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, Self

from annotated_types import Ge, Le

from fedsim.base.constraints import NonNegativeFloat, PositiveFloat, ShareBelowOne, check_field_constraints
from fedsim.base.errors import ConfigError

_NumPasses = Annotated[int, Ge(1), Le(10**6)]
"""Number of local epochs or steps; larger ones are typing errors."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """Settings of local training; exactly one of `local_epochs` and `local_steps` is set.

    A client that sends a gradient computes that of one mini-batch at w_t (FedSGD) and takes no step
    itself: the server does, with its own learning rate. Settings that would change a client's steps
    are then refused.

    Attributes:
        local_epochs: E, passes over the local data, each in a new order.
        local_steps: number of optimizer steps instead; batches go on across epochs.
        batch_size: B; the last batch of an epoch may be smaller.
        batches: `reshuffled` splits the local data into other batches each epoch, `fixed` into the
            same ones, in the same order, for the whole federation; then, and where gradients are
            sent, a round starts with the batch after the last one of the round before. Otherwise
            each round starts a new epoch.
        learning_rate: step size of the optimizer.
        optimizer: `sgd`, `adam` or `adamw`.
        momentum: momentum of SGD.
        weight_decay: L2 penalty (decoupled in `adamw`).
        batch_norm: `train` normalises by the batch and updates running statistics, `eval`
            normalises by the running statistics and leaves them alone, `frozen` does not train
            scale and shift either. BatchNorm's batch counter is not sent; it is set to 0 in each
            round.
        batch_norm_statistics: whether running statistics are sent, `shared`, or not, `withheld`;
            then they are in no message, and evaluation normalises by the batch.
        dropout: whether dropout layers drop.
        label_smoothing: share of each label that is spread evenly over all classes, in [0, 1); in
            training only.
        proximal_mu: weight of the proximal term; FedProx's server sets it.
        sends: `weights` after local training, or the `gradient` of one mini-batch; FedSGD's server
            sets it.
    """

    local_epochs: _NumPasses | None = None
    local_steps: _NumPasses | None = None
    batch_size: Annotated[int, Ge(1), Le(10**9)] = 10
    batches: Literal["reshuffled", "fixed"] = "reshuffled"
    learning_rate: PositiveFloat = 0.01
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: ShareBelowOne = 0.0
    weight_decay: NonNegativeFloat = 0.0
    batch_norm: Literal["train", "eval", "frozen"] = "train"
    batch_norm_statistics: Literal["shared", "withheld"] = "shared"
    dropout: bool = True
    label_smoothing: ShareBelowOne = 0.0
    proximal_mu: NonNegativeFloat = 0.0
    sends: Literal["weights", "gradient"] = "weights"

    @classmethod
    def from_message(cls, config: Mapping[str, Any]) -> Self:
        """Read the settings from a server's message.

        FedProx's server adds `proximal-mu`, FedSGD's `sends`.

        Raises:
            ConfigError: the settings do not go together.
        """
        values = {key.replace("-", "_"): value for key, value in config.items()}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: values[name] for name in names if name in values})

    def __post_init__(self) -> None:
        check_field_constraints(self, "training.")
        if self.sends == "gradient":
            self._check_one_gradient()
        if (self.local_epochs is None) == (self.local_steps is None):
            raise ConfigError("training: set local_epochs or local_steps, exactly one of them")
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"training.momentum: belongs to optimizer 'sgd', got '{self.optimizer}'")
        if self.batch_norm_statistics == "withheld" and self.batch_norm != "train":
            raise ConfigError(
                f"training.batch_norm: '{self.batch_norm}' normalises by running statistics, but "
                "they are withheld; set batch_norm_statistics to 'shared' or batch_norm to 'train'"
            )

    def _check_one_gradient(self) -> None:
        if self.local_epochs is not None:
            raise ConfigError(
                "training.local_epochs: clients that send gradients take one mini-batch a round; "
                "set local_steps = 1 instead"
            )
        if self.local_steps != 1:
            raise ConfigError(
                "training.local_steps: clients that send gradients take one mini-batch a round, "
                f"expected 1, got {self.local_steps}"
            )
        for name, expected in (
            ("optimizer", "sgd"),
            ("momentum", 0.0),
            ("weight_decay", 0.0),
            ("proximal_mu", 0.0),
        ):
            if getattr(self, name) != expected:
                raise ConfigError(
                    f"training.{name}: clients that send gradients take no step themselves, "
                    f"expected {expected!r}, got {getattr(self, name)!r}; leave it out"
                )

    @property
    def continues_batches(self) -> bool:
        """Return whether batches continue from round to round; see `round_batches`."""
        return self.batches == "fixed" or self.sends == "gradient"

    def check_plain_steps(self, reason: str) -> None:
        """Raise ConfigError unless clients take plain steps of SGD; `reason` is of an algorithm that needs them."""
        for name, expected in (("optimizer", "sgd"), ("momentum", 0.0)):
            if (got := getattr(self, name)) != expected:
                raise ConfigError(f"training.{name}: {reason}, expected {expected!r}, got {got!r}; leave it out")

    def steps(self, num_examples: int) -> int:
        """Return T, the number of optimizer steps of one round for a client with `num_examples`."""
        steps = known_steps(self, num_examples)
        assert steps is not None  # `__post_init__` asks for one of the two
        return steps


class StepSettings(Protocol):
    """Settings that the number of local steps follows from; None for what is not known."""

    @property
    def local_steps(self) -> int | None:
        """Return T, where clients train for steps."""

    @property
    def local_epochs(self) -> int | None:
        """Return E, where clients train for epochs."""

    @property
    def batch_size(self) -> int | None:
        """Return B."""


def known_steps(settings: StepSettings, num_examples: int) -> int | None:
    """Return T, the number of local steps of a client with N examples; None where it is not known.

    It is that of the settings, or E ceil(N / B).
    """
    if settings.local_steps is not None:
        return settings.local_steps
    if settings.local_epochs is None or settings.batch_size is None:
        return None
    return settings.local_epochs * math.ceil(num_examples / settings.batch_size)
