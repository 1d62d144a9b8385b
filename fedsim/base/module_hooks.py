"""Hooks that see what a module is called with, whether by position or by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def order_inputs(
    module: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """Return what a module is called with, in the order of its parameters.

    A network may write `self.head(input=features)`; torch hands a hook the positional arguments alone.

    >>> order_inputs(nn.Bilinear(2, 2, 1), (), {"input2": "second", "input1": "first"})
    ('first', 'second')
    """
    if not keywords:
        return arguments
    try:
        bound = inspect.signature(module.forward).bind(*arguments, **keywords)
    except (TypeError, ValueError):  # a forward without a signature
        return (*arguments, *keywords.values())
    return (*bound.args, *bound.kwargs.values())


def hook_inputs(module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...]], None]) -> RemovableHandle:
    """Let `hook` see, before each call of `module`, all that it is called with."""
    return module.register_forward_pre_hook(partial(_show_inputs, hook), with_kwargs=True)


def hook_outputs(module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], Any], Any]) -> RemovableHandle:
    """Let `hook` see what each call of `module` gets and gives; what it returns, unless None, is given instead."""
    return module.register_forward_hook(partial(_show_outputs, hook), with_kwargs=True)


def _show_inputs(
    hook: Callable[[nn.Module, tuple[Any, ...]], None],
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> None:
    hook(module, order_inputs(module, arguments, keywords))


def _show_outputs(
    hook: Callable[[nn.Module, tuple[Any, ...], Any], Any],
    module: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    output: Any,
) -> Any:
    return hook(module, order_inputs(module, arguments, keywords), output)
