"""The program `fedsim`: the command line in a separate process, which ends without delay."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def run_program() -> None:
    """Run the command line and end the process.

    When all that registered an end has had it, Python would take half a second more to take every
    imported module apart. That is left out, because the system frees the memory anyway.
    """
    try:
        Path.cwd()
    except FileNotFoundError:  # which torch would call a library that cannot be loaded
        sys.exit("fedsim: the working folder was removed; change to another one")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    codes: list[int] = []
    # Before any import registers something, because what is registered first is called last.
    atexit.register(_end_process, codes)
    try:
        from fedsim.cli.main import main

        main()
    except KeyboardInterrupt:  # before the command began, as its modules take a while
        codes.append(1)
        sys.exit("fedsim: interrupted")
    except SystemExit as end:
        codes.append(int(end.code or 0))
        raise


def _end_process(codes: list[int]) -> None:
    """End the process with the last of these exit codes; an uncaught error leaves none."""
    if not codes:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more
        pass
    os._exit(codes[-1])
