"""Checks that a reply which the server of another framework wrote can be one to what it sent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fedsim.base.errors import ConfigError, join_first
from fedsim.recording.payloads import Payload, State

log = logging.getLogger(__name__)


def check_reply(before: State, sent: State, num_members: int, path: Path) -> None:
    """Check that a reply can be one to what its client was sent; warn where it holds NaN or infinite values.

    Args:
        before: what the server sent.
        sent: the reply.
        num_members: number of clients whose sum it is; 0 for a single client.
        path: its file.

    Raises:
        ConfigError: it has other types or shapes, or is a sum of models in place of their mean.
    """
    _check_types(before, sent, path)
    _check_shapes(before, sent, path)
    _warn_of_broken_values(sent, path)
    _check_mean(before, sent, num_members, path)


def _check_types(before: State, sent: State, path: Path) -> None:
    """Raise ConfigError for integers in place of real numbers, such as a sum that is not decoded yet."""
    if name := Payload.from_dense(sent).find_codes(before):
        raise ConfigError(
            f"{path}: '{name}' is of {sent[name].dtype}, and real numbers were sent to the client; write what its "
            "numbers stand for"
        )


def _check_shapes(before: State, sent: State, path: Path) -> None:
    """Raise ConfigError for a tensor of another shape than the server sent, which no training gives."""
    for name, tensor in sent.items():
        if name in before and before[name].shape != tensor.shape:
            raise ConfigError(
                f"{path}: '{name}' is {_describe_shape(tensor)}, and {_describe_shape(before[name])} was sent to the "
                "client, so that it is no reply to that; write the tensors of the same model, or give what is packed "
                "another name"
            )


def _describe_shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"


def _warn_of_broken_values(sent: State, path: Path) -> None:
    broken = [name for name, tensor in sent.items() if not tensor.isfinite().all()]
    if broken:
        log.warning("%s: %s NaN or infinite values, which no attack can use", path, _name_holders(broken))


def _name_holders(names: Sequence[str]) -> str:
    """Return `'weight' holds`, or `'weight' and 2 more hold`."""
    return f"'{names[0]}' holds" if len(names) == 1 else f"{join_first([repr(name) for name in names], 1)} hold"


def _check_mean(before: State, sent: State, count: int, path: Path) -> None:
    """Raise ConfigError where weights of a sum over clients were not divided by their number."""
    product, square = 0.0, 0.0
    for name, tensor in before.items():
        if tensor.is_floating_point() and name in sent and sent[name].shape == tensor.shape:
            product += float((tensor.double() * sent[name].double()).sum())
            square += float(tensor.double().square().sum())
    if count > 1 and square and abs(product / square - count) < 0.1 * count:
        raise ConfigError(
            f"{path}: is about {count} times what the server sent, the sum of the models of its {count} members; write "
            "their mean, weighted by N"
        )
