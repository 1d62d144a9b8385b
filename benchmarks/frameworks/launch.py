"""Start one framework, or the fedsim command, in a fresh process, and watch it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from frameworks.clock import MARK

BENCHMARKS = Path(__file__).resolve().parent.parent
PROJECT = BENCHMARKS.parent
OURS = PROJECT / ".venv" / "bin"
PEERS = PROJECT / ".venv-peers" / "bin"
_ENVIRONMENT = {
    # This checkout, whatever is installed; Ray's actors inherit it and so find the plug-ins.
    "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(PROJECT)]),
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_LIMIT = 3600.0
_SAMPLING = 0.1


class BenchmarkError(Exception):
    """A process failed; the message ends with what it said last."""


def framework(python: Path, arguments: list[str], *, memory: bool = False) -> dict[str, Any]:
    """What `python -m frameworks ARGUMENTS` measured, with what shows from outside.

    Returns:
        Its answer, besides `start_s`, seconds from the command to the end of the first round, and
        if `memory` is asked for `peak_mb`, the highest proportional set size of that process
        (Ray's others not included).
    """
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = _start([str(python), "-m", "frameworks", *arguments], Path(folder))
        peak = 0.0
        while memory and process.poll() is None and time.monotonic() < started + _LIMIT:
            peak = max(peak, _pss_mb(process.pid))
            time.sleep(_SAMPLING)
        measured = json.loads(_finish(process, Path(folder), started)[0])
    seen = {"peak_mb": peak} if memory else {}
    return measured | seen | {"start_s": measured.pop("first_round") - started}


def fedsim(experiment: Path, *overrides: str) -> dict[str, float]:
    """Seconds of `fedsim run`: `start_s` to the end of the first round, `total_s` to the prompt.

    A round is over when its row is in metrics.csv.
    """
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "run" / "metrics.csv"
        command = [str(OURS / "fedsim"), "run", str(experiment), "--out", str(rows.parent)]
        started = time.monotonic()
        process = _start([*command, *(word for override in overrides for word in ("--set", override))], Path(folder))
        while not rows.exists() and process.poll() is None:
            time.sleep(0.01)
        first = time.monotonic() - started
        total = _finish(process, Path(folder), started)[1]
    return {"start_s": first, "total_s": total}


def imports(modules: list[str]) -> dict[str, float]:
    """Seconds that a fresh process takes to import `modules` and leave."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = _start([str(OURS / "python"), "-c", f"import {', '.join(modules)}"], Path(folder))
        return {"total_s": _finish(process, Path(folder), started)[1]}


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | _ENVIRONMENT | {MARK: uuid.uuid4().hex, "FLWR_HOME": str(folder / "flwr")}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)


def _finish(process: subprocess.Popen[bytes], folder: Path, started: float) -> tuple[str, float]:
    """What it printed, and seconds since `started`."""
    try:
        code = process.wait(_LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        raise BenchmarkError(f"took more than {_LIMIT:.0f} s") from None
    seconds = time.monotonic() - started
    if code:
        said = (folder / "stderr").read_text(errors="replace").strip().splitlines()
        raise BenchmarkError(f"exit code {code}: {' | '.join(said[-3:])}")
    return (folder / "stdout").read_text(), seconds


def _pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
