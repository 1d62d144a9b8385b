"""Two parties with halves of Adult's columns and one with labels; the tables of docs/studies/vertical.md."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn

from adversaries.vertical.feature_reconstruction import EmbeddingInversion, EmbeddingRegression
from adversaries.vertical.label_inference import GradientDirectionLabels, GradientNormLabels, GradientSignLabels
from clients.feature_party import make_feature_party
from fedsim.audit.evaluation.row_claims import score_labels
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.audit.evaluation.table_scores import draw_rows, likeliest_row
from fedsim.base import table_metrics
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.data.tables import Adult
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.interfaces.knowledge import Knowledge, KnownRows, Records
from fedsim.interfaces.row_findings import RowFeatures, RowLabels
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from strategies.curious import Curious
from strategies.split_learning import SplitLearning, SumHead
from studies.messages import attack_updates, data_folder
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

ROWS, PUBLIC, KNOWN, BATCH, UNITS, LAST_STEPS = 12000, 1000, 400, 100, 16, 20
RATE = 1.0
LABEL_ATTACKS = {"norm": GradientNormLabels, "direction": GradientDirectionLabels, "sign": GradientSignLabels}


def measure(seed: int, head: str, gradient_noise: float, embedding_noise: float) -> list[Row]:
    """Train for one pass over the rows, attack the first party's messages, and score what is claimed."""
    data = Adult(max_examples=ROWS + PUBLIC).load(data_folder())
    widths = [column.width for column in data.columns]
    middle = len(widths) // 2
    halves = widths[:middle], widths[middle:]
    parts = torch.split(data.train.inputs(), [sum(half) for half in halves], 1)
    labels, units = data.train.labels[:ROWS], UNITS if head == "mlp" else 2

    def build_bottom(party: int = 0) -> nn.Module:
        with seed_globals(seed, "bottom", party):
            return nn.Sequential(nn.Linear(sum(halves[party]), 32), nn.ReLU(), nn.Linear(32, units))

    with seed_globals(seed, "head"):
        network = SumHead(2) if head == "sum" else nn.Sequential(nn.Linear(2 * units, 32), nn.ReLU(), nn.Linear(32, 2))
    strategy = SplitLearning(
        bottoms=[build_bottom(0), build_bottom(1)],
        head=network,
        labels=dict(enumerate(labels.tolist())),
        batch_size=BATCH,
        learning_rate=RATE,
        gradient_noise=gradient_noise,
        seed=seed,
    )

    def load_rows(party: int) -> tuple[Tensor, Tensor]:
        return torch.arange(ROWS), parts[party][:ROWS]

    app = make_feature_party(build_bottom, load_rows, learning_rate=RATE, embedding_noise=embedding_noise, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        result = Curious(strategy, folder).start(InProcessGrid(app, 2), ArrayRecord(), num_rounds=ROWS // BATCH)
        transcript = Transcript(next(Path(folder).iterdir()) / "transcript")
        updates = [transcript.update(number, 0) for number in transcript.rounds]
    steps = [dict(values) for values in result.train_metrics_clientapp.values()]
    row: Row = {"accuracy": float(np.mean([float(str(step["accuracy"])) for step in steps[-LAST_STEPS:]]))}
    row["majority"] = float(max(labels.float().mean(), 1 - labels.float().mean()))
    row |= attack_labels(updates, labels, seed)
    public, own = parts[0][ROWS : ROWS + PUBLIC], parts[0][:ROWS]
    return [row | attack_columns(updates, own, public, halves[0], build_bottom, seed)]


def attack_labels(updates: Sequence[Update], labels: Tensor, seed: int) -> Row:
    """Return AUC and accuracy of each attack on labels; empty where it is refused."""
    row: Row = {}
    for name, attack in LABEL_ATTACKS.items():
        row |= {f"{name}_auc": "", f"{name}_accuracy": ""}
        try:
            finding, _ = attack_updates(attack(), updates, Knowledge(num_classes=2), generator("attack", seed))
        except AttackError:
            continue
        assert isinstance(finding, RowLabels)
        auc, accuracy = score_labels(finding, labels[finding.rows])
        row |= {f"{name}_auc": auc.value, f"{name}_accuracy": accuracy.value}
    return row


def attack_columns(
    updates: Sequence[Update], own: Tensor, public: Tensor, columns: Sequence[int], build_bottom: Any, seed: int
) -> Row:
    """Return the share of right values of each attack on columns, of two guesses, and by column."""
    known = torch.randperm(ROWS, generator=generator("known", seed))[:KNOWN]
    nothing = torch.zeros(len(known), dtype=torch.long)
    knowledge = Knowledge(
        model=build_bottom,
        columns=tuple(columns),
        value_range=([0.0], [1.0]),
        known_rows=KnownRows(inputs=own[known], labels=nothing, rows=known),
    )
    deviations, row = public.std(0), Row()

    def score(name: str, claimed: Tensor, true: Tensor) -> None:
        shares = table_metrics.compare_aligned_rows(claimed, true, columns, deviations).double().mean(0).tolist()
        row[name] = float(np.mean(shares))
        row.update({f"{name}_{index}": share for index, share in enumerate(shares)})

    records = Records(inputs=public, labels=torch.zeros(len(public), dtype=torch.long))
    inversion, without_rows = EmbeddingInversion(), replace(knowledge, known_rows=None)
    with_public = replace(without_rows, auxiliary=records)
    for name, attack, facts in (
        ("inversion", inversion, without_rows),
        ("public_inversion", inversion, with_public),
        ("regression", EmbeddingRegression(), knowledge),
    ):
        finding, _ = attack_updates(attack, updates, facts, generator("attack", seed))
        assert isinstance(finding, RowFeatures)
        score(name, finding.data, own[finding.rows])
    score("likeliest", likeliest_row(public, columns, deviations).expand_as(own), own)
    score("drawn", draw_rows(public, columns, ROWS, generator("drawn", seed)), own)
    return row


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the tables of the page."""
    return {
        "labels": _setting_table(rows, LABELS),
        "columns": _setting_table(rows, COLUMNS),
        "each": _column_table(rows),
    }


LABELS = {
    "norm_auc": "`label-norm` AUC",
    "direction_auc": "`label-direction` AUC",
    "direction_accuracy": "`label-direction` labels right",
    "sign_accuracy": "`label-sign` labels right",
    "majority": "majority label",
    "accuracy": "accuracy of the model",
}
COLUMNS = {
    "inversion": "`embedding-inversion`",
    "public_inversion": "with public rows",
    "regression": "`embedding-regression`",
    "likeliest": "likeliest values",
    "drawn": "random values by column",
    "accuracy": "accuracy of the model",
}
NAMES = ("age", "workclass", "education", "marital-status", "occupation", "relationship")


def _setting_table(rows: Sequence[Mapping[str, str]], columns: Mapping[str, str]) -> str:
    settings = ("head", "gradient_noise", "embedding_noise")
    lines = []
    for values, cell in group_rows(rows, *settings).items():
        lines.append([*values, *(_percent(cell, column) for column in columns)])
    return markdown_table(["head", "noise on gradients", "noise on embeddings", *columns.values()], lines)


def _column_table(rows: Sequence[Mapping[str, str]]) -> str:
    cell = select_rows(rows, head="mlp", gradient_noise="0.0", embedding_noise="0.0")
    chosen = ("inversion", "public_inversion", "regression", "likeliest", "drawn")
    lines = [[name, *(_percent(cell, f"{column}_{index}") for column in chosen)] for index, name in enumerate(NAMES)]
    return markdown_table(["column", *(COLUMNS[column] for column in chosen)], lines)


def _percent(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """Return mean and 95 % interval over seeds in percent; `refused` where the attack claims nothing."""
    if not all(row[column] for row in rows):
        return "refused"
    values = 100 * column_values(rows, column)
    return f"{values.mean():.0f} ± {confidence_interval(values)[1] - values.mean():.1f}"
