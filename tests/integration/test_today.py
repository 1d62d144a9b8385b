"""The study of photographs: its plan, a tiny run of it, and that its page follows from the rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from fedsim.interfaces.knowledge import Knowledge

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield import_module("today_tables")
    for name in set(sys.modules) - known:
        if str(SCRIPTS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def study(tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Digits instead of photographs, and networks and attacks that take no time."""
    study: ModuleType = tables.study
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(study, "RESULTS", tmp_path / "today.csv")
    monkeypatch.setattr(study, "DATA", {"digits": {"name": "handwriting"}})
    monkeypatch.setattr(study, "SIDES", {"digits": 28})
    small = {"resnet18/4": {"name": "resnet18", "channels": 2}, "vit": {"name": "vit", "dim": 32, "blocks": 1}}
    monkeypatch.setattr(study, "MODELS", small)
    monkeypatch.setattr(study, "PATCHES", 4)
    monkeypatch.setattr(study, "METRICS", ("psnr", "ssim", "recovered"))  # LPIPS needs weights of its own
    few = {name: a if name == "positions" else replace(a, iterations=2) for name, a in study.ATTACKS.items()}
    monkeypatch.setattr(study, "ATTACKS", few)
    for kept in (study.experiment_of, study.weights_of):
        kept.cache_clear()
    return study


def test_the_plan_goes_on_victim_by_victim(tables: ModuleType) -> None:
    cells = list(tables.study.cells())
    assert len(set(cells)) == len(cells)
    place = {cell: number for number, cell in enumerate(cells)}
    assert all(place[replace(cell, seed=1)] <= place[cell] for cell in cells)
    assert {cell.batch for cell in cells} == {1, 4, 16}
    both = {(data, weights) for data in ("cifar10", "faces") for weights in ("fresh", "trained")}
    others = {("photographs", "fresh"), ("cifar10", "early")}
    assert {(cell.data, cell.weights) for cell in cells} == both | others
    assert all(cell.batch == 1 for cell in cells if cell.attack == "positions")
    epochs = [cell for cell in cells if cell.training == "epoch"]
    assert {cell.statistics for cell in epochs} == {"none", "frozen", "withheld", "sent"}
    assert all(cell.batch >= tables.study.STEPS for cell in epochs)


def test_a_tiny_study_goes_on_and_has_its_table(
    study: ModuleType, tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [
        *study.of_resnet("digits", 1, "fresh", 1),
        *study.of_vit("digits", 1, "fresh", 1),
        *(study.Cell("vit", "digits", 1, "gradient", "fresh", "none", "positions", seed) for seed in (2, 3)),
        study.Cell("vit", "digits", 4, "epoch", "fresh", "none", "sme", 1),
        study.Cell("resnet18/4", "digits", 8, "epoch", "fresh", "sent", "by-batch-and-statistics", 1),
    ]
    monkeypatch.setattr(study, "cells", lambda: iter(cells[:3]))
    monkeypatch.setattr(sys, "argv", ["today_study.py"])
    study.main()
    assert len(tables.read(study.RESULTS)) == 3
    monkeypatch.setattr(study, "cells", lambda: iter(cells))
    study.main()
    rows = tables.read(study.RESULTS)
    assert len(rows) == len(cells)
    assert all(study.claim(cell).is_file() for cell in cells)
    monkeypatch.setattr(tables, "SCORES", ("psnr", "ssim"))
    monkeypatch.setattr(tables, "DATA", {"digits": "Digits"})
    page = tables.tables(rows).splitlines()
    assert len(page) == 4 + len(cells) - 2  # a title, a head, and the three victims of one setting in one line
    [solved] = [line for line in page if "by positions" in line]
    assert "| 3 |" in solved
    assert "**" in solved


def test_one_image_is_read_from_the_gradients_of_positions(study: ModuleType) -> None:
    cell = study.Cell("vit", "digits", 1, "gradient", "fresh", "none", "positions", 1)
    found = study.attacked(study.ATTACKS["positions"], cell, study.message(cell), study.knowledge(cell))
    images, _ = study.held("digits", 1, 1)
    assert (found.data - images).abs().max() < 1e-3
    several = replace(cell, batch=2)
    with pytest.raises(ValueError, match="positions are read of one image, not of 2; use inverting-gradients"):
        study.attacked(study.ATTACKS["positions"], several, study.message(several), study.knowledge(several))


@pytest.mark.parametrize("statistics", ["frozen", "withheld", "sent"])
def test_a_message_has_the_statistics_that_the_cell_names(study: ModuleType, statistics: str) -> None:
    cell = study.Cell("resnet18/4", "digits", 2, "gradient", "fresh", statistics, "by-batch", 1)
    update = study.message(cell)
    name = "stem.1.running_mean"
    assert (name in update.before) == (statistics != "withheld")
    returned = update.payload.values("weights", update.before)
    moved = name in returned and bool((returned[name] != update.before[name]).any())
    assert moved == (statistics == "sent")


def test_no_attack_of_the_study_is_told_the_images(study: ModuleType) -> None:
    cell = study.Cell("vit", "digits", 1, "gradient", "fresh", "none", "positions", 1)
    images, _ = study.held("digits", 1, 1)
    known: Knowledge = study.knowledge(cell)
    tensors = [value for value in vars(known).values() if hasattr(value, "numel")]
    assert all(tensor.numel() < images.numel() for tensor in tensors)


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
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, psnr: list[str], lpips: list[str], expected: str
) -> None:
    """Of PSNR more is better, of LPIPS less."""
    monkeypatch.setattr(tables, "SCORES", ("psnr", "lpips"))
    about = {"psnr_floor": "12", "lpips_floor": "0.4", "distance": "0.01", "attack": "sme"}
    rows = [about | {"psnr": p, "lpips": d} for p, d in zip(psnr, lpips, strict=True)]
    assert tables.scores(rows) == expected


def test_the_page_has_the_tables_of_the_kept_rows(tables: ModuleType) -> None:
    page = (ROOT / "docs" / "inversion.md").read_text(encoding="utf-8")
    rows = tables.read(tables.study.RESULTS)
    assert f"{tables.BEGIN}\n\n{tables.tables(rows)}\n{tables.END}" in page, "run python benchmarks/today_tables.py"
