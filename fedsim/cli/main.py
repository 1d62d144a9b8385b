"""Simulate federated learning, attack what an honest-but-curious server saw, and report what leaked.

Hyperparameters live in the experiment file; `--set a.b=value` overrides one. Exit codes: 0 done,
1 a run or an attack failed, 2 the request itself is wrong.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import signal
import sys
from importlib.metadata import version
from traceback import walk_tb
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand
from typer.utils import get_params_from_function

from fedsim.base.errors import FedsimError, error_reason
from fedsim.cli.allocator import keep_freed_memory
from fedsim.cli.attack import attack
from fedsim.cli.audit_defense import audit_defense
from fedsim.cli.check import check
from fedsim.cli.compare import compare
from fedsim.cli.data import show_data
from fedsim.cli.doctor import doctor
from fedsim.cli.dossier import dossier, verify
from fedsim.cli.expose import expose
from fedsim.cli.geometry import geometry
from fedsim.cli.import_recording import import_recording
from fedsim.cli.index import index
from fedsim.cli.inspect import inspect
from fedsim.cli.lint import lint
from fedsim.cli.materialise import materialise
from fedsim.cli.new import new
from fedsim.cli.options import Sentence, print_error
from fedsim.cli.plugins import list_plugins, show
from fedsim.cli.report import report
from fedsim.cli.reproduce import reproduce
from fedsim.cli.run import run
from fedsim.cli.sweep import sweep
from fedsim.cli.train import train
from fedsim.cli.tune import tune
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import restrict_code


class _Command(TyperCommand):
    """Command that shows the declared help of its arguments: from click 8.5 on, click's own class empties it."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        function = getattr(self.callback, "__wrapped__", None)
        declared = get_params_from_function(function) if function else {}
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name in declared:
                parameter.help = getattr(declared[parameter.name].default, "help", None)


cli = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
_INTERRUPTED = "interrupted"
_PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit code that a shell reports for a program that writes to a pipe which nobody reads any more."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Reasons of the system to write no more."""
_HOW_TO_RESUME = {
    "run": "; `fedsim run --resume RUN` continues the run",
    "reproduce": "; the same `fedsim reproduce` continues with the remaining cells",
    "sweep": "; the same `fedsim sweep` continues with the remaining cells",
    "train": "; the same `fedsim train` continues the training",
    "expose": "; exposure.csv has the finished clients",
    "attack": "; the same `fedsim attack` continues with the remaining victims",
    "tune": "; the same `fedsim tune` continues with the remaining trials",
}
"""What to do after an interrupt, by the command that was running."""
for _command in (run, sweep, train, expose, attack, tune, compare, reproduce, geometry, materialise, report, index):
    cli.command(cls=_Command)(_command)
for _evidence_command in (dossier, verify, inspect):
    cli.command(cls=_Command)(_evidence_command)
cli.command("data", cls=_Command)(show_data)
cli.command("list", cls=_Command)(list_plugins)
cli.command("import", cls=_Command)(import_recording)
for _information_command in (show, check, audit_defense, lint, new, doctor):
    cli.command(cls=_Command)(_information_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedsim {version('fedsim-curious')}")  # noqa: T201
        raise typer.Exit


@cli.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Declare the options before any command; the help text is that of this module."""


def main() -> None:
    """Run the command line: errors become one sentence and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± is no reason to fail
    if logging.lastResort is not None:  # it shows what commands without a display warn of
        logging.lastResort.setFormatter(Sentence())
    keep_freed_memory()
    with restrict_code(_list_typed_words(), anything="--trust" in sys.argv):
        sentence, code = _run_command()
    try:
        sys.stdout.flush()
    except OSError as error:  # nobody reads any more, such as `head`, which has seen enough, or the disk is full
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_unread = isinstance(error, BrokenPipeError)
        code = _PIPE_CLOSED if is_unread else 1
        sentence = sentence if is_unread else _explain_full(error)
    if sentence:
        print_error(sentence)
    if sentence == _interrupt_message():  # Flower's server thread would go on waiting for clients that are gone
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _list_typed_words() -> list[str]:
    """Return the words that the user typed without paths: somebody else may have named a folder `module:attribute`."""
    return [word for word in sys.argv[1:] if not os.path.lexists(word)]


def _run_command() -> tuple[str, int]:
    """Run the command; return what is to be said of it, and the exit code."""
    try:
        registry.check_installation()
        code = cli(standalone_mode=False) or 0
    except FedsimError as error:
        return str(error), error.exit_code
    except (typer.Abort, KeyboardInterrupt):  # typer turns only one that comes while the command works into its own
        return _interrupt_message(), 1
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):
            return "", _PIPE_CLOSED
        if _is_raised_by_typer(error):  # the answer to a shell that completes a command, or the script for it
            return "", int(error.code or 0)
        return f"third-party code {error_reason(error).removeprefix('it ')}, and the command was not completed", 1
    except OSError as error:  # a folder in the path that may not be entered, a name that is too long
        if error.filename is None and error.errno in _FULL:
            return _explain_full(error), 1
        if error.filename is None:
            raise
        return f"{error.filename}: {error.strerror}; check the path and its permissions", 1
    except MemoryError as error:
        return f"memory ran out ({error_reason(error)}); free some, or ask for less at once", 1
    except Exception as error:
        if getattr(error, "exit_code", None) == 2 and hasattr(error, "format_message"):
            # Without a command the help page has been printed, and nothing is left to say.
            sentence: str = error.format_message()
            # Of a command that does not exist, typer suggests others in the message, and click, from 8.4 on, after it.
            return (str(error) if sentence.count("Did you mean") > 1 else sentence), 2
        raise
    return (_interrupt_message(), 1) if code == 128 + signal.SIGINT else ("", code)  # what typer makes of Ctrl-C


def _explain_full(error: OSError) -> str:
    return f"the output cannot be written ({error.strerror}); make room, and do the same again"


def _is_raised_by_typer(error: SystemExit) -> bool:
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).startswith("typer.")


def _interrupt_message() -> str:
    command = next((word for word in sys.argv[1:] if word in _HOW_TO_RESUME), "")
    return _INTERRUPTED + _HOW_TO_RESUME.get(command, "")
