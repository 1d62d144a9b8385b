"""ClientApp of fedsim. It reads only messages and its partition id, so it runs on every engine."""

from __future__ import annotations

import dataclasses
import logging
import platform
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from clients.client_state import AlgorithmMemory, ClientMemories, measure_exposure
from clients.mods import defend_payload
from clients.participation import select_examples, silent_reply
from fedsim.base.errors import FedsimError, ends_training, error_reason, first_line, is_memory_error
from fedsim.base.process_defaults import protect_defaults
from fedsim.base.randomness import seed_globals, use_one_thread
from fedsim.federation.engines.arrays import fill_record, make_record, read_state
from fedsim.federation.engines.cohort import COHORT_MESSAGE_TYPE, ORDER_RECORD, error_reply
from fedsim.federation.engines.lent_experiments import find_experiment
from fedsim.federation.engines.node import failure_reason, play_cohort
from fedsim.federation.engines.readiness import READY, TROUBLE, host_versions, summarise_failure
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.defense import pair_with_keys
from fedsim.interfaces.local_context import ClientRound, copy_tensors
from fedsim.recording.control_variates import split_controls
from fedsim.recording.payloads import Kind, Payload, State
from fedsim.training.algorithm_client import TrainingClient, run_algorithm
from fedsim.training.cohort import LocalData, is_worthwhile, local_updates, training_defenses
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import evaluate, local_gradient
from fedsim.training.settings import LocalTraining

log = logging.getLogger("fedsim." + __name__)
_thread_cache = threading.local()
"""`parse_experiment`: each thread has experiments of its own, as it trains in their networks."""
_CLIENT_CODE = "code of a client (its model, loss, a defense or a measure)"


def restore_defaults(message: Message, context: Context, call: ClientAppCallable) -> Message:
    """Restore defaults of the process after a client, which others depend on (a mod)."""
    with protect_defaults(_CLIENT_CODE):
        return call(message, context)


app = ClientApp(mods=[restore_defaults])


@app.query(COHORT_MESSAGE_TYPE.split(".")[1])
def play_clients(message: Message, context: Context) -> Message:
    """Simulate several clients for one message; see `fedsim.federation.engines.node`."""
    trains_at_once = message.content[ORDER_RECORD]["together"] > 1  # type: ignore[operator]
    with use_one_thread():  # the same bytes on every engine
        return play_cohort(app, message, context, _train_cohort if trains_at_once else None)


@app.query(READY.split(".")[1])
def report_readiness(message: Message, context: Context) -> Message:
    """Report the versions of this node, and the error that keeps it from training, if any.

    See `fedsim.federation.engines.readiness`.
    """
    del context
    answer: dict[str, Any] = {"host": platform.node(), **host_versions()}
    try:
        experiment = _load_experiment(message)
        _model_on_device(experiment)
        experiment.data.train(0)
    except FedsimError as error:
        answer[TROUBLE] = str(error)
    except (Exception, SystemExit) as error:  # report versions in any case, as they may be the cause
        answer[TROUBLE] = summarise_failure(error_reason(error))
    return Message(RecordDict({"node": ConfigRecord(answer)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's data and return w_T or a gradient with N, unless the client is silent.

    A client is silent if it straggles, or if one of its defenses chooses so.
    """
    experiment = _load_experiment(message)
    client = int(context.node_config["partition-id"])
    if experiment.is_straggler(client, number := _round_number(message)):
        return silent_reply(message, number)
    before = _broadcast_state(message)
    settings = LocalTraining.from_message(message.content["config"])

    # Measure exposure on all of the client's data, then let defenses select examples.
    (full_share,) = experiment.local_data([client], number, settings)
    measure_exposure(experiment, before, number, full_share, settings, context.state)
    memories = ClientMemories(context.state)
    client_round = _client_round(experiment, before, number, full_share, memories)
    share = select_examples(experiment, client, full_share, settings, client_round, memories)
    if share is None:
        memories.store()
        return silent_reply(message, number)

    # Train, defend the update, and reply.
    if settings.sends == "gradient":
        reply = _gradient_reply(experiment, client, share, settings, client_round)
    else:
        algorithm_memory = AlgorithmMemory.read(experiment, client, memories)
        reply = _weights_reply(experiment, client, share, settings, client_round, algorithm_memory)
    memories.store()
    return Message(fill_record(RecordDict(), reply), reply_to=message)


def _client_round(
    experiment: Experiment, before: State, number: int, share: LocalData, memories: ClientMemories
) -> ClientRound:
    return ClientRound(
        key=share.key,
        number=number,
        broadcast=before,
        read_memory=memories.read,
        common_key=(experiment.seed, "common", number),
    )


def _weights_reply(
    experiment: Experiment,
    client: int,
    share: LocalData,
    settings: LocalTraining,
    client_round: ClientRound,
    algorithm_memory: AlgorithmMemory,
) -> dict[str, Any]:
    """Return the records of a client that trained by its algorithm: what it sends, defended, and N."""
    network, device = _model_on_device(experiment)
    shared_model, controls = split_controls(_lend_state(experiment, client_round.broadcast))
    training_client = TrainingClient(
        network=network,
        model=algorithm_memory.complete_model(shared_model),
        controls=controls,
        parts=experiment.model_parts,
        memory=algorithm_memory.memory,
        share=dataclasses.replace(share, inputs=share.inputs.to(device), labels=share.labels.to(device)),
        settings=settings,
        defenses=experiment.client_defenses(client),
        client_round=client_round,
        loss=experiment.client_loss,
        canaries=experiment.client_canaries(client),
    )
    sent, loss = run_algorithm(
        experiment.algorithm, training_client, experiment.private_names, algorithm_memory.private_parts
    )
    payload = _cpu_payload(_lend_state(experiment, sent))
    return _defended_reply(experiment, client, len(share.labels), payload, loss, client_round)


def _gradient_reply(
    experiment: Experiment, client: int, share: LocalData, settings: LocalTraining, client_round: ClientRound
) -> dict[str, Any]:
    """Return the records of a FedSGD client: the defended gradient of its mini-batch, and N."""
    assert share.order is not None
    (index,) = share.order
    model, device = _model_on_device(experiment)
    gradient, buffers, loss = local_gradient(
        model,
        client_round.broadcast,
        share.inputs[index].to(device),
        share.labels[index].to(device),
        settings,
        key=share.key,
        defenses=experiment.client_defenses(client),
        client_round=client_round,
        loss=experiment.client_loss,
    )
    payload = _cpu_payload(gradient, "gradient") | _cpu_payload(buffers)
    return _defended_reply(experiment, client, len(index), payload, loss, client_round)


def _train_cohort(message: Message, states: Mapping[int, RecordDict]) -> Mapping[int, Mapping[str, Any]]:
    """Train clients in one batched computation, and return the replies; leave others to `train`.

    Args:
        message: the message to all of them.
        states: client to its `Context.state`.
    """
    if message.metadata.message_type != MessageType.TRAIN:
        return {}
    experiment = _load_experiment(message)
    if experiment.clients_at_once == 1:
        return {}
    number = _round_number(message)
    clients = [client for client in states if not experiment.is_straggler(client, number)]
    if not clients:
        return {}
    try:
        # Keep the clients whose training can be batched, if batching is faster.
        settings, before = LocalTraining.from_message(message.content["config"]), _broadcast_state(message)
        if settings.sends == "gradient":
            return {}
        shares = experiment.local_data(clients, number, settings)
        memories = {client: ClientMemories(states[client]) for client in clients}
        rounds: dict[int, ClientRound] = {}
        for client, share in zip(clients, shares, strict=True):
            rounds[client] = _client_round(experiment, before, number, share, memories[client])
        if training_defenses(experiment.defenses):
            shares, clients = _select_clipping_clients(experiment, clients, shares, settings, rounds)
        if not clients or not is_worthwhile(shares, settings):
            return {}

        # Measure exposure, train, defend the updates.
        with protect_defaults(_CLIENT_CODE):
            for client, share in zip(clients, shares, strict=True):
                measure_exposure(experiment, before, number, share, settings, states[client])
            model, _ = _model_on_device(experiment)
            updates = local_updates(model, before, shares, settings, experiment.client_loss)
            replies: dict[int, Mapping[str, Any]] = {}
            for client, share, update in zip(clients, shares, updates, strict=True):
                if update is not None:
                    after, loss = update
                    payload = _cpu_payload(after)
                    replies[client] = _defended_reply(
                        experiment, client, len(share.labels), payload, loss, rounds[client]
                    )
                    memories[client].store()
            return replies
    # `train` repeats all of it, so that only the client at fault fails; a device that was lost is lost for all.
    except (Exception, SystemExit) as error:
        if is_memory_error(error):
            log.warning(
                "round %d, %d clients: the memory of their device does not last for them at once, so they train one "
                "by one, which rounds otherwise (%s)",
                number,
                len(states),
                first_line(error),
            )
        elif ends_training(error):
            return {client: error_reply(failure_reason(error)) for client in clients}
        else:
            log.debug("clients %s could not train at once: %r", list(states), error)
        return {}


def _select_clipping_clients(
    experiment: Experiment,
    clients: Sequence[int],
    shares: Sequence[LocalData],
    settings: LocalTraining,
    rounds: Mapping[int, ClientRound],
) -> tuple[list[LocalData], list[int]]:
    """Return the shares and ids of clients whose defense only clips gradients of examples."""
    clipping_shares, clipping_clients = [], []
    for client, share in zip(clients, shares, strict=True):
        hooks = TrainingHooks(
            experiment.client_defenses(client),
            experiment.model,
            settings,
            len(share.labels),
            rounds[client],
            experiment.client_canaries(client),
        )
        if hooks.clipping_factors is not None:
            clipping_shares.append(dataclasses.replace(share, hooks=hooks))
            clipping_clients.append(client)
    return clipping_shares, clipping_clients


@app.evaluate()
def evaluate_client(message: Message, context: Context) -> Message:
    """Evaluate on the client's test data: the broadcast model, or that which the client uses itself."""
    experiment = _load_experiment(message)
    model, device = _model_on_device(experiment)
    client = int(context.node_config["partition-id"])
    inputs, labels = experiment.data.test(client)
    inputs = experiment.data.to_model(inputs).to(device)
    shared_model, _ = split_controls(_lend_state(experiment, _broadcast_state(message)))
    algorithm_memory = AlgorithmMemory.read(experiment, client, ClientMemories(context.state))
    state = experiment.algorithm.personalise_model(
        algorithm_memory.complete_model(shared_model), algorithm_memory.memory
    )
    # Some networks draw in evaluation, too, as by a dropout that is always on.
    with seed_globals(experiment.seed, "evaluation", client):
        metrics = evaluate(model, state, inputs, labels.to(device), experiment.dataset.task.loss)
    record = MetricRecord({"num-examples": len(labels), **metrics})
    return Message(RecordDict({"metrics": record}), reply_to=message)


def _load_experiment(message: Message) -> Experiment:
    simulation = message.content["simulation"]
    if not hasattr(_thread_cache, "parse_experiment"):
        _thread_cache.parse_experiment = lru_cache(maxsize=4)(_parse_experiment)
    experiment: Experiment = _thread_cache.parse_experiment(str(simulation["experiment"]), str(simulation.get("run")))
    return experiment


def _parse_experiment(experiment: str, run: str) -> Experiment:
    """Return the experiment, to be cached by run, because data and partitions are costly to make.

    Another run of the same experiment is parsed anew, because code or a file that it names may have
    changed.
    """
    return Experiment.from_json(experiment, find_experiment(run))


def _model_on_device(experiment: Experiment) -> tuple[nn.Module, torch.device]:
    """Return the model on the device where clients train, and the device."""
    device = experiment.device()
    # The model is built on the CPU; moving it there again would take as long as a local step.
    return experiment.model if device.type == "cpu" else experiment.model.to(device), device


def _round_number(message: Message) -> int:
    return int(message.content["config"]["server-round"])  # type: ignore[arg-type]


def _broadcast_state(message: Message) -> State:
    return read_state(message.content["arrays"])  # type: ignore[arg-type]


def _lend_state(experiment: Experiment, state: State) -> State:
    """Return what an algorithm is given, or gives: a copy where it may write into it, also for a later client."""
    return state if experiment.trains_plainly else copy_tensors(state)


def _cpu_payload(state: State, kind: Kind = "weights") -> Payload:
    """Return a dense payload whose tensors are in CPU memory, from which messages are sent."""
    return Payload.from_dense({name: tensor.cpu() for name, tensor in state.items()}, kind)


def _defended_reply(
    experiment: Experiment, client: int, num_examples: int, payload: Payload, loss: float, client_round: ClientRound
) -> dict[str, Any]:
    """Return the records that the client sends, after its defenses acted on the payload."""
    for defense, defense_key in pair_with_keys(experiment.client_defenses(client)):
        context = client_round.make_context("on_update", defense_key, defense.draws_in_common)
        with client_round.seed_globals(defense, "on_update", *defense_key):
            payload = defend_payload(defense, client_round.broadcast, payload, context)
    metrics = fill_record(MetricRecord(), {"num-examples": num_examples, "train_loss": loss})
    return {"arrays": make_record(payload.arrays()), "metrics": metrics}
