"""Property inference: it finds the property in small cases, not the classes beside it, and says what it cannot read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inference import property_inference
from adversaries.inference.property_inference import PropertyInference
from adversaries.simulated import SimulatedClients
from clients.defenses.dp_sgd import DpSgd
from clients.defenses.gate import Gate
from clients.defenses.top_k import TopK
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import AttackError, ConfigError, KnowledgeError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge, PropertyRecords, Target
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.findings import PropertyPresence
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining

COUNT, RATE, VICTIM = 24, 0.1, 0
SHARES = {0: 0.5, 1: 0.0, 2: 0.5, 3: 0.0, 4: 0.5, 5: 0.0}
"""Of each client's records with the property."""
QUICK: dict[str, Any] = {"simulated": 25, "trees": 50}


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp(hidden=(12,)).build(Task((5,), 2))


def records(count: int, share: float, *key: int | str) -> PropertyRecords:
    """The property moves one of five numbers; another one decides the class."""
    inputs = torch.randn((count, 5), generator=generator("records", *key))
    has = torch.arange(count) < round(share * count)
    inputs[:, 0] += 2.0 * has
    return PropertyRecords(inputs=inputs, labels=(inputs[:, 1] > 0).long(), has=has)


PLAN = {"learning_rate": RATE, "local_epochs": 2, "batch_size": 8}


def record_rounds(folder: Path, rounds: int = 2, sends: str = "weights") -> Transcript:
    recorder = Recorder(folder)
    for number in range(1, rounds + 1):
        before, updates = copy_state(mlp(number)), []
        for client, share in SHARES.items():
            own, key = records(COUNT, share, "client", client), ("client", client, number)
            if sends == "gradient":
                plan = LocalTraining(local_steps=1, sends="gradient")
                made, _, _ = local_gradient(mlp(), before, own.inputs, own.labels, plan, key=key)
            else:
                made, _ = local_update(mlp(), before, own.inputs, own.labels, LocalTraining(**PLAN), key=key)
            payload = Payload.from_dense(made, "gradient" if sends == "gradient" else "weights")
            updates.append(Update(round=number, client=client, before=before, payload=payload, num_examples=COUNT))
        recorder.write(number, updates)
    return Transcript(folder)


def knowledge(**rest: Any) -> Knowledge:
    known = {"model": mlp, "loss": cross_entropy, "optimizer": "sgd", "property_records": records(400, 0.5, "public")}
    return Knowledge(**known | PLAN | rest)


def claimed(transcript: Transcript, known: Knowledge, **settings: Any) -> PropertyPresence:
    attack = PropertyInference(**QUICK | settings)
    finding = attack.run(Target(transcript=transcript, victim=VICTIM, knowledge=known, rng=generator(0)))
    assert isinstance(finding, PropertyPresence)
    return finding


def area(finding: PropertyPresence) -> float:
    held = torch.tensor([SHARES[client] > 0 for client in finding.clients.tolist()])
    pairs = finding.scores[held][:, None] - finding.scores[~held]
    return float(((pairs > 0) + 0.5 * (pairs == 0)).double().mean())


@pytest.mark.parametrize("sends", ["weights", pytest.param("gradient", marks=pytest.mark.thorough)])
def test_messages_with_the_property_are_told_from_those_without(tmp_path: Path, sends: str) -> None:
    finding = claimed(record_rounds(tmp_path, sends=sends), knowledge())
    assert finding.clients.tolist() == [*SHARES] * 2
    assert finding.rounds.tolist() == [1] * 6 + [2] * 6
    assert finding.shares.tolist() == [0.0, 0.5]
    assert area(finding) > 0.95
    held = torch.tensor([SHARES[client] > 0 for client in finding.clients.tolist()])
    assert ((finding.scores > 0.5) == held).double().mean() > 0.8


@pytest.mark.thorough
def test_from_records_whose_property_means_nothing_nothing_is_found(tmp_path: Path) -> None:
    public = records(400, 0.5, "public")
    order = torch.randperm(400, generator=generator("shuffled"))
    shuffled = PropertyRecords(inputs=public.inputs, labels=public.labels, has=public.has[order])
    finding = claimed(record_rounds(tmp_path), knowledge(property_records=shuffled))
    assert 0.15 < area(finding) < 0.85


def test_classes_are_drawn_alike_unless_they_may_tell() -> None:
    public = records(400, 0.5, "public")
    tied = PropertyRecords(
        inputs=public.inputs, labels=(torch.arange(400) % 10 < torch.where(public.has, 8, 2)).long(), has=public.has
    )
    means = {}
    for same in (True, False):
        batches = property_inference._Batches(tied, same=same)
        without, having = (
            torch.cat([batches.draw(20, share, (0, n), "")[1] for n in range(60)]).double().mean() for share in (0, 1)
        )
        means[same] = float(having - without)
    assert abs(means[True]) < 0.08
    assert means[False] > 0.5


def test_a_batch_holds_the_property_as_asked_and_no_record_twice() -> None:
    public = records(60, 0.5, "public")
    batches = property_inference._Batches(public, same=True)
    inputs, labels = batches.draw(20, 0.3, (1, 2), "")
    places = (public.inputs[:, None] == inputs).all(2).nonzero()[:, 0]
    assert len(places.unique()) == 20
    assert public.has[places].sum() == 6
    assert len(labels) == 20


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_scores_and_another_one_others(tmp_path: Path) -> None:
    transcript, known = record_rounds(tmp_path, 1), knowledge()
    first, again = (claimed(transcript, known).scores for _ in range(2))
    other = PropertyInference(**QUICK).run(
        Target(transcript=transcript, victim=VICTIM, knowledge=known, rng=generator(1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other.tensors["scores"])


def test_a_long_update_is_pooled_by_its_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(property_inference, "_MAX_FEATURES", 2)
    found = property_inference._update_features(torch.tensor([1.0, -3.0, 0.0, 4.0]))
    assert found.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("sends", ["weights", "gradient"])
def test_a_simulated_client_with_the_victims_records_sends_what_it_sent(tmp_path: Path, sends: str) -> None:
    how = {"batch_size": COUNT, "local_epochs": 1}  # one step, so that the order does not matter
    recorder, own, before = Recorder(tmp_path), records(COUNT, 0.5, "own"), copy_state(mlp(1))
    if sends == "gradient":
        plan = LocalTraining(local_steps=1, sends="gradient")
        made, _, _ = local_gradient(mlp(), before, own.inputs, own.labels, plan, key=("own",))
    else:
        made, _ = local_update(
            mlp(), before, own.inputs, own.labels, LocalTraining(learning_rate=RATE, **how), key=("own",)
        )
    payload = Payload.from_dense(made, "gradient" if sends == "gradient" else "weights")
    recorder.write(1, [Update(round=1, client=0, before=before, payload=payload, num_examples=COUNT)])
    update, clients = Transcript(tmp_path).update(1, 0), SimulatedClients(knowledge(**how))
    sent = clients.simulate_update(update, own.inputs, own.labels, ("any",))
    assert torch.allclose(sent, clients.flatten_update(update), atol=1e-7)
    assert sent.norm() > 0


def simulated_update(tmp_path: Path, *defenses: Defense) -> Tensor:
    own = records(COUNT, 0.5, "own")
    clients = SimulatedClients(knowledge(defenses=defenses))
    return clients.simulate_update(record_rounds(tmp_path, 1).update(1, VICTIM), own.inputs, own.labels, ("same",))


def test_known_defenses_are_simulated_in_training_and_on_the_update(tmp_path: Path) -> None:
    plain = simulated_update(tmp_path / "plain")
    kept = simulated_update(tmp_path / "kept", TopK(fraction=0.1))
    assert (kept != 0).sum() == pytest.approx(0.1 * len(kept), abs=2)
    assert torch.equal(kept[kept != 0], plain[kept != 0])
    noisy = simulated_update(tmp_path / "noisy", DpSgd(noise_multiplier=5.0, clip=1.0))
    assert (noisy - plain).norm() > 2 * plain.norm()


@dataclass(frozen=True, kw_only=True)
class Waning(UpdateNoise):
    """Noise that is less where a client takes part in more rounds."""

    def of_client(self, participation: Participation) -> Self:
        return replace(self, noise_multiplier=1 / participation.rounds)


@pytest.mark.parametrize(
    ("defense", "told"),
    [
        (Waning(), "round 1, client 0: the strength of Waning follows from the number of rounds"),
        (Gate(measure="gradient-norm", above=1.0), "round 1, client 0: Gate chooses the data that take part"),
    ],
    ids=["of-rounds", "of-data"],
)
def test_defenses_that_cannot_be_simulated_are_refused(tmp_path: Path, defense: Defense, told: str) -> None:
    with pytest.raises(AttackError, match=told):
        simulated_update(tmp_path, defense)


def test_a_training_that_diverges_is_refused(tmp_path: Path) -> None:
    known = knowledge(learning_rate=1e30, local_epochs=20)
    with pytest.raises(AttackError, match="round 1, client 0: a client that is simulated on auxiliary records failed"):
        claimed(record_rounds(tmp_path, 1), known)


@pytest.mark.thorough
def test_another_client_whose_message_is_broken_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, recorder = record_rounds(tmp_path / "whole", 1), Recorder(tmp_path / "broken")
    updates = []
    for client in (0, 1, 2):
        update = whole.update(1, client)
        after = {name: tensor * (float("nan") if client == 1 else 1) for name, tensor in update.after.items()}
        payload = Payload.from_dense(after, "weights")
        updates.append(Update(round=1, client=client, before=update.before, payload=payload, num_examples=COUNT))
    recorder.write(1, updates)
    with caplog.at_level(logging.WARNING):
        finding = claimed(Transcript(tmp_path / "broken"), knowledge())
    assert finding.clients.tolist() == [0, 2]
    assert "leaves another out: round 1, client 1" in caplog.text


def changed(public: PropertyRecords, **parts: Any) -> PropertyRecords:
    return PropertyRecords(**{"inputs": public.inputs, "labels": public.labels, "has": public.has} | parts)


def test_what_cannot_be_learnt_from_is_refused_in_one_sentence(tmp_path: Path) -> None:
    transcript, public = record_rounds(tmp_path, 1), records(400, 0.5, "public")
    few = PropertyRecords(inputs=public.inputs[190:220], labels=public.labels[190:220], has=public.has[190:220])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"property_records": changed(public, has=torch.ones(400))}, "each of the 400 auxiliary records has the"),
        ({"property_records": changed(public, has=torch.zeros(400))}, "none of the 400 auxiliary records has the"),
        (
            {"property_records": changed(public, labels=public.labels[:9])},
            "400 auxiliary records 9 have labels",
        ),
        ({"property_records": few}, "auxiliary records of class [01] (with|without) the property, and there are"),
        ({"property_records": records(20, 0.5, "few")}, "N is 24, and there are 20 auxiliary records"),
        ({"optimizer": "lion"}, "clients step with lion, and only training with sgd, adam, adamw is simulated"),
    ]
    for change, told in cases:
        with pytest.raises(AttackError, match=told):
            claimed(transcript, knowledge(**change))


def test_shares_that_are_the_same_number_of_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        AttackError, match=r"client 0: N is 24, and the shares 0 and 0\.01 of it are the same number of examples"
    ):
        claimed(record_rounds(tmp_path, 1), knowledge(), present=0.01)


@pytest.mark.parametrize("withheld", ["property_records", "learning_rate", "batch_size", "local_epochs", "loss"])
def test_what_it_needs_is_asked_for(tmp_path: Path, withheld: str) -> None:
    with pytest.raises(KnowledgeError, match=f"needs {withheld}, which the threat model withholds"):
        claimed(record_rounds(tmp_path, 1), knowledge(**{withheld: None}))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"present": 0.2, "absent": 0.2}, "absent: expected a smaller share than present = 0.2, got 0.2"),
        ({"present": 1.5}, "present: expected at most 1, got 1.5"),
        ({"simulated": 9}, "simulated: expected at least 10, got 9"),
        ({"trees": 49}, "trees: expected at least 50, got 49"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PropertyInference(**settings)
