"""What a local step under DP-SGD costs: fedsim's `dp-sgd` beside a step without it, and Opacus' own loop.

    python benchmarks/dp_sgd_step.py [--repeats 7] [--steps 20]

All train the same network on the same synthetic data by SGD, on one thread; under DP-SGD batches are drawn by Poisson
sampling, so they have B examples on average. Opacus makes the gradients of examples by hooks, its default, or by
`torch.func` (mode `ew` is its third), or clips without them by two backward passes (`ghost`). In each repeat all
take turns; the figures are medians over repeats of the CPU
time of a step, in milliseconds, and of its ratio to the plain step of the same repeat.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from clients.defenses.dp_sgd import DpSgd
from fedsim.base.task import Task
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.lenet import LeNet
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining

TASK = Task((1, 28, 28), 10)
NETWORKS = {"lenet": LeNet(), "sme-cnn": SmeCnn(), "mlp": Mlp(hidden=(100,))}
MODES = ("hooks", "functorch", "ew", "ghost")
EXAMPLES, RATE = 500, 0.05
Timed = Callable[[], float]


def ours(model: nn.Module, inputs: Tensor, labels: Tensor, batch: int, steps: int, *, private: bool) -> Timed:
    """CPU seconds of a step of fedsim's local training."""
    settings = LocalTraining(local_steps=steps, batch_size=batch, learning_rate=RATE)
    defenses, before = [DpSgd(noise_multiplier=1.0)] if private else [], copy_state(model)

    def timed() -> float:
        started = time.process_time()
        local_update(model, before, inputs, labels, settings, key=("benchmark",), defenses=defenses)
        return (time.process_time() - started) / steps

    return timed


def opacus(model: nn.Module, inputs: Tensor, labels: Tensor, batch: int, steps: int, mode: str) -> Timed:
    """CPU seconds of a step of Opacus' own loop."""
    model.train()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(TensorDataset(inputs, labels), batch_size=batch),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        criterion=nn.CrossEntropyLoss(),
    )
    # With ghost clipping the loss is wrapped as well.
    if mode == "ghost":
        wrapped, optimizer, objective, loader = made
    else:
        (wrapped, optimizer, loader), objective = made, cross_entropy

    def timed() -> float:
        done, started = 0, time.process_time()
        while done < steps:
            for examples, targets in loader:
                optimizer.zero_grad()
                objective(wrapped(examples), targets).backward()
                optimizer.step()
                done += 1
                if done == steps:
                    break
        return (time.process_time() - started) / steps

    return timed


def main() -> None:
    """Print a line for each network, batch size and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inputs, labels = torch.rand(EXAMPLES, 1, 28, 28), torch.randint(10, (EXAMPLES,))
    print(f"{'network':8} {'B':>3}  {'step':20} {'ms':>7}  {'ratio':>6}")
    for name, plugin in NETWORKS.items():
        for batch in (10, 50):
            data = (inputs, labels, batch, wanted.steps)
            ways = {"plain": ours(plugin.build(TASK), *data, private=False)}
            ways["fedsim dp-sgd"] = ours(plugin.build(TASK), *data, private=True)
            ways |= {f"Opacus, {mode}": opacus(plugin.build(TASK), *data, mode) for mode in MODES}
            for way in ways.values():
                way()
            seconds = [{way: timed() for way, timed in ways.items()} for _ in range(wanted.repeats)]
            for way in ways:
                took = statistics.median(row[way] for row in seconds)
                ratio = statistics.median(row[way] / row["plain"] for row in seconds)
                print(f"{name:8} {batch:3}  {way:20} {1000 * took:7.2f}  {ratio:6.2f}")


if __name__ == "__main__":
    main()
