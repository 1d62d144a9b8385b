"""Compare a run folder with its manifest, to detect changes since the run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

from fedsim.base.errors import ConfigError, FedsimError, join_first, number_of
from fedsim.federation import lock
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import is_run_file, list_files
from fedsim.federation.settings import changed_settings, flat_settings
from fedsim.federation.states import TrainingStates
from fedsim.plugins import registry
from fedsim.recording.header import RECORDING_FOLDER, Header, hash_state
from fedsim.recording.manifest import (
    LOCK_FILE,
    MANIFEST_FILE,
    SEALED_FILE,
    Manifest,
    chain_hash,
    file_hash,
    run_name,
)
from fedsim.recording.sealed_files import read_sealed_file
from fedsim.recording.seals import KEY_VARIABLE, signing_key
from fedsim.recording.transcript import Transcript

_MAX_LISTED = 10
"""Most rounds or files that a sentence names."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of comparing a run with its manifest.

    Attributes:
        manifest: of the run; None where there is none, or it was altered.
        differences: a sentence for each part that is not as it was written.
        remark: how far the verdict can be relied on.
    """

    manifest: Manifest | None
    differences: list[str]
    remark: str = ""

    @property
    def text(self) -> str:
        """Return the verdict in a line."""
        if self.manifest is None:
            return "; ".join(filter(None, [*self.differences, self.remark]))
        name = f"run {self.manifest.run}: "
        if self.differences:
            return name + f"not as it was written: {'; '.join(self.differences)}"
        files = number_of(len(self.manifest.files), "file")
        counts = f"{number_of(len(self.manifest.rounds), 'round')} and {files} match {MANIFEST_FILE}"
        return f"{name}{counts}, {self.remark}"


def compare_with_manifest(run: OpenRun) -> Verdict:
    """Compare rounds, settings and all other files of a run with its manifest.

    Of a round only the header is compared; `Transcript` checks the states when it reads them.
    """
    secret = signing_key()
    if run.path.resolve().name == RECORDING_FOLDER:
        run = OpenRun(run.path.parent)
    try:
        manifest = run.manifest.read_again()
    except FedsimError as error:
        return Verdict(manifest=None, differences=[str(error)])
    if manifest is None:
        return _verdict_without_manifest(run)
    unlisted = _find_unlisted_files(run, manifest)
    differences = [
        *_compare_rounds(run, manifest),
        *_compare_settings(run, manifest),
        *_compare_files(run, manifest, unlisted),
    ]
    # A signature vouches for the run under the name that it was begun with.
    if secret and not manifest.signed:
        differences.append(f"{MANIFEST_FILE} is not signed")
    elif secret and manifest.name and manifest.name != (folder_name := run_name(run.path)):
        differences.append(
            f"the signature is for the run '{manifest.name}', but this folder is called '{folder_name}'; restore its "
            "name, unless another run was put in its place"
        )
    if differences and (writer := lock.describe_lock_holder(run.path)):
        differences.append(f"{writer} is writing to it, so look again when that has ended")
    # Say how far the manifest itself can be relied on.
    if secret:
        remark = "signed with this key"
    elif manifest.signed:
        remark = f"signed, with a key that was not given (--key, {KEY_VARIABLE})"
    else:
        remark = "unsigned: whoever can write to the folder could have changed both"
    if foreign := [name for name in unlisted if not is_run_file(name)]:
        remark += f"; {join_first(foreign, _MAX_LISTED)}: not written by fedsim, and not used"
    if manifest.late:
        remark += f"; {MANIFEST_FILE} was begun late, so the origin of earlier files is unknown"
    return Verdict(manifest=manifest, differences=differences, remark=remark)


def start_late_manifest(run: OpenRun, experiment: Experiment | None) -> None:
    """Start a manifest where there is none, with the present hashes of all files.

    A recording that was copied without its manifest is such a case.

    Raises:
        ConfigError: FEDSIM_KEY names a key, which says nothing of what was there before; or the
            recording is not of `experiment`, which the folder's own file describes.
    """
    if os.path.lexists(run.manifest.path):
        return
    if experiment is not None:
        _check_recorded_from(run, experiment)
    run.manifest.check_key(Manifest())
    with run.manifest.edit() as manifest:
        if transcript := _transcript_in_run(run):
            for number in transcript.rounds:
                with suppress(FedsimError):  # a damaged one is reported when the recording is read
                    manifest.add_round(number, transcript.sha256(number))
        if config := run.read_experiment(trust=True):  # nothing is imported by reading it
            manifest.seed, manifest.settings = config.federation.seed, flat_settings(config)
        names = [name for name in _find_unlisted_files(run, manifest) if is_run_file(name)]
        manifest.files = {name: file_hash(run.path / name) for name in names}
        manifest.late = bool(manifest.rounds or manifest.files)


def _check_recorded_from(run: OpenRun, experiment: Experiment) -> None:
    """Raise ConfigError where a recorded round 1 is not of the experiment."""
    transcript = _transcript_in_run(run)
    if transcript is None or 1 not in transcript.rounds:
        return
    try:
        header = transcript.header(1)
    except FedsimError:  # a damaged round is reported when the recording is read
        return
    if differing := _compare_with_experiment(header, experiment):
        raise ConfigError(
            f"{run.experiment}: round 1 of the recording next to it {differing}, so the recording is of another run; "
            "put the experiment file of that run there, or remove this one"
        )


def _compare_with_experiment(header: Header, experiment: Experiment) -> str:
    """Say how a recorded round 1 differs from the model, training and data of an experiment; empty where it does not.

    Strategies of others may ask for other training, and defenses that choose examples lower N.
    """
    if list(header.broadcasts) != [hash_state(experiment.initial_state())]:
        return "began with another model than this experiment does"
    strategy = experiment.config.strategy
    if registry.is_builtin("strategies", strategy.name):
        settings = asdict(experiment.training)
        settings["proximal_mu"] = strategy.settings.get("proximal_mu", 0.0)  # FedProx's server adds it
        for name, stated in settings.items():
            recorded = header.config.get(name.replace("_", "-"))
            if recorded not in (None, stated):
                return f"was trained with {name} = {recorded}, and this experiment says {stated}"
    counts = experiment.setting.num_examples
    for reply in header.replies:
        clients = reply.members or [reply.client]
        if unknown := [client for client in clients if client >= len(counts)]:
            return f"is of client {unknown[0]}, too, and this experiment has {number_of(len(counts), 'client')}"
        held = sum(counts[client] for client in clients)
        if reply.num_examples and reply.num_examples > held:
            return f"has N = {reply.num_examples} of client {reply.client}, and in this experiment N is {held}"
    return ""


def explain_missing_manifest(run: OpenRun) -> str:
    """Return why a run without a manifest is not whole; empty where it need not have one."""
    # fedsim writes a manifest into the folder around every folder called `transcript`, and with scores.
    is_ours = run.experiment.exists() or (run.path / RECORDING_FOLDER).is_dir() or run.scores.exists()
    if not is_ours and signing_key() is None:
        return ""
    return f"{run.manifest.path}: is not there, so nothing proves the run whole; it was removed, or the run never began"


def _verdict_without_manifest(run: OpenRun) -> Verdict:
    if missing := explain_missing_manifest(run):
        return Verdict(manifest=None, differences=[missing])
    return Verdict(
        manifest=None,
        differences=[],
        remark=f"no {MANIFEST_FILE} is there, so removed rounds would not be noticed",
    )


def _compare_rounds(run: OpenRun, manifest: Manifest) -> Iterator[str]:
    present: dict[str, str] = {}
    if chain_hash(manifest.rounds) != manifest.chain:
        yield f"the chain over the rounds in {MANIFEST_FILE} does not hold"
    if transcript := _transcript_in_run(run):
        for number in transcript.rounds:
            try:
                present[str(number)] = transcript.sha256(number)
            except FedsimError:
                present[str(number)] = manifest.rounds.get(str(number), "")  # reported when the recording is read
    noted = manifest.rounds
    if missing := [number for number in noted if number not in present]:
        yield f"{_name_rounds(missing)} missing"
    if changed := [number for number in noted if number in present and present[number] != noted[number]]:
        yield f"{_name_rounds(changed)} not what was recorded"
    if new := [number for number in present if number not in noted]:
        killed = ", unless it was killed just then, and resumed records it again" if len(new) == 1 else ""
        yield f"{_name_rounds(new)} there that the run did not record{killed}"


def _transcript_in_run(run: OpenRun) -> Transcript | None:
    """Return the recording in the folder called `transcript`; rounds elsewhere are in no manifest."""
    try:
        return run.recording if (run.path / RECORDING_FOLDER).is_dir() else None
    except FedsimError:
        return None


def _name_rounds(rounds: list[str]) -> str:
    """Return the subject and verb of a sentence about `rounds`."""
    listed = join_first(rounds, _MAX_LISTED)
    return f"rounds {listed} are" if len(rounds) > 1 else f"round {listed} is"


def _compare_settings(run: OpenRun, manifest: Manifest) -> Iterator[str]:
    if manifest.settings is None:
        if run.experiment.exists():
            yield f"{run.experiment.name} is there, though the run was recorded without one"
        return
    try:
        now = flat_settings(run.config)
    except FedsimError as error:
        yield str(error)
        return
    for name, (before, after) in changed_settings(manifest.settings, now).items():
        yield f"{run.experiment.name} says {name} = {after}, the run was made with {before}"


def _compare_files(run: OpenRun, manifest: Manifest, unlisted: Iterable[str]) -> Iterator[str]:
    for name in manifest.files:
        path = run.path / name
        try:
            if not path.is_file():
                yield f"{name} is missing"
            elif not run.manifest.vouches_for(path):
                yield f"{name} is not what was written"
            elif name == SEALED_FILE:
                read_sealed_file(path)
        except FedsimError as error:
            yield str(error)
    for name in filter(is_run_file, unlisted):
        yield f"{name} is there, though {MANIFEST_FILE} does not name it (a kill just then may leave one; attack again)"
    states = TrainingStates(run.states)
    try:
        changed = states.find_missing(states.manifest().get("states", {}))
    except FedsimError as error:
        yield str(error)
        return
    for name in changed:
        yield f"{states.path(name).relative_to(run.path)} is missing, or not what was written"


_UNLISTED_FILES = (
    MANIFEST_FILE, LOCK_FILE, lock.NAME, "log.txt", "experiment.toml",
    "transcript/round-*.safetensors", "round-*.safetensors",
    "states/*.safetensors", "*.png", "report.html", "tensorboard/*", "deployment/*", "dossier.*", ".*.tmp", "*/.*.tmp",
)  # fmt: skip
"""Files that a manifest does not list: it has hashes of rounds and settings, states have a manifest
of their own, and all others are rebuilt from listed files, or read by nobody."""


def _find_unlisted_files(run: OpenRun, manifest: Manifest) -> list[str]:
    """Return the files in a run folder that its manifest should list and does not."""
    names = [path.relative_to(run.path).as_posix() for path in list_files(run.path)]
    return [
        name
        for name in names
        if name not in manifest.files and not any(fnmatchcase(name, pattern) for pattern in _UNLISTED_FILES)
    ]
