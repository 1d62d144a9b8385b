"""Attacks that read models of several sources: SIA, AIA and SRA against formulas written out, and what they refuse."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inference.attribute_inference import (
    GradientAttributeInference,
    ModelAttributeInference,
    choose_evenly_spaced,
)
from adversaries.inference.sample_reconstruction import GradientSampleReconstruction, ModelSampleReconstruction
from adversaries.inference.source_inference import SourceInference
from fedsim.base.errors import AttackError, ConfigError, FedsimError, KnowledgeError
from fedsim.base.metrics import psnr
from fedsim.base.randomness import generator
from fedsim.base.task import squared_error
from fedsim.interfaces.attack import OPTIMAL, Attack, Knowledge, PartialRecords, Records, Target
from fedsim.interfaces.findings import Inference, Representatives
from fedsim.inversion.priors import total_variation
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.model_state import copy_state
from tests.support.recordings import Record, run_attack, target_client


def message(number: int, client: int, before: State, after: State, **rest: Any) -> Update:
    sent = {"payload": Payload.from_dense(after, "weights"), "num_examples": 4}
    return Update(**{"round": number, "client": client, "before": before, **sent, **rest})


def infer(attack: Attack, transcript: Transcript, knowledge: Knowledge, victim: int = 0, seed: int = 0) -> Inference:
    finding = run_attack(attack, transcript, knowledge, victim, seed)
    assert isinstance(finding, Inference)
    return finding


# A table: two numbers around a category of three, and a category of two at the end.

FEATURES, CLASSES = 7, 4


def table(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Records, PartialRecords, Tensor]:
    """Records, the same without the category of three, and what that is."""
    rng = generator("table", seed)
    kinds = torch.randint(3, (count,), generator=rng)
    numbers = torch.randn((count, 2), generator=rng)
    flags = torch.eye(2)[torch.randint(2, (count,), generator=rng)]
    inputs = torch.cat([numbers[:, :1], torch.eye(3)[kinds], numbers[:, 1:], flags], 1).to(dtype)
    known, labels = inputs.clone(), torch.randint(CLASSES, (count,), generator=rng)
    known[:, 1:4] = 0
    partial = PartialRecords(inputs=known, labels=labels, column="kind", features=slice(1, 4), categories=tuple("abc"))
    return Records(inputs=inputs, labels=labels), partial, kinds


def classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.Tanh(), nn.Linear(9, CLASSES))


def normalised(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, CLASSES))


def make_updates(build: Callable[[int], nn.Module], rounds: Mapping[int, Sequence[int]]) -> list[Update]:
    """Untrained models: in each round the clients named, each of whom returns one of its own."""
    return [
        message(number, client, copy_state(build(100 * number)), copy_state(build(100 * number + client + 1)))
        for number, clients in rounds.items()
        for client in clients
    ]


def distances(model: nn.Module, partial: PartialRecords) -> Tensor:
    """Eq. 3, record by record and category by category."""
    rows = []
    for row, label in zip(partial.inputs, partial.labels, strict=True):
        scores = []
        for category in range(3):
            whole = row.clone()
            whole[1 + category] = 1
            logits = model(whole[None])[0].detach().numpy().astype(float)
            shares = np.exp(logits) / np.exp(logits).sum()
            scores.append(sum((shares[k] - float(k == int(label))) ** 2 for k in range(CLASSES)))
        rows.append(scores)
    return torch.tensor(rows)


# AIA on a model.


@pytest.mark.parametrize("source", ["global", "last-returned", "decoder", OPTIMAL])
def test_attributes_are_those_of_eq_3_written_out_on_the_model_of_that_source(source: str, record: Record) -> None:
    _, partial, _ = table(12)
    transcript = record(make_updates(classifier, {1: [0, 1], 3: [0, 1], 7: [1]}))
    expected = {"global": 700, "last-returned": 301}.get(source, 55)
    known = Knowledge(model=classifier, partial_records=partial, models={0: copy_state(classifier(55))})
    attack = ModelAttributeInference(source=source)
    found = infer(attack, transcript, known)
    reference = distances(classifier(expected), partial)
    assert torch.allclose(-found.scores.double(), reference, atol=1e-6)
    assert torch.equal(found.predictions, reference.argmin(1))
    assert found.of == "attribute"
    assert attack.builds_on == (source if source in ("decoder", OPTIMAL) else None)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2, 0.6])
def test_proposition_4_bounds_the_accuracy_on_linear_models(seed: int, noise: float, record: Record) -> None:
    rng = np.random.default_rng(seed)
    count, secret = 60, rng.integers(0, 2, 60)
    public = rng.normal(size=(count, 3))
    inputs = np.concatenate([public, np.eye(2)[secret]], 1)
    targets = inputs @ np.array([0.7, -0.4, 1.1, 0.2, 1.0 + rng.random()]) + noise * rng.normal(size=count)
    weights = np.linalg.lstsq(inputs, targets, rcond=None)[0]
    error, importance = np.mean((inputs @ weights - targets) ** 2), weights[4] - weights[3]
    bound = 1 - 4 * error / importance**2

    known = torch.tensor(inputs, dtype=torch.float32)
    known[:, 3:] = 0
    partial = PartialRecords(
        inputs=known,
        labels=torch.tensor(targets, dtype=torch.float32),
        column="secret",
        features=slice(3, 5),
        categories=("no", "yes"),
    )
    state = {"weight": torch.tensor(weights[None], dtype=torch.float32)}
    transcript = record([message(1, 0, state, state)])
    knowledge = Knowledge(model=lambda: nn.Linear(5, 1, bias=False), partial_records=partial)
    found = infer(ModelAttributeInference(), transcript, knowledge)
    accuracy = float((found.predictions == torch.tensor(secret)).float().mean())
    assert accuracy >= bound
    if noise == 0:
        assert accuracy == 1
        assert bound == pytest.approx(1, abs=1e-9)
    elif noise < 0.6:
        assert bound > 0.3  # so that it says something
    else:
        assert accuracy < 1  # and so that it is not the attack that is always right


def test_without_shared_statistics_all_completions_are_one_batch_so_that_the_attribute_is_not_normalised_away(
    record: Record,
) -> None:
    _, partial, _ = table(12)
    kept = {name: t for name, t in copy_state(normalised(3)).items() if "running" not in name}
    transcript = record([message(1, 0, kept, kept)])
    found = infer(ModelAttributeInference(), transcript, Knowledge(model=normalised, partial_records=partial))
    whole = torch.cat([partial.complete_with(category) for category in range(3)])
    hidden = whole @ kept["0.weight"].T + kept["0.bias"]
    hidden = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    logits = (hidden * kept["1.weight"] + kept["1.bias"]).relu() @ kept["3.weight"].T + kept["3.bias"]
    wrong = (logits.softmax(1) - torch.eye(CLASSES)[partial.labels].repeat(3, 1)).square().sum(1)
    assert torch.allclose(-found.scores, wrong.reshape(3, -1).T, atol=1e-5)
    assert found.scores.std(1).min() > 1e-3


def test_with_shared_statistics_a_record_is_judged_by_itself(record: Record) -> None:
    _, partial, _ = table(12)
    state = copy_state(normalised(3)) | {"1.running_mean": torch.full((9,), 0.3)}
    transcript = record([message(1, 0, state, state)])
    found = infer(ModelAttributeInference(), transcript, Knowledge(model=normalised, partial_records=partial))
    model = normalised(3).eval()
    model.load_state_dict({**model.state_dict(), **state})
    assert torch.allclose(-found.scores.double(), distances(model, partial), atol=1e-6)


def test_a_plain_list_of_arrays_is_matched_by_order(record: Record) -> None:
    _, partial, _ = table(5)
    state = copy_state(classifier(3))
    listed = {str(place): tensor for place, tensor in enumerate(state.values())}
    known = Knowledge(model=classifier, partial_records=partial)
    one, other = (infer(ModelAttributeInference(), record([message(1, 0, s, s)]), known) for s in (state, listed))
    assert torch.equal(one.scores, other.scores)


# AIA on gradients.


def smooth(seed: int = 0) -> nn.Module:
    return classifier(seed).double()


def steps(records: Records, rounds: int, build: Callable[[int], nn.Module] = smooth, rate: float = 0.1) -> list[Update]:
    """One full-batch step of client 0 in each round, from models that are far apart."""
    updates = []
    for number in range(1, rounds + 1):
        model = build(number)
        before = copy_state(model)
        cross_entropy(model(records.inputs), records.labels).backward()
        after = {name: p.detach() - rate * p.grad for name, p in model.named_parameters() if p.grad is not None}
        updates.append(message(number, 0, before, {**before, **after}, num_examples=len(records.inputs)))
    return updates


@pytest.mark.usefixtures("exact")
def test_the_objective_is_the_mean_cosine_and_its_slope_that_of_finite_differences(record: Record) -> None:
    records, partial, _ = table(5, dtype=torch.float64)
    transcript = record(steps(records, 3))
    known = Knowledge(model=smooth, loss=cross_entropy, partial_records=partial)
    objective = GradientAttributeInference()._objective(target_client(transcript, known))
    logits = torch.randn((5, 3), generator=generator("logits"), dtype=torch.float64)

    def written_out(point: Tensor) -> float:
        cosines = []
        for update in transcript.updates(0):
            model = smooth()
            model.load_state_dict(update.before)
            inputs = partial.inputs.clone()
            inputs[:, 1:4] = point.exp() / point.exp().sum(1, keepdim=True)
            slopes = torch.autograd.grad(cross_entropy(model(inputs), partial.labels), list(model.parameters()))
            a = np.concatenate([slope.numpy().ravel() for slope in slopes])
            b = np.concatenate([(update.before[k] - update.after[k]).numpy().ravel() for k in update.before])
            cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        return 1 - float(np.mean(cosines))

    value, slope = objective(logits)
    assert float(value) == pytest.approx(written_out(logits), abs=1e-12)
    for place in itertools.product(range(5), range(3)):
        shift = torch.zeros_like(logits)
        shift[place] = 1e-5
        difference = (written_out(logits + shift) - written_out(logits - shift)) / 2e-5
        assert float(slope[place]) == pytest.approx(difference, abs=1e-8)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in (1, 2))])
@pytest.mark.usefixtures("exact")
def test_attributes_of_a_tiny_client_are_read_off_exact_gradients(seed: int, record: Record) -> None:
    records, partial, kinds = table(8, seed, dtype=torch.float64)
    transcript = record(steps(records, 4))
    known = Knowledge(model=smooth, loss=cross_entropy, partial_records=partial)
    attack = GradientAttributeInference(iterations=60)
    found = infer(attack, transcript, known)
    assert torch.equal(found.predictions, kinds)
    curve = found.trace["objective"]
    assert curve[-1] < 0.02 * curve[0]


@pytest.mark.usefixtures("exact")
def test_the_search_moves_many_records_as_far_as_few(record: Record) -> None:
    """The mean cosine's slope for one of n records is of the size 1 / n."""
    for count in (8, 400):
        records, partial, _ = table(count, dtype=torch.float64)
        transcript = record(steps(records, 2))
        known = Knowledge(model=smooth, loss=cross_entropy, partial_records=partial)
        found = infer(GradientAttributeInference(iterations=15, learning_rate=0.5), transcript, known)
        curve = found.trace["objective"]
        assert curve[-1] < 0.1 * curve[0]


@pytest.mark.thorough
@pytest.mark.usefixtures("exact")
def test_an_objective_that_stays_ends_the_search(record: Record) -> None:
    records, partial, _ = table(4, dtype=torch.float64)
    known = Knowledge(model=smooth, loss=cross_entropy, partial_records=partial)
    transcript = record(steps(records, 2))
    told: list[tuple[int, int]] = []
    found = GradientAttributeInference(iterations=500, learning_rate=1.0, patience=3).run(
        Target(transcript=transcript, victim=0, knowledge=known, rng=generator(0)),
        lambda at, of, values: told.append((at, of)),
    )
    assert 20 < len(found.trace["objective"]) < 400
    assert told[-1] == (500, 500)


@pytest.mark.usefixtures("exact")
def test_a_gradient_that_was_sent_is_read_like_the_step_along_it(record: Record) -> None:
    records, partial, _ = table(6, dtype=torch.float64)
    updates = steps(records, 3, rate=0.5)
    gradients = [
        dataclasses.replace(u, payload=Payload.from_dense({k: 2 * v for k, v in u.pseudo_gradient.items()}, "gradient"))
        for u in updates
    ]
    known = Knowledge(model=smooth, loss=cross_entropy, partial_records=partial)
    attack = GradientAttributeInference(iterations=5)
    one, other = (infer(attack, record(list(each)), known) for each in (updates, gradients))
    assert torch.allclose(one.scores, other.scores, atol=1e-8)


@pytest.mark.usefixtures("exact")
def test_restarts_are_chosen_by_the_objective_alone(record: Record) -> None:
    records, partial, _ = table(6, dtype=torch.float64)
    transcript = record(steps(records, 2))
    known = Knowledge(model=smooth, loss=cross_entropy, partial_records=partial)
    settings: dict[str, Any] = {"iterations": 4, "start": 3.0, "learning_rate": 0.5}
    rng, singles = generator(9), []
    for _ in range(3):
        singles.append(
            GradientAttributeInference(**settings).run(
                Target(transcript=transcript, victim=0, knowledge=known, rng=rng)
            )
        )
    both = GradientAttributeInference(**settings, restarts=3).run(
        Target(transcript=transcript, victim=0, knowledge=known, rng=generator(9))
    )
    objective = GradientAttributeInference()._objective(target_client(transcript, known))
    ends = [float(objective(single.scores.double())[0]) for single in singles]
    assert max(ends) - min(ends) > 1e-4
    assert torch.equal(both.scores, singles[int(np.argmin(ends))].scores)


@pytest.mark.parametrize(
    ("shared", "batch_statistics", "by_batch"), [(True, True, True), (True, False, False), (False, False, True)]
)
def test_records_are_normalised_as_asked_and_by_the_batch_where_nothing_else_is_there(
    shared: bool, batch_statistics: bool, by_batch: bool, record: Record
) -> None:
    _, partial, _ = table(6)
    before = copy_state(normalised(3)) | {
        "1.running_mean": torch.full((9,), 0.3),
        "1.running_var": torch.full((9,), 2.0),
    }
    kept = {name: tensor for name, tensor in before.items() if shared or "running" not in name}
    after = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator(name)) for name, tensor in kept.items()}
    known = Knowledge(model=normalised, loss=cross_entropy, partial_records=partial)
    attack = GradientAttributeInference(batch_statistics=batch_statistics)
    value, _ = attack._objective(target_client(record([message(1, 0, kept, after)]), known))(torch.zeros(6, 3))
    model = normalised()
    model.load_state_dict({**model.state_dict(), **before})
    model.train(by_batch)
    whole = partial.inputs.clone()
    whole[:, 1:4] = 1 / 3
    slopes = torch.autograd.grad(cross_entropy(model(whole), partial.labels), list(model.parameters()))
    names = [name for name, _ in model.named_parameters()]
    one, other = (torch.cat([t.flatten() for t in side]) for side in (slopes, [before[n] - after[n] for n in names]))
    assert float(value) == pytest.approx(1 - float(one @ other / one.norm() / other.norm()), abs=1e-5)


def test_rounds_are_spread_from_the_first_to_the_last() -> None:
    assert choose_evenly_spaced([1, 11, 21, 31, 41], 3) == [1, 21, 41]
    assert choose_evenly_spaced([1, 11, 21], None) == choose_evenly_spaced([1, 11, 21], 9) == [1, 11, 21]
    assert choose_evenly_spaced([4, 8], 1) == [4]


# SIA.


def linear(weights: Sequence[Sequence[float]]) -> State:
    return {"weight": torch.tensor(weights)}


def blank() -> nn.Module:
    return nn.Linear(2, 2, bias=False)


LIKES_0, LIKES_1, UNSURE = linear([[4, 4], [0, 0]]), linear([[0, 0], [4, 4]]), linear([[0, 0], [0, 0]])
ONES = Records(inputs=torch.ones(3, 2), labels=torch.tensor([0, 1, 1]))
ABOUT_SOURCES = Knowledge(model=blank, loss=cross_entropy, records=ONES)


@pytest.mark.parametrize("source", ["last-returned", "decoder", OPTIMAL])
def test_a_record_is_said_to_be_of_the_client_whose_model_knows_it_best(source: str, record: Record) -> None:
    states = {2: UNSURE, 5: LIKES_0, 7: LIKES_1}
    transcript = record(
        [message(1, client, UNSURE, LIKES_0) for client in states]
        + [message(2, client, UNSURE, state) for client, state in states.items()]
    )
    known = dataclasses.replace(ABOUT_SOURCES, models=None if source == "last-returned" else states)
    found = infer(SourceInference(source=source), transcript, known, victim=5)
    assert found.of == "source"
    assert found.candidates.tolist() == [2, 5, 7]
    assert found.predictions.tolist() == [5, 7, 7]
    sure, wrong = math.log1p(math.exp(-8)), math.log1p(math.exp(8))
    reference = [[math.log(2), sure, wrong], [math.log(2), wrong, sure], [math.log(2), wrong, sure]]
    assert torch.allclose(-found.scores, torch.tensor(reference), atol=1e-5)


@pytest.mark.parametrize("source", ["returned", "last-returned"])
def test_records_of_one_client_are_decided_together_by_their_mean_loss(source: str, record: Record) -> None:
    # Of the three records two are of class 1: client 7 is surest of those, and so of their mean.
    states = {2: UNSURE, 5: LIKES_0, 7: linear([[0, 0], [0.5, 0.5]])}
    transcript = record([message(1, client, UNSURE, state) for client, state in states.items()])
    attack = SourceInference(source=source, decide="together")
    assert infer(attack, transcript, ABOUT_SOURCES, victim=5).predictions.tolist() == [7, 7, 7]
    each = infer(SourceInference(source=source), transcript, ABOUT_SOURCES, victim=5)
    assert each.predictions.tolist() == [5, 7, 7]


def test_the_claims_about_records_do_not_depend_on_whose_they_are(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    """Who infers sources does not know that records are of the one client without a model, so they are not spared."""
    transcript = record([message(1, client, UNSURE, UNSURE) for client in (2, 5, 7)])
    known = dataclasses.replace(ABOUT_SOURCES, models={2: LIKES_0, 5: LIKES_1})
    with caplog.at_level(logging.WARNING):
        of_others, own = (infer(SourceInference(source="lmra"), transcript, known, victim=who) for who in (2, 7))
    assert own.candidates.tolist() == of_others.candidates.tolist() == [2, 5]
    assert own.predictions.tolist() == of_others.predictions.tolist() == [2, 5, 5]
    assert [told.getMessage() for told in caplog.records] == [
        "SourceInference: 'lmra' decoded no model of client 7, so its records are claimed to be of others"
    ]


def test_the_majority_of_rounds_decides_among_those_who_took_part(record: Record) -> None:
    a, b = linear([[1, 1], [0, 0]]), linear([[2, 2], [0, 0]])  # the larger, the surer of class 0
    transcript = record(
        [
            message(1, 0, UNSURE, b), message(1, 1, UNSURE, a),  # class 0: client 0 wins
            message(2, 1, UNSURE, a), message(2, 2, UNSURE, UNSURE),  # client 1, as client 0 is away
            message(3, 1, UNSURE, LIKES_0), message(3, 2, UNSURE, UNSURE),  # client 1
            message(4, 0, UNSURE, b), message(4, 2, UNSURE, a),  # client 0
            message(5, 0, UNSURE, UNSURE), message(5, 1, UNSURE, b),  # client 1
        ]
    )  # fmt: skip
    found = infer(SourceInference(), transcript, ABOUT_SOURCES)
    # Class 1 goes to the least sure of class 0: clients 1, 2, 2, 2 and 0.
    assert found.predictions.tolist() == [1, 2, 2]
    assert found.scores.floor().tolist() == [[2, 3, 0], [1, 1, 3], [1, 1, 3]]


def test_equally_many_rounds_are_decided_by_the_mean_loss(record: Record) -> None:
    near, sure = linear([[0.1, 0.1], [0, 0]]), linear([[9, 9], [0, 0]])
    transcript = record(
        [
            message(1, 0, UNSURE, near), message(1, 1, UNSURE, UNSURE),
            message(2, 0, UNSURE, UNSURE), message(2, 1, UNSURE, sure),
        ]
    )  # fmt: skip
    assert infer(SourceInference(), transcript, ABOUT_SOURCES).predictions[0] == 1


def test_whoever_took_part_more_often_has_no_larger_mean_loss_for_that(record: Record) -> None:
    surer = [linear([[sure, sure], [0, 0]]) for sure in (0.0, 0.2, 0.3, 0.5)]  # class 0 costs .69, .51, .44, .31
    transcript = record(
        [
            message(1, 0, UNSURE, surer[1]), message(1, 2, UNSURE, surer[0]), message(1, 3, UNSURE, LIKES_1),
            message(2, 1, UNSURE, surer[2]), message(2, 2, UNSURE, surer[0]),
            message(3, 1, UNSURE, surer[2]), message(3, 2, UNSURE, surer[3]),
            message(4, 1, UNSURE, surer[2]), message(4, 3, UNSURE, surer[3]),
        ]
    )  # fmt: skip
    found = infer(SourceInference(), transcript, ABOUT_SOURCES)
    assert found.scores[0].floor().tolist() == [1, 1, 1, 1]
    assert found.predictions[0] == 1  # in three rounds it lost 1.31 in all, client 0 in its only one .51


def test_clients_who_share_the_smallest_loss_have_all_won(record: Record) -> None:
    """A model that is very sure has a loss of exactly 0 in float32, and of several such the first is no better."""
    transcript = record(
        [
            message(1, 0, UNSURE, LIKES_0), message(1, 1, UNSURE, LIKES_0), message(1, 2, UNSURE, LIKES_1),
            message(2, 0, UNSURE, UNSURE), message(2, 1, UNSURE, UNSURE), message(2, 2, UNSURE, LIKES_1),
        ]
    )  # fmt: skip
    found = infer(SourceInference(), transcript, ABOUT_SOURCES)
    assert found.scores[:, 0].tolist() == found.scores[:, 1].tolist()
    for won, score in zip([2, 0], found.scores[:2, 0].tolist(), strict=True):
        assert won <= score < won + 0.5
    assert found.predictions.tolist()[1:] == [2, 2]


def test_one_model_after_another_leaves_nothing_of_itself(record: Record) -> None:
    """Running statistics that some clients share and others do not, and integers."""
    whole = {0: normalised(3), 1: normalised(4), 2: normalised(5)}
    for client, model in whole.items():
        model(5 * client + torch.randn((20, FEATURES), generator=generator("fill", client)))
    states = {client: dict(model.state_dict()) for client, model in whole.items()}
    states[1] = {name: t for name, t in states[1].items() if not name.startswith(("1.running", "1.num"))}
    states[2].pop("1.num_batches_tracked")
    records = table(6)[0]
    known = Knowledge(model=normalised, loss=cross_entropy, records=records, models=states)
    transcript = record([message(1, client, {}, {}) for client in states])
    found = infer(SourceInference(source="decoder"), transcript, known)
    for client, state in states.items():
        model = normalised()
        model.load_state_dict({**model.state_dict(), **state})
        model.train(client == 1)
        with torch.no_grad():
            expected = cross_entropy(model(records.inputs), records.labels, reduction="none")
        torch.testing.assert_close(-found.scores[:, client], expected)


def test_a_regression_and_a_loss_that_only_gives_means_are_scored_record_by_record(record: Record) -> None:
    records = Records(inputs=torch.tensor([[1.0], [2.0]]), labels=torch.tensor([3.0, 2.0]))
    transcript = record([message(1, client, linear([[0.0]]), linear([[float(client)]])) for client in (1, 3)])
    known = Knowledge(
        model=lambda: nn.Linear(1, 1, bias=False), loss=lambda out, y: squared_error(out, y), records=records
    )
    found = infer(SourceInference(source="last-returned"), transcript, known, victim=1)
    assert (-found.scores).tolist() == [[4, 0], [0, 16]]


# SRA.

SHAPE = (1, 8, 8)


def images_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 10))


ABOUT_IMAGES = Knowledge(
    model=images_model,
    loss=cross_entropy,
    input_shape=SHAPE,
    value_range=([-1.0], [3.0]),
    input_mean=[0.5],
    input_std=[1.2],
    num_classes=10,
    batch_size=1,
)


def typical(attack: Attack, transcript: Transcript, knowledge: Knowledge = ABOUT_IMAGES) -> Representatives:
    finding = run_attack(attack, transcript, knowledge)
    assert isinstance(finding, Representatives)
    return finding


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"objective": "probability", "learning_rate": 5.0},
        {"optimizer": "adam", "learning_rate": 0.02},
        {"tv_weight": 1.0},
    ],
)
def test_images_of_a_class_make_the_model_sure_of_it(settings: dict[str, Any], record: Record) -> None:
    state = {name: 5 * tensor for name, tensor in copy_state(images_model(4)).items()}
    transcript = record([message(1, 0, state, state)])
    found = typical(ModelSampleReconstruction(iterations=60, **settings), transcript)
    assert found.labels.tolist() == list(range(10))
    assert found.data.shape == (10, *SHAPE)
    model = images_model()
    model.load_state_dict(state)
    before, after = (
        model(4 * images - 1).softmax(1).diagonal() for images in (torch.full((10, *SHAPE), 0.5), found.data)
    )
    assert (after > before + 0.1).all()
    assert after.mean() > 0.7
    assert before.mean() < 0.2
    assert found.trace["objective"][-1] < found.trace["objective"][0]


def test_eq_5_is_climbed_along_its_slope(record: Record) -> None:
    state = copy_state(images_model(4))
    transcript = record([message(1, 0, state, state)])
    attack = ModelSampleReconstruction(objective="probability", learning_rate=0.3, iterations=1)
    found = typical(attack, transcript)
    for k in range(10):
        start = torch.full((1, *SHAPE), 0.5, requires_grad=True)
        images_model(4)(4 * start - 1).softmax(1)[0, k].backward()
        assert start.grad is not None
        assert torch.allclose(found.data[k], (start + 0.3 * start.grad).detach()[0], atol=1e-6)


def test_the_total_variation_of_each_image_is_added_to_what_its_class_says(record: Record) -> None:
    state = copy_state(images_model(4))
    attack = ModelSampleReconstruction(objective="probability", learning_rate=0.3, tv_weight=0.5, iterations=3)
    found = typical(attack, record([message(1, 0, state, state)]))
    for k in (0, 7):
        image = torch.full((1, *SHAPE), 0.5)
        for _ in range(3):
            image.requires_grad_()
            rough = (image.diff(dim=2).abs().mean() + image.diff(dim=3).abs().mean()) / 2
            objective = 1 - images_model(4)(4 * image - 1).softmax(1)[0, k] + 0.5 * rough
            image = (image - 0.3 * torch.autograd.grad(objective, image)[0]).clamp(0, 1).detach()
        assert torch.allclose(found.data[k], image[0], atol=1e-5)


def test_a_class_that_needs_no_better_image_stops_the_search(record: Record) -> None:
    state = {name: torch.zeros_like(tensor) for name, tensor in copy_state(images_model()).items()}
    told: list[tuple[int, int]] = []
    ModelSampleReconstruction(patience=5).run(
        Target(transcript=record([message(1, 0, state, state)]), victim=0, knowledge=ABOUT_IMAGES, rng=generator(0)),
        lambda at, of, values: told.append((at, of)),
    )
    assert told == [(1, 1000), (1000, 1000)]


def trained(count: int, number: int = 1) -> tuple[Tensor, Tensor, Update]:
    """What client 0 holds in [0, 1], its labels, and its update of one step."""
    data = torch.rand((count, *SHAPE), generator=generator("images"))
    labels, model = torch.arange(count) + 3, images_model(number)
    before = copy_state(model)
    cross_entropy(model(4 * data - 1), labels).backward()
    after = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    return data, labels, message(number, 0, before, after, num_examples=count)


def test_a_single_image_and_its_label_are_found_from_the_gradient(record: Record) -> None:
    data, labels, update = trained(1)
    attack = GradientSampleReconstruction(tv_weight=0.0, iterations=200)
    found = typical(attack, record([update]))
    assert found.labels.tolist() == labels.tolist()
    floor = psnr(torch.full_like(data, 0.5), data).item()
    assert psnr(found.data, data).item() > floor + 8


def test_as_many_images_as_a_batch_are_claimed_from_the_chosen_round(record: Record) -> None:
    transcript = record([trained(5, 1)[2], trained(5, 3)[2]])
    for batch, expected in ((2, 2), (8, 5)):
        known = dataclasses.replace(ABOUT_IMAGES, batch_size=batch)
        first, third = (typical(GradientSampleReconstruction(iterations=2, round=r), transcript, known) for r in (1, 3))
        assert len(first.data) == len(first.labels) == expected
        assert torch.equal(typical(GradientSampleReconstruction(iterations=2), transcript, known).data, first.data)
        assert not torch.equal(first.data, third.data)


class Offset(nn.Module):
    """BatchNorm, and a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.register_buffer("shift", torch.tensor(0.5))
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Sigmoid(), nn.Linear(32, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs + self.shift)
        return outputs


def trained_by_batch(withheld: str) -> Update:
    """An update of one step in training on four images, without the buffers whose names hold that."""
    data, labels, _ = trained(4)
    model = Offset()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cross_entropy(model(4 * data - 1), labels).backward()
    moved = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    states = (before, dict(model.state_dict()) | moved)
    kept = ({name: t for name, t in each.items() if not withheld or withheld not in name} for each in states)
    return message(1, 0, *kept, num_examples=4)


@pytest.mark.thorough
def test_batch_norm_normalises_as_it_did_for_the_client(record: Record) -> None:
    known = dataclasses.replace(ABOUT_IMAGES, model=Offset, batch_size=4)
    attack = GradientSampleReconstruction(tv_weight=0.0, iterations=150)
    shared, withheld = (typical(attack, record([trained_by_batch(name)]), known) for name in ("", "running"))
    assert torch.equal(shared.data, withheld.data)
    assert shared.trace["objective"][-1] < 0.1 * shared.trace["objective"][0]
    with refused("the model normalises with shift, which clients of this federation do not share"):
        run_attack(attack, record([trained_by_batch("shift")]), known)


def test_total_variation_smooths_what_is_matched_to_a_gradient(record: Record) -> None:
    transcript = record([trained(2)[2]])
    rough, smoothed = (
        typical(GradientSampleReconstruction(tv_weight=weight, iterations=50), transcript).data for weight in (0.0, 1.0)
    )
    assert total_variation(smoothed) < 0.5 * total_variation(rough)


def test_adam_takes_smaller_steps_in_the_end_and_sgd_does_not() -> None:
    def shares(optimizer: Any) -> list[float]:
        schedule = GradientSampleReconstruction(optimizer=optimizer)._recipe(None).schedule  # type: ignore[arg-type]
        return [schedule(step, 80) for step in (0, 31, 51, 71)]

    assert shares("adam") == pytest.approx([1, 0.1, 0.01, 0.001])
    assert shares("sgd") == [1, 1, 1, 1]


# What is refused, in one sentence each.


def refused(sentence: str, error: type[FedsimError] = AttackError) -> Any:
    return pytest.raises(error, match=rf"^(?=[^\n]*[^.\n]\Z){sentence}")


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: SourceInference(source="global"), "source: the global model is the same for all clients"),
        (lambda: SourceInference(source=" "), "source: expected returned, last-returned, optimal or the title"),
        (lambda: ModelAttributeInference(source=""), "source: expected global, last-returned, optimal or the title"),
        (lambda: GradientAttributeInference(iterations=0), "iterations: expected at least 1, got 0"),
        (lambda: GradientAttributeInference(rounds=0), "rounds: expected at least 1, got 0"),
        (lambda: GradientAttributeInference(learning_rate=0.0), "learning_rate: expected a value above 0"),
        (lambda: GradientAttributeInference(start=-1.0), "start: expected at least 0"),
        (lambda: GradientAttributeInference(restarts=2), "restarts: with start = 0 all 2 begin at the same point"),
        (lambda: ModelSampleReconstruction(iterations=0), "iterations: expected at least 1, got 0"),
        (lambda: ModelSampleReconstruction(learning_rate=math.inf), "learning_rate: expected a finite value"),
        (lambda: ModelSampleReconstruction(tv_weight=-1.0), "tv_weight: expected at least 0"),
        (lambda: GradientSampleReconstruction(round=0), "round: expected at least 1, got 0"),
        (lambda: GradientSampleReconstruction(step_size=-1.0), "step_size: expected a value above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(build: Callable[[], Attack], sentence: str) -> None:
    with refused(sentence, ConfigError):
        build()


_, PARTIAL, _ = table(4)
ABOUT_TABLE = Knowledge(model=classifier, loss=cross_entropy, records=table(4)[0], partial_records=PARTIAL)
ON_TABLES: list[Attack] = [
    SourceInference(),
    SourceInference(source="last-returned"),
    ModelAttributeInference(),
    ModelAttributeInference(source="global"),
    GradientAttributeInference(iterations=2),
]
DECODED: list[Attack] = [SourceInference(source="lmra"), ModelAttributeInference(source="lmra")]


@pytest.mark.parametrize("attack", [*ON_TABLES, *DECODED, ModelSampleReconstruction(), GradientSampleReconstruction()])
def test_a_client_that_never_took_part(attack: Attack, record: Record) -> None:
    known = dataclasses.replace(
        ABOUT_IMAGES, records=ABOUT_TABLE.records, partial_records=PARTIAL, models={9: {}, 1: {}}
    )
    transcript = record(make_updates(classifier, {1: [0, 1], 3: [0, 1]}))
    with refused(r"client 9: took part in none of the 2 rounds to be attacked; choose another victim \(recorded: 0, 1"):
        run_attack(attack, transcript, known, victim=9)


@pytest.mark.parametrize("attack", DECODED)
def test_a_source_that_decoded_nothing(attack: Attack, record: Record) -> None:
    transcript = record(make_updates(classifier, {1: [0, 1]}))
    with refused("source: there are no models of 'lmra'; name an attack of the same file"):
        run_attack(attack, transcript, ABOUT_TABLE)
    one_model = attack.title == "ModelAttributeInference"
    for models in ({}, {1: copy_state(classifier())}):
        told = "'lmra' decoded no model of client 0" if one_model else f".*but {len(models)} have a model that 'lmra' "
        with refused(f"source: {told}" if one_model else told):
            run_attack(attack, transcript, dataclasses.replace(ABOUT_TABLE, models=models))


def test_a_source_has_to_be_one_of_several(record: Record) -> None:
    alone = dataclasses.replace(ABOUT_TABLE, models={0: copy_state(classifier())})
    transcript = record(make_updates(classifier, {1: [0]}))
    with refused("expected at least 2 candidates for the source of a record, but 1 took part in the inspected rounds"):
        run_attack(SourceInference(), transcript, alone)
    with refused("expected at least 2 candidates for the source of a record, but 1 have a model that 'lmra' decoded"):
        run_attack(SourceInference(source="lmra"), transcript, alone)


@pytest.mark.parametrize("attack", [*ON_TABLES, *DECODED])
def test_weights_that_are_nan(attack: Attack, record: Record) -> None:
    broken = copy_state(classifier()) | {"2.weight": torch.full((CLASSES, 9), math.nan)}
    transcript = record([message(1, 0, broken, broken), message(1, 1, broken, broken)])
    known = dataclasses.replace(ABOUT_TABLE, models={0: broken, 1: broken})
    with refused("(round 1|lmra), (client 0|the global model): 2.weight (of the model )?holds NaN or infinite values"):
        run_attack(attack, transcript, known)


def test_a_model_whose_outputs_overflow(record: Record) -> None:
    huge = {name: torch.full_like(tensor, 3e38) for name, tensor in copy_state(classifier()).items()}
    transcript = record([message(1, 0, huge, huge)])
    with refused("client 0, model source last-returned: the model outputs NaN or infinite values"):
        run_attack(ModelAttributeInference(), transcript, ABOUT_TABLE)


@pytest.mark.parametrize(
    "attack", [SourceInference(), SourceInference(source="last-returned"), ModelAttributeInference()]
)
def test_a_federation_of_gradients_has_no_returned_models(attack: Attack, record: Record) -> None:
    state = copy_state(classifier())
    transcript = record(
        [message(1, client, state, {}, payload=Payload.from_dense(state, "gradient")) for client in (0, 1)]
    )
    with refused("round 1, client 0: sent a gradient, no weights, so that there is no returned model to attack"):
        run_attack(attack, transcript, ABOUT_TABLE)
    infer(ModelAttributeInference(source="global"), transcript, ABOUT_TABLE)


@pytest.mark.parametrize("attack", ON_TABLES)
def test_labels_that_are_missing(attack: Attack, record: Record) -> None:
    transcript = record(make_updates(classifier, {1: [0, 1]}))

    def known(**changed: Tensor) -> Knowledge:
        records, partial = table(4)[:2]
        whole, part = dataclasses.replace(records, **changed), dataclasses.replace(partial, **changed)
        return dataclasses.replace(ABOUT_TABLE, records=whole, partial_records=part)

    with refused("of 4 known records 3 have labels; this attack needs the label of each"):
        run_attack(attack, transcript, known(labels=torch.tensor([0, 1, 2])))
    with refused("the label of known record 2 is missing or infinite; this attack needs the label of each"):
        run_attack(attack, transcript, known(labels=torch.tensor([0, 1, math.nan, 2])))
    with refused("no record of the victim is known; attack a client that holds data"):
        run_attack(attack, transcript, known(labels=torch.empty(0), inputs=torch.empty(0, FEATURES)))


def test_labels_that_do_not_fit_the_model(record: Record) -> None:
    transcript = record(make_updates(classifier, {1: [0, 1]}))
    for labels, sentence in (
        (torch.tensor([0, 1, 2, 9]), "labels of known records go from 0 to 9, but the model has 4 outputs"),
        (torch.rand(4), "the labels are targets of a regression, but the model has 4 outputs"),
    ):
        partial = dataclasses.replace(PARTIAL, labels=labels)
        with refused(sentence):
            run_attack(ModelAttributeInference(), transcript, dataclasses.replace(ABOUT_TABLE, partial_records=partial))


@pytest.mark.parametrize(
    "attack", [SourceInference(), SourceInference(source="last-returned"), GradientAttributeInference(iterations=2)]
)
def test_labels_that_the_loss_does_not_take(attack: Attack, record: Record) -> None:
    transcript = record(make_updates(classifier, {1: [0, 1]}))
    records, partial = table(4)[:2]
    for labels, kind in ((torch.tensor([0, 1, 2, 9]), "int64"), (torch.rand(4), "float32")):
        known = dataclasses.replace(
            ABOUT_TABLE,
            records=dataclasses.replace(records, labels=labels),
            partial_records=dataclasses.replace(partial, labels=labels),
        )
        with refused(rf"(round 1, )?client 0: the loss does not take labels of type {kind} with outputs of shape"):
            run_attack(attack, transcript, known)


@pytest.mark.parametrize(
    "attack", [SourceInference(), SourceInference(source="last-returned"), GradientAttributeInference(iterations=2)]
)
def test_a_loss_that_is_nan_wins_nothing(attack: Attack, record: Record) -> None:
    transcript = record(make_updates(classifier, {1: [0, 1]}))
    known = dataclasses.replace(ABOUT_TABLE, loss=lambda out, y: cross_entropy(out, y) * math.nan)
    with refused("(round 1, )?client 0: the loss of known records is NaN; check their labels"):
        run_attack(attack, transcript, known)


@pytest.mark.parametrize("attack", ON_TABLES)
def test_a_model_of_another_federation(attack: Attack, record: Record) -> None:
    transcript = record(make_updates(classifier, {1: [0, 1]}))
    with refused("round 1, (client 0|the global model): 4 tensors are not the weights of the model, which has 1;"):
        run_attack(attack, transcript, dataclasses.replace(ABOUT_TABLE, model=blank))


@pytest.mark.parametrize("attack", ON_TABLES)
def test_records_that_the_model_does_not_take(attack: Attack, record: Record) -> None:
    transcript = record(make_updates(lambda seed: nn.Linear(3, CLASSES), {1: [0, 1]}))
    known = dataclasses.replace(ABOUT_TABLE, model=lambda: nn.Linear(3, CLASSES))
    with refused(r"(round 1, )?client 0(, model source [a-z-]+)?: the model does not take inputs of shape \(\d+, 7\)"):
        run_attack(attack, transcript, known)


class Shifted(nn.Linear):
    """A layer with a buffer that takes part in what it computes."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("shift", torch.zeros(CLASSES))


@pytest.mark.parametrize("attack", ON_TABLES)
def test_buffers_that_were_not_shared(attack: Attack, record: Record) -> None:
    torch.manual_seed(0)
    states = [{name: p.detach().clone() for name, p in Shifted().named_parameters()} for _ in range(3)]
    transcript = record([message(1, client, states[2], states[client]) for client in (0, 1)])
    with refused("round 1, (client 0|the global model): the model computes with shift, which clients of this federat"):
        run_attack(attack, transcript, dataclasses.replace(ABOUT_TABLE, model=Shifted))


def test_one_record_has_no_statistics_to_be_normalised_by(record: Record) -> None:
    kept = {name: t for name, t in copy_state(normalised(3)).items() if "running" not in name}
    transcript = record([message(1, client, kept, kept) for client in (0, 1)])
    known = Knowledge(model=normalised, loss=cross_entropy, records=table(1)[0])
    with refused(r"round 1, client 0: the model does not take inputs of shape \(1, 7\) \(Expected more than 1 value"):
        run_attack(SourceInference(), transcript, known)


def test_a_client_whose_weights_never_change_tells_nothing(record: Record) -> None:
    state = copy_state(classifier())
    with refused("client 0: its weights did not change in any of the rounds that are used, there is nothing to match"):
        run_attack(GradientAttributeInference(), record([message(1, 0, state, state)]), ABOUT_TABLE)


def test_a_search_that_diverges_is_a_failure(record: Record) -> None:
    records, partial, _ = table(4)
    transcript = record(steps(records, 2, classifier))
    known = Knowledge(
        model=classifier, loss=lambda out, y: cross_entropy(out, y) / (out.sum() * 0), partial_records=partial
    )
    with refused("client 0: the objective is NaN before the first step, whatever the attack's learning_rate"):
        run_attack(GradientAttributeInference(iterations=3), transcript, known)


def test_samples_need_classes_and_rounds_that_are_there(record: Record) -> None:
    transcript = record([trained(2, 4)[2]])
    with refused("ModelSampleReconstruction needs num_classes, which the threat model withholds", KnowledgeError):
        run_attack(ModelSampleReconstruction(), transcript, dataclasses.replace(ABOUT_IMAGES, num_classes=None))
    with refused(r"client 0, model source global: for 7 classes the model has outputs of shape \(7, 10\), expected"):
        run_attack(
            ModelSampleReconstruction(source="global"), transcript, dataclasses.replace(ABOUT_IMAGES, num_classes=7)
        )
    with refused("round: client 0 is not in round 2 of those that are inspected, expected one of 4"):
        run_attack(GradientSampleReconstruction(round=2), transcript, ABOUT_IMAGES)
