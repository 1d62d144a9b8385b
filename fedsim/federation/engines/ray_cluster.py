"""Checks of a Ray cluster before and after it is joined: that it answers, lives, and has hosts like this one."""

from __future__ import annotations

import re
import socket
from contextlib import suppress
from typing import Any

from fedsim.base.errors import RunError, first_line, join_first
from fedsim.federation.engines.readiness import explain_difference, host_versions

_PATIENCE = 20.0
"""Seconds for an answer of Ray."""
_CONNECT_TIMEOUT = 3.0
"""Seconds in which a port has to accept a connection; Ray's answer may take longer."""
REMEDY = "start one there with `ray start --head`, or leave the address out"
_CLUSTER_ID = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_ALL_NODES = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"


def check_port(address: str, where: str) -> None:
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
        raise RunError(f"{where}: no Ray cluster answers at '{address}' ({reason}); {REMEDY}") from error


def check_cluster(address: str, where: str) -> None:
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
        raise RunError(f"{where}: no Ray cluster answers at '{address}' within {_PATIENCE:.0f} s; {REMEDY}") from error
    except AuthenticationError as error:  # this process is to use a token, but has none
        raise RunError(denied) from error
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise RunError(denied) from error
        raise RunError(
            f"{where}: what answers at '{address}' is no Ray cluster ({error.code().name}); {REMEDY}"
        ) from error
    if not any(map(_is_local, hosts)):  # Ray would end this process, or the run in an obscure way
        raise RunError(
            f"{where}: this machine is not a host of the Ray cluster at '{address}', which has "
            f"{join_first(sorted(hosts), 4)}; join it by `ray start --address={head}`, or start the run on one of these"
        )


def _is_local(address: str) -> bool:
    """Return whether an address is one of this machine."""
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


def compare_hosts() -> None:
    """Raise a RunError where a host of the cluster has other versions than this one."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Ask all hosts at once, then wait for each.
    remote_versions = ray.remote(num_cpus=0)(host_versions)
    answers = []
    for node in ray.nodes():
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
