"""Measure how far one command walks through the house: files entered, crossings between files, climbs.

    python tests/language/walks.py attack RUN          # fedsim attack RUN, in this process
    python tests/language/walks.py run FILE.toml --out RUN

A crossing is a call from a function of one file into a function of another, counted once however
often it happens. A climb is a crossing into a file on a floor above the caller's; the floors are
those of import-linter in pyproject.toml. Visits are entries from outside into a file, counted each
time: they show what is asked again and again. Attacks in processes of their own are not followed.
"""

from __future__ import annotations

import sys
import threading
import tomllib
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PRODUCT = tuple(f"{ROOT}/{package}/" for package in ("fedsim", "strategies", "adversaries", "clients"))
VISITED = ("recording/manifest.py", "integrity.py", "audit/audit.py", "auditing/audit.py")
"""Files whose visits are printed: a run folder's seal should be asked once."""

Place = tuple[str, str]


class Walk:
    """What a profiler sees of one command: crossings between files of the product, and visits of each file."""

    def __init__(self) -> None:
        self.crossings: set[tuple[Place, Place]] = set()
        self.visits: Counter[Place] = Counter()

    def follow(self, frame: FrameType, event: str, _: Any) -> None:
        """Note one call, if it enters a file of the product from another one."""
        if event != "call" or not frame.f_code.co_filename.startswith(PRODUCT):
            return
        caller = _product_caller(frame.f_back)
        if caller is None or caller.f_code.co_filename == frame.f_code.co_filename:
            return
        self.crossings.add((_place(caller), _place(frame)))
        self.visits[_place(frame)] += 1

    def files(self) -> set[str]:
        """Return the files that were entered."""
        return {callee[0] for _, callee in self.crossings}

    def climbs(self) -> set[tuple[Place, Place]]:
        """Return the crossings into a file above the caller's floor."""
        floors = _floors()
        return {
            (caller, callee)
            for caller, callee in self.crossings
            if _floor(callee[0], floors) < _floor(caller[0], floors)
        }


def _product_caller(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not frame.f_code.co_filename.startswith(PRODUCT):
        frame = frame.f_back
    return frame


def _place(frame: FrameType) -> Place:
    return frame.f_code.co_filename.removeprefix(f"{ROOT}/"), frame.f_code.co_qualname


def _floors() -> list[list[str]]:
    """Return the layers of the contract with most floors, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = [one["layers"] for one in settings["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    layers = max(contracts, key=len)
    return [[module.strip() for module in layer.replace("|", ":").split(":")] for layer in layers]


def _floor(file: str, floors: list[list[str]]) -> float:
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for number, modules in enumerate(floors):
        if any(module == name or module.startswith(f"{name}.") for name in modules):
            return number
    return -0.5  # strategies, clients and adversaries stand above the core, the public names beside them


def main(words: list[str]) -> None:
    """Run one command of fedsim under the profiler and print what it crossed."""
    from fedsim.cli.main import main as command_line

    walk = Walk()
    sys.argv = ["fedsim", *words]
    threading.setprofile(walk.follow)
    sys.setprofile(walk.follow)
    try:
        command_line()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # None ends it, which the stubs do not know
    print(f"files entered      {len(walk.files())}")
    print(f"crossings          {len(walk.crossings)}")
    print(f"climbs             {len(walk.climbs())}")
    for file in sorted(walk.files()):
        if file.endswith(VISITED):
            visits = sum(count for (path, _), count in walk.visits.items() if path == file)
            print(f"visits of {file}: {visits}")
            for (path, function), count in sorted(walk.visits.items()):
                if path == file:
                    print(f"    {count:4} {function}")


if __name__ == "__main__":
    main(sys.argv[1:])
