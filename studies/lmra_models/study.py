"""All attacks of LMRA's Table 1 on all clients of a federation; the tables of docs/studies/papers/lmra.md."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedsim
from fedsim.audit.evaluation.statistics import confidence_interval
from fedsim.base.errors import RunError
from fedsim.federation.failed_attacks import read_failed_attacks
from fedsim.federation.run_folder import RunFolder
from studies.lmra.study import LABELS, read_experiment
from studies.running import RUNS, Row, Study, read_rows, run_or_resume
from studies.writing import group_rows, kept_result, markdown_table

METRICS = {
    "parameter_distance",
    "zest",
    "zest_other_start",
    "local_accuracy",
    "local_mape",
    "attribute_accuracy",
    "attribute_balanced_accuracy",
    "source_accuracy",
    "class_ssim",
    "class_psnr",
}
OF_OPTIMUM = {
    "local_accuracy": ("local_accuracy", "ceiling"),
    "local_mape": ("local_mape", "ceiling"),
    "zest_of_optima": ("zest_other_start", "value"),
}
"""What scores of another model say about the optimal one: its metric, and the column of its value."""
SOURCES = {
    "global": "global",
    "last-returned": "last-returned",
    "lmra": "lmra",
    "dummy data": "lmra-dummy-data",
    "optimal": "optimal",
}
"""Models that attacks of inference read, by what their rows are called."""
ATTRIBUTES = {"adult": "sex", "leaf-synthetic": "sensitive", "flight-prices": "stops"}
LOWER_IS_BETTER = {"parameter_distance", "local_mape"}
NOT_SHARES = {"local_mape", "class_psnr"}

Rows = Sequence[Mapping[str, str]]
Values = NDArray[np.float64]
Cell = Mapping[tuple[str, ...], Rows]
"""Rows of a federation by attack and metric."""
Layout = tuple[dict[str, str], dict[str, tuple[str, str]], list[tuple[str, str]]]
LAYOUTS: dict[str, Layout] = {
    "local": (
        SOURCES,
        {
            "distance": ("parameter_distance", ""),
            "Zest": ("zest", ""),
            "Zest, other start": ("zest_other_start", ""),
            "accuracy": ("local_accuracy", ""),
            "MAPE, %": ("local_mape", ""),
        },
        [("lmra", "floor"), ("dummy data", "floor")],
    ),
    "attributes": (
        {"gradient": "aia-gradient", **{source: f"aia, {source}" for source in SOURCES}},
        {"accuracy": ("attribute_accuracy", ""), "balanced": ("attribute_balanced_accuracy", "")},
        [("dummy data", "gradient"), ("gradient", "floor"), ("optimal", "last-returned")],
    ),
    "sources": (
        {
            "majority over rounds": "sia, returned, {}",
            **{source: f"sia, {source}, {{}}" for source in SOURCES if source != "global"},
        },
        {"each record": ("source_accuracy", "each"), "client's set": ("source_accuracy", "together")},
        [("dummy data", "last-returned"), ("dummy data", "majority over rounds"), ("optimal", "last-returned")],
    ),
    "images": (
        {"gradient": "sra-gradient", **{source: f"sra, {source}" for source in SOURCES}},
        {"SSIM": ("class_ssim", ""), "PSNR, dB": ("class_psnr", "")},
        [("dummy data", "gradient"), ("last-returned", "gradient"), ("optimal", "gradient")],
    ),
}
"""Tables of the page, see `attack_table`."""
FIGURES = {
    ("table1-lmra", "lmra"): {
        "zest-global": "global",
        "zest-last": "last-returned",
        "zest-ours": "lmra",
        "accuracy-global": "global",
        "accuracy-last": "last-returned",
        "accuracy-ours": "lmra",
        "accuracy-optimal": "optimal",
        "mape-global": "global",
        "mape-last": "last-returned",
        "mape-ours": "lmra",
        "mape-optimal": "optimal",
    },
    ("table1-lmra", "lmra-dummy-data"): {
        "zest-ours": "lmra-dummy-data",
        "accuracy-ours": "lmra-dummy-data",
        "mape-ours": "lmra-dummy-data",
    },
    ("table1-aia", "lmra"): {
        "baseline": "aia-gradient",
        "global": "aia, global",
        "last": "aia, last-returned",
        "ours": "aia, lmra",
    },
    ("table1-aia", "lmra-dummy-data"): {"ours": "aia, dummy data"},
    ("table1-aia", "optimal model"): {"ours": "aia, optimal"},
    ("table1-sia", "lmra, client's set"): {
        "baseline": "sia, returned, together",
        "last": "sia, last-returned, together",
        "ours": "sia, lmra, together",
    },
    ("table1-sia", "lmra-dummy-data, client's set"): {"ours": "sia, dummy data, together"},
    ("table1-sia", "lmra, each record"): {
        "baseline": "sia, returned, each",
        "last": "sia, last-returned, each",
        "ours": "sia, lmra, each",
    },
    ("table1-sra", "lmra"): {
        "baseline": "sra-gradient",
        "global": "sra, global",
        "last": "sra, last-returned",
        "ours": "sra, lmra",
    },
    ("table1-sra", "lmra-dummy-data"): {"ours": "sra, dummy data"},
}
"""The attack by quantity of the paper's table, for each of our results."""
FIGURE_METRICS = {
    "zest": "zest",
    "accuracy": "local_accuracy",
    "mape": "local_mape",
    "table1-aia": "attribute_accuracy",
    "table1-sia": "source_accuracy",
    "table1-sra": "class_ssim",
}
"""The metric by the beginning of a quantity's name, or by table."""
COMMAND = "python -m studies lmra_models  # six to fifteen minutes of one core for each federation and seed"
NOTE = "All clients, with the seeds and intervals of our own table."


def list_attacks(data: str) -> list[dict[str, Any]]:
    """Return the attacks on a recording: models, and what they tell of attributes or images, and of sources."""
    attacks: list[dict[str, Any]] = [
        {"name": "shared-model", "label": "global", "source": "global"},
        {"name": "shared-model", "label": "last-returned"},
        {"name": "lmra", "hidden": "32x2", "learning_rate": 1e-3, "minimise_epochs": 1000},
        {"name": "lmra-dummy-data"},
    ]
    for label, source in SOURCES.items():
        if data == "att-faces":
            attacks.append({"name": "sra-model", "label": f"sra, {label}", "source": source})
        else:
            attacks.append({"name": "aia-model", "label": f"aia, {label}", "source": source})
    attacks.append(
        {"name": "sra-gradient"} if data == "att-faces" else {"name": "aia-gradient", "rounds": 3, "iterations": 30}
    )
    for label, source in {"returned": "returned", **SOURCES}.items():
        if source != "global":  # it is the same for all clients
            for decide in ("each", "together"):
                attacks.append({"name": "sia", "label": f"sia, {label}, {decide}", "source": source, "decide": decide})
    return attacks


def measure(data: str, batch_norm: bool, seed: int) -> list[Row]:
    """Return the scores of every attack on every client of one federation."""
    tables = read_experiment(data)
    tables["federation"]["seed"] = seed
    if batch_norm:
        tables["model"]["batch_norm"] = True
        tables["training"]["batch_norm_statistics"] = "withheld"
    tables["attack"] = list_attacks(data)
    return attack_clients(tables, data, "all", RUNS / "lmra_models" / f"{data}{'-bn' if batch_norm else ''}-{seed}")


def attack_clients(tables: dict[str, Any], data: str, victims: str | list[int], path: Path) -> list[Row]:
    """Run an experiment in `path`, and return the scores of its attacks on some of its clients."""
    knowledge = {"records": True} | ({"partial_records": ATTRIBUTES[data]} if data in ATTRIBUTES else {})
    tables["adversary"] = {"victims": victims, "rounds": "all", "knowledge": knowledge}
    try:
        run_or_resume(tables, path)
    except RunError as error:
        # Attacks that refuse have rows below; nothing else may have failed, and least of all the federation.
        refused = {attempt.sentence for attempt in read_failed_attacks(RunFolder(path))}
        if not error.failures or not refused.issuperset(error.failures):
            raise
    run = fedsim.open(path)
    rows: list[Row] = []
    for attempt in read_failed_attacks(RunFolder(path)):
        rows.append({"attack": attempt.attack, "victim": attempt.victim, "metric": "refused"})
    for score in run.scores.to_dict("records"):
        if score["metric"] in METRICS:
            rows.append({name: score[name] for name in ("attack", "victim", "metric", "value", "floor")})
        if score["attack"] == "last-returned" and score["metric"] in OF_OPTIMUM:
            metric, column = OF_OPTIMUM[score["metric"]]
            rows.append({"attack": "optimal", "victim": score["victim"], "metric": metric, "value": score[column]})
    return rows


def tables(rows: Rows) -> dict[str, str]:
    """Return the tables of the page."""
    return {name: attack_table(rows, *layout) for name, layout in LAYOUTS.items()}


def attack_table(
    rows: Rows, columns: Mapping[str, str], lines: Mapping[str, tuple[str, str]], differences: Sequence[tuple[str, str]]
) -> str:
    """Return what attacks get from each federation.

    Args:
        columns: the attack by the title of its column; `{}` stands for what a line adds to its name.
        lines: the metric of each line, and what it adds to the names of attacks.
        differences: titles of two columns, or of one and the floor, whose difference has a column.
    """
    body = []
    for title, cell in split_federations(rows).items():
        about = [title, " x ".join(str(len({who[place] for who in list_victims(cell)})) for place in (0, 1))]
        for line, (metric, addition) in lines.items():
            attacks = {column: attack.format(addition) for column, attack in columns.items()}
            floors = [float(row["floor"]) for row in cell.get((next(iter(attacks.values())), metric), ())]
            if not floors:
                continue
            texts = [format_number(float(np.mean(floors)), metric)]
            texts += [format_score(cell, attack, metric) for attack in attacks.values()]
            for minuend, subtrahend in differences:
                texts.append(format_difference(cell, attacks[minuend], attacks.get(subtrahend, subtrahend), metric))
            body.append([*about, line, *texts])
            about = ["", ""]
    titles = [f"{minuend} minus {subtrahend}" for minuend, subtrahend in differences]
    return markdown_table(["", "clients x seeds", "", "floor", *columns, *titles], body)


def split_federations(rows: Rows) -> dict[str, Cell]:
    """Return the rows of each federation by its title; those with batch normalisation come last."""
    federations: dict[str, Cell] = {}
    known = group_rows(rows, "data", "batch_norm")
    for batch_norm, suffix in (("False", ""), ("True", ", BN")):
        for data, title in LABELS.items():
            if (data, batch_norm) in known:
                federations[title + suffix] = group_rows(known[data, batch_norm], "attack", "metric")
    return federations


def list_victims(cell: Cell) -> set[tuple[str, str]]:
    """Return all clients and seeds of a federation."""
    return {(row["victim"], row["seed"]) for rows in cell.values() for row in rows}


def average_clients(cell: Cell, attack: str, metric: str, minus: str = "") -> Values:
    """Return the mean over seeds for each client that has values.

    Args:
        minus: the attack whose value at the same client and seed is subtracted, or `floor`.
    """
    others = {(row["victim"], row["seed"]): row["value"] for row in cell.get((minus, metric), ())}
    values = defaultdict[str, list[float]](list)
    for row in cell.get((attack, metric), ()):
        other = row["floor"] if minus == "floor" else others.get((row["victim"], row["seed"]), "" if minus else "0")
        if other:
            values[row["victim"]].append(float(row["value"]) - float(other))
    return np.array([np.mean(of_client) for of_client in values.values()])


def format_number(value: float, metric: str, sign: str = "") -> str:
    """Format a share without its leading zero, any other number with one digit behind the point.

    >>> format_number(0.5, "zest"), format_number(-0.5, "zest", "+"), format_number(41.25, "local_mape")
    ('.500', '-.500', '41.2')

    What rounds to 0 has no minus.

    >>> format_number(-0.0004, "zest"), format_number(-0.0004, "zest", "+"), format_number(-0.04, "class_psnr")
    ('.000', '+.000', '0.0')
    """
    if metric in NOT_SHARES:
        return f"{value:{sign}z.1f}"
    return re.sub(r"^([+-]?)0\.", r"\1.", f"{value:{sign}z.3f}")


def format_percent(value: float, metric: str) -> str:
    """Format a share in percent as the paper does; what is no share is in percent already."""
    return f"{value if metric in NOT_SHARES else 100 * value:.1f}"


def format_mean(cell: Cell, attack: str, metric: str, number: Callable[[float, str], str] = format_number) -> str:
    """Format the mean over clients, with its interval and of how many it is where some have no value.

    The interval is Student's; Gaffke's where one decision makes a client's value 0 or 1, or nearly so.
    """
    values = average_clients(cell, attack, metric)
    if not len(values):
        # An attack that refuses lacks a score only where others have one: faces have no error in percent.
        applies = any(metric == scored for _, scored in cell)
        return "refused" if applies and (attack, "refused") in cell else ""
    text, is_decision = number(float(values.mean()), metric), attack.endswith("together")
    low, high = confidence_interval(values, share=is_decision)
    if is_decision:
        text += f" ({number(low, metric)} to {number(high, metric)})"
    elif high > low:
        text += f" ± {number((high - low) / 2, metric)}"
    known, every = len(cell[attack, metric]), len(list_victims(cell))
    return text if known == every else f"{text} ({known} of {every})"


def format_score(cell: Cell, attack: str, metric: str) -> str:
    """Format the mean over clients, bold where it is significantly better than the floor."""
    text, differences = format_mean(cell, attack, metric), average_clients(cell, attack, metric, "floor")
    if len(differences) and attack.endswith("together"):
        # The limit for the share itself, since what is above a floor is no share.
        values = average_clients(cell, attack, metric)
        is_better = confidence_interval(values, share=True)[0] > values.mean() - differences.mean()
    else:
        is_better = is_improvement(differences, metric)
    return f"**{text}**" if is_better else text


def format_difference(cell: Cell, attack: str, other: str, metric: str) -> str:
    """Format the difference of two attacks, bold where it is significantly better, and at how many clients it is."""
    differences = average_clients(cell, attack, metric, other)
    if not len(differences):
        return ""
    low, high = confidence_interval(differences)
    text = f"{format_number(float(differences.mean()), metric, '+')} ± {format_number((high - low) / 2, metric)}"
    better = int(np.sum(differences < 0 if metric in LOWER_IS_BETTER else differences > 0))
    return f"{f'**{text}**' if is_improvement(differences, metric) else text} ({better})"


def is_improvement(differences: Values, metric: str) -> bool:
    """Return whether differences are significantly better than 0 on average."""
    low, high = confidence_interval(differences)
    return high < 0 if metric in LOWER_IS_BETTER else low > 0


def figures() -> dict[str, Any]:
    """Return our figures in the place of the paper's Table 1, in percent."""
    rows = read_rows(Study.open("lmra_models").results)
    kept: list[dict[str, Any]] = []
    for (table, name), attacks in FIGURES.items():
        figures_of_rows = {}
        for title, cell in split_federations(rows).items():
            texts = {}
            for quantity, attack in attacks.items():
                metric = FIGURE_METRICS.get(table) or FIGURE_METRICS[quantity.partition("-")[0]]
                if text := format_mean(cell, attack, metric, format_percent):
                    texts[quantity] = text
            if texts:
                figures_of_rows[title] = texts
        is_first = table not in {result["table"] for result in kept}
        kept.append(kept_result(table, name, COMMAND, figures_of_rows, NOTE if is_first else ""))
    return {"paper": "lmra", "kept": kept}
