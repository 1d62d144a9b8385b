"""Run one framework here and print what it took: `python -m frameworks FRAMEWORK TASK`, the task in JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys

import torch

from frameworks.clock import CLOCK
from frameworks.jobs import Task


def main() -> None:
    """Print one line of JSON: CPU and wall seconds a client update, the loss, and when the first round was over."""
    framework, task = sys.argv[1], Task(**json.loads(sys.argv[2]))
    # Frameworks talk; what they print goes to stderr, and the result alone to stdout.
    result, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    CLOCK.set(task.rounds, task.warm_up)
    state = importlib.import_module(f"frameworks.{framework}").run(task)
    updates = task.trained * (task.rounds - task.warm_up)
    seconds = {"cpu": CLOCK.cpu / updates, "driver": CLOCK.driver / updates, "wall": CLOCK.wall / updates}
    loss = task.work.loss(state, task.clients)
    print(json.dumps({**seconds, "first_round": CLOCK.first, "loss": loss}), file=result, flush=True)
    os._exit(0)  # some leave threads behind


if __name__ == "__main__":
    main()
