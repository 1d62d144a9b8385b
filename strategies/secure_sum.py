"""Secure aggregation in the round loop of fedsim: what a server learns under SecAgg+ is one sum a group, and no more.

The clients of a round are cut into groups. In each, as in Flower's SecAgg+, a client multiplies its update by its
weight N / N_max, cuts each number to the clipping range, rounds it at random to an integer, and sends the integers
masked; the masks of those that answered cancel in the sum modulo 2^32, and the server divides by the sum of weights.
The masks are not drawn here: a sum of masked integers, unmasked, is the sum of the integers, exactly. All other
arithmetic is done with Flower's own functions, so the result is that of its `SecAggPlusWorkflow` on the same updates.
Masked vectors look uniformly random to the server, which is why they are not recorded either.

Flower's clients send weights, ours the update w_T - w_t (or a gradient), which is what `clip` is meant for; N_max is
the most examples that any client of the federation reports, and known to all.

A group of which fewer than the threshold answer is lost: the shares that are left do not unmask its sum. The masks of
single clients that drop out above it are removed, so these are left out of the sum.

References:
    Bell et al.: Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020; Bonawitz et al.: Practical
    Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017. Differs: all pairs of a group share keys.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedsim.engines.arrays import record_of, state_in
from fedsim.errors import RunError, some_of
from fedsim.experiments.build import Experiment
from fedsim.experiments.config import SecureAggregationTable
from fedsim.experiments.secure_aggregation import group_sizes
from fedsim.randomness import numpy_generator, seeded
from fedsim.wire.messages import non_finite
from fedsim.wire.payloads import Dense, Form, Kind, Payload, State
from strategies.exchange import GROUP, MEMBERS
from strategies.secure_aggregation import weighted_mean

log = logging.getLogger("fedsim." + __name__)

_LOST = 2
_SHOWN = 10
"""Most clients named in one line of the log."""


@dataclass(frozen=True, kw_only=True)
class SecureSum:
    """The protocol of one federation.

    Attributes:
        table: its settings.
        largest: N_max.
        seed: of the run.
    """

    table: SecureAggregationTable
    largest: int
    seed: int

    @classmethod
    def of(cls, experiment: Experiment) -> SecureSum | None:
        """That of `experiment`; None where clients send their updates in clear."""
        table = experiment.config.secure_aggregation
        return None if table is None else cls(table=table, largest=max(experiment.reported), seed=experiment.seed)

    def groups(self, clients: Iterable[int], number: int) -> list[list[int]]:
        """The groups of round `number`, drawn by a key that the server has, too; each ascending.

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

    def refusal(self, reply: RecordDict, asked: RecordDict) -> str | None:
        """Why a client would not take part with what it is about to send, or None."""
        if (count := _count(reply)) > self.largest:
            return f"it reported {count} examples, more than the {self.largest} that weights are multiples of"
        if broken := non_finite({name: tensor for name, (_, tensor) in _values(reply, asked).items()}):
            return f"its '{broken[0]}' holds NaN or infinite values, and nobody could find them in the sum"
        return None

    def sums(self, replies: Iterable[Message], messages: Sequence[Message], number: int) -> Iterator[Message]:
        """One reply a group, once the last of its clients has replied; errors as they come.

        A reply is added to the sum of its group and emptied. So memory holds the sums of the groups that are not
        complete, 4 bytes a number.

        Args:
            replies: one to each of `messages`, all of them accepted.
            messages: what clients were asked in round `number`.
        """
        asked = {message.metadata.dst_node_id: message for message in messages}
        groups = [_Group(protocol=self, members=members) for members in self.groups(asked, number)]
        of = {client: group for group in groups for client in group.members}
        for reply in replies:
            client = reply.metadata.src_node_id
            if reply.has_error():
                yield reply
            else:
                of[client].add(client, reply.content, asked[client].content, number)
            of[client].waiting -= 1
            if not of[client].waiting:
                yield from of[client].closed(asked, number)
        self._warn(groups, number)

    def _warn(self, groups: Sequence[_Group], number: int) -> None:
        cut, numbers = sum(group.cut for group in groups), sum(group.numbers for group in groups)
        if cut:
            log.warning(
                "round %d: %d of %d numbers of weighted updates were beyond secure_aggregation.clip = %g, and cut",
                number,
                cut,
                numbers,
                self.table.clip,
            )

    def quantised(self, update: Mapping[str, NDArray[Any]], count: int, *key: int) -> list[NDArray[Any]]:
        """What a client with `count` examples masks: its weight, then each array of `update`, as integers.

        Args:
            key: round and client, under which the rounding is drawn.
        """
        from flwr.common.secure_aggregation.ndarrays_arithmetic import factor_combine, parameters_multiply
        from flwr.common.secure_aggregation.quantization import quantize

        levels = 1 << self.table.bits
        weight = round(count / self.largest * levels)
        weighted = parameters_multiply(list(update.values()), weight / levels)
        with seeded(self.seed, "secure aggregation", *key):  # Flower draws from NumPy's global generator
            return factor_combine(weight, quantize(weighted, self.table.clip, levels))


@dataclass(kw_only=True)
class _Group:
    """The sum over one group, as it comes about.

    Attributes:
        members: who is in it.
        survivors: who of them answered, in this order.
        waiting: of how many the reply is still to come.
        total: sum of the integers, modulo 2^32; empty before the first.
        forms: by tensor, the kind and the type of what clients sent.
        examples: sum of N.
        cut: how many of `numbers` were beyond the clipping range.
    """

    protocol: SecureSum
    members: list[int]
    survivors: list[int] = field(default_factory=list)
    waiting: int = field(init=False)
    total: list[NDArray[np.uint32]] = field(default_factory=list)
    forms: dict[str, tuple[Kind, torch.dtype]] = field(default_factory=dict)
    examples: int = 0
    cut: int = 0
    numbers: int = 0

    def __post_init__(self) -> None:
        self.waiting = len(self.members)

    def add(self, client: int, reply: RecordDict, asked: RecordDict, number: int) -> None:
        """Add what `client` sent, and empty its reply."""
        values, count = _values(reply, asked), _count(reply)
        self.forms = {name: (kind, tensor.dtype) for name, (kind, tensor) in values.items()}
        update = {name: tensor.numpy() for name, (_, tensor) in values.items()}
        own = [np.asarray(part).astype(np.uint32) for part in self.protocol.quantised(update, count, number, client)]
        if self.total:
            for part, more in zip(self.total, own, strict=True):
                part += more
        else:
            self.total = own
        self._note_cut(update, count)
        self.examples += count
        self.survivors.append(client)
        for record in reply.array_records.values():
            record.clear()

    def _note_cut(self, update: Mapping[str, NDArray[Any]], count: int) -> None:
        bound = self.protocol.table.clip * self.protocol.largest / count
        self.cut += sum(int((np.abs(values) > bound).sum()) for values in update.values())
        self.numbers += sum(values.size for values in update.values())

    def closed(self, asked: Mapping[int, Message], number: int) -> Iterator[Message]:
        """The reply of the group, or where it is lost an error for each client that answered in vain."""
        total, self.total = self.total, []
        table, needed = self.protocol.table, self.protocol.table.survivors(len(self.members))
        if len(self.survivors) < needed:
            why = (
                f"its sum is lost: {len(self.survivors)} of its group of {len(self.members)} answered, {needed} have to"
            )
            log.warning("round %d, group of clients %s: %s", number, some_of(self.members, _SHOWN), why)
            for client in self.survivors:
                yield Message(Error(code=_LOST, reason=why), reply_to=asked[client])
            return
        mean = weighted_mean(total, len(self.survivors), table.clip, 1 << table.bits)
        tensors: dict[str, tuple[Kind, Form]] = {
            name: (kind, Dense(torch.from_numpy(np.asarray(values)).to(dtype)))
            for (name, (kind, dtype)), values in zip(self.forms.items(), mean, strict=True)
        }
        content: dict[str, Any] = {
            "arrays": record_of(Payload(tensors).arrays()),
            "metrics": MetricRecord({"num-examples": self.examples}),
            GROUP: ConfigRecord({MEMBERS: sorted(self.survivors)}),
        }
        yield Message(RecordDict(content), reply_to=asked[min(self.survivors)])


def _count(reply: RecordDict) -> int:
    (metrics,) = reply.metric_records.values()
    return int(metrics["num-examples"])  # type: ignore[arg-type]


def _values(reply: RecordDict, asked: RecordDict) -> dict[str, tuple[Kind, torch.Tensor]]:
    """By tensor, what the client adds to the sum: its gradient, or the difference w_T - w_t."""
    (arrays,), (sent,) = reply.array_records.values(), asked.array_records.values()
    before = state_in(sent)
    payload = Payload.from_arrays(state_in(arrays), before)
    after = payload.after(before)
    found: dict[Kind, State] = {kind: payload.values(kind, before) for kind in ("delta", "gradient")}
    return {
        name: ("gradient", found["gradient"][name].to(tensor.dtype))
        if name in found["gradient"]
        else ("delta", found["delta"][name].to(tensor.dtype) if name in found["delta"] else after[name] - tensor)
        for name, tensor in before.items()
    }
