"""Gradient of the clients' loss by the logits, measured by calling it; labels are counted by it.

With the cross-entropy, an example of label y with softmax output p adds `alpha_y p - T_y` to the
gradient of the last bias, before the sum is divided. Without class weights and label smoothing
alpha is 1 and T_y is one-hot; weights scale both, smoothing spreads T_y. The sum is divided by N,
by the sum of the examples' weights, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsim.base.errors import KnowledgeError
from fedsim.base.loss_term import prediction_loss
from fedsim.inversion.labels.last_layer import apportion_counts

MeanLoss = Callable[[Tensor, Tensor], Tensor]
"""`(logits, labels) -> loss`, a scalar."""
_TOLERANCE = 1e-3
_REMEDY = "grant the labels with adversary.knowledge.labels = true"


@dataclass(frozen=True, eq=False)
class LogitGradient:
    """Gradient of a loss by the logits, in the notation of this module.

    Attributes:
        softmax_factors: `class`, alpha.
        targets: `class class`, T; row y is of an example of label y.
        divisors: `class`, what an example of each label adds to the divisor of the sum; None if the
            sum is not divided.
    """

    softmax_factors: Tensor
    targets: Tensor
    divisors: Tensor | None

    @property
    def is_cross_entropy(self) -> bool:
        """Return whether it is the cross-entropy without class weights and smoothing, sum or mean."""
        return _are_close(self.targets, torch.eye(len(self.targets)).to(self.targets))

    @property
    def treats_classes_alike(self) -> bool:
        """Return whether all classes have the same weight; labels may be smoothed."""
        off_diagonal = self.targets[0, 1] if len(self.targets) > 1 else self.targets[0, 0]
        symmetric = torch.full_like(self.targets, off_diagonal.item())
        symmetric.fill_diagonal_(self.targets[0, 0].item())
        return _are_close(self.targets, symmetric)

    @property
    def is_mean_cross_entropy(self) -> bool:
        """Return whether it is the mean cross-entropy, which most clients minimise."""
        return self.is_cross_entropy and self.divisors is not None

    def count_labels(self, outputs: Tensor, gradient: Tensor, num_examples: int) -> Tensor:
        """Count how many of N examples are of each class, from the gradient of the last bias.

        With the mean cross-entropy the counts are N (p - g), rounded. Otherwise the search starts
        from the solution without rounding, and examples change their class one by one as long as
        the gradient comes closer.

        Args:
            outputs: `class`, p, the mean softmax output.
            gradient: `class`, g, of the bias.
            num_examples: N.

        Returns:
            `class`.
        """
        if self.is_mean_cross_entropy:
            return apportion_counts(outputs - gradient, num_examples)
        # Column y is what an example of label y adds to the sum and to its divisor.
        added = (outputs[:, None] * self.softmax_factors.to(outputs) - self.targets.to(outputs).mT).double().cpu()
        divisors = torch.zeros(len(added)) if self.divisors is None else self.divisors.cpu()
        gradient = gradient.double().cpu()

        def distances(total: Tensor, divisor: Tensor) -> Tensor:
            means = total if self.divisors is None else total / divisor
            norms: Tensor = (means - gradient[:, None]).norm(dim=0)
            return norms

        counts = apportion_counts(self._solve_counts(added, gradient, num_examples), num_examples)
        total, divisor = added @ counts.double(), divisors.double() @ counts.double()
        best = float(distances(total[:, None], divisor))
        while True:
            # Find the best change of one example from a label to another one.
            changes = []
            for label in counts.nonzero().flatten().tolist():
                totals = (total - added[:, label])[:, None] + added
                changed = distances(totals, divisor - divisors[label] + divisors)
                new_label = int(changed.argmin())
                changes.append((float(changed[new_label]), label, new_label))
            nearest, label, new_label = min(changes)
            if not nearest < best:
                return counts
            # Make it.
            best = nearest
            counts[label] -= 1
            counts[new_label] += 1
            total = total - added[:, label] + added[:, new_label]
            divisor = divisor - divisors[label] + divisors[new_label]

    def _solve_counts(self, added: Tensor, gradient: Tensor, num_examples: int) -> Tensor:
        """Solve for real counts, on any scale, that add up to the gradient with a divisor of 1."""
        divisors = torch.ones(len(gradient)) if self.divisors is None else self.divisors.cpu()
        total = float(num_examples) if self.divisors is None else 1.0
        weight = added.abs().max()  # of the divisor's equation, so that it has the others' size
        equations = torch.cat([added, weight * divisors[None].double()])
        sides = torch.cat([gradient, weight * torch.tensor([total], dtype=torch.double)])
        solution: Tensor = torch.linalg.lstsq(equations, sides[:, None]).solution
        return solution.flatten()


def logit_gradient(loss: MeanLoss, classes: int, device: torch.device | str = "cpu") -> LogitGradient:
    """Measure how `loss` depends on the logits.

    Args:
        device: of tensors that the loss may hold.
    """
    loss = prediction_loss(loss)
    if loss is cross_entropy:
        return LogitGradient(torch.ones(classes), torch.eye(classes), torch.ones(classes))
    rng, labels = torch.Generator().manual_seed(0), torch.arange(classes)
    logits = [torch.randn((classes, classes), generator=rng) for _ in range(3)]
    outputs = [batch.softmax(1) for batch in logits]
    gradients = [_loss_gradient(loss, batch, labels, device) for batch in logits]
    # Two batches give alpha and T of each label, the third one shows whether they explain the loss.
    change = outputs[0] - outputs[1]
    factors = ((gradients[0] - gradients[1]) * change).sum(1) / change.square().sum(1)
    targets = factors[:, None] * outputs[0] - gradients[0]
    explained = _are_close(factors[:, None] * outputs[2] - targets, gradients[2])
    if not explained or not (factors > 0).all():
        raise KnowledgeError(
            "labels cannot be counted: by its derivative, the loss that clients minimise is no "
            f"cross-entropy; {_REMEDY}"
        )
    # The gradient of an example in a batch of twice the size is the same if the loss is a sum.
    doubled = _loss_gradient(loss, logits[0].repeat(2, 1), labels.repeat(2), device)[:classes]
    if _are_close(doubled, gradients[0]):
        return LogitGradient(factors, targets, None)
    # A batch of a single label shows how much its examples add to the divisor.
    divisors = torch.ones(classes)
    for label in range(classes):
        row = gradients[0][label]
        same_logits = logits[0][label].repeat(classes, 1)
        same_labels = labels[label].repeat(classes)
        single = _loss_gradient(loss, same_logits, same_labels, device)[0]
        divisors[label] = (row @ row) / (single @ row)
    return LogitGradient(classes * factors, classes * targets, divisors)


def check_mean_cross_entropy(loss: MeanLoss, classes: int, device: torch.device | str, where: str) -> None:
    """Raise KnowledgeError unless clients minimise the mean cross-entropy, which a rule assumes."""
    if not logit_gradient(loss, classes, device).is_mean_cross_entropy:
        raise KnowledgeError(
            f"{where}: labels cannot be recovered by this rule: clients minimise a cross-entropy "
            "with class weights or label smoothing, or a sum, and the rule is of the mean without "
            f"them; {_REMEDY}"
        )


def _loss_gradient(loss: MeanLoss, logits: Tensor, labels: Tensor, device: torch.device | str) -> Tensor:
    """Return the gradient of `loss` by `logits`, on the CPU."""
    with torch.enable_grad():
        inputs = logits.to(device).requires_grad_(True)
        try:
            (gradient,) = torch.autograd.grad(loss(inputs, labels.to(device)), inputs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise KnowledgeError(
                "labels cannot be counted: the loss that clients minimise cannot be tried on "
                f"logits ({error}); {_REMEDY}"
            ) from error
    return gradient.cpu()


def _are_close(measured: Tensor, expected: Tensor) -> bool:
    return bool((measured - expected).norm() <= _TOLERANCE * expected.norm())
