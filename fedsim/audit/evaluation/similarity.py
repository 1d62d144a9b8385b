"""L_sim: how well claimed examples explain the update that they were read from (SME, Eq. 1).

The evaluator computes it from the claimed examples and labels only, by one rule for all attacks and
all guesses. An attack's own objective is a curve of the report and no score.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.audit.evaluation.line_search import LineFunction, LinePoint, minimise_coarsely, minimise_on_line
from fedsim.audit.evaluation.local_optimum import match_state
from fedsim.audit.evaluation.model_shortcuts import ModelShortcuts, find_shortcuts, flatten_gradient, measure_gradients
from fedsim.base.errors import DataError, describe_error
from fedsim.base.loss_term import select_examples
from fedsim.base.randomness import use_one_thread
from fedsim.interfaces.metric import Metric
from fedsim.recording.wire_format import State, Update, match_names
from fedsim.training.model_state import load_integer_buffers, load_state
from fedsim.training.modes import (
    forward,
    freeze_parameters,
    normalise_by_instance,
    set_evaluation_modes,
    set_modes,
)
from fedsim.training.settings import LocalTraining

log = logging.getLogger(__name__)

SIMILARITY_AT_BROADCAST, SIMILARITY_ON_LINE = "l_sim", "l_sim_line"
"""Names of the metrics: at w_t, and at the best point of the line from w_t to w_T."""
_LEAST_NORM = 1e-16
"""Least product of the norms of a gradient and an update; a gradient of zero explains nothing."""
_ROUNDING = 1e-4
"""Most by which a similarity of a batch may differ from the same one computed alone."""
_CPU = torch.device("cpu")


class SimilarityAtBroadcast(Metric):
    """One minus the cosine between the update and the gradient of the claims at w_t."""

    title = "L_sim"
    higher_is_better = False
    evidence = "none"
    meaning = "fit of the claims to the message, not leakage"
    explanations = (
        "L_sim is one minus the cosine between the update and the gradient of the claims at w_t; “best on the line” is "
        "its smallest value on the line from w_t to w_T. Near 0, the claims explain the message, whether or not they "
        "resemble the victim's examples.",
    )

    @property
    def best_value(self) -> float | None:
        """Return 0; values lie in [0, 2], but the ends cut no interval, as no verdict follows."""
        return 0.0


class SimilarityOnLine(SimilarityAtBroadcast):
    """One minus that cosine at the best point of the line from w_t to w_T."""

    title = "L_sim, best on the line"


@dataclass(frozen=True, kw_only=True)
class AttackedUpdate:
    """Recorded update, and what is needed to compute gradients of claimed examples.

    Attributes:
        value_range: lowest and highest possible value of an input in model units, one value a
            channel.
        settings: how the client trained, which says how BatchNorm layers normalise; None where it
            is not known, and then they normalise by their running statistics.
        device: on which gradients are computed; the model is moved there.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    update: Update
    value_range: tuple[Tensor, Tensor]
    settings: LocalTraining | None = None
    device: torch.device = _CPU
    _shortcuts: dict[torch.Size, ModelShortcuts] = field(init=False, default_factory=dict, repr=False, compare=False)
    _batch_checks: dict[str, str] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.model.to(self.device)

    def similarities(self, data: Tensor, labels: Tensor) -> Mapping[str, float]:
        """Compute one minus the cosine between the update and the gradient of the loss of `data`.

        `l_sim` takes the gradient at w_t, as DLG and IG do, `l_sim_line` at the surrogate model on
        the line between w_t and w_T where it is smallest, as SME does. For a client that sent a
        gradient there is no line.

        Args:
            data: `example ...` in [0, 1].
            labels: `example`, class indices or targets.

        Returns:
            Values in [0, 2], by metric.
        """
        at_broadcast = self.similarity_at_broadcast(data, labels)
        values = {SIMILARITY_AT_BROADCAST: at_broadcast}
        if self.update.gradient is None:
            values[SIMILARITY_ON_LINE] = self.similarity_on_line(data, labels, at_broadcast)
        return values

    def similarity_at_broadcast(self, data: Tensor, labels: Tensor) -> float:
        """Compute `l_sim` alone, by one gradient; see `similarities`."""
        with use_one_thread(), torch.enable_grad():
            return self._distance(1.0, self.to_model_units(data), labels.to(self.device))

    def similarities_at_broadcast(self, data_sets: Sequence[Tensor], labels: Tensor) -> list[float] | None:
        """Compute `l_sim` of several sets of examples at once; None where that is to be done one by one."""
        with use_one_thread(), torch.enable_grad():
            input_sets = [self.to_model_units(data) for data in data_sets]
            return self._distances_of_batch([1.0], input_sets, labels.to(self.device))

    def similarity_on_line(self, data: Tensor, labels: Tensor, at_broadcast: float) -> float:
        """Compute `l_sim_line`; see `similarities`."""
        with use_one_thread(), torch.enable_grad():
            return minimise_on_line(self._line_function(data, labels), at_broadcast)

    def search_line(self, data: Tensor, labels: Tensor, at_broadcast: float, rival: LinePoint | None) -> LinePoint:
        """Find a point where `l_sim_line` is near its least value, by a third of the gradients or fewer.

        Args:
            at_broadcast: their similarity at w_t.
            rival: such a point for other data, see `minimise_coarsely`; None for none.
        """
        with use_one_thread(), torch.enable_grad():
            return minimise_coarsely(self._line_function(data, labels), at_broadcast, rival)

    def _line_function(self, data: Tensor, labels: Tensor) -> LineFunction:
        """Return the similarity as a function of alpha."""
        inputs, labels = self.to_model_units(data), labels.to(self.device)

        def measure(alphas: Sequence[float]) -> Sequence[float]:
            distances = self._distances_of_batch(alphas, [inputs], labels)
            return distances or [self._distance(alpha, inputs, labels) for alpha in alphas]

        return measure

    def to_model_units(self, data: Tensor) -> Tensor:
        """Return values in [0, 1] in the range of the model's inputs."""
        shape = (-1, *[1] * (data.ndim - 2))
        low, high = (end.reshape(shape).to(self.device) for end in self.value_range)
        return low + (high - low) * data.to(self.device)

    def _distance(self, alpha: float, inputs: Tensor, labels: Tensor) -> float:
        """Compute one minus the cosine at alpha w_t + (1 - alpha) w_T."""
        self._place_model(alpha)
        shortcuts = self._prepare_model(inputs)
        with freeze_parameters(self.model, self.settings) if self.settings else nullcontext():
            trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            loss = self.loss(self._outputs(inputs, shortcuts), labels)
            gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        # In double precision, tensor by tensor, so that no copy of the whole gradient is made.
        products = []
        for name, gradient in zip(trained, gradients, strict=True):
            values = flatten_gradient(gradient).double()
            update, square_of_update = self._flat_pseudo_gradient[name]
            products.append(torch.stack([values @ update, values @ values, square_of_update]))
        return _cosine_distance(*torch.stack(products).sum(0).tolist())

    def _distances_of_batch(
        self, alphas: Sequence[float], input_sets: Sequence[Tensor], labels: Tensor
    ) -> list[float] | None:
        """Compute `_distance` at several positions, or of several inputs, in one call that is read once.

        A CPU gains nothing by it. The first batch of each kind, of positions and of inputs, is held against one
        of its points that is computed alone.

        Args:
            alphas: positions; one alone, which is 1, for all inputs.
            input_sets: in model units; one alone for all positions.

        Returns:
            None where points are to be computed one by one: on a CPU, if the model cannot be batched, or if a
            gradient is not finite.
        """
        if max(len(alphas), len(input_sets)) < 2 or self.device.type == "cpu" or any(self._batch_checks.values()):
            return None
        kind = "positions" if len(alphas) > 1 else "inputs"
        if any(True for _ in self.model.buffers()):  # layers may write to them
            self._refuse_batches(kind, "the model has buffers")
            return None
        first = None if kind in self._batch_checks else self._distance(alphas[0], input_sets[0], labels)
        self._place_model(1.0)
        self._prepare_model(input_sets[0])
        with freeze_parameters(self.model, self.settings) if self.settings else nullcontext():
            names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        state = self._stack_states(alphas) if kind == "positions" else self._broadcast
        directions = {name: self._flat_pseudo_gradient[name][0] for name in names}
        try:
            compared = measure_gradients(
                self.model,
                self.loss,
                state=state,
                are_states_stacked=kind == "positions",
                input_sets=input_sets,
                labels=labels,
                directions=directions,
            )
        except Exception as error:  # a foreign model may raise anything, and memory may end
            self._refuse_batches(kind, describe_error(error))
            return None
        square_of_update = torch.stack([self._flat_pseudo_gradient[name][1] for name in names]).sum()
        *rows, last = torch.cat([compared.flatten(), square_of_update[None]]).tolist()
        try:
            distances = [_cosine_distance(*pair, last) for pair in zip(rows[::2], rows[1::2], strict=True)]
        except DataError:
            return None
        if first is not None and not abs(distances[0] - first) <= _ROUNDING:
            self._refuse_batches(kind, "the model gives other gradients in a batch")
            return None
        self._batch_checks[kind] = ""
        return distances

    def _refuse_batches(self, kind: str, reason: str) -> None:
        """Have all points computed one by one from now on."""
        self._batch_checks[kind] = reason
        log.info("client %s: similarities are computed one by one: %s", self.update.client, reason)

    def _prepare_model(self, inputs: Tensor) -> ModelShortcuts:
        """Set the model's modes, once for inputs of a shape, and return which shortcuts it allows."""
        if inputs.shape not in self._shortcuts:
            if self.settings is None:
                set_evaluation_modes(self.model, self._broadcast)
            else:
                set_modes(self.model, replace(self.settings, dropout=False), inputs)
            self._shortcuts[inputs.shape] = find_shortcuts(self.model, self.settings, inputs)
        return self._shortcuts[inputs.shape]

    def _outputs(self, inputs: Tensor, shortcuts: ModelShortcuts) -> Tensor:
        """Return the model's outputs; those of equal examples are computed once, if that saves time.

        Guesses have many equal examples, such as the mean of a class for each of its labels.
        """
        if shortcuts.computes_equal_examples_once:
            distinct_inputs, numbers = torch.unique(inputs, dim=0, return_inverse=True)
            if len(distinct_inputs) < len(inputs):
                return select_examples(forward(self.model, shortcuts.lay_out(distinct_inputs)), numbers)
        return forward(self.model, shortcuts.lay_out(inputs))

    def _stack_states(self, alphas: Sequence[float]) -> State:
        """Return `point ...`, the surrogate model at each position of the line."""
        shares = torch.tensor(alphas, device=self.device)
        states = {}
        for name, start in self._broadcast.items():
            states[name] = torch.lerp(self._state_after[name], start, shares.reshape(-1, *[1] * start.ndim))
        return states

    @torch.no_grad()
    def _place_model(self, alpha: float) -> None:
        """Set the model to the surrogate model at `alpha` on the line, 1 being w_t."""
        if alpha == 1 or self.update.gradient is not None:
            load_state(self.model, self._broadcast)
            return
        # The names were checked with the broadcast; no copy of a state is made at each point.
        tensors = self.model.state_dict()
        for name, start in self._broadcast.items():
            torch.mul(start, alpha, out=tensors[name]).add_(self._state_after[name], alpha=1 - alpha)

    @cached_property
    def _broadcast(self) -> State:
        """The broadcast w_t; what the model needs besides it is set in the model."""
        load_integer_buffers(self.model, self.update.before)
        broadcast = self._state_of_model(self.update.before)
        if self.settings is None:
            after = self.update.after
            if self.update.gradient is None:
                after = self._state_of_model(after)
            normalise_by_instance(self.model, broadcast, after)
        return broadcast

    @cached_property
    def _state_after(self) -> State:
        """The returned w_T, which every point on the line needs."""
        return self._state_of_model(self.update.after)

    @cached_property
    def _pseudo_gradient(self) -> State:
        """w_t - w_T, or the gradient that was sent, under the names of the model's parameters."""
        if self.update.gradient is None:
            if self.update.states_move:
                pseudo_gradient = self._state_of_model(self.update.pseudo_gradient)
                if pseudo_gradient:
                    return pseudo_gradient
            return {name: start - self._state_after[name] for name, start in self._broadcast.items()}
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        gradient = self._require_fit(match_names(self.update.gradient, shapes))
        return {name: tensor.to(self.device) for name, tensor in gradient.items()}

    def _state_of_model(self, state: State) -> State:
        """Return `state` under the names of the model, in single precision."""
        named_state = self._require_fit(match_state(self.model, state))
        return {name: tensor.to(self.device, torch.float32) for name, tensor in named_state.items()}

    @cached_property
    def _flat_pseudo_gradient(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The pseudo-gradient in double precision, each tensor with one axis, and its square."""
        tensors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, tensor in self._pseudo_gradient.items():
            values = flatten_gradient(tensor).double()
            tensors[name] = values, values @ values
        return tensors

    def _require_fit(self, state: State | None) -> State:
        if state is None:
            raise DataError("the recorded update is not one of the model that is known")
        return state


def _cosine_distance(product: float, square: float, square_of_update: float) -> float:
    """Return one minus the cosine of a gradient and an update, by their product and their squares."""
    if not square_of_update:
        raise DataError("the update is zero, which nothing explains")
    if not math.isfinite(square):
        raise DataError("the gradient of what is claimed is not finite")
    return 1 - product / max(math.sqrt(square) * math.sqrt(square_of_update), _LEAST_NORM)
