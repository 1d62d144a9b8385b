"""What an attack is handed, and what is refused before it reads anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedsim
from fedsim.base.errors import AttackError, PluginError, TranscriptError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import ALL, GROUPS, Attack, Knowledge, Paper, Progress, RoundsNeeded, Target, VictimTask
from fedsim.interfaces.findings import Finding, LocalModel
from fedsim.plugins import registry
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update

OTHER_HOOK = """
from fedsim.interfaces.attack import Attack

class Other(Attack):
    def _run(self, transcript, knowledge, victim, rng, progress):
        return None
"""


def update(number: int, client: int, members: Sequence[int] = (), weight: float = 1.0) -> Update:
    payload = Payload.from_dense({"weight": torch.full((2,), weight)}, "weights")
    before = {"weight": torch.zeros(2)}
    return Update(round=number, client=client, before=before, payload=payload, num_examples=4, members=tuple(members))


@pytest.fixture
def target(tmp_path: Path) -> Target:
    """Client 3 in rounds 1 and 3 of three; in round 2 the sum over clients 1 and 3."""
    recorder = Recorder(tmp_path / "recording")
    recorder.write(1, [update(1, 3, weight=1.5), update(1, 4)])
    recorder.write(2, [update(2, 1, members=(1, 3))])
    recorder.write(3, [update(3, 3, weight=2.5)])
    transcript = Transcript(tmp_path / "recording")
    return Target(transcript=transcript, victim=3, knowledge=Knowledge(), rng=generator(0))


def weight(read: Update) -> float:
    return read.after["weight"][0].item()


def one_round(target: Target, number: int) -> Target:
    return replace(target, transcript=target.transcript.restrict_to([number]))


def test_the_only_round_is_read_by_itself_and_one_of_several_by_its_number(target: Target) -> None:
    assert weight(one_round(target, 3).read_update()) == 2.5
    assert weight(target.read_update(1)) == 1.5
    with pytest.raises(
        AttackError, match=r"^this attack reads one update, the transcript shows rounds \[1, 2, 3\]; use"
    ):
        target.read_update()
    with pytest.raises(TranscriptError, match=r"^round 2: client 3 is not recorded; recorded: \[1\]$"):
        target.read_update(2)


def test_the_victims_rounds_are_those_in_which_it_took_part_and_of_its_groups_where_asked(target: Target) -> None:
    assert target.participation_rounds() == [1, 3]
    assert target.participation_rounds(in_groups=True) == [1, 2, 3]
    absent = "client 9: took part in none of the 3 rounds to be attacked; choose another victim (recorded: 1, 3, 4)"
    with pytest.raises(AttackError) as caught:
        replace(target, victim=9).participation_rounds()
    assert str(caught.value) == f"{absent} or other rounds"


def test_an_update_that_is_not_finite_is_named(tmp_path: Path) -> None:
    Recorder(tmp_path).write(1, [update(1, 3, weight=float("nan"))])
    broken = Target(transcript=Transcript(tmp_path), victim=3, knowledge=Knowledge(), rng=generator(0))
    with pytest.raises(AttackError, match=r"^round 1, client 3: weight holds NaN or infinite values; this update"):
        broken.read_update()


@dataclass(frozen=True, kw_only=True)
class Counts(Attack):
    """Claims how many rounds it was handed."""

    paper: ClassVar[Paper] = Paper(title="T", authors="A", venue="V", year=2020)
    uses: ClassVar[frozenset[str]] = frozenset({"num_classes"})

    def _run(self, target: Target, progress: Progress) -> Finding:
        assert target.knowledge.granted_facts() in ([], ["num_classes"])
        progress(1, 1, {"objective": 0.0})
        count: Tensor = torch.tensor([float(len(target.transcript.rounds))])
        return LocalModel(state={"rounds": count})


@dataclass(frozen=True, kw_only=True)
class CountsAll(Counts):
    rounds_needed: ClassVar[RoundsNeeded] = ALL


@dataclass(frozen=True, kw_only=True)
class CountsThree(Counts):
    rounds_needed: ClassVar[RoundsNeeded] = 3


@dataclass(frozen=True, kw_only=True)
class CountsSums(CountsThree):
    reads: ClassVar[frozenset[str]] = frozenset({GROUPS})


def outcome(attack: Attack, target: Target) -> float | str:
    """The rounds that it counts or why it counts none, the same by itself and among several."""
    [(_, result)] = attack.run_several([VictimTask(target=target)])
    if isinstance(result, BaseException):
        with pytest.raises(type(result)) as caught:
            attack.run(target)
        assert str(caught.value) == str(result)
        return str(result)
    alone = attack.run(target)
    assert isinstance(alone, LocalModel)
    assert isinstance(result, LocalModel)
    assert torch.equal(alone.state["rounds"], result.state["rounds"])
    return alone.state["rounds"].item()


def test_an_attack_is_refused_before_work_unless_its_victim_took_part_in_as_many_rounds_as_it_needs(
    target: Target,
) -> None:
    assert outcome(Counts(), one_round(target, 1)) == 1
    assert str(outcome(Counts(), target)).startswith("this attack reads one update, the transcript shows rounds [1,")
    assert outcome(CountsAll(), target) == 3
    assert outcome(CountsAll(), one_round(target, 1)) == 1
    assert outcome(CountsThree(), target) == (
        "client 3: took part in 2 of the 3 rounds to be attacked, CountsThree needs at least 3; record more, or "
        "attack more of them (adversary.rounds)"
    )
    assert outcome(CountsSums(), target) == 3
    assert str(outcome(CountsAll(), replace(target, victim=9))).startswith("client 9: took part in none of the 3")


def test_an_attack_gets_of_the_knowledge_what_it_declares(target: Target) -> None:
    granted = replace(target, knowledge=Knowledge(num_classes=3, learning_rate=0.1))
    assert outcome(CountsAll(), granted) == 3
    assert granted.knowledge.granted_facts() == ["num_classes", "learning_rate"]


def test_an_attack_with_another_hook_is_refused_in_a_sentence_that_names_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_attack.py").write_text(OTHER_HOOK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    with pytest.raises(PluginError) as caught:
        registry.load("attacks", "other_attack:Other")
    assert str(caught.value) == (
        "'other_attack:Other' does not load: Other._run: expected (self, target, progress), got (self, transcript, "
        "knowledge, victim, rng, progress); target is a fedsim.Target, which has the transcript, the knowledge, the "
        "victim and rng"
    )


@pytest.mark.parametrize(
    ("declared", "complaint"),
    [
        ({"subject": "pictures"}, r"^Declared\.subject: expected one of 'numbers', .*, got 'pictures'"),
        ({"rounds_needed": 0}, r"^Declared\.rounds_needed: expected 1, a larger number or 'all', got 0$"),
        ({"rounds_needed": True}, r"^Declared\.rounds_needed: expected 1, a larger number or 'all', got True$"),
        ({"rounds_needed": "every"}, r"^Declared\.rounds_needed: expected 1, a larger number or 'all', got 'every'$"),
    ],
)
def test_rounds_that_are_no_number_of_rounds_are_refused(declared: dict[str, Any], complaint: str) -> None:
    with pytest.raises(PluginError, match=complaint):
        type("Declared", (Counts,), declared)


def test_target_is_a_public_name() -> None:
    assert fedsim.Target is Target
