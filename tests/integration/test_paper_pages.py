"""The pages of papers are what the data say."""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

from fedsim.api.reproduce.papers import KeptFile, KeptResult, read_results
from fedsim.base.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def pages(load_script: Callable[[Path], ModuleType]) -> ModuleType:
    return load_script(ROOT / "docs" / "paper_pages.py")


def test_every_page_is_what_its_template_and_the_figures_say(pages: ModuleType) -> None:
    told = {path: text for path, text in pages.pages().items() if path.read_text(encoding="utf-8") != text}
    assert [path.name for path in told] == [], "figures or words have changed: run python docs/paper_pages.py"
    assert {path.stem for path in (ROOT / "docs" / "papers").glob("*.md")} == set(read_results())


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
    better = first.model_copy(update={"rows": {**first.rows, row: {**first.rows[row], "gain": "+9.9 ± 0.2"}}})
    page.results = KeptFile(paper="sme", kept=[better, *rest], details=page.results.details)
    after = page.text()
    assert "+9.9 ± 0.2; +7.4, *above*" in after
    assert "+9.9" not in before


@pytest.fixture(scope="module")
def kept_figures(load_script: Callable[[Path], ModuleType]) -> Iterator[ModuleType]:
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield load_script(ROOT / "benchmarks" / "kept_figures.py")
    for name in set(sys.modules) - known:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    "of",
    ["lmra", "tgias", pytest.param("lavp", marks=pytest.mark.slow), pytest.param("angular", marks=pytest.mark.slow)],
)
def test_kept_figures_follow_from_the_tables_of_results(kept_figures: ModuleType, of: str) -> None:
    tables = getattr(kept_figures, f"{of}_figures")()
    kept = tomllib.loads((kept_figures.FOLDER / f"{tables['paper']}-computed.toml").read_text(encoding="utf-8"))
    for part in ("kept", "details"):
        without = [kept_figures.without_day(one) for one in kept.get(part, [])]
        assert without == tables.get(part, []), "results have changed: run python benchmarks/kept_figures.py"


def test_what_is_measured_of_another_data_set_appears_in_its_table_and_on_the_page(
    kept_figures: ModuleType, pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty-five images whose MSE grows with the norm: Spearman's correlation is one."""
    lavp, some = kept_figures.lavp, {str(image): float(image) for image in range(25)}
    quality = {("cifar100", "vgg9", distance, score): some for distance in lavp.DISTANCES for score in lavp.SCORES}
    monkeypatch.setattr(lavp, "qualities", lambda: defaultdict(dict, quality))
    monkeypatch.setattr(lavp, "measures", lambda: {("cifar100", "vgg9", "gradient-norm.norm"): some})
    monkeypatch.setattr(kept_figures.local, "table", lambda _: (["image"], [["1"]]))
    tables = kept_figures.lavp_figures()
    kept = [KeptResult(**one, date=date(2026, 11, 25)) for one in tables["kept"]]
    assert [(one.table, one.name) for one in kept] == [(f"table1-cifar100-{d}", "vgg9") for d in lavp.DISTANCES]
    assert kept[0].rows == {"grad_norm": dict.fromkeys(lavp.SCORES, "+1.00 (+1.00 to +1.00)")}
    page = pages.Page("lavp")
    page.results = KeptFile(paper="lavp", kept=[*page.results.kept, *kept], details=page.results.details)
    text = page.text()
    assert "## Tables 1 and 3, CIFAR-100, cosine distance" in text
    assert "+1.00 (+1.00 to +1.00); +0.59, **missed**" in text
