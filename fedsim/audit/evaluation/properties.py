"""Score how well an attack infers whether many of the examples of a message have a property."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display
from fedsim.audit.evaluation.evaluator import (
    VICTIMS,
    EvaluationContext,
    Evaluator,
    FindingMetadata,
    FindingSpec,
    Judgement,
)
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError
from fedsim.federation.experiment import Experiment
from fedsim.federation.properties import Property
from fedsim.interfaces.findings import PropertyPresence
from fedsim.interfaces.metric import Metric

_WITH_PROPERTY, _WITHOUT_PROPERTY = "score_with_property", "score_without_property"
"""Curves of the mean score by round, of messages with and without the property."""


class MessageAuc(Metric):
    """How often messages of a victim and those of clients of the other kind are in the right order."""

    title = "property of messages, AUC"
    higher_is_better = True
    lowest = 0.0
    highest = 1.0
    evidence = "compared victims"
    preference = 160
    explanations = (
        "For a property, the AUC is how often a victim's messages (or its mean score) and those of clients of the "
        "other kind are in the right order; its floor is chance. The floor of the accuracy is the same answer for all "
        "victims, the better one, which is always right where they are of one kind. What counts is to which of the "
        "two shares told apart the true share of examples with the property is nearer.",
    )


class MessageAccuracy(Metric):
    """Share of a victim's messages for which the likelier claim about the property is true."""

    title = "property of messages, accuracy"
    higher_is_better = True
    is_share = True
    evidence = "few messages"
    preference = 161
    explanations = MessageAuc.explanations


class SenderAuc(MessageAuc):
    """How often the mean scores of a victim and of clients of the other kind are in the right order."""

    title = "property of clients, AUC"
    preference = 162


class SenderAccuracy(MessageAccuracy):
    """Whether the likelier claim about the property of all examples of a victim is true."""

    title = "property of clients, accuracy"
    preference = 163


_ROUNDING = 1e-6
"""Rounding error of shares, which are kept in single precision."""


@dataclass(frozen=True)
class PropertyEvaluator(Evaluator[PropertyPresence]):
    """Judge of claims whether the examples behind messages have a property."""

    finding = PropertyPresence

    def check_form(self, finding: PropertyPresence, spec: FindingSpec) -> None:
        """Check that the messages are of clients that exist."""
        if spec.clients is not None:
            spec.expect_below("messages of clients", finding.clients, spec.clients)

    def fact_about(self, finding: PropertyPresence) -> str:
        """Return the records that show the property."""
        del finding
        return "property_records"

    def truth(self, finding: PropertyPresence, about: FindingMetadata, case: Case) -> Truth:
        """Return the share of examples with the property behind each message.

        It is the data `message 1`; labels are 1 where the share is nearer to the larger one.
        """
        experiment = case.require_experiment()
        train = experiment.dataset.train
        has_property = _granted_property(experiment, about).values_of(train, torch.arange(len(train)))
        shares: list[float] = []
        for client, number in zip(finding.clients.tolist(), finding.rounds.tolist(), strict=True):
            indices = experiment.attacked_indices(client, number)
            shares.append(float(has_property[indices].double().mean()))
        data = torch.tensor(shares)
        return Truth(data=data[:, None], labels=_is_larger_share(finding, data).long())

    def judge(self, finding: PropertyPresence, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score messages and clients, see `score_messages` and `score_clients`."""
        experiment = context.case.require_experiment()
        _check_messages_were_sent(finding, context)
        truth, victim = self.truth(finding, about, context.case), int(about["victim"])
        of_victim = finding.clients == victim
        if not of_victim.any():
            raise DataError(f"truth: the attack scores no message of client {victim}, whom it is about")
        larger_shares = _larger_shares_by_victim(finding, experiment, about, context)
        scores = score_messages(finding.scores, truth.labels.bool(), of_victim, larger_shares)
        scores += _client_scores(finding, experiment, about, victim)
        return Judgement(scores=scores, examples=int(of_victim.sum()))

    def show(self, finding: PropertyPresence, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display the mean score by round of messages with and without the property."""
        del tokens, metric
        if truth is None:
            return Display()
        has_property = truth.labels.bool()
        curves = {}
        for name, selected in ((_WITH_PROPERTY, has_property), (_WITHOUT_PROPERTY, ~has_property)):
            if selected.any():
                curves[name] = _mean_scores_by_round(finding, selected)
        return Display(has_truth=True, curves=curves)


def _check_messages_were_sent(finding: PropertyPresence, context: EvaluationContext) -> None:
    """Raise DataError if a scored message was never sent, as by a client that failed."""
    for client, number in zip(finding.clients.tolist(), finding.rounds.tolist(), strict=True):
        if context.transcript.header(number).find_reply(client) is None:
            raise DataError(f"client {client}: sent nothing in round {number}, which the attack scores")


def _granted_property(experiment: Experiment, about: FindingMetadata) -> Property:
    return Property.from_name(experiment.dataset, str(about["knowledge"]["property_records"]))


def _is_larger_share(finding: PropertyPresence, shares: Tensor) -> Tensor:
    """Return whether each share is at least as near to the larger of the two shares."""
    return shares.double() >= finding.shares.double().mean() - _ROUNDING


def _larger_shares_by_victim(
    finding: PropertyPresence, experiment: Experiment, about: FindingMetadata, context: EvaluationContext
) -> Tensor:
    """Return `victim`, for each victim how often its messages have the larger share."""
    headers = [context.transcript.header(int(number)) for number in about["rounds"]]
    frequencies = []
    for client in _all_victims(about):
        rounds = [header.round for header in headers if header.find_reply(client) is not None]
        groups = (experiment.attacked_indices(client, number) for number in rounds)
        shares = _property_shares(experiment, about, groups)
        frequencies.append(_is_larger_share(finding, shares).double().mean())
    return torch.stack(frequencies)


def _all_victims(about: FindingMetadata) -> list[int]:
    return list(about.get(VICTIMS, [about["victim"]]))


def _property_shares(experiment: Experiment, about: FindingMetadata, groups: Iterable[Tensor]) -> Tensor:
    """Return for each group of training examples, given by indices, the share with the property."""
    granted, train = _granted_property(experiment, about), experiment.dataset.train
    return torch.tensor([float(granted.values_of(train, indices).double().mean()) for indices in groups])


def _mean_scores_by_round(finding: PropertyPresence, selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounds of the selected messages, and the mean score in each."""
    rounds, scores = finding.rounds[selected], finding.scores[selected].double()
    numbers = torch.unique(rounds)
    return numbers, torch.stack([scores[rounds == number].mean() for number in numbers])


def _client_scores(
    finding: PropertyPresence, experiment: Experiment, about: FindingMetadata, victim: int
) -> list[Score]:
    """Score the mean over each client's messages against all of its training data."""
    clients = torch.unique(finding.clients)
    means = [finding.scores[finding.clients == client].double().mean() for client in clients]

    def has_larger_share(clients: Iterable[int]) -> Tensor:
        groups = (torch.from_numpy(experiment.data.indices(client)[0]) for client in clients)
        return _is_larger_share(finding, _property_shares(experiment, about, groups))

    return score_clients(
        torch.stack(means),
        has_larger_share(clients.tolist()),
        clients == victim,
        has_larger_share(_all_victims(about)),
    )


def score_messages(scores: Tensor, has_property: Tensor, of_victim: Tensor, victims: Tensor) -> list[Score]:
    """Score claims that examples behind messages have a property in the larger of two shares.

    The truth is the share that is nearer. `property_accuracy` is the share of the victim's messages
    for which the likelier claim is true; even chances count half. Its floor is the average over all
    victims of the better one of the two answers given to each message, which takes no message, but
    the truth, to know. Where all victims are of one kind it is 1: a claim about them then reveals
    nothing, whatever the other clients are.

    `property_auc` is how often a message of the victim and those of the other kind, of any client
    and round, are in the right order, a mean over its messages; ties count half. Over clients that
    sent equally many messages, its mean is the area under the ROC curve over all messages. (These
    are the structural components of that area in [DeLong1988].)

    Args:
        scores: `message`, in [0, 1].
        has_property: `message`, whether its share is nearer to the larger one.
        of_victim: `message`, whether it is the victim's.
        victims: `victim`, for each victim of the attack, the share of its messages to which the
            larger one is nearer.
    """
    return _score_claims("property", "message", scores, has_property, of_victim, victims)


def score_clients(scores: Tensor, has_property: Tensor, of_victim: Tensor, victims: Tensor) -> list[Score]:
    """Score clients as `score_messages` does messages.

    The metrics are `property_client_auc` and `property_client_accuracy`.

    Args:
        scores: `client`, the mean over its messages.
        has_property: `client`, whether the share in all its training data is nearer to the larger
            one.
        of_victim: `client`, whether it is the victim.
        victims: `victim`, likewise for the training data of each victim of the attack.
    """
    return _score_claims("property_client", "client", scores, has_property, of_victim, victims)


def _score_claims(
    metric: str, unit: str, scores: Tensor, has_property: Tensor, of_victim: Tensor, victims: Tensor
) -> list[Score]:
    if not scores.shape == has_property.shape == of_victim.shape:
        raise DataError(f"truth: the attack scores {len(scores)} {unit}s, the truth is about {len(has_property)}")
    right = torch.where(scores == 0.5, 0.5, ((scores > 0.5) == has_property).double())
    larger_share = float(victims.double().mean())
    guess = {"one answer for all victims": max(larger_share, 1 - larger_share)}
    accuracy = Score.against_guesses(f"{metric}_accuracy", float(right[of_victim].mean()), guess)
    if has_property.all() or not has_property.any():
        kind = "the larger" if has_property.all() else "the smaller"
        reason = (
            f"each of the {len(has_property)} {unit}s has the property in {kind} share, so there is nothing to "
            "distinguish"
        )
        return [Score.from_reason(f"{metric}_auc", reason), accuracy]
    # Compare each score of the victim (rows) with all: 1 in the right order, -1 in the wrong.
    expected_sign = torch.where(has_property[of_victim], 1, -1)[:, None]
    order = (scores[of_victim][:, None] - scores).sign() * expected_sign
    is_other_kind = has_property[of_victim][:, None] != has_property
    in_order = ((order + 1) / 2 * is_other_kind).sum(1) / is_other_kind.sum(1)
    area = Score.against_guesses(f"{metric}_auc", float(in_order.mean()), {"chance": 0.5})
    return [area, accuracy]
