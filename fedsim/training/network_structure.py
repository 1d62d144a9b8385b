"""The network that clients of one process train one after another, which no defense of one may change for the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fedsim.base.errors import PluginError
from fedsim.interfaces.defense import TRAINING_HOOKS, Defense, overrides
from fedsim.interfaces.defense_checks import name_of_defense

_COMPARED = frozenset(name for name in vars(nn.Module()) if name in ("_modules", "_parameters") or "_hooks" in name)
"""Attributes by which torch's modules hold layers, parameters and hooks."""


@contextmanager
def keep_structure(model: nn.Module, defenses: Sequence[Defense]) -> Iterator[None]:
    """Put back hooks, parametrizations, layers and parameters after the block, and raise an error if some were changed.

    Other clients of the process train in the same network. On an engine that has them train in another process, they
    would send something else.

    Args:
        model: network that a client trains in the block.
        defenses: of the client. Without one that acts inside local training, nothing is compared.
    """
    inside = [defense for defense in defenses if any(overrides(defense, hook) for hook in TRAINING_HOOKS)]
    if not inside:
        yield
        return
    # Shallow copies: what modules hold, and not the values of tensors.
    before = {module: (name, type(module), _copy_containers(vars(module))) for name, module in model.named_modules()}
    changed: list[str] = []
    try:
        yield
    finally:
        for module, (name, module_class, attributes) in before.items():
            if type(module) is not module_class or _computes_otherwise(vars(module), attributes):
                changed.append(f"layer '{name}'" if name else "the network itself")
                module.__class__ = module_class
                vars(module).clear()
                vars(module).update(attributes)
    if changed:
        names = " or ".join(name_of_defense(defense) for defense in inside)
        raise PluginError(
            f"{names} left a hook, a parametrization or another layer in {changed[0]}, in which other clients train, "
            "too; have it remove what it adds"
        )


def _copy_containers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module, with copies of what holds its layers, hooks and tensors."""
    return {
        name: value.copy() if isinstance(value, dict) and (name == "_buffers" or name in _COMPARED) else value
        for name, value in attributes.items()
    }


def _computes_otherwise(attributes: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether a module has other hooks, layers or parameters than before, or another `forward`."""
    if attributes.get("forward") is not before.get("forward"):
        return True
    for name in _COMPARED & before.keys():
        now, held = attributes[name], before[name]
        if not isinstance(held, dict):  # of a network that torch.jit compiled
            continue
        if len(now) != len(held) or any(now.get(key) is not value for key, value in held.items()):
            return True
    return False
