"""Run of the ServerApp of a Flower app, whose messages are recorded."""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedsim.base.errors import RunError
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.recording.recorder import Recorder
from strategies.curious_grid import CuriousGrid
from strategies.secure_sum_grid import SecureSumGrid


def run_recorded(
    server_app: ServerApp,
    grid: Grid,
    context: Context,
    recorder: Recorder,
    *,
    partitions: Mapping[int, int],
    sums: SecureAggregationTable | None,
    seed: int,
) -> None:
    """Run a ServerApp over `grid`, and record what its server sees.

    Args:
        partitions: by node, the client that it plays, by which clients are called in the recording.
        sums: settings of secure aggregation; None where the server sees single updates.
        seed: of groups and rounding.

    Raises:
        RunError: something could not be recorded.
    """
    clients = grid if sums is None else SecureSumGrid(grid, sums, seed, partitions)
    with CuriousGrid(clients, recorder, decodes=True, partitions=partitions) as recording_grid:
        server_app(recording_grid, context)
    if losses := recording_grid.losses:
        raise RunError(
            f"not all that the app sent is recorded, of which the log has {len(losses)} errors; the first: {losses[0]}"
        )
