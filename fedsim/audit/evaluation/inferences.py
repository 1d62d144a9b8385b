"""Score what an attack infers of each record: its source, or a sensitive attribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.evaluation.evaluator import EvaluationContext, Evaluator, FindingMetadata, FindingSpec, Judgement
from fedsim.audit.evaluation.imputation import IMPUTED_GUESS, Imputation, ImputedCategories
from fedsim.audit.evaluation.score import Score
from fedsim.base.errors import DataError
from fedsim.federation.experiment import Experiment
from fedsim.federation.overlap import hash_records_at
from fedsim.interfaces.findings import Inference
from fedsim.interfaces.metric import Metric


class SourceAccuracy(Metric):
    """Share of the records that are traced to a client which holds them."""

    title = "source accuracy"
    higher_is_better = True
    is_share = True
    preference = 140
    explanations = ("For sources, the floor is the score of a client drawn at random.",)


class AttributeAccuracy(Metric):
    """Share of the records whose sensitive attribute is inferred."""

    title = "attribute accuracy"
    higher_is_better = True
    is_share = True
    preference = 170
    explanations = (
        "For attributes, the floor is the better of two guesses that use no message: the same value for all records "
        "(the most frequent one among the victim's own), and imputation, which learns from public records to predict "
        "the attribute from the other columns and the label. “Worse than imputation” means that imputation scores "
        "higher than the attack.",
    )


class AttributeBalancedAccuracy(AttributeAccuracy):
    """Mean over the values of a sensitive attribute of the share of their records that are right."""

    title = "attribute balanced accuracy"
    preference = 171


@dataclass(frozen=True)
class InferenceEvaluator(Evaluator[Inference]):
    """Judge of inferred sources and attributes of records."""

    finding = Inference

    def check_form(self, finding: Inference, spec: FindingSpec) -> None:
        """Check that there are scores of all granted records, for candidates that exist."""
        partial_records = spec.knowledge.partial_records
        if finding.of == "source":
            records, count = spec.knowledge.records, spec.clients
        else:
            records = partial_records
            count = len(partial_records.categories) if partial_records else None
        if records is not None:
            spec.expect("scores of records numbering", len(finding.scores), len(records.inputs))
        candidates = finding.candidates.tolist()
        if count is not None and max(candidates) >= count:
            spec.expect("candidates", candidates, f"numbers from 0 to {count - 1}")

    def fact_about(self, finding: Inference) -> str:
        """Return the records that it is about."""
        return "records" if finding.of == "source" else "partial_records"

    def judge(self, finding: Inference, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score an inference, see `score_inference`."""
        victim, experiment = int(about["victim"]), context.case.require_experiment()
        if finding.of == "source":
            # Reading the records of a client takes long; they serve all findings.
            records: dict[int, list[bytes]] = context.cached_values.setdefault("held records", {})
            for client in {victim, *finding.candidates.tolist()}.difference(records):
                indices = experiment.data.indices(client)[0]
                records[client] = list(hash_records_at(experiment.dataset.train, indices))
            scores = score_inference(
                finding, _holders(finding, records, victim), has_sent=_find_senders(finding, about, context)
            )
        else:
            column = str(about["partial_records"])
            inputs, _ = experiment.data.train(victim)
            true_values = experiment.dataset.column(column).values(inputs)
            imputed = _impute(experiment, context, column, victim)
            scores = score_inference(finding, true_values, imputed)
        return Judgement(scores=scores, examples=len(finding.scores))


def _holders(finding: Inference, records: Mapping[int, Sequence[bytes]], victim: int) -> Tensor:
    """Return `record candidate`, whether the candidate holds the record or one that equals it."""
    candidate_records = [set(records[candidate]) for candidate in finding.candidates.tolist()]
    rows = []
    for record in records[victim]:
        rows.append([record in candidate_set for candidate_set in candidate_records])
    return torch.tensor(rows)


def _find_senders(finding: Inference, about: FindingMetadata, context: EvaluationContext) -> Tensor:
    """Return `candidate`, whether it sent something in the attacked rounds: others are ruled out without an attack."""
    senders = set[int]()
    for number in about["rounds"]:
        for reply in context.transcript.header(int(number)).replies:
            senders.update(reply.senders)
    return torch.tensor([candidate in senders for candidate in finding.candidates.tolist()])


def _impute(experiment: Experiment, context: EvaluationContext, column: str, victim: int) -> ImputedCategories | None:
    """Impute this column of the victim's records from public ones; None where there are none."""
    dataset = experiment.dataset
    if not len(dataset.test):
        return None
    # Fitting takes seconds, and serves all victims.
    imputations: dict[str, Imputation] = context.cached_values.setdefault("imputation", {})
    if column not in imputations:
        imputations[column] = Imputation.fit(dataset.test, dataset.column(column), context.case.seed)
    return imputations[column].guess(*experiment.data.train(victim))


def score_inference(
    inference: Inference,
    truth: Tensor,
    imputed: ImputedCategories | None = None,
    has_sent: Tensor | None = None,
) -> list[Score]:
    """Score what an attack infers of each record of the victim.

    Where several candidates are the likeliest, the score is that expected of drawing one of them.

    For sources, `source_accuracy` is the share of records whose claimed client holds the record;
    the floor is one of the candidates drawn at random, or of those that sent something where not
    all did, and the ceiling is lower than 1 where no candidate holds some record.

    For an attribute, `attribute_accuracy` is the share of records whose category is right. Its floor
    is the better of two guesses: the most frequent category among the victim's own records, which
    takes its data to know, and the categories that public records of the same kind impute, see
    `fedsim.audit.evaluation.imputation`. `attribute_balanced_accuracy` is the mean of that share over the
    categories that the victim has, so that a rare one counts as much as a frequent one; saying the
    same of all records gets 1 over the number of those categories.

    Args:
        truth: for sources `record candidate`, whether the candidate holds the record, candidates in
            the order of the inference; for an attribute `record`, the index of its category.
        imputed: for an attribute, the guess from public records; None where there are none, and
            then the name of the floor says so.
        has_sent: for sources `candidate`, whether it sent something in the attacked rounds; None where all did.
    """
    likeliest = inference.scores == inference.scores.max(1, keepdim=True).values
    # `record candidate`, the probability that the candidate is claimed.
    claims = likeliest.double() / likeliest.sum(1, keepdim=True)
    if inference.of == "source":
        _check_shape(inference, truth, tuple(inference.scores.shape))
        return [_source_accuracy(claims, truth, has_sent)]
    _check_shape(inference, truth, tuple(inference.scores.shape[:1]))
    if imputed is not None:
        _check_shape(inference, imputed.likeliest, tuple(truth.shape))
    return _attribute_accuracy(claims, inference.candidates, truth, imputed)


def _check_shape(inference: Inference, truth: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(truth.shape) != expected:
        raise DataError(
            f"truth: the attack infers the {inference.of} of {expected[0]} records among "
            f"{len(inference.candidates)} candidates, but the truth is of shape {tuple(truth.shape)}, expected "
            f"{expected}"
        )


def _source_accuracy(claims: Tensor, holders: Tensor, has_sent: Tensor | None) -> Score:
    holds = holders.double()
    accuracy = (claims * holds).sum(1).mean().item()
    ceiling = holders.bool().any(1).double().mean().item()
    guess = {f"one of {holds.shape[1]} clients at random": holds.mean().item()}
    if has_sent is not None and has_sent.any() and not has_sent.all():
        guess[f"one of {int(has_sent.sum())} clients that sent something"] = holds[:, has_sent].mean().item()
    return Score.against_guesses("source_accuracy", accuracy, guess, ceiling=ceiling)


def _attribute_accuracy(
    claims: Tensor, candidates: Tensor, truth: Tensor, imputed: ImputedCategories | None
) -> list[Score]:
    counts = truth.bincount()
    present = counts.nonzero().flatten().tolist()

    def balanced_accuracy(right: Tensor) -> float:
        accuracies = [right[truth == category].mean() for category in present]
        return torch.stack(accuracies).mean().item()

    right = (claims * (candidates == truth[:, None])).sum(1)
    guesses = {"majority attribute": counts.max().item() / len(truth)}
    balanced_guesses = {"one attribute for all": 1 / len(present)}
    if imputed is not None:
        guesses[IMPUTED_GUESS] = (imputed.likeliest == truth).double().mean().item()
        balanced_guesses[IMPUTED_GUESS] = balanced_accuracy((imputed.balanced == truth).double())
    return [
        _score_against_guesses("attribute_accuracy", right.mean().item(), guesses),
        _score_against_guesses("attribute_balanced_accuracy", balanced_accuracy(right), balanced_guesses),
    ]


def _score_against_guesses(metric: str, value: float, guesses: Mapping[str, float]) -> Score:
    if IMPUTED_GUESS not in guesses:
        note = "; there are no public data to impute from"
        guesses = {f"{name}{note}": floor for name, floor in guesses.items()}
    return Score.against_guesses(metric, value, guesses)
