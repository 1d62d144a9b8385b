"""The engine of gradient inversion against the papers' formulas, and the updates it must refuse."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim.base.errors import AttackError, ConfigError, FedsimError, KnowledgeError, TranscriptError
from fedsim.base.metrics import match_examples, psnr
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.batch_norm import used_batch_statistics
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import total_variation
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining
from tests.support.recordings import Record, build_update, run_attack
from tests.support.standard_images import HIGH, LOW, MEAN, SHAPE, STD, standard, truth

LABELS = torch.tensor([1, 4, 4])


def mlp(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return Mlp(**({"hidden": (12,)} | settings)).build(Task(SHAPE, 10))


KNOWN = Knowledge(
    model=mlp,
    loss=cross_entropy,
    input_shape=SHAPE,
    num_classes=10,
    value_range=([LOW], [HIGH]),
    input_mean=[0.0],
    input_std=[1.0],
    labels=LABELS,
)


def trained(
    build: Callable[[], nn.Module] = mlp, labels: Tensor = LABELS, before: State | None = None, **how: Any
) -> Update:
    """A client's whole local training on the truth, by fedsim's own training."""
    start = before or copy_state(build())
    plan = LocalTraining(**({"local_epochs": 1, "batch_size": 100, "learning_rate": 0.1} | how))
    after, _ = local_update(build(), start, standard(truth(len(labels))), labels, plan, key=("x",))
    return build_update(start, after, client=5, num_examples=len(labels))


def run(
    attack: GradientInversion, transcript: Transcript, knowledge: Knowledge = KNOWN, seed: int = 0
) -> Reconstruction:
    finding = run_attack(attack, transcript, knowledge, 5, seed)
    assert isinstance(finding, Reconstruction)
    return finding


@pytest.fixture
def start_from_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dummy data begin where the victim's data are; the labels keep their order."""
    monkeypatch.setattr(torch, "randn", lambda shape, generator: standard(truth(shape[0])))


# The formulas.


def test_total_variation_by_hand() -> None:
    """(mean |dx| + mean |dy|) / 2, without wrap-around."""
    image = torch.tensor([[0.0, 1.0, 3.0], [0.0, 0.0, 0.0]]).reshape(1, 1, 2, 3)
    across, down = (1 + 2 + 0 + 0) / 4, (0 + 1 + 3) / 3
    assert total_variation(image).item() == pytest.approx((across + down) / 2)
    assert total_variation(torch.ones(2, 3, 4, 4)).item() == 0
    assert total_variation(image.repeat(5, 2, 1, 1)).item() == pytest.approx((across + down) / 2)


def algorithm_1(
    update: Update, attack: SurrogateModelExtension, dummy: Tensor, labels: Tensor
) -> tuple[Tensor, list[float], list[float], list[float]]:
    """SME's Algorithm 1 written down once more, alpha's gradient as the inner product of Eq. 11.

    With Eq. 5's alpha, the weight of w_0, the factor is w_0 - w_T; Eq. 11 as printed has it the other
    way round. It is taken anew each `alpha_every` iterations.
    """
    model = mlp()
    w0, wt = dict(update.before), dict(update.after)
    delta = {k: w0[k] - wt[k] for k in w0}
    flat = torch.cat([v.flatten() for v in delta.values()])
    dummy, alpha = dummy.clone().requires_grad_(True), torch.tensor(attack.alpha)
    moments = [(torch.zeros_like(dummy), torch.zeros_like(dummy)), (torch.zeros(()), torch.zeros(()))]
    objectives, similarities, alphas = [], [], []
    for k in range(attack.iterations):
        surrogate = {key: (alpha * w0[key] + (1 - alpha) * wt[key]).requires_grad_(True) for key in w0}
        loss = cross_entropy(functional_call(model, surrogate, (dummy,)), labels)
        gradient = torch.autograd.grad(loss, list(surrogate.values()), create_graph=True)
        g = torch.cat([v.flatten() for v in gradient])
        l_sim = 1 - (flat @ g) / (flat.norm() * g.norm())
        dx, dy = dummy.diff(dim=-1).abs().mean(), dummy.diff(dim=-2).abs().mean()
        objective = l_sim + attack.tv_weight * (dx + dy) / 2
        slope, *outer = torch.autograd.grad(objective, [dummy, *surrogate.values()])
        if k % attack.alpha_every == 0:
            eq_11 = sum((o * d).sum() for o, d in zip(outer, delta.values(), strict=True))
        objectives.append(objective.item())
        similarities.append(l_sim.item())
        alphas.append(alpha.item())
        decay = 0.1 ** sum(k >= int(part * attack.iterations) for part in (3 / 8, 5 / 8, 7 / 8)) if attack.decay else 1
        with torch.no_grad():
            steps = []
            for (first, second), grad in zip(moments, (slope, eq_11), strict=True):
                first.mul_(0.9).add_(0.1 * grad)
                second.mul_(0.999).add_(0.001 * grad**2)
                corrected = first / (1 - 0.9 ** (k + 1)), second / (1 - 0.999 ** (k + 1))
                steps.append(corrected[0] / (corrected[1].sqrt() + 1e-8))
            dummy -= decay * attack.step_size * steps[0]
            dummy.clamp_(LOW, HIGH)
            alpha = (alpha - decay * attack.alpha_step_size * steps[1]).clamp(0, 1)
    return dummy.detach(), objectives, similarities, alphas


@pytest.mark.parametrize(("decay", "every"), [(True, 1), (False, 1), (False, 5)])
def test_sme_is_algorithm_1_with_the_inner_product_of_eq_11(record: Record, decay: bool, every: int) -> None:
    update = trained(local_epochs=5, batch_size=2)
    attack = SurrogateModelExtension(iterations=12, alpha_step_size=0.05, step_size=0.3, decay=decay, alpha_every=every)
    start = torch.randn((3, *SHAPE), generator=generator(0)).clamp(LOW, HIGH)
    dummy, objectives, similarities, alphas = algorithm_1(update, attack, start, LABELS)
    finding = run(attack, record(update))
    assert finding.trace["objective"].tolist() == pytest.approx(objectives, abs=1e-4)
    assert finding.trace["l_sim"].tolist() == pytest.approx(similarities, abs=1e-4)
    assert finding.trace["alpha"].tolist() == pytest.approx(alphas, abs=1e-4)
    torch.testing.assert_close(finding.data, dummy * STD + MEAN, atol=2e-3, rtol=0)
    assert len(set(alphas)) > 5


def test_the_slope_in_alpha_is_that_of_the_objective(record: Record) -> None:
    """Eq. 11's value from two objectives nearby, and the first step goes down it."""
    transcript = record(trained(local_epochs=5, batch_size=2))
    up, down, here = (
        run(SurrogateModelExtension(iterations=2, alpha=a, alpha_step_size=0.01, decay=False), transcript).trace
        for a in (0.505, 0.495, 0.5)
    )
    slope = (up["objective"][0] - down["objective"][0]).item() / 0.01
    assert abs(slope) > 1e-3
    step = (here["alpha"][1] - here["alpha"][0]).item()
    assert step == pytest.approx(-math.copysign(0.01, slope), abs=1e-4)


def test_ig_is_sme_with_alpha_held_at_one(record: Record) -> None:
    transcript = record(trained(local_epochs=5))
    ig = run(InvertingGradients(iterations=10), transcript)
    sme = run(SurrogateModelExtension(iterations=10, alpha=1.0, alpha_step_size=1e-30), transcript)
    assert torch.equal(ig.data, sme.data)
    assert torch.equal(ig.trace["objective"], sme.trace["objective"])
    assert "alpha" not in ig.trace


@pytest.mark.usefixtures("start_from_the_truth")
@pytest.mark.parametrize(
    "build", [mlp, lambda: SmeCnn(channels=(2, 3), hidden=8).build(Task(SHAPE, 10))], ids=["mlp", "cnn"]
)
def test_the_truth_matches_one_full_batch_step_exactly(record: Record, build: Callable[[], nn.Module]) -> None:
    finding = run(InvertingGradients(iterations=1), record(trained(build)), dataclasses.replace(KNOWN, model=build))
    assert abs(finding.trace["l_sim"][0].item()) < 1e-4
    assert finding.snapshots is not None
    torch.testing.assert_close(finding.snapshots[0], truth(), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("start_from_the_truth")
def test_between_the_ends_of_many_steps_the_truth_matches_better_than_at_the_start(record: Record) -> None:
    """The point of SME: the gradient at w_0 is not the update, that of a surrogate nearly is."""
    transcript = record(trained(local_epochs=40, learning_rate=0.2))
    at = {
        alpha: run(SurrogateModelExtension(iterations=1, alpha=alpha), transcript).trace["l_sim"][0].item()
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    best = min(at, key=lambda alpha: at[alpha])
    assert 0 < best < 1
    assert at[best] < 0.5 * at[1.0]
    assert at[best] < at[0.0]


@given(factor=st.floats(1e-2, 50))
@settings(max_examples=4)
def test_the_objective_does_not_depend_on_the_length_of_the_update(
    tmp_path_factory: pytest.TempPathFactory, factor: float
) -> None:
    update = trained()
    longer = {name: w + factor * (update.after[name] - w) for name, w in update.before.items()}
    values = []
    for after in (update.after, longer):
        folder = tmp_path_factory.mktemp("recording")
        Recorder(folder).write(1, [dataclasses.replace(update, payload=Payload.from_dense(after, "weights"))])
        values.append(run(InvertingGradients(iterations=3, step_size=0.1), Transcript(folder)).trace["objective"])
    torch.testing.assert_close(values[0], values[1], atol=2e-3, rtol=0)


def test_alpha_stays_between_both_ends(record: Record) -> None:
    transcript = record(trained(local_epochs=3))
    for start in (0.0, 0.5, 1.0):
        attack = SurrogateModelExtension(iterations=15, alpha=start, alpha_step_size=3.0, decay=False)
        alpha = run(attack, transcript).trace["alpha"]
        assert ((alpha >= 0) & (alpha <= 1)).all()
    assert alpha.unique().numel() > 1


class Watched(nn.Module):
    """A network that notes the lowest and highest pixel that dummy data had; other inputs are of another number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.seen: list[tuple[float, float]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == len(LABELS):
            self.seen.append((inputs.min().item(), inputs.max().item()))
        return self.body(inputs)


def test_pixels_never_leave_their_range(record: Record) -> None:
    """Also inside the loop, where the finding's own clamping cannot hide it."""
    model = Watched()
    knowledge = dataclasses.replace(KNOWN, model=lambda: model)
    finding = run(InvertingGradients(iterations=25, step_size=5.0), record(trained(Watched)), knowledge)
    assert len(model.seen) >= 25
    assert min(low for low, _ in model.seen) >= LOW - 1e-5
    assert max(high for _, high in model.seen) <= HIGH + 1e-5
    assert max(high for _, high in model.seen) == pytest.approx(HIGH, abs=1e-4)  # the bound was met
    assert finding.snapshots is not None
    assert finding.snapshots.min() >= 0
    assert finding.snapshots.max() <= 1


def test_snapshots_begin_at_the_start_and_end_at_the_finding(record: Record) -> None:
    transcript = record(trained())
    for iterations in (1, 2, 7, 100):
        finding = run(InvertingGradients(iterations=iterations), transcript)
        assert finding.snapshots is not None
        assert finding.snapshot_iterations is not None
        at = finding.snapshot_iterations.tolist()
        assert at[0] == 0
        assert at[-1] == iterations
        assert at == sorted(set(at))
        assert len(at) == len(finding.snapshots)
        assert torch.equal(finding.snapshots[-1], finding.data)
        assert len(finding.trace["objective"]) == iterations


def test_signed_steps_are_signed(record: Record) -> None:
    """Adam's first step is +-step_size either way; with signs, also the second for every pixel that kept its sign."""
    transcript = record(trained())
    signed, plain = (
        run(InvertingGradients(iterations=3, step_size=0.01, signed=s, decay=False), transcript) for s in (True, False)
    )
    assert not torch.equal(signed.data, plain.data)
    assert signed.trace["objective"][0] == plain.trace["objective"][0]


def test_more_weight_on_total_variation_gives_smoother_images(record: Record) -> None:
    transcript = record(trained())
    rough, smooth = (
        total_variation(run(InvertingGradients(iterations=60, tv_weight=w), transcript).data).item()
        for w in (0.0, 10.0)
    )
    assert smooth < 0.5 * rough


@pytest.mark.parametrize(
    ("attack", "hidden"),
    [
        (InvertingGradients, ()),
        pytest.param(SurrogateModelExtension, (32,), marks=pytest.mark.thorough),
        pytest.param(InvertingGradients, (32,), marks=pytest.mark.thorough),
        (SurrogateModelExtension, ()),
    ],
)
def test_one_example_is_recovered(record: Record, attack: type[GradientInversion], hidden: tuple[int, ...]) -> None:
    """A single full-batch step on one example gives it away, far beyond any guess."""

    def build() -> nn.Module:
        return mlp(hidden=hidden)

    update = trained(build, labels=LABELS[:1], learning_rate=0.01)
    knowledge = dataclasses.replace(KNOWN, model=build, labels=LABELS[:1])
    finding = run(attack(iterations=300, step_size=0.1, tv_weight=0.0), record(update), knowledge)
    guess = psnr(torch.full((1, *SHAPE), 0.5), truth(1)).item()
    assert psnr(finding.data, truth(1)).item() > max(30, guess + 15)


def test_labels_need_not_be_granted(record: Record) -> None:
    """They are counted from the update then, and the right ones are found."""
    knowledge = dataclasses.replace(KNOWN, labels=None)
    assert run(InvertingGradients(iterations=2), record(trained()), knowledge).labels.tolist() == LABELS.tolist()


@pytest.mark.thorough
def test_a_batch_of_three_is_recovered_better_than_by_guessing(record: Record) -> None:
    def build() -> nn.Module:
        return mlp(hidden=(64,))

    knowledge = dataclasses.replace(KNOWN, model=build)
    finding = run(
        SurrogateModelExtension(iterations=300, step_size=0.1, tv_weight=0.0), record(trained(build)), knowledge
    )
    paired = finding.data[match_examples(finding.data, truth())]
    assert psnr(paired, truth()).mean() > psnr(truth().mean(0).expand_as(truth()), truth()).mean() + 3


# Units.


def test_without_moments_the_middle_of_the_range_is_the_origin(record: Record) -> None:
    """Then half the range is two standard deviations, whatever the units are."""
    knowledge = dataclasses.replace(KNOWN, input_mean=None, input_std=None)
    finding = run(InvertingGradients(iterations=1, step_size=1e-9), record(trained()), knowledge)
    start = torch.randn((3, *SHAPE), generator=generator(0)).clamp(-2, 2)
    torch.testing.assert_close(finding.data, start / 4 + 0.5, atol=1e-5, rtol=0)


def test_units_differ_from_channel_to_channel(record: Record) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Mlp(hidden=(8,)).build(Task((3, 4, 4), 10))

    before = copy_state(build())
    after = {name: w + 0.01 for name, w in before.items()}
    update = build_update(before, after, client=5, num_examples=3)
    mean, std = torch.tensor([0.2, 0.5, 0.8]), torch.tensor([0.1, 0.2, 0.3])
    knowledge = Knowledge(
        model=build,
        loss=cross_entropy,
        input_shape=(3, 4, 4),
        value_range=((-mean / std).tolist(), ((1 - mean) / std).tolist()),
        input_mean=[0.0] * 3,
        input_std=[1.0] * 3,
        labels=LABELS,
    )
    finding = run(InvertingGradients(iterations=1, step_size=1e-9), record(update), knowledge)
    start = torch.randn((3, 3, 4, 4), generator=generator(0))
    expected = (mean.reshape(3, 1, 1) + std.reshape(3, 1, 1) * start).clamp(0, 1)
    torch.testing.assert_close(finding.data, expected, atol=1e-5, rtol=0)


# Models that normalise, and apps that send lists.


def with_batch_norm() -> nn.Module:
    return mlp(batch_norm=True)


def used_state() -> dict[str, Tensor]:
    """A network with batch normalisation whose running statistics are not those of a fresh one."""
    state = copy_state(with_batch_norm())
    for name in state:
        if "running" in name:
            state[name] = 0.5 + torch.rand(state[name].shape, generator=generator(name))
    return state


@pytest.mark.usefixtures("start_from_the_truth")
@pytest.mark.parametrize("batch_norm", ["eval", "frozen"])
def test_batch_norm_by_shared_buffers_is_matched_exactly(record: Record, batch_norm: str) -> None:
    update = trained(with_batch_norm, before=used_state(), batch_norm=batch_norm)
    knowledge = dataclasses.replace(KNOWN, model=with_batch_norm)
    assert abs(run(InvertingGradients(iterations=1), record(update), knowledge).trace["l_sim"][0].item()) < 1e-4


def test_buffers_that_are_not_shared_are_one_sentence(record: Record) -> None:
    update = trained(with_batch_norm, before=used_state(), batch_norm="eval")
    before, after = ({k: v for k, v in end.items() if "running" not in k} for end in (update.before, update.after))
    bare = dataclasses.replace(update, before=before, payload=Payload.from_dense(after, "weights"))
    knowledge = dataclasses.replace(KNOWN, model=with_batch_norm)
    with pytest.raises(AttackError, match=r"the model normalises with 2\.running_mean, which clients .* do not share"):
        run(InvertingGradients(), record(bare), knowledge)


def test_running_statistics_that_noise_moved_are_not_said_to_be_of_a_batch(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    update = trained(with_batch_norm, before=used_state(), batch_norm="eval")
    after = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in update.after.items()}
    noisy = dataclasses.replace(update, payload=Payload.from_dense(after, "weights"))
    run(InvertingGradients(iterations=1), record(noisy), dataclasses.replace(KNOWN, model=with_batch_norm))
    assert "as where the client normalises by the batch or adds noise to them" in caplog.text


@pytest.mark.parametrize("moved", ["running_mean", "running_var", "weight"])
def test_running_statistics_that_moved_tell_of_training(moved: str) -> None:
    model, before = with_batch_norm(), used_state()
    after = {name: tensor + (0.1 if moved in name else 0.0) for name, tensor in before.items()}
    update = dataclasses.replace(
        trained(with_batch_norm, before=before, batch_norm="eval"),
        before=before,
        payload=Payload.from_dense(after, "weights"),
    )
    assert used_batch_statistics(update, model) == ("running" in moved)
    before, after = ({k: v for k, v in end.items() if "running" not in k} for end in (update.before, update.after))
    bare = dataclasses.replace(update, before=before, payload=Payload.from_dense(after, "weights"))
    assert used_batch_statistics(bare, model)
    plain = trained(mlp, before=copy_state(mlp()))
    assert not used_batch_statistics(plain, mlp())


def test_a_head_that_stays_with_the_client_does_not_hide_how_it_normalised() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    body = {name: t for name, t in model.state_dict().items() if t.is_floating_point() and not name.startswith("2.")}
    moved = {name: 2 * tensor for name, tensor in body.items()}
    assert used_batch_statistics(build_update(body, moved), model)
    assert not used_batch_statistics(build_update(body, body), model)


def as_list(state: State, model: nn.Module, keep: Callable[[str, Tensor], bool]) -> dict[str, Tensor]:
    """What `[v.numpy() for v in model.state_dict().values()]` in a Flower app becomes on the wire."""
    kept = [name for name, value in model.state_dict().items() if keep(name, value)]
    return {str(i): state[name] if name in state else torch.tensor(7) for i, name in enumerate(kept)}


@pytest.mark.parametrize(
    ("build", "keep"),
    [
        (mlp, lambda name, value: True),
        (with_batch_norm, lambda name, value: value.is_floating_point()),
        (with_batch_norm, lambda name, value: True),
    ],
    ids=["plain", "normalised, real-valued", "normalised, with its counter"],
)
def test_lists_of_arrays_are_matched_by_order(
    record: Record, build: Callable[[], nn.Module], keep: Callable[[str, Tensor], bool]
) -> None:
    before = used_state() if build is with_batch_norm else copy_state(build())
    update = trained(build, before=before, batch_norm="eval")
    listed = dataclasses.replace(
        update,
        before=as_list(update.before, build(), keep),
        payload=Payload.from_dense(as_list(update.after, build(), keep), "weights"),
    )
    knowledge = dataclasses.replace(KNOWN, model=build)
    named, by_order = (run(InvertingGradients(iterations=3), record(u), knowledge) for u in (update, listed))
    assert torch.equal(named.data, by_order.data)


def test_constants_that_a_model_does_not_save_need_not_be_shared(record: Record) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.register_buffer("shift", torch.tensor(0.5), persistent=False)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs + self.shift)

    run(InvertingGradients(iterations=2), record(trained(Shifted)), dataclasses.replace(KNOWN, model=Shifted))


# Updates that cannot be attacked, one sentence each.

UPDATE = trained()


def poisoned(state: State, value: float) -> State:
    name, first = next(iter(state.items()))
    return {**state, name: first.clone().index_fill_(0, torch.tensor([0]), value)}


@pytest.mark.parametrize(
    ("update", "knowledge", "kind", "sentence"),
    [
        (
            dataclasses.replace(UPDATE, payload=Payload.from_dense(poisoned(UPDATE.after, math.nan), "weights")),
            KNOWN,
            AttackError,
            r"^round 1, client 5: 1\.weight holds NaN or infinite values; this update cannot be attacked",
        ),
        (
            dataclasses.replace(UPDATE, before=poisoned(UPDATE.before, math.inf)),
            KNOWN,
            AttackError,
            "holds NaN or infinite values",
        ),
        (
            dataclasses.replace(UPDATE, payload=Payload.from_dense(UPDATE.before, "weights")),
            KNOWN,
            AttackError,
            "^round 1, client 5: w_T equals w_0, there is nothing to match$",
        ),
        (
            UPDATE,
            dataclasses.replace(KNOWN, model=lambda: mlp(hidden=(13,))),
            TranscriptError,
            r"the recorded weights w_0 have 1\.weight of shape \(12, 64\), the model \(13, 64\); attack with the model "
            r"of that federation, or say with \[app\] names which arrays are the model's$",
        ),
        (
            UPDATE,
            dataclasses.replace(KNOWN, model=lambda: SmeCnn(channels=(2, 2)).build(Task(SHAPE, 10))),
            TranscriptError,
            r"the recorded weights w_0 have no 0\.weight, the model has one of shape \(2, 1, 3, 3\)",
        ),
        (
            UPDATE,
            dataclasses.replace(KNOWN, labels=torch.tensor([1, 2])),
            AttackError,
            "2 labels are granted, but the client reported N = 3",
        ),
        (dataclasses.replace(UPDATE, num_examples=0), KNOWN, AttackError, "^round 1, client 5: N is 0"),
        (
            dataclasses.replace(UPDATE, num_examples=0),
            dataclasses.replace(KNOWN, labels=None),
            AttackError,
            "N is 0",
        ),
        (
            UPDATE,
            dataclasses.replace(KNOWN, loss=lambda logits, labels: cross_entropy(logits, labels) * math.nan),
            AttackError,
            "^round 1, client 5: the objective is NaN before the first step, whatever the attack's step_size: at these "
            "weights, most likely too large, the model makes NaN or infinite values; choose another round or victim$",
        ),
    ],
    ids=["nan", "inf", "zero", "other widths", "other network", "wrong N", "no N", "no N or labels", "nan loss"],
)  # fmt: skip
@pytest.mark.parametrize("attack", [InvertingGradients(), SurrogateModelExtension()], ids=["ig", "sme"])
def test_an_update_that_cannot_be_attacked_is_one_sentence(
    record: Record,
    attack: GradientInversion,
    update: Update,
    knowledge: Knowledge,
    kind: type[FedsimError],
    sentence: str,
) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        run(attack, record(update), knowledge)
    assert "\n" not in str(caught.value)


def test_several_rounds_or_another_victim_are_one_sentence(record: Record, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "two")
    for number in (1, 2):
        recorder.write(number, [dataclasses.replace(UPDATE, round=number)])
    with pytest.raises(AttackError, match=r"reads one update, the transcript shows rounds \[1, 2\]"):
        run(InvertingGradients(), Transcript(tmp_path / "two"))
    with pytest.raises(TranscriptError, match=r"round 1: client 6 is not recorded; recorded: \[5\]"):
        InvertingGradients().run(Target(transcript=record(UPDATE), victim=6, knowledge=KNOWN, rng=generator(0)))


def test_labels_that_nothing_gives_away_must_be_granted(record: Record) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))

    knowledge = dataclasses.replace(KNOWN, model=build, labels=None)
    with pytest.raises(KnowledgeError, match="the model's last linear layer has no bias; grant them with"):
        run(InvertingGradients(), record(trained(build)), knowledge)
    run(InvertingGradients(iterations=2), record(trained(build)), dataclasses.replace(knowledge, labels=LABELS))


@pytest.mark.parametrize(
    "settings",
    [
        {"iterations": 0},
        {"step_size": 0.0},
        {"step_size": math.inf},
        {"step_size": math.nan},
        {"tv_weight": -0.1},
        {"tv_weight": math.nan},
        {"alpha": 1.01},
        {"alpha": math.nan},
        {"alpha_step_size": 0.0},
        {"alpha_step_size": math.inf},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(settings))}: expected .*, got "):
        SurrogateModelExtension(**settings)
