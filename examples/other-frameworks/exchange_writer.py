"""Copy this file beside your server, and call it where a model is sent and where a reply arrives.

It needs numpy alone. `fedsim import EXCHANGE RUN` makes a recording of what it writes.
"""

import json
from pathlib import Path

import numpy as np


class ExchangeWriter:
    """Writer of what a server sends and gets, in a folder for each round.

    Rounds are counted from 1. Arrays are `{name: array}`, in the model's own order.
    """

    def __init__(self, folder):
        self.folder = Path(folder)

    def write_broadcast(self, round, arrays, client=None):
        """Write w_t, as it is sent to all clients, or to one of them alone."""
        name = "broadcast" if client is None else f"broadcast-{client}"
        self._write_arrays(round, name, arrays)

    def write_reply(self, round, client, arrays, num_examples, **metrics):
        """Write what a client sent, with N and other numbers that it told in clear."""
        self._write_arrays(round, f"client-{client}", arrays)
        facts = {"num_examples": int(num_examples), **{key: float(value) for key, value in metrics.items()}}
        (self.folder / f"round-{round}" / f"client-{client}.json").write_text(json.dumps(facts))

    def _write_arrays(self, round, name, arrays):
        folder = self.folder / f"round-{round}"
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{name}.npz", **arrays)
