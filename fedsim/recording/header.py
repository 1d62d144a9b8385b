"""JSON header of a round's file, with the SHA-256 of each recorded state and of itself."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard, get_args

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.base.errors import TranscriptError, one_line
from fedsim.base.files import check_readable, parse_json
from fedsim.recording.payloads import Kind, State

FORMAT_VERSION = 3
RECORDABLE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.complex64: "C64",
    torch.bool: "BOOL",
}
RECORDING_FOLDER = "transcript"
"""Folder of a recording in a run folder."""
ROUND_FILE = "round-{:06d}.safetensors"
RUN_FOLDER = "run-{}"
"""Folder of one run in the folder where an app records its runs."""
MAX_CLIENT_ID = (1 << 64) - 1
"""Largest id of a client; Flower's node ids have 64 bits."""
MAX_NUM_EXAMPLES = (1 << 63) - 1
"""Largest N, which attacks compute with as int64."""
EXAMPLE_COUNT_KEYS = ("num-examples", "num_examples")
"""Metrics in which Flower's clients report N."""
_EXAMPLE_COUNT_NAMES = re.compile(r"num[-_]?(examples|samples)|n_(examples|samples)", re.IGNORECASE)
NODE_FAILED = "its node failed"
"""Beginning of the failure reason of a client whose node failed, not the client itself."""
DIFFERS_BY_CLIENT = "differs-by-client"
"""Config key under which a header lists facts that differ between clients, without their values."""


def names_example_count(name: str) -> bool:
    """Return whether a metric of this name reports N, in Flower's apps or in others.

    >>> names_example_count("num-examples"), names_example_count("n_samples"), names_example_count("loss")
    (True, True, False)
    """
    return bool(_EXAMPLE_COUNT_NAMES.fullmatch(name))


def straggler_reason(number: int) -> str:
    """Return the failure reason of a client that chose to send nothing in round `number`, and did not train."""
    return f"straggler: did not return in round {number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """Entry of the header for one client's update.

    Attributes:
        client: its id.
        num_examples: N as the client reported it.
        broadcast: index of the broadcast state that it received in this round.
        sha256: hash of the arrays that it sent.
        kind: weights, a gradient or a delta.
        metrics: its other metrics.
        records: see `Update`.
        members: see `Update`.
        message: see `Update`.
        remarks: see `Update`.
        num_bytes: bytes of these arrays in a round by recipe, whose file may lack them; elsewhere
            0.
    """

    client: int
    num_examples: int
    broadcast: int
    sha256: str
    kind: Kind
    metrics: Mapping[str, float]
    records: Sequence[str] = ()
    members: Sequence[int] = ()
    message: int = 1
    remarks: Sequence[str] = ()
    num_bytes: int = 0

    @property
    def key_prefix(self) -> str:
        """Return the prefix of the names of its arrays in the file."""
        return f"client/{self.client}" if self.message == 1 else f"client/{self.client}:{self.message}"

    @property
    def senders(self) -> Sequence[int]:
        """Return the clients of the update: one, or those whose sum it is."""
        return self.members or (self.client,)

    def to_json(self) -> dict[str, Any]:
        """Return all fields for JSON, without optional ones that have their default."""
        fields = {key: getattr(self, key) for key in self.__slots__}
        for key, default in _OPTIONAL_COUNTS.items():
            if fields[key] == default:
                del fields[key]
        for key in _OPTIONAL_LISTS:
            if not fields[key]:
                del fields[key]
        return fields


_OPTIONAL_LISTS: dict[str, type] = {"records": str, "members": int, "remarks": str}
"""Optional lists of a reply, by default empty, with the type of their elements."""
_OPTIONAL_COUNTS: dict[str, int] = {"message": 1, "num_bytes": 0}
"""Optional numbers of a reply, with their defaults."""
_OPTIONAL_TYPES: dict[str, type] = dict.fromkeys(_OPTIONAL_LISTS, list) | dict.fromkeys(_OPTIONAL_COUNTS, int)
_KINDS = frozenset(get_args(Kind))


@dataclass(frozen=True, kw_only=True)
class Header:
    """Header of one round's file, read before any tensor.

    Attributes:
        version: format of the file.
        round: server round, counted from 1.
        broadcasts: SHA-256 of each distinct state that was sent; nearly always one.
        replies: one entry for each recorded update, by ascending client id and message.
        failures: client id to the reason why no update came back, see `errors.one_line`.
        config: facts that the server sent along with the state, the same to all clients;
            `DIFFERS_BY_CLIENT` names the others.
        recipe: what the updates of a round by recipe are computed again with: size of the groups
            that train at once, number of rounds, processor and versions; empty where the file holds
            all updates.
    """

    version: int
    round: int
    broadcasts: Sequence[str]
    replies: Sequence[Reply]
    failures: Mapping[int, str]
    config: Mapping[str, object]
    recipe: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def asked_clients(self) -> set[int]:
        """Return the clients that were sent the model, whether or not they answered."""
        return {*self.failures, *(client for reply in self.replies for client in reply.senders)}

    def find_reply(self, client: int) -> Reply | None:
        """Return the first reply of `client`, or else of a group with it, or None."""
        for reply in self.replies:
            if reply.client == client:
                return reply
        return next((reply for reply in self.replies if client in reply.members), None)

    def to_json(self) -> dict[str, Any]:
        """Return all fields for JSON, without an empty recipe."""
        return self._fields() | {"replies": [reply.to_json() for reply in self.replies]}

    def to_text(self) -> str:
        """Return the text of `to_json`."""
        # One reply after the other: the dictionaries of 100 000 take 40 MB.
        return json.dumps(self._fields(), sort_keys=True, default=Reply.to_json)

    def _fields(self) -> dict[str, Any]:
        fields = dict(vars(self))
        if not self.recipe:
            del fields["recipe"]
        return fields


_NUMPY_TYPES = (torch.float32, torch.float64, torch.int64, torch.uint8)
"""Frequent types that NumPy has as well."""


def hash_state(state: State) -> str:
    """Return the SHA-256 over the names, types, shapes and bytes of `state`, in its own order."""
    return hash_bytes(state, state_bytes(state))


def hash_bytes(state: State, memory: Mapping[str, memoryview]) -> str:
    """Return the hash of `state`, see `hash_state`, where its `state_bytes` are known already."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(_describe_tensor(name, tensor.dtype, tensor.shape))
        digest.update(memory[name])
    return digest.hexdigest()


@lru_cache(maxsize=4096)  # the name of a type is slow, and all replies hold the same tensors
def _describe_tensor(name: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    return f"{name}:{dtype}:{tuple(shape)};".encode()


def state_bytes(state: State) -> dict[str, memoryview]:
    """Return the memory of each tensor by its name, see `tensor_bytes`."""
    return {name: tensor_bytes(tensor) for name, tensor in state.items()}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of `tensor` in C order, copied only where it is in another order."""
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype in _NUMPY_TYPES:  # quicker, of small tensors
        values = (tensor.detach() if tensor.requires_grad else tensor).numpy()
        return np.ascontiguousarray(values).data.cast("B")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_header(path: Path, number: int) -> tuple[Header, str]:
    """Read and verify the header of a round's file; return it with its hash."""
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            seal = parse_json(file.metadata()["fedsim"])
        if hashlib.sha256(seal["header"].encode()).hexdigest() != seal["sha256"]:
            raise damage_error(path, "its header was altered")
        fields = parse_json(seal["header"])
        if type(fields["version"]) is int and fields["version"] != FORMAT_VERSION:
            raise TranscriptError(
                f"{path}: has format {_short_repr(fields['version'])}, this fedsim reads format {FORMAT_VERSION}; "
                "record it again"
            )
        _check_fields(fields)
        if fields["round"] != number:
            raise damage_error(path, f"it holds round {fields['round']}")
        replies = [Reply(**reply) for reply in fields.pop("replies")]
        failures = {int(client): one_line(reason) for client, reason in fields.pop("failures").items()}
        return Header(replies=replies, failures=failures, **fields), seal["sha256"]
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise damage_error(path, str(error)) from error


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value is a number, and no bool, that a float can hold.

    >>> is_number(0.5), is_number(True), is_number(10**400)
    (True, False, False)
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < sys.float_info.max
    return isinstance(value, float)


def parse_count(reported: object, otherwise: int = 0, most: int = MAX_NUM_EXAMPLES) -> int:
    """Return a count that a client reported, or `otherwise` where it is no whole number in range.

    No error is raised, because no reply may stop a federation or an audit.

    >>> parse_count(32.0), parse_count(-1), parse_count("many"), parse_count(True)
    (32, 0, 0, 0)
    """
    if not is_number(reported) or not 0 <= reported <= most or reported != int(reported):
        return otherwise
    return int(reported)


def seal_header(text: str) -> tuple[str, str]:
    """Return the `Header.to_text` of a round as it is written, with its SHA-256, and that."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"header": text, "sha256": digest}), digest


def withhold_facts(path: Path) -> None:
    """Remove the protocol facts from a round's file in place; the tensors stay where they are."""
    with path.open("r+b") as file:
        try:
            header_size = int.from_bytes(file.read(8), "little")
            head = parse_json(file.read(header_size))
            fields = parse_json(parse_json(head["__metadata__"]["fedsim"])["header"])
            fields.pop("recipe", None)
            head["__metadata__"]["fedsim"], _ = seal_header(json.dumps(fields | {"config": {}}, sort_keys=True))
            text = json.dumps(head, separators=(",", ":")).encode()
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise damage_error(path, str(error)) from error
        if len(text) > header_size:
            raise damage_error(path, "its header is not written as ours are")
        file.seek(8)
        file.write(text.ljust(header_size))


_HEADER_TYPES: Mapping[str, type] = {
    "version": int,
    "round": int,
    "broadcasts": list,
    "replies": list,
    "failures": dict,
    "config": dict,
}
_REPLY_TYPES: Mapping[str, type] = {
    "client": int,
    "num_examples": int,
    "broadcast": int,
    "sha256": str,
    "kind": str,
    "metrics": dict,
}


def _check_fields(fields: Any) -> None:
    """Raise ValueError where a header, of a file of unknown origin, is not as fedsim writes it."""
    has_recipe = isinstance(fields, dict) and "recipe" in fields
    _check_types("the header", fields, {**_HEADER_TYPES, "recipe": dict} if has_recipe else _HEADER_TYPES)
    if has_recipe and not all(type(value) in (int, str) for value in fields["recipe"].values()):
        raise ValueError(f"its recipe is {_short_repr(fields['recipe'])}")
    if not all(isinstance(item, str) for item in (*fields["broadcasts"], *fields["failures"].values())):
        raise ValueError("a hash or a reason is not a text")
    for reply in fields["replies"]:
        _check_reply(reply, len(fields["broadcasts"]))
    answers = [(reply["client"], reply.get("message", 1)) for reply in fields["replies"]]
    if len(set(answers)) < len(answers):
        raise ValueError(f"its clients and their messages are {_short_repr(answers)}, expected each once")
    failed = [int(client) for client in fields["failures"]]
    if len(set(failed)) < len(failed) or min(failed, default=0) < 0:
        raise ValueError(f"the clients that failed are {_short_repr(failed)}, expected each once and none below 0")


def _check_reply(reply: Any, num_broadcasts: int) -> None:
    present_types = {key: kind for key, kind in _OPTIONAL_TYPES.items() if isinstance(reply, dict) and key in reply}
    _check_types("a reply", reply, {**_REPLY_TYPES, **present_types})
    for key, item_type in _OPTIONAL_LISTS.items():
        if key in reply and not all(type(item) is item_type for item in reply[key]):
            raise ValueError(f"{key} of a reply are {_short_repr(reply[key])}")
    if reply["kind"] not in _KINDS:
        raise ValueError(f"a reply is of kind {_short_repr(reply['kind'])}")
    client, num_examples, broadcast = numbers = (reply["client"], reply["num_examples"], reply["broadcast"])
    if not (0 <= client <= MAX_CLIENT_ID and 0 <= num_examples <= MAX_NUM_EXAMPLES and 0 <= broadcast < num_broadcasts):
        raise ValueError(f"client, N and broadcast are {_short_repr(numbers)}")
    if reply.get("message", 1) < 1 or reply.get("num_bytes", 0) < 0:
        raise ValueError(f"message and bytes of client {client} are below what can be")
    if not all(type(value) in (int, float) for value in reply["metrics"].values()):
        raise ValueError(f"a metric of client {client} is not a number")


def _check_types(name: str, table: Any, types: Mapping[str, type]) -> None:
    if not isinstance(table, dict) or table.keys() != types.keys():
        raise ValueError(f"{name} is {_short_repr(table)}, expected {', '.join(types)}")
    for key, expected in types.items():
        if type(table[key]) is not expected:  # not isinstance: a bool is an int
            raise ValueError(f"{key} of {name} is {_short_repr(table[key])}")


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}…"


def damage_error(path: Path, why: str) -> TranscriptError:
    """Return the error to raise for a round's file that is not as it was written."""
    return TranscriptError(
        f"{path}: is damaged ({why}); the other rounds stay readable, leave this one out or record it again"
    )
