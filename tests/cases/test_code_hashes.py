"""Code counts with what it imports of its own: a sweep and old findings do not outlive an edited helper."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.federation.config import Config
from fedsim.federation.settings import hash_experiment_code
from fedsim.plugins.code_hashes import hash_plugin_code, hash_referenced_code
from fedsim.plugins.registry import load_object


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


FILES = {
    "helped_plugin.py": "import helped_by\nclass Thing:\n    def go(self):\n        from helped_package import late\n",
    "helped_by.py": "import torch\nimport helped_deeper as other\n",
    "helped_deeper.py": "FACTOR = 1\n",
    "helped_package/__init__.py": "FIRST = 1\n",
    "helped_package/late.py": "from . import beside\nfrom .beside import FACTOR\nLATE = 1\n",
    "helped_package/beside.py": "FACTOR = 1\n",
    "helped_package/unused.py": "FACTOR = 1\n",
}


def load_thing(folder: Path, **edited: str) -> type:
    for name, text in (FILES | {name.replace("__", "/") + ".py": text for name, text in edited.items()}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return load_object("helped_plugin:Thing", folder)


@pytest.mark.parametrize("edited", ["helped_by", "helped_deeper", "helped_package__late", "helped_package__beside"])
def test_what_a_plugin_imports_counts_as_its_code(edited: str, folder: Path) -> None:
    before = hash_plugin_code(load_thing(folder / "one"))
    for name in [name for name in sys.modules if name.startswith("helped_")]:
        del sys.modules[name]
    sys.path.remove(str(folder / "one"))
    text = FILES[edited.replace("__", "/") + ".py"]
    assert hash_plugin_code(load_thing(folder / "two", **{edited: text + "\n# edited\n"})) != before


def test_what_a_plugin_does_not_import_does_not_count(folder: Path) -> None:
    before = hash_plugin_code(load_thing(folder / "one"))
    for name in [name for name in sys.modules if name.startswith("helped_")]:
        del sys.modules[name]
    sys.path.remove(str(folder / "one"))
    assert hash_plugin_code(load_thing(folder / "two", helped_package__unused="FACTOR = 2\n")) == before


def test_of_a_class_that_derives_from_flowers_only_its_own_file_counts(folder: Path) -> None:
    text = "from flwr.serverapp.strategy import FedAvg\nclass Derived(FedAvg):\n    pass\n"
    (folder / "helped_strategy.py").write_text(text)
    file_hash = hashlib.sha256(text.encode()).digest()
    derived = load_object("helped_strategy:Derived", folder)
    assert hash_plugin_code(derived) == hashlib.sha256(file_hash).hexdigest()
    assert hash_plugin_code(derived.__base__) is None, "the manifest records Flower's version"


def test_code_that_a_setting_names_counts(folder: Path) -> None:
    load_thing(folder)
    config = Config.model_validate(
        {
            "data": {"name": "digits"},
            "partition": {"name": "iid"},
            "model": {"name": "mlp"},
            "defense": [{"name": "gate", "measure": {"name": "helped_plugin:Thing"}, "at_most": 1.0}],
        }
    )
    assert hash_experiment_code(config) == {"defense.0.measure.name": hash_referenced_code(["helped_plugin:Thing"])}
    assert hash_referenced_code(["helped_plugin:Thing"]) == hash_plugin_code(sys.modules["helped_plugin"].Thing)
    assert hash_referenced_code(["nowhere_at_all:Thing", "os:path", "fedsim.base.errors:X"]) is None
