"""One client in one round, trained by its algorithm; what of the result is kept, and what is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedsim.base.errors import RunError
from fedsim.base.task import Loss
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, FeatureLoss
from fedsim.interfaces.defense import TRAINING_HOOKS, Defense, overrides
from fedsim.interfaces.local_context import ClientRound, Memory
from fedsim.recording.control_variates import join_controls
from fedsim.recording.wire_format import State
from fedsim.training.canaries import Canaries
from fedsim.training.cohort import LocalData
from fedsim.training.features import make_representation
from fedsim.training.loop import local_update
from fedsim.training.penalties import LocalObjective
from fedsim.training.settings import LocalTraining

REPORTED_PASS = ""
"""Name of the pass whose loss a client reports."""


@dataclass(frozen=True, kw_only=True)
class TrainingClient:
    """A `LocalClient` that trains by fedsim's loop.

    Attributes:
        network: its architecture alone is used.
        model: the whole model at the start of the round.
        controls: control variates that the server sent.
        parts: names of the tensors in each part of the model.
        memory: what the client keeps for its algorithm.
        share: its data, in model units and on the device of the network.
        client_round: randomness and memory of its defenses.
        canaries: put among the gradients of examples.
        losses: mean training loss of each pass, by its name.
        undefended: models after the passes on which defenses that act in training did not.
        defended_steps: numbers of local steps of the passes on which they did.
    """

    network: nn.Module
    model: State
    controls: State
    parts: Mapping[str, Sequence[str]]
    memory: Memory
    share: LocalData
    settings: LocalTraining
    defenses: Sequence[Defense]
    client_round: ClientRound
    loss: Loss
    canaries: Canaries | None = None
    losses: dict[str, float] = field(default_factory=dict)
    undefended: list[State] = field(default_factory=list)
    defended_steps: list[int] = field(default_factory=list)

    @property
    def learning_rate(self) -> float:
        """Return the step size of the local optimizer."""
        return self.settings.learning_rate

    @property
    def num_steps(self) -> int:
        """Return K, the number of local steps of a pass."""
        return self.settings.steps(len(self.share.labels))

    def train(
        self,
        start: State,
        *,
        name: str = REPORTED_PASS,
        trained: Collection[str] | None = None,
        proximal_mu: float = 0.0,
        anchor: State | None = None,
        correction: State | None = None,
        feature_loss: FeatureLoss | None = None,
        local_epochs: int | None = None,
        defended: bool = True,
    ) -> dict[str, Tensor]:
        """Train the model from `start`; see `LocalClient.train`."""
        if name in self.losses:
            raise RunError(f"algorithm: it trains twice under the name '{name}'; give each pass a different name")
        settings, share, key = self.settings, self.share, self.share.key
        if name != REPORTED_PASS:
            # Batches that go on from round to round are those of the pass that is reported.
            key, share = (*key, "pass", name), dataclasses.replace(share, order=None)
            settings = dataclasses.replace(settings, batches="reshuffled")
        if local_epochs is not None:
            settings = dataclasses.replace(settings, local_epochs=local_epochs, local_steps=None)
        client_round = dataclasses.replace(self.client_round, key=key)
        after, self.losses[name] = local_update(
            self.network,
            start,
            share.inputs,
            share.labels,
            settings,
            key=key,
            defenses=self.defenses if defended else (),
            client_round=client_round,
            loss=self.loss,
            order=share.order,
            canaries=self.canaries,
            objective=LocalObjective(
                trained=trained,
                proximal_mu=proximal_mu,
                anchor=anchor,
                correction=correction,
                feature_loss=feature_loss,
            ),
        )
        # What a client keeps is on the CPU, as is what the server sent.
        after = {tensor_name: tensor.cpu() for tensor_name, tensor in after.items()}
        acts_in_training = any(overrides(defense, hook) for defense in self.defenses for hook in TRAINING_HOOKS)
        if defended:
            self.defended_steps.append(settings.steps(len(share.labels)))
        elif acts_in_training:
            self.undefended.append({tensor_name: tensor.clone() for tensor_name, tensor in after.items()})
        return after

    def make_representation(self, model: State) -> Callable[[Tensor], Tensor]:
        """Return a function that computes representations by a fixed model; see `LocalClient`."""
        return make_representation(self.network, model)


def run_algorithm(
    algorithm: ClientAlgorithm, client: TrainingClient, private_names: Collection[str], private_memory: Memory
) -> tuple[dict[str, Tensor], float]:
    """Train a client by its algorithm; return what it sends, and the loss that it reports.

    Args:
        private_names: names of the tensors that never leave it; these are cut out of what is
            sent.
        private_memory: gets them.
    """
    result = algorithm.train_client(client)
    name = type(algorithm).__name__
    if not isinstance(result, ClientResult):
        raise RunError(f"{name}.train_client: expected a ClientResult back, got {type(result).__name__}")
    if set(result.model) != set(client.model):
        odd_name = min(set(result.model) ^ set(client.model))
        raise RunError(f"{name}.train_client: '{odd_name}' was given or returned alone; return the whole model")
    if set(result.controls) != set(client.controls):
        odd_name = min(set(result.controls) ^ set(client.controls))
        raise RunError(f"{name}.train_client: the control of '{odd_name}' was given or returned alone; return all")
    if REPORTED_PASS not in client.losses:
        raise RunError(f"{name}.train_client: no pass of client.train was without a name; leave that of one out")
    is_accounted = any(overrides(defense, hook) for defense in client.defenses for hook in ("on_examples", "sampling"))
    if is_accounted and algorithm.counts_steps and (steps := sum(client.defended_steps)) > client.num_steps:
        raise RunError(
            f"{name}.train_client: takes {steps} defended steps, and the defenses account for the {client.num_steps} "
            "of [training]; train what is not sent with defended = False, or set counts_steps = False"
        )
    shared: dict[str, Tensor] = {}
    for tensor_name, tensor in result.model.items():
        if tensor_name in private_names:
            private_memory[tensor_name] = tensor
        else:
            shared[tensor_name] = tensor
            _check_defended(name, tensor_name, tensor, client)
    return join_controls(shared, result.controls), client.losses[REPORTED_PASS]


def _check_defended(name: str, tensor_name: str, tensor: Tensor, client: TrainingClient) -> None:
    """Raise RunError where a tensor that is sent is that of a pass without defenses, which would be promised of it."""
    if torch.equal(tensor, client.model[tensor_name]):
        return  # no pass trained it
    if any(torch.equal(tensor, model[tensor_name]) for model in client.undefended):
        raise RunError(
            f"{name}.train_client: '{tensor_name}' is sent as it is after a pass with defended = False, so the "
            "defenses do not hold; send the result of a defended pass"
        )
