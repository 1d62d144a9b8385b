"""The objective and its slopes as one compiled graph: the forward pass and both backward passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adversaries.engine.parts import numbers_of, shapes_of, tensors_of, with_tensors
from adversaries.scene import Scene
from fedsim.errors import AttackError, FedsimError, first_line

_AGREEMENT = 1e-3
"""Largest difference of the compiled objective from the traced function's own, relative to its size (at least 1)."""

_cache: dict[Any, Callable[..., list[Tensor]]] = {}
"""Graphs by what they were traced from. Numbers of the scene, unlike its tensors, become part of a graph."""


def compiled(
    evaluate: Callable[..., list[Tensor]],
    key: tuple[str, ...],
    scene: Scene,
    target: list[Tensor],
    sample: tuple[dict[str, Tensor], tuple[Tensor, ...]],
) -> Callable[[dict[str, Tensor], tuple[Tensor, ...]], list[Tensor]]:
    """`evaluate` with its scene, traced and compiled for tensors of these shapes.

    The graph of one victim serves all others with the same shapes: its tensors are arguments of it. For
    each victim it is compared with `evaluate` itself at the sample. Where the two differ, they are compared at two
    points close to it: at a kink of the network, such as a ReLU's, rounding decides which side the sample is on.

    Args:
        evaluate: `(values, around, scene, target) -> tensors`, without control flow that depends on values.
        key: what tells `evaluate` from other functions, such as the attack's settings.
        sample: values and surroundings to trace it with.

    Raises:
        AttackError: the model cannot be traced, or its graph does something else.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = tensors_of(scene)

    def traced(
        values: dict[str, Tensor], around: tuple[Tensor, ...], tensors: dict[str, Any], target: list[Tensor]
    ) -> list[Tensor]:
        return evaluate(values, around, with_tensors(scene, tensors), target)

    def both(run: Callable[..., list[Tensor]], beside: int = 0) -> tuple[float, float]:
        values = _beside(sample[0], beside)
        ours = run(values, sample[1], tensors, target)[0].item()
        return ours, evaluate(values, sample[1], scene, target)[0].item()

    def same(run: Callable[..., list[Tensor]]) -> bool:
        return _agree(*both(run)) or all(_agree(*both(run, beside)) for beside in (1, 2))

    arguments = (*sample, tensors, target)
    whole = (key, repr(scene.model), scene.loss, numbers_of(scene), shapes_of(arguments))
    try:
        agreed = whole in _cache and same(_cache[whole])
        if not agreed:  # new, or a model of the same outline that computes something else
            _cache[whole] = torch.compile(make_fx(traced)(*arguments), dynamic=False)
            agreed = same(_cache[whole])
        run = _cache[whole]
    except FedsimError:
        raise
    except Exception as error:
        raise AttackError(f"the model cannot be compiled ({first_line(error)}); set compile = false") from error
    if not agreed:
        ours, theirs = both(run)
        del _cache[whole]
        raise AttackError(
            f"the compiled objective is {ours:.6g} where the model gives {theirs:.6g}: its control flow depends on "
            "values, or the compiler errs; set compile = false"
        )
    return lambda values, around: run(values, around, tensors, target)


def _beside(values: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """`values` moved by a hundredth of a standard normal number each; with seed 0 as they are."""
    if not seed:
        return values
    rng = torch.Generator().manual_seed(seed)
    moved = {name: v.detach() + 0.01 * torch.randn(v.shape, generator=rng).to(v) for name, v in values.items()}
    return {name: v.requires_grad_(values[name].requires_grad) for name, v in moved.items()}


def _agree(ours: float, theirs: float) -> bool:
    both_nan = math.isnan(ours) and math.isnan(theirs)
    return both_nan or abs(ours - theirs) <= _AGREEMENT * max(1.0, abs(theirs))
