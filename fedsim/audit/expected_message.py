"""A message as clients will send it, by which attacks are checked before any client has trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from fedsim.base.randomness import generator
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.experiment import Experiment
from fedsim.recording.control_variates import split_controls
from fedsim.recording.known_terms import LINEAR_KEY
from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import Update
from fedsim.training.model_state import running_statistics
from fedsim.training.modes import trained_shapes

_STEP = 1e-3
"""Farthest that a number moves in training that is made up."""


def expect_message(
    experiment: Experiment, adversary: AdversaryTable, num_examples: int | None, members: int = 1
) -> Update:
    """Return a message with the tensors that `adversary` will see of clients of `experiment`, but for defenses.

    Its values are made up: w_t is w_0, and what clients train is moved by noise.

    Args:
        num_examples: N; it is 1 where it is not known yet.
        members: clients over which it is a sum.
    """
    before, controls = split_controls(experiment.initial_state())
    moves = _draw_moves(experiment, before)
    after = {name: tensor + moves[name] for name, tensor in before.items()}
    payload = Payload.from_dense(after, "weights")
    if experiment.training.sends == "gradient" and adversary.role.reads_messages:
        parameters = {name for name, _ in experiment.model.named_parameters(remove_duplicate=False)}
        gradient = {name: move for name, move in moves.items() if name in parameters}
        payload |= Payload.from_dense(gradient, "gradient")
    adds_terms = bool(controls) or LINEAR_KEY in experiment.algorithm.message_facts()
    rounds = adversary.rounds if isinstance(adversary.rounds, list) else []
    return Update(
        round=min(rounds, default=1),
        client=0,
        message=0,
        before=before,
        payload=payload,
        num_examples=num_examples or 1,
        members=tuple(range(members)) if members > 1 else (),
        gradient_move={name: -move for name, move in moves.items()} if adds_terms else None,
    )


def _draw_moves(experiment: Experiment, before: State) -> State:
    """Draw how far each tensor of w_t moves in local training; what is not trained stays."""
    model, training, rng = experiment.model, experiment.training, generator("expected message")
    trained = {id(model.get_parameter(name)) for name in trained_shapes(model, training)}
    moved = {name for name, parameter in model.named_parameters(remove_duplicate=False) if id(parameter) in trained}
    if training.batch_norm == "train":
        moved |= running_statistics(model)
    moves: dict[str, torch.Tensor] = {}
    for name, tensor in before.items():
        size = _STEP if name in moved else 0.0
        # Upwards, because a running variance is not below 0.
        moves[name] = size * torch.rand(tensor.shape, generator=rng).to(tensor)
    return moves


def expect_private_facts(experiment: Experiment, num_examples: int, names: Collection[str]) -> dict[str, Any]:
    """Return made-up labels and private parts of a victim, those of them that are among `names`."""
    facts: dict[str, Any] = {}
    if "labels" in names:
        labels = experiment.dataset.train.labels[:1]
        facts["labels"] = torch.zeros((num_examples, *labels.shape[1:]), dtype=labels.dtype)
    if "private_parts" in names:
        model = experiment.initial_model_state()
        facts["private_parts"] = {name: model[name] for name in experiment.private_names}
    return facts
