"""Checks of what a defense does from round to round: whether it acts in each, and what its noise follows."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.base.randomness import generator
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, DoesNotApply, expect
from fedsim.contract.defense_trials import (
    BATCH_SIZE,
    EXAMPLES,
    build_defense,
    overridden_hooks,
    random_state,
    zero_state,
)
from fedsim.interfaces.defense import Defense, overrides_guarantee
from fedsim.interfaces.local_context import Memory
from fedsim.recording.wire_format import State

_MANY_ROUNDS = 100
_EARLY_ROUNDS = 20
"""Rounds each of which is tried, besides the last of many."""
_DRAWS = 8
_LEAST_NOISE = 0.9
"""Share of the noise of the first round that has to be left in each; the draws are the same."""
_SCALES = (1.0, 1e6, 1e-6)
"""Factors of the states in which a defense may act, as one that clips acts on large ones alone."""
_LARGE, _LARGER = 1e6, 1e9
"""Factors of two states of which any clipping leaves the same."""
_SMALL_SHARES = (1e-3, 0.3)
"""Sizes of two states, as shares of the noise, that one message hardly tells apart."""
_HISTORIES = 3
"""Draws of the message before, over which noise that follows messages differs."""
_SAME = 1e-3
"""Relative difference up to which two messages are the same."""


def acts_in_its_rounds_alone(subject: CheckedPlugin) -> None:
    """It changes nothing in rounds in which it says that it does not act, which adversaries rely on."""
    defense = build_defense(subject)
    idle = [number for number in range(1, _MANY_ROUNDS + 1) if not defense.acts_in(number)]
    if not idle:
        raise DoesNotApply(f"it says that it acts in each of {_MANY_ROUNDS} rounds")
    for number in (idle[0], idle[-1]):
        for hook_case in overridden_hooks(defense, number - 1):
            result = hook_case.apply(random_state(), generator(1))
            expect(
                common.are_equal(result, hook_case.apply_nothing(random_state())),
                f"{hook_case.hook} changes something in round {number}, in which acts_in says that it does not act",
            )


def says_in_which_rounds_it_acts(subject: CheckedPlugin) -> None:
    """It acts in each round, or `acts_in` says in which it does not."""
    defense = build_defense(subject)
    if defense.draws_in_common:
        raise DoesNotApply("what it draws with all clients may have it leave out rounds")
    memory: dict[str, Tensor] = {}
    active, idle = list[int](), list[int]()
    for number in (*range(1, _EARLY_ROUNDS + 1), _MANY_ROUNDS):
        # One with momentum acts from a client's second message on, and one with a budget on its first ones.
        if _acts_once(defense, number, memory) or _acts_once(defense, number, {}):
            active.append(number)
            continue
        if any(_acts_once(defense, number, dict(memory), seed) for seed in range(1, _DRAWS)):
            raise DoesNotApply("its draws decide whether it acts")
        idle.append(number)
    unsaid = [number for number in idle if active and defense.acts_in(number)]
    expect(
        not unsaid,
        f"it changes nothing in round {unsaid[0] if unsaid else 0}, in which acts_in says that it acts, so that "
        "messages in clear count as defended ones; override acts_in",
    )


def _acts_once(defense: Defense, number: int, memory: Memory, seed: int = 0) -> bool:
    """Return whether any hook changes something in a round, by one draw."""
    if defense.sampling(EXAMPLES, BATCH_SIZE) is not None:
        return True
    for hook_case in overridden_hooks(defense, number - 1, memory):
        for scale in _SCALES:
            result = hook_case.apply(_scale_state(scale), generator("acts", seed))
            if not common.are_equal(result, hook_case.apply_nothing(_scale_state(scale))):
                return True
    return False


def _build_promising_defense(subject: CheckedPlugin) -> Defense:
    """Build the defense; raise DoesNotApply where it states no guarantee."""
    defense = build_defense(subject)
    if not overrides_guarantee(defense):
        raise DoesNotApply("it promises nothing")
    return defense


def noise_holds_in_any_round(subject: CheckedPlugin) -> None:
    """Its noise is no smaller in a late round than in an early one, if it promises something.

    A guarantee is told in how many rounds a client took part, not in which: one that is sampled may have been in late
    ones alone.
    """
    defense = _build_promising_defense(subject)
    for hook_case in overridden_hooks(defense):
        early, late = (_measure_spread(defense, hook_case.hook, number, {}) for number in (0, _MANY_ROUNDS - 1))
        expect(
            late >= _LEAST_NOISE * early,
            f"{hook_case.hook} draws {late / early if early else 0:.2g} times the noise of round 1 in round "
            f"{_MANY_ROUNDS}, where a client may take part for the first time, and its guarantee is told the number of "
            "rounds alone; count the client's rounds in context.memory",
        )


def noise_follows_no_earlier_data(subject: CheckedPlugin) -> None:
    """Its noise does not depend on data of earlier rounds of which its messages say nothing."""
    defense = _build_promising_defense(subject)
    for hook_case in overridden_hooks(defense):
        # Whatever clips makes the same message of large data and of larger ones.
        messages, spreads = list[Tensor](), list[float]()
        for factor in (_LARGE, _LARGER):
            memory: dict[str, Tensor] = {}
            messages.append(_apply(defense, hook_case.hook, 0, memory, _scale_state(factor), generator("history")))
            spreads.append(_measure_spread(defense, hook_case.hook, 1, memory))
        first, second = messages
        if first.shape != second.shape or not torch.allclose(first, second, rtol=_SAME, atol=_SAME):
            continue
        expect(
            min(spreads) >= _LEAST_NOISE * max(spreads),
            f"{hook_case.hook} draws {max(spreads) / max(min(spreads), 1e-300):.3g} times the noise after a larger "
            "update that gave the same message, so that the size of noise reveals data that nothing accounts for; let "
            "clip and noise follow from settings or messages",
        )


def noise_follows_no_small_data(subject: CheckedPlugin) -> None:
    """Its noise does not depend on earlier data that are smaller than the noise, so that its messages hide them.

    What follows from the messages, as it may, differs from draw to draw, and hardly with such data.
    """
    defense = _build_promising_defense(subject)
    for hook_case in overridden_hooks(defense):
        first_noise = _measure_spread(defense, hook_case.hook, 0, {})
        spreads_by_factor = []
        for share in _SMALL_SHARES:
            spreads = []
            for seed in range(_HISTORIES):
                memory: dict[str, Tensor] = {}
                state = _scale_state(share * first_noise)
                _apply(defense, hook_case.hook, 0, memory, state, generator("history", seed))
                spreads.append(_measure_spread(defense, hook_case.hook, 1, memory))
            spreads_by_factor.append(spreads)
        if any(min(spreads) < (1 - _SAME) * max(spreads) for spreads in spreads_by_factor):
            continue
        ends = sorted(spreads[0] for spreads in spreads_by_factor)
        expect(
            ends[0] >= _LEAST_NOISE * ends[-1],
            f"{hook_case.hook} draws {ends[-1] / max(ends[0], 1e-300):.3g} times the noise after a larger update that "
            "is hidden in the noise of its message, so that the size of noise reveals data that nothing accounts for; "
            "let clip and noise follow from settings or messages",
        )


def noise_begins_with_the_first_message(subject: CheckedPlugin) -> None:
    """No message of a client is without noise while others have it, if it promises something."""
    defense = _build_promising_defense(subject)
    for hook_case in overridden_hooks(defense):
        memory: dict[str, Tensor] = {}
        with_noise, in_clear = list[int](), list[int]()
        for number in range(_EARLY_ROUNDS):
            if _measure_spread(defense, hook_case.hook, number, memory):
                with_noise.append(number + 1)
            elif _follows_data(defense, hook_case.hook, number, memory):
                in_clear.append(number + 1)
            _apply(defense, hook_case.hook, number, memory, zero_state(), generator("history", number))
        expect(
            not (with_noise and in_clear),
            f"{hook_case.hook} adds no noise to message {in_clear[0] if in_clear else 0} of a client, and some to "
            "others, so that no guarantee holds; add it to each",
        )


def _follows_data(defense: Defense, hook: str, number: int, memory: Memory) -> bool:
    """Return whether what a hook makes of two states differs."""
    of_zeros, of_others = (
        _apply(defense, hook, number, _copy_memory(memory), state, generator("draws"))
        for state in (zero_state(), random_state())
    )
    return not torch.equal(of_zeros, of_others)


def _measure_spread(defense: Defense, hook: str, number: int, memory: Memory) -> float:
    """Return how far a hook's draws spread its results of zeros, after `number` rounds.

    Args:
        memory: what the client remembers of them.
    """
    results = []
    for seed in range(_DRAWS):
        results.append(_apply(defense, hook, number, _copy_memory(memory), zero_state(), generator("draws", seed)))
    if len({len(result) for result in results}) > 1:  # as of batches of a random size
        return 0.0
    return float(torch.stack(results).std(0).square().mean().sqrt())


def _copy_memory(memory: Memory) -> dict[str, Tensor]:
    """Return what a client remembers, for a trial that leaves no trace."""
    return {name: tensor.clone() for name, tensor in memory.items()}


def _apply(defense: Defense, hook: str, number: int, memory: Memory, state: State, rng: torch.Generator) -> Tensor:
    """Return all numbers that a hook makes of a state."""
    (hook_case,) = (case for case in overridden_hooks(defense, number, memory) if case.hook == hook)
    result = hook_case.apply(state, rng)
    return torch.cat([tensor.flatten().double() for tensor in result.values()])


def _scale_state(factor: float) -> dict[str, Tensor]:
    """Return the random state times a factor."""
    return {name: factor * tensor for name, tensor in random_state().items()}
