"""What scores follow from besides a finding and its recording: code of other packages, and network weights."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fedsim.audit.evaluation.perceptual_distance import find_backbone
from fedsim.base.content_hashes import cached_file_hash
from fedsim.base.errors import PluginError
from fedsim.federation.data_folder import find_weights_folder
from fedsim.interfaces.metric import hash_metric_code
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import hash_plugin_code


def hash_scoring_code() -> dict[str, Any]:
    """Return hashes of installed metrics, modalities and findings that are not fedsim's own, and of LPIPS' weights."""
    backbone = find_backbone(find_weights_folder())
    return {
        "weights": cached_file_hash(backbone[1]) if backbone else None,
        "metrics": hash_metric_code(),
        "modalities": _hash_foreign_code("modalities"),
        "findings": _hash_foreign_code("findings"),
    }


def _hash_foreign_code(group: registry.Group) -> dict[str, str | None]:
    """Return the code hash of each installed plug-in of a group that is not fedsim's own, by name."""
    hashes = {}
    for name in registry.registered_names(group):
        with suppress(PluginError):  # a broken one makes no scores
            if not registry.is_builtin(group, name):
                hashes[name] = hash_plugin_code(registry.load(group, name))
    return hashes
