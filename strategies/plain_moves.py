"""What servers have in common that add up the moves of their clients' models, each counted alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray


class PlainMoves(FedAvg):
    """Set each tensor of the model by the sum of what clients moved it, whatever number of examples they have.

    Subclasses name the settings that they take, and say how a tensor moves.
    """

    # Set only within a round, so a checkpoint need not hold them.
    _broadcast: ArrayRecord | None = None
    _num_clients = 0

    @abstractmethod
    def move_tensor(
        self, name: str, before: NDArray[np.floating], total_move: NDArray[np.float64], num_sent: int, num_clients: int
    ) -> NDArray[np.float64]:
        """Return a tensor of the model after the round.

        Args:
            before: as it was broadcast.
            total_move: the sum of the differences of what clients sent to it.
            num_sent: how many clients sent theirs.
            num_clients: how many there are.
        """

    def check_sent(self, server_round: int, record: ArrayRecord) -> None:
        """Check the arrays of a reply; a subclass raises RunError where they are of another algorithm."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages with what is broadcast to sampled clients."""
        self._broadcast, self._num_clients = arrays, len(list(grid.get_node_ids()))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return what is broadcast after the round; see `check_sent` for errors."""
        broadcast, num_clients = self._broadcast, self._num_clients
        self._broadcast, self._num_clients = None, 0
        valid_replies, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid_replies:
            return None, None
        assert broadcast is not None
        contents = [reply.content for reply in valid_replies]
        records = [next(iter(content.array_records.values())) for content in contents]
        self.check_sent(server_round, records[0])
        after: dict[str, Array] = {}
        for name, array in broadcast.items():
            before = array.numpy()
            total_move = _sum_moves(before, [record[name].numpy() for record in records])
            moved = self.move_tensor(name, before, total_move, len(records), num_clients)
            after[name] = Array(np.asarray(moved, before.dtype))
        return ArrayRecord(after), self.train_metrics_aggr_fn(contents, self.weighted_by_key)


def _sum_moves(before: NDArray[np.floating], sent: list[NDArray[np.floating]]) -> NDArray[np.float64]:
    """Return the sum of the differences of what was `sent` to `before`."""
    total = np.zeros(before.shape, np.float64)
    for values in sent:
        total += values.astype(np.float64) - before
    return total
