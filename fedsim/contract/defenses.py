"""Checks of defenses: each hook is called as clients call it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals, use_one_thread
from fedsim.base.task import Task
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply, expect
from fedsim.interfaces.defense import (
    HOOKS,
    NO_GUARANTEE,
    Defense,
    Guarantee,
    Participation,
    Poisson,
    overrides,
    supports_ghost_clipping,
)
from fedsim.interfaces.defense_calls import (
    apply_on_batch,
    apply_on_data,
    apply_on_examples,
    apply_on_features,
    apply_on_gradient,
    apply_on_sum,
    apply_on_update,
    describe_value,
)
from fedsim.interfaces.defense_checks import check_defense
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.interfaces.message_noise import TrainingFacts
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State, non_finite_names
from fedsim.training.cohort import LocalData
from fedsim.training.gradients import flatten_examples
from fedsim.training.local_round import LocalRound
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

_EXAMPLES, _BATCH_SIZE, _ROUNDS, _DELTA = 6, 3, 3, 1e-5
_MANY_ROUNDS = 100
_DRAWS = 8
_LEAST_NOISE = 0.9
"""Share of the noise of the first round that has to be left in each; the draws are the same."""


def is_a_defense(subject: CheckedPlugin) -> None:
    """It overrides a hook, misspells none, and each can be called as clients call it."""
    check_defense(subject.build())


def hooks_return_valid_tensors(subject: CheckedPlugin) -> None:
    """It returns tensors of the same names and shapes, finite even where all is zero."""
    for hook_case in _overridden_hooks(_build_defense(subject)):
        for state, noun in ((_random_state(), "numbers"), (_zero_state(), "zeros")):
            result = hook_case.apply(state, generator(1))
            expect(not non_finite_names(result), f"{hook_case.hook} makes NaN or infinite values of {noun}")


def draws_from_its_generator(subject: CheckedPlugin) -> None:
    """It draws from the generators of its hooks alone; the same seed gives the same bytes."""
    for hook_case in _overridden_hooks(_build_defense(subject)):
        with common.expect_untouched_generators():
            first = hook_case.apply(_random_state(), generator(1))
        with common.seed_global_generators(7):
            second = hook_case.apply(_random_state(), generator(1))
        expect(
            common.are_equal(first, second),
            f"{hook_case.hook} returns something else for the same seed; draw from 'rng' alone",
        )


def has_an_effect(subject: CheckedPlugin) -> None:
    """It changes something that a client sends, or how it draws its batches."""
    defense = _build_defense(subject)
    if defense.sampling(_EXAMPLES, _BATCH_SIZE) is not None:
        return
    memory: dict[str, Tensor] = {}
    for number in range(_ROUNDS):  # the first message of one with momentum may be as it was
        for hook_case in _overridden_hooks(defense, number, memory):
            result = hook_case.apply(_random_state(), generator(1))
            if not common.are_equal(result, hook_case.apply_nothing(_random_state())):
                return
    raise ContractViolation(
        "with these settings it changes nothing; choose defaults that defend, or refuse such settings"
    )


def acts_in_its_rounds_alone(subject: CheckedPlugin) -> None:
    """It changes nothing in rounds in which it says that it does not act, which adversaries rely on."""
    defense = _build_defense(subject)
    idle = [number for number in range(1, _MANY_ROUNDS + 1) if not defense.acts_in(number)]
    if not idle:
        raise DoesNotApply(f"it says that it acts in each of {_MANY_ROUNDS} rounds")
    for number in (idle[0], idle[-1]):
        for hook_case in _overridden_hooks(defense, number - 1):
            result = hook_case.apply(_random_state(), generator(1))
            expect(
                common.are_equal(result, hook_case.apply_nothing(_random_state())),
                f"{hook_case.hook} changes something in round {number}, in which acts_in says that it does not act",
            )


def ghost_clipping_matches_examples(subject: CheckedPlugin) -> None:
    """It gives the same gradient by ghost clipping, if it supports that, as by `on_examples`."""
    defense = _build_defense(subject)
    if not supports_ghost_clipping(defense):
        raise DoesNotApply("it has no 'example_factors', so training calls 'on_examples'")
    for scale in (1.0, 100.0):
        # Clip and sum the gradients of examples, as training does.
        gradients = {name: scale * tensor for name, tensor in _example_gradients(_random_state()).items()}
        norms = torch.stack([flatten_examples(tensor).norm(dim=1) for tensor in gradients.values()])
        total = {}
        for factors, (name, tensor) in zip(defense.example_factors(norms), gradients.items(), strict=True):
            total[name] = torch.einsum("e,e...->...", factors, tensor)
        # Both ways have to give the same gradient.
        contexts = [_make_context(generator(1), defense) for _ in range(2)]
        expected = apply_on_examples(defense, gradients, 3.0, _random_state(), contexts[0])
        result = apply_on_sum(defense, total, 3.0, _random_state(), contexts[1])
        expect(
            all(torch.allclose(expected[name], result[name], rtol=1e-4, atol=1e-6) for name in expected),
            "example_factors and on_sum make another gradient than on_examples",
        )


def sampling_is_poisson_or_none(subject: CheckedPlugin) -> None:
    """It asks for Poisson sampling or for none."""
    defense = _build_defense(subject)
    if not overrides(defense, "sampling"):
        raise DoesNotApply("it asks for no sampling of its own")
    sampling = defense.sampling(_EXAMPLES, _BATCH_SIZE)
    is_valid = sampling is None or isinstance(sampling, Poisson)
    expect(is_valid, f"sampling returns {describe_value(sampling)}, expected Poisson or None")


def keeps_state_in_memory_only(subject: CheckedPlugin) -> None:
    """It keeps all state between rounds in its memory, as tensors by name."""
    defense = _build_defense(subject)
    if not overrides(defense, "on_update"):
        raise DoesNotApply("it does not act on updates")

    def run_rounds() -> list[State]:
        memory: dict[str, Tensor] = {}
        updates = []
        for number in range(_ROUNDS):
            memory = {name: tensor.clone() for name, tensor in memory.items()}
            context = _make_context(generator(number), defense, number, memory)
            sent = apply_on_update(defense, _random_state(), context)
            updates.append(_dense_update(sent, _random_state()))
            for name, value in memory.items():
                is_valid = isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
                expect(is_valid, f"it keeps {name!r} as {describe_value(value)}, expected dense tensors by name")
        return updates

    for first, second in zip(run_rounds(), run_rounds(), strict=True):
        expect(
            common.are_equal(first, second),
            "from the same memory it sends something else, so it keeps something elsewhere",
        )


def guarantee_is_valid(subject: CheckedPlugin) -> None:
    """Its guarantee is valid, agrees with `promise`, and does not improve with more rounds."""
    defense = _build_defense(subject)
    if not overrides(defense, "guarantee"):
        expect(
            defense.promise == NO_GUARANTEE,
            "it says that something is proved, but overrides no 'guarantee'; override it, or leave 'promise' out",
        )
        raise DoesNotApply("it promises nothing")
    client = Participation(num_examples=100, batch_size=10, steps=10, rounds=10)
    of_few_rounds = defense.guarantee(replace(client, rounds=10), _DELTA)
    of_many_rounds = defense.guarantee(replace(client, rounds=20), _DELTA)
    for guarantee in (of_few_rounds, of_many_rounds):
        if guarantee is None:
            continue
        if not isinstance(guarantee, Guarantee):
            raise ContractViolation(f"guarantee returns {describe_value(guarantee)}, expected a Guarantee or None")
        expect(guarantee.epsilon > 0, f"it promises epsilon = {guarantee.epsilon}, expected above 0")
        expect(guarantee.delta <= _DELTA, f"asked for delta = {_DELTA:g}, it states epsilon for {guarantee.delta:g}")
    if of_few_rounds and of_many_rounds:
        fewer, more = of_few_rounds.epsilon, of_many_rounds.epsilon
        expect(fewer <= more, f"epsilon falls from {fewer} to {more} with more rounds")
        expect(
            fewer < more or math.isinf(fewer) or not _draws_anew(defense) or _adapts_to_rounds(subject),
            f"it states epsilon = {fewer:.4g} for 10 rounds as for 20, and draws anew in each, of which each reveals "
            "something; compose it over participation.rounds, or let of_client choose the noise by that number",
        )
    expect(defense.promise != NO_GUARANTEE, "it has a guarantee, but says of itself that it has none; set 'promise'")


def noise_holds_in_any_round(subject: CheckedPlugin) -> None:
    """Its noise is no smaller in a late round than in an early one, if it promises something.

    A guarantee is told in how many rounds a client took part, not in which: one that is sampled may have been in late
    ones alone.
    """
    defense = _build_defense(subject)
    if not (overrides(defense, "guarantee") or overrides(defense, "compose_guarantees")):
        raise DoesNotApply("it promises nothing")
    for hook_case in _overridden_hooks(defense):
        early, late = (_measure_spread(defense, hook_case.hook, number) for number in (0, _MANY_ROUNDS - 1))
        expect(
            late >= _LEAST_NOISE * early,
            f"{hook_case.hook} draws {late / early if early else 0:.2g} times the noise of round 1 in round "
            f"{_MANY_ROUNDS}, where a client may take part for the first time, and its guarantee is told the number of "
            "rounds alone; count the client's rounds in context.memory",
        )


def _measure_spread(defense: Defense, hook: str, number: int) -> float:
    """Return how far a hook's draws spread its results of zeros, after `number` rounds without the client."""
    results = []
    for seed in range(_DRAWS):
        (hook_case,) = (case for case in _overridden_hooks(defense, number) if case.hook == hook)
        result = hook_case.apply(_zero_state(), generator("draws", seed))
        results.append(torch.cat([tensor.flatten().double() for tensor in result.values()]))
    if len({len(result) for result in results}) > 1:  # as of batches of a random size
        return 0.0
    return float(torch.stack(results).std(0).square().mean().sqrt())


def _draws_anew(defense: Defense) -> bool:
    """Tell whether what `on_update` sends depends on its draws in each round, with what it remembers."""
    if not overrides(defense, "on_update"):
        return False
    for number in range(_ROUNDS):
        sent = []
        for seed in (1, 2):
            memory: dict[str, Tensor] = {}
            for earlier in range(number):
                _send(defense, generator(earlier), earlier, memory)
            sent.append(_send(defense, generator("draws", seed), number, memory))
        if common.are_equal(*sent):
            return False
    return True


def _adapts_to_rounds(subject: CheckedPlugin) -> bool:
    """Tell whether `on_update` sends something else where there are more rounds, as one that keeps to a total does."""
    fewer, more = (_send(_build_defense(subject, rounds), generator("draws"), 0, {}) for rounds in (10, 20))
    return not common.are_equal(fewer, more)


def _send(defense: Defense, rng: torch.Generator, number: int, memory: Memory) -> State:
    """Return what `on_update` makes of the random state after `number` rounds."""
    sent = apply_on_update(defense, _random_state(), _make_context(rng, defense, number, memory))
    return _dense_update(sent, _random_state())


def mixing_is_declared(subject: CheckedPlugin) -> None:
    """It says that it mixes where its `on_batch` makes one example of several records."""
    defense = _build_defense(subject)
    if not overrides(defense, "on_batch"):
        raise DoesNotApply("it does not act on batches")
    inputs, labels = _make_batch(_EXAMPLES)

    def make_batch(batch: Tensor) -> Tensor:
        return apply_on_batch(defense, batch, labels, _make_context(generator(1), defense))[0]

    outputs = make_batch(inputs)
    sources = torch.zeros(len(outputs), dtype=torch.int64)
    for record in range(_EXAMPLES):
        changed_inputs = inputs.clone()
        changed_inputs[record] = 1 - inputs[record]
        changed_outputs = make_batch(changed_inputs)
        if len(changed_outputs) != len(outputs):
            raise DoesNotApply("how many examples on_batch makes depends on their values")
        sources += (changed_outputs != outputs).flatten(1).any(1)
    expect(
        defense.mixes or not (sources > 1).any(),
        f"on_batch makes an example of {sources.max()} records; set mixes = True, so that nobody takes it for a record",
    )


def client_can_train(subject: CheckedPlugin) -> None:
    """It lets a client train, which sends the same bytes with the same seed."""
    defense = _build_defense(subject)
    task = Task((1, 8, 8), 10)
    with seed_globals("contract", "model"):
        model = Mlp(hidden=(12,)).build(task)
    before, (inputs, labels) = copy_state(model), _make_batch(_EXAMPLES)
    settings = LocalTraining(local_epochs=2, batch_size=_BATCH_SIZE, learning_rate=0.1)

    def train_client() -> State:
        after, _ = local_update(model, before, inputs, labels, settings, key=("contract",), defenses=[defense])
        update = {name: after[name] - tensor for name, tensor in before.items()}
        sent = apply_on_update(defense, update, _make_context(generator(1), defense))
        return _dense_update(sent, before)

    try:
        with use_one_thread():
            first, second = train_client(), train_client()
    except ConfigError as error:
        raise ContractViolation(f"a client cannot train under it: {error}") from error
    expect(common.are_equal(first, second), "with the same seed a client sends something else")


def adversary_view_is_valid(subject: CheckedPlugin) -> None:
    """Its `adversary_view` has the gradient's form, is differentiable, and draws nothing."""
    defense = _build_defense(subject)
    if defense.adversary_view(_dummy_gradient(), _defended_state(defense)) is None:
        raise DoesNotApply("it models no adversary who knows it: 'adversary_view' returns None")
    for sent in (_defended_state(defense), _zero_state()):
        for dummy in (_dummy_gradient(), _zero_state()):
            _check_view(defense, dummy, sent)
    # Differentiate the view with respect to the dummy gradient.
    leaves = {name: tensor.requires_grad_(True) for name, tensor in _dummy_gradient().items()}
    view = defense.adversary_view(leaves, _defended_state(defense)) or {}
    sums = [tensor.sum() for tensor in view.values() if tensor.requires_grad]
    gradients: tuple[Tensor, ...] = ()
    if sums:
        gradients = torch.autograd.grad(sums, list(leaves.values()), materialize_grads=True)
    expect(
        any(bool(gradient.any()) for gradient in gradients),
        "adversary_view does not change with the gradient, so that no dummy data can be moved by it; compute it from "
        "the gradient without 'detach', 'sign' or 'no_grad' alone",
    )


def message_noise_is_valid(subject: CheckedPlugin) -> None:
    """Its `message_noise` fits the message number by number, and draws nothing."""
    defense = _build_defense(subject)
    facts = TrainingFacts(num_examples=4, learning_rate=0.1, steps=1, batch_size=4)
    sent = _defended_state(defense)
    with common.expect_untouched_generators():
        noise = defense.message_noise(sent, facts)
    if noise is None:
        raise DoesNotApply("it models no noise of its messages: 'message_noise' returns None")
    for name, tensor in [*noise.deviations.items(), *noise.bounds.items()]:
        has_form = name in sent and tensor.shape == sent[name].shape
        expect(has_form, f"message_noise describes '{name}' in another shape than the message has, or it is not in it")
        expect(bool((tensor >= 0).all()), f"message_noise has a deviation or bound of '{name}' below 0, or NaN")
    for name, step in noise.rounding_steps.items():
        is_valid = name in sent and 0 < step < math.inf
        expect(is_valid, f"message_noise has {step} as the rounding step of '{name}', expected a finite one above 0")


def adversary_batch_is_valid(subject: CheckedPlugin) -> None:
    """Its `adversary_batch` returns mixtures of the same shape, and is differentiable."""
    defense = _build_defense(subject)
    if not overrides(defense, "adversary_batch"):
        raise DoesNotApply("it has no 'adversary_batch': dummy examples stand for those that it mixed")
    records, labels = torch.randn((4, 1, 8, 8), generator=generator("records")), torch.eye(10)[:4]
    leaf = records.clone().requires_grad_()
    with common.expect_untouched_generators():
        mixed, soft_labels = defense.adversary_batch(leaf, labels.clone())
    has_same_shapes = mixed.shape == records.shape and soft_labels.shape == labels.shape
    expect(
        has_same_shapes and soft_labels.is_floating_point(),
        f"adversary_batch returns {describe_value(mixed)} and {describe_value(soft_labels)}, expected the "
        "shapes that it was given",
    )
    are_probabilities = bool((soft_labels.sum(1) - 1).abs().max() < 1e-5)
    expect(are_probabilities, "adversary_batch returns labels that are not probabilities")
    expect(mixed.requires_grad, "adversary_batch does not change with the records; compute it without 'detach'")


def _check_view(defense: Defense, dummy: State, sent: State) -> None:
    """Check the form, values and repeatability of one `adversary_view`."""
    dummy_copy = {name: tensor.clone() for name, tensor in dummy.items()}
    sent_copy = {name: tensor.clone() for name, tensor in sent.items()}
    with common.expect_untouched_generators():
        view = defense.adversary_view(dummy_copy, sent_copy)
    with common.seed_global_generators(7):
        second_view = defense.adversary_view(dummy_copy, sent_copy)
    has_same_names = isinstance(view, Mapping) and view.keys() == dummy.keys() and isinstance(second_view, Mapping)
    expect(has_same_names, "adversary_view returns something else than a tensor for each name of the gradient")
    assert view is not None
    assert second_view is not None
    for name, tensor in dummy.items():
        seen = view[name]
        is_valid = isinstance(seen, Tensor) and seen.shape == tensor.shape and seen.is_floating_point()
        expect(
            is_valid, f"adversary_view returns '{name}' as {describe_value(seen)}, expected shape {tuple(tensor.shape)}"
        )
    expect(not non_finite_names(view), "adversary_view makes NaN or infinite values of numbers or zeros")
    expect(
        common.are_equal(view, second_view),
        "adversary_view returns something else for the same gradient; it is to draw nothing",
    )
    is_unchanged = common.are_equal(dummy_copy, dummy) and common.are_equal(sent_copy, sent)
    expect(is_unchanged, "adversary_view changes its arguments")


CHECKS = (
    *common.CHECKS,
    is_a_defense,
    hooks_return_valid_tensors,
    draws_from_its_generator,
    has_an_effect,
    acts_in_its_rounds_alone,
    ghost_clipping_matches_examples,
    sampling_is_poisson_or_none,
    keeps_state_in_memory_only,
    guarantee_is_valid,
    noise_holds_in_any_round,
    adversary_view_is_valid,
    message_noise_is_valid,
    adversary_batch_is_valid,
    mixing_is_declared,
    client_can_train,
)


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


def _overridden_hooks(defense: Defense, number: int = 0, memory: Memory | None = None) -> list[_HookCase]:
    """Return a test case for each hook that `defense` overrides, after `number` rounds, with what it remembers."""

    def make_context(rng: torch.Generator) -> LocalContext:
        return _make_context(rng, defense, number, memory)

    def call_on_data(state: State, rng: torch.Generator) -> State:
        indices = apply_on_data(defense, _make_local_round(), make_context(rng))
        return {"places": indices.float()}

    def call_on_batch(state: State, rng: torch.Generator) -> State:
        inputs, labels = apply_on_batch(defense, *_make_batch(_BATCH_SIZE), make_context(rng))
        return {"inputs": inputs, "labels": labels.float()}

    def call_on_examples(state: State, rng: torch.Generator) -> State:
        parameters = _random_state()
        # Poisson sampling may draw an empty batch.
        no_gradients = {name: tensor.new_zeros(0, *tensor.shape) for name, tensor in state.items()}
        result = apply_on_examples(defense, no_gradients, 3.0, parameters, make_context(rng))
        expect(not non_finite_names(result), "on_examples makes NaN or infinite values of an empty batch")
        return apply_on_examples(defense, _example_gradients(state), 3.0, parameters, make_context(rng))

    def call_on_gradient(state: State, rng: torch.Generator) -> State:
        return apply_on_gradient(defense, state, make_context(rng))

    def call_on_update(state: State, rng: torch.Generator) -> State:
        sent = apply_on_update(defense, state, make_context(rng))
        return _dense_update(sent, state)

    def call_on_features(state: State, rng: torch.Generator) -> State:
        features, inputs = _make_features(state)
        return {"features": apply_on_features(defense, features, inputs, make_context(rng)).detach()}

    def all_indices(state: State) -> State:
        return {"places": torch.arange(_EXAMPLES).float()}

    def same_batch(state: State) -> State:
        inputs, labels = _make_batch(_BATCH_SIZE)
        return {"inputs": inputs, "labels": labels.float()}

    def same_features(state: State) -> State:
        return {"features": _make_features(state)[0].detach()}

    def mean_gradient(state: State) -> State:
        return {name: tensor.sum(0) / 3 for name, tensor in _example_gradients(state).items()}

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


def _build_defense(subject: CheckedPlugin, rounds: int = _ROUNDS) -> Defense:
    """Build the defense for a client that takes part in a few rounds."""
    client = Participation(
        num_examples=_EXAMPLES,
        batch_size=_BATCH_SIZE,
        steps=_EXAMPLES // _BATCH_SIZE,
        rounds=rounds,
        num_classes=10,
        value_range=((0.0,), (1.0,)),
    )
    return cast("Defense", subject.build()).of_client(client)


def _make_context(
    rng: torch.Generator, defense: Defense, number: int = 0, memory: Memory | None = None
) -> LocalContext:
    """Make the context of a hook in a local step whose weights are random."""
    return LocalContext(
        rng=rng,
        round=number + 1,
        broadcast=_random_state(),
        memory={} if memory is None else memory,
        local_step=_TrialStep(),
        common_key=("common", number) if defense.draws_in_common else None,
    )


class _TrialStep:
    """Local step of a loss that is the sum of squares of all weights and inputs, halved, away from the broadcast."""

    def weights(self) -> State:
        return {name: 1.5 * tensor for name, tensor in _random_state().items()}

    def gradient_at(self, weights: State) -> State:
        return {name: tensor.clone() for name, tensor in {**self.weights(), **weights}.items()}

    def loss_at(self, weights: State) -> float:
        return sum(tensor.square().sum().item() for tensor in {**self.weights(), **weights}.values()) / 2

    def input_gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        del labels
        return inputs.clone()


def _random_state() -> dict[str, Tensor]:
    """Return 17 random numbers, whose norm is above 1, so that clipping to 1 changes them."""
    return {"a": torch.randn((4, 3), generator=generator("a")), "b": torch.randn(5, generator=generator("b"))}


def _dummy_gradient() -> dict[str, Tensor]:
    """Return random numbers in the form of `_random_state`, but others."""
    gradient = {}
    for name, tensor in _random_state().items():
        gradient[name] = torch.randn(tensor.shape, generator=generator("other", name))
    return gradient


def _defended_state(defense: Defense) -> State:
    """Return the random state after `on_gradient` and `on_update`, as the server would see it."""
    hook_cases = {hook_case.hook: hook_case for hook_case in _overridden_hooks(defense)}
    state: State = _random_state()
    for hook in ("on_gradient", "on_update"):
        if hook in hook_cases:
            state = hook_cases[hook].apply(state, generator(1))
    return state


def _zero_state() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in _random_state().items()}


def _example_gradients(state: State) -> State:
    """Return three multiples of a state as the gradients of three examples."""
    return {name: torch.stack([tensor, -2 * tensor, 3 * tensor]) for name, tensor in state.items()}


def _make_features(state: State) -> tuple[Tensor, Tensor]:
    """Return features, a smooth function of inputs and of a state, and these inputs.

    None is negative, as after ReLU, for which defenses are written.
    """
    inputs = _make_batch(_BATCH_SIZE)[0].requires_grad_(True)
    weights = torch.randn((64, state["b"].numel()), generator=generator("features")) * state["b"]
    return (inputs.flatten(1) @ weights).tanh().square(), inputs


def _make_local_round() -> LocalRound:
    """Return a round of a client that sends an update."""
    task = Task((1, 8, 8), 10)
    training = LocalTraining(local_epochs=1, batch_size=_BATCH_SIZE, learning_rate=0.1)
    with seed_globals("contract", "model"):
        model = Mlp(hidden=(12,)).build(task)
    inputs, labels = _make_batch(_EXAMPLES)
    return LocalRound.create(model, LocalData(inputs=inputs, labels=labels, key=("contract",)), training, task.loss)


def _make_batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.rand((count, 1, 8, 8), generator=generator("x")), torch.arange(count) % 10


def _dense_update(sent: State | Payload, before: State) -> State:
    return sent.values("delta", before) if isinstance(sent, Payload) else sent
