"""DP-SGD: the gradient is Opacus' own, the noise has its size, and what would void the guarantee is refused."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.defenses.dp_sgd import DpSgd
from clients.defenses.instahide import InstaHide
from clients.defenses.mixing import draw_partners
from clients.defenses.mixup import Mixup
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.federation.config import Config
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.experiment import Experiment
from fedsim.federation.run_folder import RunFolder
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.defense_checks import check_order
from fedsim.interfaces.local_context import ClientRound, LocalContext
from fedsim.plugins import registry
from fedsim.recording.transcript import Transcript
from fedsim.training.example_independence import check_example_independence
from fedsim.training.gradients import example_gradients
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.lenet import LeNet
from fedsim.training.models.mlp import Mlp
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_tiny_config, run_serial

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")
TASK = Task((1, 16, 16), 10)
CLIENT = Participation(num_examples=24, batch_size=8, steps=3, rounds=2)


def network(plugin: Any = None) -> nn.Module:
    with seed_globals("network"):
        return (plugin or LeNet()).build(TASK)


def batch(count: int = 12) -> tuple[Tensor, Tensor]:
    return torch.rand((count, 1, 16, 16), generator=generator("x")), torch.arange(count) % 10


def opacus_gradient(model: nn.Module, clip: float, per_layer: bool) -> dict[str, Tensor]:
    """Of DP-SGD without noise, by Opacus' hooks and optimizers."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer

    wrapped = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    inputs, labels = batch()
    cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
    sgd = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    count = len(list(wrapped.parameters()))
    common: Any = {"noise_multiplier": 0.0, "expected_batch_size": len(inputs), "loss_reduction": "mean"}
    if per_layer:
        made = DPPerLayerOptimizer(sgd, max_grad_norm=[clip / math.sqrt(count)] * count, **common)
    else:
        made = DPOptimizer(sgd, max_grad_norm=clip, **common)
    made.pre_step()
    return {name.removeprefix("_module."): p.grad for name, p in wrapped.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
@pytest.mark.parametrize("plugin", [LeNet(), Mlp(hidden=(9, 7))], ids=["lenet", "mlp"])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_gradient_without_noise_is_that_of_opacus(clipping: Any, plugin: Any) -> None:
    model, (inputs, labels) = network(plugin), batch()
    each, _ = example_gradients(model, inputs, labels, cross_entropy)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    clip = norms.median().item()  # some are clipped, some are not
    defense = DpSgd(clip=clip, clipping=clipping, noise_multiplier=1.0)
    ours = {name: total / len(inputs) for name, total in defense.clipped_sum(each).items()}
    theirs = opacus_gradient(model, clip, per_layer=clipping == "per-layer")
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("clipping", ["flat", "per-layer"])
def test_no_example_moves_the_sum_by_more_than_the_clip(clipping: Any) -> None:
    defense = DpSgd(clip=0.3, clipping=clipping, noise_multiplier=1.0)
    each = {
        name: 50 * torch.randn((1, *shape), generator=generator(name)) for name, shape in (("a", (4, 3)), ("b", (5,)))
    }
    total = defense.clipped_sum(each)
    assert math.sqrt(sum(t.square().sum().item() for t in total.values())) == pytest.approx(0.3, rel=1e-5)
    if clipping == "per-layer":
        for tensor in total.values():
            assert tensor.norm().item() == pytest.approx(0.3 / math.sqrt(2), rel=1e-5)


def test_noise_has_the_scale_of_the_clip_and_an_empty_batch_is_noise_alone() -> None:
    defense = DpSgd(clip=0.5, noise_multiplier=3.0)
    none = {"w": torch.zeros(0, 200, 200)}
    got = defense.on_examples(none, 8.0, LocalContext(rng=generator("noise")))["w"]
    assert got.std().item() == pytest.approx(3.0 * 0.5 / 8, rel=0.02)
    assert abs(got.mean().item()) < 0.01
    each = {"w": torch.full((2, 200, 200), 0.25 / 200)}
    moved = defense.on_examples(each, 8.0, LocalContext(rng=generator("noise")))["w"] - got
    torch.testing.assert_close(moved, torch.full((200, 200), 0.5 / 200 / 8), rtol=1e-3, atol=1e-6)


def test_clients_whose_batches_are_empty_send_noise() -> None:
    """The rate is so low that hardly any batch has an example."""
    model, (inputs, labels) = network(Mlp(hidden=(9,))), batch(60)
    settings = LocalTraining(local_steps=3, batch_size=1, learning_rate=0.1)
    defense = DpSgd(clip=1e-3, noise_multiplier=1.0)
    hooks = TrainingHooks([defense], model, settings, 60, ClientRound(key=("empty", 4)))
    assert 0 in [len(index) for index in hooks.batch_order(None)]
    after, loss = local_update(model, copy_state(model), inputs, labels, settings, key=("empty", 4), defenses=[defense])
    assert math.isfinite(loss)
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_noise_of_a_wanted_epsilon_follows_from_what_the_client_does() -> None:
    wanted = DpSgd(epsilon=4.0)
    few, many, sampled = (
        wanted.of_client(Participation(num_examples=n, batch_size=8, steps=3, rounds=rounds)).noise_multiplier
        for n, rounds in ((8, 2), (8, 20), (24, 20))
    )
    assert sampled is not None
    assert few is not None
    assert many is not None
    assert max(few, sampled) < many
    client = Participation(num_examples=8, batch_size=8, steps=3, rounds=2)
    proved = wanted.of_client(client).guarantee(client, 1e-5)
    assert proved is not None
    assert 3.95 < proved.epsilon <= 4.0


# What would void the guarantee.


@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.thorough), 7, 8]
)
def test_one_record_more_changes_one_mixture_and_adds_one(count: int) -> None:
    """All partners of a batch, with and without its last record, coupled by closing the circle where it stood."""
    with_it, without = {}, {}
    for draw in range(4000 if count <= 3 else 400):  # of few, the shares are compared below
        pairs = draw_partners(count + 1, 2, generator("partners", count, draw))[:, 1].tolist()
        if count > 1:
            closed = tuple(pairs[count] if partner == count else partner for partner in pairs[:count])
            assert sum(one != other for one, other in zip(closed, pairs[:count], strict=True)) == 1
            with_it[closed] = with_it.get(closed, 0) + 1
            plain = tuple(draw_partners(count, 2, generator("plain", count, draw))[:, 1].tolist())
            without[plain] = without.get(plain, 0) + 1
    if 1 < count <= 3:  # the closed circle is as likely as the same circle drawn without the record
        assert set(with_it) == set(without)
        for circle, times in with_it.items():
            assert times == pytest.approx(without[circle], rel=0.15)


def test_mixing_is_refused_unless_the_guarantee_that_is_left_is_asked_for() -> None:
    mixup, plain = Mixup(), DpSgd(noise_multiplier=3.0)
    with pytest.raises(ConfigError, match=r"dp-sgd: mixup makes each example of two records.*set with_mixing = true"):
        check_order([mixup, plain])
    with pytest.raises(ConfigError, match=r"dp-sgd: instahide makes each .* no guarantee is known"):
        check_order([DpSgd(noise_multiplier=1.0, with_mixing=True), InstaHide()])
    with pytest.raises(ConfigError, match="with_mixing: no other defense mixes"):
        check_order([DpSgd(noise_multiplier=1.0, with_mixing=True)])
    mixed = DpSgd(noise_multiplier=3.0, with_mixing=True)
    check_order([mixed, mixup])
    check_order([mixup, mixed, UpdateNoise(noise_multiplier=1.0)])
    a_third, left = DpSgd(noise_multiplier=1.0).guarantee(CLIENT, 1e-5), mixed.guarantee(CLIENT, 1e-5)
    assert a_third is not None
    assert left is not None
    assert left.epsilon == pytest.approx(a_third.epsilon, rel=1e-9)
    assert "two are mixed" in left.neighbours
    whole = replace(CLIENT, batch_size=24)  # whose noise is found quickly
    noise = [DpSgd(epsilon=3.0, with_mixing=m).of_client(whole).noise_multiplier for m in (True, False)]
    assert noise[0] == pytest.approx(3 * noise[1])  # type: ignore[operator]


def refused(config: Config, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        Experiment(config).check()
    assert "\n" not in str(caught.value)


def test_batch_normalisation_is_refused_with_its_name_and_the_remedy() -> None:
    defense = [{"name": "dp-sgd", "noise_multiplier": 1.0}]
    model = {"name": "resnet8"}
    data: Any = {"model": model, "defense": defense}
    refused(
        make_tiny_config(**data),
        r"layer '.*' \(BatchNorm2d\) normalises by the batch.*set training.batch_norm to 'eval'",
    )
    Experiment(make_tiny_config(training={"batch_norm": "eval"}, **data)).check()


class Mean(nn.Module):
    """Takes the mean over the batch away."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class Sums(nn.Module):
    """Keeps the mean of what it was given."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.detach().mean()
        return inputs


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 6), *layers, nn.Dropout(0.5), nn.Linear(6, 10))


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (Mean(), r"layer '2' \(Mean\) lets one example change what comes of another; choose a layer"),
        (Sums(), r"layer '2' \(Sums\) keeps statistics of its inputs, which are sent with the weights"),
        (
            nn.Sequential(nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten()),
            r"layer '2.1' \(InstanceNorm1d\) keeps statistics of its inputs",
        ),
    ],
    ids=["mixes", "keeps", "instance statistics"],
)
@pytest.mark.filterwarnings("ignore:.*InstanceNorm")
def test_other_layers_that_mix_or_keep_examples_are_refused(layer: nn.Module, match: str) -> None:
    defense, settings = DpSgd(noise_multiplier=1.0), LocalTraining(local_steps=1)
    with pytest.raises(ConfigError, match=match):
        check_example_independence(net(layer), settings, [defense], *batch(16))
    check_example_independence(net(layer), settings, [UpdateNoise()], *batch(16))  # sees no examples
    check_example_independence(net(nn.LayerNorm(6), nn.ReLU()), settings, [defense], *batch(16))


@dataclass(frozen=True, kw_only=True)
class Centres(Defense):
    """Takes the mean of a batch away from each of its examples."""

    paper = PAPER

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        return inputs - inputs.mean(0), labels


def test_another_defense_that_mixes_without_saying_so_is_refused() -> None:
    model, settings = net(), LocalTraining(local_steps=1)
    with pytest.raises(ConfigError, match="Centres lets one example change what it makes of another; let its on_batch"):
        check_example_independence(model, settings, [Centres(), DpSgd(noise_multiplier=1.0)], *batch(16))
    crop: Any = registry.build("defenses", "augmentation", {}, "test")
    crop = crop.of_client(replace(CLIENT, value_range=((0.0,), (1.0,))))
    check_example_independence(model, settings, [crop, DpSgd(noise_multiplier=1.0)], *batch(16))


# Bad input.


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({}, "set noise_multiplier, or epsilon"),
        ({"epsilon": 0.0}, "epsilon: expected a value above 0, got 0.0"),
        ({"epsilon": -1.0}, "epsilon: expected a value above 0"),
        ({"epsilon": math.inf}, "epsilon: expected a finite value"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta: expected a value above 0, got 0.0"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta: expected a value below 1, got 1.0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier: expected a value above 0, got 0.0"),
        ({"noise_multiplier": math.nan}, "noise_multiplier: expected a finite value"),
        ({"noise_multiplier": 1.0, "clip": math.inf}, "clip: expected a finite value, got inf"),
        ({"noise_multiplier": 1.0, "clipping": "by-layer"}, "clipping"),
        ({"noise_multiplier": 1.0, "accountant": "gdp"}, "accountant"),
    ],
)
def test_settings_out_of_range_are_one_sentence(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        registry.build("defenses", "dp-sgd", settings, "defense.0")


@pytest.mark.parametrize(
    ("settings", "tables", "match"),
    [
        (
            {"epsilon": 5.0, "delta": 0.05},
            {},
            "delta: 0.05 promises nothing to client 0, .* 24 .*below 0.0417",
        ),
        (
            {"epsilon": 0.001, "delta": 1e-9},
            {},
            "epsilon: 0.001 at delta 1e-09 is not reached in 6 steps .*larger epsilon, or for fewer rounds",
        ),
        pytest.param(
            {"epsilon": 2.0, "noise_multiplier": 1.0},
            {},
            r"noise_multiplier: 1 gives a client with 24 examples epsilon = 6\.\d+ in 2 rounds, above the wanted 2; "
            r"set it to at least [23]\.\d+",
            marks=pytest.mark.thorough,
        ),
        (
            {"noise_multiplier": 1.0},
            {
                "strategy": {"name": "fedsgd", "learning_rate": 0.1},
                "training": {"local_epochs": None, "local_steps": 1, "learning_rate": None, "sends": "gradient"},
            },
            "asks for Poisson sampling, but clients that send gradients take one fixed mini-batch",
        ),
        ({"noise_multiplier": 1.0}, {"training": {"batches": "fixed"}}, "training.batches is 'fixed'"),
        (
            {"noise_multiplier": 0.2, "accountant": "prv"},
            {},
            r"accountant: 'prv' cannot compute this \(epsilon is about \d+, too large .* set it to 'rdp'",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_before_work(
    settings: dict[str, Any], tables: dict[str, Any], match: str
) -> None:
    refused(make_tiny_config(defense=[{"name": "dp-sgd", **settings}], **tables), match)


def test_a_noise_multiplier_that_reaches_the_wanted_epsilon_is_used() -> None:
    config = make_tiny_config(defense=[{"name": "dp-sgd", "epsilon": 8.0, "noise_multiplier": 1.0}])
    Experiment(config).check()
    (used,) = Experiment(config).client_defenses(0)
    assert used.noise_multiplier == 1.0  # type: ignore[attr-defined]


# Engines.


def test_the_recording_is_the_same_however_clients_are_played(tmp_path: Path) -> None:
    """To the bit on any number of nodes; where many train at once or each by itself, up to the order of sums."""
    defense = [
        {"name": "dp-sgd", "noise_multiplier": 1.0, "clipping": "per-layer"},
        {"name": "update-noise", "clip": 0.5},
    ]

    def run(name: str, vectorise: bool) -> RunFolder:
        federation = {"vectorise": vectorise, "clients": 9, "straggler_probability": 0.2}
        return run_serial(make_tiny_config(defense=defense, federation=federation), tmp_path / name)

    alone, together = run("alone", vectorise=False), run("together", vectorise=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsim.federation.engines.serial.InProcessGrid", lambda app, nodes=1: InProcessGrid(app, 3))
        nodes = run("three nodes", vectorise=True)
    for path in sorted(together.transcript.iterdir()):
        assert path.read_bytes() == (nodes.transcript / path.name).read_bytes()
        assert path.read_bytes() != (alone.transcript / path.name).read_bytes()
    pairs = zip(Transcript(alone.path).updates(), Transcript(together.path).updates(), strict=True)
    for one, other in pairs:
        assert one.client == other.client
        torch.testing.assert_close(other.after, one.after, rtol=1e-4, atol=1e-5)
    assert alone.ledger.read_bytes() == together.ledger.read_bytes()
