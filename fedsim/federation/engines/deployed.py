"""The ServerApp that a SuperLink runs: the same as elsewhere, with what it reports in files.

Under Flower's deployment engine the ServerApp is a process of its own, perhaps in a container, which
shares no more than the run folder with the process that started the run. That one repeats log lines
and progress by `ServerAppRelay`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.base.errors import error_reason
from fedsim.base.files import append_text
from fedsim.base.progress import listen_to_progress, report_progress

log = logging.getLogger(__name__)
app = ServerApp()

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_LINE = re.compile(r"\S+ \S+ (?P<level>[A-Z]+) (?P<name>[\w.]+): (?P<message>.*)\n")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the installed ServerApp, and write its log lines and progress for `ServerAppRelay`."""
    folder = Path(str(context.run_config["out"]))
    handler = logging.FileHandler(serverapp_log(folder), encoding="utf-8")
    handler.setFormatter(_OneLineFormatter(_FORMAT))
    logger = logging.getLogger("fedsim")
    logger.setLevel(logging.DEBUG)  # the command line decides which of them are shown
    logger.addHandler(handler)

    def write_progress(*report: object) -> None:
        with suppress(OSError):  # a full disk, say, which must not end the run here
            append_text(_progress_file(folder), json.dumps(report) + "\n")

    try:
        (server,) = entry_points(group="fedsim.apps", name="server")
        with listen_to_progress(write_progress):
            server.load()(grid, context)
    except Exception as error:
        log.error("%s", error_reason(error))
        raise
    finally:
        logger.removeHandler(handler)
        handler.close()


def serverapp_log(folder: Path) -> Path:
    """Return the file with the log lines of the ServerApp of the run in `folder`."""
    return folder / "deployment" / "serverapp.log"


def _progress_file(folder: Path) -> Path:
    """Return the file with what the ServerApp of the run in `folder` reports of its progress."""
    return folder / "deployment" / "progress.jsonl"


class _OneLineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join(super().format(record).splitlines())


class ServerAppRelay:
    """Repeat in this process what the ServerApp of the run in `folder` logs and reports.

    Attributes:
        error: the error that ended the ServerApp; empty where there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._log_lines = _NewLines(serverapp_log(folder))
        self._reports = _NewLines(_progress_file(folder))
        self.error = ""

    def __call__(self) -> None:
        """Repeat what is new; the error that ended the ServerApp goes to `error` instead."""
        for line in self._log_lines:
            if (match := _LINE.fullmatch(line)) is None:
                continue
            if match["name"] == __name__:
                self.error = match["message"]
            else:
                level = logging.getLevelNamesMapping()[match["level"]]
                logging.getLogger(match["name"]).log(level, "%s", match["message"])
        for line in self._reports:
            try:
                work, done, total = json.loads(line)
            except ValueError:  # it was written in part
                continue
            report_progress(work, done, total)


class _NewLines:
    """Complete lines of a growing file; each is yielded once, however often this is iterated over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def __iter__(self) -> Iterator[str]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line.decode(errors="replace")
