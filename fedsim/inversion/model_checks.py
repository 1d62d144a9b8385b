"""Check that a model computes the same in evaluation mode as while clients train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.shared_setup import AnswerT, ask_once
from fedsim.training.example_independence import find_training_only_layer
from fedsim.training.hidden_state import find_written_parameter


def check_evaluation_mode(model: nn.Module, knowledge: Knowledge, where: str) -> None:
    """Raise AttackError if a layer computes differently in training mode, or writes into a parameter.

    Attacks run the model in evaluation mode, clients train it in training mode. A pass that writes into w_t has no
    gradient at w_t.
    """
    if layer := ask_of_passes("layer of training alone", model, knowledge, find_training_only_layer):
        raise AttackError(
            f"{where}: {layer} computes otherwise while a client trains than in evaluation, so "
            "that no gradient could be matched; use parametrizations in place of the old "
            "spectral_norm and weight_norm, and no 'self.training'"
        )
    if name := ask_of_passes("parameter that passes write into", model, knowledge, find_written_parameter):
        raise AttackError(
            f"{where}: each pass of the model writes into its parameter '{name}', as an embedding with max_norm does, "
            "so that no gradient could be matched; let only the optimizer change it"
        )


def ask_of_passes(
    question: str, model: nn.Module, knowledge: Knowledge, find: Callable[[nn.Module, Tensor], AnswerT]
) -> AnswerT | None:
    """Return what `find` says of the model and inputs, once for models alike; None where no inputs are known."""

    def answer() -> AnswerT | None:
        inputs = probe_inputs(model, knowledge)
        return None if inputs is None else find(model, inputs)

    return ask_once(question, model, knowledge, answer)


def random_inputs(knowledge: Knowledge, like: Tensor) -> Tensor:
    """Return eight random inputs of the known shape, from which it is seen how a network is built.

    They are between -1 and 1: of both signs, so that a ReLU shows; not 0, as networks that divide by a norm would give
    NaN; and numbers of a column that a network looks up in a table are 0, which each table has.

    Args:
        like: has the type and the device of the inputs.
    """
    uniform = torch.rand((8, *(knowledge.input_shape or ())), generator=generator("random inputs"))
    return (2 * uniform - 1).to(like)


def probe_inputs(model: nn.Module, knowledge: Knowledge) -> Tensor | None:
    """Return a few inputs that the model takes, values or else tokens, or None; other checks tell what is wrong."""
    if knowledge.input_shape is None:
        return None
    values = random_inputs(knowledge, next(model.parameters()))
    for inputs in (values, torch.zeros_like(values, dtype=torch.long)):
        try:
            with torch.no_grad():
                model(inputs)
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
        return inputs
    return None
