"""Reads an experiment file: TOML with `key=value` overrides, in which relative paths become absolute."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsim.errors import ConfigError, did_you_mean, first_line
from fedsim.experiments.config import TOO_DEEP, Config, check, titled
from fedsim.experiments.trust import check_trust, is_in_a_run
from fedsim.plugins.allowed_code import allow_code

_LARGEST = (1 << 64) - 1
"""Flower's ids of nodes, which may be victims, have 64 bits."""
FILES = (("model", "start"), ("partition", "path"))
"""Settings, by table and key, that name a file, to which a relative path is relative to the experiment file."""
PATHS = ("path", "start", "folder")
"""Settings that name a file or folder."""


def load_config(path: Path, overrides: Iterable[str] = (), *, trust: bool = False) -> Config:
    """Read an experiment file and apply `key=value` overrides.

    Args:
        trust: accept `module:callable` in a file that is in a run folder.

    Raises:
        ConfigError: the file is missing, is not TOML, says something that does not hold, or names code and is not
            the user's own.
    """
    tables, own = read_toml(path, overrides), not is_in_a_run(path)
    if own:
        allow_code(tables)
    config = config_of(tables, str(path), path.parent)
    check_trust(config, path, trust or own)
    return config


def config_of(tables: dict[str, Any], where: str, folder: Path) -> Config:
    """The experiment that `tables` describe, in which relative paths become absolute.

    Args:
        tables: as `read_toml` returns them.
        where: what messages call them.
        folder: to which relative paths are relative.

    Raises:
        ConfigError: they say something that does not hold.
    """
    check_possible(tables, where)
    make_absolute(tables, where, folder)
    return check(Config, tables, where)


def make_absolute(tables: Mapping[str, Any], where: str, folder: Path) -> None:
    """Make paths in `tables` absolute that are relative to `folder`: nodes work in folders of their own.

    Raises:
        ConfigError: one cannot be a path.
    """
    for table, key in FILES:
        owner = tables.get(table)
        if isinstance(owner, dict) and isinstance(owner.get(key), str) and owner[key]:
            try:
                owner[key] = str((folder / Path(owner[key]).expanduser()).resolve())
            except (OSError, ValueError, RuntimeError) as error:
                raise ConfigError(f"{where}: {table}.{key}: {first_line(error)}; name another file") from error


def read_toml(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file with overrides applied; of what they say, only what no setting can be is refused."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: {TOO_DEEP}") from error
    except ValueError as error:  # no TOML, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error
    for override in overrides:
        override_in(tables, override)
    check_possible(tables, str(path))
    return tables


def check_possible(tables: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where a value in `tables` is one that no setting can have."""
    try:
        for place, value in _leaves(tables):
            if complaint := _impossible(place[-1], value, is_path=place[0] == "truth" or place[-1] in PATHS):
                raise ConfigError(f"{where}: {'.'.join(titled(place, tables))}: {complaint}")
    except RecursionError as error:
        raise ConfigError(f"{where}: {TOO_DEEP}") from error


def _leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key and every value in `value` that is no table or list, and where it is."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*place, str(key)), str(key)
            yield from _leaves(inner, (*place, str(key)))
    else:
        yield place, value


def _impossible(key: str, value: Any, *, is_path: bool) -> str:
    """Why no setting can have this value; nothing where one might."""
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"expected a whole number below 2^64, got one of {value.bit_length()} bits"
    if not isinstance(value, str):
        return ""
    if "\0" in value:
        return "holds a NUL character; remove it"
    if not is_path or value == key:
        return ""
    if any(len(os.fsencode(part)) > 255 for part in value.split("/")) or len(os.fsencode(value)) > 4000:
        return f"a path of {len(value)} characters is longer than files can be called; shorten it"
    try:
        Path(value).expanduser()
    except RuntimeError:
        return f"nobody knows the home folder that {value.split('/')[0]!r} stands for; write the path out"
    return ""


def override_in(tables: dict[str, Any], override: str) -> None:
    """Apply one `a.b.c=value`; see `put`."""
    put(tables, *parsed(override), f"--set {override}")


def parsed(override: str) -> tuple[str, Any]:
    """The key and the value of `a.b.c=value`.

    Raises:
        ConfigError: it has another form.
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


def put(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `a.b.c` to `value`; in a list of plug-in tables the next word picks one by label or name.

    Raises:
        ConfigError: a table in the path is none, or cannot be told from others of its list.
    """
    *parents, last = (word.strip() for word in key.split("."))
    table: Any = tables
    for word in parents:
        if isinstance(table, list):
            named = [t for t in table if isinstance(t, dict)]
            chosen = [t for t in named if word in (t.get("label"), t.get("name"))]
            if len(chosen) != 1:
                raise ConfigError(
                    f"{where}: {len(chosen) or 'no'} tables are called '{word}', "
                    f"{did_you_mean(word, (str(t.get('label', t.get('name', ''))) for t in named))}"
                )
            table = chosen[0]
        else:
            table = table.setdefault(word, {})
        if not isinstance(table, dict | list):
            raise ConfigError(f"{where}: '{word}' is a value, not a table")
    if isinstance(table, list):
        raise ConfigError(f"{where}: name one of them, e.g. {'.'.join(parents)}.NAME.{last}")
    table[last] = value
