"""SCAFFOLD's server: plain means of the clients' models, and of what they add to the control variate."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedsim.base.errors import RunError
from fedsim.federation.strategy_checks import read_learning_rate
from fedsim.recording.control_variates import CONTROL_PREFIX
from strategies.plain_moves import PlainMoves


class Scaffold(PlainMoves):
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
        self.learning_rate = read_learning_rate(learning_rate)
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
        )

    def check_sent(self, server_round: int, record: ArrayRecord) -> None:
        """Raise RunError where the clients sent no control variates."""
        if not any(name.startswith(CONTROL_PREFIX) for name in record):
            raise RunError(
                f"round {server_round}: clients sent no control variates; strategy scaffold goes with "
                '[algorithm] name = "scaffold"'
            )

    def move_tensor(
        self, name: str, before: NDArray[np.floating], total_move: NDArray[np.float64], num_sent: int, num_clients: int
    ) -> NDArray[np.float64]:
        """Return x + eta_g mean(y_i - x), and of the control variate c + S / N mean(c_i+ - c_i)."""
        rate = num_sent / num_clients if name.startswith(CONTROL_PREFIX) else self.learning_rate
        return np.asarray(before + rate * total_move / num_sent)
