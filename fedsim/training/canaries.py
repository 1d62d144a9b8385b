"""Canaries: gradients among those of a client's examples that measure what a defense lets through.

A coin decides for each canary whether it is included among the client's examples. An included
canary is treated as they are: sampled at the same rate by the same draws, clipped and noised by the
client's own defense. Its gradient does not depend on the model: a single non-zero number, so large
that any clipping cuts it, in a coordinate of its own.

References:
    [Nasr2023] for gradients of a single number; [Steinke2023] for many canaries at once.
    [Andrew2024] and [Maddock2023] have random or optimised directions instead, which in a small
    model are not orthogonal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator
from fedsim.interfaces.defense import Defense, overrides
from fedsim.recording.wire_format import State

CANARY_VALUE = 1e6
"""Value of a canary's gradient.

A guarantee holds for examples of any gradient, so a large one tests it hardest."""


def audited_hook(defense: Defense) -> str:
    """Return the hook at which canaries test the guarantee of `defense`; '' where they cannot."""
    if not overrides(defense, "guarantee"):
        return ""
    return next((hook for hook in ("on_examples", "on_update") if overrides(defense, hook)), "")


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Canaries of one client; coordinates and coins follow from the seed and are stored nowhere.

    Attributes:
        seed: of the run.
        client: id of the client that carries them, or one that no client has where each of them is
            a client.
        count: m, the number of canaries, included or not.
    """

    seed: int
    client: int
    count: int

    @cached_property
    def is_included(self) -> Tensor:
        """Return for each canary whether it is included, `canary`.

        The adversary guesses this; only the auditor and the client know it.
        """
        return torch.rand(self.count, generator=generator(self.seed, "canary coins", self.client)) < 0.5

    def draw_coordinates(self, shapes: Mapping[str, torch.Size]) -> list[tuple[str, int]]:
        """Draw the coordinate of each canary, included or not: a tensor and a flat index into it.

        No two canaries share a coordinate.

        Args:
            shapes: shapes of the parameters that are trained.
        """
        numbers = sum(shape.numel() for shape in shapes.values())
        if self.count > numbers:
            raise ConfigError(
                "canaries.count: each needs a number of the gradient for itself, expected at most "
                f"{numbers}, the parameters that are trained, got {self.count}"
            )
        rng = generator(self.seed, "canary places", self.client)
        coordinates = torch.randperm(numbers, generator=rng)[: self.count].tolist()
        return [locate_coordinate(shapes, coordinate) for coordinate in coordinates]


def locate_coordinate(shapes: Mapping[str, torch.Size], coordinate: int) -> tuple[str, int]:
    """Return the tensor and the flat index in it of a coordinate of all tensors joined.

    >>> locate_coordinate({"weight": torch.Size([2, 3]), "bias": torch.Size([2])}, 7)
    ('bias', 1)
    """
    for name, shape in shapes.items():
        if coordinate < shape.numel():
            return name, coordinate
        coordinate -= shape.numel()
    raise IndexError(coordinate)


class CanaryInsertion:
    """Canaries that are included while a client trains, numbered after its own examples."""

    def __init__(self, canaries: Canaries, num_examples: int) -> None:
        """Insert `canaries` after a client's own `num_examples`."""
        self._canaries, self._num_examples = canaries, num_examples
        self._included: list[int] = canaries.is_included.nonzero().flatten().tolist()
        self._in_batch: list[int] = []
        self._coordinates: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return len(self._included)

    def split_batches(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield each batch without its canaries, which `append_gradients` adds to its gradients."""
        for index in batches:
            is_example = index < self._num_examples
            canary_indices = index[~is_example].tolist()
            self._in_batch = [self._included[i - self._num_examples] for i in canary_indices]
            yield index[is_example]

    def append_gradients(self, gradients: State) -> State:
        """Return `gradients`, `example ...`, followed by those of the canaries in the batch."""
        shapes = {name: rows.shape[1:] for name, rows in gradients.items()}
        self._coordinates = self._coordinates or self._canaries.draw_coordinates(shapes)
        num_rows = len(next(iter(gradients.values())))
        extended: dict[str, Tensor] = {}
        for name, rows in gradients.items():
            zeros = rows.new_zeros(len(self._in_batch), *rows.shape[1:])
            extended[name] = torch.cat([rows, zeros])
        for row, canary in enumerate(self._in_batch, num_rows):
            name, coordinate = self._coordinates[canary]
            extended[name][row].view(-1)[coordinate] = CANARY_VALUE
        return extended
