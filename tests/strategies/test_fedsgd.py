"""Clients that send gradients: how those are recorded, read by attacks, computed, and what they say about batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.data_leakage import DataLeakage
from adversaries.inversion.deep_leakage import DeepLeakage, ImprovedDeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.sapag import SelfAdaptiveLeakage
from adversaries.inversion.see_through_gradients import SeeThroughGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from adversaries.inversion.tgias_ro import TemporalInversion
from clients.defenses.update_noise import UpdateNoise
from clients.mods import defend_payload
from fedsim.audit.architecture import Architecture
from fedsim.base.errors import AttackError, ConfigError, RunError, TranscriptError
from fedsim.base.metrics import psnr
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.interfaces.attack import Attack, Knowledge, Paper, Target
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.local_context import LocalContext
from fedsim.inversion.labels.updates import count_labels
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.header import hash_state
from fedsim.recording.payloads import Payload, State
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.cohort import can_vectorise
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.sampling import round_batches
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

SHAPE = (1, 4, 4)
LABELS = torch.tensor([1, 4, 4])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp(hidden=(12,)).build(Task(SHAPE, 10))


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 10))


KNOWN = Knowledge(
    model=mlp,
    loss=cross_entropy,
    input_shape=SHAPE,
    num_classes=10,
    value_range=([0.0], [1.0]),
    learning_rate=0.1,
    local_epochs=1,
    batch_size=16,
    labels=LABELS,
)


def images(count: int) -> Tensor:
    return torch.rand((count, *SHAPE), generator=generator("images"))


def gradient_at(model: nn.Module, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    loss = cross_entropy(model(inputs), labels)
    slopes = torch.autograd.grad(loss, list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), slopes, strict=True))


def make_update(
    build: Callable[[], nn.Module] = mlp, labels: Tensor = LABELS, number: int = 1, client: int = 5
) -> Update:
    """A gradient at the fresh weights, and the running statistics that the forward pass left."""
    model = build()
    before = copy_state(model)
    gradient = gradient_at(model, images(len(labels)), labels)
    after = {name: t for name, t in copy_state(model).items() if name not in gradient}
    return Update(
        round=number,
        client=client,
        before=before,
        payload=Payload.from_dense(gradient, "gradient") | Payload.from_dense(after, "weights"),
        num_examples=len(labels),
    )


def record_updates(folder: Path, *updates: Update) -> Transcript:
    Recorder(folder).write(updates[0].round, list(updates))
    return Transcript(folder)


# The recording.


def test_a_recorded_gradient_is_read_back_to_the_bit_beside_what_travelled_with_it(tmp_path: Path) -> None:
    update = make_update(normalised)
    read = record_updates(tmp_path, update).update(1, 5)
    assert update.gradient is not None
    assert read.gradient is not None
    assert hash_state(read.gradient) == hash_state(update.gradient)
    assert hash_state(read.after) == hash_state(update.after)
    assert list(read.after) == ["1.running_mean", "1.running_var"]
    assert read.pseudo_gradient is read.gradient
    with safe_open(tmp_path / "round-000001.safetensors", framework="pt") as file:  # no pickle in it
        assert torch.equal(file.get_tensor("client/5/0000/gradient/0.weight"), update.gradient["0.weight"])


def test_a_round_may_hold_weights_of_one_client_and_a_gradient_of_another(tmp_path: Path) -> None:
    trained = replace(
        make_update(client=3),
        payload=Payload.from_dense({n: t + 1 for n, t in make_update().before.items()}, "weights"),
    )
    transcript = record_updates(tmp_path, make_update(), trained)
    assert [update.gradient is None for update in transcript.updates()] == [True, False]
    assert [reply.kind for reply in transcript.header(1).replies] == ["weights", "gradient"]


def test_the_hash_of_a_recording_covers_the_gradients(tmp_path: Path) -> None:
    update = make_update()
    assert update.gradient is not None
    other = {name: t.clone() for name, t in update.gradient.items()}
    other["1.bias"][0] += 1e-6
    hashes = [
        record_updates(tmp_path / str(place), item).hash()
        for place, item in enumerate([update, replace(update, payload=Payload.from_dense(other, "gradient"))])
    ]
    assert hashes[0] != hashes[1]


def test_a_damaged_gradient_is_noticed(tmp_path: Path) -> None:
    update = make_update()
    assert update.gradient is not None
    record_updates(tmp_path, update)
    path = tmp_path / "round-000001.safetensors"
    content = bytearray(path.read_bytes())
    at = content.find(update.gradient["1.weight"].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(TranscriptError, match="the bytes of client/5 are not those that were recorded") as error:
        Transcript(tmp_path).update(1, 5)
    assert "\n" not in str(error.value)


# What attacks see.


def test_the_scene_of_a_gradient_is_that_gradient_exactly_and_one_step(tmp_path: Path) -> None:
    update = record_updates(tmp_path, make_update()).update(1, 5)
    scene = build_problem(update, replace(KNOWN, learning_rate=0.004, local_epochs=7, batch_size=2))
    assert update.gradient is not None
    assert scene.steps == 1
    for told, true in zip(scene.direction, update.gradient.values(), strict=True):
        assert torch.equal(told, true)
    for told, true in zip(scene.mean_gradient, update.gradient.values(), strict=True):
        assert torch.equal(told, true)


@pytest.mark.parametrize(
    "attack",
    [
        DeepLeakage(iterations=5),
        ImprovedDeepLeakage(iterations=3),
        InvertingGradients(iterations=3),
        SelfAdaptiveLeakage(iterations=3),
        SeeThroughGradients(iterations=3, bn_weight=0.0),
        DataLeakage(iterations=3),
    ],
    ids=lambda attack: type(attack).__name__,
)
def test_every_attack_on_one_gradient_reads_a_gradient_that_was_sent(
    attack: GradientInversion, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None warns of several steps; the objective at the start is that of the gradient and the start alone."""
    transcript = record_updates(tmp_path, make_update())
    finding = attack.run(Target(transcript=transcript, victim=5, knowledge=KNOWN, rng=generator(0)))
    assert isinstance(finding, Reconstruction)
    assert finding.data.shape == (3, *SHAPE)
    assert "local step" not in caplog.text
    assert finding.trace["objective"][-1] < finding.trace["objective"][0]


@pytest.mark.parametrize(
    "attack",
    [InvertingGradients(iterations=1), TemporalInversion(iterations=1, gradients=1, fewest=1, local_iterations=1)],
    ids=lambda attack: type(attack).__name__,
)
@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_while_clients_train_is_told_and_its_absence_is_known(
    attack: Attack, dropout: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"hidden": [12], "dropout": 0.5}
    knowledge = replace(KNOWN, model=Architecture("mlp", settings, Task(SHAPE, 10), seed=0, dropout=dropout))
    assert knowledge.model is not None
    attack.run(
        Target(
            transcript=record_updates(tmp_path, make_update(knowledge.model)),
            victim=5,
            knowledge=knowledge,
            rng=generator(0),
        )
    )
    said = "at random while clients train, as dropout does, which this attack leaves out; expect little"
    assert [said in record.getMessage() for record in caplog.records] == [True] * dropout


def test_statistics_that_came_beside_a_gradient_serve_the_attack_that_reads_them(tmp_path: Path) -> None:
    attack = SeeThroughGradients(iterations=3, exact_statistics=True)
    finding = attack.run(
        Target(
            transcript=record_updates(tmp_path, make_update(normalised)),
            victim=5,
            knowledge=replace(KNOWN, model=normalised),
            rng=generator(0),
        )
    )
    assert isinstance(finding, Reconstruction)


def refusal(transcript: Transcript, attack: GradientInversion, knowledge: Knowledge = KNOWN) -> str:
    with pytest.raises((AttackError, TranscriptError)) as error:
        attack.run(Target(transcript=transcript, victim=5, knowledge=knowledge, rng=generator(0)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_attack_that_needs_returned_weights_says_that_there_are_none(tmp_path: Path) -> None:
    told = refusal(record_updates(tmp_path, make_update()), SurrogateModelExtension(iterations=3))
    assert told == (
        "round 1, client 5: a gradient was sent, no weights; this attack needs the weights that a client returns"
    )


def changed(update: Update, name: str, value: Tensor) -> Update:
    return replace(update, payload=Payload.from_dense({**(update.gradient or {}), name: value}, "gradient"))


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (lambda u: changed(u, "3.bias", torch.full((10,), math.nan)), "the gradient of 3.bias holds NaN or infinite"),
        (lambda u: changed(u, "3.bias", torch.full((10,), math.inf)), "the gradient of 3.bias holds NaN or infinite"),
        (
            lambda u: replace(
                u, payload=Payload.from_dense({n: torch.zeros_like(t) for n, t in u.gradient.items()}, "gradient")
            ),
            "round 1, client 5: the gradient is zero, there is nothing to match",
        ),
        (
            lambda u: changed(u, "3.bias", torch.ones(9)),
            "the recorded gradients have 3.bias of shape (9,), the model (10,)",
        ),
        (
            lambda u: replace(u, payload=Payload.from_dense({"1.weight": u.gradient["1.weight"]}, "gradient")),
            "the recorded gradients have no 1.bias, the model has one of shape (12,); attack with",
        ),
        (lambda u: replace(u, before={"w": torch.ones(2)}), "the recorded weights w_0 have no 1.weight, the model has"),
        (lambda u: replace(u, num_examples=0), "round 1, client 5: N is 0"),
    ],
    ids=["NaN", "infinite", "zero", "shape", "missing", "weights", "no N"],
)
def test_a_gradient_that_cannot_be_attacked_is_refused_in_one_sentence(
    odd: Callable[[Update], Update], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(record_updates(tmp_path, odd(make_update())), InvertingGradients(iterations=3))


def test_buffers_of_another_shape_beside_a_gradient_are_refused(tmp_path: Path) -> None:
    update = make_update(normalised)
    update = replace(update, payload=update.payload | Payload.from_dense({"1.running_mean": torch.zeros(3)}, "weights"))
    told = refusal(record_updates(tmp_path, update), InvertingGradients(iterations=3), replace(KNOWN, model=normalised))
    assert "the recorded buffers sent with the gradient have 1.running_mean of shape (3,), the model (4,)" in told


@pytest.mark.parametrize("granted", [{}, {"learning_rate": 0.5, "local_epochs": 9, "batch_size": 1}])
def test_labels_are_counted_from_a_gradient_without_knowing_any_step_size(granted: dict[str, Any]) -> None:
    labels = torch.tensor([0, 3, 3, 3, 7, 9, 9, 2])
    update = make_update(labels=labels)
    nothing: dict[str, Any] = {"learning_rate": None, "local_epochs": None, "batch_size": None}
    knowledge = replace(KNOWN, labels=None, **nothing | granted)
    # The weights beside it must not be read: these would say anything.
    astray: State = {name: torch.full_like(t, math.nan) for name, t in update.before.items()}
    counted = count_labels(update, knowledge, mlp(), update.before, astray, generator(0))
    assert counted.tolist() == sorted(labels.tolist())


# What a client computes.

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000)


def fedsgd(**how: Any) -> LocalTraining:
    return LocalTraining(**{"local_steps": 1, "batch_size": 4, "sends": "gradient", "learning_rate": 0.1} | how)


def computed(
    model: nn.Module, count: int = 3, before: State | None = None, defenses: tuple[Defense, ...] = (), **how: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    labels = torch.arange(count)
    start = copy_state(model) if before is None else before
    return local_gradient(model, start, images(count), labels, fedsgd(**how), key=("x",), defenses=defenses)


def test_a_client_sends_the_gradient_of_the_mean_loss_and_leaves_the_weights_alone() -> None:
    model = mlp()
    expected = gradient_at(mlp(), images(3), torch.arange(3))
    gradient, beside, loss = computed(model)
    assert beside == {}
    assert list(gradient) == list(expected)
    assert all(torch.equal(gradient[name], expected[name]) for name in expected)
    assert loss == cross_entropy(mlp()(images(3)), torch.arange(3)).item()
    assert hash_state(copy_state(model)) == hash_state(copy_state(mlp()))
    assert all(p.grad is None for p in model.parameters())  # the next client begins without it


def test_a_clients_gradient_is_its_one_step_of_local_training_divided_by_the_step_size() -> None:
    """The same modes, batch, dropout and defenses as local training: in float64 the two agree to rounding."""

    def build() -> nn.Module:
        torch.manual_seed(1)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 10)
        return nn.Sequential(*layers).double()

    class Twice(Defense):
        paper = PAPER

        def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
            return inputs + torch.rand(inputs.shape, generator=context.rng, dtype=inputs.dtype), labels.flip(0)

        def on_gradient(self, gradient: State, context: LocalContext) -> State:
            return {
                name: 2 * g + torch.rand(g.shape, generator=context.rng, dtype=g.dtype) for name, g in gradient.items()
            }

    before, inputs, labels = copy_state(build()), images(6).double(), torch.arange(6)
    every = (torch.tensor([4, 0, 2]),)
    chosen = every[0]
    gradient, beside, loss = local_gradient(
        build(), before, inputs[chosen], labels[chosen], fedsgd(), key=("x",), defenses=[Twice()]
    )
    settings = LocalTraining(local_steps=1, batch_size=3, learning_rate=0.5)
    after, same_loss = local_update(
        build(), before, inputs, labels, settings, key=("x",), defenses=[Twice()], order=every
    )
    for name, slope in gradient.items():
        torch.testing.assert_close(slope, (before[name] - after[name]) / 0.5)
    assert {name: t.tolist() for name, t in beside.items()} == {name: after[name].tolist() for name in beside}
    assert list(beside) == ["1.running_mean", "1.running_var"]
    assert not torch.equal(beside["1.running_mean"], before["1.running_mean"])
    assert loss == pytest.approx(same_loss)


@pytest.mark.parametrize(
    ("how", "travels"),
    [({}, True), ({"batch_norm_statistics": "withheld"}, False), ({"batch_norm": "eval"}, True)],
)
def test_running_statistics_travel_beside_the_gradient_as_local_training_would_send_them(
    how: dict[str, Any], travels: bool
) -> None:
    before = copy_state(normalised(), statistics=travels)
    _, beside, _ = computed(normalised(), before=before, **how)
    assert set(beside) == ({"1.running_mean", "1.running_var"} if travels else set())
    if how == {"batch_norm": "eval"}:
        assert all(torch.equal(beside[name], before[name]) for name in beside)


def test_the_gradient_of_what_is_frozen_or_unused_is_zero() -> None:
    model = normalised()
    gradient, _, _ = computed(model, batch_norm="frozen")
    assert not gradient["1.weight"].any()
    assert not gradient["1.bias"].any()
    assert gradient["0.weight"].any()
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.register_parameter("idle", nn.Parameter(torch.ones(2)))
    assert not computed(model)[0]["idle"].any()


def test_a_shared_parameter_gets_its_gradient_under_each_of_its_names() -> None:
    """The state holds both names; if one were not stepped, loading it would undo the other's step."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 10))
    model[2].weight = model[1].weight
    gradient, beside, _ = computed(model)
    assert set(gradient) == set(copy_state(model))
    assert torch.equal(gradient["1.weight"], gradient["2.weight"])
    assert beside == {}


def test_a_gradient_that_is_not_finite_is_one_sentence() -> None:
    model = mlp()
    before = {name: t * 1e38 for name, t in copy_state(model).items()}
    with pytest.raises(
        RunError, match=r"the gradient of 1.weight is NaN or infinite; lower strategy.learning_rate, or"
    ):
        computed(model, before=before)


# Which mini-batch it is.


def turns(count: int, rounds: int, **how: Any) -> list[list[int]]:
    settings = fedsgd(**how)
    chosen = [round_batches(count, settings, seed=3, client=1, number=number) for number in range(1, rounds + 1)]
    return [batch[0].tolist() for batch in chosen if batch is not None]


def test_the_batch_of_a_round_is_the_next_of_its_epoch() -> None:
    """Ten examples by fours: three batches an epoch, the last of two; each epoch is a permutation of all."""
    drawn = turns(10, 9)
    assert [len(batch) for batch in drawn] == [4, 4, 2] * 3
    epochs = [[*drawn[start], *drawn[start + 1], *drawn[start + 2]] for start in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for number, batch in enumerate(drawn, start=1):  # as the docstring has it
        epoch, place = (number - 1) // 3, (number - 1) % 3
        order = torch.randperm(10, generator=generator(3, "batches", 1, epoch))
        assert batch == order[4 * place : 4 * place + 4].tolist()


def test_fixed_batches_come_back_in_the_same_order() -> None:
    fixed = turns(10, 9, batches="fixed")
    assert fixed[:3] == fixed[3:6] == fixed[6:9] == turns(10, 3)
    assert turns(10, 2, batch_size=100, batches="fixed")[0] == turns(10, 2, batch_size=10, batches="fixed")[1]


def test_batches_differ_between_clients_and_seeds() -> None:
    ways = [(3, 1), (3, 2), (4, 1)]
    orders = [round_batches(30, fedsgd(), seed=seed, client=client, number=1) for seed, client in ways]
    assert len({tuple(order[0].tolist()) for order in orders if order is not None}) == 3


def test_fixed_batches_of_local_training_go_on_where_the_last_round_ended() -> None:
    by_steps = LocalTraining(local_steps=2, batch_size=4, batches="fixed")
    taken: list[list[int]] = []
    for number in (1, 2, 3):
        order = round_batches(10, by_steps, seed=3, client=1, number=number)
        assert order is not None
        assert len(order) == 2
        taken += [index.tolist() for index in order]
    assert taken == turns(10, 6, batches="fixed")
    by_epochs = LocalTraining(local_epochs=2, batch_size=4, batches="fixed")
    for number in (1, 7):
        order = round_batches(10, by_epochs, seed=3, client=1, number=number)
        assert order is not None
        assert [index.tolist() for index in order] == turns(10, 6, batches="fixed")


def test_by_default_local_training_draws_its_batches_as_ever() -> None:
    assert round_batches(10, LocalTraining(local_epochs=1), seed=3, client=1, number=1) is None


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"local_steps": None, "local_epochs": 1}, "training.local_epochs: clients that send gradients take one mini-"),
        (
            {"local_steps": 2},
            "training.local_steps: clients that send gradients take one mini-batch a round, expected 1",
        ),
        ({"local_steps": None}, "training.local_steps: clients that send gradients take one mini-batch a round"),
        ({"momentum": 0.9}, "training.momentum: clients that send gradients take no step themselves, expected 0.0, "),
        ({"optimizer": "adam"}, "training.optimizer: clients that send gradients take no step themselves"),
        ({"weight_decay": 0.1}, "training.weight_decay: clients that send gradients take no step themselves"),
        ({"proximal_mu": 0.1}, "training.proximal_mu: clients that send gradients take no step themselves"),
    ],
)
def test_what_a_client_who_sends_gradients_does_not_do_is_refused(how: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        fedsgd(**how)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_clients_who_send_gradients_are_left_to_the_loop() -> None:
    assert can_vectorise(mlp(), LocalTraining(local_steps=1), [])
    assert not can_vectorise(mlp(), fedsgd(), [])


# Defenses of what is sent.


def as_sent(gradient: State, beside: State) -> Payload:
    return Payload.from_dense(gradient, "gradient") | Payload.from_dense(beside, "weights")


def test_noise_and_clipping_act_on_the_gradient_and_on_what_travels_beside_it() -> None:
    before = copy_state(normalised())
    gradient, beside, _ = computed(normalised())
    defense = UpdateNoise(clip=0.01, noise_multiplier=0.0)
    sent = defend_payload(defense, before, as_sent(gradient, beside), LocalContext(rng=generator(0)))
    sent_gradient, sent_beside = sent.values("gradient", before), sent.values("weights", before)
    moved = {name: t - before[name] for name, t in beside.items()}
    norm = math.sqrt(sum(t.double().square().sum().item() for t in (*gradient.values(), *moved.values())))
    for name, slope in gradient.items():
        torch.testing.assert_close(sent_gradient[name], slope * 0.01 / norm)
    for name, change in moved.items():
        torch.testing.assert_close(sent_beside[name], before[name] + change * 0.01 / norm)


def test_a_gradient_that_no_defense_touches_is_sent_to_the_bit() -> None:
    class Idle(Defense):
        paper = PAPER

    gradient, beside, _ = computed(normalised())
    context = LocalContext(rng=generator(0))
    sent_as_is = defend_payload(Idle(), copy_state(normalised()), as_sent(gradient, beside), context)
    assert hash_state(sent_as_is.arrays()) == hash_state(as_sent(gradient, beside).arrays())


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (as_sent({"other": torch.ones(1)}, {}), "UpdateNoise: 'other' was not broadcast, so its update cannot be"),
        (as_sent({"w": torch.full((1,), math.nan)}, {}), "UpdateNoise: the update of 'w' is NaN or infinite"),
    ],
)
def test_a_gradient_that_cannot_be_defended_is_not_sent(reply: Payload, expected: str) -> None:
    with pytest.raises(RunError) as error:
        defend_payload(UpdateNoise(), {"w": torch.zeros(1)}, reply, LocalContext(rng=generator(0)))
    assert expected in str(error.value)


# Why the gradient itself is recorded.


def smooth() -> nn.Module:
    """What DLG was shown with: a network that is twice differentiable, with weights of usual size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10))


def by_difference(update: Update, rate: float) -> dict[str, Tensor]:
    """(w_t - w_{t+1}) / rate in float32: what is left of the gradient where weights are sent."""
    assert update.gradient is not None
    return {name: (w - (w - rate * update.gradient[name])) / rate for name, w in update.before.items()}


def relative_error(told: State, true: State) -> float:
    off = math.sqrt(sum((told[n].double() - true[n].double()).square().sum().item() for n in true))
    return off / math.sqrt(sum(t.double().square().sum().item() for t in true.values()))


def an_example(steps: int = 0) -> tuple[Update, Tensor]:
    """One example's gradient, after so many steps of training on it."""
    image = torch.rand((1, 1, 8, 8), generator=generator("an example"))
    model = smooth()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(image), torch.tensor([3])).backward()
        optimizer.step()
    gradient = gradient_at(model, image, torch.tensor([3]))
    return build_update(copy_state(model), gradient, "gradient", client=5), image


def read_off(gradient: State) -> Tensor:
    """The one example, without any optimisation: what a unit's weights move by over what its bias moves by."""
    unit = gradient["1.bias"].abs().argmax()
    return (gradient["1.weight"][unit] / gradient["1.bias"][unit]).reshape(1, 1, 8, 8)


# Steps of training before the gradient; then the relative error of the difference, and PSNR in dB of the example that
# is read off it, at the learning rates .1, .01 and .004. The gradient's norm is 4.2 at first and .007 after 300 steps,
# and what is read off the gradient itself reaches 155 dB or more.
CANCELLATION = [
    (0, [2.7e-7, 2.6e-6, 6.5e-6], [127.7, 107.2, 99.9]),
    (300, [1.9e-4, 1.9e-3, 4.9e-3], [75.8, 57.4, 49.0]),
]


@pytest.mark.parametrize(("steps", "errors", "decibels"), CANCELLATION, ids=["untrained", "trained"])
def test_a_difference_of_weights_keeps_fewer_digits_the_smaller_the_step(
    steps: int, errors: list[float], decibels: list[float]
) -> None:
    update, image = an_example(steps)
    assert update.gradient is not None
    assert psnr(read_off(update.gradient), image).item() > 150
    for rate, error, reached in zip((0.1, 0.01, 0.004), errors, decibels, strict=True):
        lossy = by_difference(update, rate)
        assert relative_error(lossy, update.gradient) == pytest.approx(error, rel=0.1)
        assert psnr(read_off(lossy), image).item() == pytest.approx(reached, abs=1.5)


@pytest.mark.slow
def test_dlg_is_limited_by_its_optimiser_long_before_it_misses_those_digits(tmp_path: Path) -> None:
    """One example through a smooth untrained network, in float32: some 98 dB whatever was sent, with any step size."""
    update, image = an_example()
    known = replace(KNOWN, model=smooth, input_shape=(1, 8, 8), labels=None, batch_size=1)
    assert update.gradient is not None
    gradients = {"sent": update.gradient} | {str(rate): by_difference(update, rate) for rate in (0.1, 0.01, 0.004)}
    for name, gradient in gradients.items():
        transcript = record_updates(tmp_path / name, replace(update, payload=Payload.from_dense(gradient, "gradient")))
        finding = DeepLeakage(iterations=60).run(
            Target(transcript=transcript, victim=5, knowledge=known, rng=generator(0))
        )
        assert isinstance(finding, Reconstruction)
        assert psnr(finding.data, image).item() == pytest.approx(97.5, abs=2.5)
