"""Small runs whose recordings, findings and scores must not move.

    python tests/golden/golden.py        # make expected.json anew, after a change that moves a figure and says why

Hashes are those of the machine that made them; another one rounds otherwise, and its scores are compared with a
tolerance.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedsim.audit.audit import open_audit
from fedsim.cli.main import main
from fedsim.recording.transcript import Transcript

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
RUNS = ("fedavg", "fedsgd", "one-example", "batch-norm", "defended", "tables", "linear", "texts")
TOLERANCE = 0.05
ROUNDED_AWAY = ("dlg", "idlg", "dlg-text")
"""Attacks whose L-BFGS turns rounding into other images; on another machine only the names of their scores count."""
Figures = dict[str, Any]


def machine() -> dict[str, str]:
    """What decides how sums are rounded."""
    processor = platform.processor()
    if (cpu_info := Path("/proc/cpuinfo")).is_file():
        # Processors of several generations share one name, so family and model count as well.
        lines = cpu_info.read_text().splitlines()
        values = [
            line.partition(":")[2].strip() for line in lines if re.match(r"(cpu family|model|model name)\t", line)
        ]
        processor = ", ".join(dict.fromkeys(values)) or processor
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": processor or platform.machine(),
    }


def fedsim(*words: str | Path) -> None:
    """The command line in this process."""
    with patch.object(sys, "argv", ["fedsim", *map(str, words)]), patch.object(sys, "path", [str(HERE), *sys.path]):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"fedsim {' '.join(map(str, words))} ended with {end.code}") from end


def run(name: str, folder: Path, *words: str) -> Figures:
    """The figures of one experiment of this folder, run into `folder`."""
    fedsim("run", HERE / f"{name}.toml", "--out", folder, "-q", *words)
    return figures(folder)


def foreign(own: Path, folder: Path) -> Figures:
    """The figures of the recording in the run `own`, attacked where nothing else is known of it."""
    (folder / "transcript").mkdir(parents=True)
    for file in (own / "transcript").glob("*.safetensors"):
        shutil.copy(file, folder / "transcript")
    truth = open_audit(own, None).case.truth(2, None)
    assert truth is not None
    spec = Path(shutil.copy(HERE / "foreign.toml", folder.with_name(f"{folder.name}.toml")))
    save_file({"data": truth.data, "labels": truth.labels}, spec.with_name("truth.safetensors"))
    fedsim("attack", folder, spec, "-q")
    return figures(folder)


def figures(folder: Path) -> Figures:
    """Hash of the messages, hash of each finding, and the scores."""
    findings = sorted((folder / "findings").glob("*/*.safetensors"))
    with (folder / "scores.csv").open() as file:
        scores = {
            "/".join(row[key] for key in ("attack", "round", "victim", "metric")): [
                row[key] for key in ("value", "floor", "ceiling")
            ]
            for row in csv.DictReader(file)
        }
    return {
        "messages": messages(folder),
        "findings": {f"{path.parent.name}/{path.stem}": digest(load_file(path)) for path in findings},
        "scores": scores,
    }


def messages(folder: Path) -> str:
    """Hash of every update in the recording, whatever its form on the disk."""
    total, transcript = hashlib.sha256(), Transcript(folder)
    for number in transcript.rounds:
        for client in transcript.clients(number):
            update = transcript.update(number, client)
            sent = {"gradient": dict(update.gradient)} if update.gradient is not None else {"after": dict(update.after)}
            states: dict[str, dict[str, Tensor]] = {"before": dict(update.before), **sent}
            total.update(f"{number} {client} {update.num_examples}".encode())
            for kind, state in states.items():
                total.update(f"{kind} {digest(state)}".encode())
    return total.hexdigest()


def digest(tensors: dict[str, Tensor]) -> str:
    """Hash of tensors by name, the order aside."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()


def differences(found: Figures, expected: Figures, *, exact: bool) -> list[str]:
    """What of `found` is not as expected, a line each; without `exact`, names and scores with a tolerance."""
    told = []
    if exact and found["messages"] != expected["messages"]:
        told.append("the messages have moved")
    for kind in ("findings", "scores"):
        for name in sorted(set(found[kind]) ^ set(expected[kind])):
            told.append(f"{kind}: {name} is {'new' if name in found[kind] else 'missing'}")
    for name in sorted(set(found["findings"]) & set(expected["findings"])):
        if exact and found["findings"][name] != expected["findings"][name]:
            told.append(f"finding {name} has moved")
    for name in sorted(set(found["scores"]) & set(expected["scores"])):
        ours, theirs = found["scores"][name], expected["scores"][name]
        moved = ours != theirs if exact else not all(map(_near, ours, theirs))
        if moved and (exact or name.partition("/")[0] not in ROUNDED_AWAY):
            told.append(f"score {name}: {ours}, expected {theirs}")
    return told


def _near(one: str, other: str) -> bool:
    if one == other or not one or not other:  # NaN is no number that anything is close to
        return one == other
    return math.isclose(float(one), float(other), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def make_all(room: Path) -> dict[str, Figures]:
    """The figures of all runs."""
    found = {name: run(name, room / name) for name in RUNS}
    return found | {"foreign": foreign(room / "fedavg", room / "foreign")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as room:
        EXPECTED.write_text(json.dumps({"machine": machine(), "runs": make_all(Path(room))}, indent=1) + "\n")
