"""A copy of a skeleton under a name of one's own."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from fedsim.errors import ConfigError, did_you_mean

PLUGINS = ("attack", "defense", "measure")
KINDS = ("experiment", *PLUGINS)
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_LONGEST = 100
"""Letters of a name, from which names of files and folders are made."""


@dataclass(frozen=True)
class Skeleton:
    """What `fedsim new KIND NAME` writes.

    Attributes:
        kind: one of KINDS.
        name: of small letters, digits, hyphens and underscores.
    """

    kind: str
    name: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"new: there is no skeleton of '{self.kind}', {did_you_mean(self.kind, KINDS)}")
        if len(self.name) > _LONGEST or not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"new: '{self.name}' cannot be the name of a file and a class; take at most {_LONGEST} small letters, "
                f"digits and hyphens, beginning with a letter, such as my-{self.kind}"
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
        """Of a plug-in, the module that holds it."""
        return self.name.replace("-", "_")

    @property
    def plugin(self) -> str:
        """What an experiment file calls the plug-in, `module:Class`."""
        return f"{self.module}:{self._cls}"

    @property
    def experiment(self) -> Path:
        """The experiment file, of a plug-in one that it is tried in."""
        return Path(f"{self.module if self.kind in PLUGINS else self.name}.toml")

    @property
    def commands(self) -> list[str]:
        """What to try it with, as words for `fedsim`."""
        check = [f"check {self.plugin}"] if self.kind in PLUGINS else []
        expose = [f"expose {self.experiment}"] if self.kind == "measure" else []
        return [*check, *expose, f"run {self.experiment}"]

    @property
    def texts(self) -> dict[Path, str]:
        """What to write, by file."""
        experiment = self._named("experiment.toml")
        if self.kind not in PLUGINS:
            return {self.experiment: experiment}
        table = f'\n[[{self.kind}]] # yours; its settings are the fields of the class\nname = "{self.plugin}"\n'
        return {Path(f"{self.module}.py"): self._named(f"{self.kind}.py"), self.experiment: experiment + table}

    def write(self, folder: Path) -> list[Path]:
        """Write the files into `folder` and say which.

        Raises:
            ConfigError: one of them is there already, and nothing was written.
            OSError: the folder cannot be written.
        """
        for path in self.texts:
            if (folder / path).exists():
                raise ConfigError(f"new: {path} is there already and is left alone; choose another name, or remove it")
        for path, text in self.texts.items():
            with (folder / path).open("x", encoding="utf-8") as file:
                file.write(text)
        return list(self.texts)

    @property
    def _cls(self) -> str:
        return "".join(word.capitalize() for word in self.module.split("_"))

    def _named(self, template: str) -> str:
        """The text of a skeleton, with the names of this one."""
        text = (files("fedsim.skeletons") / template).read_text(encoding="utf-8")
        text = text.replace(f"fedsim.skeletons.{self.kind}", self.module)
        return text.replace("Skeleton", self._cls).replace("skeleton", self.experiment.stem)
