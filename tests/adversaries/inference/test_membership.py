"""Membership attacks against formulas written out, one candidate at a time, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inference import membership
from adversaries.inference.fedmia import FedMia
from adversaries.inference.membership_cosine import MembershipCosine
from adversaries.inference.membership_difference import MembershipDifference
from adversaries.inference.membership_lira import MembershipLira
from adversaries.inference.membership_loss import MembershipLoss
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Attack, Knowledge, Records, Target
from fedsim.interfaces.findings import Membership
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.model_state import copy_state
from tests.support.recordings import build_update
from tests.support.tensors import flatten_state

RATE, HELD = 0.5, 3
ATTACKS = (MembershipLoss(), MembershipCosine(), MembershipDifference(), FedMia(), MembershipLira())


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 3))


def records(count: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = generator("records", seed)
    return torch.randn((count, 40), generator=rng), torch.randint(3, (count,), generator=rng)


def slopes(state: State, inputs: Tensor, labels: Tensor) -> State:
    """Of the mean loss."""
    model = network()
    model.load_state_dict(dict(state))
    cross_entropy(model(inputs), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def loss_of(state: State, inputs: Tensor, labels: Tensor) -> float:
    model = network()
    model.load_state_dict(dict(state))
    return float(cross_entropy(model(inputs), labels).detach())


@pytest.fixture(scope="module")
def recorded_rounds(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    """Two rounds of four clients that each take one step on three records of their own."""
    recorder = Recorder(tmp_path_factory.mktemp("recorded"))
    for number in (1, 2):
        before = copy_state(network(number))
        updates = []
        for client in range(4):
            moved = slopes(before, *records(HELD, client))
            after = {name: tensor - RATE * moved[name] for name, tensor in before.items()}
            payload = Payload.from_dense(after, "weights")
            updates.append(Update(round=number, client=client, before=before, payload=payload, num_examples=HELD))
        recorder.write(number, updates)
    return Transcript(recorder.folder)


CANDIDATES = Records(
    inputs=torch.cat([records(HELD, 0)[0], records(4, 99)[0]]),
    labels=torch.cat([records(HELD, 0)[1], records(4, 99)[1]]),
)
"""The first three are those of client 0."""


def knowledge(**rest: Any) -> Knowledge:
    known: dict[str, Any] = {"model": network, "loss": cross_entropy, "candidates": CANDIDATES}
    known |= {"learning_rate": RATE, "local_epochs": 1, "batch_size": HELD}
    return Knowledge(**known | rest)


def infer(attack: Attack, transcript: Transcript, known: Knowledge | None = None, victim: int = 0) -> Tensor:
    finding = attack.run(Target(transcript=transcript, victim=victim, knowledge=known or knowledge(), rng=generator(0)))
    assert isinstance(finding, Membership)
    return finding.scores


def each(measure: Callable[[Update, Tensor, Tensor], float], update: Update) -> list[float]:
    """What is measured of one candidate after the other."""
    rows = zip(CANDIDATES.inputs.split(1), CANDIDATES.labels.split(1), strict=True)
    return [measure(update, one, label) for one, label in rows]


def cosine(update: Update, one: Tensor, label: Tensor) -> float:
    slope, moved = flatten_state(slopes(update.before, one, label)), flatten_state(update.pseudo_gradient)
    return float(slope @ moved / (slope.norm() * moved.norm()))


def minus_loss(update: Update, one: Tensor, label: Tensor) -> float:
    return -loss_of(update.after, one, label)


def confidence(update: Update, one: Tensor, label: Tensor) -> float:
    own = torch.tensor(-loss_of(update.after, one, label), dtype=torch.float64).exp()
    return float((own / (1 - own)).log())


def difference(update: Update, one: Tensor, label: Tensor) -> float:
    moved, share = flatten_state(update.pseudo_gradient), RATE / HELD * flatten_state(slopes(update.before, one, label))
    return float(moved.square().sum() - (moved - share).square().sum())


@pytest.mark.parametrize(
    ("attack", "measure"),
    [(MembershipLoss(), minus_loss), (MembershipCosine(), cosine), (MembershipDifference(), difference)],
)
def test_scores_are_the_mean_over_rounds_of_what_is_measured_of_the_victim(
    attack: Attack, measure: Callable[[Update, Tensor, Tensor], float], recorded_rounds: Transcript
) -> None:
    expected = torch.tensor([each(measure, recorded_rounds.update(number, 0)) for number in (1, 2)]).double().mean(0)
    assert torch.allclose(infer(attack, recorded_rounds), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("attack", "measure", "pooled", "probability"),
    [
        (FedMia(), cosine, False, True),
        (FedMia(measure="loss"), minus_loss, False, True),
        pytest.param(FedMia(probability=False), cosine, False, False, marks=pytest.mark.thorough),
        (MembershipLira(), confidence, True, False),
    ],
)
def test_scores_tell_how_far_the_victim_stands_out_from_the_other_clients(
    attack: Attack,
    measure: Callable[[Update, Tensor, Tensor], float],
    pooled: bool,
    probability: bool,
    recorded_rounds: Transcript,
) -> None:
    from scipy.stats import norm

    rounds = []
    for number in (1, 2):
        found = torch.tensor([each(measure, recorded_rounds.update(number, client)) for client in range(4)]).double()
        others = found[1:]
        deviation = others.var(0).mean().sqrt() if pooled else others.std(0)
        deviations = (found[0] - others.mean(0)) / deviation
        rounds.append(torch.from_numpy(norm.cdf(deviations.numpy())) if probability else deviations)
    assert torch.allclose(infer(attack, recorded_rounds), torch.stack(rounds).mean(0), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("attack", ATTACKS)
def test_members_score_higher_than_others(attack: Attack, recorded_rounds: Transcript) -> None:
    scores = infer(attack, recorded_rounds)
    assert scores[:HELD].mean() > scores[HELD:].mean()
    assert infer(attack, recorded_rounds, victim=1)[:HELD].mean() < scores[:HELD].mean()


@pytest.mark.parametrize("attack", [MembershipCosine(), MembershipDifference(), FedMia()])
def test_scores_do_not_depend_on_how_many_gradients_are_held_at_once(
    attack: Attack, recorded_rounds: Transcript, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = infer(attack, recorded_rounds)
    monkeypatch.setattr(membership, "_GRADIENT_CHUNK_NUMEL", 800)  # two candidates
    assert torch.allclose(infer(attack, recorded_rounds), whole, atol=1e-6)


def test_the_gradient_that_a_client_sends_is_read_as_its_direction(tmp_path: Path) -> None:
    before = copy_state(network(1))
    moved = slopes(before, *records(HELD, 0))
    recorder = Recorder(tmp_path)
    payload = Payload.from_dense(moved, "gradient")
    update = Update(round=1, client=0, before=before, payload=payload, num_examples=HELD)
    recorder.write(1, [update])
    transcript = Transcript(recorder.folder)
    expected = torch.tensor(each(cosine, update)).double()
    assert torch.allclose(infer(MembershipCosine(), transcript), expected, atol=1e-5)
    assert infer(MembershipDifference(), transcript)[:HELD].mean() > 0
    with pytest.raises(AttackError, match=r"sent a gradient, no weights, .*; take an attack that reads gradients, as "):
        infer(MembershipLoss(), transcript)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"optimizer": "adam"}, "clients train with optimizer adam; expect less"),
        ({"optimizer": "sgd", "momentum": 0.9}, "clients train with momentum 0.9; expect less"),
        ({}, "optimizer, momentum, weight_decay, proximal_mu of the clients are not known"),
        ({"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "proximal_mu": 0.0}, ""),
    ],
)
def test_the_share_of_one_example_is_that_of_plain_sgd_and_other_training_is_warned_of(
    facts: dict[str, Any], told: str, recorded_rounds: Transcript, caplog: pytest.LogCaptureFixture
) -> None:
    infer(MembershipDifference(), recorded_rounds, knowledge(**facts))
    assert (told in caplog.text) if told else not caplog.text


@pytest.mark.parametrize("attack", ATTACKS)
def test_without_candidates_each_is_refused(attack: Attack, recorded_rounds: Transcript) -> None:
    with pytest.raises(KnowledgeError, match="needs candidates, which the threat model withholds"):
        infer(attack, recorded_rounds, knowledge(candidates=None))
    empty = Records(inputs=CANDIDATES.inputs[:0], labels=CANDIDATES.labels[:0])
    with pytest.raises(AttackError, match="there are no candidate records; grant some"):
        infer(attack, recorded_rounds, knowledge(candidates=empty))


@pytest.mark.parametrize("attack", [FedMia(), MembershipLira()])
def test_what_compares_clients_is_refused_where_too_few_are_recorded(attack: Attack, tmp_path: Path) -> None:
    recorder, before = Recorder(tmp_path), copy_state(network(1))
    payload = Payload.from_dense(copy_state(network(2)), "weights")
    recorder.write(
        1, [Update(round=1, client=client, before=before, payload=payload, num_examples=HELD) for client in (0, 1)]
    )
    with pytest.raises(AttackError, match="in none of its rounds at least 2 other clients are recorded"):
        infer(attack, Transcript(recorder.folder))


def reader() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(48, 3))


def test_texts_are_told_apart_too(tmp_path: Path) -> None:
    tokens, labels = torch.randint(20, (8, 6), generator=generator("tokens")), torch.arange(8) % 3
    model = reader()
    cross_entropy(model(tokens[:HELD]), labels[:HELD]).backward()
    before = copy_state(model)
    after = {name: p.detach() - RATE * p.grad for name, p in model.named_parameters() if p.grad is not None}
    recorder = Recorder(tmp_path)
    payload = Payload.from_dense(after, "weights")
    recorder.write(1, [Update(round=1, client=0, before=before, payload=payload, num_examples=HELD)])
    known = knowledge(model=reader, candidates=Records(inputs=tokens, labels=labels))
    for attack in (MembershipLoss(), MembershipCosine(), MembershipDifference()):
        scores = infer(attack, Transcript(recorder.folder), known)
        assert scores[:HELD].mean() > scores[HELD:].mean()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_gradients_of_single_candidates_want_shared_statistics_of_batch_norm_and_losses_do_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = [copy_state(normalised(), statistics=False) for _ in range(2)]
    recorder = Recorder(tmp_path)
    payload = Payload.from_dense(states[1], "weights")
    recorder.write(1, [Update(round=1, client=0, before=states[0], payload=payload, num_examples=HELD)])
    transcript, known = Transcript(recorder.folder), knowledge(model=normalised)
    with pytest.raises(AttackError, match="do not share BatchNorm's running statistics"):
        infer(MembershipCosine(), transcript, known)
    assert infer(MembershipLoss(), transcript, known).isfinite().all()


def test_updates_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    recorder, before = Recorder(tmp_path), copy_state(network(1))
    broken = {name: tensor / 0 for name, tensor in before.items()}
    sent: Sequence[Update] = [build_update(before, broken, num_examples=HELD)]
    recorder.write(1, sent)
    with pytest.raises(AttackError, match="round 1, client 0: its update holds NaN or infinite values"):
        infer(MembershipCosine(), Transcript(recorder.folder))


def test_a_round_that_is_not_finite_is_told_and_the_others_are_averaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, before = Recorder(tmp_path), copy_state(network(1))
    after = {name: 1.1 * tensor for name, tensor in before.items()}
    recorder.write(1, [build_update(before, after, num_examples=HELD)])
    alone = infer(MembershipCosine(), Transcript(recorder.folder))
    broken = {name: tensor / 0 for name, tensor in before.items()}
    recorder.write(2, [build_update(before, broken, round=2, num_examples=HELD)])
    assert torch.equal(infer(MembershipCosine(), Transcript(recorder.folder)), alone)
    assert "a round is left out: round 2, client 0: its update holds NaN or infinite values" in caplog.text
