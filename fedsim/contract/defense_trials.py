"""Trials of a defense's hooks on small random states, as a client and training would call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.contract.checks import CheckedPlugin, expect
from fedsim.interfaces.defense import (
    HOOKS,
    Defense,
    Participation,
    overrides,
)
from fedsim.interfaces.defense_calls import (
    apply_on_batch,
    apply_on_data,
    apply_on_examples,
    apply_on_features,
    apply_on_gradient,
    apply_on_update,
)
from fedsim.interfaces.defense_checks import QuadraticStep
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State, non_finite_names
from fedsim.training.cohort import LocalData
from fedsim.training.local_round import LocalRound
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

EXAMPLES, BATCH_SIZE, ROUNDS = 6, 3, 3


@dataclass(frozen=True)
class _HookCase:
    """Call of one hook with test data.

    Attributes:
        hook: name of the hook.
        apply: applies the hook to a state; the inputs of `on_data` and `on_batch` do not depend on
            it.
        apply_nothing: gives the same result as `apply` without the defense.
    """

    hook: str
    apply: Callable[[State, torch.Generator], State]
    apply_nothing: Callable[[State], State]


def overridden_hooks(defense: Defense, number: int = 0, memory: Memory | None = None) -> list[_HookCase]:
    """Return a test case for each hook that `defense` overrides, after `number` rounds, with what it remembers."""

    def new_context(rng: torch.Generator) -> LocalContext:
        return make_context(rng, defense, number, memory)

    def call_on_data(state: State, rng: torch.Generator) -> State:
        indices = apply_on_data(defense, _make_local_round(), new_context(rng))
        return {"places": indices.float()}

    def call_on_batch(state: State, rng: torch.Generator) -> State:
        inputs, labels = apply_on_batch(defense, *make_batch(BATCH_SIZE), new_context(rng))
        return {"inputs": inputs, "labels": labels.float()}

    def call_on_examples(state: State, rng: torch.Generator) -> State:
        parameters = random_state()
        # Poisson sampling may draw an empty batch.
        no_gradients = {name: tensor.new_zeros(0, *tensor.shape) for name, tensor in state.items()}
        result = apply_on_examples(defense, no_gradients, 3.0, parameters, new_context(rng))
        expect(not non_finite_names(result), "on_examples makes NaN or infinite values of an empty batch")
        return apply_on_examples(defense, example_gradients(state), 3.0, parameters, new_context(rng))

    def call_on_gradient(state: State, rng: torch.Generator) -> State:
        return apply_on_gradient(defense, state, new_context(rng))

    def call_on_update(state: State, rng: torch.Generator) -> State:
        sent = apply_on_update(defense, state, new_context(rng))
        return dense_update(sent, state)

    def call_on_features(state: State, rng: torch.Generator) -> State:
        features, inputs = _make_features(state)
        return {"features": apply_on_features(defense, features, inputs, new_context(rng)).detach()}

    def all_indices(state: State) -> State:
        return {"places": torch.arange(EXAMPLES).float()}

    def same_batch(state: State) -> State:
        inputs, labels = make_batch(BATCH_SIZE)
        return {"inputs": inputs, "labels": labels.float()}

    def same_features(state: State) -> State:
        return {"features": _make_features(state)[0].detach()}

    def mean_gradient(state: State) -> State:
        return {name: tensor.sum(0) / 3 for name, tensor in example_gradients(state).items()}

    hook_cases = [
        _HookCase("on_data", call_on_data, all_indices),
        _HookCase("on_batch", call_on_batch, same_batch),
        _HookCase("on_features", call_on_features, same_features),
        _HookCase("on_examples", call_on_examples, mean_gradient),
        _HookCase("on_gradient", call_on_gradient, dict),
        _HookCase("on_update", call_on_update, dict),
    ]
    assert [hook_case.hook for hook_case in hook_cases] == list(HOOKS)
    return [hook_case for hook_case in hook_cases if overrides(defense, hook_case.hook)]


def build_defense(subject: CheckedPlugin, rounds: int = ROUNDS) -> Defense:
    """Build the defense for a client that takes part in a few rounds."""
    client = Participation(
        num_examples=EXAMPLES,
        batch_size=BATCH_SIZE,
        steps=EXAMPLES // BATCH_SIZE,
        rounds=rounds,
        num_classes=10,
        value_range=((0.0,), (1.0,)),
    )
    return cast("Defense", subject.build()).of_client(client)


def make_context(rng: torch.Generator, defense: Defense, number: int = 0, memory: Memory | None = None) -> LocalContext:
    """Make the context of a hook in a local step whose weights are random."""
    return LocalContext(
        rng=rng,
        round=number + 1,
        broadcast=random_state(),
        memory={} if memory is None else memory,
        local_step=QuadraticStep({name: 1.5 * tensor for name, tensor in random_state().items()}),
        common_key=("common", number) if defense.draws_in_common else None,
    )


def random_state() -> dict[str, Tensor]:
    """Return 17 random numbers, whose norm is above 1, so that clipping to 1 changes them."""
    return {"a": torch.randn((4, 3), generator=generator("a")), "b": torch.randn(5, generator=generator("b"))}


def dummy_gradient() -> dict[str, Tensor]:
    """Return random numbers in the form of `random_state`, but others."""
    gradient = {}
    for name, tensor in random_state().items():
        gradient[name] = torch.randn(tensor.shape, generator=generator("other", name))
    return gradient


def defended_state(defense: Defense) -> State:
    """Return the random state after `on_gradient` and `on_update`, as the server would see it."""
    hook_cases = {hook_case.hook: hook_case for hook_case in overridden_hooks(defense)}
    state: State = random_state()
    for hook in ("on_gradient", "on_update"):
        if hook in hook_cases:
            state = hook_cases[hook].apply(state, generator(1))
    return state


def zero_state() -> dict[str, Tensor]:
    """Return zeros in the form of `random_state`."""
    return {name: torch.zeros_like(tensor) for name, tensor in random_state().items()}


def example_gradients(state: State) -> State:
    """Return three multiples of a state as the gradients of three examples."""
    return {name: torch.stack([tensor, -2 * tensor, 3 * tensor]) for name, tensor in state.items()}


def _make_features(state: State) -> tuple[Tensor, Tensor]:
    """Return features, a smooth function of inputs and of a state, and these inputs.

    None is negative, as after ReLU, for which defenses are written.
    """
    inputs = make_batch(BATCH_SIZE)[0].requires_grad_(True)
    weights = torch.randn((64, state["b"].numel()), generator=generator("features")) * state["b"]
    return (inputs.flatten(1) @ weights).tanh().square(), inputs


def _make_local_round() -> LocalRound:
    """Return a round of a client that sends an update."""
    task = Task((1, 8, 8), 10)
    training = LocalTraining(local_epochs=1, batch_size=BATCH_SIZE, learning_rate=0.1)
    with seed_globals("contract", "model"):
        model = Mlp(hidden=(12,)).build(task)
    inputs, labels = make_batch(EXAMPLES)
    return LocalRound.create(model, LocalData(inputs=inputs, labels=labels, key=("contract",)), training, task.loss)


def make_batch(count: int) -> tuple[Tensor, Tensor]:
    """Return random images and their classes."""
    return torch.rand((count, 1, 8, 8), generator=generator("x")), torch.arange(count) % 10


def dense_update(sent: State | Payload, before: State) -> State:
    """Return an update as numbers, whatever form it is sent in."""
    return sent.values("delta", before) if isinstance(sent, Payload) else sent
