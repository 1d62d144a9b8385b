"""Columns of an inner linear layer, the features that they are made of, and images from these."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.exact.layer import FirstLayer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.spear_ica import SpearIca
from fedsim.base.errors import AttackError
from fedsim.base.metrics import psnr
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Examples
from fedsim.data.cifar import Cifar10
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.priors import total_variation
from fedsim.inversion.problem import build_problem
from fedsim.recording.wire_format import Update
from fedsim.training.model_state import copy_state
from studies.messages import data_folder, weights_update
from studies.running import Row

RATE, CONVOLUTIONS = 0.01, 7
RANGE = [0.0] * 3, [1.0] * 3


@dataclass(frozen=True, kw_only=True)
class InnerLayer(FirstLayer):
    """A linear layer that takes what a ReLU gives."""

    def clamp_inputs(self, inputs: Tensor) -> Tensor:
        """See `Layer`."""
        return inputs.clamp_min(0)


def network() -> nn.Module:
    """Build two convolutions with ReLU and pooling, then 512 units."""
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10))


@cache
def load_images() -> Examples:
    """Load the training images of CIFAR-10."""
    return Cifar10().load(data_folder()).train


def measure(size: int, epochs: int, seed: int, batch: int = 0) -> Row:
    """Train, look for columns, and invert the features that they give."""
    data = load_images()
    chosen = torch.randperm(len(data), generator=generator("chosen", seed))[:size]
    images, labels = data.inputs(chosen), data.labels[chosen]
    with seed_globals("network", seed):
        model = network()
    before = copy_state(model)
    convolutions = nn.Sequential(*list(model)[:CONVOLUTIONS])
    true = convolutions(images).detach()
    optimizer, rng = torch.optim.SGD(model.parameters(), lr=RATE), generator("batches", seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=rng).split(batch or size):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    moved = float((convolutions(images).detach() - true).norm() / true.norm())
    update = weights_update(before, copy_state(model), len(images))
    try:
        found, features = find_columns(update, len(images))
    except AttackError:
        return {"columns": 0, "features": 0, "moved": moved, "psnr": ""}
    apart = torch.cdist(features, true.double()) / true.double().norm(dim=1)
    claimed, whose = (torch.from_numpy(side) for side in linear_sum_assignment(apart.numpy()))
    exact = int((apart[claimed, whose] < 1e-3).sum())
    model.load_state_dict(before)
    quality = psnr(invert_features(convolutions, features[claimed].float(), images[whose].shape), images[whose])
    return {"columns": found, "features": exact, "moved": moved, "psnr": float(quality.median())}


def find_columns(update: Update, size: int) -> tuple[int, Tensor]:
    """Return how many columns were found, and `example feature`."""
    knowledge = Knowledge(model=network, loss=cross_entropy, input_shape=(3, 32, 32), num_classes=10, value_range=RANGE)
    scene = build_problem(update, knowledge)
    weight, bias = (scene.parameter_names.index(f"{CONVOLUTIONS}.{kind}") for kind in ("weight", "bias"))
    layer = InnerLayer(
        problem=scene,
        shape=(scene.before[weight].shape[1],),
        name=str(CONVOLUTIONS),
        weight=scene.direction[weight].double(),
        bias=scene.direction[bias].double(),
        endpoints=tuple((end[weight].double(), end[bias].double()) for end in (scene.before, scene.after)),
    )
    mixture = InputMixture.from_update(layer.weight, layer.bias, size, "features")
    found, rest = SpearIca()._columns(mixture, layer, generator("columns"), lambda _: None)
    every = torch.cat([*(column[:, None] for column in found), rest], 1)
    return len(found), mixture.unmix_inputs(mixture.scale_columns(every))


def invert_features(convolutions: nn.Module, features: Tensor, shape: torch.Size) -> Tensor:
    """Return images in [0, 1] that have these features."""
    images = torch.rand(shape, generator=generator("images")).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    for _ in range(1000):
        optimizer.zero_grad()
        misfit = (convolutions(images) - features).square().sum(1) / features.square().sum(1)
        (misfit.sum() + 0.02 * len(images) * total_variation(images)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach()
