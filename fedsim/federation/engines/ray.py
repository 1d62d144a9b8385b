"""The Ray engine: Flower's simulation engine, with two physical nodes an actor.

Private names of Flower are used because the public `run_simulation` warns that it will be removed
and cannot pass a run_config to the ServerApp, and because its pools have sizes for a single
machine.

Anybody who reaches a Ray can run code in it, and by default it listens on every interface and asks
for no password. The Ray that is started here listens on loopback and requires a secret token. Its
folder with sockets, logs and packed code, which it lets anybody write to, is in one that no other
user can enter.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.base.errors import FedsimError, InstallationError, RunError, first_line, join_first
from fedsim.base.files import temporary_folder
from fedsim.federation.engines import ray_watchdog
from fedsim.federation.engines.engine import Engine, FederationJob
from fedsim.federation.engines.processes import sigterm_as_interrupt
from fedsim.federation.engines.ray_actor import ClientActor
from fedsim.federation.engines.readiness import explain_difference, host_versions

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Small arguments and results are sent inside the call instead of through the object store.
    "RAY_max_direct_call_object_size": "10000000",
    "RAY_task_rpc_inlined_bytes_limit": "100000000",
}
_PATIENCE = 20.0
"""Seconds for an answer of Ray."""
_CONNECT_TIMEOUT = 3.0
"""Seconds in which a port has to accept a connection; Ray's answer may take longer."""
_WATCH_INTERVAL, _MAX_IDLE = 5.0, 300.0
"""Seconds between two looks at a cluster, and for which all actors may be without a core."""
_MAX_PLACE_BYTES = 18
"""Longest path of the folder in which there is one for Ray: those of its sockets may have 107 bytes, 103 on macOS."""
_REMEDY = "start one there with `ray start --head`, or leave the address out"
_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ALL_NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
NODES_PER_ACTOR = 2


@dataclass(frozen=True, kw_only=True)
class RayEngine(Engine):
    """Play the clients in Ray actors, on this machine or on a cluster.

    `federation.actors` is their number, `federation.address` a cluster to join, and
    `federation.gpus_per_actor` the share of a GPU that each takes where clients train on GPUs.
    """

    def check(self, job: FederationJob) -> None:
        """Raise an error where Ray is not installed, or in use by this program, or a GPU of this machine is missing."""
        _import_ray()
        if job.config.federation.address is None:
            job.experiment.device()

    def carry(self, job: FederationJob) -> None:
        """Run all rounds over two nodes an actor."""
        federation = job.config.federation
        launch(
            job.server_app,
            job.client_app,
            job.make_context(),
            clients=federation.clients,
            actors=federation.actors,
            gpus_per_actor=federation.gpus_per_actor if federation.device == "cuda" else 0.0,
            address=federation.address,
        )


def launch(
    server_app: ServerApp,
    client_app: ClientApp,
    context: Context,
    *,
    clients: int,
    actors: int | None,
    gpus_per_actor: float,
    address: str | None,
) -> None:
    """Run `server_app` with clients in Ray actors on this machine, or on the cluster at `address`.

    Args:
        clients: number of logical clients.
        actors: number of Ray actors; by default one a core, on a cluster as many as fit.
        gpus_per_actor: share of a GPU for each actor; 0 for none.
        address: a Ray cluster, `host:port`, or `auto` for the one that this machine belongs to.

    Raises:
        InstallationError: Ray is not installed.
        RunError: Ray could not be started or reached, its hosts differ, the GPUs are not there, or
            the run failed.
    """
    # A crashed actor is restarted, and its task is tried once more. Without this, every later message
    # to it would be lost.
    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus_per_actor, "max_restarts": -1, "max_task_retries": 1}
    with ray_session(address, actors):
        from flwr.simulation.run_simulation import _run_simulation
        from flwr.supercore.telemetry import EventType

        count = _count_actors(resources, actors)
        log.info("training in %d Ray actors%s", count, f" of the cluster at {address}" if address else "")
        nodes = node_count(count, clients)
        context.run_config["nodes"] = nodes  # Flower starts the ServerApp before they are registered
        with _patched_pools(count) as pools, _cluster_watcher(pools):
            _run_simulation(
                num_supernodes=nodes,
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=client_app,
                server_app=_kill_busy_actors_after(server_app, pools),
                server_app_context=context,
                backend_config={"client_resources": resources},
            )


@contextmanager
def _restored_host() -> Iterator[None]:
    """Restore what Ray changes for good: this process's handler of SIGTERM and debugger."""
    is_main = threading.current_thread() is threading.main_thread()
    handler, debugger = signal.getsignal(signal.SIGTERM), {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT")}
    try:
        yield
    finally:
        _set_variables(debugger)
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def ray_session(address: str | None, actors: int | None, where: str = "federation") -> Iterator[None]:
    """Start or join a Ray, and leave it afterwards; errors of Ray and Flower become a RunError.

    Args:
        address: a Ray cluster, `host:port`, or `auto`; None starts one on this machine.
        actors: how many cores a Ray that is started here has.
        where: the settings' table with the address, for errors.

    Raises:
        InstallationError: Ray is not installed.
        RunError: Ray could not be started or reached, or its hosts differ.
    """
    if address is not None:
        _check_port(address, f"{where}.address")
    with (
        _environment(_ray_variables(address)),
        _restored_host(),
        _no_second_ray(),
        _connection(address, actors, where),
    ):
        yield


@contextmanager
def _no_second_ray() -> Iterator[None]:
    """Keep Ray from starting itself in this process where there is none, for good if an error ends the context.

    Threads of Flower may outlive an interrupt and use Ray again. Theirs would have no token, and a folder that is
    never removed.
    """
    from ray._private import auto_init_hook

    earlier = auto_init_hook.enable_auto_connect
    auto_init_hook.enable_auto_connect = False
    yield
    auto_init_hook.enable_auto_connect = earlier


@contextmanager
def _connection(address: str | None, actors: int | None, where: str) -> Iterator[None]:
    import ray

    with ExitStack() as cleanup:
        try:
            folder = None if address else cleanup.enter_context(temporary_folder(_place_of_sockets()))
            try:
                _connect(address, actors, f"{where}.address", folder)
            except SystemExit as error:  # by Ray's own handler of SIGTERM, which would exit without cleaning up
                raise KeyboardInterrupt from error
            cleanup.enter_context(sigterm_as_interrupt())
            if address:
                _compare_hosts()
            else:
                cleanup.enter_context(_session_watchdog())
            yield
        except FedsimError:
            raise
        except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
            raise RunError(f"engine ray: {first_line(error.__cause__ or error)}") from error
        finally:
            if ray.is_initialized():
                ray.shutdown()


@contextmanager
def _session_watchdog() -> Iterator[None]:
    """Kill every process of our Ray at the end of the context, or of this process."""
    import ray

    node: Any = ray._private.worker._global_node
    watchdog = subprocess.Popen(
        [sys.executable, "-I", "-S", ray_watchdog.__file__, node.get_session_dir_path()],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a terminal is meant for the driver
    )
    assert watchdog.stdin is not None
    try:
        yield
    finally:
        watchdog.stdin.close()
        watchdog.wait()


def _ray_variables(address: str | None) -> dict[str, str]:
    """Return environment variables for Ray and the processes that it starts."""
    variables = {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()}
    if address is None:
        # Actors inherit both. No other user of this machine can read the token in the environment, and
        # as a runtime_env the path would cost each actor a second.
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PYTHONPATH": _python_path()}
    return variables


def _python_path() -> str:
    return os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables while in this context, and let Ray read them at both ends of it.

    Ray may have been imported, and have read them, long before.

    Raises:
        InstallationError: Ray is not installed, or its version does not support tokens.
        RunError: this process uses a Ray already.
    """
    earlier = {name: os.environ.get(name) for name in variables}
    _set_variables(variables)
    try:
        reload_authentication = _authentication_loader()
        reload_authentication()
        try:
            yield
        finally:
            _set_variables(earlier)
            reload_authentication()
    finally:
        _set_variables(earlier)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _import_ray() -> Any:
    """Return Ray's core, which no program uses yet.

    Raises:
        InstallationError: Ray is not installed, or its version does not support tokens.
        RunError: this process uses a Ray already.
    """
    try:
        import flwr.simulation.run_simulation  # noqa: F401
        import ray
        from ray import _raylet
        from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined] # noqa: F401
    except ImportError as error:
        raise InstallationError(
            f"engine 'ray' needs Flower with Ray ({error}); pip install 'flwr[simulation]' or use engine 'serial'"
        ) from error
    if ray.is_initialized():
        raise RunError("engine ray: this process uses a Ray already, which is left as it is; call ray.shutdown() first")
    return _raylet


def _authentication_loader() -> Callable[[], None]:
    """Return a function that makes Ray read from the environment how to authenticate."""
    raylet = _import_ray()

    def reload_authentication() -> None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")

    return reload_authentication


def node_count(actors: int, clients: int) -> int:
    """Return the number of physical nodes: two an actor, so that one waits; at most `clients`."""
    return min(actors * NODES_PER_ACTOR, clients)


def _place_of_sockets() -> Path:
    """Return where Ray's folder goes: that of temporary files, or /tmp where its name leaves sockets no room.

    It is made if it is missing.
    """
    place = Path(os.environ.get("RAY_TMPDIR") or gettempdir()).absolute()
    if len(os.fsencode(place)) > _MAX_PLACE_BYTES:
        return Path("/tmp")
    place.mkdir(parents=True, exist_ok=True)  # as Ray does with RAY_TMPDIR
    return place


def _connect(address: str | None, actors: int | None, where: str, folder: Path | None) -> None:
    """Start Ray with its files in `folder`, or join a cluster; Flower then uses that one."""
    import ray
    from ray._private import parameter, ray_constants

    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        log.info("starting Ray on this machine")
        # `local` starts our own, even where another cluster runs. A Ray that is no cluster
        # listens only on loopback.
        no_cluster = patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False)
        # Nothing here grows a cluster or reads logs of workers, so the two processes that would do it are not started.
        # None would let Ray start the monitor of logs.
        without_monitors: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
        unmonitored = partial(parameter.RayParams, **without_monitors)
        with no_cluster, patch.object(parameter, "RayParams", unmonitored):
            ray.init(address="local", num_cpus=actors, _temp_dir=str(folder / "ray") if folder else None, **quiet)
        return
    log.info("joining the Ray cluster at %s", address)
    try:
        _check_cluster(address, where)
        folders = {name: os.environ[name] for name in ("FEDSIM_DATA", "FEDSIM_CACHE") if name in os.environ}
        variables = {"PYTHONPATH": _python_path(), **_ENVIRONMENT, **folders}
        ray.init(address=address, runtime_env={"env_vars": variables}, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(f"{where}: no Ray cluster to join at '{address}' ({first_line(error)}); {_REMEDY}") from error


def _check_port(address: str, where: str) -> None:
    """Raise a RunError where `address` is malformed, or nothing listens there.

    Ray is not needed for this, and would keep trying for long. `auto` is left for Ray to find.
    """
    if address == "auto":
        return
    match = re.fullmatch(r"\[?(?P<host>[^/\[\]]+)\]?:(?P<port>\d{1,5})", address)
    if match is None or not 0 < int(match["port"]) < 2**16:
        hint = "; ray:// is that of Ray Client, which is not used here" if address.startswith("ray://") else ""
        raise RunError(f"{where}: expected 'host:port' of a Ray cluster's head, or 'auto', got '{address}'{hint}")
    try:
        socket.create_connection((match["host"], int(match["port"])), timeout=_CONNECT_TIMEOUT).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise RunError(f"{where}: no Ray cluster answers at '{address}' ({reason}); {_REMEDY}") from error


def _check_cluster(address: str, where: str) -> None:
    """Raise a RunError where no cluster answers, it refuses us, or this machine is not part of it.

    Ray itself would keep trying for minutes, and not say which of these it is.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.exceptions import AuthenticationError

    denied = (
        f"{where}: the Ray cluster at '{address}' does not accept our token; give its own by "
        "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH"
    )
    head = canonicalize_bootstrap_address_or_die(address) if address == "auto" else address
    try:  # the channel uses TLS where Ray does, and never a proxy
        with init_grpc_channel(head, GLOBAL_GRPC_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(timeout=_PATIENCE)
            channel.unary_unary(_CLUSTER_ID)(b"", timeout=_PATIENCE)
            hosts = _parse_live_hosts(channel.unary_unary(_ALL_NODES)(b"", timeout=_PATIENCE))
    except grpc.FutureTimeoutError as error:
        raise RunError(f"{where}: no Ray cluster answers at '{address}' within {_PATIENCE:.0f} s; {_REMEDY}") from error
    except AuthenticationError as error:  # this process is to use a token, but has none
        raise RunError(denied) from error
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise RunError(denied) from error
        raise RunError(
            f"{where}: what answers at '{address}' is no Ray cluster ({error.code().name}); {_REMEDY}"
        ) from error
    if not any(map(_is_local, hosts)):  # Ray would end this process, or the run in an obscure way
        raise RunError(
            f"{where}: this machine is not a host of the Ray cluster at '{address}', which has "
            f"{join_first(sorted(hosts), 4)}; join it by `ray start --address={head}`, or start the run on one of these"
        )


def _is_local(address: str) -> bool:
    """Tell whether an address is one of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def _parse_live_hosts(answer: bytes) -> set[str]:
    """Return the addresses of the live hosts in a cluster's answer to GetAllNodeInfo."""
    from ray.core.generated import gcs_service_pb2

    nodes: Any = gcs_service_pb2.GetAllNodeInfoReply.FromString(answer)  # type: ignore[attr-defined]
    return {node.node_manager_address for node in nodes.node_info_list if node.state == 0}


def _compare_hosts() -> None:
    """Raise a RunError where a host of the cluster has other versions than this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Ask all hosts at once, then wait for each.
    remote_versions = ray.remote(num_cpus=0)(host_versions)
    answers = []
    for node in ray.nodes():  # type: ignore[no-untyped-call]
        if node["Alive"]:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answers.append((node, remote_versions.options(scheduling_strategy=strategy).remote()))
    for node, answer in answers:
        where = f"the Ray host {node['NodeManagerAddress']} cannot take part"
        try:
            remote_host = ray.get(answer, timeout=3 * _PATIENCE)
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"{where}: {first_line(error.cause)}") from error
        except ray.exceptions.RayError as error:
            raise RunError(f"{where}: {first_line(error)}") from error
        if difference := explain_difference(remote_host):
            raise RunError(f"{where}: {difference}")


def _count_actors(resources: dict[str, Any], wanted: int | None) -> int:
    """Return how many actors to start: as many as fit next to other programs, at most `wanted`."""
    import ray
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    total = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if resources["num_gpus"] and total.get("GPU", 0) < resources["num_gpus"]:
        raise RunError(
            f"federation.gpus_per_actor: {resources['num_gpus']:g} asked for, but Ray finds {total.get('GPU', 0):g} "
            "GPUs; train with device = 'cpu', or lower it"
        )
    try:
        count = pool_size_from_resources(resources)
    except ValueError as error:
        raise RunError(
            f"engine ray: no host has a core and {resources['num_gpus']:g} GPUs to spare for an actor; "
            "lower federation.gpus_per_actor, or join a larger cluster"
        ) from error
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    room = int(free.get("CPU", 0))
    if resources["num_gpus"]:
        room = min(room, int(free.get("GPU", 0) / resources["num_gpus"]))
    if not room:
        raise RunError(
            f"engine ray: all {total.get('CPU', 0):g} cores of the cluster are in use, or all of its GPUs; wait until "
            "some are free, or join another one"
        )
    count = min(count, room)
    if wanted and count < wanted:
        log.warning("federation.actors: %d asked for, but there is room for %d", wanted, count)
    return min(count, wanted or count)


@contextmanager
def _patched_pools(actors: int) -> Iterator[list[Any]]:
    """Patch Flower to start so many actors of ours and to keep all of them busy.

    It would start as many as fit into the cluster, and serve them from a thread pool of Python's
    default size, 32 at most.

    Yields:
        A list to which each pool that Flower makes is added.
    """
    import ray
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.server.superlink.fleet.vce.backend import raybackend
    from flwr.simulation.ray_transport import ray_actor

    pools: list[Any] = []
    actor_class: Any = ray.remote(ClientActor)

    def make_pool(actor_type: Any, **settings: Any) -> Any:
        pool: Any = ray_actor.BasicActorPool(actor_class, **settings)
        # Flower's actors exit from within a task, which Ray would try once more, with a warning.
        pool.terminate_all_actors = lambda: [ray.kill(actor) for actor in pool.pool]
        pools.append(pool)
        return pool

    threads = patch.object(vce_api, "ThreadPoolExecutor", partial(ThreadPoolExecutor, max_workers=actors))
    size = patch.object(ray_actor, "pool_size_from_resources", lambda resources: actors)
    with threads, size, patch.object(raybackend, "BasicActorPool", make_pool):
        yield pools


@contextmanager
def _cluster_watcher(pools: list[Any]) -> Iterator[None]:
    """Watch the cluster in a thread: warn of lost hosts, and kill actors that wait for too long."""
    ended = threading.Event()
    watcher = threading.Thread(target=_watch_cluster, args=(pools, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch_cluster(pools: list[Any], ended: threading.Event) -> None:
    import ray

    hosts, idle_seconds = _live_hosts(), 0.0
    while not ended.wait(_WATCH_INTERVAL):
        try:
            hosts_now, job = _live_hosts(), ray.get_runtime_context().get_job_id()
            states = [actor["State"] for actor in ray._private.state.actors().values() if actor["JobID"] == job]
        except Exception:  # Ray is ending, or has other private names
            return
        # Warn of lost hosts.
        for lost in hosts.keys() - hosts_now.keys():
            log.warning("the Ray host %s is gone; its clients are asked again on others", hosts[lost])
        hosts = hosts_now
        # Measure how long no actor has had a core.
        if not pools or not states or "ALIVE" in states:
            idle_seconds = 0.0
            continue
        if not idle_seconds:
            log.warning("no actor has a core of Ray; waiting %.0f s for one", _MAX_IDLE)
        idle_seconds += _WATCH_INTERVAL
        if idle_seconds > _MAX_IDLE:
            log.error("no actor has had a core of Ray for %.0f s, so the clients of this round are given up", _MAX_IDLE)
            for pool in pools:
                for actor in (*pool.pool, *pool._future_to_actor.values()):
                    ray.kill(actor)
            return


def _live_hosts() -> dict[str, str]:
    """Return the addresses of the live hosts, by their ids."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def _kill_busy_actors_after(server_app: ServerApp, pools: list[Any]) -> ServerApp:
    """Return a ServerApp that afterwards kills busy actors, so that nobody waits for late clients."""
    import ray

    ending = ServerApp()

    @ending.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            server_app(grid, context)
        finally:
            for pool in pools:
                for actor in list(pool._future_to_actor.values()):
                    ray.kill(actor)

    return ending
