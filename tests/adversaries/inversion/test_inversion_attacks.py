"""The parts of the inversion engine against formulas written out again, and the attacks that are made of them."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from adversaries.inversion.data_leakage import DataLeakage
from adversaries.inversion.deep_leakage import DeepLeakage, ImprovedDeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.long_strides import LongStrides
from adversaries.inversion.sapag import SelfAdaptiveLeakage
from adversaries.inversion.see_through_gradients import SeeThroughGradients
from adversaries.inversion.surrogate_curve import NonLinearSurrogate
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.base.errors import AttackError, ConfigError, FedsimError, KnowledgeError
from fedsim.base.metrics import match_examples, psnr
from fedsim.base.randomness import generator
from fedsim.base.task import squared_error
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion import compiled_objective as graphs
from fedsim.inversion import inversion_task
from fedsim.inversion.batch_norm import copy_with_batch_statistics
from fedsim.inversion.descent import Trial, descend, divergence_error
from fedsim.inversion.distances import Cosine, Distance, GaussianKernel, SquaredL2
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.labels.gradients import sign_rule
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import (
    BatchNormStatistics,
    EpochConsistency,
    GroupConsistency,
    MeanSquare,
    Prior,
    SoftBounds,
    SquaredTotalVariation,
    TotalVariation,
)
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.restart import objective_and_gradients
from fedsim.inversion.update_models import (
    GradientAtBroadcast,
    MidpointTraining,
    SurrogateCurve,
    SurrogatePoint,
    UnrolledTraining,
    UpdateModel,
)
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.sampling import shuffled_batches
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update
from tests.support.standard_images import HIGH, LOW, SHAPE, standard, truth

LABELS = torch.tensor([1, 4, 4])


def smooth() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10))


def normalised(momentum: float | None = 0.1) -> nn.Module:
    """Two BatchNorm layers, the second behind the first."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(108, 6),
        nn.BatchNorm1d(6, momentum=momentum),
        nn.Linear(6, 10),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Victim:
    """An update by fedsim's own training, and all that could be known of it."""

    update: Update
    knowledge: Knowledge


def victim(
    build: Callable[[], nn.Module] = smooth,
    count: int = 1,
    before: State | None = None,
    order: Sequence[Tensor] | None = None,
    **how: Any,
) -> Victim:
    """At most six examples, in an order of their own or the one that is given."""
    plan = LocalTraining(**({"local_epochs": 1, "batch_size": 100, "learning_rate": 0.1} | how))
    labels, start = LABELS.repeat(2)[:count], before or copy_state(build())
    after, _ = local_update(build(), start, standard(truth(count)), labels, plan, key=("x",), order=order)
    knowledge = Knowledge(
        model=build,
        loss=cross_entropy,
        input_shape=SHAPE,
        num_classes=10,
        value_range=([LOW], [HIGH]),
        input_mean=[0.0],
        input_std=[1.0],
        labels=labels,
        learning_rate=plan.learning_rate,
        local_epochs=plan.local_epochs,
        local_steps=plan.local_steps,
        batch_size=plan.batch_size,
        optimizer=plan.optimizer,
        momentum=plan.momentum,
        weight_decay=plan.weight_decay,
        proximal_mu=plan.proximal_mu,
    )
    return Victim(
        update=build_update(start, after, client=5, num_examples=count),
        knowledge=knowledge,
    )


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Reconstruction]:
    """Record the victim's update, and attack it."""

    def attack_it(attack: GradientInversion, of: Victim, seed: int = 0, **granted: Any) -> Reconstruction:
        folder = tmp_path / f"recording-{len(list(tmp_path.iterdir()))}"
        Recorder(folder).write(1, [of.update])
        knowledge = dataclasses.replace(of.knowledge, **granted)
        finding = attack.run(Target(transcript=Transcript(folder), victim=5, knowledge=knowledge, rng=generator(seed)))
        assert isinstance(finding, Reconstruction)
        return finding

    return attack_it


Run = Callable[..., Reconstruction]


# The formulas, in float64.


def doubled(state: State) -> dict[str, Tensor]:
    return {name: value.double() for name, value in state.items()}


def scene(of: Victim, **replaced: Any) -> InversionProblem:
    """What the engine makes of a victim, in float64 and in units that are not those of the model."""
    assert of.knowledge.model is not None
    model = of.knowledge.model().double().eval()
    names = tuple(name for name, _ in model.named_parameters())
    before, after = doubled(of.update.before), doubled(of.update.after)
    ends = [torch.tensor(x, dtype=torch.float64) for x in (0.2, 1.7, LOW, HIGH)]
    made = InversionProblem(
        model=model,
        loss=cross_entropy,
        parameter_names=names,
        before=[before[name] for name in names],
        after=[after[name] for name in names],
        buffers={name: value for name, value in before.items() if name not in names},
        returned_buffers={name: value for name, value in after.items() if name not in names},
        labels=of.knowledge.labels if of.knowledge.labels is not None else torch.empty(0),
        scaling=InputScaling(*ends),
        num_examples=of.update.num_examples,
        learning_rate=of.knowledge.learning_rate,
        local_epochs=of.knowledge.local_epochs,
        batch_size=of.knowledge.batch_size,
    )
    return dataclasses.replace(made, **replaced)


def random(*shape: int, key: str = "random") -> Tensor:
    return torch.randn(shape, generator=generator(key), dtype=torch.float64)


def test_squared_l2_by_hand() -> None:
    """Sum over layers of weight x ||g - (w_0 - w_T) / (eta T)||^2."""
    here = scene(victim(count=3, local_epochs=2, batch_size=2, learning_rate=0.05))
    assert here.steps == 4
    weights = (3.0, 0.5, 2.0, 0.0)
    gradient = [random(*start.shape, key=str(i)) for i, start in enumerate(here.before)]
    expected = 0.0
    for weight, g, start, end in zip(weights, gradient, here.before, here.after, strict=True):
        for one, a, b in zip(g.flatten().tolist(), start.flatten().tolist(), end.flatten().tolist(), strict=True):
            expected += weight * (one - (a - b) / (0.05 * 4)) ** 2
    distance = SquaredL2(layers=weights)
    assert distance(gradient, distance.target(here)).item() == pytest.approx(expected, rel=1e-9)
    plain = sum(((g - t) ** 2).sum() for g, t in zip(gradient, here.mean_gradient, strict=True))
    assert SquaredL2()(gradient, here.mean_gradient).item() == pytest.approx(float(plain), rel=1e-12)


def test_gaussian_kernel_by_hand() -> None:
    """Mean over tensors of 1 - exp(-||g - t||^2 / (n Var(t)))."""
    here = scene(victim())
    target = GaussianKernel().target(here)
    gradient = [t + 0.3 * t.std() * random(*t.shape, key=str(i)) for i, t in enumerate(target)]
    terms = []
    for g, t in zip(gradient, target, strict=True):
        values = t.flatten().tolist()
        middle = sum(values) / len(values)
        spread = sum((value - middle) ** 2 for value in values)
        far = sum((a - b) ** 2 for a, b in zip(g.flatten().tolist(), values, strict=True))
        terms.append(1 - math.exp(-far / spread))
    value = GaussianKernel()(gradient, target).item()
    assert value == pytest.approx(sum(terms) / len(terms), rel=1e-9)
    assert 0.01 < value < 0.99
    assert GaussianKernel()(target, target).item() == 0


def test_cosine_by_hand() -> None:
    here = scene(victim())
    g = torch.cat([random(*start.shape, key=str(i)).flatten() for i, start in enumerate(here.before)])
    d = torch.cat([(a - b).flatten() for a, b in zip(here.before, here.after, strict=True)])
    pieces = [x.reshape(s.shape) for x, s in zip(g.split([s.numel() for s in here.before]), here.before, strict=True)]
    value = Cosine()(pieces, Cosine().target(here)).item()
    assert value == pytest.approx(1 - (g @ d / (g.norm() * d.norm())).item(), rel=1e-9)


NOTHING = torch.empty(0)


def test_squared_total_variation_goes_around_the_edges() -> None:
    images = random(2, 3, 4, 5)
    expected = 0.0
    for n, c, y, x in itertools.product(range(2), range(3), range(4), range(5)):
        here = images[n, c, y, x]
        expected += float((here - images[n, c, (y + 1) % 4, x]) ** 2 + (here - images[n, c, y, (x + 1) % 5]) ** 2)
    problem = dataclasses.replace(scene(victim()), smooth_dimensions=(2, 3))
    value = SquaredTotalVariation()(problem, images, NOTHING).item()
    assert value == pytest.approx(expected / 2, rel=1e-9)
    rows = dataclasses.replace(scene(victim()), smooth_dimensions=())
    assert SquaredTotalVariation()(rows, images, NOTHING) == TotalVariation()(rows, images, NOTHING) == 0


def test_soft_bounds_by_hand() -> None:
    """In [0, 1], not in the units of the dummy data."""
    here, dummy = scene(victim()), random(2, *SHAPE)
    expected = 0.0
    for value in dummy.flatten().tolist():
        pixel = (0.2 + 1.7 * value - LOW) / (HIGH - LOW)
        expected += max(0.0, -pixel) ** 2 + max(0.0, pixel - 1) ** 2
    assert SoftBounds()(here, dummy, NOTHING).item() == pytest.approx(expected / 2, rel=1e-9)
    assert SoftBounds()(here, dummy.clamp(-0.4, 0.9), NOTHING).item() == 0


def test_epoch_consistency_is_over_ordered_pairs_and_does_not_see_the_order() -> None:
    here = scene(victim(count=3, local_epochs=3))
    dummy = random(9, *SHAPE)
    means = [sum(dummy[3 * e + i] for i in range(3)) / 3 for e in range(3)]
    pairs = [((a - b) ** 2).mean().item() for a in means for b in means]
    value = EpochConsistency()(here, dummy, NOTHING).item()
    assert value == pytest.approx(sum(pairs) / 9, rel=1e-9)
    shuffled = dummy[torch.tensor([2, 0, 1, 3, 5, 4, 7, 8, 6])]
    assert EpochConsistency()(here, shuffled, NOTHING).item() == pytest.approx(value, rel=1e-9)


def test_norm_and_group_consistency_by_hand() -> None:
    here, dummy, middle = scene(victim()), random(2, *SHAPE), random(2, *SHAPE, key="middle")
    assert MeanSquare()(here, dummy, middle).item() == pytest.approx((dummy**2).sum().item() / dummy.numel())
    expected = ((dummy - middle) ** 2).sum().item() / dummy.numel()
    assert GroupConsistency()(here, dummy, middle).item() == pytest.approx(expected)


def test_the_group_is_drawn_to_the_mean_of_all_restarts(run: Run) -> None:
    starts = [torch.randn((1, *SHAPE), generator=rng).clamp(LOW, HIGH) for rng in [generator(0)] for _ in range(3)]
    middle = sum(starts) / 3
    weights = {"bn_weight": 0.0, "tv_weight": 0.0, "norm_weight": 0.0, "noise": 0.0}
    attack = SeeThroughGradients(iterations=1, restarts=3, group_weight=0.5, gradient_weight=0.25, **weights)
    trace = run(attack, victim()).trace
    prior = (trace["objective"][0] - trace["distance"][0]).item()
    assert any(prior == pytest.approx(2 * ((s - middle) ** 2).mean().item(), rel=1e-4) for s in starts)


def by_hand(layers: nn.Module, state: State, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Mean and biased variance of what `normalised` feeds to its BatchNorm layers, which use running statistics."""

    def norm(x: Tensor, i: int) -> Tensor:
        axes = (1, -1, *[1] * (x.ndim - 2))
        m, v, w, b = (state[f"{i}.{key}"].reshape(axes) for key in ("running_mean", "running_var", "weight", "bias"))
        return (x - m) / torch.sqrt(v + 1e-5) * w + b

    first = torch.nn.functional.conv2d(inputs, state["0.weight"], state["0.bias"])
    second = torch.tanh(norm(first, 1)).flatten(1) @ state["4.weight"].T + state["4.bias"]
    flat = [first.transpose(0, 1).flatten(1), second.T]
    return [(x.mean(1), ((x - x.mean(1, keepdim=True)) ** 2).mean(1)) for x in flat]


def used() -> dict[str, Tensor]:
    """A state of `normalised` whose running statistics are not those of a fresh one."""
    state = copy_state(normalised())
    return {k: 0.5 + torch.rand(v.shape, generator=generator(k)) if "running" in k else v for k, v in state.items()}


def test_batch_norm_statistics_by_hand() -> None:
    here = scene(victim(normalised, 3, before=used(), batch_norm="train"))
    dummy = random(3, *SHAPE)
    state = {**dict(zip(here.parameter_names, here.before, strict=True)), **here.buffers}
    expected = 0.0
    for i, (mean, variance) in zip((1, 5), by_hand(here.model, state, 0.2 + 1.7 * dummy), strict=True):
        expected += (mean - here.returned_buffers[f"{i}.running_mean"]).norm().item()
        expected += (variance - here.returned_buffers[f"{i}.running_var"]).norm().item()
    assert BatchNormStatistics()(here, dummy, NOTHING).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("batch", [6, 2])
def test_exact_statistics_are_those_of_the_steps(momentum: float | None, batch: int) -> None:
    """One real step in training mode, and three of two examples each, in the order in which the client took them."""

    def build() -> nn.Module:
        return normalised(momentum)

    in_order = torch.arange(6).split(batch)
    of = victim(build, 6, before=used(), batch_norm="train", batch_size=batch, learning_rate=1e-7, order=in_order)
    here = scene(of)
    here = dataclasses.replace(here, model=copy_with_batch_statistics(here.model))
    at_truth = (standard(truth(6)).double() - 0.2) / 1.7
    others = {"truth": at_truth, "moved": at_truth + 0.1, "backwards": at_truth.flip(0)}
    apart = {name: BatchNormStatistics(exact=True)(here, dummy, NOTHING).item() for name, dummy in others.items()}
    assert apart["truth"] < 1e-3
    assert apart["moved"] > 1e-2
    assert (apart["backwards"] > 1e-2) == (batch == 2 and momentum is not None)
    assert BatchNormStatistics()(here, at_truth, NOTHING).item() > 1e-2  # what is worked out is not nothing


def test_the_truth_matches_a_step_in_training_mode(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact statistics the dummy gradient is taken in training mode too, else it is another gradient."""
    of = victim(normalised, 3, before=used(), batch_norm="train")
    monkeypatch.setattr(torch, "randn", lambda shape, generator: standard(truth()))
    none = {"tv_weight": 0.0, "norm_weight": 0.0, "noise": 0.0, "group_weight": 0.0}
    exact, running = (
        run(SeeThroughGradients(iterations=1, restarts=1, exact_statistics=e, **none), of).trace for e in (True, False)
    )
    assert exact["distance"][0].item() < 1e-6
    assert exact["objective"][0].item() < 1e-1  # the statistics, times 1000
    assert running["distance"][0].item() > 1e-2
    assert running["objective"][0].item() > 10


def test_the_truth_matches_an_epoch_in_training_mode(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact statistics several steps are simulated, each normalised by its own mini-batch."""
    how = {"batch_norm": "train", "batch_size": 3, "learning_rate": 0.01, "order": torch.arange(6).split(3)}
    of = victim(normalised, 6, before=used(), **how)
    monkeypatch.setattr(torch, "randn", lambda shape, generator: standard(truth(6)))
    monkeypatch.setattr(torch, "randperm", lambda count, generator: torch.arange(count))  # the client's order
    none = {"tv_weight": 0.0, "norm_weight": 0.0, "noise": 0.0, "group_weight": 0.0}
    exact, running = (
        run(SeeThroughGradients(iterations=1, restarts=1, exact_statistics=e, **none), of).trace for e in (True, False)
    )
    assert exact["distance"][0].item() < 1e-6
    assert exact["objective"][0].item() < 0.01 * running["objective"][0].item()
    assert running["distance"][0].item() > 1e-2
    none |= {"bn_weight": 0.0}
    before = {name: value for name, value in used().items() if "running" not in name}
    bare = victim(normalised, 6, before=before, batch_norm_statistics="withheld", **how)
    withheld = run(SeeThroughGradients(iterations=1, restarts=1, exact_statistics=True, **none), bare).trace
    assert withheld["objective"][0].item() < 1e-6


def test_the_model_that_normalises_by_the_batch_is_a_copy_like_a_training_one() -> None:
    model = normalised().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    copy, inputs = copy_with_batch_statistics(model), standard(truth())
    torch.testing.assert_close(copy(inputs), normalised().train()(inputs))
    assert not torch.allclose(model(inputs), copy(inputs))
    assert all(torch.equal(value, copy.state_dict()[key]) for key, value in before.items())


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ({"local_epochs": 3}, 9),
        ({"local_steps": 7}, 7),
        ({"local_epochs": 3, "momentum": 0.9}, 9),
        ({"local_epochs": 3, "weight_decay": 0.3}, 9),
        ({"local_epochs": 3, "proximal_mu": 2.0}, 9),
        ({"local_epochs": 3, "momentum": 0.5, "weight_decay": 0.1, "proximal_mu": 1.0}, 9),
    ],
    ids=lambda item: ", ".join(item) if isinstance(item, dict) else "",
)
def test_the_simulated_training_is_fedsims_own(how: dict[str, Any], steps: int) -> None:
    """Same batches in the same order, the same pseudo-gradient, whatever SGD has beside the gradient."""
    plan = LocalTraining(batch_size=2, learning_rate=0.2, **how)
    inputs, labels = standard(truth(5)).double(), torch.tensor([1, 4, 4, 0, 7])
    before = doubled(copy_state(smooth()))
    after, _ = local_update(smooth().double(), before, inputs, labels, plan, key=("x",))
    whole = dataclasses.replace(plan, local_epochs=3, local_steps=None)  # a pass cut short takes the batches of a whole
    order = torch.cat(list(shuffled_batches(5, whole, generator("x", "order"))))
    facts = {"learning_rate": 0.2, "local_epochs": None, "batch_size": 2} | how
    here = dataclasses.replace(scene(victim(count=1)), num_examples=5, **facts)
    mean = UnrolledTraining().gradient(here, {}, (inputs[order] - 0.2) / 1.7, labels[order])
    assert here.steps == steps
    for name, gradient in zip(here.parameter_names, mean, strict=True):
        torch.testing.assert_close(steps * 0.2 * gradient, before[name] - after[name], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("per_layer", [False, True])
def test_the_surrogate_lies_between_both_ends(per_layer: bool) -> None:
    here = scene(victim(count=3, local_epochs=4))
    alphas = torch.tensor([0.1, 0.9, 0.4, 0.6], dtype=torch.float64) if per_layer else torch.full((4,), 0.3).double()
    between = [
        (a * start + (1 - a) * end).requires_grad_(True)
        for a, start, end in zip(alphas, here.before, here.after, strict=True)
    ]
    dummy = random(3, *SHAPE)
    logits = functional_call(here.model, dict(zip(here.parameter_names, between, strict=True)), (0.2 + 1.7 * dummy,))
    expected = torch.autograd.grad(cross_entropy(logits, LABELS), between)
    place = SurrogatePoint(per_layer=per_layer)
    value = (alphas if per_layer else alphas[0]).clone().requires_grad_(True)
    for ours, theirs in zip(place.gradient(here, {"alpha": value}, dummy, LABELS), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert place.variables(here)["alpha"].start.shape == value.shape


@pytest.mark.parametrize("scales", [0.0, 0.1])
def test_the_curve_begins_as_the_line_and_bends_towards_its_control_point(scales: float) -> None:
    here = scene(victim(count=3, local_epochs=4))
    place, dummy = SurrogateCurve(alpha=0.3, scale_step_size=scales, bend_weight=2.0), random(3, *SHAPE)
    values = {name: variable.start for name, variable in place.variables(here).items()}
    line = SurrogatePoint().gradient(here, {"alpha": values["alpha"]}, dummy, LABELS)
    assert place.penalty(here, values).item() == 0
    for ours, straight in zip(place.gradient(here, values, dummy, LABELS), line, strict=True):
        torch.testing.assert_close(ours, straight)
    # Bend all weights of the last tensor, and scale it.
    values["bend"][-10:] = 1.5
    if scales:
        values["scale"][-1] = 2.0
    assert place.penalty(here, values).item() == pytest.approx(
        2.0 * 10 * 1.5**2 / len(values["bend"]) + (0.01 / 4 if scales else 0)
    )
    typical_change = (here.before[-1] - here.after[-1]).square().mean().sqrt()
    expected = [0.3 * start + 0.7 * end for start, end in zip(here.before, here.after, strict=True)]
    expected[-1] = expected[-1] + 2 * 0.3 * 0.7 * 1.5 * typical_change
    gradient = here.gradient(expected, dummy, LABELS)
    gradient[-1] = gradient[-1] * (2.0 if scales else 1.0)
    for ours, bent in zip(place.gradient(here, values, dummy, LABELS), gradient, strict=True):
        torch.testing.assert_close(ours, bent)


@pytest.mark.parametrize("strides", [1, 3])
def test_strides_are_the_midpoint_rule_by_equal_lengths(strides: int) -> None:
    here = scene(victim(count=3, local_epochs=20, learning_rate=0.3))
    dummy = random(3, *SHAPE)
    chord = math.sqrt(sum(((a - b) ** 2).sum().item() for a, b in zip(here.before, here.after, strict=True)))

    def slope(weights: list[Tensor]) -> list[Tensor]:
        leaves = [w.detach().requires_grad_(True) for w in weights]
        logits = functional_call(here.model, dict(zip(here.parameter_names, leaves, strict=True)), (0.2 + 1.7 * dummy,))
        return list(torch.autograd.grad(cross_entropy(logits, LABELS), leaves))

    def advanced(weights: list[Tensor], along: list[Tensor], far: float) -> list[Tensor]:
        size = math.sqrt(sum((g**2).sum().item() for g in along))
        return [w - far / size * g for w, g in zip(weights, along, strict=True)]

    weights, stride = list(here.before), 1.1 * chord / strides
    for _ in range(strides):
        weights = advanced(weights, slope(advanced(weights, slope(weights), stride / 2)), stride)
    stretch = {"stretch": torch.tensor(1.1, dtype=torch.float64)}
    ours = MidpointTraining(strides=strides).gradient(here, stretch, dummy, LABELS)
    for moved, start, end in zip(ours, here.before, weights, strict=True):
        torch.testing.assert_close(moved, start - end, atol=1e-10, rtol=1e-8)


def test_a_single_step_that_is_known_of_is_taken_as_such() -> None:
    here = scene(victim(count=3, learning_rate=0.5))
    assert MidpointTraining().variables(here) == {}
    dummy = (standard(truth()).double() - 0.2) / 1.7
    for ours, exact in zip(MidpointTraining().gradient(here, {}, dummy, LABELS), here.mean_gradient, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=1e-4)
    assert list(MidpointTraining().variables(dataclasses.replace(here, local_epochs=None))) == ["stretch"]


@pytest.mark.parametrize(("rate", "part"), [(0.02, 0.2), (0.05, 0.1)])
def test_strides_follow_a_long_training_more_closely_than_the_line(rate: float, part: float) -> None:
    """With the truth as dummy data, whose distance is what the surrogate cannot explain."""
    here = scene(victim(count=3, local_epochs=50, learning_rate=rate))
    dummy, distance, one = (standard(truth()).double() - 0.2) / 1.7, Cosine(), torch.tensor(1.0).double()
    target = distance.target(here)
    line = min(
        distance(SurrogatePoint().gradient(here, {"alpha": one * a / 20}, dummy, LABELS), target).item()
        for a in range(21)
    )
    bent = distance(MidpointTraining().gradient(here, {"stretch": one}, dummy, LABELS), target).item()
    assert bent < part * line


PARTS: list[tuple[UpdateModel, Distance, Prior]] = [
    (GradientAtBroadcast(), SquaredL2(), TotalVariation()),
    (GradientAtBroadcast(), GaussianKernel(), MeanSquare()),
    (GradientAtBroadcast(), Cosine(), GroupConsistency()),
    (SurrogatePoint(), SquaredL2(layers=(1.0, 2.0, 3.0, 4.0)), SquaredTotalVariation()),
    (SurrogatePoint(per_layer=True), Cosine(), SoftBounds()),
    (SurrogateCurve(), SquaredL2(), TotalVariation()),
    (UnrolledTraining(), SquaredL2(), EpochConsistency()),
    (UnrolledTraining(), Cosine(), MeanSquare()),
    (MidpointTraining(strides=1), Cosine(), MeanSquare()),
]


@pytest.mark.parametrize(("place", "distance", "prior"), PARTS, ids=lambda part: type(part).__name__)
def test_slopes_are_those_of_finite_differences(place: UpdateModel, distance: Distance, prior: Prior) -> None:
    """Through the whole double backward pass, in the dummy data, in alpha and in label logits."""
    here = scene(victim(count=3, local_epochs=2, batch_size=2, learning_rate=0.5))
    joint = 1.0 if isinstance(place, GradientAtBroadcast) else None
    epochs = 2 if isinstance(place, UnrolledTraining) else 1
    here = dataclasses.replace(here, labels=LABELS.repeat(epochs))
    recipe = Recipe(update_model=place, distance=distance, priors=[(0.3, prior)], label_step_size=joint)
    values = {"dummy": 0.5 * random(3 * epochs, *SHAPE)}
    values |= {name: variable.start for name, variable in place.variables(here).items()}
    if joint:
        values["label_logits"] = random(3, 10, key="logits")
    around = (torch.tensor(1.7, dtype=torch.float64), random(3 * epochs, *SHAPE, key="consensus"))

    def objective(moved: dict[str, Tensor]) -> list[Tensor]:
        return objective_and_gradients(recipe, here, moved, around, distance.target(here), tuple(values))

    _, _, _, *slopes = objective(values)
    for (name, value), slope in zip(values.items(), slopes, strict=True):
        way = random(*value.shape, key=f"way-{name}")
        ends = [objective({**values, name: value + step * way})[0].item() for step in (1e-5, -1e-5)]
        assert (slope * way).sum().item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-9)
        assert slope.abs().max() > 1e-9


# Recovery.

ALONE = {"bn_weight": 0.0, "tv_weight": 0.0, "norm_weight": 0.0, "group_weight": 0.0, "noise": 0.0}


@pytest.mark.parametrize(
    "attack",
    [
        DeepLeakage(iterations=20),
        ImprovedDeepLeakage(iterations=20),
        SelfAdaptiveLeakage(iterations=150),
        SeeThroughGradients(iterations=120, restarts=1, **ALONE),
        DataLeakage(iterations=120, tv_weight=0.0),
    ],
    ids=["dlg", "idlg", "sapag", "see-through-gradients", "dlfa"],
)
def test_one_example_is_recovered_exactly(run: Run, attack: GradientInversion) -> None:
    assert psnr(run(attack, victim()).data, truth(1)).item() > 40


@pytest.mark.parametrize(
    "attack",
    [pytest.param(DeepLeakage(iterations=20), marks=pytest.mark.thorough), ImprovedDeepLeakage(iterations=20)],
    ids=["dlg", "idlg"],
)
def test_the_label_is_found_with_the_data(run: Run, attack: GradientInversion) -> None:
    finding = run(attack, victim(), labels=None)
    assert finding.labels.tolist() == [1]
    assert psnr(finding.data, truth(1)).item() > 40


@pytest.mark.thorough
def test_labels_of_a_batch_are_found_with_the_data(run: Run) -> None:
    finding = run(DeepLeakage(iterations=15), victim(count=3), labels=None)
    assert finding.labels.sort().values.tolist() == LABELS.tolist()
    assert psnr(finding.data[match_examples(finding.data, truth())], truth()).mean() > 40


def test_dlfa_undoes_several_epochs_that_dlg_cannot(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    of = victim(local_epochs=2, learning_rate=0.5)
    simulated = psnr(run(DataLeakage(iterations=90, tv_weight=0.0, order_weight=10.0), of).data, truth(1)).item()
    assert not caplog.records
    one_step = psnr(run(ImprovedDeepLeakage(iterations=30), of).data, truth(1)).item()
    assert simulated > 40 > 30 > one_step


@pytest.mark.thorough
def test_dlfa_with_its_own_settings_beats_one_step_on_a_batch_of_several_epochs(run: Run) -> None:
    of = victim(count=3, local_epochs=3, learning_rate=0.5)
    means = []
    for attack in (DataLeakage(iterations=200), ImprovedDeepLeakage(iterations=50)):
        data = run(attack, of).data
        means.append(psnr(data[match_examples(data, truth())], truth()).mean().item())
    assert means[0] > means[1] + 1


@pytest.mark.parametrize(
    "how",
    [{"momentum": 0.9}, pytest.param({"weight_decay": 1.0}, marks=pytest.mark.thorough)],
    ids=["momentum", "weight decay"],
)
def test_dlfa_that_knows_the_optimizer_finds_what_one_that_does_not_misses(run: Run, how: dict[str, float]) -> None:
    of = victim(local_epochs=2, learning_rate=0.2, **how)
    attack = DataLeakage(iterations=60, tv_weight=0.0, order_weight=10.0)
    told, not_told = (psnr(run(attack, of, **facts).data, truth(1)).item() for facts in ({}, dict.fromkeys(how, None)))
    assert told > not_told + 3


def test_dlfa_takes_a_number_of_steps_in_place_of_passes(run: Run) -> None:
    of = victim(count=3, local_epochs=None, local_steps=5, batch_size=2, learning_rate=0.2)
    finding = run(DataLeakage(iterations=2), of)
    assert finding.data.shape == (3, *SHAPE)
    with pytest.raises(KnowledgeError, match="DataLeakage needs local_epochs, which"):
        run(DataLeakage(iterations=2), of, local_steps=None)


def test_who_simulates_sgd_is_refused_where_clients_train_by_another_optimizer(run: Run) -> None:
    of = victim(local_epochs=2, optimizer="adam", learning_rate=0.01)
    with pytest.raises(
        AttackError,
        match=r"^round 1, client 5: this attack simulates local training by SGD, and clients train by adam; choose one",
    ):
        run(DataLeakage(iterations=2), of)


@pytest.mark.parametrize(
    ("how", "withheld", "warning"),
    [
        ({}, [], ""),
        ({"optimizer": "adam"}, [], "assumes plain SGD, but clients train with optimizer adam; expect less"),
        (
            {"momentum": 0.9, "proximal_mu": 0.1},
            [],
            "assumes plain SGD, but clients train with momentum 0.9, proximal mu 0.1; expect less",
        ),
        ({}, ["optimizer"], "assumes plain SGD; optimizer of the clients is not known"),
        ({}, ["momentum", "weight_decay"], "assumes plain SGD; momentum, weight_decay of the clients are not known"),
    ],
)
def test_an_attack_that_takes_sgd_for_granted_says_so(
    run: Run, how: dict[str, Any], withheld: list[str], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    of = victim(local_epochs=2, learning_rate=0.01, **how)
    run(SurrogateModelExtension(iterations=1), of, **dict.fromkeys(withheld, None))
    where = "SurrogateModelExtension on round 1, client 5: "
    assert [record.getMessage() for record in caplog.records] == ([where + warning] if warning else [])


def test_labels_are_cut_into_mini_batches_in_random_order(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ascending order each simulated mini-batch would be of one class or two. The multiset stays."""
    seen: list[list[int]] = []

    def noting(
        scene: InversionProblem, weights: Any, dummy: Tensor, labels: Tensor, own: Any = InversionProblem.gradient
    ) -> Any:
        seen.append(labels.tolist())
        return own(scene, weights, dummy, labels)

    monkeypatch.setattr(InversionProblem, "gradient", noting)
    granted = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    of = victim(count=3, batch_size=4)
    of = dataclasses.replace(of, update=dataclasses.replace(of.update, num_examples=8))
    finding = run(DataLeakage(iterations=1), of, labels=granted)
    batches_seen = [labels for labels in seen if len(labels) == 4]
    assert all(set(labels) == {0, 1} for labels in batches_seen[:2])
    assert sorted(batches_seen[0] + batches_seen[1]) == granted.tolist()
    assert finding.labels.tolist() == batches_seen[0] + batches_seen[1]
    assert run(DataLeakage(iterations=1), of, seed=1, labels=granted).labels.tolist() != finding.labels.tolist()


def test_the_images_of_the_epochs_are_matched_before_they_are_averaged() -> None:
    images = truth()
    orders = [[0, 1, 2], [2, 0, 1], [1, 0, 2]]
    noisy = torch.cat([images[o] + 0.01 * i for i, o in enumerate(orders)])
    merged = DataLeakage()._merge_epochs(noisy, scene(victim(count=3, local_epochs=3)))
    torch.testing.assert_close(merged, images + 0.01)


def test_the_sign_rule_finds_the_label_of_any_network() -> None:
    for seed in range(12):

        def build(seed: int = seed) -> nn.Module:
            torch.manual_seed(seed)
            hidden = 4 + seed % 7
            return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

        label = torch.tensor([seed % 10])
        before = copy_state(build())
        plan = LocalTraining(local_epochs=1, learning_rate=0.1)
        after, _ = local_update(build(), before, standard(truth(1)), label, plan, key=("x",))
        names = tuple(before)
        here = scene(
            victim(),
            model=build(),
            parameter_names=names,
            before=list(before.values()),
            after=[after[name] for name in names],
        )
        assert sign_rule(here, torch.zeros(1, *SHAPE)).tolist() == label.tolist()


# Restarts, patience, precision.


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Tensor]], None]:
    """Let the restarts begin at these dummy data, one after the other."""

    def begin(at: Sequence[Tensor]) -> None:
        turn = itertools.cycle(at)
        monkeypatch.setattr(torch, "randn", lambda shape, generator: next(turn).clone())

    return begin


Starts = Callable[[Sequence[Tensor]], None]


def test_the_finding_is_the_restart_with_the_smallest_objective(run: Run, starts: Starts) -> None:
    of, at = victim(count=3), [random(3, *SHAPE, key=str(i)).float() for i in (1, 2, 0, 3)]
    alone = []
    for start in at:
        starts([start])
        alone.append(run(InvertingGradients(iterations=15, step_size=0.1), of))
    last = [finding.trace["objective"][-1].item() for finding in alone]
    best = alone[last.index(min(last))]
    assert last.index(min(last)) != 0
    starts(at)
    together = run(InvertingGradients(iterations=15, step_size=0.1, restarts=4), of)
    assert torch.equal(together.data, best.data)
    assert torch.equal(together.trace["objective"], best.trace["objective"])


@pytest.mark.parametrize(
    "attack",
    [
        InvertingGradients(iterations=8, step_size=0.1, restarts=2),
        SeeThroughGradients(iterations=8, restarts=2, bn_weight=0.0),
        InvertingGradients(iterations=1000, step_size=1e-9, restarts=2, patience=3),
    ],
    ids=["alone", "as a group", "with patience"],
)
def test_a_restart_that_diverges_is_left_behind(
    run: Run, starts: Starts, caplog: pytest.LogCaptureFixture, attack: GradientInversion
) -> None:
    start = random(1, *SHAPE).float()
    starts([start, torch.full_like(start, math.nan)] + [torch.zeros_like(start)] * 100)
    finding = run(attack, victim())
    assert finding.trace["objective"].isfinite().all()
    assert "1 restarts diverged by iteration 0" in caplog.text


def test_an_attack_all_of_whose_restarts_diverge_is_an_error(run: Run, starts: Starts) -> None:
    starts([torch.full((1, *SHAPE), math.nan)])
    with pytest.raises(
        AttackError, match="the objective is NaN before the first step, whatever the attack's step_size"
    ):
        run(InvertingGradients(restarts=2), victim())


@pytest.mark.parametrize(
    ("first", "sentence"),
    [
        (1.0, "^here: the objective became NaN at iteration 7; lower the attack's step_size$"),
        (math.nan, "^here: the objective is NaN before the first step, .* weights, .* another round or victim$"),
    ],
)
def test_steps_that_are_too_large_are_told_from_weights_that_are(first: float, sentence: str) -> None:
    curve = torch.tensor([first, *[1.0] * 6, math.nan])
    lost = Trial(step=lambda iteration: {"objective": curve[iteration]}, point=lambda: torch.zeros(1))
    assert descend([lost], 8, lambda *told: None, where="here") == []
    with pytest.raises(AttackError, match=sentence):
        raise divergence_error([lost], "here", "step_size")


def test_patience_ends_the_attack_on_a_plateau(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    finding = run(SurrogateModelExtension(iterations=500, step_size=1e-9, patience=7), victim())
    assert {name: len(curve) for name, curve in finding.trace.items()} == {"objective": 8, "l_sim": 8, "alpha": 8}
    assert "stopped after 8 iterations" in caplog.text
    assert finding.snapshots is not None
    assert finding.snapshot_iterations is not None
    assert finding.snapshot_iterations.tolist() == [0, 8]
    assert torch.equal(finding.snapshots[-1], finding.data)
    patient = run(InvertingGradients(iterations=60, step_size=0.1, patience=59), victim())
    assert len(patient.trace["objective"]) == 60


def test_bfloat16_differs_by_little_and_by_something(run: Run) -> None:
    of = victim(count=3)
    full, half = (run(InvertingGradients(iterations=5, precision=p), of) for p in ("float32", "bfloat16"))
    assert not torch.equal(full.trace["l_sim"], half.trace["l_sim"])
    torch.testing.assert_close(full.trace["objective"][:1], half.trace["objective"][:1], atol=2e-2, rtol=0)
    assert (full.data - half.data).abs().mean() < 0.1
    assert half.data.dtype == torch.float32


def test_a_loss_that_needs_more_than_half_precision_gets_it_and_a_warning_says_so(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    def exact_loss(logits: Tensor, labels: Tensor, **how: Any) -> Tensor:
        if logits.dtype == torch.bfloat16:
            raise RuntimeError("half precision is too coarse\nfor this")
        return cross_entropy(logits, labels, **how)

    of = victim(count=2)
    of = dataclasses.replace(of, knowledge=dataclasses.replace(of.knowledge, loss=exact_loss))
    full, half = (run(InvertingGradients(iterations=3, precision=p), of) for p in ("float32", "bfloat16"))
    assert torch.equal(full.data, half.data)
    assert "half precision does not do here (half precision is too coarse)" in caplog.text


# The compiled path.


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each graph that is compiled; nothing is compiled yet."""
    counted: list[object] = []
    real = torch.compile

    def counting(graph: Any, **how: Any) -> Any:
        counted.append(graph)
        return real(graph, **how)

    monkeypatch.setattr(torch, "compile", counting)
    monkeypatch.setattr(graphs, "_cache", [])
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("build", [smooth, cnn])
@pytest.mark.filterwarnings("ignore")
def test_compiled_is_as_eager_and_serves_the_next_victim(
    run: Run, compilations: list[object], build: Callable[[], nn.Module]
) -> None:
    how = {"iterations": 5, "step_size": 0.1}
    for scale in (1.0, 0.9):
        before = {name: scale * value for name, value in copy_state(build()).items()}
        of = victim(build, 3, before=before, local_epochs=3)
        eager, fast = (run(SurrogateModelExtension(compile=c, **how), of) for c in (False, True))
        for name, curve in eager.trace.items():
            torch.testing.assert_close(fast.trace[name], curve, atol=1e-4, rtol=0)
        torch.testing.assert_close(fast.data, eager.data, atol=1e-2, rtol=0)
    assert len(compilations) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_sees_the_jumps_of_relus(run: Run, compilations: list[object]) -> None:
    of = victim(cnn)
    attacks = [InvertingGradients(iterations=3, compile=c, relu_width=0.5) for c in (False, True)]
    eager, fast = (run(attack, of) for attack in attacks)
    torch.testing.assert_close(fast.data, eager.data, atol=1e-2, rtol=0)
    assert not torch.allclose(run(InvertingGradients(iterations=3), of).data, eager.data, atol=1e-2)
    assert len(compilations) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_for_one_learning_rate_or_loss_does_not_serve_another(
    run: Run, compilations: list[object]
) -> None:
    def gentle(logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(0.5 * logits, labels)

    attack = DataLeakage(iterations=2)
    for learning_rate, loss in ((0.1, cross_entropy), (2.0, cross_entropy), (2.0, gentle)):
        of = victim(local_epochs=2, learning_rate=learning_rate)
        eager, fast = (run(dataclasses.replace(attack, compile=c), of, loss=loss) for c in (False, True))
        torch.testing.assert_close(fast.trace["objective"], eager.trace["objective"], atol=1e-3, rtol=1e-4)
    assert len(compilations) == 3


class Scaled(nn.Module):
    """Two of them look the same and are not."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.body, self.factor = smooth(), factor

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(self.body(self.factor * inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_what_is_compiled_for_one_model_does_not_serve_its_lookalike(run: Run, compilations: list[object]) -> None:
    for factor in (1.0, 3.0):
        of = victim(lambda factor=factor: Scaled(factor))
        eager, fast = (run(InvertingGradients(iterations=2, compile=c), of) for c in (False, True))
        torch.testing.assert_close(fast.trace["objective"], eager.trace["objective"], atol=1e-4, rtol=0)
    assert len(compilations) == 2


class Switch(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * inputs if inputs.mean() > 0 else inputs


def with_layer(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A network with this layer in its middle."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), layer(), nn.Linear(12, 10))

    return build


def test_control_flow_that_depends_on_values_cannot_be_compiled(run: Run) -> None:
    of = victim(with_layer(Switch))
    with pytest.raises(AttackError, match=r"^the model cannot be compiled \(.*\); set compile = false$"):
        run(InvertingGradients(iterations=2, compile=True), of)
    run(InvertingGradients(iterations=2), of)


@pytest.mark.parametrize(("wrong_calls", "refused"), [(1, False), pytest.param(99, True, marks=pytest.mark.thorough)])
def test_a_compiled_graph_may_round_to_the_other_side_of_one_kink_but_not_err(
    run: Run, monkeypatch: pytest.MonkeyPatch, wrong_calls: int, refused: bool
) -> None:
    """On one of 100 writers a ReLU stood at 0 to seven digits, and the compiled objective was off by .0015 there."""
    calls = [0]

    def erring(graph: Callable[..., list[Tensor]], **how: Any) -> Callable[..., list[Tensor]]:
        def again(*arguments: Any) -> list[Tensor]:
            calls[0] += 1
            objective, *slopes = graph(*arguments)
            return [objective + 0.0015 * (calls[0] <= wrong_calls), *slopes]

        return again

    monkeypatch.setattr(torch, "compile", erring)
    monkeypatch.setattr(graphs, "_cache", [])
    of, attack = victim(), InvertingGradients(iterations=3, compile=True)
    if refused:
        with pytest.raises(
            AttackError, match=r"^the compiled objective is .* where the model gives .*set compile = fa"
        ):
            run(attack, of)
        assert graphs._cache == []
    else:
        eager, traced = run(dataclasses.replace(attack, compile=False), of), run(attack, of)
        torch.testing.assert_close(traced.trace["objective"], eager.trace["objective"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fault", [None, "repeats the values of its record", "repeats its gradients", "cannot be recorded"]
)
def test_a_cuda_graph_is_checked_when_it_is_repeated_and_what_it_gives_is_kept(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str | None
) -> None:
    """A stand-in on the CPU: each run overwrites the outputs of the last one, as those of a CUDA graph do."""
    modes: list[str | None] = []
    shared_memory: list[Tensor] = []

    def compile_stand_in(graph: Callable[..., list[Tensor]], *, dynamic: bool, mode: str | None = None) -> Any:
        modes.append(mode)
        recorded: list[Tensor] = []

        def replay(*arguments: Any) -> list[Tensor]:
            if fault == "cannot be recorded":
                raise RuntimeError("operation not permitted when stream is capturing")
            for output in shared_memory:
                output.fill_(math.nan)
            shared_memory[:] = [output.clone() for output in graph(*arguments)]
            if fault is not None and not recorded:
                recorded.extend(output.clone() for output in shared_memory)
            first = 3 if fault == "repeats its gradients" else 0  # they follow the objective, the distance and L_sim
            shared_memory[first:] = recorded[first:] or shared_memory[first:]
            return shared_memory

        return graph if mode is None else replay

    monkeypatch.setattr(torch, "compile", compile_stand_in)
    monkeypatch.setattr(graphs, "uses_cuda_graphs", lambda device: True)
    monkeypatch.setattr(graphs, "_cache", [])
    of, attack = victim(), SurrogateModelExtension(iterations=5, restarts=2, alpha_every=2, compile=True)
    eager, compiled = run(dataclasses.replace(attack, compile=False), of), run(attack, of)
    for name, curve in eager.trace.items():
        torch.testing.assert_close(compiled.trace[name], curve, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compiled.data, eager.data, atol=1e-5, rtol=1e-5)
    assert set(modes) == ({"reduce-overhead"} if fault is None else {"reduce-overhead", None})
    assert ("compiled without a CUDA graph" in caplog.text) == (fault is not None)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_device_that_is_lost_while_compiling_is_not_blamed_on_the_compiler(
    run: Run, monkeypatch: pytest.MonkeyPatch, mode: str | None
) -> None:
    def lose_device(graph: object, **how: Any) -> Callable[..., list[Tensor]]:
        def fail(*arguments: Any) -> list[Tensor]:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

        assert how.get("mode") == mode
        return fail

    monkeypatch.setattr(torch, "compile", lose_device)
    monkeypatch.setattr(graphs, "uses_cuda_graphs", lambda device: mode is not None)
    monkeypatch.setattr(graphs, "_cache", [])
    with pytest.raises(torch.AcceleratorError):
        run(InvertingGradients(iterations=3, compile=True), victim())


def test_a_device_that_is_lost_in_a_check_is_not_blamed_on_the_model(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose_device(*arguments: Any) -> Tensor:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    for owner, name in ((InversionProblem, "outputs"), (Cosine, "__call__")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lose_device)
            with pytest.raises(torch.AcceleratorError):
                run(InvertingGradients(iterations=3), victim(lambda: smooth()))  # a model of which nothing is known yet
    monkeypatch.setattr(inversion_task, "objective_and_gradients", lose_device)
    with pytest.raises(torch.AcceleratorError):
        run(InvertingGradients(iterations=3, precision="bfloat16"), victim())
    assert "half precision" not in caplog.text


# What cannot be attacked, one sentence each.

FEW = {"iterations": 3}
ONE_STEP: list[GradientInversion] = [
    DeepLeakage(iterations=1),
    ImprovedDeepLeakage(iterations=1),
    SelfAdaptiveLeakage(**FEW),
    SeeThroughGradients(bn_weight=0.0, **FEW),
]


@pytest.mark.parametrize("attack", ONE_STEP, ids=lambda attack: type(attack).__name__)
def test_an_attack_on_one_step_says_so_when_there_are_more(
    run: Run, caplog: pytest.LogCaptureFixture, attack: GradientInversion
) -> None:
    run(attack, victim())
    assert "assumes" not in caplog.text
    run(attack, victim(count=3, local_epochs=2, batch_size=2))
    assert "assumes one local step, the update is of 4; expect little" in caplog.text


def test_an_attack_that_normalises_otherwise_than_the_client_names_one_that_does_not(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run(DeepLeakage(iterations=1), victim(normalised, 3, before=used(), batch_norm="train"))
    assert "normalises by the batch, such as see-through-gradients with exact_statistics = true" in caplog.text


class Hard(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sign()


class Cut(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.detach()


class Dead(nn.ReLU):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs - 1e6)


class Bent(nn.Module):
    """Its first derivative is finite at 0, its second is not."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + (inputs - inputs.detach()).pow(1.5)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


class Once(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return torch.as_tensor(_Once.apply(inputs))


class Fused(nn.Module):
    """What a transformer of torch's computes."""

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.reshape(-1, 1, 3, 4)
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).flatten(1)


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (
            Hard,
            r"^.*, client 5: the output of layer '2' \(Hard\) does not change with the dummy data",
        ),
        (Cut, r"^.*, client 5: the output of layer '2' \(Cut\) does not change with the dummy data"),
        (
            Dead,
            r"^.*, client 5: the output of layer '2' \(Dead\) does not change with .* in which it is not dead$",
        ),
        (Bent, r"NaN or infinite: layer '2' \(Bent\) has no finite second derivative there; attack another model$"),
        (
            Once,
            r"^.*, client 5: layer '2' \(Once\) cannot be differentiated twice \(.*\), as matching gradients must;",
        ),
        (
            Fused,
            r"^.*, client 5: layer '2' \(Fused\) cannot be differentiated twice \(.*\), as matching gradients must;",
        ),
    ],
    ids=["step", "cut", "dead", "bent", "once", "fused attention"],
)
@pytest.mark.parametrize("attack", [SurrogateModelExtension(), DataLeakage()], ids=["sme", "dlfa"])
def test_a_layer_through_which_nothing_can_be_matched_is_named(
    run: Run, attack: GradientInversion, layer: Callable[[], nn.Module], sentence: str
) -> None:
    with pytest.raises(AttackError, match=sentence) as caught:
        run(attack, victim(with_layer(layer)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layer", [nn.ReLU, lambda: nn.Unflatten(1, (1, 12))], ids=["relu", "max-pool"])
def test_kinks_can_be_matched(run: Run, layer: Callable[[], nn.Module]) -> None:
    def build() -> nn.Module:
        net = with_layer(layer)()
        if not isinstance(net[2], nn.ReLU):  # type: ignore[index]
            net = nn.Sequential(*list(net)[:3], nn.MaxPool1d(2), nn.Flatten(), nn.Linear(6, 10))  # type: ignore[call-overload]
        return net

    finding = run(InvertingGradients(iterations=60, step_size=0.1), victim(build))
    assert finding.trace["objective"][-1] < 0.5 * finding.trace["objective"][0]


def test_gradients_that_do_not_depend_on_the_data_are_one_sentence(run: Run) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(10))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.flatten(1)[:, :10] + self.bias

    def linear(logits: Tensor, labels: Tensor) -> Tensor:
        return logits[:, 0].mean()

    before = copy_state(Shift())
    update = build_update(before, {"bias": before["bias"] + 1}, client=5)
    of = Victim(update=update, knowledge=dataclasses.replace(victim().knowledge, model=Shift, loss=linear))
    with pytest.raises(
        AttackError, match="exactly zero, though the model's outputs depend on them: its gradients do not"
    ):
        run(InvertingGradients(), of)


def test_a_parameter_that_the_model_does_not_use_is_no_obstacle(run: Run) -> None:
    def build() -> nn.Module:
        net = smooth()
        net.register_parameter("idle", nn.Parameter(torch.zeros(3)))
        return net

    data = run(ImprovedDeepLeakage(iterations=20), victim(build)).data
    assert psnr(data, truth(1)).item() > 40


@pytest.mark.parametrize(
    ("granted", "kind", "sentence"),
    [
        (
            {"input_shape": (1, 7, 7)},
            AttackError,
            r"^.*, client 5: the model does not take inputs of shape \(1, 1, 7, 7\) \(.*\); check input_shape, and",
        ),
        (
            {"input_shape": (1, 7, 7), "labels": None},
            AttackError,
            r"^.*, client 5: the model does not take inputs of shape \(1, 1, 7, 7\)",
        ),
        (
            {"labels": torch.tensor([12])},
            AttackError,
            r"^.*, client 5: the loss does not take outputs of shape \(1, 10\) with the labels \(.*12.*\); check",
        ),
        (
            {"labels": torch.tensor([1, 2])},
            AttackError,
            "^round 1, client 5: 2 labels are granted, but the client reported N = 1$",
        ),
    ],
    ids=["input shape", "input shape, labels counted", "label", "number of labels"],
)
def test_knowledge_that_does_not_fit_is_one_sentence(
    run: Run, granted: dict[str, Any], kind: type[FedsimError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        run(SelfAdaptiveLeakage(), victim(), **granted)
    assert "\n" not in str(caught.value)


def test_an_unknown_number_of_examples_is_one_sentence(run: Run) -> None:
    of = victim()
    silent = Victim(update=dataclasses.replace(of.update, num_examples=0), knowledge=of.knowledge)
    with pytest.raises(
        AttackError, match=r"N is 0, so nothing says how many .*; attack a client that reports its num_"
    ):
        run(DeepLeakage(), silent)


@pytest.mark.parametrize("attack", [*ONE_STEP, DataLeakage()], ids=lambda attack: type(attack).__name__)
@pytest.mark.parametrize(("change", "sentence"), [(0.0, "w_T equals w_0"), (math.nan, "holds NaN or infinite")])
def test_an_update_of_nothing_or_nan_is_refused(
    run: Run, attack: GradientInversion, change: float, sentence: str
) -> None:
    of = victim()
    after = {name: value + change for name, value in of.update.before.items()}
    with pytest.raises(AttackError, match=sentence):
        run(
            attack,
            Victim(
                update=dataclasses.replace(of.update, payload=Payload.from_dense(after, "weights")),
                knowledge=of.knowledge,
            ),
        )


def test_idlg_without_labels_reads_one_example(run: Run) -> None:
    with pytest.raises(AttackError, match="the label of one example is read from signs, N is 3; grant the labels or"):
        run(ImprovedDeepLeakage(), victim(count=3), labels=None)


def test_statistics_that_are_not_there_are_one_sentence(run: Run) -> None:
    with pytest.raises(AttackError, match="prior on BatchNorm layers, and the model has none; set bn_weight = 0"):
        run(SeeThroughGradients(), victim())
    with pytest.raises(
        AttackError, match="at most one epoch, not from 2 local steps of B = 100 on 3 examples; set it to"
    ):
        run(SeeThroughGradients(exact_statistics=True), victim(normalised, 3, local_epochs=2))
    of = victim(normalised, 3)
    after = {name: value for name, value in of.update.after.items() if "running" not in name}
    bare = Victim(
        update=dataclasses.replace(of.update, payload=Payload.from_dense(after, "weights")), knowledge=of.knowledge
    )
    with pytest.raises(AttackError, match="and the client returned no statistics of theirs; set bn_weight = 0"):
        run(SeeThroughGradients(), bare)
    run(SeeThroughGradients(bn_weight=0.0, **FEW), bare)


# Tables and regressions.


def regressor() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


ROWS, TARGETS = random(3, 6, key="rows").float().clamp(-2, 2), torch.tensor([0.5, -1.0, 2.0])


def table_victim(count: int) -> Victim:
    plan = LocalTraining(local_epochs=1, batch_size=100, learning_rate=0.05)
    before = copy_state(regressor())
    after, _ = local_update(regressor(), before, ROWS[:count], TARGETS[:count], plan, key=("x",), loss=squared_error)
    knowledge = Knowledge(
        model=regressor,
        loss=squared_error,
        input_shape=(6,),
        value_range=([-2.0], [2.0]),
        labels=TARGETS[:count],
        learning_rate=0.05,
        local_epochs=1,
        batch_size=100,
    )
    update = build_update(before, after, client=5, num_examples=count)
    return Victim(update=update, knowledge=knowledge)


@pytest.mark.thorough
def test_a_row_of_a_regression_is_recovered(run: Run) -> None:
    attack = SurrogateModelExtension(iterations=200, step_size=0.1, alpha=1.0, alpha_step_size=1e-12)
    finding = run(attack, table_victim(1))
    torch.testing.assert_close(finding.data * 4 - 2, ROWS[:1], atol=0.05, rtol=0)
    assert finding.labels.tolist() == [0.5]


@pytest.mark.parametrize(
    "attack",
    [
        InvertingGradients(**FEW),
        SurrogateModelExtension(**FEW),
        SurrogateModelExtension(precision="bfloat16", **FEW),
        ImprovedDeepLeakage(**FEW),
        SelfAdaptiveLeakage(**FEW),
        SeeThroughGradients(bn_weight=0.0, **FEW),
        DataLeakage(**FEW),
        LongStrides(**FEW),
        NonLinearSurrogate(**FEW),
    ],
    ids=["ig", "sme", "sme, bfloat16", "idlg", "sapag", "see-through-gradients", "dlfa", "long-strides", "nl-sme"],
)
def test_tables_with_targets_are_attacked(run: Run, attack: GradientInversion) -> None:
    finding = run(attack, table_victim(3))
    assert finding.data.shape == (3, 6)
    assert finding.labels.tolist() == TARGETS.tolist()


@pytest.mark.parametrize("attack", [SurrogateModelExtension(), ImprovedDeepLeakage()], ids=["counted", "by sign"])
def test_targets_that_are_withheld_must_be_granted(run: Run, attack: GradientInversion) -> None:
    with pytest.raises(
        KnowledgeError, match=r"labels cannot be recovered: the model has one output, .*; grant them with"
    ):
        run(attack, table_victim(1), labels=None)


def test_a_last_linear_layer_that_is_not_the_last_gives_no_labels_away(run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        head = nn.Conv2d(1, 10, 8)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Unflatten(1, (1, 8, 8)), head, nn.Flatten())

    with pytest.raises(KnowledgeError, match="the model ends in Flatten, not in a linear layer; grant them with"):
        run(InvertingGradients(), victim(build), labels=None)


@pytest.mark.parametrize(
    ("attack", "settings"),
    [
        (DeepLeakage, {"step_size": 0.0}),
        (ImprovedDeepLeakage, {"step_size": math.nan}),
        (SelfAdaptiveLeakage, {"step_size": -1.0}),
        (SelfAdaptiveLeakage, {"restarts": 0}),
        (SelfAdaptiveLeakage, {"patience": -1}),
        (SeeThroughGradients, {"gradient_weight": 0.0}),
        (SeeThroughGradients, {"bn_weight": -1.0}),
        (SeeThroughGradients, {"noise": math.nan}),
        (DataLeakage, {"emphasis": (1.0, 0.0)}),
        (DataLeakage, {"emphasis": (math.nan, 1.0)}),
        (DataLeakage, {"emphasis": (1.0,)}),
        (DataLeakage, {"emphasis_iterations": 0}),
        (DataLeakage, {"decay": 0.0}),
        (DataLeakage, {"order_weight": -1.0}),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    attack: type[GradientInversion], settings: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}(\.\d)?: expected .*, got "):
        attack(**settings)
