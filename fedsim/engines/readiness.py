"""Before the first round: are the nodes there, do they run what the server runs, can they load their data?"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.errors import RunError

READY = "query.ready"
TROUBLE = "trouble"
_COMPARED = ("fedsim-curious", "flwr", "torch")
_TO_CONNECT, _TO_ANSWER = 60.0, 300.0
_LONGEST = 300
"""Characters of a reason; that of a lost connection may be a page."""


def versions() -> dict[str, str]:
    """What has to be the same on all hosts for the same seed to give the same recording."""
    major, minor, _ = platform.python_version_tuple()  # base images move on by patches, which change no number
    return {"python": f"{major}.{minor}", **{name: version(name) for name in _COMPARED}}


def explain_difference(there: Mapping[str, object]) -> str | None:
    """In which version another host differs from this one, or None."""
    for name, here in versions().items():
        if there.get(name) != here:
            return f"it has {name} {there.get(name)}, the server has {here}; install the same versions on all hosts"
    return None


def in_a_line(reason: str) -> str:
    """Why a node failed, without the wrapping that Flower's engines put round an exception."""
    wrapped = re.fullmatch(r"<class '(?:\w+\.)*(\w+)(?:\(\w+\))?'>:<'(.*)'>", reason, re.DOTALL)
    name, text = (wrapped[1], wrapped[2]) if wrapped else ("", reason)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    if name == "OutOfMemoryError" or any("running low on memory" in line for line in lines):  # Ray's, none of torch's
        return "its host ran out of memory, so Ray ended the process; lower federation.actors"
    if name == "RayTaskError":  # a traceback, with process ids that change from run to run
        return lines[-1]
    said = f"{name}: {lines[0]}" if name else lines[0]
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}…"


def wait_for_nodes(grid: Grid, expected: int) -> list[int]:
    """The ids of the nodes, once at least `expected` have connected and their number no longer changes.

    Raises:
        RunError: too few came within a minute.
    """
    deadline = time.monotonic() + _TO_CONNECT
    before: list[int] = []
    while time.monotonic() < deadline:
        nodes = sorted(grid.get_node_ids())
        if nodes == before and len(nodes) >= expected:
            return nodes
        before = nodes
        time.sleep(0.05)
    raise RunError(
        f"{len(before)} of {expected} nodes connected within {_TO_CONNECT:.0f} s; start the others, "
        "or, if they are SuperNodes, lower federation.supernodes"
    )


def check_nodes(grid: Grid, nodes: Sequence[int], simulation: ConfigRecord) -> None:
    """Ask every node whether it can take part.

    Raises:
        RunError: one cannot, for the reason that it gives, or does not answer within five minutes.
    """
    messages = [Message(RecordDict({"simulation": simulation}), dst_node_id=node, message_type=READY) for node in nodes]
    silent = set(nodes)
    for reply in grid.send_and_receive(messages, timeout=_TO_ANSWER):
        silent.discard(reply.metadata.src_node_id)
        if reply.has_error():
            raise RunError(f"a node cannot take part: {in_a_line(reply.error.reason or 'it failed')}")
        answer = dict(reply.content.config_records.get("node", {}))
        # Other versions first: they may be why there is trouble.
        if why := explain_difference(answer) or str(answer.get(TROUBLE, "")):
            raise RunError(f"a node on {answer.get('host')!r} cannot take part: {why}")
    if silent:
        raise RunError(f"{len(silent)} of {len(nodes)} nodes did not answer within {_TO_ANSWER:.0f} s; restart them")
