"""What a local step under DP-SGD costs: fedsim's `dp-sgd` beside a step without it, and Opacus' own loop.

    python benchmarks/dp_sgd_step.py [--repeats 7] [--steps 20] [--out FILE.json]

All train the same network on the same synthetic data by SGD, on one thread; under DP-SGD batches are drawn by Poisson
sampling, so they have B examples on average. Opacus makes the gradients of examples by hooks, its default, or by
`torch.func` (mode `ew` is its third), or clips without them by two backward passes (`ghost`). Times are of the CPU.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch
from measuring import Row, compare_turns, make_parser, measure_in_turns, publish_rows
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
Timer = Callable[[], float]


def time_fedsim(model: nn.Module, inputs: Tensor, labels: Tensor, batch: int, steps: int, *, private: bool) -> Timer:
    """Return what measures the CPU seconds of a step of fedsim's local training."""
    settings = LocalTraining(local_steps=steps, batch_size=batch, learning_rate=RATE)
    defenses, before = [DpSgd(noise_multiplier=1.0)] if private else [], copy_state(model)

    def seconds() -> float:
        started = time.process_time()
        local_update(model, before, inputs, labels, settings, key=("benchmark",), defenses=defenses)
        return (time.process_time() - started) / steps

    return seconds


def time_opacus(model: nn.Module, inputs: Tensor, labels: Tensor, batch: int, steps: int, mode: str) -> Timer:
    """Return what measures the CPU seconds of a step of Opacus' own loop."""
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

    def seconds() -> float:
        count, started = 0, time.process_time()
        while count < steps:
            for examples, targets in loader:
                optimizer.zero_grad()
                objective(wrapped(examples), targets).backward()
                optimizer.step()
                count += 1
                if count == steps:
                    break
        return (time.process_time() - started) / steps

    return seconds


def main() -> None:
    """Measure each network and batch size."""
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inputs, labels = torch.rand(EXAMPLES, 1, 28, 28), torch.randint(10, (EXAMPLES,))
    rows: list[Row] = []
    for name, plugin in NETWORKS.items():
        for batch in (10, 50):
            data = (inputs, labels, batch, options.steps)
            ways = {"plain": time_fedsim(plugin.build(TASK), *data, private=False)}
            ways["fedsim dp-sgd"] = time_fedsim(plugin.build(TASK), *data, private=True)
            for mode in MODES:
                ways[f"Opacus, {mode}"] = time_opacus(plugin.build(TASK), *data, mode)
            turns = measure_in_turns(ways, options.repeats)
            rows += compare_turns(turns, "plain", {"network": name, "B": batch})
    publish_rows(rows, options.out)


if __name__ == "__main__":
    main()
