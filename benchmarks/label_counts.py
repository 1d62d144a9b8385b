"""How many labels `count_labels` recovers from one update, by N, T, the learning rate and how labels are spread.

Digits and the quickstart's network, or with `--data mnist` MNIST under $FEDSIM_DATA and the CNN of SME, untrained; the
protocol is known; `noise` counts by what the model makes of noise alone, as where no training is simulated; `floor`
is the better of the two guesses of the evaluator; `gain` is the mean difference on the same clients, with its
95 % interval; `warned` is the share of updates of which a warning says that simulations do not explain them.
`python benchmarks/label_counts.py` takes some minutes of one core.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation import statistics
from fedsim.audit.evaluation.scoring import frequency_guess_accuracy, label_accuracy, uniform_guess_accuracy
from fedsim.base.randomness import generator, numpy_generator
from fedsim.base.task import Task
from fedsim.data import Dataset
from fedsim.data.digits import Digits
from fedsim.data.idx import Mnist
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.labels import updates as rules
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining

CLASSES = 10
CELLS = {
    "digits": list(itertools.product((10, 50), (1, 10, 50), (0.01, 0.05, 0.2), ("iid", "skewed"))),
    "mnist": list(itertools.product((10, 50), (10, 50), (0.004, 0.05), ("iid", "skewed"))),
}


def main() -> None:
    """Print a line for each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=CELLS, default="digits")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=8)
    chosen = parser.parse_args()
    plugin: Mlp | SmeCnn = Mlp() if chosen.data == "digits" else SmeCnn()
    if chosen.data == "digits":
        data, shape = Digits().load(None), (1, 8, 8)
    else:
        data, shape = Mnist().load(Path(os.environ["FEDSIM_DATA"])), (1, 28, 28)

    def build() -> nn.Module:
        return plugin.build(Task(shape, CLASSES))

    print("N, T, rate, spread: recovered, noise, gain, floor, warned")
    for cell in CELLS[chosen.data]:
        seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
        found = np.array([measure(data, build, shape, *cell, seed) for seed in seeds])
        own, noise, floor, warned = found.mean(0)
        gains = statistics.gains(found[:, 0], found[:, 1], higher_is_better=True)
        low, high = statistics.confidence_interval(gains, lowest=-1.0, highest=1.0)
        gain = f"{gains.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
        print(f"{', '.join(map(str, cell))}: {own:.3f}, {noise:.3f}, {gain}, {floor:.3f}, {warned:.2f}", flush=True)


def measure(
    data: Dataset,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    count: int,
    epochs: int,
    rate: float,
    spread: str,
    seed: int,
) -> tuple[float, float, float, bool]:
    """Shares of labels that both rules and guesses get right of one client, and whether a warning was given."""
    (mean,), (std,) = (moment.tolist() for moment in data.moments)
    frequencies = data.test.labels.bincount(minlength=CLASSES) / len(data.test.labels)
    torch.manual_seed(seed)
    model = build()
    draw = numpy_generator(seed, "labels")
    shares = np.full(CLASSES, 0.1) if spread == "iid" else draw.dirichlet(np.full(CLASSES, 0.5))
    chosen = draw.multinomial(count, shares)
    index = torch.cat([(data.train.labels == c).nonzero().flatten()[:n] for c, n in enumerate(chosen)])
    inputs, labels = (data.train.inputs(index) - mean) / std, data.train.labels[index]
    before = copy_state(model)
    plan = LocalTraining(local_epochs=epochs, batch_size=count, learning_rate=rate)
    after, _ = local_update(model, before, inputs, labels, plan, key=(seed,))
    update = Update(
        round=1, client=0, before=before, payload=Payload.from_dense(after, "weights"), num_examples=len(labels)
    )
    knowledge = Knowledge(
        model=build, loss=cross_entropy, input_shape=shape, num_classes=CLASSES,
        value_range=([-mean / std], [(1 - mean) / std]), learning_rate=rate, local_epochs=epochs, batch_size=count,
    )  # fmt: skip
    with patch.multiple(rules, _simulate_last_layer=lambda *_: None, _MODEL_TRAININGS=1, warn=Mock()):
        by_noise = rules.count_labels(update, knowledge, model, before, after, generator(seed))
    with patch.object(rules, "warn") as warn:
        claimed = rules.count_labels(update, knowledge, model, before, after, generator(seed))
    floor = max(uniform_guess_accuracy(labels, CLASSES), frequency_guess_accuracy(labels, frequencies))
    return label_accuracy(claimed, labels), label_accuracy(by_noise, labels), floor, warn.called


if __name__ == "__main__":
    main()
