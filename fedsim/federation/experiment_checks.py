"""Check, before any work, that the parts of an experiment can be built and go together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedsim.base.errors import ConfigError, FedsimError, error_reason, one_line
from fedsim.base.randomness import generator
from fedsim.exposure.of_clients import failure_reason
from fedsim.federation import secure_aggregation
from fedsim.federation.algorithm_checks import check_algorithm
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.central_privacy import check_central_privacy, check_noised_names, check_server_canaries
from fedsim.federation.config import Config
from fedsim.federation.distributed_privacy import check_distributed_privacy
from fedsim.federation.overlap import describe_tested_records
from fedsim.federation.states import TrainingStates
from fedsim.federation.strategy_checks import check_client_rates, describe_lost_protection, sample_size
from fedsim.federation.table import PluginTable
from fedsim.interfaces.defense import Defense, overrides
from fedsim.interfaces.defense_calls import apply_on_data, apply_on_update
from fedsim.interfaces.defense_checks import check_setting, name_of_defense
from fedsim.interfaces.local_context import ClientRound, LocalContext
from fedsim.plugins import registry
from fedsim.plugins.inline import is_object
from fedsim.recording.payloads import Payload
from fedsim.training.canaries import Canaries, audited_hook
from fedsim.training.evaluation_faults import describe_evaluation_faults
from fedsim.training.example_independence import check_example_independence
from fedsim.training.hidden_state import HIDDEN_STATE, has_hidden_state
from fedsim.training.hooks import TrainingHooks
from fedsim.training.model_state import running_statistics
from fedsim.training.models.checks import check_model
from fedsim.training.modes import trained_shapes

if TYPE_CHECKING:
    from fedsim.federation.experiment import Experiment

log = logging.getLogger(__name__)
_KEEP_UPDATES = 'or set [recording] keep = "updates"'


def check_experiment(experiment: Experiment) -> None:
    """Build each part of an experiment once, and check that the parts go together."""
    # Build each part, for its errors alone.
    build_attacks(experiment.config)
    _ = experiment.loss
    experiment.data.train(0)
    strategy = experiment.new_strategy()
    experiment.initial_state()
    # Check that the parts go together.
    check_algorithm(experiment, strategy)
    check_client_rates(strategy, experiment.config.strategy.settings, experiment.training.learning_rate)
    sampled = sample_size(experiment.strategy_settings(strategy), experiment.config.federation.clients)
    if sentence := describe_lost_protection(strategy, sampled):
        log.warning("%s", sentence)
    _check_secure_aggregation(experiment, strategy)
    _check_federation_privacy(experiment, strategy)
    _check_defenses(experiment)
    _check_canaries(experiment)
    # Try the model on the first examples.
    model, dataset, first_examples = experiment.model, experiment.dataset, slice(0, 16)
    inputs = experiment.data.to_model(dataset.train.inputs(first_examples))
    labels = dataset.train.labels[first_examples]
    check_model(model, dataset, inputs[:2], experiment.config.model.name, attacked=bool(experiment.config.attack))
    _check_passes(experiment, inputs[:4])
    if sentence := describe_tested_records(experiment.data):
        log.warning("data: %s", sentence)
    _check_start(experiment)
    check_example_independence(model, experiment.training, experiment.client_defenses(0), inputs, labels)
    _check_measures(experiment)
    check_recipe(experiment)


def _check_start(experiment: Experiment) -> None:
    """Warn where the state to start from was trained on examples that clients hold out to test on, or may have been."""
    start: str | None = experiment.config.model.start
    if start is None or not experiment.data.test_fraction:
        return
    # Follow each state to the one that its own training started from.
    name, seen = Path(start).name, set[str]()
    while start and start not in seen:
        seen.add(start)
        states = TrainingStates(Path(start).parent).manifest()
        state, trained = states.get("states", {}).get(Path(start).stem), states.get("experiment", {})
        if state is None:
            log.warning(
                "model.start: nothing says what '%s' was trained on%s; if it was examples that clients hold out here, "
                "accuracy measures memory; put the manifest of its folder back, or train it again",
                Path(start).name,
                "" if len(seen) == 1 else f", from which the training of '{name}' began",
            )
            return
        if trained_on := _describe_unlike_training(experiment, state, trained):
            log.warning(
                "model.start: '%s' was trained on %s, and so on examples that clients hold out here, on which accuracy "
                "then measures memory; start from a state of the same federation, or set partition.test_fraction to 0",
                name,
                trained_on,
            )
            return
        start = trained.get("model", {}).get("start")


def _describe_unlike_training(experiment: Experiment, state: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """Say on which other examples of the same data a state was trained; empty for none."""
    data, trained_data = experiment.config.data.model_dump(mode="json"), trained.get("data", {})
    if not trained_data or any(trained_data.get(key) != data.get(key) for key in ("name", "path")):
        return ""
    if state.get("epoch"):
        return "the whole training set"
    has_same_clients = trained.get("contents", {}).get("data") == experiment.data.sha256
    return "examples of other clients" if state.get("round") and not has_same_clients else ""


def _check_passes(experiment: Experiment, inputs: Tensor) -> None:
    """Raise ConfigError where passes of the model follow from what no message holds; warn of faulty evaluation."""
    name = experiment.config.model.name
    try:
        hides_state = has_hidden_state(
            experiment.model, experiment.new_model("hidden state"), experiment.training, inputs
        )
        fault = describe_evaluation_faults(experiment.model, inputs)
    except Exception as error:  # whatever a stranger's model raises; the run names the clients that it fails
        log.warning("model '%s': failed on %d examples (%s)", name, len(inputs), one_line(error_reason(error)))
        return
    if hides_state:
        raise ConfigError(f"model: of '{name}', {HIDDEN_STATE}")
    if fault:
        log.warning("model '%s': %s", name, fault)


def _check_secure_aggregation(experiment: Experiment, strategy: Any) -> None:
    """Raise ConfigError where groups, strategy, weights or defenses forbid summing securely."""
    table = experiment.config.secure_aggregation
    if table is None:
        return
    secure_aggregation.check_groups(
        table, strategy, experiment.strategy_settings(strategy), experiment.config.federation.clients
    )
    if experiment.config.distributed_privacy is None:  # with it all clients weigh alike
        secure_aggregation.check_weights(table, experiment.reported_counts)
    secure_aggregation.check_defenses(experiment.defenses)


def _check_federation_privacy(experiment: Experiment, strategy: Any) -> None:
    """Raise ConfigError where nobody could bound what a client adds, or no noise keeps a budget."""
    if experiment.config.central_privacy is not None:
        check_central_privacy(experiment, strategy, experiment.strategy_settings(strategy))
    if experiment.config.distributed_privacy is not None:
        check_distributed_privacy(experiment)
    _ = experiment.federation_privacy


def _check_defenses(experiment: Experiment) -> None:
    """Raise ConfigError where a defense does not fit the experiment or the model."""
    if not experiment.defenses:
        return
    for defense in experiment.defenses:
        check_setting(defense, experiment.setting)
    _check_selecting_defenses(experiment)
    _check_statistics(experiment)
    _check_hooks(experiment, client=0)


def _check_statistics(experiment: Experiment) -> None:
    """Raise ConfigError where a defense moves running statistics of an update that is zero."""
    zeros = experiment.setting.update
    if running_statistics(experiment.model).isdisjoint(zeros):
        return
    for defense in experiment.client_defenses(0):
        try:
            sent = apply_on_update(defense, zeros, LocalContext(rng=generator("check")))
        except Exception as error:  # whatever a stranger's defense raises; each client says it
            log.debug("%s: its trial on an update of zeros failed (%s)", name_of_defense(defense), error)
            continue
        values = sent.values("delta", zeros) if isinstance(sent, Payload) else sent
        moved = [name for name, tensor in values.items() if tensor.any()]
        check_noised_names(experiment, moved, f"defense: {name_of_defense(defense)}")


def _check_hooks(experiment: Experiment, client: int, canaries: Canaries | None = None) -> None:
    """Raise ConfigError where defenses and canaries cannot act in the training of `client`."""
    defenses, count = experiment.client_defenses(client), experiment.data.counts[client]
    TrainingHooks(
        defenses, experiment.model, experiment.training, count, ClientRound(key=("check",)), canaries=canaries
    )


def _check_selecting_defenses(experiment: Experiment) -> None:
    """Try defenses that select examples on two examples.

    In a run, a client must not say why one of them failed. Defenses of other packages are not
    tried, as with measures.
    """
    selecting_defenses: list[Defense] = []
    for table, defense in zip(experiment.config.defense, experiment.client_defenses(0), strict=True):
        if overrides(defense, "on_data") and _is_from_fedsim(table):
            selecting_defenses.append(defense)
    if not selecting_defenses:
        return
    local = experiment.trial_round()
    for defense in selecting_defenses:
        try:
            apply_on_data(defense, local, LocalContext(rng=generator("check")))
        except FedsimError as error:
            raise ConfigError(f"defense: {name_of_defense(defense)}: {error}") from error


def _check_canaries(experiment: Experiment) -> None:
    """Raise ConfigError where canaries can measure nothing, or cannot be inserted."""
    if experiment.config.canaries is None:
        return
    if (server_canaries := experiment.server_canaries) is not None:
        check_server_canaries(experiment.config)
        server_canaries.draw_coordinates(trained_shapes(experiment.model, experiment.training))
        return
    if not any(map(audited_hook, experiment.defenses)):
        raise ConfigError(
            "canaries: they test a guarantee for a client's examples or its update, and no defense here has one; "
            "add dp-sgd or update-noise, or leave [canaries] out"
        )
    for client in experiment.config.canary_clients:
        if (canaries := experiment.client_canaries(client)) is not None:
            _check_hooks(experiment, client, canaries)
            canaries.draw_coordinates(trained_shapes(experiment.model, experiment.training))


def _check_measures(experiment: Experiment) -> None:
    """Raise ConfigError where a measure does not apply.

    Measures of other packages are not tried: only clients run them, so that no foreign code
    runs in the server's process. Their errors show when the first client measures.
    """
    schedules = zip(experiment.config.measure, experiment.measures, strict=True)
    own_schedules = [schedule for table, schedule in schedules if _is_own_plugin("measures", table.name)]
    if not own_schedules:
        return
    local = experiment.trial_round()
    for schedule in own_schedules:
        try:
            schedule.compute_once(local)
        except FedsimError as error:
            raise ConfigError(f"measure.{schedule.title}: {failure_reason(error)}") from error


def _is_from_fedsim(table: PluginTable) -> bool:
    """Return whether a defense, and the measure that it uses, if any, are fedsim's own."""
    measure = table.settings.get("measure")
    name = measure.get("name") if isinstance(measure, Mapping) else measure
    return _is_own_plugin("defenses", table.name) and (not isinstance(name, str) or _is_own_plugin("measures", name))


def _is_own_plugin(group: registry.Group, name: str) -> bool:
    return not is_object(name) and registry.is_builtin(group, name)


def check_recipe(experiment: Experiment) -> None:
    """Check that updates can be computed again, where the experiment records them by recipe.

    What only a round shows, such as a strategy that sends clients different models, is refused when
    it is recorded, and the first update is computed again in the run itself.
    """
    config = experiment.config
    if config.recording.keep != "recipe":
        return
    _check_place(config)
    _check_objects(config)
    if config.secure_aggregation is not None:
        raise _refusal(
            "secure_aggregation",
            "the server records sums of masked updates, which no client computes alone",
            "leave it out",
        )
    if config.recording.clients is not None and experiment.clients_at_once > 1:
        raise _refusal(
            "recording.clients",
            "clients with small networks train several at once, so a recipe names all that were asked",
            "leave it out, as a recipe takes some hundred bytes a client, or set federation.vectorise = false",
        )
    keeps_memory = config.defense or config.algorithm is not None
    if keeps_memory and (config.recording.rounds is not None or config.recording.every > 1):
        key = "every" if config.recording.rounds is None else "rounds"
        raise _refusal(
            f"recording.{key}",
            "a defense or an algorithm may keep something from round to round, which takes all rounds to compute again",
            "leave it out",
        )


def _check_place(config: Config) -> None:
    """Raise ConfigError where clients train elsewhere than on this machine's processor."""
    federation = config.federation
    if federation.device != "cpu":
        raise _refusal(
            f"federation.device = '{federation.device}'",
            "a GPU need not round its sums the same way twice",
            "use 'cpu'",
        )
    if federation.address is not None:
        raise _refusal(
            f"federation.address = '{federation.address}'",
            "clients on other machines may round otherwise than this one",
            "leave it out",
        )


def _check_objects(config: Config) -> None:
    """Raise ConfigError where a part of the training is an object of a Python program."""
    for where, (group, name) in config.plugins.items():
        if group not in ("strategies", "measures") and is_object(name):
            raise _refusal(
                where,
                "it is an object of this Python program, which no other one has",
                "name a plug-in or module:Class",
            )


def _refusal(culprit: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(f'recording.keep = "recipe" does not go with {culprit}: {reason}; {remedy}, {_KEEP_UPDATES}')
