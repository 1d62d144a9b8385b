"""Functions shared by evaluators of findings that claim examples: images, rows of tables, texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.claim_units import doubt_units
from fedsim.audit.evaluation.display import Display, ImageGrid, TableRows
from fedsim.audit.evaluation.evaluator import (
    EvaluationContext,
    FindingMetadata,
    FindingSpec,
    Judgement,
    first_round,
    group_members,
)
from fedsim.audit.evaluation.retraining import shared_measurements
from fedsim.audit.evaluation.scoring import claimed_data, score_examples
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics, table_metrics
from fedsim.base.errors import DataError
from fedsim.base.randomness import use_one_thread
from fedsim.base.task import goal_of, infer_modality
from fedsim.interfaces.findings import Reconstruction, Representatives, Texts
from fedsim.modalities import find_modality
from fedsim.modalities.drawing import clean_drawing

MAX_IMAGES = 16
"""Most images of a finding that a page and its image grid show; they are the first ones."""
_SNAPSHOT_VALUES = 2**22
"""Most values of snapshots that are compared with the truth at once."""
MAX_DRAWINGS = 8
"""Most drawings of a finding that a page shows."""


def check_kinds(finding: Reconstruction | Texts, spec: FindingSpec) -> None:
    """Raise AttackError unless examples and labels have the federation's kind and shape."""
    task = spec.task
    if task is not None:
        data_kinds = {True: "texts", False: "numbers"}
        has_tokens = isinstance(finding, Texts)
        spec.expect("data that are", data_kinds[has_tokens], data_kinds[task.vocabulary > 0])
        label_kinds = {True: "targets of a regression", False: "masks" if task.goal == "masks" else "classes"}
        if task.goal == "labels":
            label_kinds[True] = "0 or 1"
        are_targets = finding.labels.is_floating_point()
        spec.expect("labels that are", label_kinds[are_targets], label_kinds[task.goal not in ("classes", "masks")])
        spec.expect("labels of shape", tuple(finding.labels.shape[1:]), task.target_shape)
        if task.goal == "labels" and not ((finding.labels == 0) | (finding.labels == 1)).all():
            spec.expect("labels that are", "other numbers", label_kinds[True])
        spec.expect_below("labels", finding.labels, task.num_classes or task.mask_classes)
        if isinstance(finding, Texts):
            spec.expect_below("tokens", finding.tokens, task.vocabulary)
    elif spec.knowledge.num_classes:
        spec.expect_below("labels", finding.labels, spec.knowledge.num_classes)
    shape = task.input_shape if task else spec.knowledge.input_shape
    if shape is not None:
        spec.expect("examples of shape", tuple(claimed_data(finding).shape[1:]), tuple(shape))


def true_examples(finding: Reconstruction | Texts, about: FindingMetadata, case: Case) -> Truth | None:
    """Return the true data of the clients whose examples are claimed, where they are known."""
    if finding.claims == "federation":
        return case.truth_of_all()
    number = None if finding.claims == "client" else first_round(about)
    return case.truth(int(about["victim"]), number, group_members(about))


@use_one_thread()  # faster for small images, and then scores do not depend on the number of cores
def judge_examples(
    finding: Reconstruction | Texts, about: FindingMetadata, context: EvaluationContext, message: AttackedUpdate | None
) -> Judgement:
    """Score claimed examples against the truth, see `fedsim.audit.evaluation.scoring.score_examples`."""
    truth = true_examples(finding, about, context.case)
    if truth is None:
        return Judgement()
    claimed_kind, true_kind = (
        (labels.is_floating_point(), labels.shape[1:]) for labels in (finding.labels, truth.labels)
    )
    if claimed_kind != true_kind:
        raise DataError("truth: the victim's labels are of another kind than the attack claims, classes or targets")
    goal, true_labels = goal_of(context.knowledge.loss), truth.labels
    if goal == "labels" and true_labels.ndim > 1 and not ((true_labels == 0) | (true_labels == 1)).all():
        raise DataError(
            "truth: the victim's labels are others than 0 and 1, so that none is claimed rightly or wrongly; write "
            "which labels each example has"
        )
    scores = score_examples(
        finding,
        truth,
        public=context.public,
        others=context.examples_of_others(group_members(about) or (int(about["victim"]),)),
        rng=context.guess_generator(int(about["victim"])),
        weights=context.weights,
        auxiliary=context.auxiliary if "auxiliary" in about["granted"] else None,
        labels_granted="labels" in about["granted"],
        message=message,
        goal=goal,
        cache=shared_measurements(context),
        device=context.knowledge.device,
        num_classes=context.knowledge.num_classes,
    )
    if isinstance(finding, Reconstruction) and not isinstance(finding, Representatives) and not truth.has_tokens:
        doubt_units(finding.data, truth.data, f"{about['attack']}, client {about['victim']}")
    return Judgement(scores=scores, examples=len(truth.labels))


@use_one_thread()
def display_examples(finding: Reconstruction, truth: Truth | None) -> Display:
    """Display claimed examples as their modality says, with the true ones where they are known."""
    modality_name = truth.modality if truth else infer_modality(finding.data.shape[1:])
    shown_as = find_modality(modality_name).shown_as if modality_name else ""
    is_typical = isinstance(finding, Representatives)
    right, assignment = None, None
    if truth is not None and not is_typical:
        right, assignment = _assign_claims(finding.data, truth)
    claimed = _reorder_claims(finding.data, assignment)
    true = truth.data if truth else None
    count, has_truth = len(claimed), truth is not None
    if shown_as == "rows":
        entropy = finding.entropy
        if entropy is not None and assignment is not None:
            entropy = entropy[assignment.clamp_min(0)]
        rows = TableRows(claimed=claimed, true=true, entropy=entropy, right=right)
        return Display(examples=count, has_truth=has_truth, is_typical=is_typical, rows=rows)
    if shown_as == "drawings":
        drawings = _draw_examples(modality_name, claimed, true)
        return Display(examples=count, has_truth=has_truth, is_typical=is_typical, drawings=drawings)
    if shown_as != "images":
        return Display(examples=count, has_truth=has_truth, is_typical=is_typical)
    steps, iterations = _descent_steps(finding, assignment)
    images = ImageGrid(
        claimed=claimed,
        true=true,
        psnr=metrics.psnr(claimed, true).tolist() if true is not None else (),
        certified=_certified_flags(finding, assignment),
        steps=steps,
        iterations=iterations,
    )
    curves = {}
    snapshots, snapshot_iterations = finding.snapshots, finding.snapshot_iterations
    if true is not None and snapshots is not None and snapshot_iterations is not None:
        curves["psnr"] = snapshot_iterations.double(), _snapshot_psnr(snapshots, true)
    return Display(examples=count, has_truth=has_truth, is_typical=is_typical, images=images, curves=curves)


def _draw_examples(modality_name: str, claimed: Tensor, true: Tensor | None) -> list[str]:
    """Return drawings of the first claims, each over the true example where that is known."""
    modality = find_modality(modality_name)
    noun = modality.noun
    drawings = []
    for number, claim in enumerate(claimed[:MAX_DRAWINGS]):
        drawing = modality.draw_example(claim, None if true is None else true[number])
        label = f"claimed {noun} {number + 1}" + ("" if true is None else f" and the true {noun}")
        drawings.append(clean_drawing(drawing, label, modality_name))
    return drawings


def _assign_claims(data: Tensor, truth: Truth) -> tuple[Tensor | None, Tensor]:
    """Assign claims to the true examples as they are scored.

    Returns:
        Which values of a table are right, `true column`; None where the columns are not known. And
        the index of the claim of each true example, -1 where it has none.
    """
    if not truth.columns or truth.deviations is None:
        return None, find_modality(truth.modality).assign_claims(data, truth.data)
    right = table_metrics.compare_rows(data, truth.data, truth.columns, truth.deviations)
    assignment = table_metrics.assign_rows(right.sum(2))
    right_of_claims = right[torch.arange(len(assignment)), assignment.clamp_min(0)]
    return right_of_claims & (assignment >= 0)[:, None], assignment


def _reorder_claims(data: Tensor, assignment: Tensor | None) -> Tensor:
    """Return claims `example ...` in the order of the true ones; mid-grey where there is none."""
    if assignment is None:
        return data
    has_claim = (assignment >= 0).reshape(-1, *[1] * (data.ndim - 1))
    return torch.where(has_claim, data[assignment.clamp_min(0)], 0.5)


def _descent_steps(finding: Reconstruction, assignment: Tensor | None) -> tuple[Tensor | None, Sequence[int]]:
    """Return the dummy images that the attack kept during its descent, and their iterations."""
    snapshots, iterations = finding.snapshots, finding.snapshot_iterations
    if snapshots is None or iterations is None:
        return None, ()
    steps = snapshots if assignment is None else _reorder_snapshots(snapshots, assignment.expand(len(snapshots), -1))
    return steps, iterations.tolist()


def _reorder_snapshots(snapshots: Tensor, assignments: Tensor) -> Tensor:
    """Return claims `snapshot example ...` in the order of the true ones; mid-grey where there is none.

    Args:
        assignments: `snapshot true`, the index of a claim, -1 for none.
    """
    has_claim = (assignments >= 0).reshape(*assignments.shape, *[1] * (snapshots.ndim - 2))
    numbers = torch.arange(len(snapshots))[:, None]
    return torch.where(has_claim, snapshots[numbers, assignments.clamp_min(0)], 0.5)


def _certified_flags(finding: Reconstruction, assignment: Tensor | None) -> Sequence[bool]:
    """Return for each image whether the attack is sure of it; empty where it never says."""
    if finding.certified is None or isinstance(finding, Representatives):
        return ()
    if assignment is None:
        certified: list[bool] = finding.certified.tolist()
        return certified
    return [index >= 0 and bool(finding.certified[index]) for index in assignment.tolist()]


def _snapshot_psnr(snapshots: Tensor, true: Tensor) -> Tensor:
    """Return the mean PSNR in dB of each snapshot `snapshot example channel height width`."""
    grey = torch.full_like(true[:1], 0.5)
    means = list[Tensor]()
    for part in torch.split(snapshots, max(1, _SNAPSHOT_VALUES // snapshots[0].numel())):
        costs = metrics.image_misfits(part, true)
        assignments = [metrics.assign_by_costs(cost, lambda: metrics.image_misfits(grey, true)) for cost in costs]
        paired = _reorder_snapshots(part, torch.stack(assignments)).flatten(0, 1)
        psnr = metrics.psnr(paired, true.repeat(len(part), *[1] * (true.ndim - 1)))
        means += [values.mean() for values in torch.split(psnr, len(true))]
    return torch.stack(means)
