"""What the report needs of a recording: its size, the headers of its rounds, and what is damaged."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsim.base.errors import FedsimError
from fedsim.federation.open_run import OpenRun
from fedsim.recording.header import Header

_VERIFIED_BYTES = 10**9
"""A larger recording is not read whole for a report."""


@dataclass(kw_only=True)
class Recording:
    """Summary of a transcript.

    Attributes:
        size: bytes of its files.
        round_bytes: bytes of the arrays in each readable round: of updates, or of sums over groups.
        left_out: number of updates by recipe, of which the files hold the hash alone.
        headers: of the readable rounds.
        damaged: by damaged round, the reason.
        hash: SHA-256 of the readable rounds; empty where they are too large to be verified.
        num_values: how many numbers one state has.
    """

    size: int = 0
    round_bytes: list[int] = field(default_factory=list)
    left_out: int = 0
    headers: list[Header] = field(default_factory=list)
    damaged: dict[int, str] = field(default_factory=dict)
    hash: str = ""
    num_values: int = 0

    @property
    def holds_sums(self) -> bool:
        """True where it holds sums over groups, and no update of a single client."""
        return any(reply.members for header in self.headers for reply in header.replies)


def read_recording(folder: OpenRun, notes: list[str]) -> Recording:
    """Read the headers of a transcript, and verify its tensors unless it is larger than 1 GB.

    Args:
        notes: gets a sentence where nothing is recorded.
    """
    recording = Recording()
    try:
        transcript = folder.recording
    except FedsimError as error:
        notes.append(f"Nothing is recorded: {error}.")
        return recording
    recording.size = sum(file.stat().st_size for file in transcript.folder.glob("round-*.safetensors"))
    verify = recording.size <= _VERIFIED_BYTES
    # Read each round by itself, so that damage of one does not hide the others.
    for number in transcript.rounds:
        try:
            if verify:
                transcript.verify(number)
            recording.round_bytes.append(sum(transcript.upload_sizes(number).values()))
            recording.left_out += transcript.count_left_out(number)
            recording.headers.append(transcript.header(number))
        except FedsimError as error:
            recording.damaged[number] = str(error)
    if verify and recording.headers:
        recording.hash = transcript.hash_headers(header.round for header in recording.headers)
        for header in recording.headers:
            if header.replies:
                broadcast = transcript.broadcast(header.round, header.replies[0].client, header.replies[0].message)
                recording.num_values = sum(tensor.numel() for tensor in broadcast.values())
                break
    return recording
