"""Folders of Flower apps: what does not load, and clients whose replies answer nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

import fedsim
import strategies as strategies  # as it is before an app is loaded
from fedsim.base.errors import InstallationError, PluginError
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.flower_app import read_app
from fedsim.plugins.registry import COMPANION_PACKAGES, load_object

APP = "from flwr.serverapp import ServerApp\napp = ServerApp()\n"
PROJECT = """
[tool.flwr.app.components]
serverapp = "{serverapp}"
clientapp = "somewhere:app"
"""


@pytest.fixture(autouse=True)
def fresh_path() -> Iterator[None]:
    """Put the import path back, and forget the module of the app."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    sys.modules.pop("odd_server", None)


def write(folder: Path, serverapp: str, **files: str) -> Path:
    (folder / "pyproject.toml").write_text(PROJECT.format(serverapp=serverapp))
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_an_app_in_a_folder_below_says_that_it_has_to_be_installed(tmp_path: Path) -> None:
    package = tmp_path / "src" / "deep_app"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "server_app.py").write_text(APP)
    app = read_app(write(tmp_path, "deep_app.server_app:app"))
    with pytest.raises(PluginError, match=rf"'deep_app' is in {tmp_path}/src.*`pip install -e {tmp_path}`"):
        app.load("serverapp")
    sys.path.insert(0, str(tmp_path / "src"))
    app.load("serverapp")


@pytest.mark.parametrize("line", ["from strategies import mine", "import strategies.mine"])
def test_an_app_with_a_module_of_fedsims_name_is_told_to_rename_it(tmp_path: Path, line: str) -> None:
    folder = write(tmp_path, "odd_server:app", odd_server=f"{line}\n{APP}", strategies="mine = 1")
    with pytest.raises(PluginError, match=r"the app has a module 'strategies', and so has fedsim.* rename the app's"):
        read_app(folder).load("serverapp")
    # A module that the app does not import does no harm.
    write(tmp_path, "odd_server:app", odd_server=APP)
    read_app(folder).load("serverapp")


def test_the_code_of_a_model_cannot_change_the_working_folder_and_an_app_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    folder = write(tmp_path, "odd_server:app", odd_server=f"import os\nos.chdir('data')\n{APP}")
    load_object("odd_server:ServerApp", folder)
    assert Path.cwd() == tmp_path
    del sys.modules["odd_server"]
    read_app(folder).load("serverapp")
    assert Path.cwd() == tmp_path / "data"


def test_one_line_in_an_app_with_such_a_module_says_which_file_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in COMPANION_PACKAGES]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "strategies.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(__import__("strategies"), ModuleType)
    monkeypatch.delitem(vars(fedsim), "CuriousGrid", raising=False)
    with pytest.raises(InstallationError, match=rf"'strategies' resolves to {tmp_path}/strategies.py.*rename it"):
        _ = fedsim.CuriousGrid
    monkeypatch.delitem(sys.modules, "strategies")


def test_an_error_that_a_mod_addresses_to_the_client_itself_is_the_clients() -> None:
    """LocalDpMod answers an evaluation, whose reply has no arrays, so: no server would get it over a network."""
    app = ClientApp(mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0})}), reply_to=message)

    grid = InProcessGrid(app)
    message = Message(RecordDict({"arrays": ArrayRecord([])}), dst_node_id=2, message_type="evaluate")
    (reply,) = grid.send_and_receive([message])
    assert (reply.metadata.src_node_id, reply.metadata.reply_to_message_id) == (2, message.metadata.message_id)
    assert reply.error.reason is not None
    assert "LocalDpMod expects exactly one ArrayRecord" in reply.error.reason
