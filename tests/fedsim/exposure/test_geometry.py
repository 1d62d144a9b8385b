"""The diagnostic of SME, Sect. 5.1, beside formulas written out and a quadratic whose path is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.base.randomness import generator
from fedsim.base.task import Task, squared_error
from fedsim.exposure.geometry import Geometry, compute_geometry
from fedsim.report.geometry import draw_geometries
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining


def client(count: int = 12) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Mlp(hidden=(16,)).build(Task((1, 4, 4), 3))
    return model, torch.randn((count, 1, 4, 4), generator=generator(1)), torch.arange(count) % 3


def look(**settings: int | float) -> Geometry:
    model, inputs, labels = client()
    training = LocalTraining(**{"local_epochs": 6, "batch_size": 12, "learning_rate": 0.2} | settings)  # type: ignore[arg-type]
    return compute_geometry(model, copy_state(model), inputs, labels, training, key=("k",), loss=cross_entropy)


def test_ratios_are_those_of_a_singular_value_decomposition() -> None:
    model, inputs, labels = client()
    before, weights, path = copy_state(model), [], []
    training = LocalTraining(local_epochs=6, batch_size=5, learning_rate=0.2)
    local_update(
        model, before, inputs, labels, training, key=("k",), before_step=lambda: weights.append(copy_state(model))
    )
    for state in weights:
        model.load_state_dict(state)
        slopes = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))
        path.append(torch.cat([slope.flatten() for slope in slopes]).double().numpy())
    _, _, directions = np.linalg.svd(np.stack(path), full_matrices=False)
    expected = [np.linalg.norm(directions[:2] @ g) / np.linalg.norm(g) for g in path]
    assert look(batch_size=5).ratios == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 18


def test_one_full_step_is_its_own_gradient() -> None:
    found = look(local_epochs=1)
    assert found.ratios == pytest.approx([1.0])
    assert found.cosines[-1] == pytest.approx(1.0, abs=1e-6)
    assert found.alphas[[0, -1]].tolist() == [0.0, 1.0]


def test_two_steps_lie_in_a_plane() -> None:
    assert look(local_epochs=2).ratios == pytest.approx([1.0, 1.0], abs=1e-6)


def test_between_the_ends_the_gradient_points_along_the_update_better_than_at_either() -> None:
    found = look(local_epochs=20)
    assert found.cosines[1:-1].max() > max(found.cosines[0], found.cosines[-1])
    assert found.summary["max cosine"] == found.cosines.max()
    assert found.summary["cosine at w_0"] == found.cosines[-1]


def test_a_quadratic_with_two_directions_stays_in_their_plane() -> None:
    model = nn.Linear(2, 1, bias=False)
    inputs = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    training = LocalTraining(local_epochs=15, batch_size=2, learning_rate=0.05)
    found = compute_geometry(
        model, copy_state(model), inputs, torch.tensor([1.0, -2.0]), training, key=("k",), loss=squared_error
    )
    assert found.ratios.min() == pytest.approx(1.0, abs=1e-9)


def test_both_figures_are_drawn() -> None:
    pictures = draw_geometries([look(), look(batch_size=5)])
    assert list(pictures) == ["ratios", "cosines"]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
