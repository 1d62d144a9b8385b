"""Recorder of what a curious server sees: it writes one safetensors file a round.

Nothing in a recording needs pickle. A file holds the broadcast state once, the arrays of each
client as it sent them, and one header. It is written under a temporary name and renamed, so a
killed run leaves only whole rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from fedsim.base.errors import RunError, TranscriptError
from fedsim.base.files import check_no_link, remove_leftovers, replace_atomically, write_remedy
from fedsim.recording.header import RECORDING_FOLDER, ROUND_FILE
from fedsim.recording.manifest import ManifestFile
from fedsim.recording.round_file import RoundFile
from fedsim.recording.wire_format import Update


@dataclass(frozen=True, kw_only=True)
class RecordingPlan:
    """Selection of the messages to record, so that a recording's size stays bounded.

    Attributes:
        rounds: keep only these rounds; None keeps all.
        clients: keep only these clients; None keeps all.
        every: keep every k-th of those rounds, beginning with the first.
    """

    rounds: Sequence[int] | None = None
    clients: Sequence[int] | None = None
    every: int = 1

    def keeps_round(self, number: int) -> bool:
        """Return whether messages of round `number` are kept."""
        if self.rounds is not None:
            return number in sorted(self.rounds)[:: self.every]
        return (number - 1) % self.every == 0

    def keeps_client(self, client: int) -> bool:
        """Return whether messages of `client` are kept."""
        return self.clients is None or client in self.clients


@dataclass(frozen=True)
class Recorder:
    """Writer that appends rounds to the transcript in `folder`.

    Each round of a folder called `transcript` is noted in the manifest of the run folder around it.

    Args:
        folder: folder of the round files; made when missing.
        plan: selection of the messages to keep.
        resume: accept a folder that already holds rounds; those are kept and may be rewritten.
        durable: wait in `write` until the round is on the disk.
        manifest: of the run around the folder, where that is open already.
        recipe: called before each round; returns what its updates are computed again with, see
            `Header.recipe`, so that each is kept as its hash alone. None keeps updates whole.

    Raises:
        TranscriptError: the folder holds an earlier recording and `resume` is not set.
        RunError: the folder cannot be written.
    """

    folder: Path
    plan: RecordingPlan = field(default_factory=RecordingPlan)
    resume: bool = False
    durable: bool = False
    manifest: ManifestFile | None = field(default=None, repr=False, compare=False)
    recipe: Callable[[], Mapping[str, int | str]] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_no_link(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.folder)
        except OSError as error:
            raise RunError(f"{self.folder}: cannot be written ({error.strerror}); choose another folder") from error
        if not self.resume and any(self.folder.glob("round-*.safetensors")):
            raise TranscriptError(
                f"{self.folder}: already holds a recording; choose another folder, resume it, or remove it"
            )
        run = None if self.resume else self._run_manifest
        if run and run.contents and run.contents.rounds:
            run.start()  # its rounds were removed: this is another recording

    @cached_property
    def _run_manifest(self) -> ManifestFile | None:
        """Return the manifest of the run around the folder; None where it is in no run."""
        if self.folder.name != RECORDING_FOLDER:
            return None
        return self.manifest or ManifestFile(self.folder.parent)

    def note(self, path: Path) -> None:
        """Note the hash of another file of the run in its manifest."""
        if self._run_manifest:
            self._run_manifest.note(path)

    def write(
        self,
        number: int,
        updates: Iterable[Update],
        failures: Mapping[int, str] | None = None,
        config: Mapping[str, object] | None = None,
        *,
        expected: int | None = None,
    ) -> None:
        """Write round `number` in one step: all of it or nothing.

        A sequence is written by ascending client and message. Updates of a generator are written as
        they come, so that memory holds one at a time. Updates whose `before` is the same state
        share its copy on disk.

        Args:
            updates: the updates; those of clients that the plan does not keep are skipped.
            failures: client to reason; read after the last of `updates`.
            config: protocol facts.
            expected: about how many updates will be kept, where `updates` is no sequence.

        Raises:
            RunError: the disk is full, the folder cannot be written, two updates answer one message
                to one client, or a recipe cannot give an update back; earlier rounds stay.
        """
        if not self.plan.keeps_round(number):
            for update in updates:
                del update
            return
        path = self.folder / ROUND_FILE.format(number)
        if isinstance(updates, Sequence):
            updates = sorted(updates, key=lambda update: (update.client, update.message))
            expected = sum(self.plan.keeps_client(update.client) for update in updates)
        try:
            with (
                replace_atomically(path, durable=self.durable) as temporary,
                RoundFile(temporary, number, expected or 1, self.recipe() if self.recipe else None) as file,
            ):
                for update in _iterate_updates(updates, number):
                    if self.plan.keeps_client(update.client):
                        file.add(update)
                file.finish(failures or {}, config or {})
            if self._run_manifest:
                with self._run_manifest.edit(durable=self.durable) as noted:
                    noted.add_round(number, file.sha256)
        except OSError as error:
            raise RunError(
                f"{path}: cannot be written ({error.strerror}); "
                f"{write_remedy(error)} and resume the run, which keeps finished rounds"
            ) from error


def _iterate_updates(updates: Iterable[Update], number: int) -> Iterator[Update]:
    """Yield `updates`; an OSError in it is one of the network, not of the disk."""
    try:
        yield from updates
    except OSError as error:
        raise RunError(f"round {number}: the replies did not arrive ({error}); resume the run") from error
