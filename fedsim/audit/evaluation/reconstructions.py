"""Judge images and rows of tables that an attack claims the victim trained on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

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
)
from fedsim.audit.evaluation.examples import (
    check_kinds,
    display_examples,
    judge_examples,
    true_examples,
)
from fedsim.audit.evaluation.scoring import guess_examples
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.evaluation.truth_fit import read_attacked_update
from fedsim.base.errors import FedsimError
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.modality import PublicExamples
from fedsim.modalities import find_modality

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReconstructionEvaluator(Evaluator[Reconstruction]):
    """Judge of claimed examples that are numbers."""

    finding = Reconstruction

    def check_form(self, finding: Reconstruction, spec: FindingSpec) -> None:
        """Check that the examples have the federation's shape and kind."""
        check_kinds(finding, spec)

    def truth(self, finding: Reconstruction, about: FindingMetadata, case: Case) -> Truth | None:
        """Return the true data of the clients whose examples are claimed."""
        return true_examples(finding, about, case)

    def judge(self, finding: Reconstruction, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score claimed examples, see `fedsim.audit.evaluation.scoring.score_examples`."""
        return judge_examples(finding, about, context, _attacked_update(finding, about, context))

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


def _attacked_update(
    finding: Reconstruction, about: FindingMetadata, context: EvaluationContext
) -> AttackedUpdate | None:
    """Return the update that the finding was read from, for L_sim.

    None where it was read from several updates, where the model is not known, or where the update
    is not recorded.
    """
    if finding.claims != "update" or len(about["rounds"]) > 1:
        return None
    try:
        return read_attacked_update(about, context)
    except FedsimError as error:
        log.warning("%s, client %d: no L_sim: %s", about["attack"], int(about["victim"]), error)
        return None
