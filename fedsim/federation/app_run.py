"""Run of a Flower app over clients in this process, recorded by a curious server.

An app runs in a separate process (`fedsim.api.app_runs`), so that its modules, and what they keep, are new in each
run. Everything that is drawn follows from the seed: what the server draws from the global generators of Python, NumPy
and PyTorch from the seed alone, and what a client draws from the seed, its node and the number of its message, so that
neither the order of clients nor the recording changes anything.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedsim.base.errors import ConfigError, FedsimError, PluginError, RunError, error_reason, one_line
from fedsim.base.randomness import derive_seed, seed_globals, use_one_thread
from fedsim.federation.app_file import AppFile, RunConfig
from fedsim.federation.app_ledger import make_app_ledger
from fedsim.federation.app_replies import order_legacy_clients, packed_values, refuse_deltas
from fedsim.federation.build_plugins import build_defenses
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.flower_app import FlowerApp
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import TESTED_COLUMNS
from fedsim.federation.simulation import load_app_part, quiet_flower
from fedsim.federation.tested_examples import ExampleWatch
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.privacy.ledger import COLUMNS, summarise_ledger, unique_labels
from fedsim.recording.header import Header
from fedsim.recording.recorder import Recorder
from fedsim.recording.reported_accuracy import describe_tested_examples
from fedsim.recording.transcript import Transcript

log = logging.getLogger(__name__)
_MAX_LOOKS = 10
"""Most times that a server asks which clients there are before it sends one a message."""


@dataclass(frozen=True, kw_only=True)
class AppJob:
    """Run of an app.

    Attributes:
        recording: folder of the recording, `transcript` in a run folder.
    """

    app: FlowerApp
    run_config: RunConfig
    file: AppFile
    recording: Path


def build_app_defenses(file: AppFile) -> list[Defense]:
    """Build the defenses of a file, each of which acts on an update before it is sent."""
    make_mod, defenses = load_app_part("mod"), build_defenses(file.defense)
    for number, (table, defense) in enumerate(zip(file.defense, defenses, strict=True)):
        try:
            make_mod(defense)
        except PluginError as error:
            raise ConfigError(
                f"defense.{number}: '{table.name}' cannot act on the update of an app: {error}"
            ) from error
    if file.secure_aggregation is not None:
        from fedsim.federation.secure_aggregation import check_defenses

        check_defenses(defenses)
    return defenses


@contextmanager
def app_runner() -> Iterator[Callable[[AppJob, Any], None]]:
    """Yield the function with which a worker process runs an app."""
    with quiet_flower():
        yield lambda job, progress: run_app_here(job)


def run_app_here(job: AppJob) -> None:
    """Run an app in this process, whose global generators and import path it changes.

    Raises:
        ConfigError: the app asks for a simulation of its own.
        PluginError: the app does not load.
        RunError: the app failed, or no client answered, or a defense had nothing to act on.
    """
    seed, where = job.file.federation.seed, job.app.folder
    with use_one_thread(), _forbid_simulation(where), order_legacy_clients():
        _seed_process(seed)
        # Before the folder of the app is searched first, which may have modules called as packages of fedsim.
        for part in ("mod", "recorded-run"):
            load_app_part(part)
        server_app, client_app = job.app.load("serverapp"), job.app.load("clientapp")
        watch = ExampleWatch()
        grid = ClientGrid(client_app, job.file, job.run_config, watch)
        recorder = Recorder(job.recording)
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=dict(job.run_config))
        _seed_process(seed)  # importing may have drawn anything
        try:
            with watch.watch():
                load_app_part("recorded-run")(
                    server_app,
                    grid,
                    context,
                    recorder,
                    partitions=grid.partitions,
                    sums=job.file.secure_aggregation,
                    seed=seed,
                )
        except FedsimError:
            raise
        except (Exception, SystemExit) as error:
            raise RunError(
                f"{where}: its serverapp ended before its last round: {one_line(error_reason(error))}; what was "
                "recorded until then is kept"
            ) from error
        finally:
            grid.write_ledger(job)
            write_tested_examples(job, watch)
    grid.report()


def write_tested_examples(job: AppJob, watch: ExampleWatch) -> None:
    """Write how many examples the app tests on, and warn where clients train on them."""
    tested, trained = watch.count()
    if not trained:
        return
    folder = OpenRun(job.recording.parent)
    folder.write_table(folder.tested_examples, TESTED_COLUMNS, [{"tested": tested, "trained": trained}])
    log.warning("%s", describe_tested_examples(tested, trained))


class ClientGrid(InProcessGrid):
    """Grid over the clients of an app, each of which answers as if it were in a separate process.

    Args:
        client_app: plays every client.
        file: says how many clients there are, what draws, and which defenses act.
        run_config: settings of the app.
        watch: looks at the examples of the clients; None for nobody.
    """

    def __init__(
        self, client_app: ClientAppCallable, file: AppFile, run_config: RunConfig, watch: ExampleWatch | None = None
    ) -> None:
        self._watch = watch or ExampleWatch()
        self._seed = file.federation.seed
        self._generators: list[torch.Generator] = []
        self._defenses = build_app_defenses(file)
        self._reads_weights = bool(self._defenses) or file.secure_aggregation is not None
        self._num_looks = 0
        self._answered, self._defended, self._failed = Counter[str](), 0, list[str]()
        self._num_messages, self._beside = Counter[int](), set[str]()
        self._undefended_kind = ""  # of messages that clients answered with arrays on which no defense acts
        self._num_trained = Counter[int]()  # training messages by partition
        self._lock = threading.Lock()
        super().__init__(self._with_defenses(client_app), file.federation.clients, run_config)

    def _with_defenses(self, client_app: ClientAppCallable) -> ClientAppCallable:
        """Return a client app with the defenses around it, the first of which acts first."""
        call, make_mod = refuse_deltas(client_app) if self._reads_weights else client_app, load_app_part("mod")
        for defense in self._defenses:
            self._generators.append(torch.Generator())
            call = _wrap(call, make_mod(defense, self._generators[-1]))
        return call

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        nodes = list(super().get_node_ids())
        if threading.current_thread() is threading.main_thread():  # Flower's legacy server also asks in another
            self._num_looks += 1
            if self._num_looks > _MAX_LOOKS:
                raise RunError(
                    f"federation.clients: the server of this app waits for more than {len(nodes)} clients; set it to "
                    "as many as its strategy asks for, as in min_available_nodes"
                )
        return nodes

    def answer_message(self, message: Message) -> Message:
        """Return the reply of a client to a copy of the message, as over a network."""
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        with self._lock:  # Flower's legacy server sends from several threads
            self._num_messages[node] += 1
            if kind.split(".")[0] == MessageType.TRAIN:
                self._num_trained[self.partitions[node]] += 1
            self._num_looks = 0
            key = (node, self._num_messages[node])
            for number, rng in enumerate(self._generators):
                rng.manual_seed(derive_seed(self._seed, "app defense", number, *key))
            with seed_globals(self._seed, "app client", *key):
                _seed_keras(derive_seed(self._seed, "app client", *key))
                with self._watch.answer(kind):
                    reply = deepcopy(super().answer_message(deepcopy(message)))
        message.metadata.__dict__["_message_id"] = message.metadata.message_id
        self._count_reply(reply, kind, node)
        return reply

    def _count_reply(self, reply: Message, kind: str, node: int) -> None:
        self._answered[kind] += 1
        if self._defenses and not reply.has_error():
            self._beside |= set(packed_values(reply.content))
        if reply.has_error():
            self._failed.append(
                f"client {self.partitions[node]}, message '{kind}': {one_line(reply.error.reason or '')}"
            )
        elif kind.split(".")[0] == MessageType.TRAIN:
            self._defended += 1
        elif self._defenses and reply.content.array_records:
            self._undefended_kind = kind
            self._check_arrays_are_defended()

    def _check_arrays_are_defended(self) -> None:
        """Raise RunError where clients answered with arrays on which no defense acts."""
        if self._undefended_kind:
            raise RunError(
                f"defense: clients reply to '{self._undefended_kind}' with arrays, and "
                f"{name_of_defense(self._defenses[0])} acts only on replies to training messages, so these would be "
                "sent undefended; remove [[defense]]"
            )

    def write_ledger(self, job: AppJob) -> None:
        """Write the privacy ledger into the run folder, where a defense proves something of all that is sent."""
        if not self._defenses or not self._num_trained or self._undefended_kind or self._beside:
            return
        labels = unique_labels([table.name for table in job.file.defense])
        headers: list[Header] = []
        if any(job.recording.glob("round-*.safetensors")):
            recording = Transcript(job.recording)
            headers = [recording.header(number) for number in recording.rounds]
        rows = make_app_ledger(headers, dict(zip(labels, self._defenses, strict=True)), self._num_trained)
        if rows:
            folder = OpenRun(job.recording.parent)
            folder.write_table(folder.ledger, COLUMNS, rows)
            for sentence in summarise_ledger(rows):
                log.info("privacy: %s", sentence)

    def report(self) -> None:
        """Warn of clients that failed."""
        self._check_arrays_are_defended()  # again, because an app may catch errors of its messages
        total = sum(self._answered.values())
        if not total:
            raise RunError("the serverapp sent no message to any client, so nothing is recorded; fix its main function")
        if len(self._failed) == total:
            raise RunError(f"all clients failed, so no update is recorded; the first was {self._failed[0]}")
        if self._defenses and not self._defended:
            raise RunError(
                "defense: no client answered a training message, so no update was defended"
                + (f"; the first that failed was {self._failed[0]}" if self._failed else "; leave [[defense]] out")
            )
        if self._beside:
            log.warning(
                "defense: clients also send %s as lists or bytes, on which no defense acts; if that is of the update, "
                "the server has it undefended, so nothing is proved",
                ", ".join(sorted(self._beside)),
            )
        if self._failed:
            log.warning("%d of %d messages failed; the first was %s", len(self._failed), total, self._failed[0])


def _wrap(call: ClientAppCallable, mod: Mod) -> ClientAppCallable:
    def call_with_mod(message: Message, context: Context) -> Message:
        return mod(message, context, call)

    return call_with_mod


def _seed_process(seed: int) -> None:
    """Seed the global generators of this process, from which the server of an app may draw."""
    number = derive_seed(seed, "app server")
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002
    torch.manual_seed(number)
    _seed_keras(number)


def _seed_keras(number: int) -> None:
    """Seed the generators of Keras, which no other seed reaches, if the app has imported it."""
    keras: Any = sys.modules.get("keras")
    if keras is not None:
        keras.utils.set_random_seed(number % 2**32)


@contextmanager
def _forbid_simulation(folder: Path) -> Iterator[None]:
    """Refuse an app that starts a simulation itself, whose clients nobody would see here."""
    import flwr.simulation

    def refuse(*arguments: Any, **settings: Any) -> None:
        del arguments, settings
        raise ConfigError(
            f"{folder}: the app starts its own simulation (flwr.simulation), whose messages do not pass here; "
            "name its ServerApp and its ClientApp under [tool.flwr.app.components], or record it with fedsim.record_app"
        )

    with ExitStack() as stack:
        for name in ("run_simulation", "start_simulation"):
            if hasattr(flwr.simulation, name):
                stack.enter_context(patch.object(flwr.simulation, name, refuse))
        yield
