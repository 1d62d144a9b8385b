"""Hooks inside local training: Poisson sampling, randomness of their own, and engines that treat them alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from clients.defenses.dp_sgd import DpSgd
from clients.mods import as_mod
from fedsim.base.errors import ConfigError, PluginError, RunError
from fedsim.base.randomness import generator
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.defense import TRAINING_HOOKS, Defense, Poisson
from fedsim.interfaces.defense_checks import check_defense
from fedsim.interfaces.local_context import ClientRound, LocalContext
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.training.cohort import can_vectorise
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import evaluate, local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.sampling import poisson_batches
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.small_training import PAPER, Private, net, sgd, some_data
from tests.support.tensors import are_equal

KEY = (3, "train", 1, 0)


@dataclass(frozen=True, kw_only=True)
class Sampled(Defense):
    """Asks for Poisson sampling."""

    rate: float = 0.4

    paper = PAPER

    def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
        return Poisson(rate=self.rate)


@dataclass(frozen=True, kw_only=True)
class PoissonPrivate(Private):
    """DP-SGD that expects as many examples as there are in a batch."""

    noise: float = 1.0

    def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
        return Poisson(rate=min(1, batch_size / num_examples))


class Draws(Defense):
    """Notes what each of its hooks draws first."""

    paper = PAPER

    def __init__(self) -> None:
        self.__dict__["drawn"] = {}

    def note(self, hook: str, rng: torch.Generator) -> None:
        self.__dict__["drawn"].setdefault(hook, torch.rand(3, generator=rng).tolist())

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        self.note("on_batch", context.rng)
        return inputs, labels

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        self.note("on_examples", context.rng)
        return super().on_examples(gradients, expected, context)

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        self.note("on_gradient", context.rng)
        return gradient


class Noisy(Defense):
    """Draws at each hook that others may share."""

    paper = PAPER

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        return inputs + torch.randn(inputs.shape, generator=context.rng), labels

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        return {name: g + torch.randn(g.shape, generator=context.rng) for name, g in gradient.items()}


class Spy(nn.Module):
    """Notes the first number of each example that it sees."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.batches: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(x.flatten(1)[:, 0].tolist())
        out: Tensor = self.inner(x)
        return out


def train(*defenses: Defense, key: Any = KEY, model: nn.Module | None = None, **how: Any) -> tuple[State, float]:
    model = model or net()
    inputs, labels = some_data()
    return local_update(model, copy_state(model), inputs, labels, sgd(**how), key=key, defenses=defenses)


# Poisson sampling.


@settings(max_examples=25)
@given(rate=st.floats(0.02, 1), count=st.integers(1, 40), seed=st.integers(0, 99))
def test_each_example_is_drawn_at_the_rate_that_was_asked_for(rate: float, count: int, seed: int) -> None:
    """Within what Bernstein's inequality allows a right rate but for once in three million draws."""
    steps = 200
    drawn = torch.zeros(count)
    for index in poisson_batches(count, rate, steps, generator("poisson", seed)):
        assert torch.equal(index, index.unique())
        drawn[index] += 1
    deviation = math.sqrt(steps * rate * (1 - rate) * count)
    assert abs(drawn.sum().item() - steps * count * rate) <= 5.5 * deviation + 10


def test_examples_are_drawn_independently_of_each_other_and_of_the_step() -> None:
    steps, rate = 20_000, 0.3
    there = torch.zeros(steps, 3, dtype=torch.float64)
    for step, index in enumerate(poisson_batches(3, rate, steps, generator("poisson"))):
        there[step, index] = 1
    centred = there - rate
    bound = 5.5 * rate * (1 - rate) * math.sqrt(steps)
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert abs((centred[:, left] * centred[:, right]).sum().item()) < bound
    assert abs((centred[1:] * centred[:-1]).sum(0)).max().item() < bound


@pytest.mark.parametrize("how", [{"local_epochs": 3}, {"local_steps": 7}])
def test_the_number_of_steps_is_that_of_the_settings(how: dict[str, int]) -> None:
    order = TrainingHooks([Sampled()], net(), sgd(**how), 10, ClientRound(key=KEY)).batch_order(None)
    assert len(list(order)) == sgd(**how).steps(10)


def test_the_sample_follows_the_key_and_nothing_else() -> None:
    def drawn(*defenses: Defense, key: Any = KEY) -> list[list[float]]:
        spy = Spy(net())
        train(*defenses, key=key, model=spy)
        return spy.batches

    first = drawn(Sampled())
    torch.manual_seed(99)
    assert first == drawn(Sampled())
    assert [len(batch) for batch in first] == [len(batch) for batch in drawn(Noisy(), Sampled())]
    assert first != drawn(Sampled(), key=(3, "train", 2, 0))
    assert len({len(batch) for batch in first}) > 1


def test_the_gradient_of_a_poisson_batch_is_its_sum_divided_by_the_expected_size() -> None:
    class Mean(Sampled):
        def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
            assert expected == pytest.approx(4)
            return super().on_examples(gradients, expected, context)

    (inputs, labels), start = some_data(), copy_state(net())
    (index,) = poisson_batches(10, 0.4, 1, generator(*KEY, "order"))
    assert len(index) not in (0, 4)
    model = net()
    total = cross_entropy(model(inputs[index]), labels[index], reduction="sum")
    slopes = torch.autograd.grad(total, list(model.parameters()))
    for defense in (Sampled(), Mean()):
        after, loss = train(defense, local_steps=1)
        assert loss == pytest.approx(total.item() / len(index))
        for (name, before), slope in zip(start.items(), slopes, strict=True):
            torch.testing.assert_close(after[name], before - 0.1 * slope / 4)


# Empty batches.

NEVER = 1e-12


def test_a_step_on_an_empty_batch_is_noise_alone() -> None:
    class Empty(PoissonPrivate):
        def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
            return Poisson(rate=NEVER)

        def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
            assert {len(each) for each in gradients.values()} == {0}
            return super().on_examples(gradients, 4, context)

    start, noise = copy_state(net()), generator(*KEY, "defense", "on_examples", "Empty", 0)
    after, loss = train(Empty(), local_steps=1)
    for name, before in start.items():
        torch.testing.assert_close(after[name], before - 0.1 * 0.1 * torch.randn(before.shape, generator=noise) / 4)
    inputs, labels = some_data()
    assert loss == evaluate(net(), after, inputs, labels)["loss"]


def test_an_empty_batch_without_noise_leaves_the_model_where_it_is() -> None:
    assert are_equal(train(Sampled(rate=NEVER))[0], copy_state(net()))


def test_an_empty_batch_has_a_gradient_that_hooks_add_noise_to_and_is_shown_to_no_hook_on_batches() -> None:
    class Adds(Draws):
        on_examples = Defense.on_examples

        def on_gradient(self, gradient: State, context: LocalContext) -> State:
            assert not any(tensor.any() for tensor in gradient.values())
            return {name: torch.ones_like(tensor) for name, tensor in gradient.items()}

    defense = Adds()
    after, _ = train(Sampled(rate=NEVER), defense, local_steps=1)
    assert defense.__dict__["drawn"] == {}
    for name, start in copy_state(net()).items():
        torch.testing.assert_close(after[name], start - 0.1)


def test_the_proximal_term_pulls_on_an_empty_batch_too() -> None:
    class Once(Sampled):
        def on_gradient(self, gradient: State, context: LocalContext) -> State:
            return {name: g + 1 for name, g in gradient.items()}

    free, held = (train(Once(rate=NEVER), local_steps=3, proximal_mu=mu)[0] for mu in (0.0, 5.0))
    for name, start in copy_state(net()).items():
        assert ((held[name] - start).abs() < (free[name] - start).abs()).all()


# Where sampling cannot be.


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"^Poisson sampling: rate: expected (a value above 0|at most 1), got"):
        Poisson(rate=rate)


def test_fixed_batches_refuse_poisson_sampling() -> None:
    expected = r"^defense: Sampled asks for Poisson sampling, but training.batches is 'fixed'; set it to 'reshuffled'"
    with pytest.raises(ConfigError, match=expected):
        train(Sampled(), batches="fixed")
    (inputs, labels), model = some_data(), net()
    with pytest.raises(ConfigError, match=r"Sampled asks for Poisson sampling, but the batches of each step are given"):
        local_update(
            model, copy_state(model), inputs, labels, sgd(), key=KEY, defenses=[Sampled()], order=[torch.arange(3)]
        )


def test_clients_who_send_gradients_refuse_poisson_sampling() -> None:
    (inputs, labels), model = some_data(), net()
    with pytest.raises(ConfigError, match=r"clients that send gradients take one fixed mini-batch; choose a strategy"):
        local_gradient(
            model,
            copy_state(model),
            inputs,
            labels,
            sgd(local_steps=1, sends="gradient"),
            key=KEY,
            defenses=[Sampled()],
        )


def test_defenses_that_ask_for_different_sampling_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Sampled asks for Poisson\(rate=0.4\) and PoissonPrivate for Poisson\(rate=0.5\)"
    ):
        train(Sampled(), PoissonPrivate(), batch_size=5)
    assert train(Sampled(), PoissonPrivate(), Noisy(), batch_size=4)


def test_sampling_of_another_kind_is_refused() -> None:
    class Odd(Defense):
        paper = PAPER

        def sampling(self, num_examples: int, batch_size: int) -> Any:
            return 0.5

    with pytest.raises(
        RunError, match=r"^Odd.sampling: expected fedsim.interfaces.defense.Poisson or None back, got a float"
    ):
        train(Odd())


def test_a_sampling_hook_without_its_arguments_is_refused() -> None:
    class Bare(Defense):
        paper = PAPER

        def sampling(self) -> Poisson:  # type: ignore[override]
            return Poisson(rate=0.5)

    with pytest.raises(PluginError, match=r"'sampling' cannot be called as sampling\(num_examples, batch_size\)"):
        check_defense(Bare())


@pytest.mark.parametrize("hook", TRAINING_HOOKS)
def test_what_acts_inside_local_training_is_no_mod_and_is_not_trained_at_once(hook: str) -> None:
    inside = type("Inside", (Defense,), {"paper": PAPER, hook: lambda self, *given: None})()
    with pytest.raises(PluginError, match=f"Inside: '{hook}' acts inside local training"):
        as_mod(inside)
    assert can_vectorise(net(), sgd(), [])
    assert not can_vectorise(net(), sgd(), [inside])


# Randomness of each hook.


def drawn_by(*others: Defense, first: bool) -> dict[str, list[float]]:
    """What the hooks of `Draws` draw in a list with `others`."""
    one = Draws()
    train(*((one, *others) if first else (*others, one)), local_steps=1)
    found: dict[str, list[float]] = one.__dict__["drawn"]
    return found


def test_each_hook_draws_from_a_key_of_its_own() -> None:
    drawn = drawn_by(first=True)
    assert list(drawn) == ["on_batch", "on_examples", "on_gradient"]
    assert len({tuple(numbers) for numbers in drawn.values()}) == 3


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("others", [[Noisy()], [Sampled(rate=1.0)], [Noisy(), Noisy(), Sampled(rate=1.0)]])
def test_another_defense_changes_no_defenses_randomness(others: list[Defense], first: bool) -> None:
    assert drawn_by(*others, first=first) == drawn_by(first=True)


def test_two_defenses_of_one_class_draw_different_numbers() -> None:
    class Twin(Draws):
        on_examples = Defense.on_examples

    one, two = Twin(), Twin()
    train(one, two, local_steps=1)
    assert one.__dict__["drawn"]["on_gradient"] != two.__dict__["drawn"]["on_gradient"]
    alone = Twin()
    train(alone, local_steps=1)
    assert alone.__dict__["drawn"] == one.__dict__["drawn"]


@dataclass(frozen=True, kw_only=True)
class Adds(Defense):
    """Adds noise to each update."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: tensor + torch.randn(tensor.shape, generator=context.rng) for name, tensor in update.items()}


@dataclass(frozen=True, kw_only=True)
class AddsToo(Adds):
    """Likewise, by another name."""


def test_another_defense_changes_no_noise_on_the_update(tmp_path: Path) -> None:
    def defended_gradient(*names: str) -> State:
        defenses = [{"name": f"{__name__}:{name}"} for name in names]
        tables: dict[str, Any] = {"federation": {"clients": 1, "rounds": 1}, "defense": defenses, "attack": []}
        run = run_serial(make_tiny_config(**tables), tmp_path / "-".join(("run", *names)))
        return Transcript(run.path).update(1, 0).pseudo_gradient

    plain, one, other, both = (
        defended_gradient(),
        defended_gradient("Adds"),
        defended_gradient("AddsToo"),
        defended_gradient("AddsToo", "Adds"),
    )
    for name, start in plain.items():
        torch.testing.assert_close(both[name] - start, (one[name] - start) + (other[name] - start), rtol=0, atol=1e-4)
        assert not torch.allclose(one[name], other[name])


@dataclass(frozen=True, kw_only=True)
class Leaves(Defense):
    """Changes the network that other clients train in, too; or for a step alone."""

    what: str = "hook"

    paper = PAPER

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        if context.step:
            return gradient
        model: nn.Module = context.local_step.model  # type: ignore[union-attr]
        last = [layer for layer in model.modules() if isinstance(layer, nn.Linear)][-1]
        if self.what == "parametrization":
            nn.utils.parametrizations.weight_norm(last)
        elif self.what == "norm":
            nn.utils.spectral_norm(last)
        elif self.what == "forward":
            last.forward = partial(linear, weight=last.weight)  # type: ignore[method-assign]
        else:
            hook = last.register_forward_hook(lambda _, inputs, output: output + 1)
            if self.what == "nothing":
                hook.remove()
        return gradient


@pytest.mark.parametrize("what", ["hook", "parametrization", "norm", "forward"])
def test_what_a_defense_leaves_in_the_network_is_named_and_put_back(what: str) -> None:
    """The next client of the process would train with it, and not that of another process."""
    model, (inputs, labels) = net(), some_data()
    before = copy_state(model)

    def train(defense: Defense | None) -> State:
        defenses = [] if defense is None else [defense]
        return local_update(model, before, inputs, labels, sgd(), key=KEY, defenses=defenses)[0]

    alone = train(None)
    assert are_equal(train(Leaves(what="nothing")), alone)
    with pytest.raises(PluginError, match=r"^Leaves left a hook, .* in layer '.+', in which other clients train"):
        train(Leaves(what=what))
    assert are_equal(train(None), alone)


# A federation.

TABLES: dict[str, Any] = {"defense": [{"name": f"{__name__}:PoissonPrivate"}], "attack": []}


@dataclass(frozen=True, kw_only=True)
class PrivateFromGlobals(DpSgd):
    """DP-SGD whose noise is of torch's global generator, as of a library."""

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        return self.on_sum(self.clipped_sum(gradients), expected, context)

    def example_factors(self, norms: Tensor) -> Tensor:
        return super().example_factors(norms)

    def on_sum(self, total: State, expected: float, context: LocalContext) -> State:
        return {name: (tensor + 0.1 * torch.randn(tensor.shape)) / expected for name, tensor in total.items()}


def test_clients_with_such_defenses_send_the_same_bytes_whether_or_not_others_train_at_once(tmp_path: Path) -> None:
    together, alone = (
        Transcript(run_serial(make_tiny_config(federation={"vectorise": way}, **TABLES), tmp_path / str(way)).path)
        for way in (True, False)
    )
    for one, other in zip(together.updates(), alone.updates(), strict=True):
        assert are_equal(one.after, other.after)
    assert len(list(alone.updates())) == 8


def test_what_libraries_draw_is_the_same_whether_or_not_others_train_at_once(tmp_path: Path) -> None:
    """Which clients train at once depends on the engine."""
    defense = {"name": f"{__name__}:PrivateFromGlobals", "noise_multiplier": 1.0}
    together, alone = (
        Transcript(
            run_serial(
                make_tiny_config(federation={"vectorise": way, "rounds": 1}, defense=[defense], attack=[]),
                tmp_path / str(way),
            ).path
        )
        for way in (True, False)
    )
    for one, other in zip(together.updates(), alone.updates(), strict=True):
        torch.testing.assert_close(one.after, other.after, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"training": {"batches": "fixed"}}, "asks for Poisson sampling, but training.batches is 'fixed'"),
        (
            {
                "strategy": {"name": "fedsgd", "learning_rate": 0.1},
                "training": {"local_epochs": None, "local_steps": 1, "learning_rate": 0.01, "sends": "gradient"},
            },
            "clients that send gradients take one fixed mini-batch",
        ),
        ({"model": {"batch_norm": True}}, "normalises by the batch and so mixes examples"),
    ],
)
def test_an_experiment_that_a_defense_cannot_work_in_is_refused_before_it_starts(
    tables: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        Experiment(make_tiny_config(**TABLES, **tables)).check()
