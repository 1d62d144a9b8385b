"""Tables of a federation: its data, model and training, its clients and what is kept of it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from annotated_types import Ge, Le
from pydantic import Field

from fedsim.base.constraints import NonNegativeInt, PositiveInt
from fedsim.federation.table import LabelledTable, PluginTable, Table, add_keys
from fedsim.training.settings import LocalTraining


class DataTable(PluginTable):
    """[data]: the data set of the federation."""

    name: str = Field(
        default="digits",
        description="Name of a data set, or `module:attribute`; the other keys are its settings.",
    )
    standardise: bool = Field(
        default=True,
        description="Whether models are fed with inputs of mean 0 and standard deviation 1.",
    )


class PartitionTable(PluginTable):
    """[partition]: how examples are partitioned among the clients."""

    name: str = Field(
        default="iid", description="Name of a partition, or `module:Class`; the other keys are its settings."
    )
    samples_per_client: int | None = Field(
        default=None, ge=1, description="Maximum number of examples per client; by default all of its part."
    )
    test_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Share that is held out for testing, see `test_by`."
    )
    test_by: Literal["sample", "client"] = Field(
        default="sample",
        description="What `test_fraction` is a share of: each client's examples (`sample`), or the clients "
        "(`client`), which then train nothing and on whose examples the server tests.",
    )


class ModelTable(PluginTable):
    """[model]: the network, and the trained state to start from."""

    name: str = Field(
        default="sme-cnn",
        description="Name of a model, or `module:attribute`; the other keys are its settings.",
    )
    start: str | None = Field(
        default=None,
        description="Trained state to start from, a safetensors file such as `fedsim train` writes; a relative "
        "path is relative to the experiment file. By default weights are drawn by the seed.",
    )


class StrategyTable(PluginTable):
    """[strategy]: the Flower strategy that aggregates."""

    name: str = Field(
        default="fedavg",
        description="Name of a Flower strategy, or `module:Class`; the other keys are its keyword arguments.",
    )


class AlgorithmTable(PluginTable):
    """[algorithm]: what each client trains, keeps and sends.

    Where `[strategy]` is left out, the strategy is the one that the algorithm goes with.
    """

    name: str = Field(
        default="fedavg", description="Name of a client algorithm, or `module:Class`; the other keys are its settings."
    )


class TrainingTable(Table):
    """[training]: the fields of `fedsim.training.settings.LocalTraining`, which checks the values.

    If `sends` is left out, the strategy's class declares it. `resolve` writes it out, because a
    recording is attacked without loading the strategy. Clients that send a gradient take one
    mini-batch a round: `local_steps = 1`. The proximal term is a setting of FedProx's server.
    """

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


if not TYPE_CHECKING:
    _TYPES = get_type_hints(LocalTraining, include_extras=True)
    _SETTINGS = {item.name: (_TYPES[item.name], item.default) for item in fields(LocalTraining)}
    del _SETTINGS["proximal_mu"]
    TrainingTable = add_keys(TrainingTable, **_SETTINGS)


class FederationTable(Table):
    """[federation]: how many clients and rounds, on which engine.

    SuperNodes that fedsim starts for engine `flower` run in a separate network, which no other
    user of this machine can reach, and which reaches no other network.
    """

    engine: str | PluginTable = Field(
        default="serial", description="Name of an engine, or a table of its `name` and its own settings."
    )
    seed: int = Field(default=0, ge=0, description="Seed of everything that is drawn at random.")
    clients: int = Field(default=10, ge=1, le=10_000_000, description="Number of clients.")
    rounds: int = Field(default=1, ge=1, le=1_000_000, description="Number of rounds.")
    straggler_probability: float = Field(
        default=0.0, ge=0, lt=1, description="Probability with which a client sends nothing in a round."
    )
    evaluate_every: int = Field(
        default=1,
        ge=0,
        description="Number of rounds between two evaluations; 0 for none. Otherwise the last round is always "
        "evaluated.",
    )
    evaluate_examples: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of test examples for the server's evaluation, the same ones each time, drawn by "
        "the seed; by default all.",
    )
    timeout: float = Field(
        default=3600.0,
        gt=0,
        le=1e8,
        description="Seconds that a round waits for its clients, and a little longer for replies that are "
        "being sent; an evaluation waits as long again.",
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="Device on which clients train.")
    vectorise: bool = Field(
        default=True,
        description="Whether clients train several at once where that is faster, or each in a separate loop.",
    )
    reply_memory: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="MB of a round's replies that are kept in memory, the others on disk; by default a quarter "
        "of what is free, and 512 at least.",
    )
    actors: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Engine `ray`: number of Ray actors; by default one per core, and on a cluster as many as fit.",
    )
    address: str | None = Field(
        default=None,
        description="Engine `ray`: a Ray cluster to join. Engine `flower`: name of a connection in Flower's own "
        "configuration, to submit to a running SuperLink.",
    )
    gpus_per_actor: float = Field(
        default=1.0,
        gt=0,
        le=1024,
        description="Engine `ray`: share of a GPU that each actor takes when `device` is `cuda`.",
    )
    supernodes: int = Field(
        default=2,
        ge=1,
        le=100_000,
        description="Engine `flower`: number of SuperNodes to start, or, under `flwr run`, to wait for.",
    )

    @property
    def engine_table(self) -> PluginTable:
        """Return the engine as a table of its name and its settings."""
        return PluginTable(name=self.engine) if isinstance(self.engine, str) else self.engine


class StatesTable(Table):
    """[states]: the states of training that are saved, in `RUN/states` or by `fedsim train`.

    Only `fedsim train` trains centrally, on the whole training set.
    """

    rounds: list[NonNegativeInt] = Field(
        default=[], description="Rounds of the federation after which the model is saved; 0 is the untrained model."
    )
    epochs: list[Annotated[int, Ge(0), Le(1_000_000)]] = Field(
        default=[], description="Epochs of central training after which the model is saved."
    )
    decay_at: list[PositiveInt] = Field(
        default=[], description="Epochs of central training after which the learning rate is multiplied by `decay`."
    )
    decay: float = Field(default=0.1, gt=0, le=1, description="Factor of the learning rate, see `decay_at`.")


class RecordingTable(Table):
    """[recording]: the rounds and clients that are recorded."""

    rounds: list[int] | None = Field(
        default=None, description="Recorded rounds; by default all, see `every`; `[]` records nothing."
    )
    clients: list[int] | None = Field(default=None, description="Ids of the recorded clients; by default all.")
    colluders: list[int] | None = Field(
        default=None,
        description="Ids of clients of which the run keeps what they add to secure sums, in `RUN/colluders`, for a "
        'server that colludes with them (`adversary.who = ["server", 3]`); by default nothing of a single client is '
        "kept.",
    )
    every: int = Field(default=1, ge=1, description="Every k-th of these rounds is recorded, beginning with the first.")
    keep: Literal["updates", "recipe"] = Field(
        default="updates",
        description="What is kept of an update: the update itself (`updates`), or its hash, from which it is "
        "computed again and checked whenever it is read (`recipe`).",
    )
    fsync: bool = Field(
        default=False,
        description="Whether each round and checkpoint has to be on the disk before the run continues, so that a "
        "power cut costs no more than the round in which it happens.",
    )


class MeasureTable(LabelledTable):
    """[[measure]]: a measure of exposure that each client computes before it sends, for itself.

    It tells nobody.
    """

    each: bool = Field(
        default=False, description="Whether single examples are measured as well as all of them together."
    )
    every: int = Field(
        default=1, ge=1, description="Number of rounds from one measurement to the next, beginning with round 1."
    )
    memory: int = Field(default=512, ge=1, le=1 << 20, description="Maximum memory of measuring in MiB.")
