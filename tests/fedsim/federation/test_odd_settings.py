"""Every setting of our plug-ins and tables, with values that make no sense: a sentence that names it, or plain use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import Bulyan, FedTrimmedAvg
from torch import nn

from fedsim.base.errors import ConfigError, FedsimError, PluginError, RunError
from fedsim.base.randomness import numpy_generator
from fedsim.base.task import Task
from fedsim.data import Dataset, Examples
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.resolve import resolve
from fedsim.federation.strategy_checks import describe_lost_protection
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins import registry
from fedsim.recording.payloads import State
from fedsim.training.models.checks import check_network, limit_memory
from tests.support.experiments import make_tiny_config, run_serial

ODD = [-1, 0, -0.5, 1.5, 50, 1 << 62, math.nan, math.inf, 1e30, True, "", "\0", "x", [], [-1], [math.nan], [True], {}]
NEEDED = {
    "qfedavg": {"client_learning_rate": 0.1},
    "fedsgd": {"learning_rate": 0.1},
    "dp-sgd": {"noise_multiplier": 1.0},
    "gate": {"measure": "gradient-norm", "above": 1.0},
}


def ours(group: registry.Group) -> list[str]:
    """Strangers' plug-ins may be installed, and are theirs to test."""
    entries = {name: registry.find_entry_point(group, name) for name in registry.registered_names(group)}
    return [name for name, entry in entries.items() if entry.dist and entry.dist.name == "fedsim-curious"]


def settings_of(*groups: registry.Group) -> list[Any]:
    return [
        pytest.param(group, name, key, id=f"{name}-{key}", marks=pytest.mark.thorough if is_shared(name, key) else ())
        for group in groups
        for name in ours(group)
        for key in registry.setting_parameters(registry.load(group, name))
    ]


def is_shared(name: str, key: str) -> bool:
    """Return whether it is a setting of another strategy that FedAvg has as well."""
    known = registry.setting_parameters(registry.load("strategies", "fedavg"))
    return name in ours("strategies") and name != "fedavg" and key in known


def assert_one_sentence(error: FedsimError, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert not text.endswith(".")
    assert any(word in text for word in words), text


def accepted(group: registry.Group, name: str, key: str) -> Iterator[tuple[Any, Any]]:
    """The odd values that are accepted, and the plug-in made with each."""
    for value in ODD:
        try:
            yield value, registry.build(group, name, {**NEEDED.get(name, {}), key: value}, "here")
        except FedsimError as error:
            assert_one_sentence(error, key)


@pytest.mark.parametrize(("group", "name", "key"), settings_of("attacks", "defenses", "datasets"))
def test_an_odd_setting_is_named_or_kept_as_it_was_written(group: registry.Group, name: str, key: str) -> None:
    for value, plugin in accepted(group, name, key):
        kept = dataclasses.asdict(plugin)[key]
        assert (list(kept) if isinstance(kept, tuple) else kept) == value
        assert not isinstance(kept, float) or math.isfinite(kept)
        assert not isinstance(value, bool) or isinstance(
            registry.setting_parameters(type(plugin))[key].default, bool | None
        )


@pytest.fixture(scope="module")
def data() -> Dataset:
    train = Examples(raw=torch.zeros(60, 1, 8, 8), labels=torch.arange(60) % 6, scale=1.0)
    return Dataset(name="drawn", train=train, test=train, num_classes=6, source="", licence="")


@pytest.mark.parametrize(("group", "name", "key"), settings_of("partitions"))
def test_an_odd_setting_of_a_partition_is_named_or_shares_out(
    group: registry.Group, name: str, key: str, data: Dataset
) -> None:
    for _, plugin in accepted(group, name, key):
        try:
            shares = plugin.assign(data, 4, numpy_generator(1))
        except FedsimError as error:
            assert_one_sentence(error, key, name, "partition", "drawn", "is not JSON")
            continue
        assert len(shares) == 4
        for share in shares:
            assert share.dtype == np.int64
            assert ((share >= 0) & (share < 60)).all()
            assert len(np.unique(share)) == len(share)


TASKS = {"text": Task((12,), 4, 50), "image": Task((3, 32, 32), 4), "table": Task((5,), 4)}


@pytest.mark.parametrize(("group", "name", "key"), settings_of("models"))
def test_an_odd_setting_of_a_model_is_named_or_builds_a_network(group: registry.Group, name: str, key: str) -> None:
    for value, plugin in accepted(group, name, key):
        if value in (50, 1e30) or (value == 1 << 62 and key in ("blocks", "layers", "width", "patch")):
            continue  # would take its time; what is too large is tested by itself
        built = 0
        for task in TASKS.values():
            try:
                with limit_memory(name):
                    network = check_network(plugin.build(task), name)
                    outputs = network.eval()(
                        torch.zeros(2, *task.input_shape).to(torch.long if task.vocabulary else None)
                    )
            except FedsimError as error:
                assert_one_sentence(error, key, name, "images", "texts", "takes", "inputs")
                continue
            assert isinstance(network, nn.Module)
            assert outputs.shape == (2, 4)
            built += 1
        assert built or value not in (True,)


@pytest.mark.parametrize(("group", "name", "key"), settings_of("strategies"))
def test_an_odd_setting_of_a_strategy_is_named_or_makes_one(group: registry.Group, name: str, key: str) -> None:
    training = {"local_steps": 1} if name == "fedsgd" else {"local_epochs": 1}
    for value in ODD:
        table = {"name": name, **NEEDED.get(name, {}), key: value}
        try:
            config = validate_tables(
                Config, {"strategy": table, "training": training, "federation": {"clients": 4}}, "here"
            )
            experiment = Experiment(resolve(config))
            strategy = experiment.new_strategy()
        except FedsimError as error:
            assert_one_sentence(error, key)
            continue
        assert value in (0, 1.5, 50), (key, value)
        assert not isinstance(value, bool)
        assert strategy is not None


def test_a_learning_rate_of_clients_that_a_strategy_does_not_set_is_refused_or_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Experiment(resolve(make_tiny_config(strategy={"name": "fedadam", "eta_l": 0.1}))).check()
    with pytest.raises(ConfigError, match=r"eta_l: changes nothing, as clients train at training.learning_rate = 0.1"):
        Experiment(resolve(make_tiny_config(strategy={"name": "fedadam", "eta_l": 5.0}))).check()
    Experiment(resolve(make_tiny_config(strategy={"name": "qfedavg", "client_learning_rate": 0.1}))).check()
    assert not caplog.text
    Experiment(resolve(make_tiny_config(strategy={"name": "qfedavg", "client_learning_rate": 0.5}))).check()
    assert "strategy.client_learning_rate: is 0.5" in caplog.text


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrangersNoise(Defense):
    """Adds noise to all that is sent, and declares nothing."""

    def on_update(self, update: State, context: LocalContext) -> State:
        return {name: tensor + torch.randn(tensor.shape, generator=context.rng) for name, tensor in update.items()}


@pytest.mark.parametrize(
    "defense", [{"name": "update-noise", "noise_multiplier": 1e-3}, {"name": f"{__name__}:StrangersNoise"}]
)
def test_noise_on_running_variances_which_may_fall_below_0_is_refused(defense: dict[str, Any]) -> None:
    model = {"name": "mlp", "hidden": [16], "batch_norm": True}
    with pytest.raises(ConfigError, match=r"defense: .*: '2.running_mean' is a running statistic of a BatchNorm layer"):
        Experiment(make_tiny_config(model=model, defense=[defense])).check()
    withheld = {"batch_norm_statistics": "withheld"}
    Experiment(make_tiny_config(model=model, defense=[defense], training=withheld)).check()
    Experiment(make_tiny_config(model=model, defense=[{"name": "top-k"}])).check()


def test_a_running_variance_that_a_factor_drives_below_0_ends_the_run(tmp_path: Path) -> None:
    """The model would give NaN, beside an accuracy."""
    config = make_tiny_config(
        model={"name": "mlp", "hidden": [16], "batch_norm": True},
        training={"local_epochs": 5, "batch_size": 4},
        federation={"rounds": 6},
        defense=[{"name": "random-mask", "masked": 0.9, "rescale": True}],
    )
    with pytest.raises(RunError, match=r"round \d: '2.running_var', a running variance .*, fell below 0, with which"):
        run_serial(config, tmp_path / "run")


class CastingLinear(nn.Module):
    """Casts its inputs to bfloat16, so that it takes those of fedsim."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10, dtype=torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs.flatten(1).bfloat16())
        return outputs


def test_a_network_of_another_type_than_attacks_compute_in_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'layer.weight' of torch.bfloat16, expected torch.float32, in which"):
        Experiment(make_tiny_config(model={"name": f"{__name__}:CastingLinear"})).check()


@pytest.mark.parametrize(
    ("clients", "beta", "trims"), [(4, 0.2, False), (4, 0.25, True), (5, 0.2, True), (4, 0.0, True)]
)
def test_a_trimmed_mean_that_trims_nobody_is_told_of(
    clients: int, beta: float, trims: bool, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = {"name": "fedtrimmedavg", "beta": beta}
    Experiment(resolve(make_tiny_config(strategy=strategy, federation={"clients": clients}))).check()
    assert ("nobody is trimmed" in caplog.text) != trims
    assert trims or "raise it to 0.25" in caplog.text


def test_krum_that_selects_all_clients_is_told_of_before_the_run(caplog: pytest.LogCaptureFixture) -> None:
    for selected, is_told in ((3, False), (4, True)):
        strategy = {"name": "multikrum", "num_nodes_to_select": selected}
        Experiment(resolve(make_tiny_config(strategy=strategy, federation={"clients": 4}))).check()
        assert ("4 are selected among 4 clients, so that nobody is left out" in caplog.text) == is_told


def test_a_class_made_from_a_robust_strategy_is_told_of_what_it_does_not_withstand() -> None:
    class Trimmed(FedTrimmedAvg):
        pass

    class Selective(Bulyan):
        pass

    assert "nobody is trimmed" in describe_lost_protection(Trimmed(beta=0.2), 4)
    sentence = describe_lost_protection(Selective(num_malicious_nodes=1), 6)
    assert "Selective withstands at most 0 malicious clients among 6, not 1" in sentence
    assert not describe_lost_protection(Selective(num_malicious_nodes=1), 7)


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({"name": "krum", "num_malicious_nodes": 1}, "withstands at most 0 malicious clients among 4, not 1"),
        ({"name": "bulyan", "num_malicious_nodes": 0}, ""),
        ({"name": "multikrum", "num_nodes_to_select": 4}, "num_nodes_to_select: 4 are selected among 4 clients"),
        ({"name": "multikrum", "num_nodes_to_select": 3}, ""),
        ({"name": "fedtrimmedavg", "beta": 0.2}, "0.2 of the 4 clients of a round is less than one client"),
    ],
)
def test_what_a_robust_strategy_does_not_withstand_is_told_by_the_clients_that_returned(
    strategy: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = {"clients": 5, "rounds": 2, "straggler_probability": 0.2, "seed": 1}
    run_serial(make_tiny_config(strategy=strategy, federation=federation), tmp_path / "run")
    sentences = [record.getMessage() for record in caplog.records if "strategy." in record.getMessage()]
    assert [sentence.startswith("round 2: strategy.") and told in sentence for sentence in sentences] == [True] * bool(
        told
    )


def test_a_round_in_which_nobody_returns_says_nothing_of_protection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_serial(
        make_tiny_config(federation={"clients": 3, "rounds": 2, "straggler_probability": 0.5, "seed": 0}),
        tmp_path / "run",
    )
    assert "round 2: the strategy aggregated nothing" in caplog.text
    assert "num_nodes_to_select" not in caplog.text


TABLES = {
    table: list(Config.model_fields[table].annotation.model_fields)  # type: ignore[union-attr]
    for table in ("training", "federation", "states", "recording", "partition", "data", "model")
}


@pytest.mark.parametrize(("table", "key"), [(table, key) for table, keys in TABLES.items() for key in keys])
def test_an_odd_value_of_a_table_is_named_or_kept(table: str, key: str) -> None:
    for value in ODD:
        tables: dict[str, Any] = {"training": {"local_epochs": 1}}
        tables[table] = tables.get(table, {}) | {key: value}
        try:
            config = validate_tables(Config, tables, "here")
            _ = Experiment(config).training
        except (FedsimError, PluginError) as error:
            assert_one_sentence(error, key, "training: set local_epochs or local_steps")
            continue
        assert getattr(getattr(config, table), key) == value
