"""Soteria: the features that the last layer's gradient reveals are perturbed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.constraints import ShareBelowOne
from fedsim.base.errors import RunError, first_line, is_device_failure
from fedsim.base.papers import cite
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State

_MAX_DERIVATIVES = 1 << 18
"""Largest number of derivatives that are computed at once, so that they fit in a cache."""


@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """Leave the features that reveal most of the data out of the last linear layer's gradient.

    The gradient of that layer's weights reveals the features r of a batch, from which its data X
    can be reconstructed. Setting the feature r_i to zero changes the reconstruction by about |r_i|
    / ||dr_i/dX||. So in each local step, the features with the largest mean of it over the batch
    are left out, and their columns of the gradient are zero. All other gradients, including those
    of the layers before, are unchanged. No formal guarantee: the paper's bound is for an adversary
    who sees only the features.

    Args:
        pruned: share of the features that is left out, below 1, rounded to at least one; 0 leaves
            all, as without the defense.

    Raises:
        ConfigError: `pruned` is out of range.
        RunError: the model's features are not differentiable in its inputs.

    References:
        [Sun2021], with the L2 norm of the data (p = 2) and the count of features (q = 0). Differs:
        the layer is always the last linear one. A batch has one set of features that are left out,
        as in the released code, which sums ||dr_i/dX|| / r_i over the batch and leaves out the
        smallest; here it is the mean of the paper's own |r_i| / ||dr_i/dX||, largest first. So a
        feature that is zero counts nothing, where the released code leaves it out before all
        others.
    """

    pruned: ShareBelowOne = 0.4

    against: ClassVar[str] = (
        "a server that finds data from the gradient of the last layer; gradients of the layers before are sent as they "
        "are, and who matches those alone is not kept from anything"
    )
    cost: ClassVar[str] = "a backward pass to the inputs for each feature in each local step; some accuracy"
    paper: ClassVar[Paper] = cite("Sun2021")

    def on_features(self, features: Tensor, inputs: Tensor, context: LocalContext) -> Tensor:
        """Return the features with the most revealing ones set to zero."""
        if not self.pruned:
            return features
        revealed = (features.detach().abs() / feature_gradient_norms(features, inputs).clamp_min(1e-12)).mean(0)
        pruned = revealed.topk(max(1, round(self.pruned * len(revealed))), sorted=False).indices
        return features.index_fill(1, pruned, 0.0)

    def adversary_view(self, gradient: State, sent: State) -> State:
        """Return the gradient with zeros in columns of the last layer that were sent as zero.

        That layer is the last matrix, as in training. After several steps, only features that were
        left out in each are known.
        """
        matrices = [name for name, tensor in gradient.items() if tensor.ndim == 2]
        if not self.pruned or not matrices:
            return gradient
        last = matrices[-1]
        return {**gradient, last: gradient[last] * (sent[last] != 0).any(0)}


def feature_gradient_norms(features: Tensor, inputs: Tensor) -> Tensor:
    """Return the L2 norm of each feature's gradient in its own example, `example feature`.

    Raises:
        RunError: the features are not differentiable in the inputs.
    """
    batch, count = features.shape
    features_at_once = max(1, _MAX_DERIVATIVES // inputs.numel())
    norms = []
    for unit_vectors in torch.split(torch.eye(count).to(features), features_at_once):
        grad_outputs = unit_vectors[:, None].expand(len(unit_vectors), batch, count)
        try:
            (gradients,) = torch.autograd.grad(features, inputs, grad_outputs, retain_graph=True, is_grads_batched=True)
        except RuntimeError as error:
            if is_device_failure(error):
                raise
            raise RunError(
                f"the features of the model have no gradient in its inputs ({first_line(error)}); choose another model"
            ) from error
        norms.append(gradients.flatten(2).norm(dim=2))
    return torch.cat(norms).mT
