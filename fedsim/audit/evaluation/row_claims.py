"""Score what is claimed of rows whose ids are known: their labels, or columns of a feature party."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display, DisplayTable
from fedsim.audit.evaluation.evaluator import EvaluationContext, Evaluator, FindingMetadata, FindingSpec, Judgement
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.table_scores import draw_rows, likeliest_row
from fedsim.audit.evaluation.truth import Truth, draw_known_rows
from fedsim.base import table_metrics
from fedsim.base.errors import DataError
from fedsim.interfaces.metric import Metric
from fedsim.interfaces.row_findings import RowFeatures, RowLabels

_EXPLANATION = (
    "For rows whose ids are known, the floor of labels is the most frequent label of these rows, or chance, and that "
    "of columns the likeliest value of each column in public rows, or in those that the adversary knows, or values "
    "drawn from public rows; no row is assigned."
)


_EXCHANGED_AUC, _SURE_DEVIATIONS = 0.4, 4.0
"""An AUC below the one, and so many deviations of chance below 0.5, distinguishes labels but exchanges them."""


class RowLabelAuc(Metric):
    """Area under the ROC curve of the scores of rows for label 1, in one step; the mean over steps."""

    title = "label AUC in a step"
    higher_is_better = True
    lowest = 0.0
    highest = 1.0
    preference = 160
    explanations = (_EXPLANATION,)


class RowLabelAccuracy(Metric):
    """Share of the rows whose label is right, from the scores of all their steps."""

    title = "labels of rows right"
    higher_is_better = True
    is_share = True
    preference = 161
    explanations = (_EXPLANATION,)


class RowColumnsRight(Metric):
    """Share of the values of rows that are right, each in its row."""

    title = "columns of rows right"
    higher_is_better = True
    is_share = True
    preference = 162
    explanations = (_EXPLANATION,)


@dataclass(frozen=True)
class RowLabelsEvaluator(Evaluator[RowLabels]):
    """Judge of labels that a feature party claims."""

    finding = RowLabels

    def check_form(self, finding: RowLabels, spec: FindingSpec) -> None:
        """Check that there is a score for each class."""
        if spec.knowledge.num_classes is not None:
            spec.expect("scores of classes numbering", finding.scores.shape[1], spec.knowledge.num_classes)

    def judge(self, finding: RowLabels, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score labels by rows and by steps."""
        truth = context.case.truth(int(about["victim"]), None)
        if truth is None:
            return Judgement()
        labels = truth.labels[find_rows(finding.rows, truth, finding.counted)]
        return Judgement(scores=score_labels(finding, labels), examples=len(torch.unique(finding.rows)))


def score_labels(finding: RowLabels, labels: Tensor) -> list[Score]:
    """Score claimed labels.

    `row_label_auc`, of two classes, is the mean over steps with rows of both labels; each row of
    `per_image` is one step. `row_label_accuracy` adds up the scores of a row in all its steps. Neither
    is scored where labels are told apart and exchanged, which is no sign that they are safe.
    """
    scores = list[Score]()
    if finding.scores.shape[1] == 2:
        auc, num_deviations = _score_auc(finding, labels)
        if auc.value < _EXCHANGED_AUC and num_deviations < -_SURE_DEVIATIONS:
            reason = (
                f"the attack distinguishes labels but exchanges them (AUC {auc.value:.2g} in a step), so they do "
                "leak; set rarer_label of the attack to the label that fewer of these rows have"
            )
            return [Score.from_reason(name, reason) for name in ("row_label_auc", "row_label_accuracy")]
        scores.append(auc)
    ids, positions = torch.unique(finding.rows, return_inverse=True)
    sums = torch.zeros(len(ids), finding.scores.shape[1], dtype=torch.float64)
    sums = sums.index_add(0, positions, finding.scores.double())
    true = torch.zeros(len(ids), dtype=torch.long).scatter(0, positions, labels.long())
    # Of classes that score the same, one is drawn.
    are_best = sums == sums.max(1, keepdim=True).values
    in_range = true.clamp_max(sums.shape[1] - 1)
    right = are_best[torch.arange(len(ids)), in_range].double() / are_best.sum(1) * (true == in_range)
    majority = {"majority label": float(true.bincount().max()) / len(true)}
    return [
        *scores,
        Score.against_guesses("row_label_accuracy", float(right.mean()), majority, per_image=tuple(right.tolist())),
    ]


def _score_auc(finding: RowLabels, labels: Tensor) -> tuple[Score, float]:
    """Return the score, and by how many standard deviations of chance it is above 0.5."""
    from sklearn.metrics import roc_auc_score  # takes a second

    areas, variances = [], []
    for step in torch.unique(finding.steps).tolist():
        here = finding.steps == step
        step_labels = labels[here]
        if len(torch.unique(step_labels)) == 2:
            margins = (finding.scores[here, 1] - finding.scores[here, 0]).double()
            areas.append(float(roc_auc_score(step_labels, margins)))
            counts = torch.unique(step_labels, return_counts=True)[1].double()
            variances.append(float((counts.sum() + 1) / (12 * counts.prod())))  # of Mann and Whitney's U, by its range
    if not areas:
        return Score.from_reason("row_label_auc", "no step has rows of both labels"), 0.0
    mean = sum(areas) / len(areas)
    num_deviations = (mean - 0.5) * len(areas) / math.sqrt(sum(variances))
    return Score.against_guesses("row_label_auc", mean, {"chance": 0.5}, per_image=tuple(areas)), num_deviations


@dataclass(frozen=True)
class RowFeaturesEvaluator(Evaluator[RowFeatures]):
    """Judge of columns that a label party claims."""

    finding = RowFeatures

    def check_form(self, finding: RowFeatures, spec: FindingSpec) -> None:
        """Check the number of features, and that no row is claimed that was granted."""
        if spec.knowledge.columns is not None:
            spec.expect("features numbering", finding.data.shape[1], sum(spec.knowledge.columns))
        known = spec.knowledge.known_rows
        if known is not None:
            spec.expect("known rows numbering", int(torch.isin(finding.rows, known.rows).sum()), 0)

    def truth(self, finding: RowFeatures, about: FindingMetadata, case: Case) -> Truth | None:
        """Return the rows that are claimed, in the order of the claims."""
        truth = case.truth(int(about["victim"]), None)
        return None if truth is None else _select_claimed(truth, finding)

    def judge(self, finding: RowFeatures, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score the share of values that are right, beside guesses from public rows."""
        everything = context.case.truth(int(about["victim"]), None)
        if everything is None:
            return Judgement()
        truth = _select_claimed(everything, finding)
        public = context.public
        if public is None or truth.deviations is None:
            reason = "there are no public rows of these columns, whose deviations say which numbers are right"
            return Judgement(scores=[Score.from_reason("row_columns_right", reason)], examples=len(finding.rows))
        rng = context.guess_generator(int(about["victim"]))
        guesses = {
            "likeliest values": likeliest_row(public.data, truth.columns, truth.deviations).expand_as(finding.data),
            "random values by column": draw_rows(public.data, truth.columns, len(finding.rows), rng),
        }
        # What known rows say of the marginals is no news from embeddings.
        if count := int((about["knowledge"] or {}).get("known_rows", 0)):
            known = draw_known_rows(count, len(everything.data), context.case.seed, int(about["victim"]))
            row = likeliest_row(everything.data[known], truth.columns, truth.deviations)
            guesses["likeliest values of known rows"] = row.expand_as(finding.data)
        right = _right_values(finding.data, truth).mean(1)
        score = Score.against_guesses(
            "row_columns_right",
            float(right.mean()),
            {name: float(_right_values(guess, truth).mean()) for name, guess in guesses.items()},
            per_image=tuple(right.tolist()),
        )
        return Judgement(scores=[score], examples=len(finding.rows))

    def show(self, finding: RowFeatures, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display the share of right values of each column beside the likeliest value of these rows."""
        del tokens, metric
        if truth is None or truth.deviations is None:
            return Display()
        rows = []
        shares = _right_values(finding.data, truth).mean(0).tolist()
        best = likeliest_row(truth.data, truth.columns, truth.deviations).expand_as(truth.data)
        floors = _right_values(best, truth).mean(0).tolist()
        for index, (width, share, floor) in enumerate(zip(truth.columns, shares, floors, strict=True)):
            kind = "number" if width == 1 else f"{width} categories"
            rows.append((str(index), kind, share, floor))
        columns = ["column", "kind", "right", "likeliest value of these rows"]
        return Display(has_truth=True, tables=[DisplayTable(title="Columns", columns=columns, rows=rows)])


def _select_claimed(everything: Truth, finding: RowFeatures) -> Truth:
    """Return the true rows that are claimed, in the order of the claims."""
    indices = find_rows(finding.rows, everything, finding.counted)
    return Truth(
        data=everything.data[indices],
        labels=everything.labels[indices],
        columns=everything.columns,
        deviations=everything.deviations,
        modality=everything.modality,
        rows=finding.rows,
    )


def _right_values(claimed: Tensor, truth: Truth) -> Tensor:
    """Return `row column`, 1 where the value is right."""
    assert truth.deviations is not None
    return table_metrics.compare_aligned_rows(claimed, truth.data, truth.columns, truth.deviations).double()


def find_rows(rows: Tensor, truth: Truth, counted: int = 0) -> Tensor:
    """Return the position of each row in the truth.

    Args:
        truth: names the ids of its rows; without them they are counted from 0.
        counted: rows of each step, where messages name none and `rows` are positions; else 0.
    """
    if counted and (counted != len(truth.data) or truth.rows is not None):
        named = ", which names its rows" if truth.rows is not None else ""
        raise DataError(
            f"truth: messages name no rows, a step is about {counted}, and the file has {len(truth.data)}{named}; so "
            "it is unknown which are claimed. Send ids in an integer tensor 'rows', or write all rows of a step in "
            "their order and no ids"
        )
    ids = truth.rows if truth.rows is not None else torch.arange(len(truth.data))
    ordered, order = ids.sort()
    positions = torch.searchsorted(ordered, rows).clamp_max(len(ordered) - 1)
    missing = rows[ordered[positions] != rows]
    if len(missing):
        raise DataError(
            f"truth: row {int(missing[0])} is claimed, and the file does not have it; write ids with write_truth(..., "
            "rows=...)"
        )
    return order[positions]
