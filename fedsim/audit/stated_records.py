"""Check what [app] states of the records of messages, and of the parts of the model that are in none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from fedsim.base.errors import ConfigError, TranscriptError, did_you_mean
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.training.model_state import sendable_shapes


def check_record_names(transcript: Transcript) -> None:
    """Raise ConfigError where [app] names a record, and all messages have a single one."""
    app = transcript.message_format
    named = app.record or app.broadcast_record
    if not named or app.messages:
        return
    for number in transcript.rounds:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            replies = transcript.header(number).replies
            if any(reply.records for reply in replies):
                return
    key = "record" if app.record else "broadcast_record"
    raise ConfigError(
        f"app.{key}: '{named}' chooses between records of arrays, and each of these messages has a single one, "
        "whatever its name; leave the key out"
    )


def find_private_names(network: nn.Module, parts: Sequence[str], sent: State) -> frozenset[str]:
    """Return the tensors of the model that [app] private says to stay with the clients."""
    tensors = network.state_dict()
    names: set[str] = set()
    for part in parts:
        of_part = {name for name in tensors if name == part or name.startswith(f"{part}.")}
        if not of_part:
            known = [name for name, module in network.named_modules() if name and module.state_dict()]
            raise ConfigError(f"app.private: the model has no part '{part}', {did_you_mean(part, known)}")
        names |= of_part
    if shared := sorted(names & sent.keys()):
        raise ConfigError(
            f"app.private: '{shared[0]}' is in the messages, so the server sees it; name only parts that no client "
            "sends"
        )
    if names and not any(name in tensors for name in sent):
        raise ConfigError(
            "app.private: the arrays of the messages have other names than the model's, so it is unknown which of "
            "them are missing; name them with [app] names"
        )
    return frozenset(names)


def shared_shapes(network: nn.Module, private_names: Collection[str]) -> list[Mapping[str, torch.Size]]:
    """Return the sets of tensors that a federation may send whose clients keep some of them."""
    return [
        {name: shape for name, shape in names.items() if name not in private_names}
        for names in sendable_shapes(network)
    ]
