"""Commands that compute nothing answer without importing torch or Flower, and end quietly where nobody reads on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedsim.plugins import descriptions

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedsim", "adversaries", "clients", "strategies")
CLI = "import sys; from fedsim.cli.main import main; main()"
WATCHED = "import atexit, sys; atexit.register(lambda: print([m for m in ('torch', 'flwr') if m in sys.modules])); "


def call(*words: str, before: str = WATCHED) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", before + CLI, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("run", "nowhere.toml"),
        ("attack", "nowhere", "nowhere.toml"),
        ("train", "nowhere.toml"),
        ("new", "atack", "x"),
    ],
)
def test_help_and_a_mistake_in_a_file_do_not_wait_for_torch(words: tuple[str, ...]) -> None:
    assert call(*words).stdout.endswith("[]\n")


def test_a_mistyped_key_does_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[federation]\nclientz = 3\n")
    result = call("run", str(tmp_path / "x.toml"))
    assert (result.returncode, result.stdout) == (2, "[]\n")
    assert "did you mean 'clients'" in result.stderr
    result = call("attack", str(tmp_path), "--set", "federation.clients=3")
    assert (result.returncode, result.stdout) == (2, "[]\n")


def test_no_module_imports_scipy_before_it_is_needed() -> None:
    """Each process of workers, of strangers' attacks and of cells would wait for it."""
    code = [file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py")]
    assert len(code) > 300
    assert [file for file in code if re.search(r"^(from|import) scipy", file.read_text(), re.MULTILINE)] == []


def test_what_a_plugin_says_of_itself_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    first, second = call("show", "sme"), call("show", "sme")
    assert first.stdout.endswith("['torch']\n")
    assert second.stdout.endswith("[]\n")
    assert second.stdout.splitlines()[:-1] == first.stdout.splitlines()[:-1]
    kept = tmp_path / "descriptions.json"
    kept.write_text(kept.read_text().replace('"of": "', '"of": "x'))
    assert call("show", "sme").stdout == first.stdout


def test_a_list_of_plugins_whose_descriptions_are_kept_does_not_wait_for_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    first, second = call("list", "defenses"), call("list", "defenses")
    assert "update-noise" in second.stdout
    assert second.stdout.endswith("[]\n")
    assert second.stdout.splitlines()[:-1] == first.stdout.splitlines()[:-1]


@pytest.mark.parametrize("damage", ["", "[]", '{"of": 3}', "{"])
def test_damaged_descriptions_are_made_anew(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path))
    descriptions._read_cache.cache_clear()
    (tmp_path / "descriptions.json").write_text(damage)
    assert descriptions.describe_plugin("attacks", "sme").needs
    descriptions._read_cache.cache_clear()


def test_a_pipe_that_nobody_reads_any_more_ends_the_command_quietly() -> None:
    command = f"{sys.executable} -c '{CLI}' show sme | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert result.stderr == ""
    assert result.stdout.splitlines()[0].startswith("sme")
    assert result.stdout.splitlines()[-1] in ("141", "0")  # 0 where all was written before the pipe was closed
