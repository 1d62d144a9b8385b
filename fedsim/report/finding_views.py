"""Findings as the page shows them: what each claims, beside the truth and the best guess."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.audit.audit import Audit
from fedsim.audit.evaluation.case import UnknownTruthError
from fedsim.audit.evaluation.display import Display, DisplayMatrix, DisplayTable, ImageGrid, RocCurve, TextPair
from fedsim.audit.evaluation.evaluator import Evaluator, evaluator_of, guess_generator
from fedsim.audit.evaluation.examples import MAX_IMAGES
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.reconstructions import ReconstructionEvaluator
from fedsim.audit.evaluation.scoring import claimed_data
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.finding_files import load_claim
from fedsim.base.errors import FedsimError, RunError, error_reason, name_rounds, one_line
from fedsim.base.files import write_bytes, write_remedy
from fedsim.base.grouping import group_by
from fedsim.base.progress import track
from fedsim.data import Dataset
from fedsim.federation.run_folder import RunFolder
from fedsim.interfaces.findings import Finding, Reconstruction, Texts
from fedsim.interfaces.metric import describe_metric, sort_metrics
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.header import hash_state
from fedsim.report import figures, image_scores
from fedsim.report.attack_traits import attack_key, find_main_metric
from fedsim.report.curves import Curves
from fedsim.report.image_scores import FindingKey
from fedsim.report.noise import relative_roughness, usual_roughness
from fedsim.report.pictures import Gallery, encode_png, images_as_bytes
from fedsim.report.records import ShownRecords, shown_records

log = logging.getLogger(__name__)

_REQUIRED_KEYS = (
    "attack", "plugin", "round", "victim", "repeat", "granted", "settings", "changed", "seconds", "command", "warnings",
    "variant", "members", "rounds", "partial_records", "knowledge", "app",
)  # fmt: skip
"""What the page needs of the metadata of a finding."""
_SHARED_GUESSES = 16
"""How many sets of images of guesses are kept for the next findings; those about one victim come together."""


@dataclass(frozen=True, kw_only=True)
class FindingView:
    """Finding as the page shows it.

    Attributes:
        about: what the finding declares: attack, round, victim, settings, ...
        hash: SHA-256 of all that it claims.
        curves: its curves by name.
        num_examples: how many examples are claimed; of a `bag`, how many words.
        has_truth: whether the truth is known and shown.
        texts: the first claimed texts with the true ones; of a `bag`, one pair of sets of words.
        bag: whether it claims which words occur, and no texts.
        pictured: whether it claims images, which a `Gallery` has.
        rows: the first rows of a claimed table.
        drawings: SVG of the first examples, each claimed one over the true one.
        card_images: by example that a card of the page shows, the claimed image and the true one as PNGs.
        card_texts: likewise, the text or record.
        roc: the curve of an attack that distinguishes members from non-members.
        numbers: by name, what else the evaluator shows.
        tables: likewise.
        matrices: likewise.
        roughness: of claimed images, relative to public ones; NaN if unknown.
    """

    about: Mapping[str, Any]
    hash: str
    curves: Curves
    num_examples: int
    has_truth: bool
    texts: Sequence[TextPair] = ()
    bag: bool = False
    pictured: bool = False
    rows: ShownRecords | None = None
    drawings: Sequence[str] = ()
    card_images: Mapping[int, tuple[bytes, bytes]] = field(default_factory=dict)
    card_texts: Mapping[int, TextPair] = field(default_factory=dict)
    roc: RocCurve | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[DisplayTable] = ()
    matrices: Sequence[DisplayMatrix] = ()
    roughness: float = math.nan


def read_findings(
    folder: RunFolder,
    audit: Audit | None,
    notes: list[str],
    failures: list[str],
    *,
    score_rows: Sequence[Mapping[str, str]],
    names: Mapping[tuple[str, str], str],
    gallery: Gallery | None = None,
    scores: image_scores.ExampleScores | None = None,
    card_examples: Mapping[FindingKey, Collection[int]] | None = None,
    trust: bool = False,
) -> list[FindingView]:
    """Read every readable finding and draw its images; those about the same update stand together.

    Args:
        notes: gets a sentence for each finding that cannot be read or shown, and for each truth that is not known.
        failures: gets the former alone.
        card_examples: by finding, the examples that cards of the page show.
    """
    views = []
    viewer = _Viewer(
        audit,
        notes,
        titles=names,
        gallery=gallery or Gallery(),
        guesses=_best_guesses(score_rows),
        scores=scores or {},
        card_examples=card_examples or {},
    )
    main_metric = cache(partial(find_main_metric, audit=audit, trust=trust))
    paths = sorted(folder.findings.glob("*/*.safetensors"), key=_sort_key)
    for path in track(paths, "drawing", len(paths)):
        name = path.name
        try:
            finding, about = load_claim(path)
            name = f"{about['attack']}, {name_rounds(about['round'])}, client {about['victim']}"
            metric = main_metric(str(about["plugin"]))
            views.append(_view_finding(finding, about, path.with_suffix(".png"), viewer, metric))
        except OSError as error:
            raise RunError(
                f"{path.parent}: cannot be written ({error.strerror}); {write_remedy(error)} and try again"
            ) from error
        except Exception as error:  # whatever a stranger's finding does to those who draw it
            is_sentence = isinstance(error, FedsimError)
            failures.append(f"{name} is left out: {error if is_sentence else one_line(error_reason(error))}")
            notes.append(f"{failures[-1]}.")
            log.error("%s", failures[-1], exc_info=None if is_sentence else error)
    return views


def _sort_key(path: Path) -> tuple[list[list[int]], str]:
    """Order findings by number, not by letter: round 2 before 10, and `2-5`, an attack on several rounds, in between.

    The naive attack comes before the adaptive one, whose folder has the longer name.
    """
    numbers = re.findall(r"(?:round|client|repeat)-([\d-]*\d)", path.stem)
    return [[int(part) for part in number.split("-")] for number in numbers], path.parent.name


def _best_guesses(score_rows: Sequence[Mapping[str, str]]) -> dict[FindingKey, str]:
    """Return by finding the guess that sets its floor by the preferred metric of its examples."""
    rows_by_metric = group_by(score_rows, lambda row: row["metric"])
    guesses: dict[FindingKey, str] = {}
    for metric in sort_metrics(rows_by_metric):
        facts = describe_metric(metric)
        if facts.of_examples and facts.ranks_examples:
            for row in rows_by_metric[metric]:
                if row["floor_guess"]:
                    guesses.setdefault(image_scores.finding_key(row), row["floor_guess"])
    return guesses


@dataclass(frozen=True)
class _Viewer:
    """Everything that is needed to show a finding with the truth and the best guess.

    Attributes:
        guesses: by finding, the name of the guess that sets its floor.
        card_examples: by finding, the examples that cards of the page show.
        shared_guesses: images of guesses that several attacks on one victim are judged beside.
    """

    audit: Audit | None
    notes: list[str]
    titles: Mapping[tuple[str, str], str]
    gallery: Gallery
    guesses: Mapping[FindingKey, str]
    scores: image_scores.ExampleScores
    card_examples: Mapping[FindingKey, Collection[int]]
    shared_guesses: MeasurementCache = field(default_factory=lambda: MeasurementCache(_SHARED_GUESSES))

    @cached_property
    def public_data(self) -> PublicExamples | None:
        """Public data, which guesses are made of."""
        return self.audit.case.public() if self.audit else None

    @cached_property
    def usual_roughness(self) -> float:
        """Roughness of public images; NaN where there are none."""
        return usual_roughness(self.public_data.data if self.public_data else None)

    @property
    def dataset(self) -> Dataset | None:
        """Data set of the experiment, which names the columns of tables."""
        return self.audit.experiment.dataset if self.audit and self.audit.experiment else None

    def guess(
        self, evaluator: Evaluator[Any], finding: Finding, about: Mapping[str, Any], truth: Truth
    ) -> tuple[str, Tensor] | None:
        """Return name and images of the guess that sets the floor of `finding`; None where it is not scored."""
        name = self.guesses.get(image_scores.finding_key(about))
        if name is None or self.audit is None:
            return None
        victim = int(about["victim"])
        rng = guess_generator(self.audit.case, victim)
        compute = partial(evaluator.guess, finding, truth, name, self.public_data, rng)
        if isinstance(finding, Reconstruction) and type(evaluator).guess is ReconstructionEvaluator.guess:
            images = self.shared_guesses.find(
                compute, name, victim, len(finding.data), finding.labels, truth.data, truth.labels, truth.modality
            )
        else:  # which parts of a finding an evaluator of another kind makes its guesses of is unknown
            images = compute()
        return None if images is None else (name, images)

    def truth(self, evaluator: Evaluator[Any], finding: Finding, about: Mapping[str, Any]) -> Truth | None:
        """Return the truth about `finding`; None, with a note, where it is not known or has another shape."""
        reason, truth = "", None
        try:
            truth = evaluator.truth(finding, about, self.audit.case) if self.audit else None
        except UnknownTruthError:
            return None
        except (FedsimError, IndexError) as error:
            reason = f"The truth about client {about['victim']} is not known: {error}."
        if truth is not None and isinstance(finding, Reconstruction | Texts):
            claimed, texts = claimed_data(finding), isinstance(finding, Texts)
            if (truth.data.shape[1:], truth.has_tokens) != (claimed.shape[1:], texts):
                shapes = f"{tuple(truth.data.shape[1:])}, but {about['attack']} claims {tuple(claimed.shape[1:])}"
                kinds = "; they are not compared" if truth.has_tokens == texts else ", of another kind"
                truth, reason = None, f"Client {about['victim']} held examples of shape {shapes}{kinds}."
        if reason and reason not in self.notes:
            self.notes.append(reason)
        return truth


def _curves(finding: Finding) -> dict[str, Any]:
    """Return the curves of a finding as `(iteration, value)`.

    Values go through float32, so that a mean of curves stays finite in float64; what is beyond is not drawn.
    """
    return {name: (np.arange(len(y), dtype=float), y.float().double().numpy()) for name, y in finding.trace.items()}


def _page_metadata(about: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what the page needs of the metadata of a finding, and add whom it is about."""
    members = ", ".join(map(str, about["members"]))
    who = f"the sum over clients {members}" if members else f"client {about['victim']}"
    optional = {"tuned": str(about.get("tuned") or ""), "attacker": about.get("attacker", "server")}
    return {key: about[key] for key in _REQUIRED_KEYS} | optional | {"title": about["attack"], "who": who}


def _view_finding(finding: Finding, about: Mapping[str, Any], png: Path, viewer: _Viewer, metric: str) -> FindingView:
    """Return what the page needs of one finding, and write its picture to `png`."""
    tokens = viewer.audit.case.tokens if viewer.audit else ()
    evaluator, key = evaluator_of(finding), image_scores.finding_key(about)
    truth = viewer.truth(evaluator, finding, about)
    display = evaluator.show(finding, truth, tokens, metric)
    metadata = _page_metadata(about) | {"attack": viewer.titles[attack_key(about)]}
    card_images, card_examples = {}, viewer.card_examples.get(key, ())
    roughness = math.nan
    # Images go into a PNG of the run folder, the gallery and the cards.
    if (sheet := display.images) is not None:
        first_true = None if sheet.true is None else sheet.true[:MAX_IMAGES]
        first_claimed = sheet.claimed[:MAX_IMAGES]
        write_bytes(
            png,
            figures.draw_image_sheet(first_claimed, first_true, sheet.psnr[:MAX_IMAGES], sheet.certified[:MAX_IMAGES]),
        )
        viewer.gallery.add(
            metadata,
            sheet,
            typical=display.is_typical,
            guess=lambda: viewer.guess(evaluator, finding, about, truth) if truth else None,
            scores=viewer.scores.get(key, {}),
        )
        card_images = _card_images(sheet, card_examples)
        roughness = relative_roughness(sheet.claimed, viewer.usual_roughness)
    dataset = viewer.dataset if display.rows is not None else None
    shown_curves = {name: (x.double().numpy(), y.double().numpy()) for name, (x, y) in display.curves.items()}
    return FindingView(
        about=metadata,
        hash=hash_state(finding.tensors),
        curves=_curves(finding) | shown_curves,
        num_examples=display.examples,
        has_truth=display.has_truth,
        texts=display.texts,
        bag=display.is_bag_of_words,
        pictured=sheet is not None,
        rows=None if display.rows is None else shown_records(display.rows, dataset),
        drawings=display.drawings,
        card_images=card_images,
        card_texts=_card_texts(display, card_examples, dataset) if display.has_truth else {},
        roc=display.roc,
        numbers=display.numbers,
        tables=display.tables,
        matrices=display.matrices,
        roughness=roughness,
    )


def _card_images(sheet: ImageGrid, examples: Iterable[int]) -> dict[int, tuple[bytes, bytes]]:
    """Return by example the claimed image and the true one, as PNGs; empty where the truth is not known."""
    if sheet.true is None:
        return {}
    pictures = {}
    for example in examples:
        if example < len(sheet.claimed):
            claimed, true = (
                encode_png(images_as_bytes(images[example : example + 1])[None])
                for images in (sheet.claimed, sheet.true)
            )
            pictures[example] = claimed, true
    return pictures


def _card_texts(display: Display, examples: Iterable[int], dataset: Dataset | None) -> dict[int, TextPair]:
    """Return by example the text, the set of words or the record."""
    if display.rows is not None:
        row_numbers = [example for example in examples if example < len(display.rows.claimed)]
        rows = shown_records(display.rows, dataset, row_numbers)
        return {number: rows.as_text(position) for position, number in enumerate(row_numbers)}
    return {example: display.texts[example] for example in examples if example < len(display.texts)}
