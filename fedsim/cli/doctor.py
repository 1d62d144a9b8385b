"""`fedsim doctor`."""

from __future__ import annotations

from itertools import groupby

from fedsim.cli.options import DataDir, finish, use_data_dir
from fedsim.cli.plugins import laid_out
from fedsim.workflow.doctor import Told, examined

_WIDTH = 16


def doctor(data_dir: DataDir = None) -> None:
    """Say what this machine can run: versions, cores, memory, GPU, data sets, weights for LPIPS, plug-ins.

    It ends with 1 where something is broken that fedsim cannot do without.
    """
    use_data_dir(data_dir)
    broken: list[Told] = []
    for number, (part, items) in enumerate(groupby(examined(), key=lambda told: told.part)):
        print(f"{chr(10) * bool(number)}{part}:")  # noqa: T201
        for told in items:
            print(laid_out(f"{told.name:<{_WIDTH}}  ", [told.text]), flush=True)  # noqa: T201
            broken += [told] * told.broken
    finish([f"{told.name}: {told.text}" for told in broken])
