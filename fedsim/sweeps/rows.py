"""What a cell brings to the table, out of its run folder: scores beside accuracy, privacy spent, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from fedsim.auditing.plan import ADAPTIVE
from fedsim.auditing.scores import SCORES
from fedsim.evaluation.empirical_epsilon import written
from fedsim.experiments.run_folder import RunFolder, measurements, read_rows, spendings
from fedsim.privacy.ledger import spent
from fedsim.recording.finding_files import read_about
from fedsim.recording.transcript import Transcript

_SAME = ("victim", "round", "repeat", "metric")
_NUMBERS = ("value", "floor", "ceiling")


def rows_of(folder: RunFolder, title: str) -> list[dict[str, str]]:
    """The rows of `sweep.csv` for the attack called `title`, without the columns of the place and `run`.

    Raises:
        FedsimError: a file of the run is damaged.
    """
    federation = {"accuracy": _accuracy(folder), "bytes": _bytes(folder)}
    proved, measured, seconds = _proved(folder), _measured(folder), _seconds(folder)
    rows = []
    for row in read_rows(folder.scores, SCORES, _NUMBERS):
        if row["attack"] not in (title, f"{title} {ADAPTIVE}"):
            continue
        victim = row["victim"]
        rows.append(
            {
                "knows_defenses": str(int(row["attack"] != title)),
                **{name: row[name] for name in _SAME},
                **{name: _number(row[name]) for name in _NUMBERS},
                "better": "higher" if row["higher_is_better"] == "True" else "lower",
                "proved_epsilon": proved.get(victim, ""),
                "measured_epsilon": measured.get(victim, ""),
                "seconds": seconds.get((row["attack"], victim, row["round"], row["repeat"]), ""),
                **federation,
            }
        )
    return rows


def _number(text: str) -> str:
    """A number as it is written, nothing where there is none."""
    return "" if not text or math.isnan(float(text)) else text


def _accuracy(folder: RunFolder) -> str:
    """Of the global model at its last evaluation."""
    found = [row["accuracy"] for row in measurements(folder) if row["client"] == "server"]
    return next((text for text in reversed(found) if _number(text)), "")


def _bytes(folder: RunFolder) -> str:
    """The mean of what a client sent in a round, as far as the server sees single clients."""
    transcript = Transcript(folder.path)
    sent = [
        transcript.sizes(number)[reply.client]
        for number in transcript.rounds
        for reply in transcript.header(number).replies
        if not reply.members
    ]
    return str(sum(sent) / len(sent)) if sent else ""


def _proved(folder: RunFolder) -> dict[str, str]:
    """By client, the smallest epsilon that one of its defenses proves."""
    rows = spendings(folder)
    found: dict[str, float] = {}
    for defense in dict.fromkeys(row["defense"] for row in rows):
        for client, some in spent(rows, defense).items():
            found[str(client)] = min(found.get(str(client), math.inf), some.epsilon)
    return {client: str(epsilon) for client, epsilon in found.items()}


def _measured(folder: RunFolder) -> dict[str, str]:
    """By client, the largest epsilon that was measured of one of its defenses."""
    found: dict[str, float] = {}
    for item in written(folder):
        found[str(item.client)] = max(found.get(str(item.client), 0.0), item.measured.epsilon)
    return {client: str(epsilon) for client, epsilon in found.items()}


def _seconds(folder: RunFolder) -> Mapping[tuple[str, ...], str]:
    """By attack, victim, round and repeat, how long the attack took."""

    def told() -> Iterator[tuple[tuple[str, ...], str]]:
        for path in folder.findings.glob("*/*.safetensors"):
            about: Mapping[str, Any] = read_about(path)
            yield tuple(str(about[key]) for key in ("attack", "victim", "round", "repeat")), str(about["seconds"])

    return dict(told())
