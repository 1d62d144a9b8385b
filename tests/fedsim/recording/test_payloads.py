"""A payload is on the wire and on the disk what the client sent, and what an attack reads of it is that, to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.base.errors import PayloadError, TranscriptError
from fedsim.federation.engines.arrays import ReplySpool, decode_lazily, make_record, read_state
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.payloads import Dense, Kind, Payload, Quantised, Sparse, State
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update

BEFORE = {"weight": torch.linspace(-1, 1, 6).reshape(2, 3), "bias": torch.tensor([0.5, -0.25])}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether these are the same names, types, shapes and bits."""
    return list(left) == list(right) and all(
        one.dtype == right[name].dtype
        and one.shape == right[name].shape
        and one.numpy().tobytes() == right[name].numpy().tobytes()
        for name, one in left.items()
    )


def over_the_wire(payload: Payload) -> ArrayRecord:
    """What arrives, through Flower's own bytes."""
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in payload.arrays().items()})


def message(payload: Payload) -> Update:
    return Update(round=1, client=3, before=BEFORE, payload=payload, num_examples=4)


numbers = st.floats(width=32, allow_nan=True) | st.sampled_from([-0.0, 1e-45, 16777217.0])


@st.composite
def forms(draw: st.DrawFn, shape: tuple[int, ...]) -> Dense | Sparse | Quantised:
    size = torch.Size(shape).numel()
    form = draw(st.sampled_from(["dense", "sparse", "quantised"]))
    if form == "dense":
        kind = draw(st.sampled_from([torch.float32, torch.float16]))
        return Dense(torch.tensor(draw(st.lists(numbers, min_size=size, max_size=size))).to(kind).reshape(shape))
    if form == "sparse":
        places = draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
        values = draw(st.lists(numbers, min_size=len(places), max_size=len(places)))
        kind = draw(st.sampled_from([torch.int32, torch.int64]))
        return Sparse(torch.tensor(places, dtype=kind), torch.tensor(values, dtype=torch.float32))
    integers = draw(st.lists(st.integers(-128, 127), min_size=size, max_size=size))
    scales = draw(st.lists(numbers, min_size=shape[0], max_size=shape[0]))
    scale = torch.tensor(scales) if draw(st.booleans()) else torch.tensor(scales[0])
    return Quantised(torch.tensor(integers, dtype=torch.int8).reshape(shape), scale.float())


@st.composite
def payloads(draw: st.DrawFn) -> Payload:
    kind: Kind = draw(st.sampled_from(get_args(Kind)))
    return Payload({name: (kind, draw(forms(tuple(tensor.shape)))) for name, tensor in BEFORE.items()})


def dense(payload: Payload) -> State:
    return {name: form.to_dense(BEFORE[name].shape) for name, (_, form) in payload.tensors.items()}


@settings(max_examples=50)
@given(payload=payloads())
def test_what_is_read_is_what_was_sent_through_the_wire_and_a_recording(
    payload: Payload, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("payload")
    arrived = Payload.from_arrays(read_state(over_the_wire(payload)), BEFORE)
    Recorder(folder).write(1, [message(arrived)])
    read = Transcript(folder).recorded_update(1, 3)
    for got in (arrived, read.payload):
        assert got.kind == payload.kind
        assert same(got.arrays(), payload.arrays())
        assert [type(form) for _, form in got.tensors.values()] == [type(f) for _, f in payload.tensors.values()]
    sent = dense(payload)
    expected = {
        "weights": {name: BEFORE[name] - tensor for name, tensor in sent.items()},
        "gradient": sent,
        "delta": {name: -tensor for name, tensor in sent.items()},
    }[payload.kind]
    assert same(read.pseudo_gradient, expected)


@settings(max_examples=40)
@given(payload=payloads())
def test_what_a_strategy_gets_is_the_payload_decoded_from_memory_or_from_disk(payload: Payload) -> None:
    record = make_record(payload.arrays())
    plain = decode_lazily(record, BEFORE)
    ReplySpool(None, -1).store(record)  # all of it moves to a file, the arrays of `plain` come from there
    assert same({name: torch.from_numpy(array.numpy()) for name, array in plain.items()}, payload.decode(BEFORE))


def test_a_payload_that_strategies_can_read_reaches_them_untouched() -> None:
    for payload in (Payload.from_dense(BEFORE, "weights"), Payload.from_dense(BEFORE, "gradient")):
        record = make_record(payload.arrays())
        assert decode_lazily(record, BEFORE) is record
    assert list(Payload.from_dense(BEFORE, "weights").arrays()) == ["weight", "bias"]
    assert list(Payload.from_dense(BEFORE, "gradient").arrays()) == ["gradient/weight", "gradient/bias"]


def test_what_decoding_makes_is_written_out() -> None:
    delta = {"weight": torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, -4.0]])}
    sparse = Payload.from_sparse(delta)
    assert {name: tensor.tolist() for name, tensor in sparse.arrays().items()} == {
        "delta-indices/weight": [1, 5],
        "delta-values/weight": [2.0, -4.0],
    }
    assert sparse.nbytes == 2 * 4 + 2 * 4
    quantised = Payload.from_integers(
        {"weight": torch.tensor([[0, 1, 0], [0, 0, -1]]).to(torch.int8)}, {"weight": SCALES}
    )
    assert quantised.nbytes == 6 + 2 * 4
    for payload in (Payload.from_dense(delta), sparse, quantised):
        assert torch.equal(payload.decode(BEFORE)["weight"], BEFORE["weight"] + delta["weight"])
    integers = Quantised(torch.tensor([3, -1]).to(torch.int8), torch.tensor(0.5))
    slopes = Payload({"bias": ("gradient", integers)})
    assert slopes.decode(BEFORE)["gradient/bias"].tolist() == [1.5, -0.5]


SCALES = torch.tensor([2.0, 4.0])
MALFORMED: dict[str, tuple[State, str]] = {
    "no values": ({"delta-indices/bias": torch.tensor([0])}, "'bias' as indices, expected dense values, indices and"),
    "no scales": ({"delta-integers/bias": torch.tensor([0, 1])}, "'bias' as integers, expected dense values, "),
    "two forms": (
        {"delta/bias": torch.ones(2), "delta-scales/bias": torch.ones(())},
        "'bias' as dense values and scales, expected",
    ),
    "two kinds": ({"delta/bias": torch.ones(2), "bias": torch.ones(2)}, "'bias' as delta and as weights, expected one"),
    "never broadcast": ({"delta/other": torch.ones(2)}, "'other' as delta, but it was not broadcast as real numbers"),
    "shape": ({"delta/bias": torch.ones(3)}, "'bias' with shape (3,), expected (2,)"),
    "type": ({"delta/bias": torch.ones(2).long()}, "'bias' as int64, expected floating-point numbers"),
    "index below 0": (
        {"delta-indices/bias": torch.tensor([-1]), "delta-values/bias": torch.ones(1)},
        "'bias' with indices from -1 to -1, expected 0 to 1",
    ),
    "index too large": (
        {"delta-indices/bias": torch.tensor([0, 2]), "delta-values/bias": torch.ones(2)},
        "'bias' with indices from 0 to 2, expected 0 to 1",
    ),
    "index twice": (
        {"delta-indices/bias": torch.tensor([1, 1]), "delta-values/bias": torch.ones(2)},
        "'bias' with index 1 more than once, expected each once",
    ),
    "indices are reals": (
        {"delta-indices/bias": torch.tensor([1.0]), "delta-values/bias": torch.ones(1)},
        "'bias' with indices of float32, expected int32 or int64",
    ),
    "values are integers": (
        {"delta-indices/bias": torch.tensor([1]), "delta-values/bias": torch.tensor([1])},
        "'bias' as int64, expected floating-point numbers",
    ),
    "fewer values": (
        {"delta-indices/bias": torch.tensor([0, 1]), "delta-values/bias": torch.ones(1)},
        "'bias' with indices of shape (2,) and values of shape (1,), expected two lists of one length",
    ),
    "integers are reals": (
        {"weights-integers/bias": torch.ones(2), "weights-scales/bias": torch.ones(())},
        "'bias' with integers of float32, expected one of int8, uint8, int16, int32, int64",
    ),
    "integers of another shape": (
        {"delta-integers/bias": torch.tensor([1]), "delta-scales/bias": torch.ones(())},
        "'bias' with integers of shape (1,), expected (2,)",
    ),
    "too many scales": (
        {"delta-integers/bias": torch.tensor([1, 2]), "delta-scales/bias": torch.ones(3)},
        "'bias' with scales of shape (3,), expected () or (2,)",
    ),
    "scales are integers": (
        {"gradient-integers/bias": torch.tensor([1, 2]), "gradient-scales/bias": torch.tensor(1)},
        "'bias' as int64, expected floating-point numbers",
    ),
}


@pytest.mark.parametrize(("arrays", "expected"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_payload_is_refused_in_one_sentence(arrays: State, expected: str) -> None:
    with pytest.raises(PayloadError) as caught:
        Payload.from_arrays(arrays, BEFORE)
    assert str(caught.value).startswith("it sent ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(PayloadError):
        decode_lazily(make_record(arrays), BEFORE)


def test_integers_and_scales_have_the_same_names() -> None:
    with pytest.raises(PayloadError, match="'bias' has only one of integers and scales"):
        Payload.from_integers({"bias": torch.tensor([1, 2])}, {})


def test_weights_whose_name_begins_like_an_encoding_are_plain() -> None:
    before = {"delta/kernel": torch.zeros(3), "weights-indices/kernel": torch.zeros(2)}
    sent = over_the_wire(Payload.from_dense({name: tensor + 1 for name, tensor in before.items()}, "weights"))
    assert decode_lazily(sent, before) is sent
    assert same(Payload.from_arrays(read_state(sent), before).weights_after(before), read_state(sent))


def test_a_recording_of_a_malformed_payload_is_damaged(tmp_path: Path) -> None:
    broken = Payload({"bias": ("delta", Sparse(torch.tensor([7]), torch.ones(1)))})
    Recorder(tmp_path).write(1, [message(broken)])
    with pytest.raises(TranscriptError, match=r"is damaged \(of client 3: it sent 'bias' with indices from 7 to 7"):
        Transcript(tmp_path).update(1, 3)


@settings(max_examples=50)
@given(payload=payloads())
def test_an_attack_matches_the_delta_that_was_sent_and_not_a_difference_of_rounded_weights(payload: Payload) -> None:
    deltas = Payload({name: ("delta", form) for name, (_, form) in payload.tensors.items()})
    moved = [-tensor.float() for tensor in dense(deltas).values()]
    assume(all(bool(tensor.square().sum().isfinite()) for tensor in moved))  # others are refused before
    assume(any(bool((tensor != 0).any()) for tensor in moved))  # else there is nothing to match
    known = Knowledge(
        model=lambda: nn.Linear(3, 2),
        loss=cross_entropy,
        input_shape=(3,),
        value_range=(0.0, 1.0),
        device=torch.device("cpu"),
    )
    scene = build_problem(MessageFormat().read(message(deltas)), known)
    for got, expected in zip(scene.direction, moved, strict=True):
        assert got.numpy().tobytes() == expected.numpy().tobytes()
