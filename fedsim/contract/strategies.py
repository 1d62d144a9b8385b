"""What a strategy keeps to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsim.contract.checks import Broken, NotChecked, Subject, expect
from fedsim.experiments.strategy_checks import sends
from fedsim.plugins import registry
from fedsim.randomness import numpy_generator, seeded

if TYPE_CHECKING:
    from flwr.app import Context, Message

_CLIENTS, _ROUNDS = 8, 2
_DEMANDED = 0.1
"""For each setting that has no default, such as a learning rate."""
Arrays = Mapping[str, NDArray[Any]]


def is_made(subject: Subject) -> None:
    """It loads, and is made as a Flower strategy from its settings."""
    try:
        from flwr.serverapp.strategy import Strategy
    except ImportError as error:
        raise NotChecked("Flower is not installed; pip install 'fedsim-curious[federation]'") from error
    strategy = _strategy(subject)
    expect(isinstance(strategy, Strategy), f"{type(strategy).__name__} is no flwr.serverapp.strategy.Strategy")


def says_what_clients_send(subject: Subject) -> None:
    """What its clients are to send is weights or a gradient."""
    sends(subject.cls, subject.name, None)


def aggregates_rounds(subject: Subject) -> None:
    """It aggregates rounds of a few clients into a model of the same tensors, finite, and not the one before."""
    start, models = _start(), _federated(subject)
    for number, after in enumerate(models, 1):
        got, expected = _shapes(after), _shapes(start)
        expect(got == expected, f"after round {number} the model has {got}, expected {expected}")
        finite = all(np.isfinite(array).all() for array in after.values())
        expect(finite, f"after round {number} the model is NaN or infinite")
    moved = any(not np.array_equal(models[-1][name], array) for name, array in start.items())
    expect(moved, "the model never changes, whatever clients send")


def aggregates_the_same_again(subject: Subject) -> None:
    """With the same seed of the global generators, which Flower draws from, it aggregates the same bytes."""
    for one, other in zip(_federated(subject), _federated(subject), strict=True):
        same = all(np.array_equal(array, other[name]) for name, array in one.items())
        expect(same, "the same replies are aggregated to another model; draw from the global generators alone")


CHECKS = (is_made, says_what_clients_send, aggregates_rounds, aggregates_the_same_again)


def _strategy(subject: Subject) -> Any:
    known = registry.parameters(subject.cls)
    demanded = [key for key, parameter in known.items() if parameter.default is parameter.empty]
    return subject.build(**{key: _DEMANDED for key in demanded if key not in subject.settings})


def _start() -> Arrays:
    rng = numpy_generator("contract", "start")
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in (("weight", (4, 3)), ("bias", (3,)))}


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _federated(subject: Subject) -> list[Arrays]:
    """The model after each round, in Flower's own order of calls."""
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp

    from fedsim.engines.garbage import little_garbage
    from fedsim.engines.serial import InProcessGrid

    app = ClientApp()
    app.train()(_replied)
    strategy, grid = _strategy(subject), InProcessGrid(app, _CLIENTS)
    arrays = ArrayRecord({name: Array(array) for name, array in _start().items()})
    models: list[Arrays] = []
    with little_garbage():
        for number in range(1, _ROUNDS + 1):
            with seeded("contract", "server", number):
                messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
                replies = sorted(grid.send_and_receive(messages), key=lambda reply: reply.metadata.src_node_id)
                if failed := [reply for reply in replies if reply.has_error()]:
                    raise Broken(f"round {number}: what it sends cannot be answered ({failed[0].error.reason})")
                aggregate, _ = strategy.aggregate_train(number, replies)
            if aggregate is None:
                raise Broken(f"round {number}: of {len(replies)} replies it makes no model")
            arrays = aggregate
            models.append({name: array.numpy() for name, array in arrays.items()})
    return models


def _replied(message: Message, context: Context) -> Message:
    """What a client answers: weights that it moved by something of its own, or a gradient."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    client = int(context.node_config["partition-id"])
    ((_, broadcast),) = message.content.array_records.items()
    configs = message.content.config_records.values()
    gradient = any(config.get("sends") == "gradient" for config in configs)
    rng = numpy_generator("contract", client)
    sent = {}
    for name, array in broadcast.items():
        before = array.numpy()
        change = (0.1 * rng.normal(size=before.shape)).astype(before.dtype)
        sent[f"gradient/{name}" if gradient else name] = Array(np.asarray(change if gradient else before + change))
    metrics = MetricRecord({"num-examples": 10 + client, "train_loss": 1.0 + client, "partition-id": client})
    return Message(RecordDict({"arrays": ArrayRecord(sent), "metrics": metrics}), reply_to=message)
