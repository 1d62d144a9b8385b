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


def _precision() -> str:
    """As torch calls it; a program may have set it by names of which torch knows no mixture."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


def _set_precision(precision: str) -> None:
    try:
        torch.set_float32_matmul_precision(precision)
    except RuntimeError:
        torch.backends.cuda.matmul.fp32_precision = precision


def _folder() -> str:
    """The working folder; empty where somebody removed it."""
    try:
        return os.getcwd()  # noqa: PTH109 - texts, as os.chdir takes them
    except OSError:
        return ""


_DEFAULTS = {
    "torch's default dtype": _Default(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": _Default(torch.get_default_device, _set_device),
    "whether torch records gradients": _Default(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": _Default(torch.get_num_threads, torch.set_num_threads),
    "torch's precision of float32 products": _Default(_precision, _set_precision),
    "whether torch is deterministic": _Default(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "what NumPy does on errors": _Default(np.geterr, lambda errors: np.seterr(**errors)),
    "the working folder": _Default(_folder, os.chdir),
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
            with contextlib.suppress(OSError):  # a folder that is gone; the others are put back
                _DEFAULTS[what].write(before[what])
    if changed:
        what = changed[0]
        raise PluginError(
            f"{who} changed {what} from {before[what]} to {after[what]}, which all code of the process shares; have it "
            "put back what it changes"
        )
