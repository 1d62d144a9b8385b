"""The Ray that clients or cells run in: started on this machine, or joined, and left as it was.

Anybody who reaches a Ray can run code in it, and by default it listens on every interface and asks
for no password. The Ray that is started here listens on loopback and requires a secret token. Its
folder with sockets, logs and packed code, which it lets anybody write to, is in one that no other
user can enter.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

from fedsim.base.environment import set_variables
from fedsim.base.errors import FedsimError, InstallationError, RunError, first_line
from fedsim.base.files import temporary_folder
from fedsim.federation.engines import ray_watchdog
from fedsim.federation.engines.processes import sigterm_as_interrupt
from fedsim.federation.engines.ray_cluster import REMEDY, check_cluster, check_port, compare_hosts

log = logging.getLogger(__name__)

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Small arguments and results are sent inside the call instead of through the object store.
    "RAY_max_direct_call_object_size": "10000000",
    "RAY_task_rpc_inlined_bytes_limit": "100000000",
}
_MAX_PLACE_BYTES = 18
"""Longest path of the folder in which there is one for Ray: those of its sockets may have 107 bytes, 103 on macOS."""


@contextmanager
def _restored_host() -> Iterator[None]:
    """Restore what Ray changes for good: this process's handler of SIGTERM and debugger."""
    is_main = threading.current_thread() is threading.main_thread()
    handler, debugger = signal.getsignal(signal.SIGTERM), {"PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT")}
    try:
        yield
    finally:
        set_variables(debugger)
        if is_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def ray_session(address: str | None, actors: int | None, where: str = "federation") -> Iterator[None]:
    """Start or join a Ray, and leave it afterwards; errors of Ray and Flower become a RunError.

    Args:
        address: a Ray cluster, `host:port`, or `auto`; None starts one on this machine.
        actors: how many cores a Ray that is started here has.
        where: the settings' table with the address, for errors.
    """
    if address is not None:
        check_port(address, f"{where}.address")
    with (
        _environment(_ray_variables(address)),
        _restored_host(),
        _prevent_second_ray(),
        _connection(address, actors, where),
    ):
        yield


@contextmanager
def _prevent_second_ray() -> Iterator[None]:
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
                compare_hosts()
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
    """
    earlier = {name: os.environ.get(name) for name in variables}
    set_variables(variables)
    try:
        reload_authentication = _authentication_loader()
        reload_authentication()
        try:
            yield
        finally:
            set_variables(earlier)
            reload_authentication()
    finally:
        set_variables(earlier)


def import_ray() -> Any:
    """Return Ray's core, which no program uses yet."""
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
    raylet = import_ray()

    def reload_authentication() -> None:
        raylet.AuthenticationTokenLoader.instance().reset_cache()
        raylet.Config.initialize("")

    return reload_authentication


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
        check_cluster(address, where)
        folders = {name: os.environ[name] for name in ("FEDSIM_DATA", "FEDSIM_CACHE") if name in os.environ}
        variables = {"PYTHONPATH": _python_path(), **_ENVIRONMENT, **folders}
        ray.init(address=address, runtime_env={"env_vars": variables}, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(f"{where}: no Ray cluster to join at '{address}' ({first_line(error)}); {REMEDY}") from error
