"""Values of single clients from answers to queries, in clear or as sums over cohorts [So2023]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedsim.base.constraints import NonNegativeFloat
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.answer_findings import AnsweredValues
from fedsim.interfaces.attack import (
    ALL,
    CLIENT,
    GROUP,
    GROUPS,
    Attack,
    Outcome,
    Paper,
    Progress,
    RoundsNeeded,
    Subject,
    Target,
    VictimTask,
    run_sequentially,
    warn,
)
from fedsim.interfaces.findings import client_ids
from fedsim.recording.answer_claims import EXACT, UNCHECKED, AnswerClaim, claim_answers, find_people
from fedsim.recording.cohort_answers import (
    AnswerErrors,
    QuestionGroup,
    group_questions,
    list_reported_counts,
    read_answers,
)
from fedsim.recording.cohort_systems import Floats
from fedsim.recording.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class Differencing(Attack):
    """Solve for what a client answered, from all answers that are sums over cohorts with and without it.

    1. Read the answers to each question: each is a sum over known clients (`read_answers`).
    2. A client's value follows if its unit vector is in the row space of the matrix of cohorts, in
       exact arithmetic (`CohortSystem`). Else the mean of its cohort is claimed, as a guess.
    3. Where the system is inconsistent, clients' values changed; then nothing is claimed that other
       answers do not check. Exact is said of what no change of one or two clients could have made
       wrong unnoticed; other values hold if nobody's values changed, and are marked.
    4. Between exact answers whose number of people differs by one, the difference is the value of
       who joined or left (`find_people`).

    A client that answers in clear needs no system. Answers are what clients send, so that a defense
    has to be stated for the error that it leaves.

    Args:
        noise: standard deviation of the noise that each client adds to each number; 0 for none.
        rounded_to: clients round to multiples of this; 0 where they do not.
        smallest_cell: clients answer 0 for numbers below it; 0 where they do not.
        tolerance: rounding error of a sum, as of secure aggregation, relative to the largest one of
            its question.

    References:
        [So2023], on models; [Dinur2003], on noise.
        Differs: the paper supposes models that no longer change; here changes are looked for, and
        clients are weighted by N, which is solved for as well.
    """

    noise: NonNegativeFloat = 0.0
    rounded_to: NonNegativeFloat = 0.0
    smallest_cell: NonNegativeFloat = 0.0
    tolerance: NonNegativeFloat = 1e-4
    paper: ClassVar[Paper] = cite("So2023")
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUP, GROUPS})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    subject: ClassVar[Subject] = "answers"
    main_metric: ClassVar[str] = "answers_exact"

    def _run(self, target: Target, progress: Progress) -> AnsweredValues:
        return self._claim_values(target, progress, self._read_groups(target.transcript))

    def _run_several(self, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Attack one victim after the other; those of the same rounds read all answers once."""
        cached = dict[tuple[str, tuple[int, ...]], list[QuestionGroup]]()

        def claim_values(task: VictimTask) -> AnsweredValues:
            transcript = task.target.transcript
            key = str(transcript.folder), tuple(transcript.rounds)
            if key not in cached:
                cached[key] = self._read_groups(transcript)
            return self._claim_values(task.target, task.progress, cached[key])

        return run_sequentially(tasks, claim_values)

    def _read_groups(self, transcript: Transcript) -> list[QuestionGroup]:
        errors = AnswerErrors(
            noise=self.noise,
            rounded_to=self.rounded_to,
            smallest_cell=self.smallest_cell,
            tolerance=self.tolerance,
        )
        return group_questions(read_answers(transcript), errors)

    def _claim_values(self, target: Target, progress: Progress, groups: Sequence[QuestionGroup]) -> AnsweredValues:
        claims: dict[str, list[AnswerClaim]] = {}
        for number, group in enumerate(groups, 1):
            found, changes = claim_answers(group, target.victim)
            claims |= {name: given for name, given in found.items() if given}
            if changes and any(len(cohort.members) > 1 for cohort in group.cohorts):
                warn(
                    f"clients' answers to {', '.join(list(group.answers)[:3])} changed before round "
                    f"{', '.join(map(str, changes[:10]))}, or there is noise that the attack does not know (noise); "
                    "of sums over these rounds, only what others check is claimed"
                )
            progress(number, len(groups), {"objective": 0.0})
        if not claims:
            raise AttackError(
                f"client {target.victim}: gave no answers that are numbers of one shape in all rounds, so there are no "
                "sums to solve; fedsim inspect says what is in clear"
            )
        standings = [claim.standing for given in claims.values() for claim in given]
        if UNCHECKED in standings:
            warn(
                f"client {target.victim}: some values are claimed on the assumption that no person's values changed "
                "between rounds, which the answers do not rule out"
            )
        largest = max((given[-1] for given in claims.values()), key=lambda claim: len(claim.group))
        counts = list_reported_counts((given for group in groups for given in group.answers.values()), target.victim)
        people = find_people(claims, counts) if EXACT in standings else []
        return AnsweredValues(
            rounds={name: torch.tensor([claim.round for claim in given]) for name, given in claims.items()},
            values={name: _stack(claim.value for claim in given) for name, given in claims.items()},
            standings={name: torch.tensor([claim.standing for claim in given]) for name, given in claims.items()},
            spreads={name: _stack(claim.spread for claim in given) for name, given in claims.items()},
            people={
                f"{person.round}/{name}": torch.from_numpy(np.atleast_1d(value))
                for person in people
                for name, value in person.values.items()
            },
            group=client_ids(largest.group),
            group_sums={
                name: torch.from_numpy(np.atleast_1d(given[-1].group_sum))
                for name, given in claims.items()
                if given[-1].group == largest.group
            },
        )


def _stack(arrays: Iterable[Floats]) -> torch.Tensor:
    return torch.from_numpy(np.stack(list(arrays)))
