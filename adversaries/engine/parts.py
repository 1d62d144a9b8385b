"""A scene taken apart into its tensors and the rest, so that one computation serves the tensors of others."""

from __future__ import annotations

import dataclasses
from typing import Any

from adversaries.scene import Scene, Units

_UNITS = [item.name for item in dataclasses.fields(Units)]


def tensors_of(scene: Scene) -> dict[str, Any]:
    """Every tensor of the scene, in lists and dicts."""
    seen = {name: list(own) for name in ("sent", "moved") if (own := getattr(scene, name)) is not None}
    return {
        "before": list(scene.before),
        "after": list(scene.after),
        **seen,
        "buffers": dict(scene.buffers),
        "returned_buffers": dict(scene.returned_buffers),
        "labels": scene.labels,
        "units": [getattr(scene.units, name) for name in _UNITS],
    }


def with_tensors(scene: Scene, tensors: dict[str, Any]) -> Scene:
    """The scene with other tensors in the place of its own, as `tensors_of` gives them."""
    given = dict(zip(_UNITS, tensors["units"], strict=True))
    kept = all(tensor is getattr(scene.units, name) for name, tensor in given.items())
    units = scene.units if kept else dataclasses.replace(scene.units, **given)  # which keep what they have computed
    return dataclasses.replace(scene, **{**tensors, "units": units})


def numbers_of(scene: Scene) -> tuple[Any, ...]:
    """The facts of a scene that are no tensors, besides its model and loss."""
    facts = (
        "names",
        "num_examples",
        "learning_rate",
        "local_epochs",
        "local_steps",
        "batch_size",
        "optimizer",
        "momentum",
        "weight_decay",
        "proximal_mu",
        "by_batch",
    )
    return repr(scene.defenses), repr(scene.mixing), *(getattr(scene, name) for name in facts)


def shapes_of(tree: Any) -> tuple[Any, ...]:
    """Shape, type and device of each tensor in nested lists and dicts."""
    from torch.utils._pytree import tree_leaves

    return tuple((tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in tree_leaves(tree))
