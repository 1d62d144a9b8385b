"""Recordings as others than the server see them, computed from what the server recorded."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from copy import copy
from dataclasses import replace
from pathlib import Path

from fedsim.base.errors import ConfigError, TranscriptError
from fedsim.recording.adversary_role import AdversaryRole
from fedsim.recording.header import Header
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript


class ComputedTranscript(Transcript, ABC):
    """Recording whose headers and updates are computed from those that a server recorded.

    Args:
        recording: what the server saw.
        role: who sees what is computed.
    """

    def __init__(self, recording: Transcript, role: AdversaryRole) -> None:
        super().__init__(recording.folder, message_format=recording.message_format)
        self._recording = recording
        self._role = role

    def _choose_rounds(self) -> None:
        """Keep the rounds that are seen."""
        reasons = {number: self._find_hindrance(number) for number in self._recording.rounds}
        self._paths = {number: self._recording.round_path(number) for number, reason in reasons.items() if not reason}
        if not self._paths:
            listing = "; ".join(f"round {number}: {reason}" for number, reason in list(reasons.items())[:3])
            raise ConfigError(f"adversary.who: no round of this run shows {self._role} any update ({listing})")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._recording!r}, {self._role!r})"

    def restrict_to(self, rounds: Iterable[int]) -> Transcript:
        """Return a transcript of only the messages of `rounds`, without protocol facts."""
        transcript = copy(self)
        transcript._paths = {number: self._paths[number] for number in sorted(set(rounds))}
        transcript._shows_facts = False
        return transcript

    def copy_to(self, folder: Path) -> None:
        """Write what is seen as a recording of its own into `folder`; see `Transcript.copy_to`."""
        folder.mkdir(parents=True)
        for number in self._paths:
            updates = [self.update(number, client) for client in self.clients(number)]
            header = self.header(number)
            Recorder(folder, resume=True).write(number, updates, header.failures, header.config)

    def header(self, number: int) -> Header:
        """Return the header of a round as it is seen."""
        self._check_is_seen(number)
        if number not in self._headers:
            self._headers[number] = self._make_header(number)
        header = self._headers[number]
        return header if self._shows_facts else replace(header, config={})

    def _recorded_header(self, number: int) -> Header:
        return self.header(number)

    def sha256(self, number: int) -> str:
        """Return a SHA-256 of the round as it is seen."""
        return hashlib.sha256(self.header(number).to_text().encode()).hexdigest()

    def verify(self, number: int) -> None:
        """Check all that the round is computed from."""
        for client in self.clients(number):
            self.recorded_update(number, client)

    def upload_sizes(self, number: int) -> dict[int, int]:
        """Return nothing: what is computed was not sent."""
        self._check_is_seen(number)
        return {}

    def explain_absence(self, number: int) -> str:
        """Say why there is no round `number`: it is recorded, and this adversary sees nothing of it, or it is not."""
        reason = self._find_hindrance(number) if number in self._recording.rounds else "it is not recorded"
        seen = ", ".join(map(str, self._paths))
        return f"shows {self._role} no update ({reason}); rounds that show one: {seen}"

    def _check_is_seen(self, number: int) -> None:
        if number not in self._paths:
            raise TranscriptError(f"round {number}: {self.explain_absence(number)}")

    @abstractmethod
    def _find_hindrance(self, number: int) -> str:
        """Say why a recorded round is not seen; empty where it is."""

    @abstractmethod
    def _make_header(self, number: int) -> Header:
        """Return the header of a round that is seen."""
