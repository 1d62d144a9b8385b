"""Checks of strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.base.randomness import numpy_generator, seed_globals
from fedsim.contract.checks import CheckedPlugin, ContractViolation, NotChecked, expect
from fedsim.federation.strategy_checks import declared_message
from fedsim.plugins import registry
from fedsim.recording.control_variates import join_controls
from fedsim.recording.payloads import State

if TYPE_CHECKING:
    from flwr.app import Context, Message

_CLIENTS, _ROUNDS = 8, 2
_REQUIRED_VALUE = 0.1
"""Value of each setting that has no default, such as a learning rate."""
Arrays = Mapping[str, NDArray[Any]]


def is_made(subject: CheckedPlugin) -> None:
    """It loads, and its settings make a Flower strategy."""
    try:
        from flwr.serverapp.strategy import Strategy
    except ImportError as error:
        raise NotChecked("Flower is not installed; pip install 'fedsim-curious[federation]'") from error
    strategy = _build_strategy(subject)
    expect(isinstance(strategy, Strategy), f"{type(strategy).__name__} is not a flwr.serverapp.strategy.Strategy")


def declares_messages(subject: CheckedPlugin) -> None:
    """It declares that clients send weights or a gradient."""
    declared_message(subject.cls, subject.name, None)


def aggregates_rounds(subject: CheckedPlugin) -> None:
    """It aggregates rounds of a few clients into a finite, changing model of the same tensors."""
    initial, models = _initial_arrays(subject), _run_federation(subject)
    for number, model in enumerate(models, 1):
        got, expected = _shapes(model), _shapes(initial)
        expect(got == expected, f"after round {number} the model has {got}, expected {expected}")
        is_finite = all(np.isfinite(array).all() for array in model.values())
        expect(is_finite, f"after round {number} the model is NaN or infinite")
    has_changed = any(not np.array_equal(models[-1][name], array) for name, array in initial.items())
    expect(has_changed, "the model never changes, whatever clients send")


def is_deterministic(subject: CheckedPlugin) -> None:
    """It aggregates the same bytes with the same seed of the global generators."""
    for first, second in zip(_run_federation(subject), _run_federation(subject), strict=True):
        same = all(np.array_equal(array, second[name]) for name, array in first.items())
        expect(same, "the same replies are aggregated to another model; draw from the global generators alone")


CHECKS = (is_made, declares_messages, aggregates_rounds, is_deterministic)


def _build_strategy(subject: CheckedPlugin) -> Any:
    parameters = registry.setting_parameters(subject.cls)
    required = [key for key, parameter in parameters.items() if parameter.default is parameter.empty]
    return subject.build(**{key: _REQUIRED_VALUE for key in required if key not in subject.settings})


def _initial_arrays(subject: CheckedPlugin) -> Arrays:
    """Return a tiny model, with control variates where the clients' algorithm has some."""
    rng = numpy_generator("contract", "start")
    shapes = {"weight": (4, 3), "bias": (3,)}
    model = {name: torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
    controls: State = {}
    for name in getattr(subject.cls, "algorithms", ())[:1]:
        controls = registry.build("algorithms", name, {}, name).initial_controls(model)
    return {name: tensor.numpy() for name, tensor in join_controls(model, controls).items()}


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _run_federation(subject: CheckedPlugin) -> list[Arrays]:
    """Return the model after each round, calling the strategy in Flower's own order."""
    from flwr.app import Array, ArrayRecord, ConfigRecord
    from flwr.clientapp import ClientApp

    from fedsim.federation.engines.gc_pause import exclude_existing_objects
    from fedsim.federation.engines.serial import InProcessGrid

    app = ClientApp()
    app.train()(_reply)
    strategy, grid = _build_strategy(subject), InProcessGrid(app, _CLIENTS)
    arrays = ArrayRecord({name: Array(array) for name, array in _initial_arrays(subject).items()})
    models: list[Arrays] = []
    with exclude_existing_objects():
        for number in range(1, _ROUNDS + 1):
            with seed_globals("contract", "server", number):
                messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
                replies = sorted(grid.send_and_receive(messages), key=lambda reply: reply.metadata.src_node_id)
                for reply in replies:
                    if reply.has_error():
                        raise ContractViolation(
                            f"round {number}: what it sends cannot be answered ({reply.error.reason})"
                        )
                aggregate, _ = strategy.aggregate_train(number, replies)
            if aggregate is None:
                raise ContractViolation(f"round {number}: of {len(replies)} replies it makes no model")
            arrays = aggregate
            models.append({name: array.numpy() for name, array in arrays.items()})
    return models


def _reply(message: Message, context: Context) -> Message:
    """Return a client's reply: the broadcast weights plus a random change, or a random gradient."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

    client = int(context.node_config["partition-id"])
    ((_, broadcast),) = message.content.array_records.items()
    configs = message.content.config_records.values()
    sends_gradient = any(config.get("sends") == "gradient" for config in configs)
    rng = numpy_generator("contract", client)
    arrays = {}
    for name, array in broadcast.items():
        before = array.numpy()
        change = (0.1 * rng.normal(size=before.shape)).astype(before.dtype)
        if sends_gradient:
            arrays[f"gradient/{name}"] = Array(np.asarray(change))
        else:
            arrays[name] = Array(np.asarray(before + change))
    metrics = MetricRecord({"num-examples": 10 + client, "train_loss": 1.0 + client, "partition-id": client})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)
