"""The linear span of a client's inputs, read exactly from updates of the first layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base.randomness import seed_globals

_OVERSAMPLING = 16  # singular vectors that are computed beyond the largest possible rank


@dataclass(frozen=True, kw_only=True)
class InputSpan:
    """The span of a client's inputs.

    A layer W x + b that takes the inputs themselves has the gradient (sum over examples of delta
    x^T) for W. Its rows are linear combinations of inputs, and so are the rows of any update by
    gradient descent, with any number of local steps, momentum or clipping. Enough updates theta_t -
    theta_c,t of many rounds therefore span the same space as the client's inputs, and its rank is
    the number of linearly independent inputs. Two things follow. Trained on the client's data only,
    W would not leave W_0 + span, so that the effect of other clients' data on W outside of it can
    be removed (`project`). And inputs need not be searched outside of the span (`to_inputs`).

    Attributes:
        weight: name of W.
        basis: `rank input`, orthonormal, float32.
        shape: of one example.
    """

    weight: str
    basis: Tensor
    shape: tuple[int, ...]

    @property
    def step_scale(self) -> float:
        """Return the RMS change of coordinates for an RMS change of one in the inputs."""
        rank, inputs = self.basis.shape
        return float((inputs / rank) ** 0.5)

    def to_inputs(self, coordinates: Tensor) -> Tensor:
        """Map coordinates `example rank` to inputs `example ...`."""
        return (coordinates @ self.basis.to(coordinates)).reshape(len(coordinates), *self.shape)

    def weight_in_coordinates(self, weight: Tensor) -> Tensor:
        """Express W in coordinates, `output rank`, with the outputs of W for the inputs."""
        return weight @ self.basis.to(weight).T

    def project(self, weight: Tensor, origin: Tensor) -> Tensor:
        """Project `weight` on `origin` + span, both `output input`.

        The result is at most as far as `weight` from any other point of `origin` + span, such as
        the client's optimum if `origin` is W_0.
        """
        basis = self.basis.to(weight.device, torch.float64)
        return (origin + ((weight - origin).double() @ basis.T) @ basis).to(weight)


def row_span(before: Tensor, after: Tensor, max_rank: int) -> Tensor | None:
    """Compute an orthonormal basis of the span of the rows of `before - after`, `rank input`.

    A direction counts if its singular value exceeds the rounding of the models: the type's
    precision times the norm of all broadcast, or returned, weights. Directions below it hardly
    moved, and would hardly move in the client's own training.

    None is returned if the span is uninformative:
    - it is the space of all inputs;
    - its rank is above `max_rank`, which gradient descent on so many examples cannot cause, but
      noise, most kinds of compression, weight decay (which adds the rows of W itself) and data
      augmentation do;
    - its rank equals the number of rows that moved: then more messages would add dimensions.

    If the examples outnumber the inputs, entries that a defense never sends are indistinguishable
    from an input that is always 0.

    Args:
        before: `message output input`, W as it was broadcast.
        after: `message output input`, W as it was returned.
        max_rank: number of the client's examples.
    """
    rows = (before.double() - after.double()).flatten(0, 1)
    rounding = torch.finfo(before.dtype).eps * max(float(models.double().norm()) for models in (before, after))
    num_moved_rows = int((rows.norm(dim=1) > rounding / len(rows) ** 0.5).sum())
    singular_values, basis = _leading_singular_vectors(rows, max_rank + _OVERSAMPLING)
    rank = int((singular_values > rounding).sum())
    if rank in (0, rows.shape[1]) or rank > max_rank or rank >= num_moved_rows:
        return None
    return basis[:rank].float()


def _leading_singular_vectors(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute at least the first `count` singular values and right vectors `vector input`."""
    if 2 * count < min(rows.shape):
        with seed_globals("input span"):  # a randomised method
            _, singular_values, vectors = torch.svd_lowrank(rows, q=count, niter=2)
        return singular_values, vectors.T
    if rows.shape[0] > rows.shape[1]:
        rows = torch.linalg.qr(rows, mode="r").R
    _, singular_values, vectors = torch.linalg.svd(rows, full_matrices=False)
    return singular_values, vectors
