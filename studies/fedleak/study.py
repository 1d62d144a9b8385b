"""FedLeak's two parts, as `fedleak` guesses them, alone and together; the table of docs/explanation/inversion.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from adversaries.inversion.partial_matching import PartialMatching
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import Recipe
from fedsim.recording.wire_format import State, Update
from studies.giml.study import with_interval
from studies.messages import (
    gradient_update,
    image_knowledge,
    invert_update,
    mean_gradient,
    one_client_experiment,
    score_claim,
)
from studies.running import Row
from studies.smoothness.study import weights_of
from studies.writing import column_values, group_rows, markdown_table, select_rows

SEED, VICTIMS, FLOOR, EPOCHS = 1, 6, 1000, 4
NETWORKS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "mlp": ("MLP 784-100-10, first weights", "mnist", {"name": "mlp", "hidden": [100]}, 16),
    "cnn": ("SME's CNN / 4, first weights", "cifar10", {"name": "sme-cnn", "channels": [16, 32], "hidden": 200}, 4),
    "resnet18/4": ("ResNet18/4, four epochs, by the batch", "cifar10", {"name": "resnet18", "channels": 16}, 4),
}
"""Title, data set, settings and N."""
STEPS = 150
"""Of those that evaluate two gradients a step; the others make twice as many."""
ATTACKS: dict[str, dict[str, Any]] = {
    "plain": {"iterations": 2 * STEPS, "share": 1.0, "smoothing": 0.0},
    "partial": {"iterations": 2 * STEPS, "smoothing": 0.0},
    "smoothed": {"iterations": STEPS, "share": 1.0},
    "both": {"iterations": STEPS},
}


@dataclass(frozen=True, kw_only=True)
class PartialMatchingByBatch(PartialMatching):
    """The attack with dummy data that BatchNorm layers normalise by their batch, as they did the client's."""

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return replace(super()._recipe(problem), normalised_by_batch=True)

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        return build_problem(update, knowledge, use_batch_statistics=True)


@cache
def experiment_of(network: str) -> Experiment:
    """Return an experiment with one client, of the network and its data set."""
    _, data, model, _ = NETWORKS[network]
    return one_client_experiment({"name": data}, model, SEED)


@cache
def state_of(network: str) -> State:
    """Return the weights that clients receive: the first ones, or those of the study of smoothness after training."""
    if network == "resnet18/4":
        return weights_of(network, EPOCHS)
    return experiment_of(network).initial_state()


def measure(network: str, attack: str) -> list[Row]:
    """Attack the gradients of the first clients by a part of the attack."""
    return attack_gradients(network, ATTACKS[attack], VICTIMS, "fedleak study")


def attack_gradients(network: str, settings: Mapping[str, Any], clients: int, study: str) -> list[Row]:
    """Attack the gradients of the first clients, who hold test images one after another.

    Args:
        settings: of `PartialMatching`, which with a share of 1 and no smoothing is `InvertingGradients`.
        study: is part of the key of random starts.
    """
    size, experiment, rows = NETWORKS[network][3], experiment_of(network), list[Row]()
    model, state, test = experiment.new_model(), state_of(network), experiment.dataset.test
    by_batch = network == "resnet18/4"
    matching = (PartialMatchingByBatch if by_batch else PartialMatching)(**settings)
    for client in range(clients):
        model.load_state_dict(state, strict=False)
        index = torch.arange(client * size, (client + 1) * size)
        labels, order = test.labels[index].sort()
        images = test.inputs(index)[order]
        gradient = mean_gradient(model.train(by_batch), experiment.data.to_model(images), labels)
        knowledge, rng = image_knowledge(experiment, labels), generator(SEED, study, client)
        finding = invert_update(matching, gradient_update(state, gradient, size), knowledge, rng)
        truth, train = Truth(data=images, labels=labels), experiment.dataset.train
        scores = score_claim(finding, truth, generator(SEED, "floors", client), train, FLOOR, labels_granted=True)
        row: Row = {"client": client, "l_sim": float(finding.trace["l_sim"][-1])}
        for metric in ("psnr", "ssim", "identified"):
            row |= {metric: scores[metric].value, f"{metric} floor": scores[metric].floor}
        rows.append(row)
    return rows


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: a line for each network and part of the attack."""
    lines = []
    for (network, attack), cell in group_rows(rows, "network", "attack").items():
        psnr, plain = column_values(cell, "psnr"), select_rows(rows, network=network, attack="plain")
        line = [NETWORKS[str(network)][0], str(NETWORKS[str(network)][3]), attack, with_interval(psnr, ".1f")]
        line.append(with_interval(psnr - column_values(cell, "psnr floor"), "+.1f"))
        line.append("–" if attack == "plain" else with_interval(psnr - column_values(plain, "psnr"), "+.1f"))
        line.append(with_interval(100 * column_values(cell, "identified"), ".0f"))
        line += [
            f"{100 * column_values(cell, 'identified floor').mean():.0f}",
            f"{column_values(cell, 'l_sim').mean():.4f}",
        ]
        lines.append(line)
    head = ["network", "N", "matching", "PSNR (dB)", "beyond the guess", "beyond plain", "identified (%)"]
    return {"": markdown_table([*head, "by chance (%)", "distance"], lines)}
