"""An adversary that knows that records were mixed: through the mixing in one round, and by equations over several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.unmixing import Unmixing, unmix_records
from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.instahide import InstaHide
from clients.defenses.mixup import Mixup
from fedsim.base.errors import AttackError
from fedsim.base.metrics import pair_examples, psnr
from fedsim.base.randomness import generator, seed_globals
from fedsim.data.digits import Digits
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_gradient
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

DIGITS = Digits().load(None)
MEAN, STD = (moment.reshape(-1, 1, 1) for moment in DIGITS.standardisation)
LOW, HIGH = (((end - MEAN) / STD).flatten().tolist() for end in (0, 1))


def mlp() -> nn.Module:
    with seed_globals("mixtures"):
        return Mlp(hidden=(64,)).build(DIGITS.task)


KNOWN = Knowledge(
    model=mlp,
    loss=cross_entropy,
    input_shape=(1, 8, 8),
    num_classes=10,
    value_range=(LOW, HIGH),
    input_mean=[0.0],
    input_std=[1.0],
)


def victim(count: int) -> tuple[Tensor, Tensor]:
    """The first images of the data set, which are of the classes 0, 1, 2, and so on."""
    images, labels = DIGITS.train.inputs(slice(0, count)), DIGITS.train.labels[:count]
    assert len(labels.unique()) == count
    return images, labels


def make_update(defense: Defense, images: Tensor, labels: Tensor, number: int = 1) -> Update:
    count = len(labels)
    client = Participation(num_examples=count, batch_size=count, steps=1, rounds=1, num_classes=10)
    plan = LocalTraining(local_steps=1, batch_size=count, sends="gradient")
    before = copy_state(mlp())
    gradient, _, _ = local_gradient(
        mlp(),
        before,
        (images - MEAN) / STD,
        labels,
        plan,
        key=("mixtures", number),
        defenses=[defense.of_client(client)],
    )
    payload = Payload.from_dense(gradient, "gradient")
    return Update(round=number, client=0, before=before, payload=payload, num_examples=count)


@pytest.fixture
def record_rounds(tmp_path: Path) -> Callable[..., Transcript]:
    def write(defense: Defense, images: Tensor, labels: Tensor, rounds: int = 1) -> Transcript:
        recorder = Recorder(tmp_path / "recording")
        for number in range(1, rounds + 1):
            recorder.write(number, [make_update(defense, images, labels, number)])
        return Transcript(tmp_path / "recording")

    return write


def decibels(attack: Attack, transcript: Transcript, knowledge: Knowledge, images: Tensor) -> float:
    found = attack.run(Target(transcript=transcript, victim=0, knowledge=knowledge, rng=generator("attack")))
    assert isinstance(found, Reconstruction)
    return psnr(pair_examples(found.data, images), images).mean().item()


# Through the mixing.


def test_neighbours_on_a_circle_are_mixed() -> None:
    records, labels = torch.tensor([[0.0], [2.0], [6.0]]), torch.eye(3)
    mixed, soft = Mixup().adversary_batch(records, labels)
    assert mixed.flatten().tolist() == [1.0, 4.0, 3.0]
    assert soft.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]


def test_the_expected_larger_weight_stands_for_one_drawn_from_beta() -> None:
    """Of Beta(1, 1), uniform, the larger weight is 3/4 on average."""
    mixed, _ = Mixup(alpha=1.0).adversary_batch(torch.tensor([[0.0], [1.0]]), torch.eye(2))
    torch.testing.assert_close(mixed, torch.tensor([[0.25], [0.75]]))
    same, _ = Mixup(alpha=0.0).adversary_batch(torch.tensor([[0.0], [1.0]]), torch.eye(2))
    assert same.flatten().tolist() == [0.0, 1.0]


def test_the_gradient_of_mixed_dummy_records_is_that_which_the_client_sent() -> None:
    """The client's own circle is some order of its records; in that order the dummy gradient is the one sent."""
    images, labels = victim(4)
    update = make_update(Mixup(), images, labels)
    scene = replace(build_problem(update, KNOWN), mixing_defenses=[Mixup()])
    apart = []
    for order in ([0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3]):  # all circles of four
        soft = torch.eye(10)[labels[order]]
        found = scene.gradient(scene.before, ((images - MEAN) / STD)[order], soft)
        apart.append(max((a - b).abs().max().item() for a, b in zip(found, scene.direction, strict=True)))
    assert min(apart) < 1e-6 < sorted(apart)[1]


@pytest.mark.thorough
def test_knowing_mixup_takes_an_odd_number_of_records_apart(record_rounds: Callable[..., Transcript]) -> None:
    """Sums of neighbours on a circle of odd length determine its members."""
    images, labels = victim(3)
    transcript = record_rounds(Mixup(), images, labels)
    attack = InvertingGradients(step_size=0.1, tv_weight=0.001, iterations=400)
    naive = decibels(replace(attack, iterations=100), transcript, replace(KNOWN, labels=labels), images)
    adaptive = decibels(attack, transcript, replace(KNOWN, defenses=(Mixup(),)), images)
    assert naive < 17
    assert adaptive > 25


# By equations.


def test_mixtures_with_known_weights_give_their_records() -> None:
    records = torch.tensor([[0.0, 1.0], [3.0, -1.0]], dtype=torch.float64)
    weights = torch.tensor([[[0.75, 0.25], [0.5, 0.5]]], dtype=torch.float64)
    low, high = (torch.full((2,), end, dtype=torch.float64) for end in (-1.0, 3.0))
    found = unmix_records(weights @ records, weights, low, high, signs_lost=False)
    torch.testing.assert_close(found, records, atol=0.1, rtol=0.0)


def test_records_follow_from_absolute_values_of_several_rounds() -> None:
    rng = generator("absolute")
    records = torch.rand((4, 50), generator=rng, dtype=torch.float64) * 3.5 - 0.5
    drawn = torch.rand((4, 4, 4), generator=rng, dtype=torch.float64)
    weights = drawn / drawn.sum(-1, keepdim=True)
    mixtures = (weights @ records).abs()
    low, high = (torch.full((50,), end, dtype=torch.float64) for end in (-0.5, 3.0))
    found = unmix_records(mixtures, weights, low, high, signs_lost=True)
    assert ((found - records).abs() < 0.05).all(0).double().mean() > 0.9


@pytest.mark.thorough
def test_instahide_is_undone_by_several_rounds(record_rounds: Callable[..., Transcript]) -> None:
    images, labels = victim(3)
    transcript, known = (
        record_rounds(InstaHide(k=2), images, labels, rounds=4),
        replace(KNOWN, defenses=(InstaHide(k=2),)),
    )
    attack = Unmixing(iterations=400)
    assert decibels(InvertingGradients(iterations=200, step_size=0.1), transcript.restrict_to([1]), KNOWN, images) < 12
    assert decibels(attack, transcript, known, images) > 20
    assert decibels(attack, transcript, KNOWN, images) < 12  # as if no sign had been flipped


def test_equations_are_of_shares_that_sum_to_one_and_count_by_how_well_gradients_were_matched(
    record_rounds: Callable[..., Transcript], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a few steps soft labels still have weight on classes that no record has."""
    images, labels = victim(3)
    transcript, seen = record_rounds(Mixup(), images, labels, rounds=2), list[Tensor]()

    def watched(mixtures: Tensor, weights: Tensor, *rest: Any, **how: Any) -> Tensor:
        seen.append(weights)
        return unmix_records(mixtures, weights, *rest, **how)

    monkeypatch.setattr("adversaries.inversion.unmixing.unmix_records", watched)
    decibels(Unmixing(iterations=20), transcript, replace(KNOWN, labels=labels), images)
    trust = seen[0].sum(-1)
    assert trust.shape == (2, 3)
    torch.testing.assert_close(trust, trust[:, :1].expand(2, 3))
    assert trust.max().item() == pytest.approx(1)
    assert 0 < trust.min() < 1 - 1e-6, "the rounds were not matched equally well"


def test_mixtures_are_found_without_the_defenses_that_mix_and_with_all_others() -> None:
    known = replace(KNOWN, defenses=(Mixup(), GradientPrune()))
    scene = Unmixing()._problem(make_update(Mixup(), *victim(3)), known)
    assert scene.defenses == [GradientPrune()]


def test_records_of_one_class_are_not_told_apart(record_rounds: Callable[..., Transcript]) -> None:
    images, _ = victim(3)
    labels = torch.tensor([0, 1, 1])
    transcript = record_rounds(Mixup(), images, labels)
    with pytest.raises(AttackError, match="labels of 2 classes for N = 3 records"):
        decibels(Unmixing(iterations=150), transcript, KNOWN, images)
    with pytest.raises(AttackError, match="all records have to be of different classes"):
        decibels(Unmixing(iterations=1), transcript, replace(KNOWN, labels=labels), images)


def test_more_records_than_classes_are_refused_before_the_run() -> None:
    Unmixing().check_facts(KNOWN, 10, ())
    with pytest.raises(AttackError, match=r"^the clients: labels of 10 classes for N = 11 records"):
        Unmixing().check_facts(KNOWN, 11, ())


def test_n_has_to_be_the_same_in_all_rounds(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "recording")
    for number, count in ((1, 3), (2, 4)):
        recorder.write(number, [make_update(Mixup(), *victim(count), number)])
    with pytest.raises(AttackError, match="N differs between rounds \\(3, 4\\)"):
        decibels(Unmixing(iterations=1), Transcript(tmp_path / "recording"), KNOWN, victim(3)[0])


def test_too_many_choices_of_signs_are_refused(record_rounds: Callable[..., Transcript]) -> None:
    images, labels = DIGITS.train.inputs(slice(0, 11)), torch.arange(11) % 10
    transcript = record_rounds(InstaHide(k=2), images, labels)
    with pytest.raises(AttackError, match="N is 11, and 2\\^N choices of signs are tried"):
        decibels(Unmixing(iterations=1), transcript, replace(KNOWN, defenses=(InstaHide(k=2),)), images)
