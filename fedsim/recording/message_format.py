"""Format of the messages of a Flower app: how they map to the tensors of the audited model.

Importing this module does not load torch, because experiment files are checked with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from fedsim.base.constraints import NonNegativeInt, PositiveInt
from fedsim.base.errors import TranscriptError

if TYPE_CHECKING:
    from torch import Tensor

    from fedsim.recording.payloads import Payload, State
    from fedsim.recording.wire_format import Update

_OUTPUT_FIRST_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}
"""Number of dimensions to the permutation of axes `position ... input output` into PyTorch's."""
_TENSOR_KEYS = {"replies", "prefix", "module", "names", "shapes", "transposed"}
"""Keys that change how the tensors of a message are read."""
_MODEL_KEYS = {"messages", "broadcast_messages", "outputs", "frozen", "defended"}
"""Keys that change nothing about an update that was recorded."""


class MessageFormat(BaseModel):
    """[app]: the format of another Flower app's messages, as its auditor states it.

    Nothing is guessed.

    Attributes:
        replies: kind of the arrays that clients send under plain names; weights w_T in most apps.
        messages: type of the messages whose answers are updates, such as `query.weights`, where
            these are not training messages with arrays; they hold arrays, lists of numbers or
            bytes.
        record: the record of arrays that holds the model, where messages have several.
        broadcast_record: the record in which the server sends w_t, where it has another name than
            the one in which clients answer.
        broadcast_messages: type of the messages that hold what the server sends where it is another than
            `messages`: what a client was last sent in one of these before it answered, such as
            gradients of its embeddings.
        message: number, from 1, of the message that is audited where the server sends a client
            several in a round, such as one for each model of a cluster; 0 where it sends one.
        prefix: prefix that names of sent tensors have and names in the model do not, such as
            `_orig_mod.`.
        module: the part of the model whose tensors are sent under names relative to it, such as
            `head`.
        names: the model's names of the tensors in the order in which they are sent, `""` for a
            tensor that is not in the model; empty leaves the names. Where one vector is sent, it
            is cut into these tensors, whose `shapes` have to be named.
        shapes: name in the model to shape, for tensors that are sent as plain lists of numbers, or
            as one vector.
        transposed: whether weights have their input axis first, as in Flax, Keras and scikit-learn.
        num_examples: N of all clients, or client id to N; replaces the N that clients report.
        outputs: `module:callable` that computes logits from the model's outputs and its inputs, for
            models that return a tuple or an object.
        frozen: whether parameters that need no gradient are not sent, and keep the values that the
            model is built with.
        private: parts of the model that stay with the clients, such as `head`; nobody sends them,
            and attacks do not know them.
        controls: the record in which the server sends SCAFFOLD's control variate c, and clients answer with theirs,
            which follow from their moves (option II), under the names of the model's tensors in `record`. Where
            messages have one record of arrays, it is what stands before these names, such as `c.`; `names` counts.
        control_replies: what clients send in it: the `change` of their control variate, c_i+ - c_i, or its new
            `value`, c_i+.
        defended: whether the app's clients defend themselves, as by noise, so that their true examples may
            explain nothing of their messages, nor their control variates their moves; these are then scored all the
            same.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    replies: Literal["weights", "delta", "gradient"] = "weights"
    messages: str = ""
    record: str = ""
    broadcast_record: str = ""
    broadcast_messages: str = ""
    message: NonNegativeInt = 0
    prefix: str = ""
    module: str = ""
    names: list[str] = []
    shapes: dict[str, list[PositiveInt]] = {}
    transposed: bool = False
    num_examples: PositiveInt | dict[str, PositiveInt] | None = None
    outputs: str = ""
    frozen: bool = False
    private: list[str] = []
    controls: str = ""
    control_replies: Literal["change", "value"] = "change"
    defended: bool = False

    @field_validator("num_examples")
    @classmethod
    def _check_client_keys(cls, counts: int | dict[str, int] | None) -> int | dict[str, int] | None:
        check_client_ids(counts if isinstance(counts, dict) else ())
        return counts

    @model_validator(mode="after")
    def _check_controls(self) -> MessageFormat:
        if self.control_replies != "change" and not self.controls:
            raise ValueError("control_replies: no record of control variates is named; name it with controls")
        if self.controls and (self.replies == "gradient" or self.message):
            key = "message" if self.message else "replies"
            raise ValueError(
                f"controls: control variates correct several local steps of one model, which {key} = "
                f"{getattr(self, key)!r} excludes; leave one of them out"
            )
        return self

    @property
    def stated_keys(self) -> set[str]:
        """Return the keys whose values are not the defaults."""
        return set(self.model_dump(exclude_defaults=True))

    @property
    def changes_updates(self) -> bool:
        """Return whether updates are read in another way than fedsim's own."""
        return bool(self.stated_keys - _MODEL_KEYS)

    def read(self, update: Update) -> Update:
        """Return `update` as attacks read it: by the model's names, floats in `WORKING_TYPE`.

        Raises:
            TranscriptError: it has several records of which this format names none, it does not
                match this format, or it holds integers in place of real numbers.
        """
        from fedsim.recording.payloads import Payload, to_working_type  # imports torch

        where = update.name
        in_one_record = bool(self.controls) and not update.records
        # Select the record that holds the model.
        if update.records:
            before = self._select_record(update.before, where, "the server", self._broadcast_key(update.before))
            sent = self._select_record(update.payload.arrays(), where, f"client {update.client}")
            update = replace(update, before=before, payload=Payload.from_dense(sent, "weights"), records=())

        # Rename, reshape and transpose the tensors, unless the format leaves them as they are.
        move = update.gradient_move
        if in_one_record or self.stated_keys & _TENSOR_KEYS:
            arrays, broadcast_names = update.payload.arrays(), list(update.before)
            names = broadcast_names if arrays.keys() <= update.before.keys() else list(arrays)
            if update.before.keys() < arrays.keys():  # clients send more behind the model, such as gradients
                broadcast_names = names
            before = self._read_before(update.before, arrays, where, broadcast_names, drop_controls=in_one_record)
            sent = self._to_model(arrays, where, names, drop_controls=in_one_record)
            payload = self._to_payload(sent, before)
            if move is not None:
                move = self._to_model(move, where, broadcast_names)
            update = replace(update, before=before, payload=payload)
        if name := update.payload.find_codes(update.before):
            raise TranscriptError(
                f"{where}: '{name}' came as integers, but real numbers were sent, so the integers encode others in "
                "an unknown way; record what the server decodes them to (docs/how-to/import-a-recording.md)"
            )
        return replace(
            update,
            gradient_move=None if move is None else to_working_type(move),
            before=to_working_type(update.before),
            payload=update.payload.to_working_type(update.before),
            num_examples=self.num_examples_of(update.client, update.num_examples),
        )

    def read_controls(self, update: Update) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the control variates that the server and the client sent, by the names of their tensors in messages.

        Raises:
            TranscriptError: one of them sent none, or some are not of tensors of the model.
        """
        where = update.name
        received, model = self._split_controls(update.before, update, where, "the server")
        sent, _ = self._split_controls(update.payload.arrays(), update, where, f"client {update.client}")
        for name, control in received.items():
            shapes = [state[name].shape if name in state else None for state in (received, model, sent)]
            if len(set(shapes)) > 1:
                raise TranscriptError(
                    f"{where}: the control variate '{name}' of shape {tuple(control.shape)} has no counterpart in the "
                    "model or in the reply; it is read where the app sends them under the names of the model's tensors"
                )
        return received, sent

    def _split_controls(
        self, state: State, update: Update, where: str, sender: str
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the control variates and the model that somebody sent, both by the names of the model's tensors."""
        if update.records:
            key = self._broadcast_key(update.before) if sender == "the server" else "record"
            return self._select_record(state, where, sender, "controls"), self._select_record(state, where, sender, key)
        names = self._model_names(list(state), where)
        sent_name_of = {name: sent_name for sent_name, name in names.items()}
        controls: dict[str, Tensor] = {}
        model: dict[str, Tensor] = {}
        for sent_name, tensor in state.items():
            if not names[sent_name].startswith(self.controls):
                model[sent_name] = tensor
            elif counterpart := sent_name_of.get(names[sent_name].removeprefix(self.controls)):
                controls[counterpart] = tensor
        if not controls:
            raise TranscriptError(
                f"{where}: {sender} sent one record of arrays, in which no name is that of another array with "
                f"'{self.controls}' before it, as [app] controls says; fix it, name each array with [app] names, or "
                "leave it out"
            )
        return controls, model

    def read_moves(self, update: Update) -> dict[str, Tensor]:
        """Return w_t - w_T by the names of the tensors in messages, in float64, of a message with control variates."""
        where = update.name
        _, before = self._split_controls(update.before, update, where, "the server")
        _, sent = self._split_controls(update.payload.arrays(), update, where, f"client {update.client}")
        moves = {}
        for name in before.keys() & sent.keys():
            moved = sent[name].double()
            moves[name] = -moved if self.replies == "delta" else before[name].double() - moved
        return moves

    def _broadcast_key(self, broadcast: State) -> str:
        """Return the key that names the record of w_t; empty where a single record is taken whatever its name."""
        if self.broadcast_record:
            return "broadcast_record"
        return "" if len({name.partition("/")[0] for name in broadcast}) == 1 else "record"

    def _select_record(self, state: State, where: str, sender: str, key: str = "record") -> dict[str, Tensor]:
        """Return the tensors of one record.

        Args:
            state: the tensors of all records, called `RECORD/NAME`.
            key: the key of this table that names the record; empty for the only one.
        """
        records = list(dict.fromkeys(name.partition("/")[0] for name in state))
        wanted = str(getattr(self, key)) if key else records[0]
        if wanted not in records:
            quoted = ", ".join(f"'{name}'" for name in records)
            holds = "the control variates" if key == "controls" else "the model"
            reason = f"none is called '{wanted}'" if wanted else f"which of them holds {holds} is not said"
            remedy = f"name one with [app] {key}"
            if sender == "the server" and key == "record":
                remedy += ", or, where the server's has another name, with [app] broadcast_record"
            raise TranscriptError(f"{where}: {sender} sent the records of arrays {quoted}, and {reason}; {remedy}")
        prefix = f"{wanted}/"
        return {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}

    def _read_before(
        self, before: State, sent: State, where: str, sent_names: Sequence[str], *, drop_controls: bool
    ) -> dict[str, Tensor]:
        """Return w_t by the names of the model, which it has already where clients alone send one vector."""
        if self._is_vector(sent) and before.keys() >= set(self.names):
            return {name: self._transpose(before[name]) for name in self.names}
        return self._to_model(before, where, sent_names, drop_controls=drop_controls)

    def _is_vector(self, state: State) -> bool:
        """Return whether one vector holds the several tensors of `names`."""
        return len(self.names) > 1 and len(state) == 1 and next(iter(state.values())).ndim == 1

    def _cut_vector(self, state: State, where: str) -> dict[str, Tensor]:
        """Return the tensors of `names`, one after the other in a vector."""
        ((sent_name, vector),) = state.items()
        sizes: list[int] = []
        for name in self.names:
            if name not in self.shapes:
                raise TranscriptError(
                    f"{where}: '{sent_name}' is a vector of {vector.numel()} numbers, and [app] names says that it "
                    f"holds {len(self.names)} tensors; name the shape of each in [app] shapes, which has none of "
                    f"'{name}'"
                )
            sizes.append(math.prod(self.shapes[name]))
        if sum(sizes) != vector.numel():
            raise TranscriptError(
                f"{where}: '{sent_name}' is a vector of {vector.numel()} numbers, and the tensors in [app] names have "
                f"{sum(sizes)} by [app] shapes; fix one of them"
            )
        tensors: dict[str, Tensor] = {}
        start = 0
        for name, size in zip(self.names, sizes, strict=True):
            tensors[name] = self._transpose(self._reshape(name, vector[start : start + size], where))
            start += size
        return tensors

    def _to_model(
        self, state: State, where: str, sent_names: Sequence[str], *, drop_controls: bool = False
    ) -> dict[str, Tensor]:
        """Return `state` with the names, shapes and axes of the model.

        Args:
            state: tensors by the names under which they were sent.
            sent_names: the names of all sent tensors, in the order that `names` refers to.
            drop_controls: whether the control variates are among them.
        """
        if self._is_vector(state):
            return self._cut_vector(state, where)
        model_name_of = self._model_names(sent_names, where)
        named_state: dict[str, Tensor] = {}
        for sent_name, tensor in state.items():
            name = model_name_of[sent_name]
            if name and not (drop_controls and name.startswith(self.controls)):
                named_state[name] = self._transpose(self._reshape(name, tensor, where))
        return named_state

    def _model_names(self, sent_names: Sequence[str], where: str) -> dict[str, str]:
        """Return the model's name of each sent tensor, `""` of one that is not in the model."""
        if self.prefix and not any(name.startswith(self.prefix) for name in sent_names):
            raise TranscriptError(
                f"{where}: no tensor has a name that begins with '{self.prefix}', but for instance "
                f"'{next(iter(sent_names), '')}'; fix [app] prefix"
            )
        if self.names and len(self.names) != len(sent_names):
            raise TranscriptError(
                f"{where}: {len(sent_names)} tensors were sent, and [app] names has {len(self.names)}; name each, "
                'in the order in which they are sent, "" for those that are not of the model'
            )
        module_prefix = f"{self.module}." if self.module else ""
        names = self.names or [f"{module_prefix}{name.removeprefix(self.prefix)}" for name in sent_names]
        if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
            raise TranscriptError(
                f"{where}: several of the tensors that were sent are called '{repeated[0]}' in the model, and one of "
                'them would be read; fix [app] names, with "" for those that are not of the model, or prefix'
            )
        return dict(zip(sent_names, names, strict=True))

    def _reshape(self, name: str, tensor: Tensor, where: str) -> Tensor:
        shape = self.shapes.get(name)
        if shape is None:
            return tensor
        if tensor.numel() != math.prod(shape):
            raise TranscriptError(f"{where}: '{name}' has {tensor.numel()} numbers, [app] shapes says {list(shape)}")
        return tensor.reshape(tuple(shape))

    def _transpose(self, tensor: Tensor) -> Tensor:
        if self.transposed and tensor.ndim in _OUTPUT_FIRST_AXES:
            return tensor.permute(_OUTPUT_FIRST_AXES[tensor.ndim]).contiguous()
        return tensor

    def _to_payload(self, arrays: State, before: State) -> Payload:
        """Return the payload of `arrays`, whose real numbers are of the kind `replies`."""
        from fedsim.recording.payloads import Payload  # imports torch

        payload = Payload.from_arrays(arrays, before)
        if self.replies == "weights":
            return payload
        tensors = dict(payload.tensors)
        for name, (_, form) in payload.tensors.items():
            if name in before and before[name].is_floating_point():
                tensors[name] = (self.replies, form)
        return Payload(tensors)

    def num_examples_of(self, client: int, reported: int) -> int:
        """Return N of a client: the stated one, or else the one that it reported."""
        if self.num_examples is None:
            return reported
        if isinstance(self.num_examples, int):
            return self.num_examples
        counts = {int(key): count for key, count in self.num_examples.items()}
        return counts.get(client, reported)


def check_client_ids(keys: Iterable[str]) -> None:
    """Raise ValueError unless each key of a table is the id of a client."""
    for key in keys:
        if not (key.isascii() and key.isdigit()):
            raise ValueError(f"expected client ids as keys, got '{key}'")
