"""A gate: the client measures how exposed its data are, and then sends, protects, or leaves out what is most so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedsim.attacks import Paper
from fedsim.defense import Defense, Memory, Participation, Setting, called, overrides
from fedsim.errors import ConfigError, PluginError, did_you_mean
from fedsim.measure import Measure
from fedsim.training.local_round import LocalRound
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import State

_ACTIONS = ("withhold", "noise", "drop-examples")
_ACCESS = ("white-box", "black-box")
_REMEMBERED = 1000
"""About how many of its own past values a client keeps, the latest, all of one round or none."""
_ROUNDING = 1e-9
"""By how much a product such as 0.55 * 100 may be above the number that it is."""


@dataclass(frozen=True, kw_only=True)
class Gate(Defense):
    """Measure before sending, and where the data are exposed too much, send nothing, add noise, or leave examples out.

    In each round the client measures what it would send without its defenses, and the gate closes where the value says
    that more is exposed than the limit allows. Which way that is, the measure declares. With `withhold` the client then
    sends nothing. With `noise` it adds Gaussian noise to the update of this round. With `drop-examples` it measures
    each of its examples by itself, by its share of the gradient at the broadcast model, and trains without those that
    are past the limit, as if it never held them: N is smaller by as many. If none is left it sends nothing.

    The limit is `above` or `below`, or with `quantile` q it follows the client's own past: of n past values the ceil(q
    (n + 1))-th, least exposed first. Values that come in random order pass it in a share of at most 1 - q of the
    rounds; where exposure rises as training goes on it closes more often, and where it falls hardly ever. As long as
    that place is beyond n the gate stays open: with q = 0.9 in the first 9 rounds, with q = 0.5 in the first one; one
    that would stay open in all rounds is refused. Values of rounds in which it closed count as well. For
    `drop-examples` the past is that of all examples, whose values of earlier rounds count, and those of this round do
    not; so in the first round nothing is left out, and after it as soon as there are so many values. About the latest
    1000 are kept, in whole rounds, at least one. `fraction` instead leaves out that share of the examples, those that
    are exposed most, in each round. A value that is undefined, as of a zero gradient, is of data that are not exposed.

    Silence has one reason only for the server, in the words that are said of a straggler: that nothing came. Where the
    measure fails, the client is silent, too. Still, who knows of the gate learns by silence, by noise or by a smaller N
    that the data are exposed at this model. So nothing is proved, and beside a defense that proves something the gate
    is refused.

    Args:
        measure: the name of a measure, or a table of its `name` and settings.
        quantity: which of its values counts; by default the first that it declares.
        above: close where the value is larger; of a value that means more exposure if it is larger.
        below: close where the value is smaller; of a value that means more exposure if it is smaller.
        quantile: close where the value is further than this quantile of the client's own past values, in (0, 1).
        fraction: of the examples, in [0, 1); the count is rounded down. Of `drop-examples` alone.
        action: `withhold`, `noise` or `drop-examples`.
        noise: standard deviation of the noise, in units of what is sent, weights or gradient; of `noise` alone.
        access: of the client to the model. `black-box` allows only measures that are made of gradients of inputs which
            the client chooses.
        memory: MiB that the measure may use at once.

    Raises:
        ConfigError: a setting is out of range, missing or contradicts another one, or the measure is not known.

    References:
        Foreseeing Privacy Threats from Gradient Inversion Through the Lens of Angular Lipschitz Smoothness, Sec. 4 and
        Fig. 5: clients measure by gradients of inputs that they choose.
        Differs: the paper proposes that a client looks at its measure before it sends, and leaves open what it then
        does; limits, the three actions and calibration by the client's own past are ours.
    """

    measure: str | Mapping[str, Any] = field(hash=False)
    quantity: str = ""
    above: float | None = None
    below: float | None = None
    quantile: float | None = None
    fraction: float | None = None
    action: Literal["withhold", "noise", "drop-examples"] = "withhold"
    noise: float | None = None
    access: Literal["white-box", "black-box"] = "white-box"
    memory: int = 512

    against: ClassVar[str] = (
        "the server and all who see what a client sends, as far as the measure tells when data are exposed; silence, "
        "noise or a smaller N itself tells them that the data were"
    )
    cost: ClassVar[str] = (
        "accuracy: what is withheld, noised or left out is missing from the model, and is not missing at random; time: "
        "a measurement a round, from one gradient to thousands"
    )
    paper: ClassVar[Paper] = Paper(
        title="Foreseeing Privacy Threats from Gradient Inversion Through the Lens of Angular Lipschitz Smoothness",
        authors="Anonymous",
        venue="preprint under review",
        year=2023,
    )

    def __post_init__(self) -> None:
        for name, value, known in (("action", self.action, _ACTIONS), ("access", self.access, _ACCESS)):
            if value not in known:
                raise ConfigError(f"{name}: expected {', '.join(map(repr, known))}, got {value!r}")
        if self.memory < 1:
            raise ConfigError(f"memory: expected at least 1 MiB, got {self.memory}")
        self._check_noise()
        self._check_one_limit()
        object.__setattr__(self, "measure", self._written_out())
        self._check_measure()

    def check(self, setting: Setting) -> None:
        """See Defense. A gate that can never close, or would leave nothing to send, is refused."""
        counts = [_examples(setting.participation(client), setting.training) for client in range(setting.clients)]
        if self.quantile is not None:
            sizes = counts if self.action == "drop-examples" else [1]
            most = max(map(_kept_of, sizes))
            past = max(min((setting.rounds - 1) * size, _kept_of(size)) for size in sizes)
            if self._place(self.quantile, past) > past:
                longer = ", or more rounds" if self._place(self.quantile, most) <= most else ""
                raise ConfigError(
                    f"quantile: {self.quantile} of its own past is beyond the {past} values that a client keeps by the "
                    f"last of {setting.rounds} rounds, so the gate never closes; set a smaller one{longer}"
                )
        if self.action != "drop-examples":
            return
        least, most = min(counts), max(counts)
        if least < 2:
            raise ConfigError(
                f"action 'drop-examples' of client {counts.index(least)}, whose message is made of a single example, "
                "would leave nothing to send; use action 'withhold', or give each client at least 2"
            )
        if self.fraction and not int(self.fraction * most):
            raise ConfigError(
                f"fraction: {self.fraction} of {most} examples, the most of any client, is less than one, so nothing "
                f"is ever left out; set at least {math.ceil(1000 / most) / 1000}"
            )

    def check_beside(self, others: Sequence[Defense], place: int) -> None:
        """See Defense. A gate that looks at the data before it acts is covered by no proof."""
        del place
        for other in others:
            if _proves(other):
                raise ConfigError(
                    f"whether it closes depends on the data, which the guarantee of {called(other)} does not cover, so "
                    "that its epsilon would be false; leave one of them out"
                )

    def on_data(  # type: ignore[override]
        self, local: LocalRound, *, rng: torch.Generator, memory: Memory
    ) -> Tensor:
        """See Defense."""
        del rng
        memory.pop("noisy", None)
        everything = torch.arange(len(local.labels))
        if self.action == "drop-examples":
            return everything[~self._most_exposed(self._of_each(local), memory)]
        if not self._past_limit(self._of_all(local), memory).any():
            return everything
        if self.action == "withhold":
            return everything[:0]
        memory["noisy"] = torch.tensor(1)
        return everything

    def on_update(  # type: ignore[override]
        self, update: State, *, rng: torch.Generator, memory: Memory
    ) -> State:
        """See Defense."""
        if memory.pop("noisy", None) is None:
            return update
        assert self.noise is not None
        return {
            name: tensor + self.noise * torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype)
            for name, tensor in update.items()
        }

    @cached_property
    def _gauge(self) -> Measure:
        """The measure, made of its settings."""
        from fedsim.plugins import registry  # which takes more than torch

        table = {"name": self.measure} if isinstance(self.measure, str) else dict(self.measure)
        name = table.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"measure: expected the name of a measure, or a table with a 'name', got {self.measure}")
        try:
            made = registry.build("measures", name, table, "measure")
        except PluginError as error:
            raise ConfigError(f"measure: {str(error).removeprefix('measures: ')}") from error
        if not isinstance(made, Measure):
            raise ConfigError(f"measure: '{name}' does not derive from fedsim.Measure")
        return made

    @property
    def _chosen(self) -> str:
        return self.quantity or next(iter(self._gauge.quantities))

    @property
    def _sign(self) -> int:
        """1 where a larger value says that more is exposed, -1 where it says that less is."""
        return 1 if self._gauge.quantities[self._chosen] == "more" else -1

    def _written_out(self) -> dict[str, Any]:
        """The measure as a table with all of its settings, so that a run tells what it was made with."""
        name = self.measure if isinstance(self.measure, str) else self.measure.get("name")
        settings = dataclasses.asdict(self._gauge)
        return {"name": name, **{key: value for key, value in settings.items() if value is not None}}

    def _check_noise(self) -> None:
        if self.action != "noise" and self.noise is not None:
            raise ConfigError(f"noise: belongs to action 'noise', got action '{self.action}'; leave it out")
        if self.action == "noise" and not (self.noise is not None and 0 < self.noise < math.inf):
            raise ConfigError(f"noise: action 'noise' needs a finite standard deviation above 0, got {self.noise}")

    def _check_one_limit(self) -> None:
        limits = {name: getattr(self, name) for name in ("above", "below", "quantile", "fraction")}
        given = [name for name, value in limits.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ConfigError(f"expected exactly one of above, below, quantile and fraction, got {got}")
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ConfigError(f"quantile: expected a share above 0, below 1, got {self.quantile}")
        if self.fraction is not None and self.action != "drop-examples":
            raise ConfigError(
                f"fraction: counts examples, which action '{self.action}' does not choose; use above, below or "
                "quantile, or action 'drop-examples'"
            )
        if self.fraction is not None and not 0 <= self.fraction < 1:
            raise ConfigError(f"fraction: expected a share of at least 0, below 1, got {self.fraction}")
        for name in ("above", "below"):
            if limits[name] is not None and not math.isfinite(limits[name]):
                raise ConfigError(f"{name}: expected a finite number, got {limits[name]}")

    def _check_measure(self) -> None:
        measure, known = self._named, self._gauge.quantities
        if self.quantity and self.quantity not in known:
            raise ConfigError(f"quantity: {measure} gives no '{self.quantity}', {did_you_mean(self.quantity, known)}")
        wrong, right = ("below", "above") if self._sign > 0 else ("above", "below")
        if getattr(self, wrong) is not None:
            raise ConfigError(
                f"{wrong}: a larger '{self._chosen}' of {measure} says that {known[self._chosen]} is exposed, so the "
                f"gate would close where least is; use {right}"
            )
        if self.access == "black-box" and not self._gauge.black_box:
            raise ConfigError(
                f"access: {measure} takes derivatives of the model, which a client with black-box access does not "
                "have; choose a measure of gradients alone, as angular-lipschitz, or access = 'white-box'"
            )

    @property
    def _named(self) -> str:
        assert isinstance(self.measure, Mapping)
        return str(self.measure["name"])

    def _of_all(self, local: LocalRound) -> Tensor:
        """The value of what the client would send, one number, in float64."""
        found = self._gauge.of_sent(local.sent(self.memory << 20))
        return torch.tensor([found[self._chosen]], dtype=torch.float64)

    def _of_each(self, local: LocalRound) -> Tensor:
        """The value of each example, `example`, in float64."""
        batch = local.model, local.loss, local.inputs, local.labels
        found = self._gauge.of_each(*batch, training=_one_gradient(local.training), memory=self.memory << 20)
        return found[self._chosen].double()

    def _most_exposed(self, values: Tensor, memory: Memory) -> Tensor:
        """Of which examples too much is exposed."""
        if self.fraction is None:
            return self._past_limit(values, memory)
        exposed = torch.nan_to_num(self._sign * values, nan=-math.inf)
        most = exposed.argsort(descending=True, stable=True)[: int(self.fraction * len(values))]
        return torch.zeros(len(values), dtype=torch.bool).index_fill(0, most, value=True)

    def _past_limit(self, values: Tensor, memory: Memory) -> Tensor:
        """Of which values too much is exposed; NaN is not. With `quantile`, they are added to those in `memory`."""
        exposed = self._sign * values
        if self.quantile is None:
            limit = self.above if self.above is not None else self.below
            assert limit is not None
            return exposed > self._sign * limit
        past = memory.get("values", exposed[:0])
        memory["values"] = torch.cat([past, exposed[~exposed.isnan()]])[-_kept_of(len(values)) :]
        place = self._place(self.quantile, len(past))
        return exposed > (past.sort().values[place - 1] if place <= len(past) else math.inf)

    @staticmethod
    def _place(quantile: float, past: int) -> int:
        """Which of so many past values is the limit, counted from 1; beyond them it is none."""
        return math.ceil(quantile * (past + 1) - _ROUNDING)


def _kept_of(values: int) -> int:
    """How many values a client keeps that has so many in a round."""
    return max(_REMEMBERED // values, 1) * values


def _one_gradient(training: LocalTraining) -> LocalTraining:
    """One gradient of all data by the same loss, in the same modes of layers, in the place of local steps."""
    return LocalTraining(
        local_steps=1,
        sends="gradient",
        batch_norm=training.batch_norm,
        batch_norm_statistics=training.batch_norm_statistics,
        dropout=training.dropout,
        label_smoothing=training.label_smoothing,
    )


def _examples(client: Participation, training: LocalTraining) -> int:
    """How many examples a message is made of."""
    return min(client.num_examples, client.batch_size) if training.sends == "gradient" else client.num_examples


def _proves(defense: Defense) -> bool:
    """Whether a defense proves anything of some ordinary client."""
    if not overrides(defense, "guarantee"):
        return False
    client = Participation(num_examples=1000, batch_size=10, steps=10, rounds=1)
    return defense.of_client(client).guarantee(client, 1e-5) is not None
