"""What a run folder holds, read for the report: the recording, the findings, and the truth beside them."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.auditing.audit import Audit
from fedsim.auditing.scores import SCORES
from fedsim.auditing.variants import columns, told_apart
from fedsim.datasets import Dataset
from fedsim.errors import FedsimError, RunError, TrustError, one_line, what_it_said
from fedsim.evaluation.examples import IMAGES
from fedsim.evaluation.kind import Pair, Roc, Sheet, Shown, evaluator_of, guessing
from fedsim.evaluation.score import Public
from fedsim.evaluation.scoring import claimed_data
from fedsim.evaluation.truth import Truth
from fedsim.experiments.build import Experiment
from fedsim.experiments.run_folder import RunFolder, read_rows
from fedsim.files import write_bytes
from fedsim.findings import Finding, Reconstruction, Texts
from fedsim.plugins import registry
from fedsim.progress import tracked
from fedsim.recording.finding_files import load_claim, read_about
from fedsim.recording.header import Header, hash_state
from fedsim.recording.transcript import Transcript
from fedsim.reporting import figures, image_scores
from fedsim.reporting.curves import Curves
from fedsim.reporting.image_scores import Key
from fedsim.reporting.pictures import Gallery, as_bytes, png_of
from fedsim.reporting.records import Records, records
from fedsim.reporting.summary import Kind

log = logging.getLogger(__name__)

_NEEDED = (
    "attack", "plugin", "round", "victim", "repeat", "granted", "settings", "changed", "seconds", "command", "warnings",
    "variant", "members", "rounds", "partial_records",
)  # fmt: skip
"""What the page needs of what a finding says of itself."""
_WRITTEN = ("knowledge", "app")
"""What else it needs of that, which findings of an earlier fedsim do not say."""
_VERIFIED = 10**9
"""Bytes; a larger recording is not read whole for a report."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the page needs of one finding; `known` says whether the truth is shown beside it.

    `images` counts the examples, of which `texts` shows the first. Where the finding is a `bag`, it tells which words
    there are and no texts: `texts` is one pair of sets, and `images` counts the claimed words. `pictured` says whether
    they are images; a `Gallery` has these. `rows` shows the first rows of a table. `cut` are the images that stand for
    all of an attack, claimed ones beside true ones as PNGs, by their places, and `told` the texts or records that do.
    `roc` is the curve of an attack that tells members from others.
    `hash` is the SHA-256 of all that is claimed, with its curves.
    """

    about: Mapping[str, Any]
    hash: str
    curves: Curves
    images: int
    known: bool
    texts: Sequence[Pair] = ()
    bag: bool = False
    pictured: bool = False
    rows: Records | None = None
    cut: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict)
    told: Mapping[int, Pair] = field(default_factory=dict)
    roc: Roc | None = None


@dataclass(kw_only=True)
class Recording:
    """What the transcript holds; `damaged` maps rounds to reasons, `values` counts the numbers in one state.

    `sent` are the bytes of the arrays in each readable round: of updates, or of sums over groups.
    """

    size: int = 0
    sent: list[int] = field(default_factory=list)
    headers: list[Header] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    hash: str = ""
    values: int = 0

    @property
    def of_sums(self) -> bool:
        """Whether it holds sums over groups, and no update of a single client."""
        return any(reply.members for header in self.headers for reply in header.replies)


def own_audit(
    folder: RunFolder, notes: list[str], failures: list[str] | None = None, *, trust: bool = False
) -> Audit | None:
    """The audit that the run's own experiment describes; None for a recording made elsewhere.

    Args:
        folder: of the run.
        notes: gets a sentence where the experiment cannot be used.
        failures: gets the error itself.
        trust: import code that the experiment names.

    Raises:
        TrustError: the experiment names code of its own, and is not trusted.
    """
    try:
        config = folder.read_experiment(trust=trust)
    except TrustError:
        raise
    except FedsimError as error:
        notes.append(f"The experiment file is not used: {error}.")
        if failures is not None:
            failures.append(str(error))
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
            recording.sent.append(sum(alone.sizes(number).values()))
            recording.headers.append(alone.header(number))
        except FedsimError as error:
            recording.damaged[number] = str(error)
    if recording.headers and whole:
        intact = Transcript(transcript.folder, [header.round for header in recording.headers])
        recording.hash = intact.hash()
        first = next(((n, client) for n in intact.rounds for client in intact.clients(n)), None)
        before = intact.recorded(*first).before if first else {}
        recording.values = sum(tensor.numel() for tensor in before.values())
    return recording


def read_findings(
    folder: RunFolder,
    audit: Audit | None,
    notes: list[str],
    failures: list[str],
    *,
    gallery: Gallery | None = None,
    scores: image_scores.Values | None = None,
    cut: Mapping[Key, Collection[int]] | None = None,
    trust: bool = False,
) -> list[Found]:
    """Every readable finding; those about the same update stand together.

    Args:
        notes: gets a sentence for each that cannot be read or shown, and for each truth that is not known.
        failures: gets those of the former.
        gallery: gets their images.
        scores: of single examples.
        cut: the places of images that are kept in `Found.cut`, by finding.
    """
    found = []
    titles = called(folder)
    viewer = _Viewer(
        audit,
        notes,
        titles=titles,
        gallery=gallery or Gallery(),
        guesses=_guesses(folder),
        scores=scores or {},
        cut=cut or {},
    )
    paths = sorted(folder.findings.glob("*/*.safetensors"), key=_place)
    for path in tracked(paths, "drawing", len(paths)):
        who = path.name
        try:
            finding, about = load_claim(path)
            who = f"{about['attack']}, round {about['round']}, client {about['victim']}"
            metric = _main_metric(about, audit, trust)
            found.append(_look_at(finding, about, path.with_suffix(".png"), viewer, metric))
        except OSError as error:
            raise RunError(f"{path.parent}: cannot be written ({error.strerror}); make room and try again") from error
        except Exception as error:  # whatever a stranger's finding does to those who draw it
            told = isinstance(error, FedsimError)
            failures.append(f"{who} is left out: {error if told else one_line(what_it_said(error))}")
            notes.append(f"{failures[-1]}.")
            log.error("%s", failures[-1], exc_info=None if told else error)
    return found


def _place(path: Path) -> tuple[list[list[int]], str]:
    """By number, not by letter: round 2 before 10, and `2-5`, an attack on several rounds, in between.

    The naive attack comes before the adaptive one, whose folder has the longer name.
    """
    numbers = re.findall(r"(?:round|client|repeat)-([\d-]*\d)", path.stem)
    return [[int(part) for part in number.split("-")] for number in numbers], path.parent.name


def _guesses(folder: RunFolder) -> dict[Key, str]:
    """By finding, the guess that sets its floor by PSNR, or where it claims what classes look like by class PSNR."""
    rows = [row for row in scored(folder) if row["metric"] in ("psnr", "class_psnr") and row["floor_guess"]]
    return {image_scores.key_of(row): row["floor_guess"] for row in rows}


@dataclass(frozen=True)
class _Viewer:
    """Who looks at a finding.

    Attributes:
        audit: knows the truth; None where nobody does.
        notes: gets a sentence for each truth that is not known.
        titles: what attacks are called.
        gallery: gets images.
        guesses: by finding, the name of the guess that sets its floor.
        scores: of single images.
        cut: by finding, the places of images that are kept.
    """

    audit: Audit | None
    notes: list[str]
    titles: Mapping[tuple[str, str], str]
    gallery: Gallery
    guesses: Mapping[Key, str]
    scores: image_scores.Values
    cut: Mapping[Key, Collection[int]]

    @cached_property
    def public(self) -> Public | None:
        """What guesses are made of."""
        return self.audit.case.public() if self.audit else None

    def guess(self, finding: Finding, about: Mapping[str, Any], truth: Truth) -> tuple[str, Tensor] | None:
        """The best guess that `finding` is judged beside, and its images; None where it is not scored."""
        name = self.guesses.get(image_scores.key_of(about))
        if name is None or self.audit is None:
            return None
        rng = guessing(self.audit.case, int(about["victim"]))
        images = evaluator_of(finding).guess(finding, truth, name, self.public, rng)
        return None if images is None else (name, images)

    def truth(self, finding: Finding, about: Mapping[str, Any]) -> Truth | None:
        """What is shown beside `finding`; None where it is not known, or does not fit."""
        why, truth = "", None
        try:
            truth = evaluator_of(finding).truth(finding, about, self.audit.case) if self.audit else None
        except (FedsimError, IndexError) as error:
            why = f"The truth about client {about['victim']} is not known: {error}."
        if truth is not None and isinstance(finding, Reconstruction | Texts):
            claimed, texts = claimed_data(finding), isinstance(finding, Texts)
            if (truth.data.shape[1:], truth.texts) != (claimed.shape[1:], texts):
                shapes = f"{tuple(truth.data.shape[1:])}, but {about['attack']} claims {tuple(claimed.shape[1:])}"
                kinds = "; they are not compared" if truth.texts == texts else ", of another kind"
                truth, why = None, f"Client {about['victim']} held examples of shape {shapes}{kinds}."
        if why and why not in self.notes:
            self.notes.append(why)
        return truth


def _main_metric(about: Mapping[str, Any], audit: Audit | None, trust: bool) -> str:
    return str(getattr(_attack_class(str(about["plugin"]), audit, trust), "main_metric", ""))


def _curves(finding: Finding) -> dict[str, Any]:
    """In the range of float32, so that a mean of curves is in that of float64; what is beyond is not drawn."""
    return {name: (np.arange(len(y), dtype=float), y.float().double().numpy()) for name, y in finding.trace.items()}


def _needed(about: Mapping[str, Any]) -> dict[str, Any]:
    members = ", ".join(map(str, about["members"]))
    who = f"the sum over clients {members}" if members else f"client {about['victim']}"
    written = {key: value if isinstance(value := about.get(key), dict) else None for key in _WRITTEN}
    return {key: about[key] for key in _NEEDED} | written | {"title": about["attack"], "who": who}


def _look_at(finding: Finding, about: Mapping[str, Any], png: Path, viewer: _Viewer, metric: str) -> Found:
    """What the page needs of one finding; its picture is written as well."""
    tokens = viewer.audit.case.tokens if viewer.audit else ()
    truth, key = viewer.truth(finding, about), image_scores.key_of(about)
    shown = evaluator_of(finding).show(finding, truth, tokens, metric)
    told = _needed(about) | {"attack": viewer.titles[_made(about)]}
    cut, places = {}, viewer.cut.get(key, ())
    if (sheet := shown.sheet) is not None:
        true = None if sheet.true is None else sheet.true[:IMAGES]
        first = sheet.claimed[:IMAGES]
        write_bytes(png, figures.image_sheet(first, true, sheet.psnr[:IMAGES], sheet.certified[:IMAGES]))
        viewer.gallery.add(
            told,
            sheet,
            typical=shown.typical,
            guess=lambda: viewer.guess(finding, about, truth) if truth else None,
            scores=viewer.scores.get(key, {}),
        )
        cut = _cut(sheet, places)
    experiment = viewer.audit.experiment if viewer.audit else None
    dataset = experiment.dataset if shown.rows is not None and experiment else None
    return Found(
        about=told,
        hash=hash_state(finding.tensors),
        curves=_curves(finding)
        | {name: (x.double().numpy(), y.double().numpy()) for name, (x, y) in shown.curves.items()},
        images=shown.examples,
        known=shown.known,
        texts=shown.texts,
        bag=shown.bag,
        pictured=sheet is not None,
        rows=None if shown.rows is None else records(shown.rows, dataset),
        cut=cut,
        told=_told(shown, places, dataset) if shown.known else {},
        roc=shown.roc,
    )


def _cut(sheet: Sheet, places: Iterable[int]) -> dict[int, tuple[bytes, bytes]]:
    """The claimed image at each of these places as a PNG, and the true one."""
    if sheet.true is None:
        return {}
    parts = (sheet.claimed, sheet.true)
    pictures = {p: [png_of(as_bytes(part[p : p + 1])[None]) for part in parts] for p in places if p < len(parts[0])}
    return {place: (claimed, true) for place, (claimed, true) in pictures.items()}


def _told(shown: Shown, places: Iterable[int], dataset: Dataset | None) -> dict[int, Pair]:
    """The text, the set of words or the record at each of these places."""
    if shown.rows is not None:
        some = [place for place in places if place < len(shown.rows.claimed)]
        chosen = records(shown.rows, dataset, some)
        return {place: chosen.as_text(at) for at, place in enumerate(some)}
    return {place: shown.texts[place] for place in places if place < len(shown.texts)}


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
        made, source = _made(about), str(about["settings"].get("source", ""))
        found[made] = replace(found[made], main_metric=_main_metric(about, audit, trust), source=source)
    return found


def _abouts(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """What each readable finding says of itself."""
    for path in sorted(folder.findings.rglob("*.safetensors")):
        with suppress(FedsimError):  # it is not scored either
            about = read_about(path)
            yield about


def _made(about: Mapping[str, Any]) -> tuple[str, str]:
    return about["attack"], about["variant"]


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
