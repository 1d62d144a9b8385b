"""Bases of the tables of an experiment file, and checks that several tables share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator


class Table(BaseModel):
    """Table of the experiment file; unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class PluginTable(BaseModel):
    """Table that picks a plug-in by `name`; the other keys are the plug-in's settings."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, ser_json_inf_nan="constants")
    name: str = Field(description="Name of a plug-in, or `module:Class`; the other keys are its settings.")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the plug-in's own settings."""
        return dict(self.model_extra or {})


def add_keys(base: type[Table], **keys: tuple[Any, Any]) -> Any:
    """Create the table `base` with further keys, each with its type and its default."""
    return create_model(base.__name__, __base__=base, __module__=base.__module__, __doc__=base.__doc__, **keys)  # type: ignore[call-overload]


_MAX_LABEL_LENGTH = 60
"""Most characters of a label; file systems allow names of 255 bytes, and a character may have
four."""


class LabelledTable(PluginTable):
    """Table of a list, of which several may pick the same plug-in."""

    label: str = Field(
        default="",
        description="Distinguishes two settings of the same plug-in, and names a folder; by default its name.",
    )

    @field_validator("label")
    @classmethod
    def _check_label(cls, label: str) -> str:
        if label and not re.fullmatch(r"\w[\w .,=+-]*", label):
            raise ValueError(f"it names a folder: expected letters, digits and any of ' .,=+-', got '{label}'")
        if len(label) > _MAX_LABEL_LENGTH:
            raise ValueError(f"it names a folder: expected at most {_MAX_LABEL_LENGTH} characters, got {len(label)}")
        return label

    @property
    def title(self) -> str:
        """Return the name under which its results are stored."""
        return self.label or self.name


def check_titles(tables: Iterable[LabelledTable], noun: str) -> None:
    """Raise ValueError where two tables of a list have the same title."""
    for title, count in Counter(table.title for table in tables).items():
        if count > 1:
            raise ValueError(f"two {noun} are called '{title}'; give one of them a label")


def check_list(where: str, chosen: list[int], noun: str) -> None:
    """Raise ValueError where chosen clients or rounds are none, or one is named twice."""
    if not chosen:
        raise ValueError(f"{where}: the list is empty; leave the key out, or name {noun}")
    if duplicates := [item for item, count in Counter(chosen).items() if count > 1]:
        raise ValueError(f"{where}: {duplicates[0]} is named twice; name each once")


def check_choice(where: str, chosen: list[int], count: int, noun: str) -> None:
    """Raise ValueError where chosen clients or rounds are not among `count`, or one is named twice."""
    first = 0 if noun == "clients" else 1
    if len(chosen) > count:
        raise ValueError(f"{where}: {len(chosen)} {noun} named, but federation.{noun} is {count}")
    for item in chosen:
        if not first <= item < first + count:
            raise ValueError(f"{where}: expected {noun} from {first} to {first + count - 1}, got {item}")
    check_list(where, chosen, noun)
