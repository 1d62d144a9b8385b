"""A sweep in Python: cells side by side in processes, their tables and page, and what interrupts them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomli_w

import fedsim
from fedsim.api import sweeping
from fedsim.base.errors import ConfigError, RunError
from fedsim.base.workers import PrepareWork
from fedsim.cli.main import main
from fedsim.cli.options import console
from fedsim.sweeps.board import SweepBoard
from fedsim.sweeps.file import read_sweep
from fedsim.sweeps.queue import JobQueue, SweepJob
from tests.support.forks import ForkedCommand
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[3]
SWEEP: dict[str, Any] = {
    "sweep": {
        "axes": {"attack": [{"name": "sme", "iterations": 1}], "defense": [[], [{"name": "top-k", "fraction": 0.1}]]},
        "workers": 1,
    },
    "partition": {"name": "iid", "samples_per_client": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {"clients": 2, "rounds": 1},
    "adversary": {"victims": [0]},
}
BROKEN = '''
from dataclasses import dataclass

from adversaries.inversion.surrogate_model import SurrogateModelExtension


@dataclass(frozen=True, kw_only=True)
class Broken(SurrogateModelExtension):
    """Raises where it should attack."""

    def _run(self, *arguments, **more):
        raise ZeroDivisionError("my mistake")
'''
Call = Callable[..., tuple[int, str, str]]


def scores(folder: Path) -> pd.DataFrame:
    return fedsim.Sweep(folder).table.drop(columns=["seconds", "run"])


@pytest.fixture(scope="module")
def sweep_steps() -> list[tuple[str, int, int]]:
    """The steps of `sweep_home`, while it was made."""
    return []


@pytest.fixture(scope="module")
def sweep_home(tmp_path_factory: pytest.TempPathFactory, sweep_steps: list[tuple[str, int, int]]) -> Path:
    """A sweep that nobody interrupts, and its store."""
    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patched:
        stay_here(patched)
        fedsim.sweep(SWEEP, home / "sweep", cells=home / "cells", progress=lambda *step: sweep_steps.append(step))
    return home


def stay_here(patched: pytest.MonkeyPatch) -> None:
    """Work on cells in this process, which has imported all that a new one would have to."""

    def in_this_process(
        queue: JobQueue, workers: int, prepare: PrepareWork, arguments: tuple[Any, ...], report: object
    ) -> Iterator[tuple[SweepJob, BaseException | None]]:
        with prepare(*arguments) as do:
            while queue:
                do(job := queue.popleft(), lambda iteration, iterations, values: None)
                yield job, None

    patched.setattr(sweeping, "run_in_processes", in_this_process)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """`fedsim sweep study.toml` in an empty folder: exit code, standard output and standard error."""
    stay_here(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_width", 300)  # COLUMNS counts only until it is made, perhaps by an earlier test

    def call(*options: str, **changes: Any) -> tuple[int, str, str]:
        tables = deepcopy(SWEEP)
        tables["sweep"] |= changes
        Path("study.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")
        monkeypatch.setattr("sys.argv", ["fedsim", "sweep", "study.toml", *options])
        with pytest.raises(SystemExit) as end:
            main()
        told = capfd.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return call


def test_a_sweep_has_tables_and_a_page_and_its_steps_are_told(
    sweep_home: Path, sweep_steps: list[tuple[str, int, int]]
) -> None:
    found = fedsim.Sweep(sweep_home / "sweep")
    num_done = [done for what, done, total in sweep_steps if (what, total) == ("cells", 2)]
    assert num_done == sorted(num_done)  # federations are no cells
    assert set(num_done) == {0, 1, 2}
    assert found.failures == []
    assert set(zip(found.table["defense"], found.table["seed"], strict=True)) == {("none", 0), ("top-k", 0)}
    assert set(found.table["baseline"]) == {0}
    assert found.cells["state"].tolist() == ["done"] * 2
    assert all((sweep_home / "sweep" / run / "report.html").is_file() for run in found.cells["run"])
    assert "sweep.html" in str(found.report())
    assert len(list(sweep_home.glob("cells/federations/*.json"))) == 2


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_sweep_leaves_no_page_of_the_sweep_before(
    end: type[BaseException], sweep_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    fedsim.sweep(SWEEP, out=folder, cells=sweep_home / "cells")
    page = folder / "sweep.html"
    assert page.is_file()

    def interrupted(board: SweepBoard, sweep: object) -> None:
        assert not page.exists()  # nor is it there after a `kill -9` at this moment
        assert set(fedsim.Sweep(folder).cells["seed"]) == {7}
        raise end

    monkeypatch.setattr(sweeping, "_do_jobs", interrupted)
    with pytest.raises(end):
        fedsim.sweep(SWEEP, out=folder, cells=sweep_home / "cells", set={"sweep.seeds": [7]})
    assert "seeds = [" in page.read_text(encoding="utf-8")
    assert fedsim.Sweep(folder).cells["state"].tolist() == ["not done"] * 2


def test_finished_cells_are_not_made_again_in_another_folder(sweep_home: Path, tmp_path: Path) -> None:
    markers = {path: path.stat().st_mtime_ns for path in sweep_home.glob("cells/*/*.json")}
    fedsim.sweep(SWEEP, out=tmp_path / "other", cells=sweep_home / "cells")
    assert {path: path.stat().st_mtime_ns for path in sweep_home.glob("cells/*/*.json")} == markers
    pd.testing.assert_frame_equal(scores(tmp_path / "other"), scores(sweep_home / "sweep"))


def test_a_failing_cell_is_told_in_a_sentence_and_the_others_go_on(here: Call) -> None:
    Path("broken.py").write_text(BROKEN, encoding="utf-8")
    axes = {"attack": [{"name": "broken:Broken", "iterations": 1}, {"name": "sme", "iterations": 1}]}
    code, out, error = here(axes=axes)
    assert code == 1
    (sentence,) = [line for line in error.splitlines() if line.startswith("fedsim: ")]
    assert sentence.startswith("fedsim: attack=broken:Broken, seed=0: broken:Broken, round 1, client 0: ")
    assert "ZeroDivisionError: my mistake" in sentence
    assert "Traceback" not in out + error
    assert "Traceback" in Path("runs/study/log.txt").read_text(encoding="utf-8")
    assert fedsim.Sweep("runs/study").cells["state"].tolist() == ["failed", "done"]
    del sys.modules["broken"]
    Path("broken.py").write_text(BROKEN.replace("raise", "return super()._run(*arguments, **more)\n        raise"))
    assert here(axes=axes)[0] == 0


@pytest.mark.thorough
def test_a_dry_run_says_what_is_shared_done_and_does_not_apply(here: Call) -> None:
    axes = {
        "attack": [{"name": "sme", "iterations": 1}, {"name": "spear-ica"}],
        "model": [{"name": "mlp", "hidden": [16]}, {"name": "lenet"}],
    }
    code, out, error = here("--dry-run", axes=axes)
    assert (code, error) == (0, "")
    assert "2 cells on 1 federation, 0 done; 2 more do not apply; each federation runs once" in out
    assert "attack: sme, spear-ica; model: lenet; seed: 0" in out
    assert "no cell is done yet" in out
    assert not Path("runs").exists()
    assert here(axes=axes)[0] == 0
    assert "all cells are done" in here("--dry-run", axes=axes)[1]
    more = here("--dry-run", axes=axes, seeds=[0, 1])[1]
    assert "remain with 1 worker, estimated from finished cells" in more


def test_where_nothing_leaks_without_a_defense_it_is_said_before_the_other_cells_run(here: Call) -> None:
    axes = {"attack": [{"name": "sme", "iterations": 1}], "defense": [[{"name": "top-k", "fraction": 0.1}]]}
    assert here(axes=axes, stop_without_leak=True)[0] == 0
    log = Path("runs/study/log.txt")
    assert "no attack shows a leak (sme; 1 victim)" in log.read_text(encoding="utf-8")
    cells = fedsim.Sweep("runs/study").cells
    assert cells[["defense", "added", "state"]].values.tolist() == [["top-k", 0, "skipped"], ["none", 1, "done"]]
    assert "attack more victims" in cells["reason"][0]
    assert "(sweep.stop_without_leak)" in cells["reason"][0]
    assert len(list(Path("runs/cells").glob("federations/*.json"))) == 1  # that of the control
    assert here(axes=axes)[0] == 0
    assert "the other cells still run" in log.read_text(encoding="utf-8")
    assert fedsim.Sweep("runs/study").cells["state"].tolist() == ["done", "done"]


def test_a_dry_run_says_which_controls_are_added(here: Call) -> None:
    axes = {"defense": [[{"name": "top-k", "fraction": fraction}] for fraction in (0.1, 0.2)]}
    out = here("--dry-run", axes={"attack": [{"name": "sme", "iterations": 1}], **axes})[1]
    assert "3 cells on 3 federations, 0 done; 1 of the cells is a control without a defense, added" in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "moments",
    [
        ["attacks/*/*"],
        pytest.param(["federations/*/transcript/*"], marks=pytest.mark.slow),
        pytest.param(["federations/*.json", "attacks/*.json"], marks=pytest.mark.slow),
    ],
)
def test_kill_9_changes_nothing_in_the_table(
    moments: list[str], sweep_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as soon as each of these files is there, then begun once more."""
    file = tmp_path / "study.toml"
    file.write_text(tomli_w.dumps(SWEEP), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for moment in moments:
        process = ForkedCommand("sweep", "study.toml", "-q", folder=tmp_path)
        while process.poll() is None and not list((tmp_path / "runs" / "cells").glob(moment)):
            time.sleep(0.01)
        process.kill()
        wait_until(lambda process=process: process.poll() is not None)
        assert process.poll() == -signal.SIGKILL
    stay_here(monkeypatch)
    fedsim.sweep(file, out=tmp_path / "runs" / "study", cells=tmp_path / "runs" / "cells")
    pd.testing.assert_frame_equal(scores(tmp_path / "runs" / "study"), scores(sweep_home / "sweep"))


@pytest.mark.slow
def test_ctrl_c_leaves_tables_of_what_is_done(sweep_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(tomli_w.dumps(SWEEP | {"sweep": SWEEP["sweep"] | {"workers": 2}}), encoding="utf-8")
    # A test run that a script started in the background ignores the signal, and so would its children.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heed}; from fedsim.cli.main import main; main()", "sweep", "study.toml", "-q"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list((tmp_path / "runs" / "cells").glob("federations/*.json")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        told = process.communicate()[1]
    assert process.returncode == 1
    assert told == "fedsim: interrupted; the same `fedsim sweep` continues with the remaining cells\n"
    assert "not done" in set(fedsim.Sweep(tmp_path / "runs" / "study").cells["state"])
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    pd.testing.assert_frame_equal(scores(tmp_path / "runs" / "study"), scores(sweep_home / "sweep"))


@pytest.mark.slow
def test_two_sweeps_share_a_store_at_the_same_time(sweep_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(tomli_w.dumps(SWEEP), encoding="utf-8")
    command = [sys.executable, "-c", "from fedsim.cli.main import main; main()", "sweep", "study.toml", "-q", "--out"]
    both = [subprocess.Popen([*command, name], cwd=tmp_path) for name in ("a", "b")]
    assert [process.wait() for process in both] == [0, 0]
    for name in ("a", "b"):
        pd.testing.assert_frame_equal(scores(tmp_path / name), scores(sweep_home / "sweep"))


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds notes\.txt and no sweep; move it away, or"):
        fedsim.sweep(SWEEP, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_sweep_that_is_in_no_file_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="out: a sweep that is in no file has no name; name its folder"):
        fedsim.sweep(SWEEP)


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cells").write_text("a file")
    with pytest.raises(RunError, match=r"cells/federations: cannot be written .*; choose another --cells"):
        fedsim.sweep(SWEEP, out=tmp_path / "sweep", cells=tmp_path / "cells")


@pytest.mark.ray
def test_a_cluster_that_does_not_answer_is_named_and_nothing_is_lost(sweep_home: Path, tmp_path: Path) -> None:
    axes = {"attack": [{"name": "sme", "iterations": 1}, {"name": "sme", "iterations": 2}]}
    changes = {"sweep.on": "ray", "sweep.address": "127.0.0.1:1", "sweep.axes.attack": axes["attack"]}
    with pytest.raises(RunError, match=r"sweep\.address: no Ray cluster .* '127\.0\.0\.1:1'"):
        fedsim.sweep(SWEEP, out=tmp_path / "sweep", cells=sweep_home / "cells", set=changes)
    found = fedsim.Sweep(tmp_path / "sweep")
    assert sorted(found.cells["state"]) == ["done", "done", "not done", "not done"]
    assert len(found.table)


@pytest.fixture
def ray_head() -> Iterator[str]:
    """The address of a Ray cluster of this one host, as `ray start --head` makes it; it listens on loopback."""
    ray = shutil.which("ray", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if ray is None:
        pytest.skip("there is no `ray` command, so no cluster can be started")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # a short path, for sockets are files in it
        command = [ray, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2"]
        more = ["--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}"]
        with (Path(folder) / "said.txt").open("wb") as said:
            head = subprocess.Popen([*command, *more], stdout=said, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while b"Ray runtime started" not in (text := (Path(folder) / "said.txt").read_bytes()):
                assert head.poll() is None, text.decode()
                assert time.monotonic() < deadline, text.decode()
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()  # with --block, it ends what it started
            head.wait()


@pytest.mark.slow
@pytest.mark.ray
def test_a_sweep_on_a_cluster_that_is_there_already_has_the_same_table(
    ray_head: str, sweep_home: Path, tmp_path: Path
) -> None:
    changes = {"sweep.on": "ray", "sweep.address": ray_head, "sweep.workers": 2}
    found = fedsim.sweep(SWEEP, out=tmp_path / "sweep", cells=tmp_path / "cells", set=changes)
    assert found.failures == []
    assert found.cells["state"].tolist() == ["done"] * 2
    pd.testing.assert_frame_equal(scores(tmp_path / "sweep"), scores(sweep_home / "sweep"))


DIES = """
import os
from dataclasses import dataclass
from typing import ClassVar
import fedsim
from clients.defenses.update_noise import UpdateNoise

@dataclass(frozen=True)
class DiesOnce(fedsim.Defense):
    "Ends its process once."
    note: str
    paper: ClassVar = UpdateNoise.paper
    def on_update(self, update, context):
        try:
            os.close(os.open(self.note, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return update
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_job_whose_actor_died_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dies_once.py").write_text(DIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    tables = {
        "sweep": {"on": "ray", "workers": 2, "seeds": [1, 2], "axes": {"attack": [{"name": "sme", "iterations": 2}]}},
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [8]},
        "federation": {"clients": 3, "rounds": 1},
        "defense": [{"name": "dies_once:DiesOnce", "note": str(tmp_path / "note")}],
    }
    found = fedsim.sweep(tables, out=tmp_path / "sweep", cells=tmp_path / "cells")
    assert (tmp_path / "note").exists()
    assert found.failures == []
    assert set(found.cells["state"]) == {"done"}


def test_the_example_is_a_grid_of_attacks_defenses_strengths_and_seeds(tmp_path: Path) -> None:
    """Every cell of it applies; `sweep_home` shows that such a file runs."""
    from fedsim.sweeps.plan import plan_sweep
    from fedsim.sweeps.store import CellStore

    file = ROOT / "examples" / "sweep.toml"
    plan = plan_sweep(read_sweep(file), CellStore(tmp_path), trust=False)
    assert plan.inapplicable == []
    assert len(plan.cells) == 2 * 5 * 3
    assert len(plan.remaining_federations) == 5 * 3


def test_the_grid_of_the_page_is_one() -> None:
    page = (ROOT / "docs" / "how-to" / "run-a-sweep.md").read_text(encoding="utf-8")
    block = next(block for block in page.split("```toml\n")[1:] if "[sweep.axes]" in block).split("```")[0]
    from fedsim.sweeps.file import parse_sweep
    from fedsim.sweeps.grid import build_grid

    grid = build_grid(parse_sweep(tomllib.loads(block), "page", ROOT / "examples"))
    assert len(grid.points) == (2 * 3 - 2) * 2 * 3
