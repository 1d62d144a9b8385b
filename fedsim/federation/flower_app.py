"""Folder of a Flower app: what its pyproject.toml says, and the code that it names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsim.base.content_hashes import hash_files
from fedsim.base.errors import ConfigError, PluginError, TrustError, did_you_mean
from fedsim.federation.app_file import RunConfig, flatten_run_config
from fedsim.federation.experiment_file import read_toml
from fedsim.federation.trust import is_in_run_folder
from fedsim.plugins import registry
from fedsim.plugins.allowed_code import allow_code

_PROJECT_FILE = "pyproject.toml"
_COMPONENTS = ("serverapp", "clientapp")
_CODE_SUFFIXES = frozenset({".py", ".yaml", ".yml"})
"""Of files that say what an app does; in YAML apps keep settings, and not results."""


@dataclass(frozen=True, kw_only=True)
class FlowerApp:
    """Flower app in a folder.

    Attributes:
        folder: with its pyproject.toml and its code.
        name: of the project.
        components: `module:attribute` of its serverapp and its clientapp.
        config: its settings, by keys with dots.
    """

    folder: Path
    name: str
    components: Mapping[str, str]
    config: RunConfig

    def merge_config(self, changes: Mapping[str, Any]) -> RunConfig:
        """Return the settings of the app with these changes, of which Flower takes known keys alone."""
        merged = dict(self.config)
        for key, value in flatten_run_config(changes).items():
            if key not in merged:
                raise ConfigError(
                    f"run_config.{key}: is not a setting of the app in {self.folder}, {did_you_mean(key, merged)}; "
                    "its settings are in its pyproject.toml, under [tool.flwr.app.config]"
                )
            old = merged[key]
            if isinstance(old, float) and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if type(value) is not type(old):
                raise ConfigError(
                    f"run_config.{key}: expected {type(old).__name__}, as in the app's pyproject.toml, got {value!r}"
                )
            merged[key] = value
        return merged

    def hash_code(self) -> str:
        """Return the SHA-256 of the app's pyproject.toml and of all Python and YAML files in its folder.

        Data that the app reads, and packages that it imports from elsewhere, are left out.
        """
        paths = (path for path in sorted(self.folder.rglob("*.*")) if path.suffix in _CODE_SUFFIXES and path.is_file())
        files = [path for path in paths if not _is_hidden(path.relative_to(self.folder))]
        return hash_files([self.folder / _PROJECT_FILE, *files], self.folder)

    def load(self, component: str) -> Any:
        """Import the code of the app, and return its `serverapp` or `clientapp`.

        As with `flwr run`, the folder of the app comes first on the import path.
        """
        from flwr.clientapp import ClientApp
        from flwr.serverapp import ServerApp

        folder = str(self.folder)
        if sys.path[:1] != [folder]:
            sys.path.insert(0, folder)
        reference = self.components[component]
        try:
            loaded = registry.load_object(reference, self.folder, is_app=True)
        except PluginError as error:
            raise PluginError(f"{error}{self._describe_import_error(error.__cause__)}") from error
        kind = ServerApp if component == "serverapp" else ClientApp
        if not isinstance(loaded, kind):
            raise PluginError(
                f"{self.folder / _PROJECT_FILE}: {component}: '{reference}' is a {type(loaded).__name__}, expected a "
                f"{kind.__name__} of Flower"
            )
        return loaded

    def _describe_import_error(self, error: BaseException | None) -> str:
        """Say how to help where a module of the app is not the one that was found; empty where that is not known."""
        if not isinstance(error, ImportError) or not error.name:
            return ""
        package = error.name.partition(".")[0]
        if package in registry.COMPANION_PACKAGES and _has_module(self.folder, package):
            return (
                f"; the app has a module '{package}', and so has fedsim, so that one hides the other: rename the app's"
            )
        for folder in sorted(self.folder.glob("*/")):
            if package not in sys.modules and _has_module(folder, package):
                return (
                    f"; '{package}' is in {folder}, where `flwr run` finds it only if the app is installed: "
                    f"`pip install -e {self.folder}`, or add that folder to PYTHONPATH"
                )
        return ""


def read_app(folder: Path, *, trust: bool = False) -> FlowerApp:
    """Read the pyproject.toml of an app; its code is not imported yet.

    Args:
        folder: of the app; its code is the user's own, unless it is in a run folder.
        trust: let the code run even then.
    """
    folder = folder.resolve()
    file = folder / _PROJECT_FILE
    if not file.is_file():
        raise ConfigError(f"{folder}: holds no {_PROJECT_FILE}; name the folder of a Flower app, as for `flwr run`")
    tables = read_toml(file)
    app = _find_table(tables, "tool", "flwr", "app")
    if app is None:
        raise ConfigError(f"{file}: has no table [tool.flwr.app], so it is of no Flower app; name the folder of one")
    # Both sides of the app have to be named.
    named = app.get("components")
    components: dict[str, str] = {}
    for name in _COMPONENTS:
        reference = named.get(name) if isinstance(named, Mapping) else None
        if not isinstance(reference, str) or not all(reference.partition(":")):
            raise ConfigError(
                f'{file}: tool.flwr.app.components: names no {name}, expected `{name} = "module:attribute"`; an app '
                "that starts a simulation in its own script can be recorded with fedsim.record_app"
            )
        components[name] = reference
    if not trust and is_in_run_folder(file):
        raise TrustError(
            f"{file}: is in a run folder, whose code is not run unasked; pass --trust if you trust the author "
            "of the folder"
        )
    allow_code(components)
    # Settings of the app are flat, as Flower hands them to it.
    config = app.get("config", {})
    if not isinstance(config, Mapping):
        raise ConfigError(f"{file}: tool.flwr.app.config: expected a table of settings")
    flat = flatten_run_config(config)
    for key, value in flat.items():
        if not isinstance(value, bool | int | float | str):
            raise ConfigError(
                f"{file}: tool.flwr.app.config.{key}: expected a number, a text, true or false, got {value!r}"
            )
    project = _find_table(tables, "project") or {}
    return FlowerApp(folder=folder, name=str(project.get("name") or folder.name), components=components, config=flat)


def _has_module(folder: Path, name: str) -> bool:
    """Return whether a folder holds a module or a package of this name."""
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def _is_hidden(path: Path) -> bool:
    """Return whether a path is within a hidden folder, such as an environment or that of Git."""
    return any(part.startswith(".") for part in path.parts)


def _find_table(tables: Mapping[str, Any], *keys: str) -> Mapping[str, Any] | None:
    """Return a table within tables; None where it is not there."""
    found: Any = tables
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None
