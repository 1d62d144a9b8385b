"""Terms of a local objective besides the loss, functions of the weights alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import Tensor, nn

from fedsim.interfaces.algorithm import FeatureLoss
from fedsim.recording.wire_format import State
from fedsim.training.settings import LocalTraining


@dataclass(frozen=True, kw_only=True)
class LocalObjective:
    """What a client algorithm asks of one pass of local training.

    Attributes:
        trained: names of the parameters that are trained; None trains all.
        proximal_mu: weight of a proximal term.
        anchor: weights to which it pulls; None for those at the start.
        correction: is added to the gradient of each step, by name of a parameter.
        feature_loss: is added to the loss of each batch.
    """

    trained: Collection[str] | None = None
    proximal_mu: float = 0.0
    anchor: State | None = None
    correction: State | None = None
    feature_loss: FeatureLoss | None = None


def make_penalties(model: nn.Module, settings: LocalTraining, objective: LocalObjective) -> Callable[[], list[Tensor]]:
    """Return a function that computes the terms, from the weights that `model` has then.

    Args:
        settings: `proximal_mu` is that of a server that asks for FedProx.
    """
    pulls: list[tuple[float, Tensor, Tensor]] = []
    if settings.proximal_mu:
        pulls += [(settings.proximal_mu, parameter, _copy(parameter)) for parameter in model.parameters()]
    trained: dict[str, nn.Parameter] = {}
    if objective.proximal_mu or objective.correction:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if objective.proximal_mu:
        for name, parameter in trained.items():
            anchor = parameter if objective.anchor is None else objective.anchor[name].to(parameter)
            pulls.append((objective.proximal_mu, parameter, _copy(anchor)))
    corrections: list[tuple[Tensor, Tensor]] = []
    for name, correction in (objective.correction or {}).items():
        if name in trained:
            corrections.append((trained[name], correction.to(trained[name])))

    def compute_terms() -> list[Tensor]:
        terms = [mu / 2 * (parameter - anchor).square().sum() for mu, parameter, anchor in pulls]
        return terms + [(correction * parameter).sum() for parameter, correction in corrections]

    return compute_terms


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
