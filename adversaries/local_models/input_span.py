"""What the updates of a network's first layer say of its inputs: the linear span of a client's data, exactly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.randomness import seeded

_SPARE = 16  # singular vectors that are sought beyond the largest number there can be


@dataclass(frozen=True, kw_only=True)
class InputSpan:
    """The span of a client's inputs.

    A layer W x + b that takes the inputs themselves has the gradient (sum over examples of delta x^T) for W, so its
    rows are combinations of inputs, and so are the rows of all that gradient descent, by any number of local steps,
    with momentum or clipping, makes of W. The rows of the client's updates theta_t - theta_c,t over many rounds
    therefore span what the client's inputs span, once there are enough of them, and the rank is how many linearly
    independent inputs it has. Two things follow. Trained alone, W would not leave W_0 + span, so that what others' data
    made of W elsewhere can be taken away (`project`). And inputs need not be sought outside of it (`inputs`).

    Attributes:
        weight: name of W.
        basis: `rank input`, orthonormal, float32.
        shape: of one example.
    """

    weight: str
    basis: Tensor
    shape: tuple[int, ...]

    @property
    def stretch(self) -> float:
        """By how much a coordinate moves where each number of an example moves by one, in the root mean square."""
        rank, inputs = self.basis.shape
        return float((inputs / rank) ** 0.5)

    def inputs(self, coordinates: Tensor) -> Tensor:
        """`example ...` of `example rank`."""
        return (coordinates @ self.basis.to(coordinates)).reshape(len(coordinates), *self.shape)

    def within(self, weight: Tensor) -> Tensor:
        """W in coordinates, `output rank`: what it makes of coordinates is what W makes of their inputs."""
        return weight @ self.basis.to(weight).T

    def project(self, weight: Tensor, origin: Tensor) -> Tensor:
        """The point of `origin` + span that is nearest to `weight`, `output input` both.

        It is no farther than `weight` from any other point there, such as the client's optimum where `origin` is W_0.
        """
        basis = self.basis.to(weight.device, torch.float64)
        return (origin + ((weight - origin).double() @ basis.T) @ basis).to(weight)


def row_span(before: Tensor, after: Tensor, most: int) -> Tensor | None:
    """Orthonormal basis of the span of the rows of `before - after`, `rank input`; None where it says nothing.

    Directions are counted that stand out of the rounding of the models: singular values above the type's precision
    times the norm of all that were sent, or returned. What is lost in it is where it hardly moved, so hardly would
    alone.

    It says nothing, and None is returned, where
    - it is all inputs: then it holds whatever one could seek;
    - its rank is above `most`, which gradient descent on so many examples cannot bring about: so with noise, most
      kinds of compression, weight decay (which adds the rows of W itself), data augmentation;
    - it is of as many dimensions as there are rows that moved: then more messages would show more.

    Where the examples outnumber the inputs, entries that a defense sends never are indistinguishable from a column
    that is always 0.

    Args:
        before: `message output input`, W as it was broadcast.
        after: `message output input`, W as it returned it.
        most: how many examples it has.
    """
    rows = (before.double() - after.double()).flatten(0, 1)
    rounding = torch.finfo(before.dtype).eps * max(float(models.double().norm()) for models in (before, after))
    moved = int((rows.norm(dim=1) > rounding / len(rows) ** 0.5).sum())
    sizes, basis = _singular(rows, most + _SPARE)
    rank = int((sizes > rounding).sum())
    if rank in (0, rows.shape[1]) or rank > most or rank >= moved:
        return None
    return basis[:rank].float()


def _singular(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Singular values in descending order, and right singular vectors, `vector input`; at least the first `most`."""
    if 2 * most < min(rows.shape):
        with seeded("input span"):  # a randomised method
            _, sizes, vectors = torch.svd_lowrank(rows, q=most, niter=2)
        return sizes, vectors.T
    if rows.shape[0] > rows.shape[1]:
        rows = torch.linalg.qr(rows, mode="r").R
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    return sizes, basis
