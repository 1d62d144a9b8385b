"""The ClientApp. It reads message records and its partition id, nothing else, so it is the same on every engine."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable, Mod

from clients.mods import as_mod
from fedsim.engines.cohort import COHORT, play_cohort
from fedsim.errors import RunError
from fedsim.experiment import Experiment
from fedsim.messages import State
from fedsim.randomness import generator, numpy_generator, one_thread
from fedsim.training import LocalTraining, evaluate, local_update

app = ClientApp()


@app.query(COHORT.split(".")[1])
def cohort(message: Message, context: Context) -> Message:
    """Play several clients for one message; see `fedsim.engines.cohort`."""
    with one_thread():  # the same bytes on every engine
        return play_cohort(app, message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train on the client's data and return (w_T, N), unless the client straggles this round."""
    experiment = _experiment(message)
    client = int(context.node_config["partition-id"])
    config = message.content.config_records["config"]
    number = int(config["server-round"])  # type: ignore[arg-type]
    key = (experiment.seed, "train", number, client)
    if numpy_generator(*key, "straggler").random() < experiment.config.federation.straggler_probability:
        raise RunError(f"straggler: did not return in round {number}")
    defenses = experiment.defenses
    mods = [as_mod(defense, generator(*key, "update", place)) for place, defense in enumerate(defenses)]

    def work(message: Message, context: Context) -> Message:
        del context
        data = experiment.data
        inputs, labels = data.train(client)
        after, loss = local_update(
            experiment.model,
            _state(message),
            data.to_model(inputs),
            labels,
            _settings(config),
            key=key,
            defenses=defenses,
        )
        arrays = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in after.items()})
        metrics = MetricRecord({"num-examples": len(labels), "train_loss": loss})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    call: ClientAppCallable = work
    for mod in mods:
        call = partial(_through, mod, call)
    return call(message, context)


@app.evaluate()
def test(message: Message, context: Context) -> Message:
    """Evaluate the broadcast model on what this client holds out."""
    experiment = _experiment(message)
    inputs, labels = experiment.data.test(int(context.node_config["partition-id"]))
    loss, accuracy = evaluate(experiment.model, _state(message), experiment.data.to_model(inputs), labels)
    metrics = MetricRecord({"num-examples": len(labels), "loss": loss, "accuracy": accuracy})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _through(mod: Mod, call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    return mod(message, context, call_next)


def _experiment(message: Message) -> Experiment:
    return _parse(str(message.content.config_records["simulation"]["experiment"]))


@lru_cache(maxsize=4)
def _parse(experiment: str) -> Experiment:
    """Actors live long: data and partitions are made once for each experiment."""
    return Experiment.from_json(experiment)


def _state(message: Message) -> State:
    arrays = message.content.array_records["arrays"]
    return {name: torch.from_numpy(array.numpy()) for name, array in arrays.items()}


def _settings(config: ConfigRecord) -> LocalTraining:
    """The protocol facts that the server sent; FedProx's server adds `proximal-mu`."""
    sent = {key.replace("-", "_"): value for key, value in config.items()}
    known = {item.name for item in dataclasses.fields(LocalTraining)}
    return LocalTraining(**{key: value for key, value in sent.items() if key in known})  # type: ignore[arg-type]
