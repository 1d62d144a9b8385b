"""Judge every finding in a run folder, and write `scores.csv` and `image-scores.csv`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedsim.auditing.cache import Cache
from fedsim.auditing.variants import VARIANT, columns
from fedsim.errors import FedsimError, RunError, one_line, what_it_said
from fedsim.evaluation.kind import VICTIMS, Bench, Judgement, evaluator_of
from fedsim.evaluation.score import Score
from fedsim.findings import Finding
from fedsim.progress import tracked
from fedsim.recording.finding_files import load_claim, read_about
from fedsim.recording.manifest import is_noted

log = logging.getLogger(__name__)

SCORES = (
    "attack", "victim", "round", "repeat", "metric", "value", "floor", "floor_guess", "nearest_public", "ceiling",
    "higher_is_better", "examples", "seed", "missing", *VARIANT,
)  # fmt: skip
IMAGES = ("attack", "victim", "round", "repeat", "image", "metric", "value", *VARIANT)


def score(cache: Cache, bench_of: Callable[[Mapping[str, Any]], Bench], failures: list[str]) -> list[dict[str, Any]]:
    """Judge every finding that this run's attacks made.

    Findings of attacks that the file no longer names, or now makes with other settings or knowledge, are judged too,
    under their own variant. Findings that an attack made before its code changed are left out: they cannot be made
    again, and would be averaged with those of the present code. A finding that cannot be judged does not affect others.

    Args:
        bench_of: gives what a finding is judged with, from what it says of itself.
        failures: gets one sentence for each finding that cannot be judged.

    Returns:
        The rows of `scores.csv`.
    """
    rows, images, folder = [], [], cache.folder
    paths = _findings(folder.findings)
    known = {path: about for path in paths if (about := _accepted(path, cache, failures)) is not None}
    together = _victims(known.values())
    for path in tracked(known, "scoring", len(known)):
        if (read := _readable(path, failures)) is None:
            continue
        finding, about = read
        judgement = _judged(finding, about | {VICTIMS: together[_run_of(about)]}, bench_of, failures)
        where = {key: about[key] for key in ("attack", "victim", "round", "repeat")} | columns(about)
        rows += [where | _row(item, judgement.examples) | {"seed": cache.seed} for item in judgement.scores]
        for item in judgement.scores:
            images += [
                where | {"metric": item.metric, "image": place, "value": value}
                for place, value in enumerate(item.per_image)
                if not math.isnan(value)
            ]
    folder.write_table(folder.scores, SCORES, rows)
    folder.write_table(folder.images, IMAGES, images)
    folder.settle()
    return rows


def _accepted(path: Path, cache: Cache, failures: list[str]) -> dict[str, Any] | None:
    """What a finding says of itself; None where it is not scored, and then the log says why."""
    try:
        if not is_noted(cache.folder.path, path):
            raise RunError(f"{path}: is not what this run found; remove it, or attack again to make it anew")
        about = read_about(path)
    except FedsimError as error:
        _fail(path, error, failures)
        return None
    if cache.is_outdated(about):
        log.warning("%s/%s: not scored: made with other code", path.parent.name, path.name)
        return None
    return about


def _readable(path: Path, failures: list[str]) -> tuple[Finding, dict[str, Any]] | None:
    """A finding and what it says of itself; None where it is damaged."""
    try:
        return load_claim(path)
    except FedsimError as error:
        _fail(path, error, failures)
        return None


def _fail(path: Path, error: FedsimError, failures: list[str]) -> None:
    log.error("%s/%s: not scored: %s", path.parent.name, path.name, error)
    if not any(str(error) in told for told in failures):  # the attack may have reported the same already
        failures.append(f"not scored: {error}")


def _run_of(about: Mapping[str, Any]) -> tuple[Any, ...]:
    """What findings have in common that one attack made of several victims."""
    return (*(about[key] for key in ("attack", "variant", "round", "repeat")), *about["rounds"])


def _victims(abouts: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], list[int]]:
    """All victims of each such attack, ascending."""
    found: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for about in abouts:
        found[_run_of(about)].add(int(about["victim"]))
    return {which: sorted(victims) for which, victims in found.items()}


def _judged(
    finding: Finding, about: Mapping[str, Any], bench_of: Callable[[Mapping[str, Any]], Bench], failures: list[str]
) -> Judgement:
    try:
        return evaluator_of(finding).judge(finding, about, bench_of(about))
    except Exception as error:  # a finding of any package may have any content
        told = isinstance(error, FedsimError)
        who = f"{about['attack']}, round {about['round']}, client {about['victim']}"
        failures.append(f"{who}: not scored: {error if told else one_line(what_it_said(error))}")
        log.error("%s", failures[-1], exc_info=None if told else error)
        return Judgement()


def _findings(folder: Path) -> list[Path]:
    """Finding files by attack, round, victim and repeat, in the order of their numbers."""

    def key(path: Path) -> tuple[str, list[int]]:
        return path.parent.name, [int(part) for part in path.stem.split("-") if part.isdigit()]

    return sorted(folder.glob("*/*.safetensors"), key=key)


def _row(item: Score, examples: int) -> dict[str, Any]:
    row = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
    del row["per_image"]
    return row | {"examples": examples, "ceiling": "" if item.ceiling is None else item.ceiling}
