"""Check that the server can release its models under central privacy, and choose the noise."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from fedsim.base.errors import ConfigError
from fedsim.federation.config import Config
from fedsim.federation.privacy_tables import CentralPrivacyTable
from fedsim.federation.strategy_checks import sample_size
from fedsim.privacy.central import (
    CENTRAL_PRIVACY,
    CentralPrivacy,
    choose_count_noise,
    count_shared_noise,
    make_central_mechanism,
)
from fedsim.privacy.federation_privacy import check_delta, find_least_noise
from fedsim.recording.recorder import RecordingPlan
from fedsim.training.model_state import running_statistics

if TYPE_CHECKING:
    from fedsim.federation.experiment import Experiment

_AVERAGING = ("FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "FedSgd")
"""Strategies, by class name, that make the next model of the mean of the updates alone."""


def make_central_privacy(
    table: CentralPrivacyTable, settings: Mapping[str, Any], clients: int, rounds: int
) -> CentralPrivacy:
    """Return the mechanism that a table describes.

    Args:
        settings: those of the strategy, which say how many clients a round has.
    """
    check_delta(table.delta, clients, CENTRAL_PRIVACY)
    rate = _read_rate(settings) if table.sampling == "poisson" else None
    expected = float(sample_size(settings, clients)) if rate is None else rate * clients
    cycle = _count_cycle(int(expected), clients) if table.sampling == "cyclic" else None
    num_bands = _choose_bands(table, cycle)
    noise = table.noise_multiplier
    if noise is None:
        assert table.epsilon is not None
        times_asked = rounds if cycle is None else math.ceil(rounds / cycle)
        noise = math.sqrt(count_shared_noise(table.noise, cycle)) * find_least_noise(
            lambda noise: make_central_mechanism(noise, rate, times_asked),
            table.epsilon,
            table.delta,
            f"{CENTRAL_PRIVACY}.epsilon",
        )
    return CentralPrivacy(
        clip=table.clip,
        noise_multiplier=noise,
        delta=table.delta,
        clients=clients,
        expected=expected,
        rate=rate,
        cycle=cycle,
        correlation=table.noise,
        num_bands=num_bands,
        quantile=table.quantile,
        clip_learning_rate=table.clip_learning_rate,
        count_noise=choose_count_noise(table.quantile, table.count_noise, expected),
    )


def _count_cycle(num_asked: int, clients: int) -> int:
    """Return in how many rounds all clients are asked once."""
    if clients % num_asked:
        raise ConfigError(
            f"strategy.fraction_train: with {CENTRAL_PRIVACY}.sampling = 'cyclic' all {clients} clients take turns, "
            f"and rounds of {num_asked} do not divide them; sample a number that does"
        )
    return clients // num_asked


def _choose_bands(table: CentralPrivacyTable, cycle: int | None) -> int:
    """Return the number of bands: that of the table, or as many as a cycle has rounds."""
    if table.noise != "banded" or cycle is None:
        return 1
    if table.bands is not None and table.bands > cycle:
        raise ConfigError(
            f"{CENTRAL_PRIVACY}.bands: noise of {table.bands} bands spans as many rounds, and each client is asked "
            f"once in {cycle}, so that two of its rounds would share noise, which is not accounted for; expected at "
            f"most {cycle}"
        )
    return cycle if table.bands is None else table.bands


def _read_rate(settings: Mapping[str, Any]) -> float:
    """Return the probability of each client to be drawn."""
    least = settings.get("min_train_nodes", 1)
    if least > 1:
        raise ConfigError(
            f"strategy.min_train_nodes: with {CENTRAL_PRIVACY}.sampling = 'poisson' clients are sampled "
            f"independently, so a round may have none, and {least} cannot be guaranteed; set it to 1, or sampling to "
            "'fixed'"
        )
    rate = float(settings.get("fraction_train", 1.0))
    if not 0 < rate <= 1:
        raise ConfigError(
            f"strategy.fraction_train: it is the probability of each client to be drawn, expected a value above 0 and "
            f"at most 1, got {rate:g}"
        )
    return rate


def check_central_privacy(experiment: Experiment, strategy: Any, settings: Mapping[str, Any]) -> None:
    """Check that strategy, messages and model let the server bound what a client adds."""
    name = type(strategy).__name__
    if name not in _AVERAGING or not type(strategy).__module__.startswith(("flwr.", "strategies.")):
        raise ConfigError(
            f"{CENTRAL_PRIVACY}: {name} may use more of the updates than their mean, and noise is added to the mean "
            "alone; choose a strategy that averages, as fedavg or fedadam, or leave the table out"
        )
    if settings.get("weighted_by_key", "num-examples") != "num-examples":
        raise ConfigError(
            f"strategy.weighted_by_key: under {CENTRAL_PRIVACY} all clients count alike, since with weights one of "
            f"them could move the mean by more than its clip, got {settings['weighted_by_key']!r}; leave it out"
        )
    if settings.get("fraction_train") == 0:
        raise ConfigError("strategy.fraction_train: with 0 no client trains, so there is nothing to protect; raise it")
    config = experiment.config
    if config.secure_aggregation is not None:
        raise ConfigError(
            f"{CENTRAL_PRIVACY}: the server clips the update of each client, and under secure aggregation it sees sums "
            "alone; leave [central_privacy] or [secure_aggregation] out"
        )
    check_released_state(experiment, CENTRAL_PRIVACY)


def check_server_canaries(config: Config) -> None:
    """Check that models tell what canaries moved, where these are clients of a server that promises something."""
    if config.central_privacy is not None and config.central_privacy.quantile is not None:
        raise ConfigError(
            "canaries: the server clips all of them, so that a clip that adapts would follow them; leave "
            "central_privacy.quantile or [canaries] out"
        )
    rounds, recording = config.federation.rounds, config.recording
    plan = RecordingPlan(rounds=recording.rounds, every=recording.every)
    recorded = [number for number in range(1, rounds + 1) if plan.keeps_round(number)]
    # A round's recording has the model before it, and that of the last round the final model, too.
    if len(recorded) + (rounds in recorded) < 2:
        raise ConfigError(
            f"canaries: they are seen in how models move, and of {rounds} rounds recording keeps one model alone, that "
            f"before round {recorded[0]}; record the next round as well (recording.rounds, recording.every), or all"
        )


def check_released_state(experiment: Experiment, table_name: str) -> None:
    """Raise ConfigError where the model has numbers that noise would spoil, or that get none."""
    if experiment.algorithm.initial_controls(experiment.initial_model_state()):
        raise ConfigError(
            f"{table_name}: the algorithm sends control variates with the model, and noise is meant for one "
            "sum; choose another algorithm, or leave the table out"
        )
    check_noised_names(experiment, experiment.initial_state(), table_name)


def check_noised_names(experiment: Experiment, names: Collection[str], where: str) -> None:
    """Raise ConfigError where a running statistic is among the `names` of numbers that get noise."""
    if statistics := sorted(running_statistics(experiment.model).intersection(names)):
        raise ConfigError(
            f"{where}: '{statistics[0]}' is a running statistic of a BatchNorm layer, and with noise a "
            "variance may fall below 0; set training.batch_norm_statistics to 'withheld', or choose a model without "
            "such layers"
        )
