"""What one iteration of an inversion attack costs: IG and SME beside `breaching`'s Inverting Gradients.

    python benchmarks/inversion_speed.py [--only CELL ...] [--repeats N] [--iterations N] [--compile] [--out FILE.json]
    python benchmarks/inversion_speed.py --epochs 1 5 10 20 50      # SME's and DLFA's cost as E, and so T, grows

All attack the same update of the paper's CNN (ten local epochs, B = 10, learning rate 0.004) with the labels
known, in one process and on one thread, in turn: in each turn some tens of iterations of each. Times are mean CPU
milliseconds of an iteration, without set-up and compilation. Data are noise: the work does not depend on them. With
`--epochs`, each attack runs in a process of its own, and by how much its memory rises stands beside the time.

`breaching` lives in .venv-peers, which `make benchmark-inversion` sets up; without it the script compares with
eager IG. It cannot attack grey images (its total variation wants three channels), so the cells are CIFAR-sized.
"""

from __future__ import annotations

import importlib
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import (
    Row,
    compare_turns,
    make_parser,
    measure_in_turns,
    peak_growth,
    publish_rows,
    read_lines,
    run_alone,
)
from torch import nn
from victims import NoiseVictims

from adversaries.inversion.data_leakage import DataLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.inversion.matching import GradientInversion

PEER, BASE = "breaching IG", "IG eager"


CELLS = {
    "28x28x1 N=10": NoiseVictims(shape=(1, 28, 28), channels=(32, 64), hidden=100, count=10, epochs=10),
    "28x28x1 N=50": NoiseVictims(shape=(1, 28, 28), channels=(32, 64), hidden=100, count=50, epochs=10),
    "32x32x3 N=10": NoiseVictims(count=10, epochs=10),
    "32x32x3 N=50": NoiseVictims(count=50, epochs=10),
}
Clock = list[float]
"""CPU seconds of this process at each iteration."""


def time_fedsim(attack: GradientInversion, cell: NoiseVictims) -> float:
    """Return CPU seconds of an iteration of one of fedsim's attacks, run as its users would."""
    clock: Clock = []

    def tick(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        clock.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        (victim,) = cell.draw_targets(cell.record_updates(1, Path(folder)), 1)
        attack.run(victim.target, tick)
    return mean_iteration(clock)


def time_breaching(breaching: Any, iterations: int, cell: NoiseVictims) -> float:
    """Return CPU seconds of an iteration of `invertinggradients` with SME's settings: step size 1, not signed, TV 0.01.

    Its total variation sums both directions where SME's takes their mean, hence 0.005.
    """
    from omegaconf import OmegaConf

    folder = Path(breaching.__file__).parent / "config" / "attack"
    config = OmegaConf.merge(
        OmegaConf.load(folder / "_default_optimization_attack.yaml"), OmegaConf.load(folder / "invertinggradients.yaml")
    )
    config.optim.step_size, config.optim.signed, config.optim.max_iterations = 1.0, None, iterations
    config.regularization.total_variation.scale = 0.005
    with tempfile.TemporaryDirectory() as room:
        update = cell.record_updates(1, Path(room)).update(1, 0)
    attacker = breaching.attacks.prepare_attack(
        cell.build_model(), nn.CrossEntropyLoss(), config, {"device": torch.device("cpu"), "dtype": torch.float}
    )
    depth = cell.shape[0]
    facts = SimpleNamespace(shape=cell.shape, mean=(0.5,) * depth, std=(0.25,) * depth, modality="vision")
    payload = [{"parameters": list(update.before.values()), "buffers": None, "metadata": facts}]
    shared = [
        {
            "gradients": list(update.pseudo_gradient.values()),
            "buffers": [],
            "metadata": {"labels": torch.arange(cell.count), "num_data_points": cell.count, "local_hyperparams": None},
        }
    ]
    clock: Clock = []
    compute = attacker._compute_objective

    def tick(*arguments: Any) -> Any:
        clock.append(time.process_time())
        return compute(*arguments)

    attacker._compute_objective = tick
    attacker.reconstruct(payload, shared, server_secrets={})
    return mean_iteration(clock)


def mean_iteration(clock: Clock) -> float:
    """Return the mean, without the first iteration, which warms up."""
    return (clock[-1] - clock[1]) / (len(clock) - 2)


def build_attacks(iterations: int, *, compiled: bool) -> dict[str, GradientInversion]:
    """Build the attacks to time; bfloat16 where the processor has instructions for it, else it is slower."""
    attacks: dict[str, GradientInversion] = {}
    for way in ("eager", "compiled") if compiled else ("eager",):
        settings: dict[str, Any] = {"iterations": iterations, "compile": way == "compiled"}
        attacks[f"IG {way}"] = InvertingGradients(**settings)
        attacks[f"SME {way}"] = SurrogateModelExtension(**settings)
        attacks[f"SME {way}, stale"] = SurrogateModelExtension(**settings, alpha_every=10)
    if compiled and any(word in line for line in read_lines("/proc/cpuinfo") for word in ("avx512_bf16", "amx_bf16")):
        attacks["SME compiled bf16"] = SurrogateModelExtension(**settings, precision="bfloat16")
    return attacks


def compare_attacks(name: str, attacks: Mapping[str, GradientInversion], iterations: int, repeats: int) -> list[Row]:
    """Return a row for each attack on one cell, beside that of breaching where it is installed."""
    cell = CELLS[name]
    ways: dict[str, Callable[[], float]] = {}
    try:
        breaching = importlib.import_module("breaching")
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed here: no comparison with breaching, see `make benchmark-inversion`")
    else:
        if cell.shape[0] == 3:
            ways[PEER] = partial(time_breaching, breaching, iterations, cell)
    for label, attack in attacks.items():
        ways[label] = partial(time_fedsim, attack, cell)
    return compare_turns(measure_in_turns(ways, repeats), PEER if PEER in ways else BASE, {"cell": name})


def measure_attack(name: str, cell: NoiseVictims) -> dict[str, float]:
    """Return CPU milliseconds of an iteration, and how far memory rises at its peak."""
    attacks = {"SME": SurrogateModelExtension(iterations=8), "DLFA": DataLeakage(iterations=4)}
    time_fedsim(InvertingGradients(iterations=3), cell)  # what torch sets up on its first call
    seconds: list[float] = []
    growth = peak_growth(lambda: seconds.append(time_fedsim(attacks[name], cell)))
    return {"ms": 1e3 * seconds[0], "MiB": growth}


def follow_epochs(cells: list[str], epochs: list[int]) -> list[Row]:
    """Return what E, and with it the number of local steps, does to SME's and DLFA's cost (SME, Table 3)."""
    rows = []
    for cell, count, name in product(cells, epochs, ("SME", "DLFA")):
        figures = run_alone("--attack", name, "--only", cell, "--epochs", str(count))
        rows.append({"cell": cell, "E": count, "attack": name, **figures})
    return rows


def main() -> None:
    """Compare attacks, or follow their cost as E grows."""
    parser = make_parser(__doc__, repeats=5, choices=CELLS)
    parser.set_defaults(only=["32x32x3 N=10", "32x32x3 N=50"])
    parser.add_argument("--iterations", type=int, default=20, help="of a turn (default 20, 3 to 100)")
    parser.add_argument("--compile", action="store_true", help="also the compiled attacks; a minute or two a shape")
    parser.add_argument("--epochs", nargs="+", type=int, help="how cost grows with E, in place of the comparison")
    parser.add_argument("--attack", choices=["SME", "DLFA"], help="with one E, print the cost of one attack")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if options.attack:
        cell = replace(CELLS[options.only[0]], epochs=options.epochs[0])
        print(json.dumps(measure_attack(options.attack, cell)))
    elif options.epochs:
        publish_rows(follow_epochs(options.only, options.epochs), options.out)
    else:
        attacks = build_attacks(options.iterations, compiled=options.compile)
        rows = [compare_attacks(name, attacks, options.iterations, options.repeats) for name in options.only]
        publish_rows([row for part in rows for row in part], options.out)


if __name__ == "__main__":
    main()
