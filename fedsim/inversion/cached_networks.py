"""Networks that attacks train once for the same inputs, and keep as files in the cache."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from fedsim.base.files import replace_atomically

log = logging.getLogger(__name__)


def load_or_train(network: nn.Module, path: Path, train: Callable[[], bool]) -> None:
    """Load the state of a network from its file, or train it and write the file.

    Of several processes that want the same network at once, one trains it, and the others wait.

    Args:
        network: is changed.
        path: of the file, named after all that the state follows from.
        train: trains the network; tells whether other processes may have what came of it.
    """
    if _read_network(network, path):
        return
    with _wait_for_others(path):
        if not _read_network(network, path) and train():
            _write_network(network, path)


@contextmanager
def _wait_for_others(path: Path) -> Iterator[None]:
    """Lock a file beside that of a network; without a lock, as some file systems have none, each process trains."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except OSError:
        yield
        return
    with file:  # closing it ends the lock
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read_network(network: nn.Module, path: Path) -> bool:
    """Load the state of a network where there is one; tell whether there was."""
    if not path.is_file():
        return False
    try:
        network.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        log.warning("%s is damaged (%s), so the network is trained again", path, error)
        return False
    return True


def _write_network(network: nn.Module, path: Path) -> None:
    """Keep the state of a network; a cache that cannot be written only costs time."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            save_file(state, temporary)
