"""The documents lead where they say."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tomllib
from functools import cache
from importlib import import_module
from itertools import dropwhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tomli_w
from click import NoSuchOption
from typer.main import get_command

import fedsim
from fedsim.base.errors import ConfigError
from fedsim.cli.main import cli
from fedsim.federation.app_file import AppFile
from fedsim.federation.config import AttackFile, Config
from fedsim.federation.experiment_file import load_config
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.knowledge import FACTS
from fedsim.plugins import registry
from fedsim.sweeps.file import SweepTable
from tests.support.scripts import load_script

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/*.md"), *ROOT.glob("examples/**/*.md")]
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_there_are_links_to_follow() -> None:
    assert "](docs/" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_of_signatures_is_what_the_code_says() -> None:
    module = load_script(ROOT / "docs" / "plugin_interface.py")
    told = module.PAGE.read_text(encoding="utf-8")
    assert told == module.page(), "the interface has changed: run python docs/plugin_interface.py"
    for name in (
        *FACTS,
        "read_update",
        "rounds_needed",
        "against_guesses",
        "find_reply",
        "number_message",
        "sampling",
        "on_batch",
        "on_examples",
        "on_gradient",
        "on_update",
        "num_examples",
        "assign",
        "Task",
    ):
        assert re.search(rf"\b{name}\b", told), name


def test_the_page_of_settings_is_what_the_code_says() -> None:
    module = load_script(ROOT / "docs" / "settings_reference.py")
    page = module.PAGE.read_text(encoding="utf-8")
    assert page == module.page(), "settings have changed: run python docs/settings_reference.py"
    assert "| `learning_rate` | `finite float > 0` | `0.01` | Step size of the optimizer. |" in page


def test_the_reference_shows_every_public_name_as_what_it_is() -> None:
    """Those that the page does not document itself lead to where they are; `make docs` fails where a link is broken."""
    page = (ROOT / "docs" / "reference" / "fedsim.md").read_text(encoding="utf-8")
    here = re.findall(r"^\.\. auto(?:function|class):: (\w+)(?:\(\))?$", page, re.MULTILINE)
    homes = dict(re.findall(r"^\| `fedsim\.(\w+)` \| \{py:class\}`(fedsim\.[\w.]+)` \|$", page, re.MULTILINE))
    assert sorted([*here, *homes]) == sorted(fedsim.__all__)
    for name, home in homes.items():
        module, _, found = home.rpartition(".")
        assert getattr(import_module(module), found) is getattr(fedsim, name)


def test_every_page_is_in_the_contents_of_the_site() -> None:
    docs = ROOT / "docs"
    listed = {docs / "index.md"}
    for index in docs.rglob("index.md"):
        contents = "".join(re.findall(r"^```{toctree}\n(.*?)^```", index.read_text(), re.DOTALL | re.MULTILINE))
        names = [line for line in contents.split("\n") if line and not line.startswith(":")]
        listed |= {index.parent / f"{name}.md" for name in names}
    assert sorted(docs.rglob("*.md")) == sorted(listed)


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def _commands(page: Path) -> list[list[str]]:
    """Each command of the page as words, without variables before it."""
    lines = "\n".join(_blocks(page, "sh")).replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words)) for words in split]


def _commands_of_another_commit(page: Path) -> str:
    """The blocks of the page whose files, as it says below them, only another commit has."""
    blocks = re.findall(r"```sh\n((?:(?!```).)*)```\n\nMade by commit", page.read_text(encoding="utf-8"), re.DOTALL)
    return "\n".join(blocks)


def _unknown_words(arguments: list[str]) -> list[str]:
    """List the options, and the sections after `--only`, of which a benchmark's source does not know."""
    shared = (ROOT / "benchmarks" / "measuring.py").read_text(encoding="utf-8")
    source = (ROOT / arguments[0]).read_text(encoding="utf-8") + shared
    unknown, option = [], ""
    for word in arguments[1:]:
        option = word if word.startswith("--") else option
        if (word == option or option == "--only") and f'"{word}"' not in source:
            unknown.append(word)
    return unknown


@cache
def list_commands() -> dict[str, Any]:
    """Build the commands and their options once, which takes a tenth of a second."""
    commands: dict[str, Any] = get_command(cli).commands
    return commands


PAGES_WITH_COMMANDS = [page for page in DOCUMENTS if any(_commands(page))]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
@patch.dict(os.environ)  # options such as --data-dir write into it
def test_the_commands_of_a_page_exist_with_their_options(page: Path) -> None:
    """What `fedsim` is told parses, its settings are those of the experiment file, and make and python find theirs."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = list_commands()
    for words in filter(None, _commands(page)):
        program, arguments = words[0].rpartition("/")[2], words[1:]
        if program == "fedsim":
            given = commands[arguments[0]].make_context(arguments[0], arguments[1:]).params
            if arguments[0] in ("run", "train") and (file := given["file"]) and (ROOT / file).is_file():
                load_config(ROOT / file, given["overrides"] or [])
            assert not str(given.get("file")).startswith("examples/") or (ROOT / given["file"]).is_file(), words
        elif program == "make":
            assert set(arguments) <= set(targets), words
        elif program == "python" and arguments[0].endswith(".py"):
            is_here = (ROOT / arguments[0]).is_file()
            assert is_here or arguments[0] in _commands_of_another_commit(page), words
            if is_here and arguments[0].startswith("benchmarks/"):
                assert not _unknown_words(arguments), words


def test_commands_were_found_to_check() -> None:
    told = {page.name: len(list(filter(None, _commands(page)))) for page in PAGES_WITH_COMMANDS}
    assert told["README.md"] >= 3
    assert told["run-an-experiment.md"] >= 6
    assert told["sme.md"] >= 10
    assert told["tgias-ro.md"] >= 10
    assert _unknown_words(["benchmarks/engines.py", "--repeats", "2", "--only", "wide", "loop, 1 step"]) == []
    assert _unknown_words(["benchmarks/engines.py", "--repeat", "2", "--only", "wode"]) == ["--repeat", "wode"]
    with pytest.raises(NoSuchOption):
        list_commands()["run"].make_context("run", ["quickstart.toml", "--iterations", "3"])


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_of_an_experiment_on_a_page_are_ones(page: Path) -> None:
    for block in _blocks(page, "toml"):
        tables = tomllib.loads(block)
        if "project" in tables:  # a package of one's own
            continue
        if "sweep" in tables:
            described = validate_tables(SweepTable, tables["sweep"], str(page))
            _check_plugins("attacks", described.axes.get("attack", []), str(page))
            _check_plugins(
                "defenses", [table for some in described.axes.get("defense", []) for table in some], str(page)
            )
            continue
        config: AttackFile
        model = tables.get("adversary", {}).get("knowledge", {}).get("model")
        if isinstance(model, str) or tables.keys() & {"app", "truth"}:  # of an app, or of a recording made elsewhere
            config = validate_tables(AppFile, tables, str(page))
        else:
            whole = {"federation": {"rounds": 100}, "training": {"local_epochs": 1}, **tables}
            config = validate_tables(Config, whole, str(page))
        for group, plugins in (("attacks", config.attack), ("defenses", getattr(config, "defense", []))):
            _check_plugins(group, [{"name": table.name, **table.settings} for table in plugins], str(page))


def _check_plugins(group: registry.Group, tables: list[dict[str, Any]], where: str) -> None:
    """Make each registered plug-in from its settings."""
    for table in tables:
        settings = {key: value for key, value in table.items() if key not in ("name", "label")}
        if table["name"] in registry.registered_names(group):
            registry.build(group, table["name"], settings, where)


def test_the_page_of_experiments_names_every_table() -> None:
    page = (ROOT / "docs" / "reference" / "experiments.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\[+([\w.]+)\]+` \| .* \|$", page, re.MULTILINE)
    assert sorted(rows) == sorted([*Config.model_fields, "adversary.knowledge"])


def test_a_how_to_has_at_most_a_thousand_words() -> None:
    counts = {}
    for page in (ROOT / "docs" / "how-to").glob("*.md"):
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        counts[page.name] = len(re.findall(r"\S*\w\S*", prose))
    assert len(counts) > 20
    assert {name: count for name, count in counts.items() if count > 1000} == {}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_modules_and_files_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for name in set(re.findall(r"`((?:fedsim|strategies|adversaries|clients)(?:\.\w+)+)`", text)) - set(groups):
        module, _, attribute = name.rpartition(".")
        assert (ROOT / name.replace(".", "/")).with_suffix(".py").is_file() or (
            (ROOT / name.replace(".", "/")).is_dir() or hasattr(import_module(module), attribute)
        ), name
    folders = "fedsim|strategies|adversaries|clients|tests|benchmarks|studies|examples"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+\w)`", text):
        assert (ROOT / path).exists(), path


def test_the_page_of_architecture_names_every_package_and_what_is_in_it() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    for package in [path.parent for path in ROOT.glob("fedsim/*/__init__.py")]:
        assert re.search(rf"^\|.*`(fedsim)?\.{package.name}`", page, re.MULTILINE), package.name
    for package_name, contents in re.findall(r"^\| `([a-z.]+)` \| (.*) \|$", page, re.MULTILINE):
        folder = ROOT / package_name.replace(".", "/")
        for name in re.findall(r"`([a-z_]+)`", contents):
            is_file = any(folder.rglob(f"{name}.py")) or (folder / name).is_dir()
            assert is_file or any(hasattr(module, name) for module in (import_module(package_name), fedsim)), name
    for group in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]:
        assert f"`{group}`" in page, group


@pytest.mark.thorough
def test_the_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experiment with few iterations, to be fast."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    from fedsim.federation.engines.serial import InProcessGrid

    quick = tomllib.loads((ROOT / "examples" / "quickstart.toml").read_text(encoding="utf-8"))
    quick["adversary"] |= {"workers": 1, "victims": [0]}
    quick["federation"]["rounds"] = 1
    for table in quick["attack"]:
        table |= {} if table["name"].startswith("spear") else {"iterations": 2}
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "quickstart.toml").write_text(tomli_w.dumps(quick), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"FedAvg": FedAvg, "grid": InProcessGrid(ClientApp()), "their_app": ServerApp()}
    blocks = _blocks(ROOT / "README.md", "python")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block.replace("iterations=100", "iterations=2"), "README.md", "exec"), names)
    assert names["run"].report().path.is_file()
    assert names["strategy"].recorder.folder == tmp_path / "recording" / "run-1" / "transcript"
    assert names["grid"].recording == tmp_path / "recording" / "run-2"


def test_the_functions_that_a_page_declares_serve_as_data_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "how-to" / "your-own-data-and-models.md"
    [code] = _blocks(page, "python")
    [text] = [block for block in _blocks(page, "toml") if "mine:net" in block]
    (tmp_path / "mine_of_the_page.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tables = tomllib.loads(text.replace("mine:", "mine_of_the_page:"))
    built: list[Any] = []
    for group, table in (("datasets", tables["data"]), ("models", tables["model"])):
        built.append(registry.build(group, table.pop("name"), table, group))
        with pytest.raises(ConfigError, match="colour"):
            registry.build(group, f"mine_of_the_page:{'data' if group == 'datasets' else 'net'}", {"colour": 1}, group)
    data, model = built
    own = data.load(None)
    assert len(own.train) == 500
    assert model.build(own.task)(own.train.inputs(slice(3))).shape == (3, 2)
