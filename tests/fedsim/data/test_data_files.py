"""Files of a data folder and the cache of what was parsed from them."""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fedsim.base.errors import DataError
from fedsim.data import Column, Dataset, DatasetPlugin, Examples
from fedsim.data.arrays import ArrayFile
from fedsim.data.cache import cache_folder, load_cached
from fedsim.data.files import find_file, has_listed_sum, require_data_folder, verify_checksum
from fedsim.data.holdout import choose_evenly
from fedsim.data.image_folder import ImageFolder
from fedsim.data.leaf import Leaf
from fedsim.data.tables import Csv


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sub" / "file.bin"
    path.parent.mkdir()
    path.write_bytes(b"content")
    return path


SHA, MD5 = hashlib.sha256(b"content").hexdigest(), hashlib.md5(b"content").hexdigest()


# Found, or named with the way to get it.


def test_the_first_name_that_is_there_is_found(tmp_path: Path, file: Path) -> None:
    assert find_file(tmp_path, ["none", "sub/file.bin", "sub"], "") == file
    with pytest.raises(DataError, match=r"^/.*/none \(or sub\): no such file; look elsewhere$"):
        find_file(tmp_path, ["none", "sub"], "look elsewhere")


def test_a_data_folder_is_given_and_exists(tmp_path: Path, file: Path) -> None:
    assert require_data_folder(tmp_path, "x") == tmp_path
    with pytest.raises(DataError, match="'x' needs a data folder; give --data-dir DIR or set FEDSIM_DATA"):
        require_data_folder(None, "x")
    with pytest.raises(DataError, match=r"file\.bin is not a folder; give --data-dir"):
        require_data_folder(file, "x")


# Sums.


def test_a_file_with_the_official_sum_passes_and_another_does_not(tmp_path: Path, file: Path) -> None:
    assert verify_checksum(file, tmp_path, MD5) == file
    assert verify_checksum(file, tmp_path) == file
    with pytest.raises(DataError) as caught:
        verify_checksum(file, tmp_path, "0" * 32)
    assert str(caught.value) == (
        f"{file}: is damaged or another file, its md5 is {MD5[:12]}... but the official file has 000000000000...; "
        f"get it again, or if it differs on purpose, write its sha256 into {tmp_path / 'SHA256SUMS'}"
    )


@pytest.mark.parametrize(
    "line", ["{}  sub/file.bin", "{} *sub/file.bin", "{}  ./sub/file.bin\r", "\n{}  sub/file.bin\n\n"]
)
def test_what_the_folder_lists_goes_before_the_official_sum(tmp_path: Path, file: Path, line: str) -> None:
    sums = tmp_path / "SHA256SUMS"
    sums.write_text(line.format(SHA.upper()) + "\n")
    assert verify_checksum(file, tmp_path, "0" * 32) == file
    assert has_listed_sum(file, tmp_path)
    assert not has_listed_sum(tmp_path / "other", tmp_path)
    assert not has_listed_sum(file, tmp_path / "elsewhere")
    rewritten(sums, line.format("0" * 64) + "\n")
    with pytest.raises(DataError, match=rf"its sha256 is {SHA[:12]}\.\.\. but .*SHA256SUMS lists 000000000000"):
        verify_checksum(file, tmp_path, MD5)


def rewritten(path: Path, text: str) -> None:
    """Write `text` and make sure that the file's time says so, however coarse the clock."""
    before = path.stat().st_mtime_ns
    path.write_text(text)
    os.utime(path, ns=(before + 10**6, before + 10**6))


@pytest.mark.parametrize("line", ["SHA256 (sub/file.bin) = 00", "00  sub/file.bin", "nonsense"])
def test_sums_that_are_none_are_refused_rather_than_skipped(tmp_path: Path, file: Path, line: str) -> None:
    (tmp_path / "SHA256SUMS").write_text(f"{SHA}  other\n{line}\n")
    with pytest.raises(DataError, match=r"SHA256SUMS: line 2 is not 'SHA256  FILE'; write it again"):
        verify_checksum(file, tmp_path, MD5)


def test_sums_that_are_no_text_and_files_that_are_gone_are_one_sentence(tmp_path: Path, file: Path) -> None:
    file.unlink()
    with pytest.raises(DataError, match=r"file\.bin: cannot be read \(No such file or directory\)"):
        verify_checksum(file, tmp_path, MD5)
    (tmp_path / "SHA256SUMS").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"SHA256SUMS: cannot be read .*; write it again with sha256sum, or remove it"):
        verify_checksum(file, tmp_path, MD5)


# Held out by a fixed rule.


@pytest.mark.parametrize("fraction", [0.2, 0.25, 0.5, 0.29, 0.07])
def test_each_class_gives_its_share_and_all_classes_together_too(fraction: float) -> None:
    labels = torch.arange(7).repeat(100)
    held_out = choose_evenly(labels, fraction)
    assert held_out.sum().item() == int(700 * fraction + 1e-9)
    for label in range(7):
        assert abs(held_out[labels == label].sum().item() - 100 * fraction) < 1
    assert torch.equal(held_out, choose_evenly(labels, fraction))


def test_every_fifth_is_the_fifth_and_single_examples_count_together() -> None:
    assert choose_evenly(torch.zeros(11).long(), 1 / 5).nonzero().flatten().tolist() == [4, 9]
    assert choose_evenly(torch.arange(10), 0.2).nonzero().flatten().tolist() == [4, 9]
    assert choose_evenly(torch.tensor([1, 0, 1, 0, 1, 0, 1, 0, 1, 0]), 0.2).nonzero().flatten().tolist() == [8, 9]


# The cache.


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A data set of one file, whose bytes are its labels."""

    classes: int = 3


def parsed(path: Path) -> Dataset:
    labels = torch.tensor(list(path.read_bytes()), dtype=torch.int64)
    raw = torch.arange(len(labels) * 4, dtype=torch.uint8).reshape(-1, 1, 2, 2)
    return Dataset(
        name="counting",
        train=Examples(raw=raw, labels=labels, scale=0.5, groups=labels.clone()),
        test=Examples(raw=raw[:1].to(torch.int32), labels=labels[:1].float(), scale=None),
        num_classes=3,
        source="here",
        licence="none",
        value_range=(-1.5, 2.0),
        class_names=("a", "b", "ü"),
        group_names=("x", "y", "z"),
        columns=(Column(name="c", start=0, categories=("p", "q")), Column(name="d", start=2, low=1, high=3)),
        target=(3.5, 2.5),
    )


class Parser:
    """Parses, and counts how often."""

    def __init__(self, path: Path, dataset: Callable[[Path], Dataset] = parsed) -> None:
        self.path, self.dataset, self.calls = path, dataset, 0

    def __call__(self) -> Dataset:
        self.calls += 1
        return self.dataset(self.path)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "source"
    path.write_bytes(bytes([0, 1, 2, 1]))
    return path


def entry() -> Path:
    (path,) = (cache_folder() / "datasets").iterdir()
    return path


def assert_same(one: Dataset, other: Dataset) -> None:
    for part in ("train", "test"):
        a, b = getattr(one, part), getattr(other, part)
        assert a.scale == b.scale
        for name in ("raw", "labels", "groups"):
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None)
            assert x is None or (x.dtype == y.dtype and torch.equal(x, y))
    for name in ("name", "num_classes", "source", "value_range", "class_names", "group_names", "columns", "target"):
        assert getattr(one, name) == getattr(other, name), name


def test_what_comes_from_the_cache_is_what_was_parsed(source: Path) -> None:
    parse = Parser(source)
    first, second = (load_cached(Counting(), [source], parse) for _ in range(2))
    assert parse.calls == 1
    assert_same(first, parsed(source))
    assert_same(second, parsed(source))


def test_other_settings_and_a_changed_source_are_parsed_anew(source: Path) -> None:
    parse = Parser(source)
    load_cached(Counting(), [source], parse)
    load_cached(Counting(classes=4), [source], parse)
    assert parse.calls == 2
    before = source.stat()
    source.write_bytes(bytes([2, 2, 2, 2]))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert load_cached(Counting(), [source], parse).train.labels.tolist() == [2, 2, 2, 2]
    source.write_bytes(bytes([1]))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert load_cached(Counting(), [source], parse).train.labels.tolist() == [1]
    assert parse.calls == 4


@pytest.mark.parametrize("harm", ["cut", "empty", "text", "foreign", "other fields"])
def test_a_damaged_entry_is_parsed_anew_with_a_warning(
    source: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import save_file

    parse = Parser(source)
    load_cached(Counting(), [source], parse)
    path, whole = entry(), entry().read_bytes()
    if harm == "foreign":
        save_file({"train/raw": torch.zeros(2)}, path)
    elif harm == "other fields":
        save_file(
            {}, path, metadata={"fedsim": '{"name": "counting", "train": {}, "test": {}, "colour": 1, "columns": []}'}
        )
    else:
        path.write_bytes({"cut": whole[:-7], "empty": b"", "text": b"<html>" * 20}[harm])
    again = load_cached(Counting(), [source], parse)
    assert_same(again, parsed(source))
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{path}: is not readable" in warning.getMessage()
    assert "parsing the data anew" in warning.getMessage()
    load_cached(Counting(), [source], parse)
    assert parse.calls == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert_same(load_cached(Counting(), [source], Parser(source)), parsed(source))
    assert "the parsed data are not kept" in caplog.text
    assert "set FEDSIM_CACHE to a folder with room" in caplog.text


@pytest.mark.parametrize(("closed", "mode"), [("", 0o644), ("file", 0o600), ("folder", 0o600)])
def test_whom_a_source_is_kept_from_cannot_read_its_copy_in_the_cache(
    closed: str, mode: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "parents", property(lambda path: [path.parent]))  # pytest's own folder is closed
    source.parent.chmod(0o700 if closed == "folder" else 0o755)
    source.chmod(0o640 if closed == "file" else 0o644)
    earlier = os.umask(0o022)
    try:
        load_cached(Counting(), [source], Parser(source))
    finally:
        os.umask(earlier)
    assert entry().stat().st_mode & 0o777 == mode


def test_an_error_of_the_parser_leaves_nothing_behind(source: Path) -> None:
    def broken(path: Path) -> Dataset:
        raise DataError(f"{path}: is damaged")

    with pytest.raises(DataError, match="is damaged"):
        load_cached(Counting(), [source], Parser(source, broken))
    assert not cache_folder().exists()


def test_the_cache_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FEDSIM_CACHE", raising=False)
    assert cache_folder() == Path("/home/me/.cache/fedsim")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/x")
    assert cache_folder() == Path("/var/x/fedsim")
    monkeypatch.setenv("FEDSIM_CACHE", "~/mine")
    assert cache_folder() == Path("/home/me/mine")


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FEDSIM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(DataError, match="this user has no home folder; set FEDSIM_CACHE to a folder"):
        cache_folder()


def resident() -> tuple[int, int]:
    """Bytes of memory that this process holds, and those of them that are pages of files."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE"), int(pages[2]) * os.sysconf("SC_PAGE_SIZE")


def big(path: Path) -> Dataset:
    raw = torch.ones((1000, 1, 300, 300), dtype=torch.uint8)
    part = Examples(raw=raw, labels=torch.zeros(1000).long(), scale=1.0)
    return Dataset(name="big", train=part, test=parsed(path).train, num_classes=1, source="", licence="")


def test_cached_tensors_are_mapped_not_read(source: Path) -> None:
    del_me = load_cached(Counting(), [source], Parser(source, big))
    before, mapped_before = resident()
    again = load_cached(Counting(), [source], Parser(source, big))
    assert again.train.raw.nbytes == 90_000_000
    assert resident()[0] - before < 10_000_000
    assert again.train.raw[500:].sum().item() == 45_000_000
    # Libraries may give memory back meanwhile, but not pages of files.
    assert resident()[1] - mapped_before > 30_000_000
    del del_me


def test_a_write_into_mapped_data_stays_with_the_writer(source: Path) -> None:
    one, other = (load_cached(Counting(), [source], Parser(source)) for _ in range(2))
    one.train.raw[0] = 99
    assert other.train.raw[0].flatten().tolist() == [0, 1, 2, 3]
    assert_same(load_cached(Counting(), [source], Parser(source)), parsed(source))


def test_data_outlive_their_cache_entry(source: Path) -> None:
    dataset = load_cached(Counting(), [source], Parser(source))
    entry().unlink()
    assert_same(dataset, parsed(source))


def write_often(source: Path, until: float) -> None:
    while time.monotonic() < until:
        dataset = load_cached(Counting(), [source], Parser(source))
        assert dataset.train.labels.tolist() == [0, 1, 2, 1]
        for path in (cache_folder() / "datasets").glob("*.safetensors"):
            path.unlink(missing_ok=True)


@pytest.mark.thorough
def test_processes_that_write_the_same_entry_do_not_harm_each_other(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = multiprocessing.get_context("fork")
    until = time.monotonic() + 1.5
    processes = [context.Process(target=write_often, args=(source, until)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    load_cached(Counting(), [source], Parser(source))
    with safe_open(entry(), framework="pt") as kept:  # one whole file and no leftovers beside it
        assert "train/raw" in kept.keys()  # noqa: SIM118


def test_a_byte_flipped_in_the_cache_is_noticed_by_the_next_process(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_cached(Counting(), [source], Parser(source))
    (path,) = (cache_folder() / "datasets").iterdir()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    monkeypatch.setattr("fedsim.data.cache._verified_files", set())  # as a new process begins
    again = Parser(source)
    assert_same(load_cached(Counting(), [source], again), parsed(source))
    assert again.calls == 1


@pytest.mark.parametrize(
    "plugin",
    [
        Csv(path="people.csv", target="y"),
        ArrayFile(path="people.csv"),
        Leaf(path="people.csv"),
        ImageFolder(path="people.csv"),
    ],
)
def test_a_relative_path_without_a_data_folder_names_both_remedies(plugin: DatasetPlugin) -> None:
    with pytest.raises(
        DataError, match=r"needs a data folder for the relative data\.path 'people\.csv'; write the whole"
    ):
        plugin.load(None)
