"""First linear layer's update as a mixture of inputs, and the columns that unmix it.

A layer z = W x + c that takes the inputs themselves has the gradient D^T X for W and D^T 1 for c,
where X holds one input a row and D, `example unit`, the loss's gradient with respect to z. Any
number of steps of gradient descent, momentum and clipping included, only adds up such products, so
the update of W is D^T X with D summed over the steps. A singular value decomposition gives D^T = U
Q and X = Q^-1 R for some unknown Q, `example example`. A column q of Q is known by its zeros: if
the ReLU behind a unit is silent for an example in all steps, U q is zero ([Dimitrov2024], SPEAR,
for one step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.base.errors import AttackError

_FLOAT64_EPS = torch.finfo(torch.float64).eps
_EDGE_FACTOR = 3.0
"""A singular value is significant above this many times the largest that rounding causes."""
_ZERO_ROUNDINGS = 50.0
"""A gradient counts as zero up to this many times its rounding."""
_MAX_MEDIAN_ZERO, _MIN_MEDIAN_GRADIENT = 4.0, 500.0
"""Limits, in roundings, of the medians of a column's zeros and of its other gradients."""
_CHANCE_FACTOR = 6.0
"""Zeros of a column may be chance up to this many times the number expected by chance."""
_MAX_LEVERAGE = 0.98
"""Largest leverage of a silent unit in a column that is accepted, see `refine_column`."""
_LEAST_SINGULAR_VALUE = 0.01
"""The directions of silent units span all but one dimension: least value of the last but one."""
_SPARE_ZEROS = 2
"""Smallest number of zeros of a column beyond those needed to compute it."""
_LEAST_NEW_PART = 1e-3
"""Least norm of a new column's part that is orthogonal to the known columns."""
_REFINEMENTS = 5
_RIDGE, _INVERSE_ITERATIONS = 1e-12, 3
_TINY = 1e-300


@dataclass(frozen=True, kw_only=True)
class InputMixture:
    """Factored update of a first linear layer, U R for the weights.

    Attributes:
        unit_indices: `unit`, of the units that changed by more than rounding; the others say
            nothing.
        rows: U, `unit rank`, float64; its columns are orthonormal but for the units that were left
            out.
        singular_values: `rank`, descending.
        inputs: R, `rank input`.
        bias: `unit`, the update of the bias.
        noise: standard deviation of the rounding of one number of the update.
    """

    unit_indices: Tensor
    rows: Tensor
    singular_values: Tensor
    inputs: Tensor
    bias: Tensor
    noise: float

    @classmethod
    def from_update(
        cls, weight: Tensor, bias: Tensor, num_examples: int, where: str, *, exact: bool = True
    ) -> InputMixture:
        """Factor an update.

        Args:
            weight: `unit input`, the change of the weights, or their gradient.
            bias: `unit`, likewise for the bias.
            num_examples: N.
            exact: the update must span at most N inputs; else it is cut to its N largest
                directions.
        """
        units, varying = weight.any(1).nonzero()[:, 0], weight.any(0).nonzero()[:, 0]
        largest_number = min(len(units), len(varying)) - 1
        if num_examples > largest_number:
            matrix_rank = int(torch.linalg.matrix_rank(weight))
            raise AttackError(
                f"{where}: N is {num_examples}, but {len(units)} units that moved and {len(varying)} inputs that "
                f"vary, of rank {matrix_rank}, distinguish at most {max(largest_number, 0)} examples; choose an "
                "attack that matches gradients, such as sme"
            )
        # Estimate the rounding from the singular values beyond N.
        left, values, right = torch.linalg.svd(weight[units][:, varying], full_matrices=False)
        spare = (len(units) - num_examples) * (len(varying) - num_examples)
        # The largest singular value of rounding, over its standard deviation.
        widest = math.sqrt(len(units)) + math.sqrt(len(varying))
        tail = values[num_examples:]
        noise = max(
            float(tail.norm()) / math.sqrt(spare),
            float(tail[0]) / widest,
            float(values[0]) * _FLOAT64_EPS,
        )
        # Choose the rank.
        edge = _EDGE_FACTOR * noise * widest
        rank = int((values > edge).sum())
        if not exact:
            rank = min(rank, num_examples) or num_examples
        rounding = noise * float((1 / values[:rank]).norm())
        if not rank or (exact and _MIN_MEDIAN_GRADIENT * rounding > 1):
            raise AttackError(
                f"{where}: the update spans more than N = {num_examples} inputs, or nearly so: the "
                f"gap in its singular values is too small, number {num_examples} is "
                f"{values[num_examples - 1]:.2g} and number {num_examples + 1} "
                f"{values[num_examples]:.2g}; noise, compression, Adam, augmentation, or rounding of a small "
                "update, hide the inputs, so choose an attack that matches gradients, such as sme, or 'cocktail-party'"
            )
        inputs = weight.new_zeros((rank, weight.shape[1]))
        inputs[:, varying] = values[:rank, None] * right[:rank]
        if float(bias[units].norm()) < _ZERO_ROUNDINGS * noise:
            raise AttackError(
                f"{where}: the bias of the first linear layer moved by no more than rounding, and "
                "the scale of each input is read from it; choose an attack that matches gradients, "
                "such as sme"
            )
        # Rows that are little more than rounding would count as zeros of any column.
        least_norm = _ZERO_ROUNDINGS * rounding if exact else 0
        significant = left[:, :rank].norm(dim=1) > least_norm
        return cls(
            unit_indices=units[significant],
            rows=left[significant, :rank],
            singular_values=values[:rank],
            inputs=inputs,
            bias=bias[units[significant]],
            noise=noise,
        )

    @property
    def rank(self) -> int:
        """Return the number of linearly independent inputs."""
        return len(self.singular_values)

    @cached_property
    def directions(self) -> Tensor:
        """Return `unit rank`, the rows at norm 1.

        The direction of a silent unit is orthogonal to its example's column, however small the row.
        """
        directions: Tensor = self.rows / self.rows.norm(dim=1, keepdim=True)
        return directions

    @cached_property
    def bias_coordinates(self) -> Tensor:
        """Return `rank`, the sum of all columns of Q, which U maps to the update of the bias."""
        solution: Tensor = torch.linalg.lstsq(self.rows, self.bias[:, None]).solution
        return solution[:, 0]

    def find_zeros(self, columns: Tensor) -> Tensor:
        """Return where the gradients of columns, `rank column`, are zero within rounding."""
        return self._gradients_in_roundings(columns) <= _ZERO_ROUNDINGS

    def most_chance_zeros(self, columns: Tensor) -> Tensor:
        """Return `column`, the largest number of zeros of each of `rank column` that may be chance."""
        sizes = self._gradients_in_roundings(columns)
        median = sizes.where(sizes > _ZERO_ROUNDINGS, torch.nan).nanmedian(0).values
        most: Tensor = _SPARE_ZEROS + _CHANCE_FACTOR * len(sizes) * _ZERO_ROUNDINGS / median
        return most

    def gradient_rounding(self, columns: Tensor) -> Tensor:
        """Return `column`, the standard deviation of the rounding of each column's gradients.

        Args:
            columns: `rank column`.
        """
        rounding: Tensor = self.noise * (columns / self.singular_values[:, None]).norm(dim=0)
        return rounding

    def _gradients_in_roundings(self, columns: Tensor) -> Tensor:
        """Return `unit column`, the size of each gradient in multiples of its rounding."""
        return (self.rows @ columns).abs() / self.gradient_rounding(columns)

    def refine_column(self, guess: Tensor) -> Tensor | None:
        """Compute the column of Q that has the zeros of `guess`; None if they do not certify one.

        The column is computed from its zeros again and again, until they stay. It is accepted if
        each zero is predicted by the others: if the leverage of each silent unit's row among all of
        them is below 1. Any vector that is made zero at rank - 1 rows has these zeros, and further
        ones if rows are multiples of one another, but then some row has leverage 1.

        Args:
            guess: `rank`.

        Returns:
            `rank`, of norm 1.
        """
        column, silent = guess, torch.zeros(len(self.rows), dtype=torch.bool)
        for _ in range(_REFINEMENTS):
            zeros = self.find_zeros(column[:, None])[:, 0]
            if int(zeros.sum()) < self.rank + _SPARE_ZEROS:
                return None
            if torch.equal(zeros, silent):
                break
            silent = zeros
            column = approach_null_vector(self.rows[silent], column)
        sizes = self._gradients_in_roundings(column[:, None])[:, 0]
        if silent.all() or not torch.equal(sizes <= _ZERO_ROUNDINGS, silent):
            return None
        # Zeros must be small, other gradients large, and zeros more than chance gives.
        median_zero, median_gradient = float(sizes[silent].median()), float(sizes[~silent].median())
        if median_zero > _MAX_MEDIAN_ZERO or median_gradient < _MIN_MEDIAN_GRADIENT:
            return None
        if int(silent.sum()) < self.rank + float(self.most_chance_zeros(column[:, None])):
            return None
        return column if self.is_determined(silent) else None

    def is_determined(self, silent: Tensor, max_leverage: float = _MAX_LEVERAGE) -> bool:
        """Return whether silent units determine a column, and each is predicted by the others.

        Args:
            silent: `unit`, which they are.
            max_leverage: upper bound of the leverage of each of them.
        """
        if int(silent.sum()) < self.rank + _SPARE_ZEROS:
            return False
        rows = self.directions[silent]
        squared_values, vectors = torch.linalg.eigh(rows.T @ rows)
        if float(squared_values[1]) <= _LEAST_SINGULAR_VALUE**2:
            return False
        leverage = ((rows @ vectors[:, 1:]).square() / squared_values[1:]).sum(1)
        return float(leverage.max()) < max_leverage

    def add_column(self, columns: list[Tensor], column: Tensor) -> bool:
        """Append `column` unless it depends on `columns`; return whether it was appended."""
        new_part = self.remaining_directions(columns).T @ column
        is_new = float(new_part.norm()) > _LEAST_NEW_PART
        if is_new:
            columns.append(column)
        return is_new

    def remaining_directions(self, columns: Sequence[Tensor]) -> Tensor:
        """Return `rank rest`, an orthonormal basis of the complement of `columns`.

        The update in these directions contains no input but those of the other examples.
        """
        if not columns:
            return torch.eye(self.rank, dtype=torch.float64)
        directions: Tensor = torch.linalg.qr(torch.stack(list(columns), 1), mode="complete").Q
        return directions[:, len(columns) :]

    def scale_columns(self, columns: Tensor) -> Tensor:
        """Scale all columns, `rank column`, so that they add up to the update of the bias."""
        scales: Tensor = torch.linalg.solve(columns, self.bias_coordinates)
        return columns * scales

    def unmix_inputs(self, columns: Tensor) -> Tensor:
        """Return X, `example input`, from all columns of Q, `rank example`, scaled."""
        inputs: Tensor = torch.linalg.solve(columns, self.inputs)
        return inputs

    def input_errors(self, columns: Tensor) -> Tensor:
        """Estimate `example`, the standard deviation of each input's error by rounding.

        Rounding reaches an input by R, and by each column, which is computed from rows with errors
        of their own. The error is infinite if the columns do not explain the update of the bias:
        then some inputs are sums of several.

        Args:
            columns: `rank example`, all of them, scaled.
        """
        rounding = self.noise * (1 + float((columns.sum(1) / self.singular_values).norm()))
        unexplained = (self.rows @ columns).sum(1) - self.bias
        if float(unexplained.square().mean().sqrt()) > _ZERO_ROUNDINGS * rounding:
            return torch.full((self.rank,), math.inf, dtype=torch.float64)
        column_errors = [self._column_error(column) for column in columns.T]
        squared_errors = torch.tensor(column_errors, dtype=torch.float64).square()
        through_columns = (squared_errors * self.unmix_inputs(columns).square().mean(1)).sum()
        deviation = (self.noise**2 + through_columns).sqrt()
        errors: Tensor = torch.linalg.inv(columns).norm(dim=1) * deviation
        return errors

    def _column_error(self, column: Tensor) -> float:
        """Return the norm of the error of a column that was computed from its zeros."""
        if self.rank == 1:
            return 0.0
        rows = self.rows[self.find_zeros(column[:, None])[:, 0]]
        least_value = math.sqrt(max(float(torch.linalg.eigvalsh(rows.T @ rows)[1]), _TINY))
        rounding = self.noise * float((column / self.singular_values).norm())
        return rounding * math.sqrt(self.rank) / least_value


def approach_null_vector(rows: Tensor, start: Tensor) -> Tensor:
    """Return nearly the unit vector that `rows` make smallest, by inverse iteration from `start`.

    Each step subtracts what is not in the null space. As that is computed from the residuals of the
    rows, and not from their Gram matrix, it is as precise as a singular value decomposition, which
    takes several times as long.
    """
    gram = rows.T @ rows
    gram.diagonal().add_(_RIDGE * float(gram.trace()))
    factor = torch.linalg.cholesky(gram)
    vector = start[:, None]
    for _ in range(_INVERSE_ITERATIONS):
        vector = vector - torch.cholesky_solve(rows.T @ (rows @ vector), factor)
        vector = vector / vector.norm()
    return vector[:, 0]
