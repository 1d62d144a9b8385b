"""How many kernels an iteration of an inversion attack starts, one restart after the other and many in one call.

    python benchmarks/kernel_launches.py [--victims N ...] [--restarts N ...] [--only NAME ...]

On an accelerator, whose kernels of a small network take less time than their start, this is what an iteration costs.
There need not be one: PyTorch's profiler counts on the CPU the operations that compute, each of which starts one kernel
or a few. Left out are those that only look at a tensor in another way or ask for memory. Counted is from the 21st to
the 30th of 1000 iterations, with a reading of the objective, of noise, eight images of 32 x 32 x 3 and SME's CNN, all
victims in one round. How many there are does not depend on the sizes, so the CNN has few channels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from measuring import make_parser, publish_rows
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from victims import NoiseVictims

from fedsim.inversion import matching
from fedsim.inversion.matching import GradientInversion
from fedsim.plugins import registry

VICTIMS = NoiseVictims(channels=(4, 8), hidden=20, count=8, classes=10, epochs=1, batch_size=8, rate=0.01)
FIRST, LAST = 21, 31
"""Iterations at which `progress` is called, between which is counted."""
ATTACKS: dict[str, dict[str, object]] = {
    "inverting-gradients": {},
    "sme": {},
    "see-through-gradients": {"bn_weight": 0.0},
}


class CountingEnds(BaseException):
    """The iterations to count are over."""


def count_launches(attack: GradientInversion, victims: int, *, at_once: bool) -> float:
    """Return how many kernels an iteration of one victim starts."""
    profiler = profile(activities=[ProfilerActivity.CPU])

    def progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        if iteration == FIRST:
            profiler.start()
        if iteration == LAST:
            profiler.stop()
            raise CountingEnds

    with TemporaryDirectory() as room:
        first, *others = VICTIMS.draw_targets(VICTIMS.record_updates(victims, Path(room) / "transcript"), victims)
        with patch.object(matching, "batching_is_faster", lambda device: at_once), suppress(CountingEnds):
            list(attack.run_several([replace(first, progress=progress), *others]))
    return sum(map(starts_kernel, profiler.events())) / (LAST - FIRST) / (victims if at_once else 1)


def starts_kernel(event: FunctionEvent) -> bool:
    """Return whether this is an operation that computes and is not made up of others that do."""
    return computes(event.name) and not any(map(holds_computation, event.cpu_children))


def holds_computation(event: FunctionEvent) -> bool:
    """Return whether this is, or is made up of, operations that compute."""
    return computes(event.name) or any(map(holds_computation, event.cpu_children))


@cache
def computes(name: str) -> bool:
    """Return whether this is one of PyTorch's operations, and not one that returns a view, bare memory or no tensor."""
    if not name.startswith("aten::") or "empty" in name or name in ("aten::_unsafe_view", "aten::resize_"):
        return False
    returns = [value for schema in torch._C._jit_get_schemas_for_operator(name) for value in schema.returns]
    looks = any(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    return not looks and any("Tensor" in str(value.type) for value in returns)


def main() -> None:
    """Count for each attack, number of restarts and number of victims."""
    parser = make_parser(__doc__, choices=ATTACKS)
    parser.add_argument("--victims", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--restarts", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    logging.disable()
    rows = []
    for name, restarts in product(options.only, options.restarts):
        settings = {**ATTACKS[name], "iterations": 1000, "restarts": restarts}
        attack = registry.build("attacks", name, settings, name)
        alone = count_launches(attack, 1, at_once=False)
        for victims in options.victims:
            together = count_launches(attack, victims, at_once=True)
            about = {"attack": name, "restarts": restarts, "victims": victims}
            rows.append({**about, "one after the other": alone, "in one call": together, "ratio": alone / together})
    publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
