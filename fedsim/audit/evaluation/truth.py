"""The victims' true data, which only the evaluator knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from fedsim.base import text_metrics
from fedsim.base.errors import DataError, RunError, first_line, number_of
from fedsim.base.randomness import generator
from fedsim.base.task import infer_modality
from fedsim.federation.config import PUBLIC_KEY


def draw_known_rows(count: int, total: int, seed: int, victim: int) -> Tensor:
    """Draw which of a victim's `total` rows an adversary knows in full; returns `count` positions."""
    return torch.randperm(total, generator=generator(seed, "known rows", victim))[:count]


@dataclass(frozen=True, kw_only=True)
class Truth:
    """True data of a victim.

    Attributes:
        data: `example ...`, numbers in [0, 1] whose axes are those of the modality, or tokens of
            texts, which are integers.
        labels: `example`, class indices, or targets of a regression; of several labels or numbers `example target`; of
            masks `example height width`, class indices.
        padding: the token that fills short texts up; None where there is none.
        columns: number of features of each column of a table, see `fedsim.base.table_metrics`; empty
            where it is not known.
        deviations: `feature`, standard deviations of a table's numbers in public rows.
        modality: name of the kind of examples; inferred where it is left out.
        holders: `example`, the client that holds each; None if all are one client's, or it
            is not needed.
        rows: `example`, id of each row in the messages of split learning; None if they are not given, and
            then rows are counted from 0.
        answers: of federated analytics, by `answers/ROUND/QUESTION` what the client would have answered without any
            defense, and by `people/ROUND/QUESTION` what the one who joined or left before that round added; then
            there are no examples.
    """

    data: Tensor
    labels: Tensor
    padding: int | None = None
    columns: Sequence[int] = ()
    deviations: Tensor | None = None
    modality: str = ""
    holders: Tensor | None = None
    rows: Tensor | None = None
    answers: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.modality and not self.answers:
            inferred = infer_modality(self.data.shape[1:], has_tokens=self.has_tokens)
            object.__setattr__(self, "modality", inferred)

    @property
    def has_tokens(self) -> bool:
        """Return whether the data are tokens, as those of texts."""
        return not self.data.is_floating_point()

    def without_empty_texts(self) -> Truth:
        """Return the truth without texts that have no token but padding, which are not scored."""
        if not self.has_tokens:
            return self
        has_token = ~text_metrics.are_empty(self.data, self.padding)
        return replace(self, data=self.data[has_token], labels=self.labels[has_token])

    @classmethod
    def load(cls, path: Path) -> Truth:
        """Read a safetensors file with `data` and `labels`.

        For texts it has `tokens` and `labels`, and may have `padding`.

        Raises:
            DataError: it is missing, damaged, or its values leave [0, 1].
        """
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise DataError(f"truth: {path} is not a file; name a safetensors file with 'data' and 'labels'")
        try:
            tensors = load_file(path)
            if "tokens" in tensors:
                return cls._from_tokens(path, tensors)
            if any(name.startswith(f"{ANSWERS}/") for name in tensors):
                return cls(data=torch.zeros(0, 1), labels=torch.zeros(0), answers=tensors)
            data, labels = tensors["data"].float(), tensors["labels"]
            labels = labels.float() if labels.is_floating_point() else labels.long()
        except (OSError, SafetensorError, KeyError) as error:
            raise DataError(f"truth: {path} is not a safetensors file with 'data' and 'labels' ({error})") from error
        if labels.is_floating_point() and not labels.isfinite().all():
            raise DataError(f"truth: {path}: a label is NaN or infinite; correct it, or leave its example out")
        if not labels.is_floating_point() and bool((labels < 0).any()):
            raise DataError(
                f"truth: {path}: a label is {int(labels.min())}, and classes are counted from 0; number them so, or "
                "leave such examples out"
            )
        modality = _read_modality(path) or infer_modality(data.shape[1:])
        has_targets = labels.ndim == 2 and labels.is_floating_point() and len(labels) == len(data)
        has_masks = data.ndim == 4 and not labels.is_floating_point() and labels.shape == (len(data), *data.shape[2:])
        has_labels = labels.shape == data.shape[:1] or has_targets or has_masks
        if not modality or not len(data) or not has_labels:
            raise DataError(
                f"truth: {path}: expected data of shape (example, channel, height, width), (example, feature) or "
                "(example, channel, time), or of a modality given to write_truth, and an integer, a real number, a "
                "row of real numbers (of several labels 0.0 or 1.0) or a mask (height, width) as a label for each, "
                f"got {tuple(data.shape)} and {tuple(labels.shape)}"
            )
        if not (data.min() >= 0 and data.max() <= 1):
            raise DataError(f"truth: {path}: data lies in [{data.min():.3g}, {data.max():.3g}], expected [0, 1]")
        rows = tensors.get("rows")
        if rows is not None and (
            rows.dtype != torch.int64 or rows.shape != (len(data),) or len(torch.unique(rows)) < len(rows)
        ):
            raise DataError(f"truth: {path}: expected rows to be {len(data)} different int64 ids, one for each example")
        return cls(data=data, labels=labels, modality=modality, rows=rows)

    @classmethod
    def _from_tokens(cls, path: Path, tensors: Mapping[str, Tensor]) -> Truth:
        tokens, labels = tensors["tokens"], tensors["labels"]
        are_integers = not (tokens.is_floating_point() or labels.is_floating_point())
        if (
            not are_integers
            or tokens.ndim != 2
            or not len(tokens)
            or labels.shape != tokens.shape[:1]
            or (tokens < 0).any()
        ):
            raise DataError(
                f"truth: {path}: expected tokens of shape (example, place), integers of at least 0, and a label for "
                f"each, got {tuple(tokens.shape)} and {tuple(labels.shape)}"
            )
        padding = int(tensors["padding"]) if "padding" in tensors else None
        return cls(data=tokens.long(), labels=labels.long(), padding=padding, modality=_read_modality(path))


def write_truth(
    folder: Path | str,
    load: Callable[[int], Any],
    clients: Iterable[int],
    *,
    value_range: tuple[float | Sequence[float], float | Sequence[float]] = (0.0, 1.0),
    modality: str = "",
    public: Any = None,
    rows: Callable[[int], Any] | None = None,
) -> dict[str, str]:
    """Write the data of clients to files, to score findings about the recording of a Flower app.

    Args:
        folder: gets a safetensors file for each client.
        load: returns the training data of a client as they are fed to the model: inputs and labels,
            or an iterable of such pairs, such as a DataLoader.
        clients: their ids in the recording; `load` is called with each.
        value_range: lowest and highest value of an input, as in the attack file; each a number, or
            one value a feature.
        modality: name of the kind of examples; by default it follows from the number of axes.
        public: examples that no client has, of which guesses are made and, where an adversary is
            granted them, auxiliary records; in one of the forms that `load` returns.
        rows: returns the ids of a client's examples in the messages of split learning, in their order.

    Returns:
        The `[truth]` table of the attack file: client to the absolute path of its file.

    Raises:
        DataError: `load` returns something else than data of that range.
        RunError: the folder cannot be written.
    """
    table: dict[str, str] = {}
    by_key = ((str(client), load(client)) for client in clients)
    for client, loaded in chain(by_key, [] if public is None else [(PUBLIC_KEY, public)]):
        inputs, labels = _join_examples(loaded, f"client {client}")
        if not inputs.isfinite().all():
            raise DataError(f"client {client}: an input is NaN or infinite; correct it, or leave its example out")
        axes = (-1, *[1] * (inputs.ndim - 2))
        low, high = (torch.tensor(end).reshape(axes) for end in value_range)
        data = (inputs.float() - low) / (high - low)
        if not (data.min() >= -_RANGE_TOLERANCE and data.max() <= 1 + _RANGE_TOLERANCE):
            raise DataError(
                f"client {client}: its inputs lie in [{inputs.min():.3g}, {inputs.max():.3g}], value_range is "
                f"{list(value_range)}; give the range of what the model is fed with"
            )
        tensors = {"data": data.clamp(0, 1).contiguous(), "labels": labels.contiguous()}
        if rows is not None and client != PUBLIC_KEY:
            tensors["rows"] = _read_row_ids(rows(int(client)), f"client {client}")
        path = _save_tensors(folder, client, tensors, {"modality": modality} if modality else None)
        Truth.load(path)
        table[client] = str(path)
    return table


def _read_row_ids(ids: Any, client: str) -> Tensor:
    """Return the ids of rows as int64.

    Raises:
        DataError: they are no integers, which alone messages can name.
    """
    try:
        tensor = torch.as_tensor(ids)
        are_integers = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        if tensor.dtype == torch.uint64:  # of which large ones would become negative
            are_integers = bool((tensor.long() >= 0).all())
    except (TypeError, ValueError, RuntimeError, OverflowError):  # as of texts
        are_integers = False
    if not are_integers:
        raise DataError(f"{client}: ids of rows are not integers of 64 bits; return the numbers that messages name")
    return tensor.long().clone()


def _save_tensors(
    folder: Path | str, client: str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> Path:
    """Write the file of one client; return its absolute path."""
    path = Path(folder).resolve() / f"client-{client}.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error}); choose another folder") from error
    return path


ANSWERS, PEOPLE = "answers", "people"
"""Begin the names of true answers, see `Truth.answers`."""


def write_answers(
    folder: Path | str,
    answers: Mapping[int, Mapping[int, Mapping[str, Any]]],
    people: Mapping[int, Mapping[int, Mapping[str, Any]]] | None = None,
) -> dict[str, str]:
    """Write true answers of clients to files, to score findings about a recording of federated analytics.

    Args:
        folder: gets a safetensors file for each client.
        answers: by client and round, what the client would have answered to each question without
            any defense.
        people: by client and round, what the one person who joined or left before that round adds to each answer.

    Returns:
        The `[truth]` table of the attack file: client to the absolute path of its file.

    Raises:
        DataError: an answer is no number or array of finite numbers, or a client of `people` has no answers.
        RunError: the folder cannot be written.
    """
    table: dict[str, str] = {}
    for client in people or {}:
        if client not in answers:
            raise DataError(f"client {client}: people joined or left, but it has no answers; give these, too")
    for client in answers:
        tensors: dict[str, Tensor] = {}
        for part, of_clients in ((ANSWERS, answers), (PEOPLE, people or {})):
            for number, by_name in of_clients.get(client, {}).items():
                for name, value in by_name.items():
                    tensors[f"{part}/{number}/{name}"] = _to_finite(value, f"client {client}, round {number}: '{name}'")
        table[str(client)] = str(_save_tensors(folder, str(client), tensors))
    return table


def _to_finite(value: Any, where: str) -> Tensor:
    """Return an answer in float64."""
    try:
        tensor = torch.as_tensor(value).to(torch.float64).contiguous().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where} is not a number or array of numbers ({first_line(error)}); give what it is"
        ) from error
    if not tensor.isfinite().all():
        raise DataError(f"{where} is NaN or infinite; leave it out")
    return tensor


def _read_modality(path: Path) -> str:
    """Return the modality that the metadata of a truth file name; empty where they name none."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
    return metadata.get("modality", "")


_RANGE_TOLERANCE = 1e-3
"""Share of the value range by which an input may lie outside of it, by rounding."""


def _join_examples(loaded: Any, client: str) -> tuple[Tensor, Tensor]:
    """Join what `load` returned to one tensor of inputs and one of labels."""
    if isinstance(loaded, tuple) and loaded and all(isinstance(part, DataLoader) for part in loaded):
        raise DataError(
            f"{client}: its data are {number_of(len(loaded), 'DataLoader')}; return the one that it trains on, such as "
            "the first one, `load_data(...)[0]`"
        )
    try:
        if isinstance(loaded, tuple | list) and len(loaded) == 2 and hasattr(loaded[0], "shape"):
            return torch.as_tensor(loaded[0]), _shape_labels(torch.as_tensor(loaded[1]))
        pairs = [_read_pair(pair, client) for pair in loaded]
        join = torch.cat if pairs[0][1].ndim else torch.stack  # batches, or single examples
        return join([inputs for inputs, _ in pairs]), _shape_labels(join([labels for _, labels in pairs]))
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{client}: its data are not inputs and labels ({first_line(error)}); return two arrays, or something "
            "that yields pairs of them"
        ) from error


def _read_pair(pair: Any, client: str) -> tuple[Tensor, Tensor]:
    """Return inputs and labels of a batch or of one example."""
    if isinstance(pair, Mapping):  # a batch of Hugging Face's data sets
        names = ", ".join(f"'{name}'" for name in pair)
        raise DataError(
            f"{client}: its batches are dicts of {names}; yield pairs instead, such as "
            "((batch['img'], batch['label']) for batch in loader)"
        )
    inputs, labels = pair
    return torch.as_tensor(inputs), torch.as_tensor(labels)


def _shape_labels(labels: Tensor) -> Tensor:
    """Return labels as they are where each is a row of real numbers or a mask, and else one after the other."""
    are_rows = labels.ndim == 2 and labels.is_floating_point() and labels.shape[1] > 1
    are_masks = labels.ndim == 3 and not labels.is_floating_point() and labels.shape[1:].numel() > 1
    return labels if are_rows or are_masks else labels.reshape(-1)
