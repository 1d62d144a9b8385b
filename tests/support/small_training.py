"""A network of three classes, examples for it, and defenses that touch the gradients of examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from clients.defenses.dp_sgd import DpSgd
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")


def net(**how: Any) -> nn.Module:
    """Return the network, always with the same weights."""
    with seed_globals("test-model"):
        return Mlp(hidden=(6,), **how).build(Task((1, 2, 2), 3))


def some_data(count: int = 10) -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    rng = generator("some data")
    return torch.randn(count, 1, 2, 2, generator=rng), torch.randint(0, 3, (count,), generator=rng)


def sgd(**how: Any) -> LocalTraining:
    """Return two epochs in batches of four, with settings replaced."""
    length = {} if "local_steps" in how else {"local_epochs": 2}
    return LocalTraining(**{**length, "batch_size": 4, "learning_rate": 0.1, "batch_norm": "eval", **how})


@dataclass(frozen=True, kw_only=True)
class Private(Defense):
    """DP-SGD as its hooks are meant."""

    clip: float = 0.1
    noise: float = 0.0

    paper: ClassVar[Paper] = PAPER

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()]).norm(dim=0)
        factors = (self.clip / norms).clamp(max=1)
        sums = {name: torch.einsum("e,e...->...", factors, each) for name, each in gradients.items()}
        scale = self.noise * self.clip
        return {n: (s + scale * torch.randn(s.shape, generator=context.rng)) / expected for n, s in sums.items()}


@dataclass(frozen=True, kw_only=True)
class Shown(DpSgd):
    """DP-SGD whose `on_examples` is its own, so that nothing may be computed another way."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        return super().on_examples(gradients, expected, context)
