"""Candidate records: rows that a client may have, drawn from what is known, and recombined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.interfaces.knowledge import Records
from fedsim.recording.tree_models import Floats

_CHANGED_COLUMNS = 1.5
"""Columns of a recombined record, on average, that are drawn anew."""
Indices = NDArray[np.int64] | NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Records that a client may have.

    Attributes:
        rows: `candidate feature`, in the units that trees were trained on.
        labels: `candidate`, classes or targets.
    """

    rows: Floats
    labels: Floats

    def select(self, indices: Indices) -> Candidates:
        """Return the candidates with these indices, in this order."""
        return Candidates(rows=self.rows[indices], labels=self.labels[indices])

    def join(self, others: Candidates) -> Candidates:
        """Return these candidates, then the others."""
        return Candidates(
            rows=np.concatenate([self.rows, others.rows]),
            labels=np.concatenate([self.labels, others.labels]),
        )

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordSpace:
    """What is known of a client's records beside its trees.

    Attributes:
        widths: number of features of each column; 1 for a number, more for categories.
        low: `feature`, lowest value.
        high: `feature`, highest value.
        samples: for each feature, values that it may have.
        label_samples: labels that a record may have.
        are_classes: whether labels are 0 or 1.
        auxiliary: records that no client has; None where they are not known.
    """

    widths: Sequence[int]
    low: Floats
    high: Floats
    samples: Sequence[Floats]
    label_samples: Floats
    are_classes: bool
    auxiliary: Candidates | None

    @classmethod
    def describe(
        cls,
        widths: Sequence[int],
        value_range: tuple[Floats, Floats],
        thresholds: Mapping[int, Sequence[float]],
        label_samples: Floats,
        auxiliary: Records | None,
        *,
        are_classes: bool,
    ) -> RecordSpace:
        """Describe columns by auxiliary records, or else by thresholds, which some records have."""
        low, high = value_range
        known: Candidates | None = None
        if auxiliary is not None:
            rows, labels = auxiliary.inputs.double().numpy(), auxiliary.labels.double().numpy()
            known = Candidates(rows=rows, labels=labels)
            samples = list(rows.T)
            label_samples = label_samples if are_classes else labels
        else:
            samples = []
            for feature, (lowest, highest) in enumerate(zip(low, high, strict=True)):
                samples.append(_values_between(thresholds.get(feature, ()), lowest, highest))
        return cls(
            widths=widths,
            low=low,
            high=high,
            samples=samples,
            label_samples=label_samples,
            are_classes=are_classes,
            auxiliary=known,
        )

    @property
    def columns(self) -> list[slice]:
        """Return the features of each column."""
        columns, start = list[slice](), 0
        for width in self.widths:
            columns.append(slice(start, start + width))
            start += width
        return columns

    def begin(self, count: int, rng: np.random.Generator) -> Candidates:
        """Return the first candidates: auxiliary records or drawn ones, with each of two classes."""
        first = self.draw(count, rng) if self.auxiliary is None else self.auxiliary
        if not self.are_classes:
            return first
        negatives = Candidates(rows=first.rows, labels=np.zeros(len(first)))
        return negatives.join(Candidates(rows=first.rows, labels=np.ones(len(first))))

    def draw(self, count: int, rng: np.random.Generator) -> Candidates:
        """Draw candidates, each column for itself; categories are as likely as they are elsewhere."""
        rows = np.stack([rng.choice(sample, count) for sample in self.samples], axis=1)
        for column in self.columns:
            width = column.stop - column.start
            if width > 1:
                means = np.array([sample.mean() for sample in self.samples[column]]) + 1e-9
                chosen = rng.choice(width, count, p=means / means.sum())
                rows[:, column] = np.eye(width)[chosen]
        labels = rng.choice(self.label_samples, count)
        return Candidates(rows=rows, labels=labels)

    def recombine(self, parents: Candidates, count: int, rng: np.random.Generator) -> Candidates:
        """Return candidates in which some columns of a parent are drawn anew."""
        children = parents.select(rng.integers(len(parents), size=count))
        donors = self.draw(count, rng)
        num_columns = len(self.widths) + 1  # the label is the last one
        is_changed = rng.random((count, num_columns)) < _CHANGED_COLUMNS / num_columns
        rows = children.rows.copy()
        for number, column in enumerate(self.columns):
            changed = is_changed[:, number]
            rows[changed, column] = donors.rows[changed, column]
        labels = np.where(is_changed[:, -1], donors.labels, children.labels)
        return Candidates(rows=rows, labels=labels)

    def to_unit_range(self, rows: Floats) -> torch.Tensor:
        """Return rows in [0, 1], as findings claim them."""
        width = np.where(self.high > self.low, self.high - self.low, 1)
        return torch.from_numpy(np.clip((rows - self.low) / width, 0, 1)).float()


def _values_between(thresholds: Sequence[float], low: float, high: float) -> Floats:
    """Return a value for each interval between thresholds: its lower end, which some record has.

    The lowest interval has no lower end; the spread of thresholds says how far below them it is.
    """
    if not thresholds:
        return np.array([(low + high) / 2])
    values = np.array(thresholds)
    spread = max(float(values.std()), 1e-6 * max(abs(values[0]), high - low))
    return np.concatenate([[max(low, values[0] - spread)], values])
