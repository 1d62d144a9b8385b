"""What attacks gain by seeing that ReLUs switch; the tables of docs/explanation/inversion.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adversaries.inversion.inverting_gradients import InvertingGradients
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.identification import IDENTIFIED
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import Recipe
from fedsim.recording.wire_format import Update
from studies.fedleak.study import FLOOR, NETWORKS, SEED, experiment_of, state_of
from studies.giml.study import with_interval
from studies.messages import gradient_update, image_knowledge, invert_update, mean_gradient, score_claim
from studies.running import Row
from studies.trust.study import VICTIMS, case_order, case_tables, record_case
from studies.trust.verdicts import ATTACKS
from studies.writing import column_values, group_rows, markdown_table, select_rows

CLIENTS, ITERATIONS = 10, 300
SCORES = ["PSNR (dB)", "beyond the guess", "beyond width 0", "identified (%)", "by chance (%)", "distance"]


@dataclass(frozen=True, kw_only=True)
class InvertingGradientsByBatch(InvertingGradients):
    """The attack with dummy data that BatchNorm layers normalise by their batch, as they did the client's."""

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return replace(super()._recipe(problem), normalised_by_batch=True)

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        return build_problem(update, knowledge, use_batch_statistics=True)


def measure(width: float, network: str = "", tv_weight: float = 0.0, defense: str = "", seed: int = 0) -> list[Row]:
    """Attack gradients of a network, or the federation of the study `trust` with a defense that the server knows."""
    return attack_gradients(network, tv_weight, width) if network else attack_federation(defense, seed, width)


def attack_gradients(network: str, tv_weight: float, width: float) -> list[Row]:
    """Attack the gradients of the first clients, who hold test images one after another."""
    size, experiment, rows = NETWORKS[network][3], experiment_of(network), list[Row]()
    model, state, test = experiment.new_model(), state_of(network), experiment.dataset.test
    by_batch = network == "resnet18/4"
    settings: dict[str, Any] = {"iterations": ITERATIONS, "step_size": 0.1, "tv_weight": tv_weight, "relu_width": width}
    matching = (InvertingGradientsByBatch if by_batch else InvertingGradients)(**settings)
    for client in range(CLIENTS):
        model.load_state_dict(state, strict=False)
        index = torch.arange(client * size, (client + 1) * size)
        labels, order = test.labels[index].sort()
        images = test.inputs(index)[order]
        gradient = mean_gradient(model.train(by_batch), experiment.data.to_model(images), labels)
        rng = generator(SEED, "relu jumps", client)
        finding = invert_update(
            matching, gradient_update(state, gradient, size), image_knowledge(experiment, labels), rng
        )
        truth, train = Truth(data=images, labels=labels), experiment.dataset.train
        scores = score_claim(finding, truth, generator(SEED, "floors", client), train, FLOOR, labels_granted=True)
        row: Row = {"client": client, "distance": float(finding.trace["l_sim"][-1])}
        for metric in ("psnr", IDENTIFIED):
            row |= {metric: scores[metric].value, f"{metric} floor": scores[metric].floor}
        rows.append(row)
    return rows


def attack_federation(defense: str, seed: int, width: float) -> list[Row]:
    """Attack the victims of the study `trust` by `map`, which knows the defense."""
    run, adversary = record_case(defense, seed), case_tables(defense, seed)[1]
    # The run's folder keeps the scores of all widths, and of the study `trust`, side by side.
    label = f"map, width {width:g}"
    table = {**ATTACKS["map"], "relu_width": width, "label": label}
    adversary = {**adversary, "knowledge": {**adversary["knowledge"], "defenses": True}}
    audit = open_audit(
        run.path, validate_tables(AttackFile, {"adversary": adversary, "attack": [table]}, defense), trust=True
    )
    failures, unscored = audit.run(), list[str]()
    rows: dict[int, Row] = {}
    for score in audit.score(unscored):
        if score["attack"] not in (label, f"{label} adaptive"):
            continue
        row = rows.setdefault(int(score["victim"]), {"client": score["victim"]})
        if score["metric"] == "l_sim":
            row["distance"] = score["value"]
        elif score["metric"] in ("psnr", IDENTIFIED):
            row |= {score["metric"]: score["value"], f"{score['metric']} floor": score["floor"]}
    if failures or unscored or len(rows) != len(VICTIMS):
        raise ConfigError(f"studies/relu_jumps: {defense}, seed {seed}: {[*failures, *unscored, len(rows)][0]}")
    return list(rows.values())


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what widths give on networks, and what `map` gets of defended clients with and without."""
    networks = [row for row in rows if row["network"]]
    federations = [row for row in rows if row["defense"]]
    return {"networks": table_of_networks(networks), "defenses": table_of_defenses(federations)}


def table_of_networks(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a line for each network, weight of the total variation, and width."""
    lines = []
    groups, order = group_rows(rows, "network", "tv_weight", "width"), list(NETWORKS)
    for network, tv_weight, width in sorted(
        groups, key=lambda key: (order.index(key[0]), float(key[1]), float(key[2]))
    ):
        cell = groups[network, tv_weight, width]
        title, _, _, size = NETWORKS[str(network)]
        exact = select_rows(rows, network=network, tv_weight=tv_weight, width="0")
        lines.append([title, str(size), str(tv_weight), str(width), *format_cell(cell, exact)])
    head = ["network", "N", "total variation", "width"]
    return markdown_table([*head, *SCORES], lines)


def table_of_defenses(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a line for each defense and width; seeds are pooled."""
    lines = []
    groups, order = group_rows(rows, "defense", "width"), case_order()
    for defense, width in sorted(groups, key=lambda key: (order.index(key[0]), float(key[1]))):
        cell, exact = groups[defense, width], select_rows(rows, defense=defense, width="0")
        lines.append([str(defense), str(width), str(len(cell)), *format_cell(cell, exact)])
    return markdown_table(["defense", "width", "victims", *SCORES], lines)


def format_cell(cell: Sequence[Mapping[str, str]], exact: Sequence[Mapping[str, str]]) -> list[str]:
    """Format the scores of a cell, and what it gains over the exact derivative on the same victims."""
    psnr = column_values(cell, "psnr")
    return [
        with_interval(psnr, ".1f"),
        with_interval(psnr - column_values(cell, "psnr floor"), "+.1f"),
        "–" if cell[0]["width"] == "0" else with_interval(psnr - column_values(exact, "psnr"), "+.1f"),
        with_interval(100 * column_values(cell, "identified"), ".0f"),
        f"{100 * column_values(cell, 'identified floor').mean():.0f}",
        f"{column_values(cell, 'distance').mean():.4f}",
    ]
