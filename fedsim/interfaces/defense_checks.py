"""Checks of defenses before any work: what they override, their order, and whether they fit a setting.

`QuadraticStep` is a local step in which hooks can be tried.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from fedsim.base.errors import ConfigError, PluginError
from fedsim.interfaces.defense import HOOKS, Defense, Participation, Setting, overrides, overrides_guarantee
from fedsim.recording.wire_format import State

_ATTRIBUTES = frozenset(Defense.__annotations__)
"""Names of the class attributes that a defense declares."""
_METHODS = frozenset(name for name in vars(Defense) if not name.startswith("_")) - _ATTRIBUTES
"""Names of the methods that a defense may override."""


@dataclass(frozen=True)
class QuadraticStep:
    """Local step at weights `state`, of a loss that is half the sum of squares of all weights and inputs."""

    state: State

    def weights(self) -> State:
        """Return copies of the parameters."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def gradient_at(self, weights: State) -> State:
        """Return the gradient, which is the weights themselves."""
        return {name: tensor.clone() for name, tensor in {**self.state, **weights}.items()}

    def loss_at(self, weights: State) -> float:
        """Return the loss without the part of the inputs."""
        return sum(tensor.square().sum().item() for tensor in {**self.state, **weights}.values()) / 2

    def input_gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Return the gradient by the inputs, which is the inputs themselves."""
        del labels
        return inputs.clone()


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
    """Raise PluginError where `hook` cannot be called with what it replaces and a context."""
    try:
        inspect.signature(getattr(defense, hook)).bind(*arguments, "context")
    except TypeError as error:
        call = f"{hook}({', '.join([*arguments, 'context'])})"
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
            ignored = "a hook of a defense and would never be called" if is_method else "an attribute that is looked at"
            raise PluginError(f"{name}: '{added}' is not {ignored}, {meant}")


def check_order(defenses: Sequence[Defense]) -> None:
    """Raise ConfigError where `defenses` cannot be combined in this order.

    Refused are a defense that changes an update which an earlier one encoded, one that chooses
    examples beside the guarantee of another, and whatever the `check_combination` of a defense refuses.
    """
    updating = [defense for defense in defenses if overrides(defense, "on_update")]
    encoders = [name_of_defense(defense) for defense in updating if defense.encodes]
    for index, encoder in enumerate(updating[:-1]):
        if encoder.encodes:
            after = name_of_defense(updating[index + 1])
            remedy = f"put {encoders[0]} last"
            if len(encoders) > 1:
                remedy = f"use one of {', '.join(encoders)} alone, and put it last"
            raise ConfigError(
                f"defense: {encoders[0]} puts the update into another form, sparse or quantised, and {after} after it "
                f"changes the numbers, so that nothing is left of it; {remedy}"
            )
    for position, defense in enumerate(defenses):
        with _name_in_errors(defense):
            _check_choice(defense, [other for other in defenses if other is not defense])
            defense.check_combination(defenses, position)


def _check_choice(defense: Defense, others: Sequence[Defense]) -> None:
    """Raise ConfigError where `defense` chooses examples, and one of the `others` proves something about all of them.

    An accountant is told N, the sampling rate and the steps of all examples, and that a client's silence says nothing.
    """
    if not overrides(defense, "on_data"):
        return
    for other in others:
        if _has_guarantee(other):
            raise ConfigError(
                "which examples it chooses, and whether any, may depend on the data, and N changes with them, which "
                f"the guarantee of {name_of_defense(other)} does not cover, so that its epsilon would be false; leave "
                "one of them out"
            )


def _has_guarantee(defense: Defense) -> bool:
    """Return whether a defense has a guarantee, tried with a typical client."""
    if not overrides_guarantee(defense):
        return False
    client = Participation(num_examples=1000, batch_size=10, steps=10, rounds=1)
    return defense.of_client(client).compose_guarantees([client], 1e-5) is not None


def check_setting(defense: Defense, setting: Setting) -> None:
    """Raise ConfigError where `defense` does not fit `setting`, or one of its clients."""
    with _name_in_errors(defense):
        if overrides(defense, "on_features") and setting.task.vocabulary:
            raise ConfigError(
                "replaces features by how they change with the inputs, and texts are inputs that cannot be "
                "differentiated; choose data of numbers, or leave it out"
            )
        _check_idle_rounds(defense, setting.rounds)
        defense.check(setting)
        if overrides(defense, "of_client"):
            clients = range(len(setting.num_examples))
            for participation in {setting.participation(client) for client in clients}:
                defense.of_client(participation)


def _check_idle_rounds(defense: Defense, rounds: int) -> None:
    """Raise ConfigError where `defense` proves something about all that a client sends, and lets rounds through."""
    idle = (number for number in range(1, rounds + 1) if not defense.acts_in(number))
    if overrides(defense, "acts_in") and _has_guarantee(defense) and (number := next(idle, None)):
        raise ConfigError(
            f"it has a guarantee, and does not act in round {number}, whose messages are in clear, so that its epsilon "
            "would be false; let it act in all rounds, or promise nothing"
        )


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
