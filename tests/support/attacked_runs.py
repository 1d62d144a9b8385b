"""Attacks on a run of a few clients, each made if it suits the task, and their scores."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from typing import Any

from fedsim.audit.audit import Audit, make_audit
from fedsim.base.errors import FedsimError
from fedsim.federation.open_run import OpenRun
from tests.support.experiments import make_attack_file

_SETTINGS: Mapping[str, Mapping[str, Any]] = {"inverting-gradients": {"iterations": 3}, "sme": {"iterations": 3}}
"""Of attacks that descend, to be quick."""


def attack_clients(run: OpenRun, name: str) -> tuple[Audit | None, list[str]]:
    """Attack two clients in all rounds with all knowledge but the labels; return the audit and its failures.

    The audit is None where the attack is refused before any work, with the sentence in place of failures.
    """
    knowledge = {"candidates": "held-out", "known_candidates": 4, "records": True, "labels": False, "auxiliary": True}
    attack = {"name": name, **_SETTINGS.get(name, {})}
    spec = make_attack_file(attack, victims=[0, 1], rounds="all", knowledge=knowledge)
    try:
        audit = make_audit(run, spec)
        return audit, audit.run()
    except FedsimError as error:
        return None, [str(error)]


def read_scores(run: OpenRun) -> list[dict[str, str]]:
    """Return the rows of `scores.csv`."""
    with (run.path / "scores.csv").open() as file:
        return list(csv.DictReader(file))


def read_values(run: OpenRun, attack: str) -> list[dict[str, str]]:
    """Return the rows of an attack that have a value."""
    rows = [row for row in read_scores(run) if row["attack"] == attack]
    return [row for row in rows if math.isfinite(float(row["value"] or "nan"))]
