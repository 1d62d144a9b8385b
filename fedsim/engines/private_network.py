"""A network that no other user of this machine can reach: a Linux namespace with a loopback of its own.

Flower's SuperLink runs any app that is submitted to its port, and has no accounts for submitters. On the loopback that
all users of a machine share, each of them could so run code as the user who started it. In a namespace of its own a
process has another loopback, and only its user (and root) can enter it. As nothing leads out of the namespace, its
processes reach no network either.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence

from fedsim.engines import loopback
from fedsim.engines.processes import Processes, Started
from fedsim.errors import RunError

_PATIENCE = 10.0
_PAUSE = 0.01
_USER_NAMESPACE = ("--user", "--map-current-user", "--keep-caps")


class PrivateNetwork:
    """Runs commands in a network namespace of their own, which ends with `processes`.

    A user may make one inside a user namespace of its own. Root needs none, and is better off without: in it root
    could not read the files of other users.

    Args:
        processes: starts the process that holds the namespace, as "network".
        python: runs that process.

    Raises:
        RunError: this system lets nobody, or not this user, make a namespace.
    """

    def __init__(self, processes: Processes, python: str) -> None:
        if shutil.which("unshare") is None or shutil.which("nsenter") is None:
            raise RunError(
                _refusal("the commands unshare and nsenter of util-linux, version 2.37 or newer, are missing")
            )
        holder = [python, "-I", "-S", loopback.__file__]
        ways: list[tuple[str, ...]] = [(), _USER_NAMESPACE] if os.geteuid() == 0 else [_USER_NAMESPACE]
        for user_namespace in ways:
            started = processes.start("network", ["unshare", *user_namespace, "--net", "--", *holder])
            if (process := _process_id(started)) is not None:
                break
            reason = started.last_words()
            processes.end(started)
        else:
            raise RunError(_refusal(reason))
        credentials = ("--user", "--preserve-credentials") if user_namespace else ()
        self._enter = ("nsenter", f"--target={process}", *credentials, "--net", "--")

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the command that runs `words` in this network."""
        return [*self._enter, *words]


def _process_id(holder: Started) -> int | None:
    """Wait for the process in the new namespace; None where it could not be made."""
    deadline = time.monotonic() + _PATIENCE
    while not holder.ended and time.monotonic() < deadline:
        if (said := holder.said()).endswith("\n") and said.strip().isdigit():
            return int(said)
        time.sleep(_PAUSE)
    return None


def _refusal(reason: str) -> str:
    return (
        "federation.engine: 'flower' keeps its SuperLink in a network namespace of its own, for on the loopback that "
        f"all users of this machine share any of them could run code as you; here none can be made ({reason}); "
        "let users make namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu; in a container, "
        "a security profile that allows unshare), or use engine 'serial' or 'ray', or the address of a SuperLink"
    )
