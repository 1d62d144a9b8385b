"""By how much LAVP's minimum differs between starts of its power iteration: `python benchmarks/lavp_starts.py`.

Fresh networks and random inputs, drawn five times: an MLP of 100 units on 28 x 28 and LeNet on 3 x 32 x 32, batches of
1 and 8, ten starts each.
"""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import numpy as np
import torch

from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.exposure.hessian import Hessian
from fedsim.exposure.lanczos import smallest_by_power_iteration
from fedsim.training.message_function import ClientMessage
from fedsim.training.models.lenet import LeNet
from fedsim.training.models.mlp import Mlp

NETWORKS = {"mlp": (Mlp(hidden=(100,)), Task((1, 28, 28), 10)), "lenet": (LeNet(), Task((3, 32, 32), 10))}
DRAWS, STARTS, BATCHES, STEPS = 5, 10, (1, 8), (10, 100)


def main() -> None:
    """Print a line for each network, batch, distance and number of steps."""
    torch.set_num_threads(1)
    for name, count in product(NETWORKS, BATCHES):
        messages = [draw_message(name, count, draw) for draw in range(DRAWS)]
        for distance, steps in product(("l2", "cosine"), STEPS):
            ratios = sorted(ratio_of_starts(Hessian(sent, distance), steps) for sent in messages)
            texts = ", ".join(f"{ratio:.1f}" for ratio in ratios)
            print(f"{name}, batch of {count}, {distance}, {steps} steps: largest / smallest {texts}", flush=True)


def draw_message(name: str, count: int, draw: int) -> ClientMessage:
    """Return the gradient of random inputs on a fresh network."""
    model, task = NETWORKS[name]
    with seed_globals("starts", draw):
        network = model.build(task)
    inputs = torch.randn(count, *task.input_shape, generator=generator("starts", "inputs", draw))
    return ClientMessage.create(network, task.loss, inputs, torch.arange(count))


def ratio_of_starts(hessian: Hessian, steps: int) -> float:
    """Return the largest minimum of all starts divided by the smallest."""
    values = []
    for number in range(STARTS):
        start = torch.from_numpy(np.random.default_rng(number).standard_normal(hessian.size))
        with patch.object(Hessian, "start_vector", start):
            values.append(smallest_by_power_iteration(hessian, steps))
    return max(values) / min(values)


if __name__ == "__main__":
    main()
