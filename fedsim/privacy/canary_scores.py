"""How well a client's messages tell which canaries are in: likelihood ratios of each round.

What a canary moves in a round of k steps, at rate q, is as often the clip as the canary was sampled,
beside Gaussian noise of k steps. The best score of a canary is the logarithm of

    sum over j of Binomial(j; k, q) N(x; j a, 1) / N(x; 0, 1),  a = 1 / (scale sqrt(k)),

where x is the move in units of its noise, and rounds add. The sum of moves, in its place, counts a round in
which a canary was hardly sampled like one in which it was. One step a round shows most: then the
server sees what the proof takes it to see.

References:
    [Steinke2023], Sec. 6, and [Nasr2023], for gradients of a single number, in sums of which the likelihood is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.interfaces.mechanism import Mechanism

_LARGEST_MOVE = 1e6
"""Moves beyond so many standard deviations of noise count as that."""


def score_rounds(moves: Tensor, mechanisms: Sequence[Mechanism | None]) -> Tensor | None:
    """Return the log-likelihood ratio of each canary, `canary`; None where one is unknown.

    The noise is measured by the moves below 0, since no canary moves its number down. So no learning
    rate or clip has to be known, and a program with other noise than it declares is scored by its own.

    Args:
        moves: `round canary`, how far the number of each canary moved along its gradient.
        mechanisms: what is declared of each round; None where nothing is.

    >>> steps = Mechanism(scale=1.0, rate=0.5, releases=2)
    >>> score_rounds(torch.tensor([[-1.0, 1.0, -1.0, 9.0]]), [steps]).argsort().tolist()
    [0, 2, 1, 3]
    """
    total = torch.zeros(moves.shape[1], dtype=torch.float64)
    for round_moves, mechanism in zip(moves.double(), mechanisms, strict=True):
        if mechanism is None or mechanism.noise != "gaussian":
            return None
        total += _score_round(round_moves, mechanism)
    return total


def _score_round(moves: Tensor, mechanism: Mechanism) -> Tensor:
    from scipy.stats import binom

    below = moves[moves < 0]
    deviation = below.square().mean().sqrt() if len(below) else moves.new_zeros(())
    smallest = torch.finfo(torch.float64).tiny
    normal_moves = (moves / deviation.clamp(min=smallest)).clamp(-_LARGEST_MOVE, _LARGEST_MOVE)
    steps = mechanism.releases
    amplitude = 1 / (mechanism.scale * steps**0.5)
    if mechanism.rate == 1:
        log_ratios: Tensor = normal_moves * steps * amplitude - (steps * amplitude) ** 2 / 2
    else:
        times = torch.arange(steps + 1, dtype=torch.float64)
        chances = torch.from_numpy(binom.pmf(times.numpy(), steps, mechanism.rate))
        exponents = normal_moves[:, None] * times * amplitude - (times * amplitude) ** 2 / 2
        log_ratios = torch.logsumexp(chances.log() + exponents, dim=1)
    return log_ratios
