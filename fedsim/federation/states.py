"""States of training: models after some rounds or epochs, from which an experiment can start.

A folder of states holds one safetensors file each and `manifest.json`, with the settings that made
them, their accuracy, and their SHA-256.
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

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.files import hash_file, parse_json, replace_atomically, write_remedy
from fedsim.recording.manifest import MANIFEST_FILE, ManifestFile
from fedsim.recording.wire_format import State, non_finite_names

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class TrainingStates:
    """Saved states of one training.

    Args:
        folder: folder of their files.
    """

    folder: Path

    def path(self, name: str) -> Path:
        """Return the file of the state called `name`, such as `round-5` or `epoch-10`."""
        return self.folder / f"{name}.safetensors"

    def manifest(self) -> dict[str, Any]:
        """Read the manifest of the states; empty where there are none."""
        path = self.folder / MANIFEST
        try:
            if not path.is_file():
                return {}
            content = dict(parse_json(path.read_text(encoding="utf-8")))
            for entry in dict(content.get("states", {})).values():
                if not isinstance(entry["sha256"], str):
                    raise ValueError("the hash of a state is not a text")
            return content
        except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{path}: is damaged ({error}); remove the folder and train again") from error

    def find_missing(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are missing, or not as they were written."""
        entries = self.manifest().get("states", {})
        missing: list[str] = []
        for name in names:
            path = self.path(name)
            if name not in entries or not path.is_file() or hash_file(path) != entries[name]["sha256"]:
                missing.append(name)
        return missing

    def save_state(self, name: str, state: State, made_by: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Write one state and note it in the manifest, and the manifest in that of a run around it.

        Args:
            made_by: description of the whole training: settings, versions.
            about: facts about this state, such as its accuracy.
        """
        path, old_manifest, run = self.path(name), self.manifest(), self.folder.parent
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replace_atomically(path) as temporary:
                save_file({key: tensor.contiguous() for key, tensor in state.items()}, temporary)
            entry = {**about, "sha256": hash_file(path)}
            new_manifest = {**made_by, "states": {**old_manifest.get("states", {}), name: entry}}
            with replace_atomically(self.folder / MANIFEST) as temporary:
                temporary.write_text(json.dumps(new_manifest, indent=2) + "\n", encoding="utf-8")
            if (run / MANIFEST_FILE).is_file():
                ManifestFile(run).note(self.folder / MANIFEST)
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path}: cannot be written ({error}); {write_remedy(error)} and train again") from error


def read_state(path: Path, like: State, model: str, withheld: Collection[str] = ()) -> dict[str, Tensor]:
    """Read the state in `path`, in the order and types of `like`.

    Args:
        like: a state of the network that is to start from it.
        withheld: names that may be in the file and are left out, as no message of the federation
            has them.
    """
    if path.exists() and not path.is_file():  # reading from a pipe would wait for ever
        raise ConfigError(f"model.start: {path} is not a file; `fedsim train` makes one")
    try:
        content = path.read_bytes()
        tensors = load(content)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"model.start: {path} is not a readable safetensors file ({error}); `fedsim train` makes one"
        ) from error
    noted = TrainingStates(path.parent).manifest().get("states", {}).get(path.stem)
    if noted and hashlib.sha256(content).hexdigest() != noted["sha256"]:
        raise ConfigError(f"model.start: {path} is not the file that its {MANIFEST} describes; train it again")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in withheld}
    for name, tensor in like.items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            got = tuple(tensors[name].shape) if name in tensors else "nothing"
            raise ConfigError(
                f"model.start: {path} is not a state of '{model}': expected {name} of shape "
                f"{tuple(tensor.shape)}, got {got}; name the model that it was trained with"
            )
    if unknown := sorted(set(tensors) - set(like)):
        raise ConfigError(f"model.start: {path} is not a state of '{model}', which has no {unknown[0]}")
    if broken_names := non_finite_names(tensors):
        raise ConfigError(f"model.start: {path} holds NaN or infinite values in {broken_names[0]}; train it again")
    return {name: tensors[name].to(tensor.dtype) for name, tensor in like.items()}
