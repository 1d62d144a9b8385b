"""The defenses against the strongest passive attacks, over seeds, and the first table of docs/studies/defenses.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np

import fedsim
from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.evaluation.identification import IDENTIFIED, score_identification
from fedsim.audit.evaluation.matches import Pool
from fedsim.audit.evaluation.statistics import mean_and_margin
from fedsim.base.errors import ConfigError
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Reconstruction
from fedsim.report.summary import Summary
from fedsim.sweeps.file import read_sweep
from fedsim.sweeps.grid import SweepGrid, build_grid
from studies.defenses.study import cost_of, promised_epsilon
from studies.running import RUNS, STUDIES, Row, run_or_resume
from studies.trust.prices import accuracies, table_of_prices
from studies.trust.verdicts import ATTACKS, METRICS, NONE, Rows, readings, verdict_of
from studies.writing import group_rows, markdown_table, select_rows

VICTIMS = list(range(20))
STRONGER: dict[str, tuple[str, dict[str, Any]]] = {
    "update-noise 0.2": ("update-noise 0.02", {"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.2}),
    "update-noise 0.1": ("update-noise 0.02", {"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.1}),
    "update-noise 0.06": ("update-noise 0.02", {"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.06}),
    "dp-sgd 0.3": ("dp-sgd 0.1", {"name": "dp-sgd", "clip": 4.0, "noise_multiplier": 0.3}),
}
"""Cases that the study of defenses does not have: the case of it that each follows, and the defense."""
REFUSES = "refuses"


@cache
def defense_grid() -> SweepGrid:
    """Return the grid of the study of defenses."""
    return build_grid(read_sweep(STUDIES / "defenses" / "sweep.toml"))


def case_tables(case: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the experiment of a case of the study of defenses or of `STRONGER`, and the adversary's table."""
    like, defense = STRONGER.get(case, (case, None))
    points = [point for point in defense_grid().points if point.labels["case"] == like and not point.is_added]
    tables = deepcopy(defense_grid().tables(points[0]))
    adversary, _ = tables.pop("adversary"), tables.pop("attack")
    if defense is not None:
        tables["defense"] = [defense]
    tables["federation"] = {**tables["federation"], "seed": seed}
    if adversary["victims"] != "all":
        adversary["victims"] = VICTIMS
    adversary |= {"auxiliary": 5000, "workers": 1, "knowledge": {**adversary["knowledge"], "auxiliary": True}}
    return tables, adversary


def record_case(case: str, seed: int) -> fedsim.Run:
    """Run the federation of a case, unless it was run before."""
    return run_or_resume(case_tables(case, seed)[0], RUNS / "trust" / f"{case}, seed {seed}")


def measure(seed: int, attack: str, case: str) -> list[Row]:
    """Attack the victims of a case, and return a row for each victim and metric, or one that says why there is none.

    `other` is the share of the next victim's images that the same claims identify; cells of earlier commits have none.
    """
    run = record_case(case, seed)
    table = {**ATTACKS[attack], "label": attack}
    spec = validate_tables(AttackFile, {"adversary": case_tables(case, seed)[1], "attack": [table]}, case)
    audit = open_audit(run.path, spec, trust=True)
    failures = audit.run()
    titles = (attack, f"{attack} adaptive")
    unscored: list[str] = []
    scores = [row for row in audit.score(unscored) if row["attack"] in titles and row["metric"] in METRICS]
    # A victim without a score would be left out of the means without a word; its finding stays for the next try.
    if unscored:
        raise ConfigError(f"studies/trust: {case}, seed {seed}: {unscored[0]}; run the same command again")
    about = cost_of(run)
    others = identify_others(run, audit, scores)
    rows = []
    for row in scores:
        is_share = row["metric"] == IDENTIFIED
        rows.append({
            "knows": row["attack"].endswith("adaptive"), "victim": row["victim"], "metric": row["metric"],
            "value": row["value"], "floor": row["floor"], "floor_guess": row["floor_guess"],
            "examples": row["examples"], "other": others[row["attack"], int(row["victim"])] if is_share else "",
            "failed": "", **about,
        })  # fmt: skip
    for title in titles:
        reasons = [reason for reason in failures if reason.startswith(f"{title}:") or reason.startswith(f"{title} ")]
        if reasons:
            rows.append({"knows": title.endswith("adaptive"), "failed": reasons[0], **about})
    return rows


def identify_others(run: fedsim.Run, audit: Audit, scores: Sequence[Row]) -> dict[tuple[str, int], float]:
    """Return the share of the next victim's images that the claims about each victim identify, by attack and victim."""
    claimed = {(row["attack"], int(row["victim"])) for row in scores}
    victims, shares = sorted({victim for _, victim in claimed}), {}
    for item in run.findings:
        if (item.attack, item.victim) in claimed:
            other = victims[(victims.index(item.victim) + 1) % len(victims)]
            truth = audit.case.truth(other, None, members_of(run, other))
            assert truth is not None
            assert isinstance(item.finding, Reconstruction)
            pool = Pool.from_truth(truth, audit.case.public())
            shares[item.attack, item.victim] = score_identification(item.finding.data, truth, pool).value
    return shares


def members_of(run: fedsim.Run, victim: int) -> Sequence[int]:
    """Return the clients whose sum stands for a victim; the victim alone where nothing is summed."""
    reply = run.transcript.header(run.transcript.rounds[0]).find_reply(victim)
    return (reply.members if reply else ()) or (victim,)


def tables(rows: Rows) -> dict[str, str]:
    """Return a line for each defense: what it costs, and what each attack gets, first without knowledge of it."""
    found = {case: of_case for (case,), of_case in group_rows(rows, "case").items()}
    attacks = [attack for attack in ATTACKS if select_rows(rows, attack=attack)]
    lines = []
    for case in filter(found.__contains__, case_order()):
        of_case = found[case]
        line = [case, accuracy_text(of_case), promised_epsilon(of_case[0]["epsilon"])]
        for metric, text in (("psnr", gain_text), ("identified", share_text)):
            line += [attack_text(of_case, attack, metric, text) for attack in attacks]
        lines.append([*line, victims_text(of_case, attacks), seeds_text(of_case, found[NONE])])
    head = ["defense", "accuracy", "ε", *(f"{name}, dB" for name in attacks)]
    head += [f"identified: {name}, %" for name in attacks]
    table = markdown_table([*head, "victims", "verdict"], lines)
    return {"": table, "prices": table_of_prices(rows), "others": table_of_others(rows)}


def table_of_others(rows: Rows) -> str:
    """Return what claims identify of their victim's images and of the next victim's, where both were compared.

    InstaHide's mixtures have a line for each attack, and all other defenses together have one.
    """
    compared = [row for row in select_rows(rows, metric=IDENTIFIED) if row["other"]]
    mixed = [row for row in compared if row["case"].startswith("instahide")]
    plain = [row for row in compared if not row["case"].startswith("instahide")]
    groups, order, lines = group_rows(mixed, "case", "attack", "knows"), case_order(), []
    for (case, attack, knows), of_cell in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
        lines.append(other_line(case, f"{attack}, knows the defense" if knows == "True" else attack, of_cell))
    count = len({row["case"] for row in plain})
    lines.append(other_line(f"{count} others", ", ".join(sorted({row["attack"] for row in plain})), plain))
    head = ["defense", "attack", "identified, %", "images of another client, %", "by chance, %", "victims"]
    return markdown_table(head, lines)


def other_line(case: str, attack: str, rows: Rows) -> list[str]:
    """Return the line of some attacks: shares of the victim's images, of the next victim's, and by chance."""
    line = [case, attack]
    for column in ("value", "other", "floor"):
        shares = defaultdict(list)
        for row in rows:
            shares[row["seed"], row["victim"]].append(100 * float(row[column]))
        means = {unit: float(np.mean(values)) for unit, values in shares.items()}
        line.append("{:.1f} ± {:.1f}".format(*mean_and_margin(means)))
    return [*line, count_victims(rows)]


def case_order() -> list[str]:
    """Return the cases in the order of the study of defenses, those of `STRONGER` where they belong."""
    order = list(dict.fromkeys(point.labels["case"] for point in defense_grid().points))
    for case, (place, _) in STRONGER.items():
        order.insert(order.index(place) + 1, case)
    return order


def attack_text(rows: Rows, attack: str, metric: str, text: Callable[[Summary], str]) -> str:
    """Format the naive and the adaptive score of an attack; empty where it was not made."""
    if not select_rows(rows, attack=attack):
        return ""
    found = readings(rows, attack)
    shown = [text(found[metric, knows].summary) for knows in (False, True) if (metric, knows) in found]
    if any(row["failed"] for row in select_rows(rows, attack=attack)):
        shown.append(REFUSES)
    return " / ".join(shown)


def gain_text(item: Summary) -> str:
    """Format how many dB a score is above the floor, with half of its 95 % interval over victims and seeds."""
    gains = {victim_and_seed(name): item.values[name] - item.floors[name] for name in item.values}
    mean, margin = mean_and_margin(gains)
    return f"{mean:+z.1f} ± {margin:.1f}"


def share_text(item: Summary) -> str:
    """Format a share in per cent, with half of its 95 % interval over victims and seeds."""
    mean, margin = mean_and_margin({victim_and_seed(name): 100 * value for name, value in item.values.items()})
    return f"{mean:.0f} ± {margin:.0f}"


def victim_and_seed(name: str) -> tuple[str, str]:
    """Return victim and seed of what `readings` counts as a victim."""
    seed, victim = name.split("-")
    return victim, seed


def accuracy_text(rows: Rows) -> str:
    """Format the mean accuracy over seeds, in per cent."""
    return f"{100 * np.mean(list(accuracies(rows).values())):.1f} %"


def victims_text(rows: Rows, attacks: Sequence[str]) -> str:
    """Format how many victims of how many seeds were attacked, by attack where they were not equally many."""
    attacks_by_count: dict[str, list[str]] = {}
    for attack in attacks:
        if of_attack := [row for row in select_rows(rows, attack=attack) if row["victim"]]:
            attacks_by_count.setdefault(count_victims(of_attack), []).append(attack)
    if len(attacks_by_count) == 1:
        return attacks_by_count.popitem()[0]
    return "; ".join(f"{', '.join(names)}: {count}" for count, names in attacks_by_count.items())


def count_victims(rows: Rows) -> str:
    """Format how many victims of how many seeds there are.

    >>> count_victims([{"seed": "1", "victim": "0"}, {"seed": "1", "victim": "1"}])
    '2, 1 seed'
    """
    victims = {(row["seed"], row["victim"]) for row in rows}
    seeds = {row["seed"] for row in rows}
    return f"{len(victims)}, {len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}"


def seeds_text(rows: Rows, undefended: Rows) -> str:
    """Format the verdict on a defense, and those of the seeds where they differ from it."""
    verdict = verdict_of(rows, undefended)
    single = {}
    for (seed,), of_seed in group_rows(rows, "seed").items():
        single[seed] = verdict_of(of_seed, select_rows(undefended, seed=seed))
    differing = {seed: text for seed, text in single.items() if text != verdict}
    if not differing:
        return verdict
    if len(single) > 1 and len(differing) == len(single) and len(set(single.values())) == 1:
        return f"{verdict} (each seed alone: {single.popitem()[1]})"
    return f"{verdict} ({'; '.join(f'seed {seed}: {text}' for seed, text in differing.items())})"
