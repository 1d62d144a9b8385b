"""Labels from gradients that were sent, one or several of the same mini-batch; the rules need no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from adversaries.labels.last_layer import LastLayer, apportioned, last_bias, spelled_out, untrained
from adversaries.labels.logit_gradient import logit_gradient
from adversaries.scene import Scene
from fedsim.errors import AttackError, KnowledgeError

_TURNS = 20


def sign_rule(scene: Scene, dummy: Tensor) -> Tensor:
    """The label of a single example: the class whose logit the last layer's bias moved up after one step.

    With cross-entropy the gradient of that bias is p - onehot(y), negative for the true class alone; class weights and
    sums change its size, not its signs.

    Args:
        dummy: `example ...` in standardised units, any data that the model takes.

    Raises:
        AttackError: there is more than one example.
        KnowledgeError: the model has no final linear layer with a bias for each class, or no classes.

    References:
        Zhao et al.: iDLG, 2020, for the bias (the paper's weights need features of one sign).
    """
    if scene.num_examples != 1:
        raise AttackError(
            f"{scene.where}: the label of one example is read from signs, N is {scene.num_examples}; grant the labels "
            "or choose another attack"
        )
    name = last_bias(scene.model, scene.units.to_model(dummy))
    if name not in scene.names:
        raise untrained(name)
    form = logit_gradient(scene.loss, len(scene.model.get_parameter(name)), scene.before[0].device)
    if not torch.equal(form.targets.argmax(1), torch.arange(len(form.targets))):
        raise KnowledgeError(f"{scene.where}: the loss that clients minimise does not move the true class most")
    return scene.direction[scene.names.index(name)].argmin().reshape(1)


LabelRule = Callable[[Sequence[LastLayer], int, torch.Generator], Tensor]
"""`(last layers of gradients of one mini-batch, its size, rng) -> labels in ascending order`."""


def column_rule(layers: Sequence[LastLayer], num_examples: int, rng: torch.Generator) -> Tensor:
    """The b classes with the smallest entry in their row of the gradient, of the last layer's mean over rounds.

    Assumes that no label repeats (those that do are missed, and others claimed), that the layer's inputs are not
    negative, as behind a ReLU, and the size of the mini-batch. Needs no bias.

    Raises:
        AttackError: there are more examples than classes.

    References:
        Yin et al.: See through Gradients, CVPR 2021, Sect. 3.2. Differs: takes the mean of several gradients.
    """
    smallest = torch.stack([layer.weight_gradient.min(1).values for layer in layers]).mean(0)
    if num_examples > len(smallest):
        raise AttackError(
            f"the column rule finds each class once, N = {num_examples} is more than {len(smallest)} classes; "
            "recover labels by optimisation"
        )
    return smallest.argsort()[:num_examples].sort().values


def bias_rule(layers: Sequence[LastLayer], num_examples: int, rng: torch.Generator) -> Tensor:
    """Counts n_c = b (p_c - g_c), exact except for p, from the gradient g of the last layer's bias.

    p, the mean softmax output of the mini-batch, is that of one feature vector a class; these follow from the counts
    and the weights' gradient, so both are improved alternately. Several gradients of one mini-batch are averaged.
    Assumes cross-entropy, a bias, and the size of the mini-batch. Labels may repeat.

    Raises:
        KnowledgeError: the layer has no bias.
    """
    return spelled_out(_by_bias(layers, num_examples)[0])


def label_optimisation(
    layers: Sequence[LastLayer],
    num_examples: int,
    rng: torch.Generator,
    *,
    iterations: int = 100,
) -> Tensor:
    """Labels whose gradient of the last layer, with features that are found along with them, is the recorded one.

    Minimises the squared distance between the last layer's gradient of dummy features with dummy labels and the
    recorded one, over both (Eq. 16), by L-BFGS with a strong Wolfe line search. The labels are shared by all
    gradients of the mini-batch; the features are not, because those of later gradients come from other weights. Labels
    may repeat. Where there is a bias, the counts are n_c = b (p_c - g_c) of its gradient g, where p is the mean
    softmax output of the dummy features; else they are the sums of the dummy labels. They are rounded to integers
    that sum to b. Where the layer's inputs are not below 0, dummy features are squares; where there is a bias, they
    start at the size that the gradient shows. Assumes cross-entropy, and the size of the mini-batch.

    Args:
        layers: of one or more gradients of the same mini-batch.
        num_examples: b.
        rng: draws the dummy features and the logits of the dummy labels.
        iterations: of L-BFGS, at most.

    Returns:
        `example`, labels in ascending order.

    Raises:
        AttackError: it diverged.

    References:
        Li et al.: Temporal Gradient Inversion Attacks with Robust Optimization, Eq. 16 and App. B.1. Differs: the
        distance is divided by the recorded gradient's squared norm, the gradient of the bias takes part in it, and
        the counts are read off that where there is one.
    """
    weight, target = (torch.stack([getattr(layer, name) for layer in layers]) for name in ("weight", "weight_gradient"))
    biased = [layer for layer in layers if layer.bias is not None and layer.bias_gradient is not None]
    bias, slope = (
        torch.stack([getattr(layer, name) for layer in biased]) if biased else weight.new_zeros(weight.shape[:2])
        for name in ("bias", "bias_gradient")
    )
    non_negative = all(layer.non_negative for layer in layers)
    size = target.square().sum((1, 2)) + slope.square().sum(1)
    size = torch.where(size > 0, size, 1)
    rounds, classes, width = weight.shape
    scale = _mixture(target, slope).square().mean((1, 2), keepdim=True).sqrt() if biased else weight.new_ones(1)
    scale = torch.where(scale > 0, scale, 1)
    spread = scale.sqrt() if non_negative else scale
    features = torch.randn((rounds, num_examples, width), generator=rng).to(weight).mul(spread).requires_grad_(True)
    logits = torch.randn((num_examples, classes), generator=rng).to(weight).requires_grad_(True)
    optimizer = torch.optim.LBFGS(
        [features, logits], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def outputs() -> tuple[Tensor, Tensor]:
        inputs = features.square() if non_negative else features
        return inputs, (inputs @ weight.mT + bias[:, None]).softmax(2)

    def distance() -> Tensor:
        inputs, p = outputs()
        wrong = (p - logits.softmax(1)) / num_examples
        apart = (wrong.mT @ inputs - target).square().sum((1, 2))
        if biased:
            apart = apart + (wrong.sum(1) - slope).square().sum(1)
        return (apart / size).mean()

    def closure() -> float:
        optimizer.zero_grad()
        value = distance()
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        counts = logits.softmax(1).sum(0) if not biased else num_examples * (outputs()[1].mean(1) - slope).mean(0)
    if not counts.isfinite().all():
        raise AttackError("label optimisation diverged; recover labels by the rule for biases, or grant them")
    return spelled_out(apportioned(counts, num_examples))


RULES: Mapping[str, LabelRule] = {
    "optimisation": label_optimisation,
    "bias": bias_rule,
    "column": column_rule,
}
"""How labels are recovered from gradients that were sent, by name."""


def _by_bias(layers: Sequence[LastLayer], num_examples: int) -> tuple[Tensor, Tensor]:
    """Counts a class, and `round class feature`: the feature vector that stands for each class.

    Row c of the weights' gradient is sum_i (p_ic - y_ic) x_i / b. With one vector x_k a class that is
    sum_k (n_k / b) p_kc x_k - (n_c / b) x_c, which is solved for x_c with p and n as they were.
    """
    for layer in layers:
        if layer.bias is None or layer.bias_gradient is None:
            raise KnowledgeError(
                "the last linear layer has no bias to count labels by; recover them by optimisation, or grant them "
                "with adversary.knowledge.labels = true, and set align = false"
            )
    weight, bias, target, slope = (
        torch.stack([getattr(layer, name) for layer in layers])
        for name in ("weight", "bias", "weight_gradient", "bias_gradient")
    )
    mixture = _mixture(target, slope)
    features = mixture.expand_as(target)
    p = (mixture @ weight.mT + bias[:, None]).softmax(2).squeeze(1)
    for _ in range(_TURNS):
        counts = apportioned(num_examples * (p - slope).mean(0), num_examples)
        share = (counts / num_examples)[None, :, None]
        of_class = (features @ weight.mT + bias[:, None]).softmax(2)
        solved = ((share * of_class).mT @ features - target) / share.clamp_min(1 / num_examples)
        features = torch.where(share > 0, solved, mixture)
        p = (share * (features @ weight.mT + bias[:, None]).softmax(2)).sum(1)
    return apportioned(num_examples * (p - slope).mean(0), num_examples), features


def _mixture(target: Tensor, slope: Tensor) -> Tensor:
    """`round 1 feature`, a mean of the features: rows of classes that mostly do not occur are sum_i p_ic x_i / b."""
    positive = slope.clamp_min(0)
    mixture = (target * (slope > 0)[..., None]).sum(1) / positive.sum(1, keepdim=True).clamp_min(1e-12)
    return mixture[:, None]
