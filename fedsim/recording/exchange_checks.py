"""Checks that a reply which the server of another framework wrote can be one to what it sent."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fedsim.base.errors import ConfigError, PayloadError, join_first
from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import compare_states, float_norm

log = logging.getLogger(__name__)


def check_reply(before: State, sent: State, num_members: int, path: Path) -> None:
    """Check that a reply can be one to what its client was sent; warn where it holds NaN or infinite values.

    Args:
        before: what the server sent.
        num_members: number of clients whose sum it is; 0 for a single client.
    """
    _check_names(before, sent, path)
    _check_types(before, sent, path)
    _check_shapes(before, sent, path)
    _warn_of_broken_values(sent, path)
    _check_mean(before, sent, num_members, path)


_LIKE_WEIGHTS, _LIKE_MOVE = 0.5, 0.2
"""Cosine of a reply and w_t from which on it looks like weights, and up to which like a delta or a gradient."""
_EQUAL = 1e-3
"""Distance of w_t from the mean of the replies, in lengths of their moves, up to which the two are one."""


class ReplyKinds:
    """Notes of what the replies of all rounds look like, of which an attack file says one kind for all."""

    def __init__(self) -> None:
        self._first: dict[str, Path] = {}

    def note(self, before: State, sent: State, path: Path) -> None:
        """Note whether a reply looks like weights or like a move; warn once where there are both."""
        product, square, sent_square = compare_states(before, sent)
        if not square or not sent_square:
            return
        cosine = product / math.sqrt(square * sent_square)
        if cosine > _LIKE_WEIGHTS:
            kind = "weights"
        elif cosine < _LIKE_MOVE and sent_square < 0.25 * square:
            kind = "a delta or a gradient"
        else:
            return
        is_new = kind not in self._first
        self._first.setdefault(kind, path)
        if is_new and len(self._first) > 1:
            first_kind, first_path = next(iter(self._first.items()))
            log.warning(
                "%s: looks like %s, and %s like %s; an attack file says one of them for all ([app] replies), so write "
                "all replies in one way, or import them into a recording each",
                path,
                kind,
                first_path,
                first_kind,
            )


class MeanReply:
    """Means of the replies of a round to one w_t, with and without weights N."""

    def __init__(self) -> None:
        self._sums: list[tuple[float, dict[str, Tensor]]] = [(0.0, {}), (0.0, {})]
        self._count, self._moved = 0, 0.0

    def add(self, before: State, sent: State, num_examples: int) -> None:
        """Add a reply."""
        moved = {}
        for name, tensor in before.items():
            if tensor.is_floating_point() and name in sent and sent[name].shape == tensor.shape:
                moved[name] = sent[name].double() - tensor.double()
        for position, weight in enumerate((1.0, float(num_examples))):
            total, sums = self._sums[position]
            added = {name: sums.get(name, 0.0) + weight * tensor for name, tensor in moved.items()}
            self._sums[position] = total + weight, added
        self._moved = max(self._moved, float_norm(moved))
        self._count += 1

    def warn_of_aggregate(self, before: State, folder: Path) -> None:
        """Warn where w_t is the mean of what clients answered to it, so that it was written after the aggregation."""
        # Rounding to the type of w_t may hide no more than this.
        rounding = sum(1e-6 * float(t.double().norm()) for t in before.values() if t.is_floating_point())
        if self._count < 2 or self._moved * _EQUAL < rounding:
            return
        for total, sums in self._sums:
            if total and float_norm(sums) / total < _EQUAL * self._moved:
                log.warning(
                    "%s: the broadcast is the mean of what clients answered to it, as where it is written after the "
                    "server aggregated; write it when it is sent, or attacks read each move from the wrong model",
                    folder,
                )
                return


def _check_names(before: State, sent: State, path: Path) -> None:
    """Raise ConfigError for names that would be read as those of a gradient or a delta in a recording of fedsim's."""
    for name, tensor in sent.items():
        try:
            is_plain = name in before or Payload.from_arrays({name: tensor}, before).kind == "weights"
        except PayloadError:
            is_plain = False
        if not is_plain:
            raise ConfigError(
                f"{path}: '{name}' is called as a message of fedsim's own would be; call each array as the server "
                "called it, and say what replies are with [app] replies"
            )


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
                "client, so that it is not a reply to it; write the tensors of the same model, or give what is packed "
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
    product, square, _ = compare_states(before, sent)
    if count > 1 and square and abs(product / square - count) < 0.1 * count:
        raise ConfigError(
            f"{path}: is about {count} times what the server sent, the sum of the models of its {count} members; write "
            "their mean, weighted by N"
        )
