"""The losses of several labels or numbers an example are those of torch, and rows stay together."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from fedsim.audit.evaluation.target_scores import labels_right, score_targets, target_error
from fedsim.base.errors import ConfigError
from fedsim.base.task import Goal, Task, goal_of, label_loss, smooth_labels, sort_targets, squared_error
from fedsim.interfaces.modality import PublicExamples

RNG = torch.Generator().manual_seed(0)
OUTPUTS, TARGETS = torch.randn(5, 3, generator=RNG), torch.randint(2, (5, 3), generator=RNG).float()


@pytest.mark.parametrize(
    ("loss", "of_torch"), [(label_loss, binary_cross_entropy_with_logits), (squared_error, mse_loss)]
)
def test_the_loss_is_that_of_torch_and_has_a_value_an_example(loss: object, of_torch: object) -> None:
    assert callable(loss)
    assert callable(of_torch)
    assert torch.allclose(loss(OUTPUTS, TARGETS), of_torch(OUTPUTS, TARGETS))
    rows = torch.stack([of_torch(OUTPUTS[row], TARGETS[row]) for row in range(5)])
    assert torch.allclose(loss(OUTPUTS, TARGETS, reduction="none"), rows)
    assert torch.allclose(loss(OUTPUTS, TARGETS, reduction="sum"), rows.sum())


def test_one_number_is_no_row_of_numbers() -> None:
    assert Task((6,), 0).target_shape == ()
    assert Task((6,), 0, num_targets=3).target_shape == (3,)
    assert Task((6,), 0, num_labels=1).target_shape == (1,)


@pytest.mark.parametrize("others", [{"num_labels": 2}, {"num_targets": 2}, {"num_targets": 0}, {"num_labels": -2}])
def test_what_is_predicted_is_said_once(others: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected one of num_classes, num_labels, num_targets and mask_classes"):
        Task((6,), 3, **others)


@pytest.mark.parametrize(
    ("loss", "goal"),
    [
        (None, "classes"),
        (smooth_labels(cross_entropy, 0.1), "classes"),
        (nn.MultiMarginLoss(), "classes"),
        (nn.BCEWithLogitsLoss(), "labels"),
        (nn.MultiLabelSoftMarginLoss(), "labels"),
        (lambda outputs, targets: binary_cross_entropy_with_logits(outputs, targets, reduction="sum"), "labels"),
        (nn.MSELoss(), "numbers"),
        (nn.HuberLoss(), "numbers"),
    ],
)
def test_what_is_predicted_follows_from_a_loss_of_the_user(loss: object, goal: Goal) -> None:
    assert goal_of(loss) == goal


def test_sorting_keeps_each_row_together() -> None:
    rows = torch.randint(2, (40, 4), generator=RNG).float()
    assert sort_targets(rows).tolist() == sorted(rows.tolist())


def test_a_claim_without_knowledge_does_not_beat_the_floor_of_targets() -> None:
    """Rows like the public ones, centres of them and one row for all get no better score than the floor."""
    public_rows = (torch.rand(300, 6, generator=RNG) < torch.linspace(0.05, 0.9, 6)).float()
    public = PublicExamples(data=torch.zeros(300, 1), labels=public_rows)
    gains = []
    for trial in range(20):
        true = (torch.rand(8, 6, generator=RNG) < torch.linspace(0.05, 0.9, 6)).float()
        claim = public_rows[torch.randint(300, (8,), generator=RNG)]
        score = score_targets(claim, true, "labels", public, torch.Generator().manual_seed(trial))
        gains.append(score.value - score.floor)
    assert sum(gains) / len(gains) < 0.01
    assert labels_right(true, true) == 1
    assert target_error(true, true.flip(0)) == 0


def test_the_error_of_numbers_does_not_depend_on_their_units() -> None:
    rows, true = torch.randn(100, 2, generator=RNG), torch.randn(4, 2, generator=RNG)
    claims = true + torch.tensor([1.0, 0.0])  # one of the two numbers is far off
    scores = []
    for unit, shift in ((torch.ones(2), 0.0), (torch.tensor([1.0, 1000.0]), 5.0)):
        public = PublicExamples(data=torch.zeros(100, 1), labels=rows * unit + shift)
        rng = torch.Generator().manual_seed(0)
        scores.append(score_targets(claims[:3] * unit + shift, true * unit + shift, "numbers", public, rng))
    assert scores[0].value == pytest.approx(scores[1].value, rel=1e-3)
    assert scores[0].floor == pytest.approx(scores[1].floor, rel=1e-3)
    assert "no public examples" in score_targets(claims, true, "numbers", None, RNG).missing


def test_without_public_examples_every_label_is_a_guess() -> None:
    ones = torch.ones(3, 4)
    assert score_targets(ones, ones, "labels", None, RNG).floor == 1
