"""The interface of a client algorithm: what a client trains, what it keeps, and what it sends.

    class Ditto(ClientAlgorithm):
        def train_client(self, client):
            shared = client.train(client.model)
            ...
            return ClientResult(model=shared)

fedsim takes care of the rest: batches, optimizer and defenses act in each pass of `client.train`,
tensors of private parts are cut out of what is returned and kept in the client's own state, and the
others are sent. So no algorithm can send a part that it declares to be private.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor, nn

from fedsim.base.constraints import CheckedSettings
from fedsim.base.papers import Paper
from fedsim.interfaces.local_context import Memory
from fedsim.recording.payloads import State

if TYPE_CHECKING:
    from fedsim.training.settings import LocalTraining

WHOLE_MODEL = "model"
"""Name of the only part of a model that is not divided."""

FeatureLoss = Callable[[Tensor, Tensor], Tensor]
"""`(inputs, features) -> term`: a term of the loss, from a batch and its representation.

Both have one row for each example, and the term is a mean over them.
"""


class LocalClient(Protocol):
    """One client in one round, as its algorithm sees it."""

    @property
    def model(self) -> State:
        """Return the whole model at the start of the round.

        It is what the server sent, w_t, together with the parts that this client keeps.
        """

    @property
    def controls(self) -> State:
        """Return the control variates that the server sent with the model, by name of a parameter."""

    @property
    def parts(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the tensors in each part of the model."""

    @property
    def memory(self) -> Memory:
        """Return tensors by name that this client keeps for its algorithm, none in its first round."""

    @property
    def learning_rate(self) -> float:
        """Return the step size of the local optimizer."""

    @property
    def num_steps(self) -> int:
        """Return K, the number of local steps of a pass with the epochs or steps of `[training]`."""

    def train(
        self,
        start: State,
        *,
        name: str = "",
        trained: Collection[str] | None = None,
        proximal_mu: float = 0.0,
        anchor: State | None = None,
        correction: State | None = None,
        feature_loss: FeatureLoss | None = None,
        local_epochs: int | None = None,
        defended: bool = True,
    ) -> dict[str, Tensor]:
        """Train the model from `start` on the client's data, and return it.

        The objective is the loss, plus `proximal_mu` / 2 times the squared distance to `anchor`, plus
        the inner product with `correction`, whose gradient is the correction.

        Args:
            start: tensors of the whole model.
            name: of this pass, from which its batches and other random draws follow. The pass
                without a name draws as plain local training does, and its loss is what the client
                reports; each client needs exactly one.
            trained: names of the parameters that are trained; None trains all.
            proximal_mu: weight of the proximal term.
            anchor: weights to which the proximal term pulls; by default `start`.
            correction: is added to the gradient of each step, by name of a parameter.
            feature_loss: is added to the loss of each batch; its features are what enters the last
                linear layer.
            local_epochs: passes over the data, in place of what `[training]` says.
            defended: whether the client's defenses act on this pass. What is sent must not follow
                from one on which they do not.
        """

    def make_representation(self, model: State) -> Callable[[Tensor], Tensor]:
        """Return a function that computes the representation of inputs by a fixed model.

        The representation, `example feature`, is what enters the last linear layer, in evaluation
        mode.
        """


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """Result of local training.

    Attributes:
        model: the whole model after training; what is in a private part is kept, the rest is sent.
        controls: control variates that are sent beside it, by the names of `LocalClient.controls`,
            as the server's own plus the client's change.
    """

    model: State
    controls: State = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClientAlgorithm(CheckedSettings, ABC):
    """Base of all client algorithms: a frozen dataclass whose fields are its settings.

    One instance serves all clients, so a subclass must not store state on `self`; `client.memory`
    is for that.

    Attributes:
        strategies: names of the strategies that it goes with, the usual one first; empty where any
            does whose clients send weights.
        private_parts: names of the parts of the model that never leave the client.
        personal: whether each client has a model of its own, with which it is evaluated.
        adds_to_loss: whether it adds a term to the losses of examples, which defenses that bound the
            gradients of single examples would not bound.
        counts_steps: whether what is sent follows from exactly the local steps that `[training]`
            says, for which privacy accountants account.
        keeps: what a client keeps from round to round, in a few words.
        sends: what a client sends, in a few words.
        paper: where it was published.
    """

    strategies: ClassVar[tuple[str, ...]] = ()
    private_parts: ClassVar[frozenset[str]] = frozenset()
    personal: ClassVar[bool] = False
    adds_to_loss: ClassVar[bool] = False
    counts_steps: ClassVar[bool] = True
    keeps: ClassVar[str] = "nothing"
    sends: ClassVar[str] = "the whole model"
    paper: ClassVar[Paper]

    @classmethod
    def describe_facts(cls) -> list[str]:
        """Return what `fedsim show` prints below the settings, a line each."""
        strategy = ", ".join(cls.strategies) or "any whose clients send weights"
        evaluated = "each client's own model" if cls.personal else "the shared model"
        return [f"keeps: {cls.keeps}", f"sends: {cls.sends}", f"strategy: {strategy}", f"evaluates: {evaluated}"]

    def check(self, training: LocalTraining) -> None:
        """Raise ConfigError where this algorithm does not fit the settings of local training."""
        del training

    def training_facts(self) -> Mapping[str, float]:
        """Return facts of local training that every server knows who knows the algorithm.

        Names are those of `fedsim.interfaces.knowledge.Knowledge`, such as `proximal_mu`.
        """
        return {}

    def message_facts(self) -> Mapping[str, float]:
        """Return numbers that the server sends to each client along with the settings of training.

        They stand in the recording, for what attacks have to know of the messages themselves.
        """
        return {}

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        """Return the names of the tensors in each part of `network`, by name of the part.

        Each parameter and each floating-point buffer has to be in exactly one part.

        Raises:
            ConfigError: the network has no such parts.
        """
        return {WHOLE_MODEL: [name for name, tensor in network.state_dict().items() if tensor.is_floating_point()]}

    def initial_controls(self, parameters: State) -> State:
        """Return the control variates that the server sends in the first round, none by default.

        Args:
            parameters: of the initial model, by name.
        """
        del parameters
        return {}

    def personalise_model(self, model: State, memory: Memory) -> State:
        """Return the model that this client uses itself, by default the shared one with its own parts.

        Args:
            model: what the server sent, together with the parts that this client keeps.
            memory: what it keeps for its algorithm.
        """
        del memory
        return model

    @abstractmethod
    def train_client(self, client: LocalClient) -> ClientResult:
        """Train one client in one round."""
