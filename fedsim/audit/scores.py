"""Judge every finding in a run folder, and write `scores.csv` and `image-scores.csv`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedsim.audit.cache import FindingCache
from fedsim.audit.evaluation.case import UnknownTruthError
from fedsim.audit.evaluation.doubts import collect_doubts
from fedsim.audit.evaluation.evaluator import VICTIMS, EvaluationContext, Judgement, evaluator_of
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth_fit import find_complaint
from fedsim.audit.finding_files import load_claim, read_facts
from fedsim.audit.score_reuse import NUMBER_COLUMNS, EarlierScores
from fedsim.audit.variants import VARIANT_COLUMNS, variant_columns
from fedsim.base.errors import DataError, FedsimError, RunError, error_reason, name_rounds, one_line
from fedsim.base.progress import track
from fedsim.federation.run_folder import read_rows
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.metric import list_metric_faults

log = logging.getLogger(__name__)

SCORE_COLUMNS = (
    "attack", "victim", "round", "repeat", "metric", "value", "floor", "floor_guess", "nearest_public", "ceiling",
    "higher_is_better", "examples", "seed", "missing", "instrument", "doubt", *VARIANT_COLUMNS,
)  # fmt: skip
"""Columns of `scores.csv`."""
IMAGE_SCORE_COLUMNS = ("attack", "victim", "round", "repeat", "image", "metric", "value", *VARIANT_COLUMNS)
"""Columns of `image-scores.csv`."""


def score_findings(
    cache: FindingCache,
    context_of: Callable[[Mapping[str, Any]], EvaluationContext],
    failures: list[str],
    earlier: EarlierScores,
) -> list[dict[str, Any]]:
    """Judge every finding that this run's attacks made, see `judge_findings`, and write the scores.

    Returns:
        The rows of `scores.csv`.
    """
    rows, image_rows = judge_findings(cache, context_of, failures, earlier)
    folder = cache.folder
    folder.write_table(folder.scores, SCORE_COLUMNS, rows)
    folder.write_table(folder.images, IMAGE_SCORE_COLUMNS, image_rows)
    earlier.save()
    return rows


def read_score_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a `scores.csv`."""
    return read_rows(path, SCORE_COLUMNS, NUMBER_COLUMNS, ("victim", "repeat", "examples"))


def judge_findings(
    cache: FindingCache,
    context_of: Callable[[Mapping[str, Any]], EvaluationContext],
    failures: list[str],
    earlier: EarlierScores | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Judge every finding that this run's attacks made, and write nothing.

    Findings of attacks that the file no longer names, or now makes with other settings or
    knowledge, are judged too, under their own variant. Findings that an attack made before its code
    changed are left out: they cannot be made again, and would be averaged with those of the present
    code. A finding that cannot be judged does not affect others.

    Args:
        context_of: gives the evaluation context of a finding, from the finding's metadata.
        failures: gets one sentence for each finding that cannot be judged.
        earlier: scores in the folder; by default every finding is judged anew.

    Returns:
        The rows of `scores.csv` and of `image-scores.csv`.
    """
    rows, image_rows, folder = list[dict[str, Any]](), list[dict[str, Any]](), cache.folder
    failures += [f"not scored by one metric: {fault}" for fault in list_metric_faults()]
    # Read the metadata of all findings first: some scores compare all victims of an attack.
    metadata: dict[Path, dict[str, Any]] = {}
    for path in _finding_paths(folder.findings):
        about = _read_metadata(path, cache, failures)
        if about is not None:
            metadata[path] = about
    victims = _victims_by_attack(metadata.values())
    for path in track(metadata, "scoring", len(metadata)):
        about = metadata[path]
        compared = victims[_attack_key(about)]
        key_columns = {key: about[key] for key in ("attack", "victim", "round", "repeat")} | variant_columns(about)
        if earlier is not None:
            inputs = earlier.hash_inputs(path, about, compared)
            earlier_rows, earlier_image_rows = earlier.find_rows(path, about, inputs)
            if earlier_rows:
                rows += [row | key_columns | {"seed": cache.case.seed} for row in earlier_rows]
                image_rows += [row | key_columns for row in earlier_image_rows]
                continue
        loaded = _load_finding(path, failures)
        if loaded is None:
            continue
        finding, about = loaded
        num_failures = len(failures)
        with collect_doubts() as doubts:
            judgement = _judge(finding, about | {VICTIMS: compared}, context_of, failures)
        finding_columns = {"seed": cache.case.seed, "doubt": one_line("; ".join(doubts))}
        if earlier is not None and judgement.scores and len(failures) == num_failures:
            earlier.note_scores(path, inputs)
        for score in judgement.scores:
            rows.append(key_columns | score_row(score, judgement.examples) | finding_columns)
            for index, value in enumerate(score.per_image):
                if not math.isnan(value):
                    image_rows.append(key_columns | {"metric": score.metric, "image": index, "value": value})
    return rows, image_rows


def _read_metadata(path: Path, cache: FindingCache, failures: list[str]) -> dict[str, Any] | None:
    """Read the metadata of a finding; None where it is not scored, and then the log says why."""
    try:
        if not cache.folder.manifest.vouches_for(path):
            raise RunError(f"{path}: is not what this run found; remove it, or attack again")
        about = read_facts(path)
        if cache.is_of_other_messages(about):
            raise RunError(f"{path}: was found in another recording than is here; remove it, or attack again")
    except FedsimError as error:
        _report_failure(path, error, failures)
        return None
    if cache.is_outdated(about):
        log.warning("%s/%s: not scored: made with other code", path.parent.name, path.name)
        return None
    return about


def _load_finding(path: Path, failures: list[str]) -> tuple[Finding, dict[str, Any]] | None:
    """Load a finding and its metadata; None where it is damaged."""
    try:
        return load_claim(path)
    except FedsimError as error:
        _report_failure(path, error, failures)
        return None


def _report_failure(path: Path, error: FedsimError, failures: list[str]) -> None:
    log.error("%s/%s: not scored: %s", path.parent.name, path.name, error)
    # The attack may have reported the same error already.
    if not any(str(error) in sentence for sentence in failures):
        failures.append(f"not scored: {error}")


def _attack_key(about: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what the findings have in common that one attack made of several victims."""
    return (*(about[key] for key in ("attack", "variant", "round", "repeat")), *about["rounds"])


def _victims_by_attack(metadata: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[int]]:
    """Group the victims of all findings by `_attack_key`, ascending."""
    victims: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for about in metadata:
        victims[_attack_key(about)].add(int(about["victim"]))
    return {key: sorted(clients) for key, clients in victims.items()}


def _judge(
    finding: Finding,
    about: Mapping[str, Any],
    context_of: Callable[[Mapping[str, Any]], EvaluationContext],
    failures: list[str],
) -> Judgement:
    """Judge a finding; report an error and return no scores where that fails.

    That the truth is not known is no failure. A truth file of a recording made elsewhere has to explain the victim's
    message: where it does not, either of the two is read wrongly.
    """
    try:
        context = context_of(about)
        if complaint := find_complaint(finding, about, context):
            raise DataError(complaint)
        return evaluator_of(finding).judge(finding, about, context)
    except UnknownTruthError as error:
        log.warning("%s, client %d: not scored: %s", about["attack"], int(about["victim"]), error)
        return Judgement()
    except Exception as error:  # a finding of any package may have any content
        is_ours = isinstance(error, FedsimError)
        reason = error if is_ours else one_line(error_reason(error))
        name = f"{about['attack']}, {name_rounds(about['round'])}, client {about['victim']}"
        failures.append(f"{name}: not scored: {reason}")
        # The sentence of a FedsimError says it all; any other error needs its traceback.
        log.error("%s", failures[-1], exc_info=None if is_ours else error)
        return Judgement()


def _finding_paths(folder: Path) -> list[Path]:
    """List finding files by attack, round, victim and repeat, in the order of their numbers."""

    def key(path: Path) -> tuple[str, list[int]]:
        return path.parent.name, [int(part) for part in path.stem.split("-") if part.isdigit()]

    return sorted(folder.glob("*/*.safetensors"), key=key)


def score_row(score: Score, examples: int) -> dict[str, Any]:
    """Return the columns of `scores.csv` that are about a score, which is of so many `examples`."""
    row = {field.name: getattr(score, field.name) for field in dataclasses.fields(score)}
    del row["per_image"], row["count"]
    examples = examples if score.count is None else score.count
    ceiling = "" if score.ceiling is None else score.ceiling
    return row | {"examples": examples, "ceiling": ceiling, "higher_is_better": score.higher_is_better}
