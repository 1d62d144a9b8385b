"""Registry of plug-ins by name; fedsim's own and others' register the same way, as entry points."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import chdir, nullcontext
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from fedsim.base.constraints import Constraint, find_constraint
from fedsim.base.errors import (
    ConfigError,
    InstallationError,
    PluginError,
    did_you_mean,
    error_reason,
    first_line,
    one_line,
)
from fedsim.plugins import inline
from fedsim.plugins.allowed_code import check_allowed
from fedsim.plugins.annotations import argument_types

Group = Literal[
    "attacks",
    "defenses",
    "strategies",
    "datasets",
    "partitions",
    "models",
    "findings",
    "measures",
    "metrics",
    "modalities",
    "engines",
    "panels",
    "algorithms",
]
GROUPS: tuple[Group, ...] = get_args(Group)
DISTRIBUTION = "fedsim-curious"
"""Name of fedsim's distribution."""
COMPANION_PACKAGES = ("strategies", "adversaries", "clients")
PLUGIN_METHODS: Mapping[Group, str] = {
    "attacks": "run",
    "defenses": "on_update",
    "strategies": "aggregate_train",
    "datasets": "load",
    "partitions": "assign",
    "models": "build",
    "findings": "judge",
    "measures": "compute",
    "modalities": "guess_examples",
    "engines": "carry",
    "metrics": "best_value",
    "panels": "render",
    "algorithms": "train_client",
}
"""The method that a plug-in class of each group has."""
_FACTORY_GROUPS: tuple[Group, ...] = ("models", "datasets")
"""Groups in which a function that returns the model or data set can replace a class."""


def check_installation() -> None:
    """Raise InstallationError where something shadows one of fedsim's other packages."""
    home = Path(__file__).resolve().parents[2]
    for package in COMPANION_PACKAGES:
        spec = find_spec(package)
        file = Path(spec.origin).resolve() if spec and spec.origin else None
        is_ours = file is not None and file.parent.parent == home and "PART_OF" in file.read_text()
        if not is_ours:
            raise InstallationError(
                f"'{package}' resolves to {file}, not to this copy of fedsim ({home}); a folder or distribution "
                "of that name shadows it; rename it where it is the module of an app, or run from another folder or "
                "in a separate environment"
            )


@cache
def _entry_points(group: Group) -> Mapping[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name; several where distributions disagree."""
    points_by_name: dict[str, tuple[EntryPoint, ...]] = {}
    for point in entry_points(group=f"fedsim.{group}"):
        points = points_by_name.get(point.name, ())
        if point.value not in [known.value for known in points]:
            points_by_name[point.name] = (*points, point)
    if not points_by_name:
        raise InstallationError(f"no {group} are registered; install the project first ('pip install -e .' will do)")
    return points_by_name


def registered_names(group: Group) -> list[str]:
    """Return the registered names, sorted."""
    return sorted(_entry_points(group))


def entry_point_texts(owner: str) -> list[str]:
    """Return the entry points of the distribution `owner` as texts `group name value`, sorted."""
    texts = []
    for group in GROUPS:
        for points in _entry_points(group).values():
            for point in points:
                if point.dist and _distribution_name(point.dist) == owner:
                    texts.append(f"{point.group} {point.name} {point.value}")
    return sorted(texts)


def find_entry_point(group: Group, name: str) -> EntryPoint:
    """Return the entry point called `name`.

    Raises:
        PluginError: the name is not registered, or two distributions did.
    """
    points_by_name = _entry_points(group)
    if name not in points_by_name:
        raise PluginError(f"{group}: nothing is called '{name}', {did_you_mean(name, points_by_name)}")
    points = points_by_name[name]
    if len(points) > 1:
        owners = " and ".join(sorted(point.dist.name if point.dist else point.value for point in points))
        raise PluginError(f"{group}: '{name}' is registered by {owners}; uninstall one of them")
    return points[0]


def find_builtin_entry_point(group: Group, name: str) -> EntryPoint | None:
    """Return fedsim's own entry point called `name`, whoever else registers it; None without."""
    for point in _entry_points(group).get(name, ()):
        if point.dist is not None and _distribution_name(point.dist) == DISTRIBUTION:
            return point
    return None


@cache
def _distribution_name(distribution: Distribution) -> str:
    return distribution.name  # which parses the metadata of the package each time


def find_distribution(group: Group, name: str) -> str:
    """Return the distribution that registers `name`, or the module of `module:attribute`.

    Raises:
        PluginError: the name is not registered, or two distributions did.
    """
    if ":" in name:
        return name.partition(":")[0]
    distribution = find_entry_point(group, name).dist
    return _distribution_name(distribution) if distribution else "?"


def find_groups(name: str, tables: Iterable[str] = ()) -> list[Group]:
    """Return the groups in which `name` is registered, or to which `module:attribute` belongs.

    Args:
        tables: names that something else than a plug-in has; such a name may be in no group.

    Raises:
        PluginError: there are none, or the module does not import.
    """
    if ":" in name:
        loaded = load_object(name)
        groups = [group for group in GROUPS if _is_plugin_class(loaded, group)]
        if not groups:
            groups = [group for group in _FACTORY_GROUPS if _is_factory(loaded, group)]
        if not groups:
            raise PluginError(
                f"'{name}' is not a plug-in: no class that derives from an interface of fedsim, such as "
                "fedsim.Attack, nor a function annotated to return a model or a data set"
            )
        return groups
    groups = [group for group in GROUPS if name in registered_names(group)]
    if not groups and name not in tables:
        all_names = [known for group in GROUPS for known in registered_names(group)]
        raise PluginError(f"nothing is called '{name}', {_say_what_is_meant(name, [*all_names, *tables])}")
    return groups


def _say_what_is_meant(name: str, known: Iterable[str]) -> str:
    """Say how a package of this name in the working folder is installed, which name is similar, or where all are."""
    package = Path(name.replace("-", "_"))
    if (package / "pyproject.toml").is_file():
        return f"but a folder {package} is here; if that is its package, `pip install --no-deps -e ./{package}`"
    remark = did_you_mean(name, known)
    # So many names would hide the sentence.
    return remark if remark.startswith("did") else "`fedsim list` lists all names; a class in a file is module:Class"


def is_builtin(group: Group, name: str) -> bool:
    """Return whether fedsim itself registers this name.

    Raises:
        PluginError: the name is not registered, or two distributions did.
    """
    return ":" not in name and find_distribution(group, name) == DISTRIBUTION


def find_name(group: Group, cls: type) -> str | None:
    """Return the name under which `cls` is registered, if it is."""
    value = f"{cls.__module__}:{cls.__qualname__}"
    for name, points in _entry_points(group).items():
        if [point.value for point in points] == [value]:
            return name
    return None


def load(group: Group, name: str) -> Any:
    """Return the class registered as `name`, or the class or function at `module:attribute`.

    An experiment file may come with somebody else's run, so nothing is called that is not a plug-in:
    `os:system` is not a model. A function is recognised by its declared return type.

    Raises:
        PluginError: the name is unknown, its module does not import, or it is no plug-in of
            `group`.
    """
    if inline.is_object(name):
        loaded = inline.find_object(name)
        loaded = loaded if isinstance(loaded, type) else type(loaded)
    else:
        loaded = load_object(name) if ":" in name else _load_entry_point(group, name)
    if _is_plugin_class(loaded, group) or _is_factory(loaded, group):
        return loaded
    alternative = ""
    if group in _FACTORY_GROUPS:
        from fedsim.plugins.factories import RETURN_TYPES

        alternative = f", nor a function annotated to return {RETURN_TYPES[group]}"
    raise PluginError(
        f"{group}: '{name}' is not a class with a method '{PLUGIN_METHODS[group]}'{alternative}; name another plug-in"
    )


def _is_plugin_class(candidate: Any, group: Group) -> bool:
    return isinstance(candidate, type) and hasattr(candidate, PLUGIN_METHODS[group])


def _is_factory(candidate: Any, group: Group) -> bool:
    """Return whether calling `candidate` makes a model or data set."""
    if group not in _FACTORY_GROUPS:
        return False
    from fedsim.plugins.factories import is_factory

    return is_factory(candidate, group)


def _load_entry_point(group: Group, name: str) -> Any:
    point = find_entry_point(group, name)
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        owner = point.dist.name if point.dist else "?"
        raise PluginError(
            f"{group}: '{name}' ({point.value}, from {owner}) does not load: {one_line(error_reason(error))}"
        ) from error


def load_object(reference: str, folder: Path | None = None, *, is_app: bool = False) -> Any:
    """Return the object at `module:attribute`.

    Args:
        reference: `module:attribute`.
        folder: a folder in which the module may be; by default the working folder.
        is_app: whether it is a whole app, which may change the working folder for what it does next. Other code may
            not, because runs have relative paths.

    Raises:
        PluginError: the module does not import or has no such attribute.
        TrustError: the command line may not load it, see `allowed_code`.
    """
    check_allowed(reference)
    module_name, _, attribute = reference.partition(":")
    search_folder = str((folder or Path.cwd()).resolve())
    if search_folder not in sys.path:
        sys.path.append(search_folder)
    try:
        with nullcontext() if is_app else chdir(Path.cwd()):
            module = importlib.import_module(module_name)
        loaded = getattr(module, attribute)
    except (Exception, SystemExit) as error:
        reason = one_line(error_reason(error))
        missing = module_name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == missing:
            reason += f"; put '{missing}' into {search_folder}, or name its folder in PYTHONPATH"
        raise PluginError(f"'{reference}' does not load: {reason}") from error
    _check_not_shadowed(reference, module, Path(search_folder))
    return loaded


def _check_not_shadowed(reference: str, module: ModuleType, folder: Path) -> None:
    """Raise PluginError where `folder` has this module, but another of its name was loaded."""
    path = folder.joinpath(*module.__name__.split("."))
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    expected = next((file for file in candidates if file.is_file()), None)
    loaded = getattr(module, "__file__", None)
    if expected is not None and (loaded is None or not expected.samefile(loaded)):
        raise PluginError(
            f"'{reference}': {expected} is meant, but {loaded} was loaded under that name; rename one of them"
        )


def build(group: Group, name: str, settings: Mapping[str, Any], where: str) -> Any:
    """Build the plug-in `name` from a table of settings.

    Settings are validated strictly by the names and annotations of keyword arguments. Flower's
    strategies and a user's functions accept finite numbers only; where they have no annotation but
    a number as default, a number is expected.

    Raises:
        ConfigError: an unknown setting or a wrong type; names it as `where.setting`.
        PluginError: the name is unknown, or its module does not import.
    """
    if inline.is_object(name) and not isinstance(inline.find_object(name), type):
        return inline.build_inline_plugin(group, name, settings, where)
    loaded = load(group, name)
    if _is_plugin_class(loaded, group):
        return construct(loaded, name, settings, where)
    from fedsim.plugins.factories import FactoryPlugin

    return construct(FactoryPlugin.make_constructor(loaded), name, settings, where)


def construct(cls: Any, name: str, settings: Mapping[str, Any], where: str) -> Any:
    """Make an instance of `cls` from a table of settings, see `build`; `name` is for errors."""
    known = setting_parameters(cls)
    # Unknown and missing settings are reported by their names.
    for key in settings:
        if key not in known:
            raise ConfigError(f"{where}.{key}: unknown setting for '{name}', {did_you_mean(key, known)}")
    required = [key for key, parameter in known.items() if parameter.default is parameter.empty]
    missing = [key for key in required if key not in settings]
    if missing:
        raise ConfigError(f"{where}: '{name}' needs {', '.join(missing)}, which is not set")
    # Values are checked by pydantic, and then by the class itself.
    is_dataclass = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    arguments = {} if is_dataclass else _validate_arguments(cls, known, settings, where)
    try:
        if is_dataclass:
            content = _ANY_VALUE.dump_json(dict(settings))
            return _dataclass_adapter(cls).validate_json(content, strict=True)
        return cls(**arguments)
    except ValidationError as error:
        keys, complaint = explain_validation_error(error, settings)
        raise ConfigError(f"{'.'.join((where, *keys))}: {complaint}") from error
    except SystemExit as error:
        raise ConfigError(f"{where}: '{name}' refuses these settings: {error_reason(error)}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: '{name}' refuses these settings: {first_line(error)}") from error


def _validate_arguments(
    cls: Any,
    known: Mapping[str, inspect.Parameter],
    settings: Mapping[str, Any],
    where: str,
) -> dict[str, Any]:
    """Validate `settings` by the annotations of `cls`, and return them as these types.

    Raises:
        ConfigError: a setting is of another type, or no finite number.
    """
    types, arguments = argument_types(cls), {}
    for key, value in settings.items():
        adapter = _type_adapter(types.get(key, _infer_type(known[key].default)))
        try:
            arguments[key] = adapter.validate_json(_ANY_VALUE.dump_json(value), strict=True)
        except ValidationError as error:
            keys, complaint = explain_validation_error(error, value)
            raise ConfigError(f"{'.'.join((where, key, *keys))}: {complaint}") from error
    return arguments


def _infer_type(default: Any) -> Any:
    """Return the type for a setting without annotation: of a bool or number, else any."""
    return {bool: bool, int: int | float, float: int | float}.get(type(default), Any)


def _type_adapter(annotation: Any) -> TypeAdapter[Any]:
    """Return a validator for a type, or for any value where pydantic does not know the type."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))
    except PydanticUserError:
        return TypeAdapter(Any)


def setting_parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """Return the settings that a plug-in takes, by name."""
    return {
        name: parameter
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def explain_validation_error(error: ValidationError, tables: Any) -> tuple[list[str], str]:
    """Return the keys that lead to pydantic's first complaint, and a sentence: expected and got.

    Where a value fits no member of a union, pydantic complains once for each member; these become
    one sentence.

    Args:
        tables: the validated tables, in which the keys are looked up.
    """
    complaints = error.errors()
    first = complaints[0]
    keys = _keys_in(first, tables)
    if first["type"] == "value_error":
        return keys, str(first["msg"]).removeprefix("Value error, ")
    # Join the complaints about the same value.
    messages = [_word_complaint(complaint) for complaint in complaints if _keys_in(complaint, tables) == keys]
    alternatives = [message.removeprefix("Input should be ").removeprefix("expected ") for message in messages[1:]]
    sentence = " or ".join([messages[0], *alternatives])
    # Use the words of TOML, and cut a long value.
    sentence = sentence.replace("valid array", "list").replace("an object", "a table")
    got = repr(first["input"])
    if len(got) > _MAX_VALUE_LENGTH:
        got = f"{got[:_MAX_VALUE_LENGTH]}…"
    return keys, f"{sentence[0].lower()}{sentence[1:]}, got {got}"


def _word_complaint(complaint: ErrorDetails) -> str:
    """Return pydantic's complaint, for a constraint in the words that it has everywhere else."""
    if complaint["type"] == "predicate_failed" and "isfinite" in complaint["msg"]:
        return Constraint.finite().expectation
    constraint = find_constraint(complaint.get("ctx", {}))
    return constraint.expectation if constraint else str(complaint["msg"])


def _keys_in(complaint: ErrorDetails, tables: Any) -> list[str]:
    """Return the location of a complaint without the names of union members, which pydantic inserts."""
    keys = []
    *_, last = complaint["loc"] or [None]
    for part in complaint["loc"]:
        is_missing = part is last and complaint["type"] == "missing"
        # Python may hand over a table whose keys are integers, such as ids of clients; pydantic reads them as text.
        table = dict(zip(map(str, tables), tables.values(), strict=True)) if isinstance(tables, Mapping) else {}
        if isinstance(part, str) and isinstance(tables, Mapping) and (part in table or is_missing):
            keys.append(part)
            tables = table.get(part)
        elif isinstance(part, int) and isinstance(tables, Sequence):
            keys.append(str(part))
            tables = _item_or_none(tables, part)
    return keys


def _item_or_none(values: Sequence[Any], index: int) -> Any:
    """Return an item, or None where a list is too short for its type."""
    return values[index] if index < len(values) else None


_ANY_VALUE: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="constants"))
_MAX_VALUE_LENGTH = 200
"""Number of letters of a rejected value that an error shows."""


@cache
def _dataclass_adapter(cls: type) -> TypeAdapter[Any]:
    if "__pydantic_config__" not in vars(cls):
        cls.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)  # type: ignore[attr-defined]
    return TypeAdapter(cls)
