"""Labels counted from one update of a client whose protocol is known."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch

from fedsim.audit.evaluation.scoring import frequency_guess_accuracy, label_accuracy, uniform_guess_accuracy
from fedsim.base.randomness import generator, numpy_generator
from fedsim.data import Dataset
from fedsim.data.digits import Digits
from fedsim.data.idx import Mnist
from fedsim.inversion.labels import updates as rules
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining
from studies.messages import data_folder, task_knowledge, weights_update
from studies.running import Row

CLASSES = 10
NETWORKS: dict[str, Any] = {"digits": Mlp(), "mnist": SmeCnn()}


@cache
def load_dataset(name: str) -> Dataset:
    """Load digits or MNIST."""
    return Digits().load(None) if name == "digits" else Mnist().load(data_folder())


def measure(data: str, count: int, epochs: int, rate: float, spread: str, seed: int) -> Row:
    """Return the shares of labels that the rule, noise and the better guess get right, and whether it warned."""
    dataset, network = load_dataset(data), NETWORKS[data]
    (mean,), (std,) = (moment.tolist() for moment in dataset.moments)
    torch.manual_seed(seed)
    model = network.build(dataset.task)
    # Draw the client's examples, and train.
    draw = numpy_generator(seed, "labels")
    shares = np.full(CLASSES, 0.1) if spread == "iid" else draw.dirichlet(np.full(CLASSES, 0.5))
    chosen = draw.multinomial(count, shares)
    train = dataset.train
    index = torch.cat([(train.labels == label).nonzero().flatten()[:n] for label, n in enumerate(chosen)])
    inputs, labels, before = (train.inputs(index) - mean) / std, train.labels[index], copy_state(model)
    plan = LocalTraining(local_epochs=epochs, batch_size=count, learning_rate=rate)
    after, _ = local_update(model, before, inputs, labels, plan, key=(seed,))
    update = weights_update(before, after, len(labels))
    knowledge = task_knowledge(
        lambda: network.build(dataset.task), dataset.task, value_range=([-mean / std], [(1 - mean) / std]),
        learning_rate=rate, local_epochs=epochs, batch_size=count,
    )  # fmt: skip
    # Count by noise alone, as where no training is simulated, and as the attack does.
    with patch.multiple(rules, _simulate_last_layer=lambda *_: None, _MODEL_TRAININGS=1, warn=Mock()):
        by_noise = rules.count_labels(update, knowledge, model, before, after, generator(seed))
    with patch.object(rules, "warn") as warn:
        claimed = rules.count_labels(update, knowledge, model, before, after, generator(seed))
    frequencies = dataset.test.labels.bincount(minlength=CLASSES) / len(dataset.test.labels)
    floor = max(uniform_guess_accuracy(labels, CLASSES), frequency_guess_accuracy(labels, frequencies))
    row = {"recovered": label_accuracy(claimed, labels), "noise": label_accuracy(by_noise, labels)}
    return row | {"floor": floor, "warned": int(warn.called)}
