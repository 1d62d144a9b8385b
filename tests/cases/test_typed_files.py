"""Numbers and texts in files of a run are of the kind and size that messages can hold, or the file is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedsim import Transcript
from fedsim.base.errors import TranscriptError
from fedsim.recording.header import seal_header
from fedsim.recording.messages import RecordedExchange, RecordedMessage, read_messages, write_messages
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.sealed_files import write_sealed_file
from fedsim.recording.wire_format import Update

HUGE = 10**400


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_examples", HUGE), ("num_examples", 1 << 63), ("metrics", {"loss": HUGE}), ("metrics", "many")],
    ids=["N", "N of 64 bits", "metric", "text"],
)
def test_a_header_with_a_number_that_no_message_holds_is_damaged(tmp_path: Path, key: str, value: Any) -> None:
    payload = Payload.from_dense({"w": torch.ones(2)}, "weights")
    Recorder(tmp_path).write(
        1, [Update(round=1, client=0, before={"w": torch.zeros(2)}, payload=payload, num_examples=3)]
    )
    [path] = tmp_path.rglob("round-*.safetensors")
    with safe_open(path, framework="pt") as file:
        fields = json.loads(json.loads(file.metadata()["fedsim"])["header"])
    fields["replies"][0][key] = value
    tensors = load_file(path)
    path.chmod(0o644)
    save_file(tensors, path, metadata={"fedsim": seal_header(json.dumps(fields, sort_keys=True))[0]})
    with pytest.raises(TranscriptError, match=r"is damaged \(") as caught:
        Transcript(tmp_path).header(1)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("key", "value"),
    [("kind", 7), ("round", "one"), ("sent", [{"node": 1}]), ("number", HUGE), ("replies", 3)],
    ids=["kind", "round", "sent", "number", "replies"],
)
def test_messages_of_other_kinds_than_ours_are_damaged(tmp_path: Path, key: str, value: Any) -> None:
    reply = RecordedMessage(node=1, client=1, metrics={"m": {"loss": 0.5}}, arrays={"a": {"w": np.ones(2)}})
    path = write_messages(
        tmp_path,
        RecordedExchange(
            number=1, kind="query", round=1, recorded_as=0, sent=[RecordedMessage(node=1, client=1)], replies=[reply]
        ),
    )
    [found] = read_messages(tmp_path)
    assert found.replies[0].arrays["a"]["w"].tolist() == [1.0, 1.0]
    with safe_open(path, framework="np") as file:
        header = json.loads(json.loads(file.metadata()["fedsim"])["header"])
    write_sealed_file(path, header | {key: value}, {"0": np.ones(2)})
    with pytest.raises(TranscriptError, match="is damaged") as caught:
        list(read_messages(tmp_path))
    assert "\n" not in str(caught.value)
