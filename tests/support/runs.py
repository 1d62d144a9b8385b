"""What two runs must have in common."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from fedsim.federation.run_folder import RunFolder, read_exposures, read_rows
from fedsim.recording.transcript import Transcript


def hash_recording(folder: RunFolder) -> dict[str, str]:
    """Return the hash of each file of the transcript."""
    files = sorted(folder.transcript.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read_metrics(folder: RunFolder) -> list[dict[str, str]]:
    """Return the rows of `metrics.csv` without what the clock says."""
    rows = read_rows(folder.metrics)
    for row in rows:
        row.pop("seconds", None)
    return rows


def read_checkpoint(folder: RunFolder, prefix: str = "") -> dict[str, bytes]:
    """Return the bytes of the tensors that the run ended with."""
    with safe_open(folder.checkpoint, framework="np") as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
        return {name: file.get_tensor(name).tobytes() for name in names}


def assert_same_runs(run: Path | RunFolder, other: Path | RunFolder) -> None:
    """Check that both wrote the same: recording, figures of each round, measures, and final state."""
    left, right = (RunFolder(path) if isinstance(path, Path) else path for path in (run, other))
    assert hash_recording(left) == hash_recording(right)
    assert Transcript(left.path).hash() == Transcript(right.path).hash()
    assert read_metrics(left) == read_metrics(right)
    assert read_exposures(left) == read_exposures(right)
    assert left.checkpoint.read_bytes() == right.checkpoint.read_bytes()


def read_dossier(folder: Path) -> dict[str, Any]:
    """Return the dossier in a folder, without its seal."""
    content: dict[str, Any] = json.loads((folder / "dossier.json").read_text())["dossier"]
    return content
