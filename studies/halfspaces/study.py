"""How many columns each source of `spear-ica` finds by itself, by the units for each example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.exact.halfspaces import add_halfspace_columns
from adversaries.exact.layer import FirstLayer, read_first_layer
from adversaries.exact.mixture import InputMixture
from adversaries.exact.spear_ica import SpearIca, add_estimated_columns
from fedsim.base import metrics
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Examples
from fedsim.data.cifar import Cifar10
from fedsim.data.idx import Mnist
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.findings import Reconstruction
from fedsim.training.model_state import copy_state
from studies.messages import attack_updates, data_folder, weights_update
from studies.running import Row
from studies.writing import column_values, group_rows, markdown_table

RATE, BATCH, GAUSSIAN_LIMIT = 0.05, 10, 8.0
"""Learning rate; batch of several epochs, of one step all examples; the range of Gaussian numbers, at both sides."""
SAME_COSINE, EXACT_PSNR = 1 - 1e-6, 40.0


@cache
def load_images(data: str) -> Examples:
    """Load the training images of a data set."""
    dataset = Mnist() if data == "mnist" else Cifar10()
    return dataset.load(data_folder()).train


def draw_examples(data: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs, `example channel height width`, and labels."""
    rng = generator("halfspaces study", data, seed)
    if data == "gaussian":
        inputs = torch.randn(size, 1, 28, 28, generator=rng)
        return inputs, torch.randint(10, (size,), generator=rng)
    images = load_images(data)
    chosen = torch.randperm(len(images), generator=rng)[:size]
    return images.inputs(chosen), images.labels[chosen]


def build_network(num_inputs: int, units: int, seed: int) -> nn.Module:
    """Build a network of one hidden layer."""
    with seed_globals("halfspaces study", seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, units), nn.ReLU(), nn.Linear(units, 10))


def measure(data: str, size: int, units_per_example: int, epochs: int, source: str, seed: int) -> Row:
    """Search columns by one source until a pass finds none; count them, and those of one example alone.

    Of `spear-ica` as a whole, examples that are certified and those that are exact are counted, and its processor time.
    """
    inputs, labels = draw_examples(data, size, seed)
    new = partial(build_network, inputs[0].numel(), units_per_example * size, seed)
    model = new()
    before = copy_state(model)
    optimizer, rng = torch.optim.SGD(model.parameters(), RATE), generator("batches", seed)
    for _ in range(epochs):
        for batch in torch.randperm(size, generator=rng).split(size if epochs == 1 else BATCH):
            optimizer.zero_grad()
            cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    low, high = (-GAUSSIAN_LIMIT, GAUSSIAN_LIMIT) if data == "gaussian" else (0.0, 1.0)
    channels = inputs.shape[1]
    knowledge = Knowledge(
        model=new,
        loss=cross_entropy,
        input_shape=tuple(inputs.shape[1:]),
        num_classes=10,
        value_range=([low] * channels, [high] * channels),
    )
    update = weights_update(before, copy_state(model), size)
    if source == "spear-ica":
        finding, seconds = attack_updates(SpearIca(), [update], knowledge, generator("columns"))
        assert isinstance(finding, Reconstruction)
        assert finding.certified is not None
        true = (inputs - low) / (high - low)
        is_exact = metrics.psnr(metrics.pair_examples(finding.data, true), true) >= EXACT_PSNR
        return {"columns": int(finding.certified.sum()), "right": int(is_exact.sum()), "seconds": seconds}
    layer = read_first_layer(update, knowledge)
    try:
        mixture = InputMixture.from_update(layer.weight, layer.bias, size, "halfspaces study")
    except AttackError:
        return {"columns": "", "right": ""}
    columns = find_columns(mixture, layer, source)
    # Compare with the true columns.
    coordinates = torch.linalg.lstsq(mixture.inputs.T, inputs.flatten(1).double().T).solution.T
    true = torch.linalg.pinv(coordinates)
    true = true / true.norm(dim=0)
    right = sum(float((true.T @ column).abs().max()) > SAME_COSINE for column in columns)
    return {"columns": len(columns), "right": right}


def find_columns(mixture: InputMixture, layer: FirstLayer, source: str) -> list[Tensor]:
    """Return the columns that passes of one source find until one finds none."""
    columns: list[Tensor] = []
    rng = generator("columns")
    while len(columns) < mixture.rank:
        count = len(columns)
        if source == "halfspaces":
            add_halfspace_columns(mixture, layer, columns, 1, rng)
        else:
            add_estimated_columns(mixture, layer, columns, 0, rng)
        if len(columns) == count:
            break
    return columns


def format_share(row: Mapping[str, str]) -> str:
    """Format the share of examples whose columns were found, and of an attack as a whole its time."""
    if not row["columns"]:
        return "refused"
    share = f"{float(row['right']) / int(row['size']):.2f}"
    return f"{share} in {float(row['seconds']):.0f} s" if row["seconds"] else share


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the table of shares of the examples whose columns were found, and how many sums were found besides."""
    ratios = sorted({row["units_per_example"] for row in rows}, key=int)
    head = ["inputs", "N", "steps", "source", *(f"{ratio} units" for ratio in ratios)]
    lines = []
    for (data, size, epochs, source), found in group_rows(rows, "data", "size", "epochs", "source").items():
        by_ratio = group_rows(found, "units_per_example")
        shares = []
        for ratio in ratios:
            seeds = by_ratio.get((ratio,), [])
            values = [format_share(row) for row in seeds]
            shares.append(", ".join(values) or "-")
        lines.append([data, size, "one" if epochs == "1" else f"{epochs} epochs", source, *shares])
    of_sources = [row for row in rows if row["source"] != "spear-ica"]
    wrong = sum(column_values(of_sources, "columns")) - sum(column_values(of_sources, "right"))
    return {
        "found": markdown_table(head, lines),
        "sums": f"Of all columns that a source found {wrong:.0f} are sums of several examples.",
    }
