"""Shells complete commands and options."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).with_name("fedsim")
ASKED = """
source "$HOME/.bashrc"
COMP_WORDS=({words}) COMP_CWORD={last}
_fedsim_completion fedsim
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p fedsim
"""


def bash(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    """What a shell answers whose home folder is `home` and that finds `fedsim` on its path."""
    search = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "HOME": str(home), "PATH": search},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder in which `fedsim --install-completion` was run."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    folder = tmp_path_factory.mktemp("home")
    installed = bash("fedsim --install-completion; echo end $?", folder)
    assert "bash completion installed" in installed.stdout
    assert installed.stderr == ""
    assert installed.stdout.endswith("end 0\n")
    return folder


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        pytest.param(["fedsim", "lis"], "list", marks=pytest.mark.thorough),
        pytest.param(["fedsim", "lint", "--str"], "--strict", marks=pytest.mark.thorough),
        (["fedsim", "run", "--resu"], "--resume"),
        pytest.param(["fedsim", "attack", "--data"], "--data-dir", marks=pytest.mark.thorough),
        pytest.param(["fedsim", "show", "update-n"], "update-noise", marks=pytest.mark.thorough),
    ],
)
def test_bash_completes_commands_and_options_and_says_nothing_else(words: list[str], offered: str, home: Path) -> None:
    result = bash(ASKED.format(words=" ".join(words), last=len(words) - 1), home)
    assert result.stdout.splitlines() == [offered, "complete -o default -F _fedsim_completion fedsim"]
    assert result.stderr == ""


def test_a_shell_that_is_not_known_gets_a_sentence() -> None:
    result = subprocess.run(
        [str(PROGRAM)],
        env={**os.environ, "_FEDSIM_COMPLETE": "complete_nosuch"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.stderr == "Shell nosuch not supported.\n"
    assert result.returncode == 1
