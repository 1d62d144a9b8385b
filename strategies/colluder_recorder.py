"""Record what colluding clients add to secure sums, apart from what the server sees.

Without `recording.colluders` nothing of a single client is written. With it, what the named clients
added is in `RUN/colluders`, for an adversary with whom they collude.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsim.federation.experiment import Experiment
from fedsim.federation.open_run import OpenRun
from fedsim.recording.header import ROUND_FILE
from fedsim.recording.recorder import Recorder, RecordingPlan
from fedsim.recording.wire_format import Update


@dataclass(frozen=True)
class ColluderRecorder:
    """Recorder of what colluding clients add to the sums of a round.

    Attributes:
        clients: their ids.
        recorder: writes the rounds.
        folder: the run, whose manifest names each file.
    """

    clients: frozenset[int]
    recorder: Recorder
    folder: OpenRun
    _updates: list[Update] = field(default_factory=list, repr=False)

    @classmethod
    def from_experiment(cls, experiment: Experiment, folder: OpenRun, *, resume: bool) -> ColluderRecorder | None:
        """Return the recorder that the experiment asks for; None where it asks for none."""
        table = experiment.config.recording
        if table.colluders is None:
            return None
        plan = RecordingPlan(rounds=table.rounds, every=table.every)
        recorder = Recorder(folder.colluders, plan, resume, table.fsync)
        return cls(frozenset(table.colluders), recorder, folder)

    def keep(self, update: Update) -> None:
        """Keep what a colluding client added to a sum until the round is written."""
        self._updates.append(update)

    def write(self, number: int) -> None:
        """Write the round; nothing where it is not recorded, or none of the clients took part.

        Raises:
            RunError: the folder cannot be written.
        """
        updates = list(self._updates)
        self._updates.clear()
        if updates and self.recorder.plan.keeps_round(number):
            self.recorder.write(number, updates)
            self.folder.manifest.note(self.recorder.folder / ROUND_FILE.format(number))
