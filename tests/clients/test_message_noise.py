"""What each defense says of the noise of its messages."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from clients.defenses.dp_sgd import DpSgd
from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.layer_freeze import LayerFreeze
from clients.defenses.outpost import Outpost
from clients.defenses.quantise import Quantise
from clients.defenses.random_mask import RandomMask
from clients.defenses.top_k import TopK
from clients.defenses.update_noise import UpdateNoise
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts, combine_noise
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State

FACTS = TrainingFacts(num_examples=8, learning_rate=0.1, steps=2, batch_size=4)
SENT = {"weight": torch.tensor([[0.0, 2.0], [-0.5, 0.0]]), "bias": torch.tensor([0.0, 3.0])}


def noise_of(defense: Defense, sent: State = SENT) -> MessageNoise:
    noise = defense.message_noise(sent, FACTS)
    assert noise is not None
    return noise


def test_noise_has_the_size_that_clients_add() -> None:
    gaussian = noise_of(UpdateNoise(clip=0.5, noise_multiplier=0.02)).deviations
    assert gaussian["bias"].tolist() == pytest.approx([0.01, 0.01])
    laplace = noise_of(UpdateNoise(clip=0.5, noise_multiplier=0.02, noise="laplace")).deviations
    assert laplace["bias"][0].item() == pytest.approx(0.01 * math.sqrt(2))


def test_noise_of_dp_sgd_adds_up_over_steps() -> None:
    """Each of two steps adds sigma C / (q N) times the learning rate."""
    noise = noise_of(DpSgd(clip=4.0, noise_multiplier=0.1))
    assert noise.deviations["bias"][0].item() == pytest.approx(0.1 * math.sqrt(2) * 0.4 / 4)


def test_levels_are_as_far_apart_as_the_smallest_number_sent() -> None:
    assert noise_of(Quantise(bits=4)).rounding_steps == {"weight": 0.5, "bias": 3.0}
    assert not noise_of(Quantise(bits=4), {"weight": torch.zeros(2)}).rounding_steps


def test_what_was_not_sent_is_smaller_than_what_was() -> None:
    """Top-k selects from the update as a whole, pruning from each tensor."""
    of_all = noise_of(TopK(fraction=0.5)).bounds
    assert of_all["weight"].tolist() == [[0.5, 0.0], [0.0, 0.5]]
    assert of_all["bias"].tolist() == [0.5, 0.0]
    one_step = replace(FACTS, steps=1)
    by_tensor = GradientPrune(pruned=0.5).message_noise(SENT, one_step)
    assert by_tensor is not None
    assert by_tensor.bounds["bias"].tolist() == [3.0, 0.0]
    assert not by_tensor.adds_noise


def test_what_was_sent_after_two_steps_may_have_been_pruned_in_one() -> None:
    """By up to the smallest number of its tensor, and uniformly so; zeros were pruned in both."""
    noise = noise_of(GradientPrune(pruned=0.5))
    assert noise.bounds["bias"].tolist() == [6.0, 0.0]
    assert noise.deviations["bias"].tolist() == pytest.approx([0.0, 3 / math.sqrt(3)])
    assert GradientPrune(pruned=0.5).message_noise(SENT, TrainingFacts(num_examples=8)) is None
    assert not noise_of(GradientPrune(pruned=0.0)).reads_message


def test_what_was_left_out_says_nothing() -> None:
    masked = noise_of(RandomMask(masked=0.5)).deviations["bias"]
    assert masked.tolist() == [math.inf, 0.0]
    frozen = noise_of(LayerFreeze(layers=("bias",))).deviations
    assert frozen["bias"].isinf().all()
    assert "weight" not in frozen


@pytest.mark.parametrize(
    "defense",
    [
        UpdateNoise(quantile=0.5, bit_noise=1.0, noise_multiplier=1.0),
        Quantise(scheme="sign"),
        TopK(error_feedback=True),
        RandomMask(error_feedback=True),
        Outpost(),
    ],
)
def test_what_is_not_known_is_not_claimed(defense: Defense) -> None:
    assert defense.message_noise(SENT, FACTS) is None


def test_dp_sgd_needs_the_learning_rate() -> None:
    assert DpSgd(noise_multiplier=1.0).message_noise(SENT, TrainingFacts(num_examples=8, steps=2, batch_size=4)) is None


def test_several_defenses_combine() -> None:
    parts = [
        MessageNoise(bounds={"bias": torch.tensor([2.0, 0.0])}, rounding_steps={"bias": 1.0}),
        MessageNoise(bounds={"bias": torch.tensor([1.0, 0.0])}, deviations={"bias": torch.tensor([0.0, math.inf])}),
    ]
    both = combine_noise(parts, SENT)
    assert both.bounds["bias"].tolist() == [1.0, 0.0]
    assert both.deviations["bias"].tolist() == [0.0, math.inf]
    assert both.rounding_steps == {"bias": 1.0}


def test_levels_are_told_where_no_number_is_at_the_first_one() -> None:
    """2, 6 and 10 levels of 0.1, beside one at 5; four bits have no tenth level."""
    sent = {"bias": torch.tensor([0.2, -0.6, 1.0, 0.5])}
    assert noise_of(Quantise(bits=8), sent).rounding_steps["bias"] == pytest.approx(0.1)
    assert noise_of(Quantise(bits=4), sent).rounding_steps["bias"] == pytest.approx(0.2)


def test_levels_of_what_was_quantised_are_the_true_ones() -> None:
    """A tensor of ten numbers at 127 levels has none at the first."""
    defense, rng = Quantise(bits=8), torch.Generator().manual_seed(0)
    update: dict[str, torch.Tensor] = {"bias": 1 + torch.rand(10, generator=rng)}
    payload = defense.on_update(update, LocalContext(rng=rng, broadcast=update))
    assert isinstance(payload, Payload)
    sent = payload.values("delta", update)
    step = noise_of(defense, sent).rounding_steps["bias"]
    assert step == pytest.approx(update["bias"].norm().item() / 127, rel=1e-4)


def test_noise_of_a_mean_over_clients_is_smaller() -> None:
    noise = MessageNoise(deviations={"bias": torch.tensor([2.0, math.inf])})
    assert noise.average_over_clients(4).deviations["bias"].tolist() == [1.0, math.inf]


def test_only_what_is_read_from_a_message_can_be_disturbed() -> None:
    assert noise_of(TopK(fraction=0.5)).reads_message
    assert noise_of(RandomMask(masked=0.5)).reads_message
    assert noise_of(Quantise(bits=4)).reads_message
    assert not noise_of(LayerFreeze(layers=("bias",))).reads_message
    assert not noise_of(UpdateNoise(noise_multiplier=0.02)).reads_message
