"""An accelerator that is not there, on which everything can be tried.

Tensors on it say that they are on PyTorch's `meta` device, so code that asks for their device treats them as on any
accelerator. Their values are kept beside on the CPU, so that loops go on and results can be compared; `meta` alone
keeps none, and ends at the first number that is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.inversion import shared_setup

ROOT = Path(__file__).parents[2]
ROOMS = tuple(str(ROOT / room) for room in ("adversaries", "clients", "fedsim"))
DEVICE = torch.device("meta")
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
JOINING = {"aten::cat", "aten::stack"}
WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's marks of what needs values to go on: numbers that are read, and shapes that depend on values."""


class Mixed(RuntimeError):
    """Tensors of two devices met in one computation, or a generator met a tensor of another device."""


class OnDevice(Tensor):
    """A tensor on the accelerator; its value is that of `held`, on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"OnDevice({self.held!r})"

    def tolist(self) -> Any:
        """As of any tensor; PyTorch's own does not take subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{call} of a tensor on an accelerator that is no longer there")


class Computing(TorchDispatchMode):
    """Computes with tensors on the accelerator, and refuses what CUDA refuses.

    That is tensors of two devices in one computation, and random numbers on it by a generator of the CPU. As on CUDA, a
    CPU tensor may be one number, unless it is joined to others, or the places of an indexing.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        leaves = list(_leaves((args, given)))
        here = any(type(leaf) is OnDevice for leaf in leaves)
        asked = given.get("device")
        there = here if asked is None else torch.device(asked) == DEVICE
        if not here and not there:
            return call(*args, **given)
        self.accelerator.calls += 1
        self._check(call, args, given, leaves, there)
        if asked is not None:
            given = {**given, "device": "cpu"}
        own = {id(leaf.held): leaf for leaf in leaves if type(leaf) is OnDevice}
        found = call(*_mapped(_held, args), **_mapped(_held, given))
        if call._schema.name == "aten::copy_":
            return args[0]
        if torch.Tag.inplace_view in call.tags:
            _reshape(call, args, given)
            return args[0]
        if not there:
            return found

        def placed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return own[id(leaf)] if id(leaf) in own else OnDevice(leaf)

        return _mapped(placed, found)

    def _check(self, call: Any, args: Any, given: dict[str, Any], leaves: list[Any], there: bool) -> None:
        name = call._schema.name
        if name in ("aten::copy_", "aten::_to_copy"):
            if not (type(args[0]) is OnDevice if name == "aten::copy_" else there):
                self.accelerator.note()
            return
        waits = bool(WAITING.intersection(call.tags))
        if name in INDEXING:
            waits = any(type(i) is OnDevice and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            leaves = list(_leaves((args[0], *args[2:])))
        if waits:
            self.accelerator.note()
        for leaf in leaves:
            if isinstance(leaf, Tensor) and type(leaf) is not OnDevice and (leaf.ndim or name in JOINING):
                raise Mixed(f"{name} mixes a tensor {tuple(leaf.shape)} of the CPU with those of the accelerator")
            if isinstance(leaf, torch.Generator) and leaf.device != DEVICE and there:
                raise Mixed(f"{name} draws on the accelerator by a generator of the {leaf.device}")


class Written(TorchFunctionMode):
    """Numbers that are written down arrive on the accelerator; of what is on `meta` PyTorch itself leaves them out."""

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if call in (torch.tensor, torch.as_tensor) and given.get("device") == DEVICE:
            return call(*args, **{**given, "device": "cpu"}).to(DEVICE)
        if call is Tensor.new_tensor and type(args[0]) is OnDevice:
            written = torch.tensor(*args[1:], **{"dtype": args[0].dtype, **given, "device": "cpu"})
            return written.to(given.get("device", DEVICE))
        if call == Tensor.data.__set__ and type(args[0]) is OnDevice:
            args[0].held = args[1].held
        if call in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[1], list):
            args = (args[0], torch.tensor(args[1]), *args[2:])
        return call(*args, **given)


class Accelerator:
    """One that tensors can be moved to while it is entered.

    Attributes:
        calls: how many computations it did.
        reads: where the CPU waited for its values, `room/module.py:function`.
    """

    device, mixed = DEVICE, Mixed

    def __init__(self) -> None:
        self.calls = 0
        self.reads: set[str] = set()

    def __enter__(self) -> None:
        self._modes = Computing(self), Written()
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def note(self) -> None:
        """The innermost function of ours that is being called waits for the accelerator."""
        frame = sys._getframe(1)
        while not frame.f_code.co_filename.startswith(ROOMS):
            if frame.f_back is None:
                return
            frame = frame.f_back
        function = frame.f_code.co_qualname.split(".<locals>")[0]
        self.reads.add(f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{function}")


def _reshape(call: Any, args: Any, given: dict[str, Any]) -> None:
    """Change the shape that the tensor itself states, as `call` has changed that of its value."""
    before = torch._C._meta_in_tls_dispatch_include()
    with no_dispatch():
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            call(*args, **given)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def _held(leaf: Any) -> Any:
    return leaf.held if type(leaf) is OnDevice else leaf


def _leaves(tree: Any) -> Iterator[Any]:
    """Of nested tuples, lists and dicts; PyTorch's own, which know more containers, take most of a test's time."""
    if isinstance(tree, (tuple, list, dict)):
        for part in _parts(tree):
            yield from _leaves(part)
    else:
        yield tree


def _parts(tree: Any) -> Iterable[Any]:
    return tree.values() if isinstance(tree, dict) else tree


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)([_mapped(change, part) for part in tree])
    if isinstance(tree, dict):
        return {name: _mapped(change, part) for name, part in tree.items()}
    return change(tree)


@pytest.fixture
def accelerator() -> Accelerator:
    """One that is there for a test, in which every model is asked about anew."""
    shared_setup._answers.clear()
    return Accelerator()
