"""An adversary that knows the defense sees more: the same attacks, naive and adaptive, on the same updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.sent_gradients import ClientUpdates
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from adversaries.inversion.tgias_ro import TemporalInversion
from clients.defenses.gradient_prune import GradientPrune
from clients.defenses.layer_freeze import LayerFreeze
from clients.defenses.quantise import Quantise
from clients.defenses.random_mask import RandomMask
from clients.defenses.soteria import Soteria
from clients.defenses.top_k import TopK
from clients.defenses.update_noise import UpdateNoise
from clients.mods import defend_payload
from fedsim.base.metrics import pair_examples, psnr
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.attack import Knowledge
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.inversion import compiled_objective
from fedsim.inversion.distances import Cosine, Distance, GaussianKernel, SquaredL2
from fedsim.inversion.labels.last_layer import fill_dropped_entries
from fedsim.inversion.labels.updates import count_labels
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining
from tests.support.digit_clients import COUNT, DIGITS, data, mlp

ROUNDS = 3
PLAN = LocalTraining(local_epochs=3, batch_size=COUNT // 2, learning_rate=0.05)


def cnn() -> nn.Module:
    with seed_globals("cnn"):
        return SmeCnn().build(DIGITS.task)


Build = Callable[[], nn.Module]
ITERATIONS: dict[Build, int] = {mlp: 150, cnn: 40}
"""By when the two adversaries are apart."""


def make_update(build: Build, sends: str, victim: int, *defenses: Defense) -> Update:
    """What the client sends of its four digits: a gradient, or its weights after six local steps."""
    (inputs, labels), before, key = data(victim), copy_state(build()), ("client", victim)
    if sends == "gradient":
        whole = replace(PLAN, batch_size=COUNT)
        found, _, _ = local_gradient(build(), before, inputs, labels, whole, key=key, defenses=defenses)
        payload = Payload.from_dense(found, "gradient")
    else:
        found, _ = local_update(build(), before, inputs, labels, PLAN, key=key, defenses=defenses)
        payload = Payload.from_dense(found, "weights")
    for defense in defenses:
        payload = defend_payload(defense, before, payload, LocalContext(rng=generator(*key, "sent"), broadcast=before))
    return Update(round=1, client=victim, before=before, payload=payload, num_examples=COUNT)


def known(build: Build, victim: int, *defenses: Defense, **more: Any) -> Knowledge:
    granted = Knowledge(
        model=build,
        loss=cross_entropy,
        input_shape=(1, 8, 8),
        num_classes=10,
        value_range=([0.0], [1.0]),
        input_mean=[0.3],
        input_std=[0.35],
        labels=data(victim)[1].sort().values,
        learning_rate=PLAN.learning_rate,
        local_epochs=PLAN.local_epochs,
        batch_size=PLAN.batch_size,
        optimizer="sgd",
        momentum=0.0,
        weight_decay=0.0,
        proximal_mu=0.0,
        defenses=defenses,
    )
    return replace(granted, **more)


def mean_psnr(build: Build, sends: str, defense: Defense, *, adaptive: bool) -> float:
    """Mean PSNR in dB over the client's digits."""
    kind: type[GradientInversion] = InvertingGradients if sends == "gradient" else SurrogateModelExtension
    attack = kind(iterations=ITERATIONS[build], step_size=0.1)  # type: ignore[call-arg]
    granted = known(build, 0, *([defense] if adaptive else []))
    finding = attack.invert(make_update(build, sends, 0, defense), granted, generator("attack", 0), lambda *_: None)
    inputs, _ = data(0)
    return psnr(pair_examples(finding.data, inputs), inputs).mean().item()


@pytest.mark.parametrize(
    ("build", "sends", "defense", "margin"),
    [
        pytest.param(mlp, "gradient", TopK(fraction=0.1), 0.7, marks=pytest.mark.thorough),
        pytest.param(cnn, "gradient", TopK(fraction=0.02), 0.6, marks=pytest.mark.thorough),
        pytest.param(cnn, "weights", TopK(fraction=0.02), 0.6, marks=pytest.mark.slow),
        (mlp, "gradient", RandomMask(masked=0.4), 6.0),
        pytest.param(cnn, "weights", RandomMask(masked=0.4), 0.4, marks=pytest.mark.slow),
        pytest.param(mlp, "weights", RandomMask(masked=0.4, rescale=True), 5.0, marks=pytest.mark.thorough),
        pytest.param(mlp, "gradient", LayerFreeze(layers=("1.weight",)), 0.8, marks=pytest.mark.thorough),
        pytest.param(mlp, "gradient", Quantise(scheme="sign"), 0.8, marks=pytest.mark.thorough),
        pytest.param(cnn, "weights", Quantise(scheme="sign"), 1.3, marks=pytest.mark.slow),
        pytest.param(mlp, "gradient", GradientPrune(pruned=0.7), 3.5, marks=pytest.mark.thorough),
        pytest.param(cnn, "gradient", GradientPrune(pruned=0.95), 0.9, marks=pytest.mark.thorough),
        pytest.param(cnn, "weights", GradientPrune(pruned=0.95), 0.8, marks=pytest.mark.thorough),
        pytest.param(mlp, "gradient", Soteria(pruned=0.4), 8.0, marks=pytest.mark.thorough),
        pytest.param(cnn, "weights", Soteria(pruned=0.4), 0.4, marks=pytest.mark.thorough),
    ],
)
def test_who_knows_the_defense_finds_more(build: Build, sends: str, defense: Defense, margin: float) -> None:
    """By more than `margin` dB, which is at most half of what was measured."""
    naive, adaptive = (mean_psnr(build, sends, defense, adaptive=knows) for knows in (False, True))
    assert adaptive > naive + margin


@pytest.mark.parametrize("distance", [Cosine(), SquaredL2(), GaussianKernel()])
@pytest.mark.parametrize(
    "defense",
    [
        TopK(fraction=0.1),
        RandomMask(masked=0.4),
        RandomMask(masked=0.4, rescale=True),
        LayerFreeze(layers=("1.weight",)),
        GradientPrune(pruned=0.7),
        Soteria(pruned=0.4),
    ],
)
def test_at_the_true_data_every_distance_is_smaller_for_who_knows_the_defense(
    distance: Distance, defense: Defense
) -> None:
    """It would be zero but for the half of what was not sent; nothing in it is NaN, nor is its slope."""
    update = make_update(mlp, "gradient", 0, defense)
    inputs, labels = data(0)
    values = []
    for defenses in ((), (defense,)):
        scene = build_problem(update, known(mlp, 0, *defenses))
        dummy = scene.scaling.from_unit_range(inputs).requires_grad_(True)
        gradient = scene.apply_defenses(scene.gradient(scene.before, dummy, labels))
        value = distance(gradient, distance.target(scene))
        (slope,) = torch.autograd.grad(value, dummy)
        assert slope.isfinite().all()
        values.append(value.item())
    naive, adaptive = values
    assert adaptive < naive * (0.9 if isinstance(defense, TopK | GradientPrune) else 1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_one_graph_serves_victims_with_other_masks_and_none_serves_both_adversaries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted, real = list[object](), torch.compile
    monkeypatch.setattr(torch, "compile", lambda graph, **how: counted.append(graph) or real(graph, **how))
    monkeypatch.setattr(compiled_objective, "_cache", [])
    attack, defense = InvertingGradients(iterations=3, step_size=0.1), TopK(fraction=0.1)
    for defenses, graphs in (((), 1), ((defense,), 2)):
        for victim in range(2):
            update, granted = make_update(mlp, "gradient", victim, defense), known(mlp, victim, *defenses)
            eager, fast = (
                replace(attack, compile=fast).invert(update, granted, generator(0), lambda *_: None)
                for fast in (False, True)
            )
            torch.testing.assert_close(fast.trace["objective"], eager.trace["objective"], atol=1e-4, rtol=0)
        assert len(counted) == graphs


# Labels.


def test_what_a_mask_left_out_of_the_last_layer_follows_from_its_other_numbers() -> None:
    """Of one example the weights' gradient is the bias's times the features, here (2, 1, 0, 4)."""
    bias, features = torch.tensor([0.5, -0.75, 0.25]), torch.tensor([2.0, 1.0, 0.0, 4.0])
    true = {"weight": bias[:, None] * features, "bias": bias}
    masked = {"weight": true["weight"].clone(), "bias": torch.tensor([0.5, 0.0, 0.25])}
    masked["weight"][1, 0] = masked["weight"][2, 3] = 0.0
    found = fill_dropped_entries(masked, [RandomMask(masked=0.4)])
    torch.testing.assert_close(found["bias"], bias)
    torch.testing.assert_close(found["weight"], true["weight"])


def test_only_what_a_defense_can_have_left_out_is_filled_in() -> None:
    """Half of it under top-k, half of the bound under pruning, nothing under a rounding that is right on average."""
    layer = {"weight": torch.tensor([[2.0, 4.0], [1.0, 2.0], [4.0, 8.0]]), "bias": torch.tensor([1.0, 0.5, 0.0])}
    assert fill_dropped_entries(layer, [RandomMask()])["bias"].tolist() == pytest.approx([1.0, 0.5, 2.0])
    assert fill_dropped_entries(layer, [TopK()])["bias"].tolist() == pytest.approx([1.0, 0.5, 1.0])
    assert fill_dropped_entries(layer, [GradientPrune()])["bias"].tolist() == pytest.approx([1.0, 0.5, 0.25], rel=1e-3)
    assert fill_dropped_entries(layer, [Quantise(scheme="ternary")])["bias"].tolist() == [1.0, 0.5, 0.0]
    silent = {"weight": layer["weight"], "bias": torch.zeros(3)}
    assert not fill_dropped_entries(silent, [RandomMask()])["bias"].any(), "where nothing was sent nothing is told"


@pytest.mark.parametrize(
    ("sends", "defense"),
    [
        ("gradient", RandomMask(masked=0.4)),
        pytest.param("weights", GradientPrune(pruned=0.7), marks=pytest.mark.thorough),
        pytest.param("weights", RandomMask(masked=0.4), marks=pytest.mark.thorough),
        pytest.param("gradient", GradientPrune(pruned=0.7), marks=pytest.mark.thorough),
    ],
)
def test_who_knows_the_defense_counts_labels_better(sends: str, defense: Defense) -> None:
    right = {False: 0.0, True: 0.0}
    for victim in range(8):
        update, labels = make_update(mlp, sends, victim, defense), data(victim)[1]
        for knows in right:
            granted = known(mlp, victim, *([defense] if knows else []), labels=None)
            scene = build_problem(update, granted)
            before = dict(zip(scene.parameter_names, scene.before, strict=True))
            after = dict(zip(scene.parameter_names, scene.after or scene.before, strict=True))
            counted = count_labels(update, granted, scene.model, before, after, generator("labels", victim))
            both = torch.minimum(counted.bincount(minlength=10), labels.bincount(minlength=10))
            right[knows] += both.sum().item() / COUNT / 8
    assert right[True] > right[False] + 0.03
    assert right[True] > 0.85


def test_a_last_bias_that_was_never_sent_is_told(caplog: pytest.LogCaptureFixture) -> None:
    defense = LayerFreeze(layers=("3.bias",))
    update, granted = make_update(mlp, "weights", 0, defense), known(mlp, 0, defense, labels=None)
    scene = build_problem(update, granted)
    before, after = (dict(zip(scene.parameter_names, state, strict=True)) for state in (scene.before, scene.after))
    assert len(count_labels(update, granted, scene.model, before, after, generator(0))) == COUNT
    assert "round 1, client 0: 3.bias was not sent; labels are guesses" in caplog.text


# Several rounds.


def over_rounds(build: Build, rounds: int, defense: Defense, *, adaptive: bool, **settings: Any) -> float:
    """PSNR in dB of TGIAs-RO from gradients of the same digits at weights that others' gradients have moved."""
    (inputs, labels), state, model = data(0), dict(copy_state(build())), build()
    whole, updates, memory = replace(PLAN, batch_size=COUNT), list[Update](), dict[str, Tensor]()
    for number in range(1, rounds + 1):
        before = dict(state)
        found, _, _ = local_gradient(model, before, inputs, labels, whole, key=("client", number))
        payload = defend_payload(
            defense,
            before,
            Payload.from_dense(found, "gradient"),
            LocalContext(rng=generator("sent", number), round=number, broadcast=before, memory=memory),
        )
        updates.append(Update(round=number, client=0, before=before, payload=payload, num_examples=COUNT))
        rows = slice(200 + 32 * number, 232 + 32 * number)
        others = DIGITS.train.inputs(rows), DIGITS.train.labels[rows]
        step, _, _ = local_gradient(model, before, *others, replace(PLAN, batch_size=32), key=("others", number))
        state = {name: before[name] - 0.3 * step[name] for name in before}
    attack = TemporalInversion(
        gradients=rounds,
        iterations=40,
        optimizer="adam",
        step_size=0.1,
        distance="cosine",
        layers="equal",
        tv_weight=0.05,
        align=False,
        **settings,
    )
    messages = ClientUpdates(client=0, rounds=range(1, rounds + 1), read=lambda number: updates[number - 1])
    granted = known(build, 0, *([defense] if adaptive else []))
    finding = attack.invert(messages, granted, generator("attack"), lambda *_: None)
    return psnr(pair_examples(finding.data, inputs), inputs).mean().item()


@pytest.mark.parametrize(
    ("build", "defense", "margin"),
    [
        pytest.param(mlp, RandomMask(masked=0.4), 0.8, marks=pytest.mark.thorough),
        pytest.param(cnn, RandomMask(masked=0.8), 2.5, marks=pytest.mark.thorough),
        (mlp, RandomMask(masked=0.8, error_feedback=True), 1.5),
        pytest.param(cnn, TopK(fraction=0.05), 0.8, marks=pytest.mark.thorough),
        pytest.param(cnn, Quantise(scheme="sign"), 2.5, marks=pytest.mark.slow),
    ],
)
def test_over_rounds_too_who_knows_the_defense_finds_more(build: Build, defense: Defense, margin: float) -> None:
    naive, adaptive = (over_rounds(build, ROUNDS, defense, adaptive=knows) for knows in (False, True))
    assert adaptive > naive + margin


@pytest.mark.thorough
def test_rounds_average_noise_and_their_mean_does_at_least_as_well_as_their_median() -> None:
    """Gaussian noise whose deviation is 0.02, as the server knows: 1000 times 2e-5."""
    noise = UpdateNoise(clip=1000.0, noise_multiplier=2e-5)
    one = over_rounds(mlp, 1, noise, adaptive=True)
    mean, median = (over_rounds(mlp, ROUNDS, noise, adaptive=True, aggregation=how) for how in ("mean", "median"))
    assert mean > one + 1.5
    assert mean > median
