"""Decide which files the user trusts, so that no code that a stranger's file names runs unasked."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.base.errors import TrustError
from fedsim.federation.config import AttackFile
from fedsim.plugins.allowed_code import find_references


def is_in_run_folder(path: Path, run: Path | None = None) -> bool:
    """Return whether a file is in a run folder, which may come from a stranger.

    A folder is a run folder if it is `run`, holds a manifest and an experiment file, or holds a
    recording. Both the given path and the path with links resolved are searched.
    """
    folders = {*Path(os.path.abspath(path)).parents, *path.resolve().parents}  # noqa: PTH100
    if run is not None and run.resolve() in {folder.resolve() for folder in folders}:
        return True
    return any(_is_run_folder(folder) for folder in folders)


def _is_run_folder(folder: Path) -> bool:
    if all((folder / name).exists() for name in ("manifest.json", "experiment.toml")):
        return True
    return any(folder.glob("transcript/round-*.safetensors"))


def check_trust(spec: AttackFile, path: Path, trust: bool) -> None:
    """Raise TrustError where a file that is not trusted names code by `module:callable`.

    Keys are searched at any depth. This check only gives an early error that names the key; the
    import itself is refused by `fedsim.plugins.allowed_code`.
    """
    if trust:
        return
    for key_path, reference in find_references(spec.model_dump(exclude={"federation": {"address"}})):
        raise TrustError(
            f"{path}: {'.'.join(key_path)}: '{reference}' is code that the run folder names, and "
            "is not run unasked; pass --trust if you trust the author of the folder"
        )
