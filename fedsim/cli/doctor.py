"""Command `fedsim doctor`."""

from __future__ import annotations

from itertools import groupby

from fedsim.api.doctor import MachineCheck, run_checks
from fedsim.cli.options import DataDir, finish
from fedsim.cli.plugins import lay_out

_NAME_WIDTH = 16


def doctor(data_dir: DataDir = None) -> None:
    """Say what this machine can run: versions, cores, memory, GPU, data sets, weights for LPIPS, plug-ins.

    The exit code is 1 if something that fedsim needs is broken.
    """
    broken: list[MachineCheck] = []
    for number, (part, results) in enumerate(groupby(run_checks(), key=lambda result: result.part)):
        print(f"{chr(10) * bool(number)}{part}:")  # noqa: T201
        for result in results:
            print(lay_out(f"{result.name:<{_NAME_WIDTH}}  ", [result.text]), flush=True)  # noqa: T201
            if result.broken:
                broken.append(result)
    finish([f"{result.name}: {result.text}" for result in broken])
