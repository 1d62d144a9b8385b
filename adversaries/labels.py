"""Label recovery: how often each class occurs in the victim's data, read off the last layer.

`count_labels` reads an update of any number of steps. The rules of `RULES` read gradients that were sent, one or
several of the same mini-batch, and take no data to do it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.scene import Scene, known_steps
from fedsim.attack import Knowledge
from fedsim.errors import AttackError, KnowledgeError, RunError, TranscriptError
from fedsim.messages import State, Update, by_name
from fedsim.training import LocalTraining, local_update

log = logging.getLogger("fedsim." + __name__)

_PROBES = 512
_TURNS = 20
_SIMULATED_STEPS = 1000
_GROWN = 2.0  # features of noise that grow or shrink by more do not stay as they are
_UNEXPLAINED = 0.5  # share of the movement of the bias that a simulation may leave over
_TRAININGS = 4  # of a copy of the model
_SHORT = 1.0  # learning rate x local steps up to which noise counts better than simulations of noise correct
_LEAST_PART = 0.02  # of the movement by the slope at w_0, to divide by
_LONG = 2.0  # learning rate x local steps from which counts were found to come near to guessing
_STEADY = 0.1  # where what the model makes of noise changed by less (total variation), noise stands in for data

_REMEDY = "grant them with adversary.knowledge.labels = true, and set align = false where there is such a setting"


@torch.no_grad()
def count_labels(
    update: Update, knowledge: Knowledge, model: nn.Module, before: State, after: State, rng: torch.Generator
) -> Tensor:
    """Count labels from the last linear layer of a FedAvg update of any number of steps.

    With cross-entropy, the mean gradient of that layer's bias over N examples is p_c - n_c / N, where p is
    the mean softmax output and n_c the number of examples of class c. So over a round the bias moves
    by -s (p_c - n_c / N), with s = learning rate x local steps and p averaged along the way. A first p
    is that of noise inputs, averaged over both ends of the round. With many steps at a large rate noise no longer
    stands in for data: p then comes of simulating the layer's training (`_by_simulation`) or, where layers below
    changed the features too, that of the whole model (`_by_trained_copy`). Where neither explains the update, or
    training was long enough to fit the client's data, a warning says that counts may come near to guessing
    (`benchmarks/label_counts.py`). Where the learning rate, E and B are withheld, nothing is simulated, and s is read
    off a class that does not occur, for which the ratio of movement to p is largest; so at least one class must be
    absent then. A gradient that was sent is that of one step at w_0 and is read as it is: there s is 1 and p that at
    w_0.

    Args:
        before: w_0 under the names of `model`'s parameters.
        after: w_T likewise; not read where a gradient was sent.

    Returns:
        `example`, N labels in ascending order.

    Raises:
        KnowledgeError: the model has no final linear layer with a bias for each class, or no classes.

    References:
        Dimitrov et al.: Data Leakage in Federated Averaging, TMLR 2022; Geng et al.:
        Towards General Deep Leakage in Federated Learning, 2021. Differs: counts by the bias instead of
        the weights. Chen and Vikalo: Recovering Labels from Local Updates in Federated Learning, ICML 2024, for how
        sure the model is of each class, simulated over the steps. Differs: see `_by_simulation`.
        Assumes SGD, with momentum where that is granted; with Adam counts are rougher.
    """
    probes = _probes(model, knowledge, rng)
    name = _last_bias(model, probes)
    if update.gradient is not None:
        slope = _sent_gradient(update, model)[name].double().cpu()
        return _spelled_out(_counts(_seen(model, name, before, probes)[0] - slope, update.num_examples))
    moved = (before[name] - after[name]).double().cpu()
    if not model.get_parameter(name).requires_grad and not moved.any():
        raise _untrained(name)
    (first, start), (q, end) = (_seen(model, name, weights, probes) for weights in (before, after))
    p = (first + q) / 2
    known = _steps_times_rate(update.num_examples, knowledge)
    scale = known or (moved / p.clamp_min(1e-12)).max().item()
    if not scale > 0:
        scale = moved.abs().max().item() or 1.0
    shares, count = p - moved / scale, update.num_examples
    steps = known_steps(knowledge, count)
    if not (known and steps):
        return _spelled_out(_counts(shares, count))
    layer = _moved_layer(name, before, after, scale, non_negative=bool((start >= 0).all()))
    found = None
    if _GROWN > end.norm() / start.norm().clamp_min(1e-12) > 1 / _GROWN:
        found = _by_simulation(layer, shares, ((start + end) / 2).mean(0), count, steps, scale)
    labels, cause = _spelled_out(_counts(shares if found is None else found, count)), ""
    steady = (q - first).abs().sum() / 2 <= _STEADY
    if not steady and scale > _LONG:
        cause = f"learning rate x local steps is {scale:.3g}, long enough to fit its data"
    if not steady and found is None:
        slope = moved / scale
        labels, unexplained = _by_trained_copy(model, update, before, slope, name, labels, first, probes, knowledge)
        if unexplained > _UNEXPLAINED:
            cause = "training that is simulated with the labels that were counted does not explain the update"
    if cause:
        log.warning("round %d, client %d: %s; counts may come near to guessing", update.round, update.client, cause)
    return labels


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


def _by_simulation(
    layer: LastLayer, first: Tensor, noise: Tensor, num_examples: int, steps: int, scale: float
) -> Tensor | None:
    """Shares of the classes with which simulated training of the last layer moves it as it was seen to move.

    One feature vector x_k stands for each class. Training from w_0 with shares n_k / N and these vectors shows how
    sure of class c the model is about examples of class k, p_kc, on average over the steps. The mean gradients of bias
    and weights, sum_k (n_k / N) p_kc - n_c / N and sum_k (n_k / N) p_kc x_k - (n_c / N) x_c, then give shares and
    vectors, and all that is done in turn. Assumes SGD with whole batches, and vectors that stay as they are.

    Args:
        layer: at w_0, with gradients that are means over the steps.
        first: shares to start from, as `_counts` takes them.
        noise: `feature`, of noise; the vectors start there where every class occurs.
        scale: learning rate x local steps.

    Returns:
        `class`; None where the simulation, with the shares it found, moves the bias otherwise than it moved.

    References:
        Chen and Vikalo: Recovering Labels from Local Updates in Federated Learning, ICML 2024. Differs: reads the
        vectors off the update, where the paper has an auxiliary data set, simulates each step of the layer, where it
        draws logits for each epoch, and does not leave the layer's weights out.
    """
    assert layer.bias_gradient is not None
    slope, target = layer.bias_gradient, layer.weight_gradient
    steps = min(steps, _SIMULATED_STEPS)
    share = _shares(first)
    features = _of_absent(layer, share, noise, num_examples).expand_as(target)
    for _ in range(_TURNS):
        sure = _sureness(layer, features, share, steps, scale / steps)
        simulated = share @ sure - share
        share = (share + _shares(share @ sure - slope)) / 2
        solved = ((share[:, None] * sure).mT @ features - target) / share[:, None].clamp_min(1 / num_examples)
        if layer.non_negative:
            solved = solved.clamp_min(0)
        counted = share[:, None] > 0.5 / num_examples
        features = torch.where(counted, solved, _of_absent(layer, share, noise, num_examples))
    return share if (simulated - slope).norm() <= _UNEXPLAINED * slope.norm() else None


def _by_trained_copy(
    model: nn.Module,
    update: Update,
    before: State,
    slope: Tensor,
    name: str,
    labels: Tensor,
    first: Tensor,
    probes: Tensor,
    knowledge: Knowledge,
) -> tuple[Tensor, float]:
    """The labels with which training the whole model on noise moves the last bias most nearly as it was seen to move.

    A copy is trained from w_0 on noise with the labels so far; where that explains the update, or where a round moves
    little (`_SHORT`), they stay. Else shares of the classes are corrected by 1/a of the difference between the
    movements of the bias, where a is how far it moves in the simulation, as a share of how far the slope at w_0 alone
    would move it; and that in turn.

    Args:
        slope: `class`, how far the bias moved, over learning rate x local steps.
        name: of that bias.
        labels: `example`, to start from.
        first: `class`, the mean softmax output at w_0, of noise.
        probes: noise.

    Returns:
        The labels, and what their simulation leaves over, as a share of the movement that was seen.

    References:
        Chen and Vikalo: Recovering Labels from Local Updates in Federated Learning, ICML 2024. Differs: trains on
        noise, where the paper has an auxiliary data set, and reads the movement of the bias alone.
    """
    count = update.num_examples
    steps, rate = known_steps(knowledge, count), knowledge.learning_rate
    if steps is None or rate is None or steps > _SIMULATED_STEPS:
        return labels, float("inf")
    plan = LocalTraining(
        local_epochs=knowledge.local_epochs if knowledge.local_steps is None else None,
        local_steps=knowledge.local_steps,
        batch_size=knowledge.batch_size or count,
        learning_rate=rate,
        momentum=knowledge.momentum or 0.0,
        weight_decay=knowledge.weight_decay or 0.0,
        proximal_mu=knowledge.proximal_mu or 0.0,
    )
    scale, own = _steps_times_rate(count, knowledge) or 1.0, deepcopy(model)
    inputs, key = probes[torch.arange(count) % len(probes)], (update.round, update.client)
    tried: list[tuple[float, Tensor]] = []
    for _ in range(_TRAININGS if scale > _SHORT else 1):
        try:
            with torch.enable_grad():
                end, _ = local_update(own, before, inputs, labels.to(inputs.device), plan, key=key)
        except RunError:  # it diverged, or BatchNorm got one example
            tried.append((float("inf"), labels))
            break
        share = labels.bincount(minlength=len(slope)).double() / count
        simulated = (before[name] - end[name]).double().cpu() / scale
        tried.append((((simulated - slope).norm() / slope.norm().clamp_min(1e-12)).item(), labels))
        if tried[0][0] <= _UNEXPLAINED:
            break
        away = first - share
        part = (simulated @ away / (away @ away).clamp_min(1e-12)).clamp(_LEAST_PART, 1)
        labels = _spelled_out(_counts(share + (simulated - slope) / part, count))
    unexplained, labels = min(tried, key=lambda one: one[0])
    return labels, unexplained


def _sureness(layer: LastLayer, features: Tensor, share: Tensor, steps: int, rate: float) -> Tensor:
    """`class class`: the softmax output of each class's vector, averaged over simulated steps; 0 for absent classes."""
    assert layer.bias is not None
    there = share > 0
    weight, bias, inputs, part = layer.weight, layer.bias, features[there], share[there, None]
    labels, total = torch.diag(share)[there], torch.zeros_like(share).repeat(len(inputs), 1)
    for _ in range(steps):
        p = (inputs @ weight.mT + bias).softmax(1)
        total += p
        wrong = part * p - labels
        weight, bias = weight - rate * wrong.mT @ inputs, bias - rate * wrong.sum(0)
    return torch.zeros_like(share).repeat(len(share), 1).index_put((there,), total / steps)


def _of_absent(layer: LastLayer, share: Tensor, noise: Tensor, num_examples: int) -> Tensor:
    """The mean feature vector: what the rows of classes that do not occur moved along; that of noise where all do."""
    assert layer.bias_gradient is not None
    absent = (_counts(share, num_examples) == 0) & (layer.bias_gradient > 0)
    if not absent.any():
        return noise
    return layer.weight_gradient[absent].sum(0) / layer.bias_gradient[absent].sum()


def _moved_layer(name: str, before: State, after: State, scale: float, *, non_negative: bool) -> LastLayer:
    """The last linear layer at w_0, and its movement over `scale` for its gradient."""
    weight, bias = (f"{name.removesuffix('bias')}{kind}" for kind in ("weight", "bias"))
    start, end = ([state[key].double().cpu() for key in (weight, bias)] for state in (before, after))
    return LastLayer(
        weight=start[0],
        bias=start[1],
        weight_gradient=(start[0] - end[0]) / scale,
        bias_gradient=(start[1] - end[1]) / scale,
        non_negative=non_negative,
    )


def _shares(parts: Tensor) -> Tensor:
    """`parts` above 0, as shares of their sum; equal ones where none is."""
    positive = parts.clamp_min(0)
    return positive / positive.sum() if positive.any() else torch.full_like(parts, 1 / len(parts))


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


def _seen(model: nn.Module, name: str, state: State, probes: Tensor) -> tuple[Tensor, Tensor]:
    """`class`, the mean softmax output, and `example feature`, what goes into the last layer, whose bias is `name`."""
    inputs: list[Tensor] = []
    layer = model.get_submodule(name.rpartition(".")[0])
    hook = layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    try:
        logits: Tensor = functional_call(model, dict(state), (probes,))
    finally:
        hook.remove()
    return logits.double().softmax(1).mean(0).cpu(), inputs[-1].double().cpu()


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
