"""Run attacks of other packages, each package in a process that learns nothing of run and truth.

The process is a worker with bare `Surroundings`. It is sent the attack, copies of the rounds that
it reads, the knowledge that it is granted, the victim and a seed. It sends back progress, prints,
warnings, and how it ended: with a finding, whose tensors it leaves in its folder, or with a
sentence. Neither its arguments, environment, open files and import path nor its memory lead to the
run, its data or the experiment, except where it imports a module from the folder of the experiment.
Rounds are copied, not linked: a link would let it change the recording.

Each attack is made in a fork of the process, and what it leaves in the folder is removed. It finds
nothing that was handed to another one: candidates of several victims, some of which share those that
are no members, tell members without a message.

It is no sandbox. The process may read whatever files its user can, and look for the run among them;
and the evaluator imports the module of an attack as well, to read its settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from fedsim.audit.finding_files import finding_from_tensors, tensors_to_save
from fedsim.base.errors import AttackCrash, AttackError, FedsimError, one_line
from fedsim.base.randomness import lend_generators, reseed_globals, seed_globals_with, use_one_thread
from fedsim.base.worker_messages import ErrorMessage, LogMessage, ProgressMessage, ResultMessage
from fedsim.base.worker_process import Forks
from fedsim.base.workers import Surroundings, Worker
from fedsim.interfaces.attack import (
    Attack,
    Outcome,
    Progress,
    Target,
    VictimTask,
    run_sequentially,
    warn,
)
from fedsim.interfaces.findings import Finding
from fedsim.plugins.allowed_code import ALLOWED_CODE_VARIABLE, ANY_CODE
from fedsim.plugins.code_hashes import find_module_file, find_plugin_files, make_crash_error
from fedsim.recording.transcript import Transcript

_HIDDEN_VARIABLES = frozenset({"FEDSIM_DATA", "FEDSIM_CACHE", "FEDSIM_KEY", "PWD", "OLDPWD"})
"""Environment variables that may lead to the run."""
_FINDING = "finding"
"""Name of the file for the tensors of a finding."""
_TENSORS = "tensors"
"""Name of the file for the tensors that an attack is granted."""
_SECONDS_TO_END = 10.0
"""Seconds to wait for a process that was killed."""
_MODULES_WITH_TRUTH = (
    "fedsim.audit.audit",
    "fedsim.audit.attack_runner",
    "fedsim.federation.experiment",
    "fedsim.federation.federated_data",
    "fedsim.federation.open_run",
    "fedsim.federation.update_recipes",
    "fedsim.audit.optima",
    "fedsim.audit.evaluation",
    "fedsim.data",
)
"""Modules whose objects hold the truth, and must not be pickled."""


def attempt(attack: Attack, target: Target, progress: Progress) -> Finding:
    """Run `attack` in this process and return its finding.

    Raises:
        AttackCrash: it raised another error than a FedsimError.
    """
    try:
        # A library that draws from global generators draws something else for each victim and repeat.
        # Threads of its own may build networks, for which fedsim seeds them, too.
        with use_one_thread(), seed_globals_with(target.rng.initial_seed()), lend_generators():
            return attack.run(target, progress)
    except (FedsimError, KeyboardInterrupt):
        raise
    except BaseException as error:  # of foreign code, also sys.exit: say where in it
        raise make_crash_error(error, type(attack)) from error


def attempt_all(attack: Attack, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
    """Run `attack` on each task, in this process.

    Yields:
        Each task with a finding, a FedsimError, or an AttackCrash in place of any other error.

    Raises:
        FedsimError: it ended before all outcomes were there; an AttackCrash in place of any other
            error.
    """
    with use_one_thread():
        try:
            for task, outcome in _with_seeded_globals(attack, tasks):
                if isinstance(outcome, BaseException) and not isinstance(outcome, FedsimError):
                    crashed = make_crash_error(outcome, type(attack))
                    crashed.__cause__ = outcome
                    yield task, crashed
                else:
                    yield task, outcome
        except (FedsimError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # likewise
            raise make_crash_error(error, type(attack)) from error


def _with_seeded_globals(attack: Attack, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
    """Run `attack` on each task; each finds the global generators seeded by its own seed, as in `attempt`."""

    def seeded_tasks() -> Iterator[VictimTask]:
        for task in tasks:
            reseed_globals(task.target.rng.initial_seed())
            yield task

    outcomes = attack.run_several(seeded_tasks())
    while True:
        # Only while it works: the receiver of the outcome has the generators as they were.
        with seed_globals_with(0), lend_generators():
            item = next(outcomes, None)
        if item is None:
            return
        yield item


class Isolation:
    """Processes for attacks of other packages; as a context manager, it ends them.

    Args:
        room: folder in which each process gets a folder of its own, for copies of rounds.
        hidden: folders and files to which nothing that a process learns may lead.
    """

    def __init__(self, room: Path, hidden: Iterable[Path]) -> None:
        self._room = room
        self._hidden = list(hidden)
        self._processes: dict[str, _PackageProcess] = {}

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.end()
        self._processes = {}

    def attempt_all(self, attack: Attack, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Run `attack` on each task, one after the other in the process of its package."""

        def attempt_task(task: VictimTask) -> Finding:
            return self.attempt(attack, task.target, task.progress)

        return run_sequentially(tasks, attempt_task)

    def attempt(self, attack: Attack, target: Target, progress: Progress) -> Finding:
        """Run `attack` in the process of its package, which is started if need be.

        Raises:
            PluginError: no other process can import it.
            AttackCrash: it raised another error than a FedsimError, or its process died.
            AttackError: the rounds cannot be copied.
        """
        # Collect the files of all modules that the process must import.
        files = find_plugin_files(type(attack))
        for granted_code in (target.knowledge.model, target.knowledge.loss):
            modules = getattr(granted_code, "modules", ())
            files = {module: find_module_file(module) for module in modules} | files
        # Reuse the process of the package, unless it cannot import all of them.
        package = type(attack).__module__.partition(".")[0]
        process = self._processes.pop(package, None)
        if process is None or not process.can_import(files):
            if process is not None:
                process.end()
            # Where an import asks for an accelerator, no fork of its process can use that.
            forks: Forks = "after-setup" if target.knowledge.device.type == "cpu" else "before-setup"
            process = _PackageProcess(Path(mkdtemp(dir=self._room)), files, self._hidden, forks)
        try:
            answer = process.run_attack(attack, target, progress)
        except BaseException:
            process.end()
            raise
        self._processes[package] = process
        if isinstance(answer, FedsimError):
            raise answer
        return answer


class _PackageProcess:
    """Process of one package, with its folder."""

    def __init__(self, folder: Path, files: Mapping[str, Path], hidden: Iterable[Path], forks: Forks) -> None:
        self._folder = folder
        self._files = dict(files)
        self._copied_rounds: tuple[Path, list[int]] | None = None
        hidden = list(hidden)
        surroundings = Surroundings(
            folder=folder,
            environment=_environment(hidden),
            import_path=_import_path(files.items(), hidden),
        )
        named_files = [(name, str(file)) for name, file in self._files.items()]
        self._worker = Worker(_package_attacker, (named_files,), surroundings, forks=forks)

    def can_import(self, files: Mapping[str, Path]) -> bool:
        """Return whether it lives, and its import path was made for all of these modules."""
        return self._worker.is_alive and files.items() <= self._files.items()

    def run_attack(self, attack: Attack, target: Target, progress: Progress) -> Finding | FedsimError:
        """Return the finding of `attack`, or the error that it ends in."""
        self._copy_rounds(target.transcript)
        knowledge = target.knowledge
        if knowledge.models is not None:
            # Read models that are loaded lazily.
            models = {client: dict(state) for client, state in knowledge.models.items()}
            knowledge = replace(knowledge, models=models)
        # The process makes the target again, from its copies of the rounds and from the seed.
        who = target.victim, target.members, target.rng.initial_seed()
        target_bytes, tensors = _pickle_without_tensors((attack, knowledge, *who))
        save_file(tensors, self._folder / _TENSORS)
        (self._folder / _FINDING).unlink(missing_ok=True)  # of another victim
        self._worker.submit(target_bytes)
        try:
            return self._await_answer(progress)
        finally:  # or an attack of another package would find it beside its own folder
            (self._folder / _TENSORS).unlink(missing_ok=True)

    def _await_answer(self, progress: Progress) -> Finding | FedsimError:
        """Pass on what the process says until it ends its attack; return how that ended."""
        while True:
            wait([self._worker.line], timeout=0.5)
            for message in self._worker.poll_messages():
                match message:
                    case ProgressMessage():
                        progress(message.iteration, message.iterations, message.values)
                    case LogMessage():
                        warn(one_line(message.text))
                    case ErrorMessage():
                        return message.to_error()
                    case ResultMessage():
                        return _read_finding(self._folder / _FINDING, message.result)

    def end(self) -> None:
        """End the process and all that it started, and remove its folder."""
        self._worker.end(kill=True)
        self._worker.reap(_SECONDS_TO_END)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy_rounds(self, transcript: Transcript) -> None:
        """Copy the rounds of `transcript`, unless they are there from the last time."""
        rounds = transcript.folder, transcript.rounds
        if self._copied_rounds == rounds:
            return
        self._copied_rounds = None
        shutil.rmtree(self._folder / "transcript", ignore_errors=True)
        try:
            transcript.copy_to(self._folder / "transcript")
        except OSError as error:
            raise AttackError(
                f"rounds {transcript.rounds}: cannot be copied to {self._folder} for an attack in a separate process "
                f"({error.strerror}); set TMPDIR to a folder with room"
            ) from error
        self._copied_rounds = rounds


@contextmanager
def _package_attacker(
    files: Sequence[tuple[str, str]],
) -> Iterator[Callable[[bytes, Progress], tuple[str, list[str]]]]:
    """Give the function with which the process of a package attacks, after its modules were imported.

    It returns the kind of the finding, and the names of its tensors in the order in which it has
    them; the tensors are in a file.
    """
    folder = Path.cwd()
    for name, file in files:
        _import_module(name, file)

    def attack_target(target_bytes: bytes, progress: Progress) -> tuple[str, list[str]]:
        with _removed_files(folder):
            finding = attempt(*_restore_target(target_bytes), progress)
        tensors = tensors_to_save(finding)
        save_file(tensors, folder / _FINDING)
        return finding.kind, list(tensors)

    yield attack_target


@contextmanager
def _removed_files(folder: Path) -> Iterator[None]:
    """Remove what was added to `folder` in the block, where the attack on the next victim would find it."""
    before = set(folder.iterdir())
    try:
        yield
    finally:
        for path in set(folder.iterdir()) - before:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _read_finding(file: Path, result: Any) -> Finding | FedsimError:
    """Return the finding, or an error that says what is wrong with it."""
    try:
        kind, names = result
        tensors = load(file.read_bytes())
        return finding_from_tensors(kind, {name: tensors[name] for name in names})
    except AttackError as error:
        return error
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        return AttackCrash(f"its finding cannot be read ({error})")


class _Pickler(pickle.Pickler):
    """Pickler that collects tensors separately and refuses objects that hold the truth.

    A pickled tensor would carry all memory that it is a view of.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[str, Tensor] = {}

    def persistent_id(self, thing: Any) -> str | None:
        """See pickle.Pickler."""
        if not isinstance(thing, Tensor):
            if type(thing).__module__.startswith(_MODULES_WITH_TRUTH):
                raise pickle.PicklingError(f"a {type(thing).__name__} is not for attacks")
            return None
        name = str(len(self.tensors))
        self.tensors[name] = thing.detach().cpu().contiguous().clone()
        return name


class _Unpickler(pickle.Unpickler):
    """Unpickler for what `_Pickler` wrote."""

    def __init__(self, text: bytes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(text))
        self._tensors = tensors

    def persistent_load(self, name: str) -> Tensor:
        """See pickle.Unpickler."""
        return self._tensors[name]


def _restore_target(target_bytes: bytes) -> tuple[Attack, Target]:
    """Return the attack that bytes name, and its target over the copied rounds."""
    attack, knowledge, victim, members, seed = _Unpickler(target_bytes, load_file(_TENSORS)).load()
    target = Target(
        transcript=Transcript(Path("transcript"), facts=False),
        victim=victim,
        members=members,
        knowledge=knowledge,
        rng=torch.Generator().manual_seed(seed),
    )
    return attack, target


def _pickle_without_tensors(things: object) -> tuple[bytes, dict[str, Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(things)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AttackError(f"what it is granted or set to cannot go to a separate process ({error})") from error
    return file.getvalue(), pickler.tensors


def _environment(hidden: Iterable[Path]) -> dict[str, str]:
    """Return our environment variables, without those that name or contain one of `hidden`."""
    hidden_paths = {spelling for path in hidden for spelling in _spellings(path)}
    environment: dict[str, str] = {}
    for name, value in os.environ.items():
        if name not in _HIDDEN_VARIABLES and not any(path in value for path in hidden_paths):
            environment[name] = value
    # What else may be loaded names the code of data sets and models; an attack can import what it likes anyway.
    environment[ALLOWED_CODE_VARIABLE] = ANY_CODE
    if sys.dont_write_bytecode:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return environment


def _spellings(path: Path) -> set[str]:
    """Return the texts by which `path` may be written.

    A relative path of one part is left out: that word may stand for anything.
    """
    spellings = {str(path.absolute()), str(path.resolve())}
    if len(path.parts) > 1:
        spellings.add(str(path))
    return spellings


def _import_path(files: Iterable[tuple[str, Path]], hidden: Iterable[Path]) -> list[str]:
    """Return our import path, without folders that hold one of `hidden` or are in it.

    The folders of the modules in `files` stay.
    """
    needed = {_import_root(name, file) for name, file in files}
    needed.add(Path(__file__).resolve().parents[2])
    hidden_paths = [path.resolve() for path in hidden]
    prefixes = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)]

    def is_hidden(folder: Path) -> bool:
        return any(folder.is_relative_to(path) or path.is_relative_to(folder) for path in hidden_paths)

    entries: list[Path] = []
    for entry in sys.path:
        folder = Path(entry).resolve()
        is_installed = any(folder.is_relative_to(prefix) for prefix in prefixes)
        if folder in needed or is_installed or not is_hidden(folder):
            entries.append(folder)
    return [str(entry) for entry in dict.fromkeys([*entries, *sorted(needed)])]


def _import_root(name: str, file: Path) -> Path:
    """Return the folder from which module `name`, which is in `file`, is imported."""
    return file.parents[name.count(".") + (file.name == "__init__.py")]


def _import_module(name: str, file: str) -> None:
    """Import a module by its name, or from `file` where the name does not lead there."""
    with suppress(ImportError):
        if Path(str(getattr(importlib.import_module(name), "__file__", None))).resolve() == Path(file):
            return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
