"""Whether a run is still what it was when it was written: everything in the folder is compared with its manifest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fedsim.errors import ConfigError, FedsimError, some_of
from fedsim.experiments import lock
from fedsim.experiments.build import Experiment
from fedsim.experiments.config import Config, check
from fedsim.experiments.reading import read_toml
from fedsim.experiments.run_folder import RunFolder, files_below, is_made
from fedsim.experiments.settings import differing, settings_of
from fedsim.experiments.states import States
from fedsim.recording.header import RECORDING, hash_state
from fedsim.recording.manifest import (
    GUARD,
    NAME,
    SEALED,
    Manifest,
    chained,
    changing,
    check_key,
    file_hash,
    name_of,
    name_of_run,
    read,
)
from fedsim.recording.sealed import read_sealed
from fedsim.recording.seals import KEY, key
from fedsim.recording.transcript import Transcript

_SHOWN = 10
"""Most numbers of rounds named in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of comparing a run with its manifest.

    Attributes:
        manifest: None where there is none, or one that was altered.
        differences: a sentence for each thing that is not as it was written.
        remark: what the verdict does not say.
    """

    manifest: Manifest | None
    differences: list[str]
    remark: str = ""

    @property
    def text(self) -> str:
        """In a line."""
        if self.manifest is None:
            return "; ".join([*self.differences, self.remark])
        name = f"run {self.manifest.run}: "
        if self.differences:
            return name + f"not as it was written: {'; '.join(self.differences)}"
        counts = f"{len(self.manifest.rounds)} rounds and {len(self.manifest.files)} files are those of its {NAME}"
        return f"{name}{counts}, {self.remark}"


def held_against_manifest(folder: Path) -> Verdict:
    """Compare the headers of the rounds, the settings and all other files of the run; the transcript checks the states.

    Raises:
        ConfigError: FEDSIM_KEY names a key that cannot be used.
    """
    secret = key()
    if folder.resolve().name == RECORDING:
        folder = folder.parent
    try:
        manifest = read(folder)
    except FedsimError as error:
        return Verdict(manifest=None, differences=[str(error)])
    if manifest is None:
        return _without(folder)
    differences = [*_rounds(folder, manifest), *_settings(folder, manifest), *_files(folder, manifest)]
    if secret and not manifest.signed:
        differences.append(f"{NAME} bears no signature")
    elif secret and manifest.name and manifest.name != (called := name_of_run(folder)):
        differences.append(
            f"what is signed is the run that was begun as '{manifest.name}', and this folder is called '{called}'; "
            "give it back its name, unless another run was put in its place"
        )
    if differences and (who := lock.holder(folder)):
        differences.append(f"{who} is writing to it, so look again when that has ended")
    if secret:
        remark = "signed with this key"
    elif manifest.signed:
        remark = f"signed, with a key that was not given (--key, {KEY})"
    else:
        remark = "unsigned, so that who can write there can make them again"
    if strange := [name for name in _unnamed(folder, manifest) if not is_made(name)]:
        remark += f"; {some_of(strange, _SHOWN)}: not fedsim's, and nothing reads it"
    if manifest.late:
        remark += f"; {NAME} was begun late, so it does not say where what was there by then is from"
    return Verdict(manifest=manifest, differences=differences, remark=remark)


def adopt(run: RunFolder, experiment: Experiment | None) -> None:
    """Begin a manifest where there is none, as of a recording that was copied without: all that is there, as it is now.

    Raises:
        ConfigError: FEDSIM_KEY names a key, which says nothing of what was there before; or the recording is not of
            `experiment`, which the folder's own file describes.
    """
    if os.path.lexists(run.manifest):
        return
    if experiment is not None:
        _check_recorded_from(run, experiment)
    check_key(run.path, Manifest())
    with changing(run.path) as manifest:
        if transcript := _recorded(run.path):
            for number in transcript.rounds:
                with suppress(FedsimError):  # a damaged one is reported when the recording is read
                    manifest.add_round(number, transcript.sha256(number))
        if config := run.read_experiment(trust=True):  # nothing is imported by reading it
            manifest.seed, manifest.settings = config.federation.seed, settings_of(config)
        manifest.files = {name: file_hash(run.path / name) for name in _unnamed(run.path, None) if is_made(name)}
        manifest.late = bool(manifest.rounds or manifest.files)


def _check_recorded_from(run: RunFolder, experiment: Experiment) -> None:
    """Raise ConfigError where round 1 is recorded and did not begin with the initial model of `experiment`."""
    transcript = _recorded(run.path)
    if transcript is None or 1 not in transcript.rounds:
        return
    try:
        sent = transcript.header(1).broadcasts
    except FedsimError:  # a damaged round is reported when the recording is read
        return
    if list(sent) != [hash_state(experiment.initial_state())]:
        raise ConfigError(
            f"{run.experiment}: round 1 of the recording beside it began with another model than this experiment does, "
            "so the recording is of another run; put the experiment file of that run there, or remove this one"
        )


def _without(folder: Path) -> Verdict:
    """Of a folder without a manifest: fedsim leaves one around every folder called `transcript`."""
    if RunFolder(folder).experiment.exists() or (folder / RECORDING).is_dir() or key() is not None:
        gone = f"{folder / NAME}: is not there, so nothing proves the run whole; it was removed, or the run never began"
        return Verdict(manifest=None, differences=[gone])
    return Verdict(manifest=None, differences=[], remark=f"no {NAME} is there, so removed rounds would not be noticed")


def _rounds(folder: Path, manifest: Manifest) -> Iterator[str]:
    there: dict[str, str] = {}
    if chained(manifest.rounds) != manifest.chain:
        yield f"the chain over the rounds in {NAME} does not hold"
    if transcript := _recorded(folder):
        for number in transcript.rounds:
            try:
                there[str(number)] = transcript.sha256(number)
            except FedsimError:
                there[str(number)] = manifest.rounds.get(str(number), "")  # reported when the recording is read
    noted = manifest.rounds
    if missing := [number for number in noted if number not in there]:
        yield f"{_named(missing)} missing"
    if others := [number for number in noted if number in there and there[number] != noted[number]]:
        yield f"{_named(others)} not what was recorded"
    if new := [number for number in there if number not in noted]:
        killed = ", unless it was killed just then, and resumed records it again" if len(new) == 1 else ""
        yield f"{_named(new)} there that the run did not record{killed}"


def _recorded(folder: Path) -> Transcript | None:
    """What is in the folder called `transcript`; rounds elsewhere are in no manifest."""
    try:
        return Transcript(folder) if (folder / RECORDING).is_dir() else None
    except FedsimError:
        return None


def _named(rounds: list[str]) -> str:
    several = len(rounds) > 1
    return f"round{'s' * several} {some_of(rounds, _SHOWN)} {'are' if several else 'is'}"


def _settings(folder: Path, manifest: Manifest) -> Iterator[str]:
    experiment = RunFolder(folder).experiment
    if manifest.settings is None:
        if experiment.exists():
            yield f"{experiment.name} is there, though the run was recorded without one"
        return
    try:
        now = settings_of(check(Config, read_toml(experiment), experiment.name))
    except FedsimError as error:
        yield str(error)
        return
    for name, (before, after) in differing(manifest.settings, now).items():
        yield f"{experiment.name} says {name} = {after}, the run was made with {before}"


def _files(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name in manifest.files:
        path = folder / name
        try:
            if not path.is_file():
                yield f"{name} is missing"
            elif not manifest.names(name, file_hash(path)):
                yield f"{name} is not what was written"
            elif name == SEALED:
                read_sealed(path)
        except FedsimError as error:
            yield str(error)
    for name in filter(is_made, _unnamed(folder, manifest)):
        yield f"{name} is there, though {NAME} does not name it (a kill just then may leave one; attack again)"
    states = States(RunFolder(folder).states)
    try:
        changed = states.lacks(states.manifest().get("states", {}))
    except FedsimError as error:
        yield str(error)
        return
    for name in changed:
        yield f"{name_of(folder, states.path(name))} is missing, or not what was written"


_VOUCHED = (
    NAME, GUARD, lock.NAME, "log.txt", "experiment.toml", "transcript/round-*.safetensors", "round-*.safetensors",
    "states/*.safetensors", "*.png", "report.html", "tensorboard/*", "deployment/*", ".*.tmp", "*/.*.tmp",
)  # fmt: skip
"""Files that a manifest does not name: it has hashes of rounds and settings, states have a manifest of their own, and
all others are drawn anew from what it names, or read by nobody."""


def _unnamed(folder: Path, manifest: Manifest | None) -> list[str]:
    """The files in the folder of a run that its manifest should name and does not."""
    named = manifest.files if manifest else {}
    names = (name_of(folder, path) for path in files_below(folder))
    return [name for name in names if name not in named and not any(fnmatchcase(name, kind) for kind in _VOUCHED)]
