"""Find defenses that are set to do nothing, by what their hooks make of random tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.interfaces.defense import Defense, Participation, overrides
from fedsim.interfaces.defense_calls import (
    apply_on_batch,
    apply_on_examples,
    apply_on_features,
    apply_on_gradient,
    apply_on_update,
)
from fedsim.interfaces.defense_checks import QuadraticStep
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import State

_SMALL = 1e-6
"""Scale of the tensors: so short a message is within any clip, and only what hides it changes it."""
_LARGE = 20.0
"""Scale of tensors that are longer than any message: a clip that they are within does nothing."""
_NUM_DRAWS = 20
"""How often a hook is called, as it may act at random."""
_STRENGTHS = (0.1, 0.5, 1.0, 4.0)
"""Values of a setting that are tried after its default."""
_EXAMPLES, _CLASSES = 8, 10


def find_missing_strength(defense: Defense) -> dict[str, float] | None:
    """Return values of settings with which a defense that does nothing would do something.

    Returns:
        The setting that is its strength comes first, then limits that no message reaches, by which
        the strength may be multiplied. None where the defense does something, and where no number
        among its settings is its strength. A defense that chooses examples by what they give away
        is not judged, as that depends on them.
    """
    if overrides(defense, "on_data") or _acts_with(defense, {}):
        return None
    defaults = _default_numbers(defense)
    for name, default in defaults.items():
        value = getattr(defense, name)
        for strength in (*([] if default is None else [default]), *_STRENGTHS):
            changes = {name: type(value)(strength)}
            if strength != value and _acts_with(defense, changes):
                return _lower_limits(defense, defaults, changes)
    return None


def _default_numbers(defense: Defense) -> dict[str, float | None]:
    """Return the settings that are numbers, each with its default; None where it has none."""
    defaults: dict[str, float | None] = {}
    for setting in fields(defense):
        value = getattr(defense, setting.name)
        if setting.init and isinstance(value, int | float) and not isinstance(value, bool):
            defaults[setting.name] = setting.default if isinstance(setting.default, int | float) else None
    return defaults


def _lower_limits(
    defense: Defense, defaults: Mapping[str, float | None], changes: dict[str, float]
) -> dict[str, float]:
    """Return `changes` with the defaults of limits that are beyond any message."""
    if _acts_with(defense, {}, _LARGE):
        return changes
    for name, default in defaults.items():
        if default is None or name in changes or default == getattr(defense, name):
            continue
        limit = {name: default}
        # What acts on small messages, too, is another strength.
        if (
            _acts_with(defense, limit, _LARGE)
            and not _acts_with(defense, limit)
            and _acts_with(defense, changes | limit)
        ):
            changes = changes | limit
    return changes


def _acts_with(defense: Defense, changes: Mapping[str, Any], scale: float = _SMALL) -> bool:
    try:
        return _acts(replace(defense, **changes), scale)
    except (Exception, SystemExit):  # it refuses these values, or is made for other tensors
        return not changes


def _acts(defense: Defense, scale: float) -> bool:
    """Return whether a hook changes something."""
    client = Participation(
        num_examples=_EXAMPLES,
        batch_size=_EXAMPLES,
        steps=1,
        rounds=1,
        num_classes=_CLASSES,
        value_range=((0.0,), (1.0,)),
    )
    client_defense = defense.of_client(client)
    for number in range(_NUM_DRAWS):
        for changes_something in _hook_trials(client_defense, number, scale):
            if changes_something():
                return True
    return False


def _hook_trials(defense: Defense, number: int, scale: float) -> Iterator[Callable[[], bool]]:
    """Yield for each hook that `defense` overrides a function that tells whether it changes something."""
    state = _random_state(scale)
    context = LocalContext(
        rng=generator("pitfalls", number),
        broadcast=_random_state(),
        local_step=QuadraticStep(_random_state()),
        common_key=("pitfalls", number) if defense.draws_in_common else None,
    )

    def changes_batch() -> bool:
        inputs, labels = _random_batch()
        new_inputs, new_labels = apply_on_batch(defense, inputs, labels, context)
        classes = new_labels if new_labels.ndim == 1 else new_labels.argmax(1)
        return not torch.equal(new_inputs, inputs) or not torch.equal(classes, labels)

    def changes_features() -> bool:
        inputs = _random_batch()[0].requires_grad_()
        weights = torch.randn((inputs[0].numel(), 64), generator=generator("features"))
        features = (inputs.flatten(1) @ weights).tanh()
        return not torch.equal(apply_on_features(defense, features, inputs, context), features)

    def changes_examples() -> bool:
        gradients = {name: torch.stack([tensor, -tensor, 3 * tensor]) for name, tensor in state.items()}
        mean = {name: tensor.sum(0) / 3 for name, tensor in gradients.items()}
        result = apply_on_examples(defense, gradients, 3.0, state, context)
        return any(not torch.allclose(result[name], mean[name], rtol=1e-4, atol=0) for name in mean)

    def changes_gradient() -> bool:
        return not _are_equal(apply_on_gradient(defense, state, context), state)

    def changes_update() -> bool:
        sent = apply_on_update(defense, state, context)
        return not _are_equal(sent.values("delta", state) if isinstance(sent, Payload) else sent, state)

    trials = {
        "on_batch": changes_batch,
        "on_features": changes_features,
        "on_examples": changes_examples,
        "on_gradient": changes_gradient,
        "on_update": changes_update,
    }
    for hook, changes_something in trials.items():
        if overrides(defense, hook):
            yield changes_something


def _random_state(scale: float = _SMALL) -> dict[str, Tensor]:
    """Return so many numbers that one in a hundred of them are some."""
    shapes = {"weight": (40, 50), "bias": (40,)}
    return {name: scale * torch.randn(shape, generator=generator(name)) for name, shape in shapes.items()}


def _random_batch() -> tuple[Tensor, Tensor]:
    inputs = torch.rand((_EXAMPLES, 1, 8, 8), generator=generator("inputs"))
    return inputs, torch.arange(_EXAMPLES) % _CLASSES


def _are_equal(first: State, second: State) -> bool:
    return all(torch.equal(first[name], tensor) for name, tensor in second.items())
