"""The studies: their plans hold together, pages follow from their rows, and a tiny one of each kind runs."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from fedsim.base.errors import ConfigError, RunError
from fedsim.inversion.distances import Cosine
from fedsim.inversion.priors import BatchNormStatistics
from fedsim.sweeps.file import read_sweep
from fedsim.sweeps.grid import build_grid
from strategies.checkpoint import Checkpoint
from studies import running, writing
from studies.running import Study, StudyFile
from studies.today_optimizers import study as optimizers
from studies.today_priors.study import known_problem
from studies.trust import prices
from studies.trust import study as trust
from tests.support.experiments import TINY

ROOT = Path(__file__).parents[2]
NAMES = running.study_names()
SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
def test_a_study_says_what_it_asks_and_has_a_plan(name: str) -> None:
    study = Study.open(name)
    assert study.file.about.strip()
    if (study.folder / "sweep.toml").exists():
        assert build_grid(read_sweep(study.folder / "sweep.toml")).points
    elif not name.startswith("lavp"):  # whose cells are images of data sets
        assert study.cells()


@pytest.mark.parametrize(
    "name", ["dager", "tableak", "today", "angular", "gate", "trust", "transforms", "null_space", "lmra_sweeps"]
)
def test_every_row_is_of_a_cell(name: str) -> None:
    study = Study.open(name)
    cells, is_row_of = study.cells(), getattr(study.module, "is_row_of", running.matches)
    for row in running.read_rows(study.results)[::20]:
        assert any(is_row_of(row, cell) for cell in cells), row


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name in ("exposure", "gate") else ()) for name in NAMES]
)
def test_pages_have_the_tables_of_the_rows(name: str) -> None:
    for page, tables in writing.page_tables(Study.open(name)).items():
        text = page.read_text(encoding="utf-8")
        for mark, table in tables.items():
            assert writing.replace_marked(text, mark, table) == text, f"run python -m studies {name} --write"


def test_a_study_goes_on_after_its_rows(tmp_path: Path) -> None:
    measured = []

    class Module:
        @staticmethod
        def measure(size: int) -> dict[str, float]:
            measured.append(size)
            return {"value": size / 3}

    study = Study("dager", StudyFile(about="", cells=[{"size": [1, 2, 3]}], number_format=".3g"))
    vars(study)["module"] = Module
    running.run_cells(study, tmp_path / "rows.csv", {"size": "2"}, 1.0)
    running.run_cells(study, tmp_path / "rows.csv", {}, 1.0)
    running.run_cells(study, tmp_path / "rows.csv", {}, 1.0)
    assert measured == [2, 1, 3]
    assert (tmp_path / "rows.csv").read_text() == "size,value\n2,0.667\n1,0.333\n3,1.0\n"


def test_a_row_does_not_take_the_place_of_its_cell(tmp_path: Path) -> None:
    """Its own `value` would be kept instead of the cell's, and the cell measured again."""
    study = Study("dager", StudyFile(about="", cells=[{"value": [64, 256]}]))
    vars(study)["module"] = SimpleNamespace(measure=lambda value: [{"value": value / 100}])
    with pytest.raises(ConfigError, match=r"a row's column 'value' has 0.64, and that of its cell has 64; give one of"):
        running.run_cells(study, tmp_path / "rows.csv", {}, 1.0)
    assert not (tmp_path / "rows.csv").exists()


def test_a_cell_with_victims_that_were_not_scored_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Means over the others would be taken for those of all."""

    class Audit:
        def run(self) -> list[str]:
            return []

        def score(self, failures: list[str]) -> list[dict[str, str]]:
            failures.append("map, round 1, client 0: not scored: no disk space")
            return []

    monkeypatch.setattr(trust, "record_case", lambda case, seed: SimpleNamespace(path=tmp_path))
    monkeypatch.setattr(trust, "open_audit", lambda *_, **__: Audit())
    with pytest.raises(
        ConfigError, match=r"none, seed 1: map, round 1, client 0: not scored: .*; run the same command"
    ):
        trust.measure(seed=1, attack="map", case="none")


def test_a_study_finishes_the_run_that_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = TINY | {"federation": {**TINY["federation"], "rounds": 3}}
    save = Checkpoint.save

    def save_or_die(self: Checkpoint, *args: Any, **keywords: Any) -> None:
        if self.round == 2:
            raise KeyboardInterrupt
        save(self, *args, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", save_or_die)
        with pytest.raises(KeyboardInterrupt):
            running.run_or_resume(tables, tmp_path / "run")
    assert running.run_or_resume(tables, tmp_path / "run").metrics["round"].max() == 3
    running.run_or_resume(tables | {"federation": {**tables["federation"], "timeout": 99.0}}, tmp_path / "run")
    other = tables | {"training": {**tables["training"], "learning_rate": 0.7}}
    with pytest.raises(ConfigError, match=r"run: training.learning_rate: the run was made with .*, and .* 0.7; remove"):
        running.run_or_resume(other, tmp_path / "run")


@pytest.mark.parametrize(
    ("failures", "is_raised"),
    [((), True), (("lmra, round 1, client 0: no",), False), (("lmra, round 1, client 0: no", "round 2: lost"), True)],
)
def test_a_federation_that_fails_is_not_taken_for_attacks_that_refuse(
    failures: tuple[str, ...], is_raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from studies.lmra_models import study

    (folder := tmp_path / "lmra_models" / "adult-1").mkdir(parents=True)
    (folder / "failed.csv").write_text("attack,round,victim,repeat,why\nlmra,1,0,0,no\n")
    (folder / "scores.csv").write_text("attack,victim,metric,value,floor\n")  # of an earlier attempt
    error = RunError("it failed")
    error.failures = failures

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(study, "RUNS", tmp_path)
    monkeypatch.setattr(study, "run_or_resume", fail)
    monkeypatch.setattr(study.fedsim, "open", lambda path: SimpleNamespace(scores=pd.read_csv(path / "scores.csv")))
    if is_raised:
        with pytest.raises(RunError, match="it failed"):
            study.measure("adult", False, 1)
    else:
        assert study.measure("adult", False, 1) == [{"attack": "lmra", "victim": 0, "metric": "refused"}]


def trust_rows(case: str, accuracy: float, share: float, attacks: str = "map learned ig") -> list[dict[str, str]]:
    about = {"case": case, "accuracy": str(accuracy), "knows": "False", "metric": "identified", "floor_guess": ""}
    about |= {"value": str(share), "floor": "0.01", "examples": "8", "other": "", "failed": "", "epsilon": ""}
    names = [{"seed": seed, "victim": str(victim)} for seed in "12" for victim in range(5)]
    return [{**about, **name, "attack": attack} for attack in attacks.split() for name in names]


def test_a_defense_is_worth_its_price_if_none_that_costs_less_leaves_as_few_images() -> None:
    found = [*trust_rows("none", 0.9, 0.9), *trust_rows("noise", 0.8, 0.1), *trust_rows("dearer", 0.7, 0.2)]
    found += [*trust_rows("half tried", 0.9, 0.0, "map ig"), *trust_rows("censor", 0.9, 0.0)]
    found += trust_rows("censor round 11", 0.9, 0.9, "map")  # what it leaves in later rounds counts
    table = prices.table_of_prices(found)
    assert [line.split(" | ")[:3] for line in table.splitlines()[2:]] == [
        ["| none", "–", "90.0 ± 0.0"],
        ["| noise", "10.0 ± 0.0", "10.0 ± 0.0"],
    ]


def test_rows_of_another_commit_are_told_in_one_sentence() -> None:
    assert running.other_commit("", [{}]) == ""
    assert running.other_commit("0000000", []) == ""
    assert "were made by commit 0000000, and this is" in running.other_commit("0000000", [{}])


def test_a_table_without_a_place_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="the page has no place for the table; write '<!-- study x: begin -->'"):
        writing.replace_marked("a page", "x", "table")


@pytest.fixture
def today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The study of photographs with digits in their place, and networks and attacks that take no time."""
    module = import_module("studies.today.study")
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "DATA", {"digits": {"name": "handwriting"}})
    monkeypatch.setattr(module, "SIDES", {"digits": 28})
    small = {"resnet18/4": {"name": "resnet18", "channels": 2}, "vit": {"name": "vit", "dim": 32, "blocks": 1}}
    monkeypatch.setattr(module, "MODELS", small)
    monkeypatch.setattr(module, "PATCHES", 4)
    monkeypatch.setattr(module, "METRICS", ("psnr", "ssim", "recovered"))  # LPIPS needs weights of its own
    few = {name: a if name == "positions" else replace(a, iterations=2) for name, a in module.ATTACKS.items()}
    monkeypatch.setattr(module, "ATTACKS", few)
    for cached in (module.experiment_of, module.weights_of):
        cached.cache_clear()
    return module


MESSAGE = {"data": "digits", "training": "gradient", "weights": "fresh", "seed": 1}


def test_one_image_is_read_from_the_gradients_of_positions(today: ModuleType) -> None:
    message = MESSAGE | {"model": "vit", "statistics": "none"}
    row = today.measure(**message, batch=1, attack="positions")
    assert row["psnr"] > 40
    assert today.claim_path(message | {"batch": 1, "attack": "positions"}).is_file()
    update, knowledge = today.send_message(**message, batch=2)
    with pytest.raises(ValueError, match="positions are read of one image, not of 2; use inverting-gradients"):
        today.ATTACKS["positions"].invert(update, knowledge)
    images, _ = today.victims_images("digits", 2, 1)
    tensors = [value for value in vars(knowledge).values() if hasattr(value, "numel")]
    assert all(tensor.numel() < images.numel() for tensor in tensors)


@pytest.mark.parametrize("statistics", ["frozen", "withheld", "sent"])
def test_a_message_has_the_statistics_that_the_cell_names(today: ModuleType, statistics: str) -> None:
    update, _ = today.send_message(**MESSAGE, model="resnet18/4", batch=2, statistics=statistics)
    name = "stem.1.running_mean"
    assert (name in update.before) == (statistics != "withheld")
    returned = update.payload.values("weights", update.before)
    moved = name in returned and bool((returned[name] != update.before[name]).any())
    assert moved == (statistics == "sent")


def test_statistics_of_the_pass_of_the_gradient_are_those_of_the_engine(today: ModuleType) -> None:
    """The study of optimizers saves the engine's second pass; its distance by parts of the network is the engine's."""
    update, knowledge = today.send_message(**MESSAGE, model="resnet18/4", batch=2, statistics="sent")
    problem = known_problem(update, knowledge, by_batch=True)
    stage = optimizers.Stage(parametrisation=optimizers.Pixels())
    point = stage.parametrisation.start(problem, (2, 1, 28, 28), torch.Generator().manual_seed(0))
    engine = optimizers.make_evaluation(problem, stage.recipe(problem, BatchNormStatistics(exact=True)))(point)
    shared = stage.recipe(problem, optimizers.SharedStatistics.watch(problem.model))
    objective, gradient = optimizers.make_evaluation(problem, shared)(point)
    assert objective == pytest.approx(engine[0])
    torch.testing.assert_close(gradient, engine[1])
    found = problem.gradient(problem.before, point, problem.labels)
    split = optimizers.split_distance(problem, point)
    assert split["distance"] == pytest.approx(Cosine()(found, Cosine().target(problem)).item(), rel=1e-4)
    assert sum(split[f"left_{part}"] for part in optimizers.PARTS) == pytest.approx(1)


def test_line_searches_keep_to_their_budget() -> None:
    """Of the points that L-BFGS saw the lowest counts, but none after the budget."""
    seen = []

    def evaluate(point: torch.Tensor) -> tuple[float, torch.Tensor]:
        seen.append(point.clone())
        return (point**4).sum().item(), 4 * point**3

    best = optimizers.search_lines(evaluate, torch.tensor([1.0, -2.0]), 7)
    assert len(seen) >= 7
    assert torch.equal(best, min(seen[:7], key=lambda point: (point**4).sum().item()))


@pytest.mark.parametrize(
    ("psnr", "lpips", "expected"),
    [
        (["15", "16", "17"], ["0.5", "0.3", "0.7"], "**16.0** (13.5, 18.5) / 0.50 / 0.01"),
        (["9", "16", "17"], ["0.2", "0.25", "0.25"], "14.0 (3.2, 24.8) / **0.23** / 0.01"),
        (["15"], ["0.1"], "15.0 / 0.10 / 0.01"),
        ([], [], "–"),
    ],
)
def test_bold_is_what_beats_the_guess_for_sure(
    today: ModuleType, monkeypatch: pytest.MonkeyPatch, psnr: list[str], lpips: list[str], expected: str
) -> None:
    """Of PSNR more is better, of LPIPS less."""
    monkeypatch.setattr(today, "SCORES", {"psnr": ".1f", "lpips": ".2f"})
    about = {"psnr_floor": "12", "lpips_floor": "0.4", "distance": "0.01", "attack": "sme"}
    rows = [about | {"psnr": p, "lpips": d} for p, d in zip(psnr, lpips, strict=True)]
    assert today.format_scores(rows) == expected


def test_a_sweep_of_unknown_cells_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"studies/labels: no cell is {'case': 'no such'}"):
        running.run_sweep(Study.open("labels"), tmp_path / "rows.csv", {"case": "no such"})


def test_a_sweep_of_some_cells_does_not_take_the_place_of_all_rows() -> None:
    study = Study.open("labels")
    with pytest.raises(ConfigError, match=r"results.csv has the rows of all cells.*; name another file with --out"):
        running.run_sweep(study, study.results, {"case": "no such"})


def test_a_column_that_kept_rows_lack_is_added_to_their_file(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    running.append_rows(path, [{"seed": 1, "psnr": 10.0}], ".3g")
    running.append_rows(path, [{"seed": 2, "psnr": 11.0, "small": 3.0}], ".3g")
    running.append_rows(path, [{"seed": 3, "psnr": 12.0}], ".3g")
    kept = [(row["seed"], row["small"]) for row in running.read_rows(path)]
    assert kept == [("1", ""), ("2", "3.0"), ("3", "")]
