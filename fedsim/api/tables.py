"""The tables of experiment files with their keys: type, range, default and meaning of each."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedsim.federation.adversary_tables import AdversaryTable, AttackTable, KnowledgeTable
from fedsim.federation.config import ReportTable
from fedsim.federation.federation_tables import (
    AlgorithmTable,
    DataTable,
    FederationTable,
    MeasureTable,
    ModelTable,
    PartitionTable,
    RecordingTable,
    StatesTable,
    StrategyTable,
    TrainingTable,
)
from fedsim.federation.privacy_tables import (
    CanariesTable,
    CentralPrivacyTable,
    DistributedPrivacyTable,
    SecureAggregationTable,
)
from fedsim.federation.table import PluginTable, Table
from fedsim.plugins.descriptions import format_type
from fedsim.recording.message_format import MessageFormat
from fedsim.sweeps.file import SweepTable
from fedsim.training.settings import LocalTraining

TABLES: Mapping[str, type[BaseModel]] = {
    "data": DataTable,
    "partition": PartitionTable,
    "model": ModelTable,
    "training": TrainingTable,
    "federation": FederationTable,
    "strategy": StrategyTable,
    "algorithm": AlgorithmTable,
    "defense": PluginTable,
    "secure_aggregation": SecureAggregationTable,
    "central_privacy": CentralPrivacyTable,
    "distributed_privacy": DistributedPrivacyTable,
    "canaries": CanariesTable,
    "measure": MeasureTable,
    "recording": RecordingTable,
    "states": StatesTable,
    "adversary": AdversaryTable,
    "adversary.knowledge": KnowledgeTable,
    "attack": AttackTable,
    "report": ReportTable,
    "app": MessageFormat,
    "truth": Table,
    "sweep": SweepTable,
}
"""Class of each table of experiment, attack and sweep files by its name, in the order of a file."""
LISTS = ("defense", "measure", "attack")
"""Names of tables of which a file may have several."""
_TEXTS: Mapping[str, str] = {
    "training": "What a client does in a round.",
    "defense": "One defense of the clients; several work in the order of the file.",
    "truth": "In an attack file, client ids with safetensors files of `data` and `labels`, to score attacks on a "
    "recording made elsewhere. A key may be `#1`, `#2` ..., the clients in the order in which they appear.",
}
"""Text of tables whose class says nothing for the user of a file."""
REQUIRED = "required"
"""What stands in place of the default of a key or setting without one."""
_TABLE_CLASS = re.compile(r"fedsim[.\w]*Table")


@dataclass(frozen=True, kw_only=True)
class TableKey:
    """Key of a table.

    Attributes:
        kind: its type, with the range of its values.
        default: as Python writes it; `REQUIRED` where there is none.
        meaning: what it says.
    """

    name: str
    kind: str
    default: str
    meaning: str

    @property
    def is_required(self) -> bool:
        """Return whether a file has to give it."""
        return self.default == REQUIRED


@dataclass(frozen=True, kw_only=True)
class TableDescription:
    """Table of a file.

    Attributes:
        name: as the file has it, with dots.
        text: what the table is about.
    """

    name: str
    text: str
    keys: Sequence[TableKey]


def describe_table(name: str) -> TableDescription:
    """Return what is known of the table called `name`, which is one of `TABLES`."""
    return describe_class(name, TABLES[name])


def describe_class(name: str, cls: type[BaseModel]) -> TableDescription:
    """Return what is known of a table that `cls` checks."""
    texts = read_setting_texts(LocalTraining if name == "training" else cls)
    keys = [_describe_key(key, field, texts) for key, field in cls.model_fields.items()]
    docstring = (inspect.getdoc(cls) or "").partition("\n\nAttributes:")[0]
    text = _TEXTS.get(name) or docstring.partition("]: ")[2]
    return TableDescription(name=name, text=_begin_sentence(text), keys=keys)


def _begin_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _describe_key(name: str, field: FieldInfo, texts: Mapping[str, str]) -> TableKey:
    kind = _format_field_type(_add_range(field.annotation, field.metadata))
    if field.is_required():
        default = REQUIRED
    elif isinstance(field.default, BaseModel):
        default = "that table's"
    else:
        default = repr(field.default)
    meaning = _begin_sentence(field.description or texts[name])
    return TableKey(name=name, kind=kind, default=default, meaning=meaning)


def _add_range(kind: Any, limits: Sequence[Any]) -> Any:
    """Return a type with the limits that its field has; None, where it may be that, has none."""
    if not limits:
        return kind
    if get_origin(kind) in (Union, UnionType):
        members = [member if member is type(None) else Annotated[member, *limits] for member in get_args(kind)]
        return reduce(or_, members)
    return Annotated[kind, *limits]


def _format_field_type(kind: Any) -> str:
    """Return the type of a key as text; a class of a table is a table to the author of a file."""
    return _TABLE_CLASS.sub("table", format_type(kind)).replace("typing.", "")


_SECTION = re.compile(r"^(?:Args|Attributes):\n((?:(?: .*)?\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): (.*\n(?: {8}.*\n)*)", re.MULTILINE)


def read_setting_texts(cls: type) -> dict[str, str]:
    """Return what docstrings say of each setting; a class takes precedence over its bases.

    >>> class Blur:
    ...     '''Blur images.
    ...
    ...     Args:
    ...         width: of the kernel,
    ...             in pixels.
    ...     '''
    >>> read_setting_texts(Blur)
    {'width': 'of the kernel, in pixels.'}
    """
    texts: dict[str, str] = {}
    for owner in reversed(inspect.getmro(cls)):
        texts |= _read_entries(owner.__doc__ or "")
    return texts


def _read_entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield name and text of each entry, the text in one line."""
    for section in _SECTION.findall(f"{inspect.cleandoc(docstring)}\n"):
        for name, text in _ENTRY.findall(section):
            yield name, " ".join(text.split())
