"""Files of a new plug-in or experiment, made from a skeleton under a chosen name."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fedsim.base.errors import ConfigError, did_you_mean

PLUGINS = ("attack", "defense", "measure")
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
    """

    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"new: there is no skeleton of '{self.kind}', {did_you_mean(self.kind, KINDS)}")
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
        check = [f"check {self.reference}"] if self.kind in PLUGINS else []
        expose = [f"expose {self.experiment_file}"] if self.kind == "measure" else []
        return [*check, *expose, f"run {self.experiment_file}"]

    @property
    def file_contents(self) -> dict[Path, str]:
        """Return the contents of the files, by path."""
        experiment = self._fill_template("experiment.toml")
        if self.kind not in PLUGINS:
            return {self.experiment_file: experiment}
        table = f'\n[[{self.kind}]] # yours; its settings are the fields of the class\nname = "{self.reference}"\n'
        module_file = Path(f"{self.module}.py")
        return {module_file: self._fill_template(f"{self.kind}.py"), self.experiment_file: experiment + table}

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
            with (folder / path).open("x", encoding="utf-8") as file:
                file.write(text)
        return list(self.file_contents)

    @property
    def _class_name(self) -> str:
        return "".join(word.capitalize() for word in self.module.split("_"))

    def _fill_template(self, template: str) -> str:
        """Return the text of a skeleton with the names of the new plug-in or experiment."""
        text = (files("fedsim.skeletons") / template).read_text(encoding="utf-8")
        text = text.replace(f"fedsim.skeletons.{self.kind}", self.module)
        return text.replace("Skeleton", self._class_name).replace("skeleton", self.experiment_file.stem)
