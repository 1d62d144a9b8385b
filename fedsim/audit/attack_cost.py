"""Warn beforehand of attacks that take long, or more memory than there is."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedsim.audit.stated_model import grey_inputs
from fedsim.audit.truth_files import count_group_examples
from fedsim.base.machine import free_memory
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.transcript import Transcript

log = logging.getLogger(__name__)

_MAX_TRIALS = 4
"""Most examples on which a pass is measured."""
_GRAPHS_IN_MEMORY = 4
"""Memory needed to differentiate a matched gradient, in forward passes."""
_DOUBLE_BACKWARD_COST = 3
"""About how many times longer it takes to differentiate a gradient than to compute it."""
_LONG_SECONDS = 600.0
"""Seconds from which on the expected time of an attack is worth a warning."""


def warn_of_cost(attacks: Sequence[tuple[str, Attack]], transcript: Transcript, knowledge: Knowledge) -> None:
    """Warn beforehand of attacks that take long or too much memory, and say what helps."""
    counts = [count for client_counts in count_group_examples(transcript).values() for count in client_counts]
    steps: dict[str, int] = {}
    for title, attack in attacks:
        steps[title] = getattr(attack, "iterations", 0) * getattr(attack, "restarts", 1)
    if not counts or not any(steps.values()):
        return
    if None in (knowledge.model, knowledge.input_shape, knowledge.value_range):
        return
    # Measure a pass over a few examples; memory and time grow with their number.
    trial_count = max(min(_MAX_TRIALS, max(counts)), 1)
    try:
        trial_bytes, trial_seconds = _measure_pass(knowledge, trial_count)
    except Exception:  # anybody's network; the attack itself says what is wrong with it
        log.debug("the cost of the attacks cannot be estimated", exc_info=True)
        return
    needed = trial_bytes / trial_count * max(counts) * _GRAPHS_IN_MEMORY
    available = free_memory()
    if needed > available and knowledge.device.type == "cpu":
        log.warning(
            "an attack on %d examples takes about %.1f GB, %.1f GB are free; choose adversary.victims with fewer "
            "examples, or a device with more memory",
            max(counts),
            needed / 1e9,
            available / 1e9,
        )
    for title, number in steps.items():
        expected = trial_seconds / trial_count * max(counts) * number
        if expected > _LONG_SECONDS:
            log.warning(
                "%s: about %.0f minutes for a client with %d examples; attack.%s.iterations (now %d) lowers that",
                title,
                expected / 60,
                max(counts),
                title,
                number,
            )


def _measure_pass(knowledge: Knowledge, count: int) -> tuple[int, float]:
    """Return the bytes that a forward pass keeps, and the seconds of a matching step.

    A matching step computes a gradient and differentiates it; its time is an estimate.
    """
    assert knowledge.model is not None
    network = knowledge.model().to(knowledge.device)
    saved_bytes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        inputs = grey_inputs(network, knowledge, count).requires_grad_()
        start = time.monotonic()
        total = network.eval()(inputs).float().square().sum()
    total.backward()
    return sum(saved_bytes.values()), _DOUBLE_BACKWARD_COST * (time.monotonic() - start)
