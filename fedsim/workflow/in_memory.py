"""Attack one update that is in memory, without a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from math import inf
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.attacks import Attack
from fedsim.errors import AttackCrash, ConfigError, FedsimError, did_you_mean, first_line, one_line, what_it_said
from fedsim.files import fresh_folder
from fedsim.findings import Finding
from fedsim.knowledge import FACTS, Knowledge, KnownCandidates, PartialRecords, PropertyRecords, Records
from fedsim.models.checks import unsized
from fedsim.plugins import registry
from fedsim.plugins.frozen import plain
from fedsim.randomness import generator, one_at_a_time, one_thread
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.model_state import state_of, statistics_of
from fedsim.wire.messages import State, Update, misfit, non_finite
from fedsim.wire.payloads import WORKING_TYPE, Payload
from fedsim.workflow.logs import Progress, told
from fedsim.workflow.records import without_twins

_OBJECTS: Mapping[str, tuple[type, str]] = {
    "labels": (Tensor, "a tensor of one label for each example"),
    "records": (Records, "fedsim.knowledge.Records"),
    "candidates": (Records, "fedsim.knowledge.Records"),
    "known_candidates": (KnownCandidates, "fedsim.knowledge.KnownCandidates"),
    "auxiliary": (Records, "fedsim.knowledge.Records"),
    "property_records": (PropertyRecords, "fedsim.knowledge.PropertyRecords"),
    "partial_records": (PartialRecords, "fedsim.knowledge.PartialRecords"),
}
"""Facts that are neither numbers nor texts: their type, and what to say of it."""


@one_at_a_time
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
    progress: Progress | None = None,
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
    known = without_twins(_checked(knowledge))
    if not isinstance(num_examples := plain(num_examples), int) or isinstance(num_examples, bool) or num_examples < 1:
        raise ConfigError(f"attack: num_examples: expected a whole number of at least 1, got {num_examples!r}")
    if not callable(loss):
        raise ConfigError(f"attack: loss: expected a function of outputs and labels, got {type(loss).__name__}")
    network = _copy(model).to(WORKING_TYPE)
    sent = _state("before", before, network)
    returned = _state("after", after, network, statistics=not statistics_of(network).isdisjoint(sent))
    built = _built(attack, settings or {})
    known |= _classes(network, known, texts=built.texts)
    granted = Knowledge(model=lambda: deepcopy(network), loss=loss, value_range=_ends(value_range), **known)
    update = Update(
        round=1, client=0, before=sent, payload=Payload.dense(returned, "weights"), num_examples=num_examples
    )
    with fresh_folder() as folder, told(progress), one_thread():
        Recorder(folder).write(1, [update])

        def follow(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
            if progress is not None:
                progress(built.called, iteration, iterations)

        try:
            return built.run(Transcript(folder), granted, victim=0, rng=generator(seed, "attack"), progress=follow)
        except FedsimError:
            raise
        except Exception as error:  # the attack, the model and the loss may be anybody's code
            raise AttackCrash(f"attack: {built.called}: {one_line(what_it_said(error))}") from error


def _checked(knowledge: Mapping[str, Any]) -> dict[str, Any]:
    """`knowledge` as attacks read it: sequences are tuples, and labels are in ascending order.

    Raises:
        ConfigError: a name is no fact that can be granted, or a value does not fit it.
    """
    found: dict[str, Any] = {}
    for name, given in knowledge.items():
        if name not in FACTS:
            raise ConfigError(f"attack: '{name}' is nothing that can be known, {did_you_mean(name, FACTS)}")
        fact = FACTS[name]
        value: Any = tuple(map(plain, given)) if isinstance(given, list | tuple) else plain(given)
        if value is None:
            continue
        if name in _OBJECTS:
            kind, expected = _OBJECTS[name]
            fits = isinstance(value, kind)
        elif kinds := get_args(fact.value):  # a list of numbers
            expected = fact.expected
            numbers = isinstance(value, tuple) and all(type(item) in (int, *kinds) for item in value)
            fits = numbers and fact.fits(value)
        else:
            fits, expected = fact.takes(value), fact.expected
        if not fits:
            raise ConfigError(f"attack: {name}: expected {expected}, got {one_line(repr(given))}")
        found[name] = value.sort().values if name == "labels" else value
    return found


def _copy(model: object) -> nn.Module:
    """A copy of the network, which the caller may go on using.

    Raises:
        ConfigError: it is no network, has no weights, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attack: model: expected a torch.nn.Module, got {type(model).__name__}")
    if complaint := unsized(model):
        raise ConfigError(f"attack: model: {complaint}")
    if not any(True for _ in model.parameters()):
        raise ConfigError(f"attack: model: this {type(model).__name__} has no weights; hand over the attacked network")
    try:
        return deepcopy(model)
    except Exception as error:  # anybody's network
        raise ConfigError(f"attack: model: cannot be copied ({first_line(error)})") from error


def _built(attack: str | Attack, settings: Mapping[str, Any]) -> Attack:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"attack: settings: expected a dict of names and values, got {type(settings).__name__}")
    if isinstance(attack, str):
        found: Attack = registry.build("attacks", attack, settings, "attack").entitled(attack)
        return found
    if not isinstance(attack, Attack):
        raise ConfigError(f"attack: expected a name or an instance of fedsim.Attack, got {type(attack).__name__}")
    if settings:
        raise ConfigError(
            f"attack: settings: '{next(iter(settings))}' is named, but the attack is an object, which has "
            "its settings already"
        )
    return attack


def _state(
    what: str, given: State | nn.Module, network: nn.Module, *, statistics: bool | None = None
) -> dict[str, Tensor]:
    """`given` under the names of `network`, copied.

    Args:
        statistics: whether the running statistics of BatchNorm layers are part of it; None where they may be or not.

    Raises:
        ConfigError: a tensor is missing, is not known to the network, has another shape or type, or is not finite.
    """
    state = state_of(given) if isinstance(given, nn.Module) else given
    if not isinstance(state, Mapping):
        raise ConfigError(f"attack: {what}: expected a state dict or a network, got {type(given).__name__}")
    state = {
        name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    if statistics is None:
        statistics = not statistics_of(network).isdisjoint(state)
    expected = state_of(network, statistics=statistics)
    if missing := [name for name in expected if name not in state]:
        raise ConfigError(f"attack: {what}: has no '{missing[0]}', which the model has; hand over states of this model")
    if further := [name for name in state if name not in expected]:
        raise ConfigError(f"attack: {what}: has '{further[0]}', which the model lacks; hand over states of this model")
    if wrong := misfit(expected, state):
        raise ConfigError(f"attack: {what}: {wrong.removeprefix('it sent ')}; hand over states of this model")
    if broken := non_finite(state):
        raise ConfigError(f"attack: {what}: '{broken[0]}' holds NaN or infinite values")
    return {name: state[name].detach().cpu().clone() for name in expected}


def _classes(network: nn.Module, known: Mapping[str, Any], *, texts: bool) -> dict[str, int]:
    """The number of classes, where nobody names it and the model gives one number for each of several.

    Raises:
        ConfigError: the model does not take examples of the shape that is named, or has fewer outputs than classes.
    """
    if (shape := known.get("input_shape")) is None:
        return {}
    outputs, classes = _outputs(network, shape, texts=texts), known.get("num_classes")
    if classes is not None and classes > outputs:
        raise ConfigError(f"attack: num_classes: expected at most the {outputs} outputs of the model, got {classes}")
    return {"num_classes": outputs} if classes is None and outputs > 1 else {}


def _outputs(network: nn.Module, shape: tuple[int, ...], *, texts: bool) -> int:
    """How many numbers the network gives for one example of this shape.

    Raises:
        ConfigError: it does not take such an example, or gives something else than a row of numbers.
    """
    kind = torch.long if texts else next(network.parameters()).dtype
    try:
        with torch.no_grad():
            logits = deepcopy(network).cpu().eval()(torch.zeros(1, *shape, dtype=kind))
    except Exception as error:  # anybody's network
        raise ConfigError(
            f"attack: input_shape: the model does not take inputs of shape {shape} ({first_line(error)})"
        ) from error
    if not isinstance(logits, Tensor) or logits.ndim not in (1, 2) or len(logits) != 1:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise ConfigError(f"attack: model: expected one row of outputs for one example, got {got}")
    return int(logits.numel())


def _ends(value_range: tuple[Any, Any] | None) -> tuple[list[float], list[float]] | None:
    """Lowest and highest values, one a channel or one for all."""
    if value_range is None:
        return None
    try:
        low, high = (
            [float(value) for value in (end if isinstance(end, list | tuple) else [end])] for end in value_range
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"attack: value_range: expected (lowest, highest), got {value_range!r}") from error
    if len(low) != len(high) or not all(-inf < a < b < inf for a, b in zip(low, high, strict=True)):
        raise ConfigError(
            f"attack: value_range: expected the lowest below the highest value, both finite, got {value_range!r}"
        )
    return low, high
