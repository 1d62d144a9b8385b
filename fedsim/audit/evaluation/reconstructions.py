"""Judge images and rows of tables that an attack claims the victim trained on."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display
from fedsim.audit.evaluation.evaluator import (
    EvaluationContext,
    Evaluator,
    FindingMetadata,
    FindingSpec,
    Judgement,
    first_round,
)
from fedsim.audit.evaluation.examples import (
    check_kinds,
    display_examples,
    judge_examples,
    shared_measurements,
    true_examples,
)
from fedsim.audit.evaluation.scoring import guess_examples
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import FedsimError
from fedsim.federation.config import PUBLIC_KEY
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities import find_modality

log = logging.getLogger(__name__)

_UNRELATED, _RELATED = 0.95, 0.5
"""One minus the cosine from which on examples do not explain an update, and up to which they do."""


@dataclass(frozen=True)
class ReconstructionEvaluator(Evaluator[Reconstruction]):
    """Judge of claimed examples that are numbers."""

    finding = Reconstruction

    def form(self, finding: Reconstruction, spec: FindingSpec) -> None:
        """Check that the examples have the federation's shape and kind."""
        check_kinds(finding, spec)

    def truth(self, finding: Reconstruction, about: FindingMetadata, case: Case) -> Truth | None:
        """Return the true data of the clients whose examples are claimed."""
        return true_examples(finding, about, case)

    def judge(self, finding: Reconstruction, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score claimed examples, see `fedsim.audit.evaluation.scoring.score_examples`.

        A truth file of a recording made elsewhere must explain the client's update; otherwise the
        finding is not scored.
        """
        message = _attacked_update(finding, about, context)
        if message is not None and context.case.is_described_by_file:
            complaint = _truth_complaint(message, about, context)
            if complaint:
                log.error("%s, client %s: not scored: %s", about["attack"], about["victim"], complaint)
                return Judgement()
        return judge_examples(finding, about, context, message)

    def show(self, finding: Reconstruction, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display images or rows, with the true ones where they are known."""
        return display_examples(finding, truth)

    def guess(
        self,
        finding: Reconstruction,
        truth: Truth,
        name: str,
        public: PublicExamples | None,
        rng: torch.Generator,
    ) -> Tensor | None:
        """Return the images of a guess, assigned to the true ones as claims are."""
        modality = find_modality(truth.modality)
        guess = guess_examples(finding, truth, public, rng).get(name)
        if guess is None or modality.shown_as != "images":
            return None
        return modality.pair_claims(guess, truth.data)


def _truth_complaint(message: AttackedUpdate, about: FindingMetadata, context: EvaluationContext) -> str:
    """Say why a victim's truth file cannot be the data behind its update; empty where it can."""
    victim = str(about["victim"])
    if victim not in context.case.files:
        return ""
    distance = _distance(message, context.case.files[victim], context)
    if math.isnan(distance) or distance < _RELATED:
        return ""
    files = {client: file for client, file in context.case.files.items() if client != PUBLIC_KEY}
    distances = {client: _distance(message, file, context) for client, file in files.items()}
    nearest = min(distances, key=lambda client: distances[client])
    complaint = f"what truth.{victim} says that it held does not explain its message (1 - cosine {distance:.3f})"
    if distances[nearest] < _RELATED:
        return (
            f"{complaint}, and what client {nearest} is said to have held does ({distances[nearest]:.3f}); mend [truth]"
        )
    # Many local steps turn an update away from any gradient, and noise may leave nothing of it.
    if distance < _UNRELATED or context.knowledge.defenses_in(first_round(about)):
        return ""
    complaint = f"{complaint}, nor does anybody else's"
    if context.case.is_defended:
        sentence = f"{complaint}; it is scored, since the app is said to be defended"
        log.warning("%s, client %s: %s", about["attack"], victim, sentence)
        return ""
    return (
        f"{complaint}; mend [truth], or what [app] and [adversary.knowledge] say of the model, the loss and the "
        "messages; if the app's own defense hides the data, say defended = true in [app]"
    )


def _distance(message: AttackedUpdate, file: Path, context: EvaluationContext) -> float:
    """Return one minus the cosine between the update and the gradient of a truth file.

    It is the least along the line from w_t to w_T.
    """
    try:
        truth, update = Truth.load(file), message.update
        compute = partial(message.similarities, truth.data, truth.labels)
        inputs = update.round, update.client, truth.data, truth.labels
        return min(shared_measurements(context).find(compute, "truth file", *inputs).values())
    except (FedsimError, RuntimeError, ValueError, IndexError):  # of another shape, say
        return math.nan


def _attacked_update(
    finding: Reconstruction, about: FindingMetadata, context: EvaluationContext
) -> AttackedUpdate | None:
    """Return the update that the finding was read from, for L_sim.

    None where it was read from several updates, where the model is not known, or where the update
    is not recorded.
    """
    knowledge, several_rounds = context.knowledge, "-" in str(about["round"])
    if finding.claims != "update" or several_rounds:
        return None
    if knowledge.model is None or knowledge.value_range is None:
        return None
    assert knowledge.loss is not None
    victim = int(about["victim"])
    low, high = (torch.tensor(end) for end in knowledge.value_range)
    try:
        update = context.transcript.update(first_round(about), victim)
    except FedsimError as error:
        log.warning("%s, client %d: no L_sim: %s", about["attack"], victim, error)
        return None
    return AttackedUpdate(
        model=knowledge.model(),
        loss=knowledge.loss,
        update=update,
        value_range=(low, high),
        settings=context.case.training,
        device=knowledge.device,
    )
