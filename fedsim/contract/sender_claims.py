"""Check that an attack infers senders from what they sent, and not from the ids under which it was recorded.

The victim's id is the answer where an attack is to find whose records these are, or who sent a message. So the
messages of the victim and of another client change their ids, and what is claimed has to go with the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedsim.base.errors import AttackError
from fedsim.contract.checks import ContractViolation, DoesNotApply
from fedsim.contract.recordings import OTHER, VICTIM, TinyRecording
from fedsim.interfaces.findings import Finding, Inference, Linkage, PropertyPresence
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript

_SWAPPED = {VICTIM: OTHER, OTHER: VICTIM}


def compare_swapped(
    finding: Finding, scene: TinyRecording, folder: Path, attack: Callable[[TinyRecording], Finding]
) -> None:
    """Raise ContractViolation where the scores of two clients stay with their ids when their messages are swapped.

    Args:
        finding: what the attack claims in `scene`.
        folder: of the recording with swapped messages, which is made.
        attack: makes the attack in a scene.

    Raises:
        DoesNotApply: it scores no two clients differently, or nothing of the kind.
    """
    scores = _scores_of_clients(finding)
    if scores is None:
        raise DoesNotApply("what it claims is not about who sent what")
    if isinstance(finding, PropertyPresence) and not scores[OTHER]:
        # Both messages may have the property, and no id is the answer where one client alone is judged.
        raise DoesNotApply("it claims a property of no other client's messages here")
    if scores[VICTIM] == scores[OTHER]:
        raise DoesNotApply("it claims the same of two clients here")
    first = scene.transcript.rounds[0]
    # The victim's first message is the one that others are linked to.
    rounds = [number for number in scene.transcript.rounds if number > first or not isinstance(finding, Linkage)]
    try:
        swapped = _scores_of_clients(attack(_swap_messages(scene, rounds, folder)))
    except AttackError as error:
        raise DoesNotApply(f"with the messages of two clients swapped it says: {error}") from error
    if swapped is not None and all(swapped[client] == scores[client] for client in _SWAPPED):
        raise ContractViolation(
            "what it claims of two clients stays the same when their messages are swapped, so that it follows from "
            "their ids, which are the answer, or from no message; let scores follow from messages, and use "
            "'target.victim' only to find the victim's message"
        )


def _scores_of_clients(finding: Finding) -> Mapping[int, list[list[float]]] | None:
    """Return what is claimed of the victim and of another client; None where nothing is."""
    if isinstance(finding, Inference) and finding.of == "source":
        clients, rows = finding.candidates.tolist(), finding.scores.T.tolist()
    elif isinstance(finding, Linkage | PropertyPresence):
        clients, rows = finding.clients.tolist(), finding.scores[:, None].tolist()
    else:
        return None
    scores: dict[int, list[list[float]]] = {client: [] for client in _SWAPPED}
    for client, row in zip(clients, rows, strict=True):
        if client in scores:
            scores[client].append(row)
    return scores


def _swap_messages(scene: TinyRecording, rounds: list[int], folder: Path) -> TinyRecording:
    """Record the scene again, with the messages of the victim and of another client swapped in these rounds."""
    recorder = Recorder(folder)
    for number in scene.transcript.rounds:
        updates = [scene.transcript.update(number, client) for client in scene.transcript.clients(number)]
        if number in rounds:
            updates = [replace(update, client=_SWAPPED.get(update.client, update.client)) for update in updates]
        recorder.write(number, updates)
    return replace(scene, transcript=Transcript(folder))
