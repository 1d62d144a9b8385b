"""The geometry of a client's local steps in parameter space: the analysis behind surrogate models (SME, Sect. 5.1).

It needs the client's data, so only the client or the evaluator can compute it. It says how well an update can be
matched by the gradient at one model on the line between w_0 and w_T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsim.task import Loss, smoothed
from fedsim.training.loop import local_update
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_modes
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State

Numbers = NDArray[np.float64]
_POINTS = 21
"""On the line between w_0 and w_T, ends included."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What one client's local training looks like.

    Attributes:
        ratios: `step`, share of the norm of the gradient at w_t that lies in the plane spanned by the
            two leading directions of all of them: ||P_2 g_t|| / ||g_t||, in [0, 1].
        alphas: `point`, positions on the line, 1 being w_0 and 0 being w_T (SME, Eq. 5).
        cosines: `point`, cosine between w_0 - w_T and the gradient at that position, in [-1, 1].
    """

    ratios: Numbers
    alphas: Numbers
    cosines: Numbers

    @property
    def summary(self) -> dict[str, float]:
        """The three rows of SME's Tables 1, 4 and 5: lowest ratio, cosine at w_0, largest cosine."""
        return {
            "min ratio": float(self.ratios.min()),
            "cosine at w_0": float(self.cosines[-1]),
            "max cosine": float(self.cosines.max()),
        }


def geometry(
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

    All gradients are of the mean loss of all the client's data, with layers in training modes. It takes the memory of
    T + 1 gradients.

    Args:
        model: lends its architecture.
        before: w_0.
        inputs: `example ...` in model units.
        labels: `example`.
        key: of its randomness; with that of the federation, the steps are those that were recorded.
        order: as in `fedsim.training.loop.local_update`.
    """
    steps: list[Tensor] = []
    objective = smoothed(loss, settings.label_smoothing)

    def gradient() -> Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad]
        value = objective(forward(model, inputs), labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])

    after, _ = local_update(
        model,
        before,
        inputs,
        labels,
        settings,
        key=key,
        loss=loss,
        order=order,
        before_step=lambda: steps.append(gradient()),
    )
    path = torch.stack(steps).double()
    moved = torch.cat([(before[n] - after[n]).flatten() for n, p in model.named_parameters() if p.requires_grad])
    alphas = np.linspace(0, 1, _POINTS)
    cosines = []
    for alpha in alphas.tolist():
        load_state(model, {name: alpha * before[name] + (1 - alpha) * after[name] for name in after})
        set_modes(model, settings, inputs)
        cosines.append(torch.nn.functional.cosine_similarity(gradient().double(), moved.double(), dim=0).item())
    return Geometry(ratios=_ratios(path), alphas=alphas, cosines=np.array(cosines))


def _ratios(path: Tensor) -> Numbers:
    """From `step parameter` gradients; by way of their T x T products, which are few."""
    values, vectors = torch.linalg.eigh(path @ path.T)
    leading = (vectors[:, -2:] * values[-2:].clamp_min(0).sqrt()).square().sum(1).sqrt()
    ratio: Numbers = (leading / path.norm(dim=1).clamp_min(1e-300)).clamp(max=1).numpy()
    return ratio
