"""How LMRA's attacks depend on the federation (Driouich et al. 2022, Figs. 2-4, 6, 7): one setting is moved at a time.

    python benchmarks/lmra_sweeps.py batch adult --data-dir DIR

Runs fedsim on the experiment files beside it, a run folder for each value, and goes on where it was stopped. Prints a
column for each value: means over the clients of seed 1, with 95 % intervals, floors and numbers in brackets. With more
local epochs there are fewer rounds, so that each client trains through its data a thousand times and the adversary
inspects a hundred messages.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fedsim.audit.evaluation.statistics import format_mean
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder, read_rows

HERE = Path(__file__).parent
ATTRIBUTE = {"adult": "sex", "leaf-synthetic": "sensitive", "flight-prices": "stops"}
FACES = "att-faces"


def settings(sweep: str, data: str) -> dict[int, dict[str, int]]:
    """By the value that is moved, what differs from the experiment file."""
    if sweep == "batch":
        values = (8, 32, 256) if data == FACES else (64, 512, 4096)
        return {value: {"training.batch_size": value} for value in values}
    if sweep == "epochs":
        return {
            value: {"training.local_epochs": value, "federation.rounds": 1000 // value, "recording.every": 10 // value}
            for value in (1, 2, 5, 10)
        }
    if sweep == "examples":
        values = (16, 64) if data == FACES else (64, 256, 1024)
        batch = 32 if data == FACES else 256
        return {value: {"partition.samples_per_client": value, "training.batch_size": batch} for value in values}
    if data == FACES:
        return {value: {"federation.clients": value} for value in (10, 20, 40)}
    return {value: dict.fromkeys(("federation.clients", "data.clients"), value) for value in (10, 20, 40, 100)}


def fedsim(*arguments: str, may_fail: bool = False) -> None:
    """Run the command, or end with its exit code; 1 is an attack that failed on some client, which may be."""
    done = subprocess.run([sys.executable, "-c", "from fedsim.cli.main import main; main()", *arguments], check=False)
    if done.returncode and not (may_fail and done.returncode == 1):
        sys.exit(done.returncode)
    if done.returncode:
        print(f"attacks failed, see above: {arguments[1]}", file=sys.stderr)


def measure(data: str, overrides: Mapping[str, int], folder: Path, data_dir: str, first: int | None) -> Path:
    """The run folder of one value, recorded, and its first so many clients attacked, or all."""
    run = folder / "-".join([data, *(f"{name.rpartition('.')[2]}{value}" for name, value in overrides.items())])
    changes = [word for name, value in overrides.items() for word in ("--set", f"{name}={value}")]
    beside = ["--data-dir", data_dir]
    begin = [str(HERE / f"lmra-{data}.toml"), "--out", str(run), *changes]
    fedsim("run", *(["--resume", str(run)] if run.exists() else begin), *beside)
    attacks = "lmra-faces-sweep-attacks.toml" if data == FACES else "lmra-sweep-attacks.toml"
    known = [] if data == FACES else ["--set", f"adversary.knowledge.partial_records={ATTRIBUTE[data]}"]
    config = OpenRun(run).read_experiment()
    assert config is not None
    attacked = [*range(config.federation.clients)][:first]
    victims = [] if first is None else ["--set", f"adversary.victims={attacked}"]
    fedsim("attack", str(run), str(HERE / attacks), *beside, *known, *victims, may_fail=True)
    return run


def table(runs: Mapping[int, Path], first: int | None) -> None:
    """One line for each attack and metric, in Markdown, of the first so many clients or of all."""
    cells: dict[tuple[str, str], dict[int, dict[tuple[str, str], tuple[float, float]]]] = {}
    for value, run in runs.items():
        for row in read_rows(RunFolder(run).scores):
            if not row["missing"] and (first is None or int(row["victim"]) < first):
                cell = cells.setdefault((row["attack"], row["metric"]), {}).setdefault(value, {})
                cell[row["victim"], "1"] = float(row["value"]), float(row["floor"])
    print(f"| attack | metric | {' | '.join(str(value) for value in runs)} |")
    print("|---" * (len(runs) + 2) + "|")
    for (attack, metric), columns in cells.items():
        texts = []
        for value in runs:
            cell = columns.get(value, {})
            found = {place: score for place, (score, _) in cell.items()}
            floor = sum(guess for _, guess in cell.values()) / max(1, len(cell))
            texts.append(f"{format_mean(found)} ({floor:.3f}; n = {len(cell)})" if cell else "")
        print(f"| {attack} | {metric} | {' | '.join(texts)} |")


def main() -> None:
    """Measure all values of one sweep on one data set and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", choices=["batch", "epochs", "examples", "clients"])
    parser.add_argument("data", choices=[*ATTRIBUTE, FACES])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/lmra-sweeps"))
    parser.add_argument("--values", type=int, nargs="*", help="only these of the values")
    parser.add_argument(
        "--first",
        type=int,
        help="attack so many clients only; sia on decoded models has no other candidates then",
    )
    given = parser.parse_args()
    if given.sweep == "clients" and given.data not in ("leaf-synthetic", FACES):
        parser.error("the other data sets have as many clients as they have")
    points = settings(given.sweep, given.data)
    chosen = given.values or list(points)
    if unknown := set(chosen) - set(points):
        parser.error(f"--values: {sorted(unknown)} are not among {sorted(points)}")
    table(
        {value: measure(given.data, points[value], given.out, given.data_dir, given.first) for value in chosen},
        given.first,
    )


if __name__ == "__main__":
    main()
