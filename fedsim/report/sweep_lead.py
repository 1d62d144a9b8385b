"""The lead of a sweep's page: which defense stops what, in a few sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.report.adaptive import HOLDS, NOT_CONCLUDED, ONLY_NAIVE
from fedsim.report.attack_outcomes import AttackOutcome
from fedsim.report.defense_outcomes import NOTHING, WEAKENS, DefenseOutcome
from fedsim.report.summary import enumerate_words
from fedsim.report.verdicts import NOT_JUDGED, UNDECIDED

ONLY_SETTING = "the only setting"
"""Name of a setting where there is no other."""
_MOST_NAMES = 6
"""Most settings that a sentence names."""
_SENTENCES = {
    HOLDS: ("{names} holds against {attacks}.", "{names} hold against {attacks}."),
    WEAKENS: (
        "{names} weakens {attacks}, but is not shown to stop {them}: {clause}.",
        "{names} weaken {attacks}, but are not shown to stop {them}: {clause}.",
    ),
    ONLY_NAIVE: (
        "{names} beats only the naive form of {attacks}.",
        "{names} beat only the naive form of {attacks}.",
    ),
    NOTHING: (
        "{names} does nothing against {attacks}: leakage is hardly lower, or not at all.",
        "{names} do nothing against {attacks}: leakage is hardly lower, or not at all.",
    ),
    NOT_CONCLUDED: (
        "Nothing is concluded about {names} against {attacks}, because {clause}.",
        "Nothing is concluded about {names} against {attacks}, because {clause}.",
    ),
}
"""Words of the lead about one setting, and about several, in this order."""


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """Row of one setting in the table that opens the page.

    Attributes:
        outcomes: what the defense is worth against each attack, the worst first.
        details: the same by each metric.
        leaking: attacks that leak, where it has no defense.
        leakage: of the strongest attack beyond the guess.
        proved: epsilon, as a range over victims and seeds.
        promise: what an epsilon of that size promises.
        bytes: that a client sends in a round.
        no_learning: that its model has not learnt; empty where it has.
    """

    name: str
    is_defended: bool
    outcomes: Sequence[AttackOutcome]
    details: Sequence[DefenseOutcome]
    leaking: Sequence[str]
    verdict: str
    reason: str
    leakage: str
    difference: str
    accuracy: str
    accuracy_change: str
    proved: str
    promise: str
    measured: str
    bytes: str
    no_learning: str
    href: str

    @property
    def css(self) -> str:
        """CSS class of the verdict."""
        if self.leaking or self.verdict in (NOTHING, ONLY_NAIVE):
            return "leaks"
        return "undecided" if self.verdict in (WEAKENS, NOT_CONCLUDED, UNDECIDED) else ""

    @property
    def name_and_cost(self) -> str:
        """Its name, with what it costs in accuracy where that is known."""
        return f"{self.name} (accuracy {self.accuracy_change.partition(';')[0]})" if self.accuracy_change else self.name


def write_lead(rows: Sequence[SettingRow], warning: str) -> str:
    """Write the answer of a sweep in a few sentences.

    Args:
        warning: that nothing leaks without a defense; empty where something does.
    """
    if not any(row.is_defended for row in rows):
        return _lead_without_defenses(rows)
    has_outcome = any(outcome.word != NOT_CONCLUDED for row in rows for outcome in row.outcomes)
    if warning and not has_outcome:
        return f"{warning[0].upper()}{warning[1:]}."
    # Settings by what is said of them.
    names: dict[tuple[str, tuple[str, ...], str], list[str]] = defaultdict(list)
    for row in rows:
        attacks: dict[tuple[str, str], list[str]] = defaultdict(list)
        for outcome in row.outcomes:
            attacks[outcome.word, outcome.clause].append(outcome.attack)
        for (word, clause), several in attacks.items():
            name = row.name_and_cost if word in (HOLDS, WEAKENS) else row.name
            names[word, tuple(several), clause].append(name)
    sentences = []
    if leaking := list(dict.fromkeys(attack for row in rows for attack in row.leaking)):
        verb = "finds" if len(leaking) == 1 else "find"
        sentences.append(f"Without a defense, {enumerate_words(leaking)} {verb} a leak.")
    for word, forms in _SENTENCES.items():
        for (word_of_settings, attack_names, clause), setting_names in names.items():
            if word_of_settings != word:
                continue
            text = forms[len(setting_names) > 1].format(
                names=_enumerate_settings(setting_names),
                attacks=enumerate_words(attack_names),
                them="it" if len(attack_names) == 1 else "them",
                clause=clause,
            )
            sentences.append(f"{text[0].upper()}{text[1:]}" if text.startswith(ONLY_SETTING) else text)
    return " ".join(sentences)


def _lead_without_defenses(rows: Sequence[SettingRow]) -> str:
    if not rows:
        return ""
    leaking, unjudged = list[str](), list[str]()
    for row in rows:
        if row.leaking:
            leaking.append(row.name)
        elif row.verdict == NOT_JUDGED:
            unjudged.append(row.name)
    if len(unjudged) == len(rows):
        return "No attack was judged in any setting, so that nothing is known of leaks."
    if not leaking and unjudged:
        return (
            f"No attack shows a leak in {len(rows) - len(unjudged)} of {len(rows)} settings; in the others none was "
            f"judged: {_enumerate_settings(unjudged)}."
        )
    if not leaking:
        return "No attack shows a leak in any setting."
    if len(leaking) == len(rows):
        return "The messages leak." if len(rows) == 1 else "The messages leak in every setting."
    return f"The messages leak in {len(leaking)} of {len(rows)} settings: {_enumerate_settings(leaking)}."


def _enumerate_settings(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return enumerate_words(names)
    return enumerate_words([*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} other settings"])
