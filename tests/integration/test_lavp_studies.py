"""Studies of LAVP: many images are attacked at once as one by one, and colours are those of pixels."""

from __future__ import annotations

import pytest
import torch

from fedsim.base.randomness import seed_globals
from fedsim.base.task import Task
from fedsim.data import Dataset, Examples
from fedsim.inversion.input_scaling import InputScaling
from fedsim.training.model_state import copy_state
from fedsim.training.models.lenet import LeNet
from studies.lavp.study import TV_WEIGHTS, LavpMatching
from studies.lavp_measures.study import colour_errors
from studies.lavp_prior.correlations import Claims
from studies.lavp_prior.study import descend
from studies.messages import gradient_update, invert_update, mean_gradient, task_knowledge

TASK = Task((3, 12, 12), 10)


@pytest.mark.parametrize("distance", ["l2", "cosine"])
def test_images_at_once_end_where_each_ends_by_the_attack(distance: str) -> None:
    with seed_globals("lavp"):
        network = LeNet().build(TASK)
    rng = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn((2, *TASK.input_shape), generator=rng), torch.tensor([3, 7])
    moments = {"value_range": ([-2.0] * 3, [2.0] * 3), "input_mean": [0.0] * 3, "input_std": [1.0] * 3}
    known = task_knowledge(lambda: network, TASK, labels=labels[:1], **moments)
    scaling = InputScaling.from_knowledge(known, inputs)
    dummy = torch.cat([torch.randn((1, *TASK.input_shape), generator=torch.Generator().manual_seed(i)) for i in (0, 1)])
    objectives = descend(network, (inputs, labels), dummy, distance, TV_WEIGHTS[distance], scaling, iterations=4)
    for image in (0, 1):
        one = slice(image, image + 1)
        update = gradient_update(copy_state(network), mean_gradient(network, inputs[one], labels[one]), 1)
        facts = task_knowledge(lambda: network, TASK, labels=labels[one], **moments)
        attack = LavpMatching(distance=distance, iterations=4)
        found = invert_update(attack, update, facts, torch.Generator().manual_seed(image))
        assert torch.allclose(scaling.to_unit_range(dummy[one]), found.data, atol=1e-6)
        assert objectives[image].item() == pytest.approx(found.trace["objective"][-1].item(), rel=1e-5)


def test_the_colour_of_the_data_set_is_the_mean_of_its_pixels() -> None:
    images = torch.stack([torch.full((3, 4, 4), value) for value in (0.5, 0.7)])
    examples = Examples(raw=images, labels=torch.tensor([0, 1]), scale=1.0)
    dataset = Dataset(name="grey", train=examples, test=examples, num_classes=2, source="", licence="")
    errors = {row["measure"]: row["value"] for row in colour_errors(torch.full((1, 3, 4, 4), 0.6), dataset)}
    assert errors == pytest.approx({"image.own-mean": 0, "image.data-mean": 0, "image.mean-image": 0}, abs=1e-6)


def test_the_start_that_matches_best_is_claimed() -> None:
    """A start with a smaller error but a worse match is not chosen: the attacker does not know errors."""
    claims = Claims()
    for objective, mse in (("2", "0.3"), ("1", "0.5"), ("3", "0.1")):
        claims.add({"image": "7", "half": "1", "objective": objective, "mse": mse, "ssim": "0", "lpips": "0"})
    assert claims.scores["mse"] == {"7": 0.5}
    assert claims.starts == {"7": 3}
