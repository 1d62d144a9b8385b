"""Watchdog of Ray: kill every process of one Ray session once the process that started it is gone.

This file is run by its path with the session's folder as its argument, with Ray's token in its
environment and a pipe for stdin. The pipe closes when its writer ends, however it ends. Ray's own
agents would notice that up to a minute later.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PAUSE = 0.05
_MAX_SCANS = 40
"""Most scans for processes: one that is killed may have started another just before."""


def main() -> None:
    """Wait for the end of stdin, then kill the processes of the given Ray session."""
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for the process that started this one
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    session, token = sys.argv[1], os.environ["RAY_AUTH_TOKEN"].encode()
    for _ in range(_MAX_SCANS):
        processes = [process for process in Path("/proc").glob("[0-9]*") if _is_of_session(process, session, token)]
        if not processes:
            break
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(_PAUSE)


def _is_of_session(process: Path, session: str, token: bytes) -> bool:
    """Return whether a process belongs to the Ray session; this process does not count."""
    if process.name == str(os.getpid()):
        return False
    try:
        command = (process / "cmdline").read_bytes()
        if not command.startswith(b"ray::"):
            # Other children of the driver have the token, strangers may name the session,
            # and none does both.
            return session.encode() in command and token in (process / "environ").read_bytes()
        # Workers and agents overwrite both, but write logs into the session's folder.
        return any(str(file.readlink()).startswith(session) for file in (process / "fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False


if __name__ == "__main__":
    main()
