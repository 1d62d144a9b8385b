"""Files of a new plug-in or experiment, made from a skeleton under a chosen name."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fedsim.base.errors import ConfigError, did_you_mean
from fedsim.plugins import registry

INSTALLED: Mapping[str, registry.Group] = {"metric": "metrics", "panel": "panels"}
"""Kinds of plug-ins that no experiment names, so that they are used as soon as they are installed,
with their groups."""
PLUGINS = ("attack", "defense", "algorithm", "measure", "modality", *INSTALLED)
KINDS = ("experiment", *PLUGINS)
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_MAX_NAME_LENGTH = 100
"""Letters of a name, from which names of files and folders are made."""


@dataclass(frozen=True)
class PluginTemplate:
    """Files that `fedsim new KIND NAME` writes.

    Attributes:
        kind: one of KINDS.
        name: small letters, digits, hyphens and underscores.
        inversion: of attacks, whether it composes a gradient inversion of `fedsim.inversion`.
    """

    kind: str
    name: str
    inversion: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"new: there is no skeleton of '{self.kind}', {did_you_mean(self.kind, KINDS)}")
        if self.inversion and self.kind != "attack":
            raise ConfigError(f"new: --inversion is a kind of attack; leave it out for a new {self.kind}")
        if len(self.name) > _MAX_NAME_LENGTH or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"new: '{self.name}' cannot be the name of a file and a class; take at most {_MAX_NAME_LENGTH} "
                f"small letters, digits and hyphens, beginning with a letter, such as my-{self.kind}"
            )
        if self.kind in PLUGINS and keyword.iskeyword(self.module):
            raise ConfigError(
                f"new: '{self.name}' is a word of Python, which no module can be called; add another word"
            )
        if self.kind in PLUGINS and find_spec(self.module) is not None:
            raise ConfigError(
                f"new: a module '{self.module}' is installed already and would be loaded in place of your file; "
                "choose another name"
            )
        group = INSTALLED.get(self.kind)
        if group and self.module in registry.registered_names(group):
            raise ConfigError(f"new: one of the {group} is called '{self.module}' already; choose another name")

    @property
    def module(self) -> str:
        """Return the name of a plug-in's module."""
        return self.name.replace("-", "_")

    @property
    def reference(self) -> str:
        """Return the plug-in's reference in an experiment file, `module:Class`."""
        return f"{self.module}:{self._class_name}"

    @property
    def experiment_file(self) -> Path:
        """Return the name of the experiment file; for a plug-in, of one that uses it."""
        return Path(f"{self.module if self.kind in PLUGINS else self.name}.toml")

    @property
    def commands(self) -> list[str]:
        """Return the commands that try it, without the leading `fedsim`."""
        if self.kind in INSTALLED:
            return [f"check {self.module}", f"run {self.experiment_file}"]
        check = [f"check {self.reference}"] if self.kind in PLUGINS else []
        expose = [f"expose {self.experiment_file}"] if self.kind == "measure" else []
        return [*check, *expose, f"run {self.experiment_file}"]

    @property
    def installation(self) -> str:
        """Return the command that has to come first; empty where there is none."""
        return f"pip install --no-deps -e ./{self.module}" if self.kind in INSTALLED else ""

    @property
    def file_contents(self) -> dict[Path, str]:
        """Return the contents of the files, by path."""
        experiment = self._fill_template("experiment.toml")
        if self.kind not in PLUGINS:
            return {self.experiment_file: experiment}
        if self.kind in INSTALLED:
            package = Path(self.module)
            return {
                package / f"{self.module}.py": self._fill_template(self._module_template),
                package / "pyproject.toml": self._fill_template("package.toml"),
                self.experiment_file: experiment,
            }
        module_file, plugin = Path(f"{self.module}.py"), self._fill_template(self._module_template)
        if self.kind == "modality":
            own_data = f'name = "{self.module}:make_examples" # yours\nmodality = "{self.reference}" # yours, too'
            experiment = experiment.replace('name = "handwriting"', own_data)
            return {module_file: plugin, self.experiment_file: experiment}
        heading = f"[{self.kind}]" if self.kind == "algorithm" else f"[[{self.kind}]]"
        table = f'\n{heading} # yours; its settings are the fields of the class\nname = "{self.reference}"\n'
        return {module_file: plugin, self.experiment_file: experiment + table}

    def write(self, folder: Path) -> list[Path]:
        """Write the files into `folder` and return their paths relative to it.

        Raises:
            ConfigError: one of them is there already, and nothing was written.
            OSError: the folder cannot be written.
        """
        for path in self.file_contents:
            if (folder / path).exists():
                raise ConfigError(f"new: {path} is there already and is left alone; choose another name, or remove it")
        for path, text in self.file_contents.items():
            (folder / path).parent.mkdir(exist_ok=True)
            with (folder / path).open("x", encoding="utf-8") as file:
                file.write(text)
        return list(self.file_contents)

    @property
    def _class_name(self) -> str:
        return "".join(word.capitalize() for word in self.module.split("_"))

    @property
    def _module_template(self) -> str:
        return "inversion_attack.py" if self.inversion else f"{self.kind}.py"

    def _fill_template(self, template: str) -> str:
        """Return the text of a skeleton with the names of the new plug-in or experiment."""
        text = (files("fedsim.skeletons") / template).read_text(encoding="utf-8")
        text = text.replace(f"fedsim.skeletons.{self._module_template.removesuffix('.py')}", self.module)
        text = text.replace("fedsim.groups", f"fedsim.{INSTALLED.get(self.kind, '')}")
        return text.replace("Skeleton", self._class_name).replace("skeleton", self.experiment_file.stem)
