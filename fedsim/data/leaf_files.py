"""LEAF's JSON format: `users`, `num_samples`, and `user_data` with lists `x` and `y` a user."""

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

from fedsim.base.errors import DataError
from fedsim.base.files import join_pairs

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters for its Shakespeare task, in its order."""

_CLASS_LIMIT = 1 << 31
"""Labels from here on are refused even where the number of classes is unknown."""
_TOKENS = {character: token for token, character in enumerate(LETTERS)}


@dataclass(frozen=True)
class LeafExamples:
    """Examples of several files.

    Attributes:
        inputs: `example feature` numbers (float32) or `example position` characters (int32).
        labels: `example` (int64).
        groups: `example`, its user (int64), as indices into `LeafFiles.users`.
    """

    inputs: Tensor
    labels: Tensor
    groups: Tensor


@dataclass(frozen=True)
class _UserExamples:
    """Examples of one user in one file; `where` is the beginning of an error about them."""

    where: str
    user: str
    x: list[Any]
    y: list[Any]


class LeafFiles:
    """Reader of the files of one task, whose examples have to be of the same kind.

    Args:
        num_classes: number of classes, which labels have to be below; None where it is not known.

    Attributes:
        users: all users so far, each with its index.
        texts: whether inputs are texts.
        letters: whether labels are characters.
        size: numbers or characters in one input.
    """

    def __init__(self, num_classes: int | None) -> None:
        self.num_classes = num_classes
        self.users: dict[str, int] = {}
        self.texts = self.letters = False
        self.size = 0

    def read(self, paths: Sequence[Path]) -> LeafExamples:
        """Return all examples in one or more files."""
        inputs, labels, groups = [], [], []
        file_of_examples: dict[tuple[str, int, int], Path] = {}
        for path in paths:
            for examples in _read_users(path):
                if not self.size:
                    self._detect_kind(examples)
                inputs.append(self._parse_inputs(examples))
                labels.append(self._parse_labels(examples))

                # Refuse examples that another file has too.
                key = examples.user, hash(inputs[-1].tobytes()), hash(labels[-1].tobytes())
                first_path = file_of_examples.setdefault(key, path)
                if first_path != path:
                    raise DataError(
                        f"{examples.where}: has the same examples in {first_path.name}, and they would count twice; "
                        "remove one"
                    )
                group = self.users.setdefault(examples.user, len(self.users))
                groups.append(np.full(len(examples.y), group, np.int64))
        if not inputs:
            raise DataError(f"{paths[0].parent}: holds no example, expected at least one")
        arrays: tuple[list[NDArray[Any]], ...] = (inputs, labels, groups)
        return LeafExamples(*(torch.from_numpy(np.concatenate(array)) for array in arrays))

    def _detect_kind(self, examples: _UserExamples) -> None:
        """Set the kind of the task by its first example."""
        x = examples.x[0]
        self.texts, self.letters = isinstance(x, str), isinstance(examples.y[0], str)
        if not isinstance(x, str | list) or not x:
            raise DataError(f"{examples.where}: x is {x!r}, expected a list of numbers or a text")
        if isinstance(x, str) and x.lower().endswith((".jpg", ".jpeg", ".png")):
            raise DataError(f"{examples.where}: x names an image ({x}), which is not supported; use 'image-folder'")
        if isinstance(x, list) and not all(isinstance(value, int | float) for value in x):
            raise DataError(
                f"{examples.where}: x is a list of words or lists, which is not supported; "
                "expected one flat list of numbers or one text an example"
            )
        self.size = len(x)

    def _parse_inputs(self, examples: _UserExamples) -> NDArray[Any]:
        where = examples.where
        kind = str if self.texts else list
        for x in examples.x:
            if not isinstance(x, kind):
                expected = "a text" if self.texts else "a list of numbers"
                raise DataError(f"{where}: an x is a {type(x).__name__}, expected {expected} like the first one")
            if len(x) != self.size:
                raise DataError(f"{where}: an x is of length {len(x)}, expected {self.size} like the first one")
        if self.texts:
            tokens = []
            for text in examples.x:
                tokens.append([_find_token(where, character) for character in text])
            return np.array(tokens, np.int32)
        try:
            with np.errstate(over="ignore"):  # too large numbers become infinite, see below
                numbers = np.array(examples.x, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{where}: x holds something that is not a number ({error})") from error
        if not np.isfinite(numbers).all():
            raise DataError(f"{where}: x holds NaN, null or an infinite number; correct the file")
        return numbers

    def _parse_labels(self, examples: _UserExamples) -> NDArray[np.int64]:
        where = examples.where
        for y in examples.y:
            if self.letters:
                if not isinstance(y, str) or len(y) != 1:
                    raise DataError(f"{where}: y is {y!r}, expected one character like the first one")
            elif not isinstance(y, int | float) or isinstance(y, bool) or y % 1 or not 0 <= y < _CLASS_LIMIT:
                raise DataError(f"{where}: y is {y!r}, expected a class, a whole number from 0 on")
            elif self.num_classes is not None and y >= self.num_classes:
                raise DataError(f"{where}: y is {y}, expected less than num_classes ({self.num_classes})")
        return np.array([_find_token(where, y) if self.letters else int(y) for y in examples.y], np.int64)


def _read_users(path: Path) -> Iterator[_UserExamples]:
    """Yield the examples of each user in a file that has any."""
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=join_pairs)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); fix its permissions") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: is no JSON text, or not as LEAF writes it ({error}); get the file again") from error
    kinds = {"users": list, "num_samples": list, "user_data": dict}
    for key, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise DataError(f"{path}: has no {key}, expected what LEAF writes: users, num_samples and user_data")
    # Check the three tables against each other.
    users, sizes, data = (content[key] for key in kinds)
    if wrong := [user for user in users if not isinstance(user, str)]:
        raise DataError(f"{path}: users holds {wrong[0]!r}, expected names in quotes; correct the file")
    if len(set(users)) < len(users):
        repeated = next(user for index, user in enumerate(users) if user in users[:index])
        raise DataError(f"{path}: names user '{repeated}' twice, whose examples would count twice; correct the file")
    if len(users) != len(sizes):
        raise DataError(f"{path}: names {len(users)} users but {len(sizes)} num_samples, expected one each")
    if unnamed := sorted(set(data) - set(users)):
        raise DataError(f"{path}: user_data holds '{unnamed[0]}', who is not among users; correct the file")
    # Check and yield each user's examples.
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
            yield _UserExamples(where, user, x, y)


def _find_token(where: str, character: str) -> int:
    if character not in _TOKENS:
        raise DataError(f"{where}: the text holds {character!r}, expected only LEAF's {len(LETTERS)} characters")
    return _TOKENS[character]
