"""An attack of another package runs in a separate process: it finds no truth, and an honest one finds the same."""

from __future__ import annotations

import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.finding_files import load_finding
from fedsim.audit.isolation import Isolation, _import_path, _pickle_without_tensors, attempt, attempt_all
from fedsim.base import workers
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Attack, Knowledge, Target, VictimTask
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.forks import ForkedCommand
from tests.support.processes import find_descendants, is_alive, wait_until
from tests.support.shared import make_once

pytestmark = pytest.mark.isolated

STRANGERS = '''
"""Attacks of somebody else."""
import faulthandler, gc, logging, os, signal, sys, time, warnings
from dataclasses import dataclass
from pathlib import Path
import torch
from fedsim.interfaces.attack import Attack, Paper, warn
from fedsim.base.errors import AttackError
from fedsim.interfaces.findings import LocalModel, Reconstruction

@dataclass(frozen=True, kw_only=True)
class Of(Attack):
    """What they have in common."""
    paper = Paper(title="T", authors="A, B", venue="V", year=2020)

def run_folders(words):
    """Every run that some words lead to: their folders, those in them and those that they are in."""
    parts = [Path(part) for word in words for part in str(word).replace("=", os.pathsep).split(os.pathsep)]
    for place in dict.fromkeys(place for part in parts for place in (part, *part.absolute().parents)):
        is_shared = place.name in ("tmp", "", "/") or place.name.startswith(("pytest-", "popen-gw"))  # by other tests
        inside = () if is_shared else place.glob("*/")
        for folder in (place, *inside):
            if (folder / "experiment.toml").is_file() and (folder / "transcript").is_dir():
                yield folder

def open_files():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            pass

@dataclass(frozen=True, kw_only=True)
class Thief(Of):
    """Looks for what the evaluator knows."""
    way: str

    def _run(self, target, progress):
        victim = target.victim
        found = getattr(self, f"_by_{self.way}")(target.transcript, victim)
        if found is None:
            raise AttackError(f"round 1, client {victim}: nothing by {self.way}")
        data, labels = found
        return Reconstruction(data=data, labels=labels)

    def _by_folder(self, transcript, victim):
        words = [transcript.folder, transcript.folder.resolve().parent, os.getcwd(), *sys.argv, *sys.orig_argv]
        words += [*sys.path, *os.environ.values(), *open_files()]
        for folder in run_folders(words):
            return self._of(folder, victim)

    def _by_audit(self, transcript, victim):
        try:
            return self._of(transcript.folder.absolute().parent, victim)
        except Exception:
            return None

    def _of(self, folder, victim):
        from fedsim.audit.audit import open_audit
        truth = open_audit(folder, None).case.truth(victim, 1)
        return truth.data, truth.labels

    def _by_frames(self, transcript, victim):
        frame = sys._getframe()
        while frame is not None:
            for thing in frame.f_locals.values():
                experiment = getattr(thing, "experiment", None)
                if experiment is not None:
                    return experiment.data.train(victim)
            frame = frame.f_back

    def _by_memory(self, transcript, victim):
        for thing in gc.get_objects():
            if type(thing).__name__ == "Truth":
                return thing.data, thing.labels
            if type(thing).__name__ == "Experiment":
                return thing.data.train(victim)

    def _by_facts(self, transcript, victim):
        text = next(transcript.folder.glob("*.safetensors")).read_bytes()
        if b"learning-rate" in text:
            return torch.zeros(6, 1, 8, 8), torch.zeros(6, dtype=torch.long)

    def _by_data(self, transcript, victim):
        for name in ("FEDSIM_DATA", "FEDSIM_CACHE"):
            if name in os.environ:
                return torch.zeros(6, 1, 8, 8), torch.zeros(6, dtype=torch.long)

@dataclass(frozen=True, kw_only=True)
class Honest(Of):
    """Uses all that it is handed."""
    needs = frozenset({"model", "loss", "labels", "value_range", "input_shape", "learning_rate"})
    uses = needs

    def _run(self, target, progress):
        update, knowledge = target.read_update(), target.knowledge
        shape = (update.num_examples, *knowledge.input_shape)
        data = torch.rand(shape, generator=target.rng, requires_grad=True)
        model = knowledge.model()
        loss = knowledge.loss(model(data), knowledge.labels)
        loss = loss + sum((a * b).sum() for a, b in zip(update.pseudo_gradient.values(), model.parameters()))
        [slope] = torch.autograd.grad(loss, [data])
        progress(1, 1, {"objective": loss.detach()})
        trace = {"objective": torch.stack([loss.detach(), loss.detach() * knowledge.learning_rate])}
        return Reconstruction(data=(data - slope).clamp(0, 1).detach(), labels=knowledge.labels, trace=trace)

@dataclass(frozen=True, kw_only=True)
class Decoder(Of):
    """Claims what was returned last, in its order."""
    rounds_needed = "all"
    def _run(self, target, progress):
        state = list(target.transcript.updates(target.victim))[-1].after
        return LocalModel(state={name: state[name] for name in sorted(state, reverse=True)})

@dataclass(frozen=True, kw_only=True)
class Ends(Of):
    """Ends its process, or this attack of it."""
    how: str
    def _run(self, target, progress):
        if target.victim != (2 if self.how == "SIGSEGV" else 0):
            return Reconstruction(data=torch.zeros(6, 1, 8, 8), labels=torch.zeros(6, dtype=torch.long))
        if self.how == "sys.exit":
            sys.exit(0)
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "os._exit":
            os._exit(0)
        if self.how == "nothing":
            print("printed by a stranger")
            return None
        os.kill(os.getpid(), signal.SIGSEGV)

@dataclass(frozen=True, kw_only=True)
class Warns(Of):
    """Has something to say."""
    def _run(self, target, progress):
        log = logging.getLogger(__name__)
        log.info("nobody asked")
        log.warning("client %d: \\x1b[2Jexpect\\nless", target.victim)
        log.warning("%d words", "no number of")
        warn("by the function for it")
        logging.getLogger("fedsim.adversaries.matching").error("w" * 10000)
        return Reconstruction(data=torch.zeros(6, 1, 8, 8), labels=torch.zeros(6, dtype=torch.long))

victims_so_far = []

@dataclass(frozen=True, kw_only=True)
class Remembers(Of):
    """Keeps what it was told of one victim for the next, as candidates, of which the shared ones are no members."""
    def _run(self, target, progress):
        warnings.warn("as of a library, for each victim the same")
        victims_so_far.append(target.victim)
        if len(victims_so_far) > 1 or Path("victims", "last").exists() or Path("finding").exists():
            raise AttackError(f"remembers {victims_so_far}")
        Path("victims").mkdir()
        Path("victims", "last").touch()
        return Reconstruction(data=torch.zeros(6, 1, 8, 8), labels=torch.zeros(6, dtype=torch.long))

@dataclass(frozen=True, kw_only=True)
class Hangs(Of):
    """Does not come back."""
    pids: str
    def _run(self, target, progress):
        Path(self.pids, str(os.getpid())).touch()
        time.sleep(600)
'''


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    adversary = {"victims": [0, 2], "rounds": [1], "workers": 1, "knowledge": {"labels": True}}
    tables = {"partition": {"samples_per_client": 6}, "federation": {"rounds": 1}, "adversary": adversary}
    config = make_tiny_config(**tables, attack=[{"name": "sme", "iterations": 2}])
    return make_once(tmp_path_factory, "isolation", lambda folder: run_serial(config, folder / "run")) / "run"


@pytest.fixture
def run(recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, and in a folder that can be imported from, the attacks of a stranger."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "isolated_strangers.py").write_text(STRANGERS)
    monkeypatch.syspath_prepend(str(code))
    sys.modules.pop("isolated_strangers", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Path(shutil.copytree(recorded_run, tmp_path / "runs" / "mine"))


def spec(*attacks: dict[str, Any], **adversary: Any) -> AttackFile:
    named = [attack | {"name": f"isolated_strangers:{attack['name']}"} for attack in attacks]
    table = {"victims": [0, 2], "rounds": [1], "workers": 1, "knowledge": {"labels": True}} | adversary
    return validate_tables(AttackFile, {"adversary": table, "attack": named}, "attack.toml")


def here(audit: Audit) -> None:
    """Attack as if the stranger's attacks were ours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Isolation, "attempt", lambda self, *given, **named: attempt(*given, **named))
        assert audit.run() == []


WAYS = ("folder", "audit", "frames", "memory", "facts", "data")


@pytest.mark.usefixtures("fresh_interpreters")
def test_a_thief_finds_no_truth(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the run folder, frames, what is in memory, `open_audit`, facts of the protocol, the data folder."""
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    monkeypatch.setenv("WHERE_I_WORK", f"in {run}")
    monkeypatch.setattr(sys, "argv", ["fedsim", "attack", str(run)])
    tests = str(tmp_path.parent.parent)  # where other tests' runs lie, to which their modules may have led
    path = [entry for entry in sys.path if not entry.startswith(tests) or entry.startswith(str(tmp_path))]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.syspath_prepend(str(run.parent))
    monkeypatch.chdir(run)
    attacks = [{"name": "Thief", "label": way, "way": way} for way in WAYS]
    audit = open_audit(run, spec(*attacks, victims=[0]))
    assert audit.run() == [f"{way}, round 1, client 0: nothing by {way}" for way in WAYS]
    assert audit.score() == []


def test_the_thief_would_find_it_where_the_truth_is(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above could not fail."""
    monkeypatch.setattr(sys, "argv", ["fedsim", "attack", str(run)])
    monkeypatch.syspath_prepend(str(run.parent))
    attacks = [{"name": "Thief", "label": way, "way": way} for way in WAYS if way != "data"]
    here(open_audit(run, spec(*attacks, victims=[0])))


@pytest.mark.parametrize("process", ["fork", pytest.param("fresh", marks=pytest.mark.thorough)])
def test_an_honest_stranger_finds_the_same_to_the_byte(
    process: str, run: Path, recorded_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if process == "fresh":
        monkeypatch.setattr(workers, "subprocess", subprocess)
    other = Path(shutil.copytree(recorded_run, tmp_path / "other"))
    attacks = spec({"name": "Honest", "label": "honest"}, {"name": "Decoder", "label": "decoder"})
    told: list[float] = []
    assert open_audit(run, attacks).run(lambda job, i, n, values: told.append(values["objective"])) == []
    here(open_audit(other, attacks))
    found = sorted((run / "findings").glob("*/*.safetensors"))
    assert len(found) == 4
    for path in found:
        theirs, about = load_finding(path)
        ours, beside = load_finding(other / path.relative_to(run))
        assert list(theirs.tensors) == list(ours.tensors)
        assert all(torch.equal(theirs.tensors[name], tensor) for name, tensor in ours.tensors.items())
        assert about | {"seconds": 0} == beside | {"seconds": 0}
    assert len(told) == 2


def test_a_stranger_that_ends_its_process_fails_alone(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hows = ("sys.exit", "interrupt", "os._exit", "nothing", "SIGSEGV")
    attacks = spec(*({"name": "Ends", "label": how, "how": how} for how in hows))
    failures = open_audit(run, attacks).run()
    file = run.parents[1] / "code" / "isolated_strangers.py"
    line = {how: 1 + STRANGERS.splitlines().index(text) for how, text in (
        ("sys.exit", "            sys.exit(0)"), ("interrupt", "            raise KeyboardInterrupt"))}  # fmt: skip
    assert failures[0] == (
        f"sys.exit, round 1, client 0: it called sys.exit ({file}:{line['sys.exit']}; the traceback is in log.txt)"
    )
    assert failures[1].startswith("interrupt, round 1, client 0: KeyboardInterrupt")
    assert failures[2] == "os._exit, round 1, client 0: its process ended itself, with exit code 0"
    assert failures[3] == "nothing, round 1, client 0: nothing returned NoneType, expected a Finding"
    assert failures[4] == "SIGSEGV, round 1, client 2: its process was killed by SIGSEGV"
    assert len(failures) == 5
    assert len(list((run / "findings").glob("*/*client-*.safetensors"))) == 5
    assert "printed by a stranger" in capfd.readouterr().err


STARTS_THREADS = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(1)
pool.submit(int).result()

@dataclass(frozen=True, kw_only=True)
class Threaded(Remembers):
    def _run(self, target, progress):
        pool.submit(int).result(timeout=5)
        return super()._run(target, progress)
"""


@pytest.mark.usefixtures("fresh_interpreters")  # in forks of the test, pytest keeps what is warned of
@pytest.mark.parametrize("name", ["Remembers", "Threaded"])
def test_a_stranger_remembers_no_other_victim(name: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By memory or files, also where threads of its module are in no fork; what Python warns of is shown once."""
    if name == "Threaded":
        (run.parents[1] / "code" / "isolated_strangers.py").write_text(STRANGERS + STARTS_THREADS)
    assert open_audit(run, spec({"name": name, "label": "remembers"})).run() == []
    assert len(list((run / "findings").glob("*/*client-*.safetensors"))) == 2
    assert capfd.readouterr().err.count("as of a library") == 2  # once with the line of code


def test_what_a_stranger_warns_of_is_logged_and_stays_with_its_finding(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By `warn` or any logger, as one line that no terminal obeys and that is not endless."""
    assert open_audit(run, spec({"name": "Warns", "label": "warns"}, victims=[2])).run() == []
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == ["client 2: [2Jexpect less", "by the function for it", "w" * 299 + "…"]
    [path] = (run / "findings").glob("*/*.safetensors")
    assert load_finding(path)[1]["warnings"] == told


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="who is whose child is told by /proc")
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.thorough)])
def test_nothing_outlives_an_attack_that_is_stopped(
    run: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers, in each a stranger that never calls back: all end with the command, which wrote nothing more."""
    (tmp_path / "pids").mkdir()
    (tmp_path / "attack.toml").write_text(
        '[adversary]\nworkers = 2\nvictims = [0, 2]\nrounds = [1]\n'
        f'[[attack]]\nname = "isolated_strangers:Hangs"\npids = "{tmp_path / "pids"}"\n'
    )  # fmt: skip
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    process = ForkedCommand("attack", run, tmp_path / "attack.toml", folder=tmp_path)
    try:
        wait_until(lambda: process.poll() is not None or len(list((tmp_path / "pids").iterdir())) == 2)
        assert process.poll() is None, process.finish()
        started = find_descendants(process.pid)
        assert {int(pid.name) for pid in (tmp_path / "pids").iterdir()} < set(started)
        assert len(started) == 8  # two workers, their strangers, forks that imported and forks of these that attack
        process.send_signal(number)
        _, _, said = process.finish(10)
        wait_until(lambda: not any(map(is_alive, started)), 5)
        assert not (run / "findings").exists()
        if number == signal.SIGINT:
            assert said == "fedsim: interrupted; the same `fedsim attack` continues with the remaining victims\n"
            assert not list((tmp_path / "temporary").glob("fedsim-*"))
    finally:
        process.kill()


MODEL = (
    "from torch import nn\ndef build():\n"
    "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))\n"
)


def test_a_model_beside_the_attack_file_is_found_and_its_folder_is_all_that_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`module:callable` of a recording made elsewhere."""
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "model_of_a_stranger.py").write_text(MODEL)
    (run / "experiment.toml").unlink()
    knowledge = {"model": "model_of_a_stranger:build", "input_shape": [1, 8, 8], "value_range": [0, 1]}
    attack = {"name": "isolated_strangers:Needs"}
    needs = (
        "\n@dataclass(frozen=True, kw_only=True)\nclass Needs(Of):\n    'Build it.'\n    needs = frozenset({'model'})\n"
        "    def _run(self, target, progress):\n"
        "        weight = target.knowledge.model()[1].weight\n"
        "        return Reconstruction(data=torch.full((6, 1, 8, 8), weight.numel() / 10000), "
        "labels=torch.zeros(6, dtype=torch.long))\n"
    )
    (tmp_path / "code" / "isolated_strangers.py").write_text(STRANGERS + needs)
    sys.modules.pop("model_of_a_stranger", None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tables = {"adversary": {"workers": 1, "knowledge": knowledge}, "attack": [attack]}
    audit = open_audit(run, validate_tables(AttackFile, tables, "x"), beside)
    assert audit.run() == []
    [path] = (run / "findings").glob("*/*.safetensors")
    assert load_finding(path)[0].tensors["data"].max().item() == pytest.approx(0.1024)


def test_the_import_path_leads_neither_to_the_run_nor_to_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, run, data = tmp_path / "project", tmp_path / "project" / "runs" / "x", tmp_path / "data"
    file = tmp_path / "plugins" / "theirs" / "attack.py"
    for folder in (run, data, file.parent):
        folder.mkdir(parents=True)
    file.touch()
    before = list(sys.path)
    monkeypatch.setattr(sys, "path", [*before, str(project), str(run), str(data / "code")])
    found = _import_path([("theirs.attack", file)], [run, data])
    assert str(tmp_path / "plugins") in found
    assert not {str(project), str(run), str(data / "code")} & set(found)
    assert str(project) in _import_path([("mine", project / "mine.py")], [run, data])


class Named(Attack):
    """Of this test's own module."""

    def _run(self, target: Target, progress: object) -> Any:
        draw = torch.rand(1, generator=target.rng).item()
        raise AttackError(f"client {target.victim}: {target.members} of {target.transcript.rounds}, {draw}")


def test_the_target_goes_over_and_what_cannot_is_a_sentence(recorded_run: Path, tmp_path: Path) -> None:
    class Local(Attack):
        """Of no module's own."""

        def _run(self, *given: object) -> Any:
            raise AssertionError

    [(_, sme)] = build_attacks(validate_tables(AttackFile, {"attack": [{"name": "sme"}]}, "x"))
    transcript, rng = Transcript(recorded_run).restrict_to([1]), generator(0)

    def sentence(attack: Attack, knowledge: Knowledge) -> str:
        target = Target(transcript=transcript, victim=0, members=(0, 2), knowledge=knowledge, rng=rng)
        with pytest.raises(AttackError) as caught, Isolation(tmp_path, []) as isolation:
            isolation.attempt(attack, target, lambda *_: None)
        return str(caught.value)

    draw = torch.rand(1, generator=generator(0)).item()
    assert sentence(Named(), Knowledge()) == f"client 0: (0, 2) of [1], {draw}"
    assert sentence(Local(), Knowledge()).startswith("what it is granted or set to cannot go to a separate process (")
    network = nn.Linear(1, 1)
    assert "cannot go" in sentence(sme, Knowledge(model=lambda: network))
    audit = open_audit(recorded_run, None)
    assert "Experiment is not for attacks" in sentence(sme, Knowledge(input_mean=audit.experiment))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


class DrawsFromGlobals(Attack):
    """Draws from the generators of torch, NumPy and Python, as a library would."""

    def _run(self, target: Target, progress: object) -> Any:
        raise AttackError(f"{torch.rand(1).item()} {np.random.rand()} {random.random()}")  # noqa: NPY002


def test_what_a_library_draws_follows_from_the_seed_of_each_attack(recorded_run: Path, tmp_path: Path) -> None:
    """It began at the same state in each process, so that repeats found the same and looked certain."""
    transcript = Transcript(recorded_run).restrict_to([1])

    def order(seed: int) -> VictimTask:
        rng = generator(seed)
        target = Target(transcript=transcript, victim=0, members=(), knowledge=Knowledge(), rng=rng)
        return VictimTask(target=target, progress=lambda *_: None)

    def draw_apart(seed: int) -> str:
        with Isolation(tmp_path, []) as isolation, pytest.raises(AttackError) as caught:
            isolation.attempt(DrawsFromGlobals(), order(seed).target, lambda *_: None)
        return str(caught.value)

    state = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())  # noqa: NPY002
    together = [str(outcome) for _, outcome in attempt_all(DrawsFromGlobals(), map(order, (1, 2, 1)))]
    assert together[0] == together[2] != together[1]
    assert [draw_apart(seed) for seed in (1, 2)] == together[:2]
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), repr(np.random.get_state())) == state[1:]  # noqa: NPY002


class BuildsInThreads(Attack):
    """Builds a network in a thread, for which fedsim seeds the global generators, and waits for it."""

    def _run(self, target: Target, progress: object) -> Any:
        def build() -> float:
            with seed_globals("network"):
                return torch.rand(1).item()

        with ThreadPoolExecutor(1) as pool:
            raise AttackError(f"{pool.submit(build).result(timeout=10)} {torch.rand(1).item()}")


def test_threads_of_an_attack_may_have_generators_seeded(recorded_run: Path) -> None:
    """Else the thread would wait for the attack, which waits for the thread."""
    transcript = Transcript(recorded_run).restrict_to([1])
    target = Target(transcript=transcript, victim=0, members=(), knowledge=Knowledge(), rng=generator(1))
    task = VictimTask(target=target, progress=lambda *_: None)
    ((_, together),) = attempt_all(BuildsInThreads(), [task])
    with pytest.raises(AttackError) as caught:
        attempt(BuildsInThreads(), target, task.progress)
    assert str(together) == str(caught.value)


def test_what_holds_the_truth_cannot_be_handed_over(tmp_path: Path) -> None:
    truth = Truth(data=torch.zeros(1, 1, 2, 2), labels=torch.zeros(1, dtype=torch.long))
    for thing in (truth, ForeignRecording({"0": tmp_path})):
        with pytest.raises(AttackError, match=f"a {type(thing).__name__} is not for attacks"):
            _pickle_without_tensors((thing,))
