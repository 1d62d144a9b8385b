"""Which files are the user's own, and which may be a stranger's, so that no code that they name is run unasked."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.errors import TrustError
from fedsim.experiments.config import AttackFile
from fedsim.plugins.allowed_code import references_in


def is_in_a_run(path: Path, run: Path | None = None) -> bool:
    """Whether a file is in a run folder, which may be a stranger's; also where it, or a folder in its path, is a link.

    A folder is a run folder if it is `run`, holds a manifest and an experiment file, or holds a recording.
    """
    places = {*Path(os.path.abspath(path)).parents, *path.resolve().parents}  # noqa: PTH100
    if run is not None and run.resolve() in {place.resolve() for place in places}:
        return True
    made = ("manifest.json", "experiment.toml")
    return any(
        all((place / name).exists() for name in made) or any(place.glob("transcript/round-*.safetensors"))
        for place in places
    )


def check_trust(spec: AttackFile, path: Path, trust: bool) -> None:
    """Raise TrustError where a file that is not trusted names code by `module:callable`, at whatever depth.

    That is for a sentence before any work that names the key; loading is refused where it happens
    (`fedsim.plugins.allowed_code`).
    """
    if trust:
        return
    for place, reference in references_in(spec.model_dump(exclude={"federation": {"address"}})):
        raise TrustError(
            f"{path}: {'.'.join(place)}: '{reference}' is code that the run folder names, and is not run unasked; "
            "pass --trust if you trust the author of the folder"
        )
