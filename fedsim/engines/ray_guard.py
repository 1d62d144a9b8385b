"""End every process of one Ray once the process that started it is gone, or asks for it.

`python ray_guard.py SESSION` is started by path, with Ray's token in its environment and a pipe for stdin. The pipe
closes when its writer ends, however it ends. Ray's own agents would notice that up to a minute later.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PAUSE = 0.05
_ROUNDS = 40  # of looking, at most: what is killed may have started something just before


def main() -> None:
    """Wait for the end of stdin, then kill the processes of the Ray session that the argument names."""
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for the process that started this one
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1):
        pass
    session, token = sys.argv[1], os.environ["RAY_AUTH_TOKEN"].encode()
    for _ in range(_ROUNDS):
        processes = [process for process in Path("/proc").glob("[0-9]*") if _is_of(process, session, token)]
        if not processes:
            break
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process.name), signal.SIGKILL)
        time.sleep(_PAUSE)


def _is_of(process: Path, session: str, token: bytes) -> bool:
    """Tell whether a process is one that Ray started, but for this one."""
    if process.name == str(os.getpid()):
        return False
    try:
        command = (process / "cmdline").read_bytes()
        if not command.startswith(b"ray::"):
            # Other children of the driver have the token, and others may name the session, but none does both.
            return session.encode() in command and token in (process / "environ").read_bytes()
        # Workers and agents wrote their titles over both, but write their logs into the session's folder.
        return any(str(file.readlink()).startswith(session) for file in (process / "fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False


if __name__ == "__main__":
    main()
