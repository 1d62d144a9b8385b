"""Gate: a client measures its exposure before it sends, and withholds what is too exposed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedsim.base.constraints import FiniteFloat, PositiveFloat, PositiveInt, PositiveShareBelowOne, ShareBelowOne
from fedsim.base.errors import ConfigError, PluginError, did_you_mean
from fedsim.base.papers import cite
from fedsim.exposure.measure import Meaning, Measure
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Participation, Setting
from fedsim.interfaces.local_context import LocalContext, Memory
from fedsim.recording.wire_format import State
from fedsim.training.local_round import LocalRound
from fedsim.training.settings import LocalTraining

_NUM_PAST_VALUES = 1000
"""About how many of its past values a client keeps: the latest, in whole rounds."""
_ROUNDING_ERROR = 1e-9
"""Largest rounding error of a product such as 0.55 * 100."""


@dataclass(frozen=True, kw_only=True)
class Gate(Defense):
    """Measure exposure before sending; above a limit, send nothing, add noise, or drop examples.

    In each round the client measures the update that it would send without defenses. The gate
    closes if the value is past the limit, in the direction that `larger_means` or else the measure
    declares as more exposure. The action is then one of:

    - `withhold`: the client sends nothing.
    - `noise`: it adds Gaussian noise to the update of this round.
    - `drop-examples`: it measures each example separately, by its share of the gradient at the
      broadcast model, and trains without those past the limit, as if it did not have them: N is
      smaller. If none is left, it sends nothing.

    The limit is one of:

    - `above` or `below`: a fixed value.
    - `quantile` q: the ceil(q (n + 1))-th of the client's n past values, least exposed first.
      Values in random order pass it in a share of at most 1 - q of the rounds; if exposure rises
      during training, the gate closes more often, and if it falls, hardly ever. While that rank is
      above n the gate stays open: with q = 0.9 in the first 9 rounds, with q = 0.5 in the first
      one. A gate that would stay open in all rounds is refused. Values of rounds in which it closed
      count as well. For `drop-examples` the past values are those of all examples in earlier
      rounds, so nothing is dropped in the first round. About the latest 1000 values are kept, in
      whole rounds, at least one.
    - `fraction`: in each round that share of the examples is dropped, the most exposed first.

    An undefined value, as of a zero gradient, counts as not exposed.

    The server sees the same silence as of a straggler. If the measure fails, the client is silent,
    too. Still, a server that knows of the gate infers from silence, noise or a smaller N that the
    data are exposed at this model. So nothing is proved, and the gate is refused beside a defense
    with a guarantee.

    Args:
        measure: the name of a measure, or a table of its `name` and settings.
        quantity: the value of the measure that counts; by default the first that it declares.
        larger_means: whether a larger value says that `more` or `less` is exposed; by default as
            the measure declares, which its source says and a study of your clients may contradict.
        above: close if the value is larger; for values that mean more exposure if larger.
        below: close if the value is smaller; for values that mean more exposure if smaller.
        quantile: close if the value is past this quantile of the client's past values, in (0, 1).
        fraction: share of the examples that is dropped, in [0, 1); the count is rounded down. Only
            for `drop-examples`.
        action: `withhold`, `noise` or `drop-examples`.
        noise: standard deviation of the noise, in units of the weights or gradient sent. Only for
            `noise`.
        access: the client's access to the model. `black-box` allows only measures that are computed
            from gradients of inputs which the client chooses.
        memory: MiB that the measure may use at once.

    Raises:
        ConfigError: a setting is out of range, missing or contradicts another one, or the measure
            is not known.

    References:
        [Anonymous2023] (angular Lipschitz smoothness), Sec. 4 and Fig. 5: clients measure by
        gradients of inputs that they choose.
        Differs: the paper proposes that a client computes its measure before it sends, and leaves
        open how it then acts; limits, the three actions and calibration by the client's own past
        are ours.
    """

    measure: str | Mapping[str, Any] = field(hash=False)
    quantity: str = ""
    larger_means: Meaning | None = None
    above: FiniteFloat | None = None
    below: FiniteFloat | None = None
    quantile: PositiveShareBelowOne | None = None
    fraction: ShareBelowOne | None = None
    action: Literal["withhold", "noise", "drop-examples"] = "withhold"
    noise: PositiveFloat | None = None
    access: Literal["white-box", "black-box"] = "white-box"
    memory: PositiveInt = 512

    against: ClassVar[str] = (
        "the server and all who see what a client sends, as far as the measure shows when data are exposed; "
        "silence, noise or a smaller N itself reveals that the data were"
    )
    cost: ClassVar[str] = (
        "accuracy: what is withheld, noised or left out is missing from the model, and is not missing at random; time: "
        "a measurement a round, from one gradient to thousands"
    )
    paper: ClassVar[Paper] = cite("Anonymous2023")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_noise()
        self._check_one_limit()
        object.__setattr__(self, "measure", self._complete_measure_table())
        self._check_measure()

    def check(self, setting: Setting) -> None:
        """Check that the gate can close in some round, and leaves each client something to send."""
        clients = range(setting.clients)
        counts = [_num_examples(setting.participation(client), setting.training) for client in clients]
        if self.quantile is not None:
            self._check_quantile(self.quantile, counts if self.action == "drop-examples" else [1], setting.rounds)
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

    def on_data(self, local: LocalRound, context: LocalContext) -> Tensor:
        """Return the indices of the examples to train on; none to send nothing.

        If noise is to be added in this round, the memory notes it for `on_update`.
        """
        context.memory.pop("noisy", None)
        all_indices = torch.arange(len(local.labels))
        if self.action == "drop-examples":
            return all_indices[~self._is_too_exposed(self._measure_examples(local), context.memory)]
        if not self._is_past_limit(self._measure_update(local), context.memory).any():
            return all_indices
        if self.action == "withhold":
            return all_indices[:0]
        context.memory["noisy"] = torch.tensor(1)
        return all_indices

    def on_update(self, update: State, context: LocalContext) -> State:
        """Return the update, with noise if `on_data` closed the gate in this round."""
        if context.memory.pop("noisy", None) is None:
            return update
        assert self.noise is not None
        return {
            name: tensor + self.noise * torch.randn(tensor.shape, generator=context.rng, dtype=tensor.dtype)
            for name, tensor in update.items()
        }

    @cached_property
    def _built_measure(self) -> Measure:
        from fedsim.plugins import registry  # imports more than torch

        table = {"name": self.measure} if isinstance(self.measure, str) else dict(self.measure)
        name = table.pop("name", None)
        if not isinstance(name, str):
            raise ConfigError(f"measure: expected the name of a measure, or a table with a 'name', got {self.measure}")
        try:
            measure = registry.build("measures", name, table, "measure")
        except PluginError as error:
            raise ConfigError(f"measure: {str(error).removeprefix('measures: ')}") from error
        if not isinstance(measure, Measure):
            raise ConfigError(f"measure: '{name}' does not derive from fedsim.Measure")
        return measure

    @property
    def _quantity_name(self) -> str:
        return self.quantity or next(iter(self._built_measure.quantities))

    @property
    def _meaning(self) -> Meaning:
        """Return whether a larger value means more exposure or less."""
        return self.larger_means or self._built_measure.quantities[self._quantity_name]

    @property
    def _sign(self) -> int:
        """Return 1 if a larger value means more exposure, -1 if it means less."""
        return 1 if self._meaning == "more" else -1

    def _complete_measure_table(self) -> dict[str, Any]:
        """Return the measure as a table with all of its settings, also defaults, to be recorded."""
        name = self.measure if isinstance(self.measure, str) else self.measure.get("name")
        settings = dataclasses.asdict(self._built_measure)
        return {"name": name, **{key: value for key, value in settings.items() if value is not None}}

    def _check_noise(self) -> None:
        if self.action != "noise" and self.noise is not None:
            raise ConfigError(f"noise: belongs to action 'noise', got action '{self.action}'; leave it out")
        if self.action == "noise" and self.noise is None:
            raise ConfigError("noise: action 'noise' needs a standard deviation, which is not set")

    def _check_one_limit(self) -> None:
        limits = {name: getattr(self, name) for name in ("above", "below", "quantile", "fraction")}
        given = [name for name, value in limits.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ConfigError(f"expected exactly one of above, below, quantile and fraction, got {got}")
        if self.fraction is not None and self.action != "drop-examples":
            raise ConfigError(
                f"fraction: counts examples, which action '{self.action}' does not choose; use above, below or "
                "quantile, or action 'drop-examples'"
            )

    def _check_quantile(self, quantile: float, values_per_round: Sequence[int], rounds: int) -> None:
        """Raise ConfigError if the gate stays open in all rounds.

        Args:
            values_per_round: for each client, the number of values that it measures in a round.
        """
        capacity = max(map(_num_kept_values, values_per_round))
        num_past = max(min((rounds - 1) * count, _num_kept_values(count)) for count in values_per_round)
        if self._limit_rank(quantile, num_past) > num_past:
            remedy = ", or more rounds" if self._limit_rank(quantile, capacity) <= capacity else ""
            raise ConfigError(
                f"quantile: {quantile} of its own past is beyond the {num_past} values that a client keeps by the "
                f"last of {rounds} rounds, so the gate never closes; set a smaller one{remedy}"
            )

    def _check_measure(self) -> None:
        measure, quantities = self._measure_name, self._built_measure.quantities
        if self.quantity and self.quantity not in quantities:
            raise ConfigError(
                f"quantity: {measure} gives no '{self.quantity}', {did_you_mean(self.quantity, quantities)}"
            )
        wrong, right = ("below", "above") if self._sign > 0 else ("above", "below")
        if getattr(self, wrong) is not None:
            says = f"a larger '{self._quantity_name}' of {measure} says that {self._meaning} is exposed"
            other = "less" if self._meaning == "more" else "more"
            raise ConfigError(
                f"{wrong}: {says}, so the gate would close where least is; use {right}, or, if your clients show "
                f"the reverse, larger_means = '{other}'"
            )
        if self.access == "black-box" and not self._built_measure.black_box:
            raise ConfigError(
                f"access: {measure} takes derivatives of the model, which a client with black-box access does not "
                "have; choose a measure of gradients alone, as angular-lipschitz, or access = 'white-box'"
            )

    @property
    def _measure_name(self) -> str:
        assert isinstance(self.measure, Mapping)
        return str(self.measure["name"])

    def _measure_update(self, local: LocalRound) -> Tensor:
        """Return the value of the undefended update, `1`, in float64."""
        values = self._built_measure.compute_for_message(local.client_message(self.memory << 20))
        return torch.tensor([values[self._quantity_name]], dtype=torch.float64)

    def _measure_examples(self, local: LocalRound) -> Tensor:
        """Return the value of each example, `example`, in float64."""
        batch = local.model, local.loss, local.inputs, local.labels
        training = _single_gradient_training(local.training)
        values = self._built_measure.compute_per_example(*batch, training=training, memory=self.memory << 20)
        return values[self._quantity_name].double()

    def _is_too_exposed(self, values: Tensor, memory: Memory) -> Tensor:
        """Return which examples are dropped, by `fraction` or past the limit."""
        if self.fraction is None:
            return self._is_past_limit(values, memory)
        exposure = torch.nan_to_num(self._sign * values, nan=-math.inf)
        most_exposed = exposure.argsort(descending=True, stable=True)[: int(self.fraction * len(values))]
        return torch.zeros(len(values), dtype=torch.bool).index_fill(0, most_exposed, value=True)

    def _is_past_limit(self, values: Tensor, memory: Memory) -> Tensor:
        """Return which values are past the limit; NaN is not.

        With `quantile`, add the values to those in `memory`.
        """
        exposure = self._sign * values
        if self.quantile is None:
            limit = self.above if self.above is not None else self.below
            assert limit is not None
            return exposure > self._sign * limit
        past = memory.get("values", exposure[:0])
        memory["values"] = torch.cat([past, exposure[~exposure.isnan()]])[-_num_kept_values(len(values)) :]
        rank = self._limit_rank(self.quantile, len(past))
        return exposure > (past.sort().values[rank - 1] if rank <= len(past) else math.inf)

    @staticmethod
    def _limit_rank(quantile: float, num_past: int) -> int:
        """Return the rank, from 1, of the past value that is the limit; none above `num_past`."""
        return math.ceil(quantile * (num_past + 1) - _ROUNDING_ERROR)


def _num_kept_values(values_per_round: int) -> int:
    """Return how many past values a client keeps, in whole rounds."""
    return max(_NUM_PAST_VALUES // values_per_round, 1) * values_per_round


def _single_gradient_training(training: LocalTraining) -> LocalTraining:
    """Return settings for one gradient of all data, with the loss and layer modes of `training`."""
    return LocalTraining(
        local_steps=1,
        sends="gradient",
        batch_norm=training.batch_norm,
        batch_norm_statistics=training.batch_norm_statistics,
        dropout=training.dropout,
        label_smoothing=training.label_smoothing,
    )


def _num_examples(client: Participation, training: LocalTraining) -> int:
    """Return the number of examples that contribute to an update."""
    return min(client.num_examples, client.batch_size) if training.sends == "gradient" else client.num_examples
