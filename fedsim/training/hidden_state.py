"""Check that what a network computes follows from the tensors that messages hold.

Clients of one process train in the same network, others in copies of it, and attacks in one that is built anew. All of
them load what was sent, so anything else that a network keeps makes them differ, without an error.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from fedsim.base.randomness import seed_globals
from fedsim.training.model_state import copy_state, load_state
from fedsim.training.modes import forward, set_evaluation_modes, set_modes
from fedsim.training.settings import LocalTraining

HIDDEN_STATE = (
    "two copies with the same weights compute different outputs, so it holds something that no message does: an "
    "attribute or a buffer that changes from pass to pass or is drawn at random (buffers of integers, or with "
    "persistent = False, are not sent); keep it in a persistent buffer of real numbers, or draw it with its own seed"
)
"""What is wrong with a model that `has_hidden_state`, the end of a sentence."""


def has_hidden_state(used_model: nn.Module, new_model: nn.Module, settings: LocalTraining, inputs: Tensor) -> bool:
    """Return whether two copies of a network differ in what they compute once the same state is loaded.

    Args:
        used_model: one that has computed outputs of other inputs before; its weights and buffers change.
        new_model: one of another random draw, not used before; likewise.
        settings: of local training, for the modes of layers and what is sent.
        inputs: `example ...` in model units.
    """
    state = copy_state(new_model, statistics=settings.batch_norm_statistics == "shared")
    used, new = (_run_passes(model, state, settings, inputs) for model in (used_model, new_model))
    return not all(torch.allclose(*pair, rtol=1e-4, atol=1e-6, equal_nan=True) for pair in zip(used, new, strict=True))


@torch.no_grad()
def _run_passes(model: nn.Module, state: dict[str, Tensor], settings: LocalTraining, inputs: Tensor) -> list[Tensor]:
    """Return outputs in training and in evaluation, and the state that is sent after them."""
    from torch.utils._pytree import tree_leaves

    load_state(model, state)
    set_modes(model, settings, inputs)
    with seed_globals("hidden state"):
        in_training = forward(model, inputs)
        sent = copy_state(model, statistics=settings.batch_norm_statistics == "shared")
        set_evaluation_modes(model, sent)
        outputs = tree_leaves([in_training, forward(model, inputs)])  # also of tuples and dicts
        return [*(output for output in outputs if isinstance(output, Tensor)), *sent.values()]


def find_written_parameter(model: nn.Module, inputs: Tensor) -> str | None:
    """Return the first parameter that a pass of `model` writes into, as an embedding with `max_norm` does, or None.

    Args:
        model: it is copied.
        inputs: `example ...` in model units.
    """
    model = deepcopy(model)
    parameters = dict(model.named_parameters())
    before = {name: (parameter._version, parameter.detach().clone()) for name, parameter in parameters.items()}
    with torch.no_grad():
        model(inputs)
    for name, parameter in parameters.items():
        version, values = before[name]
        if parameter._version != version or not torch.equal(parameter.nan_to_num(), values.nan_to_num()):
            return name
    return None
