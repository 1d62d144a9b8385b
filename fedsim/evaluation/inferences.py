"""What an attack infers of each record of the victim: whose it is, or a sensitive attribute."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import DataError
from fedsim.evaluation.imputation import IMPUTED, Guess, Imputation
from fedsim.evaluation.kind import About, Bench, Evaluator, Judgement, Owed
from fedsim.evaluation.score import Score
from fedsim.experiments.build import Experiment
from fedsim.experiments.twins import contents
from fedsim.findings import Inference

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inferences(Evaluator[Inference]):
    """Sources and attributes of records."""

    finding = Inference

    def form(self, finding: Inference, owed: Owed) -> None:
        """As many records as were granted, and candidates that exist."""
        partial = owed.knowledge.partial_records
        records = owed.knowledge.records if finding.of == "source" else partial
        if records is not None:
            owed.expect("scores of records numbering", len(finding.scores), len(records.inputs))
        known = owed.clients if finding.of == "source" else len(partial.categories) if partial else None
        if known is not None and max(candidates := finding.candidates.tolist()) >= known:
            owed.expect("candidates", candidates, f"numbers from 0 to {known - 1}")

    def judge(self, finding: Inference, about: About, bench: Bench) -> Judgement:
        """See `score_inference`."""
        victim, experiment = int(about["victim"]), bench.case.experiment
        if experiment is None:
            log.warning(
                "%s, client %d: not scored: only an experiment says what the victim held", about["attack"], victim
            )
            return Judgement()
        if finding.of == "source":
            held: dict[int, list[bytes]] = bench.kept.setdefault("held records", {})
            for client in {victim, *finding.candidates.tolist()}.difference(held):
                held[client] = list(contents(experiment.dataset.train, experiment.data.indices(client)[0]))
            scores = score_inference(finding, _holders(finding, held, victim))
        else:
            column = str(about["partial_records"])
            own = experiment.dataset.column(column).values(experiment.data.train(victim)[0])
            scores = score_inference(finding, own, _imputed(experiment, bench, column, victim))
        return Judgement(scores=scores, examples=len(finding.scores))


def _holders(finding: Inference, held: Mapping[int, Sequence[bytes]], victim: int) -> Tensor:
    """`record candidate`, whether the candidate holds the record, or one that equals it."""
    shares = [set(held[candidate]) for candidate in finding.candidates.tolist()]
    return torch.tensor([[record in share for share in shares] for record in held[victim]])


def _imputed(experiment: Experiment, bench: Bench, column: str, victim: int) -> Guess | None:
    """What public records say of this column of the victim's; None where no records are public."""
    dataset = experiment.dataset
    if not len(dataset.test):
        return None
    learnt: dict[str, Imputation] = bench.kept.setdefault("imputation", {})  # takes seconds, and serves all victims
    if column not in learnt:
        learnt[column] = Imputation.learnt(dataset.test, dataset.column(column), bench.case.seed)
    return learnt[column].guess(*experiment.data.train(victim))


def score_inference(inference: Inference, truth: Tensor, imputed: Guess | None = None) -> list[Score]:
    """Judge what an attack infers of each record of the victim.

    Where several candidates are the likeliest, each counts by chance alone: as if one of them were drawn.

    Of sources, `source_accuracy` is the share of records whose claimed client holds the record; the floor is one of the
    candidates drawn at random, the ceiling lower than 1 where nobody among the candidates holds a record.

    Of an attribute, `attribute_accuracy` is the share of records whose category is right; its floor is the better of
    two guesses: the most frequent category among the victim's own records, which takes its data to know, and what
    public records of the same kind say of each of them, see `fedsim.evaluation.imputation`.
    `attribute_balanced_accuracy` is the mean of that share over the categories that the victim has, so that a rare one
    counts as much as a frequent one; saying the same of all records gets 1 over the number of those categories.

    Args:
        truth: of sources `record candidate`, whether the candidate holds the record, candidates in the order of the
            inference; of an attribute `record`, the index of its category.
        imputed: of an attribute, the guess from public records; None where there are none, which the floor then says.

    Raises:
        DataError: the inference is about other records or candidates than the truth.
    """
    likeliest = inference.scores == inference.scores.max(1, keepdim=True).values
    chosen = likeliest.double() / likeliest.sum(1, keepdim=True)  # record candidate: probability of being claimed
    if inference.of == "source":
        _check_shape(inference, truth, tuple(inference.scores.shape))
        return [_source_accuracy(chosen, truth)]
    _check_shape(inference, truth, tuple(inference.scores.shape[:1]))
    if imputed is not None:
        _check_shape(inference, imputed.likeliest, tuple(truth.shape))
    return _attribute_accuracy(chosen, inference.candidates, truth, imputed)


def _check_shape(inference: Inference, truth: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(truth.shape) != expected:
        raise DataError(
            f"truth: the attack infers the {inference.of} of {expected[0]} records among "
            f"{len(inference.candidates)} candidates, but the truth is of shape {tuple(truth.shape)}, expected "
            f"{expected}"
        )


def _source_accuracy(chosen: Tensor, holders: Tensor) -> Score:
    holds = holders.double()
    right = (chosen * holds).sum(1).mean().item()
    ceiling = holders.bool().any(1).double().mean().item()
    guess = {f"one of {holds.shape[1]} clients at random": holds.mean().item()}
    return Score.beside("source_accuracy", right, guess, ceiling=ceiling)


def _attribute_accuracy(chosen: Tensor, candidates: Tensor, truth: Tensor, imputed: Guess | None) -> list[Score]:
    counts = truth.bincount()
    present = counts.nonzero().flatten().tolist()

    def balanced(right: Tensor) -> float:
        return torch.stack([right[truth == category].mean() for category in present]).mean().item()

    right = (chosen * (candidates == truth[:, None])).sum(1)
    guesses = {"majority attribute": counts.max().item() / len(truth)}
    balanced_guesses = {"one attribute for all": 1 / len(present)}
    if imputed is not None:
        guesses[IMPUTED] = (imputed.likeliest == truth).double().mean().item()
        balanced_guesses[IMPUTED] = balanced((imputed.balanced == truth).double())
    return [
        _against_guesses("attribute_accuracy", right.mean().item(), guesses),
        _against_guesses("attribute_balanced_accuracy", balanced(right), balanced_guesses),
    ]


def _against_guesses(metric: str, value: float, guesses: Mapping[str, float]) -> Score:
    if IMPUTED not in guesses:
        guesses = {f"{name}; there are no public data to impute from": floor for name, floor in guesses.items()}
    return Score.beside(metric, value, guesses, ceiling=1.0)
