"""What one iteration of an inversion attack costs: IG and SME beside `breaching`'s Inverting Gradients.

    python benchmarks/inversion_speed.py [--cells NAME ...] [--iterations N] [--blocks N] [--compile] [--out FILE.json]
    python benchmarks/inversion_speed.py --epochs 1 5 10 20 50      # SME's and DLFA's cost as E, and so T, grows

All attack the same update of the paper's CNN (ten local epochs, B = 10, learning rate 0.004) with the labels
known, in one process and on one thread, in turn: a block is some tens of iterations of each. Printed are the
medians over blocks of a block's mean CPU milliseconds an iteration, and of the ratio to `breaching` in the same
block. Set-up and compilation are not in them; compilation is in the time of the first block. Data are noise: the
work does not depend on them. With `--epochs`, each attack runs in a process of its own, and by how much its
memory rises is printed beside the time.

`breaching` lives in .venv-peers, which `make benchmark-inversion` sets up; without it the script compares with
eager IG. It cannot attack grey images (its total variation wants three channels), so the cells are CIFAR-sized.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.data_leakage import DataLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.inversion.matching import GradientInversion
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.models.sme import SmeCnn

CLASSES, BATCH, RATE = 100, 10, 0.004
PEER, BASE = "breaching IG", "IG eager"


@dataclass(frozen=True)
class Cell:
    """Shape of the examples, width of the CNN, and N."""

    shape: tuple[int, int, int]
    channels: tuple[int, int]
    hidden: int
    count: int

    def model(self) -> nn.Module:
        """The CNN of SME, App. D."""
        plugin = SmeCnn(channels=self.channels, hidden=self.hidden)
        return plugin.build(Task(input_shape=self.shape, num_classes=CLASSES))


CELLS = {
    "28x28x1 N=10": Cell((1, 28, 28), (32, 64), 100, 10),
    "28x28x1 N=50": Cell((1, 28, 28), (32, 64), 100, 50),
    "32x32x3 N=10": Cell((3, 32, 32), (64, 128), 200, 10),
    "32x32x3 N=50": Cell((3, 32, 32), (64, 128), 200, 50),
}
Clock = list[float]
"""CPU seconds of this process at each iteration."""


def victim(cell: Cell, epochs: int = 10) -> tuple[Update, Tensor]:
    """An update, and its labels in ascending order."""
    torch.manual_seed(0)
    model = cell.model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = torch.randn(cell.count, *cell.shape)
    labels = torch.randint(CLASSES, (cell.count,)).sort().values
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(epochs):
        for batch in torch.randperm(cell.count).split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Update(
        round=1, client=0, before=before, payload=Payload.from_dense(after, "weights"), num_examples=cell.count
    ), labels


def ours(attack: GradientInversion, cell: Cell, update: Update, labels: Tensor, epochs: int = 10) -> Clock:
    """Run one of fedsim's attacks as its users would."""
    clock: Clock = []

    def tick(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        clock.append(time.process_time())

    depth = cell.shape[0]
    known = Knowledge(
        model=cell.model,
        loss=cross_entropy,
        input_shape=cell.shape,
        num_classes=CLASSES,
        value_range=((-2.0,) * depth, (2.0,) * depth),
        input_mean=(0.0,) * depth,
        input_std=(1.0,) * depth,
        labels=labels,
        learning_rate=RATE,
        local_epochs=epochs,
        batch_size=BATCH,
    )
    with tempfile.TemporaryDirectory() as folder:
        Recorder(Path(folder)).write(1, [update])
        attack.run(
            Target(
                transcript=Transcript(Path(folder)), victim=0, knowledge=known, rng=torch.Generator().manual_seed(1)
            ),
            tick,
        )
    return clock


def theirs(breaching: Any, iterations: int, cell: Cell, update: Update, labels: Tensor) -> Clock:
    """Run breaching's `invertinggradients` with SME's settings: step size 1, not signed, TV 0.01.

    Its total variation sums both directions where SME's takes their mean, hence 0.005.
    """
    from omegaconf import OmegaConf

    folder = Path(breaching.__file__).parent / "config" / "attack"
    config = OmegaConf.merge(
        OmegaConf.load(folder / "_default_optimization_attack.yaml"), OmegaConf.load(folder / "invertinggradients.yaml")
    )
    config.optim.step_size, config.optim.signed, config.optim.max_iterations = 1.0, None, iterations
    config.regularization.total_variation.scale = 0.005
    model = cell.model()
    attacker = breaching.attacks.prepare_attack(
        model, nn.CrossEntropyLoss(), config, {"device": torch.device("cpu"), "dtype": torch.float}
    )
    depth = cell.shape[0]
    facts = SimpleNamespace(shape=cell.shape, mean=(0.5,) * depth, std=(0.25,) * depth, modality="vision")
    payload = [{"parameters": list(update.before.values()), "buffers": None, "metadata": facts}]
    shared = [
        {
            "gradients": list(update.pseudo_gradient.values()),
            "buffers": [],
            "metadata": {"labels": labels, "num_data_points": cell.count, "local_hyperparams": None},
        }
    ]
    clock: Clock = []
    compute = attacker._compute_objective

    def tick(*arguments: Any) -> Any:
        clock.append(time.process_time())
        return compute(*arguments)

    attacker._compute_objective = tick
    attacker.reconstruct(payload, shared, server_secrets={})
    return clock


def per_iteration(clock: Clock) -> float:
    """Mean CPU milliseconds, without the first iteration, which warms up."""
    return 1000 * (clock[-1] - clock[1]) / (len(clock) - 2)


def variants(iterations: int, compile: bool) -> dict[str, GradientInversion]:
    """The attacks to time; bfloat16 where the processor has instructions for it."""
    chosen: dict[str, GradientInversion] = {
        BASE: InvertingGradients(iterations=iterations),
        "SME eager": SurrogateModelExtension(iterations=iterations),
        "SME eager, stale": SurrogateModelExtension(iterations=iterations, alpha_every=10),
    }
    if compile:
        chosen["IG compiled"] = InvertingGradients(iterations=iterations, compile=True)
        chosen["SME compiled"] = SurrogateModelExtension(iterations=iterations, compile=True)
        chosen["SME compiled, stale"] = SurrogateModelExtension(iterations=iterations, compile=True, alpha_every=10)
        if has_bfloat16():
            chosen["SME compiled bf16"] = SurrogateModelExtension(
                iterations=iterations, compile=True, precision="bfloat16"
            )
    return chosen


def has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16; without, it is several times slower than float32."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and any(word in flags.read_text() for word in ("avx512_bf16", "amx_bf16"))


def measure(name: str, cell: Cell, arguments: argparse.Namespace, breaching: Any) -> dict[str, Any]:
    """All variants on one cell, in turn."""
    update, labels = victim(cell)
    runs: dict[str, Callable[[], Clock]] = {}
    if breaching is not None and cell.shape[0] == 3:
        runs[PEER] = lambda: theirs(breaching, arguments.iterations, cell, update, labels)
    for label, attack in variants(arguments.iterations, arguments.compile).items():
        runs[label] = lambda attack=attack: ours(attack, cell, update, labels)  # type: ignore[misc]
    first: dict[str, float] = {}
    for label, once in runs.items():  # compiles, and warms up
        start = time.perf_counter()
        once()
        first[label] = time.perf_counter() - start
    blocks: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(arguments.blocks):
        for label, once in runs.items():
            blocks[label].append(per_iteration(once()))
    against = PEER if PEER in runs else BASE
    print(f"\n{name}: CPU ms an iteration, and {against}'s over it (median of {arguments.blocks} blocks, least, most)")
    rows = {}
    for label, times in blocks.items():
        ratios = sorted(base / own for base, own in zip(blocks[against], times, strict=True))
        rows[label] = {
            "ms": statistics.median(times),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "first_s": first[label],
        }
        print(
            f"  {label:20} {rows[label]['ms']:8.1f}   x{rows[label]['ratio']:.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})   first block {first[label]:.0f} s",
            flush=True,
        )
    return rows


def one(name: str, epochs: int, cell: Cell) -> None:
    """Time one attack in this process and print CPU ms an iteration, and how far memory rose at its peak, in MB."""
    attacks = {"SME": SurrogateModelExtension(iterations=8), "DLFA": DataLeakage(iterations=4)}
    update, labels = victim(cell, epochs)
    ours(InvertingGradients(iterations=1), cell, update, labels)  # what torch sets up on its first call
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far; Linux
    before = resident("VmRSS")
    milliseconds = per_iteration(ours(attacks[name], cell, update, labels, epochs))
    print(json.dumps({"ms": milliseconds, "peak_mb": resident("VmHWM") - before}))


def resident(field: str) -> float:
    """A figure of this process's memory in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def growing(cells: list[str], epochs: list[int]) -> dict[str, Any]:
    """What E, and with it the number of local steps, does to SME's and DLFA's cost (SME, Table 3)."""
    rows: dict[str, Any] = {}
    for cell in cells:
        print(f"\n{cell}, B = {BATCH}: CPU ms an iteration, MB above what the process held before")
        for count in epochs:
            for name in ("SME", "DLFA"):
                command = [sys.executable, __file__, "--one", name, "--cells", cell, "--epochs", str(count)]
                told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                figures = json.loads(told.splitlines()[-1])
                rows[f"{cell} E={count} {name}"] = figures
                print(f"  E={count:<3} {name:5} {figures['ms']:9.1f} {figures['peak_mb']:7.0f}", flush=True)
    return rows


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=["32x32x3 N=10", "32x32x3 N=50"])
    parser.add_argument("--iterations", type=int, default=20, help="of a block (default 20, at most 100)")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="also the compiled attacks; a minute or two a shape")
    parser.add_argument("--epochs", nargs="+", type=int, help="how cost grows with E, in place of the comparison")
    parser.add_argument("--one", choices=["SME", "DLFA"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    arguments = parser.parse_args()
    if not 3 <= arguments.iterations <= 100:
        parser.error("--iterations: expected 3 to 100, so that each iteration reports its time")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if arguments.one:
        one(arguments.one, arguments.epochs[0], CELLS[arguments.cells[0]])
        return
    try:
        breaching = importlib.import_module("breaching")
    except ModuleNotFoundError as error:
        breaching = None
        print(f"{error.name} is not installed here: no comparison with breaching, see `make benchmark-inversion`")
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    print(f"torch {torch.__version__}, {processor.partition(':')[2].strip() or platform.processor()}, one thread")
    if arguments.epochs:
        rows = growing(arguments.cells, arguments.epochs)
    else:
        rows = {name: measure(name, CELLS[name], arguments, breaching) for name in arguments.cells}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"torch": torch.__version__, "cells": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
