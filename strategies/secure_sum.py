"""Secure aggregation in fedsim's round loop: the server learns one sum a group, and no more.

The clients of a round are split into groups. As in Flower's SecAgg+, each client of a group

1. multiplies its update by its weight N / N_max,
2. clips each number to the clipping range and rounds it at random to an integer (`quantise`),
3. sends the integers masked.

The masks of the clients that answered cancel in the sum modulo 2^32 (`sum_groups`), and the server
divides the sum by the sum of weights. The masks are not drawn here: a sum of masked integers,
unmasked, is exactly the sum of the integers. All other arithmetic is done with Flower's own
functions, so the result is that of its `SecAggPlusWorkflow` on the same updates. Masked vectors
look uniformly random to the server, so they are not recorded either.

Flower's clients send weights. fedsim's clients send the update w_T - w_t (or a gradient), whose
numbers `clip` refers to. N_max is the most examples that any client of the federation reports,
known to all.

If fewer clients of a group answer than the threshold, its sum is lost: the shares that are left do
not unmask it. If enough answer, the masks of those that dropped out are removed, and only they are
left out.

A number that is 0 in all updates of a group but one is that client's alone in the sum, as of embeddings of
words that nobody else has, or of units that are silent for all others. Masks hide who it is, not what it
sent. So the protocol counts such numbers (`strategies.lone_numbers`) and says how many there are.

With `[distributed_privacy]` all weights are 1, so that no client moves the sum by more than its
clip. Between 2 and 3 a client adds its share of noise (`fedsim.privacy.distributed`).

References:
    [Bell2020]; [Bonawitz2017].
    Differs: all pairs of a group share keys.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedsim.base.errors import RunError, join_first
from fedsim.base.randomness import numpy_generator, seed_globals
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.experiment import Experiment
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.federation.secure_aggregation import MODULUS, group_sizes
from fedsim.privacy.distributed import DistributedPrivacy
from fedsim.recording.payloads import Dense, Form, Kind, Payload
from fedsim.recording.wire_format import Update, non_finite_names
from strategies.colluder_recorder import ColluderRecorder
from strategies.lone_numbers import LoneNumbers
from strategies.message_content import GROUP_RECORD, MEMBERS_KEY
from strategies.secure_aggregation import weighted_mean

log = logging.getLogger("fedsim." + __name__)

_LOST_SUM = 2
"""Code of the error that a client gets whose group's sum cannot be unmasked."""
_NO_WEIGHT = 3
"""Code of the error that a client gets of which the sum holds nothing."""
_MAX_LOGGED_CLIENTS = 10


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """Secure aggregation protocol of one federation.

    Attributes:
        table: its settings.
        largest: N_max.
        seed: seed of the run.
        privacy: the noise of which each client adds a share; None for none.
        colluders: gets what colluding clients add; None where it is not kept.
        client_by_node: the client that each node plays, by which the log calls it; one that is missing is called by
            its node.
    """

    table: SecureAggregationTable
    largest: int
    seed: int
    privacy: DistributedPrivacy | None = None
    colluders: ColluderRecorder | None = None
    client_by_node: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def from_experiment(cls, experiment: Experiment, colluders: ColluderRecorder | None = None) -> SecureSum | None:
        """Return the protocol of `experiment`; None where clients send their updates in clear."""
        table = experiment.config.secure_aggregation
        if table is None:
            return None
        largest = max(experiment.reported_counts)
        privacy = experiment.distributed_privacy
        return cls(table=table, largest=largest, seed=experiment.seed, privacy=privacy, colluders=colluders)

    def draw_groups(self, clients: Iterable[int], number: int) -> list[list[int]]:
        """Return the groups of round `number`, each ascending; the server can draw them, too.

        Raises:
            RunError: there are too few clients for one group.
        """
        present = sorted(clients)
        sizes = group_sizes(self.table.groups, len(present))
        if not sizes or sizes[-1] < 2:
            raise RunError(
                f"round {number}: the strategy sampled {len(present)} clients, too few for secure_aggregation.groups = "
                f"{self.table.groups}; sample more"
            )
        if len(sizes) > 1:
            present = numpy_generator(self.seed, "secure aggregation", number).permutation(present).tolist()
        ends = np.cumsum(sizes).tolist()
        return [sorted(present[end - size : end]) for end, size in zip(ends, sizes, strict=True)]

    def refusal_reason(self, reply: RecordDict, asked: RecordDict) -> str | None:
        """Return why a client would not take part in the protocol with this reply, or None."""
        if (count := reported_examples(reply)) > self.largest:
            return f"it reported {count} examples, more than the {self.largest} that weights are multiples of"
        if broken := non_finite_names({name: tensor for name, (_, tensor) in _update_tensors(reply, asked).items()}):
            return f"its '{broken[0]}' holds NaN or infinite values, and nobody could find them in the sum"
        return None

    def name_client(self, node: int) -> int:
        """Return the client that a node plays."""
        return self.client_by_node.get(node, node)

    def sum_groups(self, replies: Iterable[Message], messages: Sequence[Message], number: int) -> Iterator[Message]:
        """Yield one reply a group, once all its clients have replied, and errors as they come.

        Each reply is added to the sum of its group and emptied, so memory holds only the sums of
        the groups that are not complete, at 4 bytes a number.

        Args:
            replies: one to each of `messages`, all of them accepted.
            messages: the server's messages in round `number`.
        """
        message_to = {message.metadata.dst_node_id: message for message in messages}
        groups = [_Group(protocol=self, members=members) for members in self.draw_groups(message_to, number)]
        group_of = {client: group for group in groups for client in group.members}
        for reply in replies:
            client = reply.metadata.src_node_id
            group = group_of[client]
            if reply.has_error():
                yield reply
            else:
                group.add(client, reply.content, message_to[client].content, number)
            group.num_waiting -= 1
            if not group.num_waiting:
                yield from group.close(message_to, number)
        if self.colluders is not None:
            self.colluders.write(number)
        self._warn_of_clipping(groups, number)
        self._warn_of_lone_numbers(groups, number)

    def _warn_of_lone_numbers(self, groups: Sequence[_Group], number: int) -> None:
        for group in groups:
            lone = group.lone_numbers
            if lone is not None and lone.count:
                log.warning("round %d, %s", number, lone.describe())

    def _warn_of_clipping(self, groups: Sequence[_Group], number: int) -> None:
        num_clipped = sum(group.num_clipped for group in groups)
        num_values = sum(group.num_values for group in groups)
        if num_clipped:
            log.warning(
                "round %d: %d of %d numbers of weighted updates were beyond secure_aggregation.clip = %g, and cut",
                number,
                num_clipped,
                num_values,
                self.table.clip,
            )

    def quantise(self, update: Mapping[str, NDArray[Any]], count: int, *key: int) -> list[NDArray[Any]]:
        """Return the integers that a client masks: its weight, then its weighted arrays.

        With `privacy` all weights are 1, and a share of noise is added.

        Args:
            update: its arrays by name; with `privacy`, clipped to its norm.
            count: N.
            key: round and client, from which the random rounding is drawn.
        """
        from flwr.common.secure_aggregation.ndarrays_arithmetic import factor_combine, parameters_multiply
        from flwr.common.secure_aggregation.quantization import quantize

        levels = 1 << self.table.bits
        if self.privacy is not None:
            with seed_globals(self.seed, "secure aggregation", *key):
                rounded = quantize(list(update.values()), self.table.clip, levels)
            rng = numpy_generator(self.seed, "distributed privacy", *key)
            noisy = [array + self.privacy.draw_share(array.shape, rng) for array in rounded]
            return factor_combine(levels, noisy)
        weight = round(count / self.largest * levels)
        weighted = parameters_multiply(list(update.values()), weight / levels)
        with seed_globals(self.seed, "secure aggregation", *key):  # Flower draws from NumPy's global generator
            return factor_combine(weight, quantize(weighted, self.table.clip, levels))

    def min_survivors(self, size: int) -> int:
        """Return how many of a group have to answer, or its sum is lost."""
        fewest = self.table.min_survivors(size)
        return fewest if self.privacy is None else max(fewest, self.privacy.shares)

    def mean_update(self, total: list[NDArray[np.uint32]], count: int) -> list[NDArray[Any]]:
        """Return the weighted mean of `count` updates from their sum modulo 2^32."""
        levels = 1 << self.table.bits
        if self.privacy is None:
            return weighted_mean(total, count, self.table.clip, levels)
        # With noise a sum may be below 0, so it is read within half a modulus of its middle.
        middle, half = count * levels // 2, MODULUS // 2
        weight, *arrays = total
        centred = [(array.astype(np.int64) - middle + half) % MODULUS - half + middle for array in arrays]
        return weighted_mean([weight, *centred], count, self.table.clip, levels)


@dataclass(kw_only=True)
class _Group:
    """Sum over one group, to which replies are added as they come.

    Attributes:
        protocol: the protocol of the federation.
        members: its clients.
        survivors: its clients that answered, in this order.
        weightless: those among them whose weight is rounded to 0, so that the sum holds nothing of them.
        num_waiting: number of clients whose reply is still to come.
        total: sum of the integers, modulo 2^32; empty before the first.
        forms: tensor name to the kind and the type of what clients sent.
        num_examples: sum of N.
        num_clipped: how many of `num_values` were beyond the clipping range.
        num_values: number of values in all updates.
        lone_numbers: those of the sum that a single client moved; None where noise hides them, or the sum is lost.
    """

    protocol: SecureSum
    members: list[int]
    survivors: list[int] = field(default_factory=list)
    weightless: set[int] = field(default_factory=set)
    num_waiting: int = field(init=False)
    total: list[NDArray[np.uint32]] = field(default_factory=list)
    forms: dict[str, tuple[Kind, torch.dtype]] = field(default_factory=dict)
    num_examples: int = 0
    num_clipped: int = 0
    num_values: int = 0
    lone_numbers: LoneNumbers | None = None

    def __post_init__(self) -> None:
        self.num_waiting = len(self.members)

    def add(self, client: int, reply: RecordDict, asked: RecordDict, number: int) -> None:
        """Add the update in the reply of `client` to the sum, and empty the reply."""
        tensors, count = _update_tensors(reply, asked), reported_examples(reply)
        self.forms = {name: (kind, tensor.dtype) for name, (kind, tensor) in tensors.items()}
        update = {name: tensor.numpy() for name, (_, tensor) in tensors.items()}
        if self.protocol.privacy is not None:
            update, count = clip_update(update, self.protocol.privacy.clip), self.protocol.largest
        integers = self.protocol.quantise(update, count, number, client)
        addends = [np.asarray(array).astype(np.uint32) for array in integers]
        if self.protocol.colluders is not None and client in self.protocol.colluders.clients and integers[0]:
            # Who colludes knows its integers, so that rounding and noise of its own are no protection from it.
            contribution = Payload(self._dense_tensors(self.protocol.mean_update(addends, 1)))
            before, examples = read_state(*asked.array_records.values()), reported_examples(reply)
            self.protocol.colluders.keep(
                Update(round=number, client=client, before=before, payload=contribution, num_examples=examples)
            )
        if self.total:
            for array, addend in zip(self.total, addends, strict=True):
                array += addend
        else:
            self.total = addends
        self._count_clipped(update, count)
        if self.protocol.privacy is None:
            self.lone_numbers = self.lone_numbers or LoneNumbers()
            # A number below half a step of the grid, or of a client without weight, is lost by rounding and hides none.
            name = self.protocol.name_client(client)
            self.lone_numbers.add(name, list(update.values()), smallest=self._half_step(count))
        self.survivors.append(client)
        if integers[0]:
            self.num_examples += reported_examples(reply)
        else:
            self.weightless.add(client)
        for record in reply.array_records.values():
            record.clear()

    def _half_step(self, count: int) -> float:
        """Return half a step of the grid, in units of an update of a client with so many examples."""
        table, weight = self.protocol.table, count / self.protocol.largest
        return table.clip / (1 << table.bits) / weight if weight else math.inf

    def _count_clipped(self, update: Mapping[str, NDArray[Any]], count: int) -> None:
        bound = self.protocol.table.clip * self.protocol.largest / count if count else math.inf
        self.num_clipped += sum(int((np.abs(values) > bound).sum()) for values in update.values())
        self.num_values += sum(values.size for values in update.values())

    def close(self, message_to: Mapping[int, Message], number: int) -> Iterator[Message]:
        """Yield the reply of the group; if its sum is lost, an error for each that answered."""
        total, self.total = self.total, []
        needed = self.protocol.min_survivors(len(self.members))
        reason = ""
        if len(self.survivors) < needed:
            reason = f"{len(self.survivors)} of its group of {len(self.members)} answered, {needed} have to"
        elif len(self.weightless) == len(self.survivors):
            reason = "all weights N / N_max of its group are rounded to 0"
        if reason:
            self.lone_numbers = None
            reason = f"its sum is lost: {reason}"
            members = sorted(map(self.protocol.name_client, self.members))
            log.warning("round %d, group of clients %s: %s", number, join_first(members, _MAX_LOGGED_CLIENTS), reason)
            for client in self.survivors:
                yield Message(Error(code=_LOST_SUM, reason=reason), reply_to=message_to[client])
            return
        for client in sorted(self.weightless):
            reason = "its weight N / N_max is rounded to 0, so that the sum holds nothing of it"
            yield Message(Error(code=_NO_WEIGHT, reason=reason), reply_to=message_to[client])
        members = sorted(set(self.survivors) - self.weightless)
        mean = self.protocol.mean_update(total, len(self.survivors))
        tensors = self._dense_tensors(mean)
        content: dict[str, Any] = {
            "arrays": make_record(Payload(tensors).arrays()),
            "metrics": MetricRecord({"num-examples": self.num_examples}),
            GROUP_RECORD: ConfigRecord({MEMBERS_KEY: members}),
        }
        yield Message(RecordDict(content), reply_to=message_to[members[0]])

    def _dense_tensors(self, mean: Iterable[NDArray[Any]]) -> dict[str, tuple[Kind, Form]]:
        """Return the arrays of a mean by name, in the kinds and types in which clients send them."""
        tensors: dict[str, tuple[Kind, Form]] = {}
        for (name, (kind, dtype)), values in zip(self.forms.items(), mean, strict=True):
            tensors[name] = (kind, Dense(torch.from_numpy(np.asarray(values)).to(dtype)))
        return tensors


def clip_update(update: Mapping[str, NDArray[Any]], clip: float) -> dict[str, NDArray[np.float64]]:
    """Return an update, clipped to L2 norm `clip`, all arrays together, in float64."""
    exact = {name: np.asarray(values, dtype=np.float64) for name, values in update.items()}
    norm = math.sqrt(sum(float(np.vdot(values, values)) for values in exact.values()))
    factor = min(1.0, clip / norm) if norm else 1.0
    return {name: factor * values for name, values in exact.items()}


def reported_examples(reply: RecordDict) -> int:
    """Return N as the client reports it."""
    (metrics,) = reply.metric_records.values()
    return int(metrics["num-examples"])  # type: ignore[arg-type]


def _update_tensors(reply: RecordDict, asked: RecordDict) -> dict[str, tuple[Kind, torch.Tensor]]:
    """Return the tensors that a client adds to the sum: gradients, or differences w_T - w_t."""
    (arrays,), (broadcast,) = reply.array_records.values(), asked.array_records.values()
    before = read_state(broadcast)
    payload = Payload.from_arrays(read_state(arrays), before)
    after = payload.weights_after(before)
    deltas, gradients = payload.values("delta", before), payload.values("gradient", before)
    tensors: dict[str, tuple[Kind, torch.Tensor]] = {}
    for name, sent in before.items():
        if name in gradients:
            tensors[name] = ("gradient", gradients[name].to(sent.dtype))
        elif name in deltas:
            tensors[name] = ("delta", deltas[name].to(sent.dtype))
        else:
            tensors[name] = ("delta", after[name] - sent)
    return tensors
