"""The privacy ledger of a run: what each client did in each round, and what is proved of it so far.

A round is put down before clients are asked, so a run that is interrupted never shows less than was spent. Rounds in
which a client straggles are not counted: it sends nothing. Whoever fails or answers too late may have sent, so those
rounds are. Going on after an interruption sends the same bytes again, which reveals nothing more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fedsim.defense import Defense, Guarantee, Participation, Setting, overrides
from fedsim.errors import RunError
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
)
NUMBERS = ("num_examples", "batch_size", "steps", "rate", "noise_multiplier", "epsilon", "delta")
_CHECKED = ("num_examples", "rate", "noise_multiplier")
"""What must not have changed when a run goes on."""

_SHOWN = 5
"""Most attacked clients that a sentence names."""
Row = Mapping[str, Any]


class Ledger:
    """Composes what clients did, for each defense that proves something.

    Attributes:
        rows: one for each round, client that was asked, and defense, by `COLUMNS`. `counts` is 1 where the client may
            have sent; `epsilon` is that of all its rounds so far, infinite where nothing is proved of them.
    """

    def __init__(
        self,
        setting: Callable[[], Setting],
        defenses_of: Callable[[int], Sequence[Defense]],
        names: Sequence[str],
    ) -> None:
        """Of an experiment.

        Args:
            setting: what defenses work in; it builds the model, so it is asked for only where something is proved.
            defenses_of: the defenses as a client uses them.
            names: what the experiment calls each of them.
        """
        self._setting_of, self._defenses_of = setting, defenses_of
        self._places = {label: place for place, label in enumerate(labels(names)) if self._proves(place)}
        self._done: dict[tuple[str, int], Counter[Participation]] = {}
        self.rows: list[Row] = []
        self._largest: dict[str, float] = {}
        several = len(self._places) > 1
        self._columns = {label: f"epsilon of {label}" if several else "epsilon" for label in self._places}

    @cached_property
    def _setting(self) -> Setting:
        return self._setting_of()

    def __bool__(self) -> bool:
        """Whether any defense proves anything."""
        return bool(self._places)

    @property
    def columns(self) -> tuple[str, ...]:
        """A column of `metrics.csv` for each defense that proves anything: `epsilon`, where that is one."""
        return tuple(self._columns.values())

    def measured(self) -> dict[str, float]:
        """By column of `metrics.csv`, the epsilon of the client that has spent most so far."""
        return {column: self._largest.get(label, 0.0) for label, column in self._columns.items()}

    def exceeded(self) -> list[str]:
        """For each defense by which a client has spent more than was promised before the run, a sentence.

        The promise is of clients that train as the experiment says, in all its rounds. The noise for a wanted epsilon
        is chosen for that, and a strategy may ask for other batches or more steps.
        """
        return [_told_exceeded(label, over) for label in self._places if (over := self._over(label))]

    def _over(self, label: str) -> list[tuple[Spent, float]]:
        """Which clients have spent more by a defense than it promised, and what that was."""
        over = []
        for client, some in spent(self.rows, label).items():
            planned = self._setting.participation(client)
            if self._done[label, client].keys() <= {replace(planned, rounds=1)}:
                continue
            defense = self._defenses_of(client)[self._places[label]]
            promised = defense.guarantee(planned, delta_of(defense))
            if promised is not None and some.epsilon > promised.epsilon:
                over.append((some, promised.epsilon))
        return over

    def resume(self, rows: Iterable[Mapping[str, str]], rounds: int, where: str) -> None:
        """Go on after so many `rounds`, of which `rows` tell, as they were read from the file `where`.

        Raises:
            RunError: they do not tell of all these rounds, or the defenses were others.
        """
        kept = [row for row in rows if int(row["round"]) <= rounds] if self else []
        for label in self._places:
            told = {int(row["round"]) for row in kept if row["defense"] == label}
            if missing := sorted({*range(1, rounds + 1)} - told):
                raise RunError(
                    f"{where}: says nothing of {label} in round {missing[0]}, so what clients have spent is not known; "
                    "put the file back, or begin again with --overwrite"
                )
        for row in (row for row in kept if row["defense"] in self._places):
            label, client = row["defense"], int(row["client"])
            whole = self._setting.participation(client, 1)
            done = replace(whole, batch_size=int(row["batch_size"]), steps=int(row["steps"]))
            again = self._row(int(row["round"]), client, label, done, counts=row["counts"] == "1")
            self._check_same(row, again, where)
            self._add(again)

    def note(self, number: int, asked: Mapping[int, LocalTraining | None]) -> None:
        """Put down round `number`.

        Args:
            asked: by client, how it was asked to train; None for one that straggles.
        """
        for client, training in sorted(asked.items()):
            own = self._setting if training is None else replace(self._setting, training=training)
            for label in self._places:
                done = own.participation(client, 1)
                self._add(self._row(number, client, label, done, counts=training is not None))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._largest[row["defense"]] = max(self._largest.get(row["defense"], 0.0), row["epsilon"])

    def _proves(self, place: int) -> bool:
        """Whether the defense at `place` proves anything of any client."""
        first = self._defenses_of(0)[place]
        if not (overrides(first, "guarantee") or overrides(first, "composed")):
            return False
        alike = {self._setting.participation(client, 1): client for client in range(self._setting.clients)}
        for participation, client in alike.items():
            defense = self._defenses_of(client)[place]
            if defense.guarantee(participation, delta_of(defense)) is not None:
                return True
        return False

    def _row(self, number: int, client: int, label: str, done: Participation, *, counts: bool) -> Row:
        """The row of a round, which is counted if it `counts`."""
        defense = self._defenses_of(client)[self._places[label]]
        rounds = self._done.setdefault((label, client), Counter())
        if counts:
            rounds[done] += 1
        proved = _proved(defense, rounds)
        sampled = defense.sampling(done.num_examples, done.batch_size)
        return {
            "round": number,
            "client": client,
            "defense": label,
            "num_examples": done.num_examples,
            "batch_size": done.batch_size,
            "steps": done.steps,
            "rate": "" if sampled is None else sampled.rate,
            "noise_multiplier": getattr(defense, "noise_multiplier", None) or "",
            "counts": int(counts),
            "epsilon": proved.epsilon if proved else math.inf if rounds else 0.0,
            "delta": proved.delta if proved else delta_of(defense),
        }

    @staticmethod
    def _check_same(before: Mapping[str, str], now: Row, where: str) -> None:
        for name in _CHECKED:
            if before[name] != str(now[name]):
                raise RunError(
                    f"{where}: {now['defense']} of client {now['client']} had {name} = {before[name] or 'none'} in "
                    f"round {now['round']}, and now has {now[name] or 'none'}; the noise for a wanted epsilon follows "
                    "from the number of rounds, so put the settings back, or begin another run"
                )


@dataclass(frozen=True)
class Spent:
    """What a client has spent.

    Attributes:
        client: its id.
        rounds: rounds that are counted.
        epsilon: of all of them, dimensionless.
        delta: at which epsilon is stated.
        participation: what it did in the last of its rounds, `rounds` times.
    """

    client: int
    rounds: int
    epsilon: float
    delta: float
    participation: Participation


def spent(rows: Iterable[Row], defense: str) -> dict[int, Spent]:
    """By client, what the rows of a ledger say of `defense`."""
    found: dict[int, Spent] = {}
    for row in rows:
        if row["defense"] != defense:
            continue
        client = int(row["client"])
        rounds = int(row["counts"]) + (found[client].rounds if client in found else 0)
        done = Participation(
            num_examples=int(row["num_examples"]),
            batch_size=int(row["batch_size"]),
            steps=int(row["steps"]),
            rounds=rounds,
        )
        found[client] = Spent(client, rounds, float(row["epsilon"]), float(row["delta"]), done)
    return found


def most_spent(clients: Mapping[int, Spent]) -> Spent:
    """The one of `clients` that has spent most, the first of several."""
    return max(clients.values(), key=lambda some: (some.epsilon, -some.client))


def sentences(rows: Sequence[Row], attacked: Sequence[int] = ()) -> list[str]:
    """For each defense in a ledger, what the client that spent most and those that are `attacked` have spent."""
    return [f"{label}: {told(spent(rows, label), attacked)}" for label in dict.fromkeys(row["defense"] for row in rows)]


def told(clients: Mapping[int, Spent], attacked: Sequence[int] = ()) -> str:
    """What the one of `clients` that has spent most has spent, and those that are `attacked`, in a few words."""
    most = most_spent(clients)
    text = f"ε = {most.epsilon:.3g}, δ = {most.delta:g} after {counted(most.rounds)} for client {most.client}"
    text += ", which spent most" if len(clients) > 1 else ""
    shown = [clients[client] for client in attacked if client in clients and client != most.client]
    for some in shown[:_SHOWN]:
        text += f"; for the attacked client {some.client} ε = {some.epsilon:.3g} after {counted(some.rounds)}"
    return text + (f", and {len(shown) - _SHOWN} more are attacked" if len(shown) > _SHOWN else "")


def _told_exceeded(label: str, over: Sequence[tuple[Spent, float]]) -> str:
    some, promised = max(over, key=lambda pair: pair[0].epsilon)
    others = f", and the same is true of {len(over) - 1} more" if len(over) > 1 else ""
    return (
        f"{label}: client {some.client} has spent ε = {some.epsilon:.4g} in {counted(some.rounds)}, above the "
        f"{promised:.4g} that was promised before the run{others}; the strategy asked for other batches or steps than "
        "[training] says, so let [training] say the most that it asks for"
    )


def counted(rounds: int) -> str:
    """`1 round`, or `3 rounds`."""
    return f"{rounds} round{'s' * (rounds != 1)}"


def labels(names: Sequence[str]) -> list[str]:
    """`names`, numbered where they occur before: `update-noise`, `update-noise 2`."""
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name} {count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


def delta_of(defense: Defense) -> float:
    """The delta at which the guarantee of `defense` is stated."""
    own = getattr(defense, "delta", None)
    return own if isinstance(own, float) and 0 < own < 1 else DELTA


def _proved(defense: Defense, rounds: Counter[Participation]) -> Guarantee | None:
    """Of all these rounds together; None where nothing is proved of them, or there are none."""
    done = [replace(some, rounds=count) for some, count in rounds.items()]
    return defense.composed(done, delta_of(defense)) if done else None
