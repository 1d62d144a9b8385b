"""The command line, called in this process."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
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
