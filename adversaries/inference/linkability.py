"""Linkability: which messages of later rounds are of the client that sent this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import (
    CLIENT,
    Attack,
    Knowledge,
    Outcome,
    Paper,
    Progress,
    RoundsNeeded,
    Target,
    VictimTask,
    run_sequentially,
    warn,
)
from fedsim.interfaces.findings import Linkage, client_ids
from fedsim.recording.wire_format import State, Update

_SKETCH_SIZE = 1 << 16
"""Numbers that are kept of an update, whatever its size."""
_ROUNDS_KEPT = 2
_Fingerprints = Callable[[Target, int], tuple[list[int], Tensor]]
"""Function that returns the senders of a round and their fingerprints, `sender feature`."""


@dataclass(frozen=True, kw_only=True)
class Linkability(Attack):
    """Claim which messages of later rounds the sender of the victim's first message sent.

    Clients that go by another pseudonym in each round are linked by what their data have in common
    from round to round, without any data or model:

    1. From each pseudo-gradient of a round, subtract their mean, which is what the training of all
       clients has in common, and divide by the norm (`_compute_fingerprints`).
    2. Compare the messages of a later round with those of the victim's first round by cosine.
    3. The score of a message is its cosine with the victim's message, less its largest one with the
       message of anybody else, who would explain it better.

    The ids in a recording only name messages here: no score depends on them. So recordings with
    control variates or a linear term (SCAFFOLD, FedDyn) are refused, as removing these takes all
    that a client sent before.

    References:
        [Orekondy2018]: updates of one user are alike. Differs: they train a classifier of users on
        updates whose senders are known, or a network that embeds updates; here the cosine decides,
        which takes one message of each. An update of more than 65 536 numbers is sketched
        [Charikar2002], which keeps cosines to about one in 256.
    """

    paper: ClassVar[Paper] = cite("Orekondy2018")
    vector_targets: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = 2
    needs_num_examples: ClassVar[bool] = False
    needs_client_ids: ClassVar[bool] = False

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that add terms which depend on what each sent before."""
        del knowledge
        if update.gradient_move is not None:
            raise _added_terms_error("in each round")

    def _run(self, target: Target, progress: Progress) -> Linkage:
        return self._link_messages(target, progress, self._compute_fingerprints)

    def _run_several(self, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Attack one victim after the other; those of the same rounds read their messages once."""
        cached = dict[tuple[str, int], tuple[list[int], Tensor]]()

        def read_fingerprints(target: Target, number: int) -> tuple[list[int], Tensor]:
            key = (str(target.transcript.folder), number)
            if key not in cached:
                cached[key] = self._compute_fingerprints(target, number)
            return cached[key]

        return run_sequentially(tasks, lambda task: self._link_messages(task.target, task.progress, read_fingerprints))

    def _link_messages(self, target: Target, progress: Progress, fingerprints_of: _Fingerprints) -> Linkage:
        first = target.participation_rounds()[0]
        if target.transcript.adds_known_terms(first):
            raise _added_terms_error(f"round {first}")
        later = [number for number in target.transcript.rounds if number > first]
        senders, references = fingerprints_of(target, first)
        if target.victim not in senders:
            target.read_update(first)  # says what is wrong with it
        of_victim = torch.tensor([sender == target.victim for sender in senders], device=references.device)
        clients, rounds, scores = list[int](), list[int](), list[Tensor]()
        for count, number in enumerate(later, start=1):
            candidates, fingerprints = fingerprints_of(target, number)
            if not candidates:
                continue
            cosines = references @ fingerprints.T
            score = cosines[of_victim][0]
            if len(senders) > 1:
                score = score - cosines[~of_victim].amax(0)
            clients += candidates
            rounds += [number] * len(candidates)
            scores.append(score.cpu())
            progress(count, len(later), {"objective": float(scores[-1].max())})
        if not scores:
            raise AttackError(
                f"client {target.victim}: no message after round {first} can be read, so there is nothing to link; "
                "attack further rounds (adversary.rounds)"
            )
        return Linkage(
            first_round=first, clients=client_ids(clients), rounds=torch.tensor(rounds), scores=torch.cat(scores)
        )

    def _compute_fingerprints(self, target: Target, number: int) -> tuple[list[int], Tensor]:
        """Return the senders of a round whose updates can be read, and what sets each apart."""
        senders, rows = list[int](), list[Tensor]()
        for client in target.transcript.clients(number):
            try:
                update = replace(target, victim=client).read_update(number)
            except AttackError as error:
                warn(f"{self.title}: leaves a message out: {error}")
                continue
            senders.append(client)
            rows.append(_sketch(update.pseudo_gradient).to(target.knowledge.device))
        if not rows:
            return [], torch.empty(0, 0)
        updates = torch.stack(rows)
        # Updates of unlike sizes would be unlike without this, and the mean that of the largest.
        updates = torch.nn.functional.normalize(updates, dim=1)
        if len(updates) > 1:
            updates = torch.nn.functional.normalize(updates - updates.mean(0), dim=1)
        return senders, updates


def _added_terms_error(where: str) -> AttackError:
    return AttackError(
        f"{where}: clients add control variates, or a linear term, to their gradients, and removing them requires the "
        "earlier messages of the same client, which this attack has to find; link messages of another algorithm"
    )


def _sketch(gradient: State) -> Tensor:
    """Return the numbers of an update; of many, sums of some with random signs [Charikar2002]."""
    parts = [tensor.flatten().float() for tensor in gradient.values() if tensor.is_floating_point()]
    values = torch.cat(parts)
    if len(values) <= _SKETCH_SIZE:
        return values
    buckets, signs = _draw_sketch(len(values))
    return torch.zeros(_SKETCH_SIZE).index_add_(0, buckets, values * signs)


@lru_cache(maxsize=_ROUNDS_KEPT)
def _draw_sketch(size: int) -> tuple[Tensor, Tensor]:
    """Return the bucket and the sign of each number; all updates of a size have the same."""
    generator = torch.Generator().manual_seed(size)
    buckets = torch.randint(_SKETCH_SIZE, (size,), generator=generator)
    signs = torch.randint(2, (size,), generator=generator) * 2.0 - 1.0
    return buckets, signs
