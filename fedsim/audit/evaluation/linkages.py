"""Score how well an attack finds the messages of one client among those of later rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display, DisplayTable
from fedsim.audit.evaluation.evaluator import (
    EvaluationContext,
    Evaluator,
    FindingMetadata,
    FindingSpec,
    Judgement,
)
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError
from fedsim.interfaces.findings import Linkage
from fedsim.interfaces.metric import Metric

_EXPLANATION = (
    "For links, the floor is the better one of chance among the messages of a round and of choosing by N, which a "
    "server sees in clear: the message whose N is nearest to that of the victim's first message."
)


class LinkedShare(Metric):
    """Share of the victim's later rounds in which its message is the best scored one; ties count less."""

    title = "messages linked"
    higher_is_better = True
    is_share = True
    evidence = "few messages"
    preference = 164
    explanations = (_EXPLANATION,)


class LinkAuc(Metric):
    """How often a later message of the victim is scored above one of another client."""

    title = "links, AUC"
    higher_is_better = True
    lowest = 0.0
    highest = 1.0
    evidence = "compared victims"
    preference = 165
    explanations = (_EXPLANATION,)


@dataclass(frozen=True)
class LinkageEvaluator(Evaluator[Linkage]):
    """Judge of claims which messages of later rounds the victim sent; the recording says who did."""

    finding = Linkage

    def check_form(self, finding: Linkage, spec: FindingSpec) -> None:
        """Check that the messages are of clients that exist."""
        if spec.clients is not None:
            spec.expect_below("messages of clients", finding.clients, spec.clients)

    def truth(self, finding: Linkage, about: FindingMetadata, case: Case) -> Truth:
        """Return for each message whether the victim sent it, as labels and as data `message 1`."""
        is_victims = _mark_messages(finding, int(about["victim"]))
        return Truth(data=is_victims.float()[:, None], labels=is_victims.long())

    def judge(self, finding: Linkage, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score the links of the victim's message, see `score_links`."""
        victim, transcript = int(about["victim"]), context.transcript
        first = transcript.header(finding.first_round).find_reply(victim)
        if first is None:
            raise DataError(f"client {victim}: sent nothing in round {finding.first_round}, which the attack links")
        # Messages with an N nearer to that of the first message score higher, where the server knows N.
        knows_counts = (about.get("knowledge") or {}).get("num_examples") is not False
        closeness = []
        for client, number in zip(finding.clients.tolist(), finding.rounds.tolist(), strict=True):
            reply = transcript.header(number).find_reply(client)
            if reply is None:
                raise DataError(f"client {client}: sent nothing in round {number}, which the attack scores")
            closeness.append(-abs(reply.num_examples - first.num_examples))
        is_victims = _mark_messages(finding, victim)
        scores = score_links(
            finding.scores.double(), torch.tensor(closeness) if knows_counts else None, finding.rounds, is_victims
        )
        return Judgement(scores=scores, examples=int(is_victims.sum()))

    def show(self, finding: Linkage, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display for each round which message scores highest, and what the victim's scores."""
        del tokens, metric
        if truth is None:
            return Display()
        is_victims, rows = truth.labels.bool(), list[tuple[str | float, ...]]()
        for number in torch.unique(finding.rounds).tolist():
            in_round = finding.rounds == number
            victims_scores = finding.scores[in_round & is_victims]
            highest = finding.scores[in_round].max()
            rank = (
                float((finding.scores[in_round] > victims_scores[0]).sum()) + 1
                if len(victims_scores)
                else "took no part"
            )
            rows.append((str(number), float(highest), float(victims_scores[0]) if len(victims_scores) else "", rank))
        columns = ["round", "highest score", "score of the victim's message", "its rank"]
        return Display(has_truth=True, tables=[DisplayTable(title="Links by round", columns=columns, rows=rows)])


def _mark_messages(finding: Linkage, victim: int) -> Tensor:
    return torch.tensor([client == victim for client in finding.clients.tolist()])


def score_links(scores: Tensor, closeness: Tensor | None, rounds: Tensor, is_victims: Tensor) -> list[Score]:
    """Score which messages are the victim's.

    Args:
        scores: `message`, higher where the victim is the likelier sender.
        closeness: `message`, likewise by N alone; None where the adversary does not know N.
    """
    shares, shares_by_size, chances = list[float](), list[float](), list[float]()
    for number in torch.unique(rounds[is_victims]).tolist():
        in_round = rounds == number
        shares.append(_hit_share(scores[in_round], is_victims[in_round]))
        if closeness is not None:
            shares_by_size.append(_hit_share(closeness[in_round], is_victims[in_round]))
        chances.append(float(is_victims[in_round].double().mean()))
    if not shares:
        reason = "the victim took part in no later round, so nothing can be linked"
        return [Score.from_reason("linked", reason), Score.from_reason("link_auc", reason)]
    if is_victims.all():
        reason = "no other client took part in the later rounds, so every message is the victim's"
        return [Score.from_reason("linked", reason), Score.from_reason("link_auc", reason)]
    guesses, areas = {"chance": float(np.mean(chances))}, {"chance": 0.5}
    if closeness is not None:
        guesses["message with the nearest N"] = float(np.mean(shares_by_size))
        areas["message with the nearest N"] = _area(closeness, is_victims)
    linked = Score.against_guesses("linked", float(np.mean(shares)), guesses)
    area = Score.against_guesses("link_auc", _area(scores, is_victims), areas)
    return [linked, area]


def _hit_share(scores: Tensor, is_victims: Tensor) -> float:
    """Return the chance of a draw among the highest scores of a round to be the victim's message."""
    highest = scores == scores.max()
    return float((highest & is_victims).sum() / highest.sum())


def _area(scores: Tensor, is_victims: Tensor) -> float:
    """Return how often a message of the victim is scored above another one; ties count half."""
    from sklearn.metrics import roc_auc_score  # takes a second

    return float(roc_auc_score(is_victims.numpy(), scores.numpy()))
