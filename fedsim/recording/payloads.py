"""Payload that a client sends in a round: the kind and the form of each tensor.

The kind is weights, gradient or delta w_T - w_t. The form is dense, sparse (indices and values) or
quantised (integers and scales). On the wire a payload is one record of arrays whose names tell
both: dense weights have the name of their tensor, all others a prefix and a slash before it, such
as `gradient/NAME`, `delta/NAME`, `delta-indices/NAME` with `delta-values/NAME`, or
`delta-integers/NAME` with `delta-scales/NAME`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedsim.base.errors import PayloadError

State = Mapping[str, Tensor]
"""Parameter name to tensor, in the model's own order."""
Kind = Literal["weights", "gradient", "delta"]
"""Meaning of the numbers of a tensor: w_T, the gradient at w_t, or w_T - w_t."""

WORKING_TYPE = torch.float32
"""Type in which attacks and scores compute, whatever type a federation sends."""
_INDEX_TYPES = (torch.int32, torch.int64)
_INTEGER_TYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Dense:
    """Tensor that is sent with all its values.

    Attributes:
        values: the values, of any shape.
    """

    values: Tensor

    @property
    def parts(self) -> State:
        """Return the arrays that are sent, by part."""
        return {"": self.values}

    def to_dense(self, shape: torch.Size) -> Tensor:
        """Return the values themselves."""
        return self.values

    def describe_misfit(self, shape: torch.Size) -> str | None:
        """Return why this is no tensor of real numbers of `shape`, or None."""
        if self.values.shape != shape:
            return f"with shape {tuple(self.values.shape)}, expected {tuple(shape)}"
        return _describe_wrong_type(self.values)


@dataclass(frozen=True, eq=False)
class Sparse:
    """Tensor that is sent with some of its values; the others are zero.

    Attributes:
        indices: `value`, indices into the flattened tensor, each once; int32 or int64.
        values: `value`, the values at these indices.
    """

    indices: Tensor
    values: Tensor

    @property
    def parts(self) -> State:
        """Return the arrays that are sent, by part."""
        return {"indices": self.indices, "values": self.values}

    def to_dense(self, shape: torch.Size) -> Tensor:
        """Return a dense tensor of `shape` with the values at their indices.

        >>> Sparse(torch.tensor([1]), torch.tensor([5.0])).to_dense(torch.Size([3]))
        tensor([0., 5., 0.])
        """
        flat = self.values.new_zeros(math.prod(shape))
        flat[self.indices.long()] = self.values
        return flat.reshape(shape)

    def describe_misfit(self, shape: torch.Size) -> str | None:
        """Return why this is no tensor of real numbers of `shape`, or None."""
        indices, size = self.indices, math.prod(shape)
        if indices.dtype not in _INDEX_TYPES:
            return f"with indices of {_type_name(indices)}, expected int32 or int64"
        if indices.ndim != 1 or self.values.shape != indices.shape:
            return (
                f"with indices of shape {tuple(indices.shape)} and values of shape {tuple(self.values.shape)}, "
                "expected two lists of one length"
            )
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
            return f"with indices from {int(indices.min())} to {int(indices.max())}, expected 0 to {size - 1}"
        ordered = indices.sort().values
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(repeated):
            return f"with index {int(repeated[0])} more than once, expected each once"
        return _describe_wrong_type(self.values)


@dataclass(frozen=True, eq=False)
class Quantised:
    """Tensor that is sent as integers times a scale.

    Attributes:
        integers: integers of the tensor's shape.
        scales: one number, or one for each index of the first dimension, in units of the tensor.
    """

    integers: Tensor
    scales: Tensor

    @property
    def parts(self) -> State:
        """Return the arrays that are sent, by part."""
        return {"integers": self.integers, "scales": self.scales}

    def to_dense(self, shape: torch.Size) -> Tensor:
        """Return the integers times their scales, in the type of the scales."""
        scales = self.scales.reshape(-1, *[1] * (len(shape) - 1)) if self.scales.ndim else self.scales
        return self.integers.to(scales.dtype) * scales

    def describe_misfit(self, shape: torch.Size) -> str | None:
        """Return why this is no tensor of real numbers of `shape`, or None."""
        if self.integers.dtype not in _INTEGER_TYPES:
            expected_types = ", ".join(map(_dtype_name, _INTEGER_TYPES))
            return f"with integers of {_type_name(self.integers)}, expected one of {expected_types}"
        if self.integers.shape != shape:
            return f"with integers of shape {tuple(self.integers.shape)}, expected {tuple(shape)}"
        if self.scales.shape not in ((), shape[:1]):
            alternative = f" or {tuple(shape[:1])}" if shape else ""
            return f"with scales of shape {tuple(self.scales.shape)}, expected (){alternative}"
        return _describe_wrong_type(self.scales)


Form = Dense | Sparse | Quantised
_FORM_OF_PARTS: dict[frozenset[str], type[Form]] = {
    frozenset({""}): Dense,
    frozenset({"indices", "values"}): Sparse,
    frozenset({"integers", "scales"}): Quantised,
}
_PREFIXES: dict[str, tuple[Kind, str]] = {
    f"{kind}-{part}" if part else kind: (kind, part)
    for kind in get_args(Kind)
    for parts in _FORM_OF_PARTS
    for part in sorted(parts)
    if part or kind != "weights"
}
"""Prefix of an array's name on the wire to its kind and part; dense weights have no prefix."""
_PREFIX_OF = {kind_and_part: prefix for prefix, kind_and_part in _PREFIXES.items()}


@dataclass(frozen=True, eq=False)
class Payload:
    """Arrays that one client sent: the kind and the form of each tensor.

    Attributes:
        tensors: name to kind and form.
    """

    tensors: Mapping[str, tuple[Kind, Form]]

    @classmethod
    def from_dense(cls, state: State, kind: Kind = "delta") -> Payload:
        """Return a payload with all values of `state`."""
        return cls({name: (kind, Dense(tensor)) for name, tensor in state.items()})

    @classmethod
    def from_sparse(cls, delta: State) -> Payload:
        """Return a payload with the values of a delta that are not zero, and their indices."""
        tensors: dict[str, tuple[Kind, Form]] = {}
        for name, tensor in delta.items():
            flat = tensor.reshape(-1)
            indices = flat.nonzero().squeeze(1)
            values = flat[indices]
            if flat.numel() <= torch.iinfo(torch.int32).max:
                indices = indices.int()
            tensors[name] = ("delta", Sparse(indices, values))
        return cls(tensors)

    @classmethod
    def from_integers(cls, integers: State, scales: State) -> Payload:
        """Return a payload of a delta, `integers` times `scales`; see `Quantised` for their shapes.

        Raises:
            PayloadError: their names differ, or one is no tensor.
        """
        for name, value in [*integers.items(), *scales.items()]:
            if not isinstance(value, Tensor):
                raise PayloadError(
                    f"'{name}' has integers or scales that are no tensor but a {type(value).__name__}; make one of "
                    "them, as by torch.tensor"
                )
        if unmatched := sorted(set(integers) ^ set(scales)):
            raise PayloadError(f"'{unmatched[0]}' has only one of integers and scales; give both for each tensor")
        return cls({name: ("delta", Quantised(tensor, scales[name])) for name, tensor in integers.items()})

    @classmethod
    def from_arrays(cls, arrays: State, before: State) -> Payload:
        """Return the payload of a reply; the inverse of `arrays`.

        Every payload that is returned can be decoded; `describe_misfit` checks more.

        Args:
            arrays: arrays by their names on the wire.
            before: w_t.

        Raises:
            PayloadError: the arrays are no payload for these tensors; the text begins with "it
                sent".
        """
        if all(key in before for key in arrays):
            return cls.from_dense(arrays, "weights")  # nearly always
        parts_of: dict[str, dict[str, Tensor]] = {}
        kinds: dict[str, Kind] = {}
        for key, tensor in arrays.items():
            (kind, part), name = _parse_key(key, before)
            if kinds.setdefault(name, kind) != kind:
                raise PayloadError(f"it sent '{name}' as {kinds[name]} and as {kind}, expected one of them")
            parts_of.setdefault(name, {})[part] = tensor
        payload = cls({name: (kinds[name], _build_form(name, parts)) for name, parts in parts_of.items()})
        encoded = {name: (kind, form) for name, (kind, form) in payload.tensors.items() if not _is_plain(kind, form)}
        if misfit := cls(encoded).describe_misfit(before):
            raise PayloadError(misfit)
        return payload

    def __or__(self, other: Payload) -> Payload:
        """Return the tensors of both; for a name that both have, that of `other`."""
        return Payload({**self.tensors, **other.tensors})

    def to_working_type(self, before: State) -> Payload:
        """Return the payload with all real numbers in `WORKING_TYPE`.

        Float64 weights w_T become deltas w_T - w_t before they are rounded: if both were rounded,
        few digits of their difference would be left.

        Args:
            before: w_t, as it was sent.
        """
        tensors: dict[str, tuple[Kind, Form]] = {}
        for name, (kind, form) in self.tensors.items():
            sent = before.get(name)
            if isinstance(form, Sparse):
                form = Sparse(form.indices, _cast_floats(form.values))
            elif isinstance(form, Quantised):
                form = Quantised(form.integers, _cast_floats(form.scales))
            elif kind != "weights" or form.values.dtype != torch.float64 or sent is None:
                form = Dense(_cast_floats(form.values))
            elif sent.is_floating_point() and sent.shape == form.values.shape:
                kind, form = "delta", Dense(_cast_floats(form.values - sent))
            else:
                form = Dense(_cast_floats(form.values))
            tensors[name] = (kind, form)
        return Payload(tensors)

    @property
    def kind(self) -> Kind:
        """Return the kind of the payload as a whole.

        Weights (BatchNorm's statistics) may come with a gradient or a delta, which then is the
        kind.
        """
        kinds = {kind for kind, _ in self.tensors.values()}
        if "gradient" in kinds:
            return "gradient"
        return "delta" if "delta" in kinds else "weights"

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays that are sent, without names and what a transport adds."""
        return sum(array.numel() * array.element_size() for array in self.arrays().values())

    def arrays(self) -> State:
        """Return the arrays that are sent, under their names on the wire."""
        arrays: dict[str, Tensor] = {}
        for name, (kind, form) in self.tensors.items():
            if kind == "weights" and isinstance(form, Dense):
                arrays[name] = form.values  # nearly always
                continue
            for part, tensor in form.parts.items():
                prefix = _PREFIX_OF.get((kind, part))
                arrays[name if prefix is None else f"{prefix}/{name}"] = tensor
        return arrays

    def values(self, kind: Kind, before: State) -> State:
        """Return the tensors of one kind in dense form, with exactly the values that were sent.

        Args:
            kind: the kind.
            before: w_t, which has their shapes.
        """
        values: dict[str, Tensor] = {}
        for name, (sent_kind, form) in self.tensors.items():
            if sent_kind == kind:
                values[name] = form.values if isinstance(form, Dense) else form.to_dense(before[name].shape)
        return values

    def weights_after(self, before: State) -> State:
        """Return w_T of all tensors that were sent as weights or as a delta."""
        weights, deltas = self.values("weights", before), self.values("delta", before)
        after: dict[str, Tensor] = {}
        for name, (kind, _) in self.tensors.items():
            if kind == "weights":
                after[name] = weights[name]
            elif kind == "delta":
                after[name] = (before[name] + deltas[name]).to(before[name].dtype)
        return after

    def decode(self, before: State) -> State:
        """Return the arrays that a strategy aggregates: weights `NAME`, gradients `gradient/NAME`.

        Dense tensors keep their type; all others get the types of `before`.
        """
        after, gradients = self.weights_after(before), self.values("gradient", before)
        decoded: dict[str, Tensor] = {}
        for name, (kind, form) in self.tensors.items():
            key, tensor = (f"{kind}/{name}", gradients[name]) if kind == "gradient" else (name, after[name])
            decoded[key] = tensor if isinstance(form, Dense) else tensor.to(before[name].dtype)
        return decoded

    def remarks(self, before: State) -> list[str]:
        """Return sentences on tensors whose shape or type differs from w_t, but can be recorded.

        Tensors that were never broadcast get no remark, because clients may send more than the
        model.
        """
        remarks = []
        for name, (_, form) in self.tensors.items():
            if name not in before or not isinstance(form, Dense):
                continue
            sent, got = before[name], form.values
            if got.dtype == sent.dtype and got.shape == sent.shape:
                continue  # nearly always
            if got.dtype == sent.dtype == torch.uint8 and got.ndim == sent.ndim == 1:
                continue  # bytes, as of trees, are as long as what they hold
            if got.shape != sent.shape:
                remarks.append(f"'{name}' came with shape {tuple(got.shape)}, and was sent with {tuple(sent.shape)}")
            elif got.is_floating_point() != sent.is_floating_point():
                # Flower's strategies average integers, such as BatchNorm's counter, into real numbers.
                remarks.append(f"'{name}' came as {_type_name(got)}, and was sent as {_type_name(sent)}")
        return remarks

    def find_codes(self, before: State) -> str | None:
        """Return the first tensor of integers where real numbers were sent, such as quantised ones; or None.

        A single number may be a counter, which strategies average into a real number.

        >>> before = {"weight": torch.ones(2), "num_batches_tracked": torch.tensor(1.0)}
        >>> Payload.from_dense({"num_batches_tracked": torch.tensor(1)}).find_codes(before)
        >>> Payload.from_dense({"weight": torch.ones(2, dtype=torch.int8)}).find_codes(before)
        'weight'
        """
        for name, (_, form) in self.tensors.items():
            is_real = name in before and before[name].is_floating_point()
            if is_real and isinstance(form, Dense) and form.values.ndim and not form.values.is_floating_point():
                return name
        return None

    def describe_misfit(self, before: State) -> str | None:
        """Return why this is no answer to w_t, beginning with "it sent", or None.

        Dense tensors that were never broadcast, or not as real numbers, may be anything.
        """
        for name, (kind, form) in self.tensors.items():
            is_real = name in before and before[name].is_floating_point()
            if not is_real and not _is_plain(kind, form):
                return f"it sent '{name}' as {kind}, but it was not broadcast as real numbers; send its value"
            if is_real and (misfit := form.describe_misfit(before[name].shape)):
                return f"it sent '{name}' {misfit}"
        return None


def to_working_type(state: State) -> State:
    """Return `state` with its real numbers in `WORKING_TYPE`; `state` itself where all are."""
    if all(tensor.dtype == WORKING_TYPE for tensor in state.values()):
        return state
    return {name: _cast_floats(tensor) for name, tensor in state.items()}


def _cast_floats(tensor: Tensor) -> Tensor:
    return tensor.to(WORKING_TYPE) if tensor.is_floating_point() else tensor


def is_encoded(names: Iterable[str], before: Container[str]) -> bool:
    """Return whether one of these arrays has to be decoded before a strategy can read it.

    Args:
        names: names of the arrays on the wire.
        before: the names of w_t.

    >>> is_encoded(["gradient/weight"], ["weight"]), is_encoded(["delta/weight"], ["weight"])
    (False, True)
    """
    for name in names:
        kind_and_part, _ = _parse_key(name, before)
        if kind_and_part not in (("weights", ""), ("gradient", "")):
            return True
    return False


def _parse_key(key: str, before: Container[str]) -> tuple[tuple[Kind, str], str]:
    """Return kind and part of the array called `key`, and the name of its tensor.

    A name that was broadcast is that of dense weights, whatever its prefix.
    """
    prefix, _, name = key.partition("/")
    if key in before or not name or prefix not in _PREFIXES:
        return ("weights", ""), key
    return _PREFIXES[prefix], name


def _is_plain(kind: Kind, form: Form) -> bool:
    """Return whether a strategy can read it without decoding."""
    return isinstance(form, Dense) and kind != "delta"


def _build_form(name: str, parts: State) -> Form:
    if (form := _FORM_OF_PARTS.get(frozenset(parts))) is None:
        present = " and ".join(part or "dense values" for part in sorted(parts))
        raise PayloadError(
            f"it sent '{name}' as {present}, expected dense values, indices and values, or integers and scales"
        )
    return form(*(parts[part] for part in sorted(parts)))


def _describe_wrong_type(tensor: Tensor) -> str | None:
    return None if tensor.is_floating_point() else f"as {_type_name(tensor)}, expected floating-point numbers"


def _type_name(tensor: Tensor) -> str:
    return _dtype_name(tensor.dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
