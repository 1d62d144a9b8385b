"""Checks of partitions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedsim.base.errors import ConfigError, DataError
from fedsim.base.randomness import numpy_generator
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, NotChecked, expect
from fedsim.data import Dataset, Examples
from fedsim.data.partitions import Indices

CLIENTS, EXAMPLES = 5, 200
_CLASSES, _GROUPS = 4, 8


def gives_each_client_its_examples(subject: CheckedPlugin) -> None:
    """It gives each client an array of indices of examples that exist, each at most once."""
    shares = _assign_examples(subject)
    expect(len(shares) == CLIENTS, f"for {CLIENTS} clients it gives {len(shares)} arrays")
    for client, share in enumerate(shares):
        is_index = isinstance(share, np.ndarray) and share.ndim == 1 and np.issubdtype(share.dtype, np.integer)
        expect(is_index, f"what client {client} holds is no one-dimensional array of integers")
        is_within = not len(share) or (share.min() >= 0 and share.max() < EXAMPLES)
        expect(is_within, f"client {client} holds an index outside 0 to {EXAMPLES - 1}")
        expect(len(np.unique(share)) == len(share), f"client {client} holds an example twice")
    expect(any(map(len, shares)), "no client holds anything")


def gives_no_example_twice(subject: CheckedPlugin) -> None:
    """It gives no example to two clients, unless it declares `overlapping`."""
    indices = np.concatenate(_assign_examples(subject))
    if not getattr(subject.cls, "overlapping", False):
        is_disjoint = len(np.unique(indices)) == len(indices)
        expect(
            is_disjoint,
            "two clients hold the same example; where that is meant, set overlapping: ClassVar[bool] = True",
        )


def draws_from_its_generator(subject: CheckedPlugin) -> None:
    """It draws from the generator that it is given alone, and does not change the data."""
    first, dataset = _assign_examples(subject), _tiny_dataset()
    with common.expect_untouched_generators():
        second = subject.build().assign(dataset, CLIENTS, numpy_generator("contract"))
    has_same_shares = all(np.array_equal(a, b) for a, b in zip(first, second, strict=False))
    expect(
        len(first) == len(second) and has_same_shares,
        "with the same seed it gives other shares; draw from 'rng' alone",
    )
    original, examples = _tiny_dataset().train, dataset.train
    unchanged = torch.equal(examples.labels, original.labels) and torch.equal(examples.raw, original.raw)
    expect(unchanged, "it changes the data that it is given")


CHECKS = (*common.CHECKS, gives_each_client_its_examples, gives_no_example_twice, draws_from_its_generator)


def _assign_examples(subject: CheckedPlugin) -> Sequence[Indices]:
    if "shares" not in subject.cache:
        try:
            rng = numpy_generator("contract")
            subject.cache["shares"] = subject.build().assign(_tiny_dataset(), CLIENTS, rng)
        except (ConfigError, DataError) as error:
            raise NotChecked(f"it refuses a tiny data set: {error}") from error
    shares: Sequence[Indices] = subject.cache["shares"]
    return shares


def _tiny_dataset() -> Dataset:
    """Return numbers of four classes and eight natural groups."""
    number = torch.arange(EXAMPLES)
    raw = torch.linspace(0, 1, EXAMPLES)[:, None].repeat(1, 3)
    examples = Examples(raw=raw, labels=number % _CLASSES, scale=1.0, groups=number % _GROUPS)
    return Dataset(
        name="tiny",
        train=examples,
        test=examples,
        num_classes=_CLASSES,
        source="made here",
        licence="none",
        group_names=tuple(f"group {group}" for group in range(_GROUPS)),
    )
