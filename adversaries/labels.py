"""Label recovery: how often each class occurs in the victim's data, read off the last layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adversaries.scene import Scene, known_steps
from fedsim.attack import Knowledge
from fedsim.errors import AttackError, KnowledgeError, TranscriptError
from fedsim.messages import State, Update, by_name

_PROBES = 512


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
    largest; so at least one class must be absent then. A gradient that was sent is that of one step at w_0
    and is read as it is: there s is 1 and p that at w_0.

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
        Assumes plain SGD; with momentum or Adam counts are rougher (0.93 and 0.77 of the labels where
        SGD gave 0.97, three victims of the quickstart).
    """
    name = _last_bias(model)
    if update.gradient is None:
        moved = (before[name] - after[name]).double().cpu()
        ends = [_mean_softmax(model, state, knowledge, rng, len(moved)) for state in (before, after)]
        p = (ends[0] + ends[1]) / 2
        scale = _steps_times_rate(update.num_examples, knowledge) or (moved / p.clamp_min(1e-12)).max().item()
    else:
        moved = _sent_gradient(update, model)[name].double().cpu()
        p, scale = _mean_softmax(model, before, knowledge, rng, len(moved)), 1.0
    if not scale > 0:
        scale = moved.abs().max().item() or 1.0
    share = (p - moved / scale).clamp_min(0)
    counts = _round_to_sum(share / share.sum().clamp_min(1e-12) * update.num_examples, update.num_examples)
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def sign_rule(scene: Scene) -> Tensor:
    """The label of a single example: the class whose logit the last layer's bias moved up after one step.

    With cross-entropy the gradient of that bias is p - onehot(y), negative for the true class alone.

    Raises:
        AttackError: there is more than one example.
        KnowledgeError: the model has no final linear layer with a bias for each class, or no classes.

    References:
        Zhao et al.: iDLG, 2020, for the bias (the paper's weights need features of one sign).
    """
    if scene.num_examples != 1:
        raise AttackError(
            f"idlg reads the label of one example from signs, N is {scene.num_examples}; grant the labels or "
            "choose another attack"
        )
    return scene.direction[scene.names.index(_last_bias(scene.model))].argmin().reshape(1)


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


def _last_bias(model: nn.Module) -> str:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layer = model.get_submodule(linear[-1]) if linear else None
    if layer is None or layer.bias is None:
        raise KnowledgeError(
            "labels are withheld and cannot be recovered: the model has no final linear layer with a bias; "
            "grant them with adversary.knowledge.labels = true"
        )
    if layer.out_features == 1:
        raise KnowledgeError(
            "labels are withheld and are targets of a regression, which nothing gives away; "
            "grant them with adversary.knowledge.labels = true"
        )
    return f"{linear[-1]}.bias".removeprefix(".")


def _mean_softmax(model: nn.Module, state: State, knowledge: Knowledge, rng: torch.Generator, classes: int) -> Tensor:
    assert knowledge.input_shape is not None
    assert knowledge.value_range is not None
    axes = [-1] + [1] * (len(knowledge.input_shape) - 1)
    low, high = (torch.as_tensor(end).reshape(axes) for end in knowledge.value_range)
    probes = low + (high - low) * torch.rand((_PROBES, *knowledge.input_shape), generator=rng)
    logits: Tensor = functional_call(model, dict(state), (probes.to(next(iter(state.values()))),))
    if logits.shape != (_PROBES, classes):
        raise KnowledgeError(
            f"labels are withheld and cannot be recovered: the model's last linear layer gives {classes} numbers, "
            f"the model {tuple(logits.shape[1:])}; grant them with adversary.knowledge.labels = true"
        )
    return logits.double().softmax(1).mean(0).cpu()


def _steps_times_rate(num_examples: int, knowledge: Knowledge) -> float | None:
    steps = known_steps(knowledge, num_examples)
    return None if steps is None or knowledge.learning_rate is None else knowledge.learning_rate * steps


def _round_to_sum(counts: Tensor, total: int) -> Tensor:
    """Round down, then hand what is left to the largest remainders."""
    floor = counts.floor().long()
    left = total - int(floor.sum())
    floor[(counts - floor).argsort(descending=True)[:left]] += 1
    return floor
