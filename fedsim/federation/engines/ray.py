"""The Ray engine: Flower's simulation engine, with two physical nodes an actor.

Private names of Flower are used because the public `run_simulation` warns that it will be removed
and cannot pass a run_config to the ServerApp, and because its pools have sizes for a single
machine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.base.errors import RunError
from fedsim.federation.engines.engine import Engine, FederationJob
from fedsim.federation.engines.ray_actor import ClientActor
from fedsim.federation.engines.ray_session import import_ray, ray_session

log = logging.getLogger(__name__)

_WATCH_INTERVAL, _MAX_IDLE = 5.0, 300.0
"""Seconds between two looks at a cluster, and for which all actors may be without a core."""
NODES_PER_ACTOR = 2


@dataclass(frozen=True, kw_only=True)
class RayEngine(Engine):
    """Play the clients in Ray actors, on this machine or on a cluster.

    `federation.actors` is their number, `federation.address` a cluster to join, and
    `federation.gpus_per_actor` the share of a GPU that each takes where clients train on GPUs.
    """

    def check(self, job: FederationJob) -> None:
        """Raise an error where Ray is not installed, or in use by this program, or a GPU of this machine is missing."""
        import_ray()
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
                server_app=_add_actor_cleanup(server_app, pools),
                server_app_context=context,
                backend_config={"client_resources": resources},
            )


def node_count(actors: int, clients: int) -> int:
    """Return the number of physical nodes: two an actor, so that one waits; at most `clients`."""
    return min(actors * NODES_PER_ACTOR, clients)


def _count_actors(resources: dict[str, Any], wanted: int | None) -> int:
    """Return how many actors to start: as many as fit next to other programs, at most `wanted`."""
    import ray
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    total = ray.cluster_resources()
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
    free = ray.available_resources()
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

    nodes: list[dict[str, Any]] = ray.nodes()
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


def _add_actor_cleanup(server_app: ServerApp, pools: list[Any]) -> ServerApp:
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
