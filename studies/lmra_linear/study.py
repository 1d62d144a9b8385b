"""Ten clients of some 40 examples each fit a linear regression; each has coefficients of its own."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsim.audit.audit import open_audit
from fedsim.audit.finding_files import load_finding
from fedsim.federation.config import Config, validate_tables
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
from fedsim.interfaces.findings import LocalModel
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from studies.running import RUNS, Row, keep_records

CLIENTS, EXAMPLES = 10, 40


def write_examples(features: int) -> Path:
    """Write the clients' examples: linear in normal inputs and in a hidden column of two values, with noise."""
    rng = np.random.default_rng(features)
    lines = [",".join(["client", *(f"x{place}" for place in range(features)), "hidden", "y"])]
    for client in range(CLIENTS):
        weights = rng.normal(size=features)
        inputs = rng.normal(size=(EXAMPLES * 5 // 4, features)) + 0.3 * rng.normal(size=features)
        hidden = rng.integers(0, 2, len(inputs))
        targets = inputs @ weights + 3 * hidden + rng.normal() + rng.normal(size=len(inputs)) / 2
        for numbers, category, target in zip(inputs, hidden, targets, strict=True):
            lines.append(",".join([f"c{client}", *map(str, numbers), "yes" if category else "no", str(target)]))
    return keep_records(RUNS / "lmra_linear" / f"{features}.csv", lines)


def flatten_state(state: State) -> Tensor:
    """Return all weights of a model as one vector."""
    return torch.cat([tensor.flatten().double() for tensor in state.values()])


def measure(sampled: float, weights: int, batch: int, messages: int = 0) -> Row:
    """Return how far claims and the models returned last are from the optima, relative to their norms.

    The two values of the hidden column have a weight each, which makes a constant. The attack asks for d + 1 messages.
    """
    rounds = round((messages or 3 * weights) / sampled)
    tables = {
        "data": {
            "name": "csv", "path": str(write_examples(weights - 2)), "target": "y", "task": "regression",
            "group": "client",
        },
        "partition": {"name": "natural"},
        "model": {"name": "linear", "bias": False},
        "training": {"local_steps": 3, "batch_size": batch, "learning_rate": 0.05},
        "strategy": {"name": "fedavg", "fraction_train": sampled},
        "federation": {"engine": "serial", "clients": CLIENTS, "rounds": rounds, "evaluate_every": 0},
        "adversary": {"victims": "all", "rounds": "all", "workers": 1, "knowledge": {"partial_records": "hidden"}},
        "attack": [{"name": "lmra-linear"}],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run_federation(validate_tables(Config, tables, "lmra_linear"), OpenRun(Path(folder) / "run"))
        audit = open_audit(Path(folder) / "run", None)
        audit.run()
        transcript = Transcript(audit.folder.path)
        claimed, returned, determined, received = [], [], [], []
        for path in sorted(audit.folder.findings.glob("*/*.safetensors")):
            finding, about = load_finding(path)
            assert isinstance(finding, LocalModel)
            client = int(str(about["victim"]))
            updates, optimum = list(transcript.updates(client)), flatten_state(audit.optimum(client))
            for distances, state in ((claimed, finding.state), (returned, updates[-1].after)):
                distances.append(float((flatten_state(state) - optimum).norm() / optimum.norm()))
            determined.append(int(finding.trace["determined_directions"]))
            received.append(len(updates))
    if not claimed:
        return dict.fromkeys(("received", "determined", "claimed", "returned"), "refused") | {"clients": 0}
    return {
        "received": f"{min(received)} to {max(received)}",
        "determined": f"{min(determined)} to {max(determined)}",
        "claimed": f"{statistics.median(claimed):.2g} ({max(claimed):.2g})",
        "returned": f"{statistics.median(returned):.2g} ({max(returned):.2g})",
        "clients": len(claimed),
    }
