"""The Hessian of a matching loss, its ends and its whole spectrum, against autograd and the exact one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import generator
from fedsim.base.task import Task, squared_error
from fedsim.exposure import hessian
from fedsim.exposure.expected_error import ExpectedError
from fedsim.exposure.hessian import Distance, Hessian
from fedsim.exposure.jacobian_norm import JacobianNorm
from fedsim.exposure.lavp import Lavp
from fedsim.exposure.measure import Measure
from fedsim.exposure.spectrum import Spectrum
from fedsim.training.message_function import ClientMessage
from fedsim.training.models.lenet import LeNet
from fedsim.training.settings import LocalTraining
from tests.support.networks import build_convolution

LOSS: Any = nn.functional.cross_entropy
UPDATE = LocalTraining(local_steps=2, batch_size=1, learning_rate=0.1)
DISTANCES: list[Distance] = ["l2", "cosine"]


def batch(size: int = 2, side: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 1, side, side, generator=torch.Generator().manual_seed(1)), torch.arange(size)


def exact(model: nn.Module, inputs: Tensor, labels: Tensor, distance: Distance, **options: Any) -> Tensor:
    """Eigenvalues in float64."""
    sent = ClientMessage.create(deepcopy(model).double(), LOSS, inputs.double(), labels, **options)
    return torch.linalg.eigvalsh(Hessian(sent, distance).matrix())


def test_theorems_3_and_4_are_the_hessians_of_the_matching_losses() -> None:
    """Of half the squared L2 distance: the squared one of the text has twice as much."""
    model, (inputs, labels) = build_convolution().double(), batch()
    inputs = inputs.double()
    sent = ClientMessage.create(model, LOSS, inputs, labels)
    target = sent.vector

    def l2(flat: Tensor) -> Tensor:
        return (sent(flat.reshape(inputs.shape)) - target).square().sum() / 2

    def cosine(flat: Tensor) -> Tensor:
        return 1 - torch.cosine_similarity(sent(flat.reshape(inputs.shape)), target, dim=0)

    losses: dict[Distance, Callable[[Tensor], Tensor]] = {"l2": l2, "cosine": cosine}
    for distance, loss in losses.items():
        made: Any = torch.autograd.functional.hessian(loss, inputs.flatten())
        ours = Hessian(sent, distance).matrix()
        assert (ours - made).abs().max() < 1e-9 * made.abs().max()


@pytest.mark.parametrize(
    ("activation", "norm", "evaluated", "training"),
    [
        (nn.Tanh, False, False, UPDATE),
        pytest.param(nn.ReLU, True, False, None, marks=pytest.mark.thorough),
        pytest.param(nn.Tanh, False, False, None, marks=pytest.mark.thorough),
        pytest.param(nn.ReLU, True, True, None, marks=pytest.mark.thorough),
        pytest.param(nn.ReLU, False, False, UPDATE, marks=pytest.mark.thorough),
    ],
)
def test_lambda_max_in_float32_is_the_exact_eigenvalue(
    activation: type[nn.Module], norm: bool, evaluated: bool, training: LocalTraining | None
) -> None:
    model, (inputs, labels) = build_convolution(activation, norm).train(not evaluated), batch(4 if norm else 2)
    values = Lavp(steps=5).compute(model, LOSS, inputs, labels, training=training)
    for name, distance in zip(("max", "ang_max"), DISTANCES, strict=True):
        wanted = exact(model, inputs, labels, distance, training=training)[-1].item()
        assert values[name] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_lambda_max_of_lenet_is_the_exact_eigenvalue(activation: Any) -> None:
    torch.manual_seed(0)
    model, (inputs, labels) = LeNet(activation=activation).build(Task((1, 14, 14), 10)), batch(1, side=14)
    values = Lavp(steps=1).compute(model, LOSS, inputs, labels)
    for name, distance in zip(("max", "ang_max"), DISTANCES, strict=True):
        assert values[name] == pytest.approx(exact(model, inputs, labels, distance)[-1].item(), rel=1e-4)


def test_of_each_example_it_is_the_part_of_the_hessian_that_is_its_own() -> None:
    model, (inputs, labels) = build_convolution(), batch()
    each = Lavp(steps=1).compute_per_example(model, LOSS, inputs, labels)
    for name, distance in zip(("max", "ang_max"), DISTANCES, strict=True):
        whole = Hessian(ClientMessage.create(model.double(), LOSS, inputs.double(), labels), distance).matrix()
        wanted = [torch.linalg.eigvalsh(whole[part, part])[-1].item() for part in (slice(0, 64), slice(64, 128))]
        assert each[name].tolist() == pytest.approx(wanted, rel=1e-4)
        model.float()


@pytest.mark.thorough
def test_what_power_iteration_leaves_of_the_minimum_falls_with_its_steps_and_stays_above() -> None:
    model, (inputs, labels) = build_convolution(), batch()
    lowest = exact(model, inputs, labels, "l2")[0].item()
    left = [Lavp(steps=steps).compute(model, LOSS, inputs, labels) for steps in (4, 16, 64)]
    assert left[0]["min"] > 2 * left[1]["min"] > 4 * left[2]["min"]
    assert left[2]["min"] > lowest
    for values in left:
        assert values["fusion"] == pytest.approx(math.sqrt(values["max"] * values["ang_min"]))


def test_scaling_the_loss_changes_l2_by_its_square_and_the_cosine_not_at_all() -> None:
    model, (inputs, labels) = build_convolution(), batch()

    def thrice(outputs: Tensor, labels: Tensor, /, *, reduction: str = "mean") -> Tensor:
        return 3 * nn.functional.cross_entropy(outputs, labels, reduction=reduction)

    once, scaled = (Lavp(steps=8).compute(model, loss, inputs, labels) for loss in (LOSS, thrice))
    for name, factor in {"max": 9.0, "min": 9.0, "ang_max": 1.0, "ang_min": 1.0, "fusion": 3.0}.items():
        assert scaled[name] == pytest.approx(factor * once[name], rel=1e-3)


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_exact_spectrum_is_told_in_a_few_numbers(distance: Distance) -> None:
    model, (inputs, labels) = build_convolution(), batch()
    values = Spectrum(distance=distance).compute(model, LOSS, inputs, labels)
    true = exact(model, inputs, labels, distance).clamp_min(0)
    shares = true[true > 0] / true.sum()
    assert values["max"] == pytest.approx(true[-1].item(), rel=1e-9)
    assert values["q90"] == pytest.approx(true[115].item(), rel=1e-9)  # the 116th of 128
    assert values["median"] == pytest.approx(true[63].item(), rel=1e-6)
    assert values["q10"] == pytest.approx(true[12].item(), rel=1e-6, abs=1e-12 * true[-1].item())
    assert values["effective_rank"] == pytest.approx((-(shares * shares.log()).sum()).exp().item(), rel=1e-9)
    assert values["log_determinant"] == pytest.approx((true + 1e-3 * true[-1]).log().mean().item(), rel=1e-9)


@pytest.mark.parametrize(
    ("distance", "training"), [("l2", None), pytest.param("cosine", UPDATE, marks=pytest.mark.thorough)]
)
def test_the_estimate_is_close_to_the_exact_spectrum(distance: Distance, training: LocalTraining | None) -> None:
    torch.manual_seed(0)
    model, (inputs, labels) = LeNet().build(Task((1, 12, 12), 10)), batch(2, side=12)
    true = exact(model, inputs, labels, distance, training=training).clamp_min(0)
    shares = (true / true.sum()).clamp_min(1e-300)
    estimate = Spectrum(distance=distance, exact=0).compute(model, LOSS, inputs, labels, training=training)
    assert estimate["max"] == pytest.approx(true[-1].item(), rel=1e-4)
    assert estimate["effective_rank"] == pytest.approx((-(shares * shares.log()).sum()).exp().item(), rel=0.1)
    assert estimate["log_determinant"] == pytest.approx((true + 1e-3 * true[-1]).log().mean().item(), abs=0.1)
    assert true[int(0.86 * len(true))] < estimate["q90"] < true[int(0.94 * len(true))]
    assert math.isnan(estimate["q10"])


@pytest.mark.thorough
def test_an_estimate_with_all_steps_is_the_spectrum_that_the_probes_see() -> None:
    model, (inputs, labels) = build_convolution(), batch(1)
    whole, estimate = (
        Spectrum(exact=size, probes=200, steps=64).compute(model, LOSS, inputs, labels) for size in (64, 0)
    )
    for name in ("max", "effective_rank", "log_determinant", "q90", "median"):
        assert estimate[name] == pytest.approx(whole[name], rel=0.1)


class Held(TorchDispatchMode):
    """Counts bytes of all tensors that are made, as long as they are held."""

    now = most = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = call(*args, **(kwargs or {}))
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                size = leaf.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(leaf.untyped_storage(), self.let_go, size)
        return made

    def let_go(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize(
    ("measure", "training"),
    [
        (Spectrum(exact=0, probes=2, steps=2), None),
        pytest.param(ExpectedError(steps=3), None, marks=pytest.mark.thorough),
        pytest.param(JacobianNorm(exact=True), None, marks=pytest.mark.thorough),
        pytest.param(JacobianNorm(probes=16), UPDATE, marks=pytest.mark.thorough),
        pytest.param(Lavp(steps=3), UPDATE, marks=pytest.mark.thorough),
    ],
)
def test_memory_bounds_what_derivatives_take_and_changes_nothing_but_rounding(
    measure: Measure, training: LocalTraining | None
) -> None:
    model, (inputs, labels) = build_convolution(), batch()
    sent = ClientMessage.create(model, LOSS, inputs, labels, training=training)
    needed = 2 * (sent.to_double() if isinstance(measure, Spectrum) else sent).jacobian_bytes
    much = measure.compute(model, LOSS, inputs, labels, training=training)
    with Held() as held:
        little = measure.compute(model, LOSS, inputs, labels, training=training, memory=needed)
    assert little == pytest.approx(much, rel=1e-4, nan_ok=True)
    assert needed / 4 < held.most < needed
    with pytest.raises(
        ConfigError, match=r"the derivative .* takes about 1 MiB, and memory is .* MiB; raise memory, or"
    ):
        measure.compute(model, LOSS, inputs, labels, training=training, memory=needed // 2)


def test_a_whole_spectrum_and_the_basis_of_an_iteration_have_to_fit_into_memory() -> None:
    model, (inputs, labels) = build_convolution(), batch()
    sent = ClientMessage.create(model, LOSS, inputs, labels, budget=400_000)
    with pytest.raises(
        ConfigError, match=r"the whole Hessian of 128 inputs takes about 1 MiB, and memory is 0\.3815 MiB"
    ):
        Spectrum().compute_for_message(sent)
    sent = replace(sent, budget=sent.jacobian_bytes + 100_000)
    with pytest.raises(ConfigError, match="the derivative with 128 steps of Lanczos iteration takes about 1 MiB"):
        Lavp(steps=10_000).compute_for_message(sent)


def test_the_jacobian_norm_of_any_number_of_inputs_is_exact_if_it_is_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of (w'x - y)^2 the gradient is 2 r x, where r = w'x - y, and its derivative 2 (x w' + r I)."""
    monkeypatch.setattr(hessian, "MAX_EXACT_INPUTS", 1000)
    model, x, y = nn.Linear(1100, 1, bias=False), torch.randn(1, 1100, generator=generator(0)), torch.ones(1)
    with torch.no_grad():
        weight, rest = model.weight, (model(x) - y).squeeze()
        crossed = 2 * rest * (weight * x).sum()
        wanted = 2 * (x.square().sum() * weight.square().sum() + crossed + 1100 * rest.square()).sqrt().item()
    assert JacobianNorm(exact=True).compute(model, squared_error, x, y)["norm"] == pytest.approx(wanted, rel=1e-4)


def test_the_jacobian_norm_is_the_root_of_the_trace() -> None:
    model, (inputs, labels) = build_convolution(), batch()
    wanted = exact(model, inputs, labels, "l2").sum().sqrt().item()
    assert JacobianNorm(exact=True).compute(model, LOSS, inputs, labels)["norm"] == pytest.approx(wanted, rel=1e-5)
    assert JacobianNorm(probes=128).compute(model, LOSS, inputs, labels)["norm"] == pytest.approx(wanted, rel=1e-5)
    estimate = JacobianNorm(probes=100).compute(model, LOSS, inputs, labels)["norm"]
    assert estimate == pytest.approx(wanted, rel=0.1)
    assert estimate != pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("measure", [Lavp(steps=2), Spectrum(), JacobianNorm()])
def test_a_gradient_of_zero_is_undefined_and_token_ids_are_refused(measure: Measure) -> None:
    line = nn.Linear(2, 1)
    nn.init.zeros_(line.weight)
    nn.init.zeros_(line.bias)

    def error(outputs: Tensor, targets: Tensor, /, *, reduction: str = "mean") -> Tensor:
        return nn.functional.mse_loss(outputs.squeeze(1), targets, reduction=reduction)

    values = measure.compute(line, error, torch.ones(2, 2), torch.zeros(2))
    assert values
    assert all(math.isnan(value) for value in values.values())
    text = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(ConfigError, match="the inputs are token ids"):
        measure.compute(text, LOSS, torch.randint(9, (2, 3)), torch.tensor([0, 1]))


def test_a_kink_beside_the_inputs_is_not_taken_for_a_path_that_autograd_lost() -> None:
    """The unit goes silent within the longer step that is compared, and what is sent jumps."""
    model = nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 2)).double()
    inputs = torch.ones(1, 4, dtype=torch.float64)
    direction = torch.randn(4, generator=generator("measure", "direction")).double()
    with torch.no_grad():
        model[0].weight.copy_(direction)
        model[0].bias.copy_(1e-7 - direction.sum())
    for ahead, silent in ((-1e-6, True), (-1e-8, False)):
        assert bool(model[1](model[0](inputs + ahead * direction)) == 0) is silent
    assert ClientMessage.create(model, LOSS, inputs, torch.tensor([0])).jacobian.push_forward(direction).any()


def test_too_many_inputs_for_the_whole_are_refused() -> None:
    sent = ClientMessage.create(nn.Linear(4200, 2), LOSS, torch.randn(1, 4200), torch.tensor([1]))
    with pytest.raises(ConfigError, match="the whole Hessian of 4200 inputs is too large, expected at most 4096"):
        Hessian(sent, "l2").matrix()
    with pytest.raises(ConfigError, match="exact: expected at most 4096"):
        Spectrum(exact=5000)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Lavp(steps=0), "steps: expected at least 1"),
        (lambda: Spectrum(probes=0), "probes: expected at least 1"),
        (lambda: Spectrum(floor=0.0), "floor: expected a value above 0"),
        (lambda: JacobianNorm(probes=0), "probes: expected at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build: Callable[[], Measure], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build()


class Square(torch.autograd.Function):
    """The square, in the old way, which neither forward mode nor vmap know."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inputs)
        return inputs.square()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        return 2 * inputs * slope


class Once(Square):
    """Its backward pass is not differentiated; autograd takes it for a constant, without a word."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        return 2 * inputs * slope


class Frozen(Square):
    """Its backward pass can be differentiated by the slope alone."""

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors
        return 2 * inputs.detach() * slope


class Applied(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        made: Tensor = self.function(inputs)
        return made


def squared(function: Any, inputs: int = 6, units: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, units), Applied(function), nn.Linear(units, 3))


def test_products_of_several_directions_do_not_simulate_the_training_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward mode did for each block of directions, which took most of the time."""
    inputs, labels = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    jacobian = ClientMessage.create(squared(torch.square), LOSS, inputs, labels).jacobian
    expected = jacobian.push_forward(torch.eye(12)[:3])
    monkeypatch.setattr(ClientMessage, "_compute", None)
    assert torch.equal(jacobian.push_forward(torch.eye(12)[:3]), expected)
    assert torch.allclose(jacobian.push_forward(torch.eye(12)[1]), expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "measure", [Lavp(steps=5), Spectrum(), pytest.param(JacobianNorm(probes=3), marks=pytest.mark.thorough)]
)
def test_a_layer_that_cannot_be_vectorised_falls_back_to_one_double_backward_each(measure: Measure) -> None:
    inputs, labels = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    plain, own = (measure.compute(squared(function), LOSS, inputs, labels) for function in (torch.square, Square.apply))
    assert not ClientMessage.create(squared(Square.apply), LOSS, inputs, labels).jacobian.is_vectorised
    assert ClientMessage.create(squared(torch.square), LOSS, inputs, labels).jacobian.is_vectorised
    assert own == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("function", [Once, Frozen])
@pytest.mark.parametrize(("size", "units"), [(6, 5), (3072, 400)])
def test_a_layer_that_is_differentiated_only_once_is_refused_by_name(function: Any, size: int, units: int) -> None:
    inputs, labels = torch.randn(2, size, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1])
    with pytest.raises(RunError, match=r"for want of a second derivative of layer '1' \(Applied\)"):
        Lavp(steps=2).compute(squared(function.apply, size, units), LOSS, inputs, labels)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.out(self.lstm(inputs)[0][:, -1])
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.out = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.out(self.block(inputs).mean(1))
        return out


@pytest.mark.parametrize("network", [pytest.param(Recurrent, marks=pytest.mark.thorough), Attention])
def test_of_sequences_of_vectors_it_is_the_exact_eigenvalue(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, inputs, labels = network().eval(), torch.randn(2, 6, 4), torch.tensor([0, 1])
    wanted = exact(model, inputs, labels, "l2")[-1].item()
    assert Lavp(steps=2).compute(model, LOSS, inputs, labels)["max"] == pytest.approx(wanted, rel=1e-4)
