"""News in eight classes: Reuters-21578 R8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt

from fedsim.base.constraints import CheckedSettings, PositiveInt
from fedsim.base.errors import ConfigError, DataError
from fedsim.base.papers import Paper, cite
from fedsim.data import PADDING, Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.checks import memory_complaint
from fedsim.data.files import find_file, require_data_folder, verify_checksum

_CLASSES = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")
_SPECIAL_TOKENS = (PADDING, "<unk>")


@dataclass(frozen=True, kw_only=True)
class ReutersR8(CheckedSettings):
    """5485 + 2189 Reuters news of 1987 on eight subjects, as words: the text task of TGIAs-RO.

    The version with all terms [CardosoCachopo2007]: lower case, no punctuation or numbers. A text
    is cut after `length` words, or filled up at its end with token 0, `<pad>`; words outside the
    vocabulary are token 1, `<unk>`.

    Args:
        length: words of each text; TGIAs-RO takes 30 (Table X; Table VIII: 32).
        vocabulary: number of tokens: the two above, and the most frequent words of all training
            texts (in full), alphabetically where equally frequent. The paper gives no number.

    References:
        [CardosoCachopo2007].
    """

    paper: ClassVar[Paper] = cite("CardosoCachopo2007")

    length: PositiveInt = 30
    vocabulary: Annotated[int, Gt(len(_SPECIAL_TOKENS))] = 5000

    def load(self, folder: Path | None) -> Dataset:
        """Read `r8/r8-train-all-terms.txt` and `r8/r8-test-all-terms.txt`."""
        home = require_data_folder(folder, "reuters-r8")
        remedy = (
            f"get the R8 'all terms' files of A. Cardoso-Cachopo's datasets for single-label text categorization and "
            f"put them into {home / 'r8'}"
        )
        files = [find_file(home, [f"r8/r8-{part}-all-terms.txt"], remedy) for part in ("train", "test")]
        return load_cached(
            self, files, lambda: self._parse([_read_documents(verify_checksum(path, home)) for path in files])
        )

    def _parse(self, parts: Sequence[tuple[list[str], list[list[str]]]]) -> Dataset:
        count = sum(len(names) for names, _ in parts)
        if complaint := memory_complaint(torch.int32.itemsize * count * self.length):
            raise ConfigError(f"data.length: {count} texts of {self.length} words {complaint}; lower it")

        # The vocabulary comes from the training texts.
        _, training_texts = parts[0]
        frequencies = Counter(word for text in training_texts for word in text)
        by_frequency = sorted(frequencies, key=lambda word: (-frequencies[word], word))
        tokens = (*_SPECIAL_TOKENS, *by_frequency)[: self.vocabulary]
        token_ids = {word: token for token, word in enumerate(tokens)}

        train, test = (self._make_examples(*part, token_ids) for part in parts)
        return Dataset(
            name="reuters-r8",
            modality="text",
            train=train,
            test=test,
            num_classes=len(_CLASSES),
            source="D. Lewis: Reuters-21578; A. Cardoso-Cachopo: R8, all terms (2007)",
            licence="for research purposes, with citation",
            vocabulary=len(tokens),
            class_names=_CLASSES,
            tokens=tokens,
        )

    def _make_examples(
        self, names: Sequence[str], texts: Sequence[list[str]], token_ids: Mapping[str, int]
    ) -> Examples:
        unknown = _SPECIAL_TOKENS.index("<unk>")
        raw = torch.zeros((len(texts), self.length), dtype=torch.int32)
        for row, text in zip(raw, texts, strict=True):
            words = text[: self.length]
            row[: len(words)] = torch.tensor([token_ids.get(word, unknown) for word in words], dtype=torch.int32)
        labels = torch.tensor([_CLASSES.index(name) for name in names])
        return Examples(raw=raw, labels=labels, scale=None)


def _read_documents(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the class and the words of each document in a file: one a line, `class TAB text`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 text (byte {error.start}); get the file again") from error
    names, texts = [], []
    for number, line in enumerate(lines, 1):
        name, tab, text = line.partition("\t")
        words = text.lower().split()
        if not tab or not words:
            raise DataError(f"{path}: line {number} is not a class, tab and text; get the file again")
        if name not in _CLASSES:
            raise DataError(f"{path}: line {number} is of class '{name}', expected one of {', '.join(_CLASSES)}")
        names.append(name)
        texts.append(words)
    if not names:
        raise DataError(f"{path}: is empty; get the file again")
    return names, texts
