"""SCAFFOLD's server: plain means of the clients' models, and of what they add to the control variate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedsim.base.errors import ConfigError, RunError
from fedsim.recording.control_variates import CONTROL_PREFIX


class Scaffold(FedAvg):
    """Move the model by the mean of the clients' moves, and the control variate by S / N of theirs.

    S of all N clients take part in a round, and count alike whatever number of examples they have.
    The control variate of parameter `NAME` is an array `control/NAME` beside the model; clients
    send it back with the change of their own added to it, see `clients.algorithms.scaffold`.

    Args:
        learning_rate: step size of the server, eta_g; at 1 the model becomes the mean of theirs.
        fraction_train: share of the clients that each round samples.
        fraction_evaluate: share of the clients that each evaluation samples.
        min_train_nodes: least number of clients that each round samples.
        min_evaluate_nodes: least number of clients that each evaluation samples.
        min_available_nodes: number of connected clients to wait for.

    References:
        [Karimireddy2020], Algorithm 1. Differs: running statistics of BatchNorm layers are
        averaged like weights.
    """

    algorithms: ClassVar[tuple[str, ...]] = ("scaffold",)

    def __init__(
        self,
        *,
        learning_rate: float = 1.0,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
    ) -> None:
        is_number = isinstance(learning_rate, int | float) and not isinstance(learning_rate, bool)
        if not is_number or not 0 < learning_rate < math.inf:
            raise ConfigError(f"learning_rate: expected a finite value above 0, got {learning_rate}")
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
        )
        self.learning_rate = float(learning_rate)
        # Set only within a round, so a checkpoint need not hold them.
        self._broadcast: ArrayRecord | None = None
        self._num_clients = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages with the model and the control variate to sampled clients."""
        self._broadcast, self._num_clients = arrays, len(list(grid.get_node_ids()))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model and the control variate after the round.

        Raises:
            RunError: the clients sent no control variates.
        """
        before, num_clients = self._broadcast, self._num_clients
        self._broadcast, self._num_clients = None, 0
        valid_replies, _ = self._check_and_log_replies(replies, is_train=True)
        if not valid_replies:
            return None, None
        assert before is not None
        contents = [reply.content for reply in valid_replies]
        records = [next(iter(content.array_records.values())) for content in contents]
        if not any(name.startswith(CONTROL_PREFIX) for name in records[0]):
            raise RunError(
                f"round {server_round}: clients sent no control variates; strategy scaffold goes with "
                '[algorithm] name = "scaffold"'
            )
        # x <- x + eta_g mean(y_i - x), and c <- c + S / N mean(c_i+ - c_i).
        after: dict[str, Array] = {}
        for name, array in before.items():
            rate = len(records) / num_clients if name.startswith(CONTROL_PREFIX) else self.learning_rate
            after[name] = Array(_move(array.numpy(), [record[name].numpy() for record in records], rate))
        return ArrayRecord(after), self.train_metrics_aggr_fn(contents, self.weighted_by_key)


def _move(before: NDArray[np.floating], sent: list[NDArray[np.floating]], rate: float) -> NDArray[np.floating]:
    """Return `before` plus `rate` times the mean difference of what was `sent` to it."""
    total = np.zeros(before.shape, np.float64)
    for values in sent:
        total += values.astype(np.float64) - before
    return np.asarray(before + rate * total / len(sent), before.dtype)
