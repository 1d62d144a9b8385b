"""The interface of a client-side defense: hooks, each the identity by default.

`on_data` acts before local training; `sampling`, `on_batch`, `on_features`, `on_examples` and
`on_gradient` act inside it, in this order; `on_update` acts on the update before it is sent. A
defense that overrides only `on_update` also works in any other Flower app, as a mod
(`clients.mods.as_mod`).
"""

from __future__ import annotations

import copy
import difflib
import inspect
import math
import re
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, PluginError, RunError
from fedsim.base.task import Task
from fedsim.interfaces.attack import Paper
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
"""Positional parameters of each hook; each also gets `rng`."""

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "memory": ("on_data", "on_update"),
    "common": ("on_update",),
    "weights": ("on_gradient",),
    "step": ("on_gradient",),
}
"""Optional keyword parameters, and the hooks that may declare them."""
Memory = MutableMapping[str, Tensor]
"""Tensors by name that a client keeps for one defense between rounds."""
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

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"rate of Poisson sampling: expected a probability above 0, at most 1, got {self.rate}")


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
        epsilon: privacy loss, dimensionless.
        delta: probability bound, dimensionless.
        neighbours: which two inputs are made indistinguishable.
        accountant: how the rounds were composed.
    """

    epsilon: float
    delta: float
    neighbours: str
    accountant: str


@dataclass(frozen=True, kw_only=True)
class Defense(ABC):
    """Base of all defenses: a frozen dataclass whose fields are its strengths.

    Each hook gets copies and returns tensors of the same names and shapes, which is checked. A
    client whose defense fails sends nothing. Each hook has an `rng` of its own, so that neither
    another hook nor another defense changes its draws. One instance serves all clients, so a
    subclass must not store state on `self`.

    A hook may declare further keyword parameters:

    - `memory` (`on_data`, `on_update`): tensors by name that this client keeps for this defense,
      empty in its first round. Changes last for later hooks of the round and later rounds of the
      client. A round in which the client fails does not change it; a round in which `on_data`
      leaves no example, so that nothing is sent, does.
    - `common` (`on_update`): a generator that is the same for all clients in a round, for example
      for a common mask. The server could have it, too. Where clients share randomness under some
      settings only, the defense has a setting `common`, and the parameter is None by default.
    - `step` (`on_gradient`): number of the local step, counted from 0 in each round.
    - `weights` (`on_gradient`): the parameters before that step, by name.

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
    def summable(self) -> bool:
        """Return whether updates can be summed number by number, as secure aggregation does.

        Encoded updates can where all clients send the same entries, for example under a mask drawn
        from `common`.
        """
        return not self.encodes or bool(getattr(self, "common", False))

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

    def on_data(self, local: LocalRound, *, rng: torch.Generator) -> Tensor:
        """Choose the examples that take part in this round, before local training.

        The client then trains as if it had only these: N, its batches and its number of steps
        follow from them. If none is left it sends nothing, and the server sees the same as of a
        straggler; so it does where this hook fails, whose error only the log tells.

        Returns:
            `example`, indices into `local.inputs`, strictly ascending.
        """
        del rng
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

    def on_batch(self, inputs: Tensor, labels: Tensor, *, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Replace a mini-batch before its forward pass; `inputs` is `example ...` in model units.

        The number of examples may change, their shape may not, and each needs a label. It must not
        change if any defense has `on_examples` or asks for Poisson sampling, whose empty batches
        skip this hook.
        """
        del rng
        return inputs, labels

    def on_features(self, features: Tensor, inputs: Tensor, *, rng: torch.Generator) -> Tensor:
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
        del inputs, rng
        return features

    def on_examples(self, gradients: State, expected: float, *, rng: torch.Generator) -> State:
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
        del rng
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

    def on_sum(self, total: State, expected: float, *, rng: torch.Generator) -> State:
        """Turn the sum of clipped gradients into the batch's gradient; see `example_factors`."""
        del rng
        return {name: tensor / expected for name, tensor in total.items()}

    def on_gradient(self, gradient: State, *, rng: torch.Generator) -> State:
        """Replace the mean gradient of a mini-batch (or the result of `on_examples`).

        Under Poisson sampling it is the sum over the batch divided by its expected size.
        """
        del rng
        return gradient

    def on_update(self, update: State, *, rng: torch.Generator) -> State | Payload:
        """Replace the update w_T - w_t, or a FedSGD client's gradient, before it is sent.

        A state that is returned is sent in the form in which the client would have sent the update.
        A `Payload` is sent as it is, sparse or quantised, as a delta or, by a FedSGD client, a
        gradient; its constructors take care of the kind.
        """
        del rng
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
            if guarantee is not None:
                guarantees.append(guarantee)
        if len(guarantees) < len(participations):
            return None
        total = math.fsum(guarantee.epsilon for guarantee in guarantees)
        return replace(guarantees[0], epsilon=total, delta=delta)

    def adversary_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Model the effect of `on_batch` on a batch, for an adversary who knows the defense.

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
        """Model the effect of this defense on a gradient, for an adversary who knows the defense.

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


_ATTRIBUTES = frozenset(Defense.__annotations__)
"""Names of the class attributes that a defense declares."""
_METHODS = frozenset(name for name in vars(Defense) if not name.startswith("_")) - _ATTRIBUTES
"""Names of the methods that a defense may override."""
D = TypeVar("D", bound=Defense)


def apply_adversary_views(defenses: Iterable[Defense], gradient: State, sent: State) -> State | None:
    """Pass a gradient through each defense's `adversary_view` in turn; None if all are None."""
    view = None
    for defense in defenses:
        next_view = defense.adversary_view(gradient if view is None else view, sent)
        if next_view is not None:
            view = next_view
    return view


def check_defense(candidate: Any) -> Defense:
    """Return `candidate` if it is a defense that overrides a hook.

    Raises:
        PluginError: it is something else, overrides no hook, or misspells one, so that it would
            silently defend nothing.
    """
    cls = candidate if isinstance(candidate, type) else type(candidate)
    name = f"{cls.__module__}.{cls.__name__}"
    if not isinstance(candidate, Defense):
        raise PluginError(
            f"{name}: expected a defense, made from a class that derives from fedsim.interfaces.defense.Defense"
        )
    if shadowed := sorted(vars(candidate).keys() & _METHODS):
        raise PluginError(
            f"{name}: '{shadowed[0]}' is set on an instance, where it is never called; define it in the class"
        )
    _check_spelling(cls, name)
    if not any(overrides(candidate, hook) for hook in (*HOOKS, "sampling")):
        raise PluginError(f"{name}: overrides none of sampling, {', '.join(HOOKS)}, so it defends nothing")
    shortcut = [hook for hook in ("example_factors", "on_sum") if overrides(candidate, hook)]
    if shortcut and not overrides(candidate, "on_examples"):
        raise PluginError(
            f"{name}: '{shortcut[0]}' is a shortcut of 'on_examples' and is not called without it; define that, too"
        )
    if overrides(candidate, "adversary_batch") and not candidate.mixes:
        raise PluginError(f"{name}: 'adversary_batch' is only called of a defense that mixes; set mixes = True")
    for hook, arguments in HOOKS.items():
        _check_signature(candidate, name, hook, arguments)
    try:
        inspect.signature(candidate.sampling).bind("num_examples", "batch_size")
    except TypeError as error:
        raise PluginError(
            f"{name}: 'sampling' cannot be called as sampling(num_examples, batch_size) ({error})"
        ) from error
    return candidate


def _check_signature(defense: Defense, name: str, hook: str, arguments: Sequence[str]) -> None:
    """Raise PluginError where `hook` cannot be called with the arguments it is due."""
    keywords, signature = ["rng"], inspect.signature(getattr(defense, hook))
    for extra, allowed_hooks in _EXTRAS.items():
        if extra not in signature.parameters:
            continue
        if hook not in allowed_hooks:
            allowed = " and ".join(allowed_hooks)
            raise PluginError(f"{name}: '{hook}' asks for '{extra}', which is for {allowed} alone; leave it out")
        keywords.append(extra)
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        call = f"{hook}({', '.join([*arguments, *(f'{keyword}=...' for keyword in keywords)])})"
        raise PluginError(f"{name}: '{hook}' cannot be called as {call} ({error})") from error


def _check_spelling(cls: type[Defense], name: str) -> None:
    """Raise PluginError where `cls` adds a name that looks like a misspelt one of Defense."""
    known = {field.name for field in fields(cls)} | _ATTRIBUTES | _METHODS
    for added in dir(cls):
        if added.startswith("_") or added in known:
            continue
        value = inspect.getattr_static(cls, added)
        is_method = callable(value) or isinstance(value, property | classmethod | staticmethod)
        looks_like_hook = re.match("on[_A-Z]", added) is not None
        similar = difflib.get_close_matches(
            added, _METHODS if is_method else _ATTRIBUTES, n=1, cutoff=0.5 if looks_like_hook else 0.8
        )
        if similar or added.startswith("on_"):
            meant = f"did you mean '{similar[0]}'?" if similar else f"known: {', '.join(HOOKS)}"
            ignored = "hook of a defense and would never be called" if is_method else "attribute that is looked at"
            raise PluginError(f"{name}: '{added}' is no {ignored}, {meant}")


def uses_memory(defense: Defense) -> bool:
    """Return whether a hook of `defense` asks for a `Memory`."""
    return any(_asks_for(type(defense), hook, "memory") for hook in _EXTRAS["memory"])


def uses_common_randomness(defense: Defense) -> bool:
    """Return whether `on_update` asks for a generator that is `common` to all clients of a round.

    A defense that has a setting `common` asks for the generator only where that is true.
    """
    return _asks_for(type(defense), "on_update", "common") and bool(getattr(defense, "common", True))


@cache
def _asks_for(cls: type[Defense], hook: str, parameter: str) -> bool:
    return parameter in inspect.signature(getattr(cls, hook)).parameters


def pair_with_keys(defenses: Sequence[Defense]) -> list[tuple[Defense, tuple[str, int]]]:
    """Pair each defense with the end of the key of its random draws.

    The key is the name of its class and the number of earlier defenses of that class, so that its
    draws do not depend on defenses of other classes.
    """
    names = [type(defense).__name__ for defense in defenses]
    pairs = []
    for index, (defense, name) in enumerate(zip(defenses, names, strict=True)):
        pairs.append((defense, (name, names[:index].count(name))))
    return pairs


def check_order(defenses: Sequence[Defense]) -> None:
    """Raise ConfigError where `defenses` cannot be combined in this order.

    Refused are a defense that changes an update which an earlier one encoded, and whatever the
    `check_combination` of a defense refuses.
    """
    updating = [defense for defense in defenses if overrides(defense, "on_update")]
    for index, encoder in enumerate(updating[:-1]):
        if encoder.encodes:
            first, after = name_of_defense(encoder), name_of_defense(updating[index + 1])
            raise ConfigError(
                f"defense: {first} puts the update into another form, sparse or quantised, and {after} after it "
                f"changes the numbers, so that nothing is left of it; put {first} last, and use one of this kind alone"
            )
    for position, defense in enumerate(defenses):
        with _name_in_errors(defense):
            defense.check_combination(defenses, position)


def check_setting(defense: Defense, setting: Setting) -> None:
    """Raise ConfigError where `defense` does not fit `setting`, or one of its clients."""
    with _name_in_errors(defense):
        if overrides(defense, "on_features") and setting.task.kind == "text":
            raise ConfigError(
                "replaces features by how they change with the inputs, and texts are inputs that cannot be "
                "differentiated; choose data of numbers, or leave it out"
            )
        defense.check(setting)
        if overrides(defense, "of_client"):
            clients = range(len(setting.num_examples))
            for participation in {setting.participation(client) for client in clients}:
                defense.of_client(participation)


def name_of_defense(defense: Defense) -> str:
    """Return the name of `defense` in an experiment file, or of its unregistered class."""
    from fedsim.plugins import registry  # imported here: it loads more than torch

    return registry.find_name("defenses", type(defense)) or type(defense).__name__


@contextmanager
def _name_in_errors(defense: Defense) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"defense: {name_of_defense(defense)}: {error}") from error


def overrides(defense: Defense, hook: str) -> bool:
    """Return whether `defense` overrides `hook`."""
    return getattr(type(defense), hook) is not getattr(Defense, hook)


def apply_on_gradient(
    defense: Defense,
    gradient: State,
    rng: torch.Generator,
    weights: State,
    step: int = 0,
) -> State:
    """Apply `defense.on_gradient` to a copy of `gradient` and check the result.

    A tensor that the hook neither changed nor replaced is the same object as in `gradient`.

    Args:
        weights: the parameters at which the gradient was taken, by name; a defense that asks for
            them gets copies.
        step: number of the local step in this round, counted from 0.

    Raises:
        RunError: the hook did not return one floating point tensor of the same shape for each of
            `gradient`.
    """
    if not overrides(defense, "on_gradient"):
        return gradient
    copies = {name: tensor.clone() for name, tensor in gradient.items()}
    keywords: dict[str, Any] = {"rng": rng}
    if _asks_for(type(defense), "on_gradient", "weights"):
        keywords["weights"] = {name: tensor.detach().clone() for name, tensor in weights.items()}
    if _asks_for(type(defense), "on_gradient", "step"):
        keywords["step"] = step
    result = defense.on_gradient(dict(copies), **keywords)
    return _check_state(f"{type(defense).__name__}.on_gradient", gradient, copies, result)


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


def apply_on_sum(defense: Defense, total: State, expected: float, parameters: State, rng: torch.Generator) -> State:
    """Apply `defense.on_sum` to the sum of clipped gradients of `parameters` and check the result.

    Raises:
        RunError: the hook did not return one floating point tensor of the same shape for each
            parameter.
    """
    result = defense.on_sum(dict(total), expected, rng=rng)
    return _check_state(f"{type(defense).__name__}.on_sum", parameters, parameters, result)


def apply_on_examples(
    defense: Defense, gradients: State, expected: float, parameters: State, rng: torch.Generator
) -> State:
    """Apply `defense.on_examples` to per-example gradients of `parameters` and check the result.

    Raises:
        RunError: the hook did not return one floating point tensor of the same shape for each
            parameter.
    """
    result = defense.on_examples(dict(gradients), expected, rng=rng)
    return _check_state(f"{type(defense).__name__}.on_examples", parameters, parameters, result)


def apply_on_update(
    defense: Defense,
    update: State,
    rng: torch.Generator,
    memory: Memory | None = None,
    common: torch.Generator | None = None,
) -> State | Payload:
    """Apply `defense.on_update` to a copy of `update` and check the result, a state or a payload.

    Args:
        memory: the client's memory for a defense that uses one (`uses_memory`); None for all
            others.
        common: the common generator for a defense that uses one (`uses_common_randomness`); None
            for all others.

    Raises:
        RunError: the hook returned neither one floating point tensor of the same shape for each of
            `update`, nor a payload of deltas that fits it.
    """
    if not overrides(defense, "on_update"):
        return update
    where = f"{type(defense).__name__}.on_update"
    copies = {name: tensor.clone() for name, tensor in update.items()}
    keywords: dict[str, Any] = {"rng": rng}
    if _asks_for(type(defense), "on_update", "memory"):
        keywords["memory"] = memory
    if uses_common_randomness(defense):
        keywords["common"] = common
    result = defense.on_update(dict(copies), **keywords)
    if not isinstance(result, Payload):
        return _check_state(where, update, copies, result)
    _check_names(where, update, result.tensors)
    if misfit := result.describe_misfit(update):
        raise RunError(f"{where}: the payload does not fit the update ({misfit})")
    for name, (form, _) in result.tensors.items():
        if form != "delta":
            raise RunError(f"{where}: '{name}' is sent as {form}, expected a payload of deltas")
    return result


def _check_names(where: str, state: State, result: Mapping[str, object]) -> None:
    if differing := sorted(set(state) ^ set(result), key=str):
        problem = "left out" if differing[0] in state else "added"
        raise RunError(
            f"{where}: '{differing[0]}' was {problem}; return the same names, zeros where nothing is to be sent"
        )


def _check_state(where: str, state: State, copies: State, result: Any) -> State:
    """Return a hook's `result` of `copies` of `state` in the dtypes and on the devices of `state`.

    Unchanged tensors are those of `state`.
    """
    if not isinstance(result, Mapping):
        raise RunError(f"{where}: expected a dict of tensors by name back, got {describe_value(result)}")
    _check_names(where, state, result)
    for name, tensor in state.items():
        value = result[name]
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != tensor.shape:
            raise RunError(
                f"{where}: expected '{name}' as a floating tensor of shape {tuple(tensor.shape)} back, "
                f"got {describe_value(value)}"
            )
    checked = {}
    for name, tensor in state.items():
        is_unchanged = result[name] is copies[name] and torch.equal(copies[name], tensor)
        checked[name] = tensor if is_unchanged else result[name].detach().to(tensor)
    return checked


def apply_on_data(
    defense: Defense,
    local: LocalRound,
    rng: torch.Generator,
    memory: Memory | None = None,
) -> Tensor:
    """Apply `defense.on_data` and return the examples of `local` that take part in this round.

    Args:
        memory: see `apply_on_update`.

    Returns:
        `example`, strictly ascending indices.

    Raises:
        RunError: the hook returned something else than strictly ascending indices of examples.
    """
    count = len(local.labels)
    if not overrides(defense, "on_data"):
        return torch.arange(count)
    keywords: dict[str, Any] = {"rng": rng}
    if _asks_for(type(defense), "on_data", "memory"):
        keywords["memory"] = memory
    indices = defense.on_data(local, **keywords)
    if not _are_ascending_indices(indices, count):
        raise RunError(
            f"{type(defense).__name__}.on_data: expected ascending places of examples, int64 from 0 to {count - 1}, "
            f"back, got {describe_value(indices)}"
        )
    return indices.detach().cpu()


def _are_ascending_indices(indices: object, count: int) -> bool:
    if not isinstance(indices, Tensor) or indices.dtype != torch.int64 or indices.ndim != 1:
        return False
    is_within = not len(indices) or 0 <= int(indices[0]) <= int(indices[-1]) < count
    return is_within and not bool((indices.diff() <= 0).any())


def apply_on_batch(
    defense: Defense,
    inputs: Tensor,
    labels: Tensor,
    rng: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Apply `defense.on_batch` to copies of a mini-batch and check the result.

    Raises:
        RunError: the hook did not return a pair of inputs and labels, one label for each input.
    """
    if not overrides(defense, "on_batch"):
        return inputs, labels
    result = defense.on_batch(inputs.clone(), labels.clone(), rng=rng)
    where = f"{type(defense).__name__}.on_batch"
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    if not (is_pair and all(isinstance(tensor, Tensor) for tensor in result)):
        raise RunError(f"{where}: expected a pair of tensors (inputs, labels) back, got {describe_value(result)}")
    batch, targets = result
    if not (_has_same_form(batch, inputs) and batch.ndim and len(batch)):
        sizes = ", ".join(map(str, inputs.shape[1:]))
        raise RunError(f"{where}: expected inputs of shape (example, {sizes}) back, got {describe_value(batch)}")
    # Class indices may become probabilities: soft labels.
    is_soft = not labels.is_floating_point() and targets.is_floating_point() and targets.ndim == 2
    has_label_form = _has_same_form(targets, labels)
    if not (targets.ndim and (has_label_form or is_soft)) or len(targets) != len(batch):
        raise RunError(
            f"{where}: expected one label for each of {len(batch)} inputs back, got {describe_value(targets)}"
        )
    return batch.to(inputs), targets.to(labels) if has_label_form else targets.to(inputs)


def _has_same_form(tensor: Tensor, original: Tensor) -> bool:
    """Return whether both are floating point or both are not, and examples have the same shape."""
    same_kind = tensor.is_floating_point() == original.is_floating_point()
    return same_kind and tensor.shape[1:] == original.shape[1:]


def apply_on_features(defense: Defense, features: Tensor, inputs: Tensor, rng: torch.Generator) -> Tensor:
    """Apply `defense.on_features` to a copy of `features`, `example feature`, and check the result.

    Returns:
        The object `features` itself where the hook changed nothing.

    Raises:
        RunError: the hook did not return a floating point tensor in the shape of `features`.
    """
    if not overrides(defense, "on_features"):
        return features
    features_copy = features.clone()
    result = defense.on_features(features_copy, inputs, rng=rng)
    if result is features_copy and torch.equal(features_copy, features):
        return features
    if not isinstance(result, Tensor) or not result.is_floating_point() or result.shape != features.shape:
        raise RunError(
            f"{type(defense).__name__}.on_features: expected features of shape {tuple(features.shape)} back, "
            f"got {describe_value(result)}"
        )
    return result.to(features)


def describe_value(value: Any) -> str:
    """Describe a value for an error: dtype and shape of a tensor, or else its type."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "nothing"
