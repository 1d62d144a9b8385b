"""Build the plug-ins that tables name, and check that each is of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsim.base.errors import PluginError
from fedsim.exposure.measure import Measure
from fedsim.exposure.of_clients import MeasureSchedule
from fedsim.federation.adversary_tables import AttackTable
from fedsim.federation.config import AttackFile
from fedsim.federation.federation_tables import AlgorithmTable, MeasureTable
from fedsim.federation.table import PluginTable
from fedsim.interfaces.algorithm import ClientAlgorithm
from fedsim.interfaces.attack import Attack
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.defense_checks import check_defense, check_order
from fedsim.plugins import registry
from fedsim.plugins.frozen import check_frozen


def build_algorithm(table: AlgorithmTable) -> ClientAlgorithm:
    """Build the clients' algorithm."""
    plugin = registry.build("algorithms", table.name, table.settings, "algorithm")
    algorithm: ClientAlgorithm = _check_kind(plugin, ClientAlgorithm, "algorithm")
    return algorithm


def build_attacks(spec: AttackFile) -> list[tuple[AttackTable, Attack]]:
    """Build the attacks that a file names; return them with their tables."""
    attacks: list[tuple[AttackTable, Attack]] = []
    for table in spec.attack:
        where = f"attack.{table.title}"
        plugin = registry.build("attacks", table.name, table.settings, where)
        attacks.append((table, _check_kind(plugin, Attack, where).with_title(table.title)))
    return attacks


def build_defenses(tables: Sequence[PluginTable]) -> list[Defense]:
    """Build the clients' defenses, and check that they can follow one another."""
    defenses: list[Defense] = []
    for number, table in enumerate(tables):
        plugin = registry.build("defenses", table.name, table.settings, f"defense.{number}")
        defenses.append(check_defense(plugin))
    for defense in defenses:
        check_frozen(type(defense))
    check_order(defenses)
    return defenses


def build_measure(table: MeasureTable) -> MeasureSchedule:
    """Build the measure that a table names, with the settings of its use."""
    where = f"measure.{table.title}"
    plugin = registry.build("measures", table.name, table.settings, where)
    return MeasureSchedule(
        title=table.title,
        measure=_check_kind(plugin, Measure, where),
        per_example=table.each,
        interval=table.every,
        memory_budget=table.memory << 20,
    )


def _check_kind(plugin: Any, kind: type[Any], where: str) -> Any:
    """Return the plug-in if its class derives from `kind` and cannot change."""
    if not isinstance(plugin, kind):
        cls = type(plugin)
        raise PluginError(f"{where}: {cls.__module__}.{cls.__name__} does not derive from {kind.__name__}")
    check_frozen(type(plugin))
    return plugin
