"""Which files are the user's own, and which may be a stranger's, so that no code that they name is run unasked."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.errors import TrustError
from fedsim.experiments.config import AttackFile, Config


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
    """Raise TrustError where a file that is not trusted names code by `module:callable`, which would be imported."""
    named = {f"attack.{table.title}": table.name for table in spec.attack}
    if isinstance(spec, Config):
        named |= {name: getattr(spec, name).name for name in ("data", "partition", "model", "strategy")}
        named |= {f"defense.{place}": table.name for place, table in enumerate(spec.defense)}
        named |= {f"measure.{table.title}": table.name for table in spec.measure}
    found = {f"{where}.name": name for where, name in named.items() if ":" in name}
    knowledge = spec.adversary.knowledge
    written = {"adversary.knowledge.model": knowledge.model, "adversary.knowledge.loss": knowledge.loss}
    written["app.outputs"] = spec.app.outputs
    found |= {where: name for where, name in written.items() if isinstance(name, str) and ":" in name}
    for where, name in found.items():
        if not trust:
            raise TrustError(
                f"{path}: {where}: '{name}' is code that the run folder names, and is not run unasked; "
                "pass --trust if you trust the author of the folder"
            )
