"""Guesses of an attribute that read no message, as rows beside those of the attacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from torch import Tensor

import fedsim
from fedsim.audit.evaluation.imputation import Imputation
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from studies.running import Row, final_accuracy, runs_of_sweep
from studies.writing import format_mean, group_rows, markdown_table

METRICS = {"attribute_accuracy": "accuracy", "attribute_balanced_accuracy": "balanced accuracy"}
FIRST_ATTACK = "aia-gradient"


def rows_of_sweep(sweep: fedsim.Sweep) -> Iterator[Row]:
    """Yield the scores of the attacks, and those of the guesses once for each federation."""
    for labels, run in runs_of_sweep(sweep):
        about = {"case": f"E = {labels['training.local_epochs']}", "attack": labels["attack"]}
        model = {"model": final_accuracy(run)}
        for score in run.scores.to_dict("records"):
            if score["metric"] in METRICS:
                who = {"metric": score["metric"], "seed": labels["seed"], "client": score["victim"]}
                yield about | who | {"value": score["value"]} | model
        if labels["attack"] == FIRST_ATTACK:
            for guess in guess_attributes(run, int(labels["seed"])):
                yield about | guess | model


def guess_attributes(run: fedsim.Run, seed: int) -> Iterator[Row]:
    """Yield how often a coin, the client's own majority, and imputation from public records are right."""
    experiment = Experiment(load_config(run.path / "experiment.toml"))
    column = experiment.dataset.column("sex")
    imputation = Imputation.fit(experiment.dataset.test, column, seed)
    for client in range(experiment.config.federation.clients):
        inputs, labels = experiment.data.train(client)
        truth, guess = column.values(inputs), imputation.guess(inputs, labels)
        right = float((guess.likeliest == truth).double().mean())
        values = {
            "coin": (0.5, 0.5),
            "majority": (float(truth.bincount().max()) / len(truth), 0.5),
            "imputation": (right, balanced_accuracy(guess.balanced, truth)),
        }
        for name, by_metric in values.items():
            for metric, value in zip(METRICS, by_metric, strict=True):
                yield {"attack": name, "metric": metric, "seed": seed, "client": client, "value": value}


def balanced_accuracy(guess: Tensor, truth: Tensor) -> float:
    """Return the mean over categories of how many of their records are right."""
    right = (guess == truth).double()
    return fmean(float(right[truth == category].mean()) for category in truth.unique())


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return a table for each case: means, and the differences to imputation, paired by client."""
    found = {}
    for (case,), of_case in group_rows(rows, "case").items():
        values = {}
        for cell, of_cell in group_rows(of_case, "attack", "metric").items():
            values[cell] = {(row["client"], row["seed"]): float(row["value"]) for row in of_cell}
        lines = []
        for attack in dict.fromkeys(name for name, _ in values):
            line = [attack]
            for metric in METRICS:
                own, imputed = values[attack, metric], values["imputation", metric]
                gain = {who: value - imputed[who] for who, value in own.items()}
                line += [format_mean(own), format_mean(gain)]
            lines.append(line)
        head = [title for name in METRICS.values() for title in (name, "relative to imputation")]
        found[case] = markdown_table(["", *head], lines)
    return found
