"""Dossiers in Python: `fedsim.write_dossier` writes one, `fedsim.verify_dossier` computes its numbers again."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsim.api.adversaries import read_adversary
from fedsim.audit.audit import Audit, make_audit
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import serialize_calls
from fedsim.dossier.contents import NOT_REACHED, Dossier, ThresholdResult
from fedsim.dossier.files import JSON_FILE, write_dossier_files
from fedsim.dossier.run_dossier import DossierOptions, collect_run_dossier
from fedsim.dossier.sweep_dossier import collect_sweep_dossier
from fedsim.dossier.thresholds import judge_thresholds
from fedsim.dossier.verification import Verification, verify_dossier_file
from fedsim.federation.open_run import OpenRun
from fedsim.recording.recording_folder import find_run
from fedsim.report.sweep_page import FILE


@dataclass(frozen=True, kw_only=True)
class WrittenDossier:
    """Dossier that was written.

    Attributes:
        page: `dossier.html`, beside which `dossier.json` stands and, with thresholds, `dossier.junit.xml`.
        contents: what it says.
    """

    page: Path
    contents: Dossier

    @property
    def failed_thresholds(self) -> list[ThresholdResult]:
        """Thresholds that were reached, or of which that cannot be decided."""
        return [item for item in self.contents.thresholds if item.outcome != NOT_REACHED]


@serialize_calls
def write_dossier(
    path: str | Path,
    out: str | Path | None = None,
    *,
    fail_if: Sequence[str] = (),
    review_by: datetime.date | None = None,
    trust: bool = False,
) -> WrittenDossier:
    """Write a dossier of a run or a sweep for a privacy officer.

    Args:
        path: the folder of the run or sweep.
        out: the folder for the dossier; that of the run or sweep by default.
        fail_if: thresholds, such as `leaks` or `psnr>20`.
        review_by: the day by which it has to be examined again.
        trust: import code that a run folder names.

    Raises:
        ConfigError: there is neither a run nor a sweep, a threshold names nothing that it has or is always or never
            reached, or `review_by` is past.
        RunError: a table is damaged, or the folder cannot be written.
    """
    if review_by is not None and review_by < datetime.date.today():
        raise ConfigError(f"review_by: {review_by} is past, so the dossier would not be valid; name a later day")
    if isinstance(fail_if, str):
        raise ConfigError(f"fail_if: expected a list of thresholds, got a text; write ['{fail_if}']")
    folder = Path(path)
    is_sweep = (folder / FILE).is_file()
    if not is_sweep:
        folder = _check_run(folder)
    target = folder if out is None else Path(out)
    options = DossierOptions(folder=target, written=datetime.date.today(), review_by=review_by, trust=trust)
    collect = collect_sweep_dossier if is_sweep else collect_run_dossier
    dossier = collect(folder, options)
    thresholds = judge_thresholds(dossier, fail_if)
    dossier = dossier.model_copy(update={"thresholds": thresholds})
    if target.resolve() == folder.resolve() and not is_sweep:
        with OpenRun(folder).hold_lock():
            page = write_dossier_files(dossier, target)
    else:
        page = write_dossier_files(dossier, target)
    return WrittenDossier(page=page, contents=dossier)


@serialize_calls
def verify_dossier(
    path: str | Path,
    run: str | Path | None = None,
    *,
    attack_files: Sequence[str | Path] = (),
    trust: bool = False,
) -> Verification:
    """Compute every number of a dossier again from its run or sweep, and compare; nothing is written.

    Args:
        path: `dossier.json`, its folder, or one in which a Flower app recorded one run.
        run: the folder of the run or sweep, where that was moved.
        attack_files: with which a run was attacked besides its own file; they say where the truth is.
        trust: import code that a run folder names.

    Raises:
        ConfigError: there is no dossier, or no run where it says.
        RunError: the dossier was altered, or a table is damaged.
    """
    if isinstance(attack_files, str | Path):
        raise ConfigError(f"attack_files: expected a list of files, got one; write ['{attack_files}']")

    def open_audits(folder: OpenRun) -> list[Audit]:
        audits = []
        for file in attack_files:
            adversary = read_adversary(folder, Path(file), trust=trust)
            audits.append(make_audit(folder, adversary.spec, adversary.beside, trust=trust))
        return audits

    return verify_dossier_file(
        _find_dossier(Path(path)),
        None if run is None else find_run(Path(run)),
        open_audits=open_audits if attack_files else None,
        trust=trust,
    )


def _find_dossier(path: Path) -> Path:
    """Return the only run with a dossier in a folder where a Flower app records its runs; any other path itself."""
    if not path.is_dir() or (path / JSON_FILE).is_file():
        return path
    return find_run(path)


def _check_run(folder: Path) -> Path:
    """Return the folder of a run, or of the only one that a Flower app recorded there."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name that of a run or a sweep")
    run = OpenRun(find_run(folder))
    run.check_kinds()
    if not run.experiment.is_file() and not run.transcript.is_dir():
        raise ConfigError(
            f"{folder}: holds neither a run nor a sweep of fedsim; expected experiment.toml, transcript/ or {FILE} in "
            "it"
        )
    return run.path
