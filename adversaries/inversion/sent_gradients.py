"""The gradients that one client sent in several rounds, loaded on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from fedsim.base.errors import AttackError, list_rounds
from fedsim.interfaces.attack import Knowledge, Target, warn
from fedsim.inversion.batch_norm import copy_with_batch_statistics, used_batch_statistics
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.wire_format import Update, non_finite_names


@dataclass(frozen=True, kw_only=True)
class ClientUpdates:
    """Messages of one client, read round by round.

    Attributes:
        client: its id.
        rounds: in which it took part, ascending; at least one.
        read: function from one of these rounds to the update.
    """

    client: int
    rounds: Sequence[int]
    read: Callable[[int], Update]

    @classmethod
    def from_target(cls, target: Target) -> Self:
        """Collect the messages of a victim."""
        return cls(
            client=target.victim,
            rounds=target.participation_rounds(),
            read=lambda number: target.transcript.update(number, target.victim),
        )

    @classmethod
    def from_update(cls, update: Update) -> Self:
        """Return a single message."""
        return cls(client=update.client, rounds=[update.round], read=lambda number: update)

    def map_updates(self, change: Callable[[Update], Update]) -> ClientUpdates:
        """Return these messages with `change` applied to each update."""
        return replace(self, read=lambda number: change(self.read(number)))


@dataclass(frozen=True, kw_only=True)
class ClientGradients:
    """Those gradients of a client that can be matched, one inversion problem a round.

    Attributes:
        messages: all messages of the client.
        knowledge: whose model is one network for all rounds.
        rounds: with a gradient that can be matched, ascending.
        sizes: distinct N of these rounds, ascending.
        uses_batch_statistics: BatchNorm layers normalise by the batch.
    """

    messages: ClientUpdates
    knowledge: Knowledge
    rounds: Sequence[int]
    sizes: Sequence[int]
    uses_batch_statistics: bool

    @classmethod
    def from_messages(cls, messages: ClientUpdates, knowledge: Knowledge, use_batch_statistics: bool | None) -> Self:
        """Select the gradients that can be matched; warn of the others.

        Args:
            use_batch_statistics: BatchNorm layers normalise by the batch; None decides as the client trained.
        """
        usable_rounds, sizes = [], set()
        for number in messages.rounds:
            update = messages.read(number)
            fault = _describe_fault(update)
            if fault and number == messages.rounds[0]:
                raise AttackError(
                    f"round {number}, client {messages.client}: {fault}, and its mini-batch is the attacked one; "
                    "remove the round from adversary.rounds"
                )
            if fault:
                warn(f"round {number}, client {messages.client}: {fault}; the round is left out")
            else:
                usable_rounds.append(number)
                sizes.add(update.num_examples)

        # Build one network for all rounds.
        assert knowledge.model is not None
        model = knowledge.model().to(knowledge.device).eval()
        if use_batch_statistics is None:
            use_batch_statistics = used_batch_statistics(messages.read(messages.rounds[0]), model)
        network = copy_with_batch_statistics(model) if use_batch_statistics else model
        return cls(
            messages=messages,
            knowledge=replace(knowledge, model=lambda: network),
            rounds=usable_rounds,
            sizes=sorted(sizes),
            uses_batch_statistics=use_batch_statistics,
        )

    @property
    def victim(self) -> int:
        """Return the client's id."""
        return self.messages.client

    def build_problem(self, number: int) -> InversionProblem:
        """Build the inversion problem of one round."""
        return build_problem(
            self.messages.read(number), self.knowledge, use_batch_statistics=self.uses_batch_statistics
        )


def _describe_fault(update: Update) -> str:
    """Say why a gradient cannot be matched; return an empty string if it can."""
    if update.gradient is None:
        raise AttackError(
            f"{update.name}: weights were sent, expected a gradient; attack rounds of "
            "FedSGD, or updates with another attack"
        )
    for state, kind in ((update.before, "weight"), (update.gradient, "gradient of"), (update.after, "returned")):
        if broken := non_finite_names(state):
            return f"the {kind} {broken[0]} holds NaN or infinite values"
    is_zero = not any(bool((gradient != 0).any()) for gradient in update.gradient.values())
    return "the gradient is zero" if is_zero else ""


def problems_with_other_labels(problems: Sequence[InversionProblem], labels: Tensor) -> list[InversionProblem]:
    """Return the problems whose gradient indicates a class that is not among `labels`.

    With cross-entropy the last bias has the gradient p_c - n_c / B for class c, which is negative
    only if the class occurs; a margin allows for noise.
    """
    first = problems[0]
    layer = first.model.get_submodule(first.parameter_names[-1].rpartition(".")[0])
    if not isinstance(layer, nn.Linear) or layer.bias is None or labels.is_floating_point():
        return []
    absent = torch.ones(layer.out_features, dtype=torch.bool)
    absent[labels.cpu()] = False
    return [problem for problem in problems if (problem.mean_gradient[-1].cpu()[absent] < -0.25 / len(labels)).any()]


def describe_problem_rounds(problems: Sequence[InversionProblem]) -> str:
    """Name the rounds of these problems in a sentence."""
    return list_rounds([problem.where.split(",")[0].removeprefix("round ") for problem in problems])
