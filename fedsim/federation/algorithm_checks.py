"""Refusals, before a run, of what a client algorithm does not go with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedsim.base.errors import ConfigError
from fedsim.interfaces.algorithm import ClientAlgorithm
from fedsim.interfaces.defense import Defense, overrides
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.plugins import registry
from fedsim.training.model_parts import find_private_names

if TYPE_CHECKING:
    from fedsim.federation.experiment import Experiment

_PLAIN = "fedavg"


def name_of_algorithm(algorithm: ClientAlgorithm) -> str:
    """Return the name of `algorithm` in an experiment file, or of its unregistered class."""
    return registry.find_name("algorithms", type(algorithm)) or type(algorithm).__name__


def check_algorithm(experiment: Experiment, strategy: Any) -> None:
    """Check that the clients' algorithm goes with everything else in the experiment."""
    algorithm = experiment.algorithm
    name = name_of_algorithm(algorithm)
    _check_strategy(experiment, strategy, name)
    if experiment.trains_plainly:
        return
    algorithm.check(experiment.training)
    private_names = find_private_names(algorithm, experiment.model, name)
    _check_measurements(experiment, name)
    for defense in experiment.defenses:
        _check_defense(defense, algorithm, name)
    has_controls = bool(algorithm.initial_controls(experiment.initial_model_state()))
    if has_controls and experiment.config.secure_aggregation is not None:
        raise ConfigError(
            f"secure_aggregation: '{name}' sends control variates, of which its server needs the plain mean, and sums "
            "are weighted by examples; leave [secure_aggregation] out, or choose another algorithm"
        )
    if private_names:
        _check_evaluation(experiment, name)


def _check_strategy(experiment: Experiment, strategy: Any, name: str) -> None:
    """Raise ConfigError where the strategy is not one that the algorithm goes with."""
    strategy_name = experiment.config.strategy.name
    expected = experiment.algorithm.strategies
    if expected and strategy_name not in expected:
        raise ConfigError(
            f"strategy.name: algorithm '{name}' goes with {' or '.join(map(repr, expected))}, got '{strategy_name}'; "
            "leave [strategy] out, or choose another algorithm"
        )
    accepted = getattr(type(strategy), "algorithms", ())
    if accepted and name not in accepted:
        raise ConfigError(
            f"algorithm.name: strategy '{strategy_name}' goes with {' or '.join(map(repr, accepted))}, got '{name}'; "
            "choose another strategy, or that algorithm"
        )
    if experiment.trains_plainly:
        return
    if experiment.training.sends == "gradient":
        raise ConfigError(
            f"strategy.name: clients of '{strategy_name}' send the gradient of one mini-batch, and '{name}' takes "
            f"local steps; choose another strategy, or algorithm '{_PLAIN}'"
        )
    if strategy_name == "fedprox":
        raise ConfigError(
            f"strategy.name: the server of 'fedprox' adds a proximal term to what '{name}' trains; choose 'fedavg', or "
            f"algorithm '{_PLAIN}'"
        )


def _check_measurements(experiment: Experiment, name: str) -> None:
    """Raise ConfigError for what measures plain local training."""
    config = experiment.config
    for table in ("measure", "canaries"):
        if getattr(config, table):
            raise ConfigError(f"{table}: {_describe_other_training(name)}; leave [{table}] or [algorithm] out")
    if experiment.private_names and config.states.rounds:
        raise ConfigError(
            f"states.rounds: with '{name}' the server never has the whole model, so there is no state to save; leave "
            "it out"
        )


def check_trains_plainly(experiment: Experiment, command: str) -> None:
    """Raise ConfigError where clients train otherwise than a command takes for granted that simulates them anew."""
    if not experiment.trains_plainly:
        name = name_of_algorithm(experiment.algorithm)
        raise ConfigError(f"{command}: {_describe_other_training(name)}; name an experiment or run without [algorithm]")


def _describe_other_training(name: str) -> str:
    return f"it measures messages of plain local training, and '{name}' trains otherwise"


def _check_defense(defense: Defense, algorithm: ClientAlgorithm, name: str) -> None:
    """Raise ConfigError for a defense that takes plain local training for granted."""
    defense_name = name_of_defense(defense)
    if overrides(defense, "on_data"):
        raise ConfigError(
            f"defense: {defense_name} chooses examples by messages of plain local training, and '{name}' trains "
            "otherwise; leave one of them out"
        )
    if not algorithm.counts_steps and (overrides(defense, "on_examples") or overrides(defense, "sampling")):
        raise ConfigError(
            f"defense: {defense_name} accounts for the local steps of [training], and '{name}' takes more; leave one "
            "of them out"
        )
    if algorithm.adds_to_loss and (overrides(defense, "on_examples") or overrides(defense, "sampling")):
        raise ConfigError(
            f"defense: {defense_name} bounds the gradients of single examples, and '{name}' adds a term to their "
            "losses; leave one of them out"
        )


def _check_evaluation(experiment: Experiment, name: str) -> None:
    """Raise ConfigError where nobody could evaluate the models of the clients."""
    if experiment.config.federation.evaluate_every and not experiment.data.clients_hold_out:
        raise ConfigError(
            f"partition.test_fraction: with '{name}' a part of the model stays with each client, so that only the "
            "clients can evaluate, on examples of theirs; hold some out, such as 0.2, or set "
            "federation.evaluate_every = 0"
        )
