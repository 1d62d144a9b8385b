"""Warn where clients train otherwise than an attack assumes."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy

from torch import Tensor, nn

from fedsim.base.errors import join_first
from fedsim.interfaces.attack import Attack, Knowledge, warn
from fedsim.inversion.model_checks import ask_of_passes
from fedsim.training.stochastic_layers import find_stochastic_layers

OPTIMIZER_FACTS = frozenset({"optimizer", "momentum", "weight_decay", "proximal_mu"})
"""Facts that tell whether clients train by plain SGD."""


def warn_unless_plain_sgd(attack: Attack, knowledge: Knowledge, where: str, *, simulated: Collection[str] = ()) -> None:
    """Warn if clients do not, or may not, train by plain SGD, which the attack assumes.

    Args:
        simulated: which of `OPTIMIZER_FACTS` the attack simulates.
    """
    names = ("optimizer", "momentum", "weight_decay", "proximal_mu")
    facts = {name: getattr(knowledge, name) for name in names}
    differing = []
    for name, value in facts.items():
        if value and value != "sgd" and name not in simulated:
            differing.append(f"{name.replace('_', ' ')} {value}")
    hidden = [name for name, value in facts.items() if value is None]
    if differing:
        warn(
            f"{attack.title} on {where}: assumes plain SGD, but clients train with {', '.join(differing)}; expect less"
        )
    elif hidden:
        verb = "is" if len(hidden) == 1 else "are"
        warn(f"{attack.title} on {where}: assumes plain SGD; {', '.join(hidden)} of the clients {verb} not known")


def warn_of_dropout(attack: Attack, model: nn.Module, knowledge: Knowledge, where: str) -> None:
    """Warn if layers of `model` are random in training, as dropout is; attacks switch it off."""
    if not getattr(model, "draws_in_training", True):
        return

    def find_layers(model: nn.Module, inputs: Tensor) -> list[str]:
        return list(find_stochastic_layers(deepcopy(model).train(), inputs))

    if layers := ask_of_passes("layers that draw", model, knowledge, find_layers):
        names = join_first([f"'{name or 'forward'}'" for name in layers], 3)
        verb = "draws" if len(layers) == 1 else "draw"
        warn(
            f"{attack.title} on {where}: {names} of the model {verb} at random while clients train, as dropout does, "
            "which this attack leaves out; expect little"
        )
