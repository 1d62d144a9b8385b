"""Image data sets: their file formats, beside torchvision's own readers, and real files where there are some."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import logging
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from scipy.io import savemat
from sklearn.datasets import load_digits

from fedsim.base.errors import ConfigError, DataError
from fedsim.data import Dataset, cifar
from fedsim.data.cifar import Cifar10, Cifar100
from fedsim.data.download import download
from fedsim.data.faces import AttFaces
from fedsim.data.files import SUMS_FILE
from fedsim.data.idx import Emnist, FashionMnist, Mnist
from fedsim.data.image_folder import ImageFolder
from fedsim.data.svhn import Svhn
from tests.support.data_folder import find_data_folder

Array = np.ndarray[Any, Any]


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path, own_cache: None) -> Path:
    path = tmp_path / "data"
    path.mkdir()
    return path


def list_sums(folder: Path) -> None:
    """Say that all files are meant to be as they are, though they are not the official ones."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS_FILE)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in paths]
    (folder / SUMS_FILE).write_text("".join(lines))
    later = (folder / SUMS_FILE).stat().st_mtime_ns + 10**6 * len(lines)
    os.utime(folder / SUMS_FILE, ns=(later, later))


def refusal(load: Callable[[Path], object], folder: Path) -> str:
    """The one sentence in which `load` refuses what is in `folder`."""
    with pytest.raises(DataError) as caught:
        load(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


# idx: MNIST and its relatives.


def write_idx(path: Path, array: Array, kind: int = 8, packed: bool = True) -> None:
    head = (kind << 8 | array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes()
    content = head + array.astype(">i4" if kind == 12 else np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f"{path.name}.gz" if packed else path.name).write_bytes(
        gzip.compress(content) if packed else content
    )


def write_pair(home: Path, stem: str, labels: Array, packed: bool = True) -> Array:
    images = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), 28, 28))
    write_idx(home / f"{stem}-images-idx3-ubyte", images, packed=packed)
    write_idx(home / f"{stem}-labels-idx1-ubyte", labels, packed=packed)
    return images


def write_writers(folder: Path, part: str, labels: Array, writers: list[int], packed: bool = True) -> None:
    rows = np.zeros((len(writers), 8), int)
    rows[:, 0], rows[:, 2] = labels, writers
    write_idx(folder / "QMNIST" / "raw" / f"qmnist-{part}-labels-idx2-int", rows, kind=12, packed=packed)


@pytest.mark.parametrize("packed", [False, True])
def test_the_writers_of_mnist_are_its_natural_groups(folder: Path, packed: bool) -> None:
    train, test = np.array([3, 1, 4, 1]), np.array([5, 9])
    write_pair(folder / "MNIST" / "raw", "train", train)
    write_pair(folder / "MNIST" / "raw", "t10k", test)
    list_sums(folder)
    plain = Mnist().load(folder)
    assert plain.train.groups is None
    assert plain.test.groups is None
    assert plain.group_names == ()
    write_writers(folder, "train", train, [2100, 7, 2100, 40], packed)
    write_writers(folder, "test", np.array([5, 9, 2, 6]), [9, 7, 1, 1], packed)  # QMNIST's test part is longer
    list_sums(folder)
    data = Mnist().load(folder)
    assert data.group_names == ("7", "40", "2100", "9")
    assert data.train.groups is not None
    assert data.test.groups is not None
    assert data.train.groups.tolist() == [2, 0, 2, 1]
    assert data.test.groups.tolist() == [3, 0]


@pytest.mark.parametrize("labels", [[3, 1, 4, 2], [3, 1, 4]])
def test_writers_of_other_digits_are_refused(folder: Path, labels: list[int]) -> None:
    for stem in ("train", "t10k"):
        write_pair(folder / "MNIST" / "raw", stem, np.array([3, 1, 4, 1]))
    write_writers(folder, "train", np.array(labels), [1] * len(labels))
    list_sums(folder)
    sentence = refusal(Mnist().load, folder)
    assert "qmnist-train-labels-idx2-int.gz: its digits are not those of MNIST/raw; get QMNIST's file" in sentence


@pytest.mark.thorough
def test_real_mnist_is_what_torchvision_reads_and_has_539_writers(tmp_path: Path) -> None:
    import torchvision

    folder = find_data_folder("MNIST/raw", "QMNIST/raw")
    data = Mnist().load(folder)
    shutil.copytree(folder / "MNIST" / "raw", tmp_path / "MNIST" / "raw")
    for path in (tmp_path / "MNIST" / "raw").glob("*.gz"):
        path.chmod(0o644)
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    for part, train in ((data.train, True), (data.test, False)):
        reference = torchvision.datasets.MNIST(tmp_path, train=train)
        assert torch.equal(part.raw[:, 0], reference.data)
        assert torch.equal(part.labels, reference.targets)
    assert data.train.groups is not None
    assert data.test.groups is not None
    sizes = data.train.groups.bincount()
    assert (len(sizes), sizes.min().item(), sizes.max().item(), sizes.median().item()) == (539, 19, 131, 116)
    assert set(data.test.groups.tolist()) == set(range(539, 539 + 297))
    assert len(data.group_names) == len(set(data.group_names)) == 539 + 297
    # README: bytes 8 to 11 of the first row are NIST's writer id, here 0x086a.
    raw = gzip.decompress((folder / "QMNIST" / "raw" / "qmnist-train-labels-idx2-int.gz").read_bytes())
    assert data.group_names[data.train.groups[0]] == str(int.from_bytes(raw[12 + 8 : 12 + 12], "big"))


def test_the_official_sum_is_asked_of_packed_files(folder: Path) -> None:
    for stem in ("train", "t10k"):
        write_pair(folder / "FashionMNIST" / "raw", stem, np.arange(4), packed=stem == "t10k")
    sentence = refusal(FashionMnist().load, folder)
    assert "t10k-images-idx3-ubyte.gz: is damaged or another file, its md5 is" in sentence
    assert "the official file has bef4ecab320f" in sentence


def test_fashion_mnist_has_a_folder_and_names_of_its_own(folder: Path) -> None:
    import torchvision

    images = write_pair(folder / "FashionMNIST" / "raw", "train", np.array([9, 0, 2]), packed=False)
    write_pair(folder / "FashionMNIST" / "raw", "t10k", np.array([1]), packed=False)
    data = FashionMnist().load(folder)
    assert np.array_equal(data.train.raw[:, 0], images)
    assert [data.class_names[label] for label in data.train.labels.tolist()] == [
        "ankle boot",
        "T-shirt/top",
        "pullover",
    ]
    reference = torchvision.datasets.FashionMNIST(folder, train=True)
    assert torch.equal(data.train.raw[:, 0], reference.data)
    assert [name.lower() for name in data.class_names] == [name.lower() for name in reference.classes]


@pytest.mark.parametrize(
    ("load", "name"), [(Mnist().load, "mnist"), (FashionMnist().load, "fashion-mnist"), (Emnist().load, "emnist")]
)
def test_missing_files_come_with_the_command_that_fetches_them(
    folder: Path, load: Callable[[Path], object], name: str
) -> None:
    assert f"`fedsim data {name} --download --data-dir {folder}` fetches it" in refusal(load, folder)


@pytest.mark.parametrize(
    ("shape", "content"), [((2**32 - 1, 28, 28), 784), ((2**31, 2**31, 4), 0), ((1, 28, 28), 783), ((1, 28, 28), 785)]
)
def test_sizes_that_the_content_does_not_have_are_damage(folder: Path, shape: tuple[int, ...], content: int) -> None:
    home = folder / "MNIST" / "raw"
    for stem in ("train", "t10k"):
        write_pair(home, stem, np.array([1]), packed=False)
    head = (0x803).to_bytes(4, "big") + np.array(shape, ">u4").tobytes()
    (home / "train-images-idx3-ubyte").write_bytes(head + bytes(content))
    assert "train-images-idx3-ubyte: is damaged (" in refusal(Mnist().load, folder)


def test_a_packed_file_with_garbled_inside_is_damage(folder: Path) -> None:
    home = folder / "MNIST" / "raw"
    for stem in ("train", "t10k"):
        write_pair(home, stem, np.arange(10))
    path = home / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[100:140] = bytes(40)
    path.write_bytes(content)
    list_sums(folder)
    assert "train-images-idx3-ubyte.gz: is damaged (" in refusal(Mnist().load, folder)


SPLITS = ["letters", "balanced", "byclass", "bymerge", "digits", "mnist"]


@pytest.mark.parametrize("split", SPLITS)
def test_emnist_is_upright_and_its_classes_are_those_of_torchvision(folder: Path, split: Any) -> None:
    import torchvision

    known = [name for name in torchvision.datasets.EMNIST.classes_split_dict[split] if name != "N/A"]
    first = 1 if split == "letters" else 0
    labels = np.arange(len(known)) + first
    home = folder / "EMNIST" / "raw"
    images = write_pair(home, f"emnist-{split}-train", labels, packed=False)
    write_pair(home, f"emnist-{split}-test", labels[:3], packed=False)
    data = Emnist(split=split).load(folder)
    assert data.num_classes == len(known)
    assert data.class_names == tuple(known)
    assert data.train.labels.tolist() == list(range(len(known)))
    assert np.array_equal(data.train.raw[:, 0], images.transpose(0, 2, 1))
    assert len(data.test) == 3


def test_emnist_makes_do_with_its_test_file_only_if_told_to(folder: Path) -> None:
    labels = np.tile([1, 26], 10)
    images = write_pair(folder / "EMNIST" / "raw", "emnist-letters-test", labels)
    sentence = refusal(Emnist().load, folder)
    assert "emnist-letters-train-images-idx3-ubyte" in sentence
    assert 'set data.files = "test" to make do with the official test file, or on a machine with' in sentence
    data = Emnist(files="test").load(folder)
    assert (len(data.train), len(data.test)) == (16, 4)
    assert data.test.labels.tolist() == [0, 25, 0, 25]
    assert np.array_equal(data.test.raw[:, 0], images.transpose(0, 2, 1)[[8, 9, 18, 19]])
    assert "emnist-digits-test" in refusal(Emnist(split="digits", files="test").load, folder)


def test_real_letters_are_upright_and_held_out_evenly(tmp_path: Path) -> None:
    import torchvision

    folder = find_data_folder("EMNIST/raw")
    data = Emnist(files="test").load(folder)
    assert data.train.labels.bincount().tolist() == [640] * 26
    assert data.test.labels.bincount().tolist() == [160] * 26
    (tmp_path / "EMNIST" / "raw").mkdir(parents=True)
    for path in (folder / "EMNIST" / "raw").glob("*.gz"):
        (tmp_path / "EMNIST" / "raw" / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    reference = torchvision.datasets.EMNIST(tmp_path, split="letters", train=False)
    assert torch.equal(data.test.raw[:, 0], reference.data[4::5].mT)
    assert torch.equal(data.test.labels, reference.targets[4::5] - 1)
    # An upright L has its corner at the lower left; mirrored along the diagonal it is at the upper right.
    letter = data.train.inputs()[data.train.labels == data.class_names.index("l")].mean(0)[0]
    assert letter[14:, :14].mean() > 1.5 * letter[:14, 14:].mean()


# CIFAR.


def batch(labels: list[int], seed: int = 0, **more: Any) -> dict[str, Any]:
    data = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return {"data": data, "labels": labels, **more}


def write_pickle(path: Path, content: Any, protocol: int = 2) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=protocol))


def write_cifar10(folder: Path, batches: int = 5, protocol: int = 2) -> Path:
    home = folder / "cifar-10-batches-py"
    for number in range(1, batches + 1):
        write_pickle(home / f"data_batch_{number}", batch([number, 0], number), protocol)
    write_pickle(home / "test_batch", batch([9], 99), protocol)
    write_pickle(home / "batches.meta", {"label_names": list("abcdefghij")}, protocol)
    list_sums(folder)
    return home


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_cifar10_is_read_in_the_order_of_its_files(folder: Path, protocol: int) -> None:
    write_cifar10(folder, protocol=protocol)
    data = Cifar10().load(folder)
    assert data.train.labels.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert data.test.labels.tolist() == [9]
    assert np.array_equal(data.train.raw[2:4].flatten(1), batch([2, 0], 2)["data"])
    assert data.train.raw.shape == (10, 3, 32, 32)
    assert data.class_names == tuple("abcdefghij")


def test_a_part_of_cifar10_has_to_be_listed_and_the_log_says_how_much_it_is(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = write_cifar10(folder, batches=2)
    with caplog.at_level(logging.INFO, logger="fedsim"):
        assert len(Cifar10().load(folder).train) == 4
        assert len(Cifar10().load(folder).train) == 4
    lines = ["cifar10: 4 of 50000 training and 1 of 10000 test examples are there"] * 2
    assert [record.getMessage() for record in caplog.records] == lines
    (home / "data_batch_1").rename(home / "aside")  # listed, and gone
    sentence = refusal(Cifar10().load, folder)
    assert "cifar-10-batches-py/data_batch_1: no such file; on a machine with a network" in sentence
    assert "or to work with a part, list exactly the files that are there in" in sentence
    (folder / SUMS_FILE).unlink()
    (home / "aside").rename(home / "data_batch_1")
    assert "data_batch_3: no such file" in refusal(Cifar10().load, folder)


def test_five_files_that_are_not_official_are_refused_unless_listed(folder: Path) -> None:
    write_cifar10(folder)
    (folder / SUMS_FILE).unlink()
    assert "the official file has c99cafc15224" in refusal(Cifar10().load, folder)


@pytest.mark.parametrize("name", ["data_batch_1", "test_batch", "batches.meta"])
def test_no_cifar10_at_all_is_one_sentence(folder: Path, name: str) -> None:
    if name != "data_batch_1":
        (write_cifar10(folder) / name).unlink()
    assert f"{name}: no such file" in refusal(Cifar10().load, folder)
    assert "--download" in refusal(Cifar10().load, folder)


def write_cifar100(folder: Path) -> None:
    home = folder / "cifar-100-python"
    for part in ("train", "test"):
        content = {"data": batch([0] * 3)["data"], "fine_labels": [99, 0, 50], "coarse_labels": [19, 0, 7]}
        write_pickle(home / part, content)
    names = {"fine_label_names": [f"f{i}" for i in range(100)], "coarse_label_names": [f"c{i}" for i in range(20)]}
    write_pickle(home / "meta", names)
    list_sums(folder)


def test_cifar100_has_100_classes_or_20(folder: Path) -> None:
    write_cifar100(folder)
    fine, coarse = Cifar100().load(folder), Cifar100(coarse=True).load(folder)
    assert (fine.num_classes, fine.train.labels.tolist(), fine.class_names[99]) == (100, [99, 0, 50], "f99")
    assert (coarse.num_classes, coarse.train.labels.tolist(), coarse.class_names[19]) == (20, [19, 0, 7], "c19")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([1, 2], r"is not a dictionary with 'data' and 'labels'"),
        ({"data": 1}, r"is not a dictionary with 'data' and 'labels'"),
        (batch([0, 1]) | {"labels": [1]}, "holds 2 images but 1 labels"),
        (batch([0]) | {"labels": 5}, "'labels' is not a list of classes"),
        (batch([0]) | {"labels": [-1]}, "'labels' is not a list of classes"),
        (batch([0]) | {"labels": ["a"]}, "'labels' is not a list of classes"),
        (batch([0]) | {"data": [[0] * 3072]}, "'data' is not an array of rows of 3072 bytes"),
        (batch([0]) | {"data": np.zeros((1, 3071), np.uint8)}, "'data' is not an array of rows of 3072 bytes"),
        (batch([0]) | {"data": np.zeros((1, 3072))}, r"is damaged \(ValueError: expected an array of bytes, got .*f8"),
        (batch([0]) | {"data": np.array([[None]])}, "is damaged .*expected an array of bytes"),
        (batch([0]) | {"data": torch.zeros(1)}, "asks for torch"),
    ],
)
def test_pickles_of_something_else_are_refused(folder: Path, content: Any, sentence: str) -> None:
    home = write_cifar10(folder)
    write_pickle(home / "data_batch_1", content)
    list_sums(folder)
    with pytest.raises(DataError, match=rf"data_batch_1: {sentence}"):
        Cifar10().load(folder)


class Harm:
    """Unpickling this runs a command."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function", [os.system, os.mkdir, eval, exec, len, getattr, np.load, np.array, shutil.rmtree])
def test_a_pickle_that_asks_for_a_program_is_refused_not_obeyed(
    folder: Path, tmp_path: Path, function: Callable[..., Any], protocol: int
) -> None:
    home = write_cifar10(folder)
    harm = Harm(function, f"touch {tmp_path / 'harmed'}" if function is os.system else str(tmp_path / "harmed"))
    write_pickle(home / "data_batch_1", batch([0, 1]) | {"more": [harm]}, protocol)
    list_sums(folder)
    sentence = refusal(Cifar10().load, folder)
    assert "which no CIFAR file needs; it is damaged or made to do harm, get the official file" in sentence
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cnumpy\nndarray\n(I1000000000000\ntR.",  # calling the admitted names with other arguments
        b"cnumpy\ndtype\n(S'O'\ntR.",
        b"cnumpy\ndtype\n(S'u1,O'\ntR.",
        b"c_codecs\nencode\n(S'x'\nS'zip'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR(I1\n(I9000\ntcnumpy\ndtype\n(S'u1'\ntRI00\nS'short'\ntb.",
        b"cnumpy.core\nmultiarray\n.",
        b"cbuiltins\nobject.__subclasses__\n.",
        b"Psomewhere\n.",  # a persistent id
        b"\x80\x02\x82\x01.",  # an extension code
        b"0.",
        b"",
    ],
)
def test_odd_programs_end_in_a_sentence(folder: Path, program: bytes) -> None:
    home = write_cifar10(folder)
    (home / "data_batch_1").write_bytes(program)
    list_sums(folder)
    assert "data_batch_1: " in refusal(Cifar10().load, folder)


def test_a_pickle_cannot_change_numpys_own_types(folder: Path) -> None:
    home = write_cifar10(folder)
    state = b"(I3\nS'>'\n(S'a'\nt}S'a'\n(cnumpy\ndtype\n(S'u1'\ntRI0\ntsI8\nI1\nI0\ntb."
    (home / "data_batch_1").write_bytes(b"cnumpy\ndtype\n(S'u1'\ntR" + state)
    list_sums(folder)
    refusal(Cifar10().load, folder)
    assert np.dtype(np.uint8) == np.dtype("u1")
    assert (np.dtype("u1").itemsize, np.dtype("u1").names) == (1, None)


def test_a_cut_pickle_is_damage_wherever_it_is_cut(folder: Path) -> None:
    home = write_cifar10(folder, batches=1)
    whole = (home / "data_batch_1").read_bytes()
    for size in (0, 1, 2, 10, 50, 100, 1000, len(whole) - 1):
        (home / "data_batch_1").write_bytes(whole[:size])
        list_sums(folder)
        assert "data_batch_1: is damaged (" in refusal(Cifar10().load, folder)


def test_garbled_pickles_never_end_in_anything_but_data_or_a_sentence(folder: Path) -> None:
    home = write_cifar10(folder, batches=1)
    path = home / "batches.meta"
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(500):
        content = np.frombuffer(whole, np.uint8).copy()
        places = rng.integers(0, len(content), rng.integers(1, 6))
        content[places] = rng.integers(0, 256, len(places))
        path.write_bytes(content.tobytes())
        with contextlib.suppress(DataError):
            cifar._read_names(path, home, {path.name: hashlib.md5(content.tobytes()).hexdigest()}, "label_names")


@pytest.mark.thorough
@pytest.mark.parametrize(("ours", "theirs"), [(Cifar10(), "CIFAR10"), (Cifar100(), "CIFAR100")])
def test_real_cifar_is_what_torchvision_reads(ours: Cifar10 | Cifar100, theirs: str) -> None:
    import torchvision

    ten = theirs == "CIFAR10"
    home = "cifar-10-batches-py" if ten else "cifar-100-python"
    files = ("data_batch_1", "test_batch") if ten else ("train", "test")
    folder = find_data_folder(*(f"{home}/{name}" for name in files), SUMS_FILE)
    md5 = [hashlib.md5((folder / home / name).read_bytes()).hexdigest() for name in files]
    lists = {"train_list": [[files[0], md5[0]]], "test_list": [[files[1], md5[1]]]}
    subset = type("Subset", (getattr(torchvision.datasets, theirs),), lists)  # the data at hand are a part
    data = ours.load(folder)
    for part, train in ((data.train, True), (data.test, False)):
        reference = subset(folder, train=train)
        assert np.array_equal(part.raw.permute(0, 2, 3, 1), reference.data)
        assert part.labels.tolist() == reference.targets
        assert list(data.class_names) == reference.classes


def test_real_superclasses_hold_five_classes_each() -> None:
    folder = find_data_folder("cifar-100-python/train", SUMS_FILE)
    fine, coarse = Cifar100().load(folder), Cifar100(coarse=True).load(folder)
    assert torch.equal(fine.train.raw, coarse.train.raw)
    pairs = set(zip(fine.train.labels.tolist(), coarse.train.labels.tolist(), strict=True))
    assert len(pairs) == 100
    assert np.bincount([pair[1] for pair in pairs]).tolist() == [5] * 20


# SVHN.


def write_svhn(home: Path, train: list[int], test: list[int], **replaced: Any) -> Array:
    home.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, labels in (("train", train), ("test", test)):
        images = rng.integers(0, 256, (32, 32, 3, len(labels)), dtype=np.uint8)
        content = {"X": images, "y": np.array(labels, np.uint8)[:, None]} | (replaced if part == "test" else {})
        savemat(home / f"{part}_32x32.mat", content)
    return images


@pytest.mark.parametrize("home", [".", "SVHN"])
def test_svhn_counts_from_zero_and_lies_in_either_folder(folder: Path, home: str) -> None:
    images = write_svhn(folder / home, [1, 10, 9], [10, 2])
    list_sums(folder)
    data = Svhn().load(folder)
    assert data.train.labels.tolist() == [1, 0, 9]
    assert data.test.labels.tolist() == [0, 2]
    assert data.test.raw.shape == (2, 3, 32, 32)
    assert data.test.raw[1, 2, 5, 7].item() == images[5, 7, 2, 1]


def test_svhn_is_what_torchvision_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    write_svhn(folder, [1, 10, 9], [10, 2])
    list_sums(folder)
    data = Svhn().load(folder)
    md5 = hashlib.md5((folder / "test_32x32.mat").read_bytes()).hexdigest()
    monkeypatch.setitem(torchvision.datasets.SVHN.split_list, "test", ["", "test_32x32.mat", md5])
    reference = torchvision.datasets.SVHN(folder, split="test")
    assert np.array_equal(data.test.raw, reference.data)
    assert data.test.labels.tolist() == reference.labels.tolist()


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"y": np.array([[1]], np.uint8)}, "holds 2 images but 1 labels"),
        ({"y": np.array([[1.0], [2.0]])}, "'y' holds float64, expected integers"),
        ({"X": np.zeros((32, 32, 3, 2))}, r"'X' holds float64 of shape \(32, 32, 3, 2\), expected bytes"),
        ({"X": np.zeros((32, 32, 2), np.uint8)}, r"'X' holds uint8 of shape \(32, 32, 2\)"),
    ],
)
def test_svhn_of_other_content_is_refused(folder: Path, replaced: dict[str, Any], sentence: str) -> None:
    write_svhn(folder, [1, 2], [1, 2], **replaced)
    list_sums(folder)
    with pytest.raises(DataError, match=rf"test_32x32\.mat: {sentence}"):
        Svhn().load(folder)


@pytest.mark.parametrize("content", [b"", b"short", b"<html>" * 99, None])
def test_damaged_or_missing_svhn_is_one_sentence(folder: Path, content: bytes | None) -> None:
    assert "SVHN/train_32x32.mat (or train_32x32.mat): no such file; on a machine" in refusal(Svhn().load, folder)
    write_svhn(folder, [1], [1])
    assert "the official file has e26dedcc434d" in refusal(Svhn().load, folder)
    path = folder / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:-99] if content is None else content)
    list_sums(folder)
    assert "train_32x32.mat: is damaged (" in refusal(Svhn().load, folder)


# Faces.


def write_faces(folder: Path) -> None:
    for person in range(1, 41):
        home = folder / "att_faces" / f"s{person}"
        home.mkdir(parents=True)
        for image in range(1, 11):
            Image.new("L", (92, 112), person * 5 + image).save(home / f"{image}.pgm")


def test_the_last_images_of_each_person_are_held_out(folder: Path) -> None:
    write_faces(folder)
    data = AttFaces(test_images=3, size=(4, 3)).load(folder)
    assert data.train.raw.shape == (280, 1, 4, 3)
    assert data.test.raw[:, 0, 0, 0].tolist() == [p * 5 + i for p in range(1, 41) for i in (8, 9, 10)]
    assert data.train.labels.tolist() == [p for p in range(40) for _ in range(7)]
    assert data.train.groups is not None
    assert torch.equal(data.train.groups, data.train.labels)
    assert data.group_names == data.class_names
    assert (data.class_names[0], data.class_names[-1]) == ("s1", "s40")


def test_a_missing_or_damaged_face_is_named(folder: Path) -> None:
    assert "att_faces/s1/1.pgm: no such file; get the 'AT&T database of faces'" in refusal(AttFaces().load, folder)
    write_faces(folder)
    path = folder / "att_faces" / "s7" / "3.pgm"
    for content in (path.read_bytes()[:-5], b"", b"P5 1", b"<html>"):
        path.write_bytes(content)
        assert "att_faces/s7/3.pgm: is not a whole image (" in refusal(AttFaces().load, folder)
    path.unlink()
    assert "att_faces/s7/3.pgm: no such file" in refusal(AttFaces().load, folder)


def test_faces_beyond_the_memory_are_refused_before_one_is_resized(folder: Path) -> None:
    write_faces(folder)
    with pytest.raises(ConfigError, match=r"data\.size: 400 images of 1000000 x 90000 take 72000.0 GB, more than the"):
        AttFaces(size=(1_000_000, 90_000)).load(folder)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"test_images": 0}, "test_images: expected at least 1, got 0"),
        ({"test_images": 10}, "test_images: expected a value below 10, got 10"),
        ({"size": (80, 0)}, "size.1: expected at least 1, got 0"),
    ],
)
def test_settings_of_the_faces_that_cannot_be_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AttFaces(**settings)
    assert str(caught.value) == sentence


@pytest.mark.thorough
def test_real_faces_keep_their_pixels_or_are_resized() -> None:
    from torchvision.transforms.functional import resize

    folder = find_data_folder("att_faces/s1")
    native, small = AttFaces(size=(112, 92)).load(folder), AttFaces().load(folder)
    assert native.train.raw.shape == (320, 1, 112, 92)
    assert small.train.raw.shape == (320, 1, 80, 70)
    with Image.open(folder / "att_faces" / "s40" / "10.pgm") as image:
        assert np.array_equal(native.test.raw[-1, 0], np.array(image))
        assert np.array_equal(small.test.raw[-1, 0], np.array(resize(image, [80, 70])))
    assert len(torch.unique(torch.cat([native.train.raw, native.test.raw]).flatten(1), dim=0)) == 400


# Images of one's own.


def write_image(path: Path, size: tuple[int, int] = (40, 30), seed: int = 0, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (33, 33), (16, 16), (100, 17), (5, 7), (17, 16)])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1"])
def test_images_are_resized_and_cropped_as_by_torchvision(folder: Path, size: tuple[int, int], mode: str) -> None:
    import torchvision
    from torchvision.transforms.functional import center_crop, resize

    for index in range(5):
        write_image(folder / "own" / "ab"[index % 2] / f"{index}.png", size, index, mode)
    data = ImageFolder(path="own", size=16).load(folder)
    reference = torchvision.datasets.ImageFolder(folder / "own")
    image, label = reference[4]
    assert data.test.labels.tolist() == [label]
    assert np.array_equal(data.test.raw[0].permute(1, 2, 0), np.array(center_crop(resize(image, 16), [16, 16])))
    assert list(data.class_names) == reference.classes
    assert data.train.labels.tolist() == reference.targets[:4]


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_photograph_that_was_taken_upright_is_loaded_upright(folder: Path, suffix: str, orientation: int) -> None:
    turns = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    upright = Image.new("RGB", (20, 32), "black")
    upright.paste("white", (0, 0, 20, 16))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    for name in ("bus", "tram"):
        (folder / "own" / name).mkdir(parents=True)
        for number in range(2):
            image = upright.copy()
            image.paste("grey", (0, 0, 1 + number, 1 + len(name)))  # or they would be equal
            stored = image.transpose(turns[orientation]) if orientation in turns else image
            stored.save(folder / "own" / name / f"{number}.{suffix}", exif=exif)
    loaded = ImageFolder(path="own", size=16, test_fraction=0.5).load(folder).train.inputs()
    assert loaded[:, :, :6, 4:].min() > 0.9
    assert loaded[:, :, 10:, 4:].max() < 0.1


def test_every_fifth_image_in_the_order_of_classes_is_held_out(folder: Path) -> None:
    for label in "abc":
        for index in range(10):
            Image.new("RGB", (8, 8), (ord(label), index, 0)).save(make(folder / "own" / label / f"{index}.png"))
    data = ImageFolder(path="own", size=8).load(folder)
    assert data.test.raw[:, 1, 0, 0].tolist() == [4, 9] * 3
    assert data.test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.train.labels.bincount().tolist() == [8, 8, 8]
    half = ImageFolder(path=str(folder / "own"), size=8, test_fraction=0.5).load(None)
    assert half.test.labels.bincount().tolist() == [5, 5, 5]


def make(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_pages_beyond_the_first_are_told_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    pages = [Image.new("L", (8, 8), shade) for shade in (255, 0)]
    for index, place in enumerate(["train/a/x", "train/b/y", "val/a/v"]):
        pages[0].save(make(folder / "own" / f"{place}.tif"), save_all=index == 0, append_images=pages[1:])
    # Parsed where warnings are off, as by `fedsim check`, then from the cache.
    logging.disable(logging.WARNING)
    try:
        ImageFolder(path="own", size=8).load(folder)
    finally:
        logging.disable(logging.NOTSET)
    for _ in range(2):
        caplog.clear()
        data = ImageFolder(path="own", size=8).load(folder)
        assert data.train.raw.unique().tolist() == [255]
        assert caplog.text.count("only the first is read") == 1


@pytest.mark.parametrize("test", ["val", "test"])
def test_folders_of_their_own_make_the_two_parts(folder: Path, test: str) -> None:
    for index, place in enumerate(["train/a/x", "train/b/deep/y", "train/c/z", f"{test}/c/v", f"{test}/a/w"]):
        Image.new("RGB", (8, 8), (index, 255, 0)).save(make(folder / "own" / f"{place}.PNG"))
    (folder / "own" / "train" / "a" / "notes.txt").write_text("no image")
    (folder / "own" / "train" / ".hidden").mkdir()
    data = ImageFolder(path="own", size=8).load(folder)
    assert data.class_names == ("a", "b", "c")
    assert (data.train.labels.tolist(), data.train.raw[:, 0, 0, 0].tolist()) == ([0, 1, 2], [0, 1, 2])
    assert (data.test.labels.tolist(), data.test.raw[:, 0, 0, 0].tolist()) == ([0, 2], [4, 3])
    write_image(folder / "own" / test / "d" / "x.png")
    assert f"own/{test}/d: 'train' has no class of this name" in refusal(ImageFolder(path="own").load, folder)


@pytest.mark.parametrize("parts", [("train", "valid"), ("Training", "Testing"), ("train", "eval")])
def test_parts_by_other_names_are_no_classes(folder: Path, parts: tuple[str, str]) -> None:
    for part in parts:
        for label in "ab":
            write_image(folder / "own" / part / label / "x.png")
    assert "is named as a part of the data and would be a class; call" in refusal(ImageFolder(path="own").load, folder)


def test_a_class_may_be_called_train(folder: Path) -> None:
    for number, label in enumerate(("bus", "train", "tram")):
        for seed in range(5 * number, 5 * number + 5):
            write_image(folder / "own" / label / "inner" / f"{seed}.png", seed=seed)
    assert ImageFolder(path="own", size=8).load(folder).class_names == ("bus", "train", "tram")


@pytest.mark.parametrize("highest", [4095, 65535])
def test_images_of_twelve_bits_are_not_read_as_black(folder: Path, highest: int) -> None:
    pixels = np.linspace(0, highest, 64).astype(np.uint16).reshape(8, 8)
    for row, name in enumerate(["a/x", "a/y", "a/z", "b/x", "b/y", "b/z"]):
        Image.fromarray(np.roll(pixels, row, axis=0)).save(make(folder / "own" / f"{name}.png"))
    load = ImageFolder(path="own", size=8).load
    if highest == 65535:
        assert int(load(folder).train.raw.max()) == 255
    else:
        assert "no image is brighter than an eighth of its range; scale images of 12 bits" in refusal(load, folder)


def test_new_images_and_changed_ones_are_read_anew(folder: Path) -> None:
    for index in range(5):
        write_image(folder / "own" / "ab"[index % 2] / f"{index}.png", seed=index)
    assert len(ImageFolder(path="own", size=8).load(folder).train) == 4
    write_image(folder / "own" / "b" / "9.png")
    assert len(ImageFolder(path="own", size=8).load(folder).train) == 5


def test_a_folder_that_will_not_do_is_one_sentence(folder: Path) -> None:
    def load(path: str = "own", **settings: Any) -> str:
        return refusal(ImageFolder(path=path, size=8, **settings).load, folder)

    assert load("") == "data: 'image-folder' needs the folder of images; set data.path"
    assert "own: no such folder; set data.path to a folder with one folder of images a class" in load()
    own = folder / "own"
    own.mkdir()
    assert load() == f"{own}: expected two or more folders of images, one a class, got 0"
    write_image(own / "a" / "0.png")
    assert f"got 1; set data.path to {own / 'a'}, if that is where they are" in load()
    (own / "b").mkdir()
    assert f"{own / 'b'}: holds no image; add some (.bmp, .gif" in load()
    write_image(own / "b" / "1.jpg")
    assert f"{own}: 2 images, of which equal ones count as one, are too few to hold out a share of 0.2" in load()
    for index in range(2, 9):
        write_image(own / "b" / f"{index}.jpg", (400, 300))
    path = own / "b" / "3.jpg"
    for content in (path.read_bytes()[:-2000], b"", b"<html>not an image"):
        path.write_bytes(content)
        assert f"{path}: is not a whole image (" in load()
        assert "fix it or take it out of the folder" in load()
    write_image(path)
    giant = ImageFolder(path="own", size=10**6)
    assert "9 images of 1000000 x 1000000 take 27000.0 GB, more than the" in refusal(giant.load, folder)
    with pytest.raises(DataError, match="needs a data folder"):
        ImageFolder(path="own").load(None)
    (folder / SUMS_FILE).write_text(f"{'0' * 64}  own/a/0.png\n")
    assert "own/a/0.png: is damaged or another file" in load()


@pytest.mark.parametrize(("width", "height"), [(60_000, 60_000), (10_000, 9_000), (8_000, 7_000), (100_000, 1)])
def test_an_image_of_a_few_bytes_that_claims_gigabytes_is_refused(folder: Path, width: int, height: int) -> None:
    for index in range(6):
        write_image(folder / "own" / "ab"[index % 2] / f"{index}.png")
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    )
    bomb = folder / "own" / "a" / "bomb.png"
    bomb.write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    said = refusal(ImageFolder(path="own", size=64).load, folder)
    assert said.startswith(f"{bomb}: is ")
    assert "pixels" in said


@pytest.mark.parametrize("settings", [{"size": 0}, {"test_fraction": 0.0}, {"test_fraction": 1.0}])
def test_settings_of_a_folder_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}: expected "):
        ImageFolder(**settings)


def test_the_real_photographs_are_read_as_by_torchvision() -> None:
    import torchvision

    folder = find_data_folder("imagenet-sample-224/val")
    data = ImageFolder(path="imagenet-sample-224/val").load(folder)
    assert (len(data.train), len(data.test), data.num_classes) == (80, 20, 100)
    reference = torchvision.datasets.ImageFolder(folder / "imagenet-sample-224" / "val")
    for place, (image, label) in enumerate(reference[index] for index in range(4, 100, 5)):
        assert data.test.labels[place] == label
        assert np.array_equal(data.test.raw[place].permute(1, 2, 0), np.array(image))


# Downloads.


class Fake:
    """In place of a data set of torchvision: notes how it was called."""

    calls: list[tuple[Any, ...]]

    def __init__(self, root: Path, download: bool, **settings: Any) -> None:
        assert root.is_dir()
        self.calls.append((root, download, settings))


@pytest.mark.parametrize(
    ("name", "theirs", "expected"),
    [
        ("fashion-mnist", "FashionMNIST", [(".", {})]),
        ("emnist", "EMNIST", [(".", {"split": "letters"})]),
        ("cifar10", "CIFAR10", [(".", {})]),
        ("cifar100", "CIFAR100", [(".", {})]),
        ("svhn", "SVHN", [("SVHN", {"split": "train"}), ("SVHN", {"split": "test"})]),
    ],
)
def test_torchvision_fetches_what_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, theirs: str, expected: list[tuple[str, Any]]
) -> None:
    import torchvision

    Fake.calls = []
    monkeypatch.setattr(torchvision.datasets, theirs, Fake)
    download(name, tmp_path / "new")
    assert Fake.calls == [(tmp_path / "new" / root, True, settings) for root, settings in expected]


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist", "cifar10", "cifar100", "svhn"])
def test_without_a_network_one_sentence_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No name resolves and no address answers, wherever the test runs."""

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr("socket.getaddrinfo", unreachable)
    sentence = refusal(lambda folder: download(name, folder), tmp_path)
    assert f"data: '{name}' could not be downloaded (" in sentence
    assert "Network is unreachable" in sentence
    assert "on a machine with a network get " in sentence
    assert f"and put them into {tmp_path}/" in sentence


def test_mnist_that_is_there_needs_no_network_and_can_be_read(tmp_path: Path, own_cache: None) -> None:
    folder = find_data_folder("MNIST/raw", "QMNIST/raw")
    for name in ("MNIST", "QMNIST"):
        shutil.copytree(folder / name, tmp_path / name)
    for path in tmp_path.rglob("*"):
        path.chmod(0o755)
    download("mnist", tmp_path)
    data = Mnist().load(tmp_path)
    assert (len(data.train), len(data.test), len(data.group_names)) == (60000, 10000, 836)


@pytest.mark.parametrize(
    "name", ["adult", "att-faces", "digits", "flight-prices", "handwriting", "reuters-r8", "leaf", "image-folder"]
)
def test_what_cannot_be_downloaded_comes_with_what_to_do(tmp_path: Path, name: str) -> None:
    sentence = refusal(lambda folder: download(name, folder), tmp_path)
    assert sentence.startswith(f"data: '{name}' cannot be downloaded; ")
    assert "what can be" not in sentence


def test_digits_are_those_of_scikit_learn_and_every_fifth_is_a_test_example(digits: Dataset) -> None:
    images, labels = load_digits(return_X_y=True)
    tested = np.arange(len(labels)) % 5 == 4
    for examples, chosen in ((digits.train, ~tested), (digits.test, tested)):
        np.testing.assert_array_equal(examples.inputs().flatten(1), images[chosen] / 16)
        np.testing.assert_array_equal(examples.labels, labels[chosen])


def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path) -> None:
    sentence = refusal(lambda folder: download("imagenet", folder), tmp_path)
    assert sentence.endswith("what can be: cifar10, cifar100, emnist, fashion-mnist, mnist, svhn")


def test_a_data_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "could not be downloaded (" in refusal(
        lambda folder: download("cifar10", folder), tmp_path / "file" / "data"
    )
