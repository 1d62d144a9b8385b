"""The Ray engine when things go wrong, and on a cluster of several hosts (of this machine).

What can share one Ray is in test_shared_ray.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import fedsim.federation.engines.ray_cluster
import fedsim.federation.engines.ray_session
from fedsim.base.errors import RunError
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.recording.transcript import Transcript
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.processes import find_descendants, is_alive, wait_until

pytestmark = pytest.mark.ray


PLUGINS = '''
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from fedsim.interfaces.attack import Paper
from fedsim.data.digits import Digits
from fedsim.interfaces.defense import Defense

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")

@dataclass(frozen=True, kw_only=True)
class DiesOnce(Defense):
    """The first client that comes here takes its process with it."""
    note: str
    paper = PAPER
    def on_update(self, update, context):
        try:
            Path(self.note).touch(exist_ok=False)
        except FileExistsError:
            return update
        os._exit(1)

@dataclass(frozen=True, kw_only=True)
class Marked:
    """Digits with a mark on one of them; one client holds it."""
    def load(self, folder):
        data = Digits().load(folder)
        labels = data.train.labels.clone()
        labels[100] = 10
        return replace(data, train=replace(data.train, labels=labels), num_classes=11)

@dataclass(frozen=True, kw_only=True)
class DiesOfTheMark(Defense):
    """Whoever holds it takes its process with it, each time."""
    paper = PAPER
    def on_batch(self, inputs, labels, context):
        if (labels == 10).any():
            os._exit(1)
        return inputs, labels


@dataclass(frozen=True, kw_only=True)
class HangsAtTheMark(Defense):
    """Whoever holds it never answers."""
    paper = PAPER
    def on_batch(self, inputs, labels, context):
        if (labels == 10).any():
            time.sleep(10_000)
        return inputs, labels
'''


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "deadly_plugins.py").write_text(textwrap.dedent(PLUGINS))
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two hosts with one core each, without us on it."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def assert_one_sentence(error: RunError) -> None:
    assert "\n" not in str(error)
    assert "Traceback" not in str(error)
    assert error.exit_code == 1


@pytest.mark.slow
@pytest.mark.timeout(900)  # Ray starts each actor anew at low priority, which a busy machine delays
@pytest.mark.usefixtures("plugins")
def test_a_client_who_kills_every_actor_fails_and_the_others_go_on(tmp_path: Path) -> None:
    config = make_tiny_config(
        data={"name": "deadly_plugins:Marked"},
        partition={"samples_per_client": None},
        federation={"engine": "ray", "actors": 2, "clients": 8},
        defense=[{"name": "deadly_plugins:DiesOfTheMark"}],
    )
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    first, second = (transcript.header(number).failures for number in (1, 2))
    assert set(first) == set(second)
    assert len(first) == 1, "not the one who shares a message with it"
    assert all("ctor" in why and "\n" not in why and "<class" not in why for why in first.values()), first
    assert all(len(transcript.clients(number)) == 7 for number in (1, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("plugins")
def test_a_client_who_never_answers_does_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    config = make_tiny_config(
        data={"name": "deadly_plugins:Marked"},
        partition={"samples_per_client": None},
        federation={"engine": "ray", "actors": 2, "clients": 8, "rounds": 1, "timeout": 60},
        defense=[{"name": "deadly_plugins:HangsAtTheMark"}],
    )
    started = time.monotonic()
    transcript = Transcript(run_serial(config, tmp_path / "run").path)
    assert time.monotonic() - started < 180
    failures = transcript.header(1).failures
    assert set(failures.values()) == {"no reply in time"}
    assert len(failures) == 1, "not the one who shares a message with it"


def test_the_users_own_settings_of_ray_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    ours = fedsim.federation.engines.ray_session._ray_variables(None)
    before = {name: os.environ.get(name) for name in ours}
    with fedsim.federation.engines.ray_session._environment(ours):
        assert {name: os.environ.get(name) for name in ours} == ours
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert {name: os.environ.get(name) for name in ours} == before


def test_a_ray_of_ours_starts_neither_of_its_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's node fills in what is None, so what it would start is asked of the parameters as it asks them."""
    import ray
    from ray._private import parameter

    started: list[parameter.RayParams] = []

    def note_parameters(**_: Any) -> None:
        started.append(parameter.RayParams())
        started[0].update_if_absent(include_log_monitor=True)

    monkeypatch.setattr(ray, "init", note_parameters)
    fedsim.federation.engines.ray_session._connect(None, 1, "engine ray", None)
    (parameters,) = started
    assert parameters.no_monitor
    assert not parameters.include_log_monitor


@pytest.mark.parametrize("place", ["/scratch/of/a/cluster/job-1234", ""])
def test_no_other_user_can_enter_the_folder_of_a_ray_of_ours(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray lets all users write to its own folder, so that they could put other sockets there, or other code."""
    import ray

    folders: list[Path] = []

    def note_folder(_temp_dir: str, **_: Any) -> None:
        folders.append(Path(_temp_dir).parent)
        assert folders[0].stat().st_mode & 0o077 == 0
        raise RuntimeError("no more is asked")

    monkeypatch.setenv("RAY_TMPDIR", place)
    monkeypatch.setattr(ray, "init", note_folder)
    with pytest.raises(RunError, match="no more is asked"), fedsim.federation.engines.ray_session.ray_session(None, 1):
        pass
    (folder,) = folders
    assert not folder.exists(), "it is removed with what Ray wrote"
    assert len(os.fsencode(folder)) <= 18 + len("/fedsim-12345678")


def test_a_ray_of_our_host_program_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("it was ended"))
    with pytest.raises(
        RunError, match=r"engine ray: this process uses a Ray already, .* call ray.shutdown\(\) first"
    ) as caught:
        run_serial(make_tiny_config(federation={"engine": "ray"}), tmp_path / "run")
    assert_one_sentence(caught.value)


@pytest.mark.slow
def test_a_cluster_that_wants_a_token_takes_its_own_and_any_other_is_one_sentence(tmp_path: Path) -> None:
    from ray.cluster_utils import Cluster

    own = fedsim.federation.engines.ray_session._ray_variables(None)
    others = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    with fedsim.federation.engines.ray_session._environment(own):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    config = make_tiny_config(federation={"engine": "ray", "address": cluster.address})
    try:
        for variables in ({}, others):
            with (
                fedsim.federation.engines.ray_session._environment(variables),
                pytest.raises(RunError, match="does not accept our token; give its own by RAY_AUTH_MODE") as caught,
            ):
                run_serial(config, tmp_path / f"run-{len(variables)}")
            assert_one_sentence(caught.value)
        with fedsim.federation.engines.ray_session._environment(own):
            assert Transcript(run_serial(config, tmp_path / "run").path).rounds == [1, 2]
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_cluster_is_joined_and_records_the_same_bytes(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fedsim")
    alone = run_serial(make_tiny_config(), tmp_path / "serial")
    for actors in (None, 1):
        federation = {"engine": "ray", "address": cluster.address, "actors": actors}
        joined = run_serial(make_tiny_config(federation=federation), tmp_path / f"ray-{actors}")
        assert Transcript(joined.path).hash() == Transcript(alone.path).hash()
    assert "training in 1 Ray actors of the cluster" in caplog.text


@pytest.mark.slow
def test_a_machine_outside_the_cluster_is_told_so_before_ray_is_joined(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fedsim.federation.engines.ray_cluster._is_local("127.0.0.1")
    assert not fedsim.federation.engines.ray_cluster._is_local("192.0.2.77")  # set aside for documents
    monkeypatch.setattr(fedsim.federation.engines.ray_cluster, "_is_local", lambda address: False)
    with pytest.raises(RunError, match=r"this machine is not a host of the Ray cluster at .*; join it by") as caught:
        run_serial(make_tiny_config(federation={"engine": "ray", "address": cluster.address}), tmp_path / "run")
    assert_one_sentence(caught.value)


@pytest.mark.slow
def test_a_cluster_that_is_not_asked_for_is_left_alone(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else's cluster may run on this machine; Ray would join it and refuse the number of actors."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    run = run_serial(make_tiny_config(federation={"engine": "ray", "actors": 1}), tmp_path / "run")
    assert Transcript(run.path).rounds == [1, 2]


def test_nothing_at_the_address_is_one_sentence_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself is not asked, which would take half a minute and print warnings."""
    ray_session = fedsim.federation.engines.ray_session
    monkeypatch.setattr(ray_session, "_connection", lambda *rest: pytest.fail("Ray was asked"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    config = make_tiny_config(federation={"engine": "ray", "address": place})
    words = rf"federation\.address: no Ray cluster answers at '{place}' \(Connection refused\); start one there"
    with pytest.raises(RunError, match=words) as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)


@pytest.mark.parametrize(
    ("address", "more"),
    [
        ("ray://127.0.0.1:10001", "; ray:// is that of Ray Client, which is not used here"),
        ("http://127.0.0.1:8265", "$"),
        ("127.0.0.1:65536", "$"),
        (":6379", "$"),
        ("localhost", "$"),
    ],
)
def test_an_address_of_another_kind_is_one_sentence(address: str, more: str, tmp_path: Path) -> None:
    config = make_tiny_config(federation={"engine": "ray", "address": address})
    with pytest.raises(RunError, match=f"federation.address: expected 'host:port' .* got '{address}'{more}") as caught:
        run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)


def test_what_listens_but_is_no_ray_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.ray_cluster, "_PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        config = make_tiny_config(federation={"engine": "ray", "address": place})
        with pytest.raises(RunError, match=f"federation.address: no Ray cluster answers at '{place}'") as caught:
            run_serial(config, tmp_path / "run")
    assert_one_sentence(caught.value)


def test_another_service_at_the_address_is_one_sentence(tmp_path: Path) -> None:
    other = grpc.server(ThreadPoolExecutor(1))
    place = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    config = make_tiny_config(federation={"engine": "ray", "address": place})
    try:
        with pytest.raises(RunError, match=f"what answers at '{place}' is no Ray cluster \\(UNIMPLEMENTED") as caught:
            run_serial(config, tmp_path / "run")
    finally:
        other.stop(None).wait()
    assert_one_sentence(caught.value)


@pytest.mark.slow
def test_kill_9_leaves_nothing_running_and_the_run_goes_on(tmp_path: Path) -> None:
    config = make_tiny_config(federation={"engine": "ray", "actors": 1, "rounds": 400})
    whole = Transcript(run_serial(make_tiny_config(federation={"rounds": 6}), tmp_path / "whole").path)
    folder = OpenRun(tmp_path / "run")
    code = f"""
from pathlib import Path
from fedsim.federation.config import Config
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
run_federation(Config.model_validate_json({config.model_dump_json()!r}), OpenRun(Path({str(folder.path)!r})))
"""
    driver = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: folder.transcript.is_dir() and len(list(folder.transcript.glob("round-*"))) >= 2, 120)
        family = find_descendants(driver.pid)
        assert len(family) > 3, "Ray's processes should be among them"
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until(lambda: not any(is_alive(process) for process in family), 10)  # two agents of Ray would need a minute
    # Shortened, so that the end is near: the rounds so far are those of the same federation.
    kept = len(Transcript(folder.path).rounds)
    shorter = config.model_copy(update={"federation": config.federation.model_copy(update={"rounds": kept + 1})})
    folder.write_experiment(resolve(shorter))
    run_serial(shorter, folder.path, resume=True)
    again = Transcript(folder.path)
    common = [number for number in whole.rounds if number in again.rounds]
    assert len(again.rounds) == kept + 1
    assert again.restrict_to(common).hash() == whole.restrict_to(common).hash()


HOLD = """
import time
from fedsim.federation.engines.ray_session import ray_session
with ray_session(None, 1):
    print("up", flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_rays_agents_end_with_the_driver_however_it_ends(number: signal.Signals) -> None:
    command = [sys.executable, "-W", "ignore", "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "up\n"
        family = find_descendants(driver.pid)
        driver.send_signal(number)
        _, said = driver.communicate()
    if number != signal.SIGKILL:
        assert said.splitlines()[-1] == "KeyboardInterrupt"  # SIGTERM lets everything be taken down, too
    assert len(family) > 6, "Ray's two agents should be among them"
    wait_until(lambda: not any(is_alive(process) for process in family), 5)


def test_the_folder_that_ray_is_given_is_made_if_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="", dir="/tmp") as short:
        monkeypatch.setenv("RAY_TMPDIR", f"{short}/new")
        assert fedsim.federation.engines.ray_session._place_of_sockets() == Path(short, "new")
        assert Path(short, "new").is_dir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "a-long-name-that-leaves-sockets-no-room"))
    assert fedsim.federation.engines.ray_session._place_of_sockets() == Path("/tmp")


def test_no_thread_that_outlives_an_interrupt_starts_another_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would listen without a token, and its folder would stay."""
    import ray
    from ray._private import auto_init_hook

    started: list[str] = []
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)
    monkeypatch.setattr(ray, "init", lambda: started.append("ray"))
    with pytest.raises(KeyboardInterrupt), fedsim.federation.engines.ray_session._prevent_second_ray():
        raise KeyboardInterrupt
    with pytest.raises(ray.exceptions.RaySystemError):
        ray.put(1)
    assert not started


NOOP = """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query("where")
def where(message, context):
    import os
    time.sleep(5)
    return Message(RecordDict({"at": ConfigRecord({"pid": os.getpid()})}), reply_to=message)
"""


@pytest.mark.slow
def test_more_than_32_actors_work_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower alone would keep six actors busy on two cores, and never more than 32."""
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.serverapp import Grid, ServerApp

    from fedsim.federation.engines import ray
    from fedsim.federation.engines.readiness import wait_for_nodes

    (tmp_path / "noop_app.py").write_text(NOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(tmp_path))
    import noop_app

    server, pids, seconds = ServerApp(), set(), []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        nodes = wait_for_nodes(grid, 36)
        for _ in range(2):  # the first time, actors have yet to start
            messages = [Message(RecordDict({"x": ConfigRecord({})}), node, "query.where") for node in nodes[:36]]
            started = time.monotonic()
            replies = list(grid.send_and_receive(messages))
            seconds.append(time.monotonic() - started)
            pids.update(reply.content.config_records["at"]["pid"] for reply in replies)

    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    ray.launch(server, noop_app.app, context, clients=36, actors=36, gpus_per_actor=0.0, address=None)
    assert len(pids) == 36
    assert seconds[1] < 10, "36 naps of five seconds, all at once"
