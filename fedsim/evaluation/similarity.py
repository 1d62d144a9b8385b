"""L_sim: how well what an attack claims explains the message that it was read from (SME, Eq. 1).

It is the evaluator's, computed from the claimed examples and labels alone by one rule for all attacks and all guesses.
What an attack says of its own objective is a curve of the report and no score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsim.errors import DataError
from fedsim.evaluation.local_optimum import state_for
from fedsim.randomness import one_thread
from fedsim.training.model_state import load_state, load_whole_numbers
from fedsim.training.modes import forward, frozen, normalise_by_instance, set_evaluation_modes, set_modes
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State, Update, by_name

AT_BROADCAST, ON_LINE = "l_sim", "l_sim_line"
"""The metrics: of the gradient at w_t, and the best of any on the line from w_t to w_T."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """A recorded update, and how what is claimed is turned into one.

    Attributes:
        model: lends its architecture.
        loss: what the client minimises, `(outputs, labels) -> mean loss`.
        update: what the server saw.
        value_range: lowest and highest possible value of an input in model units, one value a channel.
        settings: how the client trained, which says how BatchNorm layers normalise; None where nobody says, then by
            their running statistics.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    update: Update
    value_range: tuple[Tensor, Tensor]
    settings: LocalTraining | None = None

    def similarities(self, data: Tensor, labels: Tensor) -> Mapping[str, float]:
        """One minus the cosine between the update and the gradient of the mean loss of `data`, by metric; in [0, 2].

        `l_sim` takes the gradient at w_t, as DLG and IG do, `l_sim_line` wherever it is closest on the line between
        w_t and w_T, as SME does; of a client that sent a gradient there is no line.

        Args:
            data: `example ...` in [0, 1].
            labels: `example`, class indices or targets.

        Raises:
            DataError: the update is zero or not one of the model, or the gradient is not finite.
            RunError: BatchNorm was to normalise a batch of one example.
        """
        from scipy.optimize import minimize_scalar

        low, high = (end.reshape(-1, *[1] * (data.ndim - 2)) for end in self.value_range)
        inputs = low + (high - low) * data
        with one_thread(), torch.enable_grad():
            found = {AT_BROADCAST: self._apart(1.0, inputs, labels)}
            if self.update.gradient is None:
                best = minimize_scalar(
                    self._apart, bounds=(0, 1), args=(inputs, labels), method="bounded", options={"xatol": 0.01}
                )
                found[ON_LINE] = min(float(best.fun), *found.values())
        return found

    def _apart(self, alpha: float, inputs: Tensor, labels: Tensor) -> float:
        """One minus the cosine at alpha w_t + (1 - alpha) w_T."""
        load_state(self.model, self._state(alpha))
        if self.settings is None:
            set_evaluation_modes(self.model, self._before)
        else:
            set_modes(self.model, replace(self.settings, dropout=False), inputs)
        with frozen(self.model, self.settings) if self.settings else nullcontext():
            trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            loss = self.loss(forward(self.model, inputs), labels)
            slopes = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        gradient = torch.cat([slope.flatten().double() for slope in slopes])
        moved = torch.cat([self._moved[name].flatten().double() for name in trained])
        if not moved.any():
            raise DataError("the update is zero, which nothing explains")
        if not gradient.isfinite().all():
            raise DataError("the gradient of what is claimed is not finite")
        return 1 - torch.nn.functional.cosine_similarity(gradient, moved, dim=0).item()

    def _state(self, alpha: float) -> State:
        """Of the model at that place on the line, 1 being w_t."""
        if self.update.gradient is not None:
            return self._before
        after = self._named(self.update.after)
        return {name: alpha * start + (1 - alpha) * after[name] for name, start in self._before.items()}

    @cached_property
    def _before(self) -> State:
        load_whole_numbers(self.model, self.update.before)
        before = self._named(self.update.before)
        if self.settings is None:
            after = self.update.after if self.update.gradient is not None else self._named(self.update.after)
            normalise_by_instance(self.model, before, after)
        return before

    @cached_property
    def _moved(self) -> State:
        """w_t - w_T, or the gradient that was sent, under the names of the model's parameters."""
        if self.update.gradient is None:
            after = self._named(self.update.after)
            deltas = self._named(self.update.pseudo_gradient) if self.update.sends_delta else {}
            return deltas or {name: start - after[name] for name, start in self._before.items()}
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        return self._checked(by_name(self.update.gradient, shapes))

    def _named(self, state: State) -> State:
        return {name: tensor.float() for name, tensor in self._checked(state_for(self.model, state)).items()}

    def _checked(self, state: State | None) -> State:
        if state is None:
            raise DataError("the recorded update is not one of the model that is known")
        return state
