"""Impute a withheld column from public records: the guess that attribute inference has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import DataError
from fedsim.base.randomness import derive_seed, numpy_generator
from fedsim.data import Column, Examples

IMPUTED_GUESS = "imputed from public data"
"""Name of this guess in a score."""
_MAX_RECORDS = 20_000
"""Most public records that a model is fitted to."""


@dataclass(frozen=True, kw_only=True)
class ImputedCategories:
    """Imputed categories of records, as indices.

    Attributes:
        likeliest: `record`, the category that is right most often.
        balanced: `record`, the category that is likeliest if all were equally frequent, for
            balanced accuracy.
    """

    likeliest: Tensor
    balanced: Tensor


@dataclass(frozen=True, kw_only=True)
class Imputation:
    """Predictor of a categorical column of a table from all other columns and the label.

    [Jayaraman2022] compares attribute inference with imputation from data of the same kind: what it
    predicts for a record is known without the model and the messages. Imputing needs what the attack is
    granted (the other columns and the labels of the victim's records) and public records of the
    same kind, with their labels and with the column. An adversary that lacks such records cannot
    make this guess; but an attack that stays below it has not shown that the federation leaked
    anything.

    Attributes:
        model: scikit-learn's gradient boosting; None where all public records have one category.
    """

    column: Column
    shares: Tensor
    model: Any

    @classmethod
    def fit(cls, public: Examples, column: Column, seed: int) -> Imputation:
        """Fit to the public records, or to 20,000 of them drawn by `seed`; the same at each call."""
        from sklearn.ensemble import HistGradientBoostingClassifier  # takes a second
        from threadpoolctl import threadpool_limits

        if not len(public):
            raise DataError(f"imputation: there are no public (test) records to learn '{column.name}' from")
        order = numpy_generator(seed, "imputation", column.name).permutation(len(public))
        chosen = torch.from_numpy(np.sort(order[:_MAX_RECORDS]))
        inputs, labels = public.inputs(chosen), public.labels[chosen]
        values = column.values(inputs)
        shares = values.bincount(minlength=len(column.categories)).double() / len(values)
        if (shares > 0).sum() < 2:
            return cls(column=column, shares=shares, model=None)
        model = HistGradientBoostingClassifier(
            min_samples_leaf=min(20, max(1, len(values) // 20)),  # 20 is the default, but few records need less
            random_state=derive_seed(seed, "imputation", column.name) % 2**32,
        )
        with threadpool_limits(1):  # the number of threads changes float sums
            model.fit(_features(inputs, labels, column), values.numpy())
        return cls(column=column, shares=shares, model=model)

    def guess(self, inputs: Tensor, labels: Tensor) -> ImputedCategories:
        """Impute the column of other records; their own values of the column are not read."""
        probabilities = self.shares.expand(len(inputs), -1).clone()
        if self.model is not None:
            probabilities.zero_()
            predicted = self.model.predict_proba(_features(inputs, labels, self.column))
            probabilities[:, self.model.classes_] = torch.from_numpy(predicted)
        # A category without public records has probability 0, and keeps it when divided by `tiny`.
        tiny = torch.finfo(probabilities.dtype).tiny
        weighted = probabilities / self.shares.clamp_min(tiny)
        return ImputedCategories(likeliest=probabilities.argmax(1), balanced=weighted.argmax(1))


def _features(inputs: Tensor, labels: Tensor, column: Column) -> Any:
    """Return the other columns and the label, `record feature`."""
    before, after = inputs[:, : column.features.start], inputs[:, column.features.stop :]
    return torch.cat([before, after, labels[:, None].to(inputs.dtype)], 1).numpy()
