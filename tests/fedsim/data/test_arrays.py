"""The user's own arrays in a NumPy file, and the waves that are made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.base.errors import ConfigError, DataError
from fedsim.data.arrays import ArrayFile
from fedsim.data.checks import check_dataset
from fedsim.data.waves import Waves


def write_arrays(folder: Path, **arrays: Any) -> Path:
    path = folder / "mine.npz"
    np.savez(path, **arrays)
    return path


def make_series(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 2, 16))


def test_both_parts_are_read_as_they_are(tmp_path: Path) -> None:
    series = make_series(6)
    path = write_arrays(
        tmp_path, x_train=series[:4], y_train=np.array([0, 1, 2, 0]), x_test=series[4:], y_test=np.array([1, 2])
    )
    data = ArrayFile(path=str(path)).load(None)
    assert (data.task.modality, data.task.input_shape, data.num_classes) == ("series", (2, 16), 3)
    assert torch.equal(data.train.inputs(), torch.from_numpy(series[:4]).float())
    assert data.test.labels.tolist() == [1, 2]
    assert data.value_range == pytest.approx((series.min(), series.max()))


def test_a_part_is_held_out_where_there_is_one_array(tmp_path: Path) -> None:
    path = write_arrays(tmp_path, x=make_series(20), y=np.arange(20) % 2)
    data = ArrayFile(path=path.name, value_range=(-9, 9)).load(tmp_path)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert data.test.labels.bincount().tolist() == [2, 2]
    assert data.value_range == (-9, 9)


def test_rows_of_labels_or_numbers_are_targets(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 2, (20, 3))
    data = ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=labels))).load(None)
    assert (data.task.goal, data.task.outputs, data.num_classes) == ("labels", 3, 0)
    both = np.concatenate([data.train.labels.numpy(), data.test.labels.numpy()])
    assert sorted(both.tolist()) == sorted(labels.tolist())
    numbers = np.random.default_rng(0).normal(5, 3, (20, 2))
    data = ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=numbers))).load(None)
    assert (data.task.goal, data.task.outputs, data.task.target_shape) == ("numbers", 2, (2,))
    check_dataset(data, "npz")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.full((20, 2), 2), "rows of integers from 2 to 2, expected 0 or 1"),
        (np.eye(20, 3), "rows of real numbers that are all 0 or 1; write labels"),
        (np.zeros((20, 4, 4), int), "the class of each pixel"),
    ],
)
def test_rows_that_are_no_labels_are_refused(tmp_path: Path, targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=targets))).load(None)


def test_real_numbers_are_targets_and_are_standardised(tmp_path: Path) -> None:
    targets = np.linspace(3, 8, 20)
    data = ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=targets))).load(None)
    assert data.num_classes == 0
    assert data.target == pytest.approx((targets.mean(), targets.std()))
    together = torch.cat([data.train.labels, data.test.labels]) * data.target[1] + data.target[0]
    assert together.sort().values.tolist() == pytest.approx(targets.tolist(), rel=1e-5)


def test_the_file_may_say_another_modality(tmp_path: Path) -> None:
    path = write_arrays(tmp_path, x=make_series(4), y=np.arange(4) % 2)
    assert ArrayFile(path=str(path), modality="pairs", test_fraction=0.5).load(None).task.modality == "pairs"


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"a": [1]}, "has no array 'x_train', only a; name them x and y"),
        ({"x": [[1.0]], "y": ["b"]}, "'y' holds <U1, expected numbers"),
        ({"x": [1.0], "y": [1]}, r"'x' has the shape \(1,\), expected examples by their axes"),
        ({"x": [[1.0]], "y": 1}, r"'y' has the shape \(\), expected"),
        ({"x": [[1.0]], "y": float("nan")}, r"'y' has the shape \(\), expected"),
        ({"x": [[1.0], [2.0]], "y": [1]}, "'x' has 2 examples, but not as many labels"),
        ({"x": [[None]], "y": [1]}, "is not a file of arrays, .*; write it by numpy.savez"),
    ],
)
def test_another_file_is_one_sentence(arrays: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = write_arrays(tmp_path, **arrays)
    with pytest.raises(DataError, match=sentence) as refused:
        ArrayFile(path=str(path)).load(None)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_none_and_a_range_upside_down_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.npz").write_text("x")
    with pytest.raises(DataError, match=r"mine\.npz: is not a file of arrays"):
        ArrayFile(path=str(tmp_path / "mine.npz")).load(None)
    with pytest.raises(DataError, match="'npz' needs a path"):
        ArrayFile().load(None)
    with pytest.raises(ConfigError, match=r"value_range: expected \[lowest, highest\], got \[1, 0\]"):
        ArrayFile(value_range=(1, 0))


def test_waves_are_series_of_four_forms_near_the_cycles_of_their_client() -> None:
    data = Waves(channels=2, length=64, clients=3, examples_per_client=40, noise=0).load(None)
    assert (data.task.modality, data.task.input_shape) == ("series", (2, 64))
    assert data.train.labels.bincount().tolist() == [30] * 4
    squares = data.train.raw[data.train.labels == data.class_names.index("square")]
    assert all(len(channel.unique()) == 2 for series in squares for channel in series)
    # Crossings of 0, two a cycle, differ from client to client more than within one.
    assert data.train.groups is not None
    counts = (data.train.raw[:, :, 1:].sign() != data.train.raw[:, :, :-1].sign()).sum((1, 2)).float()
    means = torch.stack([counts[data.train.groups == client].mean() for client in range(3)])
    assert means.std() > 2 * max(counts[data.train.groups == client].std() for client in range(3)) / 40**0.5


def test_more_clients_leave_the_others_as_they_are() -> None:
    few, many = (Waves(clients=clients, examples_per_client=8).load(None) for clients in (1, 3))
    assert torch.equal(few.train.raw, many.train.raw[:8])
    assert not torch.equal(many.train.raw[:8], many.train.raw[8:16])


def test_rows_of_one_label_each_are_classes(tmp_path: Path) -> None:
    rows = np.eye(3, dtype=int)[np.arange(20) % 3]
    data = ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=rows))).load(None)
    with pytest.raises(DataError, match=r"exactly one label an example, .* as y.argmax\(1\) gives it"):
        check_dataset(data, "npz")


@pytest.mark.parametrize(("real", "warned"), [((0.0, 1.0, 2.0), True), ((1.0, 2.0), True), ((0.0, 2.0), False)])
def test_real_numbers_that_may_be_classes_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, real: tuple[float, ...], warned: bool
) -> None:
    path = write_arrays(tmp_path, x=make_series(20), y=np.resize(real, 20))
    for _ in ("parsed", "cached"):
        caplog.clear()
        assert ArrayFile(path=str(path)).load(None).task.goal == "numbers"
        assert ("write them as integers if they are classes" in caplog.text) == warned


def test_targets_of_both_parts_are_of_one_kind(tmp_path: Path) -> None:
    path = write_arrays(
        tmp_path, x_train=make_series(6), y_train=np.arange(6) % 2, x_test=make_series(4), y_test=np.full(4, 0.7)
    )
    with pytest.raises(DataError, match="one holds real numbers and the other integers"):
        ArrayFile(path=str(path)).load(None)


def test_unsigned_labels_are_classes(tmp_path: Path) -> None:
    path = write_arrays(tmp_path, x=make_series(20), y=(np.arange(20) % 3).astype(np.uint16))
    assert ArrayFile(path=str(path)).load(None).num_classes == 3


def test_a_number_that_never_differs_is_nothing_to_predict(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the target is 2\.5 in every example to train on"):
        ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=np.full(20, 2.5)))).load(None)


@pytest.mark.parametrize(("offset", "is_kept"), [(0.0, True), (1e4, False), (1.7e9, False)])
def test_inputs_that_32_bits_would_round_away_are_refused(tmp_path: Path, offset: float, is_kept: bool) -> None:
    inputs = np.random.default_rng(0).random((20, 3))
    inputs[:, 1], inputs[:, 2] = inputs[:, 1] / 10 + offset, 0.1  # the last one never differs
    path = str(write_arrays(tmp_path, x=inputs, y=np.arange(20) % 2))
    if is_kept:
        assert ArrayFile(path=path).load(None).train.raw.dtype == torch.float32
    else:
        with pytest.raises(DataError, match=r"at \[:, 1\], which 32 bits round by up to .*; subtract an offset"):
            ArrayFile(path=path).load(None)


def test_equal_examples_stay_on_one_side_of_the_split(tmp_path: Path) -> None:
    series, labels = make_series(20), np.arange(20) % 2
    path = write_arrays(tmp_path, x=np.tile(series, (3, 1, 1)), y=np.tile(labels, 3))
    data = ArrayFile(path=str(path)).load(None)
    train, test = ({bytes(row) for row in part.raw.numpy()} for part in (data.train, data.test))
    assert (len(train & test), len(train), len(test), len(data.test)) == (0, 16, 4, 12)
    once = ArrayFile(path=str(write_arrays(tmp_path, x=series, y=labels))).load(None)
    assert test == {bytes(row) for row in once.test.raw.numpy()}


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.where(np.arange(20) == 3, np.nan, 1.0), "'y' has a NaN or an infinite number in example 3"),
        (np.arange(20) % 2 + 2**40, r"holds 1099511627777, and classes .* np.unique"),
        (np.arange(20, dtype=np.uint64) % 2 + np.uint64(2**63), r"holds 9223372036854775809, and classes"),
    ],
)
def test_labels_that_are_neither_classes_nor_numbers_are_refused(tmp_path: Path, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=labels))).load(None)


def test_classes_that_nobody_trains_on_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = np.arange(20) % 3
    ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=labels))).load(None)
    assert not caplog.messages
    ArrayFile(path=str(write_arrays(tmp_path, x=make_series(20), y=np.where(labels == 2, 9, labels)))).load(None)
    assert "no example to train on of 7 of the classes 0 to 9 (2, 3, 4, 5, 6 and 2 more)" in caplog.messages[0]


@pytest.mark.parametrize("count", [2, 20])
def test_a_split_without_examples_on_one_side_says_why(tmp_path: Path, count: int) -> None:
    series = np.zeros((count, 2, 16)) + (np.arange(count)[:, None, None] if count == 2 else 0)
    with pytest.raises(DataError, match=r"equal ones stay on one side, test_fraction = 0.2 leaves none to test on"):
        ArrayFile(path=str(write_arrays(tmp_path, x=series, y=np.arange(count) % 2))).load(None)
