"""A defense that does not do what it should sends nothing: the client fails, and undefended weights never leave."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from clients.mods import as_mod, defend_payload
from fedsim.base.errors import PayloadError, PluginError, RunError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.defense_checks import check_defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.payloads import Kind, Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.training.local_round import LocalRound
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_tiny_config, run_serial

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")


class Hooks(Defense):
    """Does at each hook what it is made to do."""

    paper = PAPER

    def __init__(self, update: Any = None, gradient: Any = None, batch: Any = None) -> None:
        self.__dict__.update(update=update, gradient=gradient, batch=batch)

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        return self.__dict__["batch"](inputs, labels) if self.__dict__["batch"] else (inputs, labels)  # type: ignore[no-any-return]

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        return self.__dict__["gradient"](gradient) if self.__dict__["gradient"] else gradient  # type: ignore[no-any-return]

    def on_update(self, update: State, context: LocalContext) -> State:
        return self.__dict__["update"](update) if self.__dict__["update"] else update  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class LeavesOut(Defense):
    """Sends only the last tensor of an update."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> State:
        return dict(list(update.items())[-1:])


@dataclass(frozen=True, kw_only=True)
class ZeroInPlace(Defense):
    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> State:
        for tensor in update.values():
            tensor.zero_()
        return update


def zeroed(state: State) -> State:
    for tensor in state.values():
        tensor.zero_()
    return state


BEFORE = {"w": torch.linspace(-1, 1, 6).reshape(2, 3), "b": torch.tensor([0.5, 0.25])}
AFTER = {name: tensor + 0.3 for name, tensor in BEFORE.items()}
BAD: list[tuple[Callable[[State], Any], str]] = [
    (lambda state: {"w": state["w"]}, "'b' was left out; return the same names"),
    (lambda state: {**state, "x": state["w"]}, "'x' was added; return the same names"),
    (lambda state: {**state, "b": torch.tensor(0.0)}, "expected 'b' as a floating tensor of shape (2,) back, got"),
    (lambda state: {**state, "w": state["w"][:1]}, "got float32 of shape (1, 3)"),
    (lambda state: {**state, "w": state["w"].long()}, "got int64 of shape (2, 3)"),
    (lambda state: {**state, "w": 0.0}, "got a float"),
    (lambda state: None, "expected a dict of tensors by name back, got nothing"),
    (lambda state: state["w"], "expected a dict of tensors by name back, got float32 of shape (2, 3)"),
]


@pytest.mark.parametrize(("hook", "expected"), BAD)
@pytest.mark.parametrize("sends", ["weights", "gradient"])
def test_what_a_hook_forgets_or_broadcasts_is_not_sent(hook: Any, expected: str, sends: Kind) -> None:
    with pytest.raises(RunError) as error:
        defend_payload(Hooks(update=hook), BEFORE, Payload.from_dense(AFTER, sends), LocalContext(rng=generator(0)))
    assert str(error.value).startswith("Hooks.on_update: ")
    assert expected in str(error.value)


def test_an_update_that_is_zeroed_in_place_leaves_as_zero() -> None:
    context = LocalContext(rng=generator(0))
    payload = defend_payload(Hooks(update=zeroed), BEFORE, Payload.from_dense(AFTER, "weights"), context)
    sent = payload.weights_after(BEFORE)
    assert {name: tensor.tolist() for name, tensor in sent.items()} == {n: t.tolist() for n, t in BEFORE.items()}
    gradient = defend_payload(Hooks(update=zeroed), BEFORE, Payload.from_dense(AFTER, "gradient"), context)
    assert not any(tensor.any() for tensor in gradient.values("gradient", BEFORE).values())


def test_what_a_hook_changes_belongs_to_it_and_its_types_stay() -> None:
    kept = {name: tensor.clone() for name, tensor in AFTER.items()}
    twice = Hooks(update=lambda u: {n: t.mul_(2).double() for n, t in u.items()})
    payload = defend_payload(twice, BEFORE, Payload.from_dense(AFTER, "weights"), LocalContext(rng=generator(0)))
    sent = payload.weights_after(BEFORE)
    assert all(torch.equal(AFTER[name], kept[name]) for name in kept)
    assert {tensor.dtype for tensor in sent.values()} == {torch.float32}
    torch.testing.assert_close(sent, {name: tensor + 0.6 for name, tensor in BEFORE.items()})


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"w": AFTER["w"], "b": torch.tensor(1.0)}, "is to be sent as float32 of shape ()"),
        ({"w": AFTER["w"].to(torch.int8), "b": AFTER["b"]}, "is to be sent as int8 of shape (2, 3)"),
        ({"w": AFTER["w"] + 0j, "b": AFTER["b"]}, "is to be sent as complex64 of shape (2, 3)"),
        ({**AFTER, "data": torch.ones(3, dtype=torch.int64)}, "'data' was not broadcast"),
    ],
)
def test_what_has_no_difference_to_the_broadcast_is_not_sent(after: State, expected: str) -> None:
    with pytest.raises(RunError) as error:
        defend_payload(Hooks(), BEFORE, Payload.from_dense(after, "weights"), LocalContext(rng=generator(0)))
    assert expected in str(error.value)


def test_counts_of_the_data_do_not_pass_a_defense_in_clear() -> None:
    before = {**BEFORE, "class_counts": torch.zeros(3, dtype=torch.int64), "steps": torch.tensor(0)}
    after = {**AFTER, "class_counts": torch.zeros(3, dtype=torch.int64), "steps": torch.tensor(5)}
    context = LocalContext(rng=generator(0))
    sent = defend_payload(Hooks(), before, Payload.from_dense(after, "weights"), context).arrays()
    assert sent["steps"].item() == 5
    after["class_counts"] = torch.tensor([4, 0, 2])
    with pytest.raises(RunError, match="'class_counts' holds integers, on which no defense acts, and has changed"):
        defend_payload(Hooks(), before, Payload.from_dense(after, "weights"), context)


# Inside local training, of weights and of gradients.


def net() -> nn.Module:
    torch.manual_seed(0)
    return Mlp(hidden=(4,)).build(Task((6,), 3))


def trained_by(*defenses: Defense) -> State:
    inputs, labels = torch.rand((4, 6), generator=generator("x")), torch.tensor([0, 1, 2, 0])
    settings = LocalTraining(local_steps=2, batch_size=4, learning_rate=0.1)
    return local_update(net(), copy_state(net()), inputs, labels, settings, key=("k",), defenses=defenses)[0]


def trained(defense: Defense, sends: str) -> State:
    inputs, labels = torch.rand((4, 6), generator=generator("x")), torch.tensor([0, 1, 2, 0])
    if sends == "weights":
        return trained_by(defense)
    settings = LocalTraining(local_steps=1, batch_size=4, learning_rate=0.1, sends="gradient")
    return local_gradient(net(), copy_state(net()), inputs, labels, settings, key=("k",), defenses=[defense])[0]


@pytest.mark.parametrize("sends", ["weights", "gradient"])
@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda gradient: {}, "was left out"),
        (lambda gradient: {name: torch.tensor(0.0) for name in gradient}, "got float32 of shape ()"),
        (lambda gradient: None, "got nothing"),
    ],
)
def test_a_gradient_that_a_hook_leaves_out_is_not_learned_from(hook: Any, expected: str, sends: str) -> None:
    with pytest.raises(RunError) as error:
        trained(Hooks(gradient=hook), sends)
    assert str(error.value).startswith("Hooks.on_gradient: ")
    assert expected in str(error.value)


@pytest.mark.parametrize("sends", ["weights", "gradient"])
def test_a_gradient_that_is_zeroed_in_place_is_zero(sends: str) -> None:
    got = trained(Hooks(gradient=zeroed), sends)
    start = copy_state(net())
    for name, tensor in got.items():
        assert torch.equal(tensor, start[name] if sends == "weights" else torch.zeros_like(tensor))


@pytest.mark.parametrize("sends", ["weights", "gradient"])
@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda inputs, labels: None, "expected a pair of tensors (inputs, labels) back, got nothing"),
        (lambda inputs, labels: inputs, "expected a pair of tensors (inputs, labels) back, got float32"),
        (lambda inputs, labels: (inputs[1:], labels), "expected one label for each of 3 inputs back, got int64"),
        (lambda inputs, labels: (inputs[:0], labels[:0]), "expected inputs of shape (example, 6) back, got float32"),
        (lambda inputs, labels: (inputs[:, :1], labels), "expected inputs of shape (example, 6) back, got float32"),
        (lambda inputs, labels: (inputs.sum(), labels), "got float32 of shape ()"),
        (lambda inputs, labels: (inputs, labels.float()), "expected one label for each of 4 inputs back, got float32"),
    ],
)
def test_a_batch_that_does_not_fit_together_is_not_learned_from(hook: Any, expected: str, sends: str) -> None:
    with pytest.raises(RunError) as error:
        trained(Hooks(batch=hook), sends)
    assert str(error.value).startswith("Hooks.on_batch: ")
    assert expected in str(error.value)


def test_a_batch_changed_in_place_changes_no_data_of_the_client() -> None:
    inputs, labels = torch.rand((4, 6), generator=generator("x")), torch.tensor([0, 1, 2, 0])
    kept = inputs.clone()
    settings = LocalTraining(local_steps=1, batch_size=4, learning_rate=0.1)
    own = [torch.arange(4)]

    def spoil(batch: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return batch.zero_(), targets

    local_update(
        net(), copy_state(net()), inputs, labels, settings, key=("k",), defenses=[Hooks(batch=spoil)], order=own
    )
    local_gradient(net(), copy_state(net()), inputs, labels, settings, key=("k",), defenses=[Hooks(batch=spoil)])
    assert torch.equal(inputs, kept)


def test_a_batch_may_be_of_other_size_and_of_probabilities() -> None:
    def mix(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs[1:] / 2 + inputs[:-1] / 2, torch.full((len(labels) - 1, 3), 1 / 3)

    assert trained(Hooks(batch=mix), "weights").keys() == copy_state(net()).keys()


def test_a_batch_of_probabilities_goes_through_the_next_defense() -> None:
    def spread(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, torch.full((len(labels), 3), 1 / 3)

    alone, before_another = (trained_by(Hooks(batch=spread), *others) for others in ([], [Hooks()]))
    assert all(torch.equal(before_another[name], tensor) for name, tensor in alone.items())
    with pytest.raises(RunError, match="expected one label for each of 4 inputs back, got float32 of shape"):
        trained_by(Hooks(batch=spread), Hooks(batch=lambda inputs, labels: (inputs, labels[:, :2])))
    with pytest.raises(RunError, match="expected one label for each of 4 inputs back, got int64 of shape"):
        trained_by(Hooks(batch=lambda inputs, labels: (inputs, torch.tensor(0))))


# Plug-ins that could never defend anything.


class Idle(Defense):
    paper = PAPER


class Plural(Defense):
    paper = PAPER

    def on_updates(self, update: State, context: LocalContext) -> State:
        return {}


class OneTooMany(Hooks):
    def on_gradients(self, gradient: State, context: LocalContext) -> State:
        return {}


class Camel(Defense):
    paper = PAPER

    def onUpdate(self, update: State, context: LocalContext) -> State:
        return {}


class CallsMixes(Hooks):
    mix = True

    def mixed(self) -> None:
        """A name of its own, which is near one of the interface that is no method."""


def misspelt(name: str, value: Any) -> Defense:
    return cast("Defense", type("Misspelt", (Hooks,), {name: value})())


MISSPELT = {
    "check_combinations": "check_combination",
    "example_factor": "example_factors",
    "on_sums": "on_sum",
    "onSum": "on_sum",
    "of_clients": "of_client",
    "compose_guarantee": "compose_guarantees",
    "guarantees": "guarantee",
    "adversary_views": "adversary_view",
    "adversarial_batch": "adversary_batch",
    "samplings": "sampling",
    "checks": "check",
}


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_a_name_that_is_nearly_one_of_the_interface_is_refused(name: str, meant: str) -> None:
    words = f"'{name}' is not a hook of a defense and would never be called, did you mean '{meant}'?"
    with pytest.raises(PluginError, match=re.escape(words)):
        check_defense(misspelt(name, lambda self: None))


def test_what_a_defense_says_of_itself_is_spelt_as_it_is_looked_at() -> None:
    with pytest.raises(PluginError, match=r"'sumable' is not a hook .* did you mean 'summable'\?"):
        check_defense(misspelt("sumable", property(lambda self: True)))
    for name, meant in {"encode": "encodes", "flip_signs": "flips_signs", "promises": "promise"}.items():
        with pytest.raises(
            PluginError, match=f"'{name}' is not an attribute that is looked at, did you mean '{meant}'"
        ):
            check_defense(misspelt(name, True))
    assert check_defense(CallsMixes())


def test_each_method_that_may_be_overridden_is_guarded_against_being_set_on_an_instance() -> None:
    for name in ("on_update", "on_sum", "guarantee", "check_combination", "summable"):
        thing = Hooks()
        vars(thing)[name] = lambda: None
        with pytest.raises(PluginError, match=f"'{name}' is set on an instance, where it is never called"):
            check_defense(thing)


class NoContext(Defense):
    paper = PAPER

    def on_update(self, update: State) -> State:  # type: ignore[override]
        return update


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (
            Idle(),
            "Idle: overrides none of sampling, on_data, on_batch, on_features, on_examples, "
            "on_gradient, on_update, so it defends",
        ),
        (
            Plural(),
            "Plural: 'on_updates' is not a hook of a defense and would never be called, did you mean 'on_update'?",
        ),
        (OneTooMany(), "OneTooMany: 'on_gradients' is not a hook of a defense"),
        (Camel(), "Camel: 'onUpdate' is not a hook of a defense and would never be called, did you mean 'on_update'?"),
        (NoContext(), "NoContext: 'on_update' cannot be called as on_update(update, context) (too many positional"),
        (Hooks, "Hooks: expected a defense, made from a class that derives from fedsim.interfaces.defense.Defense"),
        (object(), "builtins.object: expected a defense"),
    ],
)
@pytest.mark.parametrize("door", [check_defense, as_mod])
def test_a_class_that_would_defend_nothing_is_refused_by_name(door: Any, thing: Any, expected: str) -> None:
    with pytest.raises(PluginError) as error:
        door(thing)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_an_experiment_refuses_a_defense_with_a_misspelt_hook() -> None:
    config = make_tiny_config(defense=[{"name": f"{__name__}:Plural"}], attack=[])
    with pytest.raises(PluginError, match="did you mean"):
        _ = Experiment(config).defenses


def test_a_mod_refuses_a_defense_that_it_cannot_carry_out() -> None:
    class Inside(Defense):
        paper = PAPER

        def on_gradient(self, gradient: State, context: LocalContext) -> State:
            return gradient

    with pytest.raises(PluginError, match=r"Inside: 'on_gradient' acts inside local training, where a mod cannot"):
        as_mod(Inside())


# A federation, with clients that train several at once and one by one.


@pytest.mark.parametrize("vectorise", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("strategy", [{"name": "fedavg"}, {"name": "fedsgd", "learning_rate": 0.1}])
def test_a_federation_sends_a_zeroed_update_or_none(tmp_path: Path, vectorise: bool, strategy: dict[str, Any]) -> None:
    tables = {
        "strategy": strategy,
        "training": {"local_epochs": None, "local_steps": 1, "learning_rate": 0.01},
        "federation": {"rounds": 1, "vectorise": vectorise},
        "attack": [],
    }
    run = run_serial(make_tiny_config(defense=[{"name": f"{__name__}:ZeroInPlace"}], **tables), tmp_path / "zero")
    for update in Transcript(run.path).updates():
        assert not any(tensor.any() for tensor in update.pseudo_gradient.values())
    with pytest.raises(RunError, match=r"all 4 clients failed .*LeavesOut.on_update: .* was left out"):
        run_serial(make_tiny_config(defense=[{"name": f"{__name__}:LeavesOut"}], **tables), tmp_path / "less")
    assert list((tmp_path / "less" / "transcript").iterdir()) == []


def test_labels_of_too_few_classes_are_named() -> None:
    def soften(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, torch.full((len(labels), 2), 0.5)

    with pytest.raises(RunError, match="labels of 2 classes for a model of 3 outputs; let its of_client keep"):
        trained_by(Hooks(batch=soften))


def test_scales_that_are_no_tensors_are_named() -> None:
    with pytest.raises(
        PayloadError, match="'w' has integers or scales that are no tensor but a float; make one of them"
    ):
        Payload.from_integers({"w": torch.ones(2, dtype=torch.int8)}, {"w": 0.5})  # type: ignore[dict-item]


@dataclass(frozen=True, kw_only=True)
class SendsGlobalNoise(Defense):
    """Sends what torch's global generator draws, as a library would."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: torch.randn(tensor.shape) for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class DrawsAhead(Defense):
    """Draws one number, and changes nothing."""

    paper = PAPER

    def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
        return torch.arange(len(local.labels) + int(torch.rand(1)))

    def on_update(self, update: State, context: LocalContext) -> State:
        torch.rand(1)
        return update


def test_what_a_defense_draws_from_global_generators_depends_on_no_other_draw(tmp_path: Path) -> None:
    """Else it would be another noise on each engine, and with each number of clients."""
    noise = []
    for number, names in enumerate((["SendsGlobalNoise"], ["DrawsAhead", "SendsGlobalNoise"])):
        defenses = [{"name": f"{__name__}:{name}"} for name in names]
        tables = {"defense": defenses, "federation": {"rounds": 1}, "attack": []}
        run = run_serial(make_tiny_config(**tables), tmp_path / str(number))
        noise.append([next(iter(update.pseudo_gradient.values())) for update in Transcript(run.path).updates()])
    assert all(torch.allclose(first, second) for first, second in zip(*noise, strict=True))
    assert not torch.allclose(noise[0][0], noise[0][1])
