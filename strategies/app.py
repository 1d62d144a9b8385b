"""The ServerApp: the round loop of a federation under a curious server.

Flower's own `Strategy.start` cannot resume, sample reproducibly or attack between rounds, so the
loop is here; it calls the strategy through the same four methods.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fedsim.auditing.workers import beside
from fedsim.engines.arrays import Held, record_of, state_in
from fedsim.engines.cohort import CohortGrid, silence
from fedsim.engines.garbage import little_garbage
from fedsim.engines.memory import ClientMemory
from fedsim.engines.readiness import check_nodes, wait_for_nodes
from fedsim.errors import PayloadError, RunError, one_line, some_of, what_it_said
from fedsim.experiments.build import Experiment, resolve
from fedsim.experiments.config import FederationTable
from fedsim.experiments.reading import load_config
from fedsim.experiments.run_folder import RunFolder, exposures, measurements, spendings
from fedsim.experiments.settings import made_with
from fedsim.experiments.simulation import begin
from fedsim.experiments.states import States
from fedsim.exposure.of_clients import COLUMNS as EXPOSURE
from fedsim.exposure.of_clients import KEPT, failures, unpacked
from fedsim.privacy.ledger import COLUMNS, Ledger, sentences
from fedsim.progress import ROUNDS, tell, tracked
from fedsim.randomness import seeded
from fedsim.recording.recorder import Plan, Recorder
from fedsim.training.loop import evaluate
from fedsim.training.settings import LocalTraining
from fedsim.wire.messages import misfit
from fedsim.wire.payloads import Payload
from strategies.checkpoint import Checkpoint, opaque
from strategies.curious import Curious
from strategies.exchange import miscounted
from strategies.secure_sum import SecureSum

log, rounds = logging.getLogger("fedsim." + __name__), logging.getLogger(ROUNDS)
_STEPS = 32
"""Messages that the clients of a large round are cut into, so that progress can be shown."""
_WRONG = 2
_NAMED = 5
"""Most clients named in one line of the log."""
app = ServerApp()

METRICS = ("round", "client", "accuracy", "loss", "num_examples", "failed", "seconds")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run_config names, over whatever nodes `grid` has.

    `fedsim run` hands over the checked experiment as JSON; with `flwr run`, `experiment` is the
    path of a TOML file and `out` the run folder.
    """
    settings = context.run_config
    text = str(settings["experiment"])
    folder = RunFolder(Path(str(settings["out"])))
    resume = bool(settings.get("resume", False))
    if not text.startswith("{"):
        experiment = Experiment(resolve(load_config(Path(text))))
        experiment.check()
        with folder.held():
            begin(experiment.config, folder, resume=resume)
            _federate(experiment, folder, grid, resume=resume, nodes=_nodes(experiment, settings))
    else:  # the process that started this one holds the folder
        experiment = Experiment.from_json(text)
        _federate(experiment, folder, grid, resume=resume, nodes=_nodes(experiment, settings))


def _federate(experiment: Experiment, folder: RunFolder, grid: Grid, *, resume: bool, nodes: int) -> None:
    """`federate`, but a `sys.exit` within is an error: Flower would end as if all rounds were done."""
    try:
        federate(experiment, folder, grid, resume=resume, nodes=nodes)
    except SystemExit as error:
        raise RunError(
            f"the strategy or the model ended the server ({what_it_said(error)}); the rounds before are kept, "
            "mend the cause and resume the run"
        ) from error


def _nodes(experiment: Experiment, settings: Mapping[str, Any]) -> int:
    federation = experiment.config.federation
    return int(settings.get("nodes", federation.supernodes if federation.engine == "flower" else 1))


def federate(experiment: Experiment, folder: RunFolder, grid: Grid, *, resume: bool, nodes: int) -> None:
    """Train for the experiment's rounds and record what the server sees, over `nodes` nodes or more.

    Raises:
        RunError: all clients of a round failed, or the run folder cannot be written. Rounds before
            stay recorded, and the run can be resumed.
    """
    config = experiment.config
    recording = config.recording
    plan = Plan(rounds=recording.rounds, clients=recording.clients, every=recording.every)
    strategy = Curious(experiment.new_strategy(), Recorder(folder.transcript, plan, resume, recording.fsync))
    fresh, lost = opaque(strategy.strategy), list[str]()
    folder.note_data(experiment.data.sha256)
    start = Checkpoint.load(folder.checkpoint, strategy.strategy) if resume else None
    done = start.round if start else 0
    arrays = start.arrays if start else record_of(experiment.initial_state())
    rows = [row for row in measurements(folder) if int(row["round"]) <= done] if start else []
    ledger = Ledger(lambda: experiment.setting, experiment.defenses_of, [table.name for table in config.defense])
    if start:
        ledger.resume(spendings(folder), done, str(folder.ledger))
    exposed: list[Mapping[str, Any]] = [row for row in exposures(folder) if int(row["round"]) <= done] if start else []
    keep = _keeper(experiment, folder)
    if not done:
        keep(0, arrays, {})
    most, there = config.federation.evaluate_examples, experiment.data.public_test_size
    if most is not None and most < there:
        log.info("the server evaluates on %d of %d test examples, the same in each round", most, there)
    logical = _logical(experiment, folder, grid, nodes, ClientMemory(start.clients if start else {}))
    with little_garbage() as settle, _attacker(experiment, folder) as attack:
        for number in range(done + 1, config.federation.rounds + 1):
            tell("rounds", number - 1, config.federation.rounds)
            arrays, measured = _round(experiment, strategy, logical, number, arrays, ledger, folder)
            rows += measured
            folder.write_table(folder.metrics, (*METRICS, *ledger.columns), rows)
            if config.measure:
                exposed += _exposed(logical.memory, number)
                folder.write_table(folder.exposure, EXPOSURE, exposed)
            keep(number, arrays, measured[0])
            reached = Checkpoint.of(number, arrays, strategy.strategy, fresh, logical.memory.kept)
            reached.save(folder.checkpoint, recording.fsync, partial(folder.announce, folder.checkpoint))
            if reached.lost != lost:
                lost = reached.lost
                reached.warn(strategy.strategy)
            if attack is not None:
                attack(number)
            if number == done + 1:
                settle()  # what the first round made for good; looking through it takes longer than a small round
        tell("rounds", config.federation.rounds, config.federation.rounds)
    attacked = config.adversary.victims if isinstance(config.adversary.victims, list) else []
    for sentence in sentences(ledger.rows, attacked):
        log.info("privacy: %s", sentence)
    for sentence in ledger.exceeded():
        log.warning("privacy: %s", sentence)
    folder.settle()


def _exposed(memory: ClientMemory, number: int) -> list[dict[str, Any]]:
    """What clients that came to an end in round `number` keep of how exposed they were, which is taken from them.

    Only a simulation can: it holds the memory of its clients, and neither the strategy nor the recording sees it.
    """
    rows = [
        {"round": number, "state": f"round-{number - 1}", "client": client, **row}
        for client, kept in memory.taken(KEPT).items()
        for row in unpacked(kept["rows"])
    ]
    for sentence in failures(rows):
        log.warning("%s", sentence)
    return rows


def _keeper(experiment: Experiment, folder: RunFolder) -> Callable[[int, ArrayRecord, Mapping[str, Any]], None]:
    """A function that keeps the global model after a round, if the experiment wants it kept."""
    states = States(folder.states)

    def keep(number: int, arrays: ArrayRecord, row: Mapping[str, Any]) -> None:
        if number in experiment.config.states.rounds:
            measured = {key: row[key] for key in ("loss", "accuracy") if key in row}
            states.keep(f"round-{number}", state_in(arrays), made_with(experiment), {"round": number, **measured})

    return keep


def _logical(experiment: Experiment, folder: RunFolder, grid: Grid, expected: int, memory: ClientMemory) -> CohortGrid:
    """A node for each client, over nodes that are ready to work."""
    clients, simulation = experiment.config.federation.clients, _simulation(experiment)
    nodes = wait_for_nodes(grid, expected)
    check_nodes(grid, nodes, simulation)
    watched = _STEPS if experiment.config.federation.engine != "flower" else 0  # that starts a process for each message
    together = experiment.together
    parking = folder.path if experiment.config.secure_aggregation is None else None  # no update of one client on disk
    room = experiment.config.federation.reply_memory
    return CohortGrid(
        grid,
        clients,
        simulation,
        nodes,
        together=together,
        parking=parking,
        steps=watched,
        room=None if room is None else room * 10**6,
        memory=memory,
    )


def _round(
    experiment: Experiment,
    strategy: Curious,
    grid: CohortGrid,
    number: int,
    arrays: ArrayRecord,
    ledger: Ledger,
    folder: RunFolder,
) -> tuple[ArrayRecord, list[dict[str, Any]]]:
    started = time.monotonic()
    federation = experiment.config.federation
    with seeded(experiment.seed, "server", number):
        messages = list(strategy.configure_train(number, arrays, _protocol(experiment), grid))
        _check_asked(messages, experiment)
        if ledger:
            ledger.note(number, _asked(messages, experiment, number))
            folder.write_table(folder.ledger, COLUMNS, ledger.rows)
        failed: set[int] = set()
        answers = grid.send_and_receive(messages, timeout=federation.timeout)
        protocol = SecureSum.of(experiment)
        checked = _checked(
            tracked(answers, "clients", len(messages)), messages, experiment.model, grid.memory, protocol
        )
        replies: Iterable[Message] = _watched(checked, number, failed)
        if protocol is not None:
            replies = protocol.sums(replies, messages, number)
        aggregate, _ = strategy.aggregate_train(number, replies)
        if aggregate is None:
            log.warning("round %d: the strategy aggregated nothing, too few clients returned; the model stays", number)
            aggregate = arrays
        due = _is_evaluated(number, federation)
        measured = _evaluate(experiment, strategy, grid, number, aggregate) if due else []
    seconds = time.monotonic() - started
    server = next((row for row in measured if row["client"] == "server"), {"round": number, "client": "server"})
    server |= {"failed": len(failed), "seconds": round(seconds, 3), **ledger.measured()}
    named = ("accuracy", "loss", *ledger.columns)
    text = "".join(f"{name} {server[name]:.3f}, " for name in named if name in server)
    rounds.info(
        "round %d/%d: %s%d of %d clients returned, %.1f s",
        number,
        federation.rounds,
        text,
        len(messages) - len(failed),
        len(messages),
        seconds,
    )
    return aggregate, measured or [server]


def _is_evaluated(number: int, federation: FederationTable) -> bool:
    """Every so many rounds, and after the last, whose model is the result."""
    every = federation.evaluate_every
    return every > 0 and (number % every == 0 or number == federation.rounds)


def _check_asked(messages: Iterable[Message], experiment: Experiment) -> None:
    """Whether the strategy asks for what the experiment says that clients send, which scores and knowledge go by."""
    for message in messages:
        for record in message.content.config_records.values():
            if (asked := record.get("sends", "weights")) != experiment.training.sends:
                name, sends = experiment.config.strategy.name, experiment.training.sends
                raise RunError(
                    f"strategy '{name}' asks clients for {asked!r}, but its class declares {sends!r}; declare what it "
                    "asks for, as in sends: ClassVar[str] = 'gradient'"
                )


def _asked(messages: Iterable[Message], experiment: Experiment, number: int) -> dict[int, LocalTraining | None]:
    """By client, how it is asked to train in round `number`; None for one that straggles."""
    asked: dict[int, LocalTraining | None] = {}
    for message in messages:
        client = message.metadata.dst_node_id
        late = experiment.straggles(client, number)
        asked[client] = None if late else LocalTraining.told(message.content["config"])
    return asked


def _checked(
    replies: Iterable[Message],
    messages: Iterable[Message],
    model: nn.Module,
    memory: ClientMemory,
    protocol: SecureSum | None = None,
) -> Iterator[Message]:
    """Pass `replies` on; one that is no answer to what was sent becomes an error reply of its client.

    So does one that the client would not have sent under `protocol`. A client whose reply is accepted keeps the memory
    that came with it, and so does one that chose to send nothing; all others keep what they had.
    """
    asked = {message.metadata.dst_node_id: message for message in messages}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for reply in replies:
        message = asked[reply.metadata.src_node_id]
        wrong = None if reply.has_error() else _what_is_wrong(reply.content, message.content, parameters)
        if wrong is None and protocol is not None and not reply.has_error():
            wrong = protocol.refusal(reply.content, message.content)
        client = reply.metadata.src_node_id
        if wrong is None and (not reply.has_error() or memory.came_from(client)):
            memory.accept(client)
        yield reply if wrong is None else Message(Error(code=_WRONG, reason=one_line(wrong)), reply_to=message)


def _what_is_wrong(reply: RecordDict, asked: RecordDict, parameters: set[str]) -> str | None:
    """Why `reply` is no answer to what was `asked` of the client, or None."""
    if wrong := miscounted(reply):
        return wrong
    (metrics,), (arrays,) = reply.metric_records.values(), reply.array_records.values()
    count = metrics.get("num-examples")
    if not isinstance(count, int | float) or not 0 < count < math.inf:
        return f"it reported {count} examples, expected a number above 0"
    if strange := [name for name, array in arrays.items() if not isinstance(array, Held)]:
        return f"it sent '{strange[0]}' as {arrays[strange[0]].stype}, expected a NumPy array"
    (sent,) = asked.array_records.values()
    before = state_in(sent)
    try:
        got = Payload.from_arrays(state_in(arrays), before).decoded(before)
    except PayloadError as error:
        return str(error)
    gradient = any(record.get("sends") == "gradient" for record in asked.config_records.values())
    expected = {
        f"gradient/{name}" if gradient and name in parameters else name: tensor for name, tensor in before.items()
    }
    if missing := [name for name in expected if name not in got]:
        return f"it sent no '{missing[0]}', expected {len(expected)} tensors"
    if extra := [name for name in got if name not in expected]:
        return f"it sent '{extra[0]}', which was not asked for"
    return misfit(expected, got)


def _watched(replies: Iterable[Message], number: int, failed: set[int]) -> Iterator[Message]:
    """Pass `replies` on and note who failed; a line for each reason, an error if that were all.

    After the first round, one in which all are silent and nobody failed is lost, and the run goes on.
    """
    count = 0
    reasons: dict[str, list[int]] = {}
    for reply in replies:
        count += 1
        client = reply.metadata.src_node_id
        log.debug("round %d, client %d: %s", number, client, "failed" if reply.has_error() else "returned")
        if reply.has_error():
            failed.add(client)
            reasons.setdefault(reply.error.reason or "no reason given", []).append(client)
        yield reply
    example = "none was sampled"
    for why, clients in reasons.items():
        log.warning("round %d, %s: %s", number, _clients(clients), why)
        example = f"client {clients[-1]}: {why}"
    silent = reasons.keys() == {silence(number)}
    if len(failed) == count and (number == 1 or not silent):
        remedy = (
            "lower straggler_probability, or loosen the limits by which clients choose silence, and begin again"
            if silent
            else "the rounds before it are kept, mend the cause and resume the run"
        )
        raise RunError(f"round {number}: all {count} clients failed ({example}); {remedy}")


def _clients(numbers: list[int]) -> str:
    """`client 3`, `clients 3, 5`, or the first few of many."""
    return f"client{'s' if len(numbers) > 1 else ''} {some_of(numbers, _NAMED)}"


def _evaluate(
    experiment: Experiment, strategy: Curious, grid: CohortGrid, number: int, arrays: ArrayRecord
) -> list[dict[str, Any]]:
    """The global model on the public test set, and on what each client holds out."""
    inputs, labels = experiment.data.public_test(experiment.config.federation.evaluate_examples)
    loss = experiment.dataset.task.loss
    measured = evaluate(
        experiment.model, state_in(arrays), experiment.data.to_model(inputs), labels, loss, called="evaluation"
    )
    rows: list[dict[str, Any]] = [{"round": number, "client": "server", "num_examples": len(labels)} | measured]
    if experiment.data.clients_test:
        messages = strategy.configure_evaluate(number, arrays, ConfigRecord(), grid)
        messages = list(messages)
        answers = grid.send_and_receive(messages, timeout=experiment.config.federation.timeout)
        replies = list(tracked(answers, "evaluation by clients", len(messages)))
        if experiment.config.secure_aggregation is None:  # else nothing of a single client reaches the strategy
            strategy.aggregate_evaluate(number, replies)
        for reply in replies:
            if reply.has_content():
                metrics = dict(reply.content.metric_records["metrics"])
                where = {"round": number, "client": reply.metadata.src_node_id}
                rows.append(where | {"num_examples": metrics.pop("num-examples")} | metrics)
    return rows


def _protocol(experiment: Experiment) -> ConfigRecord:
    """What the server tells clients about training, and so what a curious server knows of it."""
    settings = vars(experiment.training) | {"proximal_mu": None, "sends": None}  # strategies add those
    if experiment.training.sends == "gradient":
        settings["learning_rate"] = None  # the server steps, and says how far if it likes
    if settings["batches"] == "reshuffled":
        del settings["batches"]  # clients reshuffle unless they are told otherwise
    if not settings["label_smoothing"]:
        del settings["label_smoothing"]  # likewise
    return ConfigRecord({key.replace("_", "-"): value for key, value in settings.items() if value is not None})


def _simulation(experiment: Experiment) -> ConfigRecord:
    """What simulated clients need and no real server would know; `CohortGrid` keeps it from the strategy."""
    hidden: Any = dict.fromkeys(("adversary", "attack", "truth", "recording", "strategy", "secure_aggregation"), True)
    hidden["training"] = {"sends"}  # the strategy's message says so
    text = experiment.config.model_dump_json(exclude=hidden)
    return ConfigRecord({"experiment": text, "run": secrets.token_hex(8)})


@contextmanager
def _attacker(experiment: Experiment, folder: RunFolder) -> Iterator[Callable[[int], None] | None]:
    """A function to call after each round, which attacks it at once in a process of its own, if asked for."""
    if experiment.config.adversary.when != "in-round":
        yield None
        return
    from fedsim.auditing.in_round import round_attacker  # with all that scoring needs, which takes seconds to import

    with beside(round_attacker, (folder.path,)) as attack:
        yield attack
