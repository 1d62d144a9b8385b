"""The Hessian of a gradient matching loss at the true inputs: what an attacker's descent sees once it is close."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import ConfigError, RunError
from fedsim.randomness import numpy_generator
from fedsim.training.sent import Sent

Distance = Literal["l2", "cosine"]
EXACT = 4096
"""Most numbers of an input whose whole Hessian is made."""
ROUNDING = 16
"""Rounding errors of one number that what is sent may be off by, beside its length, when it is computed another way."""
_COPIES = 4
"""Of the whole Hessian, at once, while it is made symmetric and while its eigenvalues are found."""


@dataclass(frozen=True)
class Hessian:
    """J' J for the L2 distance; for the cosine distance J' (I - g g' / |g|^2) J / |g|^2.

    J is the derivative of what is sent, g, by the inputs. The L2 distance is half the squared one, so there is no
    factor of 2, as in the paper. Both are positive semi-definite.

    Attributes:
        sent: what a client sends.
        distance: by which an attacker matches it.

    References:
        Hong et al. 2023 (LAVP), Theorems 3 and 4, Eqs. 4 and 5.
    """

    sent: Sent
    distance: Distance

    @property
    def size(self) -> int:
        """How many inputs vary."""
        return self.sent.linear.size

    @cached_property
    def _norm(self) -> float:
        return _length(self.sent.vector)

    @cached_property
    def _direction(self) -> Tensor:
        return self.sent.vector / self._norm

    def push(self, directions: Tensor) -> Tensor:
        """The square root's part: J v, or (I - g g' / |g|^2) J v / |g|, `number`; of `direction number` by each."""
        moved: Tensor = self.sent.linear.push(directions)
        if self.distance == "l2":
            return moved
        return (moved - (moved @ self._direction)[..., None] * self._direction) / self._norm

    def __matmul__(self, directions: Tensor) -> Tensor:
        """H v of `number`; of `direction number` the product with each, in blocks that keep to the memory budget."""
        if directions.dim() == 1:
            return self._pull(self.push(directions))
        return torch.cat([self._pull(self.push(block)) for block in self.sent.linear.blocks(directions)])

    def _pull(self, moved: Tensor) -> Tensor:
        pulled: Tensor = self.sent.linear.pull(moved)
        return pulled if self.distance == "l2" else pulled / self._norm

    @property
    def is_flat(self) -> bool:
        """Whether inputs that move by about one model unit change what is sent, or turn it, by no more than rounding.

        Numbers of this precision then tell no eigenvalue from 0, nor do they where eigenvalues are too small for them.
        """
        return self.sent.once(self._flat, self.distance)

    @staticmethod
    def _flat(sent: Sent, distance: Distance) -> bool:
        hessian, numbers = Hessian(sent, distance), torch.finfo(sent.vector.dtype)
        moved = sent.linear.push(hessian.start.to(sent.vector))
        length, rounding = _length(moved), ROUNDING * numbers.eps
        if distance == "l2":
            return length <= rounding * hessian._norm or length**2 * numbers.eps < numbers.tiny
        turned = moved - (moved @ hessian._direction) * hessian._direction
        return _length(turned) <= rounding * (length + hessian._norm)

    @property
    def largest(self) -> float:
        """Its largest eigenvalue, by Lanczos iteration (ARPACK); 0 where it is flat.

        Raises:
            RunError: the iteration did not converge.
        """
        return self.sent.once(self._largest, self.distance)

    @staticmethod
    def _largest(sent: Sent, distance: Distance) -> float:
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # takes a second to import

        hessian = Hessian(sent, distance)
        if hessian.is_flat:
            return 0.0
        if hessian.size == 1:
            return float(hessian @ sent.vector.new_ones(1))
        start = hessian.start
        operator = LinearOperator((hessian.size, hessian.size), matvec=hessian._numbers, dtype=np.float64)
        try:
            (value,) = eigsh(operator, k=1, which="LA", v0=start.cpu().numpy(), tol=1e-6, return_eigenvectors=False)
        except ArpackError as error:
            raise RunError(f"measure: the largest eigenvalue was not found: {error}") from error
        return max(float(value), 0.0)

    def matrix(self) -> Tensor:
        """The whole of it in float64, `number number`, by one product for each row.

        Raises:
            ConfigError: it has more than `EXACT` rows, or takes more than the memory budget.
        """
        if self.size > EXACT:
            raise ConfigError(
                f"measure: the whole Hessian of {self.size} inputs is too large, expected at most {EXACT}; estimate it"
            )
        self.sent.check_memory(f"the whole Hessian of {self.size} inputs", _COPIES * 8 * self.size**2)
        made = torch.cat([(self @ some).double() for some in self.sent.linear.units()])
        return (made + made.T) / 2

    @property
    def start(self) -> Tensor:
        """Where iterations start, `number` in float64, the same each time."""
        drawn = torch.from_numpy(numpy_generator("measure", "start").standard_normal(self.size))
        return drawn.to(self.sent.vector.device)

    def _numbers(self, direction: NDArray[np.float64]) -> NDArray[np.float64]:
        vector = torch.from_numpy(np.asarray(direction)).flatten().to(self.sent.vector)
        return (self @ vector).double().cpu().numpy()


def _length(vector: Tensor) -> float:
    """Of `number`; squares of small numbers do not fit into float32."""
    return float(vector.norm(dtype=torch.float64))
