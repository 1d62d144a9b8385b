"""Tables of an experiment file, validated before anything runs.

Every table is strict: an unknown key, a wrong type or a contradiction is a ConfigError that names
the key and, where there is one, the nearest known name. A table with a `name` picks a plug-in; its
other keys are the settings of that plug-in and are checked against it.
"""

from __future__ import annotations

from pydantic import Field, PrivateAttr, field_validator, model_validator

from fedsim.federation.adversary_tables import AdversaryTable, AttackTable
from fedsim.federation.federation_tables import (
    AlgorithmTable,
    DataTable,
    FederationTable,
    MeasureTable,
    ModelTable,
    PartitionTable,
    RecordingTable,
    StatesTable,
    StrategyTable,
    TrainingTable,
)
from fedsim.federation.privacy_tables import (
    CanariesTable,
    CentralPrivacyTable,
    DistributedPrivacyTable,
    SecureAggregationTable,
)
from fedsim.federation.table import PluginTable, Table, check_choice, check_list, check_titles
from fedsim.plugins.registry import Group
from fedsim.recording.adversary_role import find_error_in_collusion
from fedsim.recording.message_format import MessageFormat, check_client_ids


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
    attack: list[AttackTable] = Field(default=[])
    app: MessageFormat = MessageFormat()
    truth: dict[str, str] = Field(default={})
    report: ReportTable | None = None

    @field_validator("truth")
    @classmethod
    def _check_client_keys(cls, truth: dict[str, str]) -> dict[str, str]:
        check_client_ids(key.removeprefix("#") for key in truth if key != PUBLIC_KEY)
        return truth

    @model_validator(mode="after")
    def _check_attacks(self) -> AttackFile:
        if isinstance(self.adversary.victims, list):
            check_list("adversary.victims", self.adversary.victims, "clients")
        if isinstance(self.adversary.rounds, list):
            check_list("adversary.rounds", self.adversary.rounds, "rounds")
        check_titles(self.attack, "attacks")
        return self


class Config(AttackFile):
    """Whole experiment file.

    Where it is read from a run folder, `_data` is the hash of the data that the run was made with.
    """

    _data: str = PrivateAttr("")

    def without_data_hash(self) -> Config:
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
    defense: list[PluginTable] = Field(default=[])
    secure_aggregation: SecureAggregationTable | None = None
    central_privacy: CentralPrivacyTable | None = None
    distributed_privacy: DistributedPrivacyTable | None = None
    canaries: CanariesTable | None = None
    measure: list[MeasureTable] = Field(default=[])
    recording: RecordingTable = RecordingTable()
    states: StatesTable = StatesTable()

    @property
    def plugins(self) -> dict[str, tuple[Group, str]]:
        """Return group and name of each plug-in that acts in the federation, by position, such as `defense.0`."""
        plugins: dict[str, tuple[Group, str]] = {
            "data": ("datasets", self.data.name),
            "partition": ("partitions", self.partition.name),
            "model": ("models", self.model.name),
            "strategy": ("strategies", self.strategy.name),
        }
        if self.algorithm is not None:
            plugins["algorithm"] = ("algorithms", self.algorithm.name)
        plugins |= {f"defense.{number}": ("defenses", table.name) for number, table in enumerate(self.defense)}
        return plugins | {f"measure.{table.title}": ("measures", table.name) for table in self.measure}

    @model_validator(mode="after")
    def _check_tables(self) -> Config:
        check_titles(self.measure, "measures")
        self._check_choices()
        if self.recording.rounds == [] and self.attack and self.adversary.when != "never":
            raise ValueError("recording.rounds: nothing is recorded, so there is nothing to attack; name rounds")
        self._check_colluders()
        if not self.adversary.role.reads_messages and self.recording.clients is not None:
            raise ValueError(
                "recording.clients: an adversary that sees models sees the sum over all clients, of whom some would "
                "not be recorded; leave it out, or adversary.who"
            )
        if self.canaries is not None:
            self._check_canaries(self.canaries.clients)
        last_round = self.federation.rounds
        if self.states.rounds and max(self.states.rounds) > last_round:
            raise ValueError(
                f"states.rounds: round {max(self.states.rounds)} of federation.rounds = {last_round}; raise it"
            )
        self._check_visible_messages()
        self._refuse_keys_of_attack_files()
        return self

    def _check_choices(self) -> None:
        """Raise ValueError where a list names clients or rounds that there are not, or one of them twice."""
        adversary, recording = self.adversary, self.recording
        clients, rounds = self.federation.clients, self.federation.rounds
        for where, chosen, count, noun in (
            ("adversary.victims", adversary.victims, clients, "clients"),
            ("recording.clients", recording.clients, clients, "clients"),
            ("recording.colluders", recording.colluders, clients, "clients"),
            ("adversary.rounds", adversary.rounds, rounds, "rounds"),
            ("adversary.who", list(adversary.role.clients) or None, clients, "clients"),
            ("recording.rounds", recording.rounds or None, rounds, "rounds"),
        ):
            if isinstance(chosen, list):
                check_choice(where, chosen, count, noun)

    def _check_visible_messages(self) -> None:
        """Raise ValueError where secure aggregation, or links that nobody hears, hide what is to be attacked."""
        if self.secure_aggregation is None:
            self.adversary.check_victims_are_heard()
            return
        self.secure_aggregation.check_groups(self.federation.clients, self.recording.clients)
        if self.adversary.role.party == "eavesdropper" and self.adversary.when == "in-round":
            raise ValueError(
                "adversary.who: under [secure_aggregation] an eavesdropper sees masked vectors, and learns from the "
                "next round's model; set when = 'at-end'"
            )

    def _refuse_keys_of_attack_files(self) -> None:
        """Raise ValueError where code or files are named: a run folder may come from a stranger."""
        knowledge = self.adversary.knowledge
        if isinstance(knowledge.model, str):
            raise ValueError(
                "adversary.knowledge.model: a federation defines its own model, so give true or "
                "false; 'module:callable' belongs in the attack file of a recording made elsewhere"
            )
        if isinstance(knowledge.loss, str):
            raise ValueError(
                "adversary.knowledge.loss: a federation defines its own loss, so give true or "
                "false; a name belongs in the attack file of a recording made elsewhere"
            )
        for name in ("truth", "app"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name}: a federation has its own; [{name}] belongs in an attack file")

    def _check_colluders(self) -> None:
        """Raise ValueError where clients that attack learn nothing, or what they know would not be there."""
        role, kept = self.adversary.role, self.recording.colluders
        if len(role.colluders) == self.federation.clients:
            raise ValueError("adversary.who: all clients attack, so no client is left to be attacked; name fewer")
        if kept is not None and self.secure_aggregation is None:
            raise ValueError(
                "recording.colluders: without [secure_aggregation] the server sees, and the recording has, the update "
                "of each client; leave it out"
            )
        if role.party != "server" or not role.colluders:
            return
        if error := find_error_in_collusion(role, kept or (), sees_sums=self.secure_aggregation is not None):
            raise ValueError(error)

    def _check_canaries(self, chosen: list[int] | None) -> None:
        """Raise ValueError where the server would not see the canaries."""
        if chosen is not None and self.central_privacy is not None:
            raise ValueError(
                "canaries.clients: with [central_privacy] each canary is a separate client, as the guarantee is for "
                "whole clients; leave it out"
            )
        if chosen is not None:
            check_choice("canaries.clients", chosen, self.federation.clients, "clients")
        if self.secure_aggregation is not None:
            raise ValueError(
                "canaries: they measure what one client's messages reveal, and under secure "
                "aggregation the server sees sums alone; leave [canaries] or [secure_aggregation] "
                "out"
            )
        unseen = sorted(set(self.canary_clients) - set(self.recording.clients or self.canary_clients))
        if self.recording.rounds == [] or unseen:
            reason = f"client {unseen[0]} is not recorded" if unseen else "no round is recorded"
            raise ValueError(f"canaries: {reason}, so they would not be looked for; name others, or change [recording]")

    @property
    def canary_clients(self) -> list[int]:
        """Return the clients that carry canaries; none where canaries are clients themselves."""
        if self.canaries is None or self.central_privacy is not None:
            return []
        chosen = self.canaries.clients if self.canaries.clients is not None else self.adversary.victims
        if chosen == "all":
            return list(range(self.federation.clients))
        return list(chosen) if chosen else [min(self.recording.clients or [0])]
