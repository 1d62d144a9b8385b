"""The design of an evaluation: what an experiment, attack or sweep file sets in each of its cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsim.base.errors import ConfigError, FedsimError, TrustError
from fedsim.data import Dataset
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import config_of
from fedsim.federation.resolve import resolve
from fedsim.federation.trust import check_trust
from fedsim.interfaces.attack import Attack
from fedsim.recording.recorder import RecordingPlan
from fedsim.sweeps.file import CASE, SweepFile
from fedsim.sweeps.grid import ATTACK, DEFENSE, GridPoint, build_grid


@dataclass(frozen=True, kw_only=True)
class EvaluationDesign:
    """Settings of an evaluation.

    Attributes:
        specs: the experiment or attack file; the experiments of all valid cells of a sweep, with
            its first seed.
        sweep: the sweep file; None for a single experiment or an attack file.
        refused: cells of the sweep that are not valid, each with the reason.
    """

    specs: Sequence[AttackFile]
    sweep: SweepFile | None = None
    refused: Sequence[tuple[GridPoint, ConfigError]] = ()
    _datasets: dict[str, Dataset | FedsimError] = field(default_factory=dict)

    @classmethod
    def of_sweep(cls, file: SweepFile, *, trust: bool) -> EvaluationDesign:
        """Return the design of a sweep.

        Args:
            trust: import code that a file in a run folder names.

        Raises:
            ConfigError: no cell of the sweep is valid.
            TrustError: the file is in a run folder, and names code.
        """
        grid = build_grid(file)
        configs: list[Config] = []
        refused: list[tuple[GridPoint, ConfigError]] = []
        for point in grid.points:
            if point.seed != grid.points[0].seed:
                continue
            try:
                config = config_of(grid.tables(point), file.where, file.folder)
                check_trust(config, Path(file.where), trust or file.is_own)
                resolve(config)
            except TrustError:
                raise
            except ConfigError as error:  # other cells may do without this combination
                refused.append((point, error))
                continue
            configs.append(config)
        if not configs:
            raise refused[0][1]
        return cls(specs=configs, sweep=file, refused=refused)

    @cached_property
    def attacked_specs(self) -> list[tuple[AttackFile, list[Attack]]]:
        """Files with an attack, each with its attacks."""
        return [(spec, [attack for _, attack in build_attacks(spec)]) for spec in self.specs if spec.attack]

    @cached_property
    def attacked_configs(self) -> list[tuple[Config, list[Attack]]]:
        """Experiments with an attack, each with its attacks; none for an attack file."""
        return [(spec, attacks) for spec, attacks in self.attacked_specs if isinstance(spec, Config)]

    @property
    def configs(self) -> list[Config]:
        """Experiments; none for an attack file."""
        return [spec for spec in self.specs if isinstance(spec, Config)]

    @property
    def seeds(self) -> list[int]:
        """Seeds of the federation; none for an attack file."""
        if self.sweep is not None and self.sweep.sweep.seeds is not None:
            return list(self.sweep.sweep.seeds)
        return [config.federation.seed for config in self.configs[:1]]

    def dataset(self, config: Config) -> Dataset | None:
        """Return the data set of an experiment; None where it is not on this machine."""
        result = self._load_dataset(config)
        return result if isinstance(result, Dataset) else None

    def explain_no_dataset(self, config: Config) -> str:
        """Return why the data set of an experiment cannot be read; empty where it can."""
        result = self._load_dataset(config)
        return f"{config.data.name} cannot be checked: {result}." if isinstance(result, FedsimError) else ""

    def _load_dataset(self, config: Config) -> Dataset | FedsimError:
        key = config.data.model_dump_json()
        if key not in self._datasets:
            try:
                self._datasets[key] = Experiment(config).dataset
            except FedsimError as error:
                self._datasets[key] = error
        return self._datasets[key]

    def write_out_changes(
        self, title: str, changes: Mapping[str, Any], further: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return `changes` as tables of this file: in a sweep, as further values of axes.

        What is no value of an axis becomes a case called `not title`, since it avoids the pitfall; that
        which avoids `no-prior` is called `prior`.

        Args:
            further: changes of other cells of a sweep, which become values of their own.
        """
        if self.sweep is None or "sweep" in changes:
            return dict(changes)
        axes = dict(self.sweep.sweep.axes)
        for name in (ATTACK, DEFENSE):
            if name not in axes and self.sweep.base.get(name):
                axes[name] = [[*self.sweep.base[name]]] if name == DEFENSE else [*self.sweep.base[name]]
        changed: dict[str, None] = {}
        for number, cell_changes in enumerate([changes, *further], start=1):
            case: dict[str, Any] = {}
            for key, value in _flatten_changes(cell_changes, set(axes)).items():
                if key in axes:
                    axes[key] = [*axes[key], *value] if key == ATTACK else [*axes[key], value]
                    changed[key] = None
                else:
                    _set_nested(case, key, value)
            if case:
                cases = axes.get(CASE, [{"label": "as it is"}])
                avoided = title.removeprefix("no-") if title.startswith("no-") else f"not {title}"
                label = avoided if number == 1 else f"{avoided} {number}"
                # The changes suit the first cell, which has the first case.
                axes[CASE] = [*cases, _merge_tables(cases[0], case) | {"label": label}]
                changed[CASE] = None
        return {"sweep": {"axes": {key: axes[key] for key in changed}}}


def _flatten_changes(changes: Mapping[str, Any], axes: set[str], prefix: str = "") -> dict[str, Any]:
    """Return changes by their whole key; a table that is an axis as a whole stays a table."""
    flat: dict[str, Any] = {}
    for key, value in changes.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and path not in axes:
            flat |= _flatten_changes(value, axes, f"{path}.")
        else:
            flat[path] = value
    return flat


def _merge_tables(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tables)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and "name" not in value:
            merged[key] = _merge_tables(old, value)
        else:
            merged[key] = value
    return merged


def _set_nested(tables: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for word in parents:
        tables = tables.setdefault(word, {})
    tables[last] = value


def recorded_rounds(config: Config) -> list[int]:
    """Return the rounds that the experiment records."""
    table = config.recording
    plan = RecordingPlan(rounds=table.rounds, every=table.every)
    return [number for number in range(1, config.federation.rounds + 1) if plan.keeps_round(number)]


def attacked_rounds(config: Config) -> list[int]:
    """Return the rounds whose messages the experiment attacks."""
    chosen, recorded = config.adversary.rounds, recorded_rounds(config)
    if chosen == "all":
        return recorded
    return recorded[:1] if chosen is None else list(chosen)
