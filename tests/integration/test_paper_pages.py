"""The pages of papers are what the data say."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from datetime import date
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import tomli_w

from fedsim.api.reproduce.papers import KeptFile, KeptResult, commit_sentence, read_results
from fedsim.base.errors import ConfigError
from studies.running import Study
from studies.writing import add_kept_words, computed_file, computed_part
from tests.support.scripts import load_script

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return load_script(ROOT / "docs" / "paper_pages.py")


def test_every_page_is_what_its_template_and_the_figures_say(pages: ModuleType) -> None:
    told = {path: text for path, text in pages.pages().items() if path.read_text(encoding="utf-8") != text}
    assert [path.name for path in told] == [], "figures or words have changed: run python docs/paper_pages.py"
    assert {path.stem for path in (ROOT / "docs" / "studies" / "papers").glob("*.md")} == set(read_results())


def test_a_result_that_no_page_shows_is_told(pages: ModuleType) -> None:
    page = pages.Page("sme")
    forgotten = KeptResult(table="table6", name="forgotten", date=date(2026, 11, 25), command="c", rows={})
    page.results = KeptFile(paper="sme", kept=[*page.results.kept, forgotten], details=page.results.details)
    with pytest.raises(ConfigError, match=r"shows no \[\('table6', 'forgotten'\)\]"):
        page.text()


def test_a_changed_figure_changes_the_page(pages: ModuleType) -> None:
    page, before = pages.Page("sme"), pages.Page("sme").text()
    first, *rest = page.results.kept
    row = next(iter(first.rows))
    better = first.model_copy(update={"rows": {**first.rows, row: {**first.rows[row], "gain": "+99.9 ± 0.2"}}})
    page.results = KeptFile(paper="sme", kept=[better, *rest], details=page.results.details)
    after = page.text()
    assert "+99.9 ± 0.2; +97.4, *above*" in after
    assert "+99.9" not in before


def test_a_reason_that_was_written_by_hand_outlasts_new_figures(tmp_path: Path) -> None:
    old = {"table": "t", "name": "n", "rows": {"a": 1}, "why_missed": "few images", "date": date(2026, 11, 25)}
    path = tmp_path / "kept.toml"
    path.write_text(tomli_w.dumps({"kept": [old]}))
    [same] = add_kept_words(path, {"kept": [computed_part(old)]})["kept"]
    assert same == old
    [other] = add_kept_words(path, {"kept": [computed_part(old) | {"rows": {"a": 2}}]})["kept"]
    assert other["why_missed"] == "few images"
    assert other["date"] > old["date"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lavp", "angular", "lmra", "lmra_defenses", "lmra_models"])
def test_figures_follow_from_the_rows_of_studies(name: str) -> None:
    tables = Study.open(name).module.figures()
    kept = tomllib.loads(computed_file(name).read_text(encoding="utf-8"))
    for part in ("kept", "details"):
        figures = [computed_part(result) for result in kept.get(part, [])]
        assert figures == tables.get(part, []), f"rows have changed: run python -m studies {name} --write"


def test_correlations_of_new_rows_appear_in_their_table_and_on_the_page(
    pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-five images whose MSE grows with the norm: Spearman's correlation is one."""
    lavp, values = import_module("studies.lavp.study"), {str(image): float(image) for image in range(25)}
    quality = {("cifar100", "vgg9", distance, score): values for distance in lavp.DISTANCES for score in lavp.SCORES}
    monkeypatch.setattr(lavp, "qualities", lambda: defaultdict(dict, quality))
    monkeypatch.setattr(lavp, "measures", lambda: {("cifar100", "vgg9", "gradient-norm.norm"): values})
    monkeypatch.setattr(lavp, "own_tables", lambda *_: [])
    kept = [KeptResult(**result, date=date(2026, 11, 25)) for result in lavp.figures()["kept"]]
    assert [(result.table, result.name) for result in kept] == [
        (f"table1-cifar100-{distance}", "vgg9") for distance in lavp.DISTANCES
    ]
    assert kept[0].rows == {"grad_norm": dict.fromkeys(lavp.SCORES, "+1.00 (+1.00 to +1.00)")}
    page = pages.Page("lavp")
    page.results = KeptFile(paper="lavp", kept=[*page.results.kept, *kept], details=page.results.details)
    text = page.text()
    assert "## Tables 1 and 3, CIFAR-100, cosine distance" in text
    assert "+1.00 (+1.00 to +1.00); +0.90, **missed**" in text


def test_figures_of_another_commit_say_so_in_one_sentence() -> None:
    results = read_results()["sme"].kept
    assert commit_sentence(results) == "Made by commit d8e354e, whose files the command names."
    assert commit_sentence([result for result in results if not result.commit]) == ""
