"""The representation that the last layer's gradient reveals is perturbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.attacks import Paper
from fedsim.defense import Defense
from fedsim.errors import ConfigError, RunError, first_line
from fedsim.wire.messages import State

_AT_ONCE = 1 << 18
"""Most numbers of slopes that are computed at once; what the layers before need for that stays in a cache."""


@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """In each local step, leave those features out of the last linear layer's gradient that give the data away most.

    The gradient of that layer's weights shows the features r of a batch, from which its data X can be found. Setting
    the feature r_i to zero moves what is found by about |r_i| / ||dr_i/dX||, so the features with the largest mean of
    it over the batch are left out, and their columns of the gradient are zero. All other gradients are as they were,
    those of the layers before among them. No formal guarantee: the paper's bound is for an adversary who looks at the
    representation alone.

    Args:
        pruned: share of the features that is left out, below 1, rounded to at least one; 0 leaves all, as without the
            defense.

    Raises:
        ConfigError: `pruned` is out of range.
        RunError: the model's features do not depend on its inputs by a function with a derivative.

    References:
        Sun et al.: Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation
        Perspective, CVPR 2021, with the L2 norm of the data (p = 2) and the count of features (q = 0). Differs: the
        layer is always the last linear one. A batch has one set of features that are left out, as in the released
        code, which sums ||dr_i/dX|| / r_i over the batch and leaves out the smallest; here it is the mean of the
        paper's own |r_i| / ||dr_i/dX||, largest first. So a feature that is zero counts nothing, where the released
        code leaves it out before all others.
    """

    pruned: float = 0.4

    against: ClassVar[str] = (
        "a server that finds data from the gradient of the last layer; gradients of the layers before are sent as they "
        "are, and who matches those alone is not kept from anything"
    )
    cost: ClassVar[str] = "a backward pass to the inputs for each feature in each local step; some accuracy"
    paper: ClassVar[Paper] = Paper(
        title="Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation Perspective",
        authors="Sun, Li, Wang, Yang, Li, Chen",
        venue="CVPR",
        year=2021,
        url="https://arxiv.org/abs/2012.06043",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.pruned < 1:
            raise ConfigError(f"pruned: expected a share of at least 0, below 1, got {self.pruned}")

    def on_features(self, features: Tensor, inputs: Tensor, *, rng: torch.Generator) -> Tensor:
        """See Defense."""
        del rng
        if not self.pruned:
            return features
        revealing = (features.detach().abs() / slope_norms(features, inputs).clamp_min(1e-12)).mean(0)
        chosen = revealing.topk(max(1, round(self.pruned * len(revealing))), sorted=False).indices
        return features.index_fill(1, chosen, 0.0)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """See Defense. Features whose column of the last layer's weights was sent as zero count for nothing there.

        That layer is the last matrix, as in training. Of several steps, only what was left out in each is known.
        """
        matrices = [name for name, tensor in gradient.items() if tensor.ndim == 2]
        if not self.pruned or not matrices:
            return gradient
        last = matrices[-1]
        return {**gradient, last: gradient[last] * (sent[last] != 0).any(0)}


def slope_norms(features: Tensor, inputs: Tensor) -> Tensor:
    """`example feature`, the L2 norm of each feature's slope in the example that it is of.

    Raises:
        RunError: there is no slope.
    """
    batch, count = features.shape
    width = max(1, _AT_ONCE // inputs.numel())
    found = []
    for chosen in torch.split(torch.eye(count).to(features), width):
        wanted = chosen[:, None].expand(len(chosen), batch, count)
        try:
            (slopes,) = torch.autograd.grad(features, inputs, wanted, retain_graph=True, is_grads_batched=True)
        except RuntimeError as error:
            raise RunError(
                f"the features of the model have no slope in its inputs ({first_line(error)}); choose another model"
            ) from error
        found.append(slopes.flatten(2).norm(dim=2))
    return torch.cat(found).mT
