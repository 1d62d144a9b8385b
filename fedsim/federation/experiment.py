"""Build the objects that an experiment file describes: data, model, training, defenses, attacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsim.base.errors import (
    ConfigError,
    first_line,
    plugin_exit_error,
)
from fedsim.base.loss_term import add_model_term
from fedsim.base.process_defaults import protect_defaults
from fedsim.base.randomness import numpy_generator, seed_globals
from fedsim.base.task import Loss, smooth_labels
from fedsim.data import Dataset
from fedsim.data.checks import check_dataset
from fedsim.exposure.of_clients import MeasureSchedule
from fedsim.federation.algorithm_checks import name_of_algorithm
from fedsim.federation.build_plugins import build_algorithm, build_defenses, build_measure
from fedsim.federation.central_privacy import make_central_privacy
from fedsim.federation.config import Config
from fedsim.federation.data_folder import find_data_folder
from fedsim.federation.distributed_privacy import SumGroups, make_distributed_privacy
from fedsim.federation.experiment_checks import check_experiment
from fedsim.federation.federated_data import FederatedData, check_same_data
from fedsim.federation.federation_tables import AlgorithmTable, TrainingTable
from fedsim.federation.states import read_state
from fedsim.federation.strategy_checks import (
    MIN_CLIENT_KEYS,
    check_strategy,
    declared_message,
    read_learning_rate,
    sample_size,
)
from fedsim.interfaces.algorithm import ClientAlgorithm
from fedsim.interfaces.defense import Defense, Participation, Setting, overrides
from fedsim.modalities import check_modality
from fedsim.plugins import registry
from fedsim.plugins.inline import find_object, is_object
from fedsim.privacy.central import CentralPrivacy
from fedsim.privacy.distributed import DistributedPrivacy
from fedsim.privacy.federation_privacy import FederationPrivacy
from fedsim.recording.control_variates import join_controls, split_controls
from fedsim.training.canaries import Canaries, audited_hook
from fedsim.training.cohort import LocalData, can_vectorise, group_size
from fedsim.training.local_round import LocalRound
from fedsim.training.model_parts import find_private_names
from fedsim.training.model_state import copy_state, load_state, running_statistics
from fedsim.training.models.checks import check_network, limit_memory, redraw_weights
from fedsim.training.sampling import round_batches
from fedsim.training.settings import LocalTraining


class Experiment:
    """Objects that a `Config` describes, each built when first used.

    Args:
        config: describes them.
        source: another experiment of the same thread. Data and network, which are costly to make,
            are taken from there where both experiments describe the same.
    """

    def __init__(self, config: Config, source: Experiment | None = None) -> None:
        self.config = config
        self.seed = config.federation.seed
        self._source = source

    @classmethod
    def from_json(cls, text: str, source: Experiment | None) -> Experiment:
        """Create the experiment from the text of `config.model_dump_json()`."""
        return cls(Config.model_validate_json(text), source)

    def check(self) -> None:
        """Build everything once, so that every error in the file shows before work starts."""
        with protect_defaults("code that the experiment names (data, model, strategy, a defense or a measure)"):
            check_experiment(self)

    # The data.

    @cached_property
    def dataset(self) -> Dataset:
        """Return the data set, read from disk."""
        if self._source is not None and self._source.config.data == self.config.data:
            return self._source.dataset
        table = self.config.data
        plugin = registry.build("datasets", table.name, table.settings, "data")
        try:
            dataset = check_dataset(plugin.load(find_data_folder()), table.name)
            check_modality(dataset.task, table.name)
            return dataset
        except (MemoryError, OverflowError) as error:
            raise ConfigError(
                f"data: '{table.name}' with these settings does not fit into memory "
                f"({first_line(error)}); make it smaller"
            ) from error

    @cached_property
    def data(self) -> FederatedData:
        """Return the data set, partitioned among the clients."""
        source = self._source
        data = source.data if source is not None and source.has_same_data(self.config) else self._partition_data()
        if self.config._data:
            check_same_data(self.config._data, data.sha256)
        return data

    def has_same_data(self, config: Config) -> bool:
        """Return whether `config` describes the same data, and the same clients to hold it."""
        has_same_tables = self.config.data == config.data and self.config.partition == config.partition
        has_same_clients = self.config.federation.clients == config.federation.clients
        return has_same_tables and has_same_clients and self.seed == config.federation.seed

    def _partition_data(self) -> FederatedData:
        table = self.config.partition
        return FederatedData(
            dataset=self.dataset,
            partition=registry.build("partitions", table.name, table.settings, "partition"),
            clients=self.config.federation.clients,
            seed=self.seed,
            samples_per_client=table.samples_per_client,
            test_fraction=table.test_fraction,
            test_by=table.test_by,
            standardise=self.config.data.standardise,
        )

    def local_data(self, clients: Sequence[int], number: int, settings: LocalTraining) -> list[LocalData]:
        """Return each client's data for training in round `number`, by the server's `settings`."""
        pairs = zip(clients, self.data.model_examples(clients), strict=True)
        return [self.make_local_data(client, number, settings, *examples) for client, examples in pairs]

    def make_local_data(
        self, client: int, number: int, settings: LocalTraining, inputs: Tensor, labels: Tensor
    ) -> LocalData:
        """Return the data of `client` for round `number` from these examples, in model units."""
        return LocalData(
            inputs=inputs,
            labels=labels,
            key=(self.seed, "train", number, client),
            order=round_batches(len(labels), settings, seed=self.seed, client=client, number=number),
        )

    def trial_round(self) -> LocalRound:
        """Return the round of a client that takes a single step on two examples, for trials."""
        two_examples = slice(0, 2)
        inputs = self.data.to_model(self.dataset.train.inputs(two_examples))
        labels = self.dataset.train.labels[two_examples]
        training = dataclasses.replace(self.training, local_epochs=None, local_steps=1)
        share = LocalData(inputs=inputs, labels=labels, key=("check",), order=(torch.arange(len(labels)),))
        return LocalRound.create(self.model_with_state(self.initial_state()), share, training, self.client_loss)

    def attacked_examples(self, client: int, number: int) -> tuple[Tensor, Tensor]:
        """Return the inputs, in the data set's value range, and labels behind a client's message.

        They are all training examples of `client`, or the mini-batch of round `number` where
        clients send gradients.
        """
        examples, index = self.dataset.train, self.attacked_indices(client, number)
        return examples.inputs(index), examples.labels[index]

    def attacked_indices(self, client: int, number: int) -> Tensor:
        """Return the indices of these examples among all training examples, `example`."""
        index = torch.from_numpy(self.data.indices(client)[0])
        if self.training.sends == "weights":
            return index
        order = round_batches(len(index), self.training, seed=self.seed, client=client, number=number)
        assert order is not None
        return index[order[0]]

    @cached_property
    def reported_counts(self) -> list[int]:
        """Return the number of examples that each client reports as N.

        For clients that send a gradient it is the size of one mini-batch.
        """
        if self.training.sends == "gradient":
            return [min(count, self.training.batch_size) for count in self.data.counts]
        return list(self.data.counts)

    # The model and its weights.

    @property
    def model(self) -> nn.Module:
        """Return a network into which any state is loaded; its own weights mean nothing."""
        return self._model_and_weights[0]

    @cached_property
    def _model_and_weights(self) -> tuple[nn.Module, dict[str, Tensor]]:
        """Build the network; return it, and what it was initialised with."""
        source = self._source
        if source is not None and source.has_same_data(self.config) and source.config.model == self.config.model:
            return source._model_and_weights
        model = self.new_model()
        return model, copy_state(model)

    def new_model(self, weights: str = "model") -> nn.Module:
        """Build a network, initialised from the run's seed; `weights` names the random draw."""
        table = self.config.model
        plugin = registry.build("models", table.name, table.settings, "model")
        with seed_globals(self.seed, weights), limit_memory(table.name):
            try:
                network = plugin.build(self.dataset.task)
            except SystemExit as error:
                raise plugin_exit_error(error) from error
            return check_network(network, table.name)

    def model_with_state(self, state: Mapping[str, Tensor]) -> nn.Module:
        """Return a new network, on the CPU, with `state` loaded, which a server may have broadcast."""
        model = deepcopy(self.model).cpu()
        load_state(model, split_controls(state)[0])
        return model

    def initial_state(self) -> dict[str, Tensor]:
        """Return what the server broadcasts in the first round.

        It is w_0 without the parts that stay with the clients, and the control variates of the
        algorithm, if it has any.

        Raises:
            ConfigError: the file of `[model] start` is not readable or holds another model.
        """
        whole_model = self.initial_model_state()
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        controls = self.algorithm.initial_controls(
            {name: tensor for name, tensor in whole_model.items() if name in parameters}
        )
        shared = {name: tensor for name, tensor in whole_model.items() if name not in self.private_names}
        return join_controls(shared, controls)

    def initial_private_state(self, client: int) -> dict[str, Tensor]:
        """Return the parts that stay with `client` as they are before its first round.

        They are drawn for each client, so that no server could know them, or, with `[model] start`,
        those of its file.
        """
        if not self.private_names:
            return {}
        whole_model = self.initial_model_state()
        if self.config.model.start is None:
            drawn = self._draw_model(f"private {client}")
            whole_model = {name: drawn[name] for name in whole_model}
        return {name: tensor for name, tensor in whole_model.items() if name in self.private_names}

    def initial_model_state(self) -> dict[str, Tensor]:
        """Return w_0 of the whole model: fresh weights, or the trained ones of `[model] start`.

        Raises:
            ConfigError: the file is not readable or holds another model.
        """
        start = self.config.model.start
        return self._fresh_state if start is None else self.read_state_file(Path(start))

    def read_state_file(self, path: Path) -> dict[str, Tensor]:
        """Read the trained state in a file, as the federation would start from it.

        Raises:
            ConfigError: the file is not readable or holds another model.
        """
        is_shared = self.training.batch_norm_statistics == "shared"
        withheld = () if is_shared else running_statistics(self.model)
        return read_state(path, self._fresh_state, self.config.model.name, withheld=withheld)

    @property
    def _fresh_state(self) -> dict[str, Tensor]:
        """Return fresh weights, as far as the federation sends them."""
        model, weights = self._model_and_weights
        withheld = set() if self.training.batch_norm_statistics == "shared" else set(running_statistics(model))
        return {name: tensor for name, tensor in weights.items() if name not in withheld}

    def random_start(self) -> dict[str, Tensor]:
        """Return random weights in the form of w_0 that no client of this federation received."""
        drawn = self._draw_model("other start")
        return {name: drawn[name] for name in self._fresh_state}

    def _draw_model(self, weights: str) -> dict[str, Tensor]:
        """Return fresh weights; `weights` names the random draw."""
        model = self.new_model(weights)
        if is_object(self.config.model.name):  # all copies of an object have the same weights
            with seed_globals(self.seed, weights):
                redraw_weights(model)
        return copy_state(model)

    # The server.

    def new_strategy(self) -> Any:
        """Build the Flower strategy that the experiment names, without memory of earlier rounds.

        Raises:
            ConfigError: it does not accept one of the settings, or waits for more clients than
                there are, which would be for ever, or a setting makes no sense
                (`fedsim.federation.strategy_checks`), or its clients send something else than the
                experiment says.
        """
        table, clients = self.config.strategy, self.config.federation.clients
        cls = registry.load("strategies", table.name)
        declared_message(cls, table.name, claimed=self.config.training.sends)
        if is_object(table.name):
            strategy = find_object(table.name, fresh=True)
            check_strategy(strategy, vars(strategy), clients)
            return strategy
        settings = self._strategy_settings
        strategy = registry.build("strategies", table.name, settings, "strategy")
        check_strategy(strategy, settings, clients)
        return strategy

    def strategy_settings(self, strategy: Any) -> Mapping[str, Any]:
        """Return the settings of the strategy: those of the file, or the attributes of an object."""
        return vars(strategy) if is_object(self.config.strategy.name) else self._strategy_settings

    @property
    def _strategy_settings(self) -> dict[str, Any]:
        """Return the settings of the named strategy, which by default waits for one client."""
        parameters = registry.setting_parameters(registry.load("strategies", self.config.strategy.name))
        defaults = dict.fromkeys((key for key in MIN_CLIENT_KEYS if key in parameters), 1)
        return defaults | self.config.strategy.settings

    @property
    def server_rate(self) -> float | None:
        """Return the step size of a server that receives gradients, if its strategy sets one.

        Raises:
            ConfigError: `learning_rate` of the strategy is no step size.
        """
        table = self.config.strategy
        rate = vars(find_object(table.name)).get("learning_rate") if is_object(table.name) else None
        rate = table.settings.get("learning_rate", rate)
        if rate is None:
            return None
        return read_learning_rate(rate, "strategy.learning_rate: the server takes the steps,")

    # Local training.

    @cached_property
    def training(self) -> LocalTraining:
        """Return the settings of local training, before the server adds its own.

        Where clients send gradients, the server's step size is included.

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
                "remove it; the settings of the strategy apply"
            )
        if rate is not None:
            settings["learning_rate"] = rate
        return LocalTraining(**settings)

    @property
    def loss(self) -> Loss:
        """Return the clients' objective: the task's loss with labels smoothed by `training`.

        Raises:
            ConfigError: there are no classes to spread labels over, or the settings do not go
                together.
        """
        return smooth_labels(self.client_loss, self.training.label_smoothing)

    @cached_property
    def client_loss(self) -> Loss:
        """Return the task's loss with the term of a model that adds one, before labels are smoothed."""
        return add_model_term(self.dataset.task.loss, self.model)

    def device(self) -> torch.device:
        """Return the device on which clients train.

        Raises:
            ConfigError: a GPU is requested and there is none.
        """
        name = self.config.federation.device
        if name == "cuda" and not torch.cuda.is_available():
            raise ConfigError("federation.device: 'cuda', but PyTorch finds no GPU here; use 'cpu'")
        return torch.device(name)

    def is_straggler(self, client: int, number: int) -> bool:
        """Return whether `client` does not answer in round `number`."""
        probability = self.config.federation.straggler_probability
        if not probability:
            return False
        return float(numpy_generator(self.seed, "train", number, client, "straggler").random()) < probability

    @cached_property
    def algorithm(self) -> ClientAlgorithm:
        """Return the clients' algorithm.

        Raises:
            PluginError: it does not derive from `ClientAlgorithm`.
        """
        return build_algorithm(self.config.algorithm or AlgorithmTable())

    @cached_property
    def private_names(self) -> frozenset[str]:
        """Return the names of the tensors of the model that never leave a client.

        Raises:
            ConfigError: the algorithm does not divide the model into parts.
        """
        if not self.algorithm.private_parts:
            return frozenset()
        return find_private_names(self.algorithm, self.model, name_of_algorithm(self.algorithm))

    @cached_property
    def model_parts(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the tensors in each part into which the algorithm divides the model."""
        return self.algorithm.divide_model(self.model)

    @property
    def trains_plainly(self) -> bool:
        """Return whether clients train as without an algorithm of their own."""
        return self.config.algorithm is None or self.config.algorithm.name == AlgorithmTable().name

    @cached_property
    def clients_at_once(self) -> int:
        """Return how many clients train at once; 1 where each trains in a loop of its own."""
        if not self.trains_plainly:
            return 1
        federation = self.config.federation
        device = torch.device(federation.device)
        if not federation.vectorise or not can_vectorise(self.model, self.training, self.defenses, device):
            return 1
        return group_size(self.model, device)

    # What protects clients, and what measures their exposure.

    @cached_property
    def setting(self) -> Setting:
        """Return the setting in which defenses work."""
        has_tokens = self.dataset.task.vocabulary > 0
        low, high = ([], []) if has_tokens else self.data.value_range()
        floating = {name: tensor for name, tensor in self.initial_state().items() if tensor.is_floating_point()}
        return Setting(
            update={name: torch.zeros_like(tensor) for name, tensor in floating.items()},
            task=self.dataset.task,
            training=self.training,
            rounds=self.config.federation.rounds,
            clients=self.config.federation.clients,
            num_examples=self.data.counts,
            value_range=None if has_tokens else (tuple(low), tuple(high)),
        )

    @cached_property
    def defenses(self) -> list[Defense]:
        """Return the clients' defenses, in order."""
        return build_defenses(self.config.defense)

    def client_defenses(self, client: int) -> list[Defense]:
        """Return the defenses as `client` uses them.

        Raises:
            ConfigError: a defense cannot give the guarantee that it is set to give.
        """
        if not any(overrides(defense, "of_client") for defense in self.defenses):
            return self.defenses
        participation = self.setting.participation(client)
        if participation not in self._defenses_by_participation:
            self._defenses_by_participation[participation] = [
                defense.of_client(participation) for defense in self.defenses
            ]
        return self._defenses_by_participation[participation]

    @cached_property
    def _defenses_by_participation(self) -> dict[Participation, list[Defense]]:
        """Cache the defenses by participation, which many clients share."""
        return {}

    @property
    def federation_privacy(self) -> FederationPrivacy | None:
        """Return what the server or the protocol promises besides the clients' defenses, if anything.

        Raises:
            ConfigError: it promises nothing, or no noise keeps to epsilon.
        """
        return self.central_privacy or self.distributed_privacy

    @cached_property
    def distributed_privacy(self) -> DistributedPrivacy | None:
        """Return the mechanism of the sums under secure aggregation; None without noise.

        Raises:
            ConfigError: it promises nothing, no noise keeps to epsilon, or a sum would not fit.
        """
        table, secure_table = self.config.distributed_privacy, self.config.secure_aggregation
        if table is None or secure_table is None:
            return None
        federation = self.config.federation
        num_asked = sample_size(self.strategy_settings(self.new_strategy()), federation.clients)
        dimension = sum(tensor.numel() for tensor in self.initial_state().values())
        groups = SumGroups(table=secure_table, num_asked=num_asked, dimension=dimension)
        return make_distributed_privacy(table, groups, federation.clients, federation.rounds)

    @cached_property
    def central_privacy(self) -> CentralPrivacy | None:
        """Return the mechanism by which a trusted server releases its models; None without one.

        Raises:
            ConfigError: it promises nothing, or no noise keeps to epsilon.
        """
        table, federation = self.config.central_privacy, self.config.federation
        if table is None:
            return None
        settings = self.strategy_settings(self.new_strategy())
        return make_central_privacy(table, settings, federation.clients, federation.rounds)

    @cached_property
    def measures(self) -> list[MeasureSchedule]:
        """Return what clients measure before they send."""
        return [build_measure(table) for table in self.config.measure]

    def client_canaries(self, client: int) -> Canaries | None:
        """Return the canaries of `client`; None where no defense bounds its examples."""
        if client not in self._canary_clients or "on_examples" not in map(audited_hook, self.defenses):
            return None
        assert self.config.canaries is not None
        return Canaries(seed=self.seed, client=client, count=self.config.canaries.count)

    @cached_property
    def server_canaries(self) -> Canaries | None:
        """Return the canaries that are clients themselves, with one id after those of the others."""
        if self.config.canaries is None or self.config.central_privacy is None:
            return None
        return Canaries(seed=self.seed, client=self.config.federation.clients, count=self.config.canaries.count)

    @cached_property
    def _canary_clients(self) -> frozenset[int]:
        return frozenset(self.config.canary_clients)
