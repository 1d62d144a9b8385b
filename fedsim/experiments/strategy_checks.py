"""Whether the settings of a strategy make sense, and for so many clients; Flower itself asks little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from fedsim.errors import ConfigError, PluginError

Sends = Literal["weights", "gradient"]
LEAST = ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
"""How many clients a strategy waits for."""

_LARGEST_STEP = 1e6
_SHARES = ("fraction_train", "fraction_evaluate")
_ABOVE_ZERO = ("eta", "eta_l", "tau", "server_learning_rate", "client_learning_rate", "learning_rate")
_BELOW_ONE = ("server_momentum", "beta_1", "beta_2")
_NOT_NEGATIVE = ("q", "proximal_mu")
_REPORTED = {
    "arrayrecord_key": ("arrays",),
    "configrecord_key": ("config",),
    "train_loss_key": ("train_loss",),
    "weighted_by_key": ("num-examples", "train_loss"),
}
"""What fedsim's clients call what they send."""


def sends(cls: type, name: str, claimed: Sends | None) -> Sends:
    """What clients send under the strategy `cls`: its class attribute `sends`, or weights where there is none.

    Args:
        name: of the strategy, in messages.
        claimed: what the experiment says of it; None where it says nothing.

    Raises:
        PluginError: the class declares something else.
        ConfigError: the experiment claims something else.
    """
    declared = getattr(cls, "sends", "weights")
    if declared not in get_args(Sends):
        expected = " or ".join(map(repr, get_args(Sends)))
        raise PluginError(f"strategies: '{name}' declares sends = {declared!r}, expected {expected}")
    if claimed not in (None, declared):
        raise ConfigError(
            f"training.sends: expected {declared!r}, as the class of strategy '{name}' declares, got {claimed!r}; "
            "leave it out"
        )
    return cast("Sends", declared)


def check_strategy(strategy: Any, settings: Mapping[str, Any], clients: int) -> None:
    """Raise where a round could not be as `settings` say.

    Args:
        strategy: made of `settings`; of a stranger's own settings nothing is asked.

    Raises:
        ConfigError: a share is none, a step size or momentum cannot be, or there are too few clients.
    """
    if not type(strategy).__module__.startswith(("flwr.", "strategies.")):
        known = {*LEAST, *_SHARES}
        settings = {key: value for key, value in settings.items() if key in known}
    for key, value in settings.items():
        if key in LEAST and not 0 <= value <= clients:
            raise ConfigError(f"strategy.{key}: expected at most federation.clients = {clients}, got {value}")
        if expected := _complaint(key, value):
            raise ConfigError(f"strategy.{key}: expected {expected}, got {value!r}")
    _check_robust(type(strategy).__name__, settings, sampled(settings, clients))


def _complaint(key: str, value: Any) -> str:
    """What `value` of the setting `key` should have been; nothing where it is well."""
    if key in _SHARES and not 0 <= value <= 1:
        return "a fraction from 0 to 1"
    if key in _ABOVE_ZERO and not 0 < value <= _LARGEST_STEP:
        return f"a value above 0 and at most {_LARGEST_STEP:g}"
    if key in _BELOW_ONE and not 0 <= value < 1:
        return "a value in [0, 1)"
    if key in _NOT_NEGATIVE and not 0 <= value <= _LARGEST_STEP:
        return f"a value of at least 0 and at most {_LARGEST_STEP:g}"
    if key in _REPORTED and value not in _REPORTED[key]:
        return " or ".join(f"'{name}'" for name in _REPORTED[key]) + ", as clients call it"
    return ""


def sampled(settings: Mapping[str, Any], clients: int) -> int:
    """How many clients Flower samples for a round."""
    return max(int(clients * settings.get("fraction_train", 1.0)), int(settings.get("min_train_nodes", 1)))


def _check_robust(name: str, settings: Mapping[str, Any], sampled: int) -> None:
    """The conditions of the papers: Krum needs more than 2 f + 2 updates (Blanchard et al. 2017), Bulyan 4 f + 3."""
    invalid, chosen = settings.get("num_malicious_nodes", 0), settings.get("num_nodes_to_select")
    if chosen is not None and not 1 <= chosen <= sampled:
        raise ConfigError(
            f"strategy.num_nodes_to_select: expected 1 to {sampled}, the clients of a round, got {chosen}"
        )
    most = max(0, (sampled - 3) // (4 if name == "Bulyan" else 2))
    if not 0 <= invalid <= most:
        raise ConfigError(
            f"strategy.num_malicious_nodes: expected 0 to {most} of the {sampled} clients of a round, got {invalid}"
        )
