"""Headline of a report: the readings of all attacks, accuracy and spent privacy in a few sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from fedsim.federation.config import Config
from fedsim.report.curves import column_title, epsilon_columns
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
    join_titles,
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


def final_accuracy(rows: Sequence[Mapping[str, str]], config: Config | None = None) -> str:
    """Say in a sentence how good the recorded model is; empty where nothing was evaluated.

    It is that of the last evaluated round, on the public test set; where the server has no such figure, the plain mean
    over clients, each on what it holds out.

    Args:
        rows: rows of `metrics.csv`.
        config: settings of the experiment, where they are known.
    """
    max_examples = config.federation.evaluate_examples if config else None
    test_set = f"at most {max_examples} examples of the public test set" if max_examples else "the public test set"
    for name, unit in (("accuracy", ".1%"), ("loss", ".4g")):
        evaluated = [row for row in rows if row.get(name)]
        last = max((int(row["round"]) for row in evaluated), default=0)
        values = {row["client"]: float(row[name]) for row in evaluated if int(row["round"]) == last}
        server = values.pop("server", None)
        if server is not None:
            return f"The model's final {name} on {test_set} is {server:{unit}} (after round {last})."
        if values:
            held_out = (
                "what one client holds out" if len(values) == 1 else f"what {len(values)} clients hold out, on average,"
            )
            return f"The model's final {name} on {held_out} is {fmean(values.values()):{unit}} (after round {last})."
    return ""


def final_epsilon(rows: Sequence[Mapping[str, str]]) -> str:
    """Say in a sentence what the client that spent most has spent by the last round; empty where nothing is proved.

    Args:
        rows: rows of `metrics.csv`.
    """
    last_texts, last_round = dict[str, str](), ""
    for row in rows:
        for column in epsilon_columns(row):
            if row[column]:
                last_texts[column] = f"{column_title(column)} is {float(row[column]):.3g}"
                last_round = row["round"]
    return (
        f"The largest proved {join_titles(list(last_texts.values()))} (after round {last_round})." if last_texts else ""
    )
