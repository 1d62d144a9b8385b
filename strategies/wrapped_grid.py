"""What Grids share that stand between a server and another Grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


class WrappedGrid(Grid):
    """Grid that makes messages and names nodes as another one does; who derives from it passes the messages on.

    Args:
        grid: the other Grid.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        if name == "grid":  # copying asks for it before it is set
            raise AttributeError(name)
        return getattr(self.grid, name)

    def set_run(self, run: Any) -> None:
        """Set the run of the wrapped Grid."""
        self.grid.set_run(run)

    @property
    def run(self) -> Any:
        """Return the run of the wrapped Grid."""
        return self.grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message of the wrapped Grid."""
        return self.grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected nodes."""
        return self.grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return the connected nodes."""
        return self.grid.get_nodes()
