"""Files that a stranger wrote to take all memory or time, and names of files that would be taken for code."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedsim.audit import isolation
from fedsim.base import files
from fedsim.base.errors import ConfigError, DataError, RunError, TranscriptError, TrustError
from fedsim.cli.main import _list_typed_words, _run_command
from fedsim.data.idx import _read_idx
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.open_run import OpenRun
from fedsim.plugins import packed_arrays, registry
from fedsim.plugins.allowed_code import allow_code, check_allowed, find_references, restrict_code
from fedsim.recording.exchange_files import import_exchange
from fedsim.recording.manifest import ManifestFile


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
@pytest.mark.parametrize("name", ["client-1.npz", "client-1.json"])
def test_an_exchange_is_read_from_files_alone(kind: str, name: str, tmp_path: Path) -> None:
    """At a pipe fedsim would wait for ever, and /dev/zero has no end."""
    folder = tmp_path / "exchange" / "round-1"
    folder.mkdir(parents=True)
    for file in ("broadcast.npz", "client-1.npz"):
        np.savez(folder / file, weight=np.zeros(3, np.float32))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to("/dev/zero")
    with pytest.raises(TranscriptError, match=rf"{name}: cannot be read \(it is not a file\)"):
        import_exchange(tmp_path / "exchange", tmp_path / "run")


def test_a_file_of_settings_is_read_from_a_pipe_and_not_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell hands a file over as a pipe; /dev/zero has no end."""
    monkeypatch.setattr(files, "_MAX_SETTINGS", 1 << 10)
    (tmp_path / "zeros.toml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"zeros\.toml: cannot be read \(it has more than"):
        read_toml(tmp_path / "zeros.toml")
    reader, writer = os.pipe()
    os.write(writer, b"[federation]\r\nrounds = 3\r\n")
    os.close(writer)
    assert read_toml(Path(f"/dev/fd/{reader}")) == {"federation": {"rounds": 3}}
    os.close(reader)


@pytest.mark.parametrize(
    ("shape", "expected"), [((1, 28, 28), "more than the 784 bytes"), ((1 << 31, 1 << 15, 28), "would take .* GB")]
)
def test_packed_zeros_without_end_are_not_unpacked(shape: tuple[int, ...], expected: str, tmp_path: Path) -> None:
    images = struct.pack(">4I", 2051, *shape) + bytes(1 << 24)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(images, 1))
    with pytest.raises(DataError, match=f"train-images.* is damaged .*{expected}"):
        _read_idx(file, tmp_path, {}, 2051)


def test_arrays_that_unpack_to_more_than_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, weight=np.zeros(1 << 20))
    monkeypatch.setattr(packed_arrays, "memory_complaint", lambda size: "take too much" if size > 1 << 23 else "")
    assert len(file.getvalue()) < 1 << 16
    with pytest.raises(ValueError, match="its arrays take too much"):
        packed_arrays.read_arrays(file.getvalue(), trust=False)


@pytest.mark.parametrize("text", ["a" * 300_000, "a." * 150_000, "a:" * 150_000])
def test_code_is_looked_for_in_long_texts_in_no_time(text: str) -> None:
    started = time.process_time()
    list(find_references({"data": {"name": text}}))
    assert time.process_time() - started < 1


def test_a_path_that_somebody_else_named_as_code_allows_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "theirs:Main"
    run.mkdir()
    monkeypatch.setattr(sys, "argv", ["fedsim", "attack", str(run), "--set", "attack.mine:Attack.steps=3"])
    with restrict_code(_list_typed_words()):
        check_allowed("attack.mine:Attack.steps")
        with pytest.raises(TrustError):
            check_allowed("theirs:Main")


def test_an_attacks_environment_does_not_name_the_code_of_the_data() -> None:
    with restrict_code():
        allow_code({"data": {"name": "mine:Private"}})
        assert "Private" not in " ".join(isolation._environment([]).values())


def test_a_removed_working_folder_is_one_sentence(tmp_path: Path) -> None:
    program = "import os, sys; os.rmdir(os.getcwd()); from fedsim.cli.program import run_program; run_program()"
    folder = tmp_path / "gone"
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "fedsim: the working folder was removed; change to another one\n",
    )


def test_an_answer_that_cannot_be_written_is_one_sentence() -> None:
    program = "import sys; sys.argv = ['fedsim', '--version']; from fedsim.cli.main import main; main()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert (
        done.stderr
        == "fedsim: the output cannot be written (No space left on device); make room, and do the same again\n"
    )


def test_an_interrupt_while_the_program_starts_is_one_sentence() -> None:
    program = (
        "import sys; from importlib.abc import MetaPathFinder\n"
        "class Interrupt(MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'fedsim.cli.main': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from fedsim.cli.program import run_program; run_program()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "fedsim: interrupted\n")


def test_an_interrupt_before_the_command_works_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["fedsim", "attack", "RUN"])
    monkeypatch.setattr(registry, "check_installation", interrupt)
    sentence, code = _run_command()
    assert code == 1
    assert sentence.startswith("interrupted; the same `fedsim attack` continues")


def test_a_run_folder_that_is_no_utf_8_text_is_to_be_renamed(tmp_path: Path) -> None:
    """Its recording was called damaged, and was to be removed."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(ConfigError, match=r"no UTF-8 text.*; rename the folder"), OpenRun(folder).hold_lock():
        pass
    assert not folder.exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "findings/../../secret"])
def test_a_manifest_names_files_of_the_run_alone(name: str, tmp_path: Path) -> None:
    manifest = ManifestFile(tmp_path)
    manifest.start()
    with manifest.edit() as noted:
        noted.files[name] = "0" * 64
    with pytest.raises(RunError, match="names a file outside of the run"):
        ManifestFile(tmp_path).read_again()
