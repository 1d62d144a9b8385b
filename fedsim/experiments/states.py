"""States of training: a model after some rounds or epochs, kept so that an experiment can start from it.

A folder of states holds one safetensors file each and `manifest.json`, which says what made them, how
good they are, and their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from fedsim.errors import ConfigError, RunError
from fedsim.files import in_one_step, parse_json
from fedsim.recording import manifest
from fedsim.wire.messages import State, non_finite

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class States:
    """The states of one training.

    Args:
        folder: where they are.
    """

    folder: Path

    def path(self, name: str) -> Path:
        """The file of the state called `name`, such as `round-5` or `epoch-10`."""
        return self.folder / f"{name}.safetensors"

    def manifest(self) -> dict[str, Any]:
        """What is known of the states; empty where there are none.

        Raises:
            RunError: the manifest is damaged.
        """
        path = self.folder / MANIFEST
        try:
            found = dict(parse_json(path.read_text(encoding="utf-8"))) if path.is_file() else {}
            if not all(isinstance(about["sha256"], str) for about in dict(found.get("states", {})).values()):
                raise ValueError("the hash of a state is no text")
            return found
        except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{path}: is damaged ({error}); remove the folder and train again") from error

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Which of `names` are not there, or not as they were written."""
        known = self.manifest().get("states", {})
        return [
            n for n in names if n not in known or not self.path(n).is_file() or _sum(self.path(n)) != known[n]["sha256"]
        ]

    def keep(self, name: str, state: State, made_by: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write one state and note it in the manifest, and that in the manifest of the run around it, if there is one.

        Args:
            made_by: what describes the whole training: settings, versions.
            about: what is known of this state, such as its accuracy.

        Raises:
            RunError: the folder cannot be written.
        """
        path, known, run = self.path(name), self.manifest(), self.folder.parent
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with in_one_step(path) as temporary:
                save_file({key: tensor.contiguous() for key, tensor in state.items()}, temporary)
            entry = {**about, "sha256": _sum(path)}
            whole = {**made_by, "states": {**known.get("states", {}), name: entry}}
            with in_one_step(self.folder / MANIFEST) as temporary:
                temporary.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
            if (run / manifest.NAME).is_file():
                manifest.note(run, self.folder / MANIFEST)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be written ({error}); make room and train again") from error


def read_state(path: Path, like: State, model: str, withheld: Collection[str] = ()) -> dict[str, Tensor]:
    """The state in `path`, in the order and types of `like`.

    Args:
        like: a state of the network that is to start from it.
        model: what the experiment calls that network.
        withheld: names that may be in the file and are left out, being in no message of the federation.

    Raises:
        ConfigError: the file is missing, damaged, not what its manifest says, not finite, or of another network.
    """
    if path.exists() and not path.is_file():  # at a pipe, reading would wait for ever
        raise ConfigError(f"model.start: {path} is no file; `fedsim train` makes one")
    try:
        content = path.read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.start: {path} is no readable safetensors file ({error}); `fedsim train` makes one"
        ) from error
    noted = States(path.parent).manifest().get("states", {}).get(path.stem)
    if noted and hashlib.sha256(content).hexdigest() != noted["sha256"]:
        raise ConfigError(f"model.start: {path} is not the file that its {MANIFEST} describes; train it again")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in withheld}
    for name, tensor in like.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            got = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise ConfigError(
                f"model.start: {path} is no state of '{model}': expected {name} of shape {tuple(tensor.shape)}, "
                f"got {got}; name the model that it was trained with"
            )
    if further := sorted(set(tensors) - set(like)):
        raise ConfigError(f"model.start: {path} is no state of '{model}', which has no {further[0]}")
    if broken := non_finite(tensors):
        raise ConfigError(f"model.start: {path} holds NaN or infinite values in {broken[0]}; train it again")
    return {name: tensors[name].to(tensor.dtype) for name, tensor in like.items()}


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
