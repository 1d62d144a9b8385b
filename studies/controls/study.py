"""Attacks on SCAFFOLD's clients in round 2, with and without what control variates added to their gradients.

In round 1 there are none yet. A server that saw all rounds knows them, so that attacks are given the move without
them. Here they are left in as well, as if nobody knew of them: the models that passed are taken for those of FedAvg.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fedsim
from fedsim.base.errors import RunError
from fedsim.federation.failed_attacks import read_failed_attacks
from fedsim.federation.run_folder import RunFolder
from fedsim.recording.control_variates import split_controls
from fedsim.recording.payloads import Payload, State
from fedsim.recording.wire_format import Update
from studies.running import Row
from studies.writing import column_values, markdown_table, select_rows

CLIENTS, ATTACKED_ROUND = 6, 2
ATTACKS: list[dict[str, Any]] = [
    {"name": "inverting-gradients", "iterations": 250},
    {"name": "sme", "iterations": 250},
    {"name": "spear-ica"},
]
METRICS = ("psnr", "identified", "exact")
TITLES = {
    ("fedavg", "none"): "`fedavg`",
    ("scaffold", "known"): "`scaffold`, control variates known",
    ("scaffold", "unknown"): "`scaffold`, control variates left in",
}


def measure(algorithm: str, controls: str, seed: int) -> list[Row]:
    """Attack all clients of one federation in round 2; a row for each attack, client and metric."""
    tables = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 4},
        "model": {"name": "mlp", "hidden": [64]},
        "algorithm": {"name": algorithm},
        "strategy": {"name": algorithm},
        "training": {"local_epochs": 2, "batch_size": 4, "learning_rate": 0.1},
        "federation": {
            "engine": "serial", "clients": CLIENTS, "rounds": ATTACKED_ROUND, "seed": seed, "evaluate_every": 0,
        },
        "adversary": {"victims": "all", "rounds": [ATTACKED_ROUND], "workers": 1},
        "attack": ATTACKS,
    }  # fmt: skip
    leaves_in = patch("fedsim.recording.transcript.remove_controls", leave_controls_in)
    with tempfile.TemporaryDirectory() as folder, leaves_in if controls == "unknown" else nullcontext():
        try:
            fedsim.run(tables, out=Path(folder) / "run")
        except RunError:
            # spear-ica finds more inputs than examples where control variates are left in.
            failed = {failure.attack for failure in read_failed_attacks(RunFolder(Path(folder) / "run"))}
            if controls != "unknown" or failed != {"spear-ica"}:
                raise
        scores = fedsim.open(Path(folder) / "run").scores
    kept = scores[scores["metric"].isin(METRICS)].rename(columns={"victim": "client"})
    rows: list[Row] = kept[["client", "attack", "metric", "value", "floor"]].to_dict("records")
    return rows


def leave_controls_in(update: Update, own_control: State) -> Update:
    """Return the update of the model alone, as it was sent."""
    del own_control
    before, _ = split_controls(update.before)
    after, _ = split_controls(update.after)
    return replace(update, before=before, payload=Payload.from_dense(after, "weights"))


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: means over clients and seeds, and of how many clients a claim is beyond its floor."""
    lines = []
    for (algorithm, controls), title in TITLES.items():
        line, of_case = [title], select_rows(rows, algorithm=algorithm, controls=controls)
        for attack in ("inverting-gradients", "sme"):
            claimed = select_rows(of_case, attack=attack, metric="psnr")
            beyond = sum(float(row["value"]) > float(row["floor"]) for row in claimed)
            identified = column_values(select_rows(of_case, attack=attack, metric="identified"), "value").mean()
            value, floor = (column_values(claimed, column).mean() for column in ("value", "floor"))
            line += [f"{value:.1f} dB ({beyond})", f"{floor:.1f} dB", f"{100 * identified:.0f} %"]
        exact = select_rows(of_case, attack="spear-ica", metric="exact")
        lines.append([*line, f"{100 * column_values(exact, 'value').mean():.0f} %" if exact else "refused"])
    head = ["clients"]
    for attack in ("inverting-gradients", "sme"):
        head += [f"`{attack}`: PSNR", "floor", "`identified`"]
    return {"": markdown_table([*head, "`spear-ica`: `exact`"], lines)}
