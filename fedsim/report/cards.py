"""Cards at the top of the page: what each attack is worth, with the examples that it reconstructed best and worst.

The verdict of a card is what `fedsim.report.summary` reads out of the scores, in the words of the headline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.audit.evaluation.display import ClaimedWord, TextPair
from fedsim.audit.evaluation.identification import IDENTIFIED
from fedsim.interfaces.metric import describe_metric
from fedsim.report import adaptive, image_scores
from fedsim.report.finding_views import FindingView
from fedsim.report.headline import reported_readings
from fedsim.report.html import victim_and_round
from fedsim.report.image_scores import ExtremeExample, FindingKey
from fedsim.report.noise import explain_noise
from fedsim.report.round_leakage import RoundLeakage
from fedsim.report.verdicts import BEYOND, LEAKS, NOT_JUDGED, UNDECIDED, ScoreReading

_IMAGE_WIDTH = 84
"""CSS pixels that an image on a card is wide, about."""
_MAX_WORDS = 40
"""Most words of a text on a card."""


@dataclass(frozen=True, kw_only=True)
class CardExample:
    """Example that an attack reconstructed well or badly.

    Attributes:
        caption: which example it is, and how close the claim is.
        claimed, true: images as PNGs; empty where the example is a text.
        text: a text, a set of words or a record; None where the example is an image.
    """

    rank: str
    caption: str
    claimed: bytes = b""
    true: bytes = b""
    text: TextPair | None = None

    @property
    def width(self) -> int:
        """CSS pixels that its image is wide; small images get a whole number for each pixel."""
        pixels = int.from_bytes(self.true[16:20])  # in the header of the PNG
        return pixels * max(1, round(_IMAGE_WIDTH / pixels)) if pixels <= _IMAGE_WIDTH else _IMAGE_WIDTH


@dataclass(frozen=True, kw_only=True)
class Card:
    """Card of one attack.

    Attributes:
        readings: its readings, those by which it leaks first; none where nothing is judged.
        reason: why nothing is judged; empty where something is.
        examples: the best, median and worst; none if the truth is unknown.
        selection: from how many examples these were chosen, and by which metric.
        are_matched: whether claims had to be matched with originals, as an update is of several examples.
        rounds: what each attacked round leaked; empty where one was attacked.
        noise: that claims look like noise, and what to try; empty where they do not.
    """

    attack: str
    readings: Sequence[ScoreReading]
    reason: str = ""
    examples: Sequence[CardExample] = ()
    selection: str = ""
    are_matched: bool = False
    rounds: str = ""
    noise: str = ""

    @property
    def verdict(self) -> str:
        """Verdict of the first reading, which is the worst."""
        return self.readings[0].verdict if self.readings else NOT_JUDGED

    @property
    def tone(self) -> str:
        """Colour of the card: `leak`, `doubt` or `calm`."""
        verdicts = {reading.verdict for reading in self.readings if not reading.baseline}
        if LEAKS in verdicts:
            return "leak"
        return "doubt" if verdicts & {BEYOND, UNDECIDED} else "calm"


def choose_examples(
    all_readings: Sequence[ScoreReading], values: image_scores.ExampleScores
) -> dict[str, list[ExtremeExample]]:
    """Choose by attack the examples that its card shows: the best, the median and the worst of the scored ones."""
    attack_keys = {reading.summary.attack: reading.summary.attack_key for reading in all_readings}
    main_metrics = {}
    for attack, readings in reported_readings(all_readings).items():
        if readings:
            main_metrics[attack] = readings[0].summary.metric
    return {
        attack: image_scores.extreme_examples(values, key, main_metrics.get(attack, ""))
        for attack, key in attack_keys.items()
    }


def examples_by_finding(extremes: Mapping[str, Sequence[ExtremeExample]]) -> dict[FindingKey, list[int]]:
    """Return by finding the numbers of the examples that cards show."""
    numbers: dict[FindingKey, list[int]] = {}
    for of_attack in extremes.values():
        for extreme in of_attack:
            numbers.setdefault(extreme.key, []).append(extreme.image)
    return numbers


def attack_cards(
    all_readings: Sequence[ScoreReading],
    findings: Sequence[FindingView],
    extremes: Mapping[str, Sequence[ExtremeExample]],
    values: image_scores.ExampleScores,
    leakages: Mapping[str, RoundLeakage],
) -> list[Card]:
    """Return a card for each scored attack; an adaptive attack that equals the naive one shares its card."""
    by_key = {
        image_scores.finding_key({**finding.about, "attack": finding.about["title"]}): finding for finding in findings
    }
    result = []
    for attack, readings in reported_readings(adaptive.merge_equal_attacks(all_readings)).items():
        attack_extremes = extremes.get(attack.removesuffix(adaptive.EQUAL_SUFFIX), ())
        examples = []
        for extreme in attack_extremes:
            example = _example(extreme, by_key.get(extreme.key))
            if example is not None:
                examples.append(example)
        title = attack.removesuffix(adaptive.EQUAL_SUFFIX)
        # Noise may identify an image all the same; what is close to it is no noise.
        are_close = any(reading.verdict == LEAKS and reading.summary.metric != IDENTIFIED for reading in readings)
        findings_of_attack = [finding for finding in findings if finding.about["attack"] == title]
        remarks = (reading.remark for reading in all_readings if reading.summary.attack == attack and reading.remark)
        result.append(
            Card(
                attack=attack,
                readings=sorted(readings, key=lambda reading: reading.verdict != LEAKS),
                reason="" if readings else next(remarks, ""),
                examples=examples,
                selection=_selection(attack_extremes[0], values) if examples else "",
                are_matched=any(len(values[extreme.key][extreme.metric]) > 1 for extreme in attack_extremes),
                rounds=leakages[attack].sentence if attack in leakages else "",
                noise="" if are_close else explain_noise(findings_of_attack),
            )
        )
    return result


def _example(extreme: ExtremeExample, finding: FindingView | None) -> CardExample | None:
    """Return the example; None where the finding is gone, or does not show this example."""
    if finding is None:
        return None
    facts = describe_metric(extreme.metric)
    value = f"{facts.title} {extreme.value:.3g} {facts.unit}".rstrip()
    caption = f"{'exact' if extreme.value >= facts.exact_from else value}; {victim_and_round(finding.about)}"
    if extreme.image in finding.card_images:
        claimed, true = finding.card_images[extreme.image]
        return CardExample(rank=extreme.rank, caption=caption, claimed=claimed, true=true)
    if extreme.image in finding.card_texts and finding.bag != facts.of_examples:
        text = _truncate(finding.card_texts[extreme.image])
        return CardExample(rank=extreme.rank, caption=caption, text=text)
    return None


def _truncate(text: TextPair) -> TextPair:
    """Cut a long text to its beginning."""
    if max(len(text.claimed), len(text.true.split())) <= _MAX_WORDS:
        return text
    true = text.true.split(" ")
    if len(true) > _MAX_WORDS:
        true = [*true[:_MAX_WORDS], "…"]
    claimed = list(text.claimed)
    if len(claimed) > _MAX_WORDS:
        claimed = [*claimed[:_MAX_WORDS], ClaimedWord(text="…", right=True)]
    return TextPair(true=" ".join(true), claimed=claimed)


def _selection(extreme: ExtremeExample, values: image_scores.ExampleScores) -> str:
    """Say from how many examples this one was chosen, and by which metric."""
    count = 0
    for key, metrics in values.items():
        if key[:2] == extreme.key[:2] and extreme.metric in metrics:
            count += sum(not math.isnan(value) for value in metrics[extreme.metric])
    return f"from {count} by {describe_metric(extreme.metric).title}"
