"""FedDyn's server: plain means of the clients' models, less a state that sums all their moves."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsim.recording.known_terms import is_statistic
from strategies.plain_moves import PlainMoves


class FedDyn(PlainMoves):
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

    def move_tensor(
        self, name: str, before: NDArray[np.floating], total_move: NDArray[np.float64], num_sent: int, num_clients: int
    ) -> NDArray[np.float64]:
        """Return mean(w_k) - h / alpha, after h <- h - alpha / m sum(w_k - w_t)."""
        mean = np.asarray(before + total_move / num_sent)
        if is_statistic(name) or not np.issubdtype(before.dtype, np.floating):
            return mean
        state = self.scaled_state.get(name, np.zeros(before.shape)) - total_move / num_clients
        self.scaled_state[name] = np.asarray(state)
        return np.asarray(mean - state)
