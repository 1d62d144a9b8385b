"""Tables of an experiment file, validated before anything runs.

Every table is strict: an unknown key, a wrong type or a contradiction is a ConfigError that names
the key and, where there is one, the nearest known name. A table with a `name` picks a plug-in; its
other keys are the settings of that plug-in and are checked against it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args, get_type_hints

from annotated_types import Ge, Le
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from fedsim.base.constraints import NonNegativeInt, PositiveInt
from fedsim.base.errors import ConfigError, did_you_mean
from fedsim.interfaces.knowledge import FACTS, MESSAGE_FACTS
from fedsim.plugins.registry import explain_validation_error
from fedsim.recording.adversary_role import AdversaryRole, Who, find_error_in_who
from fedsim.recording.message_format import MessageFormat, check_client_ids
from fedsim.training.settings import LocalTraining

_T = TypeVar("_T", bound=BaseModel)


MIN_BITS, MAX_BITS = 4, 24
"""Fewest and most bits of the numbers that are summed under secure aggregation."""
TOO_DEEP = "is nested too deeply; settings are tables, lists and values in them"
"""Error text for a file whose tables are nested without end."""
_TITLED_LISTS = ("attack", "measure")
"""Lists of tables that have a title each."""


class Table(BaseModel):
    """Table of the experiment file; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class PluginTable(BaseModel):
    """Table that picks a plug-in by `name`; the other keys are the plug-in's settings."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, ser_json_inf_nan="constants")
    name: str = Field(description="Name of a plug-in, or `module:Class`; the other keys are its settings.")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the plug-in's own settings."""
        return dict(self.model_extra or {})


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
        default=None, ge=1, description="Most examples that a client holds; by default all of its part."
    )
    test_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Share that is held out to test on, see `test_by`."
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


def _add_keys(base: type[Table], **keys: tuple[Any, Any]) -> Any:
    """Create the table `base` with further keys, each with its type and its default."""
    return create_model(base.__name__, __base__=base, __module__=__name__, __doc__=base.__doc__, **keys)  # type: ignore[call-overload]


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
    TrainingTable = _add_keys(TrainingTable, **_SETTINGS)


class FederationTable(Table):
    """[federation]: how many clients and rounds, on which engine.

    SuperNodes that fedsim starts for engine `flower` run in a network of their own, which no other
    user of this machine can reach, and which reaches no other network.
    """

    engine: str | PluginTable = Field(
        default="serial", description="Name of an engine, or a table of its `name` and its own settings."
    )
    seed: int = Field(default=0, ge=0, description="Seed of everything that is drawn at random.")
    clients: int = Field(default=10, ge=1, le=10_000_000, description="Number of clients.")
    rounds: int = Field(default=1, ge=1, le=1_000_000, description="Number of rounds.")
    straggler_probability: float = Field(
        default=0.0, ge=0, le=1, description="Probability with which a client sends nothing in a round."
    )
    evaluate_every: int = Field(
        default=1,
        ge=0,
        description="Number of rounds between two evaluations. With 0 there is none; otherwise the last round "
        "has one, too.",
    )
    evaluate_examples: int | None = Field(
        default=None,
        ge=1,
        description="Most test examples that the server evaluates on, the same ones each time, drawn by the "
        "seed; by default all.",
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
        description="Whether clients train several at once where that is faster, or each in a loop of its own.",
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
        description="Engine `ray`: number of Ray actors; by default one a core, and on a cluster as many as fit.",
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


class SecureAggregationTable(Table):
    """[secure_aggregation]: clients send masked updates; the server learns sums over groups alone.

    Without this table the server sees each client's update. See `strategies.secure_sum`.
    """

    groups: int | Literal["all"] = Field(
        default="all",
        description="Least number of clients in a group, 2 or more, drawn anew in each round; `all` is one group "
        "of all clients of the round.",
    )
    threshold: int | float = Field(
        default=0.5,
        description="How many of a group have to answer, or its sum is lost: a number of clients, or a fraction "
        "of the group, at least 2 clients; 1 is all of them, as in Flower.",
    )
    bits: int = Field(
        default=22,
        description=f"Bits of a number, {MIN_BITS} to {MAX_BITS}: it is rounded at random to a multiple of "
        "2 `clip` / 2^`bits`.",
    )
    clip: float = Field(
        default=1.0,
        description="Each number of an update, times the weight of its client, is clipped to [-`clip`, `clip`]; "
        "above 0.",
    )

    @model_validator(mode="after")
    def _check_values(self) -> SecureAggregationTable:
        if self.groups != "all" and self.groups < 2:
            raise ValueError(
                f"groups: expected 2 clients or more, since the sum over one is its update, or 'all', got {self.groups}"
            )
        if not self.threshold > 0 or (isinstance(self.threshold, float) and self.threshold > 1):
            raise ValueError(
                "threshold: expected a number of clients from 1 on, or a fraction above 0 and at "
                f"most 1.0, got {self.threshold}"
            )
        if self.groups != "all" and self.threshold > self.groups:
            raise ValueError(
                f"threshold: {self.threshold} of a group have to answer, but groups = {self.groups}; lower it"
            )
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise ValueError(f"bits: expected {MIN_BITS} to {MAX_BITS}, all that float32 tells apart, got {self.bits}")
        if not self.clip > 0:
            raise ValueError(f"clip: expected a value above 0, in units of the update, got {self.clip}")
        return self

    def min_survivors(self, size: int) -> int:
        """Return how many of a group of `size` clients have to answer, by Flower's rule."""
        if isinstance(self.threshold, int) and self.threshold > 1:
            return self.threshold
        return max(round(self.threshold * size), 2)


class ClientPrivacyTable(Table):
    """Table of a mechanism that protects whole clients by noise of which the strength or the budget is set."""

    noise_multiplier: float | None = Field(default=None, gt=0)
    epsilon: float | None = Field(
        default=None,
        gt=0,
        description="Largest privacy loss of a client that may be asked in all rounds, from which the noise follows.",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="Probability bound, below 1 / `federation.clients`.")

    @model_validator(mode="after")
    def _check_noise(self) -> Self:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ValueError("noise_multiplier: set it, or epsilon, from which it follows, and not both")
        return self


class CentralPrivacyTable(ClientPrivacyTable):
    """[central_privacy]: the server clips each client's update and adds noise to their sum.

    This promises (epsilon, delta)-differential privacy of each client to those who see the models
    alone. The server is trusted: it sees each update before. See `strategies.central_privacy`.
    """

    clip: float = Field(
        default=1.0, gt=0, description="L2 norm C to which each update is clipped, with `quantile` that of round 1."
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of the noise of the sum, divided by the clip; with `quantile` that of a single "
        "release that tells as much as the sum and the count together.",
    )
    sampling: Literal["fixed", "poisson", "cyclic"] = Field(
        default="fixed",
        description="Whether a round has a fixed number of clients, for which no amplification is claimed; each client "
        "with probability `strategy.fraction_train`, independently (`poisson`), which amplifies; or a fixed number in "
        "turn, so that none is asked again before all others were (`cyclic`).",
    )
    noise: Literal["independent", "tree", "banded"] = Field(
        default="independent",
        description="Whether rounds have noise of their own, or noise that cancels in part in the sum over rounds "
        "(`tree`, `banded`), which is accounted for without amplification, with `cyclic` sampling.",
    )
    bands: int | None = Field(
        default=None,
        ge=1,
        description="How many rounds share fresh noise where it is `banded`, at most the rounds in which each client "
        "is asked once, which is the default. The server keeps the noise of one round less.",
    )
    quantile: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of updates that are not to be clipped, to which the clip adapts; by default it stays.",
    )
    clip_learning_rate: float = Field(
        default=0.2, gt=0, le=10, description="Step size of the logarithm of the clip, see `quantile`."
    )
    count_noise: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of the noise of the number of updates that were not clipped, see `quantile`; "
        "by default a twentieth of the clients of a round.",
    )

    @model_validator(mode="after")
    def _check_values(self) -> CentralPrivacyTable:
        if self.count_noise is not None and self.quantile is None:
            raise ValueError("count_noise: a clip that stays counts nothing; set quantile, or leave it out")
        if self.bands is not None and self.noise != "banded":
            raise ValueError(f"bands: noise = '{self.noise}' has none; leave it out, or set noise to 'banded'")
        if self.noise != "independent" and self.sampling != "cyclic":
            raise ValueError(
                f"noise: '{self.noise}' protects a client that adds to one of the rounds that share noise, which only "
                "sampling = 'cyclic' sees to; set that, or noise to 'independent'"
            )
        if self.noise != "independent" and self.quantile is not None:
            raise ValueError(
                f"quantile: noise = '{self.noise}' spans rounds, and is made for a clip that stays; leave it out, or "
                "set noise to 'independent'"
            )
        return self


class DistributedPrivacyTable(ClientPrivacyTable):
    """[distributed_privacy]: each client adds a share of noise to what it sends for a sum.

    This promises (epsilon, delta)-differential privacy of each client to the server, which sees
    sums under `[secure_aggregation]` alone. See `fedsim.privacy.distributed`.
    """

    clip: float = Field(default=1.0, gt=0, description="L2 norm C to which each client clips its update.")
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="Standard deviation of the noise of the smallest sum that can be unmasked, divided by the largest "
        "length of a clipped and rounded update.",
    )


class CanariesTable(Table):
    """[canaries]: measure a lower bound of epsilon in this run, besides the proved guarantee.

    A coin decides for each canary whether it is included. Included canaries are gradients among
    those of the client's examples, so they change its message and cost accuracy; the N that it
    reports does not change. With `[central_privacy]` they are clients of their own, whose updates
    the server clips and adds to the others.
    """

    count: int = Field(ge=20, le=1_000_000, description="Number of canaries that are drawn for each of `clients`.")
    clients: list[int] | None = Field(
        default=None,
        description="Ids of the clients that carry canaries; by default the victims. None where canaries are "
        "clients themselves.",
    )
    confidence: float = Field(
        default=0.99, gt=0.5, lt=1, description="Probability with which all lower bounds of the run hold."
    )


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


class KnowledgeTable(Table):
    """[adversary.knowledge]: facts that the adversary knows besides the messages.

    `true` grants the value that the run holds, `false` withholds it. A recording made elsewhere
    holds no such values, so there they are written out: `model = "module:callable"`, `input_shape =
    [1, 28, 28]`, `value_range = [0.0, 1.0]`. Values that the server sent with its model in the
    attacked round (`learning_rate` and the like) take precedence.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


if not TYPE_CHECKING:
    KnowledgeTable = _add_keys(
        KnowledgeTable,
        **{
            name: (fact.key_type, Field(default=fact.granted_by_default, description=fact.description))
            for name, fact in FACTS.items()
        },
        **{
            name: (bool, Field(default=True, description=f"{about[:1].upper()}{about[1:]}."))
            for name, about in MESSAGE_FACTS.items()
        },
    )


class AdversaryTable(Table):
    """[adversary]: the victims, the time of attacks, and the adversary's knowledge."""

    when: Literal["at-end", "in-round", "never"] = Field(
        default="at-end",
        description="When attacks are made: after the last round (`at-end`), in a process of their own as soon as "
        "a round is recorded (`in-round`), or later with `fedsim attack` (`never`).",
    )
    victims: list[int] | Literal["all"] | None = Field(
        default=None, description="Ids of the attacked clients, or `all`; by default the first recorded client."
    )
    rounds: list[int] | Literal["all"] | None = Field(
        default=None, description="Attacked rounds, or `all`; by default the first recorded one."
    )
    repeats: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="Number of random starts of each attack, all of which are scored, so that scores get an interval.",
    )
    who: Who = Field(
        default="server",
        description="Who attacks: the server; an `outsider` who gets each model; an `eavesdropper` who hears links "
        'that are not encrypted, all or, as `["eavesdropper", 3]`, those of these clients; in split learning a '
        "`feature-party`, which sees its own messages and attacks the labels; these clients, as `[3, 7]`, which "
        'pool the models that they are sent and their own updates; or, as `["server", 3, 7]`, a server that colludes '
        "with them under secure aggregation, see "
        "[Threat models](../explanation/threat-models.md).",
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Number of processes of one thread each that share the attacks on a CPU; by default one a "
        "core, but at most half as many as there are attacks.",
    )
    device: str = Field(
        default="auto",
        description="Device of the attacks, such as `cpu` or `cuda:0`; `auto` is a GPU where there is one.",
    )
    candidates: int = Field(default=1000, ge=2, le=1_000_000, description="Most candidate records that are granted.")
    auxiliary: int = Field(default=1000, ge=1, le=1_000_000, description="Most auxiliary records that are granted.")
    knowledge: KnowledgeTable = Field(
        default=KnowledgeTable(), description="Facts that the adversary knows, see `adversary.knowledge`."
    )

    @field_validator("who")
    @classmethod
    def _check_who(cls, who: Who) -> Who:
        if error := find_error_in_who(who):
            raise ValueError(error)
        return AdversaryRole.parse(who).setting

    @property
    def role(self) -> AdversaryRole:
        """Return who attacks."""
        return AdversaryRole.parse(self.who)

    def check_victims_are_heard(self) -> None:
        """Check that each named victim is on a link that is heard, where messages are in clear.

        Raises:
            ConfigError: one is not.
        """
        links, named_victims = self.role.links, self.victims if isinstance(self.victims, list) else []
        if unheard := [client for client in named_victims if links and client not in links]:
            raise ConfigError(
                f"adversary.victims: {self.role} hears nothing of client {unheard[0]}; name victims among these, or "
                "hear all links"
            )

    @model_validator(mode="after")
    def _check_values(self) -> AdversaryTable:
        if not self.role.reads_messages and self.when == "in-round":
            raise ValueError("who: others than the server learn from the next round's model; take when = 'at-end'")
        if not self.role.reads_messages and not (self.knowledge.num_examples and self.knowledge.client_ids):
            raise ValueError(
                "knowledge: num_examples and client_ids are withheld from a server; others see sums over all clients "
                "and are taken to know how many examples these are of; leave them out, or who"
            )
        telling = [name for name in ("labels", "records") if getattr(self.knowledge, name)]
        if telling and not self.knowledge.num_examples:
            raise ValueError(
                f"knowledge: {telling[0]} are granted, which are as many as the examples, and num_examples is "
                "withheld; leave one of them out"
            )
        if self.role.links and not self.knowledge.client_ids:
            raise ValueError(
                "knowledge: client_ids is withheld, and whoever hears the links of certain clients knows whose "
                "messages these are; leave it out, or take who = 'eavesdropper'"
            )
        named_victims = self.victims if isinstance(self.victims, list) else []
        if colluders := [client for client in named_victims if client in self.role.colluders]:
            raise ValueError(f"victims: client {colluders[0]} is among those who attack (who); name another")
        return self


_MAX_LABEL_LENGTH = 60
"""Most characters of a label; file systems allow names of 255 bytes, and a character may have
four."""


class LabelledTable(PluginTable):
    """Table of a list, of which several may pick the same plug-in."""

    label: str = Field(
        default="",
        description="Distinguishes two settings of the same plug-in, and names a folder; by default its name.",
    )

    @field_validator("label")
    @classmethod
    def _check_label(cls, label: str) -> str:
        if label and not re.fullmatch(r"\w[\w .,=+-]*", label):
            raise ValueError(f"it names a folder: expected letters, digits and any of ' .,=+-', got '{label}'")
        if len(label) > _MAX_LABEL_LENGTH:
            raise ValueError(f"it names a folder: expected at most {_MAX_LABEL_LENGTH} characters, got {len(label)}")
        return label

    @property
    def title(self) -> str:
        """Return the name under which its results are stored."""
        return self.label or self.name


class AttackTable(LabelledTable):
    """[[attack]]: one attack."""

    tuned: str | None = Field(
        default=None,
        description="How its settings were chosen; `fedsim tune` writes it, and reports show it.",
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
    memory: int = Field(default=512, ge=1, le=1 << 20, description="Most MiB that measuring takes at once.")


class ReportTable(Table):
    """[report]: files that are written in addition to `report.html`."""

    tensorboard: bool = Field(
        default=False,
        description="Whether accuracy, loss, scores and exposure by round are written as event files, too, which "
        "`tensorboard --logdir RUN/tensorboard` draws; it takes the package `tensorboard`.",
    )


PUBLIC_KEY = "public"
"""Key of [truth] of the examples that no client has, of which guesses and auxiliary records are made."""


class AttackFile(Table):
    """File that `fedsim attack RUN FILE` reads: an adversary without a federation.

    `truth` maps client ids to safetensors files with `data` (`example channel height width` in [0,
    1]) and `labels`, for scoring attacks on recordings made elsewhere. The attacks never see them.
    Instead of a client's id a key may be `#1`, `#2` ..., the clients in the order in which they
    appear in the recording, and in one round by id; or `public`, examples that no client has.
    """

    adversary: AdversaryTable = AdversaryTable()
    attack: list[AttackTable] = []
    app: MessageFormat = MessageFormat()
    truth: dict[str, str] = {}
    report: ReportTable | None = None

    @field_validator("truth")
    @classmethod
    def _check_client_keys(cls, truth: dict[str, str]) -> dict[str, str]:
        check_client_ids(key.removeprefix("#") for key in truth if key != PUBLIC_KEY)
        return truth

    @model_validator(mode="after")
    def _check_attacks(self) -> AttackFile:
        for name, chosen in (
            ("victims", self.adversary.victims),
            ("rounds", self.adversary.rounds),
        ):
            if isinstance(chosen, list):
                _check_list(f"adversary.{name}", chosen, "clients" if name == "victims" else name)
        _check_titles(self.attack, "attacks")
        return self


class Config(AttackFile):
    """Whole experiment file.

    Where it is read from a run folder, `_data` is the hash of the data that the run was made with.
    """

    _data: str = PrivateAttr("")

    def for_new_run(self) -> Config:
        """Return the same experiment for a new run, without the hash of an earlier run's data."""
        new = self.model_copy()
        new._data = ""
        return new

    data: DataTable = DataTable()
    partition: PartitionTable = PartitionTable()
    model: ModelTable = ModelTable()
    training: TrainingTable = TrainingTable(local_epochs=1)
    federation: FederationTable = FederationTable()
    strategy: StrategyTable = StrategyTable()
    algorithm: AlgorithmTable | None = None
    defense: list[PluginTable] = []
    secure_aggregation: SecureAggregationTable | None = None
    central_privacy: CentralPrivacyTable | None = None
    distributed_privacy: DistributedPrivacyTable | None = None
    canaries: CanariesTable | None = None
    measure: list[MeasureTable] = []
    recording: RecordingTable = RecordingTable()
    states: StatesTable = StatesTable()

    @model_validator(mode="after")
    def _check_tables(self) -> Config:
        clients, rounds = self.federation.clients, self.federation.rounds
        _check_titles(self.measure, "measures")
        for where, chosen, count, noun in (
            ("adversary.victims", self.adversary.victims, clients, "clients"),
            ("recording.clients", self.recording.clients, clients, "clients"),
            ("recording.colluders", self.recording.colluders, clients, "clients"),
            ("adversary.rounds", self.adversary.rounds, rounds, "rounds"),
            ("adversary.who", list(self.adversary.role.clients) or None, clients, "clients"),
            ("recording.rounds", self.recording.rounds, rounds, "rounds"),
        ):
            if isinstance(chosen, list) and (chosen or where != "recording.rounds"):
                check_choice(where, chosen, count, noun)
        if self.recording.rounds == [] and self.attack and self.adversary.when != "never":
            raise ValueError("recording.rounds: nothing is recorded, so there is nothing to attack; name rounds")
        self._check_colluders()
        if not self.adversary.role.reads_messages and self.recording.clients is not None:
            raise ValueError(
                "recording.clients: whoever sees models sees the sum over all clients, of whom some would not be "
                "recorded; leave it out, or adversary.who"
            )
        if self.canaries is not None:
            self._check_canaries(self.canaries.clients)
        if self.states.rounds and max(self.states.rounds) > rounds:
            raise ValueError(
                f"states.rounds: round {max(self.states.rounds)} of federation.rounds = {rounds}; raise it"
            )
        if self.secure_aggregation is not None:
            check_group_sizes(self.secure_aggregation, clients, self.recording.clients)
            if self.adversary.role.party == "eavesdropper" and self.adversary.when == "in-round":
                raise ValueError(
                    "adversary.who: under [secure_aggregation] an eavesdropper hears masked vectors, and learns from "
                    "the next round's model; take when = 'at-end'"
                )
        else:
            self.adversary.check_victims_are_heard()
        # A run folder may come from a stranger, so its experiment file names no code and no files.
        if isinstance(self.adversary.knowledge.model, str):
            raise ValueError(
                "adversary.knowledge.model: a federation has a model of its own, so give true or "
                "false; 'module:callable' belongs in the attack file of a recording made elsewhere"
            )
        if isinstance(self.adversary.knowledge.loss, str):
            raise ValueError(
                "adversary.knowledge.loss: a federation has a loss of its own, so give true or "
                "false; a name belongs in the attack file of a recording made elsewhere"
            )
        for name in ("truth", "app"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: a federation has its own; [{name}] belongs in an attack file")
        return self

    def _check_colluders(self) -> None:
        """Raise ValueError where clients that attack learn nothing, or what they know would not be there."""
        role, kept = self.adversary.role, self.recording.colluders
        if len(role.colluders) == self.federation.clients:
            raise ValueError("adversary.who: all clients attack, so that nobody is left to be attacked; name fewer")
        if kept is not None and self.secure_aggregation is None:
            raise ValueError(
                "recording.colluders: without [secure_aggregation] the server sees, and the recording has, the update "
                "of each client; leave it out"
            )
        if role.party != "server" or not role.colluders:
            return
        if self.secure_aggregation is None:
            raise ValueError(
                "adversary.who: without [secure_aggregation] the server sees the update of each client, to which "
                "colluding clients add nothing; take who = 'server'"
            )
        if missing := sorted(set(role.colluders) - set(kept or ())):
            raise ValueError(
                f"adversary.who: the run would not keep what client {missing[0]} adds to sums; set "
                f"recording.colluders = {sorted(set(role.colluders) | set(kept or ()))}"
            )

    def _check_canaries(self, chosen: list[int] | None) -> None:
        """Raise ValueError where the server would not see the canaries."""
        if chosen is not None and self.central_privacy is not None:
            raise ValueError(
                "canaries.clients: with [central_privacy] each canary is a client of its own, as the server promises "
                "something of whole clients; leave it out"
            )
        if chosen is not None:
            check_choice("canaries.clients", chosen, self.federation.clients, "clients")
        if self.secure_aggregation is not None:
            raise ValueError(
                "canaries: they measure what one client's messages tell, and under secure "
                "aggregation the server sees sums alone; leave [canaries] or [secure_aggregation] "
                "out"
            )
        unseen = sorted(set(self.canary_clients) - set(self.recording.clients or self.canary_clients))
        if self.recording.rounds == [] or unseen:
            reason = f"client {unseen[0]} is not recorded" if unseen else "no round is recorded"
            raise ValueError(f"canaries: {reason}, so nobody would look for them; name others, or change [recording]")

    @property
    def canary_clients(self) -> list[int]:
        """Return the clients that carry canaries; none where canaries are clients themselves."""
        if self.canaries is None or self.central_privacy is not None:
            return []
        chosen = self.canaries.clients if self.canaries.clients is not None else self.adversary.victims
        if chosen == "all":
            return list(range(self.federation.clients))
        return list(chosen) if chosen else [min(self.recording.clients or [0])]


def _check_titles(tables: Iterable[LabelledTable], noun: str) -> None:
    for title, count in Counter(table.title for table in tables).items():
        if count > 1:
            raise ValueError(f"two {noun} are called '{title}'; give one of them a label of its own")


def check_group_sizes(table: SecureAggregationTable, clients: int, recorded: list[int] | None) -> None:
    """Raise ValueError where no round can have such groups, or `recorded` names single clients."""
    size = clients if table.groups == "all" else table.groups
    if size > clients or clients < 2:
        raise ValueError(
            f"secure_aggregation.groups: expected at most federation.clients = {clients}, and 2 "
            f"clients or more, got {table.groups}"
        )
    if table.threshold > size:
        raise ValueError(
            f"secure_aggregation.threshold: {table.threshold} of a group have to answer, but "
            f"federation.clients is {clients}; lower it"
        )
    if recorded is not None:
        raise ValueError(
            "recording.clients: under secure aggregation the server sees groups of clients, which "
            "are drawn anew in each round; leave it out"
        )


def _check_list(where: str, chosen: list[int], noun: str) -> None:
    if not chosen:
        raise ValueError(f"{where}: the list is empty; leave the key out, or name {noun}")
    if duplicates := [item for item, count in Counter(chosen).items() if count > 1]:
        raise ValueError(f"{where}: {duplicates[0]} is named twice; name each once")


def check_choice(where: str, chosen: list[int], count: int, noun: str) -> None:
    """Raise ValueError where chosen clients or rounds are not among `count`, or one is named twice."""
    first = 0 if noun == "clients" else 1
    if len(chosen) > count:
        raise ValueError(f"{where}: {len(chosen)} {noun} named, but federation.{noun} is {count}")
    for item in chosen:
        if not first <= item < first + count:
            raise ValueError(f"{where}: expected {noun} from {first} to {first + count - 1}, got {item}")
    _check_list(where, chosen, noun)


def validate_tables(kind: type[_T], tables: Mapping[str, Any], where: str) -> _T:
    """Validate `tables` as `kind`, turning the first error into one sentence.

    Args:
        kind: class of the table.
        tables: values by key.
        where: name of the tables in error texts.

    Raises:
        ConfigError: a key is unknown, or a value is wrong.
    """
    try:
        text = json.dumps(tables)
    except TypeError as error:
        value_path, value = _find_unwritable(tables)
        key = ".".join(name_tables(value_path, tables))
        raise ConfigError(
            f"{where}: {key}: expected a number, a text, a list or a table, got {type(value).__name__}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: {TOO_DEEP}") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":  # `json.dumps` wrote it, so only its depth can be wrong
            raise ConfigError(f"{where}: {TOO_DEEP}") from error
        path, complaint = explain_validation_error(error, tables)
        if first["type"] == "extra_forbidden":
            known_keys = _field_names(kind, first["loc"][:-1])
            complaint = f"unknown key, {did_you_mean(path[-1], known_keys)}"
        elif first["type"] == "list_type" and isinstance(first["input"], dict):
            complaint = f"this is a list of tables; write [[{path[-1]}]]"
        keys = [".".join(name_tables(path, tables))] if path else []
        raise ConfigError(": ".join([where, *keys, complaint])) from error


def name_tables(path: Sequence[str], tables: Mapping[str, Any]) -> list[str]:
    """Return the path of a key with the title of an attack or a measure in place of its number.

    `--set` names tables so. Where two tables have the same title, the number stays.
    """
    if len(path) < 3 or path[0] not in _TITLED_LISTS or path[2] in ("name", "label"):
        return list(path)
    titles = [_title(table) for table in tables[path[0]]]
    title = titles[int(path[1])]
    return [path[0], title if title and titles.count(title) == 1 else path[1], *path[2:]]


def _title(table: Any) -> str:
    """Return the name under which the results of a table are stored; '' where it is not known."""
    title = (table.get("label") or table.get("name")) if isinstance(table, Mapping) else None
    return title if isinstance(title, str) else ""


def _find_unwritable(value: Any, path: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any]:
    """Return the path of the first value, and the value, that no experiment file can hold."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, inner in items:
        try:
            json.dumps(inner)
        except TypeError:
            return _find_unwritable(inner, (*path, str(key)))
    return path, value


def _field_names(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table at `path` within the table `kind`."""
    for key in path:
        field = kind.model_fields.get(str(key))
        if field is None:
            continue
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                kind = annotation
    return list(kind.model_fields)
