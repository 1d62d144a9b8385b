"""Write out what an experiment file leaves to defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedsim.base.errors import ConfigError
from fedsim.federation.config import Config
from fedsim.federation.federation_tables import StrategyTable, TrainingTable
from fedsim.federation.strategy_checks import declared_message
from fedsim.federation.table_validation import validate_tables
from fedsim.plugins import registry
from fedsim.plugins.inline import is_object


def resolve(config: Config) -> Config:
    """Return the experiment with plug-ins' default settings and `training.sends` written out.

    Raises:
        ConfigError: a plug-in refuses its settings, or the strategy's class contradicts
            `training.sends`.
        PluginError: the strategy does not load.
    """

    def write_out(group: registry.Group, table: Any, where: str) -> Any:
        plugin = registry.build(group, table.name, table.settings, where)
        if not dataclasses.is_dataclass(plugin):
            return table
        check_no_lost_none(plugin, where)
        return type(table)(**{**table.model_dump(), **dataclasses.asdict(plugin)})  # type: ignore[arg-type]

    training, strategy = _resolve_training_and_strategy(config)
    # The victims, by default the clients with canaries, may change later.
    canaries = config.canaries
    if canaries is not None and config.central_privacy is None:
        canaries = canaries.model_copy(update={"clients": config.canary_clients})
    update = {
        "training": training,
        "strategy": strategy,
        "canaries": canaries,
        "data": write_out("datasets", config.data, "data"),
        "partition": write_out("partitions", config.partition, "partition"),
        "model": write_out("models", config.model, "model"),
        "defense": [write_out("defenses", table, f"defense.{i}") for i, table in enumerate(config.defense)],
        "algorithm": config.algorithm and write_out("algorithms", config.algorithm, "algorithm"),
        "measure": [write_out("measures", table, f"measure.{table.title}") for table in config.measure],
        "attack": [write_out("attacks", table, f"attack.{table.title}") for table in config.attack],
    }
    tables = config.model_copy(update=update).model_dump(mode="json", exclude_none=True)
    resolved = validate_tables(Config, tables, "experiment")
    resolved._data = config._data
    return resolved


def check_no_lost_none(plugin: Any, where: str) -> None:
    """Raise ConfigError where a setting, not None by default, is None, which no file can hold."""
    for field in dataclasses.fields(plugin):
        if field.init and field.default is not None and getattr(plugin, field.name) is None:
            raise ConfigError(
                f"{where}.{field.name}: None cannot be written in an experiment file, where "
                "leaving the setting out means its default; give it another value, or make None "
                "its default"
            )


def _choose_strategy(config: Config) -> StrategyTable:
    """Return the strategy of the file, or the usual one of the algorithm where the file names none."""
    if config.algorithm is None or "strategy" in config.model_fields_set:
        return config.strategy
    strategies = registry.load("algorithms", config.algorithm.name).strategies
    return StrategyTable(name=strategies[0]) if strategies else config.strategy


def _resolve_training_and_strategy(config: Config) -> tuple[TrainingTable, StrategyTable]:
    """Write out what clients send, and the default step size of a server of gradients."""
    training, strategy = config.training, _choose_strategy(config)
    cls = registry.load("strategies", strategy.name)
    declared = declared_message(cls, strategy.name, training.sends if "sends" in training.model_fields_set else None)
    training = training.model_copy(update={"sends": declared})
    if declared == "weights":
        return training, strategy
    rate = None if is_object(strategy.name) else registry.setting_parameters(cls).get("learning_rate")
    if rate is not None and isinstance(rate.default, int | float):
        strategy = StrategyTable(**{"learning_rate": rate.default} | strategy.model_dump())
    return training, strategy
