"""Joint inversion: local training of several rounds as clients train, more from two rounds than from one, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.data_leakage import DataLeakage
from adversaries.inversion.joint_inversion import JointInversion, RoundsCosine, SimulatedRounds
from fedsim.base.errors import AttackError
from fedsim.base.metrics import match_examples, psnr
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.wire_format import Update
from tests.support.networks import compute_gradient
from tests.support.recordings import Record, build_update, run_attack

SHAPE, LABELS, RATE, STEPS = (1, 8, 8), torch.tensor([1, 4, 7]), 0.1, 3


def build() -> nn.Module:
    """A network with fewer numbers than three images have, so that one gradient does not determine them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2), nn.Sigmoid(), nn.Linear(2, 10))


KNOWN = Knowledge(
    model=build, loss=cross_entropy, input_shape=SHAPE, value_range=([0.0], [1.0]), labels=LABELS,
    learning_rate=RATE, local_epochs=STEPS, batch_size=3, optimizer="sgd",
)  # fmt: skip


def images() -> Tensor:
    return torch.rand((3, *SHAPE), generator=generator("truth"))


def make_updates(rounds: int = 2) -> list[Update]:
    """Weights after some steps on all examples; other clients move the weights from which each round begins."""
    updates = []
    for number in range(1, rounds + 1):
        model = build()
        for index, parameter in enumerate(model.parameters()):
            parameter.data += torch.randn(parameter.shape, generator=generator("others", number, index)) * (number - 1)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(STEPS):
            gradient = compute_gradient(model, images(), LABELS)
            for name, p in model.named_parameters():
                p.data -= RATE * gradient[name]
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        updates.append(build_update(before, after, round=number, client=5, num_examples=3))
    return updates


def problems(updates: list[Update]) -> list[InversionProblem]:
    return [build_problem(update, KNOWN) for update in updates]


def test_the_true_images_give_the_updates_of_all_rounds() -> None:
    first, *later = problems(make_updates())
    true = (images() - first.scaling.centre) / first.scaling.scale
    steps = SimulatedRounds(later=later).gradient(first, {}, true, LABELS)
    sent = [delta / (RATE * STEPS) for problem in (first, *later) for delta in problem.direction]
    for step, wanted in zip(steps, sent, strict=True):
        torch.testing.assert_close(step, wanted, rtol=1e-3, atol=1e-5)
    distance = RoundsCosine(later=later)
    assert distance(steps, distance.target(first)).item() == pytest.approx(0, abs=1e-5)
    # Steps of the second round the wrong way around: the mean of 0 and 2.
    turned = [*steps[: len(steps) // 2], *(-step for step in steps[len(steps) // 2 :])]
    assert distance(turned, distance.target(first)).item() == pytest.approx(1, abs=1e-4)


def test_two_rounds_give_more_than_one_where_one_does_not_determine_the_images(record: Record) -> None:
    transcript, quality = record(make_updates()), {}
    for rounds in (1, 2):
        attack = JointInversion(iterations=400, tv_weight=0.0, step_size=0.1)
        finding = run_attack(attack, transcript.restrict_to(range(1, rounds + 1)), KNOWN, 5)
        matched = finding.data[match_examples(finding.data, images())]
        quality[rounds] = psnr(matched, images()).mean().item()
    assert quality[2] > quality[1] + 1


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"batch_size": 2}, r"client 5: steps take 2 of N = 3 examples each"),
        ({"optimizer": "adam"}, r"simulates local training by SGD, and clients train by adam"),
    ],
)
def test_what_cannot_be_simulated_is_refused(changed: dict[str, Any], sentence: str, record: Record) -> None:
    with pytest.raises(AttackError, match=sentence):
        run_attack(JointInversion(), record(make_updates()), replace(KNOWN, **changed), 5)


def test_what_cannot_be_simulated_is_refused_before_any_federation_runs() -> None:
    with pytest.raises(AttackError, match=r"^the clients: steps take 2 of N = 3 examples each, .*; choose 'dlfa'"):
        JointInversion().check_facts(replace(KNOWN, batch_size=2), 3, ())
    for attack in (JointInversion(), DataLeakage()):
        with pytest.raises(AttackError, match=r"simulates local training by SGD, and clients train by adam"):
            attack.check_facts(replace(KNOWN, optimizer="adam"))


def test_rounds_of_other_examples_are_refused(record: Record) -> None:
    first, second = make_updates()
    with pytest.raises(AttackError, match=r"N differs between rounds \(3, 2\)"):
        run_attack(JointInversion(), record([first, replace(second, num_examples=2)]), KNOWN, 5)
