"""Checks before the first round: nodes connect, run the server's versions and load their data."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.base.errors import RunError

READY = "query.ready"
TROUBLE = "trouble"
_COMPARED_PACKAGES = ("fedsim-curious", "flwr", "torch")
_TO_CONNECT, _TO_ANSWER = 60.0, 300.0
"""Seconds for the nodes to connect, and for each to answer."""
_MAX_REASON_LENGTH = 300
"""Characters of a reason; that of a lost connection may be a page."""


def host_versions() -> dict[str, str]:
    """Return the versions that have to be the same on all hosts for the same recording."""
    major, minor, _ = platform.python_version_tuple()  # a patch of Python changes no number
    return {"python": f"{major}.{minor}", **{name: _installed_version(name) for name in _COMPARED_PACKAGES}}


@cache
def _installed_version(package: str) -> str:
    return version(package)  # it parses all of the metadata each time


def explain_difference(remote: Mapping[str, object]) -> str | None:
    """Say in which version another host differs from this one; return None if they are the same."""
    for name, here in host_versions().items():
        if remote.get(name) != here:
            return f"it has {name} {remote.get(name)}, the server has {here}; install the same versions on all hosts"
    return None


def summarise_failure(reason: str) -> str:
    """Return the reason of a node's failure in one line, without Flower's text around it.

    >>> summarise_failure("<class 'ValueError'>:<'no data'>")
    'ValueError: no data'
    """
    wrapped = re.fullmatch(r"<class '(?:\w+\.)*(\w+)(?:\(\w+\))?'>:<'(.*)'>", reason, re.DOTALL)
    name, text = (wrapped[1], wrapped[2]) if wrapped else ("", reason)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    if name == "OutOfMemoryError" or any("running low on memory" in line for line in lines):  # Ray's, not torch's
        return "its host ran out of memory, so Ray ended the process; lower federation.actors"
    if name == "RayTaskError":  # a traceback, with process ids that change from run to run
        return lines[-1]
    summary = f"{name}: {lines[0]}" if name else lines[0]
    return summary if len(summary) <= _MAX_REASON_LENGTH else f"{summary[:_MAX_REASON_LENGTH]}…"


def wait_for_nodes(grid: Grid, expected: int) -> list[int]:
    """Return the ids of the nodes once `expected` or more are connected, and no more come."""
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
    """Ask every node whether it can take part."""
    messages = [Message(RecordDict({"simulation": simulation}), dst_node_id=node, message_type=READY) for node in nodes]
    silent = set(nodes)
    for reply in grid.send_and_receive(messages, timeout=_TO_ANSWER):
        silent.discard(reply.metadata.src_node_id)
        if reply.has_error():
            raise RunError(f"a node cannot take part: {summarise_failure(reply.error.reason or 'it failed')}")
        answer = dict(reply.content.config_records.get("node", {}))
        # Versions come first, because a difference may cause the trouble.
        if reason := explain_difference(answer) or str(answer.get(TROUBLE, "")):
            raise RunError(f"a node on {answer.get('host')!r} cannot take part: {reason}")
    if silent:
        raise RunError(f"{len(silent)} of {len(nodes)} nodes did not answer within {_TO_ANSWER:.0f} s; restart them")
