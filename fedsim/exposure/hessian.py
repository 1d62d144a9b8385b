"""The Hessian of a gradient-matching distance at the true inputs.

It describes what an attacker's descent meets once it is close to the victim's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import numpy_generator
from fedsim.training.message_function import ClientMessage

Distance = Literal["l2", "cosine"]
MAX_EXACT_INPUTS = 4096
"""Largest number of inputs for which the whole Hessian is formed."""
ROUNDING_FACTOR = 16
"""Multiple of the machine epsilon, relative to the norm of the message, that counts as rounding."""
_DENSE_COPIES = 4
"""Copies of the dense Hessian in memory while it is symmetrised and decomposed."""


@dataclass(frozen=True)
class Hessian:
    """Hessian of a gradient-matching distance at the true inputs, as a linear operator.

    With the message g and its Jacobian J by the inputs it is J' J for the L2 distance, and
    J' (I - g g' / |g|^2) J / |g|^2 for the cosine distance. The L2 distance is half the squared
    one, as in the paper, so there is no factor of 2. Both are positive semi-definite.

    Attributes:
        message: the client's message as a function of its inputs.
        distance: the distance by which an attacker matches it.

    References:
        [Hong2023] (LAVP), Theorems 3 and 4, Eqs. 4 and 5.
    """

    message: ClientMessage
    distance: Distance

    @property
    def size(self) -> int:
        """Number of input values that vary."""
        return self.message.jacobian.size

    @cached_property
    def _norm(self) -> float:
        return _euclidean_norm(self.message.vector)

    @cached_property
    def _direction(self) -> Tensor:
        return self.message.vector / self._norm

    def apply_root(self, directions: Tensor) -> Tensor:
        """Multiply by a square root R of the Hessian H = R' R.

        R is J for the L2 distance and (I - g g' / |g|^2) J / |g| for the cosine distance.

        Args:
            directions: `number`, or `direction number` for several products at once.

        Returns:
            `parameter`, or `direction parameter`.
        """
        change: Tensor = self.message.jacobian.push_forward(directions)
        if self.distance == "l2":
            return change
        return (change - (change @ self._direction)[..., None] * self._direction) / self._norm

    def __matmul__(self, directions: Tensor) -> Tensor:
        """Multiply `number`, or each row of `direction number` in blocks that fit the budget."""
        if directions.dim() == 1:
            return self._apply_root_transpose(self.apply_root(directions))
        blocks = self.message.jacobian.split_directions(directions)
        return torch.cat([self._apply_root_transpose(self.apply_root(block)) for block in blocks])

    def _apply_root_transpose(self, change: Tensor) -> Tensor:
        product: Tensor = self.message.jacobian.pull_back(change)
        return product if self.distance == "l2" else product / self._norm

    @property
    def is_flat(self) -> bool:
        """True if moving the inputs by about one model unit changes the message by rounding only.

        For the cosine distance the change of direction counts. At this precision no eigenvalue can
        be told from 0 then, nor where eigenvalues are too small to be represented.
        """
        return self.message.compute_once(self._detect_flatness, self.distance)

    @staticmethod
    def _detect_flatness(message: ClientMessage, distance: Distance) -> bool:
        hessian, limits = Hessian(message, distance), torch.finfo(message.vector.dtype)
        change = message.jacobian.push_forward(hessian.start_vector.to(message.vector))
        norm, rounding = _euclidean_norm(change), ROUNDING_FACTOR * limits.eps
        if distance == "l2":
            return norm <= rounding * hessian._norm or norm**2 * limits.eps < limits.tiny
        turn = change - (change @ hessian._direction) * hessian._direction
        return _euclidean_norm(turn) <= rounding * (norm + hessian._norm)

    @property
    def largest_eigenvalue(self) -> float:
        """Largest eigenvalue, by Lanczos iteration (ARPACK); 0 where the Hessian is flat.

        Raises:
            RunError: the iteration did not converge.
        """
        return self.message.compute_once(self._compute_largest_eigenvalue, self.distance)

    @staticmethod
    def _compute_largest_eigenvalue(message: ClientMessage, distance: Distance) -> float:
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # slow to import

        hessian = Hessian(message, distance)
        if hessian.is_flat:
            return 0.0
        if hessian.size == 1:
            return float(hessian @ message.vector.new_ones(1))
        shape = (hessian.size, hessian.size)
        start = hessian.start_vector
        operator = LinearOperator(shape, matvec=hessian._multiply_array, dtype=np.float64)
        try:
            (value,) = eigsh(operator, k=1, which="LA", v0=start.cpu().numpy(), tol=1e-6, return_eigenvectors=False)
        except ArpackError as error:
            raise RunError(f"measure: the largest eigenvalue was not found: {error}") from error
        return max(float(value), 0.0)

    def matrix(self) -> Tensor:
        """Form the whole Hessian in float64, `number number`, by one product for each row.

        Raises:
            ConfigError: it has more than `MAX_EXACT_INPUTS` rows, or takes more than the memory
                budget.
        """
        if self.size > MAX_EXACT_INPUTS:
            raise ConfigError(
                f"measure: the whole Hessian of {self.size} inputs is too large, expected at most "
                f"{MAX_EXACT_INPUTS}; estimate it"
            )
        needed = _DENSE_COPIES * 8 * self.size**2
        self.message.check_memory(f"the whole Hessian of {self.size} inputs", needed)
        rows = torch.cat([(self @ block).double() for block in self.message.jacobian.unit_vectors()])
        return (rows + rows.T) / 2

    @property
    def start_vector(self) -> Tensor:
        """Start vector of all iterations, `number` in float64, the same each time."""
        values = torch.from_numpy(numpy_generator("measure", "start").standard_normal(self.size))
        return values.to(self.message.vector.device)

    def _multiply_array(self, direction: NDArray[np.float64]) -> NDArray[np.float64]:
        vector = torch.from_numpy(np.asarray(direction)).flatten().to(self.message.vector)
        return (self @ vector).double().cpu().numpy()


def _euclidean_norm(vector: Tensor) -> float:
    """Return the norm in float64, because squares of small numbers underflow in float32."""
    return float(vector.norm(dtype=torch.float64))
