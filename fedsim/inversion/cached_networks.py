"""Networks that attacks train once for the same inputs, and keep as files in the cache."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from fedsim.base.files import replace_atomically

log = logging.getLogger(__name__)


def read_network(network: nn.Module, path: Path) -> bool:
    """Load the state of a network where there is one; tell whether there was."""
    if not path.is_file():
        return False
    try:
        network.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        log.warning("%s is damaged (%s), so the network is trained again", path, error)
        return False
    return True


def write_network(network: nn.Module, path: Path) -> None:
    """Keep the state of a network; a cache that cannot be written only costs time."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            save_file(state, temporary)
