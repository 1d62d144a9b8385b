"""Canaries that are clients of a trusted server, and how well its models tell which of them are in.

The adversary sees the models. It knows the canaries, when it is whose turn, and how the noise is
correlated over rounds, so that it can combine rounds as leaves the least noise:

1. A model that moved tells the sum of its round. Of rounds whose models are not at hand, the move is
   the sum of several (`_sum_rounds`).
2. Whiten the moves by the covariance of their noise. For banded noise this multiplies them by C,
   which leaves the fresh noise.
3. Correlate with what a canary that is in would add: the matched filter, of all weighted sums of
   moves the one that tells most.
4. Do the same with differences of moves alone, in which noise that is used again cancels.

Half of the canaries send the opposite of their update every second time. Under the promised noise
they are told apart as well as others. Used again, noise cancels in the differences of their rounds,
also where they are in all of them. Noise that cancels in sums, without being accounted for, shows
in those that always send the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim.privacy.central import CentralPrivacy
from fedsim.privacy.correlated_noise import Numbers


def choose_canary_sign(canary: int, server_round: int, cycle: int | None) -> int:
    """Return the sign of what a canary sends in a round: 1 or -1, and 0 where it is not its turn.

    Args:
        canary: its number, from 0 on, among those that are in and those that are out.
        server_round: number of the round, from 1 on.
        cycle: number of rounds in which each client is asked once; None where it may be in any.

    >>> [choose_canary_sign(canary, 3, cycle=2) for canary in range(4)]
    [1, 0, -1, 0]
    """
    length = 1 if cycle is None else cycle
    times_before, now = divmod(server_round - 1, length)
    if canary % length != now:
        return 0
    return -1 if _alternates(canary, length) and times_before % 2 else 1


def _alternates(canary: int, length: int) -> bool:
    """Return whether a canary changes its sign; of each turn every second one does."""
    return canary // length % 2 == 1


def score_server_canaries(moves: Numbers, rounds_before: Sequence[int], privacy: CentralPrivacy) -> Numbers:
    """Score by the moves of models how likely each canary is in.

    Args:
        moves: `move canary`, by how much the number of each canary moved from one model to the next.
        rounds_before: of each model, after how many rounds it was released; one more than moves.
        privacy: the mechanism, which is public.

    Returns:
        `kind canary`, with 0 between canaries that are in and out: by the matched filter; by that of
        differences; by the filter, of canaries alone that do not change their sign, the others at 0.
        Where rounds are too few for it, a kind is left out.
    """
    num_rounds = rounds_before[-1]
    signals = _make_signals(moves.shape[1], num_rounds, privacy.cycle)
    totals = _sum_rounds(rounds_before)
    factor = np.linalg.cholesky(totals @ privacy.compute_noise_covariance(num_rounds) @ totals.T)
    white_moves = np.linalg.solve(factor, moves * (privacy.expected / privacy.clip))
    white_signals = np.linalg.solve(factor, totals @ signals)
    # The logarithm of a likelihood ratio, up to the variance of the noise.
    filtered = (white_moves * white_signals).sum(0) - (white_signals**2).sum(0) / 2
    kinds = [filtered]
    # Project on what neither the same fresh noise in each round nor the same released noise enters.
    reused_noise = np.stack([np.ones(len(moves)), np.linalg.solve(factor, totals.sum(1))], axis=1)
    if len(moves) > np.linalg.matrix_rank(reused_noise):
        differences = np.eye(len(moves)) - reused_noise @ np.linalg.pinv(reused_noise)
        signal_differences = differences @ white_signals
        kinds.append((white_moves * signal_differences).sum(0) - (signal_differences**2).sum(0) / 2)
    alternates = (signals < 0).any(0)
    if alternates.any() and not alternates.all():
        kinds.append(np.where(alternates, 0.0, filtered))
    return np.stack(kinds)


def _make_signals(num_canaries: int, num_rounds: int, cycle: int | None) -> Numbers:
    """Return `round canary`, what each canary sends in units of the clip."""
    period = min(num_canaries, 2 * (cycle or 1))  # then turns and signs begin anew
    signals = np.zeros((num_rounds, period))
    for index in range(num_rounds):
        for canary in range(period):
            signals[index, canary] = choose_canary_sign(canary, index + 1, cycle)
    return signals[:, np.arange(num_canaries) % period]


def _sum_rounds(rounds_before: Sequence[int]) -> Numbers:
    """Return `move round`, 1 for each round between two models."""
    totals = np.zeros((len(rounds_before) - 1, rounds_before[-1]))
    for move in range(len(totals)):
        totals[move, rounds_before[move] : rounds_before[move + 1]] = 1
    return totals
