"""What victims really held, which the evaluator alone knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsim.errors import DataError, RunError, first_line


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the victim held.

    Attributes:
        data: `example channel height width` images in [0, 1], `example feature` rows of a table, or
            `example place` tokens of texts, which are integers.
        labels: `example`, class indices, or targets of a regression.
        padding: the token that fills texts up and is none of theirs; None where there is none.
        columns: how many features each column of a table has, see `fedsim.table_metrics`; empty where nobody says.
        deviations: `feature`, standard deviations of a table's numbers in public rows.
    """

    data: Tensor
    labels: Tensor
    padding: int | None = None
    columns: Sequence[int] = ()
    deviations: Tensor | None = None

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


def write_truth(
    folder: Path | str,
    load: Callable[[int], Any],
    clients: Iterable[int],
    *,
    value_range: tuple[float | Sequence[float], float | Sequence[float]] = (0.0, 1.0),
) -> dict[str, str]:
    """Write down what clients hold, so that findings about the recording of a Flower app can be scored.

    Args:
        folder: gets a safetensors file for each client.
        load: returns what a client trains on, as it is fed to the model: inputs and labels, or anything that yields
            such pairs, such as a DataLoader.
        clients: what the recording calls them, each of which `load` is called with.
        value_range: lowest and highest value of an input, as in the attack file; each a number, or one value a feature.

    Returns:
        The `[truth]` table of the attack file: client to the absolute path of its file.

    Raises:
        DataError: what `load` returns is no data of that range.
        RunError: the folder cannot be written.
    """
    table: dict[str, str] = {}
    for client in clients:
        inputs, labels = _examples(load(client), f"client {client}")
        axes = (-1, *[1] * (inputs.ndim - 2))
        low, high = (torch.tensor(end).reshape(axes) for end in value_range)
        data = (inputs.float() - low) / (high - low)
        if not (data.min() >= -_OUTSIDE and data.max() <= 1 + _OUTSIDE):
            raise DataError(
                f"client {client}: its inputs lie in [{inputs.min():.3g}, {inputs.max():.3g}], value_range is "
                f"{list(value_range)}; give the range of what the model is fed with"
            )
        path = Path(folder).resolve() / f"client-{client}.safetensors"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"data": data.clamp(0, 1).contiguous(), "labels": labels.contiguous()}, path)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be written ({error}); choose another folder") from error
        Truth.load(path)
        table[str(client)] = str(path)
    return table


_OUTSIDE = 1e-3
"""By how much of the range an input may be outside of it, by rounding."""


def _examples(held: Any, who: str) -> tuple[Tensor, Tensor]:
    """Inputs and labels of all that `load` returned."""
    try:
        if isinstance(held, tuple | list) and len(held) == 2 and hasattr(held[0], "shape"):
            return torch.as_tensor(held[0]), torch.as_tensor(held[1]).reshape(-1)
        pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in held]
        join = torch.cat if pairs[0][1].ndim else torch.stack  # batches, or single examples
        return join([x for x, _ in pairs]), join([y for _, y in pairs]).reshape(-1)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{who}: what it holds is no inputs and labels ({first_line(error)}); return two arrays, or something that "
            "yields pairs of them"
        ) from error
