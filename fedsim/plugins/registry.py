"""Plug-ins by name. Built-ins and strangers register the same way: as entry points."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from fedsim.errors import (
    ConfigError,
    InstallationError,
    PluginError,
    did_you_mean,
    first_line,
    one_line,
    what_it_said,
)
from fedsim.plugins import objects
from fedsim.plugins.allowed_code import check_allowed
from fedsim.plugins.annotations import hints

Group = Literal["attacks", "defenses", "strategies", "datasets", "partitions", "models", "findings", "measures"]
GROUPS: tuple[Group, ...] = get_args(Group)
OWNER = "fedsim-curious"
"""The name of fedsim's distribution."""
ROOMS = ("strategies", "adversaries", "clients")
OFFERS: Mapping[Group, str] = {
    "attacks": "run",
    "defenses": "on_update",
    "strategies": "aggregate_train",
    "datasets": "load",
    "partitions": "assign",
    "models": "build",
    "findings": "judge",
    "measures": "of",
}
"""The method by which a class is known for a plug-in of its group."""
_MADE: tuple[Group, ...] = ("models", "datasets")
"""Groups in which a function that makes the product will do, too."""


def check_installation() -> None:
    """Make sure that the rooms beside `fedsim` are ours.

    Raises:
        InstallationError: a folder or distribution of the same name shadows one of them.
    """
    home = Path(__file__).resolve().parents[2]
    for room in ROOMS:
        spec = find_spec(room)
        place = Path(spec.origin).resolve() if spec and spec.origin else None
        ours = place is not None and place.parent.parent == home and "PART_OF" in place.read_text()
        if not ours:
            raise InstallationError(
                f"'{room}' resolves to {place}, not to this copy of fedsim ({home}); a folder or distribution "
                "of that name shadows it; run from another folder or use a separate environment"
            )


@cache
def _entries(group: Group) -> Mapping[str, tuple[EntryPoint, ...]]:
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=f"fedsim.{group}"):
        known = found.get(entry.name, ())
        if entry.value not in [other.value for other in known]:
            found[entry.name] = (*known, entry)
    if not found:
        raise InstallationError(f"no {group} are registered; install the project first ('pip install -e .' will do)")
    return found


def names(group: Group) -> list[str]:
    """Registered names, sorted."""
    return sorted(_entries(group))


def values(owner: str) -> list[str]:
    """What the entry points of the distribution `owner` say, of all groups."""
    known = (point for group in GROUPS for points in _entries(group).values() for point in points)
    return sorted(
        f"{point.group} {point.name} {point.value}" for point in known if point.dist and point.dist.name == owner
    )


def entry(group: Group, name: str) -> EntryPoint:
    """The entry point called `name`.

    Raises:
        PluginError: nobody registered the name, or two distributions did.
    """
    known = _entries(group)
    if name not in known:
        raise PluginError(f"{group}: nothing is called '{name}', {did_you_mean(name, known)}")
    if len(known[name]) > 1:
        owners = " and ".join(sorted(e.dist.name if e.dist else e.value for e in known[name]))
        raise PluginError(f"{group}: '{name}' is registered by {owners}; uninstall one of them")
    return known[name][0]


def owner(group: Group, name: str) -> str:
    """The distribution that registers `name`; of `module:attribute` the module.

    Raises:
        PluginError: see `entry`.
    """
    if ":" in name:
        return name.partition(":")[0]
    return dist.name if (dist := entry(group, name).dist) else "?"


def groups_of(name: str) -> list[Group]:
    """The groups in which `name` is a plug-in: registered, or as `module:attribute` of the kind of their plug-ins.

    Raises:
        PluginError: there are none, or the module does not import.
    """
    if ":" in name:
        thing = load_object(name)
        found = [group for group in GROUPS if _is_plugin(thing, group)]
        if not (found := found or [group for group in _MADE if _makes(thing, group)]):
            raise PluginError(
                f"'{name}' is no plug-in: no class that derives from an interface of fedsim, such as "
                "fedsim.Attack, nor a function annotated to return a model or a data set"
            )
        return found
    if not (found := [group for group in GROUPS if name in names(group)]):
        everything = [known for group in GROUPS for known in names(group)]
        raise PluginError(f"nothing is called '{name}', {did_you_mean(name, everything)}")
    return found


def is_own(group: Group, name: str) -> bool:
    """Whether fedsim itself registers this name: its runs outlive a new version of it and of its libraries.

    Raises:
        PluginError: see `entry`.
    """
    return ":" not in name and owner(group, name) == OWNER


def name_of(group: Group, cls: type) -> str | None:
    """The name under which `cls` is registered, if it is."""
    value = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, found in _entries(group).items() if [e.value for e in found] == [value]), None)


def load(group: Group, name: str) -> Any:
    """The class registered as `name`, or what is at `module:attribute`: a class, or a function that makes its product.

    An experiment file may come with somebody else's run, so nothing is called that is no plug-in:
    `os:system` is not a model. A function is known for one by the type that it says it returns.

    Raises:
        PluginError: the name is unknown, its module does not import, or it is no plug-in of `group`.
    """
    if objects.is_object(name):
        loaded = objects.given(name)
        loaded = loaded if isinstance(loaded, type) else type(loaded)
    else:
        loaded = load_object(name) if ":" in name else _load_entry(group, name)
    if _is_plugin(loaded, group):
        return loaded
    if _makes(loaded, group):
        return loaded
    if group in _MADE:
        from fedsim.plugins.makers import PRODUCTS

        or_else = f", nor a function annotated to return {PRODUCTS[group]}"
    else:
        or_else = ""
    raise PluginError(f"{group}: '{name}' is no class with a method '{OFFERS[group]}'{or_else}; name another plug-in")


def _is_plugin(thing: Any, group: Group) -> bool:
    return isinstance(thing, type) and hasattr(thing, OFFERS[group])


def _makes(thing: Any, group: Group) -> bool:
    if group not in _MADE:
        return False
    from fedsim.plugins.makers import makes

    return makes(thing, group)


def _load_entry(group: Group, name: str) -> Any:
    found = entry(group, name)
    try:
        return found.load()
    except (Exception, SystemExit) as error:
        owner = found.dist.name if found.dist else "?"
        raise PluginError(
            f"{group}: '{name}' ({found.value}, from {owner}) does not load: {one_line(what_it_said(error))}"
        ) from error


def load_object(reference: str, beside: Path | None = None) -> Any:
    """The object at `module:attribute`; modules in the folder `beside` are found too.

    Raises:
        PluginError: the module does not import or has no such attribute.
        TrustError: the command line may not load it, see `allowed_code`.
    """
    check_allowed(reference)
    module_name, _, attribute = reference.partition(":")
    folder = str((beside or Path.cwd()).resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
        loaded = getattr(module, attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(f"'{reference}' does not load: {one_line(what_it_said(error))}") from error
    _check_of_folder(reference, module, Path(folder))
    return loaded


def _check_of_folder(reference: str, module: ModuleType, folder: Path) -> None:
    """Raise PluginError where another module of the same name was loaded in place of the one in `folder`."""
    place = folder.joinpath(*module.__name__.split("."))
    meant = next((file for file in (place / "__init__.py", place.with_suffix(".py")) if file.is_file()), None)
    loaded = getattr(module, "__file__", None)
    if meant is not None and (loaded is None or not meant.samefile(loaded)):
        raise PluginError(
            f"'{reference}': {meant} is meant, but {loaded} was loaded under that name; rename one of them"
        )


def build(group: Group, name: str, settings: Mapping[str, Any], where: str) -> Any:
    """Make the plug-in `name` from a table of settings.

    All are validated strictly, by the names of their keyword arguments and by their annotations. Flower's strategies
    and a user's functions are given finite numbers only, and without an annotation a number where the default is one.

    Raises:
        ConfigError: an unknown setting or a wrong type; names it as `where.setting`.
        PluginError: the name is unknown, or its module does not import.
    """
    if objects.is_object(name) and not isinstance(objects.given(name), type):
        return objects.plugin(group, name, settings, where)
    found = load(group, name)
    if _is_plugin(found, group):
        return construct(found, name, settings, where)
    from fedsim.plugins.makers import Maker

    return construct(Maker.of(found), name, settings, where)


def construct(cls: Any, name: str, settings: Mapping[str, Any], where: str) -> Any:
    """Make `cls`, called `name` in messages, from a table of settings; see `build`."""
    known = parameters(cls)
    for key in settings:
        if key not in known:
            raise ConfigError(f"{where}.{key}: unknown setting for '{name}', {did_you_mean(key, known)}")
    missing = [key for key, parameter in known.items() if parameter.default is parameter.empty and key not in settings]
    if missing:
        raise ConfigError(f"{where}: '{name}' needs {', '.join(missing)}, which is not set")
    try:
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            return _adapter(cls).validate_json(_json(settings), strict=True)
        return cls(**_typed(cls, known, settings, where))
    except ValidationError as error:
        place, complaint = explain(error, settings)
        raise ConfigError(f"{'.'.join((where, *place))}: {complaint}") from error
    except (TypeError, ValueError, SystemExit) as error:
        raise ConfigError(f"{where}: '{name}' refuses these settings: {_refusal(error)}") from error


def _refusal(error: BaseException) -> str:
    return what_it_said(error) if isinstance(error, SystemExit) else first_line(error)


def _typed(cls: Any, known: Mapping[str, inspect.Parameter], settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`settings` as the annotations of `cls` want them; of finite numbers only.

    Raises:
        ConfigError: a setting is of another type, or no finite number.
    """
    types, typed = hints(cls), {}
    for key, value in settings.items():
        adapter = _adapter_of(types.get(key, _like(known[key].default)))
        try:
            typed[key] = adapter.validate_json(_ANYTHING.dump_json(value), strict=True)
        except ValidationError as error:
            place, complaint = explain(error, value)
            raise ConfigError(f"{'.'.join((where, key, *place))}: {complaint}") from error
    return typed


def _like(default: Any) -> Any:
    """What a setting without an annotation may be: true or false, or a number, where its default is one."""
    return {bool: bool, int: int | float, float: int | float}.get(type(default), Any)


def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    """For values of `kind`, or where pydantic does not know that kind, for any."""
    try:
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError:
        return TypeAdapter(Any)


def parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """The settings that a plug-in takes, by name."""
    return {
        name: parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def explain(error: ValidationError, tables: Any) -> tuple[list[str], str]:
    """Where pydantic's first complaint is, and what was expected and got there.

    What each member of a union would have accepted becomes one sentence.
    """
    complaints = error.errors()
    first, place = complaints[0], _place(complaints[0]["loc"], tables)
    if first["type"] == "value_error":
        return place, str(first["msg"]).removeprefix("Value error, ")
    alike = [str(c["msg"]) for c in complaints if _place(c["loc"], tables) == place]
    message = " or ".join([alike[0], *(other.removeprefix("Input should be ") for other in alike[1:])])
    message = message.replace("valid array", "list").replace("an object", "a table")
    got = repr(first["input"])
    return place, f"{message[0].lower()}{message[1:]}, got {got if len(got) <= 200 else got[:200] + '…'}"


def _place(location: Sequence[int | str], tables: Any) -> list[str]:
    """`location` without the names of union members, which pydantic puts in between."""
    place = []
    for part in location:
        if isinstance(tables, Mapping if isinstance(part, str) else Sequence):
            place.append(str(part))
            tables = tables.get(part) if isinstance(tables, Mapping) else _item(tables, int(part))
    return place


def _item(values: Sequence[Any], place: int) -> Any:
    """None where a list is too short for its type."""
    return values[place] if place < len(values) else None


def _json(settings: Mapping[str, Any]) -> bytes:
    return _ANYTHING.dump_json(dict(settings))


_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    if "__pydantic_config__" not in vars(cls):
        cls.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)  # type: ignore[attr-defined]
    return TypeAdapter(cls)
