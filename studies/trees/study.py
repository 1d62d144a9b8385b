"""Four clients that train trees, one of whom is attacked; the tables of docs/studies/trees.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import roc_auc_score
from torch import Tensor

from adversaries.trees.timberstrike import TimberStrike
from fedsim.audit.evaluation.table_scores import draw_rows, likeliest_row
from fedsim.base import table_metrics
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, numpy_generator
from fedsim.data.tables import Adult
from fedsim.federation.data_folder import find_data_folder
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge, Records
from fedsim.recording.payloads import Payload
from fedsim.recording.tree_models import LOGISTIC, SQUARED_ERROR, TreeModel, parse_tree_state
from fedsim.recording.tree_sums import find_thresholds
from fedsim.recording.wire_format import Update
from studies.messages import attack_updates, data_folder
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

CLIENTS, PUBLIC, DRAWS = 4, 1000, 20
RECORDS = {"breast-cancer": 100, "diabetes": 80, "adult": 200, "stroke": 200}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "max_bin 8": {"max_bin": 8},
    "min_child_weight 10": {"min_child_weight": 10},
    "covers withheld": {},
}
STROKE = "stroke/healthcare-dataset-stroke-prep.csv"
"""In the data folder: `dataset_partitioner/healthcare-dataset-stroke-prep.csv` of the paper's repository."""
Table = tuple[NDArray[np.float32], NDArray[Any], tuple[int, ...]]


@cache
def load_table(name: str) -> Table:
    """Load inputs, labels and the number of features of each column."""
    if name == "adult":
        adult = Adult(max_examples=5000).load(data_folder())
        return adult.train.inputs().numpy(), adult.train.labels.numpy(), tuple(column.width for column in adult.columns)
    if name == "stroke":
        cells = pd.read_csv(data_folder() / STROKE).to_numpy(float)
        rows, labels = cells[:, :-1], cells[:, -1].astype(int)
    else:
        load = load_breast_cancer if name == "breast-cancer" else load_diabetes
        rows, labels = load(return_X_y=True)
    return rows.astype(np.float32), labels, (1,) * rows.shape[1]


def applies(cell: Mapping[str, Any]) -> bool:
    """Return whether the file of the data is there; the paper's cannot come with fedsim."""
    folder = find_data_folder()
    return cell["data"] != "stroke" or (folder is not None and (folder / STROKE).exists())


@dataclass(frozen=True)
class Federation:
    """Records of clients and of nobody, with the range of each feature."""

    parts: Sequence[tuple[NDArray[np.float32], NDArray[Any]]]
    public: tuple[NDArray[np.float32], NDArray[Any]]
    widths: tuple[int, ...]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def deal(cls, name: str, seed: int) -> Federation:
        """Deal records out at random."""
        rows, labels, widths = load_table(name)
        order = numpy_generator(seed, "trees", name).permutation(len(rows))
        rows, labels, each = rows[order], labels[order], RECORDS[name]
        slices = [slice(each * client, each * (client + 1)) for client in range(CLIENTS)]
        others = slice(each * CLIENTS, each * CLIENTS + PUBLIC)
        low, high = rows.min(0).astype(float), rows.max(0).astype(float)
        parts = [(rows[mine], labels[mine]) for mine in slices]
        return cls(parts, (rows[others], labels[others]), widths, low, np.where(high > low, high, low + 1))

    def to_unit_range(self, rows: NDArray[Any]) -> Tensor:
        """Return rows in [0, 1]."""
        return torch.from_numpy((rows - self.low) / (self.high - self.low)).float()


def measure(seed: int, data: str, method: str, depth: int, rounds: int, setting: str) -> list[Row]:
    """Train, attack the first client with and without auxiliary records, and score what is claimed."""
    federation = Federation.deal(data, seed)
    updates, score = train_rounds(federation, data, method, depth, rounds, setting)
    true, public = (federation.to_unit_range(part[0]) for part in (federation.parts[0], federation.public))
    deviations = public.std(0)

    def share_right(rows: Tensor) -> float:
        right = table_metrics.find_correct_columns(rows, true, federation.widths, deviations)
        return float(right.double().mean())

    guess = likeliest_row(public, federation.widths, deviations).expand(len(true), -1)
    rng = generator("trees", seed)
    drawn = [share_right(draw_rows(public, federation.widths, len(true), rng)) for _ in range(DRAWS)]
    row: Row = {
        "right": "",
        "auxiliary": "",
        "likeliest": share_right(guess),
        "drawn": float(np.mean(drawn)),
        "others": share_right(federation.to_unit_range(federation.parts[1][0])),
        "model": score,
        **describe_clear_text(updates, federation),
    }
    for column, is_granted in (("right", False), ("auxiliary", True)):
        claimed = attack_client(federation, updates, seed, is_granted=is_granted)
        if claimed is not None:
            row[column] = share_right(claimed)
    return [row]


def train_rounds(
    federation: Federation, data: str, method: str, depth: int, rounds: int, setting: str
) -> tuple[list[Update], float]:
    """Return the first client's messages, and how good the last model is on public records.

    In a cyclic federation clients take turns, so that it gets as many rounds as there are clients
    times `rounds`.
    """
    import xgboost
    from flwr.serverapp.strategy.strategy_utils import aggregate_bagging

    objective = SQUARED_ERROR if data == "diabetes" else LOGISTIC
    parameters = {"objective": objective, "max_depth": depth, "nthread": 1, **SETTINGS[setting]}
    current, updates = b"", list[Update]()
    turns = rounds if method == "bagging" else CLIENTS * (rounds - 1) + 1
    for number in range(1, turns + 1):
        sent = current
        for client in range(CLIENTS) if method == "bagging" else [(number - 1) % CLIENTS]:
            rows, labels = federation.parts[client]
            booster = xgboost.Booster(parameters)
            matrix = xgboost.DMatrix(rows, label=labels)
            if sent:
                booster.load_model(bytearray(sent))
                booster.update(matrix, booster.num_boosted_rounds())
                if method == "bagging":
                    booster = booster[booster.num_boosted_rounds() - 1 :]
            else:
                booster = xgboost.train(parameters, matrix, num_boost_round=1)
            answer = bytes(booster.save_raw("json"))
            if setting == "covers withheld":
                answer = withhold_covers(answer)
            if client == 0:
                payload = Payload.from_dense({"0": to_tensor(answer)}, "weights")
                before = {"0": to_tensor(sent)}
                updates.append(Update(round=number, client=0, before=before, payload=payload, num_examples=len(labels)))
            current = aggregate_bagging(current, answer) if method == "bagging" else answer
    final = xgboost.Booster(parameters)
    final.load_model(bytearray(current))
    predictions, labels = final.predict(xgboost.DMatrix(federation.public[0])), federation.public[1]
    if objective == SQUARED_ERROR:
        return updates, 1 - float(np.mean((predictions - labels) ** 2) / np.var(labels))
    return updates, float(roc_auc_score(labels, predictions))


def to_tensor(content: bytes) -> Tensor:
    """Return bytes as an array, as Flower sends them."""
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


def withhold_covers(content: bytes) -> bytes:
    """Return a model with zeros in place of what a prediction does not need."""
    model = json.loads(content)
    for tree in model["learner"]["gradient_booster"]["model"]["trees"]:
        for key in ("sum_hessian", "base_weights", "loss_changes"):
            tree[key] = [0.0] * len(tree[key])
    return json.dumps(model).encode()


def describe_clear_text(updates: Sequence[Update], federation: Federation) -> Row:
    """Count thresholds, those that a record of the client has, and records that are alone in their leaves."""
    models = [(parse_tree_state(update.before, ""), parse_tree_state(update.after, "")) for update in updates]
    trees = [tree for before, model in models if isinstance(model, TreeModel) for tree in model.new_trees(before)]
    thresholds = find_thresholds(trees)
    rows = federation.parts[0][0]
    pairs = [(feature, value) for feature, values in thresholds.items() for value in values]
    held = sum(np.float32(value) in rows[:, feature] for feature, value in pairs)
    leaves = np.stack([tree.find_leaves(rows) for tree in trees], 1)
    _, sizes = np.unique(leaves, axis=0, return_counts=True)
    return {
        "thresholds": len(pairs),
        "held": held / max(1, len(pairs)),
        "columns": len(thresholds) / rows.shape[1],
        "alone": float((sizes == 1).sum() / len(rows)),
    }


def attack_client(federation: Federation, updates: Sequence[Update], seed: int, *, is_granted: bool) -> Tensor | None:
    """Return the rows that are claimed; None where the attack is refused."""
    rows, labels = federation.public
    auxiliary = Records(inputs=torch.from_numpy(rows), labels=torch.from_numpy(np.asarray(labels)))
    knowledge = Knowledge(
        columns=federation.widths,
        value_range=(federation.low.tolist(), federation.high.tolist()),
        auxiliary=auxiliary if is_granted else None,
    )
    try:
        finding, _ = attack_updates(TimberStrike(), updates, knowledge, generator("attack", seed))
    except AttackError:
        return None
    assert isinstance(finding, Reconstruction)
    return finding.data


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the tables of the page."""
    return {"claims": _claims_table(select_rows(rows, setting="none")), "settings": _settings_table(rows)}


SHARES = {
    "right": "`timberstrike`",
    "auxiliary": "with auxiliary rows",
    "likeliest": "likeliest values",
    "drawn": "random values by column",
    "others": "another client's records",
}
"""Columns that are shares of values that are right, by title."""


def _claims_table(rows: Sequence[Mapping[str, str]]) -> str:
    setting = ("data", "method", "depth", "rounds")
    lines = []
    for values, cell in group_rows(rows, *setting).items():
        lines.append([*values, *(_percent(cell, column) for column in (*SHARES, "alone"))])
    return markdown_table([*setting, *SHARES.values(), "records alone in their leaves"], lines)


def _settings_table(rows: Sequence[Mapping[str, str]]) -> str:
    chosen = [row for row in select_rows(rows, method="bagging", depth=6, rounds=20) if row["data"] != "diabetes"]
    columns = ("right", "auxiliary", "others", "columns", "held")
    lines, order, cells = [], [*SETTINGS], group_rows(chosen, "data", "setting")
    for data, setting in sorted(cells, key=lambda pair: (pair[0], order.index(pair[1]))):
        cell = cells[data, setting]
        thresholds, model = (np.mean(column_values(cell, column)) for column in ("thresholds", "model"))
        shares = [_percent(cell, column) for column in columns]
        lines.append([data, setting, *shares, f"{thresholds:.0f}", f"{model:.2f}"])
    head = ["data", "setting", "`timberstrike`", "with auxiliary rows", "another client's records"]
    head += ["columns split", "thresholds that a record has", "thresholds", "AUC"]
    return markdown_table(head, lines)


def _percent(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """Return the mean over seeds in percent; `refused` where the attack claims nothing."""
    return f"{100 * column_values(rows, column).mean():.0f}" if all(row[column] for row in rows) else "refused"
