"""Measurement of a client's exposure, kept in the client's own state (Flower's `Context.state`)."""

from __future__ import annotations

from flwr.app import RecordDict

from fedsim.exposure.of_clients import STATE_KEY, measure_client, pack_rows
from fedsim.federation.engines.arrays import make_record
from fedsim.federation.experiment import Experiment
from fedsim.recording.payloads import State
from fedsim.training.cohort import LocalData
from fedsim.training.settings import LocalTraining


def measure_exposure(
    experiment: Experiment, before: State, number: int, share: LocalData, settings: LocalTraining, state: RecordDict
) -> None:
    """Compute the experiment's exposure measures of round `number`, and put them into `state`.

    Args:
        before: w_t, the state that the client received.
        state: its `Context.state`.
    """
    due_measures = [measure for measure in experiment.measures if measure.is_due(number)]
    if due_measures:
        rows = list(
            measure_client(due_measures, experiment.model_with_state(before), share, settings, experiment.client_loss)
        )
        state[STATE_KEY] = make_record({"rows": pack_rows(rows)})
