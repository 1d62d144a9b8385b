"""What leaks of each client beside what measures say of it: who would have to be silent, and who is chosen.

A gate that is closed for half of the clients in a round saves what leaks of them. An oracle chooses those that leak
most, which no measure can exceed. A random choice saves half of what leaks. By a measure that is turned round the other
half is silent, so its share of the oracle's gain has the same size and the other sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import rankdata

from studies.exposure.study import exposure_rows
from studies.gate.study import ATTACKS, CLIENTS, experiment_tables, leaks_by_victim
from studies.messages import attack_federation
from studies.running import Row
from studies.writing import markdown_table

ROUNDS, PERMUTED, RIDGE = (1, 10), 999, 10.0
PARTITIONS: Mapping[str, dict[str, Any]] = {
    "alike": {"name": "iid", "samples_per_client": 8},
    "unlike": {"name": "dirichlet", "alpha": 0.5, "min_examples": 8, "samples_per_client": 8},
}
NAMES = {"sme": "SME", "ig": "IG"}
TITLES = {"alike": "iid", "unlike": "non-iid"}
LEAK, NO_GRADIENT, PREDICTED = "leak", "distance from the mean, no gradient", "predicted by all of them"
Numbers = NDArray[np.float64]


def measure(seed: int, clients: str) -> list[Row]:
    """Return a row for each round, client and quantity of a measure, and for what each attack gets."""
    tables = experiment_tables(seed, []) | {"partition": PARTITIONS[clients]}
    rows = list[Row]()
    with attack_federation(tables, ATTACKS, ROUNDS) as (run, audit):
        for (attack, number, client), leak in leaks_by_victim(audit).items():
            about = {"round": number, "client": client, "of": LEAK, "quantity": attack}
            rows.append(about | {"larger_means": "", "value": leak})
        for number, client in product(ROUNDS, range(CLIENTS)):
            for row in exposure_rows(audit, run.transcript.update(number, client).before, number, client):
                quantity = f"{row['measure']} {row['quantity']}"
                about = {"round": number, "client": client, "of": row["of"], "quantity": quantity}
                rows.append(about | {"larger_means": row["larger_means"], "value": row["value"]})
    return rows


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return each measure's share of what an oracle gains, and how probable that is by chance."""
    values = pd.DataFrame(rows).astype({"value": float, "round": int, "client": int, "seed": int})
    columns = [column_of_shares(values, *key) for key in product(PARTITIONS, ROUNDS, NAMES)]
    head = ["measured", "quantity"]
    for clients, number, attack in product(PARTITIONS, ROUNDS, NAMES):
        head.append(f"{TITLES[clients]}, round {number}, {NAMES[attack]}")
    lines = [[*name, *(column[name] for column in columns)] for name in columns[0]]
    return {"": markdown_table(head, lines)}


def column_of_shares(values: pd.DataFrame, clients: str, number: int, attack: str) -> dict[tuple[str, str], str]:
    """Return the texts of one column of the table by what measured and its quantity."""
    chosen = values[(values["clients"] == clients) & (values["round"] == number)]
    leaks = grid_of(chosen[(chosen["of"] == LEAK) & (chosen["quantity"] == attack)])
    exposures = dict(exposures_of(chosen))
    exposures["update", PREDICTED] = predict_left_out(np.stack(list(exposures.values()), 2), leaks)
    at_random = leaks.sum(1).mean() / 2
    gain = float(saved_by(leaks, leaks)) - at_random
    rng = np.random.default_rng(0)
    permuted = np.stack([leaks, *(rng.permuted(leaks, axis=1) for _ in range(PERMUTED))])
    largest, texts = np.zeros(PERMUTED), {("", "oracle"): ""}
    for name, exposure in exposures.items():
        share, *by_chance = (saved_by(exposure, permuted) - at_random) / gain
        probability = (1 + (np.array(by_chance) >= share).sum()) / (1 + PERMUTED)
        texts[name] = f"{share:+z.2f} ({probability:.3f})"
        if name[1] != PREDICTED:
            largest = np.maximum(largest, np.abs(by_chance))
    texts["", "oracle"] = f"{at_random / CLIENTS:.2f} to {(at_random - gain) / CLIENTS:.2f} dB"
    texts["", "the most of all by chance, 95 %"] = f"±{np.quantile(largest, 0.95):.2f}"
    return texts


def grid_of(rows: pd.DataFrame) -> Numbers:
    """Return values as `federation client`."""
    return np.asarray(rows.pivot(index="seed", columns="client", values="value"), dtype=float)


def exposures_of(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, str], Numbers]]:
    """Yield by what measured and its quantity the exposure of each client, larger for more; undefined is least."""
    for (of, quantity), same in rows[rows["of"] != LEAK].groupby(["of", "quantity"], sort=False):
        sign = 1 if same["larger_means"].iloc[0] == "more" else -1
        yield (str(of), str(quantity)), np.nan_to_num(sign * grid_of(same), nan=-np.inf)
    # The two quantities of expected-error differ by the mean square of the inputs.
    update = rows[rows["of"] == "update"]
    error, share = (grid_of(update[update["quantity"] == f"expected-error {name}"]) for name in ("error", "share"))
    yield ("", NO_GRADIENT), -error / share


def saved_by(exposure: Numbers, leaks: Numbers) -> Numbers:
    """Return what does not leak where the more exposed half of each federation is silent, the mean over federations.

    Args:
        exposure: `federation client`.
        leaks: `... federation client`.
    """
    closed = (-exposure).argsort(axis=1, kind="stable")[:, : CLIENTS // 2]
    return np.asarray(leaks[..., np.arange(len(closed))[:, None], closed].sum(-1).mean(-1))


def predict_left_out(exposures: Numbers, leaks: Numbers) -> Numbers:
    """Predict the leaks of each federation by ridge regression of ranks, fitted to the other federations."""
    features = rankdata(exposures, axis=1) / CLIENTS - 0.5
    target = rankdata(leaks, axis=1) / CLIENTS - 0.5
    predicted = np.empty_like(leaks)
    for federation in range(len(leaks)):
        others = np.arange(len(leaks)) != federation
        x, y = features[others].reshape(-1, features.shape[2]), target[others].ravel()
        weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ y)
        predicted[federation] = features[federation] @ weights
    return predicted
