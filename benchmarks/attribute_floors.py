"""What public data say of the sensitive attribute in LMRA's experiments, client by client, without any recording.

    python benchmarks/attribute_floors.py --data-dir DIR

First, means over all clients at seeds 1 to 3: the majority among a client's own records, imputation from public data
(`fedsim.audit.evaluation.imputation`), and the floor, the better of both for each client; and the same of balanced
accuracy.
Then, of each run in `results/lmra-clients.csv` that has attacks on attributes, how far each is from that floor, paired
by client, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import csv
import os
import tomllib
from collections.abc import Mapping
from statistics import fmean

import torch
from lmra_sweeps import ATTRIBUTE, HERE, settings

from fedsim.audit.evaluation.imputation import IMPUTED_GUESS, Imputation
from fedsim.audit.evaluation.inferences import score_inference
from fedsim.audit.evaluation.statistics import format_mean
from fedsim.federation.build import Experiment
from fedsim.federation.config import Config, validate_tables
from fedsim.interfaces.findings import Inference

METRICS = ("attribute_accuracy", "attribute_balanced_accuracy")


def experiment(data: str, seed: int, overrides: Mapping[str, int]) -> Experiment:
    """That of the file beside this, changed."""
    tables = tomllib.loads((HERE / f"lmra-{data}.toml").read_text())
    for name, value in {"federation.seed": seed, **overrides}.items():
        table, _, key = name.partition(".")
        tables[table][key] = value
    return Experiment(validate_tables(Config, tables, data))


def floors(data: str, made: Experiment, imputation: Imputation) -> list[dict[str, tuple[float, float, str]]]:
    """Of each client and metric: without public data, with them, and which guess that is."""
    column = made.dataset.column(ATTRIBUTE[data])
    found = []
    for client in range(made.config.federation.clients):
        inputs, labels = made.data.train(client)
        truth = column.values(inputs)
        candidates = torch.arange(len(column.categories))
        nobody = Inference(of="attribute", candidates=candidates, scores=torch.zeros(len(truth), len(candidates)))
        without = score_inference(nobody, truth)
        best = score_inference(nobody, truth, imputation.guess(inputs, labels))
        found.append({b.metric: (w.floor, b.floor, b.floor_guess) for w, b in zip(without, best, strict=True)})
    return found


def read_scores() -> dict[tuple[str, str, str], dict[int, float]]:
    """By run, attack and metric, what each client scored."""
    with (HERE / "results" / "lmra-clients.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] in METRICS and row["what"] == "value"]
    return {
        (row["run"], row["attack"], row["metric"]): {
            client: float(value) for client, value in enumerate(row["clients 0, 1, ..."].split()) if value != "-"
        }
        for row in rows
    }


def name_of(data: str, overrides: Mapping[str, int]) -> str:
    """As `lmra_sweeps.measure` names its run folders."""
    return "-".join([data, *(f"{name.rpartition('.')[2]}{value}" for name, value in overrides.items())])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    os.environ["FEDSIM_DATA"] = parser.parse_args().data_dir
    known = read_scores()
    for data in ATTRIBUTE:
        imputations = {}
        for metric in METRICS:
            cells = []
            for seed in (1, 2, 3):
                made = experiment(data, seed, {})
                if seed not in imputations:
                    column = made.dataset.column(ATTRIBUTE[data])
                    imputations[seed] = Imputation.fit(made.dataset.test, column, seed)
                cells += [item[metric] for item in floors(data, made, imputations[seed])]
            guessed = sum(guess == IMPUTED_GUESS for _, _, guess in cells)
            print(
                f"{data}, {metric}: without public data {fmean(c[0] for c in cells):.3f}, floor "
                f"{fmean(c[1] for c in cells):.3f}, imputed for {guessed} of {len(cells)}"
            )
        for overrides in [each for sweep in ("examples", "batch", "epochs") for each in settings(sweep, data).values()]:
            run = name_of(data, overrides)
            own = [key for key in known if key[0] == run]
            best = floors(data, experiment(data, 1, overrides), imputations[1]) if own else []
            for _, attack, metric in own:
                values = known[run, attack, metric]
                gain = {(str(client), run): value - best[client][metric][1] for client, value in values.items()}
                floor = fmean(best[client][metric][1] for client in values)
                print(
                    f"  {run}, {attack}, {metric}: {fmean(values.values()):.3f}, floor {floor:.3f}, difference "
                    f"{format_mean(gain)} (n = {len(gain)})"
                )


if __name__ == "__main__":
    main()
