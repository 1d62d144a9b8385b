"""FedDyn's server: plain means of the clients' models, less a state that sums all their moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedsim.recording.known_terms import is_statistic


class FedDyn(FedAvg):
    """Set the model to the mean of the clients' models, less h / alpha.

    Its state h is minus alpha times the sum of all moves that clients ever sent, divided by the
    number of all clients. Only h / alpha is needed and kept, so that alpha is a setting of the
    clients alone. All clients of a round count alike, whatever number of examples they have.

    Args:
        fraction_train: share of the clients that each round samples.
        fraction_evaluate: share of the clients that each evaluation samples.
        min_train_nodes: least number of clients that each round samples.
        min_evaluate_nodes: least number of clients that each evaluation samples.
        min_available_nodes: number of connected clients to wait for.

    References:
        [Acar2021], Algorithm 1. Differs: running statistics of BatchNorm layers become their plain
        means.
    """

    algorithms: ClassVar[tuple[str, ...]] = ("feddyn",)

    def __init__(
        self,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
    ) -> None:
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
        )
        self.scaled_state: dict[str, NDArray[np.float64]] = {}
        """h / alpha, by name of a parameter."""
        # Set only within a round, so a checkpoint need not hold them.
        self._broadcast: ArrayRecord | None = None
        self._num_clients = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages with the model to sampled clients."""
        self._broadcast, self._num_clients = arrays, len(list(grid.get_node_ids()))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the round."""
        before, num_clients = self._broadcast, self._num_clients
        self._broadcast, self._num_clients = None, 0
        valid_replies, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid_replies:
            return None, None
        assert before is not None
        contents = [reply.content for reply in valid_replies]
        records = [next(iter(content.array_records.values())) for content in contents]
        after: dict[str, Array] = {}
        for name, array in before.items():
            start = array.numpy()
            total_move = _sum_moves(start, [record[name].numpy() for record in records])
            model = start + total_move / len(records)
            if np.issubdtype(start.dtype, np.floating) and not is_statistic(name):
                # h <- h - alpha / m sum(w_k - w_t), and w <- mean(w_k) - h / alpha.
                state = self.scaled_state.get(name, np.zeros(start.shape)) - total_move / num_clients
                self.scaled_state[name] = np.asarray(state)
                model = model - state
            after[name] = Array(np.asarray(model, start.dtype))
        return ArrayRecord(after), self.train_metrics_aggr_fn(contents, self.weighted_by_key)


def _sum_moves(before: NDArray[np.floating], sent: list[NDArray[np.floating]]) -> NDArray[np.float64]:
    """Return the sum of the differences of what was `sent` to `before`."""
    total = np.zeros(before.shape, np.float64)
    for values in sent:
        total += values.astype(np.float64) - before
    return total
