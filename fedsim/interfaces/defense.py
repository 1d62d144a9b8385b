"""The interface of a client-side defense: hooks, each the identity by default.

`on_data` acts before local training; `sampling`, `on_batch`, `on_features`, `on_examples` and
`on_gradient` act inside it, in this order; `on_update` acts on the update before it is sent. A
defense that overrides only `on_update` also works in any other Flower app, as a mod
(`clients.mods.as_mod`). What else a hook may use is in its last argument, a `LocalContext`.
"""

from __future__ import annotations

import copy
import math
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from fedsim.base.constraints import CheckedSettings, PositiveShare, check_field_constraints
from fedsim.base.errors import PluginError
from fedsim.base.papers import Paper
from fedsim.base.task import Task
from fedsim.interfaces.local_context import DefenseKey, LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.interfaces.message_noise import MessageNoise, TrainingFacts
from fedsim.recording.payloads import Payload, State

if TYPE_CHECKING:
    from fedsim.training.local_round import LocalRound
    from fedsim.training.settings import LocalTraining

HOOKS: Mapping[str, tuple[str, ...]] = {
    "on_data": ("local",),
    "on_batch": ("inputs", "labels"),
    "on_features": ("features", "inputs"),
    "on_examples": ("gradients", "expected"),
    "on_gradient": ("gradient",),
    "on_update": ("update",),
}
"""What each hook replaces; its last argument is a `LocalContext`."""

TRAINING_HOOKS = ("on_data", "sampling", "on_batch", "on_features", "on_examples", "on_gradient")
"""Hooks that act on local training, and so need fedsim's own training loop."""
NO_GUARANTEE = "no formal guarantee"


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Poisson sampling: each example is in each batch with the same probability, independently.

    Batches therefore differ in size, and may be empty. Privacy amplification by subsampling is
    proved for this kind of sampling.

    Attributes:
        rate: probability of each example to be in a batch, above 0 and at most 1.
    """

    rate: PositiveShare

    def __post_init__(self) -> None:
        check_field_constraints(self, "Poisson sampling: ")


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Training load of one client in a run, as far as its defenses depend on it.

    Attributes:
        num_examples: N, the number of its training examples.
        batch_size: B of `[training]`.
        steps: T, its local steps in each round.
        rounds: number of rounds in which it sends an update.
        num_classes: number of classes; 0 for a regression, or where it is unknown.
        value_range: see `Setting`.
    """

    num_examples: int
    batch_size: int
    steps: int
    rounds: int
    num_classes: int = 0
    value_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Facts about an experiment before it runs, against which defenses check their settings.

    Attributes:
        update: zeros with the names and shapes of a client's update; includes BatchNorm's running
            statistics where clients share them.
        task: the learning problem.
        training: settings of local training.
        rounds: number of rounds of the federation.
        clients: number of clients of the federation.
        num_examples: N of each client, indexed by client id.
        value_range: lowest and highest value of a model input in model units, for each channel or
            feature; None for texts, or where it is unknown.
    """

    update: State
    task: Task
    training: LocalTraining
    rounds: int
    clients: int
    num_examples: Sequence[int]
    value_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def participation(self, client: int, rounds: int | None = None) -> Participation:
        """Return the load of `client` in `rounds` rounds; by default in all rounds."""
        count, training = self.num_examples[client], self.training
        return Participation(
            num_examples=count,
            batch_size=training.batch_size,
            steps=1 if training.sends == "gradient" else training.steps(count),
            rounds=self.rounds if rounds is None else rounds,
            num_classes=self.task.num_classes,
            value_range=self.value_range,
        )


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """Proved (epsilon, delta)-differential privacy of all updates that one client sends in a run.

    It does not cover N and the metrics that a client reports, which are sent as they are.

    Attributes:
        epsilon: privacy loss, dimensionless, from 0 on.
        delta: probability bound, dimensionless, below 1.
        neighbours: which two inputs are made indistinguishable.
        accountant: how the rounds were composed.

    Raises:
        PluginError: epsilon or delta is out of range, so that nothing would be proved.
    """

    epsilon: float
    delta: float
    neighbours: str
    accountant: str

    def __post_init__(self) -> None:
        if not self.epsilon >= 0 or not 0 <= self.delta < 1:  # NaN is neither
            raise PluginError(
                f"a guarantee of epsilon = {self.epsilon} at delta = {self.delta} proves nothing, expected an epsilon "
                "from 0 on and a delta from 0 to below 1; fix the defense's 'guarantee', and return None without proof"
            )


@dataclass(frozen=True, kw_only=True)
class Defense(CheckedSettings, ABC):
    """Base of all defenses: a frozen dataclass whose fields are its strengths.

    Each hook gets copies and returns tensors of the same names and shapes, which is checked. Its
    last argument is a `LocalContext`: randomness, memory, round, step, w_t, current weights, and
    the gradient at other weights. A client whose defense fails sends nothing. One instance serves
    all clients, so a subclass must not store state on `self`; `context.memory` is for that.

    Attributes:
        promise: in a few words, the proved guarantee; `NO_GUARANTEE` where there is none.
        against: the adversary it defends against, and what others still see.
        cost: its cost in accuracy, bytes or time.
        encodes: whether its `on_update` encodes the update, sparse or quantised, so that a later
            defense that changes the numbers would undo the encoding. `check_order` refuses such an
            order.
        mixes: whether its `on_batch` makes one example out of several records.
        flips_signs: whether it also flips the signs of mixed records at random (around 0, in model
            units).
    """

    promise: ClassVar[str] = NO_GUARANTEE
    against: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    encodes: ClassVar[bool] = False
    mixes: ClassVar[bool] = False
    flips_signs: ClassVar[bool] = False
    paper: ClassVar[Paper]

    @property
    def draws_in_common(self) -> bool:
        """Return whether hooks use `context.common_rng`, which is the same for all clients."""
        return False

    def acts_in(self, number: int) -> bool:
        """Return whether a hook may change anything in a round, counted from 1; by default in each.

        An adversary that knows the defense takes messages of other rounds for undefended ones.
        """
        del number
        return True

    @property
    def summable(self) -> bool:
        """Return whether updates can be summed number by number, as secure aggregation does.

        Encoded updates can where all clients send the same entries, for example under a mask drawn
        from `context.common_rng`.
        """
        return not self.encodes or self.draws_in_common

    @classmethod
    def promise_or_default(cls) -> str:
        """Return `promise`, or a general remark where a class has a guarantee but no `promise`."""
        is_undeclared = cls.guarantee is not Defense.guarantee and cls.promise == NO_GUARANTEE
        return "a guarantee, which the report of a run states" if is_undeclared else cls.promise

    def check(self, setting: Setting) -> None:
        """Raise ConfigError where this defense does not fit `setting`; called before any work."""
        del setting

    def check_combination(self, defenses: Sequence[Defense], position: int) -> None:
        """Raise ConfigError where this defense cannot be at index `position` of all `defenses`."""
        del defenses, position

    def of_client(self, participation: Participation) -> Self:
        """Return the defense as one client uses it, whose load is at most `participation`.

        By default all clients use the same. A defense whose strength follows from the client's
        load, such as the noise for a wanted epsilon, returns a copy with that strength; one that
        makes soft labels returns a copy that knows the number of classes.

        Raises:
            ConfigError: no strength is sufficient.
        """
        del participation
        return self

    def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
        """Choose the examples that take part in this round, before local training.

        The client then trains as if it had only these: N, its batches and its number of steps
        follow from them. If none is left it sends nothing, and the server sees the same as of a
        straggler; so it does if this hook fails; only the log has the error.

        Returns:
            `example`, indices into `local.inputs`, strictly ascending.
        """
        del context
        return torch.arange(len(local.labels))

    def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
        """Return the sampling of each local step's examples; None where any sampling will do.

        The number of steps remains that of `[training]`. A run is refused whose defenses ask for
        different sampling, or whose batches are not drawn anew: `batches = "fixed"`, or clients
        that send the gradient of one mini-batch.

        Args:
            num_examples: N, the number of the client's training examples.
            batch_size: B of `[training]`, which is the expected size of a batch under
                `Poisson(rate=min(1, batch_size / num_examples))`.
        """
        del num_examples, batch_size
        return None

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        """Replace a mini-batch before its forward pass; `inputs` is `example ...` in model units.

        The number of examples may change, their shape may not, and each needs a label. It must not
        change if any defense has `on_examples` or asks for Poisson sampling, whose empty batches
        skip this hook.
        """
        del context
        return inputs, labels

    def on_features(self, features: Tensor, inputs: Tensor, context: LocalContext) -> Tensor:
        """Replace the features that the gradient of the last linear layer is computed from.

        That gradient reveals the representation of the batch. The forward pass and all other
        gradients use the true features. The layer is the one of the last trained matrix, which
        anyone who sees a gradient can find; a model is refused where that matrix does not belong to
        a linear layer.

        Args:
            features: `example feature`, the input of the last linear layer, differentiable with
                respect to `inputs`.
            inputs: `example ...` in model units.

        Returns:
            Features of the same shape.
        """
        del inputs, context
        return features

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        """Aggregate the per-example gradients of a mini-batch; by default sum / `expected`.

        DP-SGD clips the gradient of each example (over all parameters), sums over the examples,
        adds noise to the sum, and divides by `expected`. A run is refused in which two defenses
        override this hook, or a layer mixes examples, as BatchNorm does that normalises by the
        batch.

        Args:
            gradients: by parameter, `example ...`, the gradient of each example's own loss;
                parameters that are not trained are left out. An empty batch of Poisson sampling has
                no examples. Memory: examples x parameters numbers.
            expected: expected number of examples: rate x N under Poisson sampling, otherwise the
                number of examples in the batch.

        Returns:
            By parameter, in the parameter's shape, the gradient that replaces the batch's mean
            gradient. The gradient of a proximal term is added to it afterwards.
        """
        del context
        return {name: per_example.sum(0) / expected for name, per_example in gradients.items()}

    def example_factors(self, norms: Tensor) -> Tensor:
        """Return the factors that clip per-example gradients, if `on_examples` clips and sums.

        This is a shortcut (ghost clipping): where one class defines `on_examples`,
        `example_factors` and `on_sum`, training may compute the clipped sum without the per-example
        gradients, which is faster, and call `on_sum` with it. Both ways have to give the same
        gradient.

        Args:
            norms: `tensor example`, the L2 norms of per-example gradients.

        Returns:
            `tensor example`, the factors.
        """
        return torch.ones_like(norms)

    def on_sum(self, total: State, expected: float, context: LocalContext) -> State:
        """Turn the sum of clipped gradients into the batch's gradient; see `example_factors`."""
        del context
        return {name: tensor / expected for name, tensor in total.items()}

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        """Replace the mean gradient of a mini-batch (or the result of `on_examples`).

        Under Poisson sampling it is the sum over the batch divided by its expected size.
        """
        del context
        return gradient

    def on_update(self, update: State, context: LocalContext) -> State | Payload:
        """Replace the update w_T - w_t, or a FedSGD client's gradient, before it is sent.

        A state that is returned is sent in the form in which the client would have sent the update.
        A `Payload` is sent as it is, sparse or quantised, as a delta or, by a FedSGD client, a
        gradient; its constructors take care of the kind.
        """
        del context
        return update

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """Return the guarantee proved for a client with this `participation`, or None."""
        del participation, delta
        return None

    def compose_guarantees(self, participations: Sequence[Participation], delta: float) -> Guarantee | None:
        """Return the guarantee for rounds of different kinds of training; None without a proof.

        Kinds differ where the server asks for other local training in some rounds. By default their
        epsilons are summed, each at an equal share of `delta` (basic composition).

        Args:
            participations: at least one, one for the rounds of each kind.
            delta: of all rounds together.
        """
        if len(participations) == 1:
            return self.guarantee(participations[0], delta)
        share = delta / len(participations)
        guarantees = []
        for participation in participations:
            guarantee = self.guarantee(participation, share)
            if guarantee is None:
                return None
            guarantees.append(guarantee)
        return replace(
            guarantees[0],
            epsilon=math.fsum(guarantee.epsilon for guarantee in guarantees),
            delta=math.fsum(guarantee.delta for guarantee in guarantees),
        )

    def mechanism(self, participation: Participation) -> Mechanism | None:
        """Return what a client with this `participation` releases; None where that is not declared.

        From it follow ceilings of scores, tighter than those of an epsilon, and what
        `fedsim audit-defense` holds the behaviour of the hooks against. The default declares
        nothing.
        """
        del participation
        return None

    def adversary_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Model the effect of `on_batch` on a batch, for an adversary that knows the defense.

        Attacks that match gradients pass their dummy records through it, where the defense `mixes`.
        It is differentiable, draws nothing, and takes the expectation over all that it cannot know.
        Dummy records have no order, so it may treat neighbours as the records that were mixed. The
        default is the identity: dummy examples then stand for mixed examples, on which the client
        trained.

        Args:
            inputs: `example ...` in model units.
            labels: `example class` probabilities, or `example` targets of a regression.
        """
        return inputs, labels

    def adversary_view(self, gradient: State, sent: State) -> State | None:
        """Model the effect of this defense on a gradient, for an adversary that knows the defense.

        Attacks that match gradients pass the gradient of their dummy data through it. It is
        differentiable, draws nothing, and takes the expectation over all that it cannot know. A
        defense that does not change the gradient in expectation returns it. The default says that
        no such model has been worked out.

        Args:
            gradient: by name, the gradient of dummy data, in the unit of `sent` where the attack is
                granted the facts to convert it.
            sent: by name, the defended update that the server got, as a pseudo-gradient. Its zeros,
                for example, reveal the mask of a sparsification.

        Returns:
            The defended gradient, by the same names. None where there is no model; attacks then
            match the gradient as it is.
        """
        del gradient, sent
        return None

    def message_noise(self, sent: State, facts: TrainingFacts) -> MessageNoise | None:
        """Describe how far a message may be from its expectation, for an adversary that knows the defense.

        Attacks that weigh a message by its likelihood read it. It draws nothing. A defense without
        noise, rounding or omissions returns an empty `MessageNoise`. The default says that no such
        model has been worked out.

        Args:
            sent: by name, the defended update that the server got, as a pseudo-gradient.
            facts: what is known of the local training behind it.

        Returns:
            None where there is no model, or where a fact that it needs is withheld; attacks then
            estimate the noise from the message.
        """
        del sent, facts
        return None


D = TypeVar("D", bound=Defense)


def apply_adversary_views(defenses: Iterable[Defense], gradient: State, sent: State) -> State | None:
    """Pass a gradient through each defense's `adversary_view` in turn; None if all are None."""
    view = None
    for defense in defenses:
        next_view = defense.adversary_view(gradient if view is None else view, sent)
        if next_view is not None:
            view = next_view
    return view


def pair_with_keys(defenses: Sequence[Defense]) -> list[tuple[Defense, DefenseKey]]:
    """Pair each defense with the end of the key of its random draws.

    The key is the name of its class and the number of earlier defenses of that class, so that its
    draws do not depend on defenses of other classes.
    """
    names = [type(defense).__name__ for defense in defenses]
    pairs = []
    for index, (defense, name) in enumerate(zip(defenses, names, strict=True)):
        pairs.append((defense, (name, names[:index].count(name))))
    return pairs


def overrides(defense: Defense, hook: str) -> bool:
    """Return whether `defense` overrides `hook`."""
    return getattr(type(defense), hook) is not getattr(Defense, hook)


def overrides_guarantee(defense: Defense) -> bool:
    """Return whether `defense` overrides either of the two hooks by which a guarantee is stated."""
    return overrides(defense, "guarantee") or overrides(defense, "compose_guarantees")


def mixing_defenses(defenses: Sequence[Defense]) -> list[Defense]:
    """Return those of `defenses` that make one example of a batch out of several records."""
    return [defense for defense in defenses if defense.mixes and overrides(defense, "on_batch")]


def copy_with_facts(defense: D, **facts: Any) -> D:
    """Return a copy of `defense` with other values of class attributes.

    `of_client` uses it for facts about the client, which are no settings.
    """
    changed = copy.copy(defense)
    vars(changed).update(facts)
    return changed


def supports_ghost_clipping(defense: Defense) -> bool:
    """Return whether `on_sum` may replace `on_examples`: one class defines both and the factors."""
    bases = type(defense).__mro__
    owners = set()
    for hook in ("on_examples", "example_factors", "on_sum"):
        owners.add(next(base for base in bases if hook in vars(base)))
    return len(owners) == 1 and Defense not in owners
