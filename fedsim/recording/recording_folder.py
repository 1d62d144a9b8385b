"""Find the round files of a recording in a run folder."""

from __future__ import annotations

import re
from pathlib import Path

from fedsim.base.errors import TranscriptError
from fedsim.recording.header import RECORDING_FOLDER, RUN_FOLDER
from fedsim.recording.messages import MESSAGES_FOLDER as MESSAGES

_ROUND_NAME = re.compile(r"round-(\d{6,})\.safetensors")
_RUN_NAME = re.compile(RUN_FOLDER.format(r"(\d{1,18})"))


def find_run(folder: Path) -> Path:
    """Return the only run in a folder where an app records its runs, such as `run-1`.

    Any other folder is returned itself.

    Raises:
        TranscriptError: it holds several runs.
    """
    names = _list_folder(folder)
    if RECORDING_FOLDER in names or any(map(_ROUND_NAME.fullmatch, names)):
        return folder
    run_names = sorted((int(name[1]), name[0]) for name in map(_RUN_NAME.fullmatch, names) if name)
    runs: list[Path] = []
    for _, name in run_names:
        run = folder / name
        if _list_folder(run / RECORDING_FOLDER) or _list_folder(run / MESSAGES):
            runs.append(run)
    if len(runs) > 1:
        raise TranscriptError(f"{folder}: holds {len(runs)} runs; name one of them, such as {runs[-1]}")
    return runs[0] if runs else folder


def find_round_paths(folder: Path) -> dict[int, Path]:
    """Return the number and path of each round's file in `folder`."""
    paths: dict[int, Path] = {}
    for name in _list_folder(folder):
        if match := _ROUND_NAME.fullmatch(name):
            paths[int(match[1])] = folder / name
    return paths


def describe_exchanges(run: Path) -> str:
    """Return a remark on recorded messages of a run that has no recorded updates."""
    count = len([name for name in _list_folder(run / MESSAGES) if name.endswith(".safetensors")])
    if not count:
        return ""
    return f" of updates, but {count} other {'exchange' if count == 1 else 'exchanges'} of messages"


def _list_folder(folder: Path) -> list[str]:
    """Return the names in `folder`, none where it does not exist."""
    try:
        # `glob` would hide that the folder cannot be read.
        return [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise TranscriptError(f"{folder}: cannot be read ({error.strerror}); fix its permissions") from error
