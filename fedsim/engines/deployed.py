"""What a SuperLink runs: the same ServerApp, whose log lines and last error go to its run folder.

Under Flower's deployment engine the ServerApp is a process of its own, perhaps in a container.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.errors import FedsimError

log = logging.getLogger(__name__)
app = ServerApp()

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE = re.compile(r"\S+ \S+ (?P<level>[A-Z]+) (?P<name>[\w.]+): (?P<message>.*)\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the installed ServerApp and keep what it says for `Relay`."""
    handler = logging.FileHandler(said(Path(str(context.run_config["out"]))), encoding="utf-8")
    handler.setFormatter(_OneLine(_FORMAT))
    logger = logging.getLogger("fedsim")
    logger.setLevel(logging.DEBUG)  # the command line decides what of it is shown
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


def said(folder: Path) -> Path:
    """Where the ServerApp of the run in `folder` writes its log lines."""
    return folder / "deployment" / "serverapp.log"


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).splitlines())


class Relay:
    """Says again in this process what the ServerApp wrote.

    Args:
        path: see `said`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.error = ""

    def __call__(self) -> None:
        """Log every line that is new; the error that ended the ServerApp is kept in `error` instead."""
        for level, name, message in self._new():
            if name == __name__:
                self.error = message
            else:
                logging.getLogger(name).log(logging.getLevelNamesMapping()[level], "%s", message)

    def _new(self) -> Iterator[tuple[str, str, str]]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read += len(line)
                if found := _LINE.fullmatch(line.decode(errors="replace")):
                    yield found["level"], found["name"], found["message"]
