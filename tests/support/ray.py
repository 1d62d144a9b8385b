"""One Ray for many runs, because its start and that of its actors take longer than the runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from fedsim.federation.engines import ray as ray_engine


@contextmanager
def share_ray(actors: int) -> Iterator[list[Any]]:
    """Start Ray as the engine does; all runs on it in this block are given the same actors.

    A run neither starts Ray, nor ends its actors; all else of it is as ever. The import path of the
    actors is that of the beginning.

    Yields:
        The actors; each is started by the first run that needs it.
    """
    import ray
    from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
    from flwr.simulation.ray_transport import ray_actor

    lasting: list[Any] = []

    class LastingPool(ray_actor.BasicActorPool):
        def add_actors_to_pool(self, num_actors: int) -> None:
            while len(lasting) < num_actors:
                lasting.append(self.create_actor_fn())
            self.pool += lasting[:num_actors]
            self.num_actors += num_actors

    with ray_engine.ray_session(None, actors), ExitStack() as patches:
        for owner, name, replacement in (
            (ray_engine, "ray_session", lambda *arguments: nullcontext()),
            (ray_engine, "import_ray", lambda: None),  # it would refuse a Ray that is in use
            (ray_actor, "BasicActorPool", LastingPool),
            (ray, "available_resources", ray.cluster_resources),  # the actors hold the cores
            (RayBackend, "terminate", lambda backend: None),
        ):
            patches.enter_context(patch.object(owner, name, replacement))
        yield lasting
