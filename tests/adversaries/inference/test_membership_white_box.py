"""Membership learnt from known records: against features written out, one record at a time, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inference.membership_white_box import MembershipWhiteBox
from fedsim.base.errors import AttackError, ConfigError, KnowledgeError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge, KnownCandidates, Records, Target
from fedsim.interfaces.findings import Membership
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.model_state import copy_state

HELD = 40


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def records(count: int, seed: int) -> Records:
    rng = generator("records", seed)
    return Records(inputs=torch.randn((count, 30), generator=rng), labels=torch.randint(3, (count,), generator=rng))


OWN, OTHERS = records(HELD, 0), records(HELD, 1)


def half(first: bool) -> tuple[Records, Tensor]:
    """Members and others, and which are members."""
    rows = slice(HELD // 2) if first else slice(HELD // 2, None)
    inputs = torch.cat([OWN.inputs[rows], OTHERS.inputs[rows]])
    labels = torch.cat([OWN.labels[rows], OTHERS.labels[rows]])
    return Records(inputs=inputs, labels=labels), torch.arange(len(labels)) < len(labels) // 2


def knowledge(**rest: Any) -> Knowledge:
    (known, members), (asked, _) = half(True), half(False)
    granted: dict[str, Any] = {"model": network, "loss": cross_entropy, "candidates": asked}
    granted["known_candidates"] = KnownCandidates(inputs=known.inputs, labels=known.labels, members=members)
    return Knowledge(**granted | rest)


@pytest.fixture(scope="module")
def recorded_rounds(tmp_path_factory: pytest.TempPathFactory) -> Transcript:
    """Two rounds in which a client learns its records by heart."""
    recorder, model = Recorder(tmp_path_factory.mktemp("recorded")), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for number in (1, 2):
        before = copy_state(model)
        for _ in range(60):
            optimizer.zero_grad()
            cross_entropy(model(OWN.inputs), OWN.labels).backward()
            optimizer.step()
        payload = Payload.from_dense(copy_state(model), "weights")
        recorder.write(number, [Update(round=number, client=0, before=before, payload=payload, num_examples=HELD)])
    return Transcript(recorder.folder)


def infer(attack: MembershipWhiteBox, transcript: Transcript, known: Knowledge) -> Tensor:
    finding = attack.run(Target(transcript=transcript, victim=0, knowledge=known, rng=generator(0)))
    assert isinstance(finding, Membership)
    return finding.scores


def features(state: State, one: Tensor, label: Tensor) -> list[float]:
    """Of one record, for the last two layers."""
    model = network()
    model.load_state_dict(dict(state))
    made = model(one)
    loss = cross_entropy(made, label)
    loss.backward()
    lengths = []
    for layer in (model[2], model[4]):
        parts = [p.grad.flatten() for p in layer.parameters() if p.grad is not None]
        lengths.append(float(torch.cat(parts).norm().log10()))
    p = made.detach().double().softmax(1).squeeze(0)
    own = p[label]
    return [float(loss.detach()), *lengths, float((own / (1 - own)).log()), float(-(p * p.log()).sum())]


def table(rounds: Transcript, of: Records) -> Tensor:
    return torch.tensor(
        [
            [value for number in (1, 2) for value in features(rounds.update(number, 0).after, one, label)]
            for one, label in zip(of.inputs.split(1), of.labels.split(1), strict=True)
        ],
        dtype=torch.float64,
    )


def auc_of(members: Tensor, scores: Tensor) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(members, scores))


def test_scores_are_the_log_odds_of_a_regression_on_features_of_all_rounds(recorded_rounds: Transcript) -> None:
    from sklearn.linear_model import LogisticRegression

    (known, members), (asked, _) = half(True), half(False)
    learnt = table(recorded_rounds, known)
    mean, deviation = learnt.mean(0), learnt.std(0, correction=0)
    model = LogisticRegression(C=0.5, max_iter=1000).fit(((learnt - mean) / deviation).numpy(), members.numpy())
    expected = torch.from_numpy(model.decision_function(((table(recorded_rounds, asked) - mean) / deviation).numpy()))
    found = infer(MembershipWhiteBox(layers=2, strength=0.5), recorded_rounds, knowledge())
    assert torch.allclose(found, expected, atol=1e-2)


def test_candidates_that_are_members_score_higher(recorded_rounds: Transcript) -> None:
    assert auc_of(half(False)[1], infer(MembershipWhiteBox(), recorded_rounds, knowledge())) > 0.9


def test_it_learns_from_what_is_known(recorded_rounds: Transcript) -> None:
    right = knowledge()
    assert right.known_candidates is not None
    wrong = replace(right.known_candidates, members=~right.known_candidates.members)
    scores = infer(MembershipWhiteBox(), recorded_rounds, knowledge(known_candidates=wrong))
    assert auc_of(half(False)[1], scores) < 0.1


def test_of_a_regression_loss_and_gradients_are_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    def line() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 1), nn.Flatten(0))

    def squared(made: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return nn.functional.mse_loss(made, targets, reduction=reduction)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        before, targets = copy_state(line()), torch.randn(2, HELD)
    weight = torch.linalg.lstsq(OWN.inputs, targets[0][:, None]).solution.T
    recorder = Recorder(tmp_path_factory.mktemp("line"))
    payload = Payload.from_dense({"0.weight": weight, "0.bias": torch.zeros(1)}, "weights")
    recorder.write(1, [Update(round=1, client=0, before=before, payload=payload, num_examples=HELD)])
    (known, members), (asked, _) = half(True), half(False)
    known, asked = (
        replace(one, labels=torch.cat([targets[0][rows], targets[1][rows]]))
        for one, rows in ((known, slice(HELD // 2)), (asked, slice(HELD // 2, None)))
    )
    grant = KnownCandidates(inputs=known.inputs, labels=known.labels, members=members)
    scores = infer(
        MembershipWhiteBox(),
        Transcript(recorder.folder),
        knowledge(model=line, loss=squared, candidates=asked, known_candidates=grant),
    )
    assert auc_of(half(False)[1], scores) > 0.8


def test_without_known_records_it_is_refused(recorded_rounds: Transcript) -> None:
    with pytest.raises(KnowledgeError, match="needs known_candidates, which the threat model withholds"):
        infer(MembershipWhiteBox(), recorded_rounds, knowledge(known_candidates=None))


@pytest.mark.parametrize(
    ("members", "told"),
    [
        (
            torch.ones(HELD).bool(),
            "of 40 known records 40 are members; this attack learns from members and from others",
        ),
        (torch.zeros(HELD).bool(), "of 40 known records 0 are members"),
        (torch.ones(3).bool(), "of 40 known records 3 are said to be members or not; say so of each"),
    ],
)
def test_known_records_of_one_kind_are_refused(members: Tensor, told: str, recorded_rounds: Transcript) -> None:
    known, _ = half(True)
    grant = KnownCandidates(inputs=known.inputs, labels=known.labels, members=members)
    with pytest.raises(AttackError, match=told):
        infer(MembershipWhiteBox(), recorded_rounds, knowledge(known_candidates=grant))


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"layers": 0}, "layers: expected at least 1, got 0"), ({"strength": 0.0}, "strength: expected a value above 0")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        MembershipWhiteBox(**settings)


def test_more_layers_than_the_network_has_are_refused(recorded_rounds: Transcript) -> None:
    with pytest.raises(AttackError, match=r"layers is 4, and the network has 3 layers with weights .*; name fewer"):
        infer(MembershipWhiteBox(layers=4), recorded_rounds, knowledge())
    found = [infer(MembershipWhiteBox(layers=layers), recorded_rounds, knowledge()) for layers in (None, 3, 2)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
