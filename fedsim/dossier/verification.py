"""Verify a dossier: compute every number again from the run, and say which are equal.

1. Contents: the dossier is computed anew from the tables of the run, and compared number by number.
2. Scores: where the truth is known, findings are judged again, and compared with `scores.csv`.
3. Epsilon: the accountant composes again what the ledger says that each client did.
4. A sweep's table is compared with what its cells' runs say.
5. Files: the page and the JUnit file are written again, and compared.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsim.audit.audit import Audit
from fedsim.base.errors import ConfigError, FedsimError
from fedsim.base.files import check_no_link
from fedsim.dossier.contents import Dossier, SealedDossier, start_sentence
from fedsim.dossier.files import JSON_FILE, JUNIT_FILE, PAGE, format_junit, read_dossier, render_dossier
from fedsim.dossier.recomputation import (
    State,
    VerifiedValue,
    are_equal,
    compose_epsilons_again,
    is_number,
    judge_findings_again,
    read_cells_again,
)
from fedsim.dossier.run_dossier import DossierOptions, collect_run_dossier
from fedsim.dossier.sweep_dossier import collect_sweep_dossier
from fedsim.dossier.thresholds import judge_thresholds
from fedsim.federation.open_run import OpenRun
from fedsim.federation.settings import versions
from fedsim.recording.seals import signing_key
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.reproduction_needs import strip_folders
from fedsim.sweeps.table import read_table

_NOT_COMPARED = ("written", "versions", "review_by", "name", "evidence.folder")
"""What a dossier does not take from the run, or what changes where a run is moved."""
_NEEDS_DATA = ("facts", "cautions", "notes")
"""What reads otherwise on a machine without the data set."""
_CONTENT_TOLERANCE = 1e-9
"""Relative difference that is rounding, of numbers that follow from tables."""
_PACKAGE = "fedsim-curious"
_STATED, _OTHER = f"what {JSON_FILE} says", "other contents"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of verifying a dossier.

    Attributes:
        dossier: the dossier.
        is_signed: whether it bears a signature.
        contents: its values.
        scores: the columns of `scores.csv`, judged again.
        epsilons: those of `ledger.csv`, composed again.
        cells: the values of `sweep.csv`, read again from the cells' runs.
        files: the page and the JUnit file, written again.
        remarks: how far the result can be relied on.
    """

    dossier: Dossier
    is_signed: bool
    contents: Sequence[VerifiedValue] = ()
    scores: Sequence[VerifiedValue] = ()
    epsilons: Sequence[VerifiedValue] = ()
    cells: Sequence[VerifiedValue] = ()
    files: Sequence[VerifiedValue] = ()
    remarks: list[str] = field(default_factory=list)

    @property
    def values(self) -> list[VerifiedValue]:
        """Return all values."""
        return [*self.contents, *self.scores, *self.epsilons, *self.cells, *self.files]

    @property
    def differences(self) -> list[VerifiedValue]:
        """Return the values that differ."""
        return [value for value in self.values if value.state == "differs"]

    @property
    def faults(self) -> list[str]:
        """Say why the dossier counts for nothing or is not verified, besides the differences."""
        faults = []
        if self.scores and all(value.state == "cannot be recomputed" for value in self.scores):
            reasons = dict.fromkeys(value.why for value in self.scores)
            faults.append(f"no score was recomputed: {next(iter(reasons))}")
        review_by = self.dossier.review_by
        if review_by is not None and review_by < datetime.date.today():
            faults.append(f"the federation had to be examined again by {review_by}, so the dossier is no longer valid")
        return faults

    @property
    def counts(self) -> dict[str, str]:
        """Say of each part how many values are equal, differ and cannot be recomputed."""
        numbers = [value for value in self.contents if value.is_number]
        texts = [value for value in self.contents if not value.is_number]
        parts = {
            "numbers of the dossier": numbers,
            "sentences and names": texts,
            "scores, judged again from the findings": self.scores,
            "epsilons, composed again from the ledger": self.epsilons,
            "numbers of sweep.csv, read again from the cells' runs": self.cells,
            "files next to dossier.json, written again": self.files,
        }
        return {name: _count_states(values) for name, values in parts.items() if values}


def verify_dossier_file(
    path: Path,
    run: Path | None,
    *,
    open_audits: Callable[[OpenRun], Sequence[Audit]] | None,
    trust: bool,
) -> Verification:
    """Compute the numbers of a dossier again, see `Verification`; nothing is written.

    Args:
        path: `dossier.json`, or its folder.
        run: the run or sweep, where it was moved.
        open_audits: returns the audits of a run by attack files; None where none are named.
    """
    sealed = read_dossier(path)
    stated = sealed.dossier
    folder = path if path.is_dir() else path.parent
    run = folder / stated.evidence.folder if run is None else run
    if not run.is_dir():
        raise ConfigError(f"{run}: the {stated.kind} of {folder / JSON_FILE} does not exist; name it with --run FOLDER")
    # Make the dossier again from the run, with the thresholds that the stated one names.
    options = DossierOptions(folder=folder, written=stated.written, review_by=stated.review_by, trust=trust)
    collect = collect_run_dossier if stated.kind == "run" else collect_sweep_dossier
    found = collect(run, options)
    thresholds = judge_thresholds(found, [item.threshold for item in stated.thresholds])
    found = found.model_copy(update={"thresholds": thresholds})
    is_signed = len(sealed.seal) > 1
    remarks = _remark_on_dossier(stated, found, is_signed=is_signed)
    files = _compare_written_files(sealed, folder)
    # Scores of a sweep are taken from its cells, those of a run are computed again.
    if stated.kind == "sweep":
        if open_audits is not None:
            raise ConfigError("--attack: the cells of a sweep have the attacks of its own file; leave it out")
        cells = read_cells_again(run, trust=trust)
        remarks.append("Scores were taken from the scores.csv of each cell, whose hash the manifest of its run has.")
        return Verification(
            dossier=stated,
            is_signed=is_signed,
            contents=_compare_contents(stated, found, _explain_missing_data_of_cells(run, trust=trust)),
            cells=cells,
            files=files,
            remarks=remarks,
        )
    reported = open_reported_run(OpenRun(run), trust=trust)
    further_audits = open_audits(OpenRun(run)) if open_audits is not None else ()
    scores = judge_findings_again(reported, further_audits)
    if any(value.state == "differs" for value in scores):
        remarks.append(_WHY_SCORES_DIFFER)
    return Verification(
        dossier=stated,
        is_signed=is_signed,
        contents=_compare_contents(stated, found, _explain_missing_data(reported)),
        scores=scores,
        epsilons=compose_epsilons_again(reported),
        files=files,
        remarks=remarks,
    )


def _remark_on_dossier(stated: Dossier, found: Dossier, *, is_signed: bool) -> list[str]:
    """Say how far the result can be relied on."""
    remarks = [f"{start_sentence(found.evidence.integrity)}."]
    if not is_signed:
        remarks.append("The dossier is not signed: whoever can write to the folder could have changed it.")
    elif signing_key() is None:
        remarks.append("The dossier is signed with a key that was not given (--key), so its signature was not checked.")
    if stated.versions != found.versions:
        changed = [
            f"{package} {stated.versions.get(package, 'unknown')} then, {version} now"
            for package, version in found.versions.items()
            if stated.versions.get(package) != version
        ]
        remarks.append(f"It was written by other versions: {', '.join(changed)}.")
    return remarks


def _compare_contents(stated: Dossier, found: Dossier, why_no_data: str) -> list[VerifiedValue]:
    """Compare two dossiers value by value."""
    stated_values = dict(_flatten(stated.model_dump(mode="json")))
    found_values = dict(_flatten(found.model_dump(mode="json")))
    values = []
    for where in dict.fromkeys([*stated_values, *found_values]):
        if where in _NOT_COMPARED or where.startswith(tuple(f"{name}." for name in _NOT_COMPARED)):
            continue
        before, now = stated_values.get(where, _NOTHING), found_values.get(where, _NOTHING)
        state: State = "equal" if are_equal(before, now, _CONTENT_TOLERANCE) else "differs"
        why = ""
        if state == "differs" and why_no_data and where.startswith(_NEEDS_DATA):
            state, why = "cannot be recomputed", why_no_data
        values.append(
            VerifiedValue(
                where=where,
                stated=_format(before),
                found=_format(now),
                state=state,
                is_number=is_number(before) or is_number(now),
                why=why,
            )
        )
    return values


_NOTHING = "nothing"
_WHY_SCORES_DIFFER = (
    "Where scores differ and the files are those that were written, the code that judges findings has changed, the "
    "scores were not computed by it, or they are of an attack file that --attack FILE has to name."
)


def _flatten(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value with its place, such as `results.0.mean`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            yield from _flatten(inner, f"{where}.{position}")
    else:
        yield where, value


def _format(value: Any) -> str:
    return "unknown" if value is None else str(value)


def _explain_missing_data_of_cells(folder: Path, *, trust: bool) -> str:
    """Say why the data set of a sweep's first cell is not there; empty where it is, or where the cell is gone."""
    for row in read_table(folder).rows:
        if row["run"]:
            try:
                return _explain_missing_data(open_reported_run(OpenRun(folder / row["run"]), trust=trust))
            except FedsimError:  # the dossier that was computed anew says so
                return ""
    return ""


def _explain_missing_data(run: ReportedRun) -> str:
    """Say why the data set of a run is not there; empty where it is, or where the run has none."""
    if run.experiment is None:
        return ""
    try:
        _ = run.experiment.dataset
    except FedsimError as error:
        return strip_folders(str(error))
    return ""


def _count_states(values: Sequence[VerifiedValue]) -> str:
    """Return `12 equal, 1 differs, 2 cannot be recomputed`."""
    counts = {state: sum(value.state == state for value in values) for state in ("equal", "differs")}
    rest = len(values) - sum(counts.values())
    parts = [f"{counts['equal']} equal", f"{counts['differs']} {'differs' if counts['differs'] == 1 else 'differ'}"]
    return ", ".join([*parts, *([f"{rest} cannot be recomputed"] if rest else [])])


def _compare_written_files(sealed: SealedDossier, folder: Path) -> list[VerifiedValue]:
    """Write the page and the JUnit file again, and compare them with those beside `dossier.json`."""
    dossier = sealed.dossier
    expected_page = render_dossier(dossier, sealed.seal)
    values = [_compare_file(folder / PAGE, expected_page)]
    if dossier.thresholds:
        values.append(_compare_file(folder / JUNIT_FILE, format_junit(dossier.name, dossier.thresholds)))
    elif (folder / JUNIT_FILE).exists():
        values.append(_make_value(JUNIT_FILE, "no thresholds, and so no such file", "a file", "differs"))
    # Another version may write the same contents in other words.
    written, now = dossier.versions.get(_PACKAGE, "unknown"), versions()[_PACKAGE]
    if written == now:
        return values
    why = f"it was written by fedsim {written}, this is {now}"
    for position, value in enumerate(values):
        if value.state == "differs":
            values[position] = replace(value, state="cannot be recomputed", why=value.why or why)
    return values


def _compare_file(path: Path, expected: str) -> VerifiedValue:
    if not path.is_file():
        why = f"{path.name} is not next to {JSON_FILE}, so its contents are unknown"
        return _make_value(path.name, _STATED, "no file", "cannot be recomputed", why)
    check_no_link(path)
    is_equal = path.read_bytes() == expected.encode()
    return _make_value(path.name, _STATED, _STATED if is_equal else _OTHER, "equal" if is_equal else "differs")


def _make_value(where: str, stated: str, found: str, state: State, why: str = "") -> VerifiedValue:
    return VerifiedValue(where=where, stated=stated, found=found, state=state, is_number=False, why=why)
