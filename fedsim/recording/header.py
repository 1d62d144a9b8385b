"""What one round's file says of itself: a JSON header with a SHA-256 of each state and of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedsim.errors import TranscriptError, one_line
from fedsim.files import check_readable, parse_json
from fedsim.wire.payloads import Kind, State

FORMAT = 3
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
RECORDING = "transcript"
"""What the folder of a recording is called in a run folder."""
FILE = "round-{:06d}.safetensors"
RUN = "run-{}"
"""What the folder of one run is called in the folder that an app records its runs in."""
MOST = (1 << 64) - 1
"""The largest id of a client; Flower's ids of nodes have 64 bits."""
MOST_EXAMPLES = (1 << 63) - 1
"""The largest N, which attacks compute with as int64."""
COUNTS = ("num-examples", "num_examples")
"""The metrics in which Flower's clients report N."""
LOST = "its node failed"
"""How the reason begins for which a client is missing through no fault of its own, as far as anybody knows."""
DIFFERING = "differs-by-client"
"""What a header calls the facts that the server did not send all clients alike, so that it does not tell them."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the header says of one client's update.

    Attributes:
        client: its id.
        num_examples: N, as it reported it.
        broadcast: which of the round's broadcast states it got.
        sha256: of the arrays that it sent.
        kind: what they are: weights, a gradient or a delta.
        metrics: what else it reported.
        records: see `Update`.
        members: see `Update`.
        message: see `Update`.
        remarks: see `Update`.
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

    @property
    def key(self) -> str:
        """What the names of its arrays begin with in the file."""
        return f"client/{self.client}" if self.message == 1 else f"client/{self.client}:{self.message}"

    @property
    def senders(self) -> Sequence[int]:
        """Whose update it is: one client, or those whose sum it is."""
        return self.members or (self.client,)

    def plain(self) -> dict[str, Any]:
        """Everything in it for JSON; what few recordings have is left out where there is none."""
        fields = asdict(self)
        return {key: value for key, value in fields.items() if key not in _RARE or value not in ((), [], 1)}


_RARE: dict[str, type] = {"records": str, "members": int, "remarks": str, "message": int}
"""Fields of a reply that few have, and of what they are lists; but `message` is a number."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """What one round's file says before any tensor is read.

    Attributes:
        version: format of the file.
        round: server round, counted from 1.
        broadcasts: SHA-256 of each distinct state that was sent; nearly always one.
        replies: one entry for each recorded update, by ascending client id and message.
        failures: client id to the reason why no update came back, see `errors.one_line`.
        config: what the server sent along with the state, as far as it sent all clients the same; `DIFFERING` names
            what else it sent.
    """

    version: int
    round: int
    broadcasts: Sequence[str]
    replies: Sequence[Reply]
    failures: Mapping[int, str]
    config: Mapping[str, object]

    def reply_of(self, client: int) -> Reply | None:
        """The first reply of `client`, or of the group that it is in; None where there is none."""
        own = (reply for reply in self.replies if reply.client == client)
        return next(own, None) or next((reply for reply in self.replies if client in reply.members), None)

    def plain(self) -> dict[str, Any]:
        """Everything in it for JSON."""
        return asdict(self) | {"replies": [reply.plain() for reply in self.replies]}


def hash_state(state: State) -> str:
    """SHA-256 over the names, types, shapes and bytes of `state`, in its own order."""
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of `tensor`, in C order, without a copy where it is in that order already."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def read_header(path: Path, number: int) -> tuple[Header, str]:
    """What a round's file says of itself, and the hash of that."""
    try:
        check_readable(path)
        with safe_open(path, framework="pt") as file:
            seal = parse_json(file.metadata()["fedsim"])
        if hashlib.sha256(seal["header"].encode()).hexdigest() != seal["sha256"]:
            raise damaged(path, "its header was altered")
        fields = parse_json(seal["header"])
        if type(fields["version"]) is int and fields["version"] != FORMAT:
            raise TranscriptError(
                f"{path}: has format {_cut(fields['version'])}, this fedsim reads format {FORMAT}; record it again"
            )
        _check_fields(fields)
        if fields["round"] != number:
            raise damaged(path, f"it holds round {fields['round']}")
        replies = [Reply(**reply) for reply in fields.pop("replies")]
        failures = {int(client): one_line(why) for client, why in fields.pop("failures").items()}  # a stranger's words
        return Header(replies=replies, failures=failures, **fields), seal["sha256"]
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error


def count_in(reported: object, otherwise: int = 0, most: int = MOST_EXAMPLES) -> int:
    """What a client reports as a count, `otherwise` where it is none: no reply may stop a federation or an audit."""
    if not isinstance(reported, int | float) or not 0 <= reported <= most or reported != int(reported):
        return otherwise
    return int(reported)


def sealed(header: Mapping[str, Any]) -> tuple[str, str]:
    """A round's header as it is written, and its SHA-256."""
    text = json.dumps(header, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"header": text, "sha256": digest}), digest


def withhold_facts(path: Path) -> None:
    """Leave the protocol facts out of a round's file; everything else stays where it is."""
    with path.open("r+b") as file:
        try:
            room = int.from_bytes(file.read(8), "little")
            head = parse_json(file.read(room))
            fields = parse_json(parse_json(head["__metadata__"]["fedsim"])["header"])
            head["__metadata__"]["fedsim"], _ = sealed(fields | {"config": {}})
            text = json.dumps(head, separators=(",", ":")).encode()
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise damaged(path, str(error)) from error
        if len(text) > room:
            raise damaged(path, "its header is not written as ours are")
        file.seek(8)
        file.write(text.ljust(room))


def _check_fields(fields: Any) -> None:
    """Raise ValueError where a header is not as fedsim writes it; the file may be anybody's."""
    kinds = {"version": int, "round": int, "broadcasts": list, "replies": list, "failures": dict, "config": dict}
    _check_kinds("the header", fields, kinds)
    if not all(isinstance(item, str) for item in (*fields["broadcasts"], *fields["failures"].values())):
        raise ValueError("a hash or a reason is no text")
    kinds = {"client": int, "num_examples": int, "broadcast": int, "sha256": str, "kind": str, "metrics": dict}
    for reply in fields["replies"]:
        rare = {key: reply[key] for key in _RARE if isinstance(reply, dict) and key in reply}
        _check_kinds("a reply", reply, kinds | {key: int if key == "message" else list for key in rare})
        for key, items in rare.items():
            if key != "message" and not all(type(item) is _RARE[key] for item in items):
                raise ValueError(f"{key} of a reply are {_cut(items)}")
        if reply["kind"] not in get_args(Kind):
            raise ValueError(f"a reply is of kind {_cut(reply['kind'])}")
        numbers = (reply["client"], reply["num_examples"], reply["broadcast"])
        if not (
            0 <= numbers[0] <= MOST and 0 <= numbers[1] <= MOST_EXAMPLES and 0 <= numbers[2] < len(fields["broadcasts"])
        ):
            raise ValueError(f"client, N and broadcast are {_cut(numbers)}")
        if reply.get("message", 1) < 1:
            raise ValueError(f"message of a reply is {_cut(reply['message'])}")
        if not all(type(value) in (int, float) for value in reply["metrics"].values()):
            raise ValueError(f"a metric of client {numbers[0]} is no number")
    answers = [(reply["client"], reply.get("message", 1)) for reply in fields["replies"]]
    if len(set(answers)) < len(answers):
        raise ValueError(f"its clients and their messages are {_cut(answers)}, expected each once")
    failed = [int(client) for client in fields["failures"]]
    if len(set(failed)) < len(failed) or min(failed, default=0) < 0:
        raise ValueError(f"the clients that failed are {_cut(failed)}, expected each once and none below 0")


def _check_kinds(what: str, table: Any, kinds: Mapping[str, type]) -> None:
    if not isinstance(table, dict) or set(table) != set(kinds):
        raise ValueError(f"{what} is {_cut(table)}, expected {', '.join(kinds)}")
    for key, kind in kinds.items():
        if type(table[key]) is not kind:  # to Python, true is a number
            raise ValueError(f"{key} of {what} is {_cut(table[key])}")


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}…"


def damaged(path: Path, why: str) -> TranscriptError:
    """What to raise of a round's file that is not as it was written."""
    return TranscriptError(
        f"{path}: is damaged ({why}); the other rounds stay readable, leave this one out or record it again"
    )
