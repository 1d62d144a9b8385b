"""Headline of a report: the readings of all attacks, accuracy and spent privacy in a few sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from fedsim.audit.attacked_rounds import parse_rounds
from fedsim.base.errors import format_percent, number_of
from fedsim.base.grouping import group_by
from fedsim.federation.config import Config
from fedsim.interfaces.metric import describe_metric
from fedsim.recording.reported_accuracy import ReportedAccuracy
from fedsim.report.curves import column_title, epsilon_columns
from fedsim.report.summary import enumerate_words, join_titles
from fedsim.report.verdicts import (
    BEYOND,
    GUESSING,
    LEAKS,
    MIN_VICTIMS,
    NOT_BEYOND,
    NOT_JUDGED,
    UNDECIDED,
    WORSE_THAN_IMPUTATION,
    ScoreReading,
)

_MAX_LISTED = 8
"""Most clients or rounds that a sentence lists."""


def headline(readings: Sequence[ScoreReading]) -> str:
    """Return the result in short: a sentence for each group of metrics and verdict, leaks first.

    Each attack is reported by the metrics of `reported_readings`. Baselines get sentences of their own.
    """
    attacks = [reading for reading in readings if not reading.baseline]
    sentences = _sentences(_readings_by_verdict(attacks))
    if baselines := [reading for reading in readings if reading.baseline and reading.verdict]:
        sentences += ["Baselines are not counted as attacks.", *_sentences(_first_readings(baselines))]
    if unjudged := [title for title in _titles(attacks) if not any(_judged_readings(attacks, title))]:
        sentences.append(f"There is no verdict on {_enumerate_attacks(unjudged)}.")
    doubts = {reading.summary.attack: reading.summary.doubt_text for reading in attacks if reading.summary.num_in_doubt}
    for doubt, titles in group_by(doubts, doubts.__getitem__).items():
        sentences.append(f"Scores of {_enumerate_attacks(titles)} are {doubt}.")
    is_concluded = any(reading.verdict == LEAKS for reading in attacks)
    if sentences and not is_concluded and (most := largest_victim_count(readings)) < MIN_VICTIMS:
        victims = "one victim was" if most <= 1 else f"{most} victims were"
        sentences.append(f"Only {victims} attacked, too few to conclude from.")
    return " ".join(sentences)


def largest_victim_count(readings: Iterable[ScoreReading]) -> int:
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

    The first is that of its first metric that has a verdict. Those of all metrics follow by which the verdict is worse,
    or which say that examples are matched. An attack without a verdict has no readings.
    """
    reported = {}
    for title in _titles(readings):
        judged = _judged_readings(readings, title)
        reported[title] = judged[:1]
        for reading in judged[1:]:
            if is_reported_beside(judged[0].verdict, reading.verdict, reading.summary.metric):
                reported[title].append(reading)
    return reported


def is_reported_beside(first_verdict: str, verdict: str, metric: str) -> bool:
    """Return whether a verdict by `metric` is reported beside that by an attack's first metric.

    It is where it is worse, or says that examples are matched.

    >>> is_reported_beside("no better than guessing", "leaks", "ssim"), is_reported_beside("leaks", "undecided", "ssim")
    (True, False)
    """
    worse_verdicts = {LEAKS: (), BEYOND: (LEAKS,)}.get(first_verdict, (LEAKS, BEYOND))
    shows_matches = describe_metric(metric).evidence == "matches" and verdict == LEAKS
    return verdict in worse_verdicts or shows_matches


def _first_readings(readings: Sequence[ScoreReading]) -> list[list[ScoreReading]]:
    """Return for each attack that has a verdict the reading by its first metric."""
    return [reported[:1] for reported in reported_readings(readings).values() if reported]


def _readings_by_verdict(attacks: Sequence[ScoreReading]) -> list[list[ScoreReading]]:
    """Return for each verdict, the worst first, the readings of each attack that are reported with it."""
    groups = []
    for verdict in _CLAIMS:
        for reported in reported_readings(attacks).values():
            groups.append([reading for reading in reported if reading.verdict == verdict])
    return [group for group in groups if group]


def _sentences(claims: Iterable[Sequence[ScoreReading]]) -> list[str]:
    """Write sentences of the form: By METRICS, ATTACKS find a leak.

    Args:
        claims: readings of one attack and verdict each; attacks with equal metrics and verdicts share a sentence.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for readings in claims:
        names = dict.fromkeys(reading.summary.short_name for reading in readings)
        groups.setdefault((enumerate_words(list(names)), readings[0].verdict), []).append(readings[0].summary.attack)
    return [f"By {metrics}, {_claim(titles, verdict)}." for (metrics, verdict), titles in groups.items()]


_CLAIMS = {
    LEAKS: ("finds a leak", "find a leak"),
    BEYOND: (f"is {BEYOND}", f"are {BEYOND}"),
    UNDECIDED: (f"is {UNDECIDED}", f"are {UNDECIDED}"),
    GUESSING: (f"is {GUESSING}", f"are {GUESSING}"),
    NOT_BEYOND: (f"is {NOT_BEYOND}", f"are {NOT_BEYOND}"),
    WORSE_THAN_IMPUTATION: (f"is {WORSE_THAN_IMPUTATION}", f"are {WORSE_THAN_IMPUTATION}"),
}
"""Words about one attack, and about several, by verdict."""


def _claim(titles: Sequence[str], verdict: str) -> str:
    """Return `sme and spear-ica find a leak`."""
    return f"{_enumerate_attacks(titles)} {_CLAIMS[verdict][len(titles) > 1]}"


def _enumerate_attacks(titles: Sequence[str]) -> str:
    """Join titles of attacks within a sentence, in quotes where one contains a comma."""
    return enumerate_words([f"'{title}'" for title in titles] if any("," in title for title in titles) else titles)


def describe_attacked(rows: Sequence[Mapping[str, str]], num_rounds: int) -> str:
    """Say in a sentence whose messages the scores are about, and of which rounds; empty where nothing is scored.

    >>> describe_attacked([{"victim": "0", "round": "1"}, {"victim": "4", "round": "1"}], 8)
    'The attacks used the messages of clients 0 and 4 in round 1 of 8.'
    """
    victims = sorted({int(row["victim"]) for row in rows})
    rounds = list(dict.fromkeys(row["round"] for row in sorted(rows, key=lambda row: parse_rounds(row["round"]))))
    if not victims:
        return ""
    names = [str(victim) for victim in victims]
    whose = f"{len(names)} clients" if len(names) > _MAX_LISTED else f"clients {enumerate_words(names)}"
    when = f"{len(rounds)} rounds" if len(rounds) > _MAX_LISTED else f"rounds {enumerate_words(rounds)}"
    whose = f"client {names[0]}" if len(names) == 1 else whose
    when = f"round {rounds[0]}" if len(rounds) == 1 and rounds[0].isdigit() else when
    return f"The attacks used the messages of {whose} in {when} of {num_rounds}."


def final_accuracy(rows: Sequence[Mapping[str, str]], config: Config | None = None) -> str:
    """Say in a sentence how good the recorded model is; empty where nothing was evaluated.

    It is that of the last evaluated round, on the public test set; where the server has no such figure, the plain mean
    over clients, each on what it holds out. Where clients have models of their own, the sentence says whose it is.
    """
    max_examples = config.federation.evaluate_examples if config else None
    test_set = f"at most {max_examples} examples of the public test set" if max_examples else "the public test set"
    for name in ("accuracy", "loss"):
        evaluated = [row for row in rows if row.get(name)]
        last = max((int(row["round"]) for row in evaluated), default=0)
        last_rows = [row for row in evaluated if int(row["round"]) == last]
        values = {row["client"]: float(row[name]) for row in last_rows}
        server = values.pop("server", None)
        whose = {row["client"]: row.get("model") for row in last_rows}
        if whose.get("server"):
            return _describe_own_models(name, test_set, server, values, is_shared=whose["server"] == "shared")
        if server is not None:
            return f"The model's final {name} on {test_set} is {_format_quality(name, server)} (after round {last})."
        if values:
            held_out = (
                "what one client holds out" if len(values) == 1 else f"what {len(values)} clients hold out, on average,"
            )
            mean = _format_quality(name, fmean(values.values()))
            return f"The model's final {name} on {held_out} is {mean} (after round {last})."
    return ""


def _format_quality(name: str, value: float) -> str:
    """Format an accuracy in percent, or a loss."""
    return format_percent(value) if name == "accuracy" else f"{value:.4g}"


def _describe_own_models(
    name: str, test_set: str, server: float | None, values: Mapping[str, float], *, is_shared: bool
) -> str:
    """Say how good the clients' own models are, and how good the shared one is, where there is one."""
    sentences = []
    if is_shared and server is not None:
        sentences.append(f"The shared model's final {name} on {test_set} is {_format_quality(name, server)}.")
        server = fmean(values.values()) if values else None
    if server is not None:
        sentences.append(
            f"The final {name} of the clients' own models, each on what that client holds out, is "
            f"{_format_quality(name, server)} on average."
        )
    return " ".join(sentences)


def describe_accuracy(
    rows: Sequence[Mapping[str, str]], config: Config | None, reported: ReportedAccuracy | None = None
) -> str:
    """Say how good the recorded model is, or where to look for that, as of a Flower app."""
    sentence = final_accuracy(rows, config)
    if sentence or config is not None:
        return sentence
    if reported is not None:
        return describe_reported_accuracy(reported)
    return "The recording does not show the accuracy of the model; see the app's own evaluation, if it has one."


def describe_reported_accuracy(reported: ReportedAccuracy) -> str:
    """Say which accuracy clients reported when the server asked them to evaluate the model.

    >>> from fedsim.recording.reported_accuracy import ReportedAccuracy
    >>> describe_reported_accuracy(ReportedAccuracy(accuracy=0.5, clients=7, examples=42, round=3))
    "As 7 clients reported in round 3, the model's accuracy on their 42 examples is 50.0 %."
    """
    when = f" in round {reported.round}" if reported.round else ""
    whose = "its" if reported.clients == 1 else "their"
    held = f"{whose} {number_of(reported.examples, 'example')}" if reported.examples else f"{whose} examples"
    if not reported.examples and reported.clients > 1:
        held += ", on average over clients,"
    clients = number_of(reported.clients, "client")
    sentence = f"As {clients} reported{when}, the model's accuracy on {held} is {format_percent(reported.accuracy)}."
    return f"{sentence} {reported.remark}".rstrip()


def final_epsilon(rows: Sequence[Mapping[str, str]]) -> str:
    """Say in a sentence what the client that spent most has spent by the last round; empty where nothing is proved."""
    last_texts, last_round = dict[str, str](), ""
    for row in rows:
        for column in epsilon_columns(row):
            if row[column]:
                last_texts[column] = f"{column_title(column)} is {float(row[column]):.3g}"
                last_round = row["round"]
    return (
        f"The largest proved {join_titles(list(last_texts.values()))} (after round {last_round})." if last_texts else ""
    )
