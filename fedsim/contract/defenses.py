"""What a defense keeps to. Each hook is called as clients call it, so what a client would refuse is a failure here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fedsim.contract import common
from fedsim.contract.checks import Broken, DoesNotApply, Subject, expect
from fedsim.defense import (
    HOOKS,
    NO_GUARANTEE,
    Defense,
    Guarantee,
    Participation,
    Poisson,
    a_defense,
    kept_examples,
    kind,
    of_examples,
    of_sum,
    overrides,
    remembers,
    replaced_batch,
    replaced_features,
    replaced_gradient,
    replaced_update,
    shortens,
)
from fedsim.errors import ConfigError
from fedsim.models.mlp import Mlp
from fedsim.randomness import generator, one_thread, seeded
from fedsim.task import Task
from fedsim.training.cohort import Share
from fedsim.training.gradients import rows_of_examples
from fedsim.training.local_round import LocalRound
from fedsim.training.loop import local_update
from fedsim.training.model_state import state_of
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State, non_finite
from fedsim.wire.payloads import Payload

_COUNT, _BATCH, _ROUNDS, _DELTA = 6, 3, 3, 1e-5


def is_a_defense(subject: Subject) -> None:
    """It overrides a hook, misspells none, and each can be called as clients call it."""
    a_defense(subject.build())


def hooks_return_what_fits(subject: Subject) -> None:
    """Each hook returns tensors of the names and shapes that it got, finite even where all is zero."""
    for case in _cases(_defense(subject)):
        for state, what in ((_state(), "it"), (_zeros(), "zeros")):
            got = case.call(state, generator(1))
            expect(
                not non_finite(got),
                f"{case.hook} makes NaN or infinite values of {what if what == 'zeros' else 'numbers'}",
            )


def draws_from_its_generator(subject: Subject) -> None:
    """It draws from the generator of each hook alone, so that the same seed gives the same bytes."""
    for case in _cases(_defense(subject)):
        with common.global_generators_untouched():
            first = case.call(_state(), generator(1))
        with common.other_global_generators(7):
            again = case.call(_state(), generator(1))
        expect(
            common.same(first, again), f"{case.hook} returns something else for the same seed; draw from 'rng' alone"
        )


def does_something(subject: Subject) -> None:
    """With these settings it changes something that a client sends, or how it draws its batches."""
    defense = _defense(subject)
    if defense.sampling(_COUNT, _BATCH) is not None:
        return
    for case in _cases(defense):
        if not common.same(case.call(_state(), generator(1)), case.untouched(_state())):
            return
    raise Broken("with these settings it changes nothing; choose defaults that defend, or refuse such settings")


def the_shortcut_of_examples_gives_the_same(subject: Subject) -> None:
    """Where it says how it shortens gradients of examples, their sum makes of them what `on_examples` does."""
    defense = _defense(subject)
    if not shortens(defense):
        raise DoesNotApply("it says nothing of how it shortens gradients of examples")
    for size in (1.0, 100.0):
        each = {name: size * tensor for name, tensor in _each(_state()).items()}
        factors = defense.example_factors(
            torch.stack([rows_of_examples(tensor).norm(dim=1) for tensor in each.values()])
        )
        total = {
            name: torch.einsum("e,e...->...", factor, tensor)
            for factor, (name, tensor) in zip(factors, each.items(), strict=True)
        }
        shown = of_examples(defense, each, 3.0, _state(), generator(1))
        summed = of_sum(defense, total, 3.0, _state(), generator(1))
        expect(
            all(torch.allclose(shown[name], summed[name], rtol=1e-4, atol=1e-6) for name in shown),
            "example_factors and on_sum make another gradient than on_examples",
        )


def sampling_is_poisson_or_none(subject: Subject) -> None:
    """It asks for Poisson sampling or for none."""
    defense = _defense(subject)
    if not overrides(defense, "sampling"):
        raise DoesNotApply("it asks for no sampling of its own")
    got = defense.sampling(_COUNT, _BATCH)
    expect(got is None or isinstance(got, Poisson), f"sampling returns {kind(got)}, expected Poisson or None")


def memory_is_all_that_it_keeps(subject: Subject) -> None:
    """What it knows of earlier rounds is in its memory, as tensors by name."""
    defense = _defense(subject)
    if not remembers(defense):
        raise DoesNotApply("it asks for no memory")

    def rounds() -> list[State]:
        kept: dict[str, Tensor] = {}
        sent = []
        for number in range(_ROUNDS):
            memory = {name: tensor.clone() for name, tensor in kept.items()}
            common = generator("common", number)
            sent.append(_dense(replaced_update(defense, _state(), generator(number), memory, common), _state()))
            for name, value in memory.items():
                fits = isinstance(name, str) and isinstance(value, Tensor) and value.layout == torch.strided
                expect(fits, f"it keeps {name!r} as {kind(value)}, expected dense tensors by name")
            kept = memory
        return sent

    for one, again in zip(rounds(), rounds(), strict=True):
        expect(common.same(one, again), "from the same memory it sends something else, so it keeps something elsewhere")


def guarantee_is_one(subject: Subject) -> None:
    """What it promises is a guarantee or nothing, as it says in words, and no less privacy loss after more rounds."""
    defense = _defense(subject)
    if not overrides(defense, "guarantee"):
        said = "it says that something is proved, but overrides no 'guarantee'; override it, or leave 'promise' out"
        expect(defense.promise == NO_GUARANTEE, said)
        raise DoesNotApply("it promises nothing")
    client = Participation(num_examples=100, batch_size=10, steps=10, rounds=10)
    few, many = (defense.guarantee(replace(client, rounds=rounds), _DELTA) for rounds in (10, 20))
    for got in (few, many):
        if got is not None and not isinstance(got, Guarantee):
            raise Broken(f"guarantee returns {kind(got)}, expected a Guarantee or None")
        expect(got is None or got.epsilon > 0, f"it promises epsilon = {got.epsilon if got else 0}, expected above 0")
    if few and many:
        expect(few.epsilon <= many.epsilon, f"epsilon falls from {few.epsilon} to {many.epsilon} with more rounds")
    expect(defense.promise != NO_GUARANTEE, "it has a guarantee, but says of itself that it has none; set 'promise'")


def a_client_trains_under_it(subject: Subject) -> None:
    """A client trains and sends under it, and with the same seed sends the same bytes."""
    defense = _defense(subject)
    task = Task((1, 8, 8), 10)
    with seeded("contract", "model"):
        model = Mlp(hidden=(12,)).build(task)
    before, (inputs, labels) = state_of(model), _batch(_COUNT)
    settings = LocalTraining(local_epochs=2, batch_size=_BATCH, learning_rate=0.1)

    def sent() -> State:
        after, _ = local_update(model, before, inputs, labels, settings, key=("contract",), defenses=[defense])
        update = {name: after[name] - tensor for name, tensor in before.items()}
        memory: dict[str, Tensor] | None = {} if remembers(defense) else None
        return _dense(replaced_update(defense, update, generator(1), memory, generator("common")), before)

    try:
        with one_thread():
            first, again = sent(), sent()
    except ConfigError as error:
        raise Broken(f"a client cannot train under it: {error}") from error
    expect(common.same(first, again), "with the same seed a client sends something else")


def adversary_sees_gradients(subject: Subject) -> None:
    """What an adversary who knows it makes of a gradient has its form and a slope in it, and follows from it alone."""
    defense = _defense(subject)
    if defense.adversary_view(_other_state(), _sent(defense)) is None:
        raise DoesNotApply("what an adversary who knows it could make of a gradient is not known")
    for sent in (_sent(defense), _zeros()):
        for dummy in (_other_state(), _zeros()):
            _check_view(defense, dummy, sent)
    leaves = {name: tensor.requires_grad_(True) for name, tensor in _other_state().items()}
    view = defense.adversary_view(leaves, _sent(defense)) or {}
    seen = [tensor for tensor in view.values() if tensor.requires_grad]
    slopes = torch.autograd.grad([t.sum() for t in seen], list(leaves.values()), materialize_grads=True) if seen else ()
    expect(
        any(bool(slope.any()) for slope in slopes),
        "adversary_view does not change with the gradient, so that no dummy data can be moved by it; compute it from "
        "the gradient without 'detach', 'sign' or 'no_grad' alone",
    )


def adversary_mixes_records(subject: Subject) -> None:
    """What an adversary who knows it makes of a batch of records is a batch of mixtures, with a slope in them."""
    defense = _defense(subject)
    if not overrides(defense, "adversary_batch"):
        raise DoesNotApply("an adversary who knows it takes dummy examples for what was trained on")
    records, labels = torch.randn((4, 1, 8, 8), generator=generator("records")), torch.eye(10)[:4]
    leaf = records.clone().requires_grad_()
    with common.global_generators_untouched():
        mixed, soft = defense.adversary_batch(leaf, labels.clone())
    fits = mixed.shape == records.shape and soft.shape == labels.shape and soft.is_floating_point()
    expect(fits, f"adversary_batch returns {kind(mixed)} and {kind(soft)}, expected the shapes that it was given")
    expect(bool((soft.sum(1) - 1).abs().max() < 1e-5), "adversary_batch returns labels that are no probabilities")
    expect(mixed.requires_grad, "adversary_batch does not change with the records; compute it without 'detach'")


def _check_view(defense: Defense, dummy: State, sent: State) -> None:
    given, beside = ({name: tensor.clone() for name, tensor in state.items()} for state in (dummy, sent))
    with common.global_generators_untouched():
        seen = defense.adversary_view(given, beside)
    with common.other_global_generators(7):
        again = defense.adversary_view(given, beside)
    fits = isinstance(seen, Mapping) and seen.keys() == dummy.keys() and isinstance(again, Mapping)
    expect(fits, "adversary_view returns something else than a tensor for each name of the gradient")
    assert seen is not None
    assert again is not None
    for name, tensor in dummy.items():
        alike = isinstance(seen[name], Tensor) and seen[name].shape == tensor.shape and seen[name].is_floating_point()
        expect(alike, f"adversary_view returns '{name}' as {kind(seen[name])}, expected shape {tuple(tensor.shape)}")
    expect(not non_finite(seen), "adversary_view makes NaN or infinite values of numbers or zeros")
    expect(
        common.same(seen, again), "adversary_view returns something else for the same gradient; it is to draw nothing"
    )
    expect(common.same(given, dummy) and common.same(beside, sent), "adversary_view changes what it is handed")


CHECKS = (
    *common.CHECKS,
    is_a_defense,
    hooks_return_what_fits,
    draws_from_its_generator,
    does_something,
    the_shortcut_of_examples_gives_the_same,
    sampling_is_poisson_or_none,
    memory_is_all_that_it_keeps,
    guarantee_is_one,
    adversary_sees_gradients,
    adversary_mixes_records,
    a_client_trains_under_it,
)


@dataclass(frozen=True)
class _Case:
    """A hook of a defense that is called as a client calls it.

    Attributes:
        hook: its name.
        call: what comes of a state; of a batch the state lends nothing.
        untouched: what would come of it without the defense.
    """

    hook: str
    call: Callable[[State, torch.Generator], State]
    untouched: Callable[[State], State]


def _cases(defense: Defense) -> list[_Case]:
    """The hooks that it overrides; one gradient an example also of an empty batch, as Poisson sampling draws it."""

    def data(state: State, rng: torch.Generator) -> State:
        memory: dict[str, Tensor] | None = {} if remembers(defense) else None
        return {"places": kept_examples(defense, _local(), rng, memory).float()}

    def batch(state: State, rng: torch.Generator) -> State:
        inputs, labels = replaced_batch(defense, *_batch(_BATCH), rng)
        return {"inputs": inputs, "labels": labels.float()}

    def examples(state: State, rng: torch.Generator) -> State:
        parameters = _state()
        none = {name: tensor.new_zeros(0, *tensor.shape) for name, tensor in state.items()}
        empty = of_examples(defense, none, 3.0, parameters, rng)
        expect(not non_finite(empty), "on_examples makes NaN or infinite values of an empty batch")
        return of_examples(defense, _each(state), 3.0, parameters, rng)

    def gradient(state: State, rng: torch.Generator) -> State:
        return replaced_gradient(defense, state, rng, _state())

    def update(state: State, rng: torch.Generator) -> State:
        memory: dict[str, Tensor] | None = {} if remembers(defense) else None
        return _dense(replaced_update(defense, state, rng, memory, generator("common")), state)

    def features(state: State, rng: torch.Generator) -> State:
        given, inputs = _features(state)
        return {"features": replaced_features(defense, given, inputs, rng).detach()}

    def plain_features(state: State) -> State:
        return {"features": _features(state)[0].detach()}

    def plain_batch(state: State) -> State:
        inputs, labels = _batch(_BATCH)
        return {"inputs": inputs, "labels": labels.float()}

    cases = [
        _Case("on_data", data, lambda state: {"places": torch.arange(_COUNT).float()}),
        _Case("on_batch", batch, plain_batch),
        _Case("on_features", features, plain_features),
        _Case("on_examples", examples, lambda state: {name: each.sum(0) / 3 for name, each in _each(state).items()}),
        _Case("on_gradient", gradient, dict),
        _Case("on_update", update, dict),
    ]
    assert [case.hook for case in cases] == list(HOOKS)
    return [case for case in cases if overrides(defense, case.hook)]


def _defense(subject: Subject) -> Defense:
    """As a client uses it that takes part in a few rounds."""
    client = Participation(
        num_examples=_COUNT,
        batch_size=_BATCH,
        steps=_COUNT // _BATCH,
        rounds=_ROUNDS,
        num_classes=10,
        value_range=((0.0,), (1.0,)),
    )
    return cast("Defense", subject.build()).of_client(client)


def _state() -> dict[str, Tensor]:
    """A dozen and some numbers, of which clipping to a norm of 1 leaves less."""
    return {"a": torch.randn((4, 3), generator=generator("a")), "b": torch.randn(5, generator=generator("b"))}


def _other_state() -> dict[str, Tensor]:
    """As the gradient of dummy data, which is not that of the data."""
    return {name: torch.randn(tensor.shape, generator=generator("other", name)) for name, tensor in _state().items()}


def _sent(defense: Defense) -> State:
    """What comes of a state, as gradient and as update."""
    hooks = {case.hook: case for case in _cases(defense)}
    state: State = _state()
    for hook in ("on_gradient", "on_update"):
        state = hooks[hook].call(state, generator(1)) if hook in hooks else state
    return state


def _zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in _state().items()}


def _each(state: State) -> State:
    """Three multiples of a state, as gradients of three examples."""
    return {name: torch.stack([tensor, -2 * tensor, 3 * tensor]) for name, tensor in state.items()}


def _features(state: State) -> tuple[Tensor, Tensor]:
    """Features of a batch, a smooth function of its inputs and of a state, and these inputs."""
    inputs = _batch(_BATCH)[0].requires_grad_(True)
    weights = torch.randn((64, state["b"].numel()), generator=generator("features")) * state["b"]
    return (inputs.flatten(1) @ weights).tanh(), inputs


def _local() -> LocalRound:
    """A round of a client that sends an update."""
    task, training = Task((1, 8, 8), 10), LocalTraining(local_epochs=1, batch_size=_BATCH, learning_rate=0.1)
    with seeded("contract", "model"):
        model = Mlp(hidden=(12,)).build(task)
    inputs, labels = _batch(_COUNT)
    return LocalRound.of(model, Share(inputs=inputs, labels=labels, key=("contract",)), training, task.loss)


def _batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.rand((count, 1, 8, 8), generator=generator("x")), torch.arange(count) % 10


def _dense(sent: State | Payload, before: State) -> State:
    return sent.values("delta", before) if isinstance(sent, Payload) else sent
