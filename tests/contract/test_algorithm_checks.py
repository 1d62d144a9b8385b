"""Each check of a client algorithm fails where one breaks what it asks for, and says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedsim.contract import algorithms, common
from fedsim.contract.checks import Check
from fedsim.contract.common import keeps_to_its_ranges
from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
from fedsim.interfaces.local_context import Memory
from fedsim.recording.payloads import State
from tests.support.checked_classes import check_class


@dataclass(frozen=True, kw_only=True)
class Plain(ClientAlgorithm):
    """Train the whole model."""

    def train_client(self, client: LocalClient) -> ClientResult:
        return ClientResult(model=client.train(client.model))


@dataclass(frozen=True, kw_only=True)
class Unregistered(Plain):
    """Go with a strategy that nobody has."""

    strategies: ClassVar[tuple[str, ...]] = ("nobody-has-it",)


@dataclass(frozen=True, kw_only=True)
class Halves(Plain):
    """Divide the model, and leave a layer out."""

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        return {"body": [name for name in network.state_dict() if name.startswith("1.")]}


@dataclass(frozen=True, kw_only=True)
class SendsBack(Plain):
    """Train, and send what it was sent."""

    def train_client(self, client: LocalClient) -> ClientResult:
        client.train(client.model)
        return ClientResult(model=client.model)


@dataclass(frozen=True, kw_only=True)
class KeepsStill(Plain):
    """Keep a part that it never trains."""

    private_parts: ClassVar[frozenset[str]] = frozenset({"head"})
    personal: ClassVar[bool] = True

    def divide_model(self, network: nn.Module) -> Mapping[str, Sequence[str]]:
        names = list(network.state_dict())
        return {"body": names[:2], "head": names[2:]}

    def train_client(self, client: LocalClient) -> ClientResult:
        return ClientResult(model=client.train(client.model, trained=client.parts["body"]))


@dataclass(frozen=True, kw_only=True)
class Draws(Plain):
    """Draw noise from the global generator."""

    def train_client(self, client: LocalClient) -> ClientResult:
        after = client.train(client.model)
        return ClientResult(model={name: tensor + torch.randn(tensor.shape) for name, tensor in after.items()})


@dataclass(frozen=True, kw_only=True)
class Undefended(Plain):
    """Send the mean of a defended pass and of one on which no defense acts."""

    def train_client(self, client: LocalClient) -> ClientResult:
        defended = client.train(client.model)
        undefended = client.train(client.model, name="again", defended=False)
        return ClientResult(model={name: (tensor + undefended[name]) / 2 for name, tensor in defended.items()})


_EARLIER: list[State] = []


@dataclass(frozen=True, kw_only=True)
class Shares(Plain):
    """Send what another client sent before it."""

    def train_client(self, client: LocalClient) -> ClientResult:
        _EARLIER.append(client.train(client.model))
        return ClientResult(model=_EARLIER[-min(3, len(_EARLIER))])


@dataclass(frozen=True, kw_only=True)
class Undeclared(Plain):
    """Use a model of its own, and not say so."""

    def train_client(self, client: LocalClient) -> ClientResult:
        after = client.train(client.model)
        client.memory.update(after)
        return ClientResult(model=after)

    def personalise_model(self, model: State, memory: Memory) -> State:
        return {**model, **memory}


@dataclass(frozen=True, kw_only=True)
class OnlyClaims(Plain):
    """Say that a client has a model of its own, and use the shared one."""

    personal: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Duck:
    """Train nobody's client."""

    def train_client(self, client: LocalClient) -> ClientResult:
        return ClientResult(model=client.model)


class Broken(Plain):
    """Cannot be made."""

    def __post_init__(self) -> None:
        raise ValueError("never")


BROKEN: list[tuple[Check, type, str]] = [
    (common.is_made, Broken, "never"),
    (common.is_a_frozen_dataclass, Broken, "is no dataclass"),
    (algorithms.is_an_algorithm, Duck, "Duck does not derive from fedsim.ClientAlgorithm"),
    (algorithms.names_its_strategies, Unregistered, "there is no strategy 'nobody-has-it'"),
    (algorithms.divides_models, Halves, "names '3.weight' in no part"),
    (algorithms.trains_clients, SendsBack, "a client sends what it was sent; train it"),
    (algorithms.trains_clients, KeepsStill, "private parts are never trained"),
    (algorithms.draws_from_its_key, Draws, "it draws from torch's global generator"),
    (algorithms.sends_what_is_defended, Undefended, "follows from data on which no defense acted"),
    (algorithms.serves_many_clients, Shares, "after another client, a client sends something else"),
    (algorithms.evaluates_personal_models, Undeclared, "a client uses a model of its own; set personal = True"),
    (algorithms.evaluates_personal_models, OnlyClaims, "a client uses the shared model; leave personal out"),
]


@pytest.mark.parametrize(("check", "cls", "sentence"), BROKEN, ids=[case[1].__name__ for case in BROKEN])
def test_an_algorithm_that_breaks_the_contract_is_told_how(
    check: Check, cls: type, sentence: str, tmp_path: Path
) -> None:
    result = check_class(check, "algorithms", cls, tmp_path)
    assert result.verdict == "failed"
    assert sentence in result.reason


def test_an_algorithm_that_keeps_to_the_contract_passes(tmp_path: Path) -> None:
    checks = [check for check in algorithms.CHECKS if check is not common.is_documented]  # it cites nobody
    assert [
        result for check in checks if not (result := check_class(check, "algorithms", Plain, tmp_path)).is_good
    ] == []


def test_each_check_is_broken_by_something_here() -> None:
    of_all_groups = {common.survives_copying, common.is_documented, keeps_to_its_ranges}
    assert {case[0] for case in BROKEN} == set(algorithms.CHECKS) - of_all_groups
