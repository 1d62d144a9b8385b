"""The serial engine: a Grid whose nodes live in this process. No Ray, no network, no threads."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedsim.base.errors import error_reason
from fedsim.federation.engines.engine import Engine, FederationJob

log = logging.getLogger(__name__)
_SERVER, _FIRST_NODE = 1, 2
_CLIENT_ERROR = 2
"""Code of the errors of clients."""


class InProcessGrid(Grid):
    """Grid that answers messages by calling a ClientApp, one node after the other.

    Args:
        client_app: plays every node.
        nodes: number of nodes; node `k` finds `partition-id` k in its context, and has the id k + 2.
        run_config: settings that every node finds in its context, as `flwr run` passes them.
    """

    def __init__(
        self,
        client_app: ClientApp | ClientAppCallable,
        nodes: int = 1,
        run_config: Mapping[str, bool | float | int | str] | None = None,
    ) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = _SERVER
        self._app = client_app
        self._message_numbers = itertools.count(1)
        self._replies: dict[str, Message] = {}
        self._run = Run.create_empty(run_id=_SERVER)
        self._contexts = {
            node + _FIRST_NODE: Context(
                run_id=_SERVER,
                node_id=node + _FIRST_NODE,
                node_config={"partition-id": node, "num-partitions": nodes},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for node in range(nodes)
        }

    def set_run(self, run: Run) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Run:
        """Run that messages belong to."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message; Flower calls this method deprecated."""
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    @property
    def partitions(self) -> dict[int, int]:
        """Return by the id of each node its `partition-id`."""
        return {node: node - _FIRST_NODE for node in self._contexts}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer each message before returning."""
        ids = []
        for message in list(messages):
            ids.append(self.number_message(message))
            self._replies[ids[-1]] = self.answer_message(message)
        return ids

    def number_message(self, message: Message) -> str:
        """Give a message that is to be answered its id, and return that."""
        message_id = str(next(self._message_numbers))
        message.metadata.__dict__["_message_id"] = message_id
        return message_id

    def answer_message(self, message: Message) -> Message:
        """Return the reply of the node that a message is for; an error reply where that fails.

        Some of Flower's mods, such as `LocalDpMod`, address their errors to the client itself. Over a network no
        server would get these.
        """
        node = message.metadata.dst_node_id
        try:
            reply = self._app(message, self._contexts[node])
            is_misaddressed = reply.metadata.src_node_id != node
        except (Exception, SystemExit) as error:
            return Message(Error(code=_CLIENT_ERROR, reason=error_reason(error)), reply_to=message)
        if not is_misaddressed:
            return reply
        reason = reply.error.reason if reply.has_error() else None
        return Message(Error(_CLIENT_ERROR, reason or "its reply answers no message of the server"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies with these message ids, and forget them."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Answer each message at once, so that `timeout` is not used."""
        del timeout
        return self.pull_messages(self.push_messages(messages))


@dataclass(frozen=True, kw_only=True)
class SerialEngine(Engine):
    """Play all clients in this process, one after the other.

    A client that hangs in Python is interrupted when its time is up. One that is stuck outside of
    Python, or ends the process, is not; other engines survive that.
    """

    in_process: ClassVar[bool] = True

    def check(self, job: FederationJob) -> None:
        """Raise ConfigError where clients are to train on a GPU and there is none."""
        job.experiment.device()

    def carry(self, job: FederationJob) -> None:
        """Run all rounds over one node in this process."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "engine serial, outside of the main thread: a client that hangs cannot be interrupted, whatever "
                "federation.timeout says"
            )
        job.run_rounds(InProcessGrid(job.client_app))
