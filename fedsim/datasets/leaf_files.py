"""LEAF's JSON format: `users`, `num_samples`, and in `user_data` the lists `x` and `y` of each user."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.errors import DataError

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters for its Shakespeare task, in its order."""

_NO_CLASS = 1 << 31
_PLACES = {character: place for place, character in enumerate(LETTERS)}


@dataclass(frozen=True)
class Part:
    """What some files hold.

    Attributes:
        inputs: `example feature` numbers (float32) or `example place` characters (int32).
        labels: `example` (int64).
        groups: `example`, whose it is (int64), indices into `LeafFiles.users`.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor


@dataclass(frozen=True)
class _Share:
    """The examples of one user in one file; `where` begins a sentence on them."""

    where: str
    user: str
    x: list[Any]
    y: list[Any]


class LeafFiles:
    """Reads files of one task, and remembers what they have in common.

    Args:
        num_classes: labels have to be less; None where that is not known.

    Attributes:
        users: everyone met so far, with a number each.
        texts: whether inputs are texts.
        letters: whether labels were characters.
        size: numbers or characters in one input.
    """

    def __init__(self, num_classes: int | None) -> None:
        self.num_classes = num_classes
        self.users: dict[str, int] = {}
        self.texts = self.letters = False
        self.size = 0

    def read(self, paths: Sequence[Path]) -> Part:
        """All examples in the files `paths`, of which there is one at least.

        Raises:
            DataError: a file is not what LEAF writes, or not of one kind with those before.
        """
        inputs, labels, groups = [], [], []
        known: dict[tuple[str, int, int], Path] = {}
        for path in paths:
            for share in _shares(path):
                if not self.size:
                    self._learn(share)
                inputs.append(self._inputs(share))
                labels.append(self._labels(share))
                key = share.user, hash(inputs[-1].tobytes()), hash(labels[-1].tobytes())
                if (same := known.setdefault(key, path)) != path:
                    raise DataError(
                        f"{share.where}: has the same examples in {same.name}, and they would count twice; remove one"
                    )
                groups.append(np.full(len(share.y), self.users.setdefault(share.user, len(self.users)), np.int64))
        if not inputs:
            raise DataError(f"{paths[0].parent}: holds no example, expected at least one")
        arrays: tuple[list[NDArray[Any]], ...] = (inputs, labels, groups)
        return Part(*(torch.from_numpy(np.concatenate(array)) for array in arrays))

    def _learn(self, share: _Share) -> None:
        x = share.x[0]
        self.texts, self.letters = isinstance(x, str), isinstance(share.y[0], str)
        if not isinstance(x, str | list) or not x:
            raise DataError(f"{share.where}: x is {x!r}, expected a list of numbers or a text")
        if isinstance(x, str) and x.lower().endswith((".jpg", ".jpeg", ".png")):
            raise DataError(f"{share.where}: x names an image ({x}), which is not supported; use 'image-folder'")
        if isinstance(x, list) and not all(isinstance(value, int | float) for value in x):
            raise DataError(
                f"{share.where}: x is a list of words or lists, which is not supported; "
                "expected one flat list of numbers or one text an example"
            )
        self.size = len(x)

    def _inputs(self, share: _Share) -> NDArray[Any]:
        kind = str if self.texts else list
        for x in share.x:
            if not isinstance(x, kind):
                expected = "a text" if self.texts else "a list of numbers"
                raise DataError(f"{share.where}: an x is a {type(x).__name__}, expected {expected} like the first one")
            if len(x) != self.size:
                raise DataError(f"{share.where}: an x is of length {len(x)}, expected {self.size} like the first one")
        if self.texts:
            return np.array([[_letter(share, character) for character in x] for x in share.x], np.int32)
        try:
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is found below
                numbers = np.array(share.x, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{share.where}: x holds something that is no number ({error})") from error
        if not np.isfinite(numbers).all():
            raise DataError(f"{share.where}: x holds NaN, null or an infinite number; correct the file")
        return numbers

    def _labels(self, share: _Share) -> NDArray[np.int64]:
        for y in share.y:
            if self.letters:
                if not isinstance(y, str) or len(y) != 1:
                    raise DataError(f"{share.where}: y is {y!r}, expected one character like the first one")
            elif not isinstance(y, int | float) or isinstance(y, bool) or y % 1 or not 0 <= y < _NO_CLASS:
                raise DataError(f"{share.where}: y is {y!r}, expected a class, a whole number from 0 on")
            elif self.num_classes is not None and y >= self.num_classes:
                raise DataError(f"{share.where}: y is {y}, expected less than num_classes ({self.num_classes})")
        return np.array([_letter(share, y) if self.letters else int(y) for y in share.y], np.int64)


def _shares(path: Path) -> Iterator[_Share]:
    """What each user in `path` holds, without those who hold nothing."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); mend its permissions") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no JSON text, or not all of it ({error}); get the file again") from error
    kinds = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise DataError(f"{path}: has no {key}, expected what LEAF writes: users, num_samples and user_data")
    users, sizes, data = (content[key] for key in kinds)
    if odd := [user for user in users if not isinstance(user, str)]:
        raise DataError(f"{path}: users holds {odd[0]!r}, expected names in quotes; correct the file")
    if len(set(users)) < len(users):
        twice = next(user for place, user in enumerate(users) if user in users[:place])
        raise DataError(f"{path}: names user '{twice}' twice, whose examples would count twice; correct the file")
    if len(users) != len(sizes):
        raise DataError(f"{path}: names {len(users)} users but {len(sizes)} num_samples, expected one each")
    if unnamed := sorted(set(data) - set(users)):
        raise DataError(f"{path}: user_data holds '{unnamed[0]}', who is not among users; correct the file")
    for user, size in zip(users, sizes, strict=True):
        if user not in data:
            raise DataError(f"{path}: user '{user}' has no user_data; correct the file")
        where = f"{path}: user '{user}'"
        x, y = (data[user].get(key) if isinstance(data[user], dict) else None for key in "xy")
        if not isinstance(x, list) or not isinstance(y, list):
            raise DataError(f"{where}: has no list x or no list y, expected one of each")
        if len(x) != len(y):
            raise DataError(f"{where}: has {len(x)} x but {len(y)} y, expected as many")
        if len(y) != size:
            raise DataError(f"{where}: has {len(y)} examples, but num_samples says {size}; correct the file")
        if y:
            yield _Share(where, user, x, y)


def _letter(share: _Share, character: str) -> int:
    if character not in _PLACES:
        raise DataError(f"{share.where}: the text holds {character!r}, expected only LEAF's {len(LETTERS)} characters")
    return _PLACES[character]
