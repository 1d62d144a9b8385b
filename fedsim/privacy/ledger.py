"""The privacy ledger of a run: what each client did in each round, and the epsilon it has spent.

A round is recorded before clients are asked, so a run that is interrupted never shows less than was
spent. Rounds in which a client straggles are not counted, because it sends nothing. Rounds in which
a client fails or answers too late are counted, because it may have sent. A resumed run sends the
same bytes again, which reveals nothing more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedsim.base.errors import PluginError, RunError, number_of
from fedsim.interfaces.defense import Defense, Guarantee, Participation, Setting, overrides_guarantee
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.federation_privacy import OTHER_CLIENTS, SERVER, FederationLedger, FederationPrivacy
from fedsim.privacy.mechanism_columns import describe_mechanism, read_mechanism
from fedsim.training.settings import LocalTraining

DELTA = 1e-5
"""The delta at which a guarantee is stated, unless the defense has a setting `delta`."""
COLUMNS = (
    "round",
    "client",
    "defense",
    "num_examples",
    "batch_size",
    "steps",
    "rate",
    "noise_multiplier",
    "counts",
    "epsilon",
    "delta",
    "unit",
    "neighbours",
    "noise",
    "noise_scale",
    "noise_rate",
    "releases",
    "noise_distance",
    "noise_dimension",
    "trusted",
    "in_clear",
)
"""`trusted` is who has to be trusted for epsilon to hold: `nobody`, or the `server`. `in_clear` is what
epsilon does not cover."""
NUMERIC_COLUMNS = (
    "num_examples",
    "batch_size",
    "steps",
    "rate",
    "noise_multiplier",
    "epsilon",
    "delta",
    "noise_scale",
    "noise_rate",
    "releases",
    "noise_distance",
    "noise_dimension",
)
_FIXED_COLUMNS = ("num_examples", "rate", "noise_multiplier")
"""Columns whose values must not have changed when a run is resumed."""

_ROUNDING = 1e-9
"""By how much a sum of shares of a delta may exceed it, relative to it."""
_MAX_NAMED_CLIENTS = 5
"""Most attacked clients that a sentence names."""
Row = Mapping[str, Any]


class Ledger:
    """Ledger of the privacy that clients have spent, for each defense that has a guarantee.

    Attributes:
        rows: one for each round, client that was asked, and defense, by `COLUMNS`. `counts` is 1
            where the client may have sent; `epsilon` is that of all its rounds so far, infinite
            where nothing is proved.
    """

    def __init__(
        self,
        setting: Callable[[], Setting],
        defenses_of: Callable[[int], Sequence[Defense]],
        names: Sequence[str],
        federation: FederationPrivacy | None = None,
    ) -> None:
        """Begin the ledger of an experiment.

        Args:
            setting: makes the setting that defenses work in. That builds the model, so it is called
                only where a defense has a guarantee.
            defenses_of: returns the defenses as a client uses them.
            federation: what the server or the protocol promises besides, if anything.
        """
        self._make_setting, self._defenses_of = setting, defenses_of
        self._federation = None if federation is None else FederationLedger(federation)
        self._defense_indices: dict[str, int] = {}
        for index, label in enumerate(unique_labels(names)):
            if self._has_guarantee(index):
                self._defense_indices[label] = index
        self._counted_rounds: dict[tuple[str, int], Counter[Participation]] = {}
        self.rows: list[Row] = []
        self._largest_epsilons: dict[str, float] = {}
        several = len(self._defense_indices) > 1
        self._columns = {label: f"epsilon of {label}" if several else "epsilon" for label in self._defense_indices}

    @cached_property
    def _setting(self) -> Setting:
        return self._make_setting()

    def __bool__(self) -> bool:
        """Return whether any defense has a guarantee, or the federation."""
        return bool(self._defense_indices) or self._federation is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of `metrics.csv`, one a defense with a guarantee; a single one is `epsilon`.

        That of the federation always says so, because it may hold for others than those of clients.
        """
        columns = tuple(self._columns.values())
        return columns if self._federation is None else (*columns, self._federation.privacy.column)

    def largest_epsilons(self) -> dict[str, float]:
        """Return, by column of `metrics.csv`, the epsilon of the client that has spent most."""
        largest = {column: self._largest_epsilons.get(label, 0.0) for label, column in self._columns.items()}
        if self._federation is not None:
            largest[self._federation.privacy.column] = self._federation.epsilon
        return largest

    def find_exceeded_promises(self) -> list[str]:
        """Return a sentence for each defense whose promise before the run some client has exceeded.

        The promise is for clients that train as the experiment says, in all its rounds. The noise
        for a wanted epsilon is chosen for that, and a strategy may ask for other batches or more
        steps.
        """
        sentences_by_defense = []
        for label in self._defense_indices:
            if excesses := self._find_excesses(label):
                sentences_by_defense.append(_describe_excess(label, excesses))
        return sentences_by_defense

    def _find_excesses(self, label: str) -> list[tuple[PrivacySpending, float]]:
        """Return the clients that have spent more than a defense promised, and that promise."""
        excesses = []
        for client, spending in spending_by_client(self.rows, label).items():
            planned = self._setting.participation(client)
            if self._counted_rounds[label, client].keys() <= {replace(planned, rounds=1)}:
                continue
            defense = self._defenses_of(client)[self._defense_indices[label]]
            promised = state_guarantee(defense, [planned])
            if promised is not None and spending.epsilon > promised.epsilon:
                excesses.append((spending, promised.epsilon))
        return excesses

    def resume(self, rows: Iterable[Mapping[str, str]], rounds: int, where: str) -> None:
        """Continue an interrupted run's ledger after its first rounds.

        Args:
            rounds: how many rounds are complete; later rows are dropped.
        """
        resumed_rows = [row for row in rows if int(row["round"]) <= rounds] if self else []
        federation = self._federation
        labels = list(self._defense_indices) + ([federation.privacy.name] if federation is not None else [])
        for label in labels:
            recorded = {int(row["round"]) for row in resumed_rows if row["defense"] == label}
            if missing := sorted({*range(1, rounds + 1)} - recorded):
                raise RunError(
                    f"{where}: has no row of {label} in round {missing[0]}, so what clients have spent is not known; "
                    "put the file back, or begin again with --overwrite"
                )
        for row in resumed_rows:
            if federation is not None and row["defense"] == federation.privacy.name:
                federation_row = federation.count_row(row)
                self._check_unchanged(row, federation_row, where)
                self.rows.append(federation_row)
                continue
            if row["defense"] not in self._defense_indices:
                continue
            label, client = row["defense"], int(row["client"])
            planned = self._setting.participation(client, 1)
            actual = replace(planned, batch_size=int(row["batch_size"]), steps=int(row["steps"]))
            new_row = self._count_round(int(row["round"]), client, label, actual, counts=row["counts"] == "1")
            self._check_unchanged(row, new_row, where)
            self._append_row(new_row)

    def record_round(self, number: int, asked: Mapping[int, LocalTraining | None]) -> None:
        """Record round `number`.

        Args:
            asked: by client, how it was asked to train; None for one that straggles.
        """
        for client, training in sorted(asked.items()):
            setting = self._setting if training is None else replace(self._setting, training=training)
            for label in self._defense_indices:
                participation = setting.participation(client, 1)
                row = self._count_round(number, client, label, participation, counts=training is not None)
                self._append_row(row)
        if self._federation is not None:
            may_send = {client: training is not None for client, training in asked.items()}
            self.rows += self._federation.count_round(number, may_send)

    def _append_row(self, row: Row) -> None:
        self.rows.append(row)
        largest = self._largest_epsilons.get(row["defense"], 0.0)
        self._largest_epsilons[row["defense"]] = max(largest, row["epsilon"])

    def _has_guarantee(self, index: int) -> bool:
        """Return whether the defense of this index guarantees anything for any client."""
        defense = self._defenses_of(0)[index]
        if not overrides_guarantee(defense):
            return False
        # Guarantees depend on participation only, so one client of each kind is enough.
        clients = range(self._setting.clients)
        client_by_participation = {self._setting.participation(client, 1): client for client in clients}
        for participation, client in client_by_participation.items():
            if state_guarantee(self._defenses_of(client)[index], [participation]) is not None:
                return True
        return False

    def _count_round(self, number: int, client: int, label: str, participation: Participation, *, counts: bool) -> Row:
        """Count a client's round, if it `counts`, and return its row."""
        defense = self._defenses_of(client)[self._defense_indices[label]]
        rounds = self._counted_rounds.setdefault((label, client), Counter())
        if counts:
            rounds[participation] += 1
        guarantee = state_guarantee(defense, [replace(kind, rounds=count) for kind, count in rounds.items()])
        sampling = defense.sampling(participation.num_examples, participation.batch_size)
        if guarantee:
            epsilon, delta = guarantee.epsilon, guarantee.delta
        else:
            epsilon, delta = math.inf if rounds else 0.0, guarantee_delta(defense)
        return {
            "round": number,
            "client": client,
            "defense": label,
            "num_examples": participation.num_examples,
            "batch_size": participation.batch_size,
            "steps": participation.steps,
            "rate": "" if sampling is None else sampling.rate,
            "noise_multiplier": getattr(defense, "noise_multiplier", None) or "",
            "counts": int(counts),
            "epsilon": epsilon,
            "delta": delta,
            **describe_mechanism(defense.mechanism(participation)),
            "trusted": "nobody",
            "in_clear": "N and metrics",
        }

    @staticmethod
    def _check_unchanged(recorded: Mapping[str, str], row: Row, where: str) -> None:
        for name in _FIXED_COLUMNS:
            if recorded[name] != str(row[name]):
                raise RunError(
                    f"{where}: {row['defense']} of client {row['client']} had {name} = {recorded[name] or 'none'} in "
                    f"round {row['round']}, and now has {row[name] or 'none'}; the noise for a wanted epsilon follows "
                    "from the number of rounds, so put the settings back, or begin another run"
                )


@dataclass(frozen=True)
class PrivacySpending:
    """Privacy that one client has spent by one defense.

    Attributes:
        client: its id.
        rounds: how many of its rounds are counted.
        epsilon: the epsilon of all of them, dimensionless.
        delta: the delta at which epsilon is stated.
        participation: what it did in the last of its rounds, `rounds` times; None where epsilon
            does not depend on it.
    """

    client: int
    rounds: int
    epsilon: float
    delta: float
    participation: Participation | None


def is_central(row: Row) -> bool:
    """Return whether a row is about released models, whose epsilon holds for others than the server."""
    return str(row["trusted"]) == SERVER


def is_shared_noise(row: Row) -> bool:
    """Return whether a row is about sums in which several clients share the noise."""
    return str(row["trusted"]) == OTHER_CLIENTS


def spending_by_client(rows: Iterable[Row], defense: str) -> dict[int, PrivacySpending]:
    """Return, by client, the privacy spent by `defense` according to the rows of a ledger."""
    spending: dict[int, PrivacySpending] = {}
    for row in rows:
        if row["defense"] != defense:
            continue
        client = int(row["client"])
        earlier_rounds = spending[client].rounds if client in spending else 0
        rounds = int(row["counts"]) + earlier_rounds
        participation = None
        if row["num_examples"] != "":
            participation = Participation(
                num_examples=int(row["num_examples"]),
                batch_size=int(row["batch_size"]),
                steps=int(row["steps"]),
                rounds=rounds,
            )
        spending[client] = PrivacySpending(client, rounds, float(row["epsilon"]), float(row["delta"]), participation)
    return spending


def collect_mechanisms(
    ledger: Sequence[Row], defense: str, client: int, last_round: float = math.inf
) -> tuple[Mechanism, ...] | None:
    """Return the mechanisms of a client's counted rounds; None where one is not declared."""
    mechanisms = []
    for row in ledger:
        is_counted = str(row["counts"]) == "1" and int(row["round"]) <= last_round
        if row["defense"] != defense or int(row["client"]) != client or not is_counted:
            continue
        mechanism = read_mechanism(row)
        if mechanism is None:
            return None
        mechanisms.append(replace(mechanism, rate=1.0) if is_central(row) else mechanism)
    return tuple(mechanisms)


def collect_by_round(ledger: Sequence[Row], defense: str, client: int) -> dict[int, Mechanism]:
    """Return, by round, the mechanism of a client, where one is declared."""
    mechanisms = {}
    for row in ledger:
        if row["defense"] != defense or int(row["client"]) != client:
            continue
        mechanism = read_mechanism(row)
        if mechanism is not None:
            mechanisms[int(row["round"])] = mechanism
    return mechanisms


def largest_spender(clients: Mapping[int, PrivacySpending]) -> PrivacySpending:
    """Return the client that has spent most, the first of several."""
    return max(clients.values(), key=lambda spending: (spending.epsilon, -spending.client))


def summarise_ledger(rows: Sequence[Row], attacked: Sequence[int] = ()) -> list[str]:
    """Return for each defense what the client that spent most and the attacked ones have spent."""
    sentences = []
    for label, row in {row["defense"]: row for row in rows}.items():
        spending = describe_spending(spending_by_client(rows, label), attacked)
        trust = "; for those who see the models alone and trust the server" if is_central(row) else ""
        sentences.append(f"{label}: {spending}{trust}")
    return sentences


def describe_spending(clients: Mapping[int, PrivacySpending], attacked: Sequence[int] = ()) -> str:
    """Say in a few words what the client that spent most and the attacked clients have spent."""
    most = largest_spender(clients)
    text = (
        f"ε = {most.epsilon:.3g}, δ = {most.delta:g} after {number_of(most.rounds, 'round')} for client {most.client}"
    )
    if len(clients) > 1:
        text += ", which spent most"
    victims = [clients[client] for client in attacked if client in clients and client != most.client]
    for victim in victims[:_MAX_NAMED_CLIENTS]:
        rounds = number_of(victim.rounds, "round")
        text += f"; for the attacked client {victim.client} ε = {victim.epsilon:.3g} after {rounds}"
    if len(victims) > _MAX_NAMED_CLIENTS:
        text += f", and {len(victims) - _MAX_NAMED_CLIENTS} more are attacked"
    return text


def _describe_excess(label: str, excesses: Sequence[tuple[PrivacySpending, float]]) -> str:
    spending, promised = max(excesses, key=lambda excess: excess[0].epsilon)
    more = f", and the same is true of {len(excesses) - 1} more" if len(excesses) > 1 else ""
    return (
        f"{label}: client {spending.client} has spent ε = {spending.epsilon:.4g} in "
        f"{number_of(spending.rounds, 'round')}, above the {promised:.4g} that was promised before the run{more}; the "
        "strategy asked for other batches or steps than [training] says, so let [training] say the most that it asks "
        "for"
    )


def unique_labels(names: Sequence[str]) -> list[str]:
    """Number names that occur before, so that each label is unique.

    >>> unique_labels(["update-noise", "prune", "update-noise"])
    ['update-noise', 'prune', 'update-noise 2']
    """
    unique = []
    for index, name in enumerate(names):
        earlier = names[:index].count(name)
        unique.append(f"{name} {earlier + 1}" if earlier else name)
    return unique


def guarantee_delta(defense: Defense) -> float:
    """Return the delta at which the guarantee of `defense` is stated."""
    delta = getattr(defense, "delta", None)
    return delta if isinstance(delta, float) and 0 < delta < 1 else DELTA


def state_guarantee(defense: Defense, participations: Sequence[Participation]) -> Guarantee | None:
    """Return what `defense` guarantees a client with all these participations, at its `guarantee_delta`.

    None without a proof, or where there are none.
    """
    if not participations:
        return None
    delta = guarantee_delta(defense)
    guarantee = defense.compose_guarantees(participations, delta)
    if guarantee is not None and guarantee.delta > delta * (1 + _ROUNDING):
        raise PluginError(
            f"{type(defense).__name__}.guarantee: asked for delta = {delta:g}, it states epsilon = "
            f"{guarantee.epsilon:.4g} for {guarantee.delta:g}; state it for the delta that is asked for, or make "
            "'delta' a setting of the defense"
        )
    return guarantee
