"""What all code in a process shares, and what code of others must therefore leave as it was."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from fedsim.errors import PluginError


class _Default(NamedTuple):
    """A setting of the process: how it is read, and how it is set again."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # "cpu" would intercept every call of torch


_DEFAULTS = {
    "torch's default dtype": _Default(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": _Default(torch.get_default_device, _set_device),
    "whether torch records gradients": _Default(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": _Default(torch.get_num_threads, torch.set_num_threads),
    "torch's precision of float32 products": _Default(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "whether torch is deterministic": _Default(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "what NumPy does on errors": _Default(np.geterr, lambda errors: np.seterr(**errors)),
    "the working folder": _Default(os.getcwd, os.chdir),
}


@contextlib.contextmanager
def unchanged_defaults(who: str) -> Iterator[None]:
    """Restore on leaving what is changed of these within, and say so: it would change what others compute.

    Args:
        who: whose code runs, for the error.

    Raises:
        PluginError: something was changed, and nothing was raised.
    """
    before = {what: default.read() for what, default in _DEFAULTS.items()}
    try:
        yield
    finally:
        after = {what: default.read() for what, default in _DEFAULTS.items()}
        changed = [what for what in _DEFAULTS if after[what] != before[what]]
        for what in changed:
            _DEFAULTS[what].write(before[what])
    if changed:
        what = changed[0]
        raise PluginError(
            f"{who} changed {what} from {before[what]} to {after[what]}, which all code of the process shares; have it "
            "put back what it changes"
        )
