"""One message of a client with rows of Adult, attacked; the tables of docs/studies/tableak.md."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.tableak import TabLeak
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.audit.evaluation.table_scores import draw_rows
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import table_metrics
from fedsim.base.randomness import generator, seed_globals
from fedsim.data import Dataset
from fedsim.data.tables import Adult
from fedsim.interfaces.attack import Attack, Knowledge
from fedsim.interfaces.findings import Reconstruction
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from studies.messages import attack_updates, data_folder, gradient_update, mean_gradient, score_claim, weights_update
from studies.running import Row
from studies.writing import column_values, markdown_table, select_rows

ITERATIONS, STARTS = 1500, 6
"""The paper has 30 starts, which take five times as long."""
ATTACKS: dict[str, Attack] = {
    "inverting-gradients": InvertingGradients(
        iterations=ITERATIONS, step_size=0.06, signed=True, tv_weight=0.0, decay=False
    ),
    "tableak, one start": TabLeak(iterations=ITERATIONS, restarts=1),
    "tableak": TabLeak(iterations=ITERATIONS, restarts=STARTS),
}
TITLES = {"gradient": "One gradient"} | {
    f"E = {epochs}": f"Weights after E = {epochs} in two mini-batches each" for epochs in (1, 2, 5)
}
PUBLIC, DRAWS = 5000, 20
BINS = {
    "category": (0.0, 0.2, 0.4, 0.6, 0.8, math.inf),
    "number": (0.0, 0.1, table_metrics.TOLERANCE, 1.0, math.inf),
}
"""Ends of the bins of the entropy of categories, and of the deviation of numbers over the starts."""
KINDS = {"category": "entropy of a category", "number": "deviation of a number over starts, in its own"}


@cache
def load_adult() -> Dataset:
    """Load all columns of Adult."""
    return Adult(drop=()).load(data_folder())


@cache
def moments() -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each feature; a deviation of zero is 1, as in the released code."""
    inputs = load_adult().train.inputs().double()
    std = inputs.std(0)
    return inputs.mean(0).float(), torch.where(std > 0, std, 1.0).float()


def measure(seed: int, sent: str, size: int, attack: str) -> Row:
    """Attack one message, and score what is claimed."""
    data, columns = load_adult(), tuple(column.width for column in load_adult().columns)
    mine = torch.randperm(len(data.train), generator=generator("tableak", size, seed))[:size]
    rows, labels = data.train.inputs(mine), data.train.labels[mine]
    mean, std = moments()
    with seed_globals("tableak", size, seed):
        model = Mlp(hidden=(100, 100)).build(data.task)
    update, plan = send_rows(model, (rows - mean) / std, labels, sent, seed)
    knowledge = Knowledge(
        model=lambda: model,
        loss=cross_entropy,
        input_shape=tuple(mean.shape),
        columns=columns,
        value_range=((-mean / std).tolist(), ((1 - mean) / std).tolist()),
        input_mean=[0.0] * len(mean),
        input_std=[1.0] * len(mean),
        labels=labels.sort().values,
        learning_rate=plan.learning_rate,
        local_epochs=plan.local_epochs,
        batch_size=plan.batch_size,
    )
    finding, seconds = attack_updates(ATTACKS[attack], [update], knowledge, generator("attack", seed))
    assert isinstance(finding, Reconstruction)
    # Score it, beside the best guess and beside rows drawn at random.
    public = data.test.inputs(slice(0, PUBLIC))
    deviations = public.std(0)
    truth = Truth(data=rows, labels=labels, columns=columns, deviations=deviations)
    rng = generator("floor", size, seed)
    scores = score_claim(finding, truth, rng, data.test, PUBLIC, labels_granted=True)
    random = []
    for _ in range(DRAWS):
        drawn = draw_rows(public, columns, size, rng)
        random.append(table_metrics.find_correct_columns(drawn, rows, columns, deviations).double().mean(1).mean())
    right = scores["columns_right"]
    return {
        "right": right.value,
        "floor": right.floor,
        "guess": right.floor_guess,
        "random": float(np.mean(random)),
        "exact": scores["exact"].value,
        "objective": float(finding.trace["objective"][-1]),
        "seconds": round(seconds, 2),
        **count_by_entropy(finding, rows, columns, deviations),
    }


def send_rows(model: nn.Module, inputs: Tensor, labels: Tensor, sent: str, seed: int) -> tuple[Update, LocalTraining]:
    """Return what the client sends, and how it trains."""
    before, count = copy_state(model), len(labels)
    if sent == "gradient":
        plan = LocalTraining(local_epochs=1, batch_size=count, learning_rate=0.01)
        return gradient_update(before, mean_gradient(model, inputs, labels), count), plan
    plan = LocalTraining(local_epochs=int(sent.removeprefix("E = ")), batch_size=count // 2, learning_rate=0.01)
    after, _ = local_update(model, before, inputs, labels, plan, key=("tableak", seed))
    return weights_update(before, after, count), plan


def count_by_entropy(
    finding: Reconstruction, rows: Tensor, columns: Sequence[int], deviations: Tensor
) -> dict[str, int | str]:
    """Count in each bin how many values were claimed, and how many of them are right."""
    counts: dict[str, int | str] = {}
    for kind, ends in BINS.items():
        for place in range(len(ends) - 1):
            counts |= {f"{kind}_{place}": "", f"{kind}_{place}_right": ""}
    if finding.entropy is None:
        return counts
    agreement = table_metrics.compare_rows(finding.data, rows, columns, deviations)
    chosen = table_metrics.assign_rows(agreement.sum(2))
    right, entropy = agreement[torch.arange(len(rows)), chosen], finding.entropy[chosen]
    is_number = torch.tensor([width == 1 for width in columns]).expand_as(right)
    deviation = (entropy - 0.5 * math.log(2 * math.pi * math.e)).exp()
    for kind, values, mask in (("category", entropy, ~is_number), ("number", deviation, is_number)):
        for place, (low, high) in enumerate(pairwise(BINS[kind])):
            # Shares that sum to 1 but for rounding have an entropy of 0, or just below.
            inside = mask & (values >= (low if place else -math.inf)) & (values < high)
            counts[f"{kind}_{place}"] = int(inside.sum())
            counts[f"{kind}_{place}_right"] = int(right[inside].sum())
    return counts


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the share of right values by number of rows, and how sure the starts were of them."""
    parts = []
    for sent, title in TITLES.items():
        if lines := list(size_lines(select_rows(rows, sent=sent))):
            head = ["rows", "batches", *(f"`{attack}`" for attack in ATTACKS), "ahead", "floor", "random", "seconds"]
            parts.append(f"{title}; values that are right, in percent, with 95 % intervals of the mean:")
            parts.append(markdown_table(head, lines, "---:"))
    parts.append("`tableak`, one gradient, how many values are right where the starts agree so far:")
    parts += [agreement_table(select_rows(rows, attack="tableak", sent="gradient"), kind) for kind in BINS]
    return {"": "\n\n".join(parts)}


def size_lines(rows: Sequence[Mapping[str, str]]) -> Iterator[list[str]]:
    """Yield a line for each number of rows, over the batches that all attacks were made on."""
    for size in sorted({int(row["size"]) for row in rows}):
        of_size = select_rows(rows, size=size)
        seeds = {row["seed"] for row in of_size}
        for attack in ATTACKS:
            seeds &= {row["seed"] for row in select_rows(of_size, attack=attack)}
        if seeds:
            both = [row for row in of_size if row["seed"] in seeds]
            right = {}
            for attack in ATTACKS:
                by_seed = sorted(select_rows(both, attack=attack), key=lambda row: int(row["seed"]))
                right[attack] = column_values(by_seed, "right")
            floor, random, seconds = (column_values(by_seed, name).mean() for name in ("floor", "random", "seconds"))
            ahead = difference_text(right["tableak"], right["inverting-gradients"])
            means = [mean_text(values) for values in right.values()]
            figures = [f"{100 * floor:.1f}", f"{100 * random:.1f}", f"{seconds:.0f}"]
            yield [str(size), str(len(seeds)), *means, ahead, *figures]


def mean_text(values: np.ndarray) -> str:
    """Format a mean in percent, with its interval where there are two values or more."""
    low, high = (100 * end for end in confidence_interval(values, share=True))
    return f"{100 * values.mean():.1f}" + (f" [{low:.0f}, {high:.0f}]" if len(values) > 1 else "")


def difference_text(values: np.ndarray, others: np.ndarray) -> str:
    """Format by how many percent values are ahead on the same batches, with the margin of the interval."""
    differences = 100 * (values - others)
    low, high = confidence_interval(differences)
    return f"{differences.mean():+.1f}" + (f" ± {(high - low) / 2:.1f}" if len(differences) > 1 else "")


def agreement_table(rows: Sequence[Mapping[str, str]], kind: str) -> str:
    """Format how many values of one kind of columns are right, by how far the starts agree."""
    bins = list(pairwise(BINS[kind]))
    names = [f"{low:g} to {high:g}" if math.isfinite(high) else f"from {low:g}" for low, high in bins]
    lines = []
    for size in sorted({int(row["size"]) for row in rows}):
        line = [str(size)]
        for place in range(len(bins)):
            of_size = select_rows(rows, size=size)
            count, right = (column_values(of_size, f"{kind}_{place}{end}").sum() for end in ("", "_right"))
            line.append(f"{100 * right / count:.0f} % of {count:.0f}" if count else "-")
        lines.append(line)
    return markdown_table(["rows", f"{KINDS[kind]}: {names[0]}", *names[1:]], lines, "---:")
