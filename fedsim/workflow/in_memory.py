"""Attack one update that is in memory, without a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.attacks import Attack
from fedsim.errors import ConfigError, did_you_mean, first_line
from fedsim.files import fresh_folder
from fedsim.findings import Finding
from fedsim.knowledge import FACTS, Knowledge
from fedsim.plugins import registry
from fedsim.randomness import generator, one_thread
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.model_state import state_of
from fedsim.wire.messages import State, Update, misfit, non_finite
from fedsim.wire.payloads import Payload
from fedsim.workflow.logs import Progress, told


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
    """Attack what one client sent: from the model that it was sent and the one that it returned to its examples.

    Args:
        before: w_t, the state that the server sent, by names of parameters; or a network that has it.
        after: w_T, the state that the client returned.
        model: a network of the attacked architecture; it is copied, and its weights do not matter.
        num_examples: N, how many examples the client trained on.
        attack: a registered name, `module:Class`, or an instance of `Attack`.
        settings: of the attack; those that are left out are as by default.
        value_range: lowest and highest value of an input, one pair or one value a channel.
        loss: what the client minimised, `(logits, labels) -> mean loss`.
        seed: of the attack's random start.
        progress: called as `progress(what, done, total)`.
        **knowledge: what else the adversary knows, by the names of `fedsim.Knowledge`: `input_shape`, `num_classes`,
            `learning_rate`, `local_epochs`, `batch_size`, `labels` ...

    Raises:
        ConfigError: something does not fit the model, or is nothing that can be known; nothing was attacked.
        KnowledgeError: the attack needs to know more.
        AttackError: the attack failed.
    """
    for name in knowledge:
        if name not in FACTS:
            raise ConfigError(f"attack: '{name}' is nothing that can be known, {did_you_mean(name, FACTS)}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attack: model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(num_examples, bool) or not isinstance(num_examples, int) or num_examples < 1:
        raise ConfigError(f"attack: num_examples: expected a whole number of at least 1, got {num_examples!r}")
    network = deepcopy(model)
    sent, returned = _state("before", before, network), _state("after", after, network)
    built = _built(attack, settings or {})
    _check_inputs(network, knowledge.get("input_shape"))
    if "num_classes" not in knowledge and (shape := knowledge.get("input_shape")) is not None:
        knowledge["num_classes"] = _outputs(network, shape)
    known = Knowledge(model=lambda: deepcopy(network), loss=loss, value_range=_ends(value_range), **_tuples(knowledge))
    update = Update(
        round=1, client=0, before=sent, payload=Payload.dense(returned, "weights"), num_examples=num_examples
    )
    with fresh_folder() as folder, told(progress), one_thread():
        Recorder(folder).write(1, [update])

        def follow(iteration: int, iterations: int, values: Mapping[str, float]) -> None:
            if progress is not None:
                progress(built.called, iteration, iterations)

        return built.run(Transcript(folder), known, victim=0, rng=generator(seed, "attack"), progress=follow)


def _built(attack: str | Attack, settings: Mapping[str, Any]) -> Attack:
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


def _state(what: str, given: State | nn.Module, network: nn.Module) -> dict[str, Tensor]:
    """`given` under the names of `network`, copied.

    Raises:
        ConfigError: a tensor is missing, is not known to the network, or has another shape.
    """
    expected = state_of(network)
    state = state_of(given) if isinstance(given, nn.Module) else given
    if not isinstance(state, Mapping):
        raise ConfigError(f"attack: {what}: expected a state dict or a network, got {type(given).__name__}")
    state = {
        name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor) and tensor.is_floating_point()
    }
    if missing := [name for name in expected if name not in state]:
        raise ConfigError(f"attack: {what}: has no '{missing[0]}', which the model has; hand over states of this model")
    if further := [name for name in state if name not in expected]:
        raise ConfigError(f"attack: {what}: has '{further[0]}', which the model lacks; hand over states of this model")
    if wrong := misfit(expected, state):
        raise ConfigError(f"attack: {what}: {wrong.removeprefix('it sent ')}; hand over states of this model")
    if broken := non_finite(state):
        raise ConfigError(f"attack: {what}: '{broken[0]}' holds NaN or infinite values")
    return {name: state[name].detach().cpu().clone() for name in expected}


def _check_inputs(network: nn.Module, shape: Any) -> None:
    if shape is None:
        return
    sizes = list(shape) if isinstance(shape, list | tuple) else []
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"attack: input_shape: expected sizes of at least 1, as (1, 28, 28), got {shape!r}")
    _outputs(network, tuple(sizes))


def _outputs(network: nn.Module, shape: tuple[int, ...]) -> int:
    """How many numbers the network gives for one example of this shape.

    Raises:
        ConfigError: it does not take such an example.
    """
    try:
        with torch.no_grad():
            logits = deepcopy(network).eval()(torch.zeros(1, *shape))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ConfigError(
            f"attack: input_shape: the model does not take inputs of shape {tuple(shape)} ({first_line(error)})"
        ) from error
    return int(logits.shape[-1])


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
    if len(low) != len(high) or not all(a < b for a, b in zip(low, high, strict=True)):
        raise ConfigError(f"attack: value_range: expected the lowest below the highest value, got {value_range!r}")
    return low, high


def _tuples(knowledge: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in knowledge.items()}
