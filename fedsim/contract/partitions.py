"""What a partition keeps to."""

from __future__ import annotations

import numpy as np
import torch

from fedsim.contract import common
from fedsim.contract.checks import NotChecked, Subject, expect
from fedsim.datasets import Dataset, Examples
from fedsim.errors import ConfigError, DataError
from fedsim.partitions import Indices
from fedsim.randomness import numpy_generator

CLIENTS, EXAMPLES = 5, 200
_CLASSES, _GROUPS = 4, 8


def gives_each_client_its_examples(subject: Subject) -> None:
    """It gives each client an array of indices of examples that exist, each at most once."""
    shares = _assigned(subject)
    expect(len(shares) == CLIENTS, f"for {CLIENTS} clients it gives {len(shares)} arrays")
    for client, share in enumerate(shares):
        whole = isinstance(share, np.ndarray) and share.ndim == 1 and np.issubdtype(share.dtype, np.integer)
        expect(whole, f"what client {client} holds is no one-dimensional array of integers")
        exist = not len(share) or (share.min() >= 0 and share.max() < EXAMPLES)
        expect(exist, f"client {client} holds an index outside 0 to {EXAMPLES - 1}")
        expect(len(np.unique(share)) == len(share), f"client {client} holds an example twice")
    expect(any(map(len, shares)), "no client holds anything")


def gives_no_example_twice(subject: Subject) -> None:
    """No two clients hold the same example, unless it says so by `overlapping`."""
    everything = np.concatenate(_assigned(subject))
    if not getattr(subject.cls, "overlapping", False):
        once = len(np.unique(everything)) == len(everything)
        expect(once, "two clients hold the same example; where that is meant, set overlapping: ClassVar[bool] = True")


def draws_from_its_generator(subject: Subject) -> None:
    """It draws from the generator that it is given alone, and leaves the data as they were."""
    first, dataset = _assigned(subject), _tiny()
    with common.global_generators_untouched():
        again = subject.build().assign(dataset, CLIENTS, numpy_generator("contract"))
    same = len(first) == len(again) and all(np.array_equal(a, b) for a, b in zip(first, again, strict=False))
    expect(same, "with the same seed it gives other shares; draw from 'rng' alone")
    before = _tiny().train
    unchanged = torch.equal(dataset.train.labels, before.labels) and torch.equal(dataset.train.raw, before.raw)
    expect(unchanged, "it changes the data that it is given")


CHECKS = (*common.CHECKS, gives_each_client_its_examples, gives_no_example_twice, draws_from_its_generator)


def _assigned(subject: Subject) -> list[Indices]:
    if "shares" not in subject.kept:
        try:
            subject.kept["shares"] = subject.build().assign(_tiny(), CLIENTS, numpy_generator("contract"))
        except (ConfigError, DataError) as error:
            raise NotChecked(f"it refuses a tiny data set: {error}") from error
    shares: list[Indices] = subject.kept["shares"]
    return shares


def _tiny() -> Dataset:
    """Numbers of four classes and eight natural groups."""
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
