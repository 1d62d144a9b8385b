"""Refuse to sum other clients in a round that is made again after a run was interrupted in it.

A round that is made again gives the same updates and draws the same noise and masks. Where the same
clients answer, whoever saw the first sum sees the same again, and learns nothing more. If others
answer, because clients were too late once, the difference of both sums is what single clients sent,
without the noise that cancels in it. No budget covers that. Masks and shares of noise are those of
the clients of a sum, so that sums without a common client tell nothing more. The noise of a trusted
server is that of its round, so that there any other client is one too many.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator

from flwr.app import Message

from fedsim.base.errors import RunError, TranscriptError, join_first
from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import read_ledger
from fedsim.recording.recorder import RecordingPlan
from fedsim.recording.transcript import Transcript
from strategies.message_content import GROUP_RECORD, MEMBERS_KEY

log = logging.getLogger("fedsim." + __name__)
_MAX_NAMED_CLIENTS = 10


class RepeatedRound:
    """Round that was begun before, and the sums that were seen in it.

    Attributes:
        number: the round.
        sums: the clients of each sum that is recorded of it, or those that are recorded.
        failed_clients: those that did not answer, where a trusted server adds the noise of the round
            to one sum of all; None where clients add it, or masks.
    """

    def __init__(
        self, number: int, sums: Collection[frozenset[int]], failed_clients: Collection[int] | None = None
    ) -> None:
        self.number, self.sums, self.failed_clients = number, sums, failed_clients

    @classmethod
    def find_all(cls, experiment: Experiment, folder: OpenRun, first: int) -> dict[int, RepeatedRound]:
        """Return by number the rounds from `first` on that are recorded; none where nothing is summed.

        Without its checkpoint a run begins at round 1 again, and then these are several. Where round
        `first` was begun, or may have been, and nothing is recorded of it, a warning says so.
        """
        config = experiment.config
        if config.secure_aggregation is None and experiment.federation_privacy is None:
            return {}
        try:
            transcript = Transcript(folder.path)
            recorded = [number for number in transcript.rounds if number >= first]
        except TranscriptError:
            recorded = []
        rounds: dict[int, RepeatedRound] = {}
        for number in recorded:
            try:
                header = transcript.header(number)
            except TranscriptError:  # a write that did not reach the disk
                _warn_of_unrecorded_round(experiment, folder, number, is_damaged=True)
                continue
            sums = [frozenset(reply.senders) for reply in header.replies]
            failed_clients = header.failures.keys() if config.secure_aggregation is None else None
            rounds[number] = cls(number, sums, failed_clients)
        if first not in recorded:
            _warn_of_unrecorded_round(experiment, folder, first, is_damaged=False)
        return rounds

    def check_replies(self, replies: Iterable[Message]) -> Iterator[Message]:
        """Yield replies, which are sums where they say of whom.

        Raises:
            RunError: clients are summed now that were not summed before with one another.
        """
        asked_clients, senders = set[int](), set[int]()
        for reply in replies:
            asked_clients.add(reply.metadata.src_node_id)
            if not reply.has_error():
                senders.add(reply.metadata.src_node_id)
                group = reply.content.config_records.get(GROUP_RECORD)
                if group is not None:
                    self._check_group(frozenset(group[MEMBERS_KEY]))  # type: ignore[arg-type]
            yield reply
        if self.failed_clients is not None:
            # A recording of some clients names all that failed, so that the others answered before.
            earlier_senders = asked_clients.difference(self.failed_clients).union(*self.sums)
            self._refuse(earlier_senders ^ senders)

    def _check_group(self, clients: frozenset[int]) -> None:
        for earlier in self.sums:
            if earlier & clients:
                self._refuse(earlier ^ clients)

    def _refuse(self, differing: Collection[int]) -> None:
        """Raise RunError where any clients are in one of two sums with the same noise alone."""
        if differing:
            raise RunError(
                f"round {self.number}: clients {join_first(sorted(differing), _MAX_NAMED_CLIENTS)} answered either now "
                "or before the run was interrupted, not both times, and the difference of both sums would show what "
                "they sent without noise; raise federation.timeout and resume again, or begin another run"
            )


def _warn_of_unrecorded_round(experiment: Experiment, folder: OpenRun, number: int, *, is_damaged: bool) -> None:
    ledger, recording = read_ledger(folder), experiment.config.recording
    plan = RecordingPlan(rounds=recording.rounds, every=recording.every)
    if any(int(row["round"]) >= number for row in ledger):
        log.warning(
            "round %d was begun before the run was interrupted, and no sum is recorded of it; if one was seen "
            "and other clients answer now, its noise is used twice, which no budget covers",
            number,
        )
    elif not ledger and (is_damaged or not plan.keeps_round(number)):
        log.warning(
            "round %d has no recording that can be read, so it is unknown whether a sum of it was seen before the "
            "run was interrupted; if so, and other clients answer now, the difference of both reveals what single "
            "clients sent",
            number,
        )
