"""Noise that a trusted server adds to the sum of each round, fresh or correlated over rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedsim.base.randomness import numpy_generator
from fedsim.privacy.central import CentralPrivacy
from fedsim.privacy.correlated_noise import compute_square_root_bands, list_tree_terms

Vector = dict[str, NDArray[np.float64]]
"""Values of an update by the name under which clients send them."""
_FRESH = "central privacy"


class RoundNoise:
    """Draw the noise of rounds by the seed of the run and the number of the round.

    Nothing of it is stored: a tree draws its nodes anew, and bands, which need the noise of the rounds
    before, are computed from round 1 on where these are not at hand, as after a run is resumed.
    """

    def __init__(self, privacy: CentralPrivacy, seed: int) -> None:
        self._privacy, self._seed = privacy, seed
        self._bands = compute_square_root_bands(privacy.num_bands)
        self._latest_noise: deque[Vector] = deque(maxlen=privacy.num_bands - 1)
        self._latest_round = 0

    def __reduce__(self) -> tuple[type[RoundNoise], tuple[CentralPrivacy, int]]:
        """Pickle no noise, which a checkpoint need not hold because it follows from the seed."""
        return RoundNoise, (self._privacy, self._seed)

    def draw(self, values: Mapping[str, NDArray[np.float64]], server_round: int, clip: float) -> Vector:
        """Draw the noise of the sum of a round.

        Args:
            values: of the form of the sum, which is the same in each round.
            server_round: number of the round, from 1 on.
            clip: to which updates of this round were clipped.

        Returns:
            Noise of deviation `sum_noise` x `clip`, with a tree of its growth, and with bands what
            they make of such noise.
        """
        deviation = self._privacy.sum_noise * clip
        shapes = {name: array.shape for name, array in values.items()}
        if self._privacy.correlation == "tree":
            return self._draw_tree_growth(shapes, server_round, deviation)
        if self._privacy.correlation == "banded":
            return self._draw_banded(shapes, server_round, deviation)
        return self._draw_fresh(shapes, deviation, _FRESH, server_round)

    def _draw_fresh(self, shapes: Mapping[str, tuple[int, ...]], deviation: float, *key: str | int) -> Vector:
        rng = numpy_generator(self._seed, *key)
        return {name: rng.normal(0.0, deviation, shape) for name, shape in shapes.items()}

    def _draw_tree_growth(self, shapes: Mapping[str, tuple[int, ...]], server_round: int, deviation: float) -> Vector:
        """Draw what the noise of the sum over the rounds of a cycle grows by in this round."""
        assert self._privacy.cycle is not None
        cycle, index = divmod(server_round - 1, self._privacy.cycle)
        growth = {name: np.zeros(shape) for name, shape in shapes.items()}
        for node, sign in list_tree_terms(index).items():
            for name, noise in self._draw_fresh(shapes, deviation, "tree noise", cycle, *node).items():
                growth[name] += sign * noise
        return growth

    def _draw_banded(self, shapes: Mapping[str, tuple[int, ...]], server_round: int, deviation: float) -> Vector:
        """Draw a row of C^-1 z: solve C y = z for the noise y of one round after the other."""
        if self._latest_round != server_round - 1:
            self._latest_noise.clear()
            self._latest_round = 0
        while self._latest_round < server_round:
            self._latest_round += 1
            noise = self._draw_fresh(shapes, deviation, _FRESH, self._latest_round)
            for band, earlier in zip(self._bands[1:], reversed(self._latest_noise), strict=False):
                for name, values in earlier.items():
                    noise[name] -= band * values
            if len(self._bands) > 1:
                for values in noise.values():
                    values /= self._bands[0]
            self._latest_noise.append(noise)
        return {name: values.copy() for name, values in noise.items()}
