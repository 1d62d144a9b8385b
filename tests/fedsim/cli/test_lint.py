"""`fedsim lint` prints pitfalls, and `fedsim run` and `fedsim sweep` say their titles once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedsim.pitfalls.find import RULES
from tests.support.commands import Call

DOCS = Path(__file__).parents[3] / "docs" / "how-to" / "lint.md"
FILE = """
[data]
name = "digits"
[partition]
name = "dirichlet"
samples_per_client = 8
[model]
name = "mlp"
hidden = [8]
[training]
local_epochs = 1
[federation]
clients = 2
rounds = 2
[adversary]
rounds = [2]
workers = 1
[[attack]]
name = "dlg"
iterations = 1
"""
FAULTLESS = """
[sweep]
seeds = [1, 2]
[data]
name = "leaf-synthetic"
[partition]
name = "natural"
[model]
name = "mlp"
[training]
local_epochs = 2
[federation]
rounds = 2
[adversary]
victims = "all"
rounds = "all"
[[attack]]
name = "inverting-gradients"
"""
EXPECTED = [
    "too few victims for a verdict",
    "small grey images only, such as MNIST or digits",
    "one local epoch or one step only",
    "one seed only",
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "experiment.toml"
    path.write_text(FILE)
    return path


def lint_lines(text: str) -> list[str]:
    """Return what is said of pitfalls, without the time before it and with lines put together again."""
    joined = re.sub(r"\s+", " ", text)
    return re.findall(r"lint: (.*?)(?= (?:\d\d:\d\d:\d\d )?lint: |; | \d\d:\d\d:\d\d |$)", joined)


def test_pitfalls_are_numbered_and_no_failure(file: Path, call: Call) -> None:
    result = call("lint", file)
    assert result.returncode == 0
    assert re.findall(r"^\d+\. (.*)$", result.stdout, re.MULTILINE) == EXPECTED
    assert "       [training]\n       local_epochs = 5\n" in result.stdout


def test_strict_fails_only_where_there_are_pitfalls(file: Path, call: Call) -> None:
    assert call("lint", file, "--strict").returncode == 1
    file.write_text(FAULTLESS)
    result = call("lint", file, "--strict")
    assert (result.returncode, result.stdout) == (0, "no pitfalls found\n")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", "nothing is attacked"),
        ("[adversary]\nvictims = [0]\n", "nothing is attacked"),
        (
            FAULTLESS.replace('"leaf-synthetic"', '"image-folder"\npath = "nowhere"'),
            "not checked: small grey images only, such as MNIST or digits",
        ),
    ],
)
def test_strict_fails_where_nothing_was_looked_at(file: Path, call: Call, text: str, title: str) -> None:
    file.write_text(text)
    result = call("lint", file, "--strict")
    assert result.returncode == 1
    assert re.findall(r"^\d+\. (.*)$", result.stdout, re.MULTILINE) == [title]
    assert ("Counter-experiment" in result.stdout) == (not title.startswith("not checked"))


@pytest.mark.parametrize("text", ["nonsense", "[training]\nepochs = 1\n", '[[attack]]\nname = "nobody"\n'])
def test_a_wrong_file_is_refused(file: Path, call: Call, text: str) -> None:
    file.write_text(text)
    result = call("lint", file)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


def test_json_has_all_of_a_pitfall(file: Path, call: Call) -> None:
    rows = json.loads(call("lint", file, "--json").stdout)
    assert [row["title"] for row in rows] == EXPECTED
    assert set(rows[0]) == {"name", "title", "detail", "reason", "counter_experiment", "was_tried"}


def test_a_run_says_titles_first_in_three_lines_at_most(file: Path, call: Call) -> None:
    result = call(
        "run", file, "--set", 'partition={"name"="iid","samples_per_client"=8}', "--set", "adversary.rounds=[1]"
    )
    assert result.returncode == 0
    assert lint_lines(result.stdout) == [*EXPECTED[:2], "iid partition only"]
    assert "; 3 more; `fedsim lint" in re.sub(r"\s+", " ", result.stdout)
    assert result.stdout.index("lint: ") < result.stdout.index("dlg")


def test_a_quiet_run_says_nothing_of_pitfalls(file: Path, call: Call) -> None:
    assert "lint" not in call("run", file, "--quiet").stdout


def test_a_sweep_says_titles_once(file: Path, call: Call) -> None:
    file.write_text(f"[sweep]\nseeds = [1, 2]\n{FILE}")
    result = call("sweep", file, "--dry-run")
    assert result.returncode == 0
    assert lint_lines(result.stdout) == EXPECTED[:3]


def test_the_documentation_lists_all_pitfalls() -> None:
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", DOCS.read_text(), re.MULTILINE)
    assert rows[1:] == [(rule.title, rule.reason) for rule in RULES]
    assert len(re.findall(r"[^\s|]*\w[^\s|]*", DOCS.read_text())) <= 400
