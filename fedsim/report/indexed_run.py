"""Entry of a run in an index, made of small files alone.

These are its manifest, experiment, versions, scores, metrics, refused and failed attacks, and the
header of its checkpoint. Each that is damaged is a problem of the entry, and the others are read. Nothing that a
run names is imported, apart from fedsim's own attacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from fedsim.audit.variants import variant_names
from fedsim.base.errors import FedsimError, RunError, error_reason, one_line
from fedsim.base.files import parse_json
from fedsim.federation import lock
from fedsim.federation.config import Config
from fedsim.federation.failed_attacks import FailedAttack, read_failed_attacks
from fedsim.federation.integrity import explain_missing_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import is_of_shared_model, read_metrics, read_refusals
from fedsim.plugins import registry
from fedsim.recording.manifest import MANIFEST_FILE, Manifest
from fedsim.recording.sealed_files import read_header
from fedsim.report.attack_traits import read_scores
from fedsim.report.failed_attacks import describe_failed_attacks
from fedsim.report.headline import headline, reported_readings
from fedsim.report.index_entry import FAILED, FINISHED, RUNNING, UNFINISHED, IndexEntry
from fedsim.report.recovery import describe_recovery
from fedsim.report.run_facts import local_training
from fedsim.report.run_learning import examine_learning
from fedsim.report.summary import enumerate_words
from fedsim.report.verdicts import (
    BEYOND,
    GUESSING,
    LEAKS,
    NOT_BEYOND,
    UNDECIDED,
    WORSE_THAN_IMPUTATION,
    AttackTraits,
    ScoreReading,
    score_readings,
)
from fedsim.sweeps.labels import NONE

_T = TypeVar("_T")
_VERSIONS = "versions.json"
_WORST_FIRST = (LEAKS, BEYOND, UNDECIDED, GUESSING, NOT_BEYOND, WORSE_THAN_IMPUTATION)


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run or of a recording; some of its files may be lost."""
    if (folder / MANIFEST_FILE).is_file() or (folder / "transcript").is_dir():
        return True
    if (folder / "experiment.toml").is_file():  # beside a file that somebody wrote there are no versions
        return (folder / _VERSIONS).is_file() or (folder / "metrics.csv").is_file()
    return any(folder.glob("round-*.safetensors"))


def describe_run(path: Path, entry: IndexEntry) -> None:
    """Fill in what is known of a run."""
    folder = OpenRun(path)
    entry.page = folder.report.name if folder.report.is_file() else ""
    entry.time = first_time(folder.experiment, folder.manifest.path, path)
    noted = _try(entry, partial(_read_manifest, folder))
    config = _try(entry, partial(_read_config, folder, noted))
    if config is not None:
        _describe_experiment(config, entry)
    elif noted is not None:
        entry.rounds = str(len(noted.rounds))
    # Each step reads files of its own.
    _try(entry, partial(_describe_version, path / _VERSIONS, entry))
    scores: list[dict[str, str]] = []
    failed: list[FailedAttack] = []
    if noted is not None:  # without a manifest, anybody may have written the results
        _try(entry, partial(_describe_learning, folder, noted, entry))
        scores = _try(entry, partial(_read_scores, folder, noted)) or []
        failed = _try(entry, partial(_read_failures, folder, noted)) or []
    _try(entry, partial(_describe_leakage, scores, config, entry))
    attacked = {*(row["attack"] for row in scores), *(attempt.attack for attempt in failed)}
    _try(entry, partial(_describe_state, folder, config, attacked, entry))
    _describe_failures(failed, entry)
    if entry.state != FINISHED and lock.describe_lock_holder(path):
        entry.state = RUNNING


def _try(entry: IndexEntry, read: Callable[[], _T]) -> _T | None:
    """Return what `read` returns; None where it fails, which is a problem of the entry."""
    try:
        return read()
    except FedsimError as error:
        entry.problems.append(str(error))
    except Exception as error:  # whatever a stranger's file does to its reader
        entry.problems.append(one_line(error_reason(error)))
    return None


def first_time(*paths: Path) -> float:
    """Return when the first of these files was written that is there."""
    for path in paths:
        with suppress(OSError):
            return path.lstat().st_mtime
    return float("nan")


def _read_manifest(folder: OpenRun) -> Manifest | None:
    """Return the manifest; None for a recording that need not have one."""
    noted = folder.manifest.contents
    if noted is None and (missing := explain_missing_manifest(folder)):
        raise RunError(missing)
    return noted


def _check_intact(folder: OpenRun, noted: Manifest | None, path: Path) -> bool:
    """Return whether there is such a file of the run; without a manifest, its hash is unknown.

    Results have to be named in the manifest; of the experiment it may hold the settings instead.
    """
    if path.is_symlink():
        raise RunError(f"{path}: is a symbolic link, which fedsim does not follow in a run folder; remove it")
    if not path.is_file():
        # A run that is being made names a file before it is there.
        if noted is not None and path.name in noted.files and not lock.describe_lock_holder(folder.path):
            raise RunError(f"{path}: is not there, although this run wrote it; put it back, or attack again")
        return False
    is_noted = noted is not None and (path.name in noted.files or path != folder.experiment)
    if is_noted and not folder.manifest.vouches_for(path):
        raise RunError(f"{path}: is not what this run wrote; put it back, or attack again")
    return True


def _read_config(folder: OpenRun, noted: Manifest | None) -> Config | None:
    return folder.config if _check_intact(folder, noted, folder.experiment) else None


def _read_scores(folder: OpenRun, noted: Manifest) -> list[dict[str, str]]:
    return read_scores(folder) if _check_intact(folder, noted, folder.scores) else []


def _read_failures(folder: OpenRun, noted: Manifest) -> list[FailedAttack]:
    return read_failed_attacks(folder) if _check_intact(folder, noted, folder.failures) else []


def _describe_experiment(config: Config, entry: IndexEntry) -> None:
    entry.data, entry.model = config.data.name, config.model.name
    entry.clients, entry.rounds = str(config.federation.clients), str(config.federation.rounds)
    entry.training = ", ".join(local_training(config)[:2])
    defenses = [table.name for table in config.defense]
    if config.secure_aggregation is not None:
        defenses.append("secure aggregation")
    entry.defenses = ", ".join(defenses) or NONE


def _describe_version(path: Path, entry: IndexEntry) -> None:
    if path.is_file() and not path.is_symlink():
        entry.version = str(dict(parse_json(path.read_bytes())).get(registry.DISTRIBUTION, ""))


def _describe_learning(folder: OpenRun, noted: Manifest, entry: IndexEntry) -> None:
    """Fill in the accuracy of the last evaluation, and whether the model has learnt."""
    if not _check_intact(folder, noted, folder.metrics):
        return
    rows = read_metrics(folder)
    entry.no_learning = examine_learning(folder, rows).sentence
    for row in rows:  # the last evaluation counts
        if is_of_shared_model(row) and row["accuracy"]:
            entry.accuracy, entry.guess = float(row["accuracy"]), float(row["guess"] or "nan")


def _describe_leakage(scores: Sequence[Mapping[str, str]], config: Config | None, entry: IndexEntry) -> None:
    """Fill in the attacks, the worst verdict and the sentence with which the report begins."""
    readings = score_readings(scores, _read_traits(scores, config))
    entry.sentence = describe_recovery(readings, "examples") or headline(readings)
    entry.verdict = worst_verdict(readings)
    # Further attacks may have been made from an attack file.
    titles = [table.title for table in config.attack] if config else []
    entry.attacks = ", ".join(dict.fromkeys([*titles, *(row["attack"] for row in scores)]))


def worst_verdict(readings: Sequence[ScoreReading]) -> str:
    """Return the worst verdict that is reported on any attack; empty without one."""
    worst_rank = len(_WORST_FIRST)
    for reported in reported_readings(readings).values():
        for reading in reported:
            if not reading.baseline and reading.verdict in _WORST_FIRST:
                worst_rank = min(worst_rank, _WORST_FIRST.index(reading.verdict))
    return _WORST_FIRST[worst_rank] if worst_rank < len(_WORST_FIRST) else ""


def _read_traits(scores: Sequence[Mapping[str, str]], config: Config | None) -> dict[tuple[str, str], AttackTraits]:
    """Return what each attack's scores are read by, without its findings; only our own attacks are imported."""
    plugins, settings, traits = {}, {}, {}
    for table in config.attack if config else ():
        plugins[table.title] = table.name
    for row in scores:
        settings[row["attack"], row["variant"]] = row["settings"]
    for key, name in variant_names(scores).items():
        title, _ = key
        cls = _load_own_attack(plugins.get(title, title))
        source = dict(json.loads(settings[key] or "{}")).get("source", getattr(cls, "source", ""))
        traits[key] = AttackTraits(name=name, main_metric=getattr(cls, "main_metric", ""), source=str(source))
    return traits


@cache
def _load_own_attack(name: str) -> Any:
    """Return the class of an attack that comes with fedsim; None for any other."""
    if name not in registry.registered_names("attacks") or not registry.is_builtin("attacks", name):
        return None
    return registry.load("attacks", name)


def _describe_state(folder: OpenRun, config: Config | None, attacked: set[str], entry: IndexEntry) -> None:
    """Fill in how far a run came: its rounds first, and then the attacks that its file names."""
    if config is None:
        entry.state = FINISHED
        return
    done = int(read_header(folder.checkpoint)["round"]) if folder.checkpoint.is_file() else 0
    is_training_alone = not folder.transcript.is_dir() and folder.states.is_dir()
    entry.state = FINISHED
    if done < config.federation.rounds and not is_training_alone:
        entry.state = UNFINISHED
        entry.reasons.append(f"{done} of {config.federation.rounds} rounds are done")
    elif config.adversary.when != "never":
        refusals = read_refusals(folder)
        missing = [table.title for table in config.attack if table.title not in attacked | set(refusals)]
        if refusals:
            entry.state = FAILED
            entry.reasons += refusals.values()
        if missing:
            entry.state = FAILED if attacked else UNFINISHED
            entry.reasons.append(f"no scores of {enumerate_words(missing)}")


def _describe_failures(failed: Sequence[FailedAttack], entry: IndexEntry) -> None:
    """Fill in which attacks failed; a run that lacks rounds stays unfinished."""
    entry.reasons += describe_failed_attacks(failed)
    if failed and entry.state == FINISHED:
        entry.state = FAILED
