"""The ClientApp. It reads message records and its partition id, nothing else, so it is the same on every engine."""

from __future__ import annotations

import dataclasses
import logging
import platform
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from torch import nn

from clients.exposure import measured
from clients.memory import memory_of
from clients.mods import defended
from clients.taking_part import silent, taking_part
from fedsim.defense import agrees, keyed
from fedsim.engines.arrays import record_of, state_in
from fedsim.engines.cohort import COHORT
from fedsim.engines.node import play_cohort
from fedsim.engines.readiness import READY, TROUBLE, in_a_line, versions
from fedsim.errors import FedsimError, what_it_said
from fedsim.experiments.build import Experiment
from fedsim.process_defaults import unchanged_defaults
from fedsim.randomness import generator, one_thread
from fedsim.training.cohort import Share, acting_inside, local_updates, pays
from fedsim.training.hooks import Hooks
from fedsim.training.loop import evaluate, local_gradient, local_update
from fedsim.training.settings import LocalTraining
from fedsim.wire.payloads import Kind, Payload, State

log = logging.getLogger("fedsim." + __name__)
_CLIENT_CODE = "code of a client (its model, loss, a defense or a measure)"


def leave_defaults(message: Message, context: Context, call: ClientAppCallable) -> Message:
    """A mod: what a client changes of its process is put back, or clients after it would compute other things."""
    with unchanged_defaults(_CLIENT_CODE):
        return call(message, context)


app = ClientApp(mods=[leave_defaults])


@app.query(COHORT.split(".")[1])
def cohort(message: Message, context: Context) -> Message:
    """Play several clients for one message; see `fedsim.engines.node`."""
    with one_thread():  # the same bytes on every engine
        return play_cohort(app, message, context, _train_together)


@app.query(READY.split(".")[1])
def ready(message: Message, context: Context) -> Message:
    """Say which versions this node runs, and what keeps it from training; see `fedsim.engines.readiness`."""
    del context
    answer: dict[str, Any] = {"host": platform.node(), **versions()}
    try:
        experiment = _experiment(message)
        _placed(experiment)
        experiment.data.train(0)
    except FedsimError as error:
        answer[TROUBLE] = str(error)
    except (Exception, SystemExit) as error:  # whatever it is, the versions have to come along: they may be why
        answer[TROUBLE] = in_a_line(what_it_said(error))
    return Message(RecordDict({"node": ConfigRecord(answer)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's data and return (w_T, N), or a gradient and N, unless it straggles or chooses silence."""
    experiment = _experiment(message)
    client = int(context.node_config["partition-id"])
    if experiment.straggles(client, number := _round(message)):
        return silent(message, number)
    (model, device), before = _placed(experiment), _state(message)
    settings = LocalTraining.told(message.content["config"])
    (whole,) = experiment.shares([client], number, settings)
    measured(experiment, before, number, whole, settings, context.state)
    share = taking_part(experiment, before, number, client, whole, settings, context.state)
    if share is None:
        return silent(message, number)
    if settings.sends == "gradient":
        reply = _gradient(experiment, message, client, share, settings, context.state)
        return Message(RecordDict(reply), reply_to=message)
    after, loss = local_update(
        model,
        before,
        share.inputs.to(device),
        share.labels.to(device),
        settings,
        key=share.key,
        defenses=experiment.defenses_of(client),
        loss=experiment.dataset.task.loss,
        order=share.order,
        canaries=experiment.canaries_of(client),
    )
    reply = _reply(experiment, message, client, share, _on_cpu(after), loss, context.state)
    return Message(RecordDict(reply), reply_to=message)


def _gradient(
    experiment: Experiment, message: Message, client: int, share: Share, settings: LocalTraining, state: RecordDict
) -> dict[str, Any]:
    """The records that a FedSGD client sends: the gradient of its mini-batch of this round, defended, and its size."""
    assert share.order is not None
    (index,) = share.order
    model, device = _placed(experiment)
    gradient, beside, loss = local_gradient(
        model,
        _state(message),
        share.inputs[index].to(device),
        share.labels[index].to(device),
        settings,
        key=share.key,
        defenses=experiment.defenses_of(client),
        loss=experiment.dataset.task.loss,
    )
    batch = Share(inputs=share.inputs[index], labels=share.labels[index], key=share.key)
    return _reply(experiment, message, client, batch, _on_cpu(gradient, "gradient") | _on_cpu(beside), loss, state)


def _train_together(message: Message, states: Mapping[int, RecordDict]) -> Mapping[int, Mapping[str, Any]]:
    """The replies of those clients that can train at once; the others are left to `train`.

    Args:
        states: `Context.state` by client.
    """
    if message.metadata.message_type != MessageType.TRAIN:
        return {}
    experiment = _experiment(message)
    if experiment.together == 1:
        return {}
    number = _round(message)
    present = [client for client in states if not experiment.straggles(client, number)]
    if not present:
        return {}
    try:
        settings, before = LocalTraining.told(message.content["config"]), _state(message)
        if settings.sends == "gradient":
            return {}
        shares = experiment.shares(present, number, settings)
        if acting_inside(experiment.defenses):
            shares, present = _shortening(experiment, present, shares, settings)
        if not present or not pays(shares, settings):
            return {}
        with unchanged_defaults(_CLIENT_CODE):
            for client, share in zip(present, shares, strict=True):
                measured(experiment, before, number, share, settings, states[client])
            updates = local_updates(experiment.model, before, shares, settings, experiment.dataset.task.loss)
            return {
                client: _reply(experiment, message, client, share, _on_cpu(update[0]), update[1], states[client])
                for client, share, update in zip(present, shares, updates, strict=True)
                if update is not None
            }
    except (Exception, SystemExit) as error:  # `train` will find out whose fault it is, and fail that client alone
        log.debug("clients %s could not train at once: %r", list(states), error)
        return {}


def _shortening(
    experiment: Experiment, clients: Sequence[int], shares: Sequence[Share], settings: LocalTraining
) -> tuple[list[Share], list[int]]:
    """Of `clients` whose defense may shorten the gradients of its examples, the shares with it, and their ids."""
    found, ids = [], []
    for client, share in zip(clients, shares, strict=True):
        hooks = Hooks(
            experiment.defenses_of(client),
            experiment.model,
            settings,
            len(share.labels),
            share.key,
            experiment.canaries_of(client),
        )
        if hooks.factors is not None:
            found.append(dataclasses.replace(share, hooks=hooks))
            ids.append(client)
    return found, ids


@app.evaluate()
def test(message: Message, context: Context) -> Message:
    """Evaluate the broadcast model on what this client holds out."""
    experiment = _experiment(message)
    model, device = _placed(experiment)
    inputs, labels = experiment.data.test(int(context.node_config["partition-id"]))
    inputs = experiment.data.to_model(inputs).to(device)
    measured = evaluate(model, _state(message), inputs, labels.to(device), experiment.dataset.task.loss)
    metrics = MetricRecord({"num-examples": len(labels), **measured})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _experiment(message: Message) -> Experiment:
    simulation = message.content["simulation"]
    return _parse(str(simulation["experiment"]), str(simulation.get("run")))


@lru_cache(maxsize=4)
def _parse(experiment: str, run: str) -> Experiment:
    """Actors live long: data and partitions are made once for each run.

    They are made anew for another run of the same experiment: code or a file that it names may have changed.
    """
    del run
    return Experiment.from_json(experiment)


def _placed(experiment: Experiment) -> tuple[nn.Module, torch.device]:
    """The model, on the device where clients train."""
    device = experiment.device()
    # Built on the CPU, and there asking each of its layers takes as long as a step.
    return experiment.model if device.type == "cpu" else experiment.model.to(device), device


def _round(message: Message) -> int:
    return int(message.content["config"]["server-round"])  # type: ignore[arg-type]


def _state(message: Message) -> State:
    return state_in(message.content["arrays"])  # type: ignore[arg-type]


def _on_cpu(state: State, kind: Kind = "weights") -> Payload:
    """A dense payload whose tensors are in the memory that messages are sent from."""
    return Payload.dense({name: tensor.cpu() for name, tensor in state.items()}, kind)


def _reply(
    experiment: Experiment,
    message: Message,
    client: int,
    share: Share,
    payload: Payload,
    loss: float,
    state: RecordDict,
) -> dict[str, Any]:
    """The records that the client sends, its updates defended; what its defenses keep goes to `state`."""
    for defense, own in keyed(experiment.defenses_of(client)):
        rng = generator(*share.key, "defense", "on_update", *own)
        common = generator(experiment.seed, "common", _round(message), *own) if agrees(defense) else None
        with memory_of(defense, "-".join(map(str, own)), state) as memory:
            payload = defended(defense, _state(message), payload, rng, memory, common)
    metrics = MetricRecord({"num-examples": len(share.labels), "train_loss": loss})
    return {"arrays": record_of(payload.arrays()), "metrics": metrics}
