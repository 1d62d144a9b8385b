"""Parts into which a client algorithm divides a model, and those that never leave the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from fedsim.base.errors import ConfigError, PluginError
from fedsim.interfaces.algorithm import ClientAlgorithm


def find_private_names(algorithm: ClientAlgorithm, network: nn.Module, name: str) -> frozenset[str]:
    """Return the names of the tensors of `network` that never leave a client."""
    parts = algorithm.divide_model(network)
    if unknown := sorted(algorithm.private_parts - set(parts)):
        raise PluginError(
            f"algorithm: '{name}' declares the private part '{unknown[0]}', and divides models into "
            f"{', '.join(sorted(parts))}; name it in divide_model"
        )
    _check_cover(parts, network, name)
    private = frozenset(tensor for part in algorithm.private_parts for tensor in parts[part])
    if algorithm.private_parts and not private:
        raise ConfigError(f"algorithm: '{name}' keeps nothing of this model on the clients; choose another model")
    shared_parameters = [tensor for tensor, _ in network.named_parameters() if tensor not in private]
    if not shared_parameters:
        raise ConfigError(f"algorithm: '{name}' would keep the whole model on the clients; share a part of it")
    _check_aliases(network, private, name)
    return private


def _check_cover(parts: Mapping[str, Sequence[str]], network: nn.Module, name: str) -> None:
    """Raise ConfigError unless each tensor of the model is in exactly one part."""
    expected = [tensor for tensor, values in network.state_dict().items() if values.is_floating_point()]
    counts = Counter(tensor for names in parts.values() for tensor in names)
    for tensor in expected:
        if counts[tensor] > 1:
            raise ConfigError(f"algorithm: '{name}' names '{tensor}' twice; put each tensor into one part")
        if not counts[tensor]:
            raise ConfigError(f"algorithm: '{name}' names '{tensor}' in no part; put each tensor into one part")
    if unknown := sorted(set(counts) - set(expected)):
        raise ConfigError(f"algorithm: '{name}' names '{unknown[0]}', which the model does not have; leave it out")


def _check_aliases(network: nn.Module, private: frozenset[str], name: str) -> None:
    """Raise ConfigError where a private parameter would be sent under another of its names."""
    names_of: dict[int, list[str]] = {}
    for tensor, parameter in network.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(tensor)
    for names in names_of.values():
        if 0 < len(private.intersection(names)) < len(names):
            raise ConfigError(
                f"algorithm: '{name}' keeps a parameter on the clients that is sent as {' or '.join(names)}; put all "
                "its names into one part"
            )
