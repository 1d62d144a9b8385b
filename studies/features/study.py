"""Features that an inner linear layer gives away, and images from these; the last table of docs/studies/exact.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.exact.spear_ica import SpearIca
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.data.cifar import Cifar10
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.priors import total_variation
from fedsim.recording.wire_format import State
from fedsim.training.model_state import copy_state
from studies.messages import attack_updates, data_folder, score_claim, weights_update
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table

RATE, FEATURES, FEATURE_LIMIT, FLOOR, EXACT = 0.01, 2048, 8.0, 1000, 1e-3
"""Learning rate; features of an image, and more than any of them is; test images for floors; relative error of an exact
claim."""


def build_convolutions() -> nn.Sequential:
    """Build two convolutions with ReLU and pooling."""
    first = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten())


def build_head() -> nn.Sequential:
    """Build what follows the convolutions: 512 units, and the classes."""
    return nn.Sequential(nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 10))


@cache
def load_images() -> Dataset:
    """Load CIFAR-10."""
    return Cifar10().load(data_folder())


def measure(size: int, epochs: int, seed: int, batch: int = 0) -> Row:
    """Train, read the features off the update of the layers behind the convolutions, and invert them."""
    dataset = load_images()
    chosen = torch.randperm(len(dataset.train), generator=generator("chosen", seed))[:size]
    images, labels = dataset.train.inputs(chosen), dataset.train.labels[chosen]
    with seed_globals("network", seed):
        convolutions, head = build_convolutions(), build_head()
    model = nn.Sequential(convolutions, head)
    received, before = copy_state(convolutions), copy_state(head)
    true = convolutions(images).detach()
    optimizer, rng = torch.optim.SGD(model.parameters(), lr=RATE), generator("batches", seed)
    for _ in range(epochs):
        for part in torch.randperm(len(images), generator=rng).split(batch or size):
            optimizer.zero_grad()
            cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
    moved = float((convolutions(images).detach() - true).norm() / true.norm())
    row: Row = {"certified": "", "exact": "", "moved": moved, "psnr": "", "psnr floor": ""}
    try:
        finding = read_features(before, copy_state(head), size)
    except AttackError:
        return row
    # Compare each claim with the features of one image, and count.
    features = finding.data * FEATURE_LIMIT
    errors = torch.cdist(features, true) / true.norm(dim=1)
    claimed, whose = (torch.from_numpy(side) for side in linear_sum_assignment(errors.numpy()))
    row["exact"] = int((errors[claimed, whose] < EXACT).sum())
    row["certified"] = int(finding.certified.sum()) if finding.certified is not None else 0
    # Invert the features through what the client received.
    convolutions.load_state_dict(received)
    inverted = invert_features(convolutions, features, torch.Size([len(features), *images.shape[1:]]))
    claim = Reconstruction(data=inverted, labels=finding.labels)
    score = score_claim(claim, Truth(data=images, labels=labels), generator("floors", seed), dataset.test, FLOOR)
    return row | {"psnr": score["psnr"].value, "psnr floor": score["psnr"].floor}


def read_features(before: State, after: State, size: int) -> Reconstruction:
    """Return what `spear-ica` claims of the inputs of the head, as a share of the limit of features.

    Raises:
        AttackError: it refuses.
    """
    knowledge = Knowledge(
        model=build_head,
        loss=cross_entropy,
        input_shape=(FEATURES,),
        num_classes=10,
        value_range=([0.0] * FEATURES, [FEATURE_LIMIT] * FEATURES),
    )
    finding, _ = attack_updates(SpearIca(), [weights_update(before, after, size)], knowledge, generator("columns"))
    assert isinstance(finding, Reconstruction)
    return finding


def invert_features(convolutions: nn.Module, features: Tensor, shape: torch.Size) -> Tensor:
    """Return images in [0, 1] that have these features."""
    images = torch.rand(shape, generator=generator("images")).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    for _ in range(1000):
        optimizer.zero_grad()
        misfit = (convolutions(images) - features).square().sum(1) / features.square().sum(1)
        (misfit.sum() + 0.02 * len(images) * total_variation(images)).backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return images.detach()


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table: a line for each N, E and B, with the values of all seeds."""
    lines = []
    for (size, epochs, batch), cell in group_rows(rows, "size", "epochs", "batch").items():
        line = [f"{size}, {epochs}, {batch or size}"]
        line += [", ".join(row[name] or "refused" for row in cell) for name in ("exact", "certified")]
        for name in ("psnr", "psnr floor"):
            line.append(", ".join(f"{float(row[name]):.1f}" if row[name] else "–" for row in cell))
        moved = 100 * column_values(cell, "moved")
        line.append(f"{moved.min():.1f} to {moved.max():.1f} %")
        lines.append(line)
    head = ["N, E, B", "exact features, of N", "certified", "images from them, dB", "best guess, dB"]
    return {"": markdown_table([*head, "features move in training by"], lines)}
