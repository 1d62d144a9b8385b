"""The likelihood of a message, number by number."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.layer_freeze import LayerFreeze
from clients.defenses.mixup import Mixup
from clients.defenses.top_k import TopK
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts
from fedsim.inversion.likelihoods import MessageLikelihood, describe_noise, estimate_deviation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update


def distance(gradient: Tensor, sent: Tensor, variance: Tensor, bound: Tensor, step: float = 0.0) -> float:
    target = [sent, variance, bound, torch.tensor(step)]
    return MessageLikelihood()([gradient], target).item()


def test_gaussian_noise_divides_squared_residuals_by_twice_the_variance() -> None:
    none = torch.zeros(2)
    assert distance(torch.tensor([1.0, 0.0]), none, torch.tensor([4.0, 1.0]), none) == 1 / 8


def test_a_number_that_was_left_out_adds_nothing() -> None:
    none = torch.zeros(1)
    assert distance(torch.tensor([7.0]), none, torch.tensor([math.inf]), none) == 0


def test_a_number_that_was_too_small_adds_what_is_beyond_its_bound() -> None:
    sizes, none, bound = torch.tensor([0.4, -1.5]), torch.zeros(2), torch.full((2,), 0.5)
    assert distance(sizes, none, torch.full((2,), 0.5), bound) == 1.0


def test_rounding_is_least_sure_between_two_levels() -> None:
    """The variance of 1.5 at levels 2 apart is 1.5 x 0.5."""
    none = torch.zeros(1)
    rounded = distance(torch.tensor([1.5]), torch.tensor([2.0]), none, none, step=2.0)
    assert rounded == pytest.approx(0.5**2 / (2 * 0.75))


def test_rounding_is_not_differentiated() -> None:
    """Else a number would flee to where its rounding is least sure."""
    gradient = torch.tensor([0.5], requires_grad=True)
    target = [torch.tensor([0.5]), torch.zeros(1), torch.zeros(1), torch.tensor(1.0)]
    MessageLikelihood()([gradient], target).backward()
    assert gradient.grad is not None
    assert gradient.grad.item() == 0


def test_noise_is_estimated_beyond_the_rank_of_the_data() -> None:
    """The signal has a hundred times the size of the noise, and rank 3."""
    rng = torch.Generator().manual_seed(0)
    signal = 10 * torch.randn(60, 3, generator=rng) @ torch.randn(3, 80, generator=rng)
    noise = 0.1 * torch.randn(60, 80, generator=rng)
    estimate = estimate_deviation([signal + noise, torch.ones(5)], 3)
    assert estimate is not None
    assert 0.09 < estimate < 0.11
    assert estimate_deviation([torch.ones(5), torch.ones(3, 80)], 3) is None


def problem_of(update: Update, *defenses: Defense) -> InversionProblem:
    facts = Knowledge(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 12)), loss=cross_entropy, input_shape=(20,),
        num_classes=12, value_range=([0.0], [1.0]), learning_rate=0.1, local_epochs=1, batch_size=2,
        defenses=defenses,
    )  # fmt: skip
    return build_problem(update, facts)


def message(*, num_examples: int = 2, members: tuple[int, ...] = ()) -> Update:
    rng = torch.Generator().manual_seed(1)
    before = {"1.weight": torch.zeros(12, 20), "1.bias": torch.zeros(12)}
    delta = {name: torch.randn(tensor.shape, generator=rng) for name, tensor in before.items()}
    payload = Payload.from_dense(delta, "delta")
    return Update(round=1, client=0, before=before, payload=payload, num_examples=num_examples, members=members)


def test_each_client_of_a_sum_adds_its_noise_and_takes_its_own_steps() -> None:
    """Four clients of two examples at batches of two take one step each, and halve the noise of their mean."""
    noise = UpdateNoise(clip=1.0, noise_multiplier=0.5)
    summed = problem_of(message(num_examples=8, members=(0, 1, 2, 3)), noise)
    described, _ = describe_noise(summed, "map")
    assert described.deviations["1.bias"].tolist() == pytest.approx([0.25] * 12)
    assert summed.update_scale == pytest.approx(0.1)


def test_pruning_by_each_client_cannot_be_read_from_a_sum(caplog: pytest.LogCaptureFixture) -> None:
    summed = problem_of(message(num_examples=8, members=(0, 1, 2, 3)), GradientPrune(pruned=0.5))
    described, viewed = describe_noise(summed, "map")
    assert not any(bound.any() for bound in described.bounds.values())
    assert len(viewed) == 1
    assert "gradient-prune in a sum over clients has no likelihood" in caplog.text


def test_zeros_are_not_read_from_what_got_noise_later(caplog: pytest.LogCaptureFixture) -> None:
    noise, top_k = UpdateNoise(clip=1.0, noise_multiplier=0.5), TopK(fraction=0.5)
    described, _ = describe_noise(problem_of(message(), top_k, noise), "map")
    assert "top-k before update-noise has no likelihood" in caplog.text
    assert all((deviation > 0.5).all() for deviation in described.deviations.values())
    caplog.clear()
    describe_noise(problem_of(message(), noise, top_k), "map")
    assert not caplog.text


def test_pruning_in_local_training_comes_before_noise_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    noise = UpdateNoise(clip=1.0, noise_multiplier=0.5)
    describe_noise(problem_of(message(), noise, GradientPrune(pruned=0.5)), "map")
    assert "gradient-prune before update-noise has no likelihood" in caplog.text


def test_mixing_has_no_likelihood_and_its_view_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    described, viewed = describe_noise(problem_of(message(), Mixup()), "map")
    assert [defense.mixes for defense in viewed] == [True]
    assert described.deviations["1.bias"].min() > 0
    assert "mixup has no likelihood, so it is taken by its view" in caplog.text


def test_frozen_layers_are_known_whatever_noise_follows(caplog: pytest.LogCaptureFixture) -> None:
    noise, frozen = UpdateNoise(clip=1.0, noise_multiplier=0.5), LayerFreeze(layers=("*.bias",))
    described, _ = describe_noise(problem_of(message(), frozen, noise), "map")
    assert described.deviations["1.bias"].isinf().all()
    assert not caplog.text


def test_a_tensor_of_zeros_does_not_outweigh_all_others() -> None:
    """The gradient of a dead layer counts as unsure as the message on average."""
    update = message()
    silent = {"1.weight": torch.ones(12, 20), "1.bias": torch.zeros(12)}
    silent_update = replace(update, payload=Payload.from_dense(silent, "delta"))
    target = MessageLikelihood(model_error=0.1).target(problem_of(silent_update))
    weight_variance, bias_variance = target[2:4]
    assert (bias_variance / weight_variance[0, 0]).tolist() == pytest.approx([240 / 252] * 12, rel=0.02)


@pytest.mark.parametrize(
    ("described", "fault"),
    [
        (MessageNoise(deviations={"another": torch.ones(2)}), "describes 'another' in another shape than the message"),
        (MessageNoise(deviations={"1.bias": torch.ones(3)}), "describes '1.bias' in another shape than the message"),
        (
            MessageNoise(deviations={"1.bias": torch.full((12,), torch.nan)}),
            "has a deviation or bound of '1.bias' below",
        ),
        (MessageNoise(bounds={"1.bias": -torch.ones(12)}), "has a deviation or bound of '1.bias' below 0, or NaN"),
    ],
)
def test_noise_that_is_none_of_the_message_is_refused_by_the_defenses_name(described: MessageNoise, fault: str) -> None:
    class Stranger(UpdateNoise):
        def message_noise(self, sent: Any, facts: TrainingFacts) -> MessageNoise:
            return described

    noise = Stranger(clip=1.0, noise_multiplier=0.5)
    with pytest.raises(AttackError, match=f"'message_noise' of .*Stranger {fault}.*; fix the defense"):
        describe_noise(problem_of(message(), noise), "map")
