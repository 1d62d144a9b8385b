"""Checks of panels."""

from __future__ import annotations

import dataclasses
from contextlib import chdir
from pathlib import Path
from tempfile import mkdtemp

from markupsafe import Markup

from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply, expect
from fedsim.contract.reported_runs import HOSTILE, write_runs
from fedsim.federation.open_run import OpenRun
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.sections import check_panel, render_section


def is_a_panel(subject: CheckedPlugin) -> None:
    """It derives from fedsim.Panel and has no settings."""
    panel = check_panel(subject.build())
    name = type(panel).__name__
    expect(not dataclasses.fields(panel), f"{name} has settings, which no file could set; remove them")


def shows_something_or_nothing(subject: CheckedPlugin) -> None:
    """It returns text or nothing for a run with findings, a bare recording, and where nothing is recorded."""
    for description, run in _read_runs(subject).items():
        try:
            render_section(subject.name, subject.build(), run)
        except Exception as error:
            raise ContractViolation(f"of {description} it raises {type(error).__name__}: {error}") from error


def escapes_text(subject: CheckedPlugin) -> None:
    """It escapes what names and texts of a run say."""
    content = ""
    for _, run in _read_runs(subject).items():
        section = render_section(subject.name, subject.build(), run)
        if section is not None and isinstance(section.content, Markup):
            content += section.content
    if "hostile()" not in content:
        raise DoesNotApply("its HTML has no text of the tiny runs")
    remedy = "put it in by markupsafe.Markup(...).format or a template that escapes"
    expect('onerror="hostile()' not in content, f"it shows {HOSTILE} of a run as it is; {remedy}")


def returns_the_same_bytes(subject: CheckedPlugin) -> None:
    """It returns the same bytes of the same run, and draws from no global generator."""
    for _, run in _read_runs(subject).items():
        with common.expect_untouched_generators():
            content = subject.build().render(run)
        with common.seed_global_generators(1):
            repeated = subject.build().render(run)
            of_run_read_anew = subject.build().render(_read_run(run.folder.path))
        expect(content == repeated, "a second time it returns something else")
        expect(content == of_run_read_anew, "of the same run, read anew, it returns something else")


def leaves_the_run_as_it_is(subject: CheckedPlugin) -> None:
    """It changes nothing of a run that the panels after it read; it may add notes and failures."""
    for description, run in _read_runs(subject).items():
        read_anew = _read_run(run.folder.path)
        texts_before = {name: repr(getattr(read_anew, name)) for name in _SHARED}
        subject.build().render(read_anew)
        for name, text in texts_before.items():
            is_same = repr(getattr(read_anew, name)) == text
            expect(is_same, f"it changes the {name} of {description}, which the panels after it read; copy them first")


_SHARED = ("scores", "metrics", "example_scores", "readings", "merged_readings", "attack_traits")
"""What most panels read of a run."""


def writes_no_files(subject: CheckedPlugin) -> None:
    """It writes no files, neither into the run folder nor into the working folder."""
    empty_folder = Path(mkdtemp(dir=subject.folder))
    for _, run in _read_runs(subject).items():
        files_before = _list_files(run.folder.path)
        with chdir(empty_folder):
            subject.build().render(run)
        expect(_list_files(run.folder.path) == files_before, "it writes into the run folder")
        expect(not _list_files(empty_folder), "it writes into the working folder")


CHECKS = (
    common.is_made,
    common.survives_copying,
    common.is_documented,
    is_a_panel,
    shows_something_or_nothing,
    escapes_text,
    returns_the_same_bytes,
    leaves_the_run_as_it_is,
    writes_no_files,
)


def _read_runs(subject: CheckedPlugin) -> dict[str, ReportedRun]:
    """Return the tiny runs by what they hold, read once for all checks."""
    if "runs" not in subject.cache:
        folders = write_runs(Path(mkdtemp(dir=subject.folder)))
        subject.cache["runs"] = {description: _read_run(folder) for description, folder in folders.items()}
    runs: dict[str, ReportedRun] = subject.cache["runs"]
    return runs


def _read_run(folder: Path) -> ReportedRun:
    """Return a run of which everything is read, so that reading it writes no further file."""
    run = open_reported_run(OpenRun(folder))
    run.read_contents()
    return run


def _list_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of each file."""
    files = {}
    for path in folder.rglob("*"):
        status = path.stat()
        files[path] = status.st_size, status.st_mtime_ns
    return files
