"""An attack that reads senders off their ids fails the contract, and one that reads their messages does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from fedsim.contract import attacks
from fedsim.contract.checks import CheckedPlugin, CheckResult, run_check
from fedsim.interfaces.attack import Attack, Paper, Progress, Target
from fedsim.interfaces.findings import Inference, Linkage, PropertyPresence, client_ids

PAPER = Paper(title="An example", authors="Nobody", venue="nowhere", year=2026)


@dataclass(frozen=True, kw_only=True)
class NamesTheVictim(Attack):
    """Claim that all records are the victim's."""

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset({"records"})

    def _run(self, target: Target, progress: Progress) -> Inference:
        clients = target.transcript.clients(target.transcript.rounds[0])
        assert target.knowledge.records is not None
        scores = torch.tensor([[float(client == target.victim) for client in clients]])
        count = len(target.knowledge.records.inputs)
        return Inference(of="source", candidates=client_ids(clients), scores=scores.expand(count, -1).clone())


@dataclass(frozen=True, kw_only=True)
class LinksTheVictim(Attack):
    """Claim that the victim sent what is recorded under its id."""

    paper: ClassVar[Paper] = PAPER
    rounds_needed: ClassVar[int] = 2

    def _run(self, target: Target, progress: Progress) -> Linkage:
        first, later = target.transcript.rounds[:2]
        clients = target.transcript.clients(later)
        return Linkage(
            first_round=first,
            clients=client_ids(clients),
            rounds=torch.full((len(clients),), later),
            scores=torch.tensor([float(client == target.victim) for client in clients]),
        )


@dataclass(frozen=True, kw_only=True)
class JudgesClients(Attack):
    """Claim that all messages that are not w_t have the property."""

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset({"property_records"})
    of_all: bool = False

    def _run(self, target: Target, progress: Progress) -> PropertyPresence:
        number = target.transcript.rounds[0]
        clients = target.transcript.clients(number) if self.of_all else [target.victim]
        return PropertyPresence(
            clients=client_ids(clients),
            rounds=torch.full((len(clients),), number),
            scores=torch.tensor([self.judge(target, number, client) for client in clients]),
            shares=torch.tensor([0.0, 0.5]),
        )

    def judge(self, target: Target, number: int, client: int) -> float:
        update = target.transcript.update(number, client)
        return float(any(bool((update.after[name] != tensor).any()) for name, tensor in update.before.items()))


class JudgesIds(JudgesClients):
    """Claim that the victim's messages alone have the property."""

    def judge(self, target: Target, number: int, client: int) -> float:
        return float(client == target.victim)


def check(name: str, folder: Path, **settings: bool) -> CheckResult:
    return run_check(
        attacks.infers_senders_from_messages,
        CheckedPlugin(group="attacks", name=name, settings=settings, folder=folder),
    )


@pytest.mark.parametrize("attack", ["NamesTheVictim", "LinksTheVictim"])
def test_claims_that_stay_with_ids_fail(attack: str, tmp_path: Path) -> None:
    result = check(f"{__name__}:{attack}", tmp_path)
    assert result.verdict == "failed"
    assert "stays the same when their messages are swapped" in result.reason


@pytest.mark.parametrize("attack", ["sia", "linkability"])
def test_claims_that_go_with_messages_pass(attack: str, tmp_path: Path) -> None:
    assert check(attack, tmp_path).verdict == "passed"


def test_a_property_of_the_victim_alone_may_be_that_of_another_client_too(tmp_path: Path) -> None:
    assert check(f"{__name__}:JudgesClients", tmp_path / "sound").verdict == "does not apply"
    assert check(f"{__name__}:JudgesIds", tmp_path / "ids", of_all=True).verdict == "failed"


def test_other_claims_are_none_of_senders(tmp_path: Path) -> None:
    assert check("label-counts", tmp_path).verdict == "does not apply"
