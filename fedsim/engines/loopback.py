"""Bring up the loopback of the network namespace that this process is in, say its process id, and hold the namespace.

`python loopback.py` is started by path, in a new namespace; a namespace lives as long as a process is in it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct

# From <linux/sockios.h> and <net/if.h>; `struct ifreq` begins with a name of 16 bytes and, here, flags.
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_REQUEST = "16sh22x"


def main() -> None:
    """Bring the loopback up, print the process id, and wait to be ended."""
    with socket.socket() as anything:
        name, flags = struct.unpack(_REQUEST, fcntl.ioctl(anything, _GET_FLAGS, struct.pack(_REQUEST, b"lo", 0)))
        fcntl.ioctl(anything, _SET_FLAGS, struct.pack(_REQUEST, name, flags | _UP))
    print(os.getpid(), flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main()
