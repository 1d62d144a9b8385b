"""Compute the tables of a run again: scores from findings, epsilons from the ledger, and a sweep's from its cells."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsim.audit.audit import Audit
from fedsim.audit.plan import ADAPTIVE
from fedsim.base.errors import FedsimError, name_rounds
from fedsim.dossier.contents import INFINITE, MINUS_INFINITE, to_float
from fedsim.federation.app_ledger import make_app_ledger
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_ledger
from fedsim.privacy.ledger import Ledger
from fedsim.report.reported_run import ReportedRun
from fedsim.report.reproduction_needs import strip_folders
from fedsim.report.run_facts import list_app_defenses
from fedsim.sweeps.rows import sweep_rows
from fedsim.sweeps.table import read_cells, read_table

State = Literal["equal", "differs", "cannot be recomputed"]
_SCORE_TOLERANCE = 1e-3
"""Relative difference of scores that is rounding, as on another machine."""
_SCORE_KEY = ("attack", "variant", "victim", "round", "repeat", "metric")
_SCORE_NUMBERS = ("value", "floor", "nearest_public", "ceiling", "examples")
_SCORE_TEXTS = ("floor_guess", "higher_is_better", "seed", "missing", "instrument", "settings", "granted")
_NO_TRUTH = "the run does not say where the clients' data are; name the attack file that does with --attack FILE"
_LEDGER_KEY = ("round", "client", "defense")
_CELL_KEY = ("knows_defenses", "victim", "round", "repeat", "metric")
_CELL_NUMBERS = ("value", "floor", "examples", "accuracy", "guess", "proved_epsilon", "measured_epsilon", "bytes")


@dataclass(frozen=True, kw_only=True)
class VerifiedValue:
    """Value of a dossier beside what the run says now.

    Attributes:
        where: its place.
        stated: what the dossier, or a table of the run, says.
        found: what was computed now.
        state: whether both are equal.
        is_number: whether it is a number; otherwise it is a text.
        why: why it cannot be recomputed; empty where it can.
    """

    where: str
    stated: str
    found: str
    state: State
    is_number: bool = True
    why: str = ""


def is_number(value: Any) -> bool:
    """Return whether a value of `dossier.json` is a number."""
    return value in (INFINITE, MINUS_INFINITE) or (isinstance(value, int | float) and not isinstance(value, bool))


def are_equal(left: Any, right: Any, tolerance: float) -> bool:
    """Return whether two values are equal, numbers up to a relative `tolerance`."""
    if is_number(left) and is_number(right):
        left, right = to_float(left), to_float(right)
        return left == right or math.isclose(left, right, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    return bool(left == right)


def _read_key(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in columns)


def judge_findings_again(run: ReportedRun, further_audits: Sequence[Audit] = ()) -> list[VerifiedValue]:
    """Judge the findings of a run again, and compare the scores with those of `scores.csv`.

    Args:
        further_audits: by attack files, which say what the run's own file does not.
    """
    if not run.scores:
        return []
    failures: list[str] = []
    judged: dict[tuple[str, ...], Mapping[str, Any]] = {}
    reason = "" if run.audit or further_audits else _NO_TRUTH
    for audit in [*([run.audit] if run.audit else []), *further_audits]:
        try:
            rows = audit.judge(failures)
        except FedsimError as error:
            reason = strip_folders(str(error))
            continue
        titles = {table.title for table in audit.spec.attack}
        titles |= {f"{title} {ADAPTIVE}" for title in titles}
        for row in rows:
            key = _read_key(row, _SCORE_KEY)
            # The file that names an attack says what it was granted.
            if row["attack"] in titles or key not in judged:
                judged[key] = row
    why = reason or strip_folders(next(iter(failures), "its finding was not judged"))
    values, stated_keys = list[VerifiedValue](), set()
    for stated_row in run.scores:
        key = _read_key(stated_row, _SCORE_KEY)
        stated_keys.add(key)
        values += _compare_score(stated_row, judged.get(key), why)
    # Scores that somebody has taken out of the table.
    for key, new_row in judged.items():
        if key not in stated_keys:
            found = str(new_row["value"])
            values.append(VerifiedValue(where=_name_score(new_row), stated="no score", found=found, state="differs"))
    return values


def _name_score(row: Mapping[str, Any]) -> str:
    return f"{row['attack']}, client {row['victim']}, {name_rounds(row['round'])}, {row['metric']}"


def _compare_score(row: Mapping[str, str], new_row: Mapping[str, Any] | None, why: str) -> Iterator[VerifiedValue]:
    """Yield each column of a row of `scores.csv` beside that of the score that was judged again."""
    reason = ""
    if new_row is None:
        reason = why
    elif new_row["missing"] and row["instrument"] and not new_row["instrument"]:
        reason = strip_folders(str(new_row["missing"]))
    elif row["missing"] and new_row["instrument"]:
        reason = f"where the run was made: {strip_folders(row['missing'])}"
    for column in (*_SCORE_NUMBERS, *_SCORE_TEXTS):
        is_column_number = column in _SCORE_NUMBERS
        read = _read_number if is_column_number else _read_text
        stated, found = read(row[column]), "" if new_row is None else read(new_row[column])
        state: State = "equal" if _are_same(stated, found) else "differs"
        if new_row is None or (reason and state == "differs"):
            state = "cannot be recomputed"
        yield VerifiedValue(
            where=f"{_name_score(row)}, {column}",
            stated=str(stated),
            found=str(found),
            state=state,
            is_number=is_column_number,
            why=reason if state == "cannot be recomputed" else "",
        )


def _read_number(value: Any) -> float:
    return math.nan if value in ("", None) else float(value)


def _read_text(value: Any) -> str:
    return strip_folders(str(value))


def _are_same(stated: float | str, found: float | str) -> bool:
    if isinstance(stated, float) and isinstance(found, float) and math.isnan(stated) and math.isnan(found):
        return True
    return are_equal(stated, found, _SCORE_TOLERANCE)


def compose_epsilons_again(run: ReportedRun) -> list[VerifiedValue]:
    """Compose the epsilons of a ledger again from what it says that clients did."""
    rows = read_ledger(run.folder)
    if not rows:
        return []
    composed: dict[tuple[str, ...], Mapping[str, Any]] = {}
    reason = "the clients' defenses are unknown"
    if run.experiment is not None:
        experiment = run.experiment
        names = [table.name for table in experiment.config.defense]
        try:
            federation = experiment.federation_privacy
            ledger = Ledger(lambda: experiment.setting, experiment.client_defenses, names, federation)
            ledger.resume(rows, max(int(row["round"]) for row in rows), str(run.folder.ledger))
            composed = {_read_key(row, _LEDGER_KEY): row for row in ledger.rows}
        except FedsimError as error:
            reason = strip_folders(str(error))
    elif run.folder.app.is_file():
        reason = "the recording does not have so many messages"
        try:
            defenses = {label: defense for _, defense, label in list_app_defenses(run)}
            composed = {_read_key(row, _LEDGER_KEY): row for row in make_app_ledger(run.recording.headers, defenses)}
        except FedsimError as error:
            reason = strip_folders(str(error))
    # Compare row by row; one without a counterpart says why.
    values = []
    for row in rows:
        where = f"{row['defense']}, client {row['client']}, round {row['round']}, epsilon"
        new_row = composed.get(_read_key(row, _LEDGER_KEY))
        stated = float(row["epsilon"] or "nan")
        if new_row is None:
            values.append(
                VerifiedValue(where=where, stated=str(stated), found="", state="cannot be recomputed", why=reason)
            )
            continue
        found = float(new_row["epsilon"])
        is_equal = are_equal(stated, found, _SCORE_TOLERANCE)
        values.append(
            VerifiedValue(where=where, stated=str(stated), found=str(found), state="equal" if is_equal else "differs")
        )
    return values


def read_cells_again(folder: Path, *, trust: bool) -> list[VerifiedValue]:
    """Read the rows of `sweep.csv` again from the runs of all cells that `cells.csv` names."""
    rows_by_cell: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in [*read_cells(folder).rows, *read_table(folder).rows]:
        if row["run"]:
            rows = rows_by_cell.setdefault((row["cell"], row["run"]), [])
            if row.get("metric"):  # otherwise the attack failed, or its finding could not be scored
                rows.append(row)
    values: list[VerifiedValue] = []
    for (cell, run_path), rows in rows_by_cell.items():
        reason, new_rows = "", list[dict[str, str]]()
        try:
            run = OpenRun(folder / run_path)
            config = run.read_experiment(trust=trust)
            # The attacks before the last one are those that it builds on.
            if config and config.attack:
                new_rows = sweep_rows(run, config.attack[-1].title, (), role=config.adversary.role)
        except FedsimError as error:
            reason = strip_folders(str(error))
        # A run folder is called by the key of its cell.
        name = Path(run_path).name
        values.append(_compare_texts(f"cell {cell}, run", cell, name))
        values += _compare_rows(cell, rows, new_rows, reason)
    return values


def _compare_texts(where: str, stated: str, found: str) -> VerifiedValue:
    return VerifiedValue(where=where, stated=stated, found=found, state="equal" if stated == found else "differs")


def _compare_rows(
    cell: str, rows: Sequence[Mapping[str, str]], new_rows: Sequence[Mapping[str, str]], reason: str
) -> Iterator[VerifiedValue]:
    """Yield the numbers of a cell's rows beside those that its run has now."""
    rows_by_key = {_read_key(row, _CELL_KEY): row for row in rows}
    new_rows_by_key = {_read_key(row, _CELL_KEY): row for row in new_rows}
    for key, row in (new_rows_by_key | rows_by_key).items():
        where = f"cell {cell}, client {row['victim']}, {row['metric']}"
        if key not in rows_by_key:
            yield _compare_texts(where, "no score", row["value"])
            continue
        for column in _CELL_NUMBERS:
            if reason:
                yield VerifiedValue(
                    where=f"{where}, {column}", stated=row[column], found="", state="cannot be recomputed", why=reason
                )
                continue
            found = new_rows_by_key[key][column] if key in new_rows_by_key else "no score"
            yield _compare_texts(f"{where}, {column}", row[column], found)
