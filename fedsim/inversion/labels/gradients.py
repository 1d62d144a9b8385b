"""Label recovery from gradients that were sent, of one mini-batch; the rules need no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.inversion.labels.last_layer import (
    LastLayer,
    apportion_counts,
    expand_counts,
    last_bias_name,
    untrained_layer_error,
)
from fedsim.inversion.labels.logit_gradient import logit_gradient
from fedsim.inversion.problem import InversionProblem
from fedsim.training.optimizers import LBFGS

_BIAS_RULE_STEPS, _MAX_LBFGS_ITERATIONS = 20, 100


def sign_rule(problem: InversionProblem, dummy: Tensor) -> Tensor:
    """Recover the label of a single example from the signs of the last bias's gradient.

    With the cross-entropy that gradient is p - onehot(y), negative for the true class only; class
    weights and sums change its size, not its signs.

    Args:
        problem: the inversion problem, of one example and one step.
        dummy: `example ...`, standardised, any data that the model takes.

    Returns:
        `example`, one label.

    References:
        [Zhao2020], for the bias (the paper's weights need features of one sign).
    """
    check_single_example(problem.num_examples, problem.where)
    name = last_bias_name(problem.model, problem.scaling.to_model(dummy))
    if name not in problem.parameter_names:
        raise untrained_layer_error(name)
    classes = len(problem.model.get_parameter(name))
    form = logit_gradient(problem.loss, classes, problem.before[0].device)
    if not torch.equal(form.targets.argmax(1), torch.arange(len(form.targets))):
        raise KnowledgeError(f"{problem.where}: the loss that clients minimise does not move the true class most")
    return problem.direction[problem.parameter_names.index(name)].argmin().reshape(1)


def check_single_example(num_examples: int, where: str) -> None:
    """Raise AttackError unless the sign rule finds all labels."""
    if num_examples != 1:
        raise AttackError(
            f"{where}: the label of one example is read from signs, N is {num_examples}; grant the labels or choose "
            "another attack"
        )


LabelRule = Callable[[Sequence[LastLayer], int, torch.Generator], Tensor]
"""`(last layers of gradients of one mini-batch, its size, rng) -> labels in ascending order`."""


def column_rule(layers: Sequence[LastLayer], num_examples: int, rng: torch.Generator) -> Tensor:
    """Return the b classes with the smallest entries in their rows of the last layer's gradient.

    Assumes that no label repeats (those that do are missed, and others claimed), that the layer's
    inputs are not negative, as after a ReLU, and that the size of the mini-batch is known. Needs no
    bias.

    Args:
        layers: of one or more gradients of the same mini-batch.
        num_examples: b.
        rng: not used.

    References:
        [Yin2021], Sect. 3.2. Differs: takes the mean of several gradients.
    """
    smallest = torch.stack([layer.weight_gradient.min(1).values for layer in layers]).mean(0)
    check_distinct_labels(num_examples, len(smallest))
    return smallest.argsort()[:num_examples].sort().values


def check_distinct_labels(num_examples: int, classes: int) -> None:
    """Raise AttackError unless the column rule can find all labels."""
    if num_examples > classes:
        raise AttackError(
            f"the column rule finds each class once, N = {num_examples} is more than {classes} classes; recover labels "
            "by optimisation"
        )


def bias_rule(layers: Sequence[LastLayer], num_examples: int, rng: torch.Generator) -> Tensor:
    """Count labels by n_c = b (p_c - g_c) from the gradient g of the last layer's bias.

    The counts are exact except for p, the mean softmax output of the mini-batch. It is computed
    from one feature vector for each class; these follow from the counts and the weights' gradient,
    so both are improved alternately. Several gradients of one mini-batch are averaged. Assumes the
    cross-entropy, a bias, and that the size of the mini-batch is known. Labels may repeat.

    Args:
        layers: of one or more gradients of the same mini-batch.
        num_examples: b.
        rng: not used.
    """
    return expand_counts(_count_by_bias(layers, num_examples))


def label_optimisation(layers: Sequence[LastLayer], num_examples: int, rng: torch.Generator) -> Tensor:
    """Optimise dummy labels and dummy features until the last layer's gradient is the recorded one.

    1. Minimise the squared distance between the last layer's gradient of dummy features with dummy
       labels and the recorded one, over both (Eq. 16), by L-BFGS with a strong Wolfe line search.
       The labels are shared by all gradients of the mini-batch; the features are not, because those
       of later gradients come from other weights.
    2. Count labels. With a bias, the counts are n_c = b (p_c - g_c) of its gradient g, where p is
       the mean softmax output of the dummy features; else the sums of the dummy labels.
    3. Round the counts to integers that sum to b.

    If the layer's inputs are not below 0, dummy features are squares; with a bias, they start at
    the size that the gradient shows. Assumes the cross-entropy, and that the size of the mini-batch
    is known. Labels may repeat.

    Args:
        layers: of one or more gradients of the same mini-batch.
        num_examples: b.

    Returns:
        `example`, labels in ascending order.

    References:
        [Li2023b], Eq. 16, App. B.1.
        Differs: the distance is divided by the recorded gradient's squared norm, the gradient of
        the bias takes part in it, and the counts are read off that if there is one.
    """
    weight = torch.stack([layer.weight for layer in layers])
    weight_gradient = torch.stack([layer.weight_gradient for layer in layers])
    biases = _stack_biases(layers)
    bias, bias_gradient = biases or (weight.new_zeros(weight.shape[:2]),) * 2
    non_negative = all(layer.non_negative for layer in layers)
    squared_norms = weight_gradient.square().sum((1, 2)) + bias_gradient.square().sum(1)
    squared_norms = torch.where(squared_norms > 0, squared_norms, 1)
    # Draw the dummy features, at the size that the gradient shows, and the dummy labels.
    rounds, classes, width = weight.shape
    scale = weight.new_ones(1)
    if biases:
        mean_features = _mean_features(weight_gradient, bias_gradient)
        scale = mean_features.square().mean((1, 2), keepdim=True).sqrt()
    scale = torch.where(scale > 0, scale, 1)
    noise = torch.randn((rounds, num_examples, width), generator=rng).to(weight)
    features = noise.mul(scale.sqrt() if non_negative else scale).requires_grad_(True)
    logits = torch.randn((num_examples, classes), generator=rng).to(weight).requires_grad_(True)
    optimizer = LBFGS(
        [features, logits],
        max_iter=_MAX_LBFGS_ITERATIONS,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_change=1e-12,
    )

    def outputs() -> tuple[Tensor, Tensor]:
        inputs = features.square() if non_negative else features
        return inputs, (inputs @ weight.mT + bias[:, None]).softmax(2)

    def distance() -> Tensor:
        inputs, p = outputs()
        logit_gradients = (p - logits.softmax(1)) / num_examples
        squares = (logit_gradients.mT @ inputs - weight_gradient).square().sum((1, 2))
        if biases:
            squares = squares + (logit_gradients.sum(1) - bias_gradient).square().sum(1)
        return (squares / squared_norms).mean()

    def closure() -> float:
        optimizer.zero_grad()
        value = distance()
        value.backward()
        return value.item()

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    # Count the labels.
    with torch.no_grad():
        p = outputs()[1].mean(1)
        label_sums = logits.softmax(1).sum(0)
        counts = num_examples * (p - bias_gradient).mean(0) if biases else label_sums
    if not counts.isfinite().all():
        raise AttackError("label optimisation diverged; recover labels by the rule for biases, or grant them")
    return expand_counts(apportion_counts(counts, num_examples))


LABEL_RULES: Mapping[str, LabelRule] = {
    "optimisation": label_optimisation,
    "bias": bias_rule,
    "column": column_rule,
}
"""Rules that recover labels from gradients that were sent, by name."""


def _count_by_bias(layers: Sequence[LastLayer], num_examples: int) -> Tensor:
    """Count labels by class, improving counts and feature vectors in turn.

    Row c of the weights' gradient is sum_i (p_ic - y_ic) x_i / b. With one vector x_k for each
    class that is sum_k (n_k / b) p_kc x_k - (n_c / b) x_c, which is solved for x_c with p and n
    fixed.
    """
    biases = _stack_biases(layers)
    if biases is None or len(biases[0]) < len(layers):
        raise KnowledgeError(
            "the last linear layer has no bias to count labels by; recover them by optimisation, "
            "or grant them with adversary.knowledge.labels = true, and set align = false"
        )
    bias, bias_gradient = biases
    weight = torch.stack([layer.weight for layer in layers])
    weight_gradient = torch.stack([layer.weight_gradient for layer in layers])
    mean_features = _mean_features(weight_gradient, bias_gradient)
    features = mean_features.expand_as(weight_gradient)
    p = (mean_features @ weight.mT + bias[:, None]).softmax(2).squeeze(1)
    for _ in range(_BIAS_RULE_STEPS):
        counts = apportion_counts(num_examples * (p - bias_gradient).mean(0), num_examples)
        shares = (counts / num_examples)[None, :, None]
        # Solve for the features of each class.
        class_outputs = (features @ weight.mT + bias[:, None]).softmax(2)
        solved = (shares * class_outputs).mT @ features - weight_gradient
        solved = solved / shares.clamp_min(1 / num_examples)
        features = torch.where(shares > 0, solved, mean_features)
        # Update the mean softmax output.
        p = (shares * (features @ weight.mT + bias[:, None]).softmax(2)).sum(1)
    return apportion_counts(num_examples * (p - bias_gradient).mean(0), num_examples)


def _stack_biases(layers: Sequence[LastLayer]) -> tuple[Tensor, Tensor] | None:
    """Return the biases and their gradients, `round class`, of the layers that have one."""
    biases, gradients = [], []
    for layer in layers:
        if layer.bias is not None and layer.bias_gradient is not None:
            biases.append(layer.bias)
            gradients.append(layer.bias_gradient)
    return (torch.stack(biases), torch.stack(gradients)) if biases else None


def _mean_features(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """Return `round 1 feature`, a weighted mean of the mini-batch's features.

    The rows of classes that mostly do not occur are sum_i p_ic x_i / b.
    """
    positive = bias_gradient.clamp_min(0)
    rows = weight_gradient * (bias_gradient > 0)[..., None]
    mean_features = rows.sum(1) / positive.sum(1, keepdim=True).clamp_min(1e-12)
    return mean_features[:, None]
