"""The Ray engine: Flower's stock simulation engine, two physical nodes an actor.

Private names of Flower are used because the public `run_simulation` warns that it will go and cannot
hand a run_config to the ServerApp, and because its pools have sizes that suit one machine.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.engines.readiness import explain_difference, versions
from fedsim.errors import FedsimError, InstallationError, RunError, first_line

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Small arguments and results travel inside the call instead of through the object store.
    "RAY_max_direct_call_object_size": "10000000",
    "RAY_task_rpc_inlined_bytes_limit": "100000000",
}
_PATIENCE = 20.0
NODES_PER_ACTOR = 2


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
        gpus_per_actor: share of a GPU that each takes; 0 for none.
        address: a Ray cluster, `host:port`, or `auto` for the one that this machine belongs to.

    Raises:
        InstallationError: Ray is not installed.
        RunError: Ray could not be started or reached, its hosts differ, the GPUs are not there, or
            the run failed.
    """
    os.environ.update({key: value for key, value in _ENVIRONMENT.items() if key not in os.environ})
    try:
        import ray
        from flwr.simulation.run_simulation import _run_simulation
        from flwr.supercore.telemetry import EventType
    except ImportError as error:
        raise InstallationError(
            f"engine 'ray' needs Flower with Ray ({error}); pip install 'flwr[simulation]' or use engine 'serial'"
        ) from error

    python_path = os.environ.get("PYTHONPATH")
    # A crashed actor comes back, and what it was at is tried once more; without this it would swallow
    # every later message.
    resources: dict[str, Any] = {"num_cpus": 1, "num_gpus": gpus_per_actor, "max_restarts": -1, "max_task_retries": 1}
    try:
        _connect(address, actors)
        if address:
            _compare_hosts()
        count = _actors(resources, actors)
        log.info("training in %d Ray actors%s", count, f" of the cluster at {address}" if address else "")
        nodes = node_count(count, clients)
        context.run_config["nodes"] = nodes  # Flower starts the ServerApp before it has registered them
        with _pools_of(count) as pools:
            _run_simulation(
                num_supernodes=nodes,
                exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
                client_app=client_app,
                server_app=_without_waiting(server_app, pools),
                server_app_context=context,
                backend_config={"client_resources": resources},
            )
    except FedsimError:
        raise
    except (RuntimeError, ConnectionError, ValueError, ray.exceptions.RayError) as error:
        raise RunError(f"engine ray: {first_line(error.__cause__ or error)}") from error
    finally:
        if ray.is_initialized():
            ray.shutdown()
        _restore("PYTHONPATH", python_path)


def node_count(actors: int, clients: int) -> int:
    """Physical nodes: enough for every actor to have another one in hand, never more than clients."""
    return min(actors * NODES_PER_ACTOR, clients)


def _connect(address: str | None, actors: int | None) -> None:
    """Start Ray, or join a cluster; Flower uses what it finds."""
    import grpc
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS

    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        os.environ["PYTHONPATH"] = path  # actors inherit it; as a runtime_env it would cost a second each
        log.info("starting Ray on this machine")
        ray.init(address="local", num_cpus=actors, **quiet)  # own actors, even where another cluster runs
        return
    log.info("joining the Ray cluster at %s", address)
    if "://" in address:
        raise RunError(f"federation.address: expected 'host:port' of a Ray cluster's head, or 'auto', got '{address}'")
    try:
        if re.fullmatch(r".+:\d+", address):  # Ray itself would go on asking for minutes
            with init_grpc_channel(
                address, GLOBAL_GRPC_OPTIONS
            ) as channel:  # with TLS where Ray has it, never by proxy
                grpc.channel_ready_future(channel).result(timeout=_PATIENCE)
        data = {name: os.environ[name] for name in ("FEDSIM_DATA", "FEDSIM_CACHE") if name in os.environ}
        ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": path, **_ENVIRONMENT, **data}}, **quiet)
    except grpc.FutureTimeoutError as error:
        raise RunError(
            f"federation.address: no Ray cluster answers at '{address}' within {_PATIENCE:.0f} s; "
            "start one there with `ray start --head`, or leave the address out"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"federation.address: no Ray cluster to join at '{address}' ({first_line(error)}); "
            "start one there with `ray start --head`, or leave the address out"
        ) from error


def _compare_hosts() -> None:
    """Raise a RunError where a host of the cluster has other versions than this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look = ray.remote(num_cpus=0)(versions)
    hosts = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(): node
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }
    for answer, node in hosts.items():
        where = f"the Ray host {node['NodeManagerAddress']} cannot take part"
        try:
            there = ray.get(answer, timeout=3 * _PATIENCE)
        except ray.exceptions.RayTaskError as error:
            raise RunError(f"{where}: {first_line(error.cause)}") from error
        except ray.exceptions.RayError as error:
            raise RunError(f"{where}: {first_line(error)}") from error
        if why := explain_difference(there):
            raise RunError(f"{where}: {why}")


def _actors(resources: dict[str, Any], wanted: int | None) -> int:
    """How many actors to start: as many as wanted and as fit."""
    import ray
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    there = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if resources["num_gpus"] and there.get("GPU", 0) < resources["num_gpus"]:
        raise RunError(
            f"federation.gpus_per_actor: {resources['num_gpus']:g} asked for, but Ray finds {there.get('GPU', 0):g} "
            "GPUs; train with device = 'cpu', or lower it"
        )
    try:
        count = pool_size_from_resources(resources)
    except ValueError as error:
        raise RunError(
            f"engine ray: no host has a core and {resources['num_gpus']:g} GPUs to spare for an actor; "
            "lower federation.gpus_per_actor, or join a larger cluster"
        ) from error
    if wanted and count < wanted:
        log.warning("federation.actors: %d asked for, but there is room for %d", wanted, count)
    return min(count, wanted or count)


@contextmanager
def _pools_of(actors: int) -> Iterator[list[Any]]:
    """Let Flower start `actors` actors, and keep all of them busy; the pools that it makes are noted in the list.

    It would start as many as fit into the cluster, and serve them from the threads of a pool of
    Python's default size, 32 at most.
    """
    import ray
    from flwr.server.superlink.fleet.vce import vce_api
    from flwr.server.superlink.fleet.vce.backend import raybackend
    from flwr.simulation.ray_transport import ray_actor

    pools: list[Any] = []

    def noted(*args: Any, **settings: Any) -> Any:
        pool: Any = ray_actor.BasicActorPool(*args, **settings)
        # Flower's actors exit from within a task, which Ray then wants to try once more, and says so.
        pool.terminate_all_actors = lambda: [ray.kill(actor) for actor in pool.pool]
        pools.append(pool)
        return pool

    threads = patch.object(vce_api, "ThreadPoolExecutor", partial(ThreadPoolExecutor, max_workers=actors))
    size = patch.object(ray_actor, "pool_size_from_resources", lambda resources: actors)
    with threads, size, patch.object(raybackend, "BasicActorPool", noted):
        yield pools


def _without_waiting(server_app: ServerApp, pools: list[Any]) -> ServerApp:
    """`server_app`, after which nobody waits for clients who did not answer in time, or never will."""
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


def _restore(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
