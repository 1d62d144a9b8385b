"""Recordings from files that the server of another framework wrote: w_t, each reply, and N.

Such a server writes a folder for each round, and a file for each state::

    exchange/
      round-1/
        broadcast.npz      w_t, as the server sent it to all clients
        broadcast-7.npz    w_t, as it sent it to client 7, where that differs
        client-7.npz       what client 7 answered: its weights, a delta or a gradient
        client-7.json      {"num_examples": 50}, and other numbers that client 7 told in clear;
                           with "members": [7, 8, 9], client-7.npz is the mean over these clients,
                           weighted by N, which their secure sum gives
        config.json        {"local_epochs": 1}, what the server told all clients; may be missing

A state is a file of NumPy (`.npz`), safetensors, PyTorch (`.pt`, `.pth`) or Flax (`.msgpack`).
Nothing in it is unpickled or imported. Arrays within arrays, as in Flax, get names with dots:
`Dense_0.kernel`. What replies mean, and which model they are of, is said by the attack file, as for
any recording that was made elsewhere.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import ConfigError, TranscriptError, TrustError, first_line
from fedsim.base.files import check_readable, parse_json
from fedsim.plugins.packed_arrays import ForeignObjectError, read_arrays
from fedsim.recording.exchange_checks import MeanReply, ReplyKinds, check_reply
from fedsim.recording.header import (
    MAX_CLIENT_ID,
    MAX_NUM_EXAMPLES,
    RECORDABLE,
    RECORDING_FOLDER,
    is_number,
)
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update

FORMATS = (".npz", ".safetensors", ".pt", ".pth", ".msgpack")
"""Endings of the files that hold a state."""
NAMES_KEY = "client-names"
"""Key in the config of a round's header of the names of clients whose names are no numbers."""
_ROUND_FOLDER = re.compile(r"round-0*([1-9][0-9]*)")
_BROADCAST = re.compile(r"broadcast(?:-(.+))?")
_REPLY = re.compile(r"client-(.+)")
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class _ReplyFacts:
    """What a client told beside its arrays, and the names of the clients whose sum they are."""

    num_examples: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    members: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _RoundFiles:
    """Files of one round.

    Attributes:
        broadcasts: client to w_t that it alone was sent; "" is every other client.
        replies: client to its answer.
        facts: client to what its JSON file says.
        config: what the server told all clients.
    """

    number: int
    folder: Path
    broadcasts: dict[str, Path] = field(default_factory=dict)
    replies: dict[str, Path] = field(default_factory=dict)
    facts: dict[str, _ReplyFacts] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)


def import_exchange(source: Path | str, run: Path | str) -> Transcript:
    """Record what the server of another framework wrote, see this module, in a new run folder.

    Clients whose names are no numbers are numbered in the order of their names, from 0 or after the
    largest name that is one; the headers of the rounds hold the names. A sum over clients is
    recorded under the lowest id of its members.

    Args:
        source: folder with a folder for each round.
        run: the run folder to make.

    Raises:
        ConfigError: `source` has no round, or something in it is not of the form above.
        TranscriptError: a file cannot be read, or holds something other than arrays.
        TrustError: a file is a pickle; nothing in it was run.
        RunError: `run` cannot be written.
    """
    source, run = Path(source), Path(run)
    rounds = _find_rounds(source)
    id_of = _number_clients(rounds)
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run}: is not a folder; name a run folder that is to be made")
    if run.exists() and any(run.iterdir()):
        raise ConfigError(f"{run}: is not empty; name a run folder that is to be made")
    names = {} if all(name.isdecimal() for name in id_of) else {number: name for name, number in id_of.items()}
    try:
        recorder, kinds = Recorder(run / RECORDING_FOLDER), ReplyKinds()
        for files in rounds:
            config = {**files.config, **({NAMES_KEY: json.dumps(names)} if names else {})}
            recorder.write(files.number, _read_updates(files, id_of, kinds), config=config, expected=len(files.replies))
    except BaseException:
        shutil.rmtree(run, ignore_errors=True)  # half a recording would be taken for a whole one
        raise
    return Transcript(recorder.folder)


def _find_rounds(source: Path) -> list[_RoundFiles]:
    """Return the files of each round, by round; nothing in a round's folder is passed over."""
    if not source.is_dir():
        raise ConfigError(f"{source}: is not a folder; name the one that holds round-1, round-2 and so on")
    rounds = dict[int, _RoundFiles]()
    for folder in sorted(source.iterdir()):
        match = _ROUND_FOLDER.fullmatch(folder.name)
        if not folder.is_dir():
            continue
        if match is None:
            if folder.name.lower().startswith("round"):  # round-0 would be missing in silence
                raise ConfigError(
                    f"{folder}: is not a round, which are round-1, round-2 and so on, counted from 1; rename the "
                    "rounds, or remove it"
                )
            continue
        number = int(match[1])
        if number in rounds:
            raise ConfigError(f"{folder}: is round {number}, as {rounds[number].folder.name} is; remove one of them")
        rounds[number] = _sort_files(number, folder)
    if not rounds:
        raise ConfigError(f"{source}: holds no folder round-1, round-2 and so on, in which states are")
    return [rounds[number] for number in sorted(rounds)]


def _sort_files(number: int, folder: Path) -> _RoundFiles:
    config = folder / _CONFIG
    files = _RoundFiles(number=number, folder=folder, config=_read_config(config) if config.exists() else {})
    for path in sorted(folder.iterdir()):
        if path == config:
            continue
        broadcast, reply = _BROADCAST.fullmatch(path.stem), _REPLY.fullmatch(path.stem)
        if path.suffix == ".json" and reply:
            files.facts[reply[1]] = _read_facts(path)
            continue
        if path.suffix in FORMATS and broadcast:
            states, client = files.broadcasts, broadcast[1] or ""
        elif path.suffix in FORMATS and reply:
            states, client = files.replies, reply[1]
        else:
            raise ConfigError(
                f"{path}: is not a file of an exchange, which are broadcast, broadcast-CLIENT and client-CLIENT, each "
                f"{', '.join(FORMATS)}, client-CLIENT.json and {_CONFIG}; rename or remove it"
            )
        if client in states:
            raise ConfigError(f"{path}: says the same as {states[client].name}; remove one of them")
        states[client] = path
    # Each reply needs a broadcast, and nothing else may name a client without a reply.
    if not files.replies:
        raise ConfigError(f"{folder}: holds no reply, a file client-CLIENT.npz; remove it, or add what clients sent")
    for client in files.replies:
        if client not in files.broadcasts and "" not in files.broadcasts:
            raise ConfigError(
                f"{folder}: holds no broadcast.npz, so it is not known what client {client} was sent; write w_t there"
            )
    for client in (*files.facts, *files.broadcasts):
        if client and client not in files.replies:
            raise ConfigError(
                f"{folder}: holds a broadcast or facts of client {client}, which sent nothing; remove them, or add "
                f"client-{client}.npz"
            )
    return files


def _number_clients(rounds: Sequence[_RoundFiles]) -> dict[str, int]:
    """Return the id of each client by its name: the name itself where it is a number, else the next number."""
    names = set[str]()
    for files in rounds:
        for name in files.replies:
            # A sum may have any name; clients are its members.
            facts = files.facts.get(name)
            names.update(facts.members if facts and facts.members else (name,))
    ids = {name: int(name) for name in names if name.isdecimal()}
    if len(set(ids.values())) < len(ids):
        raise ConfigError("two names of clients are the same number (1 and 01); write each in one way")
    # A name that is a number stays, or truth.2 would be of whoever comes third.
    others = sorted(names - ids.keys(), key=_natural_order)
    ids |= {name: number for number, name in enumerate(others, start=max(ids.values(), default=-1) + 1)}
    largest = max(ids.values())
    if largest > MAX_CLIENT_ID:
        raise ConfigError(f"client-{largest}: is above {MAX_CLIENT_ID}, the largest id of a client; give it another")
    return ids


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that puts site-2 before site-10.

    >>> sorted(["site-10", "site-2"], key=_natural_order)
    ['site-2', 'site-10']
    """
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _read_updates(files: _RoundFiles, id_of: Mapping[str, int], kinds: ReplyKinds) -> Iterator[Update]:
    """Yield the updates of a round by client; w_t of all is read once."""
    to_all = _read_state(files.broadcasts[""]) if "" in files.broadcasts else {}
    mean = MeanReply()
    members_of = dict[str, tuple[int, ...]]()
    for name in files.replies:
        facts = files.facts.get(name, _ReplyFacts())
        members_of[name] = tuple(sorted(id_of[member] for member in facts.members))
    _check_senders(files.folder, {name: members_of[name] or (id_of[name],) for name in files.replies})
    for name in sorted(files.replies, key=lambda name: (*members_of[name], id_of.get(name, 0))[0]):
        facts = files.facts.get(name, _ReplyFacts())
        before = _read_state(files.broadcasts[name]) if name in files.broadcasts else to_all
        sent = _read_state(files.replies[name])
        check_reply(before, sent, len(members_of[name]), files.replies[name])
        if name not in files.broadcasts:
            mean.add(before, sent, facts.num_examples)
        kinds.note(before, sent, files.replies[name])
        yield Update(
            round=files.number,
            client=(members_of[name] or (id_of[name],))[0],
            before=before,
            payload=Payload.from_dense(sent, "weights"),
            num_examples=facts.num_examples,
            metrics=facts.metrics,
            members=members_of[name] if len(members_of[name]) > 1 else (),  # a sum over one client is its own
        )
    mean.warn_of_aggregate(to_all, files.folder)


def _check_senders(folder: Path, senders: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ConfigError where two replies of a round would be recorded under the same client."""
    name_of = dict[int, str]()
    for name, clients in senders.items():
        if clients[0] in name_of:
            raise ConfigError(
                f"{folder}: client-{name_of[clients[0]]} and client-{name} both are or begin with client {clients[0]}, "
                "and a recording keeps one message of a client in a round; import each into a recording of its own"
            )
        name_of[clients[0]] = name


def _read_config(path: Path) -> dict[str, object]:
    config = _read_object(path)
    for key, value in config.items():
        if not isinstance(value, str | int | float | bool):
            raise ConfigError(f"{path}: {key} is {_type_of(value)}, expected a number, a text, true or false")
    return config


def _read_facts(path: Path) -> _ReplyFacts:
    facts = _read_object(path)
    count, members = facts.pop("num_examples", None), facts.pop("members", [])
    if count is not None and (
        not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_NUM_EXAMPLES
    ):
        raise ConfigError(
            f"{path}: num_examples is {count!r}, expected a whole number from 1 on; leave it out where it is not known"
        )
    if not isinstance(members, list):
        raise ConfigError(f"{path}: members is {_type_of(members)}, expected the list of clients whose sum it is")
    names = [str(member) for member in members]
    if not all(isinstance(member, int | str) and not isinstance(member, bool) for member in members):
        raise ConfigError(f"{path}: members is {members}, expected names or whole numbers of clients")
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: members names a client twice; name each client of the sum once")
    for key, value in facts.items():
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{path}: {key} is {value!r}, expected a finite number")
    return _ReplyFacts(
        num_examples=count or 0,
        metrics={key: float(value) for key, value in facts.items()},
        members=tuple(names),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        check_readable(path)
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise TranscriptError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no JSON ({first_line(error)})") from error
    if not isinstance(content, dict):
        raise ConfigError(f'{path}: holds {_type_of(content)}, expected an object, such as {{"num_examples": 50}}')
    return content


def _type_of(value: object) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _read_state(path: Path) -> State:
    """Return the tensors in a file by name."""
    try:
        check_readable(path)
        content = read_arrays(path.read_bytes(), trust=False)
    except OSError as error:
        raise TranscriptError(f"{path}: cannot be read ({error.strerror})") from error
    except EOFError as error:
        raise TranscriptError(f"{path}: is empty; write the file again") from error
    except TrustError as error:
        raise TrustError(
            f"{path}: is a pickle, or of a format that is not known; nothing in it was run. "
            "Write arrays with numpy.savez or safetensors"
        ) from error
    except ForeignObjectError as error:
        raise TrustError(
            f"{path}: is refused, as {error}; nothing in it was run. Write arrays of numbers with numpy.savez or "
            "safetensors"
        ) from error
    except Exception as error:  # bytes of unknown origin may raise anything
        raise TranscriptError(f"{path}: holds no arrays that can be read ({first_line(error)})") from error
    state = dict[str, Tensor]()
    for name, tensor in _flatten("", content, path):
        if name in state:
            raise TranscriptError(f"{path}: holds two arrays called '{name}', one within another; rename one of them")
        state[name] = tensor
    if not state:
        raise TranscriptError(f"{path}: holds no array; write w_t, or what the client sent")
    return state


def _flatten(prefix: str, content: object, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested dicts and lists, named by the keys on the way, with dots between."""
    if isinstance(content, Mapping):
        children = [(str(name), value) for name, value in content.items()]
    elif isinstance(content, list | tuple):
        children = [(str(index), value) for index, value in enumerate(content)]
    else:
        yield prefix or "0", _to_tensor(content, f"{path}: {prefix or 'its content'}")
        return
    for name, value in children:
        yield from _flatten(f"{prefix}.{name}" if prefix else name, value, path)


def _to_tensor(value: object, what: str) -> Tensor:
    """Return an array as a tensor in the byte order of this machine."""
    if isinstance(value, Tensor):
        tensor = value.detach()
    elif isinstance(value, np.ndarray | np.generic | int | float) and not isinstance(value, bool):
        array = np.array(value, order="C")
        try:
            tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        except TypeError as error:
            raise TranscriptError(f"{what} is of {array.dtype}, which is not an array of numbers") from error
    else:
        raise TranscriptError(f"{what} is {_type_of(value)}, no array; write nothing but arrays into this file")
    if tensor.layout is not torch.strided or tensor.dtype not in RECORDABLE:
        raise TranscriptError(f"{what} is of {tensor.dtype}, {tensor.layout}, which cannot be recorded; write it dense")
    return tensor.contiguous()
