"""The most probable data under a known defense, with a prior from public digits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.maximum_a_posteriori import MaximumAPosteriori
from clients.defenses.mixup import Mixup
from clients.defenses.outpost import Outpost
from clients.defenses.quantise import Quantise
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.metrics import pair_examples
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge, Records
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.wire_format import Update
from tests.support.digit_clients import COUNT, data, floor, knowledge, make_update, public, quality
from tests.support.recordings import record_updates, run_attack

NOISE = UpdateNoise(clip=1.0, noise_multiplier=0.01)
MAP = MaximumAPosteriori(iterations=60, components=20, draws=0)


def attack(method: GradientInversion, update: Update, facts: Knowledge) -> Reconstruction:
    facts = facts.restrict_to(method.declared_facts())
    return method.invert(update, facts, generator("attack"), lambda *_: None)


@pytest.mark.parametrize(
    "defense",
    [
        NOISE,
        pytest.param(Quantise(bits=4), marks=pytest.mark.thorough),
        pytest.param(Quantise(scheme="ternary"), marks=pytest.mark.thorough),
    ],
)
def test_map_is_beyond_the_floor_where_attacks_without_a_prior_are_not(defense: Defense) -> None:
    """By half a dB over two victims; under these defenses IG is below the floor, though it knows them."""
    gains, gains_without = [], []
    for victim in range(2):
        update, facts = make_update(victim, defense), knowledge(victim, defense)
        gains.append(quality(attack(MAP, update, facts), victim) - floor(victim))
        plain = attack(InvertingGradients(iterations=60, step_size=0.1), update, facts)
        gains_without.append(quality(plain, victim) - floor(victim))
    assert sum(gains) / 2 > 0.5
    assert sum(gains_without) / 2 < 0


@pytest.mark.thorough
def test_neither_noise_alone_nor_another_client_leaks() -> None:
    """The prior by itself is worth no more than the floor."""
    only_noise = UpdateNoise(clip=1e-6, noise_multiplier=1e4)
    for victim in range(2):
        of_noise = attack(MAP, make_update(victim, only_noise), knowledge(victim, only_noise))
        of_other = attack(MAP, make_update(victim + 5, NOISE), knowledge(victim, NOISE))
        assert quality(of_noise, victim) < floor(victim) + 0.3
        assert quality(of_other, victim) < floor(victim) + 0.3


@pytest.mark.thorough
def test_who_knows_the_noise_finds_more_than_who_takes_the_message_for_exact() -> None:
    naive = [quality(attack(MAP, make_update(victim, NOISE), knowledge(victim)), victim) for victim in range(2)]
    adaptive = [
        quality(attack(MAP, make_update(victim, NOISE), knowledge(victim, NOISE)), victim) for victim in range(2)
    ]
    assert sum(adaptive) > sum(naive) + 2 * 0.3


@pytest.mark.thorough
@pytest.mark.parametrize("defense", [NOISE, pytest.param(Quantise(scheme="ternary"), marks=pytest.mark.thorough)])
def test_the_expected_error_is_the_actual_one_within_a_half(defense: Defense) -> None:
    """Root mean square over simulated clients, by the attack's own spread and by the truth."""
    expected, actual = [], []
    for victim in range(3):
        finding = attack(replace(MAP, draws=3), make_update(victim, defense), knowledge(victim, defense))
        assert finding.spread is not None
        true = data(victim)[0]
        expected.append(finding.spread.square().mean())
        actual.append((pair_examples(finding.data, true) - true).square().mean())
    ratio = (torch.stack(expected).mean() / torch.stack(actual).mean()).sqrt().item()
    assert 1 / 1.5 < ratio < 1.5


def test_where_labels_are_optimised_with_the_data_an_error_is_expected_too() -> None:
    """As under mixing, where nobody knows which labels were mixed."""
    mixing = Mixup().of_client(Participation(num_examples=COUNT, batch_size=COUNT, steps=1, rounds=1, num_classes=10))
    finding = attack(replace(MAP, iterations=4, draws=2), make_update(0, mixing), knowledge(0, mixing))
    assert finding.spread is not None
    assert (finding.spread > 0).all()


@pytest.mark.thorough
def test_more_noise_is_a_larger_expected_error() -> None:
    spreads = []
    for multiplier in (0.0001, 0.05):
        noise = UpdateNoise(clip=1.0, noise_multiplier=multiplier)
        finding = attack(replace(MAP, draws=2), make_update(0, noise), knowledge(0, noise))
        assert finding.spread is not None
        spreads.append(finding.spread.mean().item())
    assert spreads[0] < spreads[1]


def test_a_defense_without_a_likelihood_is_taken_by_its_view_and_noise_of_the_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outpost = Outpost(noise_scale=0.0)
    finding = attack(MAP, make_update(0, outpost), knowledge(0, outpost))
    assert finding.data.shape == (COUNT, 1, 8, 8)
    assert "outpost has no likelihood, so it is taken by its view, with noise of" in caplog.text


def test_patches_of_public_digits_are_a_prior_too() -> None:
    """The images need no label for it, and come out more like digits than without a prior."""
    patches = replace(MAP, prior="gmm", components=5)
    update, facts = make_update(0, NOISE), knowledge(0, NOISE)
    without = quality(attack(replace(patches, prior_weight=0.0), update, facts), 0)
    assert quality(attack(patches, update, facts), 0) > without + 1


def test_without_auxiliary_records_it_is_refused(tmp_path: Any) -> None:
    transcript = record_updates(tmp_path, [make_update(0)])
    facts = replace(knowledge(0), auxiliary=None)
    with pytest.raises(KnowledgeError, match=r"MaximumAPosteriori needs auxiliary, which the threat model withholds"):
        run_attack(MAP, transcript, facts)


@pytest.mark.parametrize("prior", ["pca", "gmm"])
def test_auxiliary_records_of_another_shape_are_refused(prior: str) -> None:
    others = Records(inputs=torch.rand(20, 1, 6, 6), labels=torch.arange(20) % 10)
    method = replace(MAP, prior=prior)
    with pytest.raises(AttackError, match=r"auxiliary records are of shape \(1, 6, 6\), and the victim's of"):
        attack(method, make_update(0), knowledge(0, auxiliary=others))


def test_a_single_auxiliary_record_is_refused_by_the_setting_that_grants_more() -> None:
    single = Records(inputs=public().inputs[:1], labels=public().labels[:1])
    with pytest.raises(AttackError, match=r"two auxiliary records at least; raise adversary\.auxiliary$"):
        attack(MAP, make_update(0), knowledge(0, auxiliary=single))


def test_training_that_cannot_be_simulated_is_refused_where_it_is_asked_for() -> None:
    """By default it counts as one gradient."""
    facts = replace(knowledge(0), optimizer="adam")
    short = replace(MAP, iterations=1)
    attack(short, make_update(0), facts)
    with pytest.raises(AttackError, match="local_training = 'simulated' simulates SGD, and clients train by adam"):
        attack(replace(short, local_training="simulated"), make_update(0), facts)


def test_a_class_without_auxiliary_records_has_the_mean_of_all(caplog: pytest.LogCaptureFixture) -> None:
    records = public()
    kept = records.labels < 3
    few = Records(inputs=records.inputs[kept], labels=records.labels[kept])
    short = replace(MAP, iterations=3)
    finding = attack(short, make_update(0), knowledge(0, auxiliary=few))
    assert finding.data.isfinite().all()
    assert "no auxiliary record is of class" in caplog.text
    caplog.clear()
    attack(short, make_update(0), knowledge(0))
    assert not caplog.text


def test_the_problem_of_other_attacks_has_no_noise_model() -> None:
    problem = build_problem(make_update(0, NOISE), knowledge(0, NOISE))
    assert problem.noise is None
    assert list(problem.defenses) == [NOISE]
