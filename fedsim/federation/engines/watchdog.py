"""Watchdog: run a command, and kill it with all that it started once our parent is gone.

This file is run by its path with the command as its arguments, as leader of a process group, with a
pipe for stdin. The pipe closes when its writer ends, however it ends; then the whole group is
killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Run the command that the arguments name, and exit as it exits."""
    # These signals are meant for the command. It does not inherit a handler, as it would SIG_IGN.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=_kill_group_at_end_of_input, daemon=True).start()
    code = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).wait()
    os._exit(code if code >= 0 else 128 - code)


def _kill_group_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
