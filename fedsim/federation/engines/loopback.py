"""Bring up the loopback of this process's network namespace, and keep the namespace alive.

This file is run by its path in a new namespace; a namespace lives as long as a process is in it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct

# From <linux/sockios.h> and <net/if.h>: SIOCGIFFLAGS, SIOCSIFFLAGS and IFF_UP.
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_INTERFACE_REQUEST = "16sh22x"
"""Format of `struct ifreq`, which begins with a name of 16 bytes and, here, flags."""


def main() -> None:
    """Bring the loopback up, print the process id, and wait for the end."""
    with socket.socket() as any_socket:
        request = struct.pack(_INTERFACE_REQUEST, b"lo", 0)
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, request)
        name, flags = struct.unpack(_INTERFACE_REQUEST, answer)
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack(_INTERFACE_REQUEST, name, flags | _UP))
    print(os.getpid(), flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main()
