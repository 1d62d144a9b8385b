"""What a first linear layer gives away, by N, E, learning rate, width and all that docs/exact.md has tables of.

Ten clients a cell, three seeds, one federation each, through the round loop. `python benchmarks/exact_study.py
--data-dir DIR` takes about two hours of 2 cores, keeps what is done in benchmarks/results/exact.csv, goes on from it;
`--cells 'mnist E'` runs those whose name begins so. `python benchmarks/exact_tables.py` shows what was found.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, ClassVar
from unittest.mock import patch

import torch

import fedsim
from fedsim.base.errors import FedsimError, RunError
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State

RESULTS = Path(__file__).parent / "results" / "exact.csv"
SEEDS, CLIENTS = (1, 2, 3), 10
COLUMNS = (
    *("cell", "seed", "client", "attack", "n"),
    *("exact", "floor", "twins", "certified", "false", "psnr", "worst", "labels", "seconds"),
)
NONE = Paper(title="Part of a study, published nowhere", authors="fedsim", venue="fedsim", year=2026, url="")


@dataclass(frozen=True, kw_only=True)
class RelativeNoise(Defense):
    """Gaussian noise on the update, whose norm is that of the update times `share`."""

    share: float
    paper: ClassVar[Paper] = NONE

    def on_update(self, update: State, context: LocalContext) -> State:
        """See Defense."""
        sizes = [(float(tensor.square().sum()), tensor.numel()) for tensor in update.values()]
        deviation = self.share * math.sqrt(sum(s for s, _ in sizes) / sum(n for _, n in sizes))
        return {
            name: tensor + deviation * torch.randn(tensor.shape, generator=context.rng)
            for name, tensor in update.items()
        }


@dataclass(frozen=True, kw_only=True)
class Largest(Defense):
    """Only the largest numbers of each tensor of the update are sent, a `share` of them."""

    share: float
    paper: ClassVar[Paper] = NONE

    def on_update(self, update: State, context: LocalContext) -> State:
        """See Defense."""
        return {name: self._cut(tensor) for name, tensor in update.items()}

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        least = tensor.abs().flatten().kthvalue(1 + int((1 - self.share) * (tensor.numel() - 1))).values
        return torch.where(tensor.abs() >= least, tensor, 0)


@dataclass(frozen=True, kw_only=True)
class Rounded(Defense):
    """The update is sent in float16."""

    paper: ClassVar[Paper] = NONE

    def on_update(self, update: State, context: LocalContext) -> State:
        """See Defense."""
        return {name: tensor.half().float() for name, tensor in update.items()}


@dataclass(frozen=True)
class Cell:
    """One setting.

    Attributes:
        name: data set, what is changed of its base, and to what.
        set: the changed settings.
        defense: of clients, if any.
        beside: `OTHERS` attack the same victims.
        rounds: more than one are read together.
        alone: the only attack, if it is not `spear-ica` with `cocktail-party`.
    """

    name: str
    set: Mapping[str, Any] = field(default_factory=dict)
    defense: Defense | None = None
    beside: bool = False
    rounds: int = 1
    alone: str = ""


BASES: dict[str, dict[str, Any]] = {
    "mnist": {
        "data": {"name": "mnist"},
        "partition": {"name": "natural", "min_examples": 60, "samples_per_client": 32},
        "model": {"name": "mlp", "hidden": [400, 400]},
        "training": {"local_epochs": 10, "batch_size": 8, "learning_rate": 0.01},
    },
    "cifar10": {
        "data": {"name": "cifar10"},
        "partition": {"name": "iid", "samples_per_client": 24},
        "model": {"name": "mlp", "hidden": [400]},
        "training": {"local_epochs": 5, "batch_size": 8, "learning_rate": 0.01},
    },
    "adult": {
        "data": {"name": "adult"},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [100, 100]},
        "training": {"local_epochs": 1, "batch_size": 8, "learning_rate": 0.05},
    },
}
OTHERS = [
    {"name": "sme"},
    {"name": "inverting-gradients", "label": "ig"},
    {"name": "inverting-gradients", "step_size": 0.1, "signed": True, "tv_weight": 1e-4},
]
"""IG as SME runs it, and as its own authors do."""
REFINED = {"refine": True, "label": "cocktail-party, refined"}


def cells() -> Iterator[Cell]:
    """All of them."""
    yield from axis("mnist", "N", "partition.samples_per_client", (8, 16, 64, 100))
    yield from axis("mnist", "E", "training.local_epochs", (1, 5, 20, 50))
    yield from axis("mnist", "rate", "training.learning_rate", (0.001, 0.03, 0.1, 0.3))
    yield from axis("mnist", "width", "model.hidden", ([100, 100], [200, 200], [1000, 1000]))
    yield from axis("mnist", "depth", "model.hidden", ([400], [400, 400, 400], [400] * 4))
    for trained in (1, 5, 20):
        changed = {"federation.rounds": trained + 1, "adversary.rounds": [trained + 1]}
        yield Cell(f"mnist trained rounds {trained}", changed)
    for momentum in (0.5, 0.9):
        yield Cell(f"mnist momentum {momentum}", {"training.momentum": momentum})
    yield Cell("mnist optimizer adam", {"training.optimizer": "adam", "training.learning_rate": 0.001})
    yield Cell("mnist weight decay 0.001", {"training.weight_decay": 0.001})
    yield Cell("mnist BatchNorm behind the layer", {"model.batch_norm": True})
    for share in (1e-4, 1e-3, 1e-2, 1e-1):
        yield Cell(f"mnist noise {share:g}", defense=RelativeNoise(share=share))
    for share in (0.5, 0.1):
        yield Cell(f"mnist top-k {share:g}", defense=Largest(share=share))
    yield Cell("mnist float16", defense=Rounded())
    yield Cell("mnist clipping 0.1", {"defense": [{"name": "update-noise", "clip": 0.1, "noise_multiplier": 0.0}]})
    yield from axis("cifar10", "N", "partition.samples_per_client", (8, 16, 48))
    yield from axis("cifar10", "E", "training.local_epochs", (1, 20))
    yield from axis("cifar10", "rate", "training.learning_rate", (0.001, 0.05))
    yield from axis("cifar10", "width", "model.hidden", ([100], [1000]))
    yield from axis("adult", "N", "partition.samples_per_client", (4, 12, 16))
    yield from axis("adult", "E", "training.local_epochs", (5, 20))
    yield from axis("adult", "rate", "training.learning_rate", (0.01, 0.2))
    yield from axis("adult", "width", "model.hidden", ([50, 50], [400, 100]))
    yield from axis("adult", "depth", "model.hidden", ([100], [100, 100, 100]))
    for size in (4, 8, 12):
        one_step = {"partition.samples_per_client": size, "training.batch_size": size, "training.local_epochs": 1}
        yield Cell(f"mnist spear, one step, N {size}", {"model.hidden": [200], **one_step}, alone="spear")
    for rounds in (3, 10):
        together: dict[str, Any] = {"rounds": rounds, "alone": "spear-ica-rounds"}
        yield Cell(f"mnist width 100 100, {rounds} rounds", {"model.hidden": [100, 100]}, **together)
        yield Cell(f"cifar10 width 100, {rounds} rounds", {"model.hidden": [100]}, **together)
        narrow = {"model.hidden": [50, 50], "partition.samples_per_client": 16}
        yield Cell(f"adult width 50 50 and N 16, {rounds} rounds", narrow, **together)
    yield Cell("adult width 50 50 and N 16", narrow)
    for data in BASES:
        yield Cell(f"{data} base", beside=True)


def axis(data: str, what: str, key: str, values: tuple[Any, ...]) -> Iterator[Cell]:
    """Cells in which one setting has other values than in the base."""
    for value in values:
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        yield Cell(f"{data} {what} {shown}", {key: value})


def measure_cell(cell: Cell, seed: int, data_dir: Path) -> list[dict[str, Any]]:
    """A row for each attack and client."""
    torch.set_num_threads(1)
    data = cell.name.split()[0]
    base, party = BASES[data], {"name": "cocktail-party", "of": "values" if data == "adult" else "differences"}
    experiment = {
        **base,
        "federation": {"engine": "serial", "clients": CLIENTS, "rounds": cell.rounds, "seed": seed},
        "adversary": {"victims": "all", "rounds": list(range(1, cell.rounds + 1)), "workers": 1},
        "attack": [{"name": "spear-ica"}, party, party | REFINED, *(OTHERS if cell.beside else [])],
        **({} if cell.defense is None else {"defense": [cell.defense]}),
    }
    if cell.alone:
        experiment["attack"] = [{"name": cell.alone}]
    os.environ["FEDSIM_DATA"] = str(data_dir)
    with tempfile.TemporaryDirectory() as folder, without_slow_metrics():
        try:
            run = fedsim.run(experiment, out=Path(folder) / "run", set=dict(cell.set))
        except RunError:  # an attack refused; the others are done
            run = fedsim.open(Path(folder) / "run")
        return [row for attack in experiment["attack"] for row in rows(run, cell, seed, attack)]


@contextmanager
def without_slow_metrics() -> Iterator[None]:
    """The study has no use for LPIPS and L_sim, which take longer than the attack."""
    with (
        patch("fedsim.audit.evaluation.scoring.lpips_distances", lambda *_: "not part of the study"),
        patch("fedsim.audit.evaluation.reconstructions._attacked_update", lambda *_: None),
    ):
        yield


def rows(run: fedsim.Run, cell: Cell, seed: int, attack: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each client; of an attack that refused without figures."""
    title = attack.get("label") or attack["name"]
    with (run.path / "image-scores.csv").open() as file:
        errors = [row for row in csv.DictReader(file) if row["attack"] == title and row["metric"] == "mse"]
    scores = run.scores
    scores = scores[scores["attack"] == title]
    seconds = {found.victim: found.about["seconds"] for found in run.findings if found.attack == title}
    size = run.transcript.update(max(run.transcript.rounds), 0).num_examples
    for client in range(CLIENTS):
        row: dict[str, Any] = {"cell": cell.name, "seed": seed, "client": client, "attack": title, "n": size}
        of_client = {r["metric"]: r for _, r in scores[scores["victim"] == client].iterrows()}
        psnr = [-10 * math.log10(float(r["value"]) + 1e-16) for r in errors if int(r["victim"]) == client]
        if of_client:
            value = {name: round(float(found["value"]), 4) for name, found in of_client.items()}
            row |= {
                "exact": value["exact"],
                "floor": of_client["exact"]["floor"],
                "twins": of_client["exact"]["nearest_public"],
                "certified": value.get("certified"),
                "false": value.get("false_certificates"),
                "psnr": round(median(psnr), 2),
                "worst": round(min(psnr), 2),
                "labels": value.get("label_accuracy"),
                "seconds": round(float(seconds[client]), 2),
            }
        yield row


def main() -> None:
    """Run what is not done yet, or show what is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDSIM_DATA"))
    parser.add_argument("--cells", default="")
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    done = {(row["cell"], int(row["seed"])) for row in read(chosen.out)}
    todo = [(c, seed) for seed in chosen.seeds for c in cells() if c.name.startswith(chosen.cells)]
    todo = [(c, seed) for c, seed in todo if (c.name, seed) not in done]
    todo.sort(key=lambda job: job[0].beside)
    failed: list[str] = []
    with ProcessPoolExecutor(chosen.workers, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(measure_cell, cell, seed, chosen.data_dir): (cell.name, seed) for cell, seed in todo}
        for job in as_completed(jobs):
            try:
                found = job.result()
            except FedsimError as error:
                failed.append(f"{' '.join(map(str, jobs[job]))}: {error}")
                continue
            write(chosen.out, found)
            for attack in dict.fromkeys(row["attack"] for row in found):
                of = [row for row in found if row["attack"] == attack]
                print(*jobs[job], attack, summary(of), flush=True)
    if failed:
        sys.exit("\n".join(failed))


def summary(of: list[dict[str, Any]]) -> str:
    """Some figures of rows in one line."""
    told = [row for row in of if "exact" in row]
    if not told:
        return "refused"
    mean = {
        name: sum(row[name] or 0 for row in told) / len(told) for name in ("exact", "certified", "false", "seconds")
    }
    return (
        f"{len(told)}/{len(of)} exact {mean['exact']:.3f} certified {mean['certified']:.3f} false {mean['false']:.3f} "
        f"psnr {median(row['psnr'] for row in told):.1f} {mean['seconds']:.1f} s"
    )


def read(path: Path) -> list[dict[str, str]]:
    """All rows of an earlier run."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def write(path: Path, found: list[dict[str, Any]]) -> None:
    """Append rows."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
