"""Label recovery: how often each class occurs in the victim's data, read off the last layer.

`count_labels` reads an update of any number of steps. The rules of `RULES` read gradients that were sent, one or
several of the same mini-batch, and take no data to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.scene import Scene, known_steps
from fedsim.attack import Knowledge
from fedsim.errors import AttackError, KnowledgeError, TranscriptError
from fedsim.messages import State, Update, by_name

_PROBES = 512
_TURNS = 20

_REMEDY = "grant them with adversary.knowledge.labels = true, and set align = false where there is such a setting"


@torch.no_grad()
def count_labels(
    update: Update, knowledge: Knowledge, model: nn.Module, before: State, after: State, rng: torch.Generator
) -> Tensor:
    """Count labels from the bias of the last linear layer of a FedAvg update of any number of steps.

    With cross-entropy, the mean gradient of that bias over N examples is p_c - n_c / N, where p is
    the mean softmax output and n_c the number of examples of class c. So over a round the bias moves
    by -s (p_c - n_c / N), with s = learning rate x local steps and p averaged along the way. Here p
    is that of noise inputs, averaged over both ends of the round. Where the learning rate, E and B
    are withheld, s is read off a class that does not occur, for which the ratio of movement to p is
    largest; so at least one class must be absent then. With many steps at a large rate noise no longer stands in for
    data, and counts come near to guessing (`benchmarks/label_counts.py`). A gradient that was sent is that of one step
    at w_0 and is read as it is: there s is 1 and p that at w_0.

    Args:
        before: w_0 under the names of `model`'s parameters.
        after: w_T likewise; not read where a gradient was sent.

    Returns:
        `example`, N labels in ascending order.

    Raises:
        KnowledgeError: the model has no final linear layer with a bias for each class, or no classes.

    References:
        Dimitrov et al.: Data Leakage in Federated Averaging, TMLR 2022; Geng et al.:
        Towards General Deep Leakage in Federated Learning, 2021. Differs: uses the bias instead of
        the weights, so that it needs no estimate of the penultimate features.
        Assumes SGD, with momentum where that is granted; with Adam counts are rougher.
    """
    probes = _probes(model, knowledge, rng)
    name = _last_bias(model, probes)
    if update.gradient is None:
        moved = (before[name] - after[name]).double().cpu()
        if not model.get_parameter(name).requires_grad and not moved.any():
            raise _untrained(name)
        p = (_mean_softmax(model, before, probes) + _mean_softmax(model, after, probes)) / 2
        scale = _steps_times_rate(update.num_examples, knowledge) or (moved / p.clamp_min(1e-12)).max().item()
    else:
        moved = _sent_gradient(update, model)[name].double().cpu()
        p, scale = _mean_softmax(model, before, probes), 1.0
    if not scale > 0:
        scale = moved.abs().max().item() or 1.0
    return _spelled_out(_counts(p - moved / scale, update.num_examples))


def sign_rule(scene: Scene, dummy: Tensor) -> Tensor:
    """The label of a single example: the class whose logit the last layer's bias moved up after one step.

    With cross-entropy the gradient of that bias is p - onehot(y), negative for the true class alone.

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
    name = _last_bias(scene.model, scene.units.to_model(dummy))
    if name not in scene.names:
        raise _untrained(name)
    return scene.direction[scene.names.index(name)].argmin().reshape(1)


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """The last linear layer of one gradient: what the rules read.

    Attributes:
        weight: `class feature`, at w_t.
        bias: `class`, or None where the layer has none.
        weight_gradient: `class feature`, of the mean loss over the mini-batch.
        bias_gradient: `class`, or None where the layer has no bias.
        non_negative: what goes into the layer is not below 0, as behind a ReLU.
    """

    weight: Tensor
    bias: Tensor | None
    weight_gradient: Tensor
    bias_gradient: Tensor | None
    non_negative: bool = True


LabelRule = Callable[[Sequence[LastLayer], int, torch.Generator], Tensor]
"""`(last layers of gradients of one mini-batch, its size, rng) -> labels in ascending order`."""


def last_layer(scene: Scene, dummy: Tensor) -> LastLayer:
    """The last linear layer of the gradient that a client sent.

    Assumes that the model's outputs go into the cross-entropy as they are.

    Args:
        dummy: `example ...` in standardised units, any data that the model takes: what it makes of them shows which
            layer is the last, and whether features may be below 0.

    Raises:
        KnowledgeError: the model's outputs are not those of a linear layer, or of one for a regression.
    """
    prefix, features = _output_layer(scene.model, scene.units.to_model(dummy))
    own = [place for place, name in enumerate(scene.names) if name.rpartition(".")[0] == prefix]
    if (name := f"{prefix}.weight".removeprefix(".")) not in scene.names:
        raise _untrained(name)
    before, gradient = ([tensors[place].double().cpu() for place in own] for tensors in (scene.before, scene.direction))
    bias = len(own) > 1
    return LastLayer(
        weight=before[0],
        bias=before[1] if bias else None,
        weight_gradient=gradient[0],
        bias_gradient=gradient[1] if bias else None,
        non_negative=bool((features >= 0).all()),
    )


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
    """Counts n_c = b (p_c - g_c), exact but for p, from the gradient g of the last layer's bias.

    p, the mean softmax output of the mini-batch, is that of one feature vector a class; these follow from the counts
    and the weights' gradient, so both are improved in turn. Several gradients of one mini-batch are averaged.
    Assumes cross-entropy, a bias, and the size of the mini-batch. Labels may repeat. Some 20 ms a gradient with
    100 classes, a thirtieth of `label_optimisation`.

    Raises:
        KnowledgeError: the layer has no bias.
    """
    return _spelled_out(_by_bias(layers, num_examples)[0])


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
    gradients of the mini-batch; the features are not, for those of later gradients come from other weights. Labels
    may repeat. Where there is a bias, the counts are n_c = b (p_c - g_c) of its gradient g, where p is the mean
    softmax output of the dummy features; else they are the sums of the dummy labels. They are rounded to integers
    that sum to b. Where the layer's inputs are not below 0, dummy features are squares; where there is a bias, they
    start at the size that the gradient shows, which found 100 % of the labels of a trained ResNet8 where a start at
    size one found 94 to 96 %. Assumes cross-entropy, and the size of the mini-batch.

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
    return _spelled_out(_counts(counts, num_examples))


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
        counts = _counts(num_examples * (p - slope).mean(0), num_examples)
        share = (counts / num_examples)[None, :, None]
        of_class = (features @ weight.mT + bias[:, None]).softmax(2)
        solved = ((share * of_class).mT @ features - target) / share.clamp_min(1 / num_examples)
        features = torch.where(share > 0, solved, mixture)
        p = (share * (features @ weight.mT + bias[:, None]).softmax(2)).sum(1)
    return _counts(num_examples * (p - slope).mean(0), num_examples), features


def _mixture(target: Tensor, slope: Tensor) -> Tensor:
    """`round 1 feature`, a mean of the features: rows of classes that mostly do not occur are sum_i p_ic x_i / b."""
    positive = slope.clamp_min(0)
    mixture = (target * (slope > 0)[..., None]).sum(1) / positive.sum(1, keepdim=True).clamp_min(1e-12)
    return mixture[:, None]


def _counts(counts: Tensor, total: int) -> Tensor:
    """Integers that sum to `total`, in proportion to `counts` where they are above 0.

    Where none is, as noise can bring about, all classes count alike but for the order in which they get what is left.
    """
    positive = counts.clamp_min(0)
    if not positive.any():
        positive = 1 + (counts - counts.max()).softmax(0)
    floor = (positive / positive.sum() * total).floor().long()
    left = total - int(floor.sum())
    rest = positive / positive.sum() * total - floor
    floor[rest.argsort(descending=True, stable=True)[:left]] += 1
    return floor


def _spelled_out(counts: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def _sent_gradient(update: Update, model: nn.Module) -> State:
    """The gradient that was sent, under the names of `model`'s parameters."""
    assert update.gradient is not None
    named = by_name(update.gradient, {name: p.shape for name, p in model.named_parameters()})
    if named is None:
        raise TranscriptError(
            f"round {update.round}, client {update.client}: the recorded gradients are not those of the model; "
            "attack with the model of that federation"
        )
    return named


def _last_bias(model: nn.Module, inputs: Tensor) -> str:
    """Name of the bias of the layer whose outputs are the model's."""
    name = _output_layer(model, inputs)[0]
    if model.get_submodule(name).bias is None:
        raise KnowledgeError(
            "labels are withheld and cannot be counted: the model's last linear layer has no bias; grant them with "
            "adversary.knowledge.labels = true"
        )
    return f"{name}.bias".removeprefix(".")


def _untrained(name: str) -> KnowledgeError:
    return KnowledgeError(f"labels cannot be recovered: {name} of the last linear layer did not move; {_REMEDY}")


@torch.no_grad()
def _output_layer(model: nn.Module, inputs: Tensor) -> tuple[str, Tensor]:
    """Name of the linear layer whose outputs are the model's, and what went into it.

    Args:
        inputs: `example ...`, as the model takes them.
    """
    called: list[tuple[str, nn.Module, tuple[Tensor, ...], Tensor]] = []

    def note(name: str, layer: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        called.append((name, layer, given, made))

    leaves = ((name, layer) for name, layer in model.named_modules() if not any(layer.children()))
    hooks = [layer.register_forward_hook(partial(note, name)) for name, layer in leaves]
    try:
        outputs = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    linear = [call for call in called if isinstance(call[1], nn.Linear)]
    last = next((call for call in reversed(linear) if torch.equal(call[3], outputs)), None)
    if last is None:
        end = "changes what its last linear layer gives" if linear else "has no linear layer"
        if called and not isinstance(called[-1][1], nn.Linear):
            end = f"ends in {type(called[-1][1]).__name__}, not in a linear layer"
        raise KnowledgeError(f"labels cannot be recovered: the model {end}; {_REMEDY}")
    if outputs.ndim < 2 or outputs.shape[1] == 1:
        raise KnowledgeError(
            f"labels cannot be recovered: they are targets of a regression, which nothing gives away; {_REMEDY}"
        )
    return last[0], last[2][0]


def _probes(model: nn.Module, knowledge: Knowledge, rng: torch.Generator) -> Tensor:
    """Uniform noise in the range of inputs, `example ...`."""
    assert knowledge.input_shape is not None
    assert knowledge.value_range is not None
    axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
    low, high = (torch.as_tensor(end).reshape(axes) for end in knowledge.value_range)
    return (low + (high - low) * torch.rand((_PROBES, *knowledge.input_shape), generator=rng)).to(
        next(model.parameters())
    )


def _mean_softmax(model: nn.Module, state: State, probes: Tensor) -> Tensor:
    logits: Tensor = functional_call(model, dict(state), (probes,))
    return logits.double().softmax(1).mean(0).cpu()


def _steps_times_rate(num_examples: int, knowledge: Knowledge) -> float | None:
    """How far a gradient that stays the same moves a weight; None where that is not known, or not how clients step.

    With momentum m the gradient of step i of T moves it by the learning rate times 1 + m + ... + m^(T - i).
    """
    steps, rate, share = known_steps(knowledge, num_examples), knowledge.learning_rate, knowledge.momentum or 0.0
    if steps is None or rate is None or (knowledge.optimizer or "sgd") != "sgd":
        return None
    if not 0 < share < 1:
        return rate * steps
    return rate * (steps - share * (1 - share**steps) / (1 - share)) / (1 - share)
