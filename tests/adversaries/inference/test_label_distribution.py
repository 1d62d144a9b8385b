"""Attacks on a client's label distribution: against counting by hand, where they are exact, and what they refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from adversaries.inference.label_counts import LabelCounts
from adversaries.inference.llg import LabelLeakage, count_labels_by_row_sums
from adversaries.inference.rlu import LabelsFromUpdates
from fedsim.audit.evaluation.label_distributions import score_distribution
from fedsim.base.errors import AttackError, ConfigError, KnowledgeError
from fedsim.base.randomness import generator
from fedsim.base.task import Task, smooth_labels
from fedsim.data import Dataset
from fedsim.interfaces.attack import Attack, Knowledge, Records, Target
from fedsim.interfaces.findings import LabelDistribution
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

SHAPE, RATE = (1, 8, 8), 0.1
HELD = {0: 12, 3: 6, 7: 2}
ATTACKS = (LabelCounts(), LabelLeakage(), LabelsFromUpdates())


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp(hidden=(32,)).build(Task(SHAPE, 10))


def standardised(digits: Dataset, index: Tensor) -> Tensor:
    mean, std = digits.moments
    return (digits.train.inputs(index) - mean[0]) / std[0]


def own(digits: Dataset) -> tuple[Tensor, Tensor]:
    """What the victim holds."""
    index = torch.cat([torch.nonzero(digits.train.labels == c).flatten()[:n] for c, n in HELD.items()])
    return standardised(digits, index), digits.train.labels[index]


def others(digits: Dataset) -> Records:
    """Auxiliary records, none of them the victim's."""
    index = torch.arange(len(digits.train))[-500:]
    return Records(inputs=standardised(digits, index), labels=digits.train.labels[index])


def record_rounds(
    folder: Path,
    digits: Dataset,
    rounds: int = 2,
    sends: str = "weights",
    make: Callable[[int], nn.Module] = mlp,
    **how: Any,
) -> Transcript:
    """Rounds of the victim alone, each from other weights."""
    recorder, (inputs, labels) = Recorder(folder), own(digits)
    plan = LocalTraining(**({"local_epochs": 1, "batch_size": 20, "learning_rate": RATE} | how))
    for number in range(1, rounds + 1):
        model = make(number)
        before = copy_state(model)
        if sends == "gradient":
            cross_entropy(model(inputs), labels).backward()
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            payload = Payload.from_dense(found, "gradient")
        else:
            after, _ = local_update(model, before, inputs, labels, plan, key=("labels", number))
            payload = Payload.from_dense(after, "weights")
        recorder.write(
            number, [Update(round=number, client=0, before=before, payload=payload, num_examples=len(labels))]
        )
    return Transcript(folder)


def knowledge(digits: Dataset, **rest: Any) -> Knowledge:
    (mean,), (std,) = (moment.tolist() for moment in digits.moments)
    known: dict[str, Any] = {
        "model": mlp,
        "loss": cross_entropy,
        "input_shape": SHAPE,
        "value_range": ([-mean / std], [(1 - mean) / std]),
        "learning_rate": RATE,
        "local_epochs": 1,
        "batch_size": 20,
        "optimizer": "sgd",
        "auxiliary": others(digits),
    }
    return Knowledge(**known | rest)


def claimed(attack: Attack, transcript: Transcript, known: Knowledge) -> LabelDistribution:
    finding = attack.run(Target(transcript=transcript, victim=0, knowledge=known, rng=generator(0)))
    assert isinstance(finding, LabelDistribution)
    return finding


def distance(finding: LabelDistribution) -> tuple[float, float]:
    """The score and its floor."""
    labels = torch.tensor([label for label, count in HELD.items() for _ in range(count)])
    [score, _] = score_distribution(finding.mean_shares, labels, None)
    return score.value, score.floor


@pytest.mark.parametrize(
    ("sums", "count", "expected"),
    [
        ([-4.0, 1.0, -2.0, 0.5], 3, [2, 0, 1, 0]),  # impact -2.5: -4 becomes -1.5 and is the smallest again
        ([-3.5, 1.0, -2.0, 0.5], 4, [2, 0, 2, 0]),  # impact -1.72; a fifth less would make it three and one
        ([-4.0, -3.0, -2.0, 0.5], 2, [1, 1, 0, 0]),
        ([4.0, 3.0, 2.0, 0.5], 2, [1, 1, 1, 1]),
    ],
)
def test_llg_takes_the_impact_of_one_example_off_the_smallest_sum(
    sums: Sequence[float], count: int, expected: Sequence[int]
) -> None:
    assert count_labels_by_row_sums(torch.tensor(sums), count).tolist() == expected


@pytest.mark.parametrize("sends", ["weights", "gradient"])
def test_rlu_is_exact_for_one_step_where_its_records_are_the_victims(
    digits: Dataset, tmp_path: Path, sends: str
) -> None:
    inputs, labels = own(digits)
    known = knowledge(digits, auxiliary=Records(inputs=inputs, labels=labels))
    finding = claimed(LabelsFromUpdates(), record_rounds(tmp_path, digits, sends=sends), known)
    assert finding.rounds.tolist() == [1, 2]
    expected = labels.bincount(minlength=10).double() / len(labels)
    assert torch.allclose(finding.shares, expected.expand(2, -1), atol=2e-3)


@pytest.mark.parametrize(
    ("attack", "epochs"),
    [
        (LabelCounts(), 1),
        (LabelLeakage(), 1),
        (LabelLeakage(), 8),
        (LabelsFromUpdates(), 1),
        pytest.param(LabelsFromUpdates(), 8, marks=pytest.mark.thorough),
    ],
    ids=lambda value: str(value),
)
def test_each_attack_is_far_nearer_than_guessing(digits: Dataset, tmp_path: Path, attack: Attack, epochs: int) -> None:
    how = {"local_epochs": epochs, "batch_size": 5}
    found, floor = distance(claimed(attack, record_rounds(tmp_path, digits, **how), knowledge(digits, **how)))
    assert found < floor / 3


def test_simulated_trainings_bring_rlu_nearer(digits: Dataset, tmp_path: Path) -> None:
    how = {"local_epochs": 8, "batch_size": 5}
    transcript, known = record_rounds(tmp_path, digits, **how), knowledge(digits, **how)
    found, without = (distance(claimed(LabelsFromUpdates(simulations=n), transcript, known))[0] for n in (10, 0))
    assert found < 0.7 * without


def test_fewer_simulations_than_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="simulations: expected at least 0, got -1"):
        LabelsFromUpdates(simulations=-1)


@pytest.mark.parametrize("attack", [LabelCounts(), LabelsFromUpdates()], ids=lambda attack: type(attack).__name__)
def test_smoothing_is_taken_off_again_where_it_is_known(digits: Dataset, tmp_path: Path, attack: Attack) -> None:
    transcript = record_rounds(tmp_path, digits, label_smoothing=0.4)
    apart = {
        smoothing: distance(
            claimed(
                attack,
                transcript,
                knowledge(digits, label_smoothing=smoothing, loss=smooth_labels(cross_entropy, smoothing)),
            )
        )[0]
        for smoothing in (0.0, 0.4)
    }
    assert apart[0.4] < 0.1  # counts of 20 examples are rounded
    assert apart[0.0] > 0.2


def test_llg_counts_whole_examples_under_label_smoothing(digits: Dataset, tmp_path: Path) -> None:
    transcript = record_rounds(tmp_path, digits, label_smoothing=0.4)
    known = knowledge(digits, label_smoothing=0.4, loss=smooth_labels(cross_entropy, 0.4))
    finding = claimed(LabelLeakage(), transcript, known)
    counts = finding.shares * sum(HELD.values())
    assert torch.allclose(counts, counts.round(), atol=1e-6)


def test_a_class_without_auxiliary_record_is_told(
    digits: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = others(digits)
    some = records.labels != 3
    known = knowledge(digits, auxiliary=Records(inputs=records.inputs[some], labels=records.labels[some]))
    with caplog.at_level(logging.WARNING):
        found, floor = distance(claimed(LabelsFromUpdates(), record_rounds(tmp_path, digits, 1), known))
    assert "round 1, client 0: there is no auxiliary record of class 3; the mean of all is used instead" in caplog.text
    assert found < floor


@pytest.mark.parametrize(
    ("attack", "withheld"),
    [
        (LabelCounts(), "value_range"),
        (LabelLeakage(), "model"),
        (LabelsFromUpdates(), "auxiliary"),
        (LabelsFromUpdates(), "learning_rate"),
    ],
)
def test_what_an_attack_needs_is_asked_for(digits: Dataset, tmp_path: Path, attack: Attack, withheld: str) -> None:
    with pytest.raises(KnowledgeError, match=f"needs {withheld}, which the threat model withholds"):
        claimed(attack, record_rounds(tmp_path, digits, 1), knowledge(digits, **{withheld: None}))


def bad_labels(digits: Dataset, labels: Callable[[Tensor], Tensor]) -> Records:
    records = others(digits)
    return Records(inputs=records.inputs, labels=labels(records.labels))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_a_last_layer_that_did_not_move_is_refused(digits: Dataset, tmp_path: Path, attack: Attack) -> None:
    before = copy_state(mlp())
    last = list(before)[-2:]
    after = {name: tensor if name in last else 1.1 * tensor for name, tensor in before.items()}
    update = build_update(before, after, num_examples=20)
    Recorder(tmp_path).write(1, [update])
    with pytest.raises(AttackError, match=r"round 1, client 0: .* did not move; attack a model that ends in"):
        claimed(attack, Transcript(tmp_path), knowledge(digits))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_a_model_that_ends_otherwise_is_refused(digits: Dataset, tmp_path: Path, attack: Attack) -> None:
    def model() -> nn.Module:
        return nn.Sequential(mlp(), nn.Softmax(1))

    before = copy_state(model())
    payload = Payload.from_dense({name: 1.1 * tensor for name, tensor in before.items()}, "weights")
    Recorder(tmp_path).write(1, [Update(round=1, client=0, before=before, payload=payload, num_examples=20)])
    with pytest.raises(AttackError, match="the model ends in Softmax, not in a linear layer; attack a model that ends"):
        claimed(attack, Transcript(tmp_path), knowledge(digits, model=model))


def test_a_last_layer_without_bias_is_refused_before_the_run(digits: Dataset) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))

    for attack in (LabelCounts(), LabelsFromUpdates()):
        with pytest.raises(AttackError, match="last linear layer has no bias; attack a model that ends in a linear"):
            attack.check_facts(knowledge(digits, model=model))
    LabelLeakage().check_facts(knowledge(digits, model=model))


class TiedWeights(nn.Module):
    """The weights of the layer of classes make its inputs, too; they have the layer's name in messages."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        outputs: Tensor = self.head((linear(pixels, self.head.weight).relu() @ self.head.weight + pixels).tanh())
        return outputs


@pytest.mark.parametrize("sends", ["weights", "gradient"])
@pytest.mark.parametrize("attack", [LabelCounts(), LabelsFromUpdates()], ids=lambda attack: type(attack).__name__)
def test_weights_used_twice_are_not_read_where_the_bias_counts_labels(
    digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Attack, sends: str
) -> None:
    known = knowledge(digits, model=TiedWeights)
    with pytest.raises(AttackError, match=r"uses 'head\.weight' of its last linear layer elsewhere, too"):
        LabelLeakage().check_facts(known)
    attack.check_facts(known)
    transcript = record_rounds(tmp_path, digits, rounds=1, sends=sends, make=TiedWeights)
    # The simulated training of the last layer reads its weights, whose gradient has two sources.
    monkeypatch.setattr("fedsim.inversion.labels.updates._simulate_last_layer", None)
    value, floor = distance(claimed(attack, transcript, known))
    assert value < floor / 3


class ContrastScaling(nn.Module):
    """Each image divided by its own norm: NaN for one of zeros."""

    def forward(self, images: Tensor) -> Tensor:
        scaled: Tensor = images / images.flatten(1).norm(dim=1)[:, None, None, None]
        return scaled


@pytest.mark.parametrize("attack", ATTACKS[:2], ids=lambda attack: type(attack).__name__)
def test_a_network_that_divides_by_the_norm_of_an_image_is_attacked(
    digits: Dataset, tmp_path: Path, attack: Attack
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(ContrastScaling(), mlp())

    inputs, labels = own(digits)
    plan = LocalTraining(local_epochs=1, batch_size=20, learning_rate=RATE)
    before = copy_state(model())
    after, _ = local_update(model(), before, inputs, labels, plan, key=("labels",))
    Recorder(tmp_path).write(1, [build_update(before, after, num_examples=len(labels))])
    known = knowledge(digits, model=model, value_range=([-4.0], [4.0]))  # of which zeros are the middle
    attack.check_facts(known)
    score, floor = distance(claimed(attack, Transcript(tmp_path), known))
    assert score < floor / 2


def test_what_rlu_cannot_read_is_refused_in_one_sentence(digits: Dataset, tmp_path: Path) -> None:
    transcript = record_rounds(tmp_path, digits, 1)
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"optimizer": "adam"},
            "clients step with adam, and how far that moves a weight is not known; take label-counts",
        ),
        ({"auxiliary": bad_labels(digits, lambda labels: labels + 5)}, "an auxiliary record is of class 14"),
        ({"auxiliary": bad_labels(digits, lambda labels: labels.float())}, "500 have labels that are classes"),
        ({"auxiliary": bad_labels(digits, lambda labels: labels[:9])}, "of 500 auxiliary records 9 have labels"),
    ]
    for change, told in cases:
        with pytest.raises(AttackError, match=told):
            claimed(LabelsFromUpdates(), transcript, knowledge(digits, **change))
    with pytest.raises(AttackError, match=r"^optimizer: clients step with adam"):  # before the run
        LabelsFromUpdates().check_facts(knowledge(digits, optimizer="adam"))


def test_a_client_that_holds_nothing_is_refused(digits: Dataset, tmp_path: Path) -> None:
    before = copy_state(mlp())
    payload = Payload.from_dense({name: 1.1 * tensor for name, tensor in before.items()}, "weights")
    Recorder(tmp_path).write(1, [Update(round=1, client=0, before=before, payload=payload, num_examples=0)])
    for attack in ATTACKS:
        with pytest.raises(AttackError, match="N is 0; attack a client that reports its num_examples"):
            claimed(attack, Transcript(tmp_path), knowledge(digits))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_round_that_cannot_be_attacked_is_told_and_the_others_count(
    attack: Attack, digits: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = record_rounds(tmp_path / "first", digits, rounds=1)
    before, recorder = copy_state(mlp(2)), Recorder(tmp_path / "both")
    payload = Payload.from_dense({name: tensor / 0 for name, tensor in before.items()}, "weights")
    recorder.write(1, [first.update(1, 0)])
    recorder.write(2, [Update(round=2, client=0, before=before, payload=payload, num_examples=20)])
    finding = claimed(attack, Transcript(recorder.folder), knowledge(digits))
    assert finding.rounds.tolist() == [1]
    assert torch.equal(finding.shares, claimed(attack, first, knowledge(digits)).shares)
    assert "a round is left out: round 2, client 0: " in caplog.text
