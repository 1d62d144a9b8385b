"""Keeps what `fedsim reproduce` got: `python docs/keep_results.py runs/reproduce/*/result.toml`.

Each result goes to `fedsim/api/reproduce/kept/PAPER-SCALE.toml`, in the place of an older one for the same table and
scale;
`python docs/paper_pages.py` then shows them.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedsim.api.reproduce.papers import PACKAGE_FOLDER, format_kept, read_papers

FOLDER = PACKAGE_FOLDER / "kept"
HEAD = "# Written by `python docs/keep_results.py` from what `fedsim reproduce` got.\n"
Tables = dict[str, Any]


def keep(results: Iterable[Path], folder: Path = FOLDER) -> list[Path]:
    """Put results into the files of their papers, tables in the order of the paper; says which files were written."""
    files: dict[Path, Tables] = {}
    for path in results:
        result = tomllib.loads(path.read_text(encoding="utf-8"))
        [one] = result["kept"]
        place = folder / f"{result['paper']}-{one['name']}.toml"
        file = files.setdefault(place, before(place, result["paper"]))
        file["kept"] = [other for other in file["kept"] if other["table"] != one["table"]] + [one]
    for place, file in files.items():
        order = list(read_papers()[file["paper"]].table)
        file["kept"].sort(key=lambda one: order.index(one["table"]))
        place.write_text(HEAD + format_kept(file), encoding="utf-8")
    return list(files)


def before(place: Path, paper: str) -> Tables:
    """What a file has been keeping."""
    found: Mapping[str, Any] = tomllib.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    return {"paper": paper, "kept": found.get("kept", [])}


if __name__ == "__main__":
    for written in keep(map(Path, sys.argv[1:])):
        print(written)
