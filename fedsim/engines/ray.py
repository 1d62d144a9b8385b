"""The Ray engine: Flower's stock simulation engine, two physical nodes an actor.

Private names of Flower are touched here and in `serial` only: the public `run_simulation` warns
that it will go and cannot hand a run_config to the ServerApp.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedsim.errors import FedsimError, InstallationError, RunError

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Small arguments and results travel inside the call instead of through the object store.
    "RAY_max_direct_call_object_size": "10000000",
    "RAY_task_rpc_inlined_bytes_limit": "100000000",
}
NODES_PER_ACTOR = 2


def launch(
    server_app: ServerApp, client_app: ClientApp, context: Context, *, actors: int, clients: int, address: str | None
) -> None:
    """Run `server_app` with clients in Ray actors on this machine, or on the cluster at `address`.

    Raises:
        InstallationError: Ray is not installed.
        RunError: Ray could not be started or failed.
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

    log.info("starting Ray%s", f", cluster at {address}" if address else f" with {actors} actors on this machine")
    init: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    init |= {"address": address} if address else {"num_cpus": actors}
    try:
        _run_simulation(
            num_supernodes=node_count(actors, clients),
            exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
            client_app=client_app,
            server_app=server_app,
            server_app_context=context,
            backend_config={
                "init_args": init,
                # A crashed actor comes back; without this it swallows every later message.
                "client_resources": {"num_cpus": 1, "num_gpus": 0, "max_restarts": -1, "max_task_retries": 0},
            },
        )
    except FedsimError:
        raise
    except (RuntimeError, ConnectionError, ValueError) as error:
        raise RunError(f"engine ray: {error.__cause__ or error}") from error
    finally:
        if ray.is_initialized():
            ray.shutdown()


def node_count(actors: int, clients: int) -> int:
    """Physical nodes: enough for every actor to have another one in hand, never more than clients."""
    return min(actors * NODES_PER_ACTOR, clients)
