"""Commands `fedsim dossier` and `fedsim verify`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsim.cli.options import DataDir, Key, Trust, console, finish

if TYPE_CHECKING:
    from fedsim.api.dossiers import WrittenDossier
    from fedsim.dossier.verification import Verification

_MAX_SHOWN = 20
"""Most values that are shown of those that differ, and most reasons."""


def dossier(
    folder: Annotated[Path, typer.Argument(metavar="RUN|SWEEP", help="A run folder, or the folder of a sweep.")],
    out: Annotated[Path | None, typer.Option(help="The folder for the dossier; that of the run by default.")] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="THRESHOLD", help="Exit with code 1 if this is true: leaks, psnr>20, ..."),
    ] = None,
    review_by: Annotated[
        datetime.datetime | None,
        typer.Option("--review-by", formats=["%Y-%m-%d"], metavar="DATE", help="The date of the next review."),
    ] = None,
    data_dir: DataDir = None,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Write a dossier for a privacy officer: who sees what, what was attacked, what leaked, what is proved."""
    from fedsim.api.dossiers import write_dossier

    day = review_by.date() if review_by else None
    written = write_dossier(folder, out, fail_if=fail_if or [], review_by=day, trust=trust)
    _show_dossier(written)
    if not written.contents.evidence.is_intact:
        finish([f"{folder}: files of the run were changed, so the dossier is not reliable"])
    finish([f"--fail-if '{item.threshold}': {item.outcome}: {item.why}" for item in written.failed_thresholds])


def _show_dossier(written: WrittenDossier) -> None:
    """Print the verdict, the answer and where the dossier is."""
    contents = written.contents
    lines = [f"verdict: {contents.verdict}", *contents.answer, *contents.notes, f"dossier: {written.page}"]
    console.print(*lines, sep="\n", markup=False, highlight=False, soft_wrap=True)


def verify(
    dossier: Annotated[Path, typer.Argument(metavar="DOSSIER", help="dossier.json, its folder, or a recording.")],
    run: Annotated[Path | None, typer.Option(metavar="FOLDER", help="The run or sweep, if it was moved.")] = None,
    attack: Annotated[
        list[Path] | None,
        typer.Option("--attack", metavar="FILE", help="An attack file that the run was attacked with."),
    ] = None,
    data_dir: DataDir = None,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Verify a dossier: recompute every number from its run; exit code 1 if one differs."""
    from fedsim.api.dossiers import verify_dossier

    verification = verify_dossier(dossier, run, attack_files=attack or [], trust=trust)
    failures = []
    if differences := verification.differences:
        first = differences[0]
        more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
        failures.append(f"differs from the run: {first.where} is stated as {first.stated}, but is {first.found}{more}")
    failures += verification.faults
    headline = "; ".join(failures) or "all recomputed values are equal"
    console.print(f"result: {headline}", markup=False, highlight=False, soft_wrap=True)
    _show_verification(verification)
    finish([f"{dossier}: {failure}" for failure in failures])


def _show_verification(verification: Verification) -> None:
    """Print what is equal, what differs and what cannot be recomputed."""
    lines = [f"{name}: {counts}" for name, counts in verification.counts.items()]
    for value in verification.differences[:_MAX_SHOWN]:
        lines.append(f"differs: {value.where}: stated {value.stated}, now {value.found}")
    reasons = dict.fromkeys(value.why for value in verification.values if value.why)
    lines += [f"cannot be recomputed: {why}" for why in list(reasons)[:_MAX_SHOWN]]
    console.print(*lines, *verification.remarks, sep="\n", markup=False, highlight=False, soft_wrap=True)
