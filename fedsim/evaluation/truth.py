"""What victims really held, which the evaluator alone knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedsim.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the victim held.

    Attributes:
        data: `example channel height width` images in [0, 1], `example feature` rows of a table, or
            `example place` tokens of texts, which are integers.
        labels: `example`, class indices, or targets of a regression.
        padding: the token that fills texts up and is none of theirs; None where there is none.
    """

    data: Tensor
    labels: Tensor
    padding: int | None = None

    @property
    def texts(self) -> bool:
        """Whether the data are tokens."""
        return not self.data.is_floating_point()

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Read a safetensors file with `data`, or of texts `tokens`, and `labels`; of texts `padding`, too.

        Raises:
            DataError: it is missing, damaged, or its values leave [0, 1].
        """
        if path.exists() and not path.is_file():  # at a pipe, reading would wait for ever
            raise DataError(f"truth: {path} is no file; name a safetensors file with 'data' and 'labels'")
        try:
            tensors = load_file(path)
            if "tokens" in tensors:
                return cls._of_texts(path, tensors)
            data, labels = tensors["data"].float(), tensors["labels"]
            labels = labels.float() if labels.is_floating_point() else labels.long()
        except (OSError, SafetensorError, KeyError) as error:
            raise DataError(f"truth: {path} is not a safetensors file with 'data' and 'labels' ({error})") from error
        negative = not labels.is_floating_point() and bool((labels < 0).any())
        if data.ndim not in (2, 4) or not len(data) or labels.shape != data.shape[:1] or negative:
            raise DataError(
                f"truth: {path}: expected data of shape (example, channel, height, width) or (example, feature) and a "
                f"label for each, got {tuple(data.shape)} and {tuple(labels.shape)}"
            )
        if not (data.min() >= 0 and data.max() <= 1):
            raise DataError(f"truth: {path}: data lies in [{data.min():.3g}, {data.max():.3g}], expected [0, 1]")
        return cls(data=data, labels=labels)

    @classmethod
    def _of_texts(cls, path: Path, tensors: Mapping[str, Tensor]) -> Truth:
        tokens, labels = tensors["tokens"], tensors["labels"]
        whole = not (tokens.is_floating_point() or labels.is_floating_point())
        if not whole or tokens.ndim != 2 or not len(tokens) or labels.shape != tokens.shape[:1] or (tokens < 0).any():
            raise DataError(
                f"truth: {path}: expected tokens of shape (example, place), integers of at least 0, and a label for "
                f"each, got {tuple(tokens.shape)} and {tuple(labels.shape)}"
            )
        padding = int(tensors["padding"]) if "padding" in tensors else None
        return cls(data=tokens.long(), labels=labels.long(), padding=padding)
