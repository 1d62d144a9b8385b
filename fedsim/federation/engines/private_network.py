"""A network that no other user of this machine can reach: a Linux namespace with its own loopback.

Flower's SuperLink runs any app that is submitted to its port, and has no accounts for submitters.
On the loopback that all users of a machine share, each of them could therefore run code as the user
who started it. In its own namespace a process has another loopback, and only its user (and root)
can enter it. As no interface leads out of the namespace, its processes reach no network either.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

from fedsim.base.errors import RunError
from fedsim.federation.engines import loopback
from fedsim.federation.engines.processes import CommandProcess, Processes

_PATIENCE = 10.0
"""Seconds for making the namespace."""
_PAUSE = 0.01
_USER_NAMESPACE = ("--user", "--map-current-user", "--keep-caps")


class PrivateNetwork:
    """Network namespace for commands, which ends with `processes`.

    An ordinary user can make one only inside a user namespace. Root needs no user namespace, and is
    better off without: inside one root could not read the files of other users.

    Args:
        processes: starts the process that holds the namespace, as "network".
        python: the interpreter of that process.

    Raises:
        RunError: this system lets nobody, or not this user, make a namespace.
    """

    def __init__(self, processes: Processes, python: str) -> None:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            raise RunError(
                _explain_failure("the commands unshare and nsenter of util-linux, version 2.37 or newer, are missing")
            )
        holder = [python, "-I", "-S", loopback.__file__]
        attempts: list[tuple[str, ...]] = [(), _USER_NAMESPACE] if os.geteuid() == 0 else [_USER_NAMESPACE]
        for user_namespace in attempts:
            process = processes.start("network", ["unshare", *user_namespace, "--net", "--", *holder])
            if (process_id := _wait_for_process_id(process)) is not None:
                break
            reason = process.last_error()
            processes.end(process)
        else:
            raise RunError(_explain_failure(reason))
        credentials = ("--user", "--preserve-credentials") if user_namespace else ()
        self._enter_command = ("nsenter", f"--target={process_id}", *credentials, "--net", "--")

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` in this network."""
        return [*self._enter_command, *words]


def _wait_for_process_id(holder: CommandProcess) -> int | None:
    """Return the id of the process in the new namespace; None where that could not be made."""
    deadline = time.monotonic() + _PATIENCE
    while not holder.has_ended and time.monotonic() < deadline:
        output = holder.read_output()
        if output.endswith("\n") and output.strip().isdigit():
            return int(output)
        time.sleep(_PAUSE)
    return None


def _explain_failure(reason: str) -> str:
    return (
        "federation.engine: 'flower' keeps its SuperLink in a separate network namespace, for on the loopback that "
        f"all users of this machine share any of them could run code as you; here none can be made ({reason}); "
        "let users make namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in a container, "
        "a security profile that allows unshare), or use engine 'serial' or 'ray', or the address of a SuperLink"
    )
