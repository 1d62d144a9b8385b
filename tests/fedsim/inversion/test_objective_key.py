"""One key decides which victims share a call, and which share a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from adversaries.inversion.inverting_gradients import InvertingGradients
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion import compiled_objective
from fedsim.inversion.compiled_objective import objective_key
from fedsim.inversion.distances import Cosine, PartialCosine, SquaredL2
from fedsim.inversion.parametrisations import PublicComponents
from fedsim.inversion.priors import MeanSquare, TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.update_models import SurrogatePoint
from fedsim.training.model_state import copy_state
from tests.support.recordings import build_update

PLAIN = Recipe(priors=[(0.1, TotalVariation())])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Sigmoid(), nn.Linear(6, 4))


def knowledge() -> Knowledge:
    return Knowledge(
        model=network,
        loss=nn.functional.cross_entropy,
        input_shape=(1, 4, 4),
        value_range=((0.0,), (1.0,)),
        labels=torch.tensor([1, 3]),
        local_epochs=1,
        batch_size=2,
    )


def update(form: Any = "weights", client: int = 0) -> Any:
    before = copy_state(network())
    rng = generator("key", client)
    sent = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=rng) for name, tensor in before.items()}
    return build_update(before, sent, form, client=client, num_examples=2)


def problem(form: Any = "weights") -> InversionProblem:
    return InvertingGradients()._prepare_task(update(form), knowledge(), generator(0)).problem


def key(recipe: Recipe, of: InversionProblem, **values: torch.Tensor) -> Any:
    return objective_key(recipe, of, {"dummy": torch.zeros(2, 1, 4, 4), **values}, [])


@pytest.mark.parametrize(
    "other",
    [
        {"update_model": SurrogatePoint()},
        {"distance": SquaredL2()},
        {"distance": Cosine(layers=(1.0, 1.0, 1.0, 2.0))},
        {"priors": [(0.2, TotalVariation())]},
        {"priors": [(0.1, MeanSquare())]},
        {"parametrisation": PublicComponents(components=2, weight=1.0, spread=1.0)},
        {"label_step_size": 0.1},
        {"smoothing": 0.5},
        {"smoothing_radius": 0.1},
        {"relu_width": 0.3},
        {"distance": PartialCosine(0.5)},
    ],
    ids=lambda other: "-".join(f"{name} {value!r}"[:40] for name, value in other.items()),
)
def test_each_part_of_the_objective_is_in_its_key(other: dict[str, Any]) -> None:
    of = problem()
    assert key(PLAIN, of) == key(replace(PLAIN, priors=[(0.1, TotalVariation())]), problem())
    assert key(PLAIN, of) != key(replace(PLAIN, **other), of)


def test_what_is_not_of_the_objective_is_not_in_its_key() -> None:
    of = problem()
    assert key(PLAIN, of) == key(replace(PLAIN, step_size=0.3, optimizer="sgd", noise=0.1), of)


@pytest.mark.parametrize(
    "facts", [{"smooth_dimensions": (3,)}, {"num_clients": 2}, {"learning_rate": 0.3}, {"momentum": 0.5}], ids=str
)
def test_facts_are_in_the_key(facts: dict[str, Any]) -> None:
    assert key(PLAIN, problem()) != key(PLAIN, replace(problem(), **facts))


def test_tensors_of_the_same_shapes_and_of_other_names_are_told_apart() -> None:
    """A gradient that was sent has the shapes of w_T, and the guess of one unknown part those of another."""
    sent, returned = problem("gradient"), problem()
    alike = replace(returned, learning_rate=sent.learning_rate, local_epochs=sent.local_epochs)
    assert key(PLAIN, sent) != key(PLAIN, alike)
    assert key(PLAIN, sent, first=torch.zeros(3)) != key(PLAIN, sent, second=torch.zeros(3))


weight = [0.0]


@dataclass(frozen=True, kw_only=True)
class Tuned(InvertingGradients):
    """An attack whose settings do not say what its recipe is."""

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return replace(super()._recipe(problem), priors=[(weight[0], TotalVariation())])


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """The graphs that were traced, none of which is compiled."""
    graphs: list[Callable[..., Any]] = []

    def note(graph: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", note)
    monkeypatch.setattr(compiled_objective, "_cache", [])
    return graphs


def test_a_compiled_graph_serves_other_victims_and_no_other_recipe(traced: list[Any]) -> None:
    """Also where the objective differs by so little that no comparison of values sees it."""

    def attack(prior_weight: float, client: int = 0, **settings: Any) -> Any:
        weight[0] = prior_weight
        method = Tuned(**{"iterations": 3, "compile": True, **settings})
        return method.invert(update(client=client), knowledge(), generator(1), lambda *_: None)

    attack(1e-5)
    attack(1e-5, client=1)
    attack(1e-5, iterations=2, restarts=2, step_size=0.1)
    assert len(traced) == 1
    made = attack(2e-5)
    assert len(traced) == 2
    assert torch.equal(made.data, attack(2e-5, compile=False).data)


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body, self.factor = network(), factor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.factor * self.body(inputs))


def test_models_of_one_description_that_compute_different_things_keep_a_graph_each(traced: list[Any]) -> None:
    before = copy_state(Scaled(1.0))
    sent = {name: tensor + 0.1 for name, tensor in before.items()}
    for factor in (1.0, 3.0, 1.0, 3.0):
        known = replace(knowledge(), model=lambda factor=factor: Scaled(factor))
        method, of = InvertingGradients(iterations=3), build_update(before, sent, num_examples=2)
        eager, fast = (
            replace(method, compile=is_compiled).invert(of, known, generator(1), lambda *_: None)
            for is_compiled in (False, True)
        )
        torch.testing.assert_close(fast.data, eager.data)
    assert len(traced) == 2


FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("cause", "expected", "text"),
    [
        (OSError("no compiler found"), AttackError, r"cannot be compiled \(no compiler found\); set compile = false"),
        (FULL, torch.OutOfMemoryError, "CUDA out of memory"),
    ],
    ids=["compiler", "device"],
)
def test_what_the_compiler_fails_at_is_named(
    cause: Exception, expected: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch wraps it in an error whose first line names the backend alone."""
    from torch._dynamo.exc import BackendCompilerFailed

    def fail(graph: Any, **how: Any) -> Any:
        raise BackendCompilerFailed(lambda: None, cause, None)

    monkeypatch.setattr(torch, "compile", fail)
    monkeypatch.setattr(compiled_objective, "_cache", [])
    method = InvertingGradients(iterations=1, compile=True)
    with pytest.raises(expected, match=text):
        method.invert(update(), knowledge(), generator(1), lambda *_: None)
