"""FedSGD: clients send gradients, the server takes the steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedsim.base.errors import RunError
from fedsim.federation.strategy_checks import read_learning_rate


class FedSgd(FedAvg):
    """Average the gradients that clients send, and take one step: w - learning_rate * gradient.

    The config tells clients `sends = "gradient"`. A reply is one ArrayRecord, in which the gradient
    of parameter `NAME` is called `gradient/NAME`, and other tensors (BatchNorm's running
    statistics) have their own names; N is the size of the mini-batch. All tensors are averaged with
    the weights N, as in FedAvg. fedsim's own clients take one mini-batch a round:
    `[training] local_steps = 1`, `batch_size`, `batches`.

    Args:
        learning_rate: step size of the server, in units of weights over gradients.
        fraction_train: share of the clients that each round samples.
        fraction_evaluate: share of the clients that each evaluation samples.
        min_train_nodes: least number of clients that each round samples.
        min_evaluate_nodes: least number of clients that each evaluation samples.
        min_available_nodes: number of connected clients to wait for.
        weighted_by_key: the metric in which clients report N.

    References:
        [McMahan2017], Sect. 2 (FedSGD). Differs: a client's gradient is that of one mini-batch, as
        in [Li2023b] (TGIAs-RO); where B is at least N, it is that of all the client's data, as in
        the paper.
    """

    sends: ClassVar[Literal["weights", "gradient"]] = "gradient"

    def __init__(
        self,
        *,
        learning_rate: float,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
    ) -> None:
        self.learning_rate = read_learning_rate(learning_rate)
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
        )
        # Set only within a round, so a checkpoint need not hold it.
        self._broadcast: ArrayRecord | None = None

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return messages that ask sampled clients for gradients and name the learning rate."""
        config["sends"] = "gradient"
        config["learning-rate"] = self.learning_rate
        self._broadcast = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the gradients, and return the model after one step.

        Raises:
            RunError: the clients sent something else than gradients of the model.
        """
        before, self._broadcast = self._broadcast, None
        averaged, metrics = super().aggregate_train(server_round, replies)
        if averaged is None:
            return None, metrics
        assert before is not None
        return self._take_step(server_round, before, averaged), metrics

    def _take_step(self, server_round: int, before: ArrayRecord, averaged: ArrayRecord) -> ArrayRecord:
        if not any(name.startswith("gradient/") for name in averaged):
            raise RunError(
                f"round {server_round}: clients sent no gradients; strategy fedsgd needs clients that send "
                f"'gradient/NAME' for each parameter when the config says sends = 'gradient'"
            )
        after = {}
        for name, array in before.items():
            sent = averaged.get(f"gradient/{name}", averaged.get(name))
            if sent is None or tuple(sent.shape) != tuple(array.shape):
                got = "nothing" if sent is None else tuple(sent.shape)
                raise RunError(
                    f"round {server_round}: of '{name}', {tuple(array.shape)}, clients sent {got}; "
                    "send the gradient of each parameter and the value of each buffer that was broadcast"
                )
            value = sent.numpy()
            if f"gradient/{name}" in averaged:
                value = array.numpy() - self.learning_rate * value
            after[name] = Array(np.asarray(value))
        return ArrayRecord(after)
