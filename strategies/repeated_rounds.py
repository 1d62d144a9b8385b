"""Refuse to sum other clients in a round that is made again after a run was interrupted in it.

A round that is made again gives the same updates and draws the same noise and masks. Where the same
clients answer, whoever saw the first sum sees the same again, and learns nothing more. If others
answer, because clients were too late once, the difference of both sums is what single clients sent,
without the noise that cancels in it. No budget covers that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

from flwr.app import Message

from fedsim.base.errors import RunError, TranscriptError, join_first
from fedsim.federation.build import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_ledger
from fedsim.recording.transcript import Transcript
from strategies.message_content import GROUP_RECORD, MEMBERS_KEY

log = logging.getLogger("fedsim." + __name__)
_MAX_NAMED_CLIENTS = 10


class RepeatedRound:
    """Round that was begun before, and the sums that were seen in it.

    Attributes:
        number: the round.
        sums: the clients of each sum that is recorded of it.
        recorded_clients: those that are recorded at all; None where all are.
    """

    def __init__(
        self, number: int, sums: Collection[frozenset[int]], recorded_clients: Collection[int] | None = None
    ) -> None:
        self.number, self.sums, self.recorded_clients = number, sums, recorded_clients

    @classmethod
    def find(cls, experiment: Experiment, folder: OpenRun, number: int) -> RepeatedRound | None:
        """Return round `number` as it was before the run was interrupted; None where nothing is summed or recorded.

        Where it was begun and nothing is recorded of it, a warning says so.
        """
        config = experiment.config
        if config.secure_aggregation is None and experiment.federation_privacy is None:
            return None
        try:
            replies = Transcript(folder.path, rounds=[number]).header(number).replies
        except TranscriptError:
            if any(int(row["round"]) >= number for row in read_ledger(folder)):
                log.warning(
                    "round %d was begun before the run was interrupted, and no sum is recorded of it; if one was seen "
                    "and other clients answer now, its noise is used twice, which no budget covers",
                    number,
                )
            return None
        if config.secure_aggregation is not None:
            return cls(number, [frozenset(reply.senders) for reply in replies])
        return cls(number, [frozenset(reply.client for reply in replies)], config.recording.clients)

    def check_replies(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield replies, which are sums where they say of whom.

        Raises:
            RunError: clients are summed now that were not summed before with one another.
        """
        single_clients = set[int]()
        for reply in replies:
            if not reply.has_error():
                group = reply.content.config_records.get(GROUP_RECORD)
                if group is None:
                    single_clients.add(reply.metadata.src_node_id)
                else:
                    self._check_sum(frozenset(group[MEMBERS_KEY]))  # type: ignore[arg-type]
            yield reply
        if single_clients:
            self._check_sum(frozenset(single_clients))

    def _check_sum(self, clients: frozenset[int]) -> None:
        if self.recorded_clients is not None:
            clients &= frozenset(self.recorded_clients)
        for earlier in self.sums:
            differing = sorted(earlier ^ clients)
            if earlier & clients and differing:
                raise RunError(
                    f"round {self.number}: clients {join_first(differing, _MAX_NAMED_CLIENTS)} answered either now or "
                    "before the run was interrupted, not both times, and the difference of both sums would show what "
                    "they sent without noise; raise federation.timeout and resume again, or begin another run"
                )
