"""Plug-ins by name: what is found, what is refused, and that a broken one breaks only itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from fedsim.base.errors import ConfigError, InstallationError, PluginError
from fedsim.federation.build_plugins import build_attacks
from fedsim.federation.config import AttackFile
from fedsim.federation.table_validation import validate_tables
from fedsim.plugins import registry


class FakeDistribution:
    def __init__(self, name: str) -> None:
        self.name = name


def entry(name: str, value: str, owner: str) -> EntryPoint:
    point = EntryPoint(name, value, "fedsim.attacks")
    vars(point)["dist"] = FakeDistribution(owner)
    return point


@pytest.fixture
def attacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """The entry points of the attacks group, to be added to."""
    found = [entry("sme", "adversaries.inversion.surrogate_model:SurrogateModelExtension", "fedsim-curious")]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    registry._entry_points.cache_clear()
    yield found
    registry._entry_points.cache_clear()


def test_a_name_of_two_distributions_is_refused_naming_both(attacks: list[EntryPoint]) -> None:
    attacks += [entry("mine", "a:A", "alpha"), entry("mine", "b:B", "beta")]
    with pytest.raises(PluginError, match="attacks: 'mine' is registered by alpha and beta; uninstall one of them"):
        registry.load("attacks", "mine")
    assert registry.registered_names("attacks") == ["mine", "sme"]
    assert registry.load("attacks", "sme").__name__ == "SurrogateModelExtension"


def test_one_distribution_seen_twice_is_no_conflict(attacks: list[EntryPoint]) -> None:
    """An editable install and its source folder on the path show the same entry point twice."""
    attacks.append(attacks[0])
    assert registry.load("attacks", "sme").__name__ == "SurrogateModelExtension"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("no_such_module:X", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("adversaries.inversion.surrogate_model:Nothing", "AttributeError"),
    ],
)
def test_a_broken_plugin_is_named_with_its_distribution(attacks: list[EntryPoint], value: str, sentence: str) -> None:
    attacks.append(entry("broken", value, "stranger"))
    with pytest.raises(PluginError, match=r"'broken' .* from stranger.* does not load") as caught:
        registry.load("attacks", "broken")
    assert sentence in str(caught.value)
    assert registry.load("attacks", "sme")


def test_an_empty_group_means_that_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    registry._entry_points.cache_clear()
    try:
        with pytest.raises(InstallationError, match=r"no attacks are registered; install the project first"):
            registry.registered_names("attacks")
    finally:
        registry._entry_points.cache_clear()


@dataclass(frozen=True, kw_only=True)
class Settings:
    count: int = 1
    rate: float = 0.5
    shape: tuple[int, ...] = ()
    ends: tuple[float, float] = (0.0, 1.0)
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count: expected at least 0")


class Plain:
    def __init__(self, a: int, *, b: str = "x") -> None:
        if a < 0:
            raise ValueError("a is negative")
        self.a, self.b = a, b


@pytest.mark.parametrize(
    ("cls", "settings", "sentence"),
    [
        (Settings, {"cuont": 1}, "here.cuont: unknown setting for 'it', did you mean 'count'?"),
        (Settings, {"count": "1"}, "here.count: input should be a valid integer, got '1'"),
        (Settings, {"rate": "fast"}, "here.rate: input should be a valid number, got 'fast'"),
        (Settings, {"shape": [1, 2.5]}, "here.shape.1: input should be a valid integer, got 2.5"),
        (Settings, {"ends": [1.0]}, "here.ends.1: field required, got [1.0]"),
        (Settings, {"counts": {3: "x"}}, "here.counts.3: input should be a valid integer, got 'x'"),
        (Settings, {"count": -1}, "here: count: expected at least 0"),
        (Plain, {"b": "y"}, "here: 'it' needs a, which is not set"),
        (Plain, {"a": -1}, "here: 'it' refuses these settings: a is negative"),
        (Plain, {"a": 1, "c": 2}, "here.c: unknown setting for 'it'"),
    ],
)
def test_settings_are_checked_against_the_class(cls: Any, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.construct(cls, "it", settings, "here")
    assert str(caught.value).startswith(sentence)


def test_settings_reach_the_class() -> None:
    built = registry.construct(Settings, "it", {"count": 3, "rate": 1, "shape": [4, 5]}, "here")
    assert built == Settings(count=3, rate=1.0, shape=(4, 5))
    assert isinstance(built.rate, float)
    assert registry.construct(Plain, "it", {"a": 3}, "here").b == "x"
    assert registry.construct(Settings, "it", {"rate": float("inf")}, "here").rate == float("inf")


def test_something_else_registered_as_an_attack_is_refused(attacks: list[EntryPoint]) -> None:
    attacks.append(entry("worker", "multiprocessing:Process", "stranger"))
    spec = validate_tables(AttackFile, {"attack": [{"name": "worker"}]}, "x")
    with pytest.raises(PluginError, match=r"multiprocessing\.context\.Process does not derive from Attack"):
        build_attacks(spec)


@pytest.mark.parametrize("group", registry.GROUPS)
@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "os:environ"])
def test_what_is_no_plugin_is_not_called(group: registry.Group, name: str, tmp_path: Path) -> None:
    """An experiment file may lie in somebody else's run folder."""
    made = tmp_path / "made"
    with pytest.raises(PluginError, match=f"'{name}' is not a class with a method"):
        registry.build(group, name, {"command": f"touch {made}"}, "here")
    assert not made.exists()


def test_an_object_beside_the_file_is_found_by_module_and_name(tmp_path: Path) -> None:
    (tmp_path / "networks_of_a_stranger.py").write_text("def build():\n    return 'net'\n")
    assert registry.load_object("networks_of_a_stranger:build", tmp_path)() == "net"
    with pytest.raises(PluginError, match="'networks_of_a_stranger:biuld' does not load: AttributeError"):
        registry.load_object("networks_of_a_stranger:biuld", tmp_path)
    with pytest.raises(
        PluginError, match=f"'nowhere:x' does not load: ModuleNotFoundError.*; put 'nowhere' into {tmp_path}"
    ):
        registry.load_object("nowhere:x", tmp_path)


GUARD = "from fedsim.plugins.registry import check_installation; check_installation()"


def guarded(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the installation with `folder` in front of everything, as the current directory is."""
    return subprocess.run([sys.executable, "-c", GUARD], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("shadow", ["clients/__init__.py", "strategies/__init__.py", "adversaries.py", "clients/x.py"])
def test_a_folder_or_file_that_shadows_a_room_is_named(tmp_path: Path, shadow: str) -> None:
    (tmp_path / shadow).parent.mkdir(exist_ok=True)
    (tmp_path / shadow).write_text('PART_OF = "something else"\n')
    result = guarded(tmp_path)
    room = shadow.split("/")[0].removesuffix(".py")
    if shadow == "clients/x.py":  # a folder without __init__.py gives way to a real package
        assert result.returncode == 0
    else:
        assert "InstallationError" in result.stderr
        assert f"'{room}' resolves to {tmp_path}" in result.stderr
        assert "run from another folder" in result.stderr


def test_nothing_shadows_the_rooms_here(tmp_path: Path) -> None:
    registry.check_installation()
    assert guarded(tmp_path).returncode == 0


LEAVES = """
import sys
from fedsim.interfaces.attack import Attack
if __name__ == "leaves_at_import":
    sys.exit(0)

class Leaves(Attack):
    def __post_init__(self):
        sys.exit(0)
    def _run(self, *given):
        pass
"""


def test_sys_exit_in_a_plug_in_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end fedsim with exit code 0 and nothing done."""
    for name in ("leaves_at_import", "leaves_later"):
        (tmp_path / f"{name}.py").write_text(LEAVES)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"^'leaves_at_import:Leaves' does not load: it called sys\.exit\(0\)$"):
        registry.load("attacks", "leaves_at_import:Leaves")
    refused = r"^attack\.x: 'leaves_later:Leaves' refuses these settings: it called sys\.exit\(0\)$"
    with pytest.raises(ConfigError, match=refused):
        registry.build("attacks", "leaves_later:Leaves", {}, "attack.x")


def test_where_no_name_is_similar_the_package_here_or_the_list_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginError) as refused:
        registry.find_groups("zzz")
    assert str(refused.value) == (
        "nothing is called 'zzz', `fedsim list` lists all names; a class in a file is module:Class"
    )
    with pytest.raises(PluginError, match="did you mean 'quantity-skew'"):
        registry.find_groups("my-quantity")
    (tmp_path / "my_quantity").mkdir()
    (tmp_path / "my_quantity" / "pyproject.toml").touch()
    with pytest.raises(PluginError, match=r"a folder my_quantity is here; .*`pip install --no-deps -e ./my_quantity`"):
        registry.find_groups("my-quantity")
