"""Run one framework here and print what it took."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys

import torch

from frameworks.clock import CLOCK
from frameworks.jobs import JOBS, Task


def main() -> None:
    """Print one line of JSON: CPU and wall seconds a client update, the loss, and when the first round was over."""
    parser = argparse.ArgumentParser(prog="python -m frameworks", description=__doc__)
    parser.add_argument("framework")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--sampled", type=int, help="clients a round; all by default")
    parser.add_argument("--engine", choices=["serial", "ray"], default="serial", help="of fedsim")
    parser.add_argument("--loop", action="store_true", help="train clients one by one (fedsim)")
    parser.add_argument("--skewed", action="store_true", help="give some clients more data than others (fedsim)")
    parser.add_argument("--record", action="store_true", help="record every round (fedsim)")
    options = vars(parser.parse_args())
    framework = options.pop("framework")
    task = Task(**options | {"sampled": options["sampled"] or options["clients"]})
    # Frameworks talk; what they print goes to stderr, and the result alone to stdout.
    result, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    CLOCK.set(task.rounds, task.warm_up)
    state = importlib.import_module(f"frameworks.{framework}").run(task)
    updates = task.sampled * (task.rounds - task.warm_up)
    seconds = {"cpu": CLOCK.cpu / updates, "driver": CLOCK.driver / updates, "wall": CLOCK.wall / updates}
    loss = JOBS[task.job].loss(state, task.clients)
    print(json.dumps({**seconds, "first_round": CLOCK.first, "loss": loss}), file=result, flush=True)
    os._exit(0)  # some leave threads behind


if __name__ == "__main__":
    main()
