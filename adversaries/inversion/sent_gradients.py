"""The gradients that one client sent in several rounds, read when they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from adversaries.batch_norm import normalising_by_batch, trained_by_batch
from adversaries.scene import Scene, scene_of
from fedsim.attacks import Knowledge
from fedsim.errors import AttackError
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update, non_finite

log = logging.getLogger("fedsim." + __name__)


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What one client sent, round by round.

    Attributes:
        client: its id.
        rounds: in which it took part, ascending; at least one.
        read: its update in one of these rounds.
    """

    client: int
    rounds: Sequence[int]
    read: Callable[[int], Update]

    @classmethod
    def of(cls, transcript: Transcript, client: int) -> Self:
        """All that the transcript has of this client.

        Raises:
            AttackError: it took part in none of the rounds.
        """
        rounds = [number for number in transcript.rounds if client in transcript.clients(number)]
        if not rounds:
            raise AttackError(f"client {client} is in none of the rounds {transcript.rounds}; choose another victim")
        return cls(client=client, rounds=rounds, read=lambda number: transcript.update(number, client))

    def changed(self, change: Callable[[Update], Update]) -> Messages:
        """The same messages, each as `change` makes it."""
        return replace(self, read=lambda number: change(self.read(number)))


@dataclass(frozen=True, kw_only=True)
class SentGradients:
    """The gradients among a client's messages that can be matched.

    Attributes:
        messages: all of the client's.
        knowledge: with one network for all rounds.
        rounds: in which it sent a gradient that can be matched, ascending.
        sizes: N of these rounds, ascending, each once.
        by_batch: whether BatchNorm layers normalise by the batch.
    """

    messages: Messages
    knowledge: Knowledge
    rounds: Sequence[int]
    sizes: Sequence[int]
    by_batch: bool

    @classmethod
    def among(cls, messages: Messages, knowledge: Knowledge, by_batch: bool | None) -> Self:
        """Those of one client; where `by_batch` is None, as it trained.

        Raises:
            AttackError: it sent weights, or its first gradient cannot be matched.
        """
        sound, sizes = [], set()
        for number in messages.rounds:
            update = messages.read(number)
            fault = _fault(update)
            if fault and number == messages.rounds[0]:
                raise AttackError(
                    f"round {number}, client {messages.client}: {fault}, and its mini-batch is the one to be found; "
                    "leave the round out of adversary.rounds"
                )
            if fault:
                log.warning("round %d, client %d: %s; the round is left out", number, messages.client, fault)
            else:
                sound.append(number)
                sizes.add(update.num_examples)
        assert knowledge.model is not None
        model = knowledge.model().to(knowledge.device).eval()
        if by_batch is None:
            by_batch = trained_by_batch(messages.read(messages.rounds[0]), model)
        own = normalising_by_batch(model) if by_batch else model
        return cls(
            messages=messages,
            knowledge=replace(knowledge, model=lambda: own),
            rounds=sound,
            sizes=sorted(sizes),
            by_batch=by_batch,
        )

    @property
    def victim(self) -> int:
        """The client's id."""
        return self.messages.client

    def scene(self, number: int) -> Scene:
        """One round."""
        return scene_of(self.messages.read(number), self.knowledge, by_batch=self.by_batch)


def _fault(update: Update) -> str:
    """Why the gradient of a round cannot be matched, or an empty text.

    Raises:
        AttackError: weights were sent.
    """
    if update.gradient is None:
        raise AttackError(
            f"round {update.round}, client {update.client}: weights were sent, expected a gradient; attack rounds of "
            "FedSGD, or updates with another attack"
        )
    for state, what in ((update.before, "weight"), (update.gradient, "gradient of"), (update.after, "returned")):
        if broken := non_finite(state):
            return f"the {what} {broken[0]} holds NaN or infinite values"
    return "" if any(bool((slope != 0).any()) for slope in update.gradient.values()) else "the gradient is zero"


def of_other_labels(scenes: Sequence[Scene], labels: Tensor) -> list[Scene]:
    """Those whose last bias has a slope below 0, by more than a little noise, for a class that is not among `labels`.

    With cross-entropy that slope is p_c - n_c / b, so not below 0 for a class that does not occur.
    """
    first = scenes[0]
    layer = first.model.get_submodule(first.names[-1].rpartition(".")[0])
    if not isinstance(layer, nn.Linear) or layer.bias is None or labels.is_floating_point():
        return []
    absent = torch.ones(layer.out_features, dtype=torch.bool)
    absent[labels.cpu()] = False
    return [scene for scene in scenes if (scene.mean_gradient[-1].cpu()[absent] < -0.25 / len(labels)).any()]


def rounds_of(scenes: Sequence[Scene]) -> str:
    """The rounds of these scenes in words."""
    return in_words([scene.where.split(",")[0].removeprefix("round ") for scene in scenes])


def in_words(rounds: Sequence[int | str]) -> str:
    """Rounds as `round 3` or `rounds 1, 3, 4`."""
    return f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds))}"
