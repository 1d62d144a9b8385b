"""SIA: which client does a record come from (Hu et al. 2021)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from adversaries.local_models.model_sources import ModelAttack, Network, known, losses, models_of, outputs, returned
from adversaries.local_updates import rounds_of
from fedsim.attacks import GLOBAL, LAST_RETURNED, OPTIMAL, Knowledge, Paper, Progress
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, Inference, client_ids
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import State

log = logging.getLogger("fedsim." + __name__)

RETURNED = "returned"
"""All that the clients returned, round by round."""


@dataclass(frozen=True, kw_only=True)
class SourceInference(ModelAttack):
    """Claim that each known record belongs to the client whose model has the smallest loss on it.

    With `source = "returned"` there is such a client in each inspected round, and the record is claimed to be of the
    client that wins most rounds (Driouich et al., App. C.2); the score is how many rounds it won. All that share the
    smallest loss of a round have won it, and where two won equally many, a fraction for the smaller mean loss decides.
    With every other source each candidate has one model, and the score is minus the record's loss on it.

    Candidates are all clients of the inspected rounds, or, for decoded models, those whose model was decoded. A client
    whose model was not decoded cannot be claimed, so all of its records are claimed to be of others: to leave them out,
    the adversary would have to know whose they are.

    BatchNorm layers whose running statistics were not shared normalise all known records as one batch, which a
    candidate's model was trained on parts of, if at all.

    Args:
        source: `returned` (Hu et al.), `last-returned` takes the last model of each candidate, which clients that are
            sampled return in different rounds; else the title of an attack in the same file that decodes local models,
            or `optimal` for the true optimal local models, which only the evaluator has. The global model is the
            same for all, so it is refused.

    References:
        Hu et al.: Source Inference Attacks in Federated Learning, ICDM 2021, Sect. IV, as completed in Driouich et al.:
        Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022, Sect. 2.3 and App. C.2. Differs:
        rounds that are not inspected do not count, and in a round only those do who took part in it; ties are broken as
        above, which the paper leaves open; Hu et al. themselves report the best round in hindsight.
    """

    source: str = RETURNED

    paper: ClassVar[Paper] = Paper(
        title="Source Inference Attacks in Federated Learning",
        authors="Hu, Salcic, Sun, Dobbie, Zhang",
        venue="ICDM",
        year=2021,
        url="https://arxiv.org/abs/2109.05659",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"model", "loss", "records"})
    messages: ClassVar[tuple[str, ...]] = (RETURNED, LAST_RETURNED)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source == GLOBAL:
            raise ConfigError(
                f"source: the global model is the same for all clients and cannot tell them apart, expected "
                f"{RETURNED}, {LAST_RETURNED}, {OPTIMAL} or the title of an attack, got '{self.source}'"
            )

    @torch.no_grad()
    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        assert knowledge.records is not None
        rounds_of(transcript, victim, in_groups=self.builds_on is not None)
        candidates = self._candidates(transcript, knowledge)
        if victim not in candidates:
            log.warning(
                "%s: '%s' decoded no model of client %d, so its records are claimed to be of others",
                self.called,
                self.source,
                victim,
            )
        judge = _Judge(knowledge)
        if self.source != RETURNED:
            columns = [judge.losses(*self._state(transcript, knowledge, client)) for client in candidates]
            found = torch.stack(columns, 1)
            progress(1, 1, {"objective": float(found.amin(1).mean())})
            return _claim(candidates, -found)
        wins = torch.zeros(len(knowledge.records.inputs), len(candidates))
        sums, rounds = torch.zeros_like(wins), torch.zeros(len(candidates))
        for place, number in enumerate(transcript.rounds):
            present = transcript.clients(number)
            if not present:
                continue
            columns = [
                judge.losses(returned(transcript.update(number, client)), f"round {number}, client {client}")
                for client in present
            ]
            found, own = torch.stack(columns, 1), torch.tensor([candidates.index(client) for client in present])
            wins[:, own] += (found == found.amin(1, keepdim=True)).float()
            sums[:, own] += found
            rounds[own] += 1
            progress(place + 1, len(transcript.rounds), {"objective": float(found.amin(1).mean())})
        return _claim(candidates, wins + 0.5 / (1 + (sums / rounds).clamp_min(0)))

    def _candidates(self, transcript: Transcript, knowledge: Knowledge) -> list[int]:
        """Ids, ascending; who of them the records are of makes no difference."""
        if self.builds_on is None:
            found = {client for number in transcript.rounds for client in transcript.clients(number)}
            told = "took part in the inspected rounds; inspect rounds with more"
        else:
            found = set(models_of(knowledge, self.source))
            told = (
                f"have a model that '{self.source}' decoded; attack more victims, or see why it failed for the others"
            )
        if len(found) < 2:
            raise AttackError(f"expected at least 2 candidates for the source of a record, but {len(found)} {told}")
        return sorted(found)


class _Judge:
    """The known records, and a network that each model is put into in turn."""

    def __init__(self, knowledge: Knowledge) -> None:
        assert knowledge.records is not None
        assert knowledge.loss is not None
        self._loss = knowledge.loss
        self._inputs, self._labels = known(knowledge.records, knowledge.device)
        self._network = Network(knowledge)

    def losses(self, state: State, where: str) -> Tensor:
        """`record`, the loss of each on one model."""
        made = outputs(self._network.holding(state, where), self._inputs, where)
        # A loss is a mean by contract, so that of one record is the mean over it alone.
        each = vmap(lambda output, label: self._loss(output[None], label[None]))
        return losses(each, made, self._labels, where).float().cpu()


def _claim(candidates: list[int], scores: Tensor) -> Inference:
    return Inference(of="source", candidates=client_ids(candidates), scores=scores)
