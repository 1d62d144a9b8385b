"""Checks of panels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tomli_w
import torch
from markupsafe import Markup

from fedsim.audit.finding_files import save_finding
from fedsim.audit.scores import SCORE_COLUMNS
from fedsim.audit.variants import variant_columns
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, ContractViolation, DoesNotApply, expect
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.findings import Finding, Reconstruction, Texts
from fedsim.recording.header import RECORDING_FOLDER
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import Update
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.sections import check_panel, render_section
from fedsim.training.models.mlp import Mlp


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


HOSTILE = '"><img src=x onerror="hostile()">'
"""Text that is in every name of the run with findings; on a page that does not escape it, it is run."""
_CLIENTS, _ROUNDS = 5, 2
_EXPERIMENT = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 3},
    "model": {"name": "mlp", "hidden": [12]},
    "training": {"local_epochs": 1, "batch_size": 3},
    "federation": {"clients": _CLIENTS, "rounds": _ROUNDS},
    "adversary": {"when": "never"},
}


def write_runs(folder: Path) -> dict[str, Path]:
    """Write the run folders into `folder`; return them by what they hold."""
    # A run of fedsim with what attacks found.
    attacked = folder / f"run of {HOSTILE}"
    _write_experiment(attacked)
    _record_rounds(attacked)
    _write_findings(attacked)
    # A recording made elsewhere, and an experiment that was never run.
    recording, experiment = folder / "recording", folder / "experiment"
    _record_rounds(recording)
    _write_experiment(experiment)
    return {
        "a run with findings": attacked,
        "a recording without an experiment": recording,
        "an experiment of which nothing is recorded": experiment,
    }


def _write_experiment(run: Path) -> None:
    run.mkdir()
    (run / "experiment.toml").write_text(tomli_w.dumps(_EXPERIMENT), encoding="utf-8")


def _record_rounds(run: Path) -> None:
    """Record rounds of weights, in which one client fails."""
    with seed_globals("contract", "model"):
        network = Mlp(hidden=(12,)).build(Task((1, 8, 8), 10))
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    recorder = Recorder(run / RECORDING_FOLDER)
    for number in range(1, _ROUNDS + 1):
        updates = []
        for client in range(_CLIENTS):
            after = {name: (1 - 0.01 * client) * tensor for name, tensor in before.items()}
            payload = Payload.from_dense(after, "weights")
            updates.append(Update(round=number, client=client, before=before, payload=payload, num_examples=3))
        recorder.write(number, updates, failures={_CLIENTS: HOSTILE})


def _write_findings(run: Path) -> None:
    """Write claimed images and texts, a score of each, and what was measured by round."""
    images = torch.rand((3, 1, 8, 8), generator=generator("images"))
    labels = torch.tensor([1, 4, 4])
    curve = {"objective": torch.tensor([2.0, 1.0])}
    scores = []
    for victim in range(_CLIENTS):
        finding = Reconstruction(data=images, labels=labels, trace=curve)
        about = _save_finding(run, f"images of {HOSTILE}", victim, finding)
        scores.append(_score(about, 10.0 + victim))
    texts = Texts(tokens=torch.tensor([[1, 2], [3, 4]]), labels=labels[:2], trace=curve)
    scores.append(_score(_save_finding(run, f"texts of {HOSTILE}", 0, texts), 10.0))
    folder = OpenRun(run)
    folder.write_table(folder.scores, SCORE_COLUMNS, scores)
    epsilon = f"epsilon of {HOSTILE}"
    measured = []
    for number in range(1, _ROUNDS + 1):
        measured.append({"round": number, "client": "server", "accuracy": 0.5, "loss": 1.0, epsilon: number})
    folder.write_table(folder.metrics, ("round", "client", "accuracy", "loss", epsilon), measured)


def _save_finding(run: Path, attack: str, victim: int, finding: Finding) -> Mapping[str, Any]:
    """Save a finding; return its metadata."""
    about = {
        "attack": attack, "plugin": "dlg", "round": "1", "rounds": [1], "first_round": 1, "members": [],
        "victim": victim, "repeat": 0, "settings": {"source": HOSTILE}, "changed": {"source": HOSTILE}, "granted": [],
        "partial_records": "", "fingerprint": "", "variant": "0a1b", "command": f"fedsim attack {HOSTILE}",
        "code": None, "model_code": None, "knowledge": {}, "app": {}, "warnings": [HOSTILE], "seconds": 1.0,
    }  # fmt: skip
    save_finding(finding, run / "findings" / finding.kind / f"round-1-client-{victim}-repeat-0.safetensors", about)
    return about


def _score(about: Mapping[str, Any], value: float) -> dict[str, Any]:
    """Return a row of `scores.csv`."""
    row: dict[str, Any] = dict.fromkeys(SCORE_COLUMNS, "") | variant_columns(about)
    for name in ("attack", "victim", "round", "repeat"):
        row[name] = about[name]
    row |= {"metric": "psnr", "value": value, "floor": 9.0, "floor_guess": HOSTILE, "ceiling": "inf"}
    return row | {"higher_is_better": True, "examples": 3, "seed": 0, "nearest_public": 8.0}
