"""In which numbers a model and its derivatives are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Precision = Literal["float32", "mixed", "bfloat16"]

_PRODUCTS = frozenset(
    {
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.nn.functional.linear,
        torch.matmul,
        torch.bmm,
        torch.mm,
        torch.addmm,
        torch.baddbmm,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.bmm,
        Tensor.mm,
    }
)
"""What takes the time of a model, and what automatic mixed precision computes in bfloat16."""


@contextmanager
def computing_in(precision: Precision, device: str) -> Iterator[None]:
    """Within it, products of a model are computed in that precision, and so are derivatives of what was computed there.

    - `float32`: everything is.
    - `bfloat16`: convolutions, linear layers and other products of matrices, their values and their derivatives.
    - `mixed`: their derivatives alone.

    Why `mixed`: a value that is off by a thousandth puts a few ReLUs on the wrong side of their kink, which changes
    the gradient far more than rounding does. On SME's network for colour images (N = 50, fresh weights) `bfloat16` has
    the gradient of the weights off by 5 %, and the slope of its cosine with an update off by half; `mixed` by 0.4 % and
    4 %.

    Args:
        device: kind of the device, such as `cuda`.
    """
    with torch.autocast(device, torch.bfloat16, enabled=precision != "float32"):
        if precision != "mixed":
            yield
            return
        with _Float32Values(device):
            yield


class _Float32Values(TorchFunctionMode):
    """Gives products the values that they have in float32, and leaves their derivatives as they are."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _PRODUCTS or found.dtype != torch.bfloat16:
            return found
        with torch.no_grad(), torch.autocast(self._device, enabled=False):
            exact = func(*map(_float32, args), **{name: _float32(value) for name, value in (kwargs or {}).items()})
            error = exact - found.float()
        return found.float() + error


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
