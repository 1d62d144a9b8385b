"""Scores that are in the run folder already, and which of them still hold.

Scoring a finding takes longer than many an attack. What a score follows from is hashed beside it; a
finding whose hash is the same keeps its rows of `scores.csv` and `image-scores.csv`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.audit.cache import FindingCache
from fedsim.audit.evaluation.perceptual_distance import find_backbone
from fedsim.base.content_hashes import cached_file_hash, hash_json
from fedsim.base.errors import PluginError
from fedsim.base.files import write_text
from fedsim.federation.config import AttackFile
from fedsim.federation.data_folder import find_weights_folder
from fedsim.federation.run_folder import read_rows
from fedsim.federation.settings import versions
from fedsim.interfaces.metric import hash_metric_code
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import UNREADABLE, hash_own_checkout, hash_plugin_code
from fedsim.plugins.inline import is_object

Row = dict[str, Any]
_KEY_COLUMNS = ("attack", "variant", "round", "victim", "repeat")
NUMBER_COLUMNS = ("value", "floor", "nearest_public", "ceiling")
"""Columns of scores, each a number or empty."""
_NO_INFLUENCE = frozenset({"when", "victims", "rounds", "repeats", "workers", "device"})
"""Settings of [adversary] that say which findings there are, but nothing about a finding."""


@dataclass(frozen=True, kw_only=True)
class EarlierScores:
    """Scores of the run folder, for findings whose inputs have not changed.

    Attributes:
        new_hashes: hash of the inputs of each finding that was scored now, by its path in the folder.
    """

    cache: FindingCache
    spec: AttackFile
    new_hashes: dict[str, str] = field(default_factory=dict)

    def find_rows(self, path: Path, about: Mapping[str, Any], inputs: str) -> tuple[list[Row], list[Row]]:
        """Return what the tables say of a finding; nothing where it has to be scored."""
        if not inputs or self._old_hashes.get(self._name_finding(path)) != inputs:
            return [], []
        self.note_scores(path, inputs)
        key = tuple(str(about[column]) for column in _KEY_COLUMNS)
        return self._old_rows[0][key], self._old_rows[1][key]

    def note_scores(self, path: Path, inputs: str) -> None:
        """Note that a finding has scores that follow from `inputs`, see `hash_inputs`."""
        if inputs:
            self.new_hashes[self._name_finding(path)] = inputs

    def save(self) -> None:
        """Write the hashes of all findings that have scores."""
        folder = self.cache.folder
        write_text(folder.score_inputs, json.dumps(self.new_hashes, indent=1, sort_keys=True) + "\n")
        folder.manifest.note(folder.score_inputs)

    def hash_inputs(self, path: Path, about: Mapping[str, Any], victims: Sequence[int]) -> str:
        """Return a hash of all that the scores of a finding follow from; empty where something has none."""
        if self._common_inputs is None:
            return ""
        app, adversary = self.cache.case.tables_of_finding(self.spec, about)
        settings = adversary.model_dump(mode="json", exclude=set(_NO_INFLUENCE))
        inputs = [self._common_inputs, app.model_dump(mode="json"), settings, list(victims), cached_file_hash(path)]
        return hash_json(inputs)

    def _name_finding(self, path: Path) -> str:
        return path.relative_to(self.cache.folder.path).as_posix()

    @cached_property
    def _common_inputs(self) -> Row | None:
        """What all scores of the run follow from; None where something is in no file."""
        noted, scoring_code = self.cache.folder.manifest.contents, hash_scoring_code()
        hashes = [self.cache.model_code]
        for group in ("metrics", "modalities", "findings"):
            hashes += scoring_code[group].values()
        if noted is None or UNREADABLE in hashes:
            return None
        if any(isinstance(value, str) and is_object(value) for value in (noted.settings or {}).values()):
            return None  # an object of a program cannot be hashed
        return {
            "versions": versions(),
            "fedsim": hash_own_checkout(),
            **scoring_code,
            "truth files": {client: cached_file_hash(file) for client, file in self.cache.case.files.items()},
            "model code": self.cache.model_code,
            "settings": noted.settings,
            "code": noted.code,
            "data": noted.data,
            "seed": self.cache.case.seed,
        }

    @cached_property
    def _old_hashes(self) -> Mapping[str, str]:
        """Hashes of the inputs of scores in the folder; none where a table is not what was written."""
        folder = self.cache.folder
        paths = (folder.score_inputs, folder.scores, folder.images)
        if not all(path.is_file() and folder.manifest.vouches_for(path) for path in paths):
            return {}
        try:
            hashes: dict[str, str] = json.loads(folder.score_inputs.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return hashes if isinstance(hashes, dict) else {}

    @cached_property
    def _old_rows(self) -> tuple[Mapping[tuple[str, ...], list[Row]], Mapping[tuple[str, ...], list[Row]]]:
        """Rows of both tables by finding, with numbers as numbers."""
        folder = self.cache.folder
        tables = defaultdict[tuple[str, ...], list[Row]](list), defaultdict[tuple[str, ...], list[Row]](list)
        for table, path in zip(tables, (folder.scores, folder.images), strict=True):
            for row in read_rows(path):
                table[tuple(row[column] for column in _KEY_COLUMNS)].append(_to_numbers(row))
        return tables


def _to_numbers(row: Mapping[str, str]) -> Row:
    numbers: Row = {name: float(row[name]) for name in NUMBER_COLUMNS if row.get(name)}
    if "higher_is_better" in row:
        numbers["higher_is_better"] = row["higher_is_better"] == "True"
        numbers["examples"] = int(row["examples"])
    if "image" in row:
        numbers["image"] = int(row["image"])
    return {**row, **numbers}


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
