"""What several messages of CENSOR tell of the gradient that they are orthogonal to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from clients.defenses.censor import Censor
from fedsim.audit.audit import Audit, open_audit
from fedsim.federation.config import AttackFile
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.local_context import ClientRound
from fedsim.inversion.parametrisations import PublicComponents
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import cosine_schedule
from fedsim.recording.wire_format import State
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.settings import LocalTraining
from studies.messages import pair_psnr
from studies.running import Row
from studies.trust.study import case_tables, record_case
from studies.writing import column_values, group_rows, markdown_table

ITERATIONS, STEP_SIZE = 300, 0.1
WIDTH = 0.1
"""Of the likelihood at the end, in the size that a random direction has along a message."""
FIRST = "1.weight"
ALL_AT_ONCE = "one step"
Rows = Sequence[Mapping[str, str]]


@cache
def open_case() -> tuple[Audit, Experiment]:
    """Return the adversary's side of a federation with CENSOR, and its experiment."""
    run = record_case("censor", 1)
    spec = validate_tables(
        AttackFile, {"adversary": case_tables("censor", 1)[1], "attack": [{"name": "map"}]}, "censor"
    )
    return open_audit(run.path, spec, trust=True), Experiment(load_config(run.path / "experiment.toml"))


def send_messages(batches: str, victim: int, count: int, defense: Censor) -> list[dict[str, Tensor]]:
    """Return what a client sends at the weights of round 1, `count` times: a step with all its images, or an epoch."""
    audit, experiment = open_case()
    before = audit.transcript.update(1, victim).before
    inputs, labels = experiment.data.train(victim)
    directions = []
    for number in range(count):
        key = ("null_space", victim, number)
        known: dict[str, Any] = {
            "key": key, "defenses": [defense], "client_round": ClientRound(key=key, number=1, broadcast=before)
        }  # fmt: skip
        if batches == ALL_AT_ONCE:
            settings = LocalTraining(local_epochs=1, batch_size=len(inputs), learning_rate=0.1)
            direction, *_ = local_gradient(experiment.new_model(), before, inputs, labels, settings, **known)
        else:
            settings = LocalTraining(local_epochs=1, batch_size=len(inputs) // 2, learning_rate=0.1)
            after, _ = local_update(experiment.new_model(), before, inputs, labels, settings, **known)
            direction = {name: before[name] - after[name] for name in after}
        directions.append(direction)
    return directions


def measure(batches: str, messages: int, sender: str, victims: int) -> list[Row]:
    """Look for images whose gradient is orthogonal to what a client sent; as a control, the client after the victim.

    Returns:
        For each victim the cosine between the first layer's gradients of claim and truth, and the PSNR in dB; both
        also of the means of the classes, where the search starts. The labels are known.
    """
    audit, experiment = open_case()
    rows = []
    for victim in range(victims):
        inputs, labels = experiment.data.train(victim)
        problem = replace(build_problem(audit.transcript.update(1, victim), audit.granted_knowledge), labels=labels)
        sent = send_messages(batches, victim + (sender == "another client"), messages, Censor())
        images = experiment.dataset.to_unit_range(inputs)
        true_gradient = layer_gradients(problem, problem.scaling.from_unit_range(images))[FIRST].flatten()
        row: Row = {"victim": victim}
        for name, dummy in zip(("start", "claim"), find_orthogonal(problem, sent, batches), strict=True):
            gradient = layer_gradients(problem, dummy)[FIRST].flatten()
            row[f"{name}_cosine"] = torch.cosine_similarity(gradient, true_gradient, dim=0).item()
            row[f"{name}_psnr"] = pair_psnr(problem.scaling.to_unit_range(dummy), images)
        rows.append(row)
    return rows


def layer_gradients(problem: InversionProblem, dummy: Tensor) -> dict[str, Tensor]:
    """Return the gradient of the loss of dummy data, by parameter."""
    return dict(zip(problem.parameter_names, problem.gradient(problem.before, dummy, problem.labels), strict=True))


def find_orthogonal(problem: InversionProblem, sent: Sequence[State], batches: str) -> tuple[Tensor, Tensor]:
    """Return dummy data at the means of the classes, and the most probable ones whose gradient is orthogonal to `sent`.

    The prior is that of `map`. Where all images are in one step, the norms of the gradient are known as well.
    """
    prior, public = PublicComponents(), problem.auxiliary
    assert public is not None
    units, norms = {}, {}
    for name in problem.parameter_names:
        rows = torch.stack([message[name].flatten() for message in sent])
        norms[name] = rows.norm(dim=1, keepdim=True)
        units[name] = rows / norms[name]
    shape = (len(problem.labels), *public.inputs.shape[1:])
    coefficients = prior.start(problem, shape, torch.Generator()).requires_grad_()
    start = prior.dummy_data(problem, coefficients).detach()
    optimizer = torch.optim.Adam([coefficients], STEP_SIZE)
    for iteration in range(ITERATIONS):
        width = WIDTH ** min(1.0, 2 * iteration / ITERATIONS)
        optimizer.param_groups[0]["lr"] = STEP_SIZE * cosine_schedule(iteration, ITERATIONS)
        objective = prior.penalty(problem, coefficients)
        for name, gradient in layer_gradients(problem, prior.dummy_data(problem, coefficients)).items():
            # A random direction has a size of 1 along a message in these units.
            along = units[name] @ gradient.flatten() / gradient.norm() * gradient.numel() ** 0.5
            objective = objective + along.square().sum() / (2 * width**2)
            if batches == ALL_AT_ONCE:
                objective = objective + (gradient.norm() / norms[name][0]).log().square().sum() / (2 * width**2)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    return start, prior.dummy_data(problem, coefficients).detach()


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each number of messages: how near the claims are, beside the start of the search."""
    lines = []
    for (batches, messages, sender), of_cell in group_rows(rows, "batches", "messages", "sender").items():
        line = [batches, messages, sender, str(len(of_cell))]
        for name, form in (("cosine", ".2f"), ("psnr", ".1f")):
            start, claim = (column_values(of_cell, f"{part}_{name}").mean() for part in ("start", "claim"))
            line.append(f"{claim:{form}} ({start:{form}})")
        lines.append(line)
    head = ["a message is of", "messages", "sent by", "victims", "cosine of the first layer's gradient", "PSNR, dB"]
    return {"": markdown_table(head, lines)}
