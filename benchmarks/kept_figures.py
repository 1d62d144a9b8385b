"""Figures that follow from the tables in `results/`, written to `fedsim/api/reproduce/kept/*-computed.toml`.

`python benchmarks/kept_figures.py` takes a minute. After it `python docs/paper_pages.py` writes the pages. The day of a
result stays where its figures have not changed.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import angular_tables as angular
import lavp_local as local
import lavp_tables as lavp
import lmra_defenses as lmra
import tgias_defenses as tgias
import tomli_w
from kept_scores import read

FOLDER = Path(__file__).parent.parent / "fedsim" / "api" / "reproduce" / "kept"
HEAD = "# Written by `python benchmarks/kept_figures.py` out of benchmarks/results.\n"
Tables = dict[str, Any]
ANGULAR = """
export FEDSIM_DATA=DIR OMP_NUM_THREADS=1
python benchmarks/angular_study.py train   --epochs 0 1 2 5 10
python benchmarks/angular_study.py attack  --epochs 0 1 2 5 10 --batches 0 1
python benchmarks/angular_study.py measure --epochs 0 1 2 5 10 --batches 0 1 # ends with expected-error, here of batch 0
python benchmarks/angular_study.py floors  --batches 0 1                     # noise and mean colour
""".strip()
LAVP = """
export FEDSIM_DATA=DIR OMP_NUM_THREADS=1 # {told}
python benchmarks/lavp_study.py train   --data {data}
python benchmarks/lavp_study.py attack  --data {data} --images {images}
python benchmarks/lavp_study.py measure --data {data} --images {images}
""".strip()
LOCAL = """
export FEDSIM_DATA=DIR OMP_NUM_THREADS=1 # after the above; ten minutes of one core
python benchmarks/lavp_local.py
""".strip()
LMRA = """
# keep memory: two thirds less time for AT&T's gradients; 45 minutes of one core, 25 of them AT&T
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648
python benchmarks/lmra_defenses.py adult leaf-synthetic att-faces --data-dir DIR
""".strip()
TGIAS = """
# a minute of one core a victim and defense
python benchmarks/tgias_defenses.py none noise mask --seeds 31 32 33 34 35 --data-dir DIR
""".strip()
LAVP_IMAGES = {
    "cifar10": {"images": 50, "told": "an hour and a half of one core"},
    "cifar100": {"images": 25, "told": "as long; then LeNet with 50"},
    "photographs": {"images": 20, "told": "half a minute to one and a half of one core an image and distance"},
}
LAVP_TABLES = {"cifar10": "table1-cifar10", "cifar100": "table1-cifar100", "photographs": "table2"}


def angular_figures() -> Tables:
    """Table 1 and Figs. 4, 6 and 7 of the angular Lipschitz paper."""
    found = angular.points()
    tables = {
        "states": angular.all_states(found),
        "widths": angular.widths(found),
        "correlations": angular.correlations(found),
        "against-norm": angular.against_norm(found),
    }
    note = "Mean and standard deviation over two batches."
    intervals = "Within a batch, over states, averaged; intervals by drawing states anew."
    return {
        "paper": "angular-lipschitz",
        "kept": [
            _kept("table1", "ten epochs", ANGULAR, angular.table_1(found), note),
            _kept("fig6", "ten epochs", ANGULAR, angular.figure_6(found), intervals),
        ],
        "details": [_details(name, ANGULAR if name == "states" else "", *table) for name, table in tables.items()],
    }


def lavp_figures() -> Tables:
    """LAVP's Tables 1 to 4."""
    quality, measured = lavp.qualities(), lavp.measures()
    kept = [
        _kept(
            f"{table}-{distance}",
            name,
            LAVP.format(data=data, **LAVP_IMAGES[data]),
            rows,
            _images(data, distance, quality),
        )
        for data, table in LAVP_TABLES.items()
        for distance in lavp.DISTANCES
        for name, rows in lavp.figures(data, distance, quality, measured).items()
    ]
    return {"paper": "lavp", "kept": kept, "details": [_details("local", LOCAL, *local.table(measured))]}


def _images(data: str, distance: str, quality: Mapping[tuple[str, str, str, str], Mapping[str, float]]) -> str:
    counts = {model: len(quality.get((data, model, distance, "mse"), ())) for model in lavp.MODELS[data]}
    told = ", ".join(f"{model} {count}" for model, count in counts.items())
    return f"Spearman's correlation within each of these networks, averaged; images reconstructed: {told}."


def lmra_figures() -> Tables:
    """LMRA's Table 10."""
    note = "Means over ten clients, seed 1, with 95 % intervals."
    found = lmra.figures(read(lmra.RESULTS))
    kept = [
        _kept("table10", name, LMRA, {row: f for row, f in rows.items() if f}, note) for name, rows in found.items()
    ]
    return {"paper": "lmra", "kept": kept}


def tgias_figures() -> Tables:
    """Fig. 6 of TGIAs-RO."""
    scores = read(tgias.RESULTS)
    note = "Five victims with data and weights of their own; means with 95 % intervals."
    kept = [_kept("fig6", name, TGIAS, rows, note) for name, rows in tgias.figures(scores).items()]
    return {"paper": "tgias-ro", "kept": kept, "details": [_details("fig6", "", *tgias.table(scores))]}


def _kept(table: str, name: str, command: str, rows: Mapping[str, Mapping[str, str]], note: str) -> Tables:
    return {"table": table, "name": name, "command": command, "note": note, "rows": rows}


def _details(name: str, command: str, head: list[str], rows: list[list[str]]) -> Tables:
    return {"name": name, "command": command, "head": head, "rows": rows}


def computed() -> Iterator[tuple[Path, Tables]]:
    """Each file and what belongs in it, without days."""
    for tables in (angular_figures(), lavp_figures(), lmra_figures(), tgias_figures()):
        yield FOLDER / f"{tables['paper']}-computed.toml", tables


def dated(path: Path, tables: Tables) -> Tables:
    """With the day of each result: that in the file if its figures are the same, else today."""
    before = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for part in ("kept", "details"):
        for one in tables.get(part, ()):
            same = (old["date"] for old in before.get(part, ()) if without_day(old) == one)
            one["date"] = next(same, datetime.datetime.now(tz=datetime.UTC).date())
    return tables


def without_day(result: Tables) -> Tables:
    """A result in a file, as it is computed."""
    return {key: value for key, value in result.items() if key != "date"}


if __name__ == "__main__":
    for path, tables in computed():
        path.write_text(HEAD + tomli_w.dumps(dated(path, tables)), encoding="utf-8")
