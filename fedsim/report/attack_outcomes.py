"""What defenses are worth against an attack by all metrics together.

A defense under which examples can still be identified does not hold because PSNR fell; but neither does
it do nothing: it weakens the attack, and a sentence names the metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedsim.base.grouping import group_by
from fedsim.interfaces.metric import describe_metric
from fedsim.report.adaptive import NOT_CONCLUDED
from fedsim.report.defense_outcomes import NOTHING, WEAKENS, WORST_FIRST, DefenseOutcome
from fedsim.report.summary import enumerate_words
from fedsim.report.sweep_groups import MIN_SEEDS

_MOST_METRICS = 3
"""Most metrics that a sentence names."""


@dataclass(frozen=True, kw_only=True)
class AttackOutcome:
    """What the defense of a setting is worth against one attack, by all metrics together.

    Attributes:
        less_by: titles of the metrics by which less leaks, and
        still_by: of those by which it leaks all the same; both where it weakens the attack, else empty.
        leaks_on_any_side: whether the attack is shown to leak by any metric, without the defense or with it.
        word: one of `WORST_FIRST`.
    """

    attack: str
    decisive: DefenseOutcome
    less_by: tuple[str, ...]
    still_by: tuple[str, ...]
    leaks_on_any_side: bool
    word: str
    reason: str

    @property
    def clause(self) -> str:
        """What a sentence adds to the word: why nothing is concluded, or by which metrics less leaks.

        It names the first metric alone, so that settings and attacks share a sentence; `reason` names more.
        """
        if self.word == NOT_CONCLUDED:
            return self.reason
        return _describe_metrics(self.less_by, self.still_by, most=1) if self.less_by else ""

    @property
    def needs_seeds(self) -> bool:
        """Whether nothing is concluded of an attack that leaks without the defense, from few seeds."""
        decisive, difference = self.decisive, self.decisive.difference
        if self.word != NOT_CONCLUDED or difference is None or not decisive.leaks_without_defense:
            return False
        return difference.num_seeds < MIN_SEEDS and not self.lacks_adaptive_attack

    @property
    def lacks_adaptive_attack(self) -> bool:
        """Whether nothing is concluded because only the naive attack ran, so that no further victim helps."""
        return self.word == NOT_CONCLUDED and self.decisive.is_weaker_naively

    @property
    def severity(self) -> int:
        """Place of the outcome among all, the worst first."""
        return WORST_FIRST.index(self.word)


def judge_attacks(outcomes: Iterable[DefenseOutcome]) -> list[AttackOutcome]:
    """Return the outcome against each attack by all metrics together, the worst attack first.

    It is the worst of those by metrics by which the attack leaks without the defense or with it,
    since the others cannot tell anything; of equal ones, that of the preferred metric. Where less
    leaks by any of these, however, the defense does something: it weakens the attack, or, where the
    adversary did not know of it, nothing is concluded. Several metrics
    are several chances to see that where nothing is to be seen: less has to leak by all of them, or by
    one beyond what Bonferroni's correction for their number allows.
    """
    judged = [_judge_attack(several) for several in group_by(outcomes, lambda outcome: outcome.attack).values()]
    return sorted(judged, key=lambda item: item.severity)


def _judge_attack(outcomes: Sequence[DefenseOutcome]) -> AttackOutcome:
    leaking = [item for item in outcomes if item.leaks_on_any_side]
    worst = min(leaking or outcomes[:1], key=lambda item: item.severity)
    weaker = [item for item in leaking if item.is_weaker]
    weaker_naively = [item for item in leaking if item.is_weaker_naively]
    if worst.word == NOTHING and weaker_naively:
        worst = weaker_naively[0]
    word, reason, less_by, still_by = worst.word, worst.reason, list[str](), list[str]()
    if weaker and word in (NOTHING, WEAKENS, NOT_CONCLUDED) and not _is_weaker_beyond_chance(weaker, leaking):
        titles = enumerate_words([describe_metric(item.metric).title for item in weaker])
        word = NOT_CONCLUDED
        reason = f"leakage is lower by {titles}, but with several metrics this may be chance; add seeds or victims"
    elif weaker and word in (NOTHING, WEAKENS, NOT_CONCLUDED):
        word = WEAKENS
        less_by = [describe_metric(item.metric).title for item in weaker]
        still_by = [describe_metric(item.metric).title for item in leaking if item.leaks_with_defense]
        if still_by:
            reason = _describe_metrics(less_by, still_by)
        elif worst.word != WEAKENS:
            title = describe_metric(worst.metric).title
            reason = f"leakage is lower than without it; whether there is still a leak by {title} is open"
        # The means that are shown are those of a metric that shows both, if there is one.
        worst = next((item for item in weaker if item.leaks_with_defense), worst if worst in weaker else weaker[0])
    return AttackOutcome(
        attack=worst.attack,
        decisive=worst,
        less_by=tuple(less_by),
        still_by=tuple(still_by),
        leaks_on_any_side=bool(leaking),
        word=word,
        reason=reason,
    )


def _is_weaker_beyond_chance(weaker: Sequence[DefenseOutcome], leaking: Sequence[DefenseOutcome]) -> bool:
    """Return whether less leaks by all metrics, or by one beyond what so many metrics show by chance."""
    num_compared = sum(item.leaks_without_defense for item in leaking)
    if len(weaker) == num_compared:
        return True
    differences = [item.difference for item in weaker if item.difference is not None]
    return any(difference.is_less_among(num_compared) for difference in differences)


def _describe_metrics(less_by: Sequence[str], still_by: Sequence[str], most: int = _MOST_METRICS) -> str:
    """Say by which metrics less leaks, and by which there still is a leak; name at most so many."""
    text = f"leakage is lower by {_enumerate_metrics(less_by, most)}"
    if not still_by:
        return text
    text += ", but there is still a leak"
    return text if tuple(less_by) == tuple(still_by) else f"{text} by {_enumerate_metrics(still_by, most)}"


def _enumerate_metrics(titles: Sequence[str], most: int) -> str:
    if len(titles) <= most:
        return enumerate_words(titles)
    return enumerate_words([*titles[:most], "other metrics"])
