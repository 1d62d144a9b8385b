"""A run folder that came by mail: reading it runs no code and writes nowhere else."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from fedsim.audit.audit import Audit, open_audit
from fedsim.audit.finding_files import save_finding
from fedsim.base.errors import RunError, TrustError
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Reconstruction
from fedsim.report.reported_run import read_audit
from tests.support.commands import Call, call_fedsim
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.forks import ForkedCommand

pytestmark = pytest.mark.isolated

EVIL = "from pathlib import Path\nPath(__file__).with_name('marker').touch()\n"
NAME = "stranger_of_the_mail:Thing"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """`fedsim` in this process, in the folder beside the run, where the stranger's module lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "stranger_of_the_mail", raising=False)
    monkeypatch.delenv("FEDSIM_KEY", raising=False)

    def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
        done = call_fedsim(*words, capfd=capfd)
        done.stderr = done.stderr.split("nanobind: leaked")[0]
        return done

    return call


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = {"partition": {"samples_per_client": 6}, "federation": {"clients": 2}}
    config = make_tiny_config(**small, attack=[{"name": "label-counts"}], adversary={"when": "never", "workers": 1})
    return run_serial(config, tmp_path_factory.mktemp("honest") / "run").path


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    (tmp_path / "stranger_of_the_mail.py").write_text(EVIL)
    return Path(shutil.copytree(honest, tmp_path / "run"))


def naming(run: Path, table: str) -> None:
    """Let the experiment of `run` name the stranger's code; whoever mails it makes the manifest fit."""
    config = OpenRun(run).read_experiment()
    assert config is not None
    tables = config.model_dump(mode="json", exclude_none=True)
    named: Any = {"name": NAME}
    tables[table] = [named] if table in ("attack", "defense", "measure") else named
    (run / "experiment.toml").write_text(tomli_w.dumps({k: v for k, v in tables.items() if v != []}))
    (run / "manifest.json").unlink()


COMMANDS = ["report RUN", "attack RUN", "geometry RUN", "run --resume RUN", "inspect RUN", "data RUN/experiment.toml"]
COMMANDS += ["run RUN/experiment.toml --out new", "train RUN/experiment.toml --out new", "expose RUN"]
COMMANDS += ["expose RUN/experiment.toml --out new"]


@pytest.mark.parametrize("table", ["data", "partition", "model", "strategy", "defense", "attack", "measure"])
def test_no_command_imports_what_the_experiment_of_a_run_folder_names(run: Path, table: str, call: Call) -> None:
    naming(run, table)
    for command in COMMANDS:
        result = call(*command.replace("RUN", "run").split())
        assert result.returncode != 0, command
        assert not (run.parent / "marker").exists(), command
        if not command.startswith("inspect"):
            assert result.returncode == 2, command
            assert f"'{NAME}' is code that the run folder names" in result.stderr
            assert "pass --trust" in result.stderr
            assert len(result.stderr.strip().splitlines()) == 1


def test_trust_is_said_once_and_remembered_nowhere(run: Path, call: Call) -> None:
    naming(run, "defense")
    call("report", "run", "--trust")
    assert (run.parent / "marker").exists()
    (run.parent / "marker").unlink()
    sys.modules.pop("stranger_of_the_mail")
    assert call("report", "run").returncode == 2
    assert not (run.parent / "marker").exists()


def finding_of_theirs(run: Path) -> None:
    about: dict[str, Any] = {
        "attack": "theirs",
        "plugin": NAME,
        "round": "1",
        "rounds": [1],
        "members": [],
        "first_round": 1,
        "victim": 0,
        "repeat": 0,
    }
    about |= {"settings": {}, "changed": {}, "granted": [], "partial_records": "", "fingerprint": "", "variant": ""}
    about |= {"command": "", "code": None, "model_code": None, "warnings": [], "seconds": 1.0}
    about |= {"knowledge": {}, "app": {}}
    claim = Reconstruction(data=torch.zeros(6, 1, 8, 8), labels=torch.zeros(6, dtype=torch.long))
    path = run / "findings" / "theirs" / "round-1-client-0-repeat-0.safetensors"
    save_finding(claim, path, about)
    OpenRun(run).manifest.note(path)


@pytest.mark.parametrize("command", ["report run", "attack run", "attack run run/mine.toml", "inspect run"])
def test_no_command_imports_what_a_finding_names(run: Path, command: str, call: Call) -> None:
    finding_of_theirs(run)
    (run / "mine.toml").write_text('[adversary]\nworkers = 1\n[[attack]]\nname = "label-counts"\n')
    call(*command.split())
    assert not (run.parent / "marker").exists()


def test_trust_holds_for_what_findings_of_a_recording_made_elsewhere_name(run: Path, call: Call) -> None:
    (run / "experiment.toml").unlink()
    finding_of_theirs(run)
    call("report", "run")
    assert not (run.parent / "marker").exists()
    call("report", "run", "--trust")
    assert (run.parent / "marker").exists()


def test_an_attack_file_in_the_run_folder_is_the_runs_own_also_by_a_link(run: Path, call: Call) -> None:
    text = f'[[attack]]\nname = "{NAME}"\n'
    (run / "theirs.toml").write_text(text)
    (run.parent / "link.toml").symlink_to(run / "theirs.toml")
    (run.parent / "elsewhere.toml").write_text(text)
    (run / "out.toml").symlink_to(run.parent / "elsewhere.toml")
    for file in ("run/theirs.toml", "link.toml", "run/out.toml"):
        result = call("attack", "run", file)
        assert (result.returncode, "--trust" in result.stderr) == (2, True), file
        assert not (run.parent / "marker").exists(), file


def test_a_model_that_an_attack_file_of_the_run_folder_names_is_not_imported(run: Path, call: Call) -> None:
    text = f'[[attack]]\nname = "sme"\n[adversary.knowledge]\nmodel = "{NAME}"\n'
    (run / "theirs.toml").write_text(text)
    result = call("attack", "run", "run/theirs.toml")
    assert "adversary.knowledge.model: 'stranger_of_the_mail:Thing' is code" in result.stderr
    assert not (run.parent / "marker").exists()


def test_a_file_of_ones_own_may_name_code(run: Path, call: Call) -> None:
    (run.parent / "mine.toml").write_text(f'[[attack]]\nname = "{NAME}"\n')
    call("attack", "run", "mine.toml")
    assert (run.parent / "marker").exists()


def test_workers_and_readers_are_told_of_trust_and_do_not_assume_it(run: Path) -> None:
    from fedsim.audit.attack_runner import _attack_worker, _optimum_worker

    naming(run, "model")
    spec = make_tiny_config(attack=[{"name": "label-counts"}])
    audit = Audit(folder=OpenRun(run), spec=spec, experiment=Experiment(spec), base_folder=run)
    assert audit.trust is False
    for reads in (_attack_worker(audit.opener, run), _optimum_worker(audit.opener)):
        with pytest.raises(TrustError), reads:
            pass
    with pytest.raises(TrustError):
        open_audit(run, spec)
    with pytest.raises(TrustError):
        read_audit(OpenRun(run), [])


# Links and pipes.

LINKED = ["report.html", "scores.csv", "image-scores.csv", "log.txt", "experiment.toml", "metrics.csv", "manifest.json"]
LINKED += ["lock", ".manifest.lock", "findings/label-counts/round-1-client-0-repeat-0.safetensors"]


@pytest.mark.parametrize("name", LINKED)
def test_nothing_is_written_through_a_link_in_a_run_folder(run: Path, name: str, call: Call) -> None:
    precious = run.parent / "precious"
    precious.write_text("ten years")
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(precious)
    for command in ("attack run", "report run", "run --resume run"):
        result = call(*command.split())
        assert result.returncode != 0, command
        assert "symbolic link" in result.stderr, command
        assert precious.read_text() == "ten years"
    assert path.is_symlink()


@pytest.mark.parametrize("name", ["findings", "findings/label-counts", "transcript", "states", "optima", "deployment"])
def test_a_folder_that_is_a_link_is_not_written_into(run: Path, name: str, call: Call) -> None:
    elsewhere = run.parent / "elsewhere"
    path = run / name
    if path.exists():
        shutil.move(path, elsewhere)
    else:
        elsewhere.mkdir()
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    for command in ("attack run", "report run", "run --resume run"):
        result = call(*command.split())
        assert result.returncode != 0, command
        assert "is a symbolic link, which fedsim does not follow" in result.stderr, command
    assert sorted(elsewhere.iterdir()) == before


def test_temporary_names_cannot_be_foreseen(run: Path, call: Call) -> None:
    precious = run.parent / "precious"
    precious.write_text("ten years")
    for name in ("report.html", "scores.csv", "image-scores.csv", "manifest.json", "metrics.csv"):
        (run / f".{name}.tmp").symlink_to(precious)
    assert call("attack", "run").returncode == 0
    assert call("report", "run").returncode == 0
    assert precious.read_text() == "ten years"


@pytest.mark.parametrize("name", ["transcript/round-000001.safetensors", "log.txt", "lock", "metrics.csv"])
def test_a_pipe_in_a_run_folder_is_a_sentence_and_no_wait_for_ever(run: Path, name: str, call: Call) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    for command in ("attack run", "report run", "inspect run", "run --resume run"):
        result = call(*command.split())
        assert result.returncode != 0, command
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr


# Permissions and paths.


def give_up_permissions() -> None:
    """Root is above permissions by two capabilities, without which this process goes on."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3, this process
    assert not libc.capget(header, sets)
    for place in (0, 1):  # the capabilities in effect, and those that may be
        sets[place] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert not libc.capset(header, sets)


CLOSED = {
    "run/transcript": "inspect run",
    "run/findings": "report run",
    "run/experiment.toml": "attack run",
    "run/transcript/round-000001.safetensors": "inspect run",
    "run/metrics.csv": "inspect run",
    "run": "inspect run",
}
"""What is closed, and the command that wants to read it."""


@pytest.mark.parametrize(
    "closed",
    [
        *("run/transcript", "run/experiment.toml"),
        *(pytest.param(path, marks=pytest.mark.thorough) for path in list(CLOSED)[1:] if not path.endswith("toml")),
    ],
)
def test_what_may_not_be_read_is_one_sentence(closed: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "findings").mkdir(exist_ok=True)
    monkeypatch.chdir(run.parent)
    mode = Path(closed).stat().st_mode
    Path(closed).chmod(0)
    code, _, error = ForkedCommand(*CLOSED[closed].split(), folder=run.parent, before=give_up_permissions).finish()
    Path(closed).chmod(mode)
    error = error.split("nanobind: leaked")[0]
    assert code in (1, 2), error
    assert "Permission denied" in error or "not readable" in error
    assert len(error.strip().splitlines()) == 1, error


def test_a_folder_that_may_not_be_written_is_one_sentence(
    run: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refused(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT and str(path).startswith(str(run)):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    for command in ("report run", "attack run", "run --resume run"):
        result = call(*command.split())
        assert result.stderr.startswith("fedsim: run: cannot be written (Permission denied); fix its"), command
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("out", ["a" * 300, "/".join(["b" * 200] * 30)])
def test_a_path_that_cannot_be_is_one_sentence(out: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('[partition]\nsamples_per_client = 4\n[model]\nname = "linear"\n')
    result = call("run", "x.toml", "--out", out)
    assert result.returncode in (1, 2)
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_a_path_with_a_nul_is_one_sentence(call: Call, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written"), OpenRun(tmp_path / "nul\0here").hold_lock():
        pass
    (tmp_path / "x.toml").write_text('[model]\nname = "linear"\nstart = "nul\\u0000here"\n')
    result = call("run", "x.toml", "--out", "new")
    assert (result.returncode, len(result.stderr.strip().splitlines())) == (2, 1), result.stderr
    assert "model.start" in result.stderr


# --overwrite.


def test_overwrite_removes_a_run_and_nothing_else(run: Path, call: Call) -> None:
    (run.parent / "x.toml").write_text(
        '[partition]\nsamples_per_client = 4\n[model]\nname = "linear"\n[federation]\nengine = "serial"\nclients = 2\n'
    )
    (run / "src").mkdir()
    (run / "src" / "main.py").write_text("years")
    (run / ".git").mkdir()
    result = call("run", "x.toml", "--out", "run", "--overwrite")
    assert result.returncode == 2
    assert "run/src/main.py: is not of a run, so --overwrite does not touch the folder" in result.stderr
    assert (run / "src" / "main.py").read_text() == "years"
    assert (run / "transcript" / "round-000001.safetensors").is_file()
    shutil.rmtree(run / "src")
    assert call("run", "x.toml", "--out", "run", "--overwrite").returncode == 0
    assert not (run / "transcript" / "round-000002.safetensors").exists()


def test_a_project_with_an_experiment_file_is_no_run(call: Call, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "transcript").mkdir(parents=True)
    (project / "experiment.toml").write_text('[model]\nname = "linear"\n[federation]\nclients = 2\n')
    result = call("run", "project/experiment.toml", "--out", "project", "--overwrite")
    assert result.returncode == 2
    assert "project: is not a run folder, so --overwrite does not touch it" in result.stderr
    assert (project / "experiment.toml").is_file()


def test_every_file_of_a_run_is_on_the_list_of_what_may_be_overwritten(run: Path, call: Call) -> None:
    """Else a run could not be overwritten; a new file has to be added there."""
    from fedsim.federation.run_folder import is_run_file

    assert call("attack", "run").returncode == 0
    assert call("geometry", "run").returncode == 0
    files = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [name for name in files if not is_run_file(name)] == []


def test_an_experiment_that_is_no_file_is_not_taken_for_a_recording_made_elsewhere(run: Path, call: Call) -> None:
    (run / "experiment.toml").unlink()
    (run / "experiment.toml").mkdir()
    result = call("report", "run")
    assert result.returncode != 0
    assert "experiment.toml" in result.stderr
    assert json.loads((run / "manifest.json").read_text())["manifest"]["seed"] == 3
    with pytest.raises((RunError, ValueError)):
        OpenRun(run).read_experiment()
    assert validate_tables(Config, {}, "x") is not None
