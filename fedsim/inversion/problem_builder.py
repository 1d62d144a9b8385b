"""Build the inversion problem of one update, once it is sure that it can be attacked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fedsim.base.errors import AttackError
from fedsim.base.loss_term import add_model_term
from fedsim.data.checks import memory_complaint
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.model_checks import check_evaluation_mode
from fedsim.inversion.named_states import named_states, running_statistic_names
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.shared_setup import move_weights
from fedsim.modalities import known_modality, smooth_dimensions
from fedsim.recording.wire_format import State, Update
from fedsim.training.modes import list_batch_norms, normalise_by_instance


def build_problem(
    update: Update, knowledge: Knowledge, *, use_batch_statistics: bool = False, body_alone: bool = False
) -> InversionProblem:
    """Build the inversion problem of an update, without labels.

    Args:
        use_batch_statistics: the model will be one of `copy_with_batch_statistics`, which needs no
            running statistics.
        body_alone: accept updates of which a part of the model never left the clients; the problem
            then is of the other parameters. So it is where that part is granted, which is fixed.

    Raises:
        AttackError: a part of the model never left the clients; w_T equals w_0, the gradient is zero
            or too large, N is not positive or more than memory holds, or the model normalises by
            buffers that were not shared, or computes differently in training mode.
        TranscriptError: the update is not one of this model.
    """
    where = update.name
    assert knowledge.model is not None
    assert knowledge.loss is not None
    model = knowledge.model().to(knowledge.device).eval()
    private_parts = knowledge.private_parts or {}
    # Compare the message with the model.
    states = named_states(update, model, where, body_alone=body_alone or bool(private_parts))
    shapes, buffer_names, before, after, gradient, delta = states
    _check_buffers(model, buffer_names, before, use_batch_statistics)
    _check_num_examples(update, knowledge, where)
    normalise_by_instance(model, before, after)
    check_evaluation_mode(model, knowledge, where)
    device = knowledge.device
    # Separate what is trained from what never moves.
    frozen = _frozen_names(model, knowledge, before, after, gradient)
    trained = [name for name in shapes if name not in frozen]
    unmoved_names = [name for name in (*buffer_names, *frozen) if name in before]
    returned_names = [name for name in buffer_names if name in after]
    pseudo_gradient = None
    if delta is not None:
        pseudo_gradient = [states.direction(name).to(device) for name in trained]
    # A sent gradient counts as one step of plain SGD on all examples, whatever else is granted.
    training: dict[str, Any] = {"local_epochs": 1, "batch_size": update.num_examples}
    if gradient is None:
        training = _training_settings(knowledge)
    problem = InversionProblem(
        model=model,
        loss=add_model_term(knowledge.loss, model),
        parameter_names=tuple(trained),
        before=move_weights(before, trained, device),
        after=[] if gradient is not None else [after[name].to(device) for name in trained],
        buffers={name: {**before, **private_parts}[name].to(device) for name in (*unmoved_names, *private_parts)},
        returned_buffers={name: after[name].to(device) for name in returned_names},
        labels=torch.empty(0, dtype=torch.int64, device=device),
        scaling=InputScaling.from_knowledge(knowledge, before[next(iter(shapes))].to(device)),
        num_examples=update.num_examples,
        learning_rate=knowledge.learning_rate,
        **training,
        sent_gradient=None if gradient is None else [gradient[name].to(device) for name in trained],
        sent_pseudo_gradient=pseudo_gradient,
        uses_batch_statistics=use_batch_statistics,
        defenses=knowledge.defenses_in(update.round),
        smooth_dimensions=smooth_dimensions(known_modality(knowledge)),
        auxiliary=knowledge.auxiliary,
        num_clients=max(1, len(update.members)),
        where=where,
    )
    _check_direction(problem)
    return problem


def _check_buffers(model: nn.Module, buffer_names: Sequence[str], before: State, by_batch: bool) -> None:
    excused = running_statistic_names(model) if by_batch else []
    missing = [name for name in buffer_names if name not in before and name not in excused]
    if missing:
        raise AttackError(
            f"the model normalises with {missing[0]}, which clients of this federation do not "
            "share; this attack needs a model without such buffers, or one that shares them"
        )


def _check_num_examples(update: Update, knowledge: Knowledge, where: str) -> None:
    if update.num_examples < 1:
        raise AttackError(
            f"{where}: N is {update.num_examples}, so nothing says how many examples to look for; "
            "attack a client that reports its num_examples"
        )
    reason = memory_complaint(4.0 * update.num_examples * math.prod(knowledge.input_shape or (1,)))
    if reason:
        raise AttackError(
            f"{where}: N is {update.num_examples}, and so many examples {reason}; "
            "if that is not a count of examples, say N with [app] num_examples"
        )


def _check_direction(problem: InversionProblem) -> None:
    """Raise AttackError unless the update is finite and not zero."""
    direction = torch.cat([delta.flatten() for delta in problem.direction])
    is_finite, has_moved = torch.stack([direction.square().sum().isfinite(), direction.any()]).tolist()
    if not is_finite:
        raise AttackError(
            f"{problem.where}: what it sent is so large that its square is infinite; this update "
            "cannot be attacked, choose another round or victim"
        )
    if not has_moved:
        cause = "w_T equals w_0" if problem.sent_gradient is None else "the gradient is zero"
        raise AttackError(f"{problem.where}: {cause}, there is nothing to match")


def _training_settings(knowledge: Knowledge) -> dict[str, Any]:
    """Return how the client trains as far as it is granted, by plain SGD where the optimizer is withheld."""
    return {
        "local_epochs": knowledge.local_epochs,
        "local_steps": knowledge.local_steps,
        "batch_size": knowledge.batch_size,
        "optimizer": knowledge.optimizer or "sgd",
        "momentum": knowledge.momentum or 0.0,
        "weight_decay": knowledge.weight_decay or 0.0,
        "proximal_mu": knowledge.proximal_mu or 0.0,
    }


def _frozen_names(
    model: nn.Module, knowledge: Knowledge, before: State, after: State, gradient: State | None
) -> list[str]:
    """List the parameters that are not trained and did not change: there is nothing to match.

    Those that did not change under weight decay are not used by the model, and optimizers leave them alone. Where no
    scale and no shift of any BatchNorm layer changed, clients do not train them.
    """

    def is_unmoved(name: str) -> bool:
        return torch.equal(before[name], after[name]) if gradient is None else not gradient[name].any()

    parameters = {name: parameter for name, parameter in model.named_parameters() if name in before}
    norm_names = [
        f"{layer}.{kind}".removeprefix(".") for layer in list_batch_norms(model) for kind in ("weight", "bias")
    ]
    norm_names = [name for name in norm_names if name in parameters]
    untrained = {name for name, value in parameters.items() if not value.requires_grad or knowledge.weight_decay}
    if all(map(is_unmoved, norm_names)):
        untrained.update(norm_names)
    return [name for name in parameters if name in untrained and is_unmoved(name)]
