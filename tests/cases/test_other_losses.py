"""Labels are counted by the derivative of the loss that clients minimise, or the attack says that it cannot."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, one_hot

import fedsim
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.task import Loss
from fedsim.inversion.labels.logit_gradient import check_mean_cross_entropy, logit_gradient

LABELS = torch.tensor([0, 1, 1, 2, 2, 3, 4, 4])
WEIGHTS, MILD = torch.tensor([10.0, 1.0, 1.0, 1.0, 0.1]), torch.tensor([2.0, 1.0, 1.0, 1.0, 0.5])
LOSSES: dict[str, Loss] = {
    "mean": partial(cross_entropy, reduction="mean"),
    "class weights": partial(cross_entropy, weight=WEIGHTS),
    "sum": partial(cross_entropy, reduction="sum"),
    "weighted sum": partial(cross_entropy, weight=MILD, reduction="sum"),
    "smoothing": partial(cross_entropy, label_smoothing=0.3),
    "weights and smoothing": partial(cross_entropy, weight=MILD, label_smoothing=0.2),
}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))


def attack_update(attack: str, loss: Loss, **settings: Any) -> Any:
    model = network()
    inputs = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss(model(inputs), LABELS).backward()
    after = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    return fedsim.attack(
        before, after, model=network(), num_examples=8, attack=attack, settings=settings, loss=loss,
        input_shape=(1, 8, 8), value_range=(0, 1), num_classes=5, learning_rate=0.1, local_epochs=1, batch_size=8,
        optimizer="sgd", momentum=0.0, weight_decay=0.0, proximal_mu=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_labels_are_counted_by_the_loss_that_is_known(name: str) -> None:
    counts = LABELS.bincount(minlength=5).tolist()
    found = attack_update("inverting-gradients", LOSSES[name], iterations=1)
    assert found.labels.bincount(minlength=5).tolist() == counts
    assert (8 * attack_update("label-counts", LOSSES[name]).mean_shares).tolist() == pytest.approx(counts)


def squared(logits: Tensor, labels: Tensor) -> Tensor:
    return mse_loss(logits, one_hot(labels, logits.shape[1]).float())


def test_a_loss_that_is_no_cross_entropy_is_refused() -> None:
    with pytest.raises(KnowledgeError, match="the loss that clients minimise is no cross-entropy; grant the labels"):
        attack_update("inverting-gradients", squared, iterations=1)


@pytest.mark.parametrize("attack", ["llg"])
def test_formulas_without_class_weights_refuse_them(attack: str) -> None:
    with pytest.raises(AttackError, match=r"clients minimise a loss with class weights, .* take label-counts"):
        attack_update(attack, LOSSES["class weights"])
    attack_update(attack, LOSSES["sum"])
    attack_update(attack, LOSSES["smoothing"])


def test_rules_that_are_of_the_mean_alone_refuse_other_losses() -> None:
    check_mean_cross_entropy(LOSSES["mean"], 5, "cpu", "here")
    for name in LOSSES.keys() - {"mean"}:
        with pytest.raises(KnowledgeError, match="here: labels cannot be recovered by this rule: clients minimise a"):
            check_mean_cross_entropy(LOSSES[name], 5, "cpu", "here")


@pytest.mark.parametrize("name", LOSSES)
def test_the_derivative_of_a_loss_is_found_by_trying_it(name: str) -> None:
    form = logit_gradient(LOSSES[name], 5)
    assert form.is_mean_cross_entropy == (name == "mean")
    assert (form.divisors is None) == ("sum" in name)
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(3)).requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES[name](logits, LABELS), logits)
    added = form.softmax_factors[LABELS, None] * logits.softmax(1) - form.targets[LABELS]
    divisor = torch.ones(()) if form.divisors is None else form.divisors[LABELS].sum()
    torch.testing.assert_close(added / divisor, gradient, rtol=1e-3, atol=1e-5)
