"""How the loss that clients minimise depends on the logits, found by trying it: what counting labels rests on.

Of the cross-entropy, an example of label y with softmax output p adds `alpha_y p - T_y` to the gradient of the last
bias, before the sum is divided. Without class weights and label smoothing alpha is 1 and T_y is one-hot; weights scale
both, smoothing spreads T_y. The sum is divided by N, by the sum of the examples' weights, or by nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from adversaries.labels.last_layer import apportioned
from fedsim.errors import KnowledgeError

MeanLoss = Callable[[Tensor, Tensor], Tensor]
"""`(logits, labels) -> ` what clients minimise."""
_CLOSE = 1e-3
_REMEDY = "grant the labels with adversary.knowledge.labels = true"


@dataclass(frozen=True, eq=False)
class LogitGradient:
    """The gradient of a loss by logits, see above.

    Attributes:
        slopes: `class`, alpha.
        targets: `class class`, T; row y is of an example of label y.
        divisors: `class`, what an example of each label adds to what the sum is divided by; None where nothing divides.
    """

    slopes: Tensor
    targets: Tensor
    divisors: Tensor | None

    @property
    def is_cross_entropy(self) -> bool:
        """Whether each example counts alike, and for its own class alone, whatever the sum is divided by."""
        return _close(self.targets, torch.eye(len(self.targets)).to(self.targets))

    @property
    def treats_classes_alike(self) -> bool:
        """Whether no class counts more than another one; labels may be smoothed."""
        other = self.targets[0, 1] if len(self.targets) > 1 else self.targets[0, 0]
        alike = torch.full_like(self.targets, other.item())
        alike.fill_diagonal_(self.targets[0, 0].item())
        return _close(self.targets, alike)

    @property
    def is_mean_cross_entropy(self) -> bool:
        """Whether it is the mean cross-entropy, as most clients have it."""
        return self.is_cross_entropy and self.divisors is not None

    def count(self, outputs: Tensor, gradient: Tensor, num_examples: int) -> Tensor:
        """Return `class`, how many of N examples are of each class, so that the last bias has this gradient.

        With the mean cross-entropy that is N (p - g), rounded. Otherwise what is best without rounding is a start, from
        which one example after the other goes to another class, for as long as the gradient comes closer.

        Args:
            outputs: `class`, p, the mean softmax output.
            gradient: `class`, g, of the bias.
            num_examples: N.
        """
        if self.is_mean_cross_entropy:
            return apportioned(outputs - gradient, num_examples)
        # Column y is what an example of label y adds to the sum, and to what that is divided by.
        added = (outputs[:, None] * self.slopes.to(outputs) - self.targets.to(outputs).mT).double().cpu()
        divisors = torch.zeros(len(added)) if self.divisors is None else self.divisors.cpu()
        gradient = gradient.double().cpu()

        def distances(total: Tensor, divisor: Tensor) -> Tensor:
            means = total if self.divisors is None else total / divisor
            apart: Tensor = (means - gradient[:, None]).norm(dim=0)
            return apart

        counts = apportioned(self._solve(added, gradient, num_examples), num_examples)
        total, divisor = added @ counts.double(), divisors.double() @ counts.double()
        best = float(distances(total[:, None], divisor))
        while True:
            moves = []
            for label in counts.nonzero().flatten().tolist():
                apart = distances((total - added[:, label])[:, None] + added, divisor - divisors[label] + divisors)
                other = int(apart.argmin())
                moves.append((float(apart[other]), label, other))
            nearest, label, other = min(moves)
            if not nearest < best:
                return counts
            best = nearest
            counts[label] -= 1
            counts[other] += 1
            total = total - added[:, label] + added[:, other]
            divisor = divisor - divisors[label] + divisors[other]

    def _solve(self, added: Tensor, gradient: Tensor, num_examples: int) -> Tensor:
        """Return counts that are no integers, on any scale: what they add is the gradient, and the divisor is 1."""
        divisors = torch.ones(len(gradient)) if self.divisors is None else self.divisors.cpu()
        total = float(num_examples) if self.divisors is None else 1.0
        weight = added.abs().max()  # of the condition, beside equations of this size
        equations = torch.cat([added, weight * divisors[None].double()])
        sides = torch.cat([gradient, weight * torch.tensor([total], dtype=torch.double)])
        solution: Tensor = torch.linalg.lstsq(equations, sides[:, None]).solution
        return solution.flatten()


def logit_gradient(loss: MeanLoss, classes: int, device: torch.device | str = "cpu") -> LogitGradient:
    """Find out how `loss` depends on logits.

    Args:
        loss: `(logits, labels) -> ` what clients minimise.
        classes: how many logits there are.
        device: of tensors that the loss may hold.

    Raises:
        KnowledgeError: it is no cross-entropy, so that no formula counts labels.
    """
    if loss is cross_entropy:
        return LogitGradient(torch.ones(classes), torch.eye(classes), torch.ones(classes))
    draw, labels = torch.Generator().manual_seed(0), torch.arange(classes)
    logits = [torch.randn((classes, classes), generator=draw) for _ in range(3)]
    outputs, gradients = [z.softmax(1) for z in logits], [_gradient(loss, z, labels, device) for z in logits]
    # Two batches give alpha and T of each label, the third one shows whether there is such a pair.
    apart = outputs[0] - outputs[1]
    slopes = ((gradients[0] - gradients[1]) * apart).sum(1) / apart.square().sum(1)
    targets = slopes[:, None] * outputs[0] - gradients[0]
    if not _close(slopes[:, None] * outputs[2] - targets, gradients[2]) or not (slopes > 0).all():
        raise KnowledgeError(
            "labels cannot be counted: by its derivative, the loss that clients minimise is no cross-entropy; "
            f"{_REMEDY}"
        )
    twice = _gradient(loss, logits[0].repeat(2, 1), labels.repeat(2), device)[:classes]
    if _close(twice, gradients[0]):
        return LogitGradient(slopes, targets, None)
    # A batch of one label alone shows how much of the divisor its examples are.
    divisors = torch.ones(classes)
    for label in range(classes):
        row = gradients[0][label]
        alone = _gradient(loss, logits[0][label].repeat(classes, 1), labels[label].repeat(classes), device)[0]
        divisors[label] = (row @ row) / (alone @ row)
    return LogitGradient(classes * slopes, classes * targets, divisors)


def check_mean_cross_entropy(loss: MeanLoss, classes: int, device: torch.device | str, where: str) -> None:
    """Raise KnowledgeError where clients minimise anything but the mean cross-entropy, which a rule assumes."""
    if not logit_gradient(loss, classes, device).is_mean_cross_entropy:
        raise KnowledgeError(
            f"{where}: labels cannot be recovered by this rule: clients minimise a cross-entropy with class weights or "
            f"label smoothing, or a sum, and the rule is of the mean without them; {_REMEDY}"
        )


def _gradient(loss: MeanLoss, logits: Tensor, labels: Tensor, device: torch.device | str) -> Tensor:
    """Return the gradient of `loss` by `logits`, on the CPU."""
    with torch.enable_grad():
        inputs = logits.to(device).requires_grad_(True)
        try:
            (gradient,) = torch.autograd.grad(loss(inputs, labels.to(device)), inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise KnowledgeError(
                f"labels cannot be counted: the loss that clients minimise cannot be tried on logits ({error}); "
                f"{_REMEDY}"
            ) from error
    return gradient.cpu()


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= _CLOSE * other.norm())
