"""Findings as files: one safetensors file each, with the facts about it, such as attack, victim and round."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.errors import AttackError, RunError, TranscriptError
from fedsim.files import check_readable, in_one_step, parse_json
from fedsim.findings import Finding
from fedsim.plugins import registry

_KIND, _ORDER = "kind", "order_of_tensors"
_ROUNDS = re.compile(r"\d{1,18}(-\d{1,18})?")


def to_save(finding: Finding) -> dict[str, Tensor]:
    """Its tensors as safetensors wants them, by name; `finding_of` is the inverse.

    Raises:
        AttackError: it is of a class that derives from the one of its kind, and would be read as that one.
    """
    known = registry.load("findings", finding.kind).finding if finding.kind in registry.names("findings") else None
    if known not in (None, type(finding)):
        raise AttackError(
            f"the attack returned a {type(finding).__name__} of the kind '{finding.kind}', which is a "
            f"{known.__name__}; give it a kind of its own, and register an evaluator of that"
        )
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in finding.tensors.items()}


def save_finding(finding: Finding, path: Path, about: Mapping[str, object]) -> None:
    """Write `finding` and the facts `about` it in one step, as safetensors.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    own = to_save(finding)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_one_step(path) as temporary:
            # One key only: the library writes several in any order, so the same finding could give different bytes.
            facts = {**about, _KIND: finding.kind, _ORDER: list(own)}
            metadata = {"about": json.dumps(facts, sort_keys=True)}
            save_file(own, temporary, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error}); make room and attack again") from error


_UNREADABLE = (
    OSError, SafetensorError, AttackError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What reading a file of unknown origin may raise; a RecursionError is a RuntimeError."""


def load_finding(path: Path) -> tuple[Finding, dict[str, object]]:
    """Read what `save_finding` wrote.

    Raises:
        TranscriptError: the file is damaged.
    """
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            about = parse_json(file.metadata()["about"])
            if not isinstance(about, dict):
                raise ValueError("what it says about itself is no table")
            kind, order = about.pop(_KIND), about.pop(_ORDER)  # the file sorts by name
            tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key) for key in order}
        finding = finding_of(kind, tensors)
    except _UNREADABLE as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else error
        raise TranscriptError(f"{path}: is damaged ({why}); remove it and attack again") from error
    return finding, about


def load_claim(path: Path) -> tuple[Finding, dict[str, Any]]:
    """Read what an attack found, and check the facts about it: attack, victim, round, repeat, settings and others.

    Raises:
        TranscriptError: the file is damaged.
    """
    finding, about = load_finding(path)
    _check_said(about, path)
    return finding, about


def read_about(path: Path) -> dict[str, Any]:
    """The facts that `load_claim` returns about a finding, without the finding.

    Raises:
        TranscriptError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(parse_json(file.metadata()["about"]))
    except _UNREADABLE as error:
        raise TranscriptError(f"{path}: is damaged ({error}); remove it and attack again") from error
    _check_said(about, path)
    return about


def _check_said(about: Mapping[str, Any], path: Path) -> None:
    for key, fits in _SAID.items():
        if key not in about:
            raise TranscriptError(f"{path}: is damaged (it does not say its {key}); remove it and attack again")
        if not fits(about[key]):
            raise TranscriptError(f"{path}: is damaged ({key} is {about[key]!r}); remove it and attack again")


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _client(value: object) -> bool:
    """A client may be called by its node's id, in which Flower uses all 64 bits."""
    return type(value) is int and 0 <= value < 1 << 64


def _words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


_SAID: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("attack", "plugin"), lambda value: isinstance(value, str) and bool(value.strip())),
    **dict.fromkeys(
        ("variant", "command", "fingerprint", "partial_records"),
        lambda value: isinstance(value, str),
    ),
    **dict.fromkeys(("code", "model_code"), lambda value: value is None or isinstance(value, str)),
    **dict.fromkeys(("settings", "changed"), lambda value: isinstance(value, dict)),
    **dict.fromkeys(("first_round", "repeat"), _count),
    "victim": _client,
    **dict.fromkeys(("granted", "warnings"), _words),
    "round": lambda value: _count(value) or (isinstance(value, str) and bool(_ROUNDS.fullmatch(value))),
    "rounds": lambda value: isinstance(value, list) and all(map(_count, value)),
    "members": lambda value: isinstance(value, list) and all(map(_client, value)),
    "seconds": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}
"""What the facts about an attack's finding must be."""


def finding_of(kind: object, tensors: Mapping[str, Tensor]) -> Finding:
    """The inverse of a finding's `tensors`.

    Raises:
        AttackError: no such kind is installed, or these are no tensors of it.
        KeyError: one is missing.
    """
    known = registry.names("findings")
    if kind not in known:
        raise AttackError(f"it is of the kind {kind!r}, which nobody here can judge; known: {', '.join(known)}")
    trace = {name.removeprefix("trace/"): t for name, t in tensors.items() if name.startswith("trace/")}
    finding: Finding = registry.load("findings", str(kind)).finding.from_tensors(tensors, trace)
    return finding
