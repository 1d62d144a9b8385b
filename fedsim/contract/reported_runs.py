"""Tiny run folders for checks of panels: a run with findings, a bare recording, and nothing recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedsim.audit.finding_files import save_finding
from fedsim.audit.scores import SCORE_COLUMNS
from fedsim.audit.variants import variant_columns
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.findings import Finding, Reconstruction, Texts
from fedsim.recording.header import RECORDING_FOLDER
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import Update
from fedsim.training.models.mlp import Mlp

HOSTILE = '"><img src=x onerror="hostile()">'
"""Text that is in every name of the run with findings; on a page that does not escape it, it is run."""
_CLIENTS, _ROUNDS = 5, 2
_EXPERIMENT = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 3},
    "model": {"name": "mlp", "hidden": [12]},
    "training": {"local_epochs": 1, "batch_size": 3},
    "federation": {"clients": _CLIENTS, "rounds": _ROUNDS},
    "adversary": {"when": "never"},
}


def write_runs(folder: Path) -> dict[str, Path]:
    """Write the run folders into `folder`; return them by what they hold."""
    # A run of fedsim with what attacks found.
    attacked = folder / f"run of {HOSTILE}"
    _write_experiment(attacked)
    _record_rounds(attacked)
    _write_findings(attacked)
    # A recording made elsewhere, and an experiment that was never run.
    recording, experiment = folder / "recording", folder / "experiment"
    _record_rounds(recording)
    _write_experiment(experiment)
    return {
        "a run with findings": attacked,
        "a recording without an experiment": recording,
        "an experiment of which nothing is recorded": experiment,
    }


def _write_experiment(run: Path) -> None:
    run.mkdir()
    (run / "experiment.toml").write_text(tomli_w.dumps(_EXPERIMENT), encoding="utf-8")


def _record_rounds(run: Path) -> None:
    """Record rounds of weights, in which one client fails."""
    with seed_globals("contract", "model"):
        network = Mlp(hidden=(12,)).build(Task((1, 8, 8), 10))
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    recorder = Recorder(run / RECORDING_FOLDER)
    for number in range(1, _ROUNDS + 1):
        updates = []
        for client in range(_CLIENTS):
            after = {name: (1 - 0.01 * client) * tensor for name, tensor in before.items()}
            payload = Payload.from_dense(after, "weights")
            updates.append(Update(round=number, client=client, before=before, payload=payload, num_examples=3))
        recorder.write(number, updates, failures={_CLIENTS: HOSTILE})


def _write_findings(run: Path) -> None:
    """Write claimed images and texts, a score of each, and what was measured by round."""
    images = torch.rand((3, 1, 8, 8), generator=generator("images"))
    labels = torch.tensor([1, 4, 4])
    curve = {"objective": torch.tensor([2.0, 1.0])}
    scores = []
    for victim in range(_CLIENTS):
        finding = Reconstruction(data=images, labels=labels, trace=curve)
        about = _save_finding(run, f"images of {HOSTILE}", victim, finding)
        scores.append(_score(about, 10.0 + victim))
    texts = Texts(tokens=torch.tensor([[1, 2], [3, 4]]), labels=labels[:2], trace=curve)
    scores.append(_score(_save_finding(run, f"texts of {HOSTILE}", 0, texts), 10.0))
    folder = OpenRun(run)
    folder.write_table(folder.scores, SCORE_COLUMNS, scores)
    epsilon = f"epsilon of {HOSTILE}"
    measured = []
    for number in range(1, _ROUNDS + 1):
        measured.append({"round": number, "client": "server", "accuracy": 0.5, "loss": 1.0, epsilon: number})
    folder.write_table(folder.metrics, ("round", "client", "accuracy", "loss", epsilon), measured)


def _save_finding(run: Path, attack: str, victim: int, finding: Finding) -> Mapping[str, Any]:
    """Save a finding; return its metadata."""
    about = {
        "attack": attack, "plugin": "dlg", "round": "1", "rounds": [1], "first_round": 1, "members": [],
        "victim": victim, "repeat": 0, "settings": {"source": HOSTILE}, "changed": {"source": HOSTILE}, "granted": [],
        "partial_records": "", "fingerprint": "", "variant": "0a1b", "command": f"fedsim attack {HOSTILE}",
        "code": None, "model_code": None, "warnings": [HOSTILE], "seconds": 1.0,
    }  # fmt: skip
    save_finding(finding, run / "findings" / finding.kind / f"round-1-client-{victim}-repeat-0.safetensors", about)
    return about


def _score(about: Mapping[str, Any], value: float) -> dict[str, Any]:
    """Return a row of `scores.csv`."""
    row: dict[str, Any] = dict.fromkeys(SCORE_COLUMNS, "") | variant_columns(about)
    for name in ("attack", "victim", "round", "repeat"):
        row[name] = about[name]
    row |= {"metric": "psnr", "value": value, "floor": 9.0, "floor_guess": HOSTILE, "ceiling": "inf"}
    return row | {"higher_is_better": True, "examples": 3, "seed": 0, "nearest_public": 8.0}
