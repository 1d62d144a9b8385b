"""Tables of an adversary: who attacks whom, with which knowledge and which attacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from fedsim.base.errors import ConfigError
from fedsim.federation.table import LabelledTable, Table, add_keys
from fedsim.interfaces.knowledge import FACTS, MESSAGE_FACTS
from fedsim.recording.adversary_role import AdversaryRole, Who, find_error_in_who


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
    KnowledgeTable = add_keys(
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


def is_stated(name: str, value: object) -> bool:
    """Return whether `value` of a key of [adversary.knowledge] is another than where the key is left out.

    A number is never the same as `true`, which 1 equals in Python.

    >>> is_stated("local_epochs", 1), is_stated("local_epochs", True)
    (True, False)
    """
    default = KnowledgeTable.model_fields[name].default
    return type(value) is not type(default) or value != default


class AdversaryTable(Table):
    """[adversary]: the victims, the time of attacks, and the adversary's knowledge."""

    when: Literal["at-end", "in-round", "never"] = Field(
        default="at-end",
        description="When attacks run: after the last round (`at-end`), in a separate process as soon as "
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
        description="Number of processes of one thread each that share the attacks on a CPU; by default one per "
        "core, but at most half as many as there are attacks.",
    )
    device: str = Field(
        default="auto",
        description="Device of the attacks, such as `cpu` or `cuda:0`; `auto` is a GPU where there is one.",
    )
    candidates: int = Field(
        default=1000, ge=2, le=1_000_000, description="Maximum number of granted candidate records."
    )
    auxiliary: int = Field(default=1000, ge=1, le=1_000_000, description="Maximum number of granted auxiliary records.")
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
        """Check that each named victim is on a link that is heard, where messages are in clear."""
        links, named_victims = self.role.links, self.victims if isinstance(self.victims, list) else []
        if unheard := [client for client in named_victims if links and client not in links]:
            raise ConfigError(
                f"adversary.victims: {self.role} does not see the link of client {unheard[0]}; choose victims "
                "among these clients, or listen to all links"
            )

    @model_validator(mode="after")
    def _check_values(self) -> AdversaryTable:
        if not self.role.reads_messages and self.when == "in-round":
            raise ValueError("who: others than the server learn from the next round's model; set when = 'at-end'")
        if not self.role.reads_messages and not (self.knowledge.num_examples and self.knowledge.client_ids):
            raise ValueError(
                "knowledge: num_examples and client_ids are withheld from a server; others see sums over all "
                "clients and are assumed to know their numbers of examples; remove them, or who"
            )
        telling = [name for name in ("labels", "records") if getattr(self.knowledge, name)]
        if telling and not self.knowledge.num_examples:
            raise ValueError(
                f"knowledge: {telling[0]} are granted, which are as many as the examples, and num_examples is "
                "withheld; leave one of them out"
            )
        if self.role.links and not self.knowledge.client_ids:
            raise ValueError(
                "knowledge: client_ids is withheld, and an eavesdropper on the links of certain clients knows whose "
                "messages these are; remove it, or set who = 'eavesdropper'"
            )
        named_victims = self.victims if isinstance(self.victims, list) else []
        if colluders := [client for client in named_victims if client in self.role.colluders]:
            raise ValueError(f"victims: client {colluders[0]} is among those who attack (who); name another")
        return self


class AttackTable(LabelledTable):
    """[[attack]]: one attack."""

    tuned: str | None = Field(
        default=None,
        description="How its settings were chosen; `fedsim tune` writes it, and reports show it.",
    )
