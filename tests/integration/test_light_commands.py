"""Commands that compute nothing answer without importing torch or Flower, and end quietly where nobody reads on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim.plugins import descriptions
from tests.support.commands import call_fedsim

Describe = Callable[..., str]
ROOT = Path(__file__).parents[2]
PACKAGES = ("fedsim", "adversaries", "clients", "strategies")
CLI = "import sys; from fedsim.cli.main import main; main()"
WATCHED = "import atexit, sys; atexit.register(lambda: print([m for m in ('torch', 'flwr') if m in sys.modules])); "


def call(*words: str, before: str = WATCHED) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + CLI, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path: Path) -> None:
    """One process answers all commands and says after each what it has imported."""
    (tmp_path / "x.toml").write_text("[federation]\nclientz = 3\n")
    commands = [
        ("--help",),
        ("run", "nowhere.toml"),
        ("attack", "nowhere", "nowhere.toml"),
        ("train", "nowhere.toml"),
        ("new", "atack", "x"),
        ("run", str(tmp_path / "x.toml")),
        ("attack", str(tmp_path), "--set", "federation.clients=3"),
    ]
    code = [*WATCHED.splitlines(), "from fedsim.cli.main import main", f"for words in {commands}:"]
    code += ["    sys.argv[1:] = words", "    try: main()", "    except SystemExit as end: print('code', end.code)"]
    code += ["    print([m for m in ('torch', 'flwr') if m in sys.modules])"]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=False, timeout=60
    )
    assert re.findall(r"^code (\d)\n\[\]$", result.stdout, re.MULTILINE) == list("0222222"), result.stdout
    assert "did you mean 'clients'" in result.stderr


def test_help_waits_for_no_numbers_and_no_table_of_settings() -> None:
    """They would take as long as the help itself."""
    watched = WATCHED.replace("('torch', 'flwr')", "('numpy', 'fedsim.federation.config')")
    assert call("--help", before=watched).stdout.endswith("\n[]\n")


def test_no_module_imports_scipy_before_it_is_needed() -> None:
    """Each process of workers, of strangers' attacks and of cells would wait for it."""
    code = [file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py")]
    assert len(code) > 300
    assert [file for file in code if re.search(r"^(from|import) scipy", file.read_text(), re.MULTILINE)] == []


@pytest.fixture
def describe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Describe:
    """`fedsim WORDS...` in this process, which has torch, with a cache of the test's own; what it prints."""
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")

    def call_anew(*words: str) -> str:
        descriptions._read_cache.cache_clear()
        return call_fedsim(*words, capfd=capfd).stdout

    return call_anew


def test_what_a_plugin_says_of_itself_is_kept_until_a_file_changes(tmp_path: Path, describe: Describe) -> None:
    first = describe("show", "sme")
    second = call("show", "sme")
    assert second.stdout == first + "[]\n"
    kept = tmp_path / "descriptions.jsonl"
    text = kept.read_text()
    kept.write_text(f"x{text}")
    assert describe("show", "sme") == first
    assert kept.read_text() == text


@pytest.mark.thorough
def test_a_list_of_plugins_whose_descriptions_are_kept_does_not_wait_for_torch(describe: Describe) -> None:
    first = describe("list", "defenses")
    assert "update-noise" in first
    assert call("list", "defenses").stdout == first + "[]\n"


@pytest.mark.parametrize("damage", ["", "[]\n", "3\n{}\n", "{", "KEY\n{", "KEY\n[]\n"])
def test_damaged_descriptions_are_made_anew(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    descriptions._read_cache.cache_clear()
    (tmp_path / "descriptions.jsonl").write_text(damage.replace("KEY", descriptions._cache_key()))
    assert descriptions.describe_plugin("attacks", "sme").needs
    descriptions.describe_plugin("attacks", "dlg")
    descriptions._read_cache.cache_clear()
    assert list(descriptions._read_cache()) == ["attacks/sme", "attacks/dlg"]
    descriptions._read_cache.cache_clear()


def test_a_pipe_that_nobody_reads_any_more_ends_the_command_quietly(describe: Describe) -> None:
    describe("show", "sme")
    command = f"{sys.executable} -c '{CLI}' show sme | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert result.stderr == ""
    assert result.stdout.splitlines()[0].startswith("sme")
    assert result.stdout.splitlines()[-1] in ("141", "0")  # 0 where all was written before the pipe was closed


def test_python_runs_the_package_as_the_command() -> None:
    command = [sys.executable, "-m", "fedsim", "show", "atack"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("fedsim: ")
