"""Matching with a prior from public images, and why it ends where it does; tables of docs/studies/inversion-today.md.

The victims, networks and messages are those of the study `today`. Beside what an attack claims stands what only the
evaluation can know: the objective and the distance at the true images, at guesses, and on the way between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.statistics import Values, confidence_interval, gains
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.base.randomness import generator
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge, Records
from fedsim.inversion.batch_norm import copy_with_batch_statistics
from fedsim.inversion.distances import Cosine
from fedsim.inversion.parametrisations import DenoisedImages
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.public_fits import fit_components, fit_denoiser
from fedsim.inversion.recipe import Recipe, cosine_schedule
from fedsim.recording.wire_format import Update
from fedsim.training.optimizers import Adam
from studies.messages import data_folder, invert_update, pair_psnr, score_claim
from studies.running import Row
from studies.today.study import (
    FEWEST,
    SEED,
    SIDES,
    BatchNormalisedInversion,
    experiment_of,
    send_message,
    victims_images,
)
from studies.writing import column_values, group_rows, markdown_table

FLOOR_EXAMPLES = 500
"""First training images, of which guesses are made; there are 200 faces."""
PUBLIC_EXAMPLES = {"cifar10": slice(500, 3500), "faces": slice(0, 200)}
"""Training images that priors are fitted to. Faces are too few for guesses to have others."""
COMPONENTS = 60
METRICS = ("psnr", "ssim", "lpips", "identified")
BN_WEIGHT = 0.005
"""Of the distance to the statistics that the client sent, as in the study `today`."""
NORMALISED_BY_BATCH = ("sent", "withheld")
"""What of its BatchNorm statistics a client does where layers normalise by the batch; `frozen` and `none` do not."""
_SHARED: dict[str, Any] = {"iterations": 100, "signed": False}
DENOISERS = {"denoiser": 300, "denoiser 1000": 1000}
"""Iterations of attacks with a denoiser."""
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class FixedStart:
    """Starts matching at given images, which are optimised as they are."""

    images: Tensor

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Return the images, standardised, in the order of the problem's labels."""
        return self.images.clone()

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return them as they are now."""
        return coefficients

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return 0."""
        return coefficients.new_zeros(())


@dataclass(frozen=True, kw_only=True)
class CosineDecayInversion(BatchNormalisedInversion):
    """Matching whose step size falls along a cosine.

    Args:
        by_batch: BatchNorm layers normalise dummy data by their batch, not by the running statistics.
        start: images where it starts, standardised; None starts as the prior does.
    """

    by_batch: bool = True
    start: Tensor | None = None

    def _problem(self, update: Update, knowledge: Knowledge) -> InversionProblem:
        return build_problem(update, knowledge, use_batch_statistics=self.by_batch)

    def _recipe(self, problem: InversionProblem) -> Recipe:
        recipe = replace(super()._recipe(problem), schedule=cosine_schedule, normalised_by_batch=self.by_batch)
        return recipe if self.start is None else replace(recipe, parametrisation=FixedStart(self.start))


def build_attack(attack: str, statistics: str, half_way: Tensor) -> CosineDecayInversion:
    """Return the attack with a prior, or matching from half way to the true images, which no adversary can begin at."""
    settings = _SHARED | {
        "by_batch": statistics in NORMALISED_BY_BATCH,
        "bn_weight": BN_WEIGHT if statistics == "sent" else 0.0,
    }
    if attack == "half way":
        return CosineDecayInversion(**settings, step_size=0.02, tv_weight=0.001, start=half_way)
    if attack in DENOISERS:
        settings |= {"iterations": DENOISERS[attack], "step_size": 1.0, "prior_weight": 1e-5}
        return CosineDecayInversion(**settings, tv_weight=0.0, prior="denoiser")
    return CosineDecayInversion(**settings, step_size=0.1, tv_weight=0.0, prior="pca")


@cache
def public_records(model: str, data: str) -> Records:
    """Return the images that priors are fitted to; the network was trained on them."""
    experiment = experiment_of(model, data)
    chosen, train = PUBLIC_EXAMPLES[data], experiment.dataset.train
    return Records(inputs=experiment.data.to_model(train.inputs(chosen)), labels=train.labels[chosen])


def measure(model: str, data: str, weights: str, statistics: str, batch: int, attack: str, seed: int) -> Row:
    """Attack one victim, score the claim also against the next victim's images, and diagnose why it ended there."""
    update, knowledge = send_message(model, data, batch, "gradient", weights, statistics, seed)
    knowledge = replace(knowledge, auxiliary=public_records(model, data))
    images, labels = victims_images(data, batch, seed)
    problem = known_problem(update, knowledge, by_batch=statistics in NORMALISED_BY_BATCH)
    true = problem.scaling.from_unit_range(images[labels.argsort(stable=True)])
    points = points_between(problem, true)
    if attack in DENOISERS:
        points["nearest"] = find_denoised(problem, true)
    method = build_attack(attack, statistics, points["half"])
    finding = invert_update(method, update, knowledge, generator(SEED, "today attack", seed))
    row = list_scores(score_images(finding, model, data, batch, seed))
    row["psnr_other"] = pair_psnr(finding.data, victims_images(data, batch, seed + 1)[0])
    row["distance"] = float(finding.trace["l_sim"][-1])
    return row | diagnose(problem, true, points)


def score_images(finding: Reconstruction, model: str, data: str, batch: int, seed: int) -> dict[str, Score]:
    """Return the scores of one victim's claimed images by metric, beside guesses."""
    images, labels = victims_images(data, batch, seed)
    return score_claim(
        finding, Truth(data=images, labels=labels), generator(SEED, "today guesses", seed),
        experiment_of(model, data).dataset.train, FLOOR_EXAMPLES, weights=data_folder() / "weights",
        labels_granted=True,
    )  # fmt: skip


def list_scores(scores: Mapping[str, Score]) -> Row:
    """Return the columns of a victim's scores and of their floors."""
    return {name: scores[name].value for name in METRICS} | {f"{name}_floor": scores[name].floor for name in METRICS}


def known_problem(update: Update, knowledge: Knowledge, *, by_batch: bool) -> InversionProblem:
    """Return the problem of an attack that knows the labels, and normalises by the batch or as the model does."""
    problem = build_problem(update, knowledge, use_batch_statistics=by_batch)
    assert knowledge.labels is not None
    model = copy_with_batch_statistics(problem.model) if by_batch else problem.model
    return replace(problem, model=model, uses_batch_statistics=by_batch, labels=knowledge.labels)


def points_between(problem: InversionProblem, true: Tensor) -> dict[str, Tensor]:
    """Return images from which an attack may start, and those that it can reach; it sees the true ones.

    Returns:
        `means` of the classes, those `half` way to the true images, and the `nearest` that the components make, all
        standardised.
    """
    fit = fit_components(problem, COMPONENTS, tuple(true.shape[1:]))
    assert fit.class_means is not None
    assert fit.within is not None
    means, components = fit.class_means[problem.labels], fit.within[problem.labels]
    left = problem.scaling.to_model(true).flatten(1) - means
    coefficients = torch.einsum("ncv,nv->nc", components, left) / components.square().sum(2)
    nearest = means + torch.einsum("nc,ncv->nv", coefficients, components)
    mean_images, nearest_images = (
        (flat.reshape(true.shape) - problem.scaling.centre) / problem.scaling.scale for flat in (means, nearest)
    )
    return {"means": mean_images, "half": (mean_images + true) / 2, "nearest": nearest_images}


def find_denoised(problem: InversionProblem, true: Tensor) -> Tensor:
    """Return the images nearest to the true ones that the denoiser makes of noisy images, as far as descent finds."""
    prior, denoiser = DenoisedImages(), fit_denoiser(problem, tuple(true.shape[1:]))
    noisy = ((problem.scaling.to_unit_range(true) - denoiser.mean) / denoiser.level).requires_grad_()
    optimizer = Adam([noisy], 0.3)
    for iteration in range(200):
        optimizer.param_groups[0]["lr"] = 0.3 * cosine_schedule(iteration, 200)
        error = (prior.dummy_data(problem, noisy) - true).square().mean()
        (noisy.grad,) = torch.autograd.grad(error, noisy)
        optimizer.step()
    return prior.dummy_data(problem, noisy).detach()


def diagnose(problem: InversionProblem, true: Tensor, points: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure what a descent meets on its way to the true images.

    Returns:
        `distance_*` and `psnr_*`: the cosine distance of the gradients, in [0, 2], and the PSNR in dB at the points.
        `alignment_*`: the cosine between the step that lowers the distance most there, and the way to the true images.
    """
    result = {}
    for name, point in points.items():
        result[f"psnr_{name}"] = metrics.psnr(*map(problem.scaling.to_unit_range, (point, true))).mean().item()
        dummy = point.detach().requires_grad_()
        distance = Cosine()(problem.gradient(problem.before, dummy, problem.labels), Cosine().target(problem))
        (slope,) = torch.autograd.grad(distance, dummy)
        result[f"distance_{name}"] = distance.item()
        result[f"alignment_{name}"] = cosine_similarity(-slope.flatten(), (true - point).flatten(), dim=0).item()
    return result


TITLES = {
    "cifar10": "CIFAR-10", "faces": "Faces",
    "resnet18/4": "ResNet18/4", "vit": "ViT", "early": "early", "trained": "trained",
    "frozen": "running", "sent": "batch, sent", "withheld": "batch, withheld", "none": "–",
    "pca": "60 components", "denoiser": "denoiser, 300", "denoiser 1000": "denoiser, 1000",
    "half way": "from half way",
}  # fmt: skip
FORMATS = {"psnr": ".1f", "ssim": ".2f", "lpips": ".2f", "identified": ".2f"}
POINTS = {"means": "class means", "half": "half way", "nearest": "nearest of the prior"}


def tables(rows: Rows) -> dict[str, str]:
    """Return the scores, and what a descent meets on its way; a table of each for each data set."""
    head = ["N", "weights", "network", "BatchNorm"]
    gain_heads = ["gain in dB", "gain in LPIPS", "gain in identified"]
    score_head = [*head, "matching", "victims", "guess", "claim", *gain_heads, "other's images", "distance"]
    scores, ways = [], []
    for (data,), of_data in group_rows(rows, "data").items():
        score_lines, way_lines = map_settings(of_data)
        title = f"{TITLES[data]}, {SIDES[data]} x {SIDES[data]}:"
        scores += [title, markdown_table(score_head, score_lines)]
        ways += [title, markdown_table([*head, "matching", "victims", *POINTS.values()], way_lines)]
    changes = ["change in dB", "in LPIPS", "in identified"]
    compared = markdown_table(["compared", "data", *head, "matching", "victims", *changes], compare_settings(rows))
    return {"": "\n\n".join(scores), "ways": "\n\n".join(ways), "compared": compared}


def map_settings(rows: Rows) -> tuple[list[list[str]], list[list[str]]]:
    """Return a line of scores for each setting, and a line of what a descent meets."""
    scores, ways = [], []
    settings = group_rows(rows, "model", "statistics", "batch", "weights", "attack")
    for setting in sorted(settings, key=rank_setting):
        cell, attack = settings[setting], setting[-1]
        model, statistics, batch, weights = (TITLES.get(name, name) for name in setting[:-1])
        place = [batch, weights, model, statistics]
        line = [*place, TITLES[attack], str(len(cell))]
        for suffix in ("_floor", ""):
            line.append(
                " / ".join(f"{column_values(cell, name + suffix).mean():{form}}" for name, form in FORMATS.items())
            )
        left = f"{column_values(cell, 'distance').mean():.2f}"
        scores.append([*line, *map_gains(cell), f"{column_values(cell, 'psnr_other').mean():.1f}", left])
        if attack != "half way":
            ways.append([*place, TITLES[attack], str(len(cell)), *map_points(cell)])
    return scores, ways


COMPARISONS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "statistics withheld, not sent": ({"statistics": "withheld"}, {"statistics": "sent"}),
    "running statistics, not the batch's": ({"statistics": "frozen"}, {"statistics": "sent"}),
    "trained, not early": ({"weights": "trained"}, {"weights": "early"}),
    "a denoiser, not components": ({"attack": "denoiser"}, {"attack": "pca"}),
    "a denoiser, 1000 iterations, not components": ({"attack": "denoiser 1000"}, {"attack": "pca"}),
}
"""What is compared on the same victims, all else equal: the values of a row, and those of the row beside it."""


def compare_settings(rows: Rows) -> list[list[str]]:
    """Return how much more is found in one setting than in another by the same attack, with intervals over victims."""
    lines = []
    columns = ("data", "batch", "weights", "model", "statistics", "attack")
    cells = {setting: {row["seed"]: row for row in cell} for setting, cell in group_rows(rows, *columns).items()}
    for title, (values, others) in COMPARISONS.items():
        for setting in sorted(cells, key=rank_setting):
            about = dict(zip(columns, setting, strict=True))
            beside = cells.get(tuple((about | others).values()), {})
            seeds = [seed for seed in cells[setting] if seed in beside]
            if about == about | values and about["attack"] != "half way" and seeds:
                pair = [[cell[seed] for seed in seeds] for cell in (cells[setting], beside)]
                place = [TITLES.get(value, value) for value in setting]
                lines.append([title, *place, str(len(seeds)), *map_changes(*pair)])
    return lines


def map_changes(rows: Rows, others: Rows) -> list[str]:
    """Format by how much the claims of rows are better than those of others, with 95 % intervals of the means."""
    texts = []
    for name, form in (("psnr", "+.1f"), ("lpips", "+.2f"), ("identified", "+.2f")):
        better = gains(column_values(rows, name), column_values(others, name), higher_is_better=name != "lpips")
        low, high = confidence_interval(better)
        # Equal differences have no spread, and yet say little.
        interval = f" ({low:{form}}, {high:{form}})" if len(better) >= FEWEST and low < high else ""
        texts.append(f"{better.mean():{form}}{interval}")
    return texts


def rank_setting(setting: Sequence[str]) -> list[int]:
    """Return where a setting stands in the tables: in the order of `TITLES`, numbers by their size."""
    return [int(value) if value.isdecimal() else list(TITLES).index(value) for value in setting]


def map_gains(cell: Rows) -> list[str]:
    """Format by how much claims beat the best guess, with 95 % intervals of the means over victims.

    Fewer than `FEWEST` victims have no interval. What starts from the truth competes with no guess.
    """
    if cell[0]["attack"] == "half way":
        return ["–"] * 3
    texts = []
    for name, form in (("psnr", "+.1f"), ("lpips", "+.2f"), ("identified", "+.2f")):
        beyond = gains(
            column_values(cell, name), column_values(cell, f"{name}_floor"), higher_is_better=name != "lpips"
        )
        low, high = interval_of_gain(cell, name, beyond)
        interval = f" ({low:{form}}, {high:{form}})" if len(cell) >= FEWEST else ""
        texts.append(f"{beyond.mean():{form}}{interval}")
    return texts


def interval_of_gain(cell: Rows, name: str, beyond: Values) -> tuple[float, float]:
    """Return the 95 % interval of the mean gain over victims.

    Shares are those of few images, and of one image 0 or 1: five times 0 has no spread, and yet says little. So they
    have the interval of a share, from which the floor's mean is taken.
    """
    if name != "identified":
        return confidence_interval(beyond)
    low, high = confidence_interval(column_values(cell, name), share=True)
    floor = float(column_values(cell, f"{name}_floor").mean())
    return low - floor, high - floor


def map_points(cell: Rows) -> list[str]:
    """Format PSNR, distance and alignment at the points."""
    texts = []
    for name in POINTS:
        psnr, distance, alignment = (
            column_values(cell, f"{kind}_{name}").mean() for kind in ("psnr", "distance", "alignment")
        )
        texts.append(f"{psnr:.1f} dB / {distance:.2f} / {alignment:.3f}")
    return texts
