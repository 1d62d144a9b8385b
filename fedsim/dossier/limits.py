"""What a dossier says of its extent, of what would change its verdict, and until when it is valid."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence

from fedsim.base.errors import FedsimError, number_of
from fedsim.dossier.attack_results import list_unjudged
from fedsim.dossier.contents import (
    LEAKS,
    NO_LEAK,
    NOT_CONCLUDED,
    Aim,
    Caution,
    Coverage,
    DossierVerdict,
    MissingAttack,
    Result,
)
from fedsim.dossier.openness import list_open_reasons
from fedsim.pitfalls.design import EvaluationDesign
from fedsim.pitfalls.find import find_pitfalls
from fedsim.report.summary import enumerate_words
from fedsim.report.verdicts import MIN_VICTIMS

_SWEEP_COMPARES = "`fedsim sweep` compares them with these"
_APP_IS_RECORDED_AGAIN = "the app has to be run and recorded with them, and that recording attacked in the same way"


def describe_extent(coverage: Coverage) -> list[str]:
    """Say which part of clients and rounds was attacked."""
    if not coverage.victims:
        return []
    victims, rounds = len(coverage.victims), len(coverage.attacked_rounds)
    extent = (
        f"{victims} of {number_of(coverage.clients, 'recorded client')} {_conjugate_was(victims)} attacked, in "
        f"{rounds} of {number_of(coverage.recorded_rounds, 'recorded round')}"
    )
    is_whole = victims == coverage.clients and rounds == coverage.recorded_rounds
    return [f"{extent}." if is_whole else f"{extent}; nothing is known about the others."]


def _conjugate_was(count: int) -> str:
    return "was" if count == 1 else "were"


def describe_changes(
    verdict: DossierVerdict,
    results: Sequence[Result],
    missing: Sequence[MissingAttack],
    aims: Sequence[Aim],
    *,
    can_sweep: bool = True,
) -> list[str]:
    """Say what would change the verdict.

    Args:
        aims: what attacks can be after.
        can_sweep: whether there is an experiment that a sweep can change; otherwise another's app was recorded.
    """
    changes = []
    if verdict == LEAKS:
        further = _SWEEP_COMPARES if can_sweep else _APP_IS_RECORDED_AGAIN
        changes.append(
            "A leak that was shown remains valid for these settings. Other settings, such as a defense, secure "
            f"aggregation or longer local training, have to be attacked again; {further}."
        )
    if verdict == NO_LEAK:
        changes.append(
            "No leak is shown by these attacks on these clients. A stronger attack, another client or an earlier or "
            "later round may show one."
        )
    most = max((result.victims for result in results if not result.is_baseline), default=0)
    if verdict == NOT_CONCLUDED and most < MIN_VICTIMS:
        changes.append(
            f"At most {number_of(most, 'client')} {_conjugate_was(most)} attacked by one attack; a verdict needs "
            f"{MIN_VICTIMS} or more, which adversary.victims sets."
        )
    elif verdict == NOT_CONCLUDED:
        changes.append("More attacked clients (adversary.victims) or more seeds can decide what is undecided.")
    if unjudged := list_unjudged(results):
        changes.append(f"There is no verdict on {enumerate_words(unjudged)}, because scores are missing.")
    changes += [f"A leak is not excluded by {reason}." for reason in list_open_reasons(results)]
    if any(attack.is_failure for attack in missing):
        changes.append("Attacks that lack results may show a leak once they have them; log.txt says what went wrong.")
    if any(not aim.attacks for aim in aims):
        changes.append("Nothing is known about an adversary with an aim that was not tried (see above).")
    return changes


def describe_validity(review_by: datetime.date | None) -> list[str]:
    """Say until when a dossier is valid."""
    review = (
        f"The federation has to be examined again by {review_by.isoformat()}."
        if review_by
        else "No date for a new examination was set; --review-by DATE sets one."
    )
    return [
        "This dossier applies to the settings, data, code and recorded rounds whose hashes are in the annex, and "
        "becomes invalid when any of them changes: other clients or data, another model, other training, or further "
        "rounds.",
        "It applies to the attacks that it names, and becomes invalid when a stronger one becomes known.",
        review,
    ]


def list_pitfalls(make_design: Callable[[], EvaluationDesign]) -> tuple[list[Caution], list[str]]:
    """Return the pitfalls of an evaluation as cautions, and why they were not looked for.

    Args:
        make_design: returns the evaluation, or raises a FedsimError.
    """
    try:
        pitfalls = find_pitfalls(make_design())
    except FedsimError as error:  # a file cannot be read, or a plug-in refuses its settings
        return [], [f"Pitfalls were not looked for: {error}."]
    cautions = [Caution(title=pitfall.title, detail=pitfall.detail, reason=pitfall.reason) for pitfall in pitfalls]
    return cautions, []
