"""How exposed a client is by what it is about to send, which it keeps in its own state (Flower's `Context.state`)."""

from __future__ import annotations

from flwr.app import RecordDict

from fedsim.engines.arrays import record_of
from fedsim.experiments.build import Experiment
from fedsim.exposure.of_clients import KEPT, packed, rows_of
from fedsim.training.cohort import Share
from fedsim.training.settings import LocalTraining
from fedsim.wire.payloads import State


def measured(
    experiment: Experiment, before: State, number: int, share: Share, settings: LocalTraining, state: RecordDict
) -> None:
    """Put into `state` what the experiment's measures say of a client that was sent `before` in round `number`."""
    due = [gauge for gauge in experiment.gauges if gauge.is_due(number)]
    if due:
        rows = list(rows_of(due, experiment.filled(before), share, settings, experiment.dataset.task.loss))
        state[KEPT] = record_of({"rows": packed(rows)})
