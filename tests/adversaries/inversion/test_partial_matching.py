"""FedLeak's parts by hand, and what is left of the attack without them."""

from __future__ import annotations

from typing import Any

import torch

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.partial_matching import PartialMatching
from fedsim.base.randomness import generator
from fedsim.inversion.distances import Cosine, PartialCosine
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import Recipe
from fedsim.inversion.restart import objective_and_gradients
from tests.support import digit_clients as digits

UPDATE = digits.make_update(0)
KNOWLEDGE = digits.knowledge(0)
FEW: dict[str, Any] = {"iterations": 5, "step_size": 0.1}


def test_the_largest_entries_of_each_tensor_are_compared() -> None:
    problem = build_problem(UPDATE, KNOWLEDGE)
    target = PartialCosine(0.25).target(problem)
    count = len(problem.direction)
    torch.testing.assert_close(target[:count], Cosine().target(problem))
    for mask, delta in zip(target[count:], problem.direction, strict=True):
        is_kept = mask == 1
        assert is_kept.sum() == max(1, round(0.25 * delta.numel()))
        assert delta.abs()[is_kept].min() >= delta.abs()[~is_kept].max()
    # What is not compared may be anything.
    pairs = zip(target[:count], target[count:], strict=True)
    gradient = [torch.where(mask == 1, direction, 7.0) for direction, mask in pairs]
    torch.testing.assert_close(PartialCosine(0.25)(gradient, target), torch.tensor(0.0), atol=1e-6, rtol=0)
    # Where all entries are compared, those count that are zero in the update, too.
    everything = PartialCosine(1.0)
    torch.testing.assert_close(
        everything(gradient, everything.target(problem)), Cosine()(gradient, Cosine().target(problem))
    )


def test_smoothing_mixes_the_gradient_here_with_that_uphill() -> None:
    problem = build_problem(UPDATE, KNOWLEDGE)
    assert KNOWLEDGE.labels is not None
    problem.labels.resize_(4).copy_(KNOWLEDGE.labels)
    dummy = torch.randn((4, 1, 8, 8), generator=generator("smoothing"))
    plain, target = Recipe(), Cosine().target(problem)

    def gradient(recipe: Recipe, at: torch.Tensor) -> torch.Tensor:
        inputs = torch.tensor(1.0), torch.zeros_like(at)
        return objective_and_gradients(recipe, problem, {"dummy": at}, inputs, target, ("dummy",))[3]

    here = gradient(plain, dummy)
    uphill = gradient(plain, dummy + 0.3 * here / here.square().mean().sqrt())
    smoothed = gradient(Recipe(smoothing=0.25, smoothing_radius=0.3), dummy)
    torch.testing.assert_close(smoothed, 0.75 * here + 0.25 * uphill)
    assert not torch.allclose(smoothed, here, rtol=1e-2)


def test_without_its_parts_it_is_inverting_gradients() -> None:
    def claim(attack: InvertingGradients | PartialMatching) -> torch.Tensor:
        return attack.invert(UPDATE, KNOWLEDGE, generator("start"), lambda *_: None).data

    bare = claim(InvertingGradients(**FEW))
    torch.testing.assert_close(claim(PartialMatching(share=1.0, smoothing=0.0, **FEW)), bare)
    assert not torch.allclose(claim(PartialMatching(share=1.0, **FEW)), bare, atol=1e-3)
    assert not torch.allclose(claim(PartialMatching(smoothing=0.0, **FEW)), bare, atol=1e-3)
