"""What a run folder holds, read for the report: the recording, the findings, and the truth beside them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsim import figures, metrics, registry
from fedsim.audit import Audit, first_round, snapshots_psnr
from fedsim.errors import FedsimError, RunError
from fedsim.experiment import Experiment
from fedsim.findings import Finding, load_finding
from fedsim.run_folder import RunFolder
from fedsim.scoring import Truth
from fedsim.transcript import Header, Transcript

log = logging.getLogger(__name__)

IMAGES = 16
"""Most images shown of a finding."""
_VERIFIED = 10**9
"""Bytes; a larger recording is not read whole for a report."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the page needs of one finding; `known` says whether the truth stands beside it."""

    about: Mapping[str, Any]
    curves: figures.Curves
    picture: bytes
    images: int
    known: bool

    @property
    def width(self) -> int:
        """CSS pixels across the picture, out of the PNG's header."""
        return int.from_bytes(self.picture[16:20]) // 2


@dataclass(kw_only=True)
class Recording:
    """What the transcript holds; `damaged` maps rounds to reasons, `values` counts the numbers in one state."""

    size: int = 0
    headers: list[Header] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    hash: str = ""
    values: int = 0


def own_audit(folder: RunFolder, notes: list[str]) -> Audit | None:
    """The audit that the run's own experiment describes; None for a recording made elsewhere."""
    try:
        config = folder.read_experiment()
    except FedsimError as error:
        notes.append(f"The experiment file is not used: {error}.")
        return None
    return Audit(folder=folder, spec=config, experiment=Experiment(config), beside=folder.path) if config else None


def read_recording(folder: RunFolder, notes: list[str]) -> Recording:
    """Everything in the transcript but its tensors, which are verified where they are not too many."""
    recording = Recording()
    try:
        transcript = Transcript(folder.transcript)
    except FedsimError as error:
        notes.append(f"Nothing is recorded: {error}.")
        return recording
    recording.size = sum(file.stat().st_size for file in transcript.folder.glob("round-*.safetensors"))
    whole = recording.size <= _VERIFIED
    for number in transcript.rounds:
        alone = transcript.only([number])
        try:
            if whole:
                alone.hash()
            recording.headers.append(alone.header(number))
        except FedsimError as error:
            recording.damaged[number] = str(error)
    if recording.headers and whole:
        intact = Transcript(transcript.folder, [header.round for header in recording.headers])
        recording.hash = intact.hash()
        update = next(intact.updates(), None)
        recording.values = sum(tensor.numel() for tensor in update.before.values()) if update else 0
    return recording


def read_findings(folder: RunFolder, audit: Audit | None, notes: list[str]) -> list[Found]:
    """Every readable finding; those about the same update stand together."""
    found = []
    for path in sorted(folder.findings.glob("*/*.safetensors")):
        try:
            finding, about = load_finding(path)
            found.append(_look_at(finding, about, path.with_suffix(".png"), _truth(finding, about, audit, notes)))
        except (FedsimError, KeyError) as error:
            notes.append(f"{path.name} is left out: {error}.")
        except OSError as error:
            raise RunError(f"{path.parent}: cannot be written ({error.strerror}); make room and try again") from error
    return sorted(found, key=_place)


def _place(item: Found) -> list[list[int]]:
    """By number, not by letter: round 2 before 10, and `2-5`, an attack on several rounds, in between."""
    return [[int(part) for part in str(item.about[key]).split("-")] for key in ("round", "victim", "repeat")]


def _truth(finding: Finding, about: Mapping[str, Any], audit: Audit | None, notes: list[str]) -> Truth | None:
    why = ""
    try:
        truth = audit.truth(about["victim"], first_round(about)) if audit else None
    except (FedsimError, IndexError) as error:
        truth, why = None, f"The truth about client {about['victim']} is not known: {error}."
    if truth is not None and truth.data.shape != finding.data.shape:
        shapes = f"{tuple(truth.data.shape)}, but {about['attack']} claims {tuple(finding.data.shape)}"
        truth, why = None, f"Client {about['victim']} held data of shape {shapes}; they are not compared."
    if why and why not in notes:
        notes.append(why)
    return truth


def _look_at(finding: Finding, about: Mapping[str, Any], png: Path, truth: Truth | None) -> Found:
    curves = {name: (np.arange(len(y), dtype=float), y.double().numpy()) for name, y in finding.trace.items()}
    images = finding.data.ndim == 4
    if images and truth and finding.snapshots is not None and finding.snapshot_iterations is not None:
        curves["psnr"] = finding.snapshot_iterations.double().numpy(), np.array(snapshots_psnr(finding, truth))
    picture = b""
    if images and len(finding.data):
        if truth:
            claimed = finding.data[metrics.match(finding.data, truth.data)][:IMAGES]
            true = truth.data[:IMAGES]
            picture = figures.image_sheet(claimed, true, metrics.psnr(claimed, true).tolist())
        else:
            picture = figures.image_sheet(finding.data[:IMAGES], None, [])
        png.write_bytes(picture)
    needed = {key: about[key] for key in ("attack", "plugin", "round", "victim", "repeat", "granted")}
    return Found(
        about=needed | {"seconds": about.get("seconds")},
        curves=curves,
        picture=picture,
        images=len(finding.data),
        known=truth is not None,
    )


def attack_classes(audit: Audit | None, found: Sequence[Found]) -> dict[str, Any]:
    """Title to class, None where nobody knows it; the order fixes the colours."""
    names = {table.title: table.name for table in audit.spec.attack} if audit else {}
    names |= {str(item.about["attack"]): str(item.about["plugin"]) for item in found}
    classes: dict[str, Any] = {}
    for title, name in names.items():
        try:
            classes[title] = registry.load("attacks", name)
        except FedsimError as error:
            log.warning("%s", error)
            classes[title] = None
    return classes
