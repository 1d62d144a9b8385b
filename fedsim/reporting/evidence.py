"""What a run folder holds, read for the report: the recording, the findings, and the truth beside them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedsim import metrics
from fedsim.auditing.audit import SCORES, Audit, snapshots_psnr
from fedsim.auditing.variants import columns, told_apart
from fedsim.errors import FedsimError, RunError, TrustError, one_line, what_it_said
from fedsim.evaluation import text_metrics
from fedsim.evaluation.scoring import Truth, claimed_data
from fedsim.experiments.build import Experiment
from fedsim.experiments.run_folder import RunFolder, read_rows, write_bytes
from fedsim.findings import Finding, Reconstruction, Representatives, Texts, load_claim, read_about
from fedsim.plugins import registry
from fedsim.progress import tracked
from fedsim.recording.transcript import Header, Transcript
from fedsim.reporting import figures
from fedsim.reporting.summary import Kind

log = logging.getLogger(__name__)

IMAGES = 16
"""Most images shown of a finding."""
TEXTS, WORDS = 8, 300
"""Most texts shown of a finding, and most words where it is a set of them."""
_VERIFIED = 10**9
"""Bytes; a larger recording is not read whole for a report."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """One claimed word.

    `right` says whether it stands in its place, of a set of words whether it is there; true where nobody knows.
    """

    text: str
    right: bool


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A true text, empty where nobody knows it, and the words of the claimed one assigned to it; or sets of words."""

    true: str
    claimed: Sequence[Word]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the page needs of one finding; `known` says whether the truth stands beside it.

    `images` counts the examples, of which `picture` or `texts` shows the first. Where the finding is a `bag`, it tells
    which words there are and no texts: `texts` is one pair of sets, and `images` counts the claimed words. Where it is
    `typical`, it tells what classes look like.
    """

    about: Mapping[str, Any]
    curves: figures.Curves
    picture: bytes
    images: int
    known: bool
    texts: Sequence[Pair] = ()
    bag: bool = False
    typical: bool = False

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


def own_audit(folder: RunFolder, notes: list[str], *, trust: bool = False) -> Audit | None:
    """The audit that the run's own experiment describes; None for a recording made elsewhere.

    Raises:
        TrustError: the experiment names code of its own, and is not trusted.
    """
    try:
        config = folder.read_experiment(trust=trust)
    except TrustError:
        raise
    except FedsimError as error:
        notes.append(f"The experiment file is not used: {error}.")
        return None
    if config is None:
        return None
    return Audit(folder=folder, spec=config, experiment=Experiment(config), beside=folder.path, trust=trust)


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


def read_findings(
    folder: RunFolder, audit: Audit | None, notes: list[str], failures: list[str], *, trust: bool = False
) -> list[Found]:
    """Every readable finding; those about the same update stand together.

    Args:
        notes: gets a sentence for each that cannot be read or shown, and for each truth that is not known.
        failures: gets those of the former.
    """
    found = []
    paths = sorted(folder.findings.glob("*/*.safetensors"))
    for path in tracked(paths, "drawing", len(paths)):
        who = path.name
        try:
            finding, about = load_claim(path)
            who = f"{about['attack']}, round {about['round']}, client {about['victim']}"
            if isinstance(finding, Texts):
                names = audit.experiment.dataset.tokens if audit and audit.experiment else ()
                read = _read_words if _main_metric(about, audit, trust) == "words_found" else _read
                found.append(read(finding, about, _truth(finding, about, audit, notes), names))
            elif isinstance(finding, Reconstruction):
                truth = _truth(finding, about, audit, notes)
                found.append(_look_at(finding, about, path.with_suffix(".png"), truth))
            else:  # a model, or what is inferred: there is nothing to see but the curves
                found.append(Found(about=_needed(about), curves=_curves(finding), picture=b"", images=0, known=False))
        except OSError as error:
            raise RunError(f"{path.parent}: cannot be written ({error.strerror}); make room and try again") from error
        except Exception as error:  # whatever a stranger's finding does to those who draw it
            told = isinstance(error, FedsimError)
            failures.append(f"{who} is left out: {error if told else one_line(what_it_said(error))}")
            notes.append(f"{failures[-1]}.")
            log.error("%s", failures[-1], exc_info=None if told else error)
    titles = called(folder)
    apart = [replace(item, about={**item.about, "attack": titles[_made(item.about)]}) for item in found]
    return sorted(apart, key=_place)


def most_alike(finding: Representatives, truth: Truth) -> Truth | None:
    """For each claimed image the victim's of that class with the least squared error; None where it lacks a class."""
    own = [truth.data[truth.labels == label] for label in finding.labels]
    if not all(map(len, own)) or truth.data.shape[1:] != finding.data.shape[1:]:
        return None
    pairs = zip(own, finding.data, strict=True)
    nearest = [images[(images - claimed).square().flatten(1).sum(1).argmin()] for images, claimed in pairs]
    return Truth(data=torch.stack(nearest), labels=finding.labels)


def _place(item: Found) -> list[list[int]]:
    """By number, not by letter: round 2 before 10, and `2-5`, an attack on several rounds, in between."""
    return [[int(part) for part in str(item.about[key]).split("-")] for key in ("round", "victim", "repeat")]


def _truth(
    finding: Reconstruction | Texts, about: Mapping[str, Any], audit: Audit | None, notes: list[str]
) -> Truth | None:
    why = ""
    try:
        truth = audit.truth_about(finding, about) if audit else None
    except (FedsimError, IndexError) as error:
        truth, why = None, f"The truth about client {about['victim']} is not known: {error}."
    if truth is not None and isinstance(finding, Representatives):
        truth = most_alike(finding, truth)
    claimed = claimed_data(finding)
    if truth is not None and (truth.data.shape[1:], truth.texts) != (claimed.shape[1:], isinstance(finding, Texts)):
        shapes = f"{tuple(truth.data.shape[1:])}, but {about['attack']} claims {tuple(claimed.shape[1:])}"
        kinds = "; they are not compared" if truth.texts == isinstance(finding, Texts) else ", of another kind"
        truth, why = None, f"Client {about['victim']} held examples of shape {shapes}{kinds}."
    if why and why not in notes:
        notes.append(why)
    return truth


def _read(finding: Texts, about: Mapping[str, Any], truth: Truth | None, names: Sequence[str]) -> Found:
    """A finding of texts."""
    word = partial(_word, names)
    pairs = []
    if truth is None:
        for text in finding.tokens[:TEXTS].tolist():
            pairs.append(Pair(true="", claimed=[Word(text=word(token), right=True) for token in text]))
    else:
        claimed = text_metrics.paired_texts(finding.tokens, truth.data, truth.padding)
        for text, own in zip(claimed[:TEXTS].tolist(), truth.data[:TEXTS].tolist(), strict=True):
            words = [Word(text=word(c), right=c == t) for c, t in zip(text, own, strict=True)]
            real = [token for token in own if token != truth.padding]
            pairs.append(Pair(true=" ".join(map(word, real)), claimed=words))
    return Found(
        about=_needed(about),
        curves=_curves(finding),
        picture=b"",
        images=len(truth.data if truth else finding.tokens),
        known=truth is not None,
        texts=pairs,
    )


def _read_words(finding: Texts, about: Mapping[str, Any], truth: Truth | None, names: Sequence[str]) -> Found:
    """A finding of texts that tells only which words occur: each once, in the order in which they are claimed."""
    padding = truth.padding if truth else None
    claimed = list(dict.fromkeys(token for token in finding.tokens.flatten().tolist() if token != padding))
    true = list(dict.fromkeys(token for token in truth.data.flatten().tolist() if token != padding)) if truth else []
    held = set(true)
    words = [Word(text=_word(names, token), right=truth is None or token in held) for token in claimed[:WORDS]]
    return Found(
        about=_needed(about),
        curves=_curves(finding),
        picture=b"",
        images=len(claimed),
        known=truth is not None,
        texts=[Pair(true=" ".join(_word(names, token) for token in true[:WORDS]), claimed=words)],
        bag=True,
    )


def _word(names: Sequence[str], token: int) -> str:
    """What a token is called; one without a name is shown as its number, and where none is claimed a dash."""
    if token == text_metrics.NOTHING:
        return "–"
    return names[token] if token < len(names) else str(token)


def _main_metric(about: Mapping[str, Any], audit: Audit | None, trust: bool) -> str:
    return str(getattr(_attack_class(str(about["plugin"]), audit, trust), "main_metric", ""))


def _curves(finding: Finding) -> dict[str, Any]:
    """In the range of float32, so that a mean of curves is in that of float64; what is beyond is not drawn."""
    return {name: (np.arange(len(y), dtype=float), y.float().double().numpy()) for name, y in finding.trace.items()}


def _needed(about: Mapping[str, Any]) -> dict[str, Any]:
    needed = {key: about[key] for key in ("attack", "plugin", "round", "victim", "repeat", "granted")}
    own = {"title": about["attack"], "settings": about.get("settings") or {}, "changed": about.get("changed") or {}}
    made = {key: about.get(key) for key in ("seconds", "command", "warnings", "variant")}
    return needed | own | made


def _look_at(finding: Reconstruction, about: Mapping[str, Any], png: Path, truth: Truth | None) -> Found:
    curves = _curves(finding)
    images, typical = finding.data.ndim == 4, isinstance(finding, Representatives)
    if images and truth and finding.snapshots is not None and finding.snapshot_iterations is not None:
        curves["psnr"] = finding.snapshot_iterations.double().numpy(), np.array(snapshots_psnr(finding, truth))
    picture = b""
    if images and len(finding.data):
        if truth:
            claimed = (finding.data if typical else metrics.paired(finding.data, truth.data))[:IMAGES]
            true = truth.data[:IMAGES]
            picture = figures.image_sheet(claimed, true, metrics.psnr(claimed, true).tolist())
        else:
            picture = figures.image_sheet(finding.data[:IMAGES], None, [])
        write_bytes(png, picture)
    return Found(
        about=_needed(about),
        curves=curves,
        picture=picture,
        images=len(truth.data if truth else finding.data),
        known=truth is not None,
        typical=typical,
    )


def attack_classes(audit: Audit | None, found: Sequence[Found], *, trust: bool = False) -> dict[str, Any]:
    """Title to class, None where nobody knows it; the order fixes the colours."""
    made = {item.about["title"] for item in found}
    names = {table.title: table.name for table in audit.spec.attack if table.title not in made} if audit else {}
    names |= {str(item.about["attack"]): str(item.about["plugin"]) for item in found}
    return {title: _attack_class(name, audit, trust) for title, name in names.items()}


def scored(folder: RunFolder) -> list[dict[str, str]]:
    """The rows of `scores.csv`.

    Raises:
        RunError: they are not such as an audit writes.
    """
    return read_rows(folder.scores, SCORES, ("value", "floor", "nearest_public", "ceiling", "examples"))


def called(folder: RunFolder) -> dict[tuple[str, str], str]:
    """What the attack of each title and variant is called, of all that are scored and all that found something.

    Tables, pictures and curves call them so: a finding may be drawn and not be scored, or its score outlive it.
    """
    return told_apart([*scored(folder), *({**about, **columns(about)} for about in _abouts(folder))])


def kinds(folder: RunFolder, audit: Audit | None, *, trust: bool = False) -> dict[tuple[str, str], Kind]:
    """By the title and the variant of each attack, what reading its scores takes."""
    found = {made: Kind(name=name) for made, name in called(folder).items()}
    for about in _abouts(folder):
        made, source = _made(about), str((about.get("settings") or {}).get("source", ""))
        found[made] = replace(found[made], main_metric=_main_metric(about, audit, trust), source=source)
    return found


def _abouts(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """What each readable finding says of itself."""
    for path in sorted(folder.findings.rglob("*.safetensors")):
        with suppress(FedsimError):  # it is not scored either
            yield read_about(path)


def _made(about: Mapping[str, Any]) -> tuple[str, str]:
    return str(about["attack"]), str(about.get("variant") or "")


def _attack_class(name: str, audit: Audit | None, trust: bool) -> Any:
    """None where nobody knows it, or where a finding in the folder names code that nobody trusts."""
    trusted = trust or (audit is not None and (audit.trust or name in [table.name for table in audit.spec.attack]))
    if ":" in name and not trusted:
        log.warning("the attack '%s' is code that a finding names, and is not run unasked; pass --trust", name)
        return None
    try:
        return registry.load("attacks", name)
    except FedsimError as error:
        log.warning("%s", error)
        return None
