"""Run a command, and end it with all that it started once the process that asked for it is gone.

`python guard.py COMMAND...` is started by path, as leader of a process group, with a pipe for stdin.
The pipe closes when its writer ends, however it ends; then the whole group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Run the command that the arguments name, and exit as it exits."""
    for number in (signal.SIGTERM, signal.SIGINT):  # meant for the command; a handler, unlike SIG_IGN, stays here
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
