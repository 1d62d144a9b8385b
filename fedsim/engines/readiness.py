"""Before the first round: are the nodes there, do they run what the server runs, can they load their data?"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedsim.errors import RunError

READY = "query.ready"
TROUBLE = "trouble"
_COMPARED = ("fedsim-curious", "flwr", "torch")
_PATIENCE = 60.0


def versions() -> dict[str, str]:
    """What has to be the same on all hosts for the same seed to give the same recording."""
    return {"python": platform.python_version(), **{name: version(name) for name in _COMPARED}}


def explain_difference(there: Mapping[str, object]) -> str | None:
    """In which version another host differs from this one, or None."""
    for name, here in versions().items():
        if there.get(name) != here:
            return f"it has {name} {there.get(name)}, the server has {here}; install the same versions on all hosts"
    return None


def wait_for_nodes(grid: Grid, expected: int | None, timeout: float = _PATIENCE) -> list[int]:
    """The ids of the nodes, once `expected` have connected, or, without a number, once their number stands still.

    Raises:
        RunError: too few came within `timeout` seconds, at most a minute.
    """
    patience = min(timeout, _PATIENCE)
    deadline = time.monotonic() + patience
    before: list[int] = []
    while time.monotonic() < deadline:
        nodes = sorted(grid.get_node_ids())
        if nodes and (nodes == before if expected is None else len(nodes) >= expected):
            return nodes[:expected]
        before = nodes
        time.sleep(0.05)
    if expected is None:
        raise RunError(f"no node connected within {patience:.0f} s; start the nodes first")
    raise RunError(
        f"{len(before)} of {expected} SuperNodes connected within {patience:.0f} s; "
        "start the others, or lower federation.supernodes"
    )


def check_nodes(grid: Grid, nodes: Sequence[int], simulation: ConfigRecord, timeout: float) -> None:
    """Ask every node whether it can take part.

    Raises:
        RunError: one cannot, for the reason that it gives, or does not answer.
    """
    messages = [Message(RecordDict({"simulation": simulation}), dst_node_id=node, message_type=READY) for node in nodes]
    silent = set(nodes)
    for reply in grid.send_and_receive(messages, timeout=timeout):
        silent.discard(reply.metadata.src_node_id)
        if reply.has_error():
            raise RunError(f"a node cannot take part: {reply.error.reason}")
        answer = dict(reply.content.config_records.get("node", {}))
        why = str(answer[TROUBLE]) if TROUBLE in answer else explain_difference(answer)
        if why:
            raise RunError(f"a node on {answer.get('host')!r} cannot take part: {why}")
    if silent:
        raise RunError(f"{len(silent)} of {len(nodes)} nodes did not answer within {timeout:.0f} s; restart them")
