"""LMRA: exact decoding of linear models, the learnt mapping, and what both refuse."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from adversaries.local_models import lmra, lmra_dummy_data
from adversaries.local_models.lmra import LocalModelReconstruction
from adversaries.local_models.lmra_dummy_data import DummyDataReconstruction
from adversaries.local_models.lmra_linear import LinearLocalModel, solve_optimum
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import squared_error
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import LocalModel
from fedsim.inversion.local_updates import UpdateSpan, read_updates
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from tests.support.recordings import PLAIN_SGD, Record, build_update
from tests.support.tensors import flatten_state


def state(model: Tensor) -> dict[str, Tensor]:
    """The last parameter is the bias."""
    return {"0.weight": model[:-1].reshape(1, -1).clone(), "0.bias": model[-1:].clone()}


def least_squares(features: int = 6, examples: int = 40, rank: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A client's design matrix with its column of ones, its targets, and its optimum by the normal equations."""
    rng = generator("least squares", features, examples)
    inputs = torch.randn((examples, features), generator=rng, dtype=torch.float64)
    if rank is not None:
        inputs[:, rank:] = 0
    design = torch.cat([inputs, torch.ones(examples, 1, dtype=torch.float64)], 1)
    targets = design @ torch.randn(features + 1, generator=rng, dtype=torch.float64)
    targets += torch.randn(examples, generator=rng, dtype=torch.float64)
    return design, targets, torch.linalg.pinv(design) @ targets


def trained(models: Tensor, design: Tensor, targets: Tensor, steps: int) -> Tensor:
    """Full-batch gradient descent on the mean squared error from `... parameter`, Algorithm 3."""
    for _ in range(steps):
        models = models - 0.05 * 2 / len(targets) * (models @ design.T - targets) @ design
    return models


def trained_on_batches(models: Tensor, design: Tensor, targets: Tensor, steps: int, rng: torch.Generator) -> Tensor:
    """The same from `model parameter`, each on mini-batches of four of its own drawing."""
    for _ in range(steps):
        rows = torch.randint(len(targets), (len(models), 4), generator=rng)
        errors = torch.einsum("mbp,mp->mb", design[rows], models) - targets[rows]
        models = models - 0.05 * 2 / 4 * torch.einsum("mb,mbp->mp", errors, design[rows])
    return models


def messages(count: int, steps: int, dtype: torch.dtype = torch.float64, **data: Any) -> list[Update]:
    """Models that do not depend on one another, and what the client makes of them."""
    design, targets, optimum = least_squares(**data)
    updates = []
    for number in range(1, count + 1):
        before = torch.randn(len(optimum), generator=generator("model", number), dtype=torch.float64).to(dtype)
        after = trained(before.double(), design, targets, steps).to(dtype)
        updates.append(build_update(state(before), state(after), round=number, client=3, num_examples=40))
    return updates


def target_of(transcript: Transcript, victim: int, **knowledge: Any) -> Target:
    return Target(
        transcript=transcript.restrict_to(transcript.rounds),
        victim=victim,
        knowledge=Knowledge(**knowledge),
        rng=generator(1),
    )


def attacked(attack: Attack, transcript: Transcript, victim: int | None = None, **knowledge: Any) -> LocalModel:
    victim = transcript.clients(1)[0] if victim is None else victim
    finding = attack.run(target_of(transcript, victim, **knowledge))
    assert isinstance(finding, LocalModel)
    return finding


def failure(attack: Attack, transcript: Transcript, victim: int | None = None) -> str:
    """The one clear sentence."""
    victim = transcript.clients(1)[0] if victim is None else victim
    with pytest.raises(AttackError) as caught:
        attacked(attack, transcript, victim)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    return sentence


# Linear models.


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_d_plus_one_messages_give_the_optimum_exactly_whatever_the_number_of_local_steps(
    record: Record, steps: int
) -> None:
    optimum = least_squares()[2]
    found = attacked(LinearLocalModel(), record(messages(len(optimum) + 1, steps)))
    error = (flatten_state(found.state) - optimum).norm() / optimum.norm()
    assert error < 1e-6
    assert {name: tensor.shape for name, tensor in found.state.items()} == {"0.weight": (1, 6), "0.bias": (1,)}


def test_in_float32_the_optimum_is_found_as_exactly_as_the_messages_allow(record: Record) -> None:
    optimum = least_squares()[2]
    found = attacked(LinearLocalModel(), record(messages(3 * len(optimum), 7, torch.float32)))
    assert all(tensor.dtype == torch.float32 for tensor in found.state.values())
    error = (flatten_state(found.state) - optimum).norm() / optimum.norm()
    assert 1e-9 < error < 1e-5


def test_w_and_v_are_those_of_the_proof() -> None:
    """Eq. 13 written out: the optimum follows from W = I - (I - 2 eta H / m)^E, and no message was trained."""
    design, targets, optimum = least_squares()
    shrink = torch.eye(7, dtype=torch.float64) - 0.1 / 40 * design.T @ design
    w = torch.eye(7, dtype=torch.float64) - torch.linalg.matrix_power(shrink, 5)
    models = torch.randn((8, 7), generator=generator("models"), dtype=torch.float64)
    solution = solve_optimum(models, models @ w.T - w @ optimum)
    assert solution is not None
    found, residual, _ = solution
    assert torch.allclose(found, optimum, rtol=1e-9)
    assert residual < 1e-20
    assert torch.allclose(trained(models[0], design, targets, 5), models[0] - w @ (models[0] - optimum))


def test_with_mini_batches_the_error_falls_like_one_over_the_root_of_the_messages() -> None:
    """Proposition 3, its assumptions met: models that are independent of earlier gradients, and heterogeneous."""
    design, targets, optimum = least_squares(features=4, examples=32)
    rng = generator("stochastic")
    models = torch.randn((20, 1600, 5), generator=rng, dtype=torch.float64)
    moved = models - trained_on_batches(models.flatten(0, 1), design, targets, 3, rng).view_as(models)
    errors = {}
    for count in (100, 400, 1600):
        found = [solve_optimum(models[trial, :count], moved[trial, :count]) for trial in range(20)]
        away = torch.stack([solution[0] - optimum for solution in found if solution is not None])
        assert len(away) == 20
        errors[count] = float(away.square().sum(1).mean().sqrt())
    slope = math.log(errors[1600] / errors[100]) / math.log(16)
    assert -0.6 < slope < -0.4
    assert errors[1600] < errors[400] < errors[100]
    assert errors[1600] < 0.1 * optimum.norm()


def test_fewer_than_d_plus_one_messages_are_refused(record: Record) -> None:
    told = failure(LinearLocalModel(), record(messages(7, 3)))
    assert told == (
        "client 3: 7 messages are recorded, expected at least 8; one more than the model's 7 parameters; "
        "record more rounds, or take attack lmra"
    )
    assert "1 message is recorded" in failure(LinearLocalModel(), record(messages(1, 3)))


@pytest.mark.usefixtures("exact")
def test_where_models_are_alike_what_the_messages_determine_is_claimed_and_told(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    """All broadcast models lie in a plane: the claim is the projection of the optimum on what its equations fix."""
    design, targets, optimum = least_squares()
    corners = torch.randn((3, 7), generator=generator("plane"), dtype=torch.float64)
    updates = []
    for number in range(1, 13):
        before = torch.rand(3, generator=generator("place", number), dtype=torch.float64).softmax(0) @ corners
        after = trained(before, design, targets, 3)
        updates.append(build_update(state(before), state(after), round=number, client=3, num_examples=40))
    with caplog.at_level(logging.WARNING):
        found = attacked(LinearLocalModel(), record(updates), **PLAIN_SGD)
    assert caplog.messages == [
        "client 3, rounds 1-12: the messages determine 2 of 7 directions of the local model; in the others it is "
        "claimed as it was returned last"
    ]
    assert found.trace["determined_directions"].tolist() == [2]
    claimed, last = flatten_state(found.state), flatten_state(updates[-1].after)
    assert (claimed - optimum).norm() < (last - optimum).norm()
    assert abs((claimed - last) @ (claimed - optimum)) < 1e-9  # a projection: the rest stands upright on the change
    within = [
        (flatten_state(u.before) - flatten_state(u.after)) - (flatten_state(v.before) - flatten_state(v.after))
        for u, v in itertools.pairwise(updates)
    ]
    assert torch.stack(within).mv(claimed - optimum).abs().max() < 1e-9  # the optimum itself, in those directions


def test_models_that_differ_by_no_more_than_rounding_are_too_alike(record: Record) -> None:
    start = messages(1, 3, torch.float32)[0].before
    updates = []
    for number in range(1, 13):
        noise = 2e-7 * torch.randn(7, generator=generator("noise", number))
        before = (flatten_state(start) + noise).float()
        after = trained(before.double(), *least_squares()[:2], 3).float()
        updates.append(build_update(state(before), state(after), round=number, client=3, num_examples=40))
    assert "too alike: they differ by no more than rounding" in failure(LinearLocalModel(), record(updates))


@pytest.mark.usefixtures("exact")
def test_of_many_optima_the_one_nearest_to_what_was_returned_is_claimed(record: Record) -> None:
    """Three of six inputs are always 0: the gradient of the client's loss vanishes at the claim."""
    design, targets, _ = least_squares(rank=4)
    updates = messages(12, 3, rank=4)
    found = attacked(LinearLocalModel(), record(updates))
    assert found.trace["determined_directions"].tolist() == [5]
    claimed = flatten_state(found.state)
    assert (design.T @ (design @ claimed - targets)).norm() < 1e-9
    torch.testing.assert_close(claimed[4:6], flatten_state(updates[-1].after)[4:6])  # of which the data say nothing


# What both read.


@pytest.mark.parametrize("attack", [LinearLocalModel(), LocalModelReconstruction(epochs=5, minimise_epochs=5)])
def test_messages_that_cannot_be_attacked_are_refused(record: Record, attack: Attack) -> None:
    updates = messages(9, 3)
    assert failure(attack, record(updates), victim=8).startswith(
        "client 8: took part in none of the 9 rounds to be attacked; choose another victim (recorded: 3)"
    )
    gradient = dataclasses.replace(updates[4], payload=Payload.from_dense(updates[4].before, "gradient"))
    assert "round 5, client 3: it sent a gradient" in failure(attack, record([*updates[:4], gradient, *updates[5:]]))
    broken = dict(updates[2].after) | {"0.bias": torch.tensor([math.nan], dtype=torch.float64)}
    nan = dataclasses.replace(updates[2], payload=Payload.from_dense(broken, "weights"))
    assert "round 3, client 3: 0.bias holds NaN" in failure(attack, record([*updates[:2], nan, *updates[3:]]))
    other = dataclasses.replace(updates[2], payload=Payload.from_dense({"0.weight": torch.zeros(1, 3)}, "weights"))
    assert "returned other tensors" in failure(attack, record([*updates[:2], other, *updates[3:]]))
    smaller = {"0.weight": torch.zeros(1, 3, dtype=torch.float64)}
    changed = dataclasses.replace(updates[2], before=smaller, payload=Payload.from_dense(smaller, "weights"))
    assert "another one than in round 2" in failure(attack, record([*updates[:2], changed, *updates[3:]]))


def test_running_statistics_and_integers_are_claimed_as_last_returned(record: Record) -> None:
    extra = {"1.running_var": torch.ones(2), "1.num_batches_tracked": torch.tensor(3)}
    updates = [
        dataclasses.replace(
            u,
            before=dict(u.before) | extra,
            payload=Payload.from_dense(
                dict(u.after) | extra | {"1.running_var": torch.full((2,), float(u.round))}, "weights"
            ),
        )
        for u in messages(8, 3, torch.float32)
    ]
    found = attacked(LinearLocalModel(), record(updates))
    assert list(found.state) == list(updates[0].after)
    assert torch.equal(found.state["1.running_var"], torch.full((2,), 8.0))
    assert found.state["1.num_batches_tracked"] == 3
    assert (flatten_state({k: found.state[k] for k in ("0.weight", "0.bias")}) - least_squares()[2]).norm() < 1e-3


def test_the_span_holds_every_model_and_keeps_distances(record: Record) -> None:
    rng = generator("span")
    updates = []
    for number in range(1, 6):
        before = torch.randn(400, generator=rng)
        after = before + 0.01 * torch.randn(400, generator=rng)
        updates.append(build_update({"w": before}, {"w": after}, round=number, client=3))
    read = read_updates(target_of(record(updates), 3))
    span = UpdateSpan(read)
    assert span.before.shape == (5, 9)  # five models and five updates; the mean of the models takes one dimension
    assert span.deltas.shape == (5, 5)
    for model, coordinates in ((read.before, span.before), (read.after, span.after)):
        rebuilt = torch.stack([span.model(place) for place in coordinates])
        assert torch.allclose(rebuilt, model.double(), atol=1e-6)
        assert torch.allclose(torch.cdist(coordinates, coordinates), torch.cdist(model.double(), model.double()))
    moved = (read.after - read.before).double()
    assert torch.allclose(span.deltas @ span.deltas.T, moved @ moved.T)


# Networks.


def network() -> nn.Module:
    return seeded_network(hidden=8)


def seeded_network(hidden: int) -> nn.Module:
    with seed_globals("network"):
        return nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def data(client: int) -> tuple[Tensor, Tensor]:
    rng = generator("data", client)
    inputs = torch.randn((30, 5), generator=rng)
    return inputs, (inputs @ torch.randn((5, 3), generator=rng)).argmax(1)


def stepped(model: nn.Module, before: Mapping[str, Tensor], client: int, steps: int, rate: float) -> dict[str, Tensor]:
    weights = {name: tensor.clone() for name, tensor in before.items()}
    for _ in range(steps):
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
        loss = cross_entropy(functional_call(model, leaves, (data(client)[0],)), data(client)[1])
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        weights = {n: t.detach() - rate * s for (n, t), s in zip(leaves.items(), slopes, strict=True)}
    return weights


@cache
def federated(rounds: int = 30) -> list[Update]:
    """FedAvg of clients 0 and 1, of whom client 0 is recorded."""
    model, updates = network(), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(1, rounds + 1):
        returned = [stepped(model, before, client, 2, 0.1) for client in (0, 1)]
        updates.append(build_update(before, returned[0], round=number, num_examples=30))
        before = {name: (returned[0][name] + returned[1][name]) / 2 for name in before}
    return updates


KNOWN = {"model": network, "loss": cross_entropy, "input_shape": (5,)}
SHORT: dict[str, Any] = {"hidden": "16x2", "learning_rate": 1e-2, "epochs": 80, "minimise_epochs": 80}


@pytest.mark.parametrize("space", ["span", pytest.param("full", marks=pytest.mark.thorough)])
def test_the_mapping_is_learnt_and_its_norm_falls(record: Record, space: Any) -> None:
    found = attacked(LocalModelReconstruction(space=space, **SHORT), record(federated()))
    last = federated()[-1].after
    assert {name: (t.shape, t.dtype) for name, t in found.state.items()} == {
        name: (t.shape, t.dtype) for name, t in last.items()
    }
    assert found.trace["objective"].min() < 0.5 * found.trace["objective"][0]
    errors, held_out = found.trace["training_error"], found.trace["validation_error"]
    assert len(held_out) == len(errors)
    changes = held_out.diff().nonzero().flatten()
    assert len(changes)
    assert (changes % 10 == 9).all()  # they are looked at every tenth epoch
    assert held_out.min() < 1
    again = attacked(LocalModelReconstruction(space=space, **SHORT), record(federated()))
    assert all(torch.equal(found.state[name], again.state[name]) for name in last)


def test_a_mapping_no_better_than_the_mean_update_is_a_failed_attack(record: Record) -> None:
    rng = generator("noise")
    noisy = [
        dataclasses.replace(
            u,
            payload=Payload.from_dense(
                {n: t + torch.randn(t.shape, generator=rng) for n, t in u.before.items()}, "weights"
            ),
        )
        for u in federated()
    ]
    told = failure(LocalModelReconstruction(hidden="16x2", learning_rate=1e-6, epochs=20), record(noisy))
    assert "no better than a constant does" in told


def test_a_mapping_is_not_validated_on_models_that_came_back_unchanged(record: Record) -> None:
    trained, *others = federated(4)
    idle = [dataclasses.replace(u, payload=Payload.from_dense(u.before, "weights")) for u in others]
    told = failure(LocalModelReconstruction(**SHORT), record([trained, *idle]))
    assert "it returned all models as they were that the mapping would be validated on" in told
    assert "inspect rounds in which it trains" in told


def noise(drift: float = 0.0) -> list[Update]:
    """The client moves by chance, and always by `drift` in each parameter."""
    rng = generator("noise")
    return [
        dataclasses.replace(
            u,
            payload=Payload.from_dense(
                {n: t + drift + torch.randn(t.shape, generator=rng) for n, t in u.before.items()}, "weights"
            ),
        )
        for u in federated(20)
    ]


@pytest.mark.parametrize("drift", [pytest.param(0.0, marks=pytest.mark.thorough), 3.0])
def test_a_mapping_that_learns_its_messages_by_heart_is_a_failed_attack(record: Record, drift: float) -> None:
    told = failure(LocalModelReconstruction(**SHORT | {"hidden": "64x2"}), record(noise(drift)))
    assert "learnt from 16 messages predicts the other 4 no better than a constant does" in told
    assert "inspect more rounds (recording.every, adversary.rounds)" in told


def test_held_out_messages_choose_and_all_of_them_train(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    train = lmra._train

    def noted(*given: Any) -> Any:
        calls.append((*given[1:5], training := train(*given)))
        return training

    monkeypatch.setattr(lmra, "_train", noted)
    monkeypatch.setattr(lmra, "_LEARNING_RATES", (1e-3, 1e-2))  # the paper's take many more epochs
    attacked(LocalModelReconstruction(**SHORT | {"learning_rate": None, "minimise_epochs": 2}), record(federated()))
    *tried, (rate, seen, unseen, epochs, _) = calls
    assert [call[0] for call in tried] == [1e-3, 1e-2]
    for call in tried:
        assert (len(call[1].inputs), len(call[2].inputs)) == (24, 6)
        assert torch.cdist(call[1].inputs, call[2].inputs).min() > 0
    assert (len(seen.inputs), unseen) == (30, None)
    lowest = [min(call[4].validation) for call in tried]
    best = lowest.index(min(lowest))
    assert rate == tried[best][0]
    assert epochs == max(1, 10 * tried[best][4].validation.index(lowest[best]))


@pytest.mark.parametrize("space", ["span", "full"])
def test_inputs_and_updates_are_divided_by_one_number_each(record: Record, space: Any) -> None:
    updates = read_updates(target_of(record(federated(6)), 0))
    pairs = lmra._build_pairs(updates, space, "global", torch.device("cpu"))
    models, moves = updates.before.double(), (updates.after - updates.before).double()
    for made, given in ((pairs.inputs, models - models.mean(0)), (pairs.targets, moves)):
        assert float(made.square().mean()) == pytest.approx(1, rel=1e-5)
        gram = given @ given.T
        gram *= float(made.square().sum() / gram.trace())
        torch.testing.assert_close((made @ made.T).double(), gram, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("start", "space"),
    [
        ("last-returned", "full"),
        ("global", "span"),
        pytest.param("last-returned", "span", marks=pytest.mark.thorough),
        pytest.param("global", "full", marks=pytest.mark.thorough),
    ],
)
def test_where_the_search_begins_is_a_model_that_was_sent(record: Record, space: Any, start: Any) -> None:
    """After no step but the look at the first point, that point is what is claimed."""
    attack = LocalModelReconstruction(**SHORT | {"space": space, "start": start, "minimise_epochs": 1})
    found = attacked(attack, record(federated()))
    last = federated()[-1]
    expected = last.after if start == "last-returned" else last.before
    assert (flatten_state(found.state) - flatten_state(expected)).norm() < 1e-5
    assert (flatten_state(last.after) - flatten_state(last.before)).norm() > 1e-3


def test_the_search_returns_the_lowest_point_on_its_way() -> None:
    """Steps so large that it does not end there: Adam's are of one size at the start."""
    mapping = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        mapping.weight.copy_(torch.tensor([[1.0, 0.5], [0.0, 2.0]]))
    mapping.requires_grad_(False)
    start = torch.tensor([2.1, -1.3])
    best, curve = lmra._descend(mapping, start, 1.0, 12, lmra._SequentialProgress(lambda *_: None, 12))
    assert float(mapping(best).square().mean()) == pytest.approx(float(curve.min()))
    assert curve.min() < 0.5 * curve[0]
    assert int(curve.argmin()) not in (0, 11)


@pytest.mark.thorough
def test_the_rate_of_the_search_is_the_one_that_gets_lowest(record: Record) -> None:
    transcript = record(federated())
    short = SHORT | {"epochs": 30, "minimise_epochs": 20}
    free = attacked(LocalModelReconstruction(**short), transcript).trace["objective"]
    lowest = [
        attacked(LocalModelReconstruction(**short, minimise_learning_rate=rate), transcript).trace["objective"].min()
        for rate in (1e-1, 1e-2, 5e-3, 1e-3)
    ]
    assert len(set(map(float, lowest))) == 4
    assert free.min() == min(lowest)


def test_a_times_b_is_b_hidden_layers_of_a_units() -> None:
    pairs = lmra._Pairs(inputs=torch.zeros(3, 5), targets=torch.zeros(3, 4), start=torch.zeros(5), to_model=lambda t: t)
    made = lmra._build_network("7x3", pairs, generator(0))
    assert isinstance(made, nn.Sequential)
    shapes = [(layer.in_features, layer.out_features) for layer in made if isinstance(layer, nn.Linear)]
    assert shapes == [(5, 7), (7, 7), (7, 7), (7, 4)]
    assert sum(isinstance(layer, nn.ReLU) for layer in made) == 3


def test_a_mapping_that_diverges_is_a_failed_attack(record: Record) -> None:
    attack = LocalModelReconstruction(hidden="16x2", learning_rate=1e30, epochs=40, minimise_epochs=5)
    assert "diverged; lower the attack's learning_rate" in failure(attack, record(federated(8)))
    attack = LocalModelReconstruction(**SHORT | {"minimise_learning_rate": 1e38})
    told = failure(attack, record(federated()))
    assert "minimising the mapping diverged; lower the attack's minimise_learning_rate" in told


def test_too_few_messages_and_a_client_who_does_not_move_are_refused(record: Record) -> None:
    told = failure(LocalModelReconstruction(), record(federated(2)))
    assert "client 0: took part in 2 of the 2 rounds to be attacked" in told
    assert "needs at least 3; record more, or attack more of them (adversary.rounds)" in told
    still = [
        dataclasses.replace(update, payload=Payload.from_dense(update.before, "weights")) for update in federated(4)
    ]
    assert "the client returned every model unchanged" in failure(LocalModelReconstruction(), record(still))


@pytest.mark.parametrize(
    ("attack", "setting", "told"),
    [
        (LocalModelReconstruction, {"hidden": "64"}, "hidden: expected AxB"),
        (LocalModelReconstruction, {"epochs": 0}, "epochs: expected at least 1, got 0"),
        (LocalModelReconstruction, {"learning_rate": -1.0}, "learning_rate: expected a value above 0"),
        (DummyDataReconstruction, {"examples": 1}, "examples: expected at least 2, got 1"),
        (DummyDataReconstruction, {"sets": 0}, "sets: expected at least 1, got 0"),
        (DummyDataReconstruction, {"iterations": 0}, "iterations: expected at least 1, got 0"),
        (DummyDataReconstruction, {"mix": 0.0}, "mix: expected a value above 0"),
        (DummyDataReconstruction, {"sharpness": 0.5}, "sharpness: expected at least 1, got 0.5"),
        (DummyDataReconstruction, {"length_weight": -1.0}, "length_weight: expected at least 0"),
        (DummyDataReconstruction, {"step_size": 0.0}, "step_size: expected a value above 0"),
    ],
)
def test_bad_settings_are_refused(attack: Callable[..., Attack], setting: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        attack(**setting)


def test_dummy_data_are_made_to_move_models_as_the_client_does_and_trained_on(record: Record) -> None:
    transcript, last = record(federated(8)), flatten_state(federated(8)[-1].after)
    short: dict[str, Any] = {"sets": 2, "iterations": 30, "training_iterations": 20}
    whole = attacked(DummyDataReconstruction(mix=1.0, **short), transcript, **KNOWN)
    part = attacked(DummyDataReconstruction(mix=0.2, **short), transcript, **KNOWN)
    assert whole.trace["objective"][-10:].mean() < 0.5 * whole.trace["objective"][:10].mean()
    assert whole.trace["training_loss"][-1] < whole.trace["training_loss"][0]
    assert torch.allclose(flatten_state(part.state), torch.lerp(last, flatten_state(whole.state), 0.2), atol=1e-6)
    assert (flatten_state(whole.state) - last).norm() > 0.1


def test_dummy_labels_grow_certain_until_they_are_trained_on(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[torch.Tensor] = []
    matched: list[float] = []
    train_alone, labels = lmra_dummy_data.train_to_convergence, lmra_dummy_data._Client.labels

    def noted(model: Any, inputs: Any, labels: torch.Tensor, *others: Any, **settings: Any) -> Any:
        trained.append(labels)
        return train_alone(model, inputs, labels, *others, **settings)

    def note_sharpness(self: Any, values: torch.Tensor, sharpness: float) -> torch.Tensor:
        matched.append(sharpness)
        return labels(self, values, sharpness)

    monkeypatch.setattr(lmra_dummy_data, "train_to_convergence", noted)
    monkeypatch.setattr(lmra_dummy_data._Client, "labels", note_sharpness)
    short: dict[str, Any] = {"sets": 1, "training_iterations": 2}
    for sharpness in (1.0, 16.0):  # one step is matched without any sharpness: these logits are the same
        attacked(DummyDataReconstruction(sharpness=sharpness, iterations=1, **short), record(federated(4)), **KNOWN)
    assert torch.allclose(trained[1], (16 * trained[0].log()).softmax(1), atol=1e-6)
    assert trained[1].amax(1).mean() > trained[0].amax(1).mean()
    matched.clear()
    attacked(DummyDataReconstruction(sharpness=16.0, iterations=2, **short), record(federated(4)), **KNOWN)
    assert sorted(set(matched)) == [1, 4, 16]


def test_the_models_of_several_sets_are_averaged(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    trained, original = [], DummyDataReconstruction._train

    def noted(self: DummyDataReconstruction, *arguments: Any) -> Any:
        found = original(self, *arguments)
        trained.append(found[0])
        return found

    monkeypatch.setattr(DummyDataReconstruction, "_train", noted)
    attack = DummyDataReconstruction(sets=3, iterations=5, training_iterations=5, mix=1.0)
    found = attacked(attack, record(federated(4)), **KNOWN)
    assert len(trained) == 3
    assert not torch.allclose(trained[0], trained[1], atol=1e-4)
    assert torch.allclose(flatten_state(found.state), torch.stack(trained).mean(0), atol=1e-6)


def test_a_message_in_which_the_client_moved_nothing_is_left_out(record: Record) -> None:
    updates = federated(5)
    idle = [
        dataclasses.replace(updates[place], payload=Payload.from_dense(dict(updates[place].before), "weights"))
        for place in (0, 2)
    ]
    mixed = [idle[0], *updates[:2], idle[1], *updates[2:]]
    attack = DummyDataReconstruction(iterations=6, training_iterations=3, sets=1)
    without, with_it = (
        attacked(attack, record([dataclasses.replace(u, round=1 + place) for place, u in enumerate(each)]), **KNOWN)
        for each in (updates, mixed)
    )
    assert torch.equal(flatten_state(with_it.state), flatten_state(without.state))


def one_output() -> nn.Module:
    with seed_globals("regression"):
        return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))


@pytest.mark.thorough
def test_the_size_of_a_regressions_targets_is_told_by_the_lengths_of_updates(record: Record) -> None:
    inputs, _ = data(0)
    targets = 6 * inputs[:, 0] + 9
    model, updates = one_output(), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(1, 11):
        weights = before
        for _ in range(3):
            leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
            loss = squared_error(functional_call(model, leaves, (inputs,)), targets)
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            weights = {n: t.detach() - 0.01 * s for (n, t), s in zip(leaves.items(), slopes, strict=True)}
        updates.append(build_update(before, weights, round=number, num_examples=30))
        before = {name: (before[name] + weights[name]) / 2 for name in before}
    known = {"model": one_output, "loss": squared_error, "input_shape": (5,)}

    def error(weight: float) -> float:
        attack = DummyDataReconstruction(length_weight=weight, mix=1.0, sets=1, iterations=200, training_iterations=100)
        found = attacked(attack, record(updates), **known)
        return float(squared_error(functional_call(one_output(), dict(found.state), (inputs,)), targets))

    assert error(1.0) < 0.5 * error(0.0)


def test_dummy_data_need_the_model_of_the_messages_and_its_inputs(record: Record) -> None:
    transcript, attack = record(federated(4)), DummyDataReconstruction(iterations=2, training_iterations=2)
    with pytest.raises(AttackError, match="4 tensors are not the weights of the model, which has 4; attack"):
        attacked(attack, transcript, **KNOWN | {"model": lambda: seeded_network(hidden=9)})
    with pytest.raises(AttackError, match=r"does not take inputs of shape \(30, 7\)"):
        attacked(attack, transcript, **KNOWN | {"input_shape": (7,)})


class Scaled(nn.Module):
    """A network that computes with a buffer which is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.net(inputs * self.scale)
        return found


def scaled(updates: list[Update], scale: float | None) -> list[Update]:
    """The same under the names of `Scaled`, with this buffer, or without."""
    more = {} if scale is None else {"scale": torch.tensor(scale)}

    def renamed(state: State) -> State:
        return {f"net.{name}": tensor for name, tensor in state.items()} | more

    return [
        dataclasses.replace(u, before=renamed(u.before), payload=Payload.from_dense(renamed(u.after), "weights"))
        for u in updates
    ]


def test_dummy_data_go_through_the_buffers_that_are_shared_and_need_them(record: Record) -> None:
    attack = DummyDataReconstruction(sets=1, iterations=5, training_iterations=2)
    known = KNOWN | {"model": Scaled}
    plain, *others = (
        attacked(attack, record(scaled(federated(4), scale)), **known).trace["objective"] for scale in (1.0, 1.0, 3.0)
    )
    assert torch.equal(plain, others[0])
    assert not torch.equal(plain, others[1])
    with pytest.raises(AttackError, match="computes with scale, which clients of this federation do not share"):
        attacked(attack, record(scaled(federated(4), None)), **known)


def test_deltas_are_read_as_they_were_sent(record: Record) -> None:
    """Next to large weights, w_t + delta - w_t is rounded to something else."""
    before = state(torch.full((4,), 1000.0))
    deltas = [state(torch.linspace(1e-5, 4e-5, 4) * number) for number in (1, 2)]
    sent = [
        Update(round=number, client=3, before=before, payload=Payload.from_dense(delta), num_examples=4)
        for number, delta in enumerate(deltas, 1)
    ]
    updates = read_updates(target_of(record(sent), 3))
    assert torch.equal(updates.compute_deltas(), torch.stack([flatten_state(delta) for delta in deltas]))
    assert not torch.equal(updates.compute_deltas(), updates.after - updates.before)


def test_weights_and_deltas_of_one_client_are_not_read_together(record: Record) -> None:
    before = state(torch.ones(4))
    payloads = (Payload.from_dense(before, "weights"), Payload.from_dense(before))
    sent = [
        Update(round=number, client=3, before=before, payload=payload, num_examples=4)
        for number, payload in enumerate(payloads, 1)
    ]
    with pytest.raises(AttackError, match=r"^round 2, client 3: it sent delta, in round 1 weights; choose rounds"):
        read_updates(target_of(record(sent), 3))
