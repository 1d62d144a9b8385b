"""The first thing on the page: what each attack is worth, a card each, with the examples that it got best and worst.

What a card says is what `fedsim.reporting.summary` reads out of the scores, in the words of the headline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsim.evaluation.kind import Pair, Word
from fedsim.reporting import adaptive, image_scores
from fedsim.reporting.evidence import Found
from fedsim.reporting.html import victim_and_round
from fedsim.reporting.image_scores import Extreme, Key
from fedsim.reporting.summary import BEYOND, LEAKS, NOT_JUDGED, UNDECIDED, Line, metric_name, telling

_SIDE = 84
"""CSS pixels that an image on a card is wide, about."""
_WORDS = 40
"""Most words of a text on a card."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One example that an attack got well or badly.

    Attributes:
        rank: `best`, `median` or `worst`.
        told: which it is, and how well.
        claimed, true: images as PNGs; empty where the example is a text.
        text: a text, a set of words or a record; None where the example is an image.
    """

    rank: str
    told: str
    claimed: bytes = b""
    true: bytes = b""
    text: Pair | None = None

    @property
    def width(self) -> int:
        """CSS pixels that its image is wide, out of the PNG's header; small images get as many for each pixel."""
        own = int.from_bytes(self.true[16:20])
        return own * max(1, round(_SIDE / own)) if own <= _SIDE else _SIDE


@dataclass(frozen=True, kw_only=True)
class Card:
    """One attack.

    Attributes:
        attack: its name.
        lines: what is told of it, the first one first; none where nothing is judged.
        why: where nothing is judged, the reason.
        examples: the best, median and worst; none where nobody knows the truth.
        of: from how many these were chosen, and by what.
    """

    attack: str
    lines: Sequence[Line]
    why: str = ""
    examples: Sequence[Example] = ()
    of: str = ""

    @property
    def verdict(self) -> str:
        """In the words of the reading."""
        return self.lines[0].verdict if self.lines else NOT_JUDGED

    @property
    def tone(self) -> str:
        """Which colour it gets: `leak`, `doubt` or `calm`."""
        found = {line.verdict for line in self.lines if not line.baseline}
        if LEAKS in found:
            return "leak"
        return "doubt" if found & {BEYOND, UNDECIDED} else "calm"


def chosen(leaks: Sequence[Line], values: image_scores.Values) -> dict[str, list[Extreme]]:
    """By attack, the examples that its card shows: the best, the median and the worst of those that are scored."""
    made = {line.summary.attack: line.summary.made for line in leaks}
    first = {attack: own[0].summary.metric for attack, own in telling(leaks).items() if own}
    return {attack: image_scores.extremes(values, key, first.get(attack, "")) for attack, key in made.items()}


def places(extremes: Mapping[str, Sequence[Extreme]]) -> dict[Key, list[int]]:
    """By finding, the places of the examples that cards show."""
    found: dict[Key, list[int]] = {}
    for own in extremes.values():
        for item in own:
            found.setdefault(item.key, []).append(item.image)
    return found


def cards(
    leaks: Sequence[Line],
    found: Sequence[Found],
    extremes: Mapping[str, Sequence[Extreme]],
    values: image_scores.Values,
) -> list[Card]:
    """A card for each attack that is scored; one for an adaptive attack and the naive one where these are the same."""
    by_key = {image_scores.key_of({**item.about, "attack": item.about["title"]}): item for item in found}
    made = []
    for attack, lines in telling(adaptive.told_once(leaks)).items():
        own = extremes.get(attack.removesuffix(adaptive.BOTH), ())
        examples = [shown for item in own if (shown := _example(item, by_key.get(item.key))) is not None]
        why = next((line.remark for line in leaks if line.summary.attack == attack and line.remark), "")
        made.append(
            Card(
                attack=attack,
                lines=lines,
                why="" if lines else why,
                examples=examples,
                of=_of(own[0], values) if examples else "",
            )
        )
    return made


def _example(item: Extreme, found: Found | None) -> Example | None:
    """None where the finding is gone, or does not show this one."""
    if found is None:
        return None
    name, _, unit = metric_name(item.metric).partition(", ")
    value = f"{name} {item.value:.3g} {unit}".rstrip() if math.isfinite(item.value) else "identical"
    told = f"{value}; {victim_and_round(found.about)}"
    if item.image in found.cut:
        claimed, true = found.cut[item.image]
        return Example(rank=item.rank, told=told, claimed=claimed, true=true)
    if item.image in found.told and found.bag == (item.metric == "words_found"):
        return Example(rank=item.rank, told=told, text=_shortened(found.told[item.image]))
    return None


def _shortened(text: Pair) -> Pair:
    """Its beginning, where it is long."""
    if max(len(text.claimed), len(text.true.split())) <= _WORDS:
        return text
    end = Word(text="…", right=True)
    true = text.true.split(" ")
    claimed = list(text.claimed)
    return Pair(
        true=" ".join(true[:_WORDS] + ["…"] * (len(true) > _WORDS)),
        claimed=claimed[:_WORDS] + [end] * (len(claimed) > _WORDS),
    )


def _of(item: Extreme, values: image_scores.Values) -> str:
    """From how many examples this was chosen, and by what."""
    own = (
        metrics[item.metric] for key, metrics in values.items() if key[:2] == item.key[:2] and item.metric in metrics
    )
    count = sum(not math.isnan(value) for several in own for value in several)
    return f"from {count} by {metric_name(item.metric).partition(',')[0]}"
