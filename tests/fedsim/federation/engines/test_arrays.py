"""Arrays that keep their values as they are: to Flower and to strategies they are its own Arrays."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import fedsim.federation.engines.arrays
from fedsim.base.errors import RunError
from fedsim.federation.engines.arrays import LazyArray, ReplySpool, make_lazy, make_record, read_state

Values = NDArray[Any]

VALUES: dict[str, Values] = {
    "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(3.5),
    "empty": np.empty((0, 4), np.float32),
    "empty vector": np.empty(0, np.int64),
    "bool": np.array([True, False, True]),
    "int64": np.array([2**62, -1, 0]),
    "uint8": np.arange(5, dtype=np.uint8),
    "half": np.array([0.1, np.nan, -np.inf, -0.0], np.float16),
    "complex": np.array([1 + 2j, 3], np.complex64),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
    "reversed": np.arange(5.0)[::-1],
    "one column": np.arange(12.0).reshape(3, 4)[:, 1:2],
}
every_value = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())


def same(left: Values, right: Values) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def parked(values: Values) -> LazyArray:
    record = ArrayRecord()
    record["x"] = LazyArray(values)
    ReplySpool(None, -1).store(record)
    held = record["x"]
    assert isinstance(held, LazyArray)
    return held


def through_the_network(content: RecordDict) -> RecordDict:
    """What Flower's object store makes of `content`: each object is sent as bytes of its own."""
    contents = {name: item.deflate() for name, item in get_all_nested_objects(content).items()}
    arrived = inflate_object_from_contents(content.object_id, contents)
    assert isinstance(arrived, RecordDict)
    return arrived


made = pytest.mark.parametrize("make", [LazyArray, parked])


# Beside Flower's own Array.


@every_value
def test_the_fields_and_bytes_are_those_of_flowers_array(values: Values) -> None:
    held, array = LazyArray(values), Array(values)
    assert (held.dtype, held.shape, held.stype) == (array.dtype, array.shape, array.stype)
    assert held.data == array.data


@every_value
def test_parking_changes_no_value_and_no_type(values: Values) -> None:
    held = parked(values)
    assert same(held.numpy(), values)
    assert same(held.view(), values)
    assert same(Array(held.dtype, held.shape, held.stype, held.data).numpy(), values)
    assert same(held.numpy(), values)  # as often as somebody wants


@made
@every_value
def test_numpy_is_a_copy_that_can_be_written_to(make: Callable[[Values], LazyArray], values: Values) -> None:
    held = make(values)
    before = values.copy()
    copy = held.numpy()
    assert same(copy, Array(values).numpy())
    copy[...] = 1
    assert same(values, before)
    assert same(held.numpy(), before)


def test_view_shares_memory_until_it_is_parked() -> None:
    values = np.arange(4.0)
    assert np.shares_memory(LazyArray(values).view(), values)


@made
@every_value
def test_it_has_the_id_that_flower_gives_to_the_same_array(make: Callable[[Values], LazyArray], values: Values) -> None:
    expected = values if make is LazyArray else values.copy()  # a parked one lies in C order
    assert make(values).object_id == Array(expected).object_id


@made
@every_value
def test_it_survives_flowers_network(make: Callable[[Values], LazyArray], values: Values) -> None:
    record = ArrayRecord()
    record["x"] = make(values)
    arrived = through_the_network(RecordDict({"arrays": record})).array_records["arrays"]["x"]
    assert same(arrived.numpy(), values)


@made
def test_a_record_of_it_can_be_made_of_a_dict(make: Callable[[Values], LazyArray]) -> None:
    record = ArrayRecord({"b": make(VALUES["matrix"]), "a": make(VALUES["scalar"])})
    assert list(record) == ["b", "a"]
    assert all(same(a.numpy(), v) for a, v in zip(record.values(), (VALUES["matrix"], VALUES["scalar"]), strict=True))
    assert (
        record.count_bytes() == ArrayRecord({"b": Array(VALUES["matrix"]), "a": Array(VALUES["scalar"])}).count_bytes()
    )
    assert torch.equal(record.to_torch_state_dict()["b"], torch.from_numpy(VALUES["matrix"]))
    assert same(record.to_numpy_ndarrays()[1], VALUES["scalar"])


@every_value
def test_it_travels_between_processes(values: Values) -> None:
    arrived = pickle.loads(pickle.dumps(LazyArray(values)))
    assert isinstance(arrived, LazyArray)
    assert same(arrived.numpy(), values)
    assert arrived.data == LazyArray(values).data


def test_a_slice_travels_without_the_array_round_it() -> None:
    stack = np.zeros((64, 1000))
    assert len(pickle.dumps(LazyArray(stack[3]))) < 2 * stack[3].nbytes


def test_two_are_equal_where_their_values_are() -> None:
    assert LazyArray(np.arange(3.0)) == parked(np.arange(3.0))
    assert LazyArray(np.arange(3.0)) != LazyArray(np.arange(3))
    assert LazyArray(np.arange(3.0)) != LazyArray(np.arange(1.0, 4.0))


def test_a_read_only_array_is_held_and_copied() -> None:
    values = np.arange(3.0)
    values.flags.writeable = False
    copy = LazyArray(values).numpy()
    copy += 1
    assert copy.tolist() == [1, 2, 3]


# Parking.


def a_record(size: int, count: int = 1, seed: int = 0) -> ArrayRecord:
    rng = np.random.default_rng(seed)
    return make_record({f"p{i}": torch.from_numpy(rng.random(size, np.float32)) for i in range(count)})


def in_memory(record: ArrayRecord) -> bool:
    kept = {array._values is not None for array in record.values() if isinstance(array, LazyArray)}
    assert len(kept) == 1, "a record is moved whole or not at all"
    return kept.pop()


def test_only_what_the_limit_allows_stays_in_memory(tmp_path: Path) -> None:
    parking = ReplySpool(tmp_path, 100)
    records = [a_record(size) for size in (10, 10, 10, 5, 1)]  # 40, 40, 40, 20 and 4 bytes
    for record in records:
        parking.store(record)
    assert [in_memory(record) for record in records] == [True, True, False, True, False]


def test_without_need_no_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.arrays.tempfile, "TemporaryFile", None)
    parking = ReplySpool(tmp_path, 80)
    record = a_record(10, count=2)
    parking.store(record)
    assert in_memory(record)


def test_many_records_come_back_as_they_were(tmp_path: Path) -> None:
    parking = ReplySpool(tmp_path, 500)
    records = [a_record(1 + seed % 7, count=1 + seed % 3, seed=seed) for seed in range(200)]
    before = [{name: array.numpy() for name, array in record.items()} for record in records]
    for record in records:
        parking.store(record)
    assert not any(in_memory(record) for record in records[-20:])
    for values, record in zip(reversed(before), reversed(records), strict=True):
        assert all(same(array.numpy(), values[name]) for name, array in record.items())


def test_what_lies_there_has_no_name(tmp_path: Path) -> None:
    parking, record = ReplySpool(tmp_path, 0), a_record(1000)
    parking.store(record)
    assert not in_memory(record)
    assert list(tmp_path.iterdir()) == []


def test_arrays_outlive_their_parking_and_the_file_goes_with_the_last_of_them(tmp_path: Path) -> None:
    def files() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = files()
    parking, record = ReplySpool(tmp_path, 0), a_record(10, count=2)
    values = [array.numpy() for array in record.values()]
    parking.store(record)
    del parking
    gc.collect()
    assert all(same(a.numpy(), v) for a, v in zip(record.values(), values, strict=True))
    del record["p0"]
    assert same(record["p1"].numpy(), values[1])
    assert files() == before + 1
    del record
    assert files() == before


def test_taking_twice_moves_once(tmp_path: Path) -> None:
    parking, record = ReplySpool(tmp_path, 0), a_record(10)
    parking.store(record)
    held = record["p0"]
    assert isinstance(held, LazyArray)
    place = held._file_position
    parking.store(record)
    assert held._file_position == place


def test_parking_lets_go_of_the_memory(tmp_path: Path) -> None:
    values = np.zeros(1000)
    there = weakref.ref(values)
    record = ArrayRecord()
    record["x"] = LazyArray(values)
    del values
    ReplySpool(tmp_path, 0).store(record)
    assert there() is None


def test_arrays_of_flower_are_left_alone(tmp_path: Path) -> None:
    record = ArrayRecord({"x": Array(np.arange(3.0))})
    ReplySpool(tmp_path, 0).store(record)
    assert type(record["x"]) is Array


@pytest.mark.parametrize("folder", [True, False])
def test_a_full_disk_is_one_sentence_and_loses_nothing(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parking = ReplySpool(tmp_path if folder else None, 0)
    first, second = a_record(10, seed=1), a_record(10, seed=2)
    values = second["p0"].numpy()
    parking.store(first)

    def full(file: Any, parts: Iterable[memoryview], position: int) -> None:
        os.pwrite(file.fileno(), next(iter(parts))[:5], position)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fedsim.federation.engines.arrays, "write_parts", full)
    with pytest.raises(RunError, match=r"the updates of this round cannot be written \(No space") as caught:
        parking.store(second)
    assert "\n" not in str(caught.value)
    assert "None" not in str(caught.value)
    assert "make room and resume the run" in str(caught.value)
    assert caught.value.exit_code == 1
    assert same(second["p0"].numpy(), values)
    monkeypatch.undo()
    parking.store(second)  # when there is room again
    assert same(second["p0"].numpy(), values)
    assert same(first["p0"].numpy(), a_record(10, seed=1)["p0"].numpy())


def test_a_folder_that_is_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file or directory"):
        ReplySpool(tmp_path / "gone", 0).store(a_record(1))


# Tensors in and out.


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(["float32", "float64", "float16", "int64", "int8", "bool", "uint8", "complex64"]),
    order=st.sampled_from("CF"),
)
def test_tensors_come_out_of_any_record_as_numpy_would_give_them(shape: list[int], dtype: str, order: Any) -> None:
    count = int(np.prod(shape))
    values = np.asarray((np.arange(count) - 2).reshape(shape).astype(dtype), order=order)
    foreign = ArrayRecord({"x": Array(values)})
    assert same(read_state(foreign)["x"].numpy(), values)
    make_lazy(foreign)
    assert isinstance(foreign["x"], LazyArray)
    assert same(foreign["x"].numpy(), values)
    assert same(read_state(foreign)["x"].numpy(), values)
    foreign["x"].numpy()[...] = 0  # writable, though Flower's bytes are not
    assert same(read_state(make_record({"x": torch.from_numpy(values)}))["x"].numpy(), values)


def test_a_state_goes_in_and_out_without_a_copy() -> None:
    state = {"b": torch.arange(3.0), "a": torch.tensor(2.0)}
    record = make_record(state)
    assert list(record) == ["b", "a"]
    out = read_state(record)
    assert [out[name].data_ptr() == tensor.data_ptr() for name, tensor in state.items()] == [True, True]


def test_nobody_is_warned_of_memory_that_flower_owns() -> None:
    record = ArrayRecord({"x": Array(np.arange(3.0))})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_state(record)
        make_lazy(record)
        read_state(record)


def test_what_numpy_did_not_write_is_not_taken_for_it() -> None:
    """Flower's own `numpy` refuses such an array; guessing at its bytes would give wrong weights."""
    raw = np.arange(3, dtype=np.float32).tobytes()
    record = ArrayRecord({"x": Array("float32", (3,), "some-other-format", raw + b"trailer")})
    make_lazy(record)
    assert type(record["x"]) is Array
    with pytest.raises(TypeError, match="some-other-format"):
        read_state(record)


@pytest.mark.parametrize("claim", [{"shape": (2,)}, {"shape": (4,)}, {"dtype": "float64"}, {"dtype": "int32"}])
def test_what_an_array_claims_of_itself_does_not_change_its_values(claim: dict[str, Any]) -> None:
    """A client may say anything; the header of the .npy bytes is what every strategy goes by."""
    array = Array(np.arange(3, dtype=np.float32))
    record = ArrayRecord(
        {"x": Array(**{"dtype": array.dtype, "shape": array.shape, **claim}, stype=array.stype, data=array.data)}
    )
    try:
        seen = read_state(record)["x"].numpy()
    except ValueError:
        return
    assert same(seen, record["x"].numpy())
