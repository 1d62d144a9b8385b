"""SCAFFOLD: control variates correct the drift of clients whose data differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedsim.base.papers import Paper, cite
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.recording.payloads import State
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class ScaffoldClient(ClientAlgorithm):
    """Add c - c_i to each local gradient, and send the changes of the model and of c_i.

    The server's control variate c estimates the gradient of the federation, the client's c_i that
    of its own data. A server that saw all rounds knows c_i, too: it is the sum of what was sent. So
    attacks are given updates from which c - c_i is removed, and no control variates hide anything.
    Rather, the change of c_i tells the mean gradient once more, which counts where a defense
    changes what is sent.

    References:
        [Karimireddy2020], Algorithm 1, option II.
    """

    strategies: ClassVar[tuple[str, ...]] = ("scaffold",)
    keeps: ClassVar[str] = "its control variate, an estimate of its gradient"
    sends: ClassVar[str] = "the whole model, and the change of its control variate"
    paper: ClassVar[Paper] = cite("Karimireddy2020")

    def check(self, training: LocalTraining) -> None:
        """Raise ConfigError unless clients take plain steps, from whose sum option II follows."""
        training.check_plain_steps(
            "scaffold reads the mean gradient off the distance that a client moved, which takes plain SGD"
        )

    def initial_controls(self, parameters: State) -> State:
        """Return c = 0, from which the server begins."""
        return {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}

    def train_client(self, client: LocalClient) -> ClientResult:
        """Take local steps corrected by c - c_i, then renew c_i."""
        start, server_control = client.model, client.controls
        own_control: dict[str, torch.Tensor] = {}
        for name, control in server_control.items():
            own_control[name] = client.memory.get(name, torch.zeros_like(control))

        # y_i <- y_i - eta_l (g_i(y_i) - c_i + c), K times.
        correction = {name: server_control[name] - own_control[name] for name in server_control}
        after = client.train(start, correction=correction)

        # c_i+ <- c_i - c + (x - y_i) / (K eta_l); the server gets c_i+ - c_i.
        distance = client.num_steps * client.learning_rate
        sent_controls: dict[str, torch.Tensor] = {}
        for name, control in server_control.items():
            new_control = own_control[name] - control + (start[name] - after[name]) / distance
            sent_controls[name] = control + (new_control - own_control[name])
            client.memory[name] = new_control
        return ClientResult(model=after, controls=sent_controls)
