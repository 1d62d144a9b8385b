"""Updates and settings at the edge of what an inversion takes, and the recipes that settings make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.data_leakage import DataLeakage
from adversaries.inversion.deep_leakage import DeepLeakage, ImprovedDeepLeakage
from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.long_strides import LongStrides
from adversaries.inversion.see_through_gradients import SeeThroughGradients
from adversaries.inversion.surrogate_curve import NonLinearSurrogate
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import AttackError, KnowledgeError, TranscriptError
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.local_context import LocalContext
from fedsim.inversion.differentiability import check_differentiability
from fedsim.inversion.distances import Cosine, GaussianKernel
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from tests.support import digit_clients
from tests.support.recordings import build_update

SHAPE = (1, 6, 6)
DATA = torch.rand(2, *SHAPE, generator=generator("data"))
LABELS = torch.tensor([1, 4])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Sigmoid(), nn.Linear(12, 5))


def frozen(layer: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = network()
        net[layer].requires_grad_(False)
        return net

    return build


def update_and_knowledge(
    build: Callable[[], nn.Module] = network, epochs: int = 1, count: int = 2
) -> tuple[Update, Knowledge]:
    plan = LocalTraining(local_epochs=epochs, batch_size=10, learning_rate=0.1)
    before = copy_state(build())
    after, _ = local_update(build(), before, DATA[:count], LABELS[:count], plan, key=("x",))
    knowledge = Knowledge(
        model=build,
        loss=cross_entropy,
        input_shape=SHAPE,
        num_classes=5,
        value_range=([0.0], [1.0]),
        input_mean=[0.0],
        input_std=[1.0],
        labels=LABELS[:count],
        learning_rate=0.1,
        local_epochs=epochs,
        batch_size=10,
    )
    return build_update(before, after, round=3, client=7, num_examples=count), knowledge


def attacked(attack: InvertingGradients, folder: Path, update: Update, knowledge: Knowledge) -> Reconstruction:
    Recorder(folder).write(3, [update])
    finding = attack.run(Target(transcript=Transcript(folder), victim=7, knowledge=knowledge, rng=generator(0)))
    assert isinstance(finding, Reconstruction)
    return finding


# Layers that are not trained.


def test_weights_that_are_not_trained_are_not_matched() -> None:
    update, knowledge = update_and_knowledge(frozen(1))
    scene = build_problem(update, knowledge)
    assert scene.parameter_names == ("3.weight", "3.bias")
    gradient = scene.gradient(scene.before, DATA, LABELS)
    assert Cosine()(gradient, Cosine().target(scene)).item() < 1e-5  # the truth is the optimum


def test_a_parameter_that_moved_is_matched_whatever_the_model_says() -> None:
    update, _ = update_and_knowledge(network)
    _, knowledge = update_and_knowledge(frozen(1))
    assert len(build_problem(update, knowledge).parameter_names) == 4


def test_labels_of_a_last_layer_that_is_not_trained_must_be_granted() -> None:
    update, knowledge = update_and_knowledge(frozen(3), count=1)
    withheld = dataclasses.replace(knowledge, labels=None)
    for attack in (InvertingGradients(iterations=1), ImprovedDeepLeakage(iterations=1)):
        with pytest.raises(KnowledgeError, match=r"^labels .*: 3\.bias of the last linear layer did not move; grant"):
            attack._run(make_target(update, withheld), lambda *_: None)


def make_target(update: Update, knowledge: Knowledge) -> Target:
    """The client of this one update, and what is known of it."""
    transcript: Any = _Only(update)
    return Target(transcript=transcript, victim=7, knowledge=knowledge, rng=generator(0))


class _Only:
    """A transcript of one update."""

    def __init__(self, update: Update) -> None:
        self._update = update
        self.rounds = [update.round]

    def clients(self, number: int) -> list[int]:
        return [self._update.client]

    def update(self, number: int, client: int) -> Update:
        return self._update


# Half precision, other models.


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_what_was_sent_in_half_precision_is_attacked_in_float32(tmp_path: Path, kind: torch.dtype) -> None:
    update, knowledge = update_and_knowledge(epochs=5)
    halves = [{name: t.to(kind) for name, t in state.items()} for state in (update.before, update.after)]
    whole = [{name: t.float() for name, t in state.items()} for state in halves]
    found = [
        attacked(
            InvertingGradients(iterations=5),
            tmp_path / str(place),
            dataclasses.replace(update, before=before, payload=Payload.from_dense(after, "weights")),
            knowledge,
        )
        for place, (before, after) in enumerate((halves, whole))
    ]
    assert found[0].data.dtype == torch.float32
    assert torch.equal(found[0].data, found[1].data)


def other(change: Callable[[dict[str, Tensor]], State]) -> Callable[[Update], Update]:
    return lambda update: dataclasses.replace(update, payload=Payload.from_dense(change(dict(update.after)), "weights"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            other(lambda state: state | {"3.bias": torch.zeros(6)}),
            r"weights w_T have 3\.bias of shape \(6,\), the model \(5,\)",
        ),
        (
            other(lambda state: {name: t for name, t in state.items() if name != "3.bias"}),
            r"weights w_T have no 3\.bias, the model has one of shape \(5,\)",
        ),
        (
            lambda update: dataclasses.replace(
                update, before={str(place): t for place, t in enumerate(list(update.before.values())[:3])}
            ),
            r"weights w_0 have no 3\.bias, the model has one of shape \(5,\)",
        ),
    ],
    ids=["shape", "missing", "list"],
)
def test_the_tensor_that_does_not_fit_is_named(change: Callable[[Update], Update], told: str) -> None:
    update, knowledge = update_and_knowledge()
    with pytest.raises(TranscriptError, match=f"^round 3, client 7: the recorded {told}; attack with the model of"):
        build_problem(change(update), knowledge)


# Slopes and classes.


def test_a_distance_of_nothing_is_looked_at_too() -> None:
    update, knowledge = update_and_knowledge()
    values = {"dummy": torch.rand(2, *SHAPE)}
    with pytest.raises(
        AttackError, match=r"^round 3, client 7: the gradient of the distance in the dummy data is exactly"
    ):
        check_differentiability(
            build_problem(update, knowledge), values, LABELS, lambda leaves: (leaves["dummy"] * 0).sum()
        )


def test_another_number_of_classes_than_the_model_has_is_refused() -> None:
    update, knowledge = update_and_knowledge()
    wrong = dataclasses.replace(knowledge, num_classes=3)
    with pytest.raises(AttackError, match=r"outputs of shape \(5,\) for each example, num_classes is 3; grant the"):
        DeepLeakage(iterations=1)._run(make_target(update, wrong), lambda *_: None)


# Weights of layers.


def test_cosine_with_weights_is_that_of_weighted_gradients() -> None:
    scene = build_problem(*update_and_knowledge())
    layers = (1.0, 0.5, 2.0, 0.0)
    distance = Cosine(layers=layers)
    gradient = [torch.randn(t.shape, generator=generator("g", place)) for place, t in enumerate(scene.before)]
    g, d = (
        torch.cat([w * t.flatten() for w, t in zip(layers, side, strict=True)]) for side in (gradient, scene.direction)
    )
    expected = 1 - torch.cosine_similarity(g, d, dim=0)
    torch.testing.assert_close(distance(gradient, distance.target(scene)), expected)


def test_the_kernel_with_weights_is_their_weighted_mean() -> None:
    scene = build_problem(*update_and_knowledge())
    gradient = [t * 1.1 for t in scene.mean_gradient]
    one_by_one = [
        GaussianKernel(layers=tuple(float(place == other) for other in range(4)))(gradient, scene.mean_gradient)
        for place in range(4)
    ]
    whole = GaussianKernel(layers=(1.0, 2.0, 3.0, 4.0))(gradient, scene.mean_gradient)
    torch.testing.assert_close(whole, sum(w * v for w, v in zip((0.1, 0.2, 0.3, 0.4), one_by_one, strict=True)))
    torch.testing.assert_close(GaussianKernel()(gradient, scene.mean_gradient), torch.stack(one_by_one).mean())


# Defenses that the adversary knows.


def test_a_clip_is_undone_in_the_unit_of_what_was_sent() -> None:
    """At the true data the defended gradient is the one that was seen, though eta T of it was sent and clipped."""
    update, knowledge = update_and_knowledge()
    delta = {name: -tensor for name, tensor in update.pseudo_gradient.items()}
    length = math.sqrt(sum(tensor.square().sum().item() for tensor in delta.values()))
    defense = UpdateNoise(clip=0.3 * length)
    clipped = defense.on_update(delta, LocalContext(rng=generator(0)))
    seen = dataclasses.replace(update, payload=Payload.from_dense(clipped, "delta"))
    scene = dataclasses.replace(build_problem(seen, knowledge), defenses=(defense,))
    gradient = scene.gradient(scene.before, DATA, LABELS)
    for known, true, recorded in zip(scene.apply_defenses(gradient), gradient, scene.mean_gradient, strict=True):
        torch.testing.assert_close(known, recorded, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(0.3 * true, recorded, rtol=1e-3, atol=1e-6)


# What settings make of a recipe.


def test_dlfa_grows_its_emphasis_and_shrinks_its_steps() -> None:
    recipe = DataLeakage()._recipe(build_problem(*update_and_knowledge(epochs=2)))
    assert recipe.distance_schedule is not None
    assert [recipe.distance_schedule(step, 400) for step in (0, 100, 200, 399)] == pytest.approx(
        [1, math.sqrt(2), 2, 2]
    )
    assert recipe.schedule(20, 400) == pytest.approx(0.995**2)


def test_inverting_gradients_may_keep_its_steps() -> None:
    scene = build_problem(*update_and_knowledge())
    last = [InvertingGradients(decay=decay)._recipe(scene).schedule(99, 100) for decay in (True, False)]
    assert last == pytest.approx([1e-3, 1])


def test_see_through_gradients_weighs_its_priors_by_the_gradient() -> None:
    attack = SeeThroughGradients(gradient_weight=2.0, bn_weight=0.0, tv_weight=0.2, norm_weight=0.6, group_weight=1.0)
    weights = [weight for weight, _ in attack._recipe(build_problem(*update_and_knowledge())).priors]
    assert weights == pytest.approx([0.1, 0.3, 0.0, 0.5])

    def normalised() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.BatchNorm1d(12), nn.Sigmoid(), nn.Linear(12, 5))

    with_prior = dataclasses.replace(attack, bn_weight=0.4)
    assert with_prior._recipe(build_problem(*update_and_knowledge(normalised))).priors[2][0] == pytest.approx(0.2)


def test_strides_may_be_half_or_twice_as_long() -> None:
    scene = build_problem(*update_and_knowledge(epochs=3))
    stretch = LongStrides()._recipe(scene).update_model.variables(scene)["stretch"]
    assert (stretch.low, stretch.high) == (0.5, 2.0)


def test_patience_goes_on_while_the_objective_falls_slowly(tmp_path: Path) -> None:
    attack = InvertingGradients(iterations=40, step_size=0.01, decay=False, patience=10)
    objective = attacked(attack, tmp_path, *update_and_knowledge()).trace["objective"]
    assert objective[20] > 0.5 * objective[10]  # no half in ten iterations
    assert len(objective) == 40


def test_the_curve_reconstructs_the_client_that_sent_the_update_and_no_other() -> None:
    attack = NonLinearSurrogate(iterations=150, step_size=0.1)
    update, known = digit_clients.make_update(0), digit_clients.knowledge(0)
    finding = attack.invert(update, known, generator("curve"), lambda *_: None)
    assert digit_clients.quality(finding, 0) > digit_clients.floor(0) + 3
    assert digit_clients.quality(finding, 1) < digit_clients.floor(1)
