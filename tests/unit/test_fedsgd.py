"""Clients that send gradients: how those are recorded, read by attacks, computed, and what they say about batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.data_leakage import DataLeakage
from adversaries.deep_leakage import DeepLeakage, ImprovedDeepLeakage
from adversaries.inverting_gradients import InvertingGradients
from adversaries.labels import count_labels
from adversaries.matching import GradientInversion
from adversaries.sapag import SelfAdaptiveLeakage
from adversaries.scene import scene_of
from adversaries.see_through_gradients import SeeThroughGradients
from adversaries.surrogate_model import SurrogateModelExtension
from fedsim.attack import Knowledge
from fedsim.errors import AttackError, TranscriptError
from fedsim.findings import Reconstruction
from fedsim.messages import State, Update, as_received, as_sent
from fedsim.models.mlp import Mlp
from fedsim.randomness import generator
from fedsim.task import Task
from fedsim.training import state_of
from fedsim.transcript import Recorder, Transcript, hash_state

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


def sent(build: Callable[[], nn.Module] = mlp, labels: Tensor = LABELS, number: int = 1, client: int = 5) -> Update:
    """A gradient at the fresh weights, and the running statistics that the forward pass left."""
    model = build()
    before = state_of(model)
    gradient = gradient_at(model, images(len(labels)), labels)
    after = {name: t for name, t in state_of(model).items() if name not in gradient}
    return Update(round=number, client=client, before=before, after=after, num_examples=len(labels), gradient=gradient)


def recorded(folder: Path, *updates: Update) -> Transcript:
    Recorder(folder).write(updates[0].round, list(updates))
    return Transcript(folder)


# The recording.


def test_a_recorded_gradient_is_read_back_to_the_bit_beside_what_travelled_with_it(tmp_path: Path) -> None:
    update = sent(normalised)
    read = recorded(tmp_path, update).update(1, 5)
    assert update.gradient is not None
    assert read.gradient is not None
    assert hash_state(read.gradient) == hash_state(update.gradient)
    assert hash_state(read.after) == hash_state(update.after)
    assert list(read.after) == ["1.running_mean", "1.running_var"]
    assert read.pseudo_gradient is read.gradient
    with safe_open(tmp_path / "round-000001.safetensors", framework="pt") as file:  # no pickle in it
        assert torch.equal(file.get_tensor("gradient/5/0000/0.weight"), update.gradient["0.weight"])


def test_a_round_may_hold_weights_of_one_client_and_a_gradient_of_another(tmp_path: Path) -> None:
    trained = replace(sent(client=3), gradient=None, after={n: t + 1 for n, t in sent().before.items()})
    transcript = recorded(tmp_path, sent(), trained)
    assert [update.gradient is None for update in transcript.updates()] == [True, False]
    assert transcript.header(1).version == 2


def test_rounds_of_weights_are_written_in_the_first_format_with_the_hash_that_it_had(tmp_path: Path) -> None:
    trained = replace(sent(), gradient=None, after=sent().before)
    transcript = recorded(tmp_path, trained)
    header = transcript.header(1)
    assert header.version == 1
    assert [set(reply) for reply in header.plain()["replies"]] == [
        {"client", "num_examples", "broadcast", "sha256", "metrics"}
    ]
    assert {key: value for key, value in asdict(header).items() if key != "replies"} == {
        key: value for key, value in header.plain().items() if key != "replies"
    }


def test_the_hash_of_a_recording_covers_the_gradients(tmp_path: Path) -> None:
    update = sent()
    assert update.gradient is not None
    other = {name: t.clone() for name, t in update.gradient.items()}
    other["1.bias"][0] += 1e-6
    hashes = [
        recorded(tmp_path / str(place), item).hash()
        for place, item in enumerate([update, replace(update, gradient=other)])
    ]
    assert hashes[0] != hashes[1]


def test_a_damaged_gradient_is_noticed(tmp_path: Path) -> None:
    update = sent()
    assert update.gradient is not None
    recorded(tmp_path, update)
    path = tmp_path / "round-000001.safetensors"
    content = bytearray(path.read_bytes())
    at = content.find(update.gradient["1.weight"].numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(TranscriptError, match="the bytes of gradient/5 are not those that were recorded") as error:
        Transcript(tmp_path).update(1, 5)
    assert "\n" not in str(error.value)


def test_what_a_client_sends_comes_apart_as_it_was_put_together() -> None:
    gradient, beside = {"a": torch.ones(2)}, {"a.running_mean": torch.zeros(1)}
    assert as_received(as_sent(gradient, beside)) == (gradient, beside)
    assert as_received(beside) == (None, beside)


# What attacks see.


def test_the_scene_of_a_gradient_is_that_gradient_exactly_and_one_step(tmp_path: Path) -> None:
    update = recorded(tmp_path, sent()).update(1, 5)
    scene = scene_of(update, replace(KNOWN, learning_rate=0.004, local_epochs=7, batch_size=2))
    assert update.gradient is not None
    assert scene.steps == 1
    for told, true in zip(scene.direction, update.gradient.values(), strict=True):
        assert torch.equal(told, true)
    for told, true in zip(scene.mean_gradient, update.gradient.values(), strict=True):
        assert torch.equal(told, true)


@pytest.mark.parametrize(
    "attack",
    [
        DeepLeakage(iterations=30),
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
    transcript = recorded(tmp_path, sent())
    finding = attack.run(transcript, KNOWN, victim=5, rng=generator(0))
    assert isinstance(finding, Reconstruction)
    assert finding.data.shape == (3, *SHAPE)
    assert "local step" not in caplog.text
    assert finding.trace["objective"][-1] < finding.trace["objective"][0]


def test_statistics_that_came_beside_a_gradient_serve_the_attack_that_reads_them(tmp_path: Path) -> None:
    attack = SeeThroughGradients(iterations=3, exact_statistics=True)
    finding = attack.run(
        recorded(tmp_path, sent(normalised)), replace(KNOWN, model=normalised), victim=5, rng=generator(0)
    )
    assert isinstance(finding, Reconstruction)


def refusal(transcript: Transcript, attack: GradientInversion, knowledge: Knowledge = KNOWN) -> str:
    with pytest.raises((AttackError, TranscriptError)) as error:
        attack.run(transcript, knowledge, victim=5, rng=generator(0))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_an_attack_that_needs_returned_weights_says_that_there_are_none(tmp_path: Path) -> None:
    told = refusal(recorded(tmp_path, sent()), SurrogateModelExtension(iterations=3))
    assert told == (
        "round 1, client 5: a gradient was sent, no weights; this attack needs the weights that a client returns"
    )


def changed(update: Update, name: str, value: Tensor) -> Update:
    return replace(update, gradient={**(update.gradient or {}), name: value})


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        (lambda u: changed(u, "3.bias", torch.full((10,), math.nan)), "the gradient of 3.bias holds NaN or infinite"),
        (lambda u: changed(u, "3.bias", torch.full((10,), math.inf)), "the gradient of 3.bias holds NaN or infinite"),
        (
            lambda u: replace(u, gradient={n: torch.zeros_like(t) for n, t in u.gradient.items()}),
            "round 1, client 5: the gradient is zero, there is nothing to match",
        ),
        (lambda u: changed(u, "3.bias", torch.ones(9)), "the recorded gradients (4 tensors: 1.weight (12, 16)"),
        (
            lambda u: replace(u, gradient={"1.weight": u.gradient["1.weight"]}),
            "the recorded gradients (1 tensors: 1.weight (12, 16), ...) are not those of the model",
        ),
        (lambda u: replace(u, before={"w": torch.ones(2)}), "the recorded weights (1 tensors: w (2,), ...)"),
        (lambda u: replace(u, num_examples=0), "round 1, client 5: N is 0"),
    ],
    ids=["NaN", "infinite", "zero", "shape", "missing", "weights", "no N"],
)
def test_a_gradient_that_cannot_be_attacked_is_refused_in_one_sentence(
    odd: Callable[[Update], Update], expected: str, tmp_path: Path
) -> None:
    assert expected in refusal(recorded(tmp_path, odd(sent())), InvertingGradients(iterations=3))


def test_buffers_of_another_shape_beside_a_gradient_are_refused(tmp_path: Path) -> None:
    update = replace(sent(normalised), after={"1.running_mean": torch.zeros(3)})
    told = refusal(recorded(tmp_path, update), InvertingGradients(iterations=3), replace(KNOWN, model=normalised))
    assert "are not those of the model" in told


@pytest.mark.parametrize("granted", [{}, {"learning_rate": 0.5, "local_epochs": 9, "batch_size": 1}])
def test_labels_are_counted_from_a_gradient_without_knowing_any_step_size(granted: dict[str, Any]) -> None:
    labels = torch.tensor([0, 3, 3, 3, 7, 9, 9, 2])
    update = sent(labels=labels)
    nothing: dict[str, Any] = {"learning_rate": None, "local_epochs": None, "batch_size": None}
    knowledge = replace(KNOWN, labels=None, **nothing | granted)
    # The weights beside it must not be read: these would say anything.
    astray: State = {name: torch.full_like(t, math.nan) for name, t in update.before.items()}
    counted = count_labels(update, knowledge, mlp(), update.before, astray, generator(0))
    assert counted.tolist() == sorted(labels.tolist())
