"""What updates of a first layer say of a client's inputs, and what the dummy-data attack makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.local_models.input_span import InputSpan, row_span
from adversaries.local_models.lmra_dummy_data import DummyDataReconstruction, _Client
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import LocalModel
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.first_layer import find_first_layer
from tests.support.recordings import build_update

PIXELS, IMAGES = 48, 7
SGD: dict[str, Any] = {"lr": 0.1}


def mlp() -> nn.Module:
    with seed_globals("mlp"):
        return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 10), nn.ReLU(), nn.Linear(10, 3))


def images(client: int) -> tuple[Tensor, Tensor]:
    rng = generator("images", client)
    return torch.randn((IMAGES, 3, 4, 4), generator=rng), torch.randint(3, (IMAGES,), generator=rng)


def federated(
    rounds: int = 8, options: Mapping[str, Any] = SGD, noise: float = 0.0, new: Callable[[], nn.Module] = mlp
) -> list[Update]:
    """FedAvg of clients 0 and 1, three local steps on batches of four; client 0 is recorded."""
    model, updates, rng = new(), [], generator("noise")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(1, rounds + 1):
        returned = []
        for client in (0, 1):
            model.load_state_dict(before, strict=False)
            optimizer = torch.optim.SGD(model.parameters(), **options)
            inputs, labels = images(client)
            for _ in range(3):
                batch = torch.randperm(IMAGES, generator=rng)[:4]
                optimizer.zero_grad()
                cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
            returned.append(
                {n: p.detach() + noise * torch.randn(p.shape, generator=rng) for n, p in model.named_parameters()}
            )
        updates.append(build_update(before, returned[0], round=number, num_examples=IMAGES))
        before = {name: (returned[0][name] + returned[1][name]) / 2 for name in before}
    return updates


def span(updates: Sequence[Update], examples: int = IMAGES, weight: str = "1.weight") -> Tensor | None:
    return row_span(
        torch.stack([u.before[weight] for u in updates]), torch.stack([u.after[weight] for u in updates]), examples
    )


@pytest.mark.parametrize("options", [SGD, SGD | {"momentum": 0.9}, SGD | {"momentum": 0.9, "nesterov": True}])
def test_updates_of_the_first_layer_span_exactly_what_the_inputs_do(options: Mapping[str, Any]) -> None:
    basis = span(federated(options=options))
    assert basis is not None
    assert basis.shape == (IMAGES, PIXELS)
    assert torch.allclose(basis @ basis.T, torch.eye(IMAGES), atol=1e-5)
    own, others = (images(client)[0].flatten(1) for client in (0, 1))
    assert (own - own @ basis.T @ basis).norm() < 1e-4 * own.norm()
    assert (others - others @ basis.T @ basis).norm() > 0.8 * others.norm()


def test_many_rows_give_the_same_span_by_the_randomised_method(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = federated(12)
    whole = span(updates)
    monkeypatch.setattr("adversaries.local_models.input_span._OVERSAMPLING", 4)  # 2 x (7 + 4) < 48 inputs
    quick = span(updates)
    assert whole is not None
    assert quick is not None
    assert torch.allclose(whole.T @ whole, quick.T @ quick, atol=1e-3)


@pytest.mark.parametrize(
    "how",
    [
        {"noise": 1e-3},
        {"rounds": 2, "noise": 1e-3},
        {"options": SGD | {"weight_decay": 1e-2}},
    ],
    ids=["noise", "noise in few messages", "weight decay"],
)
def test_updates_that_are_no_combinations_of_inputs_say_nothing(how: Mapping[str, Any]) -> None:
    assert span(federated(**how)) is None


def test_a_span_of_all_inputs_and_too_few_messages_say_nothing() -> None:
    rng = generator("rows")
    before = torch.randn((5, 30, 6), generator=rng)
    assert row_span(before, before + torch.randn((5, 30, 6), generator=rng), 100) is None
    assert row_span(before, before, 100) is None
    before = torch.zeros(1, 3, 6)
    assert row_span(before, torch.randn((1, 3, 6), generator=rng), 100) is None  # rank 3 of 3 rows
    twice = torch.randn((1, 2, 6), generator=rng).repeat(1, 4, 1)
    basis = row_span(torch.zeros(1, 8, 6), twice, 100)
    assert basis is not None
    assert len(basis) == 2


def test_a_projection_is_never_farther_from_anything_in_the_span() -> None:
    basis = span(federated())
    assert basis is not None
    known = InputSpan(weight="1.weight", basis=basis, shape=(3, 4, 4))
    rng = generator("projection")
    for scale in (1e-3, 1.0, 1e3):
        origin, weight = (torch.randn((10, PIXELS), generator=rng) for _ in range(2))
        inside = origin + scale * torch.randn((10, IMAGES), generator=rng) @ basis
        projected = known.project(weight, origin)
        assert (projected - inside).norm() <= (weight - inside).norm() * (1 + 1e-5)
        assert torch.allclose(known.project(projected, origin), projected, atol=1e-5)
        assert torch.allclose(known.project(inside, origin), inside, atol=1e-4 * scale + 1e-5)


def test_coordinates_become_data_of_the_input_shape() -> None:
    basis = span(federated())
    assert basis is not None
    known = InputSpan(weight="1.weight", basis=basis, shape=(3, 4, 4))
    own = images(0)[0]
    assert torch.allclose(known.to_inputs(own.flatten(1) @ basis.T), own, atol=1e-3)
    assert known.step_scale == pytest.approx((PIXELS / IMAGES) ** 0.5)


class Twice(nn.Module):
    """One layer, applied again to its own outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, PIXELS)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layer(self.layer(inputs.flatten(1)))
        return result


class WeightElsewhere(nn.Module):
    """A layer on the inputs, whose weights also enter in a function that calls no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(PIXELS, PIXELS)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1)
        return self.layer(rows).relu() + nn.functional.linear(rows.square(), self.layer.weight)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (mlp, "1.weight"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(PIXELS, 3, bias=False)), "2.weight"),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(PIXELS, 3)), None),
        (
            lambda: nn.Sequential(
                nn.Flatten(), nn.BatchNorm1d(PIXELS, track_running_stats=False), nn.Linear(PIXELS, 3)
            ),
            None,
        ),
        (lambda: nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(PIXELS, 3)), None),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.Flatten(), nn.Linear(60, 3)), None),
        (lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(PIXELS, 3))), None),
        (Twice, None),
        (WeightElsewhere, None),
    ],
    ids=[
        *("mlp", "no bias", "convolution", "batch norm", "relu", "last axis only", "weight norm", "used twice"),
        "weight used elsewhere",
    ],
)
def test_only_a_layer_that_takes_the_inputs_themselves_counts(
    new: Callable[[], nn.Module], expected: str | None
) -> None:
    layer = find_first_layer(new().eval(), torch.randn((5, 3, 4, 4), generator=generator("look")))
    assert (layer and layer.weight) == expected


# The attack that uses it.


def find_model(
    tmp_path: Path, updates: Sequence[Update], new: Callable[[], nn.Module] = mlp, mix: float = 0.2
) -> LocalModel:
    folder = tmp_path / "transcript"
    recorder = Recorder(folder)
    for update in updates:
        recorder.write(update.round, [update])
    attack = DummyDataReconstruction(iterations=4, training_iterations=4, sets=2, mix=mix)
    known = Knowledge(model=new, loss=cross_entropy, input_shape=(3, 4, 4))
    transcript = Transcript(folder)
    finding = attack.run(
        Target(transcript=transcript.restrict_to(transcript.rounds), victim=0, knowledge=known, rng=generator("attack"))
    )
    assert isinstance(finding, LocalModel)
    return finding


def test_the_claimed_first_layer_has_left_the_first_model_along_the_clients_inputs_only(tmp_path: Path) -> None:
    updates = federated()
    claimed = find_model(tmp_path, updates).state["1.weight"]
    own = images(0)[0].flatten(1)
    inside = torch.linalg.pinv(own) @ own
    last = updates[-1].after["1.weight"] - updates[0].before["1.weight"]
    moved = claimed - updates[0].before["1.weight"]
    assert (last - last @ inside).norm() > 0.1 * last.norm()  # others' data moved what it returned
    assert (moved - moved @ inside).norm() < 1e-3 * moved.norm()


def test_noise_takes_the_span_away_and_leaves_the_attack_as_it_was(tmp_path: Path) -> None:
    updates = federated(noise=1e-3)
    claimed = find_model(tmp_path, updates, mix=1e-6).state
    assert all(torch.allclose(claimed[name], tensor, atol=1e-4) for name, tensor in updates[-1].after.items())


def conv() -> nn.Module:
    with seed_globals("conv"):
        return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def test_a_convolutional_network_is_decoded_without_it(tmp_path: Path) -> None:
    updates = federated(new=conv)
    claimed = find_model(tmp_path, updates, new=conv, mix=1e-6).state
    assert all(torch.allclose(claimed[name], tensor, atol=1e-4) for name, tensor in updates[-1].after.items())


def test_a_step_in_coordinates_is_stretched_and_every_other_one_sees_the_first_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, Tensor]] = []
    original = _Client.distance

    def noted(self: _Client, place: int, dummy: Tensor, labels: Tensor, first: Any = None) -> tuple[Tensor, Tensor]:
        seen.append((place, dummy.detach().clone()))
        return original(self, place, dummy, labels, first)

    monkeypatch.setattr(_Client, "distance", noted)
    find_model(tmp_path, federated())
    steps = seen[5:13]  # of the first set: after a look at coordinates, and one at the start, four of two messages
    assert [place for place, _ in steps[0::4]] == [0, 0]
    assert {place for place, _ in steps} != {0}
    moved = (steps[2][1] - steps[0][1]).abs().max()  # by the first step of Adam, whose size is its rate
    assert moved == pytest.approx(0.1 * (PIXELS / IMAGES) ** 0.5, rel=0.02)


FED: list[tuple[int, ...]] = []


class Fed(nn.Module):
    """The network of `mlp`, which notes what shape of inputs it is fed with."""

    def __init__(self, asks: str) -> None:
        super().__init__()
        self.asks = asks
        for name, layer in mlp().named_children():
            self.add_module(name, layer)
        if asks == "inputs later":
            self.gain = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        FED.append(tuple(inputs.shape))
        first, second = self.get_submodule("1"), self.get_submodule("3")
        assert self.asks != "shape" or inputs.ndim == 4
        outputs: Tensor = second(first(inputs.flatten(1)).relu())
        if self.asks.startswith("inputs"):
            gain = torch.eye(3)[0] if self.asks == "inputs again" else self.gain
            outputs = outputs + gain * inputs.flatten(1).sum(1, keepdim=True)
        return outputs


def test_matching_happens_in_coordinates_and_finds_the_same(tmp_path: Path) -> None:
    FED.clear()
    compact = find_model(tmp_path / "compact", federated(), new=lambda: Fed("nothing"), mix=1.0).state
    assert FED.count((IMAGES, IMAGES)) >= 16  # two sets, four steps, two messages
    FED.clear()
    whole = find_model(tmp_path / "whole", federated(), new=lambda: Fed("shape"), mix=1.0).state
    assert FED.count((IMAGES, IMAGES)) <= 1  # to see whether coordinates will do
    for name, tensor in whole.items():
        assert torch.allclose(compact[name], tensor, atol=1e-4), name


@pytest.mark.parametrize("asks", ["inputs again", "inputs later"])
def test_a_network_that_uses_inputs_elsewhere_too_is_fed_with_inputs(tmp_path: Path, asks: str) -> None:
    """Even where it begins to do so in training only, as with a branch whose weight is 0 at first."""
    updates = federated(new=lambda: Fed(asks))
    FED.clear()
    find_model(tmp_path, updates, new=lambda: Fed(asks))
    assert FED.count((IMAGES, IMAGES)) <= 2
    assert FED.count((IMAGES, 3, 4, 4)) >= 16
