"""Updates that are recorded by recipe: computed again from seed, round and client, held to a hash.

A round by recipe holds w_t, and of each update its hash. Whoever has the experiment and the
clients' data lets the clients train again and gets the same update to the bit, or none: what this
machine cannot compute again is refused by name, never approximated.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.app.metadata import Metadata
from flwr.clientapp import ClientApp

from fedsim.base.errors import FedsimError, RunError, TranscriptError
from fedsim.base.machine import describe_processor
from fedsim.federation.config import Config
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.engines.client_state import ClientState, ClientStateStore
from fedsim.federation.engines.cohort import (
    COHORT_MESSAGE_TYPE,
    DEVICE_FAILED,
    ORDER_RECORD,
    make_simulation,
    unpack_answers,
)
from fedsim.federation.engines.lent_experiments import lend_experiment
from fedsim.federation.engines.readiness import host_versions
from fedsim.federation.experiment import Experiment
from fedsim.recording.header import Header, Reply, hash_state, straggler_reason
from fedsim.recording.payloads import Payload, State
from fedsim.recording.transcript import Transcript

if TYPE_CHECKING:
    from fedsim.federation.open_run import OpenRun

_SECONDS_TO_LIVE = 86400.0
"""Time to live of a message, which Flower asks for; nothing waits for it here."""


def describe_recipe(experiment: Experiment, *, has_memory: bool) -> dict[str, int | str]:
    """Return what updates are computed again with, as it stands in a round's header.

    Args:
        has_memory: whether a client begins the round with something that it keeps from earlier
            rounds, so that these have to be computed first.
    """
    return {
        "group_size": experiment.clients_at_once,
        "rounds": experiment.config.federation.rounds,
        "memory": int(has_memory),
        **describe_machine(),
    }


def describe_machine() -> dict[str, str]:
    """Return what rounding depends on, by name; clients always compute on one thread."""
    return {
        "processor": describe_processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "numpy": np.__version__,
        **host_versions(),
    }


class UpdateRecipes:
    """Computer of the updates that a run recorded by recipe, in the order that they are asked for.

    The clients of this process train again as they did in the run, with the group that they trained
    in. The result of a group is kept until another group is asked for, and the memory of each
    client after the last round that was computed of it.

    Args:
        config: its experiment; by default that in the folder.
        run_token: name under which clients keep the experiment between calls; with that of a
            running federation they use the data that are loaded.
    """

    def __init__(self, folder: OpenRun, config: Config | None = None, run_token: str = "") -> None:
        self._folder = folder
        self._given_config = config
        self._run_token = run_token or secrets.token_hex(8)
        self._arrays: dict[tuple[int, int], State] = {}  # of the last group, by round and client
        self._memories: dict[int, tuple[int, ClientState]] = {}  # by client, after which round
        self._asked: tuple[int, list[int]] = (0, [])  # of the last round that was asked for

    def compute_update(self, number: int, reply: Reply) -> State:
        """Return the arrays that a client sent in a round by recipe.

        Raises:
            TrustError: the run names code and is not trusted.
            TranscriptError: what is computed here is not the recorded update, or the run has no
                experiment.
            FedsimError: the data, or the code of plug-ins, are not there or not those of the run.
        """
        arrays = self._arrays.get((number, reply.client))
        if arrays is not None and hash_state(arrays) == reply.sha256:
            return arrays
        # Whoever reads an update, such as an attack, may have switched gradients off.
        with torch.inference_mode(False), torch.enable_grad():
            self._recall_memory(number, reply.client)
            return self._replay_reply(number, reply)

    def _recall_memory(self, number: int, client: int) -> None:
        """Compute what `client` kept until before round `number`, where clients keep something."""
        if not self._header(number).recipe.get("memory"):
            self._memories[client] = (number - 1, {})
            return
        if self._memories.get(client, (number, {}))[0] >= number:
            self._memories[client] = (0, {})
        first = self._memories[client][0] + 1
        for earlier in self._transcript.rounds:
            if not first <= earlier < number:
                continue
            header = self._header(earlier)
            if (reply := header.find_reply(client)) is not None:
                self._replay_reply(earlier, reply)
            elif header.failures.get(client) == straggler_reason(earlier):
                # A client that is silent by choice keeps what it learned; one that failed does not.
                self._train(earlier, self._find_group(earlier, client), client)
        self._memories[client] = (number - 1, self._memories[client][1])

    def _replay_reply(self, number: int, reply: Reply) -> State:
        """Return the arrays of a reply, from what its client kept until the round before."""
        client = reply.client
        group = self._find_group(number, client)
        # After a node failed, or took too long, its clients were asked one by one.
        attempts = [group] if len(group) == 1 else [group, [client]]
        memory = self._memories[client]
        for clients in attempts:
            self._memories[client] = memory
            arrays = self._train(number, clients, client)
            if isinstance(arrays, str):
                self._check_basis()
                raise TranscriptError(f"round {number}, client {client}: cannot be computed again ({arrays})")
            if hash_state(arrays) == reply.sha256:
                return arrays
        self._check_basis()
        raise TranscriptError(_explain_difference(number, client, self._header(number).recipe))

    def _train(self, number: int, clients: Sequence[int], client: int) -> State | str:
        """Let `clients` train as in round `number`; return the arrays of `client`, or why it sent none.

        The memory of `client` becomes the one that it has after this round.
        """
        before = self._read_broadcast(number)
        store = ClientStateStore()
        if self._memories[client][1]:
            store.states[client] = self._memories[client][1]
        answers = unpack_answers(self._client_app(self._make_message(number, clients, before, store), _make_context()))
        if isinstance(answers, str):
            return answers

        self._arrays = {}
        for member, records in answers.items():
            store.extract(member, records)
            if "arrays" in records:  # of others, to be asked for; with a memory it may not be what they sent
                payload = Payload.from_arrays(read_state(records["arrays"]), before)
                self._arrays[number, member] = payload.arrays()
        answer = answers[client]
        if "error" not in answer or store.has_pending(client):
            store.commit(client)
            self._memories[client] = (number, store.states.get(client, {}))
        if "error" in answer:
            reason = str(answer["error"]["reason"])
            if reason.startswith(DEVICE_FAILED):
                raise RunError(
                    f"round {number}, client {client}: {reason} while its update was computed again; fix the cause or "
                    "free its memory, and repeat the command, or resume the run"
                )
            return reason
        return self._arrays[number, client]

    def _make_message(self, number: int, clients: Sequence[int], before: State, store: ClientStateStore) -> Message:
        """Return the message to a node that plays `clients` in round `number`."""
        header = self._header(number)
        federation = self._config.federation.model_copy(update={"rounds": header.recipe["rounds"]})
        # What clients measure changes nothing that they send.
        simulation = make_simulation(self._config.model_copy(update={"federation": federation, "measure": []}))
        simulation["run"] = self._run_token
        lend_experiment(self._experiment, simulation)
        order = ConfigRecord(
            {
                "clients": list(clients),
                "together": int(header.recipe["group_size"]),
                "num-partitions": federation.clients,
                "message-type": MessageType.TRAIN,
                "seconds": float("inf"),
            }
        )
        facts: Any = dict(header.config)
        content = RecordDict(
            {
                "arrays": make_record(before),
                "config": ConfigRecord(facts),
                "simulation": simulation,
                ORDER_RECORD: order,
                **store.pack(clients),
            }
        )
        metadata = Metadata(
            run_id=1,
            message_id="",
            src_node_id=1,
            dst_node_id=2,
            reply_to_message_id="",
            group_id=str(number),
            created_at=time.time(),
            ttl=_SECONDS_TO_LIVE,
            message_type=COHORT_MESSAGE_TYPE,
        )
        return Message(content=content, metadata=metadata)  # type: ignore[call-overload, no-any-return]

    def _find_group(self, number: int, client: int) -> list[int]:
        """Return the clients that trained at once with `client`: messages are cut by client id."""
        header = self._header(number)
        if self._asked[0] != number:
            repliers = {reply.client for reply in header.replies}
            self._asked = (number, sorted(repliers | header.failures.keys()))
        asked = self._asked[1]
        size = int(header.recipe["group_size"])
        start = bisect_left(asked, client) // size * size
        return asked[start : start + size]

    def _read_broadcast(self, number: int) -> State:
        """Return w_t of a round.

        A round in which all were silent has none in its file, and left the model as the next one
        broadcasts it.
        """
        for later in self._transcript.rounds:
            replies = self._header(later).replies if later >= number else ()
            if replies:
                return self._transcript.broadcast(later, replies[0].client)
        raise TranscriptError(f"round {number}: all clients were silent, and nothing later says what they were sent")

    def _header(self, number: int) -> Header:
        self.read_recording(number)
        return self._transcript.header(number)

    def read_recording(self, number: int) -> Transcript | None:
        """Return the recording whose updates are computed here, or None where it lacks a round."""
        if number not in self._transcript.rounds:
            del self._transcript  # the recording has become longer
        return self._transcript if number in self._transcript.rounds else None

    @cached_property
    def _transcript(self) -> Transcript:
        return Transcript(self._folder.path, source=self.compute_update)

    @cached_property
    def _client_app(self) -> ClientApp:
        from fedsim.federation.simulation import load_client_app  # imports this module's folder

        app: ClientApp = load_client_app()
        return app

    @cached_property
    def _config(self) -> Config:
        config = self._given_config or self._folder.read_experiment(trust=self._folder.is_trusted)
        if config is None:
            raise TranscriptError(
                f"{self._folder.path}: its updates were kept by recipe, and there is no experiment to compute them "
                "again from; put experiment.toml and manifest.json of the run there"
            )
        return config

    @cached_property
    def _experiment(self) -> Experiment:
        return self._folder.build_experiment(self._config)

    def _check_basis(self) -> None:
        """Raise the error that names data or code that are not those of the run, if any are not."""
        self._folder.check_code(self._config)
        _ = self._experiment.data


def _explain_difference(number: int, client: int, recipe: Mapping[str, int | str]) -> str:
    """Return a sentence that says in what this machine differs from that of the run."""
    differences: list[str] = []
    for name, here in describe_machine().items():
        if recipe.get(name) != here:
            differences.append(f"{name} is '{here}', it was '{recipe.get(name)}'")
    reason = "; ".join(differences) or "though processor and versions are the same"
    return (
        f"round {number}, client {client}: computed again, its update is not the recorded one to the bit ({reason}); "
        "compute it where the run was made, or ask there for `fedsim materialise RUN`"
    )


class RecipeCheck:
    """Proof, in the run itself, that its recipes hold: one update is computed again.

    That is done for the first round, and for the first round in which clients have a memory.
    """

    def __init__(self, folder: OpenRun, recipes: UpdateRecipes) -> None:
        self._folder = folder
        self._recipes = recipes
        self._checked = set[bool]()

    def check_round(self, number: int, *, has_memory: bool) -> None:
        """Compute the first update of round `number` again, if it is one to check.

        Args:
            number: the round, which need not be recorded.
            has_memory: whether clients began it with a memory.
        """
        if has_memory in self._checked:
            return
        try:
            transcript = self._recipes.read_recording(number)
        except TranscriptError:  # nothing is recorded so far
            return
        if transcript is None:  # [recording] leaves this round out
            return
        header = transcript.header(number)
        if not header.replies:
            return
        self._checked.add(has_memory)
        try:
            transcript.recorded_update(number, header.replies[0].client)
        except RunError:  # the device failed, and not the recipe
            raise
        except FedsimError as error:
            raise RunError(
                f'recording.keep = "recipe" does not hold here: {error}; set it to "updates", and begin again'
            ) from error


def _make_context() -> Context:
    node_config: Any = {"partition-id": 0, "num-partitions": 1}
    return Context(run_id=1, node_id=2, node_config=node_config, state=RecordDict(), run_config={})
