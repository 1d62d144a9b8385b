"""The program's end: the exit code, all of the output, and what others registered for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import atexit, sys, types

def main():
    atexit.register(print, "registered later, called sooner")
    sys.stdout.write("x" * 100_000 + "\\n")
    {end}

sys.modules["fedsim.cli.main"] = types.ModuleType("fedsim.cli.main")
sys.modules["fedsim.cli.main"].main = main
from fedsim.cli.program import run_program
run_program()
"""


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 0), ("sys.exit(2)", 2), ("raise ValueError('wrong')", 1)])
def test_output_handlers_and_exit_code_are_those_of_an_ordinary_end(end: str, code: int) -> None:
    command = [sys.executable, "-c", CODE.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout == "x" * 100_000 + "\nregistered later, called sooner\n"
    assert ("ValueError: wrong" in done.stderr) == (code == 1)


def test_modules_are_not_taken_apart() -> None:
    end = "sys.modules['torch'] = type('Slow', (), {'__del__': lambda self: print('taken apart')})(); sys.exit(0)"
    done = subprocess.run([sys.executable, "-c", CODE.format(end=end)], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "taken apart" not in done.stdout
