"""Interface of engines: what carries the messages between the server and its clients.

An engine is a plug-in of the group `fedsim.engines`. The experiment file names it in `[federation]
engine`, as a text or, with settings of its own, as a table with a `name`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.federation_tables import FederationTable
from fedsim.plugins import registry


class JobContext(Context):
    """Context of a ServerApp in the process that has checked the experiment.

    Attributes:
        experiment: the experiment, so that data need not be loaded again.
    """

    experiment: Experiment


@dataclass(frozen=True, kw_only=True)
class FederationJob:
    """One federation that an engine carries from its first round, or its checkpoint, to its end.

    Attributes:
        config: the experiment; `config.federation` says where and on what clients work.
        experiment: what it describes, as far as that is built already.
        server_app: the round loop, as a ServerApp of Flower.
        client_app: plays any clients, as a ClientApp of Flower.
        folder: the run folder, in which an engine may write logs.
        resume: whether the run goes on after its last checkpoint.
    """

    config: Config
    experiment: Experiment
    server_app: ServerApp
    client_app: ClientApp
    folder: Path
    resume: bool = False

    @property
    def run_config(self) -> dict[str, bool | bytes | float | int | str]:
        """Settings that `server_app` reads; for engines that start it in another process."""
        return {
            "experiment": self.config.model_dump_json(),
            "out": str(self.folder.resolve()),
            "resume": self.resume,
        }

    def make_context(self) -> Context:
        """Return the context with which `server_app` is called in this process."""
        context = JobContext(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=self.run_config)  # type: ignore[arg-type]
        context.experiment = self.experiment
        return context

    def run_rounds(self, grid: Grid) -> None:
        """Run all rounds over the nodes of `grid`, each of which can play any clients."""
        self.server_app(grid, self.make_context())


class Engine(ABC):
    """Carrier of the messages of a federation.

    Every engine runs the same two apps, and every one gives the same recording. A subclass is a
    frozen dataclass; its fields are settings of `[federation.engine]`.

    Class attributes:
        in_process: whether clients work in this process. Objects of a Python program, such as a
            network that no file names, reach no other one.
        splits_rounds: whether a large round is split into several messages a node, so that its
            progress is seen; False where a message costs as much as the start of a process.
    """

    in_process: ClassVar[bool] = False
    splits_rounds: ClassVar[bool] = True

    def check(self, job: FederationJob) -> None:
        """Raise an error unless this engine can carry `job`; nothing is started or written yet.

        Raises:
            ConfigError: the experiment asks for what this engine has not, in one sentence that
                names the setting and what to do.
            InstallationError: a program or package is missing.
        """
        del job

    def least_nodes(self, federation: FederationTable) -> int:
        """Return how many nodes have to be connected before the first round begins."""
        del federation
        return 1

    @abstractmethod
    def carry(self, job: FederationJob) -> None:
        """Run all rounds of `job`, and end everything that was started for them.

        `job.run_rounds(grid)` does the first. Errors of the round loop pass through.

        Raises:
            RunError: the engine could not be started, or ended early.
        """


def build_engine(federation: FederationTable) -> Engine:
    """Build the engine that `federation` names.

    Raises:
        ConfigError: it does not accept a setting.
        PluginError: no engine has this name, or it does not load.
    """
    table = federation.engine_table
    engine: Engine = registry.build("engines", table.name, table.settings, "federation.engine")
    return engine
