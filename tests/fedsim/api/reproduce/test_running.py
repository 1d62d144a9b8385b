"""A small paper's tables are run, compared, kept, and not run twice; the command says what is to be expected."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from rich.console import Console

from fedsim.api import pipeline
from fedsim.api.reproduce.figures import FigureVerdict
from fedsim.api.reproduce.papers import PACKAGE_FOLDER
from fedsim.api.reproduce.recipes import find_recipe
from fedsim.api.reproduce.running import RESULT, _sentence_on_missing, reproduce_table
from fedsim.base.errors import ConfigError
from fedsim.cli import reproduce as command
from fedsim.federation.config import Config
from fedsim.federation.run_folder import RunFolder

ROOT = PACKAGE_FOLDER.parents[2]


@pytest.fixture
def printed_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints on a wide terminal."""
    monkeypatch.setattr(command, "console", Console(width=200))

    def call(name: str | None = None, scale: str | None = None) -> str:
        command.reproduce(name, scale, cells=None, data_dir=None, quiet=True, verbose=False)
        return capsys.readouterr().out

    return call


def test_a_geometry_from_trained_states_is_measured_once_unless_it_was_damaged(
    small_paper: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcome = reproduce_table("p", "plane", "quick")
    assert {(one.row, one.quantity): one.verdict for one in outcome.comparisons} == {
        ("fresh", "best"): FigureVerdict.MET,
        ("fresh", "start"): FigureVerdict.MET,
        ("trained", "best"): FigureVerdict.MET,
        ("trained", "start"): FigureVerdict.MISSED,
    }
    best, start = (outcome.kept.rows["trained"][name] for name in ("best", "start"))
    assert (len(best), len(start)) == (len("0.99 ± 0.01"), len("0.990 ± 0.010")), "digits are the paper's"
    assert outcome.kept.note == "Two clients. ± is the standard deviation over victims and seeds."
    runs = list[float]()

    def run(config: Config, folder: RunFolder, *, overwrite: bool, real: Callable[..., Any] = pipeline.run) -> Any:
        runs.append(config.training.learning_rate)
        return real(config, folder, overwrite=overwrite)

    monkeypatch.setattr(pipeline, "run", run)
    assert reproduce_table("p", "plane", "quick").kept.rows == outcome.kept.rows
    assert runs == []
    files = sorted(Path("runs/reproduce/p-plane-quick").glob("*/geometry.csv"))
    files[0].write_bytes(files[0].read_bytes()[:-9])
    markers = [file.parent.with_name(f"{file.parent.name}.json") for file in files]
    markers[1].write_text(markers[1].read_text().replace('"max cosine": "', '"max cosine": "9'))
    assert reproduce_table("p", "plane", "quick").kept.rows == outcome.kept.rows
    assert f"{files[0].parent}: geometry.csv is not what was written, so this cell is made again" in caplog.text
    assert f"{markers[1]}: is damaged (its bytes are not those that were written)" in caplog.text
    assert runs == [0.01, 0.01]
    runs.clear()
    file = small_paper.parent / "package" / "sweeps" / "p-plane.toml"
    file.write_text(file.read_text().replace("[training]", "[training]\nlearning_rate = 0.02"))
    find_recipe.cache_clear()
    assert reproduce_table("p", "plane", "quick").kept.rows != outcome.kept.rows, "other settings, so another run"
    assert runs == [0.02, 0.02]


@pytest.mark.slow
def test_a_sweep_is_run_and_compared_and_its_result_can_be_kept(
    small_paper: Path, printed_output: Callable[..., str]
) -> None:
    text = printed_output("p", "quick")
    assert "Left out, because scripts make them: p/typed." in text
    assert "p/images, quick: Two clients. About 1 min on one core." in text
    assert "All together about 2 min." in text
    results = [small_paper / "runs" / "reproduce" / f"p-{table}-quick" / RESULT for table in ("images", "plane")]
    kept = tomllib.loads(results[0].read_text())["kept"][0]
    assert (kept["table"], kept["name"], set(kept["rows"])) == ("images", "quick", {"one", "two"})
    keep = run_path(str(ROOT / "docs" / "keep_results.py"))["keep"]
    [written] = keep(results, small_paper)
    assert written.name == "p-quick.toml"
    before = written.read_text()
    assert [one["table"] for one in tomllib.loads(before)["kept"]] == ["plane", "images"], "as in the paper"
    keep(results[:1], small_paper)
    assert written.read_text() == before


def test_the_list_says_of_each_table_what_makes_it_again(small_paper: Path, printed_output: Callable[..., str]) -> None:
    lines = {line.split()[0]: line for line in printed_output().splitlines() if line.strip().startswith("p/")}
    assert "not measured" in lines["p/plane"]
    assert "quick, 1 min; full, 4 h" in lines["p/plane"]
    assert "by_hand.py, 5 min" in lines["p/typed"]


@pytest.mark.parametrize(
    ("name", "scale", "sentence"),
    [
        ("q", None, "reproduce: no paper is called 'q', known: p"),
        ("", "quick", "reproduce: no paper is called '', known: p"),
        ("p/plan", "quick", "reproduce: no table of p that fedsim has is called 'plan', known: plane, images, typed"),
        ("p", "huge", "--scale: expected quick or full, got 'huge'"),
        ("p/typed", "full", "p/typed: no sweep makes this table; in the repository `python benchmarks/by_hand.py` "),
    ],
)
def test_what_cannot_be_done_is_told_in_a_sentence(
    name: str, scale: str | None, sentence: str, small_paper: Path, printed_output: Callable[..., str]
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        printed_output(name, scale)


def test_a_result_says_what_is_not_in_its_figures_and_why() -> None:
    assert _sentence_on_missing([], []) == ""
    assert (
        _sentence_on_missing(["lmra, client 7: why"], ["two"]) == " Failed: lmra, client 7: why. 1 cell does not apply."
    )
    assert _sentence_on_missing(list("abcde"), ["two", "three"]) == " Failed: a; b; c and 2 more. 2 cells do not apply."
