"""What canaries show of clients' shares of noise, in sums of the secure protocol.

A canary is a client whose update is one number of the largest length on the grid, at a place of its own,
or zeros, by a fair coin. The sum of a round has the shares of as few clients as the protocol unmasks, all of
whom send zeros. The server scores a canary by the number at its place, summed over rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from fedsim.federation.distributed_privacy import SumGroups, make_distributed_privacy
from fedsim.federation.privacy_tables import DistributedPrivacyTable, SecureAggregationTable
from fedsim.privacy.canary_bounds import EpsilonBound, best_lower_bound
from strategies.secure_sum import SecureSum
from studies.running import Row
from studies.writing import format_mean, markdown_table, select_rows

CLIENTS, ASKED, ROUNDS, NUMBERS = 500, 50, 20, 25_450
DELTA, CONFIDENCE = 1e-3, 0.99
SECURE = SecureAggregationTable(groups="all", threshold=0.8, bits=18)


def audit_shares(epsilon: float, canaries: int, seed: int, senders: float = 1.0) -> tuple[EpsilonBound, float]:
    """Return what canaries show of the shares, and the epsilon that is proved.

    Args:
        epsilon: that the noise is made for.
        canaries: their number, at most that of the numbers of an update.
        seed: of coins, rounding and noise.
        senders: share of the clients that are needed which add their noise; below 1 the promise is broken.
    """
    table = DistributedPrivacyTable(epsilon=epsilon, delta=DELTA, clip=0.25)
    groups = SumGroups(table=SECURE, num_asked=ASKED, dimension=NUMBERS)
    privacy = make_distributed_privacy(table, groups, CLIENTS, ROUNDS)
    protocol = SecureSum(table=SECURE, largest=1, seed=seed, privacy=privacy)
    inside = np.random.default_rng(seed).random(canaries) < 0.5
    signal = np.floor(privacy.distance) * inside
    scores = np.zeros(canaries)
    zeros = {"w": np.zeros(canaries, dtype=np.float64)}  # other numbers of an update hold no canary
    count = max(1, math.floor(senders * privacy.shares))
    for number in range(ROUNDS):
        total = [np.zeros(1, dtype=np.uint32), signal.astype(np.uint32)]
        for client in range(count):
            for array, addend in zip(total, protocol.quantise(zeros, 1, number, client), strict=True):
                array += np.asarray(addend).astype(np.uint32)
        values = protocol.mean_update(total, count)[0]
        scores += np.asarray(values, dtype=np.float64).reshape(-1)
    bound = best_lower_bound(
        torch.from_numpy(scores), torch.from_numpy(inside), DELTA, CONFIDENCE, [privacy.mechanism(ROUNDS)]
    )
    return bound, privacy.epsilon(ROUNDS)


def measure(epsilon: float, seed: int) -> Row:
    """Audit shares that are sound."""
    bound, proved = audit_shares(epsilon, canaries=2000, seed=seed)
    return {"proved": proved, "measured": bound.epsilon, "right": bound.correct, "guesses": bound.guesses}


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: proved and measured epsilon."""
    lines = []
    for epsilon in ("2.0", "8.0", "20.0"):
        chosen = select_rows(rows, epsilon=epsilon)
        measured = {("", row["seed"]): float(row["measured"]) for row in chosen}
        right = ", ".join(f"{row['right']} of {row['guesses']}" for row in chosen)
        lines.append([f"{float(chosen[0]['proved']):.3g}", format_mean(measured), right])
    return {"": markdown_table(["proved", "measured", "right guesses"], lines)}
