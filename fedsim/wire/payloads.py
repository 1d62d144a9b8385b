"""What one client sends in a round, in the form in which it sends it.

Each tensor is sent as weights, as a gradient or as a delta w_T - w_t, and each of these dense, sparse (indices and
values) or quantised (integers and scales). On the wire a payload is one record of arrays, whose names say which: dense
weights have the name of their tensor, all others a word and a slash before it, such as `gradient/NAME`, `delta/NAME`,
`delta-indices/NAME` with `delta-values/NAME`, or `delta-integers/NAME` with `delta-scales/NAME`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedsim.errors import PayloadError

State = Mapping[str, Tensor]
"""Parameter name to tensor, in the model's own order."""
Kind = Literal["weights", "gradient", "delta"]
"""What the numbers of a tensor are: w_T, the gradient at w_t, or w_T - w_t."""

WORKING_TYPE = torch.float32
"""What attacks and scores compute in, whatever type a federation sends; see `in_working_type`."""
_INDICES = (torch.int32, torch.int64)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Dense:
    """All values of a tensor.

    Attributes:
        values: of any shape.
    """

    values: Tensor

    @property
    def parts(self) -> State:
        """The arrays that are sent, by part."""
        return {"": self.values}

    def dense(self, shape: torch.Size) -> Tensor:
        """The values themselves."""
        return self.values

    def misfit(self, shape: torch.Size) -> str | None:
        """What keeps this from being a tensor of real numbers of `shape`, or None."""
        if self.values.shape != shape:
            return f"with shape {tuple(self.values.shape)}, expected {tuple(shape)}"
        return _not_floating(self.values)


@dataclass(frozen=True, eq=False)
class Sparse:
    """Some values of a tensor; the others are zero.

    Attributes:
        indices: `value`, places in the flattened tensor, each once; int32 or int64.
        values: `value`, what is there.
    """

    indices: Tensor
    values: Tensor

    @property
    def parts(self) -> State:
        """The arrays that are sent, by part."""
        return {"indices": self.indices, "values": self.values}

    def dense(self, shape: torch.Size) -> Tensor:
        """A tensor of `shape` with the values at their places."""
        flat = self.values.new_zeros(math.prod(shape))
        flat[self.indices.long()] = self.values
        return flat.reshape(shape)

    def misfit(self, shape: torch.Size) -> str | None:
        """What keeps this from being a tensor of real numbers of `shape`, or None."""
        indices, size = self.indices, math.prod(shape)
        if indices.dtype not in _INDICES:
            return f"with indices of {_type(indices)}, expected int32 or int64"
        if indices.ndim != 1 or self.values.shape != indices.shape:
            return (
                f"with indices of shape {tuple(indices.shape)} and values of shape {tuple(self.values.shape)}, "
                "expected two lists of one length"
            )
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
            return f"with indices from {int(indices.min())} to {int(indices.max())}, expected 0 to {size - 1}"
        ordered = indices.sort().values
        if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
            return f"with index {int(twice[0])} more than once, expected each once"
        return _not_floating(self.values)


@dataclass(frozen=True, eq=False)
class Quantised:
    """A tensor as integers times a scale.

    Attributes:
        integers: of the tensor's shape.
        scales: one number, or one for each index of the tensor's first dimension, in units of the tensor.
    """

    integers: Tensor
    scales: Tensor

    @property
    def parts(self) -> State:
        """The arrays that are sent, by part."""
        return {"integers": self.integers, "scales": self.scales}

    def dense(self, shape: torch.Size) -> Tensor:
        """The integers times their scales, in the type of the scales."""
        scales = self.scales.reshape(-1, *[1] * (len(shape) - 1)) if self.scales.ndim else self.scales
        return self.integers.to(scales.dtype) * scales

    def misfit(self, shape: torch.Size) -> str | None:
        """What keeps this from being a tensor of real numbers of `shape`, or None."""
        if self.integers.dtype not in _INTEGERS:
            return f"with integers of {_type(self.integers)}, expected one of {', '.join(map(_name, _INTEGERS))}"
        if self.integers.shape != shape:
            return f"with integers of shape {tuple(self.integers.shape)}, expected {tuple(shape)}"
        if self.scales.shape not in ((), shape[:1]):
            told = f" or {tuple(shape[:1])}" if shape else ""
            return f"with scales of shape {tuple(self.scales.shape)}, expected (){told}"
        return _not_floating(self.scales)


Form = Dense | Sparse | Quantised
_FORMS: dict[frozenset[str], type[Form]] = {
    frozenset({""}): Dense,
    frozenset({"indices", "values"}): Sparse,
    frozenset({"integers", "scales"}): Quantised,
}
_HEADS: dict[str, tuple[Kind, str]] = {
    f"{kind}-{part}" if part else kind: (kind, part)
    for kind in get_args(Kind)
    for parts in _FORMS
    for part in sorted(parts)
    if part or kind != "weights"
}
"""The words before the slash, and what they say of an array; dense weights have none."""
_HEAD_OF = {said: head for head, said in _HEADS.items()}


@dataclass(frozen=True, eq=False)
class Payload:
    """What one client sent: the kind and the form of each tensor.

    Attributes:
        tensors: name to kind and form.
    """

    tensors: Mapping[str, tuple[Kind, Form]]

    @classmethod
    def dense(cls, state: State, kind: Kind = "delta") -> Payload:
        """All values of `state`."""
        return cls({name: (kind, Dense(tensor)) for name, tensor in state.items()})

    @classmethod
    def sparse(cls, state: State, kind: Kind = "delta") -> Payload:
        """The values of `state` that are not zero, with their places."""
        tensors: dict[str, tuple[Kind, Form]] = {}
        for name, tensor in state.items():
            flat = tensor.reshape(-1)
            places = flat.nonzero().squeeze(1)
            short = places.int() if flat.numel() <= torch.iinfo(torch.int32).max else places
            tensors[name] = (kind, Sparse(short, flat[places]))
        return cls(tensors)

    @classmethod
    def quantised(cls, integers: State, scales: State, kind: Kind = "delta") -> Payload:
        """`integers` times `scales`, which has the same names; see `Quantised` for the shapes.

        Raises:
            PayloadError: their names differ.
        """
        if other := sorted(set(integers) ^ set(scales)):
            raise PayloadError(f"'{other[0]}' has only one of integers and scales; give both for each tensor")
        return cls({name: (kind, Quantised(tensor, scales[name])) for name, tensor in integers.items()})

    @classmethod
    def from_arrays(cls, arrays: State, before: State) -> Payload:
        """The payload of a reply: the inverse of `arrays`. All in it can be decoded; `misfit` asks more of it.

        Args:
            before: w_t.

        Raises:
            PayloadError: the arrays are no payload for these tensors; the text begins with "it sent".
        """
        found: dict[str, dict[str, Tensor]] = {}
        kinds: dict[str, Kind] = {}
        for key, tensor in arrays.items():
            (kind, part), name = _read(key, before)
            if kinds.setdefault(name, kind) != kind:
                raise PayloadError(f"it sent '{name}' as {kinds[name]} and as {kind}, expected one of them")
            found.setdefault(name, {})[part] = tensor
        payload = cls({name: (kinds[name], _form(name, parts)) for name, parts in found.items()})
        encoded = {name: sent for name, sent in payload.tensors.items() if not _is_plain(*sent)}
        if wrong := cls(encoded).misfit(before):
            raise PayloadError(wrong)
        return payload

    def __or__(self, other: Payload) -> Payload:
        """The tensors of both; of a name that both have, that of `other`."""
        return Payload({**self.tensors, **other.tensors})

    def in_working_type(self, before: State) -> Payload:
        """Return what was sent with all real numbers in `WORKING_TYPE`.

        Of float64 weights w_T the difference to w_t is taken first: both rounded by themselves would leave few of its
        digits. It is a delta then.

        Args:
            before: w_t, as it was sent.
        """
        tensors: dict[str, tuple[Kind, Form]] = {}
        for name, (kind, form) in self.tensors.items():
            sent = before.get(name)
            if isinstance(form, Sparse):
                form = Sparse(form.indices, _in_working_type(form.values))
            elif isinstance(form, Quantised):
                form = Quantised(form.integers, _in_working_type(form.scales))
            elif kind != "weights" or form.values.dtype != torch.float64 or sent is None:
                form = Dense(_in_working_type(form.values))
            elif sent.is_floating_point() and sent.shape == form.values.shape:
                kind, form = "delta", Dense(_in_working_type(form.values - sent))
            else:
                form = Dense(_in_working_type(form.values))
            tensors[name] = (kind, form)
        return Payload(tensors)

    @property
    def kind(self) -> Kind:
        """What it is as a whole: weights (BatchNorm's statistics) may come with a gradient or a delta."""
        kinds = {kind for kind, _ in self.tensors.values()}
        return "gradient" if "gradient" in kinds else "delta" if "delta" in kinds else "weights"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays that are sent; names and what a transport adds are not counted."""
        return sum(array.numel() * array.element_size() for array in self.arrays().values())

    def arrays(self) -> State:
        """The arrays that are sent, under their names on the wire."""
        return {
            f"{_HEAD_OF[kind, part]}/{name}" if (kind, part) in _HEAD_OF else name: tensor
            for name, (kind, form) in self.tensors.items()
            for part, tensor in form.parts.items()
        }

    def values(self, kind: Kind, before: State) -> State:
        """The tensors of one kind, dense, to the bit as they were sent.

        Args:
            before: w_t, which has their shapes.
        """
        return {
            name: form.values if isinstance(form, Dense) else form.dense(before[name].shape)
            for name, (sent_as, form) in self.tensors.items()
            if sent_as == kind
        }

    def after(self, before: State) -> State:
        """w_T of all tensors that were sent as weights or as a delta."""
        weights, deltas = self.values("weights", before), self.values("delta", before)
        return {
            name: weights[name] if kind == "weights" else (before[name] + deltas[name]).to(before[name].dtype)
            for name, (kind, _) in self.tensors.items()
            if kind != "gradient"
        }

    def decoded(self, before: State) -> State:
        """What a strategy aggregates: weights by their names, gradients as dense arrays `gradient/NAME`.

        What is plain is left as it is, all else has the types of `before`.
        """
        after, slopes = self.after(before), self.values("gradient", before)
        decoded: dict[str, Tensor] = {}
        for name, (kind, form) in self.tensors.items():
            key, tensor = (f"{kind}/{name}", slopes[name]) if kind == "gradient" else (name, after[name])
            decoded[key] = tensor if isinstance(form, Dense) else tensor.to(before[name].dtype)
        return decoded

    def remarks(self, before: State) -> list[str]:
        """Say what is odd about the tensors of an answer to w_t, though each can be recorded as it was sent.

        Tensors that were never broadcast are not odd: clients may send more than the model.
        """
        remarks = []
        for name, (_, form) in self.tensors.items():
            if name not in before or not isinstance(form, Dense):
                continue
            sent, got = before[name], form.values
            if got.shape != sent.shape:
                remarks.append(f"'{name}' came with shape {tuple(got.shape)}, and was sent with {tuple(sent.shape)}")
            elif got.is_floating_point() != sent.is_floating_point():
                # Flower's strategies average integers, such as BatchNorm's counter, into real numbers.
                remarks.append(f"'{name}' came as {_type(got)}, and was sent as {_type(sent)}")
        return remarks

    def misfit(self, before: State) -> str | None:
        """What keeps this from being an answer to w_t: "it sent" and why, or None.

        Dense tensors that were never broadcast, or not as real numbers, may be anything.
        """
        for name, (kind, form) in self.tensors.items():
            real = name in before and before[name].is_floating_point()
            if not real and not _is_plain(kind, form):
                return f"it sent '{name}' as {kind}, but it was not broadcast as real numbers; send its value"
            if real and (wrong := form.misfit(before[name].shape)):
                return f"it sent '{name}' {wrong}"
        return None


def in_working_type(state: State) -> State:
    """Return `state` with its real numbers in `WORKING_TYPE`; `state` itself where they are."""
    if all(tensor.dtype == WORKING_TYPE for tensor in state.values()):
        return state
    return {name: _in_working_type(tensor) for name, tensor in state.items()}


def _in_working_type(tensor: Tensor) -> Tensor:
    return tensor.to(WORKING_TYPE) if tensor.is_floating_point() else tensor


def is_encoded(names: Iterable[str], before: Container[str]) -> bool:
    """Whether some of these arrays have names that no strategy knows, and so have to be decoded.

    Args:
        before: the names of w_t.
    """
    return any(_read(name, before)[0] not in (("weights", ""), ("gradient", "")) for name in names)


def _read(key: str, before: Container[str]) -> tuple[tuple[Kind, str], str]:
    """What the array called `key` is, and of which tensor; a name that was broadcast is that of plain weights."""
    head, _, name = key.partition("/")
    if key in before or not name or head not in _HEADS:
        return ("weights", ""), key
    return _HEADS[head], name


def _is_plain(kind: Kind, form: Form) -> bool:
    """Whether strategies read it as it is."""
    return isinstance(form, Dense) and kind != "delta"


def _form(name: str, parts: State) -> Form:
    if (form := _FORMS.get(frozenset(parts))) is None:
        told = " and ".join(part or "dense values" for part in sorted(parts))
        raise PayloadError(
            f"it sent '{name}' as {told}, expected dense values, indices and values, or integers and scales"
        )
    return form(*(parts[part] for part in sorted(parts)))


def _not_floating(tensor: Tensor) -> str | None:
    return None if tensor.is_floating_point() else f"as {_type(tensor)}, expected floating-point numbers"


def _type(tensor: Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
