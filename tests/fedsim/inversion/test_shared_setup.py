"""Victims of one federation share what their set-up asks of the model, and weights that are equal."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion import model_checks, shared_setup
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.shared_setup import ModelCopies, ask_once, move_weights
from fedsim.training.model_state import copy_state
from tests.support.recordings import build_update

META = torch.device("meta")


class Builder:
    """Builds a small network, of another width where it is told."""

    width = 3

    def __call__(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(4, self.width), nn.Sigmoid(), nn.Linear(self.width, 2))


def knowledge(builder: Builder) -> Knowledge:
    return Knowledge(
        model=builder, loss=nn.functional.cross_entropy, input_shape=(1, 2, 2), value_range=((0.0,), (1.0,))
    )


def test_a_question_about_a_model_is_asked_once_for_all_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    find = model_checks.find_training_only_layer

    def count(model: nn.Module, inputs: Tensor) -> str | None:
        asked.append(model)
        return find(model, inputs)

    monkeypatch.setattr(model_checks, "find_training_only_layer", count)
    builder = Builder()
    for _ in range(3):
        before = copy_state(builder())
        after = {name: tensor + torch.rand(tensor.shape) for name, tensor in before.items()}
        build_problem(build_update(before, after, num_examples=1), knowledge(builder))
    assert len(asked) == 1


def test_other_models_hooks_and_modes_and_what_failed_are_asked_about_anew() -> None:
    builder, asked = Builder(), list[nn.Module]()

    def ask(model: nn.Module, known: Knowledge) -> str:
        def compute() -> str:
            asked.append(model)
            return "yes"

        return ask_once("a question", model, known, compute)

    ask(builder(), knowledge(builder))
    assert ask(builder(), knowledge(builder)) == "yes"
    assert len(asked) == 1
    hooked = builder()
    hooked.register_forward_hook(lambda module, inputs, output: output)
    masked = builder()
    masked.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    builder.width = 4
    for model in (builder(), hooked, builder().eval(), masked, masked):
        ask(model, knowledge(builder))
    other = Builder()
    ask(builder(), knowledge(other))
    assert len(asked) == 7
    with pytest.raises(ValueError, match="no answer"):
        ask_once("another", builder(), knowledge(builder), lambda: (_ for _ in ()).throw(ValueError("no answer")))
    assert ask_once("another", builder(), knowledge(builder), lambda: 5) == 5
    number = id(builder)
    assert number in shared_setup._answers
    builder = Builder()
    gc.collect()
    assert number not in shared_setup._answers


def test_equal_weights_are_moved_once_and_let_go_with_the_last_problem() -> None:
    before = copy_state(Builder()())
    names = list(before)
    first = move_weights(before, names, META)
    second = move_weights({name: tensor.clone() for name, tensor in before.items()}, names, META)
    assert all(one is other for one, other in zip(first, second, strict=True))
    changed = before | {names[0]: before[names[0]] + 1}
    third = move_weights(changed, names, META)
    assert [one is other for one, other in zip(first, third, strict=True)] == [False, True, True, True]
    del first, second, third
    gc.collect()
    assert not shared_setup._moved_weights[META]
    # A CPU has nothing to move.
    here = move_weights(before, names, torch.device("cpu"))
    assert all(tensor is before[name] for name, tensor in zip(names, here, strict=True))


class CountedBuilder:
    """Counts the models it makes, which differ from each other as it is told."""

    def __init__(self, difference: str = "") -> None:
        self.calls, self.difference = 0, difference

    def __call__(self) -> nn.Module:
        self.calls += 1
        model = Builder()()
        if self.difference == "weights":
            next(model.parameters()).data += self.calls
        elif self.difference == "attribute":
            model.scale = {"by": (1.0, float(self.calls))}
        elif self.difference == "function":
            model.change = lambda inputs: inputs
        elif self.difference == "tensor":
            model.seen = torch.full((2,), self.calls)
        elif self.difference == "not to be copied":
            model.seen = torch.ones(2, requires_grad=True) + 1
        elif self.difference == "a cycle":
            next(model.children()).models = [model]  # cannot be compared
        return model


def test_a_model_that_is_built_alike_twice_is_copied_from_then_on() -> None:
    builder = CountedBuilder()
    copies = ModelCopies(builder, torch.device("cpu"))
    models = [copies() for _ in range(5)]
    assert builder.calls == 2
    weights = [next(model.parameters()) for model in models]
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert len({weight.data_ptr() for weight in weights}) == 5  # nobody changes another one's


@pytest.mark.parametrize("difference", ["weights", "attribute", "function", "tensor", "not to be copied", "a cycle"])
def test_a_builder_that_makes_another_model_each_time_is_asked_each_time(difference: str) -> None:
    builder = CountedBuilder(difference)
    copies = ModelCopies(builder, torch.device("cpu"))
    models = [copies() for _ in range(4)]
    assert builder.calls == 4
    if difference == "weights":
        assert len({next(model.parameters()).sum().item() for model in models}) == 4


def test_answers_are_those_of_the_builder_that_is_copied() -> None:
    builder = Builder()
    assert ask_once("of both", builder(), knowledge(builder), lambda: 1) == 1
    copies = replace(knowledge(builder), model=ModelCopies(builder, torch.device("cpu")))
    assert ask_once("of both", builder(), copies, lambda: 2) == 1
