"""How many values of Adult's rows TabLeak reads from one message, by the number of rows, beside plain matching.

`nice -n 10 python benchmarks/tableak_study.py` runs what is not done yet, seed by seed, on one core, for `--minutes` at
most, and keeps it in benchmarks/results/tableak.csv; `--tables` prints those of docs/tableak.md. Data come from
FEDSIM_DATA.

The setting is that of Vero et al. 2023, Table 1: all 14 columns of Adult, everything standardised, the categories too;
a fresh network with hidden layers of 100 and 100 units for each batch; labels are known. `gradient`: one gradient of
`size` rows. `E = 1` and so on: the weights after so many epochs on them in two mini-batches.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from resumed import go_on, read
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.tableak import TabLeak
from fedsim.audit.evaluation.score import PublicExamples
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.audit.evaluation.table_scores import draw_rows
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import table_metrics
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.data.tables import Adult
from fedsim.federation.build import find_data_folder
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

RESULTS = Path(__file__).parent / "results" / "tableak.csv"
ITERATIONS, STARTS = 1500, 6
"""The paper has 30 starts, which take five times as long."""
PLAIN = InvertingGradients(iterations=ITERATIONS, step_size=0.06, signed=True, tv_weight=0.0, decay=False)
ATTACKS: Mapping[str, Attack] = {
    "inverting-gradients": PLAIN,
    "tableak, one start": TabLeak(iterations=ITERATIONS, restarts=1),
    "tableak": TabLeak(iterations=ITERATIONS, restarts=STARTS),
}
SIZES, SEEDS = (1, 2, 4, 8, 16, 32), range(2, 12)
FEDAVG_SIZE, EPOCHS, FEDAVG = 8, {"E = 1": 1, "E = 2": 2, "E = 5": 5}, 3
"""Rows and passes of a client that sends weights, and for how many seeds it is attacked."""
PUBLIC, DRAWS = 5000, 20
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, math.inf)
SPREADS = (0.0, 0.1, table_metrics.TOLERANCE, 1.0, math.inf)
"""Ends of the bins of the entropy of categories, and of the deviation of numbers over the starts."""


@dataclass(frozen=True)
class Cell:
    """One setting."""

    attack: str
    sent: str
    size: int
    seed: int


def cells() -> Iterator[Cell]:
    """All of them, seed by seed; those of many passes, which take longest, last."""
    *short, long = EPOCHS
    for seed in SEEDS:
        for size, attack in product(SIZES, ATTACKS):
            yield Cell(attack, "gradient", size, seed)
        if seed in SEEDS[:FEDAVG]:
            yield from (Cell(attack, passes, FEDAVG_SIZE, seed) for passes, attack in product(short, ATTACKS))
    yield from (Cell(attack, long, FEDAVG_SIZE, seed) for seed, attack in product(SEEDS[:FEDAVG], ATTACKS))


@cache
def adult() -> Dataset:
    """All columns of Adult."""
    if (folder := find_data_folder()) is None:
        raise SystemExit("FEDSIM_DATA is not set; point it at the folder with the data sets")
    return Adult(drop=()).load(folder)


@cache
def moments() -> tuple[Tensor, Tensor]:
    """Of each feature; a deviation of zero is 1, as in the released code."""
    inputs = adult().train.inputs().double()
    std = inputs.std(0)
    return inputs.mean(0).float(), torch.where(std > 0, std, 1.0).float()


def measure_cell(cell: Cell) -> dict[str, Any]:
    """A row."""
    data, columns = adult(), tuple(column.width for column in adult().columns)
    mine = torch.randperm(len(data.train), generator=generator("tableak", cell.size, cell.seed))[: cell.size]
    rows, labels = data.train.inputs(mine), data.train.labels[mine]
    (mean, std), model = moments(), network(cell)
    update, plan = update_and_plan(cell, model, (rows - mean) / std, labels)
    known = Knowledge(
        model=lambda: model,
        loss=cross_entropy,
        input_shape=tuple(mean.shape),
        columns=columns,
        value_range=((-mean / std).tolist(), ((1 - mean) / std).tolist()),
        input_mean=[0.0] * len(mean),
        input_std=[1.0] * len(mean),
        labels=labels.sort().values,
        learning_rate=plan.learning_rate,
        local_epochs=plan.local_epochs,
        batch_size=plan.batch_size,
    )
    with tempfile.TemporaryDirectory() as folder:
        Recorder(Path(folder) / "transcript").write(1, [update])
        started = time.process_time()
        found = ATTACKS[cell.attack].run(
            Target(
                transcript=Transcript(Path(folder) / "transcript"),
                victim=0,
                knowledge=known,
                rng=generator("attack", cell.seed),
            )
        )
        seconds = time.process_time() - started
    assert isinstance(found, Reconstruction)
    public = PublicExamples(data=data.test.inputs(slice(0, PUBLIC)), labels=data.test.labels[:PUBLIC])
    deviations = public.data.std(0)
    truth = Truth(data=rows, labels=labels, columns=columns, deviations=deviations)
    rng = generator("floor", cell.size, cell.seed)
    scores = {s.metric: s for s in score_examples(found, truth, public=public, rng=rng, labels_granted=True)}
    of = scores["columns_right"]
    random = [
        share(draw_rows(public.data, columns, cell.size, rng), rows, columns, deviations).mean() for _ in range(DRAWS)
    ]
    kept = dict(zip(Cell.__dataclass_fields__, astuple(cell), strict=True)) | {
        "right": of.value,
        "floor": of.floor,
        "guess": of.floor_guess,
        "random": float(np.mean(random)),
        "exact": scores["exact"].value,
        "objective": float(found.trace["objective"][-1]),
        "seconds": round(seconds, 2),
    }
    return kept | by_entropy(found, rows, columns, deviations)


def network(cell: Cell) -> nn.Module:
    """With fresh weights."""
    with seed_globals("tableak", cell.size, cell.seed):
        return Mlp(hidden=(100, 100)).build(adult().task)


def update_and_plan(cell: Cell, model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[Update, LocalTraining]:
    """What the client sends, and how it trains."""
    before = copy_state(model)
    if cell.sent == "gradient":
        plan = LocalTraining(local_epochs=1, batch_size=cell.size, learning_rate=0.01)
        slopes = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))
        payload = Payload.from_dense(dict(zip(before, slopes, strict=True)), "gradient")
    else:
        plan = LocalTraining(local_epochs=EPOCHS[cell.sent], batch_size=cell.size // 2, learning_rate=0.01)
        after, _ = local_update(model, before, inputs, labels, plan, key=("tableak", cell.seed))
        payload = Payload.from_dense(after, "weights")
    return Update(round=1, client=0, before=before, payload=payload, num_examples=cell.size), plan


def share(claimed: Tensor, true: Tensor, columns: Sequence[int], deviations: Tensor) -> Tensor:
    """`row`, of the values."""
    return table_metrics.find_correct_columns(claimed, true, columns, deviations).double().mean(1)


def by_entropy(found: Reconstruction, rows: Tensor, columns: Sequence[int], deviations: Tensor) -> dict[str, int]:
    """In each bin, how many values were claimed, and how many of them are right."""
    if found.entropy is None:
        return {}
    agreement = table_metrics.compare_rows(found.data, rows, columns, deviations)
    chosen = table_metrics.assign_rows(agreement.sum(2))
    right, entropy = agreement[torch.arange(len(rows)), chosen], found.entropy[chosen]
    number = torch.tensor([size == 1 for size in columns]).expand_as(right)
    spread = (entropy - 0.5 * math.log(2 * math.pi * math.e)).exp()
    told: dict[str, int] = {}
    for kind, value, of, ends in (("category", entropy, ~number, SHARES), ("number", spread, number, SPREADS)):
        for place, (low, high) in enumerate(pairwise(ends)):
            # Shares that sum to 1 but for rounding have an entropy of 0, or just below.
            there = of & (value >= (low if place else -math.inf)) & (value < high)
            told |= {f"{kind}_{place}": int(there.sum()), f"{kind}_{place}_right": int(right[there].sum())}
    return told


BINS = [
    f"{kind}_{place}{end}"
    for kind, ends in (("category", SHARES), ("number", SPREADS))
    for place in range(len(ends) - 1)
    for end in ("", "_right")
]


def tables(rows: list[dict[str, str]]) -> Iterator[str]:
    """Lines of the tables."""
    weights = {passes: f"Weights after {passes} in two mini-batches each" for passes in EPOCHS}
    for sent_, title in ({"gradient": "One gradient"} | weights).items():
        own = [row for row in rows if row["sent"] == sent_]
        if not _common(own):
            continue
        yield f"\n{title}; values that are right, in percent, with 95 % intervals of the mean:\n"
        yield "| rows | batches | " + " | ".join(f"`{a}`" for a in ATTACKS) + " | ahead | floor | random | seconds |"
        yield "|---:|---:|" + "---:|" * (len(ATTACKS) + 4)
        for size in sorted({int(row["size"]) for row in own}):
            whole = {seed for of_size, seed in _common(own) if of_size == str(size)}
            of = {
                a: [r for r in own if r["size"] == str(size) and r["attack"] == a and r["seed"] in whole]
                for a in ATTACKS
            }
            if not whole:
                continue
            told = [spread([float(row["right"]) for row in some]) for some in of.values()]
            told.append(ahead(of["tableak"], of["inverting-gradients"]))
            last = of["tableak"]
            floor, random = (spread([float(row[name]) for row in last]) for name in ("floor", "random"))
            seconds = np.mean([float(row["seconds"]) for row in last])
            figures = " | ".join([*told, floor.split()[0], random.split()[0], f"{seconds:.0f}"])
            yield f"| {size} | {len(whole)} | {figures} |"
    yield "\n`tableak`, one gradient, how many values are right where the starts agree so far:\n"
    yield from (line for kind in ("category", "number") for line in sure(rows, kind))


def _common(rows: list[dict[str, str]]) -> set[tuple[str, str]]:
    """Sizes and seeds of the batches that all attacks were made on."""
    return set.intersection(*({(r["size"], r["seed"]) for r in rows if r["attack"] == a} for a in ATTACKS))


def spread(values: Sequence[float]) -> str:
    """A mean in percent, with its interval where there are two values or more."""
    found = np.array(values)
    low, high = (100 * end for end in confidence_interval(found, share=True))
    return f"{100 * found.mean():.1f}" + (f" [{low:.0f}, {high:.0f}]" if len(found) > 1 else "")


def ahead(some: Sequence[Mapping[str, str]], others: Sequence[Mapping[str, str]]) -> str:
    """By how many percent, on average over the same batches, with the margin of its interval."""
    right = [{row["seed"]: 100 * float(row["right"]) for row in rows} for rows in (some, others)]
    found = np.array([right[0][seed] - right[1][seed] for seed in right[0]])
    low, high = confidence_interval(found)
    return f"{found.mean():+.1f}" + (f" ± {(high - low) / 2:.1f}" if len(found) > 1 else "")


def sure(rows: list[dict[str, str]], kind: str) -> Iterator[str]:
    """A table of one kind of columns."""
    ends = SHARES if kind == "category" else SPREADS
    what = "entropy of a category" if kind == "category" else "deviation of a number over starts, in its own"
    bins = [(low, high) for low, high in pairwise(ends)]
    names = [f"{low:g} to {high:g}" if math.isfinite(high) else f"from {low:g}" for low, high in bins]
    yield f"| rows | {what}: " + " | ".join(names) + " |"
    yield "|---:|" + "---:|" * len(bins)
    own = [row for row in rows if row["attack"] == "tableak" and row["sent"] == "gradient"]
    for size in sorted({int(row["size"]) for row in own}):
        of = [row for row in own if row["size"] == str(size)]
        told = []
        for place in range(len(bins)):
            count, right = (sum(int(row[f"{kind}_{place}{end}"]) for row in of) for end in ("", "_right"))
            told.append(f"{100 * right / count:.0f} % of {count}" if count else "-")
        yield f"| {size} | " + " | ".join(told) + " |"
    yield ""


def main() -> None:
    """Run what is not done yet, or show what is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--tables", action="store_true", help="show what was found")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.tables:
        sys.stdout.write("\n".join(tables(read(chosen.out))) + "\n")
        return
    torch.set_num_threads(1)
    measures = ["right", "floor", "guess", "random", "exact", "objective", "seconds"]
    go_on(
        cells(),
        measure_cell,
        chosen.out,
        [*Cell.__dataclass_fields__, *measures, *BINS],
        chosen.minutes,
        rounded=lambda value: float(f"{value:.4g}"),
        told=(*Cell.__dataclass_fields__, "right", "floor", "seconds"),
    )


if __name__ == "__main__":
    main()
