"""Facts that a threat model can grant an adversary besides the messages.

Each fact is declared once. The keys of `[adversary.knowledge]`, the checks of their values, the
facts read from a server's messages, the table of the report and that of the documentation all
follow from these fields. Importing this module does not load torch, because experiment files are
checked with it.
"""

# ruff: noqa: RUF009 (fields that are made by a function which returns `dataclasses.field`)

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedsim.interfaces.defense import Defense
    from fedsim.recording.wire_format import State


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One fact that a threat model grants or withholds.

    Attributes:
        about: description for the report and the documentation.
        value_type: type of a value in the experiment file; None where the file can only grant or
            withhold the fact.
        is_valid: tests a value of that type.
        expected: description of a valid value, for an error.
        granted_by_default: the value of its TOML key where the key is left out.
        victim_data: short description of the part of the victim's data that it reveals; empty where
            the fact is the same for all victims.
        setting: whether it is a setting of local training, which a server sends along with its
            model.
        aliases: further names of such a setting in the config that Flower apps send.
    """

    about: str
    value_type: Any = None
    is_valid: Callable[[Any], bool] = lambda value: True
    expected: str = ""
    granted_by_default: bool = True
    victim_data: str = ""
    setting: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def private(self) -> bool:
        """Return whether it differs from victim to victim."""
        return bool(self.victim_data)

    @property
    def description(self) -> str:
        """Return the description of its TOML key: what it is, and which values are valid."""
        sentence = f"{self.about[:1].upper()}{self.about[1:]}."
        return f"{sentence} A value: {self.expected}." if self.expected else sentence

    @property
    def key_type(self) -> Any:
        """Return the type of its TOML key: true or false, or a value.

        A private fact with a value type cannot be `true`: the value says which part is granted.
        """
        if self.value_type is None:
            return bool
        return (Literal[False] if self.private else bool) | self.value_type

    def accepts(self, value: object) -> bool:
        """Return whether a value that a server sent has the right type and is valid."""
        types = {float: int | float}.get(self.value_type, self.value_type)
        return isinstance(value, types) and not isinstance(value, bool) and self.is_valid(value)


_Check = tuple[Callable[[Any], bool], str]
"""Test of a value, and a description of valid values."""
_ANY_VALUE: _Check = (lambda value: True, "")


def _fact(about: str, value_type: Any = None, check: _Check = _ANY_VALUE, **details: Any) -> Any:
    """Return a field of `Knowledge` that is None unless it is granted; `details` are further fields of its `Fact`."""
    is_valid, expected = check
    fact = Fact(about=about, value_type=value_type, is_valid=is_valid, expected=expected, **details)
    return field(default=None, metadata={"fact": fact})


def _setting(about: str, value_type: type, check: _Check, *aliases: str) -> Any:
    """Return a field of `Knowledge` for a setting of local training."""
    return _fact(about, value_type, check, setting=True, aliases=aliases)


def _are_finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _is_range(ends: Sequence[float | list[float]]) -> bool:
    if len(ends) != 2:
        return False
    low, high = (end if isinstance(end, list) else [end] for end in ends)
    return len(low) == len(high) > 0 and _are_finite([*low, *high]) and all(map(operator.lt, low, high))


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


_SIZES: _Check = (lambda sizes: len(sizes) > 0 and min(sizes) > 0, "sizes of at least 1")
_RANGE: _Check = (_is_range, "[lowest, highest], or of each as many as there are columns")
_SCALES: _Check = (
    lambda scales: _are_finite(scales) and min(scales, default=1) > 0,
    "finite values above 0",
)
_POSITIVE: _Check = (lambda rate: 0 < rate < math.inf, "a finite value above 0")
_NOT_NEGATIVE: _Check = (lambda weight: 0 <= weight < math.inf, "a finite value of at least 0")
_COUNT: _Check = (lambda count: count >= 1, "at least 1")


HELD_OUT, OTHER_CLIENTS = "held-out", "other-clients"
NON_MEMBER_SOURCES = (HELD_OUT, OTHER_CLIENTS)
"""Sources of candidate records that are not the victim's: the data set's test examples, or training
examples of other clients, on which the global model was trained as well."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records that the adversary knows: the victim's, candidates for membership, or auxiliary ones.

    Attributes:
        inputs: `record feature` or `record channel height width`, in model units.
        labels: `record`, class indices, or targets of a regression.
    """

    inputs: Tensor
    labels: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all fields that are tensors, by name."""
        from torch import Tensor

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class KnownCandidates(Records):
    """Candidate records with known membership.

    Attributes:
        members: `record`, whether the victim trained on it.
    """

    members: Tensor


@dataclass(frozen=True, kw_only=True)
class KnownRows(Records):
    """Rows of the victim that the adversary knows in full.

    Attributes:
        rows: `record`, their ids in the messages.
    """

    rows: Tensor


@dataclass(frozen=True, kw_only=True)
class PropertyRecords(Records):
    """Records with a label that says whether they have a property.

    Attributes:
        has: `record`, whether it has the property.
    """

    has: Tensor


@dataclass(frozen=True, kw_only=True)
class PartialRecords(Records):
    """Records in which one categorical column is unknown.

    Attributes:
        inputs: `record feature`, in model units; zero at the unknown column's features.
        column: name of the unknown column.
        features: positions of its features in the inputs, one for each category (0 or 1 in model
            units).
        categories: the values that the column may take.
    """

    column: str
    features: slice
    categories: tuple[str, ...]

    def complete_with(self, category: int) -> Tensor:
        """Return `record feature` inputs with the unknown column set to `category` in all records.

        Args:
            category: index into `categories`.
        """
        inputs = self.inputs.clone()
        inputs[:, self.features.start + category] = 1
        return inputs


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Facts that the threat model grants the adversary besides the messages.

    A field that is None is withheld, or the attack does not declare to read it.

    Attributes:
        models: by client, the local model that the attack named by `Attack.builds_on` claims.
        modality: name of the kind of examples, which says what the axes of `input_shape` mean;
            empty if none was named; it is then inferred.
        device: the device on which the attack computes.
    """

    model: Callable[[], nn.Module] | None = _fact(
        "a function that builds the architecture whose weights the server broadcasts", str
    )
    loss: Callable[[Tensor, Tensor], Tensor] | None = _fact(
        "the clients' loss, a function of logits and labels that returns the mean", str
    )
    input_shape: tuple[int, ...] | None = _fact(
        "shape of one example, as channel, height and width of an image", list[int], _SIZES
    )
    columns: tuple[int, ...] | None = _fact(
        "number of features of each column of a table, in order: 1 for a number, more for the categories of one column",
        list[int],
        _SIZES,
    )
    num_classes: int | None = _fact("number of classes", int, (lambda count: count >= 2, "at least 2"))
    value_range: tuple[Sequence[float], Sequence[float]] | None = _fact(
        "lowest and highest possible value of the model's inputs: one pair, or one value per channel (of a table: per "
        "feature)",
        list[float] | list[list[float]],
        _RANGE,
    )
    input_mean: Sequence[float] | None = _fact(
        "mean of the model's inputs, 0 if clients standardise", list[float], (_are_finite, "finite values")
    )
    input_std: Sequence[float] | None = _fact(
        "standard deviation of the model's inputs, 1 if clients standardise", list[float], _SCALES
    )
    learning_rate: float | None = _setting("step size of the clients' local training", float, _POSITIVE, "lr")
    local_epochs: int | None = _setting(
        "E, passes of a client over its data in one round; 1 if it sends a gradient", int, _COUNT
    )
    local_steps: int | None = _setting(
        "T, local steps of a client in one round, if their number is set instead of E; an attack that needs "
        "local_epochs accepts it instead",
        int,
        _COUNT,
    )
    batch_size: int | None = _setting("B, examples in one local step", int, _COUNT)
    optimizer: str | None = _setting(
        "optimizer of the clients: sgd, adam or adamw", str, (lambda name: bool(name.strip()), "a name, as sgd or adam")
    )
    momentum: float | None = _setting("momentum of the clients' SGD", float, _NOT_NEGATIVE)
    weight_decay: float | None = _setting("weight of the L2 penalty in the clients' steps", float, _NOT_NEGATIVE)
    proximal_mu: float | None = _setting("weight of FedProx's proximal term in the clients' loss", float, _NOT_NEGATIVE)
    label_smoothing: float | None = _setting(
        "share of each label that clients spread over all classes; if it is granted, the loss of an attack uses such "
        "labels",
        float,
        (lambda share: 0 <= share < 1, "at least 0, below 1"),
    )
    labels: Tensor | None = _fact(
        "the victim's labels in ascending order; an attack that splits them into mini-batches shuffles them",
        granted_by_default=False,
        victim_data="labels",
    )
    records: Records | None = _fact(
        "the victim's training records, for an attack that infers their source",
        granted_by_default=False,
        victim_data="records",
    )
    partial_records: PartialRecords | None = _fact(
        "the victim's records without a sensitive attribute, for an attack that infers it",
        str,
        (bool, "the name of a column"),
        granted_by_default=False,
        victim_data="all columns of records but one",
    )
    candidates: Records | None = _fact(
        "candidate records for membership inference, half of them the victim's; source of the others: "
        f"{' or '.join(NON_MEMBER_SOURCES)}",
        str,
        (
            lambda source: source in NON_MEMBER_SOURCES,
            f"where half of them come from, {' or '.join(NON_MEMBER_SOURCES)}",
        ),
        granted_by_default=False,
        victim_data="half of the candidate records, but not which half",
    )
    known_candidates: KnownCandidates | None = _fact(
        "number of further candidates with known membership, for supervised membership inference; half of them are the "
        "victim's, and none is scored",
        int,
        (lambda count: count >= 4 and count % 2 == 0, "an even number, at least 4"),
        granted_by_default=False,
        victim_data="some of its training records, known to be such",
    )
    known_rows: KnownRows | None = _fact(
        "number of the victim's rows that the adversary knows in full, with their ids, for an attack on split "
        "learning; none of them is scored",
        int,
        _COUNT,
        granted_by_default=False,
        victim_data="some of its rows",
    )
    auxiliary: Records | None = _fact(
        "labelled records of the same kind that no client trains on",
        granted_by_default=False,
    )
    property_records: PropertyRecords | None = _fact(
        "auxiliary records that are labelled by a property, for property inference; the property: column=category or "
        "group=name",
        str,
        (lambda name: "=" in name, "column=category, such as sex=Female, or group=name"),
        granted_by_default=False,
    )
    private_parts: State | None = _fact(
        "the parts of the model that stay with the victim, as they were at the start of the round",
        granted_by_default=False,
        victim_data="the parts of its model that it never sends",
    )
    noise_covariance: Tensor | None = _fact(
        "covariance over rounds of the noise that a trusted server adds, in units of fresh noise; the mechanism's "
        "matrix is public"
    )
    defenses: Sequence[Defense] | None = _fact(
        "the clients' defenses with their settings; each attack that can use them then runs twice, without them "
        "(naive) and with them (adaptive)",
        granted_by_default=False,
    )
    models: Mapping[int, State] | None = None
    modality: str = ""
    device: torch.device = field(default_factory=_cpu)

    def granted_facts(self) -> list[str]:
        """Return the names of the facts that are granted, in the order of the fields."""
        return [name for name in FACTS if getattr(self, name) is not None]

    def defenses_in(self, number: int) -> list[Defense]:
        """Return the known defenses that act in a round, counted from 1; none where they are withheld."""
        return [defense for defense in self.defenses or () if defense.acts_in(number)]

    @property
    def tables(self) -> dict[str, Records]:
        """Return all records that are granted, by the name of the fact."""
        values = {name: getattr(self, name) for name in FACTS}
        return {name: value for name, value in values.items() if isinstance(value, Records)}

    def restrict_to(self, names: Set[str]) -> Knowledge:
        """Return a copy without the facts that are not among `names`."""
        withheld: dict[str, Any] = {name: None for name in self.granted_facts() if name not in names}
        return replace(self, **withheld)


FACTS: Mapping[str, Fact] = {item.name: item.metadata["fact"] for item in fields(Knowledge) if "fact" in item.metadata}
"""All facts that a threat model can grant or withhold, by name, in the order of the fields."""


def describe_grants(names: Iterable[str]) -> str:
    """Say in brackets what to write so that these facts are granted; '' where all are, unless a file withholds them.

    >>> describe_grants(["model", "auxiliary"])
    ' (auxiliary = true)'
    """
    keys = []
    for name in names:
        fact = FACTS[name]
        if not fact.granted_by_default:
            keys.append(f"{name} = true" if fact.value_type is None else f"{name}: {fact.expected}")
    return f" ({'; '.join(keys)})" if keys else ""


MESSAGE_FACTS: Mapping[str, str] = {
    "num_examples": "N, the number of examples that clients say they trained on; without it an attack that reads N is "
    "refused",
    "client_ids": "which messages of different rounds are of the same client; without it clients have other pseudonyms "
    "in each round, and an attack that joins several rounds of a client is refused",
}
"""Facts that messages show a server, and that a threat model may withhold all the same."""
TRAINING_FACTS = tuple(name for name, fact in FACTS.items() if fact.setting)
"""Settings of local training, which a server sends along with its model."""


def config_keys(name: str) -> tuple[str, ...]:
    """Return the keys of the setting `name` in the config that servers send, fedsim's own first."""
    return name.replace("_", "-"), name, *FACTS[name].aliases
