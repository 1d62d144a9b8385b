"""How well an attack tells whether many of the examples behind a message have a property."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.errors import DataError
from fedsim.evaluation.case import Case
from fedsim.evaluation.kind import VICTIMS, About, Bench, Evaluator, Judgement, Owed, Shown
from fedsim.evaluation.score import Score
from fedsim.evaluation.truth import Truth
from fedsim.experiments.build import Experiment
from fedsim.experiments.properties import Property
from fedsim.findings import PropertyPresence

log = logging.getLogger(__name__)

WITH, WITHOUT = "score_with_property", "score_without_property"
"""Curves of the mean score by round, of messages that the evaluator knows to be of either kind."""

_ROUNDING = 1e-6
"""Of shares, which are kept in single precision."""


@dataclass(frozen=True)
class Properties(Evaluator[PropertyPresence]):
    """Whether the examples behind messages have a property."""

    finding = PropertyPresence

    def form(self, finding: PropertyPresence, owed: Owed) -> None:
        """Clients that exist."""
        if owed.clients is not None:
            owed.expect_below("messages of clients", finding.clients, owed.clients)

    def truth(self, finding: PropertyPresence, about: About, case: Case) -> Truth | None:
        """Of each message: `message 1` data, the share of examples with the property, and labels, 1 for the larger."""
        if case.experiment is None:
            return None
        experiment, kind = case.experiment, _property(case.experiment, about)
        flags = kind.of(experiment.dataset.train, torch.arange(len(experiment.dataset.train)))
        pairs = zip(finding.clients.tolist(), finding.rounds.tolist(), strict=True)
        shares = torch.tensor([float(flags[experiment.behind(*pair)].double().mean()) for pair in pairs])
        return Truth(data=shares[:, None], labels=_many(finding, shares).long())

    def judge(self, finding: PropertyPresence, about: About, bench: Bench) -> Judgement:
        """See `score_messages` and `score_clients`."""
        truth, victim = self.truth(finding, about, bench.case), int(about["victim"])
        experiment = bench.case.experiment
        if truth is None or experiment is None:
            log.warning(
                "%s, client %d: not scored: only an experiment says what the victim held", about["attack"], victim
            )
            return Judgement()
        mine = finding.clients == victim
        if not mine.any():
            raise DataError(f"truth: the attack scores no message of client {victim}, whom it is about")
        attacked = _attacked(finding, experiment, about, bench)
        found = score_messages(finding.scores, truth.labels.bool(), mine, attacked)
        return Judgement(scores=[*found, *_of_clients(finding, experiment, about, victim)], examples=int(mine.sum()))

    def show(self, finding: PropertyPresence, truth: Truth | None, tokens: Sequence[str], metric: str) -> Shown:
        """Mean scores by round, apart for messages with the property and for those without."""
        del tokens, metric
        if truth is None:
            return Shown()
        kinds = {WITH: truth.labels.bool(), WITHOUT: ~truth.labels.bool()}
        curves = {name: _by_round(finding, which) for name, which in kinds.items() if which.any()}
        return Shown(known=True, curves=curves)


def _property(experiment: Experiment, about: About) -> Property:
    return Property.named(experiment.dataset, str(about["knowledge"]["property_records"]))


def _many(finding: PropertyPresence, shares: Tensor) -> Tensor:
    """Whether each share is nearer to the larger one that the attack tells apart, or as near."""
    return shares.double() >= finding.shares.double().mean() - _ROUNDING


def _attacked(finding: PropertyPresence, experiment: Experiment, about: About, bench: Bench) -> Tensor:
    """`victim`, of each whom the attack was made on, how often its messages in these rounds are of the larger share."""
    headers, found = [bench.transcript.header(int(number)) for number in about["rounds"]], []
    for client in _victims(about):
        sent = [header.round for header in headers if header.reply_of(client) is not None]
        shares = _shares(experiment, about, (experiment.behind(client, number) for number in sent))
        found.append(_many(finding, shares).double().mean())
    return torch.stack(found)


def _victims(about: About) -> list[int]:
    return list(about.get(VICTIMS, [about["victim"]]))


def _shares(experiment: Experiment, about: About, places: Iterable[Tensor]) -> Tensor:
    """Of each group of training examples at these places, the share with the property."""
    kind, train = _property(experiment, about), experiment.dataset.train
    return torch.tensor([float(kind.of(train, own).double().mean()) for own in places])


def _by_round(finding: PropertyPresence, which: Tensor) -> tuple[Tensor, Tensor]:
    rounds, scores = finding.rounds[which], finding.scores[which].double()
    found = torch.unique(rounds)
    return found, torch.stack([scores[rounds == number].mean() for number in found])


def _of_clients(finding: PropertyPresence, experiment: Experiment, about: About, victim: int) -> list[Score]:
    """Of each client the mean over its messages, beside all that it trains on."""
    clients = torch.unique(finding.clients)
    scores = torch.stack([finding.scores[finding.clients == client].double().mean() for client in clients])

    def held(which: Iterable[int]) -> Tensor:
        places = (torch.from_numpy(experiment.data.indices(client)[0]) for client in which)
        return _many(finding, _shares(experiment, about, places))

    return score_clients(scores, held(clients.tolist()), clients == victim, held(_victims(about)))


def score_messages(scores: Tensor, held: Tensor, mine: Tensor, victims: Tensor) -> list[Score]:
    """Judge how likely the examples behind messages are claimed to have a property in the larger of two shares.

    The truth is the share that is nearer. `property_accuracy` is the share of the victim's messages for which the
    likelier claim is true; even chances count half. Its floor is what the better one of the two answers gets on average
    over all victims when it is given to each message, which takes no message, but the truth to know. Where victims are
    of one kind alone it is 1: what an attack says of them tells nothing, whatever the other clients are.

    `property_auc` is how often a message of the victim and those of the other kind, of any client and round, are in
    the right order, a mean over its messages; level scores count half. Of clients that sent equally many messages, the
    mean over all of them is the area under the ROC curve over all messages. (These are the structural components of
    that area in DeLong et al.: Comparing the Areas under Two or More Correlated Receiver Operating Characteristic
    Curves, Biometrics 1988.)

    Args:
        scores: `message`, in [0, 1].
        held: `message`, whether its share is nearer to the larger one.
        mine: `message`, whether it is the victim's.
        victims: `victim`, of each whom the attack was made on, in which share of its messages the larger one is nearer.

    Raises:
        DataError: their numbers differ.
    """
    return _scores("property", "message", scores, held, mine, victims)


def score_clients(scores: Tensor, held: Tensor, mine: Tensor, victims: Tensor) -> list[Score]:
    """The same of clients, `property_client_auc` and `property_client_accuracy`, of whom one is the victim.

    Args:
        scores: `client`, the mean over its messages.
        held: `client`, of all that it trains on.
        mine: `client`.
        victims: `victim`, likewise of all that it trains on.
    """
    return _scores("property_client", "client", scores, held, mine, victims)


def _scores(metric: str, unit: str, scores: Tensor, held: Tensor, mine: Tensor, victims: Tensor) -> list[Score]:
    if not scores.shape == held.shape == mine.shape:
        raise DataError(f"truth: the attack scores {len(scores)} {unit}s, the truth is about {len(held)}")
    right = torch.where(scores == 0.5, 0.5, ((scores > 0.5) == held).double())
    often = float(victims.double().mean())
    guess = {"the same for all victims": max(often, 1 - often)}
    accuracy = Score.beside(f"{metric}_accuracy", float(right[mine].mean()), guess, ceiling=1.0)
    if held.all() or not held.any():
        kind = "the larger" if held.all() else "the smaller"
        why = f"each of the {len(held)} {unit}s has the property in {kind} share, so that nothing can be told apart"
        return [Score.not_computed(f"{metric}_auc", why), accuracy]
    apart = (scores[mine][:, None] - scores).sign() * torch.where(held[mine], 1, -1)[:, None]  # own, any
    others = held[mine][:, None] != held
    in_order = ((apart + 1) / 2 * others).sum(1) / others.sum(1)
    return [Score.beside(f"{metric}_auc", float(in_order.mean()), {"chance": 0.5}, ceiling=1.0), accuracy]
