"""What attacks gain by seeing that ReLUs switch; the tables of docs/explanation/inversion.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.identification import IDENTIFIED
from fedsim.base.errors import ConfigError
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from studies.fedleak.study import NETWORKS, attack_gradients
from studies.giml.study import with_interval
from studies.running import Row
from studies.trust.study import VICTIMS, case_order, case_tables, record_case
from studies.trust.verdicts import ATTACKS
from studies.writing import column_values, group_rows, markdown_table, select_rows

CLIENTS, ITERATIONS = 10, 300
INVERTING_GRADIENTS = {"share": 1.0, "smoothing": 0.0}
"""As settings of `PartialMatching`."""
COLUMNS = ("client", "psnr", "psnr floor", IDENTIFIED, f"{IDENTIFIED} floor")
SCORES = ["PSNR (dB)", "beyond the guess", "beyond width 0", "identified (%)", "by chance (%)", "distance"]


def measure(width: float, network: str = "", tv_weight: float = 0.0, defense: str = "", seed: int = 0) -> list[Row]:
    """Attack gradients of a network, or the federation of the study `trust` with a defense that the server knows."""
    if not network:
        return attack_federation(defense, seed, width)
    settings = {"iterations": ITERATIONS, "step_size": 0.1, "tv_weight": tv_weight, "relu_width": width}
    rows = attack_gradients(network, {**INVERTING_GRADIENTS, **settings}, CLIENTS, "relu jumps")
    return [{"distance": row["l_sim"], **{name: row[name] for name in COLUMNS}} for row in rows]


def attack_federation(defense: str, seed: int, width: float) -> list[Row]:
    """Attack the victims of the study `trust` by `map`, which knows the defense."""
    run, adversary = record_case(defense, seed), case_tables(defense, seed)[1]
    # The run's folder keeps the scores of all widths, and of the study `trust`, side by side.
    label = f"map, width {width:g}"
    table = {**ATTACKS["map"], "relu_width": width, "label": label}
    adversary = {**adversary, "knowledge": {**adversary["knowledge"], "defenses": True}}
    audit = open_audit(
        run.path, validate_tables(AttackFile, {"adversary": adversary, "attack": [table]}, defense), trust=True
    )
    failures, unscored = audit.run(), list[str]()
    rows: dict[int, Row] = {}
    for score in audit.score(unscored):
        if score["attack"] not in (label, f"{label} adaptive"):
            continue
        row = rows.setdefault(int(score["victim"]), {"client": score["victim"]})
        if score["metric"] == "l_sim":
            row["distance"] = score["value"]
        elif score["metric"] in ("psnr", IDENTIFIED):
            row |= {score["metric"]: score["value"], f"{score['metric']} floor": score["floor"]}
    if failures or unscored or len(rows) != len(VICTIMS):
        raise ConfigError(f"studies/relu_jumps: {defense}, seed {seed}: {[*failures, *unscored, len(rows)][0]}")
    return list(rows.values())


def tables(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what widths give on networks, and what `map` gets of defended clients with and without."""
    networks = [row for row in rows if row["network"]]
    federations = [row for row in rows if row["defense"]]
    return {"networks": table_of_networks(networks), "defenses": table_of_defenses(federations)}


def table_of_networks(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a line for each network, weight of the total variation, and width."""
    lines = []
    groups, order = group_rows(rows, "network", "tv_weight", "width"), list(NETWORKS)
    for network, tv_weight, width in sorted(
        groups, key=lambda key: (order.index(key[0]), float(key[1]), float(key[2]))
    ):
        cell = groups[network, tv_weight, width]
        title, _, _, size = NETWORKS[str(network)]
        exact = select_rows(rows, network=network, tv_weight=tv_weight, width="0")
        lines.append([title, str(size), str(tv_weight), str(width), *format_cell(cell, exact)])
    head = ["network", "N", "total variation", "width"]
    return markdown_table([*head, *SCORES], lines)


def table_of_defenses(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a line for each defense and width; seeds are pooled."""
    lines = []
    groups, order = group_rows(rows, "defense", "width"), case_order()
    for defense, width in sorted(groups, key=lambda key: (order.index(key[0]), float(key[1]))):
        cell, exact = groups[defense, width], select_rows(rows, defense=defense, width="0")
        lines.append([str(defense), str(width), str(len(cell)), *format_cell(cell, exact)])
    return markdown_table(["defense", "width", "victims", *SCORES], lines)


def format_cell(cell: Sequence[Mapping[str, str]], exact: Sequence[Mapping[str, str]]) -> list[str]:
    """Format the scores of a cell, and what it gains over the exact derivative on the same victims."""
    psnr = column_values(cell, "psnr")
    return [
        with_interval(psnr, ".1f"),
        with_interval(psnr - column_values(cell, "psnr floor"), "+.1f"),
        "–" if cell[0]["width"] == "0" else with_interval(psnr - column_values(exact, "psnr"), "+.1f"),
        with_interval(100 * column_values(cell, "identified"), ".0f"),
        f"{100 * column_values(cell, 'identified floor').mean():.0f}",
        f"{column_values(cell, 'distance').mean():.4f}",
    ]
