"""The house speaks the field's language: names, docstrings and words are held to it; see language/code_figures.py.

When one of these fails on a name that you are sure of, add it to the exceptions below and say why.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[1]

FUNCTION_NAMES_ALLOWED = {
    "after": "`Update.before` and `Update.after` are w_t and w_T for every plug-in",
}
"""Names of functions that the rule would refuse, and why they stand."""

CLASS_NAMES_ALLOWED = {
    "Skeleton": "templates, which `fedsim new` copies under the name of the plug-in",
}
"""Class names that stand in two files, and why they do."""

WORDS_NOT_OURS = {
    r"\bslopes?\b": "gradient",
    r"\bholdings\b": "the client's data, or its partition",
    r"\btwins?\b": "overlap, or examples that two clients share",
    r"\bshorten(s|ed|ing)?\b": "clip",
    r"\bgauge\b": "measure",
}
"""Words that a reader of the field would not use, and what it says in their place."""

LINES_ALLOWED = {
    "slope": r"straight|line|fit|regress|linear model",
}
"""Where a word stands for what the field means by it, the line says so."""


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    return load_script(ROOT / "tests" / "language" / "code_figures.py")


@pytest.fixture(scope="module")
def figures(measure: ModuleType) -> Any:
    """Return the figures of the product, which take seconds to count."""
    return measure.code_figures()


@pytest.fixture(scope="module")
def lines(measure: ModuleType) -> list[tuple[str, str]]:
    """Return each line of the product with such a word, in lower case, after its file and number."""
    # Most lines hold none of the words, which one search tells.
    any_word = re.compile("|".join(WORDS_NOT_OURS))
    return [
        (f"{path.relative_to(ROOT)}:{number}", line)
        for path in measure.python_files(measure.PRODUCT)
        for number, line in enumerate(path.read_text().lower().splitlines(), start=1)
        if any_word.search(line)
    ]


def test_each_function_is_named_by_a_verb_or_a_noun(measure: ModuleType, figures: Any) -> None:
    names = figures.function_names
    bare = sorted(name for name in names if measure.is_bare(name) and name not in FUNCTION_NAMES_ALLOWED)
    assert not bare, f"named by a participle, an adverb or a preposition alone: {', '.join(bare)}"


def test_each_class_name_stands_once(figures: Any) -> None:
    twice = {name: files for name, files in figures.classes_twice.items() if name not in CLASS_NAMES_ALLOWED}
    assert not twice, "\n".join(f"class {name}: {', '.join(files)}" for name, files in twice.items())


def test_exceptions_are_still_needed(figures: Any) -> None:
    unused = [name for name in FUNCTION_NAMES_ALLOWED if not figures.function_names[name]]
    unused += [name for name in CLASS_NAMES_ALLOWED if name not in figures.classes_twice]
    assert not unused, f"take these out of the exceptions: {', '.join(unused)}"


def test_docstrings_open_with_a_verb_and_stand_by_themselves(figures: Any) -> None:
    assert figures.share(figures.verb_openings, figures.function_docstrings) >= 70
    assert figures.share(figures.leaning_openings, figures.docstrings) < 2


def test_values_are_named_after_what_they_hold(figures: Any) -> None:
    assert figures.share(figures.vague_assignments, figures.assignments) < 1


def test_comprehensions_do_not_become_more(figures: Any) -> None:
    """The target is 25 in 1,000 lines without docstrings; this bound falls with each file that is read again."""
    assert figures.comprehension_density <= 35


@pytest.mark.parametrize("word", WORDS_NOT_OURS)
def test_the_field_has_another_word(lines: list[tuple[str, str]], word: str) -> None:
    allowed = next((rule for key, rule in LINES_ALLOWED.items() if key in word), None)
    hits = [(where, line) for where, line in lines if re.search(word, line)]
    bad = [f"{where}: {line.strip()}" for where, line in hits if not (allowed and re.search(allowed, line))]
    assert not bad, f"say {WORDS_NOT_OURS[word]}:\n" + "\n".join(bad[:20])


def test_a_percentage_is_written_in_one_way() -> None:
    """As 5 %, with a space, in what fedsim and the studies print and on the pages."""
    printed = [path for folder in ("fedsim", "adversaries", "clients", "strategies", "studies", "docs") for path in
               (ROOT / folder).rglob("*.py")]  # fmt: skip
    templates = [path for path in (ROOT / "fedsim/report/templates").iterdir() if path.suffix != ".css"]
    found = [str(path) for path in printed if re.search(r"\.\d%[}\"']", path.read_text(encoding="utf-8"))]
    found += [str(path) for path in templates if re.search(r"}}%|}} %", path.read_text(encoding="utf-8"))]
    own = [path for path in printed if path.relative_to(ROOT).parts[0] not in ("studies", "docs")]
    found += [str(path) for path in own if re.search(r"[a-z0-9]} %|%%", path.read_text(encoding="utf-8"))]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for path in pages:
        own_words = re.sub(r'"[^"]{1,300}"', "", path.read_text(encoding="utf-8"))  # quotations keep their spelling
        if re.search(r"\d%(?![0-9A-F]{2})", own_words):
            found.append(str(path))
    assert found == []


def test_the_rule_for_names_tells_good_from_bad(measure: ModuleType) -> None:
    bad = ["told", "_kept", "beside", "made_again", "of_each", "_one_by_one"]
    good = ["pair_claims", "label_counts", "read", "split", "seed", "training", "__len__", "update", "embed"]
    assert [name for name in bad if not measure.is_bare(name)] == []
    assert [name for name in good if measure.is_bare(name)] == []


def test_each_file_says_what_it_holds(figures: Any) -> None:
    silent = figures.silent_files
    assert not silent, f"without a docstring at its top: {', '.join(silent)}"


def test_each_table_of_the_pages_begins_with_a_head() -> None:
    """Rows after an empty line are no table, and stand on the page as text with bars."""
    headless = []
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
            if not re.match(r"\|.*\n\|[\s:|-]+\|?(?:\n|$)", table):
                headless.append(f"{path.relative_to(ROOT)}: {table.splitlines()[0][:60]}")
    assert headless == []
