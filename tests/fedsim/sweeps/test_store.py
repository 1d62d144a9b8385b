"""A finished cell is never made again, unless it was damaged; what was interrupted goes on to the same rows."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from fedsim.api import pipeline
from fedsim.api.cell_runner import job_runner
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.inversion.matching import GradientInversion
from fedsim.sweeps import store as storing
from fedsim.sweeps.board import SweepBoard
from fedsim.sweeps.file import parse_sweep
from fedsim.sweeps.plan import SweepPlan, plan_sweep
from fedsim.sweeps.queue import SweepJob
from fedsim.sweeps.store import CellStore, StoreEntry, is_prepared
from fedsim.sweeps.table import read_cells, read_table

SWEEP: dict[str, Any] = {
    "sweep": {"axes": {"attack": [{"name": "sme", "iterations": 3}, {"name": "analytic"}]}},
    "partition": {"name": "iid", "samples_per_client": 8, "test_fraction": 0.25},
    "model": {"name": "mlp", "hidden": [16]},
    "federation": {"clients": 3, "rounds": 2},
    "adversary": {"victims": [0, 1]},
}


def plan_of(store: Path, **sweep: Any) -> SweepPlan:
    tables = deepcopy(SWEEP)
    tables["sweep"] |= sweep
    return plan_sweep(parse_sweep(tables, "study.toml", store), CellStore(store), trust=False)


def work_off(store: Path, plan: SweepPlan) -> dict[str, str]:
    """Do all jobs in this process; what each that failed said."""
    failed = {}
    with job_runner(CellStore(store)) as do:
        for job in [
            *(SweepJob(cell, True) for cell in plan.remaining_federations),
            *(SweepJob(cell, False) for cell in plan.remaining_cells),
        ]:
            try:
                do(job, lambda iteration, iterations, values: None)
            except Exception as error:
                failed[job.name] = str(error)
    return failed


def rows(plan: SweepPlan) -> dict[str, list[dict[str, str]]]:
    """By attack, its rows without what depends on the clock."""
    found = {cell.point.labels["attack"]: plan.finished_cells[cell.key].rows for cell in plan.cells}
    return {attack: [{k: v for k, v in row.items() if k != "seconds"} for row in own] for attack, own in found.items()}


def cell(plan: SweepPlan, store: Path, attack: str = "sme") -> StoreEntry:
    return next(CellStore(store).cell(c.key) for c in plan.cells if c.point.labels["attack"] == attack)


def federation(plan: SweepPlan, store: Path) -> StoreEntry:
    return CellStore(store).federation(plan.cells[0].federation)


@pytest.fixture(scope="module")
def finished_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    assert work_off(store, plan_of(store)) == {}
    return store


@pytest.fixture
def own(finished_store: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may change."""
    return Path(shutil.copytree(finished_store, tmp_path / "store"))


@pytest.fixture(scope="module")
def expected(finished_store: Path) -> dict[str, list[dict[str, str]]]:
    return rows(plan_of(finished_store))


def test_a_cell_is_a_run_whose_recording_is_its_federations(finished_store: Path) -> None:
    plan = plan_of(finished_store)
    source, target = federation(plan, finished_store).folder, cell(plan, finished_store).folder
    name = "transcript/round-000001.safetensors"
    assert (source.path / name).samefile(target.path / name)
    for folder in (source, target):
        assert compare_with_manifest(OpenRun(folder.path)).differences == []
        assert folder.report.is_file()
    assert not (target.path / "findings" / "analytic").exists()


def test_every_score_stands_beside_its_floor_accuracy_and_cost(finished_store: Path) -> None:
    found = plan_of(finished_store).finished_cells[plan_of(finished_store).cells[0].key].rows
    assert {row["victim"] for row in found} == {"0", "1"}
    psnr = next(row for row in found if row["metric"] == "psnr")
    assert float(psnr["value"]) > 0
    assert float(psnr["floor"]) > 0
    assert (psnr["better"], psnr["knows_defenses"], psnr["round"], psnr["repeat"]) == ("higher", "0", "1", "0")
    assert 0 <= float(psnr["accuracy"]) <= 1
    assert 0.1 <= float(psnr["guess"]) <= 0.2  # of ten classes the most frequent one
    assert int(psnr["num_evaluated"]) > 100
    assert float(psnr["bytes"]) == 4 * (64 * 16 + 16 + 16 * 10 + 10)
    assert float(psnr["seconds"]) >= 0
    assert (psnr["proved_epsilon"], psnr["measured_epsilon"]) == ("", "")


def test_finished_cells_are_found_again_from_other_files(finished_store: Path) -> None:
    plan = plan_of(
        finished_store, axes={"attack": [{"name": "analytic", "label": "exact"}, {"name": "sme", "iterations": 4}]}
    )
    assert [c.point.labels["attack"] for c in plan.remaining_cells] == ["sme"]
    assert plan.remaining_federations == []
    assert plan.estimated_seconds is not None
    assert plan_of(finished_store).remaining_cells == []


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)


DAMAGE: Mapping[str, Callable[[StoreEntry], object]] = {
    "transcript/round-000002.safetensors is not what was written": lambda place: _flip(
        place.folder.path / "transcript" / "round-000002.safetensors"
    ),
    "scores.csv is not what was written": lambda place: _flip(place.folder.scores),
    "findings/sme/round-1-client-0-repeat-0.safetensors is not": lambda place: _flip(
        place.folder.path / "findings" / "sme" / "round-1-client-0-repeat-0.safetensors"
    ),
    "metrics.csv cannot be read (No such file": lambda place: place.folder.metrics.unlink(),
    "report.html is missing": lambda place: place.folder.report.unlink(),
    "manifest.json: was altered": lambda place: _flip(place.folder.manifest.path),
    "manifest.json is missing": lambda place: shutil.rmtree(place.folder.path),
    "experiment.toml is not what was written": lambda place: _flip(place.folder.experiment),
    ".json: is damaged": lambda place: place.marker_path.write_bytes(place.marker_path.read_bytes()[:-9]),
    "its bytes are not those that were written": lambda place: place.marker_path.write_text(
        place.marker_path.read_text(encoding="utf-8").replace('"value": "', '"value": "9'), encoding="utf-8"
    ),
}


OF_EACH_CHECK = {
    "transcript/round-000002.safetensors is not what was written", "report.html is missing", ".json: is damaged",
}  # fmt: skip


@pytest.mark.parametrize(
    "sentence",
    [pytest.param(sentence, marks=() if sentence in OF_EACH_CHECK else pytest.mark.thorough) for sentence in DAMAGE],
)
def test_a_damaged_cell_is_named_and_made_again(
    own: Path, expected: object, caplog: pytest.LogCaptureFixture, sentence: str
) -> None:
    DAMAGE[sentence](cell(plan_of(own), own))
    with caplog.at_level(logging.WARNING):
        plan = plan_of(own)
    assert [c.point.labels["attack"] for c in plan.remaining_cells] == ["sme"]
    assert plan.remaining_federations == []
    assert sentence in caplog.text
    assert cell(plan, own).folder.path.name in caplog.text
    assert work_off(own, plan) == {}
    again = plan_of(own)
    assert again.remaining_cells == []
    assert rows(again) == expected
    assert compare_with_manifest(OpenRun(cell(again, own).folder.path)).differences == []


def _rewrite(marker: Path, where: tuple[str, str]) -> None:
    """Edit a marker's rows, and make its hash anew, as anybody can who has read how."""
    said = json.loads(marker.read_bytes())
    said["marker"]["rows"][0]["value"] = "99"
    text = json.dumps([*where, said["marker"]], sort_keys=True)
    said["seal"]["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    marker.write_text(json.dumps(said), encoding="utf-8")


@pytest.mark.thorough
def test_with_a_key_only_cells_that_it_signed_are_taken(
    own: Path, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("a secret that is long enough")
    monkeypatch.setenv("FEDSIM_KEY", str(tmp_path / "key"))
    plan = plan_of(own)
    assert len(plan.remaining_cells) == len(plan.cells) == 2
    assert "(it is not signed), so this cell is made again" in caplog.text
    assert work_off(own, plan) == {}
    signed = plan_of(own)
    assert (signed.remaining_cells, signed.remaining_federations) == ([], [])
    assert rows(signed) == expected
    one, other = (cell(signed, own, attack) for attack in ("sme", "analytic"))
    shutil.copyfile(other.marker_path, one.marker_path)
    assert [c.point.labels["attack"] for c in plan_of(own).remaining_cells] == ["sme"]
    _rewrite(other.marker_path, (other.folder.path.parent.name, other.folder.path.name))
    assert len(plan_of(own).remaining_cells) == 2
    assert "it is not signed with this key" in caplog.text


def test_a_cell_prepared_without_a_key_is_prepared_anew_with_one(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the federation that is made again has the same bytes, down to its seconds."""
    plan = plan_of(own)
    recording = federation(plan, own).read_marker()
    config = next(c.config for c in plan.cells if c.point.labels["attack"] == "sme")
    assert recording is not None
    assert is_prepared(cell(plan, own), config, recording)
    (tmp_path / "key").write_text("a secret that is long enough")
    monkeypatch.setenv("FEDSIM_KEY", str(tmp_path / "key"))
    assert not is_prepared(cell(plan, own), config, recording)


def test_a_damaged_federation_is_made_again_only_where_a_cell_needs_it(own: Path, expected: object) -> None:
    plan = plan_of(own)
    _flip(federation(plan, own).folder.path / "transcript" / "round-000001.safetensors")
    assert plan_of(own).remaining_federations == []  # all its cells are done, each with the recording
    cell(plan, own).remove_marker()
    damaged = plan_of(own)
    assert [c.federation for c in damaged.remaining_federations] == [plan.cells[0].federation]
    assert work_off(own, damaged) == {}
    assert rows(plan_of(own)) == expected


def test_what_a_user_does_with_a_cell_is_no_damage(own: Path) -> None:
    folder = cell(plan_of(own), own).folder
    tables = folder.read_experiment()
    assert tables is not None
    victims = tables.adversary.model_copy(update={"victims": [2]})
    other = pipeline.Adversary(spec=tables.model_copy(update={"adversary": victims}))
    assert len(list(folder.findings.rglob("*.safetensors"))) == 2
    pipeline.attack(OpenRun(folder.path), other)
    assert len(list(folder.findings.rglob("*.safetensors"))) == 3
    assert plan_of(own).remaining_cells == []


def test_a_federation_that_was_interrupted_goes_on(own: Path, expected: object) -> None:
    """After one of its two rounds."""
    plan = plan_of(own)
    place, config = federation(plan, own), plan.cells[0].federation_config
    shutil.rmtree(own)
    short = config.federation.model_copy(update={"rounds": 1})
    pipeline.run(config.model_copy(update={"federation": short}), place.folder)
    place.folder.note_experiment(config)
    first = place.folder.path / "transcript" / "round-000001.safetensors"
    written = first.stat().st_mtime_ns
    assert work_off(own, plan_of(own)) == {}
    assert first.stat().st_mtime_ns == written
    assert rows(plan_of(own)) == expected


@pytest.mark.parametrize("links", [pytest.param(0, marks=pytest.mark.thorough), 3])
def test_a_cell_that_was_interrupted_while_it_was_prepared_is_prepared_anew(
    own: Path, expected: object, monkeypatch: pytest.MonkeyPatch, links: int
) -> None:
    plan = plan_of(own)
    shutil.rmtree(own / "attacks")
    done: list[Path] = []

    def interrupted(source: Path, target: Path) -> None:
        if len(done) == links:
            raise KeyboardInterrupt
        done.append(target)
        os.link(source, target)

    to_do = plan_of(own)
    with monkeypatch.context() as patched:
        patched.setattr(storing, "_link_or_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            work_off(own, to_do)
    assert plan.cells[0].key not in plan_of(own).finished_cells
    assert work_off(own, plan_of(own)) == {}
    assert rows(plan_of(own)) == expected


def test_findings_of_a_cell_that_was_interrupted_are_kept(own: Path, expected: object) -> None:
    plan = plan_of(own)
    place = cell(plan, own)
    place.remove_marker()
    first, second = sorted(place.folder.findings.rglob("*.safetensors"))
    second.unlink()
    written = first.stat().st_mtime_ns
    assert work_off(own, plan_of(own)) == {}
    assert first.stat().st_mtime_ns == written
    assert rows(plan_of(own)) == expected


@pytest.mark.thorough
def test_where_there_are_no_links_files_are_copied(
    own: Path, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*names: object) -> None:
        raise PermissionError(1, "no links here")

    shutil.rmtree(own / "attacks")
    with monkeypatch.context() as patched:
        patched.setattr(os, "link", refused)
        assert work_off(own, plan_of(own)) == {}
    assert rows(plan_of(own)) == expected


@pytest.mark.thorough
def test_an_attack_that_refuses_is_told_and_not_tried_again(own: Path, tmp_path: Path) -> None:
    noise = {"name": "update-noise", "clip": 0.5, "noise_multiplier": 0.1}
    plan = plan_of(own, axes={"attack": [{"name": "spear-ica"}], "defense": [[], [noise]]})
    assert len(plan.remaining_cells) == 2
    assert work_off(own, plan) == {}
    again = plan_of(own, axes={"attack": [{"name": "spear-ica"}], "defense": [[], [noise]]})
    assert again.remaining_cells == []
    board = SweepBoard(tmp_path, CellStore(own), again)
    board.write()
    (failure,) = board.failure_summaries
    assert failure.startswith("attack=spear-ica, defense=update-noise, seed=0: spear-ica, round 1, client 0:")
    assert failure.endswith("; 1 failure more in the report of this cell")  # that of client 1 has the same reason
    table = read_cells(tmp_path)
    assert [row["state"] for row in table.rows] == ["done", "failed"]
    scored = {(row["defense"], row["victim"], row["metric"] != "") for row in read_table(tmp_path).rows}
    assert scored == {(label, victim, label == "none") for label in ("none", "update-noise") for victim in "01"}


def test_an_attack_that_crashed_is_tried_again(own: Path, expected: object, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(own / "attacks")

    def crash(self: object, *args: object, **settings: object) -> None:
        raise MemoryError("none is left")

    with monkeypatch.context() as patched:
        patched.setattr(GradientInversion, "_update", crash)
        assert work_off(own, plan_of(own)) == {}
    plan = plan_of(own)
    assert [c.point.labels["attack"] for c in plan.remaining_cells] == ["sme"]
    assert any("none is left" in sentence for sentence in plan.finished_cells[plan.remaining_cells[0].key].failures)
    assert work_off(own, plan) == {}
    assert rows(plan_of(own)) == expected


@pytest.fixture
def failing(own: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """A store without cells, whose next federation has a failure, one with this traceback, if any."""
    shutil.rmtree(own)

    def arrange(error: Exception | None) -> None:
        def log_missing_epsilon(*arguments: object) -> list[str]:
            logging.getLogger("fedsim.test").error("no epsilon", exc_info=error)
            return ["no epsilon"]

        monkeypatch.setattr(pipeline, "_measure_epsilon", log_missing_epsilon)

    return arrange


@pytest.mark.thorough
def test_what_failed_in_a_federation_is_told_of_its_cells_also_once_it_is_removed(
    own: Path, failing: Callable[[Exception | None], None], tmp_path: Path
) -> None:
    failing(None)
    assert work_off(own, plan_of(own)) == {}
    for _ in range(2):
        plan = plan_of(own)
        assert plan.remaining_cells == []
        board = SweepBoard(tmp_path, CellStore(own), plan)
        board.write()
        assert board.failure_summaries == ["attack=sme, seed=0 and 1 more: no epsilon"]
        assert [row["state"] for row in read_cells(tmp_path).rows] == ["failed", "failed"]
        shutil.rmtree(own / "federations", ignore_errors=True)


@pytest.mark.thorough
def test_a_federation_that_crashed_is_tried_again_and_so_are_its_cells(
    own: Path, failing: Callable[[Exception | None], None], monkeypatch: pytest.MonkeyPatch, expected: object
) -> None:
    failing(MemoryError("none is left"))
    assert work_off(own, plan_of(own)) == {}
    again = plan_of(own)
    assert len(again.remaining_federations) == 1
    assert len(again.remaining_cells) == 2
    monkeypatch.undo()
    assert work_off(own, again) == {}
    assert plan_of(own).remaining_cells == []
    assert [marker.failures for marker in plan_of(own).finished_cells.values()] == [[], []]
    assert rows(plan_of(own)) == expected


def test_a_strangers_file_in_a_cell_is_not_removed(own: Path) -> None:
    place = cell(plan_of(own), own)
    place.remove_marker()
    place.folder.metrics.unlink()
    (place.folder.path / "notes.txt").write_text("mine", encoding="utf-8")
    failed = work_off(own, plan_of(own))
    assert "notes.txt: is not of a run" in failed["attack=sme, seed=0"]
    assert OpenRun(place.folder.path).scores.is_file()
