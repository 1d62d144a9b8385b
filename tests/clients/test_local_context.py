"""What a stranger can write as a defense with its context: each against the same thing done by hand."""

from __future__ import annotations

import dataclasses
import textwrap
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.defenses.dp_sgd import DpSgd
from fedsim.base.errors import RunError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import ClientRound, LocalContext
from fedsim.training.cohort import LocalData, local_updates
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

SETTINGS = LocalTraining(local_epochs=2, batch_size=4, learning_rate=0.1)
KEY = (3, "train", 1, 0)


def network() -> nn.Module:
    with seed_globals("context"):
        return Mlp(hidden=(6,)).build(Task((1, 4, 4), 3))


def batch(count: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn((count, 1, 4, 4), generator=generator("inputs")), torch.arange(count) % 3


def train(*defenses: Defense, model: nn.Module | None = None, settings: LocalTraining = SETTINGS, **how: Any) -> Any:
    model = model or network()
    return local_update(model, copy_state(model), *batch(), settings, key=KEY, defenses=defenses, **how)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharpness(Defense):
    """Sharpness-aware minimisation: the gradient a little uphill."""

    rho: float = 0.05

    def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
        norm = torch.cat([tensor.flatten() for tensor in gradient.values()]).norm()
        weights = context.weights
        return context.gradient_at(
            {name: weights[name] + self.rho * tensor / norm for name, tensor in gradient.items()}
        )


def test_a_sharpness_aware_step_is_what_it_is_by_hand() -> None:
    model, (inputs, labels) = network(), batch()
    settings = dataclasses.replace(SETTINGS, local_epochs=None, local_steps=3, batch_size=8)
    result = train(Sharpness(), settings=settings)
    for _ in range(3):
        gradients = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter += 0.05 * gradient / norm
        uphill = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient, step in zip(model.parameters(), gradients, uphill, strict=True):
                parameter -= 0.05 * gradient / norm + 0.1 * step
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_the_sharpness_aware_step_of_the_docstring_is_finite_where_all_is_zero() -> None:
    code = (LocalContext.__doc__ or "").partition("as a defense:")[2].partition("Attributes:")[0]
    example: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(code), example)
    context = SimpleNamespace(weights={"w": torch.ones(2)}, gradient_at=lambda weights: weights)
    zeros = {"w": torch.zeros(2)}
    assert torch.equal(example["on_gradient"](SimpleNamespace(rho=0.05), zeros, context)["w"], torch.ones(2))


def test_a_proximal_term_of_ones_own_is_fedprox() -> None:
    class Pull(Defense):
        def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
            weights, start = context.weights, context.broadcast
            return {name: tensor + 0.5 * (weights[name] - start[name]) for name, tensor in gradient.items()}

    fedprox = train(settings=dataclasses.replace(SETTINGS, proximal_mu=0.5))
    for name, tensor in train(Pull()).items():
        torch.testing.assert_close(tensor, fedprox[name], rtol=1e-5, atol=1e-7)


def test_adversarial_training_moves_inputs_up_the_gradient() -> None:
    class Adversarial(Defense):
        def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> Any:
            return inputs + 0.1 * context.input_gradient(inputs, labels).sign(), labels

    model, (inputs, labels) = network(), batch()
    settings = dataclasses.replace(SETTINGS, local_epochs=None, local_steps=1, batch_size=8)
    result = train(Adversarial(), settings=settings)
    leaf = inputs.clone().requires_grad_()
    (towards,) = torch.autograd.grad(cross_entropy(model(leaf), labels), leaf)
    gradients = torch.autograd.grad(
        cross_entropy(model(inputs + 0.1 * towards.sign()), labels), list(model.parameters())
    )
    for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(result[name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_a_gradient_elsewhere_leaves_statistics_and_dropout_as_they_are() -> None:
    class Looks(Defense):
        def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
            here = context.gradient_at(context.weights)
            assert here.keys() == gradient.keys()
            return gradient

    def model() -> nn.Module:
        with seed_globals("context"):
            return nn.Sequential(
                nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)
            )

    settings = dataclasses.replace(SETTINGS, batch_norm_statistics="shared", dropout=True)
    with_look, without = (train(*some, model=model(), settings=settings) for some in ([Looks()], []))
    assert with_look.keys() == without.keys()
    assert all(torch.equal(with_look[name], without[name]) for name in without)


def test_the_gradient_at_the_current_weights_is_the_gradient() -> None:
    seen: list[float] = []

    class Compares(Defense):
        def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
            here = context.gradient_at({})
            seen.extend(float((here[name] - tensor).abs().max()) for name, tensor in gradient.items())
            return gradient

    train(Compares())
    assert len(seen) == 4 * 4
    assert max(seen) < 1e-6


def test_hooks_know_round_step_and_what_their_client_kept() -> None:
    class Counts(Defense):
        moments: ClassVar[list[tuple[int, int, int]]] = []

        def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
            steps = int(context.memory.get("steps", torch.tensor(0))) + 1
            context.memory["steps"] = torch.tensor(steps)
            self.moments.append((context.round, context.step, steps))
            return gradient

    memories: dict[tuple[str, int], dict[str, Tensor]] = {}
    for number in (1, 2):
        client_round = ClientRound(key=KEY, number=number, read_memory=lambda key: memories.setdefault(key, {}))
        train(Counts(), client_round=client_round)
    assert Counts.moments == [(1, step, step + 1) for step in range(4)] + [(2, step, step + 5) for step in range(4)]


def test_clients_that_train_at_once_show_the_same_step_and_weights() -> None:
    class Watches(DpSgd):
        moments: ClassVar[list[tuple[int, float]]] = []

        def on_examples(self, gradients: Any, expected: float, context: LocalContext) -> Any:
            return self.on_sum(self.clipped_sum(gradients), expected, context)

        def example_factors(self, norms: Tensor) -> Tensor:
            return super().example_factors(norms)

        def on_sum(self, total: Any, expected: float, context: LocalContext) -> Any:
            self.moments.append((context.step, sum(float(w.sum()) for w in context.weights.values())))
            return super().on_sum(total, expected, context)

    defense, model = Watches(noise_multiplier=0.5), network()
    train(defense)
    one_by_one, before = list(Watches.moments), copy_state(model)
    Watches.moments.clear()
    inputs, labels = batch()
    hooks = TrainingHooks([defense], model, SETTINGS, len(labels), ClientRound(key=KEY, broadcast=before))
    assert hooks.clipping_factors is not None
    local_updates(model, before, [LocalData(inputs=inputs, labels=labels, key=KEY, hooks=hooks)], SETTINGS)
    assert [step for step, _ in Watches.moments] == [step for step, _ in one_by_one] == [0, 1, 2, 3]
    for (_, once), (_, looped) in zip(Watches.moments, one_by_one, strict=True):
        assert once == pytest.approx(looped, rel=1e-4)


def test_no_second_gradient_gets_round_clipping() -> None:
    with pytest.raises(RunError, match="another gradient of the batch would get round it"):
        train(DpSgd(noise_multiplier=1.0), Sharpness())


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda context: context.gradient_at({}), r"context.gradient_at: no local step of fedsim's training"),
        (lambda context: context.input_gradient(*batch()), r"context.input_gradient: no local step"),
        (lambda context: context.common_rng, r"context.common_rng: clients agree on nothing here"),
    ],
)
def test_what_is_not_there_is_said(use: Any, sentence: str) -> None:
    with pytest.raises(RunError, match=sentence):
        use(LocalContext(rng=generator(0)))


def test_a_name_that_is_no_parameter_is_refused() -> None:
    class Misspells(Defense):
        def on_gradient(self, gradient: Any, context: LocalContext) -> Any:
            return context.gradient_at({"wieght": torch.zeros(1)})

    with pytest.raises(RunError, match=r"'wieght' is not a parameter of the model"):
        train(Misspells())


def test_there_is_no_batch_before_defenses_have_made_it() -> None:
    class Early(Defense):
        def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> Any:
            context.gradient_at({})
            return inputs, labels

    with pytest.raises(RunError, match="there is no batch of examples yet; call it in 'on_gradient'"):
        train(Early())


def test_what_is_common_is_so_for_all_clients_of_a_round_and_for_that_alone() -> None:
    def draws(client: int, number: int) -> list[int]:
        client_round = ClientRound(key=(3, "train", number, client), number=number, common_key=(3, "common", number))
        context = client_round.make_context("on_update", ("Mask", 0), draws_in_common=True)
        return torch.randint(1000, (4,), generator=context.common_rng).tolist()

    assert draws(0, 1) == draws(1, 1)
    assert draws(0, 1) != draws(0, 2)


def test_a_memory_that_takes_the_place_of_another_is_refused() -> None:
    context = LocalContext(rng=generator(0))
    context.memory["kept"] = torch.ones(1)
    with pytest.raises(RunError, match="a mapping that takes its place would be lost"):
        context.memory = {"kept": torch.zeros(1)}
