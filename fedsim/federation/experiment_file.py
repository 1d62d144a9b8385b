"""Read an experiment file: TOML with `key=value` overrides; relative paths become absolute."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsim.base.errors import ConfigError, did_you_mean, first_line
from fedsim.base.files import read_settings
from fedsim.federation.config import Config
from fedsim.federation.table_validation import TOO_DEEP, name_tables, validate_tables
from fedsim.federation.trust import check_trust, is_in_run_folder
from fedsim.plugins.allowed_code import allow_code

_LARGEST_INTEGER = (1 << 64) - 1
"""Largest number in a file: Flower's node ids, which may be victims, have 64 bits."""
_TOO_MANY_PARTS = re.compile(
    r"""(?:(?<![\w-])[\w-]+[ \t]*\.[ \t]*|"[^"\n]*"[ \t]*\.[ \t]*|'[^'\n]*'[ \t]*\.[ \t]*){100}"""
)
"""A key of a hundred parts with dots between, more than any table has."""
FILES = (("model", "start"), ("partition", "path"))
"""Settings, by table and key, that name a file relative to the experiment file."""
PATHS = ("path", "start", "folder")
"""Settings that name a file or folder."""


def load_config(path: Path, overrides: Iterable[str] = (), *, trust: bool = False) -> Config:
    """Read an experiment file and apply `key=value` overrides.

    Args:
        trust: accept `module:callable` in a file that is in a run folder.

    Raises:
        ConfigError: the file is missing, is not TOML, is invalid, or names code and is not the
            user's own.
    """
    tables, is_own = read_toml(path, overrides), not is_in_run_folder(path)
    if "sweep" in tables:
        raise ConfigError(f"{path}: has a [sweep] table, so it is not a single experiment; `fedsim sweep` runs it")
    if is_own:
        allow_code(tables)
    config = config_of(tables, str(path), path.parent)
    check_trust(config, path, trust or is_own)
    return config


def config_of(tables: dict[str, Any], where: str, folder: Path) -> Config:
    """Validate the tables of an experiment, whose relative paths become absolute.

    Args:
        tables: as `read_toml` returns them.
        folder: folder to which relative paths refer.
    """
    check_possible(tables, where)
    make_absolute(tables, where, folder)
    return validate_tables(Config, tables, where)


def make_absolute(tables: Mapping[str, Any], where: str, folder: Path) -> None:
    """Make paths in `tables`, relative to `folder`, absolute, as nodes work in other folders."""
    for name, key in FILES:
        table = tables.get(name)
        if isinstance(table, dict) and isinstance(table.get(key), str) and table[key]:
            try:
                table[key] = str((folder / Path(table[key]).expanduser()).resolve())
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(f"{where}: {name}.{key}: {first_line(error)}; name another file") from error


def read_toml(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the tables of a TOML file and apply overrides.

    Only values that no setting can have are refused; `check_possible` finds them.
    """
    try:
        text = read_settings(path)
        if _TOO_MANY_PARTS.search(text):  # whose cost to the parser grows with the square of their number
            raise ConfigError(f"{path}: {TOO_DEEP}")
        tables = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: {TOO_DEEP}") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(tables, override)
    check_possible(tables, str(path))
    return tables


def check_possible(tables: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where a value in `tables` is one that no setting can have."""
    try:
        for path, value in _leaves(tables):
            is_path = path[0] == "truth" or path[-1] in PATHS
            if complaint := _find_complaint(path[-1], value, is_path=is_path):
                raise ConfigError(f"{where}: {'.'.join(name_tables(path, tables))}: {complaint}")
    except RecursionError as error:
        raise ConfigError(f"{where}: {TOO_DEEP}") from error


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every key, and every value that is no table or list, each with its path."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, str(key)), str(key)
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


def _find_complaint(key: str, value: Any, *, is_path: bool) -> str:
    """Say why no setting can have this value; '' where one might."""
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        return f"expected a whole number below 2^64, got one of {value.bit_length()} bits"
    if not isinstance(value, str):
        return ""
    if "\0" in value:
        return "holds a NUL character; remove it"
    if not is_path or value == key:
        return ""
    if any(len(os.fsencode(part)) > 255 for part in value.split("/")) or len(os.fsencode(value)) > 4000:
        return f"a path of {len(value)} characters is longer than files can be called; choose a shorter one"
    try:
        Path(value).expanduser()
    except RuntimeError:
        return f"the home folder that {value.split('/')[0]!r} stands for is unknown; write the path out"
    return ""


def apply_override(tables: dict[str, Any], override: str) -> None:
    """Apply one `a.b.c=value` to `tables`, see `set_value`."""
    set_value(tables, *parse_override(override), f"--set {override}")


def parse_override(override: str) -> tuple[str, Any]:
    """Parse `a.b.c=value` into its key and its value, which is TOML or else a text.

    >>> parse_override("training.local_epochs=5")
    ('training.local_epochs', 5)
    """
    key, equals, text = override.partition("=")
    if not equals or not all(word.strip() for word in key.split(".")):
        raise ConfigError(f"--set {override}: expected key=value, e.g. attack.sme.iterations=200")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError as error:
        raise ConfigError(f"--set {key}: {TOO_DEEP}") from error
    except ValueError:
        value = text
    return key, value


def set_value(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `a.b.c` to `value`; in a list of plug-in tables the next word picks one by label or name."""
    *parents, last = (word.strip() for word in key.split("."))
    table: Any = tables
    for word in parents:
        if isinstance(table, list):
            items = [item for item in table if isinstance(item, dict)]
            matches = [item for item in items if word in (item.get("label"), item.get("name"))]
            if len(matches) != 1:
                titles = [str(item.get("label", item.get("name", ""))) for item in items]
                raise ConfigError(
                    f"{where}: {len(matches) or 'no'} tables are called '{word}', {did_you_mean(word, titles)}"
                )
            table = matches[0]
        else:
            table = table.setdefault(word, {})
        if not isinstance(table, dict | list):
            raise ConfigError(f"{where}: '{word}' is a value, not a table")
    if isinstance(table, list):
        raise ConfigError(f"{where}: name one of them, e.g. {'.'.join(parents)}.NAME.{last}")
    table[last] = value
