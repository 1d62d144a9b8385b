"""A network into which an attack loads the models that it reads, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property

from torch import nn

from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.batch_norm import copy_with_batch_statistics
from fedsim.inversion.named_states import find_absent_names, missing_part_error
from fedsim.recording.wire_format import State, match_any_names, non_finite_names
from fedsim.training.model_state import load_state, running_statistics


class LoadableNetwork:
    """A network built once from the adversary's knowledge, into which states are loaded in turn.

    It is in evaluation mode and on the attack's device.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        assert knowledge.model is not None
        self._model = deepcopy(knowledge.model()).to(knowledge.device).eval()
        self._initial_state = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}

    @cached_property
    def _batch_statistics_model(self) -> nn.Module:
        return copy_with_batch_statistics(self._model)

    def load(self, state: State, where: str) -> nn.Module:
        """Load `state` and return the network; it is valid until the next call.

        Tensors that `state` lacks have their initial values. BatchNorm layers whose running
        statistics were not shared normalise by the batch.
        """
        named_state, lacks_statistics = match_state(self._model, state, where)
        model = self._batch_statistics_model if lacks_statistics else self._model
        load_state(model, {**self._initial_state, **named_state})
        return model


def match_state(model: nn.Module, state: State, where: str) -> tuple[State, bool]:
    """Name the tensors of `state` as `model` does.

    Returns:
        The named state, and whether it lacks BatchNorm's running statistics.
    """
    if broken := non_finite_names(state):
        raise AttackError(
            f"{where}: {broken[0]} of the model holds NaN or infinite values, so it is uninformative; choose another "
            "source or victim"
        )

    # Try the sets of tensors that a federation may share: all, without integers, without running
    # statistics, or parameters alone.
    model_state, statistics = model.state_dict(), running_statistics(model)
    floating = [name for name, tensor in model_state.items() if tensor.is_floating_point()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    name_lists: Sequence[Sequence[str]] = (
        list(model_state),
        floating,
        [name for name in floating if name not in statistics],
        parameters,
    )
    shape_maps = []
    for names in name_lists:
        shape_maps.append({name: model_state[name].shape for name in names})
    named_state = match_any_names(state, shape_maps)
    if named_state is None and (absent := find_absent_names(state, model)):
        raise missing_part_error(absent, where)
    if named_state is None and len(state) < len(parameters):
        raise AttackError(
            f"{where}: holds {len(state)} of the {len(parameters)} tensors that clients train, as where a part of the "
            "model stays with each client; this attack needs all of it, so attack an algorithm whose clients send that"
        )
    if named_state is None:
        raise AttackError(
            f"{where}: {len(state)} tensors are not the weights of the model, which has {len(parameters)}; attack with "
            "the model of that federation"
        )

    missing = {name for name in floating if name not in named_state}
    if missing_buffers := sorted(missing - statistics):
        raise AttackError(
            f"{where}: the model computes with {missing_buffers[0]}, which clients of this federation do not share; "
            "this attack needs a model without such buffers, or one that shares them"
        )
    return named_state, bool(missing)
