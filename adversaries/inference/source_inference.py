"""SIA: source inference, which client a record comes from [Hu2021]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from adversaries.loadable_network import LoadableNetwork
from adversaries.local_models.model_sources import (
    ModelAttack,
    compute_losses,
    compute_outputs,
    decoded_models,
    returned_weights,
    unpack_records,
)
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.loss_term import prediction_loss
from fedsim.base.papers import cite
from fedsim.interfaces.attack import (
    GLOBAL,
    LAST_RETURNED,
    OPTIMAL,
    Knowledge,
    Paper,
    Progress,
    Target,
    warn,
)
from fedsim.interfaces.findings import Inference, client_ids
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State

RETURNED = "returned"
"""The source of an attack that reads the models returned by all clients, round by round."""


@dataclass(frozen=True, kw_only=True)
class SourceInference(ModelAttack):
    """Claim that each known record belongs to the client whose model has the smallest loss on it.

    With `source = "returned"`:

    1. In each inspected round, compute each record's loss on the model of every client
       (`_RecordLosses`). The client with the smallest loss wins the round; clients that tie all
       win.
    2. Claim the client that wins most rounds ([Driouich2022], App. C.2). The score is the number of
       rounds won, plus a fraction that decides ties in favour of the smaller mean loss.

    With every other source each candidate client has one model, and the score is minus the record's
    loss on it.

    Candidates are all clients of the inspected rounds, or, for decoded models, those whose model
    was decoded. A client whose model was not decoded cannot be claimed, so its records are all
    attributed to other clients: to exclude them, the adversary would have to know which records
    these are.

    BatchNorm layers whose running statistics were not shared normalise all known records as one
    batch, although each candidate's model was trained on at most a part of them.

    Args:
        source: `returned` (Hu et al.), `last-returned` takes the last model of each candidate,
            which clients that are sampled return in different rounds; else the title of an attack
            in the same file that decodes local models, or `optimal` for the true optimal local
            models, which only the evaluator has. The global model is the same for all, so it is
            refused.
        decide: about `each` record by itself, as in Hu et al.; or about all known records
            `together`, by their mean loss, which takes it as known that they are of one client. So
            does the released code of [Driouich2022], with the client's whole data set.

    References:
        [Hu2021], Sect. IV, as completed in [Driouich2022], Sect. 2.3 and App. C.2. Differs: rounds
        that are not inspected do not count, and in a round only the clients that took part in it
        are compared; ties are broken as above, which the paper leaves open; Hu et al. themselves
        report the best round in hindsight.
    """

    source: str = RETURNED
    decide: Literal["each", "together"] = "each"

    paper: ClassVar[Paper] = cite("Hu2021")
    vector_targets: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "records"})
    clients_needed: ClassVar[int] = 2
    transcript_sources: ClassVar[tuple[str, ...]] = (RETURNED, LAST_RETURNED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == GLOBAL:
            raise ConfigError(
                f"source: the global model is the same for all clients and cannot tell them apart, expected "
                f"{RETURNED}, {LAST_RETURNED}, {OPTIMAL} or the title of an attack, got '{self.source}'"
            )

    @torch.no_grad()
    def _run(self, target: Target, progress: Progress) -> Inference:
        candidates = self._candidate_clients(target)
        if target.victim not in candidates:
            warn(
                f"{self.title}: '{self.source}' decoded no model of client {target.victim}, so its "
                "records are claimed to be of others"
            )
        record_losses = _RecordLosses(target.knowledge, are_of_one_client=self.decide == "together")
        if self.source != RETURNED:
            columns = []
            for client in candidates:
                state, where = self._source_state(replace(target, victim=client))
                columns.append(record_losses.compute(state, where))
            losses_by_client = torch.stack(columns, 1)
            progress(1, 1, {"objective": float(losses_by_client.amin(1).mean())})
            return _source_claim(candidates, -losses_by_client)
        wins = self._count_wins(target.transcript, candidates, record_losses, progress)
        return _source_claim(candidates, wins)

    def _count_wins(
        self, transcript: Transcript, candidates: list[int], record_losses: _RecordLosses, progress: Progress
    ) -> Tensor:
        """Count the rounds that each client wins, `record client`, plus less than one for ties."""
        wins = torch.zeros(record_losses.num_records, len(candidates))
        loss_sums, num_rounds = torch.zeros_like(wins), torch.zeros(len(candidates))
        for index, number in enumerate(transcript.rounds):
            clients = transcript.clients(number)
            if not clients:
                continue
            columns = []
            for client in clients:
                where = f"round {number}, client {client}"
                columns.append(record_losses.compute(returned_weights(transcript.update(number, client)), where))
            losses_by_client = torch.stack(columns, 1)

            smallest = losses_by_client.amin(1, keepdim=True)
            client_columns = torch.tensor([candidates.index(client) for client in clients])
            wins[:, client_columns] += (losses_by_client == smallest).float()
            loss_sums[:, client_columns] += losses_by_client
            num_rounds[client_columns] += 1
            progress(index + 1, len(transcript.rounds), {"objective": float(losses_by_client.amin(1).mean())})
        mean_losses = loss_sums / num_rounds
        return wins + 0.5 / (1 + mean_losses.clamp_min(0))

    def _candidate_clients(self, target: Target) -> list[int]:
        """Return the ids of candidate clients, ascending; they are the same for every victim."""
        transcript = target.transcript
        if self.builds_on is None:
            candidates = {client for number in transcript.rounds for client in transcript.clients(number)}
            remedy = "took part in the inspected rounds; inspect rounds with more"
        else:
            candidates = set(decoded_models(target.knowledge, self.source))
            remedy = (
                f"have a model that '{self.source}' decoded; attack more victims, or see why it failed for the others"
            )
        if len(candidates) < 2:
            raise AttackError(
                f"expected at least 2 candidates for the source of a record, but {len(candidates)} {remedy}"
            )
        return sorted(candidates)


class _RecordLosses:
    """Losses of the known records on one model after another.

    Args:
        are_of_one_client: whether each record is given the mean loss of all of them.
    """

    def __init__(self, knowledge: Knowledge, *, are_of_one_client: bool) -> None:
        self._are_of_one_client = are_of_one_client
        assert knowledge.records is not None
        assert knowledge.loss is not None
        self._loss = prediction_loss(knowledge.loss)
        self._inputs, self._labels = unpack_records(knowledge.records, knowledge.device)
        self._network = LoadableNetwork(knowledge)

    @property
    def num_records(self) -> int:
        return len(self._inputs)

    def compute(self, state: State, where: str) -> Tensor:
        """Return each record's loss on the model of `state`, `record`."""
        logits = compute_outputs(self._network.load(state, where), self._inputs, where)
        # A loss is a mean over examples by contract, so a batch of one gives the example's loss.
        example_loss = vmap(lambda output, label: self._loss(output[None], label[None]))
        losses = compute_losses(example_loss, logits, self._labels, where).float().cpu()
        return losses.mean().expand_as(losses) if self._are_of_one_client else losses


def _source_claim(candidates: list[int], scores: Tensor) -> Inference:
    return Inference(of="source", candidates=client_ids(candidates), scores=scores)
