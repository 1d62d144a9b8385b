"""The ServerApp that a SuperLink runs: the same as elsewhere, with its log lines in the run folder.

Under Flower's deployment engine the ServerApp is a process of its own, perhaps in a container. The
process that started the run repeats the log lines by `LogRelay`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.base.errors import FedsimError

log = logging.getLogger(__name__)
app = ServerApp()

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE = re.compile(r"\S+ \S+ (?P<level>[A-Z]+) (?P<name>[\w.]+): (?P<message>.*)\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the installed ServerApp, and write its log lines for `LogRelay`."""
    handler = logging.FileHandler(serverapp_log(Path(str(context.run_config["out"]))), encoding="utf-8")
    handler.setFormatter(_OneLineFormatter(_FORMAT))
    logger = logging.getLogger("fedsim")
    logger.setLevel(logging.DEBUG)  # the command line decides which of them are shown
    logger.addHandler(handler)
    try:
        (server,) = entry_points(group="fedsim.apps", name="server")
        server.load()(grid, context)
    except Exception as error:
        log.error("%s", error if isinstance(error, FedsimError) else f"{type(error).__name__}: {error}")
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


def serverapp_log(folder: Path) -> Path:
    """Return the file with the log lines of the ServerApp of the run in `folder`."""
    return folder / "deployment" / "serverapp.log"


class _OneLineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).splitlines())


class LogRelay:
    """Log again in this process what the ServerApp has logged.

    Args:
        path: the ServerApp's log file, see `serverapp_log`.

    Attributes:
        error: the error that ended the ServerApp; empty where there is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.error = ""

    def __call__(self) -> None:
        """Log every new line; the error that ended the ServerApp goes to `error` instead."""
        for level, name, message in self._read_new_lines():
            if name == __name__:
                self.error = message
            else:
                logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message)

    def _read_new_lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield level, logger and message of each line that is complete."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                if match := _LINE.fullmatch(line.decode(errors="replace")):
                    yield match["level"], match["name"], match["message"]
