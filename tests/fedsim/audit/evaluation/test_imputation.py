"""Imputation from public records: what it learns, what it does not look at, and where there is nothing to learn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsim.audit.evaluation.imputation import Imputation, ImputedCategories
from fedsim.base.errors import DataError
from fedsim.data import Column, Examples

COLUMN = Column(name="sex", start=1, categories=("f", "m", "x"))
"""Beside a number before and a number after it."""


def table(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, labels and the hidden category, which is 1 where the first number is above a half and the label is 1."""
    rng = torch.Generator().manual_seed(seed)
    numbers, labels = torch.rand((count, 2), generator=rng), torch.randint(2, (count,), generator=rng)
    hidden = ((numbers[:, 0] > 0.5) & (labels == 1)).long()
    one_hot = torch.nn.functional.one_hot(hidden, 3).float()
    return torch.cat([numbers[:, :1], one_hot, numbers[:, 1:]], 1), labels, hidden


def learnt(count: int = 400, seed: int = 5) -> Imputation:
    inputs, labels, _ = table(count, 0)
    return Imputation.fit(Examples(raw=inputs, labels=labels, scale=1.0), COLUMN, seed)


def test_what_the_other_columns_and_the_label_give_away_is_imputed() -> None:
    inputs, labels, hidden = table(200, 1)
    assert (learnt().guess(inputs, labels).likeliest == hidden).float().mean() > 0.97
    # Without the right label half of the category cannot be told.
    assert (learnt().guess(inputs, 1 - labels).likeliest == hidden).float().mean() < 0.6


def test_the_column_itself_is_not_looked_at_and_each_call_says_the_same() -> None:
    inputs, labels, _ = table(200, 1)
    blind = inputs.clone()
    blind[:, COLUMN.features] = 0
    one, other = learnt().guess(inputs, labels), learnt().guess(blind, labels)
    assert torch.equal(one.likeliest, other.likeliest)
    assert torch.equal(one.balanced, other.balanced)


def test_the_balanced_guess_dares_the_rare_category() -> None:
    """Where nothing tells the categories apart, the likeliest is the frequent one; balanced accuracy wants both."""
    rng = torch.Generator().manual_seed(0)
    inputs = torch.rand((600, 5), generator=rng)
    inputs[:, COLUMN.features] = torch.nn.functional.one_hot((torch.rand(600, generator=rng) < 0.2).long(), 3).float()
    public = Examples(raw=inputs, labels=torch.zeros(600).long(), scale=1.0)
    guess = Imputation.fit(public, COLUMN, 0).guess(torch.rand((300, 5), generator=rng), torch.zeros(300).long())
    assert (guess.likeliest == 1).float().mean() < 0.2
    assert 0.3 < (guess.balanced == 1).float().mean() < 0.7
    assert not (guess.balanced == 2).any()  # which is public nowhere


def test_a_column_that_is_constant_in_public_is_guessed_as_that() -> None:
    inputs, labels, _ = table(50, 0)
    inputs[:, COLUMN.features] = torch.tensor([0.0, 0.0, 1.0])
    guess = Imputation.fit(Examples(raw=inputs, labels=labels, scale=1.0), COLUMN, 0).guess(inputs, labels)
    expected = ImputedCategories(likeliest=torch.full((50,), 2), balanced=torch.full((50,), 2))
    assert torch.equal(guess.likeliest, expected.likeliest)
    assert torch.equal(guess.balanced, expected.balanced)


def test_without_public_records_there_is_nothing_to_learn() -> None:
    with pytest.raises(DataError, match=r"^imputation: there are no public \(test\) records to learn 'sex' from"):
        learnt(0)
