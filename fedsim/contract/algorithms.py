"""Checks of client algorithms: each trains one client of a tiny network for two rounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.contract import common
from fedsim.contract.checks import CheckedPlugin, NotChecked, expect
from fedsim.interfaces.algorithm import ClientAlgorithm
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import ClientRound, LocalContext
from fedsim.plugins import registry
from fedsim.recording.control_variates import split_controls
from fedsim.recording.payloads import State
from fedsim.training.algorithm_client import TrainingClient, run_algorithm
from fedsim.training.cohort import LocalData
from fedsim.training.model_parts import find_private_names
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

_TASK = Task((1, 4, 4), 3)
_TRAINING = LocalTraining(local_epochs=2, batch_size=4, learning_rate=0.1)
_ROUNDS = 2


@dataclass(frozen=True)
class _Rounds:
    """Rounds of one client.

    Attributes:
        sent: what it sent in each round.
        memory: what its algorithm kept in the end.
        private_parts: what of the model it kept in the end.
        personal: the model that it uses itself, in the end.
        start: the whole model before the first round.
        trained: names of its parameters.
    """

    sent: list[State]
    memory: State
    private_parts: State
    personal: State
    start: State
    trained: Collection[str]


def is_an_algorithm(subject: CheckedPlugin) -> None:
    """It derives from fedsim.ClientAlgorithm."""
    common.build_instance(subject, ClientAlgorithm)


def names_its_strategies(subject: CheckedPlugin) -> None:
    """Each strategy that it goes with is registered."""
    for name in _algorithm(subject).strategies:
        expect(name in registry.registered_names("strategies"), f"there is no strategy '{name}'; fix strategies")


def divides_models(subject: CheckedPlugin) -> None:
    """It puts each tensor of a model into exactly one part."""
    find_private_names(_algorithm(subject), _fitting_network(subject), subject.name)


def trains_clients(subject: CheckedPlugin) -> None:
    """It trains: what a client sends, or keeps, differs from what it was given."""
    rounds = _train(subject)
    sent_model, _ = split_controls(rounds.sent[0])
    moved = [name for name, tensor in sent_model.items() if not torch.equal(tensor, rounds.start[name])]
    expect(moved, "a client sends what it was sent; train it")
    still = [name for name, tensor in rounds.private_parts.items() if torch.equal(tensor, rounds.start[name])]
    expect(len(still) < max(1, len(rounds.private_parts)), "private parts are never trained; train them, or share them")


def draws_from_its_key(subject: CheckedPlugin) -> None:
    """It is deterministic, and draws from no global generator."""
    with common.expect_untouched_generators():
        first = _train(subject)
    with common.seed_global_generators(1):
        second = _train(subject)
    is_same = all(common.are_equal(*pair) for pair in zip(first.sent, second.sent, strict=True))
    expect(is_same and common.are_equal(first.memory, second.memory), "the same client sends or keeps something else")


@dataclass(frozen=True, kw_only=True)
class _Silence(Defense):
    """Let no defended pass learn anything."""

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        """Return zeros."""
        del context
        return {name: torch.zeros_like(tensor) for name, tensor in gradient.items()}


def sends_what_is_defended(subject: CheckedPlugin) -> None:
    """Where defenses silence the passes on which they act, it sends the same whatever the data are."""
    sent = []
    for holder in (0, 1):
        rounds = _train(subject, holder=holder, defenses=(_Silence(),))
        sent.append([{name: message[name] for name in message.keys() & rounds.trained} for message in rounds.sent])
    is_same = all(common.are_equal(*pair) for pair in zip(*sent, strict=True))
    expect(is_same, "what it sends follows from data on which no defense acted; send results of defended passes alone")


def serves_many_clients(subject: CheckedPlugin) -> None:
    """It keeps nothing of one client for another."""
    algorithm = _algorithm(subject)
    alone = _train(subject, algorithm=algorithm)
    _train(subject, client=1, algorithm=algorithm)
    after_another = _train(subject, algorithm=algorithm)
    is_same = all(common.are_equal(*pair) for pair in zip(alone.sent, after_another.sent, strict=True))
    expect(is_same, "after another client, a client sends something else; keep things in client.memory")


def evaluates_personal_models(subject: CheckedPlugin) -> None:
    """The model that a client uses itself is a whole one, and its own where it says so."""
    rounds, algorithm = _train(subject), _algorithm(subject)
    expect(set(rounds.personal) == set(rounds.start), "personalise_model returns another model; return the whole one")
    is_shared = common.are_equal(rounds.personal, rounds.start)
    expect(algorithm.personal or is_shared, "a client uses a model of its own; set personal = True")
    expect(is_shared is not algorithm.personal, "a client uses the shared model; leave personal out")


CHECKS = (
    *common.CHECKS,
    is_an_algorithm,
    names_its_strategies,
    divides_models,
    trains_clients,
    draws_from_its_key,
    sends_what_is_defended,
    serves_many_clients,
    evaluates_personal_models,
)


def _algorithm(subject: CheckedPlugin) -> ClientAlgorithm:
    algorithm: ClientAlgorithm = common.build_instance(subject, ClientAlgorithm)
    return algorithm


def _fitting_network(subject: CheckedPlugin) -> nn.Module:
    """Return a tiny network that the algorithm accepts."""
    refusal = ""
    for has_batch_norm in (False, True):
        with seed_globals("contract", "model"):
            network = Mlp(hidden=(6,), batch_norm=has_batch_norm).build(_TASK)
        try:
            _algorithm(subject).divide_model(network)
        except ConfigError as error:
            refusal = str(error)
            continue
        return network
    raise NotChecked(f"it accepts no tiny network: {refusal}")


def _train(
    subject: CheckedPlugin,
    *,
    client: int = 0,
    holder: int | None = None,
    algorithm: ClientAlgorithm | None = None,
    defenses: Sequence[Defense] = (),
) -> _Rounds:
    """Train one client, with its own data or those of `holder`, for two rounds in which the server sends the same."""
    algorithm, network = algorithm or _algorithm(subject), _fitting_network(subject)
    start = copy_state(network)
    private_names = find_private_names(algorithm, network, subject.name)
    parameters = {name: start[name] for name, _ in network.named_parameters()}
    controls = algorithm.initial_controls(parameters)
    private_parts: dict[str, Tensor] = {name: start[name] for name in private_names}
    memory: dict[str, Tensor] = {}
    sent: list[State] = []
    for number in range(1, _ROUNDS + 1):
        training_client = TrainingClient(
            network=network,
            model={**start, **private_parts},
            controls=controls,
            parts=algorithm.divide_model(network),
            memory=memory,
            share=_share(client, number, client if holder is None else holder),
            settings=_TRAINING,
            defenses=defenses,
            client_round=ClientRound(key=("contract", number, client), number=number),
            loss=_TASK.loss,
        )
        sent.append(run_algorithm(algorithm, training_client, private_names, private_parts)[0])
    personal = algorithm.personalise_model({**start, **private_parts}, memory)
    return _Rounds(
        sent=sent, memory=memory, private_parts=private_parts, personal=personal, start=start, trained=parameters
    )


def _share(client: int, number: int, holder: int) -> LocalData:
    inputs = torch.randn((8, *_TASK.input_shape), generator=generator("contract", "inputs", holder))
    return LocalData(inputs=inputs, labels=torch.arange(8) % 3, key=("contract", "train", number, client))
