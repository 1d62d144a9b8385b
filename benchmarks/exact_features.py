"""What the columns of an inner linear layer give away: features, and images from these.

A network of two convolutions and two linear layers, CIFAR-10, one client. The update of the first linear layer is made
of the features that the convolutions give, as long as these hardly move in local training. Its columns are sought as
`spear-ica` does; the images are those whose features come closest to the ones found, by Adam with total variation.
`python benchmarks/exact_features.py --data-dir DIR` takes three minutes of one core.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

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
from fedsim.data.cifar import Cifar10
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.priors import total_variation
from fedsim.inversion.problem import build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update

CELLS = ((4, 1, 4), (8, 1, 8), (16, 1, 16), (8, 5, 8), (8, 5, 4))
RATE, SEEDS, CONVOLUTIONS = 0.01, 3, 7
RANGE = [0.0] * 3, [1.0] * 3


@dataclass(frozen=True, kw_only=True)
class Inner(FirstLayer):
    """A linear layer that takes what a ReLU gives."""

    def clamp_inputs(self, inputs: Tensor) -> Tensor:
        """See `Layer`."""
        return inputs.clamp_min(0)


def network() -> nn.Module:
    """Two convolutions with ReLU and pooling, then 512 units."""
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Linear(512, 10))


def main() -> None:
    """Print a line for each cell and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDSIM_DATA"))
    data = Cifar10().load(parser.parse_args().data_dir).train
    print("N, E, B, seed: columns found, features within 1e-3, how far local training moves them, median dB of images")
    for size, epochs, batch in CELLS:
        for seed in range(SEEDS):
            chosen = torch.randperm(len(data), generator=generator("chosen", seed))[:size]
            found = measure_features(data.inputs(chosen), data.labels[chosen], epochs, batch, seed)
            print(f"{size}, {epochs}, {batch}, {seed}: {found}", flush=True)


def measure_features(images: Tensor, labels: Tensor, epochs: int, batch: int, seed: int) -> str:
    """Train, look for columns, and invert the features that they give."""
    with seed_globals("network", seed):
        model = network()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    convolutions = nn.Sequential(*list(model)[:CONVOLUTIONS])
    true = convolutions(images).detach()
    optimizer, rng = torch.optim.SGD(model.parameters(), lr=RATE), generator("batches", seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(images), generator=rng).split(batch):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    after = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    moved = float((convolutions(images).detach() - true).norm() / true.norm())
    sent = Payload.from_dense(after, "weights")
    update = Update(round=1, client=0, before=before, payload=sent, num_examples=len(images))
    try:
        found, features = columns(update, len(images))
    except AttackError:
        return f"refused, -, {moved:.4f}, -"
    apart = torch.cdist(features, true.double()) / true.double().norm(dim=1)
    claimed, whose = (torch.from_numpy(side) for side in linear_sum_assignment(apart.numpy()))
    exact = int((apart[claimed, whose] < 1e-3).sum())
    model.load_state_dict(before)
    quality = psnr(inverted(convolutions, features[claimed].float(), images[whose].shape), images[whose])
    return f"{found}, {exact}, {moved:.4f}, {float(quality.median()):.1f}"


def columns(update: Update, size: int) -> tuple[int, Tensor]:
    """How many columns were found, and `example feature`."""
    knowledge = Knowledge(model=network, loss=cross_entropy, input_shape=(3, 32, 32), num_classes=10, value_range=RANGE)
    scene = build_problem(update, knowledge)
    weight, bias = (scene.parameter_names.index(f"{CONVOLUTIONS}.{kind}") for kind in ("weight", "bias"))
    layer = Inner(
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


def inverted(convolutions: nn.Module, features: Tensor, shape: torch.Size) -> Tensor:
    """`example channel height width`, images in [0, 1] that have these features."""
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


if __name__ == "__main__":
    main()
