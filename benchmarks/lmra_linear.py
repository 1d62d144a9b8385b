"""LMRA's Propositions 1, 3 and 4 in federations: python benchmarks/lmra_linear.py (Driouich et al. 2022, App. B).

Ten clients of some 40 examples each fit a linear regression of d weights. Targets are linear in standard normal inputs
and a hidden column of two values, with noise; each client has coefficients of its own. For each setting it prints how
far what `lmra-linear` claims is from the client's optimum (least squares), relative to its norm, median and largest
over clients, the same of the model that the client returned last, and how many directions its messages determine.
Then, for Proposition 4, how often Eq. 3 with the optimal model tells the hidden column, and the bound 1 - 4 E /
theta[s]^2. Proposition 2 says that fewer than some d messages are not enough; the attack asks for d + 1.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.finding_files import load_finding
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
from fedsim.interfaces.findings import Inference, LocalModel
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State

CLIENTS, EXAMPLES, FULL = 10, 40, 1000


def table(path: Path, features: int) -> None:
    """Write the clients' examples."""
    rng = np.random.default_rng(features)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", *(f"x{place}" for place in range(features)), "hidden", "y"])
        for client in range(CLIENTS):
            weights = rng.normal(size=features)
            inputs = rng.normal(size=(EXAMPLES * 5 // 4, features)) + 0.3 * rng.normal(size=features)
            hidden = rng.integers(0, 2, len(inputs))
            targets = inputs @ weights + 3 * hidden + rng.normal() + rng.normal(size=len(inputs)) / 2
            for row, own, target in zip(inputs, hidden, targets, strict=True):
                writer.writerow([f"c{client}", *row, "yes" if own else "no", target])


def attacked(folder: Path, weights: int, messages: int, batch: int, sampled: float, attack: dict[str, str]) -> Audit:
    """One federation, recorded and attacked; in each round the share `sampled` of the clients takes part."""
    path = folder / f"{weights}.csv"
    if not path.is_file():
        table(path, weights - 2)  # the two values of the hidden column have a weight each, which makes a constant
    tables = {
        "data": {"name": "csv", "path": str(path), "target": "y", "task": "regression", "group": "client"},
        "partition": {"name": "natural"},
        "model": {"name": "linear", "bias": False},
        "training": {"local_steps": 3, "batch_size": batch, "learning_rate": 0.05},
        "strategy": {"name": "fedavg", "fraction_train": sampled},
        "federation": {
            "engine": "serial", "clients": CLIENTS, "rounds": round(messages / sampled), "evaluate_every": 0,
        },
        "adversary": {
            "victims": "all", "rounds": "all", "workers": 1, "knowledge": {"partial_records": "hidden"},
        },
        "attack": [attack],
    }  # fmt: skip
    made = OpenRun(folder / "-".join(map(str, (weights, messages, batch, sampled, *attack.values()))))
    run_federation(validate_tables(Config, tables, "lmra_linear"), made)
    audit = open_audit(made.path, None)
    for failure in audit.run():
        print(failure)
    return audit


def flat(state: State) -> Tensor:
    """All weights of a model."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def distances(audit: Audit) -> str:
    """The columns of one line."""
    transcript = Transcript(audit.folder.path)
    claimed, returned, determined, received = [], [], [], []
    for path in sorted(audit.folder.findings.glob("*/*.safetensors")):
        finding, about = load_finding(path)
        assert isinstance(finding, LocalModel)
        client = int(str(about["victim"]))
        updates = list(transcript.updates(client))
        optimum = flat(audit.optimum(client))
        for far, state in ((claimed, finding.state), (returned, updates[-1].after)):
            far.append(float((flat(state) - optimum).norm() / optimum.norm()))
        determined.append(int(finding.trace["determined_directions"]))
        received.append(len(updates))
    if not claimed:
        return "refused for all clients"
    told = " | ".join(f"{statistics.median(far):.2g} ({max(far):.2g})" for far in (claimed, returned))
    return f"{min(received)} to {max(received)} | {min(determined)} to {max(determined)} | {told} | {len(claimed)}"


def hidden_column(audit: Audit) -> None:
    """Proposition 4, client by client."""
    assert audit.experiment is not None
    data, column = audit.experiment.data, audit.experiment.dataset.column("hidden")
    for path in sorted(audit.folder.findings.glob("*/*.safetensors")):
        finding, about = load_finding(path)
        assert isinstance(finding, Inference)
        client = int(str(about["victim"]))
        inputs, targets = data.train(client)
        weights = flat(audit.optimum(client))
        first, second = weights[column.features]
        error = (data.to_model(inputs).double() @ weights - targets).square().mean()
        right = (finding.predictions == column.values(inputs)).double().mean()
        print(f"client {client}: {right:.3f}, at least {1 - 4 * error / (second - first) ** 2:.3f}")


def main() -> None:
    """Print all lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(
        "| clients a round | batch | d | messages | directions | claimed | last-returned | clients |\n"
        + "|---" * 8
        + "|"
    )
    full = [(d, 3 * d, FULL, sampled) for sampled in (0.5, 1.0) for d in (4, 8, 16, 32)]
    mini = [(4, messages, 8, 0.5) for messages in (20, 100, 400, 1600)]
    with TemporaryDirectory() as name:
        for weights, messages, batch, sampled in full + mini:
            audit = attacked(Path(name), weights, messages, batch, sampled, {"name": "lmra-linear"})
            own = "all" if batch == FULL else str(batch)
            print(f"| {round(sampled * CLIENTS)} | {own} | {weights} | {distances(audit)} |", flush=True)
        print("\nEq. 3 with the optimal model, d = 8:")
        hidden_column(attacked(Path(name), 8, 1, FULL, 1.0, {"name": "aia-model", "source": "optimal"}))


if __name__ == "__main__":
    main()
