"""Content decides whether data are those that something was made of, not names, sizes or times."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.base import content_hashes
from fedsim.data.tables import Csv
from fedsim.federation.config import Config
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.training_states import make_states


def write_table(path: Path, seed: int) -> None:
    """Rows of digits, as many bytes for each seed, at the same time of modification."""
    numbers = np.random.default_rng(seed).integers(0, 10, (60, 4))
    lines = [",".join(map(str, row)) for row in numbers]
    path.write_text("a,b,c,label\n" + "\n".join(f"{line[:-1]}{line[0] > '4':d}" for line in lines) + "\n")
    os.utime(path, ns=(10**18, 10**18))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))


def test_a_table_of_equal_size_and_time_is_parsed_anew(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_table(path, 1)
    first = Csv(path=str(path), target="label").load(None)
    size = path.stat().st_size
    write_table(path, 2)
    assert path.stat().st_size == size
    second = Csv(path=str(path), target="label").load(None)
    assert not np.array_equal(first.train.raw.numpy(), second.train.raw.numpy())


def test_what_was_read_is_known_again_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "table.csv", list[Path]()
    write_table(path, 1)
    before = content_hashes.hash_file
    monkeypatch.setattr(content_hashes, "hash_file", lambda file: read.append(file) or before(file))
    monkeypatch.setattr(content_hashes, "_hashes", {})
    first = content_hashes.hash_files([path])
    assert content_hashes.hash_files([path]) == first
    assert len(read) == 2  # so young that it might have changed within the resolution of its times
    monkeypatch.setattr(time, "time_ns", lambda: 2 * 10**18)
    assert {content_hashes.hash_files([path]) for _ in range(2)} == {first}
    monkeypatch.setattr(content_hashes, "_hashes", {})  # as another process would
    assert content_hashes.hash_files([path]) == first
    assert len(read) == 3
    time.sleep(0.02)
    write_table(path, 2)
    assert content_hashes.hash_files([path]) != first


def test_states_are_trained_again_when_the_data_change(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    tables: dict[str, Any] = {
        "data": {"name": "csv", "path": str(path), "target": "label"},
        "model": {"name": "mlp", "hidden": [4]},
        "federation": {"engine": "serial", "clients": 2, "rounds": 1},
        "states": {"epochs": [1]},
    }
    states = []
    for seed in (1, 2, 1):
        write_table(path, seed)
        states.append(make_states(validate_tables(Config, tables, "experiment"), "table", None).path("epoch-1"))
    assert states[0] != states[1]
    assert states[0] == states[2]
    assert states[0].read_bytes() != states[1].read_bytes()


def test_what_changed_within_the_resolution_of_its_times_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "file", [1000]
    monkeypatch.setattr(content_hashes, "_hashes", {})
    monkeypatch.setattr(content_hashes, "_file_stamp", lambda file: (1, 1, 4, 1000, 1000))  # the same for both contents
    monkeypatch.setattr(time, "time_ns", lambda: now[0])
    path.write_text("once")
    first = content_hashes.cached_file_hash(path), content_hashes.hash_files([path])
    path.write_text("more")
    now[0] = 10**15
    assert content_hashes.cached_file_hash(path) != first[0]
    assert content_hashes.hash_files([path]) != first[1]
