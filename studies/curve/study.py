"""SME's line beside NL-SME's curve on the same updates; the table of docs/explanation/inversion.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from adversaries.inversion.long_strides import LongStrides
from adversaries.inversion.surrogate_curve import NonLinearSurrogate
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator
from fedsim.federation.experiment import Experiment
from fedsim.inversion import Cosine, InversionProblem, SurrogateCurve, SurrogatePoint, UpdateModel, build_problem
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.settings import LocalTraining
from studies.messages import image_knowledge, invert_update, one_client_experiment, score_claim, weights_update
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

SEED, VICTIMS, SIZE = 1, 5, 10
PLAIN_SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "proximal_mu": 0.0}
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "lenet": ("mnist", {"name": "lenet", "activation": "relu"}),
    "cnn": ("cifar10", {"name": "sme-cnn", "channels": [16, 32], "hidden": 100}),
}
TITLES = {"lenet": "LeNet (ReLU), MNIST", "cnn": "SME's CNN / 4, CIFAR-10"}
SETTINGS: dict[str, Any] = {"iterations": 200, "step_size": 0.1}
ATTACKS = {
    "sme": SurrogateModelExtension(**SETTINGS),
    "long-strides": LongStrides(**SETTINGS),
    "nl-sme": NonLinearSurrogate(**SETTINGS),
    "nl-sme, P fast": NonLinearSurrogate(bend_step_size=0.1, bend_weight=0.0, **SETTINGS),
}
MODELS: dict[str, UpdateModel] = {"line": SurrogatePoint(step_size=0.01), "curve": SurrogateCurve()}


@cache
def experiment_of(network: str) -> Experiment:
    """Return an experiment with one client, of the network and its data set."""
    data, model = NETWORKS[network]
    return one_client_experiment({"name": data}, model, SEED)


@cache
def victims_of(network: str, epochs: int, rate: float) -> list[tuple[Update, Truth]]:
    """Return each client's update from the first weights, and its images, by ascending label."""
    experiment, victims = experiment_of(network), []
    before, training = experiment.initial_state(), experiment.dataset.train
    settings = LocalTraining(local_epochs=epochs, batch_size=SIZE, learning_rate=rate)
    for client in range(VICTIMS):
        index = torch.arange(client * SIZE, (client + 1) * SIZE)
        labels, order = training.labels[index].sort()
        images = training.inputs(index)[order]
        inputs = experiment.data.to_model(images)
        after, _ = local_update(experiment.new_model(), before, inputs, labels, settings, key=(SEED, "curve", client))
        truth = Truth(data=images, labels=labels)
        victims.append((weights_update(before, before | after, SIZE, client), truth))
    return victims


def measure(network: str, epochs: int, rate: float, attack: str) -> list[Row]:
    """Attack all clients, or explain their updates by images that stay as they are."""
    rows, victims = list[Row](), victims_of(network, epochs, rate)
    for client, (update, truth) in enumerate(victims):
        knowledge = image_knowledge(experiment_of(network), truth.labels, **PLAIN_SGD)
        if attack in MODELS:
            problem = replace(build_problem(update, knowledge), labels=truth.labels)
            for images, of in (("own", client), ("another's", (client + 1) % VICTIMS)):
                dummy = problem.scaling.from_unit_range(victims[of][1].data)
                l_sim = fit_update_model(MODELS[attack], problem, dummy)
                rows.append({"images": images, "client": client, "l_sim": l_sim})
            continue
        finding = invert_update(ATTACKS[attack], update, knowledge, generator(SEED, "curve study", client))
        examples = experiment_of(network).dataset.test
        scores = score_claim(finding, truth, generator(SEED, "floors", client), examples, 1000)
        row: Row = {"images": "claimed", "client": client, "l_sim": finding.trace["l_sim"][-1].item()}
        for metric in ("psnr", "ssim"):
            row |= {metric: scores[metric].value, f"{metric} floor": scores[metric].floor}
        rows.append(row)
    return rows


def fit_update_model(model: UpdateModel, problem: InversionProblem, dummy: torch.Tensor) -> float:
    """Return the least 1 - cosine that the variables of an update model reach, the dummy data as they are."""
    distance, target = Cosine(), Cosine().target(problem)
    variables = model.variables(problem)
    values = {name: variable.start.clone().requires_grad_(True) for name, variable in variables.items()}
    optimizer = torch.optim.Adam([{"params": [values[name]], "lr": variables[name].step_size} for name in variables])
    least = float("inf")
    for _ in range(SETTINGS["iterations"]):
        found = distance(model.gradient(problem, values, dummy, problem.labels), target)
        least = min(least, found.item())
        penalty = model.penalty(problem, values)
        (found if penalty is None else found + penalty).backward(inputs=list(values.values()))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, variable in variables.items():
                values[name].clamp_(variable.low, variable.high)
    return least


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: a line for each network, number of epochs and learning rate."""
    lines = []
    for (network, epochs, rate), cell in group_rows(rows, "network", "epochs", "rate").items():
        line = [TITLES[network], epochs, rate]
        for attack in ATTACKS:
            claims = select_rows(cell, attack=attack)
            gain = column_values(claims, "psnr") - column_values(claims, "psnr floor")
            ssim = column_values(claims, "ssim").mean()
            line.append(f"{gain.mean():+.1f} ({(gain > 0).sum()}), {ssim:.2f}")
        for model in MODELS:
            explained = select_rows(cell, attack=model)
            both = [
                column_values(select_rows(explained, images=images), "l_sim").mean() for images in ("own", "another's")
            ]
            line.append("{:.3f}, {:.3f}".format(*both))
        lines.append(line)
    head = ["network", "E", "rate", *(f"`{name}`" if name in ("sme", "nl-sme") else name for name in ATTACKS), *MODELS]
    return {"": markdown_table(head, lines)}
