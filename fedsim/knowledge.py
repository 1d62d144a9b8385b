"""What an adversary can be granted besides the messages: each fact is declared once, as a field of `Knowledge`.

The keys of `[adversary.knowledge]`, the check of a value that is written out there, what is read from the messages of a
server, the table of the report and that of the documentation all follow from these fields. Importing this module loads
no torch, because an experiment file is checked with it.
"""

# ruff: noqa: RUF009 (fields that are made by a function which returns `dataclasses.field`)

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from fedsim.defense import Defense
    from fedsim.wire.messages import State


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One thing that a threat model grants or withholds.

    Attributes:
        about: what it is, for the report and the documentation.
        value: type of a value that is written out in the file; None where the file can only grant or withhold.
        fits: whether such a value makes sense.
        expected: what a value that fits is, for an error.
        granted: the value of its TOML key where the key is left out.
        victims: in short, what of the victim's own data it is; empty where it is the same for all victims.
        setting: whether it is a setting of local training, which a server sends along with its model.
        aliases: what Flower apps call such a setting in the config that they send, besides its own name.
    """

    about: str
    value: Any = None
    fits: Callable[[Any], bool] = lambda value: True
    expected: str = ""
    granted: bool = True
    victims: str = ""
    setting: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def private(self) -> bool:
        """Whether it differs from victim to victim."""
        return bool(self.victims)

    @property
    def key(self) -> Any:
        """Type of its TOML key: true or false, or a value; of what is private, a value says what is withheld of it."""
        if self.value is None:
            return bool
        return (Literal[False] if self.private else bool) | self.value

    def takes(self, value: object) -> bool:
        """Whether a value that a server sent is of the right type and makes sense."""
        kinds = {float: int | float}.get(self.value, self.value)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.fits(value)


_Check = tuple[Callable[[Any], bool], str]


def _fact(about: str, value: Any = None, check: _Check | None = None, **how: Any) -> Any:
    """A field of `Knowledge` that is None unless it is granted."""
    if check is not None:
        how["fits"], how["expected"] = check
    return field(default=None, metadata={"fact": Fact(about=about, value=value, **how)})


def _setting(about: str, value: type, check: _Check, *aliases: str) -> Any:
    return _fact(about, value, check, setting=True, aliases=aliases)


def _finite(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) for value in values)


def _are_ends(low: Sequence[float], high: Sequence[float]) -> bool:
    return len(low) == len(high) > 0 and _finite([*low, *high]) and all(map(operator.lt, low, high))


def _cpu() -> torch.device:
    import torch

    return torch.device("cpu")


_SIZES: _Check = (lambda sizes: len(sizes) > 0 and min(sizes) > 0, "sizes of at least 1")
_RANGE: _Check = (
    lambda ends: len(ends) == 2 and _are_ends(*(end if isinstance(end, list) else [end] for end in ends)),
    "[lowest, highest], or of each as many as there are columns",
)
_SCALES: _Check = (lambda scales: _finite(scales) and min(scales, default=1) > 0, "finite values above 0")
_POSITIVE: _Check = (lambda rate: 0 < rate < math.inf, "a finite value above 0")
_NOT_NEGATIVE: _Check = (lambda weight: 0 <= weight < math.inf, "a finite value of at least 0")
_COUNT: _Check = (lambda count: count >= 1, "at least 1")


HELD_OUT, OTHER_CLIENTS = "held-out", "other-clients"
OTHERS = (HELD_OUT, OTHER_CLIENTS)
"""Where candidate records come from that are not the victim's: the data set's test examples, or the training examples
of other clients, which the global model has learnt likewise."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """Records that the adversary knows: the victim's, candidates of which some are, or auxiliary ones, which are not.

    Attributes:
        inputs: `record feature` or `record channel height width`, in model units.
        labels: `record`, class indices, or targets of a regression.
    """

    inputs: Tensor
    labels: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that is said of the records, by name."""
        from torch import Tensor

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, kw_only=True)
class KnownCandidates(Records):
    """Records of which it is known whether they are the victim's.

    Attributes:
        members: `record`, whether the victim trained on it.
    """

    members: Tensor


@dataclass(frozen=True, kw_only=True)
class PropertyRecords(Records):
    """Records of which it is known whether they have a property.

    Attributes:
        has: `record`, whether it has the property.
    """

    has: Tensor


@dataclass(frozen=True, kw_only=True)
class PartialRecords(Records):
    """Records of which one categorical column is not known.

    Attributes:
        inputs: `record feature`, in model units; zero at the column's features.
        column: its name.
        features: where its features are, one (0 or 1 in model units) a category.
        categories: what it may hold.
    """

    column: str
    features: slice
    categories: tuple[str, ...]

    def completed(self, category: int) -> Tensor:
        """`record feature`, as if the column held `category`, an index into `categories`, in all records."""
        inputs = self.inputs.clone()
        inputs[:, self.features.start + category] = 1
        return inputs


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """What the threat model grants the adversary besides the messages. None means withheld, or not declared.

    Attributes:
        models: by client, what the attack named by `Attack.builds_on` claims to be its local model.
        device: where the attack computes.
    """

    model: Callable[[], nn.Module] | None = _fact(
        "a function that builds the architecture whose weights the server broadcasts", str
    )
    loss: Callable[[Tensor, Tensor], Tensor] | None = _fact(
        "what clients minimise, a function of logits and labels that returns the mean loss", str
    )
    input_shape: tuple[int, ...] | None = _fact(
        "shape of one example, as channel, height and width of an image", list[int], _SIZES
    )
    columns: tuple[int, ...] | None = _fact(
        "how many features each column of a table became, in their order: 1 is a number, more are the categories of "
        "one column",
        list[int],
        _SIZES,
    )
    num_classes: int | None = _fact("number of classes", int, (lambda count: count >= 2, "at least 2"))
    value_range: tuple[Sequence[float], Sequence[float]] | None = _fact(
        "lowest and highest possible value of an input, in the units that the model is fed with: one pair, or one "
        "value a channel (of a table: a feature)",
        list[float] | list[list[float]],
        _RANGE,
    )
    input_mean: Sequence[float] | None = _fact(
        "mean of the inputs in those units, 0 where clients standardise", list[float], (_finite, "finite values")
    )
    input_std: Sequence[float] | None = _fact(
        "standard deviation of the inputs in those units, 1 where clients standardise", list[float], _SCALES
    )
    learning_rate: float | None = _setting("step size of the clients' local training", float, _POSITIVE, "lr")
    local_epochs: int | None = _setting(
        "E, passes of a client over its data in one round; 1 where it sends a gradient", int, _COUNT
    )
    local_steps: int | None = _setting(
        "T, steps of a client in one round, where it takes a number of them instead of passes; an attack that needs "
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
    proximal_mu: float | None = _setting("weight of FedProx's proximal term in their steps", float, _NOT_NEGATIVE)
    label_smoothing: float | None = _setting(
        "share of each label that clients spread over all classes; where it is granted, the loss that an attack is "
        "handed is that of such labels",
        float,
        (lambda share: 0 <= share < 1, "at least 0, below 1"),
    )
    labels: Tensor | None = _fact(
        "the victim's labels in ascending order; an attack that cuts them into mini-batches shuffles them",
        granted=False,
        victims="labels",
    )
    records: Records | None = _fact(
        "the victim's training records, for an attack that asks where they come from", granted=False, victims="records"
    )
    partial_records: PartialRecords | None = _fact(
        "the victim's records without a sensitive attribute, for an attack that infers it",
        str,
        granted=False,
        victims="all columns of records but one",
    )
    candidates: Records | None = _fact(
        "records of which half are training records of the victim's, for an attack that tells which; where the others "
        f"come from: {' or '.join(OTHERS)}",
        str,
        (lambda whose: whose in OTHERS, f"where half of them come from, {' or '.join(OTHERS)}"),
        granted=False,
        victims="half of the candidate records, but not which half",
    )
    known_candidates: KnownCandidates | None = _fact(
        "how many further records like the candidates, of which the adversary knows whether they are the victim's, for "
        "an attack that learns from them; half of them are, and none of them is scored",
        int,
        (lambda count: count >= 4 and count % 2 == 0, "an even number, at least 4"),
        granted=False,
        victims="some of its training records, known to be such",
    )
    auxiliary: Records | None = _fact(
        "labelled records of the same kind that no client trains on, for an attack that tries models on them",
        granted=False,
    )
    property_records: PropertyRecords | None = _fact(
        "records like the auxiliary ones which say whether they have a property, for an attack that looks for it in "
        "what clients send; which property: column=category or group=name",
        str,
        (lambda name: "=" in name, "column=category, as sex=Female, or group=name"),
        granted=False,
    )
    defenses: Sequence[Defense] | None = _fact(
        "the defenses of the clients with their settings, for an attack that passes its dummy gradients through them; "
        "each such attack is then made twice, without them (naive) and with them (adaptive)",
        granted=False,
    )
    models: Mapping[int, State] | None = None
    device: torch.device = field(default_factory=_cpu)

    def granted(self) -> list[str]:
        """Names of what is granted, in the order of the fields."""
        return [name for name in FACTS if getattr(self, name) is not None]

    @property
    def tables(self) -> dict[str, Records]:
        """All records that are granted, by the name of the fact."""
        return {name: value for name in FACTS if isinstance(value := getattr(self, name), Records)}

    def only(self, names: Set[str]) -> Knowledge:
        """The same without what is granted but is not among `names`."""
        withheld: dict[str, Any] = {name: None for name in self.granted() if name not in names}
        return replace(self, **withheld)


FACTS: Mapping[str, Fact] = {item.name: item.metadata["fact"] for item in fields(Knowledge) if "fact" in item.metadata}
"""Everything that a threat model can grant or withhold, by its name, in the order of the fields."""


def sent_as(name: str) -> tuple[str, ...]:
    """What servers call the setting `name` in the config that they send: fedsim's name first, then others'."""
    return name.replace("_", "-"), name, *FACTS[name].aliases
