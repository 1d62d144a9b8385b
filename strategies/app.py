"""ServerApp of fedsim: the round loop of a federation under a curious server.

Flower's own `Strategy.start` cannot resume, sample reproducibly or attack between rounds, so this
loop replaces it; it calls the strategy through the same four methods.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.serverapp import Grid, ServerApp

from fedsim.base.errors import ConfigError, RunError, error_reason, join_first
from fedsim.base.progress import ROUNDS, report_progress, track
from fedsim.base.randomness import seed_globals
from fedsim.base.workers import background_worker
from fedsim.exposure.of_clients import COLUMNS as EXPOSURE
from fedsim.exposure.of_clients import STATE_KEY, failure_sentences, unpack_rows
from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.engines.client_state import ClientStateStore
from fedsim.federation.engines.cohort import CohortGrid, make_simulation
from fedsim.federation.engines.engine import JobContext, build_engine
from fedsim.federation.engines.gc_pause import exclude_existing_objects
from fedsim.federation.engines.lent_experiments import lend_experiment
from fedsim.federation.engines.readiness import check_nodes, wait_for_nodes
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import load_config
from fedsim.federation.federation_tables import FederationTable
from fedsim.federation.open_run import OpenRun
from fedsim.federation.resolve import resolve
from fedsim.federation.run_folder import METRICS_COLUMNS, read_exposures, read_ledger, read_metrics
from fedsim.federation.settings import training_fingerprint
from fedsim.federation.simulation import prepare_run
from fedsim.federation.states import TrainingStates
from fedsim.federation.strategy_checks import describe_lost_protection
from fedsim.federation.update_recipes import RecipeCheck, UpdateRecipes, describe_recipe
from fedsim.privacy.ledger import COLUMNS, Ledger, summarise_ledger
from fedsim.recording.control_variates import split_controls
from fedsim.recording.header import straggler_reason
from fedsim.recording.payloads import State
from fedsim.recording.recorder import Recorder, RecordingPlan
from fedsim.recording.wire_format import non_finite_names
from fedsim.training.loop import evaluate, evaluate_constant
from fedsim.training.model_state import running_statistics
from fedsim.training.settings import LocalTraining
from strategies.central_privacy import CentrallyPrivate
from strategies.checkpoint import Checkpoint, unsavable_attributes
from strategies.colluder_recorder import ColluderRecorder
from strategies.curious import Curious
from strategies.repeated_rounds import RepeatedRound
from strategies.reply_checks import check_devices, check_replies, name_failed_device
from strategies.secure_sum import SecureSum

log, rounds = logging.getLogger("fedsim." + __name__), logging.getLogger(ROUNDS)
_PROGRESS_STEPS = 32
"""Number of messages that a large round is split into, so that progress is shown."""
_AVERAGE_FROM_BYTES = 16 << 20
"""Size of a round's replies above which a strategy that averages gets means, see `ReplyCollector`."""
_MAX_LOGGED_CLIENTS = 5
app = ServerApp()

_SHARED, _PERSONAL = "shared", "personal"
"""Values of the column `model` of `metrics.csv`, where clients have models of their own.

A personal row of the server is the mean of the clients', weighted by their examples.
"""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment in the run_config over the nodes of `grid`.

    Under `fedsim run`, `experiment` is the checked experiment as JSON. Under `flwr run`, it is the
    path of a TOML file, and `out` the run folder.
    """
    settings = context.run_config
    text = str(settings["experiment"])
    folder = OpenRun(Path(str(settings["out"])))
    resume = bool(settings.get("resume", False))
    if not text.startswith("{"):
        experiment = Experiment(resolve(load_config(Path(text))))
        experiment.check()
        if experiment.config.recording.keep == "recipe":
            raise ConfigError(
                'recording.keep = "recipe" does not go with `flwr run`: its clients may be on machines that round '
                'otherwise than this one; use `fedsim run`, or set it to "updates"'
            )
        with folder.hold_lock():
            prepare_run(experiment.config, folder, resume=resume)
            _federate_without_exit(experiment, folder, grid, resume=resume, nodes=_num_nodes(experiment, settings))
    else:  # the process that started this one holds the lock of the folder
        # The text decides, and the data and network of this process serve where they are the same.
        source = context.experiment if isinstance(context, JobContext) else None
        experiment = Experiment.from_json(text, source)
        _federate_without_exit(experiment, folder, grid, resume=resume, nodes=_num_nodes(experiment, settings))


def _federate_without_exit(experiment: Experiment, folder: OpenRun, grid: Grid, *, resume: bool, nodes: int) -> None:
    """Call `federate`, and turn a `sys.exit` in it into an error.

    Otherwise Flower would end as if all rounds were done.
    """
    try:
        federate(experiment, folder, grid, resume=resume, nodes=nodes)
    except SystemExit as error:
        raise RunError(
            f"the strategy or the model ended the server ({error_reason(error)}); fix the cause and "
            "resume the run, which keeps finished rounds"
        ) from error


def _num_nodes(experiment: Experiment, settings: Mapping[str, Any]) -> int:
    federation = experiment.config.federation
    return int(settings.get("nodes", build_engine(federation).least_nodes(federation)))


def federate(experiment: Experiment, folder: OpenRun, grid: Grid, *, resume: bool, nodes: int) -> None:
    """Train for the experiment's rounds over at least `nodes` nodes, and record the messages.

    Raises:
        RunError: all clients of a round failed, or the run folder cannot be written. Rounds before
            stay recorded, and the run can be resumed.
    """
    config = experiment.config
    recording = config.recording
    plan = RecordingPlan(rounds=recording.rounds, clients=recording.clients, every=recording.every)
    client_state = ClientStateStore()
    recipe = partial(_describe_recipe, experiment, client_state) if recording.keep == "recipe" else None
    recorder = Recorder(folder.transcript, plan, resume, recording.fsync, folder.manifest, recipe)
    honest = CentrallyPrivate.wrap(experiment.new_strategy(), experiment)
    strategy = Curious(honest, recorder, average_from=_AVERAGE_FROM_BYTES)
    colluders = ColluderRecorder.from_experiment(experiment, folder, resume=resume)
    fresh, unsavable = unsavable_attributes(strategy.strategy), list[str]()
    folder.note_data(experiment.data.sha256)

    # Begin after the last checkpoint, with the rows of the rounds before.
    checkpoint = Checkpoint.load(folder.checkpoint, strategy.strategy) if resume else None
    if checkpoint:
        client_state.states = checkpoint.clients
    elif resume and folder.metrics.is_file():
        log.warning("%s: there is no checkpoint to go on from, so all rounds are made again", folder.path)
    last_round = checkpoint.round if checkpoint else 0
    arrays = checkpoint.arrays if checkpoint else make_record(experiment.initial_state())
    rows = list[Mapping[str, Any]]()
    exposure_rows = list[Mapping[str, Any]]()
    names = [table.name for table in config.defense]
    ledger = Ledger(lambda: experiment.setting, experiment.client_defenses, names, experiment.federation_privacy)
    if checkpoint:
        rows += [row for row in read_metrics(folder) if int(row["round"]) <= last_round]
        ledger.resume(read_ledger(folder), last_round, str(folder.ledger))
        exposure_rows += [row for row in read_exposures(folder) if int(row["round"]) <= last_round]
    save_state = _state_saver(experiment, folder)
    if not last_round:
        save_state(0, arrays, {})
    num_evaluated, num_test = config.federation.evaluate_examples, experiment.data.public_test_size
    if num_evaluated is not None and num_evaluated < num_test:
        log.info("the server evaluates on %d of %d test examples, the same in each round", num_evaluated, num_test)
    simulation = make_simulation(config)
    lend_experiment(experiment, simulation)
    client_grid = _client_grid(experiment, folder, grid, nodes, simulation, client_state)
    recipe_check = RecipeCheck(folder, UpdateRecipes(folder, config, str(simulation["run"]))) if recipe else None

    with exclude_existing_objects() as settle, _round_attack(experiment, folder) as attack:
        repeated_rounds = RepeatedRound.find_all(experiment, folder, last_round + 1) if resume else {}
        for number in range(last_round + 1, config.federation.rounds + 1):
            report_progress("rounds", number - 1, config.federation.rounds)
            has_memory = bool(client_state.states)
            repeated = repeated_rounds.get(number)
            with name_failed_device(number):
                arrays, round_rows = _run_round(
                    experiment, strategy, client_grid, number, arrays, ledger, folder, repeated, colluders
                )
            if recipe_check is not None:
                recipe_check.check_round(number, has_memory=has_memory)

            # Write the round; its checkpoint last, because a resumed run begins after it.
            rows += round_rows
            folder.write_table(folder.metrics, _metrics_columns(experiment, ledger), rows, settle=False)
            if config.measure:
                exposure_rows += _pop_exposures(client_grid.client_state, number)
                folder.write_table(folder.exposure, EXPOSURE, exposure_rows, settle=False)
            save_state(number, arrays, round_rows[0])
            checkpoint = Checkpoint.capture(number, arrays, strategy.strategy, fresh, client_grid.client_state.states)
            checkpoint.save(folder.checkpoint, recording.fsync, partial(folder.manifest.announce, folder.checkpoint))
            if checkpoint.unsavable != unsavable:
                unsavable = checkpoint.unsavable
                checkpoint.warn(strategy.strategy)
            if attack is not None:
                attack(number)
            if number == last_round + 1:
                settle()  # the first round's objects stay; to scan them takes longer than a round
        report_progress("rounds", config.federation.rounds, config.federation.rounds)
    _log_privacy(ledger, config.adversary.victims)
    folder.settle_manifest()


def _metrics_columns(experiment: Experiment, ledger: Ledger) -> Sequence[str]:
    """Return the columns of `metrics.csv`; where clients have models of their own, `model` says whose a row is."""
    model = ("model",) if experiment.algorithm.personal else ()
    return (*METRICS_COLUMNS, *model, *ledger.columns)


def _describe_recipe(experiment: Experiment, client_state: ClientStateStore) -> dict[str, int | str]:
    """Return what the updates of a round are computed again with; called before its first reply."""
    return describe_recipe(experiment, has_memory=bool(client_state.states))


def _log_privacy(ledger: Ledger, victims: object) -> None:
    for sentence in summarise_ledger(ledger.rows, victims if isinstance(victims, list) else []):
        log.info("privacy: %s", sentence)
    for sentence in ledger.find_exceeded_promises():
        log.warning("privacy: %s", sentence)


def _pop_exposures(memory: ClientStateStore, number: int) -> list[dict[str, Any]]:
    """Take the exposure that clients measured in round `number` out of their state.

    Only a simulation can, because it holds the state of its clients. Neither the strategy nor the
    recording sees it.
    """
    rows: list[dict[str, Any]] = []
    for client, arrays in memory.pop_record(STATE_KEY).items():
        for row in unpack_rows(arrays["rows"]):
            rows.append({"round": number, "state": f"round-{number - 1}", "client": client, **row})
    for sentence in failure_sentences(rows):
        log.warning("%s", sentence)
    return rows


def _state_saver(experiment: Experiment, folder: OpenRun) -> Callable[[int, ArrayRecord, Mapping[str, Any]], None]:
    """Return a function that saves the global model after the rounds that the experiment names."""
    states = TrainingStates(folder.states)

    def save_state(number: int, arrays: ArrayRecord, row: Mapping[str, Any]) -> None:
        if number in experiment.config.states.rounds:
            metrics = {key: row[key] for key in ("loss", "accuracy") if key in row}
            states.save_state(
                f"round-{number}", _model_state(arrays), training_fingerprint(experiment), {"round": number, **metrics}
            )

    return save_state


def _client_grid(
    experiment: Experiment,
    folder: OpenRun,
    grid: Grid,
    expected: int,
    simulation: ConfigRecord,
    memory: ClientStateStore,
) -> CohortGrid:
    """Return a grid with one node for each client, over physical nodes that are ready."""
    federation = experiment.config.federation
    # Those in this process are all there from the beginning.
    nodes = list(grid.get_node_ids()) if isinstance(grid, InProcessGrid) else wait_for_nodes(grid, expected)
    check_nodes(grid, nodes, simulation)
    steps = _PROGRESS_STEPS if build_engine(federation).splits_rounds else 0
    # Under secure aggregation, no update of a single client may be written to disk.
    parking = folder.path if experiment.config.secure_aggregation is None else None
    megabytes = federation.reply_memory
    return CohortGrid(
        grid,
        federation.clients,
        simulation,
        nodes,
        group_size=experiment.clients_at_once,
        spool_folder=parking,
        min_messages=steps,
        reply_memory=None if megabytes is None else megabytes * 10**6,
        client_state=memory,
        evaluates_with_state=experiment.algorithm.personal,
    )


def _run_round(
    experiment: Experiment,
    strategy: Curious,
    grid: CohortGrid,
    number: int,
    arrays: ArrayRecord,
    ledger: Ledger,
    folder: OpenRun,
    repeated: RepeatedRound | None,
    colluders: ColluderRecorder | None,
) -> tuple[ArrayRecord, list[dict[str, Any]]]:
    """Train and evaluate one round; return the global model after it, and rows of metrics."""
    start_time = time.monotonic()
    federation = experiment.config.federation
    with seed_globals(experiment.seed, "server", number):
        messages = list(strategy.configure_train(number, arrays, _training_config(experiment), grid))
        _check_messages(messages, experiment)
        if ledger:
            ledger.record_round(number, _training_of_clients(messages, experiment, number))
            folder.write_table(folder.ledger, COLUMNS, ledger.rows, settle=False)

        # Replies stream through: check each, log failures, sum groups under secure aggregation.
        failed: set[int] = set()
        protocol = SecureSum.from_experiment(experiment, colluders)
        answers = track(grid.send_and_receive(messages, timeout=federation.timeout), "clients", len(messages))
        valid_replies = check_replies(answers, messages, experiment.model, grid.client_state, protocol)
        replies: Iterable[Message] = valid_replies
        if messages or experiment.central_privacy is None:  # else all may be left out by independent draws
            replies = _note_failures(valid_replies, number, failed)
        if protocol is not None:
            replies = protocol.sum_groups(replies, messages, number)
        if repeated is not None:
            replies = repeated.check_replies(replies)
        aggregate = _check_aggregate(experiment, number, strategy.aggregate_train(number, replies), arrays)
        if aggregate is None:
            log.warning("round %d: the strategy aggregated nothing, too few clients returned; the model stays", number)
            aggregate = arrays
        # What was sampled was checked before the first round.
        elif failed and (sentence := describe_lost_protection(strategy.strategy, len(messages) - len(failed))):
            log.warning("round %d: %s", number, sentence)
        _check_variances(experiment, number, aggregate)
        rows: list[dict[str, Any]] = []
        if _is_evaluation_round(number, federation):
            rows = _evaluate(experiment, strategy, grid, number, aggregate)
    seconds = time.monotonic() - start_time
    server_row = next((row for row in rows if row["client"] == "server"), {"round": number, "client": "server"})
    server_row |= {"failed": len(failed), "seconds": round(seconds, 3), **ledger.largest_epsilons()}
    logged = [name for name in ("accuracy", "loss", *ledger.columns) if name in server_row]
    whose = "of the clients' own models: " if server_row.get("model") == _PERSONAL else ""
    rounds.info(
        "round %d/%d: %s%s%d of %d clients returned, %.1f s",
        number,
        federation.rounds,
        whose,
        "".join(f"{name} {server_row[name]:.3f}, " for name in logged),
        len(messages) - len(failed),
        len(messages),
        seconds,
    )
    return aggregate, rows or [server_row]


def _is_evaluation_round(number: int, federation: FederationTable) -> bool:
    every = federation.evaluate_every
    return every > 0 and (number % every == 0 or number == federation.rounds)


def _check_messages(messages: Iterable[Message], experiment: Experiment) -> None:
    """Raise RunError unless the strategy asks for what its class declares.

    Scores and the adversary's knowledge rely on the declaration.
    """
    for content in {id(message.content): message.content for message in messages}.values():
        for record in content.config_records.values():
            if (asked := record.get("sends", "weights")) != experiment.training.sends:
                name, sends = experiment.config.strategy.name, experiment.training.sends
                raise RunError(
                    f"strategy '{name}' asks clients for {asked!r}, but its class declares {sends!r}; declare what it "
                    "asks for, as in sends: ClassVar[str] = 'gradient'"
                )


def _training_of_clients(
    messages: Iterable[Message], experiment: Experiment, number: int
) -> dict[int, LocalTraining | None]:
    """Return for each client how it is asked to train in round `number`; None for a straggler."""
    training: dict[int, LocalTraining | None] = {}
    for message in messages:
        client = message.metadata.dst_node_id
        is_late = experiment.is_straggler(client, number)
        training[client] = None if is_late else LocalTraining.from_message(message.content["config"])
    return training


def _note_failures(replies: Iterable[Message], number: int, failed: set[int]) -> Iterator[Message]:
    """Yield `replies`, add clients that failed to `failed`, and log each reason once.

    After the first round, a round in which all clients are silent is lost, and the run goes on.

    Raises:
        RunError: the device of a client failed, all clients failed, or in the first round all were silent.
    """
    count = 0
    reasons: dict[str, list[int]] = {}
    for reply in check_devices(replies, number):
        count += 1
        client = reply.metadata.src_node_id
        log.debug("round %d, client %d: %s", number, client, "failed" if reply.has_error() else "returned")
        if _group_by_reason(reply, reasons):
            failed.add(client)
        yield reply
    _warn_of_failures(number, reasons)
    example = "none was sampled"
    for why, clients in reasons.items():
        example = f"client {clients[-1]}: {why}"
    all_silent = reasons.keys() == {straggler_reason(number)}
    if len(failed) == count and (number == 1 or not all_silent):
        remedy = (
            "lower straggler_probability, or loosen the limits by which clients choose silence, and begin again"
            if all_silent
            else "fix the cause and resume the run, which keeps finished rounds"
        )
        raise RunError(f"round {number}: all {count} clients failed ({example}); {remedy}")


def _group_by_reason(reply: Message, reasons: dict[str, list[int]]) -> bool:
    """Add the client of a failed reply to those that failed for this reason; return whether it failed."""
    if reply.has_error():
        reasons.setdefault(reply.error.reason or "no reason given", []).append(reply.metadata.src_node_id)
    return bool(reply.has_error())


def _warn_of_failures(number: int, clients_by_reason: Mapping[str, list[int]], what: str = "") -> None:
    """Log each reason for which clients failed once; `what` they did stands before it."""
    for why, clients in clients_by_reason.items():
        log.warning("round %d, %s: %s%s", number, _list_clients(clients), what, why)


def _list_clients(clients: list[int]) -> str:
    """Return `client 3`, `clients 3, 5`, or the first few of many."""
    return f"{'clients' if len(clients) > 1 else 'client'} {join_first(clients, _MAX_LOGGED_CLIENTS)}"


def _evaluate(
    experiment: Experiment, strategy: Curious, grid: CohortGrid, number: int, arrays: ArrayRecord
) -> list[dict[str, Any]]:
    """Return rows of metrics of the global model, on the public and on each client's test data.

    Where a part of the model stays with the clients, there is no global one, and the server's row
    is the mean of the clients'.
    """
    rows: list[dict[str, Any]] = []
    if not experiment.private_names:
        rows.append(_evaluate_shared_model(experiment, number, arrays))
    if experiment.data.clients_hold_out:
        messages = list(strategy.configure_evaluate(number, arrays, ConfigRecord(), grid))
        answers = grid.send_and_receive(messages, timeout=experiment.config.federation.timeout)
        replies = list(check_devices(track(answers, "evaluation by clients", len(messages)), number))
        # Under secure aggregation, nothing of a single client may reach the strategy.
        if experiment.config.secure_aggregation is None:
            strategy.aggregate_evaluate(number, replies)
        reasons: dict[str, list[int]] = {}
        for reply in replies:
            if _group_by_reason(reply, reasons):
                continue
            client = reply.metadata.src_node_id
            metrics = dict(reply.content.metric_records["metrics"])
            rows.append({"round": number, "client": client, "num_examples": metrics.pop("num-examples")} | metrics)
        _warn_of_failures(number, reasons, "evaluation failed, so no row of metrics.csv: ")
    if experiment.algorithm.personal:
        for row in rows:
            row["model"] = _SHARED if row["client"] == "server" else _PERSONAL
    return rows if not experiment.private_names else [_mean_row(number, rows), *rows]


def _evaluate_shared_model(experiment: Experiment, number: int, arrays: ArrayRecord) -> dict[str, Any]:
    """Return the row of the server, which evaluates the global model on the public test data."""
    inputs, labels = experiment.data.public_test(experiment.config.federation.evaluate_examples)
    server_metrics = evaluate(
        experiment.model,
        _model_state(arrays),
        experiment.data.to_model(inputs),
        labels,
        experiment.dataset.task.loss,
        progress_name="evaluation",
    )
    guess = evaluate_constant(labels, experiment.dataset.task.goal)
    return {"round": number, "client": "server", "num_examples": len(labels), "guess": guess} | server_metrics


def _mean_row(number: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means of the clients' metrics, weighted by the examples on which they evaluated."""
    total = sum(row["num_examples"] for row in rows)
    means: dict[str, Any] = {"round": number, "client": "server", "model": _PERSONAL, "num_examples": total}
    for name in ("loss", "accuracy"):
        if rows and all(name in row for row in rows):
            means[name] = sum(row[name] * row["num_examples"] for row in rows) / total
    return means


def _model_state(arrays: ArrayRecord) -> State:
    """Return the tensors of the model, without control variates that go with it."""
    return split_controls(read_state(arrays))[0]


def _check_aggregate(experiment: Experiment, number: int, returned: object, before: ArrayRecord) -> ArrayRecord | None:
    """Return the aggregate of what `aggregate_train` returned: None, or the tensors that it was given.

    A tensor that is left out would be that of a fresh model when the next one is loaded, and integers are what is left
    of weights that a strategy cut off at the point.

    Raises:
        RunError: it is something else, or tensors are missing, of another shape, no real numbers or not finite.
    """
    returns = f"round {number}: aggregate_train of strategy '{experiment.config.strategy.name}' returns"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise RunError(f"{returns} a {type(returned).__name__}, expected a pair of an ArrayRecord or None, and metrics")
    aggregate = returned[0]
    if aggregate is None:
        return None
    if not isinstance(aggregate, ArrayRecord):
        raise RunError(f"{returns} a {type(aggregate).__name__} in its pair, expected an ArrayRecord or None")
    if missing := [name for name in before if name not in aggregate]:
        raise RunError(f"{returns} no {join_first(missing, 3)}; return all tensors that clients are sent")
    for name, sent in before.items():
        if (shape := tuple(aggregate[name].shape)) != (expected := tuple(sent.shape)):
            raise RunError(f"{returns} {name} of shape {shape}, and the model has {expected}; return it in its shape")
        if not aggregate[name].dtype.startswith("float"):
            raise RunError(
                f"{returns} {name} as {aggregate[name].dtype}, and the model has real numbers; return floats"
            )
    # Models compute in float32, in which a large double is infinite.
    if broken := non_finite_names({name: tensor.float() for name, tensor in read_state(aggregate).items()}):
        raise RunError(
            f"{returns} NaN or infinite values in {join_first(broken, 3)}; lower the step size in [strategy], or find "
            "what it divides by"
        )
    return aggregate


def _check_variances(experiment: Experiment, number: int, arrays: ArrayRecord) -> None:
    """Raise RunError where a running variance is below 0, with which a BatchNorm layer gives NaN."""
    for name in sorted(running_statistics(experiment.model).intersection(arrays)):
        if name.rpartition(".")[2] == "running_var" and (arrays[name].numpy() < 0).any():
            raise RunError(
                f"round {number}: '{name}', a running variance of a BatchNorm layer, fell below 0, with which the "
                "model gives NaN; noise or a factor on what clients send, or a large step of the server, makes it so: "
                "set training.batch_norm_statistics to 'withheld', or change these"
            )


def _training_config(experiment: Experiment) -> ConfigRecord:
    """Return the training settings that the server sends to clients, and therefore knows."""
    # Strategies add these two, and the learning rate with which the server steps along gradients.
    settings = vars(experiment.training) | {"proximal_mu": None, "sends": None}
    if experiment.training.sends == "gradient":
        settings["learning_rate"] = None
    if settings["batches"] == "reshuffled":
        del settings["batches"]  # the clients' default
    if not settings["label_smoothing"]:
        del settings["label_smoothing"]  # the clients' default
    settings |= experiment.algorithm.message_facts()
    return ConfigRecord({key.replace("_", "-"): value for key, value in settings.items() if value is not None})


@contextmanager
def _round_attack(experiment: Experiment, folder: OpenRun) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that attacks a round in another process; None without in-round attacks."""
    if experiment.config.adversary.when != "in-round":
        yield None
        return
    from fedsim.audit.round_attacks import round_attacker  # takes seconds to import

    with background_worker(round_attacker, (folder.path,)) as attack:
        yield attack
