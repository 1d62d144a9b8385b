"""The geometry of a client's local steps in parameter space: SME's analysis of surrogate models.

The analysis (SME, Sect. 5.1) tells how well the gradient at one model on the line between w_0 and
w_T can match an update. It needs the client's data, so only the client or the evaluator can compute
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.base.task import Loss, smooth_labels
from fedsim.recording.wire_format import State
from fedsim.training.loop import local_update
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_modes
from fedsim.training.settings import LocalTraining

Numbers = NDArray[np.float64]
_LINE_POINTS = 21
"""Positions on the line between w_0 and w_T, ends included."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Geometry of one client's local training: gradients of its steps and on the line w_0 to w_T.

    Attributes:
        ratios: `step`, share of the norm of the gradient at w_t that lies in the plane spanned by
            the two leading directions of all gradients: ||P_2 g_t|| / ||g_t||, in [0, 1].
        alphas: `point`, positions on the line, 1 being w_0 and 0 being w_T (SME, Eq. 5).
        cosines: `point`, cosine between w_0 - w_T and the gradient at that position, in [-1, 1].
    """

    ratios: Numbers
    alphas: Numbers
    cosines: Numbers

    @property
    def summary(self) -> dict[str, float]:
        """Rows of SME's Tables 1, 4 and 5: lowest ratio, cosine at w_0, largest cosine."""
        return {
            "min ratio": float(self.ratios.min()),
            "cosine at w_0": float(self.cosines[-1]),
            "max cosine": float(self.cosines.max()),
        }


def compute_geometry(
    model: nn.Module,
    before: State,
    inputs: Tensor,
    labels: Tensor,
    settings: LocalTraining,
    *,
    key: tuple[int | str, ...],
    loss: Loss,
    order: Sequence[Tensor] | None = None,
) -> Geometry:
    """Simulate a client's local training and compute the geometry of its steps.

    All gradients are of the mean loss over all of the client's data, with layers in training mode.
    T + 1 gradients are in memory at once.

    Args:
        model: gives the architecture; its weights are overwritten.
        before: w_0.
        inputs: `example ...` in model units.
        labels: `example`.
        key: key of its random numbers; with that of the federation, the steps are the recorded
            ones.
        loss: the task's loss, before label smoothing.
        order: examples of each step, as in `fedsim.training.loop.local_update`.
    """
    steps: list[Tensor] = []
    objective = smooth_labels(loss, settings.label_smoothing)

    def compute_gradient() -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        value = objective(forward(model, inputs), labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])

    # Train as the client does, and keep the gradient at each w_t.
    after, _ = local_update(
        model,
        before,
        inputs,
        labels,
        settings,
        key=key,
        loss=loss,
        order=order,
        before_step=lambda: steps.append(compute_gradient()),
    )
    gradients = torch.stack(steps).double()
    trained_names = [name for name, p in model.named_parameters() if p.requires_grad]
    update = torch.cat([(before[name] - after[name]).flatten() for name in trained_names])

    # Compare the update with the gradient at each point on the line from w_T to w_0.
    alphas = np.linspace(0, 1, _LINE_POINTS)
    cosines = []
    for alpha in alphas.tolist():
        point = {name: alpha * before[name] + (1 - alpha) * after[name] for name in after}
        load_state(model, point)
        set_modes(model, settings, inputs)
        line_gradient = compute_gradient().double()
        cosine = torch.nn.functional.cosine_similarity(line_gradient, update.double(), dim=0)
        cosines.append(cosine.item())
    return Geometry(ratios=_in_plane_ratios(gradients), alphas=alphas, cosines=np.array(cosines))


def _in_plane_ratios(gradients: Tensor) -> Numbers:
    """Return the share of each gradient's norm in the plane of the two leading directions.

    `gradients` is `step parameter`; the plane comes from their T x T inner products, which are few.
    """
    values, vectors = torch.linalg.eigh(gradients @ gradients.T)
    in_plane = (vectors[:, -2:] * values[-2:].clamp_min(0).sqrt()).square().sum(1).sqrt()
    norms = gradients.norm(dim=1).clamp_min(1e-300)
    ratios: Numbers = (in_plane / norms).clamp(max=1).numpy()
    return ratios
