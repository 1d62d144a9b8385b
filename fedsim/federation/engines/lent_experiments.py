"""Experiments that a server lends to the clients that it plays in its own thread.

Clients know an experiment by its text, and by the name of the run, which is drawn at random. What
is lent is therefore never that of another run, and is gone with the run.
"""

from __future__ import annotations

import threading
from weakref import WeakValueDictionary

from flwr.app import ConfigRecord

from fedsim.federation.experiment import Experiment

_experiments: WeakValueDictionary[tuple[str, int], Experiment] = WeakValueDictionary()
"""By name of the run, and thread: clients of other threads train in networks of their own."""


def lend_experiment(experiment: Experiment, simulation: ConfigRecord) -> None:
    """Let the clients of the run that `simulation` names use the data and network of `experiment`."""
    _experiments.setdefault((str(simulation["run"]), threading.get_ident()), experiment)


def find_experiment(run: str) -> Experiment | None:
    """Return the experiment that is lent to the clients of a run in this thread, or None."""
    return _experiments.get((run, threading.get_ident()))
