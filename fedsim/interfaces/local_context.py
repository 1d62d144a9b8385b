"""What a hook of a client's defense may use besides what it replaces: one argument, `LocalContext`."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from fedsim.base.errors import RunError
from fedsim.base.randomness import generator, seed_globals
from fedsim.recording.payloads import State

Memory = MutableMapping[str, Tensor]
"""Tensors by name that a client keeps for one defense between rounds."""
DefenseKey = tuple[str, int]
"""Name of a defense's class, and how many defenses of that name come before it."""


def copy_tensors(state: State) -> dict[str, Tensor]:
    """Copy the tensors of `state`, so that writing to the copies changes no other tensor."""
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class LocalStep(Protocol):
    """A local step that is under way: its weights, and gradients of its mini-batch."""

    def weights(self) -> State:
        """Return copies of the parameters before this step, by name."""

    def gradient_at(self, weights: State) -> State:
        """Return the mean gradient of the step's mini-batch at other `weights`, by name."""

    def loss_at(self, weights: State) -> float:
        """Return the mean loss of the step's mini-batch at other `weights`."""

    def input_gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient of the mean loss by `inputs`, at the weights before the step."""


@dataclass(kw_only=True)
class LocalContext:
    """The moment in which a hook is called: one client, one round, one local step.

    A sharpness-aware step, as a defense:

        def on_gradient(self, gradient, context):
            norm = torch.cat([tensor.flatten() for tensor in gradient.values()]).norm().clamp_min(1e-12)
            weights = context.weights
            uphill = {name: weights[name] + self.rho * tensor / norm for name, tensor in gradient.items()}
            return context.gradient_at(uphill)

    Attributes:
        rng: the only source of randomness of this hook, keyed by seed, round, client and defense,
            so that no other hook and no other defense changes what it draws.
        round: number of the round, counted from 1; 0 in a mod of an app whose server does not say it.
        step: number of the local step in this round, counted from 0; 0 outside of local training.
        broadcast: w_t, by name, as the server sent it. It is copied when it is first read, for other
            clients and the server's recording share what was given here.
        memory: tensors by name that this client keeps for this defense alone, none in its first
            round. What is in it when the round ends is there again in the next round that the
            client takes part in. A round in which the client fails leaves it as it was; one in
            which `on_data` has it send nothing does not.
    """

    rng: torch.Generator
    round: int = 1
    step: int = 0
    broadcast: State = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)
    local_step: LocalStep | None = None
    common_key: tuple[int | str, ...] | None = None

    def __post_init__(self) -> None:
        self._shared_broadcast = vars(self).pop("broadcast")

    if not TYPE_CHECKING:  # type checkers would take any misspelt attribute for one of these

        def __getattr__(self, name: str) -> State:
            if name != "broadcast":
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            self.broadcast = copy_tensors(self._shared_broadcast)
            return self.broadcast

    def __setattr__(self, name: str, value: object) -> None:
        # `context.memory |= {...}` assigns the mapping that it has changed.
        if name == "memory" and vars(self).get("memory", value) is not value:
            raise RunError(
                "context.memory: a mapping that takes its place would be lost; change it in place, as in "
                "context.memory['name'] = tensor"
            )
        super().__setattr__(name, value)

    @property
    def weights(self) -> State:
        """Return copies of the current parameters by name: w_t outside of local training."""
        if self.local_step is not None:
            return self.local_step.weights()
        return copy_tensors(self._shared_broadcast)

    @cached_property
    def common_rng(self) -> torch.Generator:
        """Return a generator that is the same for all clients in this round.

        The server could have it, too. A defense that uses it says so by `draws_in_common`.

        Raises:
            RunError: the defense does not declare it, or clients cannot agree here.
        """
        if self.common_key is None:
            raise RunError(
                "context.common_rng: clients agree on nothing here; let the defense's `draws_in_common` be true, and "
                "use it in fedsim's own ClientApp"
            )
        return generator(*self.common_key)

    def gradient_at(self, weights: State) -> State:
        """Compute the mean gradient of this step's mini-batch at other weights.

        Layers are in the modes of training; running statistics and what later steps draw stay as
        they are. Of the objective this is the loss alone, without a proximal term.

        Args:
            weights: parameters by name; those that are left out stay as they are.

        Returns:
            The gradient of each trained parameter, by name.

        Raises:
            RunError: no local step with a batch is under way, or another defense sees the gradients
                of single examples, which a second gradient of the batch would get round.
        """
        return self._running_step("gradient_at").gradient_at(weights)

    def loss_at(self, weights: State) -> float:
        """Compute the mean loss of this step's mini-batch at other weights, as `gradient_at` does.

        Args:
            weights: parameters by name; those that are left out stay as they are.

        Returns:
            The loss, in the unit of the task's.

        Raises:
            RunError: as for `gradient_at`.
        """
        return self._running_step("loss_at").loss_at(weights)

    def input_gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the gradient of the mean loss by `inputs`, for adversarial examples.

        Args:
            inputs: `example ...` in model units.
            labels: `example`.

        Returns:
            A tensor of the shape of `inputs`.

        Raises:
            RunError: no local step is under way.
        """
        return self._running_step("input_gradient").input_gradient(inputs, labels)

    def _running_step(self, method: str) -> LocalStep:
        if self.local_step is None:
            raise RunError(
                f"context.{method}: no local step of fedsim's training is under way; call it in 'on_batch' or "
                "'on_gradient'"
            )
        return self.local_step


@dataclass(frozen=True, kw_only=True)
class ClientRound:
    """One client's part in one round, from which the contexts of its defenses' hooks are made.

    Attributes:
        key: key of all its randomness in this round.
        number: of the round.
        broadcast: w_t.
        read_memory: returns the memory of a defense; a new one each time if left out.
        common_key: key of what all clients of the round draw alike; None where they cannot agree.
    """

    key: tuple[int | str, ...]
    number: int = 1
    broadcast: State = field(default_factory=dict)
    read_memory: Callable[[DefenseKey], Memory] | None = None
    common_key: tuple[int | str, ...] | None = None

    def make_context(self, hook: str, defense_key: DefenseKey, draws_in_common: bool) -> LocalContext:
        """Make the context of one hook of one defense.

        Args:
            hook: name of the hook.
            defense_key: key of the defense, see `pair_with_keys`.
            draws_in_common: whether the defense uses `common_rng`.
        """
        common_key = None
        if draws_in_common and self.common_key is not None:
            common_key = (*self.common_key, *defense_key)
        return LocalContext(
            rng=generator(*self.key, "defense", hook, *defense_key),
            round=self.number,
            broadcast=self.broadcast,
            memory={} if self.read_memory is None else self.read_memory(defense_key),
            common_key=common_key,
        )

    def seed_globals(self, defense: object, *key: int | str) -> AbstractContextManager[None]:
        """Seed the global generators for a hook that may run where no dropout key seeds them.

        What a library draws from them is then the same on every engine, and another for each client. Fedsim's own
        defenses draw from their context alone, so that nothing is seeded for them, which would take as long as they.

        Args:
            defense: whose hook it is.
            key: name of the hook, and what distinguishes its calls in this round.
        """
        if type(defense).__module__.partition(".")[0] == "clients":
            return nullcontext()
        return seed_globals(*self.key, "globals of a defense", *key)
