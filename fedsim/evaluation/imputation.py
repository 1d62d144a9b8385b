"""What public records say of a withheld column: the guess that every inference of an attribute has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.datasets import Column, Examples
from fedsim.errors import DataError
from fedsim.randomness import numpy_generator, seed_for

IMPUTED = "imputed from public data"
"""What this guess is called beside a score."""
_MOST = 20_000
"""Public records that are learnt from, at most."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Indices of categories.

    Attributes:
        likeliest: `record`, which is right most often.
        balanced: `record`, the category that is likeliest when all are taken to be as frequent, for balanced accuracy.
    """

    likeliest: Tensor
    balanced: Tensor


@dataclass(frozen=True, kw_only=True)
class Imputation:
    """A categorical column of a table, predicted from all other columns and the label.

    Imputation from data of the same kind is what Jayaraman and Evans (Are Attribute Inference Attacks Just Imputation?,
    CCS 2022) compare attribute inference with: what it says of a record is known without the model and the messages.
    Imputing needs what the attack is granted (the other columns and the labels of the victim's records) and
    public records of the same kind, with their labels and with the column. An adversary who lacks such records cannot
    make this guess; but an attack that stays below it has not shown that the federation leaked anything.

    Attributes:
        column: what is predicted.
        shares: `category`, how often the public records hold each.
        model: scikit-learn's gradient boosting; None where all public records hold the same category.
    """

    column: Column
    shares: Tensor
    model: Any

    @classmethod
    def learnt(cls, public: Examples, column: Column, seed: int) -> Imputation:
        """Fit to the public records, 20 000 of them drawn by `seed` where there are more; the same at each call.

        Raises:
            DataError: there are none.
        """
        from sklearn.ensemble import HistGradientBoostingClassifier  # takes a second
        from threadpoolctl import threadpool_limits

        if not len(public):
            raise DataError(f"imputation: there are no public (test) records to learn '{column.name}' from")
        drawn = numpy_generator(seed, "imputation", column.name).permutation(len(public))[:_MOST]
        chosen = torch.from_numpy(np.sort(drawn))
        inputs, labels = public.inputs(chosen), public.labels[chosen]
        values = column.values(inputs)
        shares = values.bincount(minlength=len(column.categories)).double() / len(values)
        if (shares > 0).sum() < 2:
            return cls(column=column, shares=shares, model=None)
        model = HistGradientBoostingClassifier(
            min_samples_leaf=min(20, max(1, len(values) // 20)),  # 20 is usual, but of few records leaves no tree
            random_state=seed_for(seed, "imputation", column.name) % 2**32,
        )
        with threadpool_limits(1):  # the number of threads changes float sums
            model.fit(_others(inputs, labels, column), values.numpy())
        return cls(column=column, shares=shares, model=model)

    def guess(self, inputs: Tensor, labels: Tensor) -> Guess:
        """The column of other records; what `inputs` hold in the column itself is not read.

        Args:
            inputs: `record feature`, in the data set's value range.
            labels: `record`, class indices or targets.
        """
        found = self.shares.expand(len(inputs), -1).clone()
        if self.model is not None:
            found.zero_()
            found[:, self.model.classes_] = torch.from_numpy(
                self.model.predict_proba(_others(inputs, labels, self.column))
            )
        tiny = torch.finfo(found.dtype).tiny  # what is public nowhere has no probability either
        return Guess(likeliest=found.argmax(1), balanced=(found / self.shares.clamp_min(tiny)).argmax(1))


def _others(inputs: Tensor, labels: Tensor, column: Column) -> Any:
    """`record feature`: the other columns and the label."""
    own = column.features
    return torch.cat([inputs[:, : own.start], inputs[:, own.stop :], labels[:, None].to(inputs.dtype)], 1).numpy()
