"""Headline of a report: the readings of all attacks in a few sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsim.report.summary import (
    BEYOND,
    GUESSING,
    LEAKS,
    LESS_THAN_PUBLIC,
    MIN_VICTIMS,
    NOT_BEYOND,
    NOT_JUDGED,
    UNDECIDED,
    ScoreReading,
)


def headline(readings: Sequence[ScoreReading]) -> str:
    """Return the result in short: a sentence for each metric and verdict.

    Each attack is reported by its first metric that has a verdict and, if it does not leak by that one, by the first
    metric by which it does. Baselines get sentences of their own.
    """
    attacks = [reading for reading in readings if not reading.baseline]
    sentences = _sentences(_first_readings(attacks))
    for sentence in _sentences(_further_leaks(attacks)):
        sentences.append(f"Besides, {sentence[0].lower()}{sentence[1:]}")
    if baselines := [reading for reading in readings if reading.baseline and reading.verdict]:
        sentences += ["Baselines are not counted as attacks.", *_sentences(_first_readings(baselines))]
    if unjudged := [title for title in _titles(attacks) if not any(_judged_readings(attacks, title))]:
        sentences.append(f"There is no verdict on {_enumerate_attacks(unjudged)}.")
    if sentences and (most := most_victims(readings)) < MIN_VICTIMS:
        victims = "one victim was" if most <= 1 else f"{most} victims were"
        sentences.append(f"Only {victims} attacked, too few to conclude from.")
    return " ".join(sentences)


def most_victims(readings: Iterable[ScoreReading]) -> int:
    """Return the largest number of victims that any score is about."""
    counts = [reading.summary.count if reading.summary.unit == "victim" else 1 for reading in readings]
    return max(counts, default=0)


def _titles(readings: Iterable[ScoreReading]) -> list[str]:
    return list(dict.fromkeys(reading.summary.attack for reading in readings))


def _judged_readings(readings: Iterable[ScoreReading], title: str) -> list[ScoreReading]:
    """Return the readings of an attack that have a verdict."""
    return [
        reading for reading in readings if reading.summary.attack == title and reading.verdict not in ("", NOT_JUDGED)
    ]


def reported_readings(readings: Sequence[ScoreReading]) -> dict[str, list[ScoreReading]]:
    """Return by attack the readings that the headline and the cards of the page report.

    The first is that of its first metric that has a verdict. If the attack does not leak by that, those of all metrics
    follow by which it does. An attack without a verdict has no readings.
    """
    reported = {}
    for title in _titles(readings):
        judged = _judged_readings(readings, title)
        reported[title] = judged[:1]
        if judged and judged[0].verdict not in (LEAKS, BEYOND):
            reported[title] += [reading for reading in judged[1:] if reading.verdict in (LEAKS, BEYOND)]
    return reported


def _first_readings(readings: Sequence[ScoreReading]) -> list[list[ScoreReading]]:
    """Return for each attack that has a verdict the reading by its first metric."""
    return [reported[:1] for reported in reported_readings(readings).values() if reported]


def _further_leaks(attacks: Sequence[ScoreReading]) -> list[list[ScoreReading]]:
    """Return for each attack that does not leak by its first metric the readings by which it does, by verdict."""
    groups = []
    for reported in reported_readings(attacks).values():
        for verdict in (LEAKS, BEYOND):
            groups.append([reading for reading in reported[1:] if reading.verdict == verdict])
    return [group for group in groups if group]


def _sentences(claims: Iterable[Sequence[ScoreReading]]) -> list[str]:
    """Write sentences of the form: By METRICS, ATTACKS leak.

    Args:
        claims: readings of one attack and verdict each; attacks with equal metrics and verdicts share a sentence.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for readings in claims:
        names = dict.fromkeys(reading.summary.name.split(",")[0] for reading in readings)
        groups.setdefault((_enumerate(list(names)), readings[0].verdict), []).append(readings[0].summary.attack)
    sentences = []
    for metrics in dict.fromkeys(metrics for metrics, _ in groups):
        for verdict in _CLAIMS:
            if (metrics, verdict) in groups:
                sentences.append(f"By {metrics}, {_claim(groups[metrics, verdict], verdict)}.")
    return sentences


_CLAIMS = {
    LEAKS: ("leaks", "leak"),
    BEYOND: (f"is {BEYOND}", f"are {BEYOND}"),
    UNDECIDED: (f"is {UNDECIDED}", f"are {UNDECIDED}"),
    GUESSING: (f"is {GUESSING}", f"are {GUESSING}"),
    NOT_BEYOND: (f"is {NOT_BEYOND}", f"are {NOT_BEYOND}"),
    LESS_THAN_PUBLIC: (f"tells {LESS_THAN_PUBLIC}", f"tell {LESS_THAN_PUBLIC}"),
}
"""What a sentence says of one attack, and of several, by verdict."""


def _claim(titles: Sequence[str], verdict: str) -> str:
    """Return `sme and spear-ica leak`."""
    return f"{_enumerate_attacks(titles)} {_CLAIMS[verdict][len(titles) > 1]}"


def _enumerate_attacks(titles: Sequence[str]) -> str:
    """Join titles of attacks within a sentence, in quotes where one contains a comma."""
    return _enumerate([f"'{title}'" for title in titles] if any("," in title for title in titles) else titles)


def _enumerate(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
