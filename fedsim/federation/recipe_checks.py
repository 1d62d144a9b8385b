"""Refusals, before a run, of what its updates could not be computed again from by recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsim.base.errors import ConfigError
from fedsim.plugins.inline import is_object

if TYPE_CHECKING:
    from fedsim.federation.config import Config
    from fedsim.federation.experiment import Experiment

_KEEP_UPDATES = 'or set [recording] keep = "updates"'


def check_recipe(experiment: Experiment) -> None:
    """Check that updates can be computed again, where the experiment records them by recipe.

    What only a round shows, such as a strategy that sends clients different models, is refused when
    it is recorded, and the first update is computed again in the run itself.
    """
    config = experiment.config
    if config.recording.keep != "recipe":
        return
    _check_place(config)
    _check_objects(config)
    if config.secure_aggregation is not None:
        raise _refusal(
            "secure_aggregation",
            "the server records sums of masked updates, which no client computes alone",
            "leave it out",
        )
    if config.recording.clients is not None and experiment.clients_at_once > 1:
        raise _refusal(
            "recording.clients",
            "clients with small networks train several at once, so a recipe names all that were asked",
            "leave it out, as a recipe takes some hundred bytes a client, or set federation.vectorise = false",
        )
    keeps_memory = config.defense or config.algorithm is not None
    if keeps_memory and (config.recording.rounds is not None or config.recording.every > 1):
        key = "every" if config.recording.rounds is None else "rounds"
        raise _refusal(
            f"recording.{key}",
            "a defense or an algorithm may keep something from round to round, which takes all rounds to compute again",
            "leave it out",
        )


def _check_place(config: Config) -> None:
    """Raise ConfigError where clients train elsewhere than on this machine's processor."""
    federation = config.federation
    if federation.device != "cpu":
        raise _refusal(
            f"federation.device = '{federation.device}'",
            "a GPU need not round its sums the same way twice",
            "use 'cpu'",
        )
    if federation.address is not None:
        raise _refusal(
            f"federation.address = '{federation.address}'",
            "clients on other machines may round otherwise than this one",
            "leave it out",
        )


def _check_objects(config: Config) -> None:
    """Raise ConfigError where a part of the training is an object of a Python program."""
    for where, (group, name) in config.plugins.items():
        if group not in ("strategies", "measures") and is_object(name):
            raise _refusal(
                where,
                "it is an object of this Python program, which no other one has",
                "name a plug-in or module:Class",
            )


def _refusal(culprit: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f'recording.keep = "recipe" does not go with {culprit}: {reason}; {remedy}, {_KEEP_UPDATES}')
