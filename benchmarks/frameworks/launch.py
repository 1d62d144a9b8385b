"""Start one framework in a fresh process, and watch it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from frameworks.clock import MARK
from frameworks.jobs import Task

BENCHMARKS = Path(__file__).resolve().parent.parent
_ENVIRONMENT = {
    # This checkout, whatever is installed; Ray's actors inherit it and so find the plug-ins.
    "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)]),
    "OMP_NUM_THREADS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # As the command `fedsim` sets them (`fedsim.cli.allocator`), so that freed memory is reused; for all frameworks.
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_MMAP_MAX_": "0",
}
_LIMIT = 3600.0
_PAUSE = 0.1


class BenchmarkError(Exception):
    """A process failed; the message ends with what it said last."""


def run_framework(python: Path, framework: str, task: Task, *, memory: bool) -> dict[str, Any]:
    """Return what a framework measured in a process of its own, with what shows from outside.

    Returns:
        Its answer, besides `start_s`, seconds from the command to the end of the first round, and if `memory` is asked
        for `peak_mb`, the highest proportional set size of that process (Ray's others not included).

    Raises:
        BenchmarkError: it failed, or took more than an hour.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, peak = Path(name), 0.0
        environment = os.environ | _ENVIRONMENT | {MARK: uuid.uuid4().hex, "FLWR_HOME": str(folder / "flwr")}
        started = time.monotonic()
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            command = [str(python), "-m", "frameworks", framework, json.dumps(asdict(task))]
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
        while memory and process.poll() is None and time.monotonic() < started + _LIMIT:
            peak = max(peak, _pss_mb(process.pid))
            time.sleep(_PAUSE)
        try:
            code = process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            raise BenchmarkError(f"took more than {_LIMIT:.0f} s") from None
        if code:
            last = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-3:]
            raise BenchmarkError(f"exit code {code}: {' | '.join(last)}")
        measured: dict[str, Any] = json.loads((folder / "stdout").read_text())
    measured["start_s"] = measured.pop("first_round") - started
    return measured | ({"peak_mb": peak} if memory else {})


def _pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
