"""The interface of a client-side defense: hooks, each the identity by default.

`on_data` acts before local training; `sampling`, `on_batch`, `on_features`, `on_examples` and `on_gradient` inside of
it, in this order; `on_update` on what the client is about to send. A defense that overrides only `on_update` also works
in any other Flower app, as a mod (`clients.mods.as_mod`).
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

from fedsim.attacks import Paper
from fedsim.errors import ConfigError, PluginError, RunError
from fedsim.task import Task
from fedsim.wire.payloads import Payload, State

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
"""The hooks of a defense and what each is handed, besides `rng`."""

_EXTRAS: Mapping[str, tuple[str, ...]] = {
    "memory": ("on_data", "on_update"),
    "common": ("on_update",),
    "weights": ("on_gradient",),
    "step": ("on_gradient",),
}
"""What a hook is handed only if it has a parameter of that name."""
Memory = MutableMapping[str, Tensor]
"""Tensors by name that a client keeps for one defense from round to round, for its hooks to read and change."""
INSIDE = ("on_data", "sampling", "on_batch", "on_features", "on_examples", "on_gradient")
"""What acts on local training, and so needs fedsim's own."""
NO_GUARANTEE = "no formal guarantee"


@dataclass(frozen=True, kw_only=True)
class Poisson:
    """Poisson sampling: in each step, each example is in the batch with one probability, independently of the others.

    So batches differ in size, and may be empty. What differential privacy gains by sampling is proved for it.

    Attributes:
        rate: probability of each example to be in a batch, above 0 and at most 1.
    """

    rate: float

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ConfigError(f"rate of Poisson sampling: expected a probability above 0, at most 1, got {self.rate}")


@dataclass(frozen=True, kw_only=True)
class Participation:
    """What one client does in a run, as far as its defenses depend on it.

    Attributes:
        num_examples: N, what it holds.
        batch_size: B of `[training]`.
        steps: T, its local steps in each round.
        rounds: rounds in which it sends.
        num_classes: of what it learns; 0 of a regression, or where nobody said.
        value_range: as of `Setting`.
    """

    num_examples: int
    batch_size: int
    steps: int
    rounds: int
    num_classes: int = 0
    value_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known of an experiment before it runs; what a defense checks its own settings against.

    Attributes:
        update: zeros in the form of what clients send, by name; BatchNorm's running statistics are among them where
            clients share those.
        task: what the federation learns.
        training: how clients train.
        rounds: of the federation.
        clients: of the federation.
        num_examples: N of each client, by its id.
        value_range: lowest and highest value of a model input, a channel or feature, in model units; None of texts, or
            where nobody said.
    """

    update: State
    task: Task
    training: LocalTraining
    rounds: int
    clients: int
    num_examples: Sequence[int]
    value_range: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def participation(self, client: int, rounds: int | None = None) -> Participation:
        """What `client` does in `rounds` rounds; by default at most, in all of them."""
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
    """What is proved: (epsilon, delta)-differential privacy of the weights that one client sends in a run.

    N and the metrics that a client reports are sent as they are, and are not covered.

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

    Each hook is handed copies, and what it returns is checked: tensors of the same names and shapes as those that
    it got. A client whose defense fails sends nothing. Each hook draws from an `rng` of its own, so that no other
    hook and no other defense changes what it draws. One instance serves all clients, so nothing may be kept on it.

    A defense that remembers earlier rounds gives its `on_data` or `on_update` a further parameter, `*, rng, memory`:
    tensors by name of this client and this defense alone, none in the client's first round. What is in it on return is
    there again in the next hook that asks for it, in this round or in the next one that the client takes part in; a
    round in which the client fails leaves it as it was. One in which `on_data` had it send nothing does not.

    A defense whose clients agree on something in each round, as on a common mask, gives its `on_update` a further
    parameter `common`: a generator that is the same for all clients in one round. The server could have it, too. Where
    clients agree under some settings alone, `common` is one of these, and the parameter may be left out, None, without.

    A defense that adapts to local training gives its `on_gradient` a further parameter `step`, the number of the local
    step, counted from 0 in each round; or `weights`, the parameters before that step, by name.

    Attributes:
        promise: in a few words, what is proved; `NO_GUARANTEE` where nothing is.
        against: against whom it defends, and who still sees what.
        cost: what it costs: accuracy, bytes, time.
        encodes: whether its `on_update` puts the update into another form, sparse or quantised, of which nothing is
            left if another defense changes the numbers after it. Such an order is refused (`check_order`).
        mixes: whether its `on_batch` makes one example out of several records.
        flips_signs: whether it also flips signs of what it mixed, at random around 0 in model units.
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
        """Whether what clients send can be summed number by number, as secure aggregation does.

        Of a form of its own that is so where all clients leave out the same numbers, as under a mask in `common`.
        """
        return not self.encodes or bool(getattr(self, "common", False))

    @classmethod
    def promised(cls) -> str:
        """`promise`; a class that has a guarantee and does not say so is not said to have none."""
        silent = cls.guarantee is not Defense.guarantee and cls.promise == NO_GUARANTEE
        return "a guarantee, which the report of a run states" if silent else cls.promise

    def check(self, setting: Setting) -> None:
        """Raise ConfigError where these settings make no sense in `setting`; called before any work, with no data."""
        del setting

    def check_beside(self, others: Sequence[Defense], place: int) -> None:
        """Raise ConfigError where this defense makes no sense at its `place` in `others`, the list of all."""
        del others, place

    def of_client(self, participation: Participation) -> Self:
        """This defense as one client uses it, which takes part at most as `participation` says.

        By default all clients use the same. One whose strength follows from what a client does, as the noise for a
        wanted epsilon, returns a copy with that strength; one that makes soft labels, a copy that knows the classes.

        Raises:
            ConfigError: no strength will do.
        """
        del participation
        return self

    def on_data(self, local: LocalRound, *, rng: torch.Generator) -> Tensor:
        """Choose the examples that take part in this round, before local training.

        The client then does what one does that holds these alone: N, its batches and its number of steps follow from
        them. If none is left it sends nothing. All that the server gets to know is that it did not return, in the words
        that are said of a straggler; the same is true where this hook fails, and why is told to nobody but the log.

        Returns:
            `example`, places in `local.inputs`, ascending and without repetition.
        """
        del rng
        return torch.arange(len(local.labels))

    def sampling(self, num_examples: int, batch_size: int) -> Poisson | None:
        """How the examples of each local step are drawn: `Poisson` sampling, or None where any sampling will do.

        The number of steps remains that of `[training]`. A run is refused whose defenses ask for different sampling,
        or whose batches are not drawn anew: `batches = "fixed"`, or clients that send the gradient of one mini-batch.

        Args:
            num_examples: N, what the client holds.
            batch_size: B of `[training]`; `Poisson(rate=min(1, batch_size / num_examples))` expects as many.
        """
        del num_examples, batch_size
        return None

    def on_batch(self, inputs: Tensor, labels: Tensor, *, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Replace a mini-batch before its forward pass. `inputs` is `example ...` in model units.

        There may be more or fewer examples than before, of the same shape, with a label each; as many as before if
        any defense sees one gradient an example or asks for Poisson sampling. An empty batch of that is not shown.
        """
        del rng
        return inputs, labels

    def on_features(self, features: Tensor, inputs: Tensor, *, rng: torch.Generator) -> Tensor:
        """Replace what the gradient of the last linear layer's weights is computed from.

        That gradient tells the representation of the batch. The forward pass and all other gradients keep the true one.
        The layer is that of the last matrix which is trained, so that who sees a gradient finds it, too; a model is
        refused where that matrix is of no linear layer.

        Args:
            features: `example feature`, the input of the model's last linear layer, differentiable by `inputs`.
            inputs: `example ...` in model units.

        Returns:
            Features of the same shape.
        """
        del inputs, rng
        return features

    def on_examples(self, gradients: State, expected: float, *, rng: torch.Generator) -> State:
        """Make one gradient of those of the single examples of a mini-batch; the default is sum / `expected`.

        DP-SGD clips the gradient of each example, all tensors together, sums over the examples, adds noise of the
        sum's scale, and divides by `expected`. A run is refused in which two defenses do this, or a layer mixes
        examples: BatchNorm that normalises by the batch.

        Args:
            gradients: by parameter `example ...`, the gradient of each example's own loss; parameters that are not
                trained are left out. There are no examples in an empty batch of Poisson sampling. They take
                examples x parameters numbers of memory.
            expected: expected number of examples, rate x N under Poisson sampling, otherwise as many as there are.

        Returns:
            By parameter the gradient that takes the place of the batch's mean gradient, in the parameter's shape. The
            slope of a proximal term is added to it.
        """
        del rng
        return {name: each.sum(0) / expected for name, each in gradients.items()}

    def example_factors(self, norms: Tensor) -> Tensor:
        """By what factors the gradients of examples are shortened, if `on_examples` only does that before it sums.

        A shortcut: where one class defines `on_examples`, this and `on_sum`, training may make the sum without making
        the gradients, which is faster, and call `on_sum` with it. Both ways have to give the same.

        Args:
            norms: `tensor example`, the L2 norms of the gradients of single examples.

        Returns:
            `tensor example`, the factors.
        """
        return torch.ones_like(norms)

    def on_sum(self, total: State, expected: float, *, rng: torch.Generator) -> State:
        """Make the gradient of a mini-batch of the sum of shortened gradients; see `example_factors`."""
        del rng
        return {name: tensor / expected for name, tensor in total.items()}

    def on_gradient(self, gradient: State, *, rng: torch.Generator) -> State:
        """Replace the mean gradient of a mini-batch, or what `on_examples` made, before the optimizer's step.

        Under Poisson sampling it is the sum over the batch divided by its expected size.
        """
        del rng
        return gradient

    def on_update(self, update: State, *, rng: torch.Generator) -> State | Payload:
        """Replace the update w_T - w_t, or the gradient that a FedSGD client sends in its place, before it is sent.

        A state is sent as the client would have sent the update. A `Payload` is sent as it is, sparse or quantised, as
        a delta or, by a FedSGD client, a gradient; its constructors take care of the kind.
        """
        del rng
        return update

    def guarantee(self, participation: Participation, delta: float) -> Guarantee | None:
        """What is proved of a client that did what `participation` says, or None where nothing is."""
        del participation, delta
        return None

    def composed(self, done: Sequence[Participation], delta: float) -> Guarantee | None:
        """What is proved of a client that did all of `done`, rounds of different kinds, or None where nothing is.

        Kinds differ where the server asks for other local training in some rounds. By default epsilons are added up.

        Args:
            done: at least one, each for its rounds.
            delta: of all of it together.
        """
        if len(done) == 1:
            return self.guarantee(done[0], delta)
        proved = [self.guarantee(some, delta / len(done)) for some in done]
        parts = [some for some in proved if some is not None]
        if len(parts) < len(proved):
            return None
        return replace(parts[0], epsilon=math.fsum(some.epsilon for some in parts), delta=delta)

    def adversary_batch(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """A model of what `on_batch` does to a batch, for an adversary who knows the defense.

        Attacks that match gradients pass their dummy records through it, where the defense `mixes`. It is
        differentiable, draws nothing, and takes the expectation over what it cannot know. Dummy records are in no
        order, so it may take neighbours for those that were mixed. The default is the identity: dummy examples stand
        for what was trained on.

        Args:
            inputs: `example ...` in model units.
            labels: `example class` probabilities, or `example` targets of a regression.
        """
        return inputs, labels

    def adversary_view(self, gradient: State, sent: State) -> State | None:
        """A model of what this defense does to a gradient, for an adversary who knows the defense.

        Attacks that match gradients pass the gradient of their dummy data through it. It is differentiable, draws
        nothing, and takes the expectation over what it cannot know. A defense that leaves the gradient as it is in
        expectation returns it; the default says that nobody has worked out what an adversary could know.

        Args:
            gradient: by name, of dummy data, in the unit of `sent` where the attack is granted what tells it.
            sent: by name, the defended update that was seen, as a pseudo-gradient: which numbers of it are zero, for
                example, tells the mask of a sparsification.

        Returns:
            By the same names, what the defense would make of `gradient`; None where that is not known, and attacks take
            the gradient as it is.
        """
        del gradient, sent
        return None


_WORDS = frozenset(Defense.__annotations__)
"""What a defense says of itself."""
_METHODS = frozenset(name for name in vars(Defense) if not name.startswith("_")) - _WORDS
"""What a defense may override."""
D = TypeVar("D", bound=Defense)


def adversary_views(defenses: Iterable[Defense], gradient: State, sent: State) -> State | None:
    """What an adversary who knows these defenses makes of a gradient, one after the other; None if none says anything.

    See `Defense.adversary_view`.
    """
    known = None
    for defense in defenses:
        if (seen := defense.adversary_view(gradient if known is None else known, sent)) is not None:
            known = seen
    return known


def a_defense(thing: Any) -> Defense:
    """`thing`, if it is a defense that does something.

    Raises:
        PluginError: it is something else, overrides no hook, or misspells one; what it was meant to do would be left
            undone in silence.
    """
    cls = thing if isinstance(thing, type) else type(thing)
    name = f"{cls.__module__}.{cls.__name__}"
    if not isinstance(thing, Defense):
        raise PluginError(f"{name}: expected a defense, made from a class that derives from fedsim.defense.Defense")
    if beside := sorted(vars(thing).keys() & _METHODS):
        raise PluginError(
            f"{name}: '{beside[0]}' is set on an instance, where it is never called; define it in the class"
        )
    _check_spelling(cls, name)
    if not any(overrides(thing, hook) for hook in (*HOOKS, "sampling")):
        raise PluginError(f"{name}: overrides none of sampling, {', '.join(HOOKS)}, so it defends nothing")
    shortcut = [hook for hook in ("example_factors", "on_sum") if overrides(thing, hook)]
    if shortcut and not overrides(thing, "on_examples"):
        raise PluginError(
            f"{name}: '{shortcut[0]}' is a shortcut of 'on_examples' and is not called without it; define that, too"
        )
    if overrides(thing, "adversary_batch") and not thing.mixes:
        raise PluginError(f"{name}: 'adversary_batch' is called of a defense that mixes alone; set mixes = True")
    for hook, given in HOOKS.items():
        keywords, signature = ["rng"], inspect.signature(getattr(thing, hook))
        for extra, takers in _EXTRAS.items():
            if extra not in signature.parameters:
                continue
            if hook not in takers:
                alone = " and ".join(takers)
                raise PluginError(f"{name}: '{hook}' asks for '{extra}', which is for {alone} alone; leave it out")
            keywords.append(extra)
        try:
            signature.bind(*given, **dict.fromkeys(keywords))
        except TypeError as error:
            called = f"{hook}({', '.join([*given, *(f'{keyword}=...' for keyword in keywords)])})"
            raise PluginError(f"{name}: '{hook}' cannot be called as {called} ({error})") from error
    try:
        inspect.signature(thing.sampling).bind("num_examples", "batch_size")
    except TypeError as error:
        raise PluginError(
            f"{name}: 'sampling' cannot be called as sampling(num_examples, batch_size) ({error})"
        ) from error
    return thing


def _check_spelling(cls: type[Defense], name: str) -> None:
    """Raise PluginError where something that `cls` adds, and no setting, is called nearly as what a defense has."""
    known = {field.name for field in fields(cls)} | _WORDS | _METHODS
    for added in dir(cls):
        if added.startswith("_") or added in known:
            continue
        value = inspect.getattr_static(cls, added)
        method = callable(value) or isinstance(value, property | classmethod | staticmethod)
        hook = re.match("on[_A-Z]", added) is not None
        near = difflib.get_close_matches(added, _METHODS if method else _WORDS, n=1, cutoff=0.5 if hook else 0.8)
        if near or added.startswith("on_"):
            meant = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(HOOKS)}"
            ignored = "hook of a defense and would never be called" if method else "attribute that is looked at"
            raise PluginError(f"{name}: '{added}' is no {ignored}, {meant}")


def remembers(defense: Defense) -> bool:
    """Whether a hook of `defense` asks for a `Memory`."""
    return any(_asks_for(type(defense), hook, "memory") for hook in _EXTRAS["memory"])


def agrees(defense: Defense) -> bool:
    """Whether the `on_update` of `defense` asks for a generator that is `common` to all clients of a round.

    One that has a setting of that name asks for it where that is set.
    """
    return _asks_for(type(defense), "on_update", "common") and bool(getattr(defense, "common", True))


@cache
def _asks_for(cls: type[Defense], hook: str, parameter: str) -> bool:
    return parameter in inspect.signature(getattr(cls, hook)).parameters


def keyed(defenses: Sequence[Defense]) -> list[tuple[Defense, tuple[str, int]]]:
    """Each of `defenses` with the end of its key: the name of its class, and how many of that name come before it.

    So what it draws depends on no defense of another name.
    """
    names = [type(defense).__name__ for defense in defenses]
    return [
        (defense, (name, names[:place].count(name)))
        for place, (defense, name) in enumerate(zip(defenses, names, strict=True))
    ]


def check_order(defenses: Sequence[Defense]) -> None:
    """Raise ConfigError where `defenses` make no sense together in this order.

    One that undoes the form into which an earlier one put the update is refused here; each says by `check_beside` what
    else it cannot stand.
    """
    acting = [defense for defense in defenses if overrides(defense, "on_update")]
    for place, encoder in enumerate(acting[:-1]):
        if encoder.encodes:
            first, after = called(encoder), called(acting[place + 1])
            raise ConfigError(
                f"defense: {first} puts the update into another form, sparse or quantised, and {after} after it "
                f"changes the numbers, so that nothing is left of it; put {first} last, and use one of this kind alone"
            )
    for place, defense in enumerate(defenses):
        with _named(defense):
            defense.check_beside(defenses, place)


def check_fits(defense: Defense, setting: Setting) -> None:
    """Raise ConfigError where the settings of `defense` make no sense in `setting`, or for one of its clients."""
    with _named(defense):
        if overrides(defense, "on_features") and setting.task.kind == "text":
            raise ConfigError(
                "replaces features by how they change with the inputs, and texts are inputs that cannot be "
                "differentiated; choose data of numbers, or leave it out"
            )
        defense.check(setting)
        if overrides(defense, "of_client"):
            for alike in {setting.participation(client) for client in range(len(setting.num_examples))}:
                defense.of_client(alike)


def called(defense: Defense) -> str:
    """The name of `defense` in an experiment file; that of its class, where it is not registered."""
    from fedsim.plugins import registry  # which takes more than torch

    return registry.name_of("defenses", type(defense)) or type(defense).__name__


@contextmanager
def _named(defense: Defense) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"defense: {called(defense)}: {error}") from error


def overrides(defense: Defense, hook: str) -> bool:
    """Whether `defense` does anything at `hook`."""
    return getattr(type(defense), hook) is not getattr(Defense, hook)


def replaced_gradient(defense: Defense, gradient: State, rng: torch.Generator, weights: State, step: int = 0) -> State:
    """What `defense.on_gradient` puts in the place of `gradient`, which is left as it is.

    A tensor that the hook neither changed nor replaced is the object that `gradient` has.

    Args:
        weights: the parameters at which the gradient was taken, by name; a defense that asks for them gets copies.
        step: of local training in this round, counted from 0.

    Raises:
        RunError: the hook returned something else than one tensor of numbers for each of `gradient`, of its shape.
    """
    if not overrides(defense, "on_gradient"):
        return gradient
    given = {name: tensor.clone() for name, tensor in gradient.items()}
    keywords: dict[str, Any] = {"rng": rng}
    if _asks_for(type(defense), "on_gradient", "weights"):
        keywords["weights"] = {name: tensor.detach().clone() for name, tensor in weights.items()}
    keywords |= {"step": step} if _asks_for(type(defense), "on_gradient", "step") else {}
    got = defense.on_gradient(dict(given), **keywords)
    return _fitting(f"{type(defense).__name__}.on_gradient", gradient, given, got)


def mixers(defenses: Sequence[Defense]) -> list[Defense]:
    """Those of `defenses` that make one example of a batch out of several records."""
    return [defense for defense in defenses if defense.mixes and overrides(defense, "on_batch")]


def informed(defense: D, **facts: Any) -> D:
    """A copy of `defense` on which class attributes have other values: what it learns in `of_client`, no setting."""
    knowing = copy.copy(defense)
    vars(knowing).update(facts)
    return knowing


def shortens(defense: Defense) -> bool:
    """Whether `example_factors` and `on_sum` may take the place of `on_examples`: one class has defined all three."""
    hooks, line = ("on_examples", "example_factors", "on_sum"), type(defense).__mro__
    owners = {next(base for base in line if hook in vars(base)) for hook in hooks}
    return len(owners) == 1 and Defense not in owners


def of_sum(defense: Defense, total: State, expected: float, parameters: State, rng: torch.Generator) -> State:
    """The gradient that `defense.on_sum` makes of the sum of shortened gradients of each of `parameters`.

    Raises:
        RunError: the hook returned something else than one tensor of numbers for each parameter, of its shape.
    """
    got = defense.on_sum(dict(total), expected, rng=rng)
    return _fitting(f"{type(defense).__name__}.on_sum", parameters, parameters, got)


def of_examples(defense: Defense, gradients: State, expected: float, parameters: State, rng: torch.Generator) -> State:
    """The gradient that `defense.on_examples` makes of `gradients`, `example ...` of each of `parameters`.

    Raises:
        RunError: the hook returned something else than one tensor of numbers for each parameter, of its shape.
    """
    got = defense.on_examples(dict(gradients), expected, rng=rng)
    return _fitting(f"{type(defense).__name__}.on_examples", parameters, parameters, got)


def replaced_update(
    defense: Defense,
    update: State,
    rng: torch.Generator,
    memory: Memory | None = None,
    common: torch.Generator | None = None,
) -> State | Payload:
    """`replaced_gradient` for `on_update`, which may hand back a payload of the update.

    Args:
        memory: of a defense that `remembers`; None for all others.
        common: of a defense that `agrees`; None for all others.

    Raises:
        RunError: as from `replaced_gradient`, or the payload is not one of the update.
    """
    if not overrides(defense, "on_update"):
        return update
    where, given = f"{type(defense).__name__}.on_update", {name: tensor.clone() for name, tensor in update.items()}
    keywords: dict[str, Any] = {"rng": rng}
    keywords |= {"memory": memory} if _asks_for(type(defense), "on_update", "memory") else {}
    keywords |= {"common": common} if agrees(defense) else {}
    got = defense.on_update(dict(given), **keywords)
    if not isinstance(got, Payload):
        return _fitting(where, update, given, got)
    _check_names(where, update, got.tensors)
    if wrong := got.misfit(update):
        raise RunError(f"{where}: the payload does not fit the update ({wrong})")
    if strange := [name for name, (sent_as, _) in got.tensors.items() if sent_as != "delta"]:
        raise RunError(f"{where}: '{strange[0]}' is sent as {got.tensors[strange[0]][0]}, expected a payload of deltas")
    return got


def _check_names(where: str, state: State, got: Mapping[str, object]) -> None:
    if other := sorted(set(state) ^ set(got), key=str):
        lacks = "left out" if other[0] in state else "added"
        raise RunError(f"{where}: '{other[0]}' was {lacks}; return the same names, zeros where nothing is to be sent")


def _fitting(where: str, state: State, given: State, got: Any) -> State:
    """What a hook that was `given` copies of `state` got from them, checked."""
    if not isinstance(got, Mapping):
        raise RunError(f"{where}: expected a dict of tensors by name back, got {kind(got)}")
    _check_names(where, state, got)
    for name, tensor in state.items():
        if not isinstance(got[name], Tensor) or not got[name].is_floating_point() or got[name].shape != tensor.shape:
            raise RunError(
                f"{where}: expected '{name}' as a floating tensor of shape {tuple(tensor.shape)} back, "
                f"got {kind(got[name])}"
            )
    kept = {name for name in state if got[name] is given[name] and torch.equal(given[name], state[name])}
    return {name: tensor if name in kept else got[name].detach().to(tensor) for name, tensor in state.items()}


def kept_examples(defense: Defense, local: LocalRound, rng: torch.Generator, memory: Memory | None = None) -> Tensor:
    """Which examples of `local` take part in this round after `defense.on_data`: `example`, ascending places.

    Args:
        memory: as of `replaced_update`.

    Raises:
        RunError: the hook returned something else than ascending places of examples.
    """
    count = len(local.labels)
    if not overrides(defense, "on_data"):
        return torch.arange(count)
    keywords: dict[str, Any] = {"rng": rng}
    keywords |= {"memory": memory} if _asks_for(type(defense), "on_data", "memory") else {}
    got = defense.on_data(local, **keywords)
    places = isinstance(got, Tensor) and got.dtype == torch.int64 and got.ndim == 1
    if not places or (len(got) and not 0 <= int(got[0]) <= int(got[-1]) < count) or bool((got.diff() <= 0).any()):
        raise RunError(
            f"{type(defense).__name__}.on_data: expected ascending places of examples, int64 from 0 to {count - 1}, "
            f"back, got {kind(got)}"
        )
    return got.detach().cpu()


def replaced_batch(defense: Defense, inputs: Tensor, labels: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """What `defense.on_batch` puts in the place of a mini-batch, whose tensors are left as they are.

    Raises:
        RunError: the hook returned something else than a pair of inputs and labels, of which one belongs to each other.
    """
    if not overrides(defense, "on_batch"):
        return inputs, labels
    got = defense.on_batch(inputs.clone(), labels.clone(), rng=rng)
    where = f"{type(defense).__name__}.on_batch"
    if not (isinstance(got, tuple | list) and len(got) == 2 and all(isinstance(part, Tensor) for part in got)):
        raise RunError(f"{where}: expected a pair of tensors (inputs, labels) back, got {kind(got)}")
    batch, targets = got
    alike = batch.is_floating_point() == inputs.is_floating_point() and batch.shape[1:] == inputs.shape[1:]
    if not (alike and batch.ndim and len(batch)):
        raise RunError(f"{where}: expected inputs of shape (example, {_sizes(inputs)}) back, got {kind(batch)}")
    probabilities = not labels.is_floating_point() and targets.is_floating_point() and targets.ndim == 2
    plain = targets.is_floating_point() == labels.is_floating_point() and targets.shape[1:] == labels.shape[1:]
    if not (targets.ndim and (plain or probabilities)) or len(targets) != len(batch):
        raise RunError(f"{where}: expected one label for each of {len(batch)} inputs back, got {kind(targets)}")
    return batch.to(inputs), targets.to(labels) if plain else targets.to(inputs)


def replaced_features(defense: Defense, features: Tensor, inputs: Tensor, rng: torch.Generator) -> Tensor:
    """What `defense.on_features` puts in the place of `features`, `example feature`; that object where nothing changed.

    Raises:
        RunError: the hook returned something else than numbers in the shape of `features`.
    """
    if not overrides(defense, "on_features"):
        return features
    given = features.clone()
    got = defense.on_features(given, inputs, rng=rng)
    if got is given and torch.equal(given, features):
        return features
    if not isinstance(got, Tensor) or not got.is_floating_point() or got.shape != features.shape:
        raise RunError(
            f"{type(defense).__name__}.on_features: expected features of shape {tuple(features.shape)} back, "
            f"got {kind(got)}"
        )
    return got.to(features)


def _sizes(tensor: Tensor) -> str:
    return ", ".join(map(str, tensor.shape[1:]))


def kind(thing: Any) -> str:
    """What `thing` is, in a few words."""
    if isinstance(thing, Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')} of shape {tuple(thing.shape)}"
    return f"a {type(thing).__name__}" if thing is not None else "nothing"
