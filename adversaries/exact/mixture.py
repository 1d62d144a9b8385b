"""The update of a first linear layer as a mixture of inputs, and the columns that unmix it.

A layer z = W x + c that takes the inputs themselves has the gradient D^T X for W and D^T 1 for c, where X holds one
input a row and D, `example unit`, the loss's gradient with respect to z. Any number of steps of gradient descent,
momentum and clipping included, only adds up such products, so the update of W is D^T X with D summed over the steps. A
singular value decomposition gives D^T = U Q and X = Q^-1 R for some unknown Q, `example example`. A column q of Q is
known by its zeros: where the ReLU behind a unit is silent for an example in all steps, U q is zero (Dimitrov et al.:
SPEAR, NeurIPS 2024, for one step).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsim.errors import AttackError

_FLOAT64 = torch.finfo(torch.float64).eps
_EDGE = 3.0
"""A singular value stands out where it is so many times the largest that rounding alone brings about."""
_ABOVE = 50.0
"""A gradient counts as zero up to so many times its rounding."""
_TYPICAL, _CLEAR = 4.0, 500.0
"""Of a column that is found, half of the zeros are below, and half of the other gradients above, so many times."""
_SURPRISE = 6.0
"""A column has more zeros than are needed by so many times the number that gradients of its size have by chance."""
_CERTAIN = 0.98
"""Largest leverage of a silent unit in a column that counts as found, see `Mixture.column`."""
_FIRM = 0.01
"""The directions of silent units span all but one dimension: the smallest but one singular value is at least this."""
_SPARE = 2
"""A column has at least so many zeros more than are needed to compute it."""
_NEW = 1e-3
"""Part of a column, of unit norm, that is at least orthogonal to those that were found before."""
_TURNS = 5


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The update of a first linear layer, factored.

    Attributes:
        units: `unit`, the indices of units that moved by more than rounding; the others say nothing.
        rows: U, `unit rank`, float64; its columns are orthonormal but for the units that were left out.
        sizes: `rank`, the singular values, descending.
        inputs: R, `rank input`, so that the update of the weights is `rows @ inputs`.
        bias: `unit`, the update of the bias.
        noise: standard deviation of the rounding of one number of the update.
    """

    units: Tensor
    rows: Tensor
    sizes: Tensor
    inputs: Tensor
    bias: Tensor
    noise: float

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, most: int, where: str, *, exact: bool = True) -> Mixture:
        """Factor an update.

        Args:
            weight: `unit input`, what the weights moved by, or their gradient.
            bias: `unit`, likewise of the bias.
            most: number of examples.
            where: names the update in errors.
            exact: the update spans no more inputs than there are; else it is cut down to as many directions.

        Raises:
            AttackError: there are more examples than the layer can tell apart, or the update spans more than them.
        """
        units, varying = weight.any(1).nonzero()[:, 0], weight.any(0).nonzero()[:, 0]
        most_told = min(len(units), len(varying)) - 1
        if most > most_told:
            raise AttackError(
                f"{where}: N is {most}, but {len(units)} units that moved and {len(varying)} inputs that vary, of rank "
                f"{int(torch.linalg.matrix_rank(weight))}, tell at most {max(most_told, 0)} examples apart; choose an "
                "attack that matches gradients, such as sme"
            )
        left, sizes, right = torch.linalg.svd(weight[units][:, varying], full_matrices=False)
        spare = (len(units) - most) * (len(varying) - most)
        widest = math.sqrt(len(units)) + math.sqrt(
            len(varying)
        )  # largest singular value of rounding, over its deviation
        tail = sizes[most:]
        noise = max(float(tail.norm()) / math.sqrt(spare), float(tail[0]) / widest, float(sizes[0]) * _FLOAT64)
        edge = _EDGE * noise * widest
        rank = int((sizes > edge).sum())
        if not exact:
            rank = min(rank, most) or most
        rounding = noise * float((1 / sizes[:rank]).norm())
        if not rank or (exact and _CLEAR * rounding > 1):
            raise AttackError(
                f"{where}: the update spans more than N = {most} inputs, or nearly so: the gap in its singular values "
                f"is too small, number {most} is {sizes[most - 1]:.2g} and number {most + 1} {sizes[most]:.2g}; noise, "
                "compression, Adam or augmentation hide the inputs, so choose an attack that matches gradients, such "
                "as sme, or 'cocktail-party'"
            )
        inputs = weight.new_zeros((rank, weight.shape[1]))
        inputs[:, varying] = sizes[:rank, None] * right[:rank]
        if float(bias[units].norm()) < _ABOVE * noise:
            raise AttackError(
                f"{where}: the bias of the first linear layer moved by no more than rounding, and the scale of each "
                "input is read from it; choose an attack that matches gradients, such as sme"
            )
        # Rows that are little more than rounding would count as zeros of whatever column.
        telling = left[:, :rank].norm(dim=1) > (_ABOVE * rounding if exact else 0)
        return cls(
            units=units[telling],
            rows=left[telling, :rank],
            sizes=sizes[:rank],
            inputs=inputs,
            bias=bias[units[telling]],
            noise=noise,
        )

    @property
    def rank(self) -> int:
        """Number of linearly independent inputs."""
        return len(self.sizes)

    @cached_property
    def directions(self) -> Tensor:
        """`unit rank`, the rows at unit norm: a silent unit's is orthogonal to its example's column, however small."""
        directions: Tensor = self.rows / self.rows.norm(dim=1, keepdim=True)
        return directions

    @cached_property
    def of_bias(self) -> Tensor:
        """`rank`, the sum of all columns of Q at their scales, which U maps to the update of the bias."""
        solution: Tensor = torch.linalg.lstsq(self.rows, self.bias[:, None]).solution
        return solution[:, 0]

    def zeros(self, columns: Tensor) -> Tensor:
        """`unit column`: where the gradient is zero within rounding, of columns `rank column`."""
        return self._in_roundings(columns) <= _ABOVE

    def rounding(self, columns: Tensor) -> Tensor:
        """`column`: the standard deviation of the rounding of the gradients of each column, of `rank column`."""
        rounding: Tensor = self.noise * (columns / self.sizes[:, None]).norm(dim=0)
        return rounding

    def _in_roundings(self, columns: Tensor) -> Tensor:
        """`unit column`: the size of each gradient in multiples of its rounding."""
        return (self.rows @ columns).abs() / self.rounding(columns)

    def column(self, guess: Tensor) -> Tensor | None:
        """The column of Q, `rank`, of unit norm, whose zeros `guess` has, or None where they do not make one.

        It is computed from its zeros again, until they stay. Then it is a column only if each of them is foretold by
        the others: if the leverage of each silent unit's row among those of all is below 1. Whatever vector is made
        zero at rank - 1 rows has these zeros, and further ones where rows are multiples of one another, but then some
        row has leverage 1.
        """
        column = guess
        for _ in range(_TURNS):
            silent = self.zeros(column[:, None])[:, 0]
            if int(silent.sum()) < self.rank + _SPARE:
                return None
            column = torch.linalg.svd(self.rows[silent], full_matrices=False).Vh[-1]
        sizes = self._in_roundings(column[:, None])[:, 0]
        if silent.all() or not torch.equal(sizes <= _ABOVE, silent):
            return None
        typical, clear = float(sizes[silent].median()), float(sizes[~silent].median())
        by_chance = len(sizes) * _ABOVE / clear
        if typical > _TYPICAL or clear < _CLEAR or int(silent.sum()) < self.rank + _SPARE + _SURPRISE * by_chance:
            return None
        return column if self.determined(silent) else None

    def determined(self, silent: Tensor, most: float = _CERTAIN) -> bool:
        """Whether these units, `unit`, tell a column by being silent, and each of them is foretold by the others.

        Args:
            most: largest leverage of any of them.
        """
        if int(silent.sum()) < self.rank + _SPARE:
            return False
        left, firm, _ = torch.linalg.svd(self.directions[silent], full_matrices=False)
        leverage = left[:, : self.rank - 1].square().sum(1)
        return float(leverage.max()) < most and float(firm[self.rank - 2]) > _FIRM

    def add(self, found: list[Tensor], column: Tensor) -> bool:
        """Put `column` into `found` unless it depends on those that are there; says whether it did."""
        left = self.left(found).T @ column
        if new := float(left.norm()) > _NEW:
            found.append(column)
        return new

    def left(self, found: Sequence[Tensor]) -> Tensor:
        """`rank rest`, orthonormal: all directions in which the columns that are not found yet differ from the others.

        What they map the update to holds no input but those of the examples that are not found yet.
        """
        if not found:
            return torch.eye(self.rank, dtype=torch.float64)
        directions: Tensor = torch.linalg.qr(torch.stack(list(found), 1), mode="complete").Q
        return directions[:, len(found) :]

    def scaled(self, columns: Tensor) -> Tensor:
        """Columns `rank column` at the scales at which they add up to the update of the bias."""
        scales: Tensor = torch.linalg.solve(columns, self.of_bias)
        return columns * scales

    def unmixed(self, columns: Tensor) -> Tensor:
        """X, `example input`, of all columns of Q, `rank example`, at their scales."""
        inputs: Tensor = torch.linalg.solve(columns, self.inputs)
        return inputs

    def errors(self, columns: Tensor) -> Tensor:
        """`example`: the standard deviation of each input of `unmixed` that rounding of the update makes.

        Rounding reaches an input by R, and by each column, which is computed from rows with errors of their own. The
        error is infinite where the columns do not explain the update of the bias: then some inputs are sums of several.

        Args:
            columns: `rank example`, all that there are, scaled.
        """
        rounding = self.noise * (1 + float((columns.sum(1) / self.sizes).norm()))
        unexplained = (self.rows @ columns).sum(1) - self.bias
        if float(unexplained.square().mean().sqrt()) > _ABOVE * rounding:
            return torch.full((self.rank,), math.inf, dtype=torch.float64)
        of_columns = torch.tensor([self._error(column) for column in columns.T], dtype=torch.float64)
        through = (of_columns.square() * self.unmixed(columns).square().mean(1)).sum()
        error: Tensor = torch.linalg.inv(columns).norm(dim=1) * (self.noise**2 + through).sqrt()
        return error

    def _error(self, column: Tensor) -> float:
        """The norm of the error of a column that was computed from its zeros."""
        if self.rank == 1:
            return 0.0
        rows = self.rows[self.zeros(column[:, None])[:, 0]]
        firm = float(torch.linalg.svdvals(rows)[self.rank - 2])
        return self.noise * float((column / self.sizes).norm()) * math.sqrt(self.rank) / firm
