"""Settings that all code of a process shares, and that plug-ins must therefore not change."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from fedsim.base.errors import PluginError


class _Default(NamedTuple):
    """Setting of the process, with functions that read and restore it."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # "cpu" would intercept every call of torch


def _get_precision() -> str:
    """Return torch's precision, also where a program set it in two ways, which torch refuses."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return str(torch.backends.cuda.matmul.fp32_precision)


def _set_precision(precision: str) -> None:
    try:
        torch.set_float32_matmul_precision(precision)
    except RuntimeError:
        torch.backends.cuda.matmul.fp32_precision = precision


def _get_working_folder() -> str:
    """Return the working folder, or an empty text if it has been removed."""
    try:
        return os.getcwd()  # noqa: PTH109 - os.chdir takes a text
    except OSError:
        return ""


_DEFAULTS = {
    "torch's default dtype": _Default(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": _Default(torch.get_default_device, _set_device),
    "whether torch records gradients": _Default(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's number of threads": _Default(torch.get_num_threads, torch.set_num_threads),
    "torch's precision of float32 products": _Default(_get_precision, _set_precision),
    "whether torch is deterministic": _Default(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "what NumPy does on errors": _Default(np.geterr, lambda errors: np.seterr(**errors)),
    "the working folder": _Default(_get_working_folder, os.chdir),
}


@contextlib.contextmanager
def protect_defaults(who: str) -> Iterator[None]:
    """Restore process-wide settings after the block, and raise PluginError if it changed one."""
    before = {name: default.read() for name, default in _DEFAULTS.items()}
    try:
        yield
    finally:
        after = {name: default.read() for name, default in _DEFAULTS.items()}
        changed = [name for name in _DEFAULTS if after[name] != before[name]]
        for name in changed:
            with contextlib.suppress(OSError):  # a working folder that was removed
                _DEFAULTS[name].write(before[name])
    if changed:
        name = changed[0]
        raise PluginError(
            f"{who} changed {name} from {before[name]} to {after[name]}, which all code of the process shares; "
            "make it restore what it changes"
        )
