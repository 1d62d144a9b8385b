"""What a cell brings to the table, out of its run folder: scores beside accuracy, privacy spent, bytes and seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedsim.auditing.plan import ADAPTIVE, Job
from fedsim.auditing.scores import SCORES
from fedsim.evaluation.empirical_epsilon import written
from fedsim.experiments.run_folder import RunFolder, measurements, read_rows, spendings
from fedsim.privacy.ledger import spent
from fedsim.recording.finding_files import read_about
from fedsim.recording.transcript import Transcript

_JOB = ("attack", "victim", "round", "repeat")
_SAME = ("victim", "round", "repeat", "metric")
_NUMBERS = ("value", "floor", "ceiling")


def rows_of(folder: RunFolder, title: str, planned: Iterable[Job]) -> list[dict[str, str]]:
    """The rows of `sweep.csv` for the attack called `title`, without the columns of the place and `run`.

    Args:
        folder: the run.
        title: what the attack is called there.
        planned: what the adversary was to do; what came to no score has a row without a metric.

    Raises:
        FedsimError: a file of the run is damaged.
    """
    federation = {"accuracy": _accuracy(folder), "bytes": _bytes(folder)}
    proved, measured, seconds = _proved(folder), _measured(folder), _seconds(folder)
    scored = list(read_rows(folder.scores, SCORES, _NUMBERS))
    rows = []
    for row in [*scored, *_without(scored, planned)]:
        if row["attack"] not in (title, f"{title} {ADAPTIVE}"):
            continue
        victim = row["victim"]
        rows.append(
            {
                "knows_defenses": str(int(row["attack"] != title)),
                **{name: row[name] for name in _SAME},
                **{name: _number(row[name]) for name in _NUMBERS},
                "better": {"True": "higher", "False": "lower"}.get(row["higher_is_better"], ""),
                "proved_epsilon": proved.get(victim, ""),
                "measured_epsilon": measured.get(victim, ""),
                "seconds": seconds.get(_job(row), ""),
                **federation,
            }
        )
    return rows


def _without(scored: Iterable[Mapping[str, str]], planned: Iterable[Job]) -> Iterator[dict[str, str]]:
    """A row of `scores.csv` for each job that came to no score: it failed, or what it found could not be judged."""
    found = {_job(row) for row in scored}
    for job in planned:
        told = dict(zip(_JOB, (job.title, str(job.victim), job.round, str(job.repeat)), strict=True))
        if _job(told) not in found:
            yield dict.fromkeys(SCORES, "") | told


def _job(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in _JOB)


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
            yield tuple(str(about[key]) for key in _JOB), str(about["seconds"])

    return dict(told())
