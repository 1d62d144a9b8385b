"""Attacks of other packages, each package in a process of its own that is told nothing of the run or of the truth.

It is sent the attack, copies of the rounds that it reads, the knowledge that it is granted, the victim, a seed.
It sends back progress, prints, warnings, and its finding as bytes of safetensors, or a sentence. The process is a
fresh interpreter in a folder of its own. Neither its arguments, environment, open files and import path nor its memory
lead to the run, its data or the experiment, except the folder of a module beside the experiment that it imports.
Rounds are copied, not linked: a link would let it change the recording.

It is no sandbox. The process may read whatever files its user can, and look for the run among them; and the evaluator
imports the module of an attack as well, to read its settings.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from fedsim.attacks import Attack, Knowledge, Order, Outcome, Progress, one_by_one
from fedsim.auditing.workers import cause_of_death, describe, end_with, interpreter, raised
from fedsim.errors import AttackCrash, AttackError, FedsimError, one_line
from fedsim.findings import Finding
from fedsim.plugins.code import crash, file_of, files_of
from fedsim.randomness import one_thread
from fedsim.recording.finding_files import finding_of, to_save
from fedsim.recording.transcript import Transcript

_NAMED = frozenset({"FEDSIM_DATA", "FEDSIM_CACHE", "FEDSIM_KEY", "PWD", "OLDPWD"})
_HOLD_TRUTH = (
    "fedsim.auditing.audit",
    "fedsim.experiments.build",
    "fedsim.experiments.federated_data",
    "fedsim.auditing.optima",
    "fedsim.evaluation",
    "fedsim.datasets",
)


def attempt(
    attack: Attack,
    transcript: Transcript,
    knowledge: Knowledge,
    *,
    victim: int,
    rng: torch.Generator,
    progress: Progress,
) -> Finding:
    """What `attack` finds in this process.

    Raises:
        AttackCrash: it raised something else than a FedsimError.
    """
    try:
        with one_thread():
            return attack.run(transcript, knowledge, victim=victim, rng=rng, progress=progress)
    except (FedsimError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a stranger's, also sys.exit: say where in its code
        raise crash(error, type(attack)) from error


def attempts(attack: Attack, orders: Iterable[Order]) -> Iterator[tuple[Order, Outcome]]:
    """What `attack` finds of each, in this process: a finding, a FedsimError, or an AttackCrash for anything else.

    Raises:
        FedsimError: it ended before it gave all; an AttackCrash for anything else than a FedsimError.
    """
    with one_thread():
        try:
            for order, outcome in attack.run_several(orders):
                if isinstance(outcome, BaseException) and not isinstance(outcome, FedsimError):
                    crashed = crash(outcome, type(attack))
                    crashed.__cause__ = outcome
                    yield order, crashed
                else:
                    yield order, outcome
        except (FedsimError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # as in `attempt`
            raise crash(error, type(attack)) from error


class Isolation:
    """Runs attacks of other packages; as a context manager, it ends their processes.

    Args:
        room: folder in which each process has one of its own; copies of rounds are there.
        hidden: folders and files to which nothing that a process is told may lead.
    """

    def __init__(self, room: Path, hidden: Iterable[Path]) -> None:
        self._room = room
        self._hidden = list(hidden)
        self._strangers: dict[str, _Stranger] = {}

    def __enter__(self) -> Isolation:
        return self

    def __exit__(self, *_: object) -> None:
        for stranger in self._strangers.values():
            stranger.end()
        self._strangers = {}

    def attempts(self, attack: Attack, orders: Iterable[Order]) -> Iterator[tuple[Order, Outcome]]:
        """What `attack` finds of each, one after the other in the process of its package; see `attempt`."""

        def found(order: Order) -> Finding:
            return self.attempt(
                attack,
                order.transcript,
                order.knowledge,
                victim=order.victim,
                rng=order.rng,
                progress=order.progress,
            )

        return one_by_one(orders, found)

    def attempt(
        self,
        attack: Attack,
        transcript: Transcript,
        knowledge: Knowledge,
        *,
        victim: int,
        rng: torch.Generator,
        progress: Progress,
    ) -> Finding:
        """What `attack` finds in the process of its package, which is started if need be.

        Raises:
            PluginError: no other process can import it.
            AttackCrash: it raised something else than a FedsimError, or its process died.
            AttackError: the rounds cannot be copied.
        """
        files = files_of(type(attack))
        for named in (knowledge.model, knowledge.loss):
            files = {module: file_of(module) for module in getattr(named, "modules", ())} | files
        package = type(attack).__module__.partition(".")[0]
        stranger = self._strangers.pop(package, None)
        if stranger is None or not stranger.knows(files):
            if stranger is not None:
                stranger.end()
            stranger = _Stranger(Path(mkdtemp(dir=self._room)), files, self._hidden)
        try:
            answer = stranger.ask(attack, transcript, knowledge, victim, rng.initial_seed(), progress)
        except BaseException:
            stranger.end()
            raise
        self._strangers[package] = stranger
        if isinstance(answer, FedsimError):
            raise answer
        return answer


class _Stranger:
    """The process of one package, and what is in its folder."""

    def __init__(self, folder: Path, files: Mapping[str, Path], hidden: Iterable[Path]) -> None:
        self._folder = folder
        self._files = dict(files)
        self._copied: tuple[Path, list[int]] | None = None
        self._line, theirs = Pipe()
        hidden = list(hidden)
        self._process = subprocess.Popen(
            interpreter(__name__, theirs),
            cwd=folder,
            env=_environment(hidden),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for us
        )
        theirs.close()
        threading.Thread(target=_pass_on, args=(self._process.stdout,), daemon=True).start()
        with suppress(OSError):  # it is dead, which `ask` will notice
            self._line.send_bytes(json.dumps(_import_path(files.items(), hidden)).encode())

    def knows(self, files: Mapping[str, Path]) -> bool:
        """Whether its import path was made for all of these modules."""
        return files.items() <= self._files.items()

    def ask(
        self, attack: Attack, transcript: Transcript, knowledge: Knowledge, victim: int, seed: int, progress: Progress
    ) -> Finding | FedsimError:
        """What `attack` finds, or the sentence that it ends in."""
        log = logging.getLogger(f"fedsim.adversaries.{type(attack).__module__}")
        self._copy(transcript)
        if knowledge.models is not None:
            knowledge = replace(knowledge, models={client: dict(state) for client, state in knowledge.models.items()})
        files = [(name, str(file)) for name, file in self._files.items()]
        order, tensors = _packed((attack, knowledge, victim, seed))
        save_file(tensors, self._folder / "tensors")
        with suppress(OSError):
            self._line.send_bytes(json.dumps(files).encode())
            self._line.send_bytes(order)
        while True:
            said = json.loads(self._hear())
            if "progress" in said:
                progress(*said["progress"])
            elif "warning" in said:
                log.warning("%s", one_line(str(said["warning"])))
            elif "raised" in said:
                return raised(*said["raised"])
            else:
                return _read(said["kind"], self._hear(), said["found"])

    def end(self) -> None:
        """End it, with all that it started, and remove its folder."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._line.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _copy(self, transcript: Transcript) -> None:
        """Copy the rounds of `transcript`, unless they are there from the last time."""
        wanted = transcript.folder, transcript.rounds
        if self._copied == wanted:
            return
        self._copied = None
        shutil.rmtree(self._folder / "transcript", ignore_errors=True)
        try:
            transcript.copy_to(self._folder / "transcript")
        except OSError as error:
            raise AttackError(
                f"rounds {transcript.rounds}: cannot be copied to {self._folder} for an attack in a process of its own "
                f"({error.strerror}); set TMPDIR to a folder with room"
            ) from error
        self._copied = wanted

    def _hear(self) -> bytes:
        """The next thing that it says.

        Raises:
            AttackCrash: it died.
        """
        try:
            while not self._line.poll(0.5):
                if self._process.poll() is not None and not self._line.poll():
                    raise EOFError
            return self._line.recv_bytes()
        except (EOFError, OSError):
            try:
                code = self._process.wait(1)
            except subprocess.TimeoutExpired:
                code = None
            raise AttackCrash(f"its process {cause_of_death(code)}") from None


def serve(line: Connection, parent: int) -> None:
    """What the process of a package does all its life."""
    end_with(parent)

    def progress(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
        numbers = {str(name): float(value) for name, value in values.items()}
        line.send_bytes(json.dumps({"progress": (int(iteration), int(iterations), numbers)}).encode())

    logging.getLogger().addHandler(_ToEvaluator(line))
    with suppress(EOFError):
        while True:
            files, order = json.loads(line.recv_bytes()), line.recv_bytes()
            try:
                for name, file in files:
                    _import(name, file)
                attack, knowledge, victim, seed = _Unpickler(order, load_file("tensors")).load()
                rng = torch.Generator().manual_seed(seed)
                transcript = Transcript(Path("transcript"), facts=False)
                found = attempt(attack, transcript, knowledge, victim=victim, rng=rng, progress=progress)
                tensors = to_save(found)
                finding = save(tensors)
            except BaseException as error:
                line.send_bytes(json.dumps({"raised": describe(error)}).encode())
            else:
                line.send_bytes(json.dumps({"found": list(tensors), "kind": found.kind}).encode())
                line.send_bytes(finding)


class _ToEvaluator(logging.Handler):
    """Hands warnings over, of whatever logger."""

    def __init__(self, line: Connection) -> None:
        super().__init__(logging.WARNING)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            self._line.send_bytes(json.dumps({"warning": record.getMessage()}).encode())
        except Exception:  # its words do not fit its arguments, say, which is no reason for the attack to fail
            self.handleError(record)


def _read(kind: str, finding: bytes, order: list[str]) -> Finding | FedsimError:
    """The finding in `finding`, checked as it is made, or what is wrong with it."""
    try:
        tensors = load(finding)
        return finding_of(kind, {name: tensors[name] for name in order})
    except AttackError as error:
        return error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        return AttackCrash(f"its finding cannot be read ({error})")


class _Pickler(pickle.Pickler):
    """Leaves tensors out, whose memory may be part of something larger, and refuses what holds the truth."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[str, Tensor] = {}

    def persistent_id(self, thing: Any) -> str | None:
        """See pickle.Pickler."""
        if not isinstance(thing, Tensor):
            if type(thing).__module__.startswith(_HOLD_TRUTH):
                raise pickle.PicklingError(f"a {type(thing).__name__} is not for attacks")
            return None
        name = str(len(self.tensors))
        self.tensors[name] = thing.detach().cpu().contiguous().clone()
        return name


class _Unpickler(pickle.Unpickler):
    """The inverse."""

    def __init__(self, text: bytes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(text))
        self._tensors = tensors

    def persistent_load(self, name: str) -> Tensor:
        """See pickle.Unpickler."""
        return self._tensors[name]


def _packed(things: object) -> tuple[bytes, dict[str, Tensor]]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(things)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise AttackError(f"what it is granted or set to cannot go to a process of its own ({error})") from error
    return file.getvalue(), pickler.tensors


def _environment(hidden: Iterable[Path]) -> dict[str, str]:
    """Ours, without what names or contains one of `hidden`."""
    paths = {name for path in hidden for name in _spellings(path)}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _NAMED and not any(path in value for path in paths)
    }
    return kept | ({"PYTHONDONTWRITEBYTECODE": "1"} if sys.dont_write_bytecode else {})


def _spellings(path: Path) -> set[str]:
    """How `path` may be written; as it was given only where that is no single word, which may stand for anything."""
    return {str(path.absolute()), str(path.resolve())} | ({str(path)} if len(path.parts) > 1 else set())


def _import_path(files: Iterable[tuple[str, Path]], hidden: Iterable[Path]) -> list[str]:
    """Ours, without folders that hold one of `hidden` or are in it, but with those of the modules in `files`."""
    needed = {_root(name, file) for name, file in files} | {Path(__file__).resolve().parents[2]}
    away = [path.resolve() for path in hidden]
    found = [Path(entry).resolve() for entry in sys.path]
    system = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
    kept = [
        entry
        for entry in found
        if entry in needed
        or any(entry.is_relative_to(prefix) for prefix in system)
        or not any(entry.is_relative_to(path) or path.is_relative_to(entry) for path in away)
    ]
    return [str(entry) for entry in dict.fromkeys([*kept, *sorted(needed)])]


def _root(name: str, file: Path) -> Path:
    """The folder from which `name`, which is in `file`, is imported."""
    return file.parents[name.count(".") + (file.name == "__init__.py")]


def _import(name: str, file: str) -> None:
    """Import a module by its name, or where that leads elsewhere or nowhere, from its file."""
    with suppress(ImportError):
        if Path(str(getattr(importlib.import_module(name), "__file__", None))).resolve() == Path(file):
            return
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _pass_on(output: Any) -> None:
    """What it prints, to where our errors go; a file of ours among its own would tell it where we are."""
    with suppress(OSError, ValueError):
        while text := output.read(1 << 16):
            sys.stderr.write(text.decode(errors="replace"))
            sys.stderr.flush()
