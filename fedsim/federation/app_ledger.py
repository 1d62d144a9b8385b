"""Privacy ledger of a Flower app whose clients have defenses of fedsim around them.

Nobody knows how an app draws its records, so only guarantees count that follow from the number of
messages alone, as that of `update-noise`: whatever a client's data are, what it sends is clipped and
has noise. Each training message that a client was sent counts, also where it failed or was late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedsim.interfaces.defense import Defense, Guarantee, Participation, overrides_guarantee
from fedsim.privacy.ledger import Row, guarantee_delta, state_guarantee
from fedsim.privacy.mechanism_columns import describe_mechanism
from fedsim.recording.header import Header

IN_CLEAR = "N, metrics, and settings sent with arrays"
_TRIALS = (
    Participation(num_examples=1, batch_size=1, steps=1, rounds=1),
    Participation(num_examples=5000, batch_size=50, steps=100, rounds=1),
)
"""Participations that differ in all but the number of messages."""


def prove_by_messages(defense: Defense, messages: int) -> Guarantee | None:
    """Return what a defense guarantees a client that sends so many messages.

    None where it guarantees nothing, or that depends on how the client trains.
    """
    if not overrides_guarantee(defense):
        return None
    guarantees = [state_guarantee(defense, [replace(trial, rounds=messages)]) for trial in _TRIALS]
    return guarantees[0] if guarantees[0] == guarantees[1] else None


def make_app_ledger(
    headers: Iterable[Header], defenses: Mapping[str, Defense], num_asked: Mapping[int, int] | None = None
) -> list[Row]:
    """Return the rows of a ledger: one for each training message to a client, and each defense.

    Args:
        headers: of all rounds of the recording.
        defenses: by label; those that prove nothing by the number of messages have no rows, nor those that do not act
            in all rounds.
        num_asked: by client, to how many training messages it was asked for an answer. Those that are in no header
            count in the last round.
    """
    messages = [(header.round, client) for header in headers for client in _list_asked_clients(header)]
    unrecorded = Counter(num_asked or {}) - Counter(client for _, client in messages)
    last_round = max((number for number, _ in messages), default=1)
    messages += [(last_round, client) for client in sorted(unrecorded.elements())]
    proving = dict[str, Defense]()
    for label, defense in defenses.items():
        acts_in_all = all(defense.acts_in(number) for number in {number for number, _ in messages})
        if acts_in_all and prove_by_messages(defense, 1) is not None:
            proving[label] = defense
    num_messages = Counter[tuple[str, int]]()
    rows: list[Row] = []
    for number, client in messages:
        for label, defense in proving.items():
            num_messages[label, client] += 1
            rows.append(_make_row(number, client, label, defense, num_messages[label, client]))
    return rows


def _make_row(number: int, client: int, label: str, defense: Defense, messages: int) -> Row:
    """Return the row of the last of so many messages of a client."""
    guarantee = prove_by_messages(defense, messages)
    first, second = (defense.mechanism(trial) for trial in _TRIALS)
    return {
        "round": number,
        "client": client,
        "defense": label,
        **dict.fromkeys(("num_examples", "batch_size", "steps", "rate"), ""),
        "noise_multiplier": getattr(defense, "noise_multiplier", None) or "",
        "counts": 1,
        "epsilon": math.inf if guarantee is None else guarantee.epsilon,
        "delta": guarantee_delta(defense) if guarantee is None else guarantee.delta,
        **describe_mechanism(first if first == second else None),
        "trusted": "nobody",
        "in_clear": IN_CLEAR,
    }


def _list_asked_clients(header: Header) -> Sequence[int]:
    """Return each client once for each message to it that is recorded, ascending."""
    return sorted([*(client for reply in header.replies for client in reply.senders), *header.failures])
