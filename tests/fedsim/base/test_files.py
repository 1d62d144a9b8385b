"""Temporary folders: none outlives its process for long, and none is taken from a process that lives."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedsim.base.files
from fedsim.base.errors import RunError
from fedsim.base.files import read_all, replace_atomically, temporary_folder, write_parts, write_text

HOLDS = """
import time
from fedsim.base.files import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = os.pathsep.join(filter(None, sys.path))
    environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    (theirs / "copied").mkdir()
    (tmp_path / "fedsim-results").mkdir()  # somebody else's
    with temporary_folder() as ours, temporary_folder():
        assert theirs.is_dir()
        assert ours.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with temporary_folder():
            assert not theirs.exists()
            assert ours.is_dir()
    assert list(tmp_path.iterdir()) == [tmp_path / "fedsim-results"]


def test_a_system_that_writes_nothing_is_an_error_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([3, 0])  # after them the test fails, instead of hanging
    monkeypatch.setattr(os, "pwritev", lambda file, parts, position: next(answers))
    with (tmp_path / "file").open("w+b", buffering=0) as file, pytest.raises(OSError, match="writes nothing"):
        write_parts(file, [memoryview(b"eleven bytes")], 0)


@pytest.mark.parametrize(("most", "chunk"), [(1 << 20, 1 << 18), (3, 1 << 18), (1 << 20, 7), (3, 7)])
def test_parts_are_written_whole_in_their_order_however_little_the_system_takes(
    most: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call may write less than it is asked to, and takes at most 1024 parts."""
    pwritev = os.pwritev

    def write_little(file: int, parts: list[memoryview], position: int) -> int:
        return pwritev(file, [memoryview(b"".join(parts))[:most]] if most < 1 << 20 else parts, position)

    monkeypatch.setattr(os, "pwritev", write_little)
    monkeypatch.setattr(fedsim.base.files, "_CHUNK_SIZE", chunk)
    parts = [b"", b"first", b"", *(f"{number} ".encode() for number in range(1500)), b"last", b""]
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        write_parts(file, map(memoryview, parts), 4)
        assert (tmp_path / "file").read_bytes() == bytes(4) + b"".join(parts)
        memory = bytearray(5)
        read_all(file, memoryview(memory), 4)
        assert memory == b"first"
        with pytest.raises(OSError, match="shorter"):
            read_all(file, memoryview(bytearray(5)), len(b"".join(parts)))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EACCES, "fix its permissions"),
        (errno.EROFS, "fix its permissions"),
        (errno.ENOENT, "put its folder back"),
        (errno.EISDIR, "move what is there"),
        (errno.ENAMETOOLONG, "choose a shorter path"),
    ],
)
def test_the_remedy_of_a_file_that_cannot_be_written_fits_the_reason(
    number: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(fedsim.base.files.os, "open", refuse)
        with pytest.raises(RunError, match=rf"report\.html: cannot be written \(.*\); {remedy} and try again"):
            write_text(tmp_path / "report.html", "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_removed_meanwhile_is_asked_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_text(folder / "report.html", "")
    shutil.rmtree(folder)
    with pytest.raises(RunError, match="put its folder back and try again"):
        write_text(folder / "report.html", "")


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_files_of_tensors_get_the_permissions_that_the_umask_allows(umask: int, mode: int, tmp_path: Path) -> None:
    """Colleagues may read findings and checkpoints where they may read the rest of a run, and nobody else."""
    earlier = os.umask(umask)
    try:
        with replace_atomically(tmp_path / "finding.safetensors") as temporary:
            save_file({"data": torch.zeros(1)}, temporary)
        write_text(tmp_path / "scores.csv", "")
    finally:
        os.umask(earlier)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {mode}
