"""The tables of an experiment file, checked before anything runs.

Every table is strict: an unknown key, a wrong type or a contradiction is a ConfigError that names the key and, where
there is one, the nearest known name. A table with a `name` picks a plug-in; its other keys are the settings of that
plug-in and are checked against it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

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

from fedsim.errors import ConfigError, did_you_mean
from fedsim.knowledge import FACTS
from fedsim.plugins.registry import explain
from fedsim.training.settings import LocalTraining

_T = TypeVar("_T", bound=BaseModel)


MIN_BITS, MAX_BITS = 4, 24
"""Of the numbers that are summed under secure aggregation."""
TOO_DEEP = "is nested too deeply; settings are tables, lists and values in them"
"""What is wrong with a file whose tables contain tables without end."""
_TITLED = ("attack", "measure")
"""Lists of tables that have a title each."""


class Table(BaseModel):
    """A table of the experiment file; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class PluginTable(BaseModel):
    """A table that picks a plug-in by `name`; the other keys are the plug-in's settings."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, ser_json_inf_nan="constants")
    name: str

    @property
    def settings(self) -> dict[str, Any]:
        """The plug-in's own settings."""
        return dict(self.model_extra or {})


class DataTable(PluginTable):
    """[data]: which data set, and whether models are fed with standardised inputs."""

    name: str = "digits"
    standardise: bool = True


class PartitionTable(PluginTable):
    """[partition]: who holds what.

    `test_fraction` is held out to test on: of each client's examples (`test_by = "sample"`), or of
    the clients, who then train nothing and whose examples the server tests on (`test_by = "client"`).
    """

    name: str = "iid"
    samples_per_client: int | None = Field(default=None, ge=1)
    test_fraction: float = Field(default=0.0, ge=0, lt=1)
    test_by: Literal["sample", "client"] = "sample"


class ModelTable(PluginTable):
    """[model]: which network, and the trained state to start from.

    `start` is a safetensors file such as `fedsim train` writes; a relative path is relative to the
    experiment file.
    """

    name: str = "sme-cnn"
    start: str | None = None


class StrategyTable(PluginTable):
    """[strategy]: which Flower strategy aggregates."""

    name: str = "fedavg"


def _derived(base: type[Table], **keys: tuple[Any, Any]) -> Any:
    """The table `base` with `keys`, each with its type and its default, which are declared elsewhere."""
    return create_model(base.__name__, __base__=base, __module__=__name__, __doc__=base.__doc__, **keys)  # type: ignore[call-overload]


class TrainingTable(Table):
    """[training]: the fields of `fedsim.training.settings.LocalTraining`, which checks the values.

    If `sends` is left out, the strategy's class declares it. `resolve` writes it down, because a recording is attacked
    without loading the strategy. Clients that send a gradient take one mini-batch a round: `local_steps = 1`. The
    proximal term is a setting of FedProx's server.
    """

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...


if not TYPE_CHECKING:
    _SETTINGS = {item.name: (get_type_hints(LocalTraining)[item.name], item.default) for item in fields(LocalTraining)}
    del _SETTINGS["proximal_mu"]
    TrainingTable = _derived(TrainingTable, **_SETTINGS)


class FederationTable(Table):
    """[federation]: how many clients and rounds, on which engine.

    `evaluate_every` is the rounds between two evaluations (0 for none at all; else the last round has
    one, too), `evaluate_examples` the most test examples that the server evaluates on (default: all; the
    same ones, drawn by the seed, each time), `timeout` how many seconds a round waits for its clients
    (and a little longer for what they have sent by then; an evaluation waits as long again), `device`
    where clients train,
    `vectorise` whether clients with small networks train several at once (`fedsim.training.cohort`)
    or each in a loop of its own. `reply_memory` is how many MB of a round's replies wait in memory, the others on disk
    (default: a quarter of what is free, and 512 at least).

    Engine `ray`: `actors` is the number of Ray actors (default: one a core, on a cluster as many as
    fit), `address` a Ray cluster to join, `gpus_per_actor` the share of a GPU that each actor takes
    when `device` is `cuda`. Engine `flower`: `supernodes` is how many of them to start, or, under
    `flwr run`, to wait for; `address` is the name of a connection in Flower's own configuration, to
    submit to a SuperLink that runs already. What is started here runs in a network of its own, which
    no other user of this machine can reach, and which reaches no other network.
    """

    engine: Literal["serial", "ray", "flower"] = "serial"
    seed: int = Field(default=0, ge=0)
    clients: int = Field(default=10, ge=1, le=10_000_000)
    rounds: int = Field(default=1, ge=1, le=1_000_000)
    straggler_probability: float = Field(default=0.0, ge=0, le=1)
    evaluate_every: int = Field(default=1, ge=0)
    evaluate_examples: int | None = Field(default=None, ge=1)
    timeout: float = Field(default=3600.0, gt=0, le=1e8)
    device: Literal["cpu", "cuda"] = "cpu"
    vectorise: bool = True
    reply_memory: int | None = Field(default=None, ge=1, le=100_000_000)
    actors: int | None = Field(default=None, ge=1, le=100_000)
    address: str | None = None
    gpus_per_actor: float = Field(default=1.0, gt=0, le=1024)
    supernodes: int = Field(default=2, ge=1, le=100_000)


class SecureAggregationTable(Table):
    """[secure_aggregation]: clients send masked updates, of which the server learns sums over groups, and nothing else.

    `groups` is the least number of clients in a group, drawn anew in each round, or `all` for one group of all clients
    of the round. `threshold` is how many of a group have to answer, or its sum is lost: a number of clients, or a
    fraction of the group, of which at least 2; 1 is all of them, as in Flower. Each number of an update, times the
    weight of its client, is cut to [-`clip`, `clip`] and rounded at random to a multiple of 2 `clip` / 2^`bits`. See
    `strategies.secure_sum`.
    """

    groups: int | Literal["all"] = "all"
    threshold: int | float = 0.5
    bits: int = 22
    clip: float = 1.0

    @model_validator(mode="after")
    def _is_possible(self) -> SecureAggregationTable:
        if self.groups != "all" and self.groups < 2:
            raise ValueError(
                f"groups: expected 2 clients or more, since the sum over one is its update, or 'all', got {self.groups}"
            )
        if not self.threshold > 0 or (isinstance(self.threshold, float) and self.threshold > 1):
            raise ValueError(
                "threshold: expected a number of clients from 1 on, or a fraction above 0 and at most 1.0, got "
                f"{self.threshold}"
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

    def survivors(self, size: int) -> int:
        """How many of a group of `size` clients have to answer: Flower's rule."""
        if isinstance(self.threshold, int) and self.threshold > 1:
            return self.threshold
        return max(round(self.threshold * size), 2)


class CanariesTable(Table):
    """[canaries]: a lower bound of epsilon, measured in this run, beside what is proved of the defenses.

    `count` canaries are drawn for each of `clients`, by default for the victims, and a coin for each says whether it is
    in. Those that are in are gradients among those of the client's examples, so what it sends changes, and costs
    accuracy; the N that it reports does not change. `confidence` is the probability with which all lower bounds of the
    run hold.
    """

    count: int = Field(ge=20, le=1_000_000)
    clients: list[int] | None = None
    confidence: float = Field(default=0.99, gt=0.5, lt=1)


class StatesTable(Table):
    """[states]: which states of training are kept, in `RUN/states` or by `fedsim train`.

    `rounds` are rounds of the federation, `epochs` those of central training on the whole training
    set, which only `fedsim train` does; 0 is the untrained model. In central training the learning
    rate is multiplied with `decay` after each of the epochs `decay_at`.
    """

    rounds: list[Annotated[int, Field(ge=0)]] = []
    epochs: list[Annotated[int, Field(ge=0, le=1_000_000)]] = []
    decay_at: list[Annotated[int, Field(ge=1)]] = []
    decay: float = Field(default=0.1, gt=0, le=1)


class RecordingTable(Table):
    """[recording]: see `fedsim.recording.recorder.Plan`; `rounds = []` records nothing.

    `fsync` is whether each round and checkpoint has to be on the disk before the run goes on, so that a power cut
    costs no more than the round in which it happens.
    """

    rounds: list[int] | None = None
    clients: list[int] | None = None
    every: int = Field(default=1, ge=1)
    fsync: bool = False


class KnowledgeTable(Table):
    """[adversary.knowledge]: what the adversary is granted besides the messages; a key for each of `FACTS`.

    `true` grants what the run itself holds, `false` withholds it; a recording made elsewhere has
    nothing to take from, so there the value is written out: `model = "module:callable"`,
    `input_shape = [1, 28, 28]`, `value_range = [0.0, 1.0]`. What the server sent along with its model in the attacked
    round (`learning_rate` and its kin) is taken from there wherever it says something. `records` are the victim's
    training examples; `partial_records` names the one column of a table that is withheld of them. `candidates` are
    records of which half are among them; it says where the others come from, `held-out` or `other-clients`.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


if not TYPE_CHECKING:
    KnowledgeTable = _derived(KnowledgeTable, **{name: (fact.key, fact.granted) for name, fact in FACTS.items()})


class AdversaryTable(Table):
    """[adversary]: whom to attack, when, and with what knowledge.

    `when` is `at-end` (after the last round), `in-round` (in a process of its own as soon as a
    round is recorded) or `never` (later, with `fedsim attack`). `victims` are client ids, `all`, or
    by default the first recorded client; `rounds` are by default the first recorded one. `repeats`
    runs each attack from that many random starts, all scored, so that scores get an interval. On a
    CPU, `workers` processes of one thread each share the attacks (default: one a core, but
    at most half as many as there are attacks). `candidates` and `auxiliary` are how many records of that kind are
    granted at most, where they are.
    """

    when: Literal["at-end", "in-round", "never"] = "at-end"
    victims: list[int] | Literal["all"] | None = None
    rounds: list[int] | Literal["all"] | None = None
    repeats: int = Field(default=1, ge=1, le=1000)
    workers: int | None = Field(default=None, ge=1, le=4096)
    device: str = "auto"
    candidates: int = Field(default=1000, ge=2, le=1_000_000)
    auxiliary: int = Field(default=1000, ge=1, le=1_000_000)
    knowledge: KnowledgeTable = KnowledgeTable()


_LONGEST = 60
"""Characters of a label; file systems take names of 255 bytes, and a character may have four."""


class LabelledTable(PluginTable):
    """A table of a list; `label` tells two settings of the same plug-in apart."""

    label: str = ""

    @field_validator("label")
    @classmethod
    def _names_a_folder(cls, label: str) -> str:
        if label and not re.fullmatch(r"\w[\w .,=+-]*", label):
            raise ValueError(f"it names a folder: expected letters, digits and any of ' .,=+-', got '{label}'")
        if len(label) > _LONGEST:
            raise ValueError(f"it names a folder: expected at most {_LONGEST} characters, got {len(label)}")
        return label

    @property
    def title(self) -> str:
        """What its results are filed under."""
        return self.label or self.name


class AttackTable(LabelledTable):
    """[[attack]]: one attack; `label` tells two settings of the same one apart and names a folder."""


class MeasureTable(LabelledTable):
    """[[measure]]: how exposed each client is before it sends, which it computes of itself and tells nobody.

    `each` measures each example besides of all of them together. It is done in round 1 and each `every` rounds after
    it, with `memory` MiB at once. `label` tells two settings of the same measure apart.
    """

    each: bool = False
    every: int = Field(default=1, ge=1)
    memory: int = Field(default=512, ge=1, le=1 << 20)


class AppTable(Table):
    """[app]: what the messages of somebody's Flower app mean, where their recording alone does not say it.

    All but two keys are those of `fedsim.recording.reading.Reading`; `num_examples` is one number, or one for each
    client id. `outputs = "module:callable"` makes logits of what the model returns and of its inputs, for models that
    return a tuple or an object. `messages` is the kind of the messages whose answers are updates, where these are no
    training messages with arrays, such as `query.weights`: arrays, lists of numbers or bytes. With `frozen = true`,
    parameters that need no gradient are not sent, and keep the values that the model is built with.
    """

    replies: Literal["weights", "delta", "gradient"] = "weights"
    messages: str = ""
    record: str = ""
    message: Annotated[int, Field(ge=0)] = 0
    prefix: str = ""
    module: str = ""
    names: list[str] = []
    shapes: dict[str, list[Annotated[int, Field(ge=1)]]] = {}
    transposed: bool = False
    num_examples: Annotated[int, Field(ge=1)] | dict[str, Annotated[int, Field(ge=1)]] | None = None
    outputs: str = ""
    frozen: bool = False

    @field_validator("num_examples")
    @classmethod
    def _keys_are_clients(cls, counts: int | dict[str, int] | None) -> int | dict[str, int] | None:
        _check_clients(counts if isinstance(counts, dict) else ())
        return counts


class ReportTable(Table):
    """[report]: what is written beside `report.html`.

    `tensorboard` writes accuracy, loss, scores and exposure by round as event files for TensorBoard, into
    `RUN/tensorboard`; it takes the package `tensorboard`.
    """

    tensorboard: bool = False


class AttackFile(Table):
    """What `fedsim attack RUN FILE` reads: an adversary without a federation.

    `truth` maps client ids to safetensors files with `data` (`example channel height width` in
    [0, 1]) and `labels`, for scoring what was recorded elsewhere. The attacks never see them. Instead of a client's id
    a key may be `#1`, `#2` ..., the clients in the order in which they appear in the recording, and in one round by id.
    """

    adversary: AdversaryTable = AdversaryTable()
    attack: list[AttackTable] = []
    app: AppTable = AppTable()
    truth: dict[str, str] = {}
    report: ReportTable | None = None

    @field_validator("truth")
    @classmethod
    def _keys_are_clients(cls, truth: dict[str, str]) -> dict[str, str]:
        _check_clients(key.removeprefix("#") for key in truth)
        return truth

    @model_validator(mode="after")
    def _attacks_make_sense(self) -> AttackFile:
        for name, chosen in (("victims", self.adversary.victims), ("rounds", self.adversary.rounds)):
            if isinstance(chosen, list):
                _check_list(f"adversary.{name}", chosen, "clients" if name == "victims" else name)
        _check_titles(self.attack, "attacks")
        return self


class Config(AttackFile):
    """A whole experiment file.

    Of one that is read from a run folder, `_data` is the hash of the data that the run was made with.
    """

    _data: str = PrivateAttr("")

    def as_new(self) -> Config:
        """Return the same experiment for a run that is yet to be made, with whatever data there are."""
        new = self.model_copy()
        new._data = ""
        return new

    data: DataTable = DataTable()
    partition: PartitionTable = PartitionTable()
    model: ModelTable = ModelTable()
    training: TrainingTable = TrainingTable(local_epochs=1)
    federation: FederationTable = FederationTable()
    strategy: StrategyTable = StrategyTable()
    defense: list[PluginTable] = []
    secure_aggregation: SecureAggregationTable | None = None
    canaries: CanariesTable | None = None
    measure: list[MeasureTable] = []
    recording: RecordingTable = RecordingTable()
    states: StatesTable = StatesTable()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        clients, rounds = self.federation.clients, self.federation.rounds
        _check_titles(self.measure, "measures")
        for where, chosen, count, what in (
            ("adversary.victims", self.adversary.victims, clients, "clients"),
            ("recording.clients", self.recording.clients, clients, "clients"),
            ("adversary.rounds", self.adversary.rounds, rounds, "rounds"),
            ("recording.rounds", self.recording.rounds, rounds, "rounds"),
        ):
            if isinstance(chosen, list) and (chosen or where != "recording.rounds"):
                _check_choice(where, chosen, count, what)
        if self.recording.rounds == [] and self.attack and self.adversary.when != "never":
            raise ValueError("recording.rounds: nothing is recorded, so there is nothing to attack; name rounds")
        if self.canaries is not None:
            self._check_canaries(self.canaries.clients)
        if self.states.rounds and max(self.states.rounds) > rounds:
            raise ValueError(
                f"states.rounds: round {max(self.states.rounds)} of federation.rounds = {rounds}; raise it"
            )
        if self.secure_aggregation is not None:
            _check_groups(self.secure_aggregation, clients, self.recording.clients)
        # A run folder may come from a stranger: what it holds names no code and no files.
        if isinstance(self.adversary.knowledge.model, str):
            raise ValueError(
                "adversary.knowledge.model: a federation has a model of its own, so give true or false; "
                "'module:callable' belongs in the attack file of a recording made elsewhere"
            )
        if isinstance(self.adversary.knowledge.loss, str):
            raise ValueError(
                "adversary.knowledge.loss: a federation has a loss of its own, so give true or false; a name belongs "
                "in the attack file of a recording made elsewhere"
            )
        for name in ("truth", "app"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: a federation has its own; [{name}] belongs in an attack file")
        return self

    def _check_canaries(self, chosen: list[int] | None) -> None:
        """Raise ValueError where nobody would see the canaries."""
        if chosen is not None:
            _check_choice("canaries.clients", chosen, self.federation.clients, "clients")
        if self.secure_aggregation is not None:
            raise ValueError(
                "canaries: they measure what one client's messages tell, and under secure aggregation the server sees "
                "sums alone; leave [canaries] or [secure_aggregation] out"
            )
        unseen = sorted(set(self.carriers) - set(self.recording.clients or self.carriers))
        if self.recording.rounds == [] or unseen:
            what = f"client {unseen[0]} is not recorded" if unseen else "no round is recorded"
            raise ValueError(f"canaries: {what}, so nobody would look for them; name others, or change [recording]")

    @property
    def carriers(self) -> list[int]:
        """The clients for which canaries are drawn."""
        if self.canaries is None:
            return []
        chosen = self.canaries.clients if self.canaries.clients is not None else self.adversary.victims
        if chosen == "all":
            return list(range(self.federation.clients))
        return list(chosen) if chosen else [min(self.recording.clients or [0])]


def _check_titles(tables: Iterable[LabelledTable], what: str) -> None:
    for title, count in Counter(table.title for table in tables).items():
        if count > 1:
            raise ValueError(f"two {what} are called '{title}'; give one of them a label of its own")


def _check_clients(keys: Iterable[str]) -> None:
    for key in keys:
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"expected client ids as keys, got '{key}'")


def _check_groups(table: SecureAggregationTable, clients: int, recorded: list[int] | None) -> None:
    """Raise ValueError where no round could have such groups, or clients are to be recorded that nobody sees."""
    size = clients if table.groups == "all" else table.groups
    if size > clients or clients < 2:
        raise ValueError(
            f"secure_aggregation.groups: expected at most federation.clients = {clients}, and 2 clients or more, got "
            f"{table.groups}"
        )
    if table.threshold > size:
        raise ValueError(
            f"secure_aggregation.threshold: {table.threshold} of a group have to answer, but federation.clients is "
            f"{clients}; lower it"
        )
    if recorded is not None:
        raise ValueError(
            "recording.clients: under secure aggregation the server sees groups of clients, which are drawn anew in "
            "each round; leave it out"
        )


def _check_list(where: str, chosen: list[int], what: str) -> None:
    if not chosen:
        raise ValueError(f"{where}: the list is empty; leave the key out, or name {what}")
    if twice := [item for item, count in Counter(chosen).items() if count > 1]:
        raise ValueError(f"{where}: {twice[0]} is named twice; name each once")


def _check_choice(where: str, chosen: list[int], count: int, what: str) -> None:
    first = 0 if what == "clients" else 1
    if len(chosen) > count:
        raise ValueError(f"{where}: {len(chosen)} {what} named, but federation.{what} is {count}")
    for item in chosen:
        if not first <= item < first + count:
            raise ValueError(f"{where}: expected {what} from {first} to {first + count - 1}, got {item}")
    _check_list(where, chosen, what)


def check(kind: type[_T], tables: Mapping[str, Any], where: str) -> _T:
    """Validate `tables` as `kind`, turning the first error into one sentence."""
    try:
        text = json.dumps(tables)
    except TypeError as error:
        key, odd = _unwritable(tables)
        place = titled(key, tables)
        raise ConfigError(
            f"{where}: {'.'.join(place)}: expected a number, a text, a list or a table, got {type(odd).__name__}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: {TOO_DEEP}") from error
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":  # it was JSON a moment ago
            raise ConfigError(f"{where}: {TOO_DEEP}") from error
        place, complaint = explain(error, tables)
        if first["type"] == "extra_forbidden":
            complaint = f"unknown key, {did_you_mean(place[-1], _fields_at(kind, first['loc'][:-1]))}"
        elif first["type"] == "list_type" and isinstance(first["input"], dict):
            complaint = f"this is a list of tables; write [[{place[-1]}]]"
        named = [".".join(titled(place, tables))] if place else []
        raise ConfigError(": ".join([where, *named, complaint])) from error


def titled(place: Sequence[str], tables: Mapping[str, Any]) -> list[str]:
    """`place` with the title of an attack or a measure for its number, as `--set` names it, where no other has it."""
    if len(place) < 3 or place[0] not in _TITLED or place[2] in ("name", "label"):
        return list(place)
    named = [_title(table) for table in tables[place[0]]]
    title = named[int(place[1])]
    return [place[0], title if title and named.count(title) == 1 else place[1], *place[2:]]


def _title(table: Any) -> str:
    """What the results of a table are filed under; nothing where that is not known."""
    title = (table.get("label") or table.get("name")) if isinstance(table, Mapping) else None
    return title if isinstance(title, str) else ""


def _unwritable(value: Any, place: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any]:
    """The first key, and its value, that no experiment file can hold."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in parts:
        try:
            json.dumps(inner)
        except TypeError:
            return _unwritable(inner, (*place, str(key)))
    return place, value


def _fields_at(kind: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        found = kind.model_fields.get(str(part))
        for of in (found.annotation, *get_args(found.annotation)) if found is not None else ():
            kind = of if isinstance(of, type) and issubclass(of, BaseModel) else kind
    return list(kind.model_fields)
