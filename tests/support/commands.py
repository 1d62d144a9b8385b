"""The command line, called in this process or in a fork that has imported torch already."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest

Call = Callable[..., CompletedProcess[str]]
"""The fixture `call`: `fedsim WORDS...` in this process, with what it printed."""


@functools.cache
def _keep_builder(build: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Build commands and their options once: typer would for each call, which takes as long as a small run."""
    return functools.cache(build)


def call_fedsim(
    *words: str | Path, capfd: pytest.CaptureFixture[str] | None = None, columns: int = 200
) -> CompletedProcess[str]:
    """Run `fedsim WORDS...` without the seconds that a new process takes to import torch."""
    import typer.main

    from fedsim.cli.main import main

    arguments = ["fedsim", *map(str, words)]
    # The environment is put back as a whole, for options such as --data-dir write into it.
    with (
        patch.object(sys, "argv", arguments),
        patch.object(typer.main, "get_command", _keep_builder(typer.main.get_command)),
        patch.dict(os.environ, {"COLUMNS": str(columns)}),
        pytest.raises(SystemExit) as end,
    ):
        main()
    printed = ("", "") if capfd is None else capfd.readouterr()
    return CompletedProcess(arguments, int(end.value.code or 0), *printed)


_CONTEXT = multiprocessing.get_context("forkserver")
_SLOW_IMPORTS = ["torch", "sklearn.cluster", "scipy.stats", "pandas", "matplotlib.pyplot"]
_SLOW_IMPORTS += ["pydantic", "typer", "rich.console", "jinja2", "flwr.simulation", "tests.support.commands"]


def fork_fedsim(
    *words: str | Path, cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = 290
) -> CompletedProcess[str]:
    """Run `fedsim WORDS...` in a process of its own, which need not import torch and Flower again.

    The process is forked from one that has imported these libraries and nothing of fedsim, so that
    all that fedsim does when it is imported is done in it, by this environment and in this folder.

    Raises:
        TimeoutError: it does not end in time.
    """
    _CONTEXT.set_forkserver_preload(_SLOW_IMPORTS)
    arguments = ["fedsim", *map(str, words)]
    with TemporaryDirectory() as folder:
        files = Path(folder, "stdout"), Path(folder, "stderr")
        variables = dict(os.environ) | dict(environment or {})
        process = _CONTEXT.Process(target=_run_program, args=(arguments, cwd, variables, files))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise TimeoutError(f"{arguments} did not end within {timeout:g} s")
        return CompletedProcess(arguments, process.exitcode, *(file.read_text() for file in files))


def _run_program(arguments: list[str], cwd: Path, environment: dict[str, str], files: tuple[Path, Path]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = arguments
    # What a new interpreter makes of PYTHONPATH.
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    importlib.invalidate_caches()
    from fedsim.cli.main import main

    main()
