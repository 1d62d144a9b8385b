"""Names that a skeleton can have, and what is in the files."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from fedsim.base.errors import ConfigError
from fedsim.federation.experiment_file import config_of
from fedsim.plugins import registry
from fedsim.skeletons.new import INSTALLED, KINDS, PLUGINS, PluginTemplate

TEMPLATE = (files("fedsim.skeletons") / "experiment.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("atack", "mine", "there is no skeleton of 'atack', did you mean 'attack'"),
        *(
            (kind, name, f"'{name}' cannot be the name of a file")
            for kind in KINDS
            for name in ("", "Mine", "my attack")
        ),
        *(("attack", name, "cannot be the name") for name in ("../mine", "1st", "a--b", "-a", "a-", "x.py", "a" * 101)),
        ("attack", "lambda", "'lambda' is a word of Python"),
        ("defense", "torch", "a module 'torch' is installed already"),
        ("measure", "clients", "a module 'clients' is installed already"),
        ("metric", "psnr", "one of the metrics is called 'psnr' already"),
        ("panel", "scores", "one of the panels is called 'scores' already"),
    ],
)
def test_a_bad_name_is_one_sentence(kind: str, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)) as refused:
        PluginTemplate(kind, name)
    assert "\n" not in str(refused.value)


def test_an_inversion_is_an_attack() -> None:
    with pytest.raises(ConfigError, match=r"^new: --inversion is a kind of attack; leave it out for a new defense$"):
        PluginTemplate("defense", "mine", inversion=True)


def test_an_experiment_may_be_called_as_no_module_can_be(tmp_path: Path) -> None:
    assert PluginTemplate("experiment", "lambda").write(tmp_path) == [Path("lambda.toml")]


@pytest.mark.parametrize("there", ["my_attack.py", "my_attack.toml"])
def test_nothing_is_overwritten_nor_written_beside_it(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match=f"{there} is there already and is left alone"):
        PluginTemplate("attack", "my-attack").write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize(("kind", "inversion"), [*((kind, False) for kind in KINDS), ("attack", True)])
def test_the_files_speak_of_what_they_are_called(kind: str, inversion: bool) -> None:
    skeleton = PluginTemplate(kind, "first-try_2", inversion)
    for path, text in skeleton.file_contents.items():
        assert "skeleton" not in text.lower()
        assert str(skeleton.experiment_file) in text or path == skeleton.experiment_file
        compile(text, path, "exec") if path.suffix == ".py" else tomllib.loads(text)
    assert (skeleton.reference == "first_try_2:FirstTry2") is True
    files = ["first_try_2.py"] if kind in PLUGINS else []
    if kind in INSTALLED:
        files = ["first_try_2/first_try_2.py", "first_try_2/pyproject.toml"]
    assert list(map(str, skeleton.file_contents)) == [*files, str(skeleton.experiment_file)]


@pytest.mark.parametrize("kind", INSTALLED)
def test_a_plugin_that_no_file_names_is_a_package_of_one_entry_point(kind: str, tmp_path: Path) -> None:
    skeleton = PluginTemplate(kind, "first-try")
    skeleton.write(tmp_path)
    project = tomllib.loads((tmp_path / "first_try" / "pyproject.toml").read_text())
    assert project["project"]["entry-points"] == {f"fedsim.{INSTALLED[kind]}": {"first_try": "first_try:FirstTry"}}
    assert project["tool"]["setuptools"]["py-modules"] == ["first_try"]
    assert skeleton.installation == "pip install --no-deps -e ./first_try"
    assert skeleton.commands == ["check first_try", "run first_try.toml"]


def test_what_the_experiment_has_in_comments_can_be_taken_out_of_them(tmp_path: Path) -> None:
    """Each commented table and key is one, all of them together, and each plug-in is made from its settings."""
    text, count = re.subn(r"^# (?=\[|[a-z_]+ = )", "", TEMPLATE, flags=re.MULTILINE)
    assert count >= 5
    config = config_of(tomllib.loads(text), "experiment.toml", tmp_path)
    assert (len(config.defense), len(config.measure)) == (1, 1)
    for group, tables in (("defenses", config.defense), ("measures", config.measure), ("attacks", config.attack)):
        for table in tables:
            registry.build(group, table.name, table.settings, group)


def test_the_experiment_needs_no_file_of_data_and_no_other_process() -> None:
    tables = tomllib.loads(TEMPLATE)
    assert tables["data"]["name"] in ("digits", "handwriting")
    assert (tables["federation"]["engine"], tables["adversary"]["workers"]) == ("serial", 1)
