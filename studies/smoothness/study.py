"""How far from a client's images gradients still resemble theirs; the table of docs/studies/inversion-today.md.

An attack that matches gradients descends along the cosine distance between the gradient of its dummy images and the
one that was sent. Here that distance is measured around the truth: at the client's own images with white noise, from
noise that nobody sees up to that of a poor reconstruction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fedsim.base.randomness import generator
from fedsim.federation.experiment import Experiment
from fedsim.recording.wire_format import State
from fedsim.training.loop import local_update
from fedsim.training.settings import LocalTraining
from studies.messages import mean_gradient, one_client_experiment
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table, select_rows

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lenet": ("LeNet", {"name": "lenet"}),
    "convnet/4": ("ConvNet/4", {"name": "convnet", "width": 8}),
    "vit": ("ViT", {"name": "vit"}),
    "resnet18/4": ("ResNet18/4", {"name": "resnet18", "channels": 16}),
}
"""Those that end in /4 have a quarter of the channels."""
NOISE_DB = (50, 40, 30, 20, 14)
"""PSNR in dB of the images with noise."""
SEED, TRAINED, VICTIMS = 1, 10000, 5


@cache
def experiment_of(model: str) -> Experiment:
    """Return an experiment with one client and CIFAR-10."""
    return one_client_experiment({"name": "cifar10"}, MODELS[model][1], SEED)


@cache
def weights_of(model: str, epochs: int) -> State:
    """Return the first weights, or those after some epochs of SGD on 10 000 training images."""
    experiment = experiment_of(model)
    before = experiment.initial_state()
    if not epochs:
        return before
    train = experiment.dataset.train
    inputs = experiment.data.to_model(train.inputs(slice(0, TRAINED)))
    settings = LocalTraining(local_epochs=epochs, batch_size=50, learning_rate=0.05, momentum=0.9)
    trained, _ = local_update(
        experiment.new_model(), before, inputs, train.labels[:TRAINED], settings, key=(SEED, "smoothness")
    )
    return before | trained


def measure(model: str, batch_norm: str, epochs: int, size: int) -> list[Row]:
    """Return a row for each client and noise: the cosine distance of the gradients, in [0, 2]."""
    experiment = experiment_of(model)
    network = experiment.new_model()
    network.load_state_dict(weights_of(model, epochs), strict=False)
    network.train(batch_norm == "batch")
    test, rows = experiment.dataset.test, list[Row]()
    for client in range(VICTIMS):
        index = torch.arange(client * size, (client + 1) * size)
        images, labels = test.inputs(index), test.labels[index]
        sent = flat_gradient(network, experiment.data.to_model(images), labels)
        noise = torch.randn(images.shape, generator=generator(SEED, "smoothness noise", client))
        for level in NOISE_DB:
            noisy = images + noise * 10 ** (-level / 20)
            gradient = flat_gradient(network, experiment.data.to_model(noisy), labels)
            distance = 1 - cosine_similarity(gradient, sent, dim=0).item()
            rows.append({"client": client, "noise_db": level, "distance": distance})
    return rows


def flat_gradient(network: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of all parameters as one vector."""
    return torch.cat([tensor.flatten() for tensor in mean_gradient(network, inputs, labels).values()]).double()


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: a line for each network, normalisation, size and number of epochs."""
    lines = []
    for (model, batch_norm, size, epochs), cell in group_rows(rows, "model", "batch_norm", "size", "epochs").items():
        line = [MODELS[model][0], batch_norm, size, epochs]
        for level in NOISE_DB:
            values = column_values(select_rows(cell, noise_db=level), "distance")
            line.append(f"{sum(values) / len(values):.3f}")
        lines.append(line)
    head = ["network", "BatchNorm", "N", "epochs", *(f"{level} dB" for level in NOISE_DB)]
    return {"": markdown_table(head, lines)}
