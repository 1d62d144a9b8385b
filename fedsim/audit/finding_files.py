"""Files of findings: one safetensors file each, with facts such as attack, victim and round."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.audit.attacked_rounds import parse_rounds
from fedsim.base.errors import AttackError, RunError, TranscriptError
from fedsim.base.files import check_readable, parse_json, replace_atomically, write_remedy
from fedsim.interfaces.findings import Finding
from fedsim.plugins import registry

_KIND_KEY, _ORDER_KEY = "kind", "order_of_tensors"


def tensors_to_save(finding: Finding) -> dict[str, Tensor]:
    """Return the tensors of a finding by name, as copies that safetensors can write.

    `finding_from_tensors` is the inverse.
    """
    if finding.kind in registry.registered_names("findings"):
        registered = registry.load("findings", finding.kind).finding
        if registered not in (None, type(finding)):
            raise AttackError(
                f"the attack returned a {type(finding).__name__} of the kind '{finding.kind}', which is a "
                f"{registered.__name__}; give it its own kind, and register an evaluator of that"
            )
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in finding.tensors.items()}


def save_finding(finding: Finding, path: Path, about: Mapping[str, object]) -> None:
    """Write `finding` and the facts `about` it in one step, as safetensors."""
    tensors = tensors_to_save(finding)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            # One metadata key only: safetensors writes several in any order, so bytes could differ.
            facts = {**about, _KIND_KEY: finding.kind, _ORDER_KEY: list(tensors)}
            metadata = {"about": json.dumps(facts, sort_keys=True)}
            save_file(tensors, temporary, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error}); {write_remedy(error)} and attack again") from error


_UNREADABLE = (
    OSError, SafetensorError, AttackError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors that reading a file of unknown origin may raise; a RecursionError is a RuntimeError."""


def load_finding(path: Path) -> tuple[Finding, dict[str, object]]:
    """Read a finding and the facts about it, as `save_finding` wrote them."""
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            about = parse_json(file.metadata()["about"])
            if not isinstance(about, dict):
                raise ValueError("its facts are not a table")
            # The file itself sorts tensors by name.
            kind, order = about.pop(_KIND_KEY), about.pop(_ORDER_KEY)
            tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key) for key in order}
        finding = finding_from_tensors(kind, tensors)
    except _UNREADABLE as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise TranscriptError(f"{path}: is damaged ({reason}); remove it and attack again") from error
    return finding, about


def load_claim(path: Path) -> tuple[Finding, dict[str, Any]]:
    """Read the finding of an attack and the facts about it, and check these."""
    finding, about = load_finding(path)
    _check_facts(about, path)
    return finding, about


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts that `load_claim` returns about a finding, without the finding."""
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(parse_json(file.metadata()["about"]))
    except _UNREADABLE as error:
        raise TranscriptError(f"{path}: is damaged ({error}); remove it and attack again") from error
    _check_facts(about, path)
    return about


def _check_facts(about: Mapping[str, Any], path: Path) -> None:
    for key, is_valid in _FACT_CHECKS.items():
        if key not in about:
            raise TranscriptError(f"{path}: is damaged (it does not say its {key}); remove it and attack again")
        if not is_valid(about[key]):
            raise TranscriptError(f"{path}: is damaged ({key} is {about[key]!r}); remove it and attack again")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _are_rounds(value: object) -> bool:
    """Return whether it is a round, or a text of several."""
    try:
        return bool(parse_rounds(str(value)))
    except ValueError:
        return False


def _is_client(value: object) -> bool:
    """Return whether it may be the id of a client or of a Flower node, which has up to 64 bits."""
    return type(value) is int and 0 <= value < 1 << 64


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_FACT_CHECKS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("attack", "plugin"), lambda value: isinstance(value, str) and bool(value.strip())),
    **dict.fromkeys(
        ("variant", "command", "fingerprint", "partial_records"),
        lambda value: isinstance(value, str),
    ),
    **dict.fromkeys(("code", "model_code"), lambda value: value is None or isinstance(value, str)),
    **dict.fromkeys(("settings", "changed", "knowledge", "app"), lambda value: isinstance(value, dict)),
    **dict.fromkeys(("first_round", "repeat"), _is_count),
    "victim": _is_client,
    **dict.fromkeys(("granted", "warnings"), _is_text_list),
    "round": _are_rounds,
    "rounds": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "members": lambda value: isinstance(value, list) and all(map(_is_client, value)),
    "seconds": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
"""Check for each fact about an attack's finding."""


def finding_from_tensors(kind: object, tensors: Mapping[str, Tensor]) -> Finding:
    """Return the finding of this kind with these tensors; the inverse of `tensors_to_save`.

    Raises:
        KeyError: a tensor is missing.
    """
    known = registry.registered_names("findings")
    if kind not in known:
        raise AttackError(f"it is of the kind {kind!r}, for which no evaluator is installed; known: {', '.join(known)}")
    trace: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("trace/"):
            trace[name.removeprefix("trace/")] = tensor
    finding: Finding = registry.load("findings", str(kind)).finding.from_tensors(tensors, trace)
    return finding
