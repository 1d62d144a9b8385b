"""A network that learns to invert messages from clients that are simulated on public digits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adversaries.inversion import learned_inversion
from adversaries.inversion.example_estimator import ClientMessages, match_errors
from adversaries.inversion.learned_inversion import LearnedInversion
from adversaries.inversion.message_inverter import ExampleComponents, MessageInverter, MessageProjection, choose_numbers
from clients.defenses.mixup import Mixup
from clients.defenses.quantise import Quantise
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.metrics import pair_examples, psnr
from fedsim.interfaces.attack import Knowledge, Records
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion import public_fits
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from tests.support.digit_clients import COUNT, data, floor, knowledge, make_update, public, quality
from tests.support.recordings import record_updates, run_attack

NOISE = UpdateNoise(clip=1.0, noise_multiplier=0.004)
ONLY_NOISE = UpdateNoise(clip=1e-6, noise_multiplier=1e4)
LEARNED = LearnedInversion(simulated=150, features=150, components=30, hidden=32, epochs=8, refinements=0)
VICTIMS = range(3)


def attack(folder: Path, update: Update, facts: Any, method: LearnedInversion = LEARNED) -> Reconstruction:
    transcript = record_updates(folder / f"{update.client} {len(list(folder.iterdir()))}", [replace(update, client=0)])
    finding: Reconstruction = run_attack(method, transcript, facts)
    return finding


def gains(folder: Path, *defenses: Defense, sender: int = 0, **settings: Any) -> list[float]:
    """Return by how many dB each victim's claim is beyond its floor, with the message of client `sender` further."""
    method = replace(LEARNED, **settings)
    results = []
    for victim in VICTIMS:
        finding = attack(folder, make_update(victim + sender, *defenses), knowledge(victim, *defenses), method)
        results.append(quality(finding, victim) - floor(victim))
    return results


def gain_over(guess: torch.Tensor, finding: Reconstruction, true: torch.Tensor) -> float:
    """Return by how many dB a claim is beyond a guess in its order."""
    return (psnr(pair_examples(finding.data, true), true) - psnr(guess, true)).mean().item()


def test_one_pass_inverts_messages_of_clients_it_never_saw(tmp_path: Path) -> None:
    """Of four digits each, which are at the floor without a message, by 2 dB for each victim."""
    assert min(gains(tmp_path)) > 2


@pytest.mark.thorough
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_of_few_examples_a_third_of_the_error_is_gone(tmp_path: Path, count: int) -> None:
    for victim in VICTIMS:
        inputs, labels = (tensor[:count] for tensor in data(victim))
        update = make_update(victim, count=count)
        facts = replace(knowledge(victim), labels=labels.sort().values)
        finding = attack(tmp_path, update, facts, replace(LEARNED, simulated=250))
        means = torch.stack([public().inputs[public().labels == label].mean(0) for label in labels])
        error = (pair_examples(finding.data, inputs) - inputs).square().mean()
        assert error < 0.65 * (means - inputs).square().mean()


def test_refinement_by_matching_comes_closer(tmp_path: Path) -> None:
    assert sum(gains(tmp_path, refinements=15)) > sum(gains(tmp_path)) + len(VICTIMS) * 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("defense", [NOISE, pytest.param(Quantise(bits=4), marks=pytest.mark.thorough)])
def test_it_is_beyond_the_floor_under_noise_and_rounding_it_knows(tmp_path: Path, defense: Defense) -> None:
    found = gains(tmp_path, defense, refinements=10)
    assert min(found) > 1


def test_a_sum_over_clients_is_inverted(tmp_path: Path) -> None:
    """Eight digits of two clients, with sums of two clients to learn from."""
    members = (0, 1)
    updates = [make_update(member) for member in members]
    states = [update.after for update in updates]
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    payload = Payload.from_dense(mean, "weights")
    summed = replace(updates[0], payload=payload, num_examples=2 * COUNT, members=members)
    inputs, labels = (torch.cat(parts) for parts in zip(*map(data, members), strict=True))
    order = labels.argsort(stable=True)
    facts = replace(knowledge(0), labels=labels[order], batch_size=2 * COUNT)
    finding = attack(tmp_path, summed, facts)
    means = torch.stack([public().inputs[public().labels == label].mean(0) for label in labels[order]])
    assert gain_over(means, finding, inputs[order]) > 1


@pytest.mark.thorough
def test_neither_noise_alone_nor_another_client_leaks(tmp_path: Path) -> None:
    """The class means and what was learnt are worth no more than the floor without the victim's message."""
    for found in (gains(tmp_path, ONLY_NOISE), gains(tmp_path, sender=5)):
        assert max(found) < 0.3


@pytest.mark.thorough
def test_who_knows_the_noise_finds_more(tmp_path: Path) -> None:
    strong, naive, adaptive = UpdateNoise(clip=1.0, noise_multiplier=0.01), [], []
    for victim in VICTIMS:
        update = make_update(victim, strong)
        naive.append(quality(attack(tmp_path, update, knowledge(victim)), victim))
        adaptive.append(quality(attack(tmp_path, update, knowledge(victim, strong)), victim))
    assert sum(adaptive) > sum(naive) + len(VICTIMS) * 1.0


@pytest.mark.parametrize("defenses", [[], pytest.param([NOISE], marks=pytest.mark.thorough)])
def test_the_expected_error_is_the_actual_one_within_a_quarter(tmp_path: Path, defenses: list[Defense]) -> None:
    expected, actual = [], []
    for victim in range(8):
        finding = attack(tmp_path, make_update(victim, *defenses), knowledge(victim, *defenses))
        assert finding.spread is not None
        true = data(victim)[0]
        expected.append(finding.spread.square().mean())
        actual.append((pair_examples(finding.data, true) - true).square().mean())
    ratio = (torch.stack(expected).mean() / torch.stack(actual).mean()).sqrt().item()
    assert 1 / 1.25 < ratio < 1.25


@pytest.mark.thorough
def test_victims_of_one_model_share_one_training_and_others_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_fits, "_fits", {})
    trained: list[MessageInverter] = []
    train = learned_inversion.train_inverter

    def count_trainings(*arguments: Any) -> MessageInverter:
        trained.append(train(*arguments))
        return trained[-1]

    monkeypatch.setattr(learned_inversion, "train_inverter", count_trainings)
    small = replace(LEARNED, simulated=20, features=20, components=5, epochs=1)
    for victim in range(2):
        attack(tmp_path, make_update(victim), knowledge(victim), small)
    assert len(trained) == 1
    # Another model, another defense and other records each ask for another network.
    moved = make_update(0)
    attack(tmp_path, replace(moved, before={name: 1.1 * w for name, w in moved.before.items()}), knowledge(0), small)
    attack(tmp_path, make_update(0), knowledge(0, NOISE), small)
    attack(tmp_path, make_update(0), knowledge(0, auxiliary=first_records(300)), small)
    assert len(trained) == 4


def first_records(count: int) -> Records:
    return Records(inputs=public().inputs[:count], labels=public().labels[:count])


def test_the_same_network_is_trained_again_whoever_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, results = replace(LEARNED, simulated=20, features=20, components=5, epochs=1), []
    for victims in ((0, 1), (1, 0)):
        monkeypatch.setattr(public_fits, "_fits", {})
        found = {victim: attack(tmp_path, make_update(victim), knowledge(victim), small).data for victim in victims}
        results.append(found)
    for victim in (0, 1):
        assert torch.equal(results[0][victim], results[1][victim])


def test_labels_are_counted_where_they_are_withheld(tmp_path: Path) -> None:
    finding = attack(tmp_path, make_update(1), replace(knowledge(1), labels=None))
    assert finding.labels.tolist() == data(1)[1].sort().values.tolist()


def test_without_auxiliary_records_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KnowledgeError, match=r"LearnedInversion needs auxiliary, which the threat model withholds"):
        attack(tmp_path, make_update(0), replace(knowledge(0), auxiliary=None))


def test_too_few_auxiliary_records_are_refused(tmp_path: Path) -> None:
    facts = knowledge(0, auxiliary=first_records(10 * COUNT - 1))
    with pytest.raises(AttackError, match=r"N = 4 examples each, for which 40 auxiliary records .* 39 are granted"):
        attack(tmp_path, make_update(0), facts)


def test_auxiliary_records_of_another_shape_are_refused(tmp_path: Path) -> None:
    others = Records(inputs=torch.rand(80, 1, 6, 6), labels=torch.arange(80) % 10)
    with pytest.raises(AttackError, match=r"auxiliary records are of shape \(1, 6, 6\), and the victim's of"):
        attack(tmp_path, make_update(0), knowledge(0, auxiliary=others))


def test_a_class_without_auxiliary_records_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = int(data(0)[1][0])
    kept = public().labels != missing
    others = Records(inputs=public().inputs[kept], labels=public().labels[kept])
    small = replace(LEARNED, simulated=20, features=20, components=5, epochs=1)
    attack(tmp_path, make_update(0), knowledge(0, auxiliary=others), small)
    assert f"no auxiliary record is of class {missing}, so examples of it are taken for the average" in caplog.text


def test_where_clients_mix_examples_that_nothing_is_refined_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = replace(LEARNED, simulated=20, features=15, components=8, hidden=4, epochs=1, refinements=1)
    mixing = Mixup().of_client(Participation(num_examples=COUNT, batch_size=COUNT, steps=1, rounds=1, num_classes=10))
    finding = attack(tmp_path, make_update(0, mixing), knowledge(0, mixing), small)
    assert finding.data.isfinite().all()
    assert "mixup mixes examples, so the estimate is not refined" in caplog.text


class StrongerOverRounds(UpdateNoise):
    """Noise that grows with the number of rounds, of which the server's adversary is told nothing."""

    def of_client(self, participation: Participation) -> UpdateNoise:
        return replace(self, noise_multiplier=0.01 * participation.rounds)


def test_a_defense_that_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    defense = StrongerOverRounds(clip=1.0, noise_multiplier=0.01)
    with pytest.raises(AttackError, match=r"the strength of StrongerOverRounds follows from the number of rounds"):
        attack(tmp_path, make_update(0), knowledge(0, defense))


def test_an_example_is_compared_with_the_most_similar_one_of_its_class() -> None:
    true = torch.tensor([[[1.0], [5.0], [2.0]]])
    messages = ClientMessages(features=torch.zeros(1, 1), labels=torch.tensor([[0, 0, 1]]), coefficients=true)
    estimates = torch.tensor([[[5.5], [1.0], [1.0]]])
    # The first two change places. The third is nearer to the first, but of another class.
    assert match_errors(estimates, messages).flatten().tolist() == [0.25, 0.0, 1.0]


def test_components_of_messages_keep_what_differs_between_clients() -> None:
    generator = torch.Generator().manual_seed(0)
    messages = torch.randn(20, 3, generator=generator) @ torch.randn(3, 50, generator=generator) + 4
    projection = MessageProjection.fit(torch.arange(50), messages, 10)
    features = projection.project(messages)
    assert features.shape == (20, 3)
    torch.testing.assert_close(features @ projection.basis.T + projection.mean, messages, rtol=1e-3, atol=1e-3)


def test_numbers_that_a_defense_never_sends_are_left_out() -> None:
    clean, defended = torch.randn(10, 4), torch.randn(10, 4)
    clean[:, 1], defended[:, 2] = 1.0, 0.0
    assert choose_numbers(clean, defended).tolist() == [0, 3]


def test_a_regression_has_one_class() -> None:
    components = ExampleComponents(
        shape=(2,), mean=torch.zeros(2), basis=torch.eye(2), class_means=torch.zeros(1, 2), left_out=0.0
    )
    assert components.classes(torch.tensor([0.3, -1.0])).tolist() == [0, 0]


def test_too_few_auxiliary_records_are_refused_before_the_run() -> None:
    records = Records(inputs=torch.rand(60, 1, 4, 4), labels=torch.zeros(60, dtype=torch.long))
    with pytest.raises(AttackError, match=r"^the clients: .* N = 8 .* 80 auxiliary records are needed and 60 are"):
        LEARNED.check_facts(Knowledge(auxiliary=records), 8, ())
