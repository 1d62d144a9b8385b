"""Checks of defenses: each hook is called as clients call it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals, use_one_thread
from fedsim.base.task import Task
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply, expect
from fedsim.contract.defense_rounds import (
    acts_in_its_rounds_alone,
    noise_begins_with_the_first_message,
    noise_follows_no_earlier_data,
    noise_follows_no_small_data,
    noise_holds_in_any_round,
    says_in_which_rounds_it_acts,
)
from fedsim.contract.defense_trials import (
    BATCH_SIZE,
    EXAMPLES,
    ROUNDS,
    build_defense,
    defended_state,
    dense_update,
    dummy_gradient,
    example_gradients,
    make_batch,
    make_context,
    overridden_hooks,
    random_state,
    zero_state,
)
from fedsim.interfaces.defense import (
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
    apply_on_examples,
    apply_on_sum,
    apply_on_update,
    describe_value,
)
from fedsim.interfaces.defense_checks import check_defense
from fedsim.interfaces.local_context import Memory
from fedsim.interfaces.message_noise import TrainingFacts, describe_noise_fault
from fedsim.recording.wire_format import State, non_finite_names
from fedsim.training.gradients import flatten_examples
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

_DELTA, _DRAWS = 1e-5, 8


def is_a_defense(subject: CheckedPlugin) -> None:
    """It overrides a hook, misspells none, and each can be called as clients call it."""
    check_defense(subject.build())


def hooks_return_valid_tensors(subject: CheckedPlugin) -> None:
    """It returns tensors of the same names and shapes, finite even where all is zero."""
    for hook_case in overridden_hooks(build_defense(subject)):
        for state, noun in ((random_state(), "numbers"), (zero_state(), "zeros")):
            result = hook_case.apply(state, generator(1))
            expect(not non_finite_names(result), f"{hook_case.hook} makes NaN or infinite values of {noun}")


def draws_from_its_generator(subject: CheckedPlugin) -> None:
    """It draws from the generators of its hooks alone; the same seed gives the same bytes."""
    for hook_case in overridden_hooks(build_defense(subject)):
        with common.expect_untouched_generators():
            first = hook_case.apply(random_state(), generator(1))
        with common.seed_global_generators(7):
            second = hook_case.apply(random_state(), generator(1))
        expect(
            common.are_equal(first, second),
            f"{hook_case.hook} returns something else for the same seed; draw from 'rng' alone",
        )


def has_an_effect(subject: CheckedPlugin) -> None:
    """It changes something that a client sends, or how it draws its batches."""
    defense = build_defense(subject)
    if defense.sampling(EXAMPLES, BATCH_SIZE) is not None:
        return
    memory: dict[str, Tensor] = {}
    for number in range(ROUNDS):  # the first message of one with momentum may be as it was
        for seed in range(_DRAWS):  # one may act by chance
            for hook_case in overridden_hooks(defense, number, memory):
                result = hook_case.apply(random_state(), generator(seed))
                if not common.are_equal(result, hook_case.apply_nothing(random_state())):
                    return
    raise ContractViolation(
        "with these settings it changes nothing; choose defaults that defend, or refuse such settings"
    )


def ghost_clipping_matches_examples(subject: CheckedPlugin) -> None:
    """It gives the same gradient by ghost clipping, if it supports that, as by `on_examples`."""
    defense = build_defense(subject)
    if not supports_ghost_clipping(defense):
        raise DoesNotApply("it has no 'example_factors', so training calls 'on_examples'")
    for scale in (1.0, 100.0):
        # Clip and sum the gradients of examples, as training does.
        gradients = {name: scale * tensor for name, tensor in example_gradients(random_state()).items()}
        norms = torch.stack([flatten_examples(tensor).norm(dim=1) for tensor in gradients.values()])
        total = {}
        for factors, (name, tensor) in zip(defense.example_factors(norms), gradients.items(), strict=True):
            total[name] = torch.einsum("e,e...->...", factors, tensor)
        # Both ways have to give the same gradient.
        contexts = [make_context(generator(1), defense) for _ in range(2)]
        expected = apply_on_examples(defense, gradients, 3.0, random_state(), contexts[0])
        result = apply_on_sum(defense, total, 3.0, random_state(), contexts[1])
        expect(
            all(torch.allclose(expected[name], result[name], rtol=1e-4, atol=1e-6) for name in expected),
            "example_factors and on_sum make another gradient than on_examples",
        )


def sampling_is_poisson_or_none(subject: CheckedPlugin) -> None:
    """It asks for Poisson sampling or for none."""
    defense = build_defense(subject)
    if not overrides(defense, "sampling"):
        raise DoesNotApply("it asks for no sampling of its own")
    sampling = defense.sampling(EXAMPLES, BATCH_SIZE)
    is_valid = sampling is None or isinstance(sampling, Poisson)
    expect(is_valid, f"sampling returns {describe_value(sampling)}, expected Poisson or None")


def keeps_state_in_memory_only(subject: CheckedPlugin) -> None:
    """It keeps all state between rounds in its memory, as tensors by name."""
    defense = build_defense(subject)
    if not overrides(defense, "on_update"):
        raise DoesNotApply("it does not act on updates")

    def run_rounds() -> list[State]:
        memory: dict[str, Tensor] = {}
        updates = []
        for number in range(ROUNDS):
            memory = {name: tensor.clone() for name, tensor in memory.items()}
            context = make_context(generator(number), defense, number, memory)
            sent = apply_on_update(defense, random_state(), context)
            updates.append(dense_update(sent, random_state()))
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
    defense = build_defense(subject)
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
    expect(defense.promise != NO_GUARANTEE, "it has a guarantee, but declares none; set 'promise'")


def _draws_anew(defense: Defense) -> bool:
    """Return whether what `on_update` sends depends on its draws in each round, with what it remembers."""
    if not overrides(defense, "on_update"):
        return False
    for number in range(ROUNDS):
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
    """Return whether `on_update` sends something else if there are more rounds, as one with a total budget does."""
    fewer, more = (_send(build_defense(subject, rounds), generator("draws"), 0, {}) for rounds in (10, 20))
    return not common.are_equal(fewer, more)


def _send(defense: Defense, rng: torch.Generator, number: int, memory: Memory) -> State:
    """Return what `on_update` makes of the random state after `number` rounds."""
    sent = apply_on_update(defense, random_state(), make_context(rng, defense, number, memory))
    return dense_update(sent, random_state())


def mixing_is_declared(subject: CheckedPlugin) -> None:
    """It says that it mixes where its `on_batch` makes one example of several records."""
    defense = build_defense(subject)
    if not overrides(defense, "on_batch"):
        raise DoesNotApply("it does not act on batches")
    inputs, labels = make_batch(EXAMPLES)

    def mix_batch(batch: Tensor) -> Tensor:
        return apply_on_batch(defense, batch, labels, make_context(generator(1), defense))[0]

    outputs = mix_batch(inputs)
    sources = torch.zeros(len(outputs), dtype=torch.int64)
    for record in range(EXAMPLES):
        changed_inputs = inputs.clone()
        changed_inputs[record] = 1 - inputs[record]
        changed_outputs = mix_batch(changed_inputs)
        if len(changed_outputs) != len(outputs):
            raise DoesNotApply("how many examples on_batch makes depends on their values")
        sources += (changed_outputs != outputs).flatten(1).any(1)
    expect(
        defense.mixes or not (sources > 1).any(),
        f"on_batch mixes {sources.max()} records into an example; set mixes = True, so that it does not count as a "
        "record",
    )


def client_can_train(subject: CheckedPlugin) -> None:
    """It lets a client train, which sends the same bytes with the same seed."""
    defense = build_defense(subject)
    task = Task((1, 8, 8), 10)
    with seed_globals("contract", "model"):
        model = Mlp(hidden=(12,)).build(task)
    before, (inputs, labels) = copy_state(model), make_batch(EXAMPLES)
    settings = LocalTraining(local_epochs=2, batch_size=BATCH_SIZE, learning_rate=0.1)

    def train_client() -> State:
        after, _ = local_update(model, before, inputs, labels, settings, key=("contract",), defenses=[defense])
        update = {name: after[name] - tensor for name, tensor in before.items()}
        sent = apply_on_update(defense, update, make_context(generator(1), defense))
        return dense_update(sent, before)

    try:
        with use_one_thread():
            first, second = train_client(), train_client()
    except ConfigError as error:
        raise ContractViolation(f"a client cannot train under it: {error}") from error
    expect(common.are_equal(first, second), "with the same seed a client sends something else")


def adversary_view_is_valid(subject: CheckedPlugin) -> None:
    """Its `adversary_view` has the gradient's form, is differentiable, and draws nothing."""
    defense = build_defense(subject)
    if defense.adversary_view(dummy_gradient(), defended_state(defense)) is None:
        raise DoesNotApply("it models no adversary that knows it: 'adversary_view' returns None")
    for sent in (defended_state(defense), zero_state()):
        for dummy in (dummy_gradient(), zero_state()):
            _check_view(defense, dummy, sent)
    # Differentiate the view with respect to the dummy gradient.
    leaves = {name: tensor.requires_grad_(True) for name, tensor in dummy_gradient().items()}
    view = defense.adversary_view(leaves, defended_state(defense)) or {}
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
    defense = build_defense(subject)
    facts = TrainingFacts(num_examples=4, learning_rate=0.1, steps=1, batch_size=4)
    sent = defended_state(defense)
    with common.expect_untouched_generators():
        noise = defense.message_noise(sent, facts)
    if noise is None:
        raise DoesNotApply("it models no noise of its messages: 'message_noise' returns None")
    fault = describe_noise_fault(noise, sent)
    expect(not fault, f"message_noise {fault}")


def adversary_batch_is_valid(subject: CheckedPlugin) -> None:
    """Its `adversary_batch` returns mixtures of the same shape, and is differentiable."""
    defense = build_defense(subject)
    if not overrides(defense, "adversary_batch"):
        raise DoesNotApply("it has no 'adversary_batch': dummy examples are compared with its mixtures")
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
    says_in_which_rounds_it_acts,
    ghost_clipping_matches_examples,
    sampling_is_poisson_or_none,
    keeps_state_in_memory_only,
    guarantee_is_valid,
    noise_holds_in_any_round,
    noise_begins_with_the_first_message,
    noise_follows_no_earlier_data,
    noise_follows_no_small_data,
    adversary_view_is_valid,
    message_noise_is_valid,
    adversary_batch_is_valid,
    mixing_is_declared,
    client_can_train,
)
