"""Check the settings of a strategy, also for the number of clients; Flower itself checks little."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from fedsim.base.errors import ConfigError, PluginError

log = logging.getLogger(__name__)

Sends = Literal["weights", "gradient"]
MIN_CLIENT_KEYS = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
"""Settings for the least number of clients that a strategy waits for."""

_LARGEST_STEP = 1e6
_FRACTIONS = ("fraction_train", "fraction_evaluate")
_ABOVE_ZERO = (
    "eta",
    "eta_l",
    "tau",
    "server_learning_rate",
    "client_learning_rate",
    "learning_rate",
)
_BELOW_ONE = ("server_momentum", "beta_1", "beta_2")
_NOT_NEGATIVE = ("q", "proximal_mu")
_REPLY_NAMES = {
    "arrayrecord_key": ("arrays",),
    "configrecord_key": ("config",),
    "train_loss_key": ("train_loss",),
    "weighted_by_key": ("num-examples", "train_loss"),
}
"""Names of records and metrics in replies of fedsim's clients, by setting."""


def read_learning_rate(value: object, complaint: str = "learning_rate:") -> float:
    """Return the step size of a server.

    Args:
        value: that somebody set.
        complaint: beginning of the error.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{complaint} expected a finite value above 0, got {value}")
    return float(value)


def declared_message(cls: type, name: str, claimed: Sends | None) -> Sends:
    """Return what clients send under a strategy: its class attribute `sends`, or weights.

    Args:
        claimed: `training.sends` of the experiment; None where it is left out.
    """
    declared = getattr(cls, "sends", "weights")
    if declared not in get_args(Sends):
        expected = " or ".join(map(repr, get_args(Sends)))
        raise PluginError(f"strategies: '{name}' declares sends = {declared!r}, expected {expected}")
    if claimed not in (None, declared):
        raise ConfigError(
            f"training.sends: expected {declared!r}, as the class of strategy '{name}' declares, "
            f"got {claimed!r}; leave it out"
        )
    return cast("Sends", declared)


def check_strategy(strategy: Any, settings: Mapping[str, Any], clients: int) -> None:
    """Check the settings of a strategy; of other packages' strategies only Flower's common ones."""
    if not type(strategy).__module__.startswith(("flwr.", "strategies.")):
        common_keys = {*MIN_CLIENT_KEYS, *_FRACTIONS}
        settings = {key: value for key, value in settings.items() if key in common_keys}
    for key, value in settings.items():
        if key in MIN_CLIENT_KEYS and not 0 <= value <= clients:
            raise ConfigError(f"strategy.{key}: expected at most federation.clients = {clients}, got {value}")
        if expected := _describe_expected(key, value):
            raise ConfigError(f"strategy.{key}: expected {expected}, got {value!r}")
    _check_robust(strategy, settings, sample_size(settings, clients))


def _describe_expected(key: str, value: Any) -> str:
    """Describe the values that the setting `key` accepts; '' where `value` is one of them."""
    if key == "fraction_train" and value == 0:
        return "a fraction above 0, as with 0 no client trains"
    if key in _FRACTIONS and not 0 <= value <= 1:
        return "a fraction from 0 to 1"
    if key in _ABOVE_ZERO and not 0 < value <= _LARGEST_STEP:
        return f"a value above 0 and at most {_LARGEST_STEP:g}"
    if key in _BELOW_ONE and not 0 <= value < 1:
        return "a value in [0, 1)"
    if key in _NOT_NEGATIVE and not 0 <= value <= _LARGEST_STEP:
        return f"a value of at least 0 and at most {_LARGEST_STEP:g}"
    if key in _REPLY_NAMES and value not in _REPLY_NAMES[key]:
        return " or ".join(f"'{name}'" for name in _REPLY_NAMES[key]) + ", as clients call it"
    return ""


def check_client_rates(strategy: Any, settings: Mapping[str, Any], learning_rate: float) -> None:
    """Check what Flower's strategies are told of the clients' learning rate, which they do not set.

    Args:
        settings: those of the file.
        learning_rate: at which clients train.
    """
    if not type(strategy).__module__.startswith("flwr."):
        return
    if settings.get("eta_l", learning_rate) != learning_rate:
        raise ConfigError(
            f"strategy.eta_l: changes nothing, as clients train at training.learning_rate = {learning_rate:g}, got "
            f"{settings['eta_l']:g}; leave it out"
        )
    if (told := settings.get("client_learning_rate", learning_rate)) != learning_rate:
        log.warning(
            "strategy.client_learning_rate: is %g, but clients train at training.learning_rate = %g; q-FedAvg weights "
            "updates by the former, so set it to the latter",
            told,
            learning_rate,
        )


def describe_lost_protection(strategy: Any, count: int) -> str:
    """Say what one of Flower's robust strategies, or of theirs made further, does not withstand with `count` updates.

    It is '' where nothing is lost.
    """
    trims = _is_made_from(strategy, "FedTrimmedAvg") and strategy.beta
    if trims and not int(strategy.beta * count):  # Flower rounds their number down
        remedy = f"raise it to {math.ceil(100 / count) / 100}" if count > 2 else "let more clients train"
        return (
            f"strategy.beta: {strategy.beta:g} of the {count} clients of a round is less than one client, so that "
            f"nobody is trimmed; {remedy}"
        )
    most = _most_malicious(strategy, count)
    if _is_made_from(strategy, "MultiKrum", "Bulyan") and strategy.num_malicious_nodes > most:
        return (
            f"strategy.num_malicious_nodes: {type(strategy).__name__} withstands at most {most} malicious clients "
            f"among {count}, not {strategy.num_malicious_nodes}; let more clients train (strategy.fraction_train), or "
            "lower it"
        )
    if _is_made_from(strategy, "MultiKrum") and strategy.num_nodes_to_select >= count:
        return (
            f"strategy.num_nodes_to_select: {strategy.num_nodes_to_select} are selected among {count} clients, so that "
            "nobody is left out; let more clients train (strategy.fraction_train), or lower it"
        )
    return ""


def sample_size(settings: Mapping[str, Any], clients: int) -> int:
    """Return how many clients Flower samples for a round."""
    return max(int(clients * settings.get("fraction_train", 1.0)), int(settings.get("min_train_nodes", 1)))


def _check_robust(strategy: Any, settings: Mapping[str, Any], sampled: int) -> None:
    """Check the settings of robust strategies for the clients that are sampled; fewer may return."""
    malicious, selected = settings.get("num_malicious_nodes", 0), settings.get("num_nodes_to_select")
    if selected is not None and not 1 <= selected <= sampled:
        raise ConfigError(
            f"strategy.num_nodes_to_select: expected 1 to {sampled}, the clients of a round, got {selected}"
        )
    most_malicious = _most_malicious(strategy, sampled)
    if not 0 <= malicious <= most_malicious:
        raise ConfigError(
            f"strategy.num_malicious_nodes: expected 0 to {most_malicious} of the {sampled} "
            f"clients of a round, got {malicious}"
        )


def _most_malicious(strategy: Any, count: int) -> int:
    """Return the papers' f: Krum needs more than 2 f + 2 updates [Blanchard2017], Bulyan 4 f + 3."""
    return max(0, (count - 3) // (4 if _is_made_from(strategy, "Bulyan") else 2))


def _is_made_from(strategy: Any, *names: str) -> bool:
    """Return whether its class is one of these of Flower's, or derives from one; Flower is not imported for it."""
    classes = type(strategy).__mro__
    return any(cls.__name__ in names and cls.__module__.startswith("flwr.") for cls in classes)
