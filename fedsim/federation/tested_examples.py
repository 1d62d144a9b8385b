"""Which examples an app trains and tests on, by what passes through its PyTorch networks.

An app says nothing of its data. But each example that a network is given is seen here, and the backward pass tells
which were trained on. Examples that are transformed anew each time, and networks that get their inputs by keyword,
are not recognised, so that what is found holds, and that nothing is found says nothing.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from flwr.app import MessageType
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fedsim.base.module_hooks import order_inputs
from fedsim.federation.overlap import are_many_equal

_MOST_BYTES = 2 * 10**9
"""Most bytes of inputs that are hashed in a run, which take some seconds."""
_ROW_BYTES = 2000
"""Bytes whose hash takes as long as all else that is done for an example, and which its hash takes less memory than."""


class ExampleWatch:
    """Hashes of the examples that were trained on, and of those that were tested on.

    Tested on is what passes a network while a client evaluates, or the server does anything, and is trained on by
    nobody in that pass.
    """

    def __init__(self) -> None:
        self._trained, self._tested = set[bytes](), set[bytes]()
        self._is_test = True  # the server tests, if it passes anything at all
        self._depth = 0
        self._last_output = 0
        self._ndim = 0  # of batches
        self._bytes_left = _MOST_BYTES

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Look at all inputs of networks in this process."""
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
            warnings.catch_warnings(),  # torch.compile warns of these hooks, of which the app knows nothing
        ):
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
            yield

    @contextmanager
    def answer(self, kind: str) -> Iterator[None]:
        """Say that a client answers a message of this kind."""
        self._is_test, self._depth = kind.split(".")[0] == MessageType.EVALUATE, 0
        try:
            yield
        finally:
            self._is_test, self._depth = True, 0

    def count(self) -> tuple[int, int]:
        """Return how many examples are tested on, and how many of these are trained on; 0 where these are few."""
        equal = len(self._tested & self._trained)
        return len(self._tested), equal if are_many_equal(equal, len(self._tested), self._ndim) else 0

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        del module, inputs
        self._depth += 1

    def _leave(self, module: nn.Module, arguments: tuple[Any, ...], *rest: Any) -> None:
        *keywords, output = rest  # torch leaves keywords out where the network failed
        self._depth = max(0, self._depth - 1)
        if self._depth:  # a part of a network
            return
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if next(module.parameters(), None) is None:  # a loss, whose inputs are no examples
            return
        with suppress(Exception):  # anybody's network: nothing here may change what the app does
            self._note(order_inputs(module, arguments, *keywords), output)

    def _note(self, inputs: tuple[Any, ...], output: Any) -> None:
        """Note the examples of one pass, and that they are trained on if a gradient comes back."""
        batch = inputs[0] if inputs else None
        if not isinstance(batch, Tensor) or not batch.ndim or self._bytes_left < 0:
            return
        if batch.requires_grad or batch.data_ptr() == self._last_output:  # features, passed on to a head
            return
        parts: Any = output.values() if isinstance(output, dict) else output
        outputs = [part for part in ([parts] if isinstance(parts, Tensor) else parts) if isinstance(part, Tensor)]
        if not outputs:  # it failed
            return
        self._last_output = outputs[0].data_ptr()
        rows = batch.detach().cpu().contiguous()
        self._bytes_left -= rows.numel() * rows.element_size() + _ROW_BYTES * len(rows)
        hashes = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows.numpy()]
        ends = [part for part in outputs if part.grad_fn is not None]  # a parameter would keep its hook
        self._ndim = max(self._ndim, batch.ndim)
        new = set(hashes) - self._tested if self._is_test else set()
        self._tested |= new
        if ends:
            ends[0].register_hook(partial(self._note_trained, hashes, new))

    def _note_trained(self, hashes: list[bytes], new: set[bytes], gradient: Tensor) -> None:
        """Note that a gradient came back, so that the examples were not only tested on in this pass."""
        del gradient
        self._trained.update(hashes)
        self._tested -= new
