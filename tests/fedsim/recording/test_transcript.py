"""The recording: what is written is what is read, damage is named, nothing is ever unpickled."""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import os
import pickle
import subprocess
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import fedsim.recording.round_file
import fedsim.recording.transcript
from fedsim.base.errors import FedsimError, RunError, TranscriptError, one_line
from fedsim.recording.header import Header, hash_state
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder, RecordingPlan
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from tests.support.recordings import build_update

PATH = "round-{:06d}.safetensors"


def a_state(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(3, 2, generator=rng),
        "layer.bias": torch.randn(3, generator=rng),
        "scale": torch.randn((), generator=rng, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
    }


def an_update(number: int, client: int, before: dict[str, Tensor] | None = None) -> Update:
    return Update(
        round=number,
        client=client,
        before=a_state(number) if before is None else before,
        payload=Payload.from_dense(a_state(1000 * number + client), "weights"),
        num_examples=10 + client,
        metrics={"train_loss": 0.5 * client},
    )


def record(folder: Path, rounds: int = 3, clients: int = 3, **kwargs: Any) -> Path:
    recorder = Recorder(folder, **kwargs)
    for number in range(1, rounds + 1):
        before = a_state(number)
        updates = [an_update(number, client, before) for client in range(clients)]
        recorder.write(number, updates, {7: "straggler"}, {"batch-size": 8, "optimizer": "sgd"})
    return folder


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return hash_state(left) == hash_state(right) and all(torch.equal(left[n], right[n]) for n in left)


def content(folder: Path) -> list[tuple[Any, ...]]:
    return [
        (u.round, u.client, u.num_examples, dict(u.metrics), dict(u.config), hash_state(u.before), hash_state(u.after))
        for u in Transcript(folder).updates()
    ]


# What is written is what is read.

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["a.b.weight", "0", "client/1/0000/x", "broadcast/0", "__metadata__", " ", "ä.ß"]
)
dtypes = st.sampled_from(
    [
        *(torch.float32, torch.float64, torch.float16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    ]
)
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def states(draw: st.DrawFn) -> dict[str, Tensor]:
    def tensor(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
        if dtype.is_floating_point and values.numel() > 2:
            values.view(-1)[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
        return values.abs().to(dtype) if str(dtype).startswith("torch.uint") else values.to(dtype)

    keys = draw(st.lists(names, max_size=5, unique=True))
    return {key: tensor(draw(shapes), draw(dtypes), draw(st.integers(0, 99))) for key in keys}


@settings(max_examples=25)
@given(
    before=states(),
    after=st.lists(states(), min_size=1, max_size=3),
    metrics=st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False), max_size=2),
    count=st.integers(0, 2**62),
)
def test_reading_gives_back_every_name_order_type_shape_and_byte(
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[str, Tensor],
    after: list[dict[str, Tensor]],
    metrics: dict[str, float],
    count: int,
) -> None:
    folder = tmp_path_factory.mktemp("identity")
    sent = [
        Update(
            round=4,
            client=client,
            before=before,
            payload=Payload.from_dense(state, "weights"),
            num_examples=count,
            metrics=metrics,
        )
        for client, state in enumerate(after)
    ]
    Recorder(folder).write(4, sent)
    transcript = Transcript(folder)
    assert transcript.rounds == [4]
    assert transcript.clients(4) == list(range(len(after)))
    for update in sent:
        read = transcript.recorded_update(4, update.client)
        assert list(read.before) == list(before)
        assert list(read.after) == list(update.after)
        for read_state, sent_state in ((read.before, before), (read.after, update.after)):
            for name, tensor in sent_state.items():
                assert read_state[name].dtype == tensor.dtype
                assert read_state[name].shape == tensor.shape
                assert read_state[name].numpy().tobytes() == tensor.numpy().tobytes()
        assert (read.num_examples, dict(read.metrics)) == (count, metrics)


def test_views_and_tensors_that_need_gradients_are_recorded_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tied = torch.nn.Parameter(torch.randn(2, 2))
    after = {"transposed": base.T, "strided": base[:, ::2], "tied.a": tied, "tied.b": tied}
    Recorder(tmp_path).write(1, [build_update({}, after)])
    read = Transcript(tmp_path).recorded_update(1, 0).after
    assert all(torch.equal(read[name], tensor.detach()) for name, tensor in after.items())


@pytest.mark.thorough
def test_the_order_of_names_survives_beyond_ten_thousand_tensors(tmp_path: Path) -> None:
    after = {f"p{i}": torch.tensor(float(i)) for i in range(10_003)}
    Recorder(tmp_path).write(1, [build_update({}, after)])
    assert list(Transcript(tmp_path).recorded_update(1, 0).after) == list(after)


def test_clients_one_and_ten_are_told_apart(tmp_path: Path) -> None:
    before = a_state()
    updates = [an_update(1, client, before) for client in (10, 1, 100)]
    Recorder(tmp_path).write(1, updates)
    for update in updates:
        assert same(dict(Transcript(tmp_path).recorded_update(1, update.client).after), dict(update.after))


def test_one_broadcast_is_stored_once_and_different_ones_each(tmp_path: Path) -> None:
    shared = a_state(5)
    equal_copy = {name: tensor.clone() for name, tensor in shared.items()}
    other = a_state(6)
    updates = [
        an_update(1, 0, shared),
        an_update(1, 1, equal_copy),
        an_update(1, 2, other),
        an_update(1, 3, shared),
    ]
    Recorder(tmp_path).write(1, updates)
    transcript = Transcript(tmp_path)
    assert len(transcript.header(1).broadcasts) == 2
    with safe_open(tmp_path / PATH.format(1), framework="pt") as file:
        assert len([key for key in file.keys() if key.startswith("broadcast/")]) == 2 * len(shared)  # noqa: SIM118
    for update in updates:
        assert same(dict(transcript.recorded_update(1, update.client).before), dict(update.before))


def test_a_round_in_which_nobody_answered_says_why(tmp_path: Path) -> None:
    Recorder(tmp_path).write(1, [], {3: "straggler: did not return in round 1"})
    transcript = Transcript(tmp_path)
    assert transcript.clients(1) == []
    with pytest.raises(TranscriptError, match=r"round 1: client 3 failed there \(straggler"):
        transcript.recorded_update(1, 3)


def test_an_absent_client_is_named_with_those_present(tmp_path: Path) -> None:
    record(tmp_path)
    with pytest.raises(TranscriptError, match=r"client 9 is not recorded; recorded: \[0, 1, 2\]"):
        Transcript(tmp_path).recorded_update(1, 9)


def test_two_updates_of_one_client_in_a_round_are_refused_not_mixed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"round 1.*client 0"):
        Recorder(tmp_path).write(1, [an_update(1, 0), an_update(1, 0)])
    assert not list(tmp_path.iterdir())


def test_same_content_gives_the_same_bytes_whatever_the_order_of_arrival(tmp_path: Path) -> None:
    def write(folder: Path, order: list[int], salt: bool) -> bytes:
        before = a_state()
        if salt:
            before = {name: tensor.clone() for name, tensor in before.items()}
        updates = [an_update(1, client, before) for client in order]
        failures = {9: "x", 8: "y"} if salt else {8: "y", 9: "x"}
        Recorder(folder).write(1, updates, failures, {"b": 1, "a": 2.5} if salt else {"a": 2.5, "b": 1})
        return (folder / PATH.format(1)).read_bytes()

    assert write(tmp_path / "a", [0, 1, 2], False) == write(tmp_path / "b", [2, 0, 1], True)


def test_one_hash_stands_for_everything_recorded(tmp_path: Path) -> None:
    first, again = record(tmp_path / "a"), record(tmp_path / "b")
    assert Transcript(first).hash() == Transcript(again).hash()
    changed = Recorder(tmp_path / "c")
    for update in Transcript(first).updates():
        after = {name: tensor.clone() for name, tensor in update.after.items()}
        if (update.round, update.client) == (2, 1):
            after["layer.bias"][0] += 1e-6
        changed.write(update.round, [replace(update, payload=Payload.from_dense(after, "weights"))])
    assert Transcript(tmp_path / "c").hash() != Transcript(first).hash()


def test_a_run_folder_is_read_as_the_recording_in_it(tmp_path: Path) -> None:
    record(tmp_path / "run" / "transcript")
    assert Transcript(tmp_path / "run").rounds == [1, 2, 3]


def test_rounds_can_be_narrowed_but_not_invented(tmp_path: Path) -> None:
    record(tmp_path)
    transcript = Transcript(tmp_path)
    assert transcript.restrict_to([3, 1]).rounds == [1, 3]
    assert [u.round for u in transcript.restrict_to([2]).updates()] == [2, 2, 2]
    with pytest.raises(TranscriptError, match="round 4 is not recorded; recorded: 1, 2, 3"):
        transcript.restrict_to([4])


def test_no_recording_is_one_sentence(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(TranscriptError, match="holds no recording"):
            Transcript(folder)


def test_files_of_others_in_the_folder_do_not_disturb(tmp_path: Path) -> None:
    record(tmp_path)
    for name in ("round-000001 (copy).safetensors", "round-x.safetensors", "notes.txt", "round-1.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    assert Transcript(tmp_path).rounds == [1, 2, 3]
    assert len(content(tmp_path)) == 9


# Damage is named, and stays where it is.


@pytest.fixture
def damaged(tmp_path: Path) -> Iterator[Path]:
    """A recording of three rounds; the test damages round 2, then all others must still be readable."""
    record(tmp_path / "t")
    yield tmp_path / "t" / PATH.format(2)
    transcript = Transcript(tmp_path / "t")
    for number in {1, 3}:
        for client in transcript.clients(number):
            assert same(dict(transcript.recorded_update(number, client).after), dict(an_update(number, client).after))


def read_round_two(path: Path) -> None:
    transcript = Transcript(path.parent, [2])
    for client in transcript.clients(2):
        transcript.recorded_update(2, client)


def assert_one_sentence_about(path: Path, error: FedsimError) -> None:
    assert str(path) in str(error)
    assert "damaged" in str(error)
    assert "the other rounds stay readable" in str(error)
    assert "\n" not in str(error)
    assert error.exit_code == 1


def test_sizes_are_those_of_what_was_sent_in_every_form(tmp_path: Path) -> None:
    before = {"w": torch.zeros(40), "b": torch.zeros(3, dtype=torch.float64)}
    moved = {"w": torch.arange(40.0).clamp_min(37) - 37, "b": torch.ones(3, dtype=torch.float64)}
    integers = {name: torch.ones(tensor.shape, dtype=torch.int8) for name, tensor in before.items()}
    sent = (
        Payload.from_dense(before, "weights"),
        Payload.from_sparse(moved),
        Payload.from_integers(integers, dict.fromkeys(before, torch.tensor(0.5))),
    )
    updates = [Update(round=1, client=c, before=before, payload=p, num_examples=2) for c, p in enumerate(sent)]
    Recorder(tmp_path).write(1, updates)
    sizes = Transcript(tmp_path).upload_sizes(1)
    assert sizes == {client: payload.nbytes for client, payload in enumerate(sent)}
    assert list(sizes.values()) == [184, 52, 51]


def test_sizes_of_a_damaged_file_are_not_told(damaged: Path) -> None:
    transcript = Transcript(damaged.parent)
    transcript.header(2)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(TranscriptError) as caught:
        transcript.upload_sizes(2)
    assert_one_sentence_about(damaged, caught.value)


def test_a_flipped_byte_in_a_tensor_is_found(damaged: Path) -> None:
    raw = bytearray(damaged.read_bytes())
    raw[-3] ^= 1
    damaged.write_bytes(raw)
    with pytest.raises(TranscriptError, match="not those that were recorded") as caught:
        read_round_two(damaged)
    assert_one_sentence_about(damaged, caught.value)


@pytest.mark.parametrize("keep", [0, 4, 7, 8, 100, -1])
def test_a_truncated_file_is_found(damaged: Path, keep: int) -> None:
    damaged.write_bytes(damaged.read_bytes()[:keep])
    with pytest.raises(TranscriptError) as caught:
        read_round_two(damaged)
    assert_one_sentence_about(damaged, caught.value)


def test_an_altered_header_is_found(damaged: Path) -> None:
    raw = damaged.read_bytes()
    assert raw.count(b"num_examples") == 3
    damaged.write_bytes(raw.replace(b'num_examples\\\\\\": 11', b'num_examples\\\\\\": 12'))
    assert damaged.read_bytes() != raw
    with pytest.raises(TranscriptError, match="its header was altered") as caught:
        read_round_two(damaged)
    assert_one_sentence_about(damaged, caught.value)


def test_a_file_deleted_under_the_reader_is_found(damaged: Path) -> None:
    transcript = Transcript(damaged.parent)
    assert transcript.clients(2) == [0, 1, 2]
    damaged.unlink()
    with pytest.raises(TranscriptError) as caught:
        transcript.recorded_update(2, 0)
    assert_one_sentence_about(damaged, caught.value)
    with pytest.raises(TranscriptError, match="round 2 is not recorded"):
        Transcript(damaged.parent, [2])


def test_a_round_under_the_name_of_another_is_found(damaged: Path) -> None:
    damaged.write_bytes((damaged.parent / PATH.format(3)).read_bytes())
    with pytest.raises(TranscriptError, match="round 3") as caught:
        read_round_two(damaged)
    assert_one_sentence_about(damaged, caught.value)


@pytest.mark.parametrize(
    "seal",
    [None, "", "no json", "5", "[]", "{}", '{"header": 5, "sha256": ""}', '{"header": "5", "sha256": 7}'],
)
def test_a_strangers_safetensors_file_is_refused(damaged: Path, seal: str | None) -> None:
    save_file({"weight": torch.zeros(2)}, damaged, metadata=None if seal is None else {"fedsim": seal})
    with pytest.raises(TranscriptError) as caught:
        read_round_two(damaged)
    assert_one_sentence_about(damaged, caught.value)


@pytest.mark.parametrize(
    "change", [{"client": "../../../elsewhere"}, {"num_examples": 2.5}, {"broadcast": 1}, {"broadcast": -1}]
)
def test_a_strangers_header_names_numbers_where_numbers_belong(tmp_path: Path, change: dict[str, Any]) -> None:
    """It is sealed as it should be, but client ids become names of files."""
    path = record(tmp_path, rounds=1) / PATH.format(1)
    with safe_open(path, framework="pt") as file:
        header = json.loads(json.loads(file.metadata()["fedsim"])["header"])
    header["replies"][0] |= change
    text = json.dumps(header)
    sealed = {"header": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    save_file({"w": torch.zeros(1)}, path, metadata={"fedsim": json.dumps(sealed)})
    with pytest.raises(TranscriptError, match=r"client, N and broadcast are|is .*elsewhere|is 2.5"):
        Transcript(path.parent).clients(1)


def test_a_recording_of_a_later_format_is_told_apart_from_damage(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(fedsim.recording.round_file, "FORMAT_VERSION", 4)
    Recorder(tmp_path).write(1, [replace(an_update(1, 0), payload=Payload.from_dense(a_state(), "gradient"))])
    monkeypatch.undo()
    with pytest.raises(TranscriptError, match="has format 4, this fedsim reads format 3; record it again"):
        Transcript(tmp_path).header(1)


@settings(max_examples=100)
@given(data=st.data())
def test_no_flipped_bit_anywhere_in_a_file_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flips"
    if not folder.exists():
        record(folder, rounds=1)
    path = folder / PATH.format(1)
    raw = path.read_bytes()
    place = data.draw(st.integers(0, len(raw) - 1))
    bit = data.draw(st.integers(0, 7))
    path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :])
    try:
        found = content(folder)
    except TranscriptError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        path.write_bytes(raw)
        assert found == content(folder), f"byte {place}, bit {bit} changed what is read"
    finally:
        path.write_bytes(raw)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch unpickled-by-fedsim",)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_file_full_of_pickle_is_refused_and_not_run(
    damaged: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if how == "pickle":
        damaged.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save(Bomb(), damaged)
    with pytest.raises(TranscriptError) as caught:
        read_round_two(damaged)
    assert_one_sentence_about(damaged, caught.value)
    assert not (tmp_path / "unpickled-by-fedsim").exists()


CORE = Path(fedsim.recording.transcript.__file__).parents[1]
READERS = [
    *CORE.glob("recording/*.py"),
    CORE / "interfaces/findings.py",
    CORE / "audit/finding_files.py",
    *CORE.glob("federation/*run*.py"),
]


@pytest.mark.parametrize("file", READERS, ids=lambda file: file.stem)
def test_what_reads_recordings_cannot_unpickle(file: Path) -> None:
    source = file.read_text()
    imported, called = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Attribute):
            called.add(ast.unparse(node))
    assert not imported & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    assert not called & {"torch.load", "torch.save", "np.load", "np.save", "numpy.load"}


# What is kept.


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        (RecordingPlan(), {1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 2], 4: [0, 1, 2], 5: [0, 1, 2]}),
        (RecordingPlan(rounds=[2, 5]), {2: [0, 1, 2], 5: [0, 1, 2]}),
        (RecordingPlan(rounds=[5, 2, 4], every=2), {2: [0, 1, 2], 5: [0, 1, 2]}),
        (RecordingPlan(clients=[2, 0]), {number: [0, 2] for number in range(1, 6)}),
        (RecordingPlan(every=2), {1: [0, 1, 2], 3: [0, 1, 2], 5: [0, 1, 2]}),
        (RecordingPlan(every=3, clients=[1]), {1: [1], 4: [1]}),
        (RecordingPlan(every=99), {1: [0, 1, 2]}),
    ],
)
def test_the_plan_bounds_what_is_kept(tmp_path: Path, plan: RecordingPlan, kept: dict[int, list[int]]) -> None:
    record(tmp_path, rounds=5, plan=plan)
    transcript = Transcript(tmp_path)
    assert {number: transcript.clients(number) for number in transcript.rounds} == kept
    for number in kept:
        for name in _keys(tmp_path / PATH.format(number)):
            assert name.startswith(("broadcast/", "padding/")) or int(name.split("/")[1]) in kept[number]


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


# Where it is written, and what happens when it cannot be.


def test_an_earlier_recording_is_not_written_over(tmp_path: Path) -> None:
    record(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TranscriptError, match="already holds a recording"):
        Recorder(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    Recorder(tmp_path, resume=True).write(4, [an_update(4, 0)])
    assert Transcript(tmp_path).rounds == [1, 2, 3, 4]


def test_what_a_killed_run_left_half_written_is_removed(tmp_path: Path) -> None:
    record(tmp_path)
    for leftover in (f".{PATH.format(4)}.tmp", ".tmpCyzV65"):  # the second name is safetensors' own
        (tmp_path / leftover).write_bytes(b"half a round")
    assert Transcript(tmp_path).rounds == [1, 2, 3]
    Recorder(tmp_path, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [PATH.format(number) for number in (1, 2, 3)]


def test_a_full_disk_ends_the_run_and_leaves_the_earlier_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, rounds=2)
    before = content(tmp_path)

    def full(file: Any, parts: Iterable[memoryview], position: int) -> None:
        del parts
        os.pwrite(file.fileno(), b"the first half of round 3", position)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fedsim.recording.round_file, "write_parts", full)
    with pytest.raises(RunError, match="No space left on device") as caught:
        Recorder(tmp_path, resume=True).write(3, [an_update(3, 0)])
    assert str(tmp_path / PATH.format(3)) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    assert content(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [PATH.format(1), PATH.format(2)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "fedsim-test", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a small disk here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_really_full_ends_the_run_and_leaves_the_earlier_rounds(small_disk: Path) -> None:
    recorder = Recorder(small_disk)
    big = {"weight": torch.zeros(20_000)}
    updates = [build_update(big, {"weight": torch.ones(20_000)})]
    recorder.write(1, updates)
    with pytest.raises(RunError, match="make room and resume the run"):
        recorder.write(2, updates)
    assert Transcript(small_disk).rounds == [1]
    assert len(content(small_disk)) == 1
    assert [path.name for path in small_disk.iterdir()] == [PATH.format(1)]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunError, match="cannot be written") as caught:
        Recorder(tmp_path / "file" / "transcript")
    assert caught.value.exit_code == 1


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with pytest.raises(RunError, match=r"cannot be written \(Permission denied\); choose another folder"):
        Recorder(tmp_path / "transcript")


def test_the_header_is_plain_json_that_any_safetensors_reader_shows(tmp_path: Path) -> None:
    record(tmp_path, rounds=1)
    raw = (tmp_path / PATH.format(1)).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    sealed = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["fedsim"])
    header = json.loads(sealed["header"])
    assert set(header) == {"version", "round", "broadcasts", "replies", "failures", "config"}
    assert set(header["replies"][0]) == {"client", "num_examples", "broadcast", "sha256", "kind", "metrics"}


# Updates are written as they come.


def library_reads(path: Path) -> dict[str, Tensor]:
    """Every tensor in the file, by the library's own reader, which refuses gaps and overlaps."""
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def streamed(folder: Path, clients: int, expected: int | None, **kwargs: Any) -> list[Update]:
    before = a_state()
    updates = [an_update(1, client, before) for client in range(clients)]
    Recorder(folder).write(1, iter(updates), expected=expected, **kwargs)
    return updates


def assert_recorded(folder: Path, updates: list[Update]) -> None:
    transcript = Transcript(folder)
    assert transcript.clients(1) == sorted(update.client for update in updates)
    for update in updates:
        read = transcript.recorded_update(1, update.client)
        assert same(dict(read.before), dict(update.before))
        assert same(dict(read.after), dict(update.after))
        assert (read.num_examples, read.metrics) == (update.num_examples, update.metrics)
    library_reads(folder / PATH.format(1))


@pytest.mark.parametrize("expected", [None, 0, 1, 39, 40, 41, 500])
@pytest.mark.parametrize("piece", [1 << 24, 1000, 7])
@pytest.mark.parametrize("waiting", [1, 6000, 1 << 22], ids="{} bytes wait".format)
def test_a_wrong_guess_of_how_many_will_come_costs_nothing_but_room(
    expected: int | None, piece: int, waiting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.recording.round_file, "_WAITING_BYTES", waiting)
    monkeypatch.setattr(fedsim.recording.round_file, "_BYTES_PER_ROUND", 0)
    monkeypatch.setattr(fedsim.recording.round_file, "_CHUNK_BYTES", piece)
    assert_recorded(tmp_path, streamed(tmp_path, 40, expected))


def test_data_that_is_moved_by_less_than_its_length_keeps_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.recording.round_file, "_WAITING_BYTES", 1)
    monkeypatch.setattr(fedsim.recording.round_file, "_CHUNK_BYTES", 5000)
    before = {"w": torch.arange(20_000.0)}
    updates = [build_update(before, {"w": before["w"] + client}, client=client) for client in range(3)]
    Recorder(tmp_path).write(1, iter(updates), {9: "x" * 9000}, expected=1)
    assert_recorded(tmp_path, updates)


@pytest.mark.parametrize("room", [0, 4096])
def test_a_header_of_any_length_finds_its_room(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.recording.round_file, "_BYTES_PER_ROUND", room)
    failures = {100 + client: f"client {client} says: " + 'ä"\\\n' * 2000 for client in range(30)}
    config = {f"fact {i}": "x" * 50 for i in range(100)}
    updates = streamed(tmp_path, 3, 3, failures=failures, config=config)
    assert_recorded(tmp_path, updates)
    header = Transcript(tmp_path).header(1)
    assert header.failures == {client: one_line(why) for client, why in failures.items()}
    assert header.config == config


@settings(max_examples=60)
@given(extra=st.integers(0, 400))
def test_a_header_that_is_a_byte_too_long_finds_its_room(tmp_path_factory: pytest.TempPathFactory, extra: int) -> None:
    folder = tmp_path_factory.mktemp("edge")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fedsim.recording.round_file, "_BYTES_PER_ROUND", 700)
        patch.setattr(fedsim.recording.round_file, "_BYTES_PER_REPLY", 0)
        patch.setattr(fedsim.recording.round_file, "_BYTES_PER_TENSOR", 100)
        updates = streamed(folder, 2, 2, failures={7: "x" * extra})
    assert_recorded(folder, updates)
    length = int.from_bytes((folder / PATH.format(1)).read_bytes()[:8], "little")
    assert length % 8 == 0


def test_many_metrics_find_their_room(tmp_path: Path) -> None:
    update = an_update(1, 0)
    update = replace(update, metrics={f"metric {i}": i / 3 for i in range(5000)})
    Recorder(tmp_path).write(1, iter([update]), expected=1)
    assert_recorded(tmp_path, [update])


def test_a_round_without_updates_has_room_for_its_reasons(tmp_path: Path) -> None:
    failures = dict.fromkeys(range(50), "straggler " * 100)
    Recorder(tmp_path).write(1, iter([]), failures, expected=50)
    assert Transcript(tmp_path).header(1).failures == dict.fromkeys(range(50), one_line("straggler " * 100))


def test_room_for_more_clients_than_a_header_can_name_leaves_the_file_readable(tmp_path: Path) -> None:
    """The library refuses headers of more than 100 MB, filled up with blanks or not."""
    updates = streamed(tmp_path, 2, 80_000)
    assert_recorded(tmp_path, updates)


def test_clients_who_are_not_kept_are_left_no_room(tmp_path: Path) -> None:
    before = a_state()
    sizes = []
    for clients in (1, 400):
        recorder = Recorder(tmp_path / str(clients), plan=RecordingPlan(clients=[0]))
        recorder.write(1, [an_update(1, client, before) for client in range(clients)])
        sizes.append((recorder.folder / PATH.format(1)).stat().st_size)
    assert sizes[1] < 2 * sizes[0]


def test_failures_are_read_when_the_updates_have_come_to_their_end(tmp_path: Path) -> None:
    failures: dict[int, str] = {}

    def updates() -> Iterator[Update]:
        yield an_update(1, 0)
        failures[5] = "noticed last"

    Recorder(tmp_path).write(1, updates(), failures)
    assert Transcript(tmp_path).header(1).failures == {5: "noticed last"}


@pytest.mark.parametrize("plan", [RecordingPlan(), RecordingPlan(clients=[3]), RecordingPlan(rounds=[2])])
@pytest.mark.parametrize("waiting", [1, 1 << 22])
def test_a_recorder_holds_no_update_longer_than_it_takes_to_write_or_copy_it(
    tmp_path: Path, plan: RecordingPlan, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.recording.round_file, "_WAITING_BYTES", waiting)
    alive: list[weakref.ref[Any]] = []
    most = 0
    before = a_state()

    def updates() -> Iterator[Update]:
        nonlocal most
        for client in range(20):
            update = an_update(1, client, before)
            alive.extend([weakref.ref(update), weakref.ref(update.after["layer.weight"])])
            most = max(most, sum(ref() is not None for ref in alive))
            yield update
            del update

    Recorder(tmp_path, plan).write(1, updates(), expected=20)
    assert len(alive) == 40
    assert most <= 4, "two updates, the one in hand and the one before"


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("error", [ValueError("a bad reply"), RunError("all failed"), KeyboardInterrupt()])
def test_whatever_ends_the_updates_early_leaves_no_file_and_the_earlier_rounds(
    after: int, error: BaseException, tmp_path: Path
) -> None:
    record(tmp_path, rounds=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def updates() -> Iterator[Update]:
        for client in range(after):
            yield an_update(3, client)
        raise error

    recorder = Recorder(tmp_path, resume=True)
    with pytest.raises(type(error)) as caught:
        recorder.write(3, updates())
    assert caught.value is error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    recorder.write(3, [an_update(3, 0)])
    assert Transcript(tmp_path).rounds == [1, 2, 3]


def test_two_replies_of_one_client_are_refused_in_a_stream_too(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="two replies say that they come from client 4"):
        Recorder(tmp_path).write(1, iter([an_update(1, 4), an_update(1, 5), an_update(1, 4)]))
    assert not list(tmp_path.iterdir())


def test_updates_that_come_in_one_memory_are_recorded_as_they_came(tmp_path: Path) -> None:
    before, memory = {"w": torch.arange(6.0)}, {"w": torch.zeros(6)}

    def updates() -> Iterator[Update]:
        for client in range(3):
            memory["w"].copy_(before["w"] + client)
            yield build_update(before, memory, client=client)

    Recorder(tmp_path).write(1, updates())
    for update in Transcript(tmp_path).updates():
        assert torch.equal(update.payload.weights_after(before)["w"], before["w"] + update.client)


def test_a_stream_a_list_and_a_round_in_pieces_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = streamed(tmp_path / "stream", 5, 5)
    Recorder(tmp_path / "list").write(1, list(reversed(updates)))
    monkeypatch.setattr(fedsim.recording.round_file, "_WAITING_BYTES", 1)
    streamed(tmp_path / "pieces", 5, 5)
    assert (tmp_path / "stream" / PATH.format(1)).read_bytes() == (tmp_path / "pieces" / PATH.format(1)).read_bytes()
    assert (tmp_path / "stream" / PATH.format(1)).read_bytes() == (tmp_path / "list" / PATH.format(1)).read_bytes()


@settings(max_examples=25)
@given(states=st.lists(states(), min_size=1, max_size=4), expected=st.integers(0, 5))
def test_types_of_all_widths_come_back_to_the_bit_and_where_their_width_wants_them(
    tmp_path_factory: pytest.TempPathFactory, states: list[dict[str, Tensor]], expected: int
) -> None:
    folder = tmp_path_factory.mktemp("mixed")
    odd = {"half": torch.tensor([1.5, -0.0, float("nan")]).bfloat16(), "flag": torch.tensor([True])}
    updates = [build_update(states[0], {**state, **odd}, client=client) for client, state in enumerate(states)]
    Recorder(folder).write(1, iter(updates), expected=expected)
    path = folder / PATH.format(1)
    read = library_reads(path)
    for update in updates:
        for place, (name, tensor) in enumerate(update.after.items()):
            there = read[f"client/{update.client}/{place:04d}/{name}"]
            assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape)
            assert there.reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
        assert hash_state(Transcript(folder).recorded_update(1, update.client).after) == hash_state(update.after)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    del entries["__metadata__"]
    for key, entry in entries.items():
        width = read[key].element_size()
        assert (8 + length + entry["data_offsets"][0]) % width == 0, key


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float8_e4m3fn])
def test_a_type_that_the_format_does_not_know_is_one_sentence(dtype: torch.dtype, tmp_path: Path) -> None:
    after = {"odd one": torch.zeros(2).to(dtype)}
    with pytest.raises(FedsimError, match="odd one"):
        Recorder(tmp_path).write(1, [build_update({}, after)])
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_while_data_is_moved_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsim.recording.round_file, "_BYTES_PER_ROUND", 0)

    def full(self: Any, room: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fedsim.recording.round_file.RoundFile, "_grow_header", full)
    with pytest.raises(RunError, match="No space left on device"):
        streamed(tmp_path, 40, 1)
    assert not list(tmp_path.iterdir())


def test_copies_of_some_rounds_hold_their_messages_and_no_facts(tmp_path: Path) -> None:
    """As files, for whoever reads them without this module."""
    whole = Transcript(record(tmp_path / "run"))
    whole.restrict_to([1, 3]).copy_to(tmp_path / "copy" / "inside")
    copied = Transcript(tmp_path / "copy" / "inside")
    assert copied.rounds == [1, 3]
    assert copied.hash() == whole.restrict_to([1, 3]).hash()
    assert copied.header(1) == whole.restrict_to([1]).header(1)
    assert whole.header(1).config
    assert all(b"batch-size" not in path.read_bytes() for path in copied.folder.iterdir())
    assert b"batch-size" in next(whole.folder.iterdir()).read_bytes()
    whole.copy_to(tmp_path / "all")
    assert Transcript(tmp_path / "all").header(2) == whole.header(2)


def test_an_altered_round_is_not_copied(damaged: Path, tmp_path: Path) -> None:
    """What is sealed anew would pass for intact."""
    damaged.write_bytes(damaged.read_bytes().replace(b'num_examples\\\\\\": 11', b'num_examples\\\\\\": 12'))
    with pytest.raises(TranscriptError, match="its header was altered"):
        Transcript(damaged.parent).restrict_to([2]).copy_to(tmp_path / "copy")


# What a stranger may write into a header and seal: read as it is, or named as damaged.

STRANGE = [None, True, -1, 0, 1, 2.5, 1 << 70, float("nan"), "", "x", "1", [], [[]], {}, {"a": 1}, {"1": "x"}]


def sealed_as(path: Path, header: Any) -> None:
    """Replace the header of a round by another one, with the right hash."""
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    text = header if isinstance(header, str) else json.dumps(header)
    sealed = {"header": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    save_file(tensors, path, metadata={"fedsim": json.dumps(sealed)})


@st.composite
def mutations(draw: st.DrawFn) -> tuple[list[int], int, Any]:
    """Where in a nested header, what is done there (replace, remove, add), and with what."""
    return draw(st.lists(st.integers(0, 9), max_size=4)), draw(st.integers(0, 2)), draw(st.sampled_from(STRANGE))


def mutated(value: Any, place: list[int], action: int, odd: Any) -> Any:
    if place and isinstance(value, dict) and value:
        key = sorted(value)[place[0] % len(value)]
        inner = value | {key: mutated(value[key], place[1:], action, odd)}
    elif place and isinstance(value, list) and value:
        where = place[0] % len(value)
        inner = [*value[:where], mutated(value[where], place[1:], action, odd), *value[where + 1 :]]
    elif isinstance(value, dict) and action:
        inner = dict(list(value.items())[1:]) if action == 1 else value | {"odd": odd}
    elif isinstance(value, list) and action:
        inner = value[1:] if action == 1 else [*value, *(value[:1] or [odd])]
    else:
        return odd
    return inner


@settings(max_examples=60)
@given(changes=st.lists(mutations(), min_size=1, max_size=2))
def test_whatever_a_header_says_it_is_read_or_named_as_damaged(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[list[int], int, Any]]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "strange"
    if not folder.exists():
        record(folder, rounds=1)
    path = folder / PATH.format(1)
    raw = path.read_bytes()
    with safe_open(path, framework="pt") as file:
        header = json.loads(json.loads(file.metadata()["fedsim"])["header"])
    for place, action, odd in changes:
        header = mutated(header, place, action, odd)
    sealed_as(path, header)
    try:
        transcript = Transcript(folder)
        updates = list(transcript.updates())
        assert len(transcript.hash()) == 64
        assert all(type(update.client) is int and update.client >= 0 and update.num_examples >= 0 for update in updates)
        assert len({update.client for update in updates}) == len(updates)
        assert all(isinstance(value, int | float) for update in updates for value in update.metrics.values())
    except TranscriptError as error:
        assert str(path) in str(error)  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
    finally:
        path.write_bytes(raw)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"replies": [{}]}, "a reply is {}, expected client, num_examples"),
        ({"replies": 5}, "replies of the header is 5"),
        ({"version": True}, "version of the header is True"),
        ({"round": 1.0}, "round of the header is 1.0"),
        ({"config": None}, "config of the header is None"),
        ({"failures": {"x": "y"}}, "invalid literal"),
        ({"failures": {"3": 5}}, "a hash or a reason is not a text"),
        ({"failures": {"3": "", "03": ""}}, "expected each once"),
        ({"further": 1}, "the header is {"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_header_of_another_form_is_named(tmp_path: Path, change: Any, expected: str) -> None:
    path = record(tmp_path, rounds=1) / PATH.format(1)
    with safe_open(path, framework="pt") as file:
        header = json.loads(json.loads(file.metadata()["fedsim"])["header"])
    sealed_as(path, change if isinstance(change, str) else header | change)
    with pytest.raises(TranscriptError) as caught:
        Transcript(tmp_path).header(1)
    assert expected in str(caught.value)
    assert_one_sentence_about(path, caught.value)


def test_a_reason_made_elsewhere_is_read_as_one_line_that_no_terminal_obeys(tmp_path: Path) -> None:
    path = record(tmp_path, rounds=1) / PATH.format(1)
    with safe_open(path, framework="pt") as file:
        header = json.loads(json.loads(file.metadata()["fedsim"])["header"])
    sealed_as(path, header | {"failures": {"7": "\x1b]0;mine\x07gone\n\u202eback", "8": "w" * 10_000}})
    assert Transcript(tmp_path).header(1).failures == {7: "]0;mine gone back", 8: "w" * 299 + "…"}


@pytest.mark.parametrize(
    "change",
    [
        {"client": True},
        {"client": -1},
        {"client": 1},
        {"client": 1 << 64},
        {"num_examples": -3},
        {"sha256": 5},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": True}},
        {"metrics": []},
        {"gradient": 5},
        {"more": 1},
    ],
)
def test_a_reply_of_another_form_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    path = record(tmp_path, rounds=1) / PATH.format(1)
    with safe_open(path, framework="pt") as file:
        header = json.loads(json.loads(file.metadata()["fedsim"])["header"])
    header["replies"][0] |= change
    sealed_as(path, header)
    with pytest.raises(TranscriptError, match="is damaged") as caught:
        Transcript(tmp_path).recorded_update(1, 1)
    assert_one_sentence_about(path, caught.value)


@pytest.mark.parametrize("after", [{"w": torch.ones(1)}, {"w": torch.ones(())}, {}], ids=["one", "scalar", "none"])
def test_a_tensor_of_one_element_is_never_spread_over_another(after: dict[str, torch.Tensor]) -> None:
    update = build_update({"w": torch.zeros(3)}, after)
    with pytest.raises(TranscriptError, match=r"round 1, client 0: of 'w', \(3,\), it sent"):
        _ = update.pseudo_gradient


def test_a_client_below_0_is_not_recorded(tmp_path: Path) -> None:
    update = build_update({"w": torch.zeros(3)}, {"w": torch.ones(3)}, client=-1)
    with pytest.raises(RunError, match="client -1, below 0"):
        Recorder(tmp_path).write(1, [update])


def test_a_file_with_a_client_below_0_or_twice_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = [build_update({"w": torch.zeros(3)}, {"w": torch.ones(3)}, client=k) for k in (0, 1)]
    real, text_of = Header.to_json, Header.to_text
    for number, ids in enumerate([(-1, 1), (1, 1)]):

        def forged(header: Header, ids: tuple[int, int] = ids) -> str:
            told = real(header)
            assert json.dumps(told, sort_keys=True) == text_of(header)
            told["replies"] = [reply | {"client": k} for reply, k in zip(told["replies"], ids, strict=True)]
            return json.dumps(told, sort_keys=True)

        with monkeypatch.context() as patch:
            patch.setattr(Header, "to_text", forged)
            Recorder(tmp_path / str(number)).write(1, updates)
        with pytest.raises(TranscriptError, match="client"):
            Transcript(tmp_path / str(number)).header(1)
