"""Defenses of the batch: mixup, InstaHide and augmentation, by hand, and in the round loop."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from clients.defenses.augmentation import Augmentation
from clients.defenses.instahide import MAX_WEIGHT, InstaHide, draw_bounded_weights
from clients.defenses.mixing import draw_partners
from clients.defenses.mixup import Mixup
from fedsim.base.errors import ConfigError, PluginError, RunError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.federation.experiment import Experiment
from fedsim.federation.resolve import resolve
from fedsim.interfaces.defense import Defense, Participation, Setting
from fedsim.interfaces.defense_checks import check_defense, check_order, check_setting
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.transcript import Transcript
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_tiny_config, run_serial

CLIENT = Participation(
    num_examples=4, batch_size=4, steps=1, rounds=1, num_classes=3, value_range=((-1.0, -2.0), (3.0, 2.0))
)
IMAGES = Setting(
    update={},
    task=Task((2, 4, 4), 3),
    training=LocalTraining(local_epochs=1, batch_size=4),
    rounds=1,
    clients=3,
    num_examples=[4, 8, 8],
    value_range=((-1.0, -2.0), (3.0, 2.0)),
)


def batch(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.rand((count, 2, 4, 4), generator=generator("x")) * 3 - 1, torch.arange(count) % 3


def used(defense: Defense) -> Defense:
    return defense.of_client(CLIENT)


# Mixing.


def test_two_examples_become_their_mean_twice() -> None:
    inputs, labels = torch.tensor([[0.0, 2.0], [4.0, 6.0]]), torch.tensor([0, 2])
    mixed, soft = used(Mixup()).on_batch(inputs, labels, LocalContext(rng=generator(1)))
    assert mixed.tolist() == [[2.0, 4.0], [2.0, 4.0]]
    assert soft.tolist() == [[0.5, 0.0, 0.5], [0.5, 0.0, 0.5]]


def test_labels_that_are_probabilities_are_mixed_as_such() -> None:
    soft = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    _, mixed = Mixup().on_batch(torch.zeros(2, 1), soft, LocalContext(rng=generator(1)))
    assert mixed.tolist() == [[0.25, 0.25, 0.5]] * 2


def test_targets_of_a_regression_are_mixed_like_the_inputs() -> None:
    inputs, targets = torch.tensor([[1.0], [3.0]]), torch.tensor([10.0, 30.0])
    mixed, means = Mixup(regression=True).on_batch(inputs, targets, LocalContext(rng=generator(1)))
    assert (mixed.flatten().tolist(), means.tolist()) == ([2.0, 2.0], [20.0, 20.0])


@pytest.mark.parametrize("records", [2, 3, 5])
@pytest.mark.parametrize("count", [5, 6, 9])
def test_an_example_is_made_of_different_records_and_each_record_is_in_as_many(count: int, records: int) -> None:
    for seed in range(20):
        found = draw_partners(count, records, generator(seed))
        assert found[:, 0].tolist() == list(range(count))
        assert all(len(set(row)) == records for row in found.tolist())
        assert found.flatten().bincount(minlength=count).tolist() == [records] * count


def test_beta_draws_one_weight_a_batch() -> None:
    inputs, labels = torch.eye(5), torch.arange(5) % 3
    mixed, _ = used(Mixup(alpha=1.0)).on_batch(inputs, labels, LocalContext(rng=generator(3)))
    own = mixed.diagonal()
    assert 0 < own[0] < 1
    assert (own == own[0]).all()
    torch.testing.assert_close(mixed.sum(0), torch.ones(5))
    torch.testing.assert_close(mixed.sort(1).values[:, -2:].sum(1), torch.ones(5))


def test_weights_follow_beta() -> None:
    context, defense = LocalContext(rng=generator("beta")), used(Mixup(alpha=0.4))
    drawn = torch.stack(
        [defense.on_batch(torch.eye(2), torch.zeros(2, dtype=torch.int64), context)[0][0, 0] for _ in range(800)]
    )
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.04)
    assert drawn.var().item() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.012)


def test_the_classes_have_to_be_known() -> None:
    with pytest.raises(RunError, match="Mixup: the number of classes is not known"):
        Mixup().on_batch(*batch(), LocalContext(rng=generator(1)))


@dataclass(frozen=True, kw_only=True)
class MixesInWordsAlone(Defense):
    paper = Mixup.paper

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        return inputs.flip(0), labels.flip(0)

    def adversary_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return inputs.flip(0), labels.flip(0)


def test_a_model_of_mixing_that_nobody_would_call_is_refused() -> None:
    with pytest.raises(PluginError, match="'adversary_batch' is only called of a defense that mixes"):
        check_defense(MixesInWordsAlone())


def test_one_example_has_no_partner() -> None:
    inputs, labels = batch(1)
    for defense in (Mixup(), Mixup(alpha=0.5)):
        mixed, same = used(defense).on_batch(inputs, labels, LocalContext(rng=generator(1)))
        assert torch.equal(mixed, inputs)
        assert torch.equal(same, labels)
    hidden, _ = used(InstaHide()).on_batch(inputs, labels, LocalContext(rng=generator(1)))
    assert torch.equal(hidden.abs(), inputs.abs())
    assert not torch.equal(hidden, inputs)


def test_instahide_flips_signs_of_bounded_mixtures() -> None:
    inputs, labels = torch.eye(6).view(6, 1, 6, 1) + 0.0, torch.arange(6)
    defense = InstaHide(k=3).of_client(replace(CLIENT, num_classes=6))
    hidden, soft = defense.on_batch(inputs, labels, LocalContext(rng=generator(2)))
    torch.testing.assert_close(hidden.abs().flatten(1), soft)  # record j is the j-th unit vector
    assert ((soft > 0).sum(1) == 3).all()
    torch.testing.assert_close(soft.sum(1), torch.ones(6))
    assert soft.max() <= MAX_WEIGHT
    assert (hidden < 0).any()
    assert (hidden > 0).any()


def test_signs_are_fair_and_weights_bounded() -> None:
    weights = draw_bounded_weights(3000, 2, generator(1))
    assert weights.max() <= MAX_WEIGHT
    torch.testing.assert_close(weights.sum(1), torch.ones(3000))
    assert weights[:, 0].mean().item() == pytest.approx(0.5, abs=0.01)
    flipped, _ = used(InstaHide()).on_batch(
        torch.ones(1, 1, 100, 100), torch.tensor([0]), LocalContext(rng=generator(1))
    )
    assert flipped.mean().item() == pytest.approx(0, abs=0.04)


@pytest.mark.parametrize("records", [2, 4])
def test_weights_of_a_mixture_are_normal_draws_without_sign_over_their_sum(records: int) -> None:
    from scipy.stats import ks_2samp

    drawn = np.abs(np.random.default_rng(5).standard_normal((40_000, records)))
    expected = drawn / drawn.sum(1, keepdims=True)
    expected = expected[expected.max(1) <= MAX_WEIGHT]
    got = draw_bounded_weights(4000, records, generator(3)).numpy()
    assert ks_2samp(got[:, 0], expected[:, 0]).pvalue > 0.01
    assert ks_2samp(got.max(1), expected.max(1)).pvalue > 0.01


def test_a_batch_smaller_than_k_is_mixed_as_a_whole() -> None:
    _, soft = InstaHide(k=4).of_client(CLIENT).on_batch(*batch(3), LocalContext(rng=generator(1)))
    assert (soft > 0).all()


# What makes no sense is refused.


@pytest.mark.parametrize(
    ("defense", "setting", "expected"),
    [
        (Mixup(), replace(IMAGES, task=Task((6,), 3, 20)), "mixup: tokens of a text cannot be mixed"),
        (Mixup(), replace(IMAGES, task=Task((6,), 0)), "mixup: regression: the task is a regression"),
        (Mixup(), replace(IMAGES, training=LocalTraining(local_epochs=1, batch_size=1)), "training.batch_size: one"),
        (Mixup(), replace(IMAGES, num_examples=[4, 1, 8]), "client 1 holds 1 training examples"),
        (InstaHide(k=5), IMAGES, "training.batch_size: one example is made of 5 records of a batch, got 4"),
        (InstaHide(), replace(IMAGES, num_examples=[3, 8, 8]), "client 0 holds 3 training examples"),
        (InstaHide(), replace(IMAGES, task=Task((6,), 3)), "instahide: it hides images with classes"),
        (InstaHide(), replace(IMAGES, value_range=((0.0,), (1.0,))), "data.standardise: signs are flipped around 0"),
        (InstaHide(), replace(IMAGES, value_range=((-1.0, 0.0), (1.0, 1.0))), "on one side of it, so that the flips"),
        (Augmentation(), IMAGES, "padding: images of 4 x 4 pixels would be moved by up to 4 pixels"),
        (Augmentation(padding=1), replace(IMAGES, task=Task((6,), 3)), "augmentation: it transforms images"),
    ],
)
def test_what_does_not_fit_is_refused(defense: Defense, setting: Setting, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_setting(defense, setting)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        ({"name": "FiveCrop", "size": 2}, "'FiveCrop' makes a tuple of an image of shape (2, 4, 4)"),
        ({"name": "CenterCrop", "size": 2}, "'CenterCrop' makes float32 of shape (2, 2, 2) of an image"),
        ({"name": "MixUp", "num_classes": 3}, "'MixUp' does not take images of this data set"),
    ],
)
def test_a_transform_that_does_not_fit_is_refused(transform: dict[str, Any], expected: str) -> None:
    defense = Augmentation(padding=0, transforms=(transform,))
    with pytest.raises(ConfigError) as error:
        check_setting(defense, IMAGES)
    assert f"transforms.0: {expected}" in str(error.value)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Mixup(alpha=-1.0), "alpha: expected at least 0, got -1.0"),
        (lambda: InstaHide(k=1), "k: expected at least 2, got 1"),
        (lambda: Augmentation(padding=-1), "padding: expected at least 0, got -1"),
        (lambda: Augmentation(flip=1.5), "flip: expected at most 1, got 1.5"),
        (lambda: Augmentation(transforms=({"degrees": 3},)), "transforms.0: a table without 'name'"),
        (lambda: Augmentation(transforms=({"name": "RandomRotatoin"},)), "did you mean 'RandomRotation'?"),
        (lambda: Augmentation(transforms=({"name": "RandomRotation", "degree": 3},)), "does not take these settings"),
        (lambda: Augmentation(transforms=({"name": "functional"},)), "has no transform 'functional'"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], Defense], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert expected in str(error.value)


def test_regressions_and_tables_may_be_mixed_where_that_is_said() -> None:
    check_setting(Mixup(regression=True), replace(IMAGES, task=Task((6,), 0)))
    check_setting(Mixup(), replace(IMAGES, task=Task((6,), 3)))


def test_a_last_batch_of_one_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_setting(Mixup(), replace(IMAGES, num_examples=[4, 5, 9]))
    assert "the last batch of an epoch of client 1 is of one example" in caplog.text
    assert "(clients in all: 2)" in caplog.text


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([Mixup(), InstaHide()], "instahide: mixup before it already mixes the records"),
        ([InstaHide(), Augmentation()], "augmentation: it would transform the mixtures of instahide"),
    ],
)
def test_orders_that_make_no_sense_are_refused(order: list[Defense], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_order(order)
    assert expected in str(error.value)
    check_order([Augmentation(), Mixup()])


# Augmentation.


def test_an_image_is_moved_and_black_comes_from_beyond_the_edge() -> None:
    inputs, labels = batch(40)
    low = torch.tensor([-1.0, -2.0]).view(2, 1, 1)
    moved, same = used(Augmentation(padding=1, flip=0.0)).on_batch(inputs, labels, LocalContext(rng=generator(1)))
    assert torch.equal(same, labels)
    seen = set()
    for image, found in zip(inputs, moved, strict=True):
        wide = low.expand(2, 6, 6).clone()
        wide[:, 1:5, 1:5] = image
        places = [(r, c) for r in range(3) for c in range(3) if torch.equal(found, wide[:, r : r + 4, c : c + 4])]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 9


def test_images_are_mirrored_each_by_chance() -> None:
    inputs, labels = batch(40)
    always, _ = used(Augmentation(padding=0, flip=1.0)).on_batch(inputs, labels, LocalContext(rng=generator(1)))
    assert torch.equal(always, inputs.flip(-1))
    some, _ = used(Augmentation(padding=0, flip=0.5)).on_batch(inputs, labels, LocalContext(rng=generator(1)))
    mirrored = [torch.equal(a, b) for a, b in zip(some, always, strict=True)]
    assert 8 < sum(mirrored) < 32
    assert all(m or torch.equal(a, b) for m, a, b in zip(mirrored, some, inputs, strict=True))


def test_listed_transforms_act_on_values_from_0_to_1() -> None:
    inputs, labels = batch()
    inverted, _ = used(Augmentation(padding=0, flip=0.0, transforms=({"name": "RandomInvert", "p": 1.0},))).on_batch(
        inputs, labels, LocalContext(rng=generator(1))
    )
    middle = torch.tensor([3.0 - 1.0, 2.0 - 2.0]).view(2, 1, 1)  # lowest and highest value swap places
    torch.testing.assert_close(inverted, middle - inputs)


def test_listed_transforms_draw_for_each_image_and_from_their_generator_alone() -> None:
    one = torch.rand((1, 2, 4, 4), generator=generator("x"))
    inputs, labels = one.expand(8, 2, 4, 4), torch.zeros(8, dtype=torch.int64)
    defense = used(Augmentation(padding=0, flip=0.0, transforms=({"name": "RandomErasing", "p": 1.0},)))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = defense.on_batch(inputs, labels, LocalContext(rng=generator(1)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, _ = copy.deepcopy(defense).on_batch(inputs, labels, LocalContext(rng=generator(1)))
    other, _ = defense.on_batch(inputs, labels, LocalContext(rng=generator(2)))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({image.numpy().tobytes() for image in first}) > 1


def test_the_range_of_values_has_to_be_known() -> None:
    with pytest.raises(RunError, match="Augmentation: the range of values is not known"):
        Augmentation(padding=1).on_batch(*batch(), LocalContext(rng=generator(1)))


# In the round loop.


STRATEGIES: dict[str, dict[str, Any]] = {
    "fedavg": {"strategy": {"name": "fedavg"}},
    "fedsgd": {
        "strategy": {"name": "fedsgd", "learning_rate": 0.1},
        "training": {"local_epochs": None, "local_steps": 1, "learning_rate": None},
    },
}
MIXUP = [{"name": "mixup"}]
TWO = [{"name": "augmentation", "padding": 1}, {"name": "instahide", "k": 2}]
TRANSFORMS = [{"name": "augmentation", "padding": 1, "transforms": [{"name": "RandomRotation", "degrees": 20}]}]


def record_run(folder: Path, strategy: str, defense: list[dict[str, Any]]) -> Transcript:
    config = make_tiny_config(federation={"vectorise": False}, defense=defense, **STRATEGIES[strategy])
    Experiment(resolve(config)).check()
    return Transcript(run_serial(config, folder).transcript)


@pytest.mark.parametrize(
    ("strategy", "tables"),
    [
        ("fedavg", MIXUP),
        pytest.param("fedsgd", TWO, marks=pytest.mark.thorough),
        pytest.param("fedavg", TWO, marks=pytest.mark.thorough),
        pytest.param("fedsgd", MIXUP, marks=pytest.mark.thorough),
        pytest.param("fedavg", TRANSFORMS, marks=pytest.mark.thorough),
        pytest.param("fedsgd", TRANSFORMS, marks=pytest.mark.thorough),
    ],
)
def test_a_federation_trains_on_them_the_same_each_time(
    strategy: str, tables: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, again = (record_run(tmp_path / name, strategy, tables) for name in ("first", "again"))
    plain = record_run(tmp_path / "plain", strategy, [])
    assert first.hash() == again.hash()
    number = first.rounds[0]
    for client in first.clients(number):
        one, other = first.update(number, client), plain.update(number, client)
        assert all(torch.equal(one.before[name], other.before[name]) for name in one.before)
        mine, theirs = (update.gradient or update.after for update in (one, other))
        assert any(not torch.equal(mine[name], theirs[name]) for name in mine)
