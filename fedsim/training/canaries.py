"""Canaries: gradients put among those of a client's examples, so that what a defense lets through can be measured.

A coin decides of each canary whether it is one of the client's examples. One that is in takes part as the others do:
sampled at the same rate by the same draws, clipped and noised with them by the client's own defense. Its gradient does
not depend on the model: a single number, so large that any clipping cuts it, at a place that no other canary has.

References:
    Nasr et al.: Tight Auditing of Differentially Private Machine Learning, USENIX Security 2023 (gradients of a single
    number), and Steinke, Nasr, Jagielski: Privacy Auditing with One (1) Training Run, NeurIPS 2023 (many at once).
    Andrew et al.: One-shot Empirical Privacy Estimation for Federated Learning, ICLR 2024, and Maddock et al.: CANIFE,
    ICLR 2023, have random or optimised directions instead, which in a small model are not orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.defense import Defense, overrides
from fedsim.errors import ConfigError
from fedsim.randomness import generator
from fedsim.wire.messages import State

SIZE = 1e6
"""The number of a canary's gradient. A promise holds for examples of any gradient, so a large one tests it hardest."""


def audited_at(defense: Defense) -> str:
    """The hook at which canaries measure the promise of `defense`; empty where they cannot."""
    if not overrides(defense, "guarantee"):
        return ""
    return next((hook for hook in ("on_examples", "on_update") if overrides(defense, hook)), "")


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """The canaries of one client. Places and coins follow from the seed, so they are stored nowhere.

    Attributes:
        seed: of the run.
        client: who carries them.
        count: m, in and out.
    """

    seed: int
    client: int
    count: int

    @cached_property
    def inside(self) -> Tensor:
        """`canary`, whether it is in: what the adversary guesses, and only the auditor and the client know."""
        return torch.rand(self.count, generator=generator(self.seed, "canary coins", self.client)) < 0.5

    def places(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """Of each canary, in or out, the tensor that its number is in, and where in it, each elsewhere.

        Args:
            shapes: of the parameters that are trained.

        Raises:
            ConfigError: there are fewer numbers than canaries.
        """
        numbers = sum(shape.numel() for shape in shapes.values())
        if self.count > numbers:
            raise ConfigError(
                f"canaries.count: each needs a number of the gradient for itself, expected at most {numbers}, the "
                f"parameters that are trained, got {self.count}"
            )
        rng = generator(self.seed, "canary places", self.client)
        return [located(shapes, place) for place in torch.randperm(numbers, generator=rng)[: self.count].tolist()]


def located(shapes: Mapping[str, torch.Size], place: int) -> tuple[str, int]:
    """The tensor that has the number `place` of all tensors in a row, and where in it."""
    for name, shape in shapes.items():
        if place < shape.numel():
            return name, place
        place -= shape.numel()
    raise IndexError(place)


class Insertion:
    """The canaries of a client that are in, while it trains: the examples after its own."""

    def __init__(self, canaries: Canaries, own: int) -> None:
        """Behind a client's `own` examples."""
        self._canaries, self._own = canaries, own
        self._present: list[int] = canaries.inside.nonzero().flatten().tolist()
        self._drawn: list[int] = []
        self._places: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._present)

    def apart(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """The client's own examples of each batch of all; the canaries in it are kept for `beside`."""
        for index in batches:
            own = index < self._own
            self._drawn = [self._present[place - self._own] for place in index[~own].tolist()]
            yield index[own]

    def beside(self, gradients: State) -> State:
        """`gradients`, `example ...`, and after them those of the canaries in the batch."""
        shapes = {name: each.shape[1:] for name, each in gradients.items()}
        self._places = self._places or self._canaries.places(shapes)
        there = len(next(iter(gradients.values())))
        wider = {
            name: torch.cat([each, each.new_zeros(len(self._drawn), *each.shape[1:])])
            for name, each in gradients.items()
        }
        for row, canary in enumerate(self._drawn, there):
            name, place = self._places[canary]
            wider[name][row].view(-1)[place] = SIZE
        return wider
