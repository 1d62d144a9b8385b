"""Steps of split learning: embeddings that a feature party sends, and gradients of them that it gets.

In each step the label party names rows; each feature party answers with the embeddings of its
columns of these rows. With the next message, or in one of its own, it gets the gradient of the loss
with respect to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.base.errors import TranscriptError
from fedsim.recording.payloads import State
from fedsim.recording.wire_format import Update

ROWS = "rows"
"""Name of the tensor that holds the ids of rows, in both directions."""
GRADIENT_ROWS = "gradient_rows"
"""Name of the tensor that holds the ids of the rows of a gradient, where that is not of the last answer."""
_FILLER_SIZE = 1e-6
"""Share of the second gradient's norm below which the first one is no gradient, but fills the start of a pipeline."""
BOTTOM = "bottom/"
"""Prefix of the weights of a feature party's model, where the label party sends them."""

_PIPELINE = (
    "as in a pipeline, where a party answers for more rows before the gradient of the last ones returns, so it is "
    f"unknown which answer a gradient is of; have the server name its rows in an integer tensor '{GRADIENT_ROWS}'"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class SplitStep:
    """What passed between the label party and one feature party about the rows of one step.

    Attributes:
        number: round in which the embeddings were sent.
        rows: `row`, ids; positions where the messages name none.
        counted: number of rows where the messages name none, else 0.
        embeddings: `row unit`, float32.
        gradients: `row unit`, of the loss with respect to the embeddings; None where the next
            message is not there.
        bottom: weights that the party got right before, by name; empty where it got none.
    """

    number: int
    rows: Tensor
    counted: int
    embeddings: Tensor
    gradients: Tensor | None
    bottom: State


def read_split_steps(updates: Iterable[Update]) -> list[SplitStep]:
    """Read the steps of one feature party from what it was sent and answered.

    A gradient that is bit for bit what the party was sent before its last answer, too, is no new
    one: a server that sends gradients in messages of their own may send none for a step.

    A gradient is of the last answer, unless `GRADIENT_ROWS` names its rows: in a pipeline, a party answers for the next
    rows before the gradient of the last ones returns. Where such a server does not name them, the first gradient comes
    late or is next to nothing, and then nobody knows whose it is. It names them with each gradient, or with none.

    Args:
        updates: of one party, in ascending order of rounds; `before` is what it was sent.

    Raises:
        TranscriptError: an answer holds no embeddings, its rows are others than those that were
            asked for, or not named though numbers of rows differ, or a gradient has another shape
            than the embeddings before it, or nobody knows which answer it is of.
    """
    steps, last_gradient, names_gradients = list[SplitStep](), None, False
    for update in updates:
        where = update.name
        # A gradient that came with this request belongs to an earlier answer.
        gradient = _find_matrix(update.before, f"{where}: what it was sent")
        is_old = gradient is not None and last_gradient is not None and torch.equal(gradient, last_gradient)
        if gradient is not None and not is_old and steps:
            are_named = GRADIENT_ROWS in update.before
            if are_named != names_gradients and any(step.gradients is not None for step in steps):
                raise TranscriptError(
                    f"{where}: {GRADIENT_ROWS} are named with some of the gradients that it was sent and not with "
                    "others, so it is unknown which answer those are of; have the server name them with each"
                )
            names_gradients = are_named
            index = _find_answer(steps, gradient, update, where)
            if index is not None:
                steps[index] = _add_gradient(steps[index], gradient, where)
        last_gradient = gradient
        # The answer itself begins a step.
        embeddings = _find_matrix(update.after, f"{where}: its answer")
        if embeddings is None:
            raise TranscriptError(
                f"{where}: its answer holds no matrix of floats, row by unit, and so no embeddings; choose a recording "
                "of split learning, or name the record with [app] record"
            )
        rows = _read_rows(update, len(embeddings), where)
        step = SplitStep(
            number=update.round,
            rows=torch.arange(len(embeddings)) if rows is None else rows,
            counted=len(embeddings) if rows is None else 0,
            embeddings=embeddings,
            gradients=None,
            bottom=select_bottom(update.before),
        )
        if steps and steps[0].counted != step.counted:
            raise TranscriptError(
                f"{where}: messages do not name the rows of {len(embeddings)} embeddings, and those of round "
                f"{steps[0].number} are {len(steps[0].embeddings)}, so it is unknown which rows they are of; have the "
                f"app send ids in an integer tensor '{ROWS}'"
            )
        steps.append(step)
    if steps and not names_gradients:
        _check_first_gradient(steps, f"round {steps[0].number}, client {update.client}")
    return steps


def _check_first_gradient(steps: list[SplitStep], where: str) -> None:
    """Check that the first gradient is not next to nothing, as one that fills the start of a pipeline."""
    norms = [float(step.gradients.norm()) for step in steps if step.gradients is not None]
    if len(norms) > 1 and norms[0] < _FILLER_SIZE * norms[1]:
        raise TranscriptError(
            f"{where}: the first gradient that it was sent is {norms[0]:.1e} large, and the next one {norms[1]:.1e}, "
            f"{_PIPELINE}"
        )


def select_bottom(state: State) -> dict[str, Tensor]:
    """Return the weights of a feature party's model among what it was sent, by name; empty where there are none."""
    return {name.removeprefix(BOTTOM): tensor for name, tensor in state.items() if name.startswith(BOTTOM)}


def _find_answer(steps: list[SplitStep], gradient: Tensor, update: Update, where: str) -> int | None:
    """Return the index of the answer that a gradient is of; None where the round of that answer is not recorded."""
    rows = update.before.get(GRADIENT_ROWS)
    if rows is not None:
        is_open = [step.gradients is None and torch.equal(step.rows, rows) for step in steps]
        if not any(is_open):
            raise TranscriptError(
                f"{where}: it was sent a gradient whose {GRADIENT_ROWS} are of no answer that still lacks one; have "
                "the server name them as it asked for them"
            )
        return is_open.index(True)
    is_first = all(step.gradients is None for step in steps)
    if is_first and (len(steps) > 1 or not gradient.any()) and update.round == steps[-1].number + 1:
        late = f"comes after {len(steps)} answers" if gradient.any() else "is zero"
        raise TranscriptError(f"{where}: the first gradient that it was sent {late}, {_PIPELINE}")
    return len(steps) - 1 if update.round == steps[-1].number + 1 else None


def _add_gradient(step: SplitStep, gradient: Tensor, where: str) -> SplitStep:
    if gradient.shape != step.embeddings.shape:
        raise TranscriptError(
            f"{where}: the gradient that it was sent is of shape {tuple(gradient.shape)}, and its embeddings in round "
            f"{step.number} were {tuple(step.embeddings.shape)}; this is no split learning that is understood"
        )
    return replace(step, gradients=gradient)


def _find_matrix(state: State, where: str) -> Tensor | None:
    """Return the only matrix of floats of a message beside weights; a vector is a matrix of one unit."""
    found = []
    for name, tensor in state.items():
        if tensor.is_floating_point() and not name.startswith(BOTTOM):
            found.append((name, tensor))
    if not found:
        return None
    if len(found) > 1 or not 1 <= found[0][1].ndim <= 2:
        listing = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in found[:4])
        raise TranscriptError(f"{where}: holds {listing}, and one matrix, row by unit, is expected")
    tensor = found[0][1].float()
    return tensor if tensor.ndim == 2 else tensor[:, None]


def _read_rows(update: Update, count: int, where: str) -> Tensor | None:
    """Return the ids of the rows that were asked for and answered; None where no message names them."""
    asked, answered = update.before.get(ROWS), update.after.get(ROWS)
    if asked is not None and answered is not None and not torch.equal(asked, answered):
        raise TranscriptError(
            f"{where}: it answered for other rows, or in another order, than it was asked; its embeddings belong to no "
            "known rows"
        )
    rows = answered if answered is not None else asked
    if rows is None:
        return None
    if rows.is_floating_point() or rows.shape != (count,):
        raise TranscriptError(
            f"{where}: names rows of shape {tuple(rows.shape)} and type {rows.dtype}, expected {count} integers, one "
            "for each embedding"
        )
    return rows.long()
