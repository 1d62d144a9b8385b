"""Attack on one update that is in memory, without a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from math import inf
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.api.granted_records import check_records, drop_overlap
from fedsim.base.errors import AttackCrash, ConfigError, FedsimError, did_you_mean, error_reason, first_line, one_line
from fedsim.base.files import temporary_folder
from fedsim.base.loss_term import add_model_term, describe_undeclared_term
from fedsim.base.progress import ProgressListener, listen_to_progress
from fedsim.base.randomness import generator, serialize_calls, use_one_thread
from fedsim.base.task import goal_of, sort_targets
from fedsim.interfaces.attack import Attack, Target, check_subject
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.findings import Finding
from fedsim.interfaces.knowledge import (
    FACTS,
    Knowledge,
    KnownCandidates,
    KnownRows,
    PartialRecords,
    PropertyRecords,
    Records,
)
from fedsim.plugins import registry
from fedsim.plugins.frozen import to_plain_value
from fedsim.recording.payloads import WORKING_TYPE, Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update, describe_misfit, non_finite_names
from fedsim.training.model_state import copy_state, running_statistics
from fedsim.training.models.checks import lazy_layer_complaint

_OBJECT_FACTS: Mapping[str, tuple[type, str]] = {
    "private_parts": (dict, "a dict of tensors by name"),
    "labels": (Tensor, "a tensor of one label for each example"),
    "noise_covariance": (Tensor, "a tensor of rounds by rounds"),
    "records": (Records, "fedsim.interfaces.knowledge.Records"),
    "candidates": (Records, "fedsim.interfaces.knowledge.Records"),
    "known_candidates": (KnownCandidates, "fedsim.interfaces.knowledge.KnownCandidates"),
    "known_rows": (KnownRows, "fedsim.interfaces.knowledge.KnownRows"),
    "auxiliary": (Records, "fedsim.interfaces.knowledge.Records"),
    "property_records": (PropertyRecords, "fedsim.interfaces.knowledge.PropertyRecords"),
    "partial_records": (PartialRecords, "fedsim.interfaces.knowledge.PartialRecords"),
}
"""Facts that are neither numbers nor texts: their type, and its description in error messages."""


@serialize_calls
def attack(
    before: State | nn.Module,
    after: State | nn.Module,
    *,
    model: nn.Module,
    num_examples: int,
    attack: str | Attack = "sme",
    settings: Mapping[str, Any] | None = None,
    value_range: tuple[Any, Any] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    seed: int = 0,
    progress: ProgressListener | None = None,
    **knowledge: Any,
) -> Finding:
    """Attack one client: reconstruct its examples from the model that it received and the model that it returned.

    Args:
        before: w_t, the state that the server sent, by names of parameters; or a network that has it.
        after: w_T, the state that the client returned.
        model: a network of the attacked architecture; it is copied, and its weights are not used.
        num_examples: N, how many examples the client trained on.
        attack: a registered name, `module:Class`, or an instance of `Attack`.
        settings: of the attack; those that are left out have their defaults.
        value_range: lowest and highest value of an input, one pair or one value a channel.
        loss: what the client minimised, `(logits, labels) -> mean loss`.
        seed: of the attack's random start.
        progress: called as `progress(what, done, total)`.
        **knowledge: what else the adversary knows, by the names of `fedsim.Knowledge`: `input_shape`, `num_classes`,
            `learning_rate`, `local_epochs`, `batch_size`, `labels` ... Auxiliary records that are equal to one of the
            client's `records`, or to a known candidate that is one, are left out with a warning.

    Raises:
        ConfigError: a value does not fit the model, or cannot be known; nothing was attacked.
        KnowledgeError: the attack needs to know more.
        AttackError: the attack failed.
    """
    # Check what the caller gives.
    facts = _check_knowledge(knowledge)
    if (
        not isinstance(num_examples := to_plain_value(num_examples), int)
        or isinstance(num_examples, bool)
        or num_examples < 1
    ):
        raise ConfigError(f"attack: num_examples: expected a whole number of at least 1, got {num_examples!r}")
    if not callable(loss):
        raise ConfigError(f"attack: loss: expected a function of outputs and labels, got {type(loss).__name__}")
    network = _copy_model(model).to(WORKING_TYPE)
    broadcast = _checked_state("before", before, network)
    returned = _checked_state("after", after, network, statistics=not running_statistics(network).isdisjoint(broadcast))
    built = _build_attack(attack, settings or {})
    check_subject(built.title, built)
    goal = goal_of(loss)
    classes = {} if goal == "masks" else _infer_classes(network, facts, texts=built.subject == "texts")
    facts |= classes if goal == "classes" else {}
    facts["value_range"] = value_bounds(value_range, "attack")
    facts = drop_overlap(check_records(facts, goal))
    # What the adversary knows, and what the server saw.
    granted = Knowledge(
        model=lambda: deepcopy(network),
        loss=add_model_term(loss, network),
        **facts,
    )
    update = Update(
        round=1, client=0, before=broadcast, payload=Payload.from_dense(returned, "weights"), num_examples=num_examples
    )
    with temporary_folder() as folder, listen_to_progress(progress), use_one_thread():
        Recorder(folder).write(1, [update])

        def follow(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
            if progress is not None:
                progress(built.title, iteration, iterations)

        try:
            target = Target(transcript=Transcript(folder), victim=0, knowledge=granted, rng=generator(seed, "attack"))
            return built.run(target, follow)
        except FedsimError:
            raise
        except Exception as error:  # the attack, the model and the loss may be anybody's code
            raise AttackCrash(f"attack: {built.title}: {one_line(error_reason(error))}") from error


def _check_knowledge(knowledge: Mapping[str, Any]) -> dict[str, Any]:
    """Return `knowledge` as attacks read it: sequences are tuples, and labels are in ascending order."""
    checked: dict[str, Any] = {}
    for name, value in knowledge.items():
        if name not in FACTS:
            raise ConfigError(f"attack: '{name}' is nothing that can be known, {did_you_mean(name, FACTS)}")
        fact = FACTS[name]
        plain_value: Any = (
            tuple(map(to_plain_value, value)) if isinstance(value, list | tuple) else to_plain_value(value)
        )
        if plain_value is None:
            continue
        if name in _OBJECT_FACTS:
            kind, expected = _OBJECT_FACTS[name]
            fits = isinstance(plain_value, kind)
        elif name == "defenses":
            expected = "a list of objects of fedsim.Defense, in the order in which the client applies them"
            fits = isinstance(plain_value, tuple) and all(isinstance(item, Defense) for item in plain_value)
        elif kinds := get_args(fact.value_type):  # a list of numbers
            expected = fact.expected
            numbers = isinstance(plain_value, tuple) and all(type(item) in (int, *kinds) for item in plain_value)
            fits = numbers and fact.is_valid(plain_value)
        else:
            fits, expected = fact.accepts(plain_value), fact.expected
        if not fits:
            raise ConfigError(f"attack: {name}: expected {expected}, got {one_line(repr(value))}")
        checked[name] = sort_targets(plain_value) if name == "labels" else plain_value
    return checked


def _copy_model(model: object) -> nn.Module:
    """Copy the network, which the caller may go on using."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attack: model: expected a torch.nn.Module, got {type(model).__name__}")
    if complaint := lazy_layer_complaint(model):
        raise ConfigError(f"attack: model: {complaint}")
    if not any(True for _ in model.parameters()):
        raise ConfigError(f"attack: model: this {type(model).__name__} has no weights; hand over the attacked network")
    try:
        return deepcopy(model)
    except Exception as error:  # anybody's network
        raise ConfigError(f"attack: model: cannot be copied ({first_line(error)})") from error


def _build_attack(attack: str | Attack, settings: Mapping[str, Any]) -> Attack:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"attack: settings: expected a dict of names and values, got {type(settings).__name__}")
    if isinstance(attack, str):
        built: Attack = registry.build("attacks", attack, settings, "attack").with_title(attack)
        return built
    if not isinstance(attack, Attack):
        raise ConfigError(f"attack: expected a name or an instance of fedsim.Attack, got {type(attack).__name__}")
    if settings:
        raise ConfigError(
            f"attack: settings: '{next(iter(settings))}' is named, but the attack is an object, which has "
            "its settings already"
        )
    return attack


def _checked_state(
    role: str, state_or_model: State | nn.Module, network: nn.Module, *, statistics: bool | None = None
) -> dict[str, Tensor]:
    """Copy a state, with the names of `network`.

    Args:
        state_or_model: the state, or a network that has it.
        statistics: whether the running statistics of BatchNorm layers are part of it; None where they may be or not.
    """
    state = copy_state(state_or_model) if isinstance(state_or_model, nn.Module) else state_or_model
    if not isinstance(state, Mapping):
        raise ConfigError(f"attack: {role}: expected a state dict or a network, got {type(state_or_model).__name__}")
    state = {
        name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    if statistics is None:
        statistics = not running_statistics(network).isdisjoint(state)
    expected = copy_state(network, statistics=statistics)
    if missing := [name for name in expected if name not in state]:
        raise ConfigError(f"attack: {role}: has no '{missing[0]}', which the model has; hand over states of this model")
    if unexpected := [name for name in state if name not in expected]:
        raise ConfigError(
            f"attack: {role}: has '{unexpected[0]}', which the model lacks; hand over states of this model"
        )
    if mismatch := describe_misfit(expected, state):
        raise ConfigError(f"attack: {role}: {mismatch.removeprefix('it sent ')}; hand over states of this model")
    if not_finite := non_finite_names(state):
        raise ConfigError(f"attack: {role}: '{not_finite[0]}' holds NaN or infinite values")
    return {name: state[name].detach().cpu().clone() for name in expected}


def _infer_classes(network: nn.Module, facts: Mapping[str, Any], *, texts: bool) -> dict[str, int]:
    """Return the number of classes, if it is not given and the model has several outputs."""
    if (shape := facts.get("input_shape")) is None:
        return {}
    outputs, classes = _num_outputs(network, shape, texts=texts), facts.get("num_classes")
    if classes is not None and classes > outputs:
        raise ConfigError(f"attack: num_classes: expected at most the {outputs} outputs of the model, got {classes}")
    return {"num_classes": outputs} if classes is None and outputs > 1 else {}


def _num_outputs(network: nn.Module, shape: tuple[int, ...], *, texts: bool) -> int:
    """Count the numbers that the network gives for one example of this shape."""
    dtype = torch.long if texts else next(network.parameters()).dtype
    try:
        with torch.no_grad():
            logits = deepcopy(network).cpu().eval()(torch.zeros(1, *shape, dtype=dtype))
    except Exception as error:  # anybody's network
        raise ConfigError(
            f"attack: input_shape: the model does not take {'texts' if texts else 'inputs'} of shape {shape} "
            f"({first_line(error)})"
        ) from error
    if complaint := describe_undeclared_term(network, logits):
        raise ConfigError(f"attack: model: it {complaint}")
    if not isinstance(logits, Tensor) or logits.ndim not in (1, 2) or len(logits) != 1:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ConfigError(f"attack: model: expected one row of outputs for one example, got {got}")
    return int(logits.numel())


def value_bounds(value_range: tuple[Any, Any] | None, where: str) -> tuple[list[float], list[float]] | None:
    """Return lowest and highest values, one for each channel or one for all."""
    if value_range is None:
        return None
    try:
        low, high = (
            [float(value) for value in (end if isinstance(end, list | tuple) else [end])] for end in value_range
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: value_range: expected (lowest, highest), got {value_range!r}") from error
    if len(low) != len(high) or not all(-inf < a < b < inf for a, b in zip(low, high, strict=True)):
        raise ConfigError(
            f"{where}: value_range: expected the lowest below the highest value, both finite, got {value_range!r}"
        )
    return low, high
