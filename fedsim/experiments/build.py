"""An experiment file turned into objects: data, model, training, defenses, attacks."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.attacks import Attack
from fedsim.datasets import Dataset
from fedsim.datasets.checks import check_dataset
from fedsim.defense import (
    Defense,
    Participation,
    Setting,
    a_defense,
    called,
    check_fits,
    check_order,
    kept_examples,
    overrides,
)
from fedsim.errors import ConfigError, FedsimError, PluginError, first_line
from fedsim.experiments import secure_aggregation
from fedsim.experiments.config import (
    AttackFile,
    AttackTable,
    Config,
    MeasureTable,
    PluginTable,
    StrategyTable,
    TrainingTable,
    check,
)
from fedsim.experiments.federated_data import FederatedData, check_same_data
from fedsim.experiments.states import read_state
from fedsim.experiments.strategy_checks import LEAST, check_strategy, sends
from fedsim.exposure.of_clients import Gauge, reason
from fedsim.measure import Measure
from fedsim.models.checks import a_network, check_model, drawn_anew, within_memory
from fedsim.plugins import registry
from fedsim.plugins.frozen import check_frozen
from fedsim.plugins.objects import given, is_object
from fedsim.process_defaults import unchanged_defaults
from fedsim.randomness import generator, numpy_generator, seeded
from fedsim.task import Loss, smoothed
from fedsim.training.apart import check_apart
from fedsim.training.canaries import Canaries, audited_at
from fedsim.training.cohort import Share, fits, group_size
from fedsim.training.hooks import Hooks
from fedsim.training.local_round import LocalRound
from fedsim.training.model_state import load_state, state_of, statistics_of
from fedsim.training.modes import trained
from fedsim.training.sampling import batches_of_round
from fedsim.training.settings import LocalTraining


def data_folder() -> Path | None:
    """The folder named by FEDSIM_DATA, where data sets and weights are looked for.

    Raises:
        ConfigError: it begins with the home of a user whom nobody knows.
    """
    named = os.environ.get("FEDSIM_DATA")
    try:
        return Path(named).expanduser() if named else None
    except RuntimeError as error:
        raise ConfigError(f"FEDSIM_DATA: {named}: {first_line(error)}; write the path out") from error


class Experiment:
    """What a `Config` describes; every part is made when first asked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.seed = config.federation.seed

    @classmethod
    def from_json(cls, text: str) -> Experiment:
        """The inverse of `config.model_dump_json()`."""
        return cls(Config.model_validate_json(text))

    def check(self) -> None:
        """Make everything once, so that every error in the file shows before work starts."""
        with unchanged_defaults("code that the experiment names (data, model, strategy, a defense or a measure)"):
            self._check()

    def _check(self) -> None:
        build_attacks(self.config)
        parts = (self.loss, self.data.train(0), strategy := self.new_strategy(), self.initial_state())
        del parts
        self._check_secure_aggregation(strategy)
        self._check_defenses()
        self._check_canaries()
        sample = self.data.to_model(self.dataset.train.inputs(slice(0, 2)))
        check_model(self.model, self.dataset, sample, self.config.model.name, attacked=bool(self.config.attack))
        few = slice(0, 16)
        inputs, labels = self.data.to_model(self.dataset.train.inputs(few)), self.dataset.train.labels[few]
        check_apart(self.model, self.training, self.defenses_of(0), inputs, labels)
        self._check_measures()

    def _check_secure_aggregation(self, strategy: Any) -> None:
        """Raise ConfigError where groups, strategy, weights or defenses do not go with sums over groups."""
        table = self.config.secure_aggregation
        if table is None:
            return
        settings = vars(strategy) if is_object(self.config.strategy.name) else self._strategy_settings
        secure_aggregation.check_groups(table, strategy, settings, self.config.federation.clients)
        secure_aggregation.check_weights(table, self.reported)
        secure_aggregation.check_defenses(self.defenses)

    @cached_property
    def reported(self) -> list[int]:
        """What each client reports as N: of a gradient, the size of one mini-batch."""
        batch = self.training.batch_size if self.training.sends == "gradient" else None
        return [count if batch is None else min(count, batch) for count in self.data.counts]

    def _check_defenses(self) -> None:
        """Raise ConfigError where a defense does not fit what the experiment says, or the model."""
        if self.defenses:
            for defense in self.defenses:
                check_fits(defense, self.setting)
            self._try_choosing()
            Hooks(self.defenses_of(0), self.model, self.training, self.data.counts[0], ("check",))

    def _try_choosing(self) -> None:
        """Let defenses that choose examples choose among two, for a client must not say why one of them failed.

        As of measures, those of other packages are not tried.

        Raises:
            ConfigError: one does not apply to this task, model or training.
        """
        choosing = [
            defense
            for table, defense in zip(self.config.defense, self.defenses_of(0), strict=True)
            if overrides(defense, "on_data") and _is_ours(table)
        ]
        if not choosing:
            return
        local = self.trial()
        for defense in choosing:
            try:
                kept_examples(defense, local, generator("check"), {})
            except FedsimError as error:
                raise ConfigError(f"defense: {called(defense)}: {error}") from error

    def trial(self) -> LocalRound:
        """A client that takes a single step on two examples, to try out what clients do."""
        few = slice(0, 2)
        inputs, labels = self.data.to_model(self.dataset.train.inputs(few)), self.dataset.train.labels[few]
        training = dataclasses.replace(self.training, local_epochs=None, local_steps=1)
        share = Share(inputs=inputs, labels=labels, key=("check",), order=(torch.arange(len(labels)),))
        return LocalRound.of(self.filled(self.initial_state()), share, training, self.dataset.task.loss)

    def _check_canaries(self) -> None:
        """Raise ConfigError where canaries can measure nothing, or cannot be put among examples."""
        if self.config.canaries is None:
            return
        if not any(map(audited_at, self.defenses)):
            raise ConfigError(
                "canaries: they measure what is promised of a client's examples or of its update, and no defense here "
                "promises that; add dp-sgd or update-noise, or leave [canaries] out"
            )
        for client in self.config.carriers:
            if (canaries := self.canaries_of(client)) is not None:
                count = self.data.counts[client]
                Hooks(self.defenses_of(client), self.model, self.training, count, ("check",), canaries)
                canaries.places(trained(self.model, self.training))

    def _check_measures(self) -> None:
        """Raise ConfigError where a measure does not apply; one of another package is not tried: clients alone run it.

        So nobody else's code runs in the server's process, and what it refuses shows when the first client measures.
        """
        gauges = zip(self.config.measure, self.gauges, strict=True)
        ours = [gauge for table, gauge in gauges if _is_own("measures", table.name)]
        local = self.trial() if ours else None
        for gauge in ours:
            assert local is not None
            try:
                gauge.try_out(local)
            except FedsimError as error:
                raise ConfigError(f"measure.{gauge.title}: {reason(error)}") from error

    def canaries_of(self, client: int) -> Canaries | None:
        """What is put among the examples of `client`: nothing, unless a defense promises something of each example."""
        if client not in self._carriers or "on_examples" not in map(audited_at, self.defenses):
            return None
        assert self.config.canaries is not None
        return Canaries(seed=self.seed, client=client, count=self.config.canaries.count)

    @cached_property
    def _carriers(self) -> frozenset[int]:
        return frozenset(self.config.carriers)

    @cached_property
    def setting(self) -> Setting:
        """What defenses are to work in."""
        text = self.dataset.task.kind == "text"
        low, high = ([], []) if text else self.data.value_range()
        return Setting(
            update={n: torch.zeros_like(t) for n, t in self.initial_state().items() if t.is_floating_point()},
            task=self.dataset.task,
            training=self.training,
            rounds=self.config.federation.rounds,
            clients=self.config.federation.clients,
            num_examples=self.data.counts,
            value_range=None if text else (tuple(low), tuple(high)),
        )

    @cached_property
    def dataset(self) -> Dataset:
        """The data set, read from disk."""
        table = self.config.data
        plugin = registry.build("datasets", table.name, table.settings, "data")
        try:
            return check_dataset(plugin.load(data_folder()), table.name)
        except (MemoryError, OverflowError) as error:
            raise ConfigError(
                f"data: '{table.name}' with these settings does not fit into memory ({first_line(error)}); make it "
                "smaller"
            ) from error

    @cached_property
    def data(self) -> FederatedData:
        """The data set shared out among the clients."""
        table = self.config.partition
        data = FederatedData(
            dataset=self.dataset,
            partition=registry.build("partitions", table.name, table.settings, "partition"),
            clients=self.config.federation.clients,
            seed=self.seed,
            samples_per_client=table.samples_per_client,
            test_fraction=table.test_fraction,
            test_by=table.test_by,
            standardise=self.config.data.standardise,
        )
        if self.config._data:
            check_same_data(self.config._data, data.sha256)
        return data

    @cached_property
    def model(self) -> nn.Module:
        """A network to be filled with any state; its own weights mean nothing."""
        return self.new_model()

    def new_model(self, weights: str = "model") -> nn.Module:
        """A freshly built network, initialised from the run's seed; `weights` names the draw."""
        table = self.config.model
        plugin = registry.build("models", table.name, table.settings, "model")
        with seeded(self.seed, weights), within_memory(table.name):
            return a_network(plugin.build(self.dataset.task), table.name)

    def filled(self, state: Mapping[str, Tensor]) -> nn.Module:
        """A network of its own, on the CPU, that holds `state`."""
        model = deepcopy(self.model).cpu()
        load_state(model, state)
        return model

    def initial_state(self) -> dict[str, Tensor]:
        """w_0 of the federation: fresh weights, or the trained ones of `[model] start`.

        Raises:
            ConfigError: the file is not readable or holds another model.
        """
        start = self.config.model.start
        return self._fresh if start is None else self.state_in(Path(start))

    def state_in(self, path: Path) -> dict[str, Tensor]:
        """The trained state in a file, as the federation would start from it.

        Raises:
            ConfigError: the file is not readable or holds another model.
        """
        shared = self.training.batch_norm_statistics == "shared"
        withheld = () if shared else statistics_of(self.model)
        return read_state(path, self._fresh, self.config.model.name, withheld=withheld)

    @property
    def _fresh(self) -> dict[str, Tensor]:
        """Fresh weights, as far as the federation sends them."""
        return state_of(self.new_model(), statistics=self.training.batch_norm_statistics == "shared")

    def other_start(self) -> dict[str, Tensor]:
        """Random weights that no client of this federation was ever sent, in the form of w_0."""
        model = self.new_model("other start")
        if is_object(self.config.model.name):  # whose copies all have the same weights
            with seeded(self.seed, "other start"):
                drawn_anew(model)
        return state_of(model, statistics=self.training.batch_norm_statistics == "shared")

    def new_strategy(self) -> Any:
        """The Flower strategy that the experiment names, with the memory of a fresh start.

        Raises:
            ConfigError: it does not take one of the settings, or waits for more clients than there
                are, which would be for ever, or a setting makes no sense
                (`fedsim.experiments.strategy_checks`), or its clients send something else than the experiment says.
        """
        table, clients = self.config.strategy, self.config.federation.clients
        cls = registry.load("strategies", table.name)
        sends(cls, table.name, claimed=self.config.training.sends)
        if is_object(table.name):
            strategy = given(table.name, fresh=True)
            check_strategy(strategy, vars(strategy), clients)
            return strategy
        settings = self._strategy_settings
        strategy = registry.build("strategies", table.name, settings, "strategy")
        check_strategy(strategy, settings, clients)
        return strategy

    @property
    def _strategy_settings(self) -> dict[str, Any]:
        """What the experiment says of a strategy that it names, which waits for one client where it says nothing."""
        known = registry.parameters(registry.load("strategies", self.config.strategy.name))
        return dict.fromkeys((key for key in LEAST if key in known), 1) | self.config.strategy.settings

    @cached_property
    def training(self) -> LocalTraining:
        """How clients train, before the server adds anything to it; where they send gradients, with what it adds.

        Raises:
            ConfigError: the settings do not go together.
        """
        table = self.config.training
        settings = table.model_dump(exclude_none=True)
        if table.sends == "weights":
            return LocalTraining(**settings)
        rate = self.server_rate
        if table.learning_rate not in (TrainingTable().learning_rate, rate):
            raise ConfigError(
                f"training.learning_rate: with strategy '{self.config.strategy.name}' the server takes the steps; "
                "leave it out, the settings of the strategy are what counts"
            )
        return LocalTraining(**settings | ({} if rate is None else {"learning_rate": rate}))

    @property
    def loss(self) -> Loss:
        """What clients minimise: the task's loss, of labels that are smoothed as `training` says.

        Raises:
            ConfigError: there are no classes to spread labels over, or the settings do not go together.
        """
        return smoothed(self.dataset.task.loss, self.training.label_smoothing)

    @property
    def server_rate(self) -> float | None:
        """Step size of a server that is sent gradients, where its strategy has the setting `learning_rate`.

        Raises:
            ConfigError: it is no step size.
        """
        table = self.config.strategy
        rate = vars(given(table.name)).get("learning_rate") if is_object(table.name) else None
        rate = table.settings.get("learning_rate", rate)
        if rate is None:
            return None
        if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 < rate < math.inf:
            raise ConfigError(
                f"strategy.learning_rate: the server takes the steps, expected a finite value above 0, got {rate}"
            )
        return float(rate)

    def attacked(self, client: int, number: int) -> tuple[Tensor, Tensor]:
        """What the message of `client` in round `number` was computed from, in the data set's value range.

        All of its training examples, or the mini-batch of that round where clients send gradients.
        """
        examples, index = self.dataset.train, self.behind(client, number)
        return examples.inputs(index), examples.labels[index]

    def behind(self, client: int, number: int) -> Tensor:
        """`example`, the places of these examples among all training examples."""
        index = torch.from_numpy(self.data.indices(client)[0])
        if self.training.sends == "weights":
            return index
        order = batches_of_round(len(index), self.training, seed=self.seed, client=client, number=number)
        assert order is not None
        return index[order[0]]

    def shares(self, clients: Sequence[int], number: int, settings: LocalTraining) -> list[Share]:
        """What each of `clients` brings to training in round `number`, with `settings` as it is told them."""
        data = zip(clients, self.data.fed(clients), strict=True)
        return [self.share(client, number, settings, *own) for client, own in data]

    def share(self, client: int, number: int, settings: LocalTraining, inputs: Tensor, labels: Tensor) -> Share:
        """What `client` brings in round `number` if it holds these examples, in model units."""
        return Share(
            inputs=inputs,
            labels=labels,
            key=(self.seed, "train", number, client),
            order=batches_of_round(len(labels), settings, seed=self.seed, client=client, number=number),
        )

    def straggles(self, client: int, number: int) -> bool:
        """Whether `client` does not answer in round `number`."""
        probability = self.config.federation.straggler_probability
        if not probability:
            return False
        return float(numpy_generator(self.seed, "train", number, client, "straggler").random()) < probability

    def device(self) -> torch.device:
        """Where clients train.

        Raises:
            ConfigError: a GPU is asked for and there is none.
        """
        name = self.config.federation.device
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError("federation.device: 'cuda', but PyTorch finds no GPU here; use 'cpu'")
        return torch.device(name)

    @cached_property
    def together(self) -> int:
        """How many clients train at once; 1 where each trains in a loop of its own."""
        federation = self.config.federation
        can = federation.vectorise and federation.device == "cpu" and fits(self.model, self.training, self.defenses)
        return group_size(self.model) if can else 1

    @cached_property
    def defenses(self) -> list[Defense]:
        """What each client does to protect itself, in order."""
        found = [
            a_defense(registry.build("defenses", table.name, table.settings, f"defense.{place}"))
            for place, table in enumerate(self.config.defense)
        ]
        for defense in found:
            check_frozen(type(defense))
        check_order(found)
        return found

    @cached_property
    def gauges(self) -> list[Gauge]:
        """What clients measure before they send."""
        return [a_gauge(table) for table in self.config.measure]

    def defenses_of(self, client: int) -> list[Defense]:
        """The defenses as `client` uses them.

        Raises:
            ConfigError: one of them cannot be as strong as it is asked to be.
        """
        if not any(overrides(defense, "of_client") for defense in self.defenses):
            return self.defenses
        participation = self.setting.participation(client)
        if participation not in self._of_clients:
            self._of_clients[participation] = [defense.of_client(participation) for defense in self.defenses]
        return self._of_clients[participation]

    @cached_property
    def _of_clients(self) -> dict[Participation, list[Defense]]:
        """Defenses by what clients do, which is alike for many of them."""
        return {}


def _is_ours(table: PluginTable) -> bool:
    """Whether a defense, and the measure that it takes, if any, are fedsim's own."""
    measure = table.settings.get("measure")
    name = measure.get("name") if isinstance(measure, Mapping) else measure
    return _is_own("defenses", table.name) and (not isinstance(name, str) or _is_own("measures", name))


def _is_own(group: registry.Group, name: str) -> bool:
    return not is_object(name) and registry.is_own(group, name)


def a_gauge(table: MeasureTable) -> Gauge:
    """The measure that a table names, and how it is used.

    Raises:
        ConfigError: it does not take one of the settings.
        PluginError: it does not load, or is no measure.
    """
    where = f"measure.{table.title}"
    measure = registry.build("measures", table.name, table.settings, where)
    if not isinstance(measure, Measure):
        raise PluginError(f"{where}: {type(measure).__module__}.{type(measure).__name__} does not derive from Measure")
    check_frozen(type(measure))
    return Gauge(title=table.title, measure=measure, each=table.each, every=table.every, memory=table.memory << 20)


def build_attacks(spec: AttackFile) -> list[tuple[AttackTable, Attack]]:
    """The attacks that a file names, with the tables that name them."""
    built = [(t, registry.build("attacks", t.name, t.settings, f"attack.{t.title}")) for t in spec.attack]
    return [(table, _an_attack(plugin).entitled(table.title)) for table, plugin in built]


def _an_attack(plugin: Any) -> Attack:
    if not isinstance(plugin, Attack):
        raise PluginError(f"{type(plugin).__module__}.{type(plugin).__name__} does not derive from Attack")
    check_frozen(type(plugin))
    return plugin


def resolve(config: Config) -> Config:
    """The same experiment with every plug-in's default settings written out, and what clients send.

    Raises:
        ConfigError: a plug-in refuses its settings, or the strategy's class contradicts what clients are said to send.
        PluginError: the strategy does not load.
    """

    def full(group: registry.Group, table: Any, where: str) -> Any:
        plugin = registry.build(group, table.name, table.settings, where)
        if not dataclasses.is_dataclass(plugin):
            return table
        check_no_lost_none(plugin, where)
        return type(table)(**{**table.model_dump(), **dataclasses.asdict(plugin)})  # type: ignore[arg-type]

    training, strategy = _by_the_strategy(config)
    canaries = config.canaries and config.canaries.model_copy(update={"clients": config.carriers})  # victims may change
    resolved: Config = check(
        Config,
        config.model_copy(
            update={
                "training": training,
                "strategy": strategy,
                "canaries": canaries,
                "data": full("datasets", config.data, "data"),
                "partition": full("partitions", config.partition, "partition"),
                "model": full("models", config.model, "model"),
                "defense": [full("defenses", t, f"defense.{i}") for i, t in enumerate(config.defense)],
                "measure": [full("measures", t, f"measure.{t.title}") for t in config.measure],
                "attack": [full("attacks", t, f"attack.{t.title}") for t in config.attack],
            }
        ).model_dump(mode="json", exclude_none=True),
        "experiment",
    )
    resolved._data = config._data
    return resolved


def check_no_lost_none(plugin: Any, where: str) -> None:
    """Raise ConfigError where a setting is None, which no file can hold, and its default is another value."""
    for field in dataclasses.fields(plugin):
        if field.init and field.default is not None and getattr(plugin, field.name) is None:
            raise ConfigError(
                f"{where}.{field.name}: None cannot be written in an experiment file, where leaving the setting out "
                "means its default; give it another value, or make None its default"
            )


def _by_the_strategy(config: Config) -> tuple[TrainingTable, StrategyTable]:
    """[training] and [strategy] with what clients send, and the default step size of a server of gradients."""
    training, strategy = config.training, config.strategy
    cls = registry.load("strategies", strategy.name)
    declared = sends(cls, strategy.name, training.sends if "sends" in training.model_fields_set else None)
    training = training.model_copy(update={"sends": declared})
    if declared == "weights":
        return training, strategy
    rate = None if is_object(strategy.name) else registry.parameters(cls).get("learning_rate")
    if rate is not None and isinstance(rate.default, int | float):
        strategy = StrategyTable(**{"learning_rate": rate.default} | strategy.model_dump())
    return training, strategy
