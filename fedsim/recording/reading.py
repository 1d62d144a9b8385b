"""What the messages of somebody's Flower app mean, where a recording alone does not say it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedsim.errors import TranscriptError
from fedsim.wire.messages import Update
from fedsim.wire.payloads import Kind, Payload, State, in_working_type

_OUTPUT_FIRST = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}
"""By number of dimensions, the axes of a weight (place ... input output) as PyTorch has them."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How updates are read: the auditor says it of an app, and nothing is guessed.

    Attributes:
        replies: what the numbers are that clients send under plain names; w_T in most apps.
        record: the record of arrays that holds the model, where messages have several.
        message: which of the server's messages to a client in a round is meant, counted from 1, where a client gets
            several, such as one for each model of a cluster; 0 where it gets one.
        prefix: what the names of tensors begin with and those of the model do not, such as `_orig_mod.`.
        module: the part of the model whose tensors are sent, by names that begin in it, such as `head`.
        names: what the model calls the tensors, in the order in which they are sent, `""` for one that is none of its;
            empty leaves their names.
        shapes: of tensors that are sent as plain lists of numbers, by the names of the model.
        transposed: the weights of layers have their inputs first, as in Flax, Keras and scikit-learn.
        num_examples: N, of all clients or by client, which goes before what clients report.
    """

    replies: Kind = "weights"
    record: str = ""
    message: int = 0
    prefix: str = ""
    module: str = ""
    names: Sequence[str] = ()
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    transposed: bool = False
    num_examples: int | Mapping[int, int] | None = None

    def of(self, update: Update) -> Update:
        """`update` as attacks read it: real numbers are in `WORKING_TYPE`.

        Raises:
            TranscriptError: it has several records and none is named, or not what this reading names.
        """
        where = f"round {update.round}, client {update.client}"
        if update.records:
            update = replace(
                update,
                before=self._chosen(update.before, where, "the server", alone=True),
                payload=Payload.dense(
                    self._chosen(update.payload.arrays(), where, f"client {update.client}"), "weights"
                ),
                records=(),
            )
        if self != Reading(record=self.record, message=self.message, num_examples=self.num_examples):
            arrays, sent = update.payload.arrays(), list(update.before)
            before = self._named(update.before, where, sent)
            after = self._named(arrays, where, sent if arrays.keys() <= update.before.keys() else list(arrays))
            update = replace(update, before=before, payload=self._meant(after, before))
        return replace(
            update,
            before=in_working_type(update.before),
            payload=update.payload.in_working_type(update.before),
            num_examples=self.counted(update.client, update.num_examples),
        )

    def _chosen(self, state: State, where: str, sender: str, *, alone: bool = False) -> dict[str, Tensor]:
        """The tensors of the record that holds the model; with `alone`, those of an only record whatever its name."""
        records = list(dict.fromkeys(name.partition("/")[0] for name in state))
        wanted = records[0] if alone and len(records) == 1 else self.record
        if wanted not in records:
            told = ", ".join(f"'{name}'" for name in records)
            why = f"none is called '{self.record}'" if self.record else "which of them holds the model is not said"
            raise TranscriptError(
                f"{where}: {sender} sent the records of arrays {told}, and {why}; name one with [app] record"
            )
        return {name.removeprefix(f"{wanted}/"): t for name, t in state.items() if name.startswith(f"{wanted}/")}

    def _named(self, state: State, where: str, order: Sequence[str]) -> dict[str, Tensor]:
        """`state` by the names of the model; `order` are the names under which all that `names` names was sent."""
        if self.prefix and not any(name.startswith(self.prefix) for name in state):
            raise TranscriptError(
                f"{where}: no tensor has a name that begins with '{self.prefix}', but for instance "
                f"'{next(iter(state), '')}'; mend [app] prefix"
            )
        if self.names and len(self.names) != len(order):
            raise TranscriptError(
                f"{where}: {len(order)} tensors were sent, and [app] names has {len(self.names)}; name each, in the "
                'order in which they are sent, "" for those that are not of the model'
            )
        within = f"{self.module}." if self.module else ""
        names = self.names or [f"{within}{name.removeprefix(self.prefix)}" for name in order]
        called = dict(zip(order, names, strict=True))
        return {
            called[name]: self._transposed(self._shaped(called[name], tensor, where))
            for name, tensor in state.items()
            if called[name]
        }

    def _shaped(self, name: str, tensor: Tensor, where: str) -> Tensor:
        shape = self.shapes.get(name)
        if shape is None:
            return tensor
        if tensor.numel() != math.prod(shape):
            raise TranscriptError(f"{where}: '{name}' has {tensor.numel()} numbers, [app] shapes says {list(shape)}")
        return tensor.reshape(tuple(shape))

    def _transposed(self, tensor: Tensor) -> Tensor:
        if self.transposed and tensor.ndim in _OUTPUT_FIRST:
            return tensor.permute(_OUTPUT_FIRST[tensor.ndim]).contiguous()
        return tensor

    def _meant(self, arrays: State, before: State) -> Payload:
        payload = Payload.from_arrays(arrays, before)
        if self.replies == "weights":
            return payload
        return Payload(
            {
                name: (self.replies, form) if name in before and before[name].is_floating_point() else (kind, form)
                for name, (kind, form) in payload.tensors.items()
            }
        )

    def counted(self, client: int, reported: int) -> int:
        """N of a client that reported so many examples."""
        said = self.num_examples
        if isinstance(said, int):
            return said
        return reported if said is None else said.get(client, reported)
