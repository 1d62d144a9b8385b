"""One gradient of four images with its batch's statistics, attacked; our figures for the angular Lipschitz paper."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.base import metrics
from fedsim.base.errors import AttackError
from fedsim.base.module_hooks import hook_inputs
from fedsim.base.randomness import generator
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.table_validation import validate_tables
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import BatchNormStatistics, TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.recipe import Recipe
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.model_state import copy_state, load_state
from studies.messages import (
    central_tables,
    image_knowledge,
    invert_update,
    mean_gradient,
    perceive_distances,
    trained_states,
)
from studies.running import STUDIES, Row
from studies.writing import draw_places, format_drawn, kept_details, kept_result, save_picture, spearman_of_rows

MODELS: dict[str, dict[str, Any]] = {
    "resnet18": {"name": "resnet18", "channels": 4},
    "resnet18-2": {"name": "resnet18", "channels": 4, "width": 2},
    "resnet18-4": {"name": "resnet18", "channels": 4, "width": 4},
    "convnet": {"name": "convnet", "width": 4},
}
"""Of a sixteenth of the paper's channels, 64, so that one core trains and attacks them in less than an hour."""
EPOCHS, MODES, SEED, BATCH = (0, 1, 2, 5, 10), ("eval", "train"), 1, 4
CELL = ("model", "epoch", "mode", "batch")
SCORES = ("mse", "pixel mse", "psnr", "lpips")
DROPS = ("distance before", "distance after", "objective before", "objective after")
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StatisticsMatching(GradientInversion):
    """GradAttack's attack with batch statistics given, in its strongest setting (Huang et al. 2021, `--BN_exact`).

    GradAttack adds the variations along both axes, of which `TotalVariation` is half.

    Args:
        by_batch: BatchNorm layers normalise by the batch, at the client and here.
    """

    by_batch: bool

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            priors=[(2 * 0.1, TotalVariation()), (0.005, BatchNormStatistics())],
            step_size=0.1,
            signed=True,
            normalised_by_batch=self.by_batch,
        )


def read_tables(model: str) -> dict[str, Any]:
    """Return central training by the paper's SGD; its tenths after 150 and 225 of 300 epochs are after 10 and 15."""
    sgd = {"learning_rate": 0.1, "momentum": 0.9, "batch_size": 32}
    return central_tables({"name": "cifar100"}, MODELS[model], SEED, [10, 15], **sgd)


@cache
def experiment_of(model: str) -> Experiment:
    """Return the data set and the network."""
    return Experiment(validate_tables(Config, read_tables(model), "angular"))


@dataclass(frozen=True)
class BatchClient:
    """Who computes one gradient of one batch in one mode.

    Attributes:
        network: in that mode.
        images: `example channel height width` in [0, 1].
        inputs: the same in model units.
    """

    experiment: Experiment
    network: nn.Module
    images: Tensor
    inputs: Tensor
    labels: Tensor

    def update(self) -> Update:
        """Return its gradient, and its batch's statistics in place of the running ones."""
        before = copy_state(self.network)  # a forward pass in train mode changes the running statistics
        statistics: dict[str, Tensor] = {}
        layers = {name: layer for name, layer in self.network.named_modules() if isinstance(layer, _BatchNorm)}
        hooks = [hook_inputs(layer, note_statistics(statistics, name)) for name, layer in layers.items()]
        gradient = mean_gradient(self.network, self.inputs, self.labels, self.experiment.loss)
        for hook in hooks:
            hook.remove()
        payload = Payload.from_dense(gradient, "gradient") | Payload.from_dense(statistics, "weights")
        return Update(round=1, client=0, before=before, payload=payload, num_examples=len(self.labels))

    def scores(self, claimed: Tensor) -> dict[str, float]:
        """Return means over the images, each paired with one of those claimed in [0, 1]."""
        claimed = metrics.pair_examples(claimed, self.images)
        std = torch.tensor(self.experiment.data.moments()[1]).reshape(-1, 1, 1)
        difference = (self.experiment.data.to_model(claimed) - self.inputs) / std
        pixels, psnr = metrics.mse(claimed, self.images), metrics.psnr(claimed, self.images)
        values = (difference.square(), pixels, psnr, perceive_distances(claimed, self.images))
        return {name: float(value.mean()) for name, value in zip(SCORES, values, strict=True)}


def note_statistics(statistics: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    """Return a hook that notes mean and variance of what enters a layer."""

    def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs = given[0].detach()
        statistics[f"{name}.running_mean"] = inputs.mean((0, 2, 3))
        statistics[f"{name}.running_var"] = inputs.var((0, 2, 3), unbiased=False)

    return hook


def client_of(model: str, epoch: int, mode: str, batch: int) -> BatchClient:
    """Return the client of a cell; batches are the same for all networks."""
    experiment = experiment_of(model)
    network = experiment.new_model()
    load_state(network, trained_states("angular", model, EPOCHS, lambda: read_tables(model))[epoch])
    test = experiment.dataset.test
    order = torch.randperm(len(test), generator=generator(SEED, "angular batches"))
    index = order[batch * BATCH : (batch + 1) * BATCH]
    images = test.inputs(index)
    return BatchClient(
        experiment, network.train(mode == "train"), images, experiment.data.to_model(images), test.labels[index]
    )


def measure(batch: int, epoch: int, model: str, mode: str) -> Row | list[Row]:
    """Attack a client: how close the attack comes, and how far its loss falls; no row where it refuses."""
    client = client_of(model, epoch, mode, batch)
    attack = StatisticsMatching(by_batch=mode == "train", iterations=100)
    knowledge = image_knowledge(client.experiment, client.labels)
    try:
        # The start is the same for all networks and states.
        found = invert_update(attack, client.update(), knowledge, generator(SEED, "angular attack", batch))
    except AttackError as error:
        print(f"{model}, epoch {epoch}, {mode}: {error}")
        return []
    distance, objective = found.trace["l_sim"], found.trace["objective"]
    drops = [float(value) for value in (distance[0], distance[-1], objective[0], objective[-1])]
    return client.scores(found.data) | dict(zip(DROPS, drops, strict=True))


# What follows from the rows.

COLOURS = {"eval": "#D55E00", "train": "#0072B2"}
MARKERS = dict(zip(MODELS, "os^x", strict=True))
RESNETS = ["resnet18", "resnet18-2", "resnet18-4"]
RESAMPLED, FEWEST = 1000, 3
MEASURES = {
    "gradient-norm.norm": "‖g‖",
    "lipschitz.max": "L̃",
    "lipschitz.q99": "L̃, 99 % quantile",
    "angular-lipschitz.max": "L^cos",
    "angular-lipschitz.q99": "L^cos, 99 % quantile",
    "expected-error.error": "`expected-error`",
}
PICTURED = {"gradient-norm.norm": r"$\|g\|$", "lipschitz.max": r"$\tilde{L}$", "angular-lipschitz.max": r"$L^{\cos}$"}
OUTCOMES = {"loss drop": "loss drop", "objective drop": "drop of the whole objective", "lpips": "LPIPS", "mse": "MSE"}
COMMAND = "export FEDSIM_DATA=DIR OMP_NUM_THREADS=1\npython -m studies angular angular_measures"


def read_points() -> pd.DataFrame:
    """Return a row for each attacked batch of each network, epoch and mode; NaN where it was not measured."""
    quality = pd.read_csv(STUDIES / "angular" / "results.csv").set_index(list(CELL))
    quality["loss drop"] = quality[DROPS[0]] - quality[DROPS[1]]
    quality["relative drop"] = quality["loss drop"] / quality[DROPS[0]]
    quality["objective drop"] = quality[DROPS[2]] - quality[DROPS[3]]
    measured = pd.read_csv(STUDIES / "angular_measures" / "results.csv")
    measured = measured.pivot_table(index=list(CELL), columns="measure", values="value")
    return quality.join(measured.reindex(columns=list(MEASURES))).reset_index()


def figures() -> dict[str, Any]:
    """Return our figures in the place of Table 1 and Figs. 4, 6 and 7."""
    points = read_points()
    table_1, figure_6, pooled = {}, {}, {}
    for (mode, epoch), rows in points[points.model == "resnet18"].groupby(["mode", "epoch"]):
        texts = {"mse": spread(rows.mse, 2), "psnr": spread(rows.psnr, 1), "lpips": spread(rows.lpips, 3)}
        table_1[f"{mode}, epoch {epoch}"] = texts
    for group, rows in groups(points).items():
        figure_6[group] = {"drop": interval(correlations(rows, "lipschitz.max", "loss drop"))}
        pooled[group] = {"drop": interval(correlations(rows, "lipschitz.max", "loss drop", pooled=True))}
    note = "Mean and standard deviation over two batches."
    intervals = "Within a batch, over states, averaged; intervals by drawing states anew."
    kept = [
        kept_result("table1", "ten epochs", COMMAND, table_1, note),
        kept_result("fig6", "ten epochs", COMMAND, figure_6, intervals),
        kept_result("fig6", "ten epochs; pooled", COMMAND, pooled, "Over states and batches at once."),
    ]
    tables = {
        "states": states_table,
        "widths": widths_table,
        "correlations": correlations_table,
        "against-norm": norm_table,
        "readings": readings_table,
        "drops": drops_table,
    }
    details = [kept_details(n, COMMAND if n == "states" else "", *table(points)) for n, table in tables.items()]
    return {"paper": "angular-lipschitz", "kept": kept, "details": details}


def spread(values: pd.Series, digits: int) -> str:
    """Format mean and standard deviation over batches, where there are several."""
    deviation = f" ± {values.std():.{digits}f}" if len(values) > 1 else ""
    return f"{values.mean():.{digits}f}{deviation}"


def interval(drawn: Numbers) -> str:
    """Format the first value, and where 95 % of the others are."""
    return "none: always the same" if np.isnan(drawn[0]) else format_drawn(drawn)


def groups(points: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the points of the paper's Fig. 6, and those of ConvNet."""
    resnets = points[points.model.isin(RESNETS)]
    return {
        "all networks": points,
        "ResNets, train": resnets[resnets["mode"] == "train"],
        "ResNets, eval": resnets[resnets["mode"] == "eval"],
        "ConvNet": points[points.model == "convnet"],
    }


def known_measures(rows: pd.DataFrame) -> dict[str, str]:
    """Return the measures that have values."""
    return {measure: title for measure, title in MEASURES.items() if rows[measure].notna().any()}


def states_table(points: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return means over batches of what each state of each network gives in each mode."""
    known = known_measures(points)
    formats = dict.fromkeys((*SCORES, "loss drop"), ".3f") | {"psnr": ".1f"} | dict.fromkeys(known, ".3g")
    lines = []
    for state, rows in points.groupby(["model", "mode", "epoch"]):
        means = ["" if rows[name].isna().all() else f"{rows[name].mean():{form}}" for name, form in formats.items()]
        lines.append([*map(str, state), *means])
    return ["network", "mode", "epoch", "MSE", "of pixels", "PSNR", "LPIPS", "loss drop", *known.values()], lines


def widths_table(points: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return, for Fig. 4, the LPIPS of the epoch where it is best, for each network."""
    lines = []
    for mode in MODES:
        best = [best_epoch(points, model, mode) for model in MODELS]
        lines.append([mode, *(f"{spread(rows.lpips, 3)} (epoch {epoch})" for epoch, rows in best)])
    return ["", *MODELS], lines


def best_epoch(points: pd.DataFrame, model: str, mode: str) -> tuple[int, pd.DataFrame]:
    """Return the epoch with the smallest mean LPIPS, and its batches."""
    rows = points[(points.model == model) & (points["mode"] == mode)]
    epoch = int(rows.groupby("epoch").lpips.mean().idxmin())
    return epoch, rows[rows.epoch == epoch]


def correlations_table(points: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return the correlation of each measure with each outcome, and its interval."""
    lines = []
    for group, rows in groups(points).items():
        for measure, title in known_measures(rows).items():
            texts = [interval(correlations(rows, measure, outcome)) for outcome in OUTCOMES]
            lines.append([group, str(rows[measure].count()), title, *texts])
    return ["", "points", "measure", *OUTCOMES.values()], lines


def norm_table(points: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return by how much each measure's correlation is stronger than the norm's, where both were measured."""
    norm, *others = PICTURED
    lines = []
    for group, rows in groups(points).items():
        for measure in others:
            texts, both = [], rows.dropna(subset=[measure])
            for outcome in OUTCOMES:
                stronger = np.abs(correlations(both, measure, outcome)) - np.abs(correlations(both, norm, outcome))
                texts.append(interval(stronger))
            lines.append([group, MEASURES[measure], *texts])
    return ["stronger than the norm's by", "measure", *OUTCOMES.values()], lines


def readings_table(points: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return correlations within batches and over both at once, and by how much L^cos is stronger than the norm."""
    norm, _, cosine = PICTURED
    lines = []
    for group, rows in groups(points).items():
        drawn = {}
        for measure in PICTURED:
            columns = [(outcome, pooled) for outcome in ("lpips", "mse") for pooled in (False, True)]
            drawn[measure] = [correlations(rows, measure, outcome, pooled=pooled) for outcome, pooled in columns]
            lines.append([group, MEASURES[measure], *map(interval, drawn[measure])])
        stronger = [abs(ours) - abs(of_norm) for ours, of_norm in zip(drawn[cosine], drawn[norm], strict=True)]
        lines.append([group, "L^cos stronger than ‖g‖ by", *map(interval, stronger)])
    head = [
        f"{OUTCOMES[outcome]}, {reading}" for outcome in ("lpips", "mse") for reading in ("within batches", "pooled")
    ]
    return ["", "measure", *head], lines


def drops_table(points: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Return the correlation of L-tilde with the drop of the loss, as it is and relative to its start."""
    lines = []
    for group, rows in groups(points).items():
        for states, chosen in (("all", rows), ("without epoch 0", rows[rows.epoch > 0])):
            texts = [
                interval(correlations(chosen, "lipschitz.max", outcome, pooled=pooled))
                for outcome in ("loss drop", "relative drop")
                for pooled in (False, True)
            ]
            lines.append([group, states, *texts])
    head = [f"{drop}, {reading}" for drop in ("drop", "relative drop") for reading in ("within batches", "pooled")]
    return ["", "states", *head], lines


def correlations(rows: pd.DataFrame, measure: str, outcome: str, *, pooled: bool = False) -> Numbers:
    """Return Spearman's over all states within each batch, averaged, then over states drawn anew.

    With `pooled` it is over the states of all batches at once.
    """
    grid = rows.pivot(index=list(CELL[:3]), columns="batch", values=[measure, outcome])
    first, second = grid[measure].to_numpy(), grid[outcome].to_numpy()
    states = draw_places(len(grid), RESAMPLED, SEED)
    by_batch = []
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of draws without any value
        if pooled:
            return spearman_of_rows(*(values[states].reshape(len(states), -1) for values in (first, second)))
        for x, y in zip(first.T, second.T, strict=True):
            known = np.isfinite(x[states]) & np.isfinite(y[states])
            found = spearman_of_rows(x[states], y[states])
            by_batch.append(np.where(known.sum(1) >= FEWEST, found, np.nan))
        return np.asarray(np.nanmean(by_batch, 0))


def draw(rows: Sequence[Mapping[str, str]]) -> None:
    """Draw both pictures of docs/studies/papers/angular-lipschitz.md."""
    mpl.rcParams["svg.hashsalt"] = "fedsim"
    points = read_points()
    draw_states(points)
    draw_measures(points)


def draw_states(points: pd.DataFrame) -> None:
    """Draw Figs. 2 and 4: MSE and LPIPS by epochs, best LPIPS by width, and LPIPS of all networks."""
    figure, grid = plt.subplots(2, 2, figsize=(9, 6))
    axes = grid.flatten()
    for mode in MODES:
        draw_epochs(axes[0], points, "resnet18", mode, "mse")
        draw_epochs(axes[1], points, "resnet18", mode, "lpips")
        best = [best_epoch(points, model, mode)[1].lpips for model in RESNETS]
        means, deviations = [values.mean() for values in best], [values.std() for values in best]
        axes[2].errorbar(range(len(RESNETS)), means, deviations, color=COLOURS[mode], marker="o", ms=4, lw=1)
        axes[2].set_xticks(range(len(RESNETS)), RESNETS)
        for model in MODELS:
            draw_epochs(axes[3], points, model, mode, "lpips", errors=False)
    titles = ("ResNet18 (Fig. 2, left)", "ResNet18 (Fig. 2, right)", "Best epoch (Fig. 4)", "All networks")
    for axis, title, label in zip(axes, titles, ("MSE, normalised", "LPIPS", "LPIPS", "LPIPS"), strict=True):
        axis.set(title=title, ylabel=label)
    for axis in (axes[0], axes[1], axes[3]):
        axis.set_xlabel("epochs of training")
    axes[0].legend()
    axes[3].legend(handles=list(network_marks()), fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save_picture(figure, "angular-states.svg")


def draw_epochs(axis: Axes, points: pd.DataFrame, model: str, mode: str, score: str, *, errors: bool = True) -> None:
    """Draw a line over the epochs that were attacked, at equal distances."""
    rows = points[(points.model == model) & (points["mode"] == mode)].groupby("epoch")[score]
    places = [EPOCHS.index(int(epoch)) for epoch in rows.mean().index]
    deviations = rows.std() if errors else None
    axis.errorbar(places, rows.mean(), deviations, color=COLOURS[mode], marker=MARKERS[model], label=mode, ms=4, lw=1)
    axis.set_xticks(places, [str(EPOCHS[place]) for place in places])


def network_marks() -> Iterator[Any]:
    """Yield what the markers mean."""
    for name, marker in MARKERS.items():
        yield mpl.lines.Line2D([], [], color="grey", marker=marker, ls="", label=name)


def draw_measures(points: pd.DataFrame) -> None:
    """Draw Fig. 6, L-tilde against the loss drop, and Fig. 7, three measures against LPIPS, train above eval."""
    figure, axes = plt.subplots(3, 3, figsize=(9, 8))
    parts = groups(points)
    for axis, group in zip(axes[0], ("all networks", "ResNets, train", "ResNets, eval"), strict=True):
        scatter(axis, parts[group], "loss drop", "lipschitz.max", group)
        axis.set(xlabel="loss drop", ylabel=PICTURED["lipschitz.max"], yscale="log")
    for line, group in zip(axes[1:], ("ResNets, train", "ResNets, eval"), strict=True):
        for axis, measure in zip(line, PICTURED, strict=True):
            scatter(axis, parts[group], measure, "lpips", group)
            axis.set(xlabel=PICTURED[measure], ylabel="LPIPS", xscale="log")
    for axis in axes.flat:
        for side in (axis.xaxis, axis.yaxis):
            side.set_minor_formatter(mpl.ticker.NullFormatter())
    modes = [mpl.lines.Line2D([], [], color=colour, lw=3, label=mode) for mode, colour in COLOURS.items()]
    axes[0][2].legend(handles=[*network_marks(), *modes], fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    save_picture(figure, "angular-measures.svg")


def scatter(axis: Axes, rows: pd.DataFrame, across: str, up: str, group: str) -> None:
    """Draw points, with their correlation within a batch in the title."""
    for (model, mode), part in rows.groupby(["model", "mode"]):
        axis.scatter(part[across], part[up], s=12, color=COLOURS[str(mode)], marker=MARKERS[str(model)], linewidths=0.8)
    axis.set_title(f"{group}, $r_s$ = {correlations(rows, across, up)[0]:+.2f}", fontsize=9)
