"""Optimizers, starts and losses of gradient matching, at equal budgets; tables of docs/studies/inversion-today.md.

Victims, networks and messages are those of the study `today_priors`: a ResNet18/4 whose BatchNorm layers normalise by
the batch, and the client sends these statistics and its gradient. A method is a chain of stages, each of which goes on
where the last one ended. Their objectives are the engine's; only the descent is the study's, because the engine has no
line search and no chains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.base import metrics
from fedsim.base.randomness import generator, use_one_thread
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.distances import Cosine, Distance, MeanCosine, global_norm
from fedsim.inversion.parametrisations import DenoisedImages, Parametrisation, PublicComponents
from fedsim.inversion.priors import BatchNormStatistics, TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe, cosine_schedule
from fedsim.inversion.restart import objective_and_gradients
from fedsim.training.optimizers import LBFGS, Adam
from studies.running import Row
from studies.today.study import FEWEST, SEED, send_message, victims_images
from studies.today_priors.study import (
    BN_WEIGHT,
    COMPONENTS,
    FixedStart,
    known_problem,
    list_scores,
    points_between,
    public_records,
    score_images,
)
from studies.writing import column_values, group_rows, markdown_table, select_rows

MODEL, BUDGET = "resnet18/4", 100
"""BUDGET counts evaluations of the objective and its gradient; names of methods that end in x3 have three times it."""
PARTS = {
    "stem": "first layer", "stage1": "stage 1", "stage2": "stage 2", "stage3": "stage 3", "stage4": "stage 4",
    "linear": "last layer",
}  # fmt: skip
"""Parts of the network by the beginning of their parameters' names."""
SPLIT_METHODS = ("present", "early layers", "late layers", "by tensor", "pixels", "details", "denoiser", "smooth steps")
"""Methods of which the table of parts tells."""
SMALL_SHARE = 0.01
"""Of the sum of the images' gradient norms; below it an image's gradient is a small part of the message."""
EARLY_PARTS = ("stem", "stage1", "stage2")
Evaluate = Callable[[Tensor], tuple[float, Tensor]]
"""`coefficients -> (objective, gradient)`."""
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class FirstComponents(PublicComponents):
    """The first of the public components.

    Attributes:
        first: number of those that are optimised; the others are 0.
    """

    first: int = COMPONENTS

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draw coefficients as those of all components are drawn."""
        return super().start(problem, shape, rng)[:, : self.first].clone()

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return mean and components."""
        rest = self.components - coefficients.shape[1]
        return super().dummy_data(problem, functional.pad(coefficients, (0, rest)))


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Images of fewer pixels, which are enlarged.

    Attributes:
        side: of these images.
        at_means: start at the means of the classes, not at noise.
    """

    side: int = 32
    at_means: bool = False

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draw noise, or return the means of the classes."""
        if not self.at_means:
            return torch.randn((*shape[:2], self.side, self.side), generator=rng)
        components = PublicComponents(components=COMPONENTS)
        means = components.dummy_data(problem, components.start(problem, shape, rng))
        return functional.interpolate(means, size=self.side, mode="area")

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return the images at full size."""
        return functional.interpolate(coefficients, size=32, mode="bilinear") if self.side < 32 else coefficients

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return 0."""
        return coefficients.new_zeros(())


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Part of a descent.

    Attributes:
        optimizer: `adam` with a cosine schedule, `signs` (Adam that is fed them) or `lbfgs` (strong Wolfe).
        share: of the budget.
        distance: `all`, `early` or `late` layers in one cosine, or a cosine `by tensor`.
        bn_weight: of the statistics that the client sent.
        tv_weight: of the total variation.
        relu_width: see `Recipe`.
        squared: compare the statistics by squared errors, see `SquaredStatistics`.
    """

    parametrisation: Parametrisation = FirstComponents(components=COMPONENTS, weight=1e-4, spread=0.3)
    optimizer: str = "adam"
    share: float = 1.0
    step_size: float = 0.1
    distance: str = "all"
    bn_weight: float = BN_WEIGHT
    tv_weight: float = 0.0
    relu_width: float = 0.0
    squared: bool = False

    def recipe(self, problem: InversionProblem, statistics: SharedStatistics) -> Recipe:
        """Return the objective, as the engine knows it."""
        statistics = SquaredStatistics(inputs=statistics.inputs) if self.squared else statistics
        return Recipe(
            distance=distance_of(self.distance, problem),
            priors=[(self.tv_weight, TotalVariation()), (self.bn_weight, statistics)],
            parametrisation=self.parametrisation,
            normalised_by_batch=True,
            relu_width=self.relu_width,
        )


@dataclass(frozen=True)
class SharedStatistics(BatchNormStatistics):
    """BatchNorm statistics of the pass that the gradient was computed by, which saves a third of the time.

    Attributes:
        inputs: of each BatchNorm layer in the model's last pass.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def watch(cls, model: nn.Module) -> SharedStatistics:
        """Return the statistics of a model's passes from now on."""
        statistics = cls(exact=True)
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_pre_hook(partial(statistics._keep_inputs, name))
        return statistics

    def _keep_inputs(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.inputs[name] = [inputs[0]]

    def _layer_inputs(self, *_: object) -> dict[str, list[Tensor]]:
        return self.inputs


@dataclass(frozen=True)
class SquaredStatistics(SharedStatistics):
    """Half the squared errors of means and of logarithms of deviations, in deviations of the channel's values.

    The norms of `BatchNormStatistics` add up channels of any scale. These errors are relative, and their slope falls
    with them.
    """

    def __call__(self, problem: InversionProblem, dummy: Tensor, consensus: Tensor) -> Tensor:
        """Return the sum over the channels of all BatchNorm layers."""
        terms = []
        for name, (inputs,) in self.inputs.items():
            layer = problem.model.get_submodule(name)
            assert isinstance(layer, nn.BatchNorm2d)
            assert layer.momentum is not None
            kept_share = 1 - layer.momentum
            mean = self._target(problem, f"{name}.running_mean", kept_share) / layer.momentum
            variance = self._target(problem, f"{name}.running_var", kept_share) / layer.momentum
            axes = [0, 2, 3]
            means = (inputs.mean(axes) - mean) / variance.sqrt()
            deviations = (inputs.var(axes) / variance).log() / 2
            terms.append((means.square() + deviations.square()).sum() / 2)
        return torch.stack(terms).sum()


def distance_of(name: str, problem: InversionProblem) -> Distance:
    """Return the distance that a stage names."""
    if name == "by tensor":
        return MeanCosine()
    if name == "all":
        return Cosine()
    parts = [parameter.split(".")[0] for parameter in problem.parameter_names]
    return Cosine(layers=tuple(float((part in EARLY_PARTS) == (name == "early")) for part in parts))


def components(first: int = COMPONENTS, spread: float = 0.3) -> FirstComponents:
    """Return components with the prior of the recipe, from a start of this spread."""
    return FirstComponents(components=COMPONENTS, weight=1e-4, spread=spread, first=first)


_PIXELS: dict[str, Any] = {"optimizer": "signs", "tv_weight": 0.01}
"""Settings of the study `today`, where there is no prior."""
_FINE: dict[str, Any] = {"parametrisation": Pixels(), "step_size": 0.02, "tv_weight": 0.001}
"""Settings of `today_priors` near the truth."""
_DENOISER: dict[str, Any] = {
    "parametrisation": DenoisedImages(weight=1e-5, spread=0.3), "step_size": 1.0, "share": 4.0,
}  # fmt: skip
"""As in `today_priors`, for 400 iterations."""
_SMOOTH: dict[str, Any] = _DENOISER | {"relu_width": 0.1}
_THIRDS = ((8, 15), (16, 30), (32, COMPONENTS))
"""Sides of images, and numbers of components, in three stages."""
METHODS: dict[str, tuple[str, tuple[Stage, ...]]] = {
    "present": ("present recipe: Adam", (Stage(),)),
    "signs": ("Adam on signs", (Stage(optimizer="signs"),)),
    "class means": ("Adam from the class means", (Stage(parametrisation=components(spread=0.0)),)),
    "lbfgs": ("L-BFGS, strong Wolfe", (Stage(optimizer="lbfgs"),)),
    "adam, lbfgs": ("Adam, then L-BFGS", (Stage(share=0.5), Stage(optimizer="lbfgs", share=0.5))),
    "coarse components": (
        "15, then 30, then 60 components",
        tuple(Stage(parametrisation=components(first), share=1 / 3) for _, first in _THIRDS),
    ),
    "early layers": ("first half of the layers alone", (Stage(distance="early"),)),
    "late layers": ("second half of the layers alone", (Stage(distance="late"),)),
    "by tensor": ("cosine of each tensor, mean", (Stage(distance="by tensor"),)),
    "weak statistics": ("a tenth of the statistics' weight", (Stage(bn_weight=BN_WEIGHT / 10),)),
    "pixels": ("pixels from the class means", (Stage(parametrisation=Pixels(at_means=True), **_PIXELS),)),
    "coarse pixels": (
        "8 x 8, then 16 x 16, then 32 x 32 pixels from the class means",
        tuple(Stage(parametrisation=Pixels(side=side, at_means=True), share=1 / 3, **_PIXELS) for side, _ in _THIRDS),
    ),
    "details": ("components, then pixels", (Stage(share=0.5), Stage(share=0.5, **_FINE))),
    "present x3": ("Adam, 3 x", (Stage(share=3.0),)),
    "starts x3": ("Adam, best of three starts, 3 x", (Stage(),)),
    "adam, lbfgs x3": ("Adam, then L-BFGS, 3 x", (Stage(share=1.5), Stage(optimizer="lbfgs", share=1.5))),
    "denoiser": ("denoiser, 4 x", (Stage(**_DENOISER),)),
    "smooth steps": ("denoiser, smooth steps, 4 x", (Stage(**_SMOOTH),)),
    "wide steps": ("denoiser, wider steps, 4 x", (Stage(**_SMOOTH | {"relu_width": 1.0}),)),
    "squared statistics": (
        "denoiser, smooth steps, squared statistics, 4 x",
        (Stage(**_SMOOTH, bn_weight=0.01, squared=True),),
    ),
    "quarter way": ("*from a quarter of the way to the truth*", (Stage(**_FINE),)),
}
"""Title and stages of each method. Steps are in deviations of components, or of pixels."""
ORACLE = "quarter way"
"""What no adversary can do: pixels, from class means to which a quarter of the way is added."""


def measure(weights: str, batch: int, seed: int, method: str) -> Row:
    """Attack one victim; score the claim, and say in which parts of the network the distance remains."""
    update, knowledge = send_message(MODEL, "cifar10", batch, "gradient", weights, "sent", seed)
    problem = known_problem(update, replace(knowledge, auxiliary=public_records(MODEL, "cifar10")), by_batch=True)
    stages = METHODS[method][1]
    if method == ORACLE:
        stages = (replace(stages[0], parametrisation=start_near_truth(problem, batch, seed)),)
    rng = generator(SEED, "today attack", seed)  # as in `today_priors`, so that starts are the same
    starts = 3 if method.startswith("starts") else 1
    with use_one_thread():
        ends = [run_stages(problem, stages, (batch, 3, 32, 32), rng) for _ in range(starts)]
    dummy = min(ends, key=lambda end: end[0])[1]
    claim = Reconstruction(data=problem.scaling.to_unit_range(dummy), labels=problem.labels)
    scores = score_images(claim, MODEL, "cifar10", batch, seed)
    return list_scores(scores) | split_distance(problem, dummy) | split_images(problem, scores, batch, seed)


def start_near_truth(problem: InversionProblem, batch: int, seed: int) -> FixedStart:
    """Return images a quarter of the way from class means to the true ones."""
    images, labels = victims_images("cifar10", batch, seed)
    true = problem.scaling.from_unit_range(images[labels.argsort(stable=True)])
    return FixedStart(torch.lerp(points_between(problem, true)["means"], true, 0.25))


def run_stages(
    problem: InversionProblem, stages: Sequence[Stage], shape: tuple[int, ...], rng: torch.Generator
) -> tuple[float, Tensor]:
    """Descend by one stage after the other; return the last objective and the dummy data, standardised."""
    problem = replace(problem, model=copy.deepcopy(problem.model))
    statistics = SharedStatistics.watch(problem.model)
    before, point = stages[0], stages[0].parametrisation.start(problem, shape, rng)
    for stage in stages:
        if stage is not before:
            point = carry_over(problem, before.parametrisation, stage.parametrisation, point)
        evaluate = make_evaluation(problem, stage.recipe(problem, statistics))
        point = descend(problem, stage, evaluate, point)
        before = stage
    return evaluate(point)[0], before.parametrisation.dummy_data(problem, point).detach()


def carry_over(problem: InversionProblem, old: Parametrisation, new: Parametrisation, point: Tensor) -> Tensor:
    """Return where a stage begins that goes on from the end of another."""
    if isinstance(new, FirstComponents):
        return functional.pad(point, (0, new.first - point.shape[1]))
    assert isinstance(new, Pixels)
    return functional.interpolate(old.dummy_data(problem, point), size=new.side, mode="area")


def make_evaluation(problem: InversionProblem, recipe: Recipe) -> Evaluate:
    """Return the objective with its gradient."""
    target = recipe.distance.target(problem)

    def evaluate(point: Tensor) -> tuple[float, Tensor]:
        inputs = torch.ones(()), torch.zeros_like(point)
        objective, _, _, gradient = objective_and_gradients(
            recipe, problem, {"dummy": point}, inputs, target, ("dummy",)
        )
        return objective.item(), gradient.contiguous()

    return evaluate


def descend(problem: InversionProblem, stage: Stage, evaluate: Evaluate, point: Tensor) -> Tensor:
    """Spend the budget of a stage; return where Adam ends, or the lowest point that L-BFGS saw."""
    budget, point = round(stage.share * BUDGET), point.clone()
    if stage.optimizer == "lbfgs":
        return search_lines(evaluate, point, budget)
    optimizer = Adam([point], stage.step_size)
    for iteration in range(budget):
        gradient = evaluate(point)[1]
        point.grad = gradient.sign() if stage.optimizer == "signs" else gradient
        optimizer.param_groups[0]["lr"] = stage.step_size * cosine_schedule(iteration, budget)
        optimizer.step()
        if isinstance(stage.parametrisation, Pixels):
            problem.scaling.clamp_(point)
    return point


def search_lines(evaluate: Evaluate, point: Tensor, budget: int) -> Tensor:
    """Descend by L-BFGS with line searches; return the lowest of the first `budget` points."""
    seen: list[float] = []
    best = point.clone()

    def closure() -> float:
        nonlocal best
        objective, point.grad = evaluate(point)
        if len(seen) < budget and objective < min(seen, default=objective + 1):
            best = point.detach().clone()
        seen.append(objective)
        return objective

    optimizer = LBFGS(
        [point], max_iter=budget, max_eval=budget, tolerance_grad=0, tolerance_change=0, history_size=20,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    while len(seen) < budget:
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return best


def split_distance(problem: InversionProblem, dummy: Tensor) -> dict[str, float]:
    """Return the cosine distance over all parameters, and the parts of the network that it comes from.

    At norm 1, two gradients have half the squared distance of each other as their cosine distance, which is a sum over
    tensors.

    Returns:
        `distance`, and by part `left_*`, its share of the distance, `norm_*`, its share of the squared norm of the
        message, and `cosine_*`, the cosine distance within it.
    """
    found = Cosine().target(replace(problem, sent_gradient=problem.gradient(problem.before, dummy, problem.labels)))
    sums: dict[str, Tensor] = {}
    for name, g, t in zip(problem.parameter_names, found, Cosine().target(problem), strict=True):
        part = name.split(".")[0]
        terms = torch.stack([(g - t).square().sum() / 2, t.square().sum(), g.square().sum(), (g * t).sum()]).detach()
        sums[part] = sums.get(part, torch.zeros(4)) + terms
    distance = sum(terms[0] for terms in sums.values())
    row = {"distance": float(distance)}
    for part, (left, norm, norm_found, inner) in sums.items():
        row[f"left_{part}"] = float(left / distance)
        row[f"norm_{part}"] = float(norm)
        row[f"cosine_{part}"] = float(1 - inner / (norm * norm_found).sqrt())
    return row


def split_images(problem: InversionProblem, scores: Mapping[str, Score], batch: int, seed: int) -> dict[str, float]:
    """Return how well the images are found whose gradients are a small part of the message, and how well the others.

    An image's gradient is that of its own term of the loss, and its share that of its norm in the sum of the images'.

    Returns:
        `small`, the number of images with a share below `SMALL_SHARE`; for these and the `large` ones the mean PSNR of
        the claim, `psnr_*`, and of the class mean, `means_*`, and the share `identified_*`; NaN where there are none.
    """
    images, labels = victims_images("cifar10", batch, seed)
    true = problem.scaling.from_unit_range(images)
    means = points_between(replace(problem, labels=labels), true)["means"]
    weights = [weight.detach().clone().requires_grad_() for weight in problem.before]
    losses = functional.cross_entropy(problem.outputs(weights, true), labels, reduction="none")
    norms = [global_norm(torch.autograd.grad(loss, weights, retain_graph=True)) for loss in losses]
    is_small = torch.stack(norms) < SMALL_SHARE * sum(norms)
    values = {
        "psnr": torch.tensor(scores["psnr"].per_image),
        "means": metrics.psnr(problem.scaling.to_unit_range(means), images),
        "identified": torch.tensor(scores["identified"].per_image),
    }
    row = {"small": float(is_small.sum())}
    for name, value in values.items():
        row |= {f"{name}_small": float(value[is_small].mean()), f"{name}_large": float(value[~is_small].mean())}
    return row


def tables(rows: Rows) -> dict[str, str]:
    """Return the scores of the methods, and by parts of the network, and by images, what is left and found."""
    scores, parts, shares = [], [], []
    settings = group_rows(rows, "batch", "weights")
    for setting in sorted(settings, key=lambda setting: (int(setting[0]), setting[1])):
        of_setting = settings[setting]
        known = select_rows(of_setting, method="present")
        scores.append([*setting, "the best guess", "–", str(len(known)), format_scores(known, "_floor"), "–", "–", "–"])
        norms = [f"{column_values(known, f'norm_{part}').mean():.2f}" for part in PARTS]
        parts.append([*setting, "*share of the message*", "–", *norms])
        for method, (title, stages) in METHODS.items():
            if not (cell := select_rows(of_setting, method=method)):
                continue
            starts = 3 if method.startswith("starts") else 1
            evaluations = starts * sum(round(stage.share * BUDGET) for stage in stages)
            distance = f"{column_values(cell, 'distance').mean():.2f}"
            changes = [format_change(cell, known, name) for name in ("distance", "psnr")]
            scores.append([*setting, title, str(evaluations), str(len(cell)), format_scores(cell), distance, *changes])
            if measured := [row for row in cell if row.get("small")]:
                shares.append([*setting, title, str(len(measured)), *format_images(measured)])
            if method in SPLIT_METHODS:
                left = [f"{column_values(cell, f'left_{part}').mean():.2f}" for part in PARTS]
                within = [f"{column_values(cell, f'cosine_{part}').mean():.2f}" for part in PARTS]
                cells = [" / ".join(pair) for pair in zip(left, within, strict=True)]
                parts.append([*setting, title, distance, *cells])
    changes = ["change of distance", "change in dB"]
    head = ["N", "weights", "matching", "evaluations", "victims", "PSNR / LPIPS / identified", "distance", *changes]
    part_head = ["N", "weights", "matching", "distance", *PARTS.values()]
    share_head = ["N", "weights", "matching", "victims", "images below 1 %"]
    share_head += [
        f"{kind}: {what}" for kind in ("below", "others") for what in ("claim / class mean / found", "change")
    ]
    return {
        "": markdown_table(head, scores),
        "layers": markdown_table(part_head, parts),
        "images": markdown_table(share_head, shares),
    }


def format_images(cell: Rows) -> list[str]:
    """Format how many images have a small share of the message, and how well these and the others are found."""
    texts = [f"{column_values(cell, 'small').mean():.1f} of {cell[0]['batch']}"]
    for kind in ("small", "large"):
        with_any = [row for row in cell if row[f"psnr_{kind}"] != "nan"]
        psnr, means, identified = (
            column_values(with_any, f"{name}_{kind}") for name in ("psnr", "means", "identified")
        )
        change = f"{(psnr - means).mean():+.1f} dB"
        if len(with_any) >= FEWEST:
            low, high = confidence_interval(psnr - means)
            change += f" ({low:+.1f}, {high:+.1f})"
        texts += [f"{psnr.mean():.1f} / {means.mean():.1f} / {identified.mean():.2f}", change]
    return texts


def format_scores(cell: Rows, suffix: str = "") -> str:
    """Format the means of three scores, or with `_floor` those of guesses."""
    formats = {"psnr": ".1f", "lpips": ".2f", "identified": ".2f"}
    return " / ".join(f"{column_values(cell, name + suffix).mean():{form}}" for name, form in formats.items())


def format_change(cell: Rows, present: Rows, name: str) -> str:
    """Format by how much a method differs from the present recipe on the same victims, with its 95 % interval."""
    before = {row["seed"]: float(row[name]) for row in present}
    changes = np.array([float(row[name]) - before[row["seed"]] for row in cell if row["seed"] in before])
    if cell[0]["method"] == "present" or not len(changes):
        return "–"
    text = f"{changes.mean():+.2f}"
    if len(changes) < FEWEST:
        return text
    low, high = confidence_interval(changes)
    return f"{text} ({low:+.2f}, {high:+.2f})"
