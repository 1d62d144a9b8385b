"""Networks that compute otherwise than a tutorial's: found by what they do, followed, or refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, linear

import fedsim
from clients.defenses.dp_sgd import DpSgd
from fedsim.audit.evaluation.similarity import SIMILARITY_AT_BROADCAST, AttackedUpdate
from fedsim.audit.plausibility import check_fit
from fedsim.base import metrics
from fedsim.base.errors import AttackError, ConfigError, RunError
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.named_states import named_states
from fedsim.inversion.priors import total_variation
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.update_models import FullBatchTraining
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.settings import LocalTraining
from fedsim.training.stochastic_layers import find_stochastic_layers
from tests.support.recordings import PLAIN_SGD, build_update

KNOWN: dict[str, Any] = {
    "num_examples": 1,
    "input_shape": (1, 8, 8),
    "value_range": (0, 1),
    "learning_rate": 0.1,
    "local_epochs": 1,
    "batch_size": 1,
    **PLAIN_SGD,
    "labels": torch.tensor([1]),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 8, 2, batch_first=True, dropout=0.5), nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(inputs.view(-1, 4, 4))[0][:, -1])
        return outputs


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.view(-1, 4, 4)
        outputs: Tensor = self.head(self.layer(tokens, tokens, tokens, need_weights=False)[0].flatten(1))
        return outputs


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(inputs.view(-1, 4, 4)).flatten(1))
        return outputs


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(dropout(inputs, 0.5, self.training))
        return outputs


class SkippedPath(nn.Module):
    """Stochastic depth, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.path, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            outputs: Tensor = self.head(inputs)
        else:
            outputs = self.head(inputs + self.path(inputs))
        return outputs


class AlwaysNoisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs + torch.randn_like(inputs))
        return outputs


def train_one_step(network: nn.Module, key: int, *, drops: bool) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = torch.randn(8, 16)
    settings = LocalTraining(local_epochs=None, local_steps=1, batch_size=8, learning_rate=0.1, dropout=drops)
    after, _ = local_update(network, copy_state(network), inputs, torch.arange(8) % 5, settings, key=(key,))
    return after


@pytest.mark.parametrize("kind", [Recurrent, Attentive, Encoder, Functional, SkippedPath])
def test_without_dropout_no_network_draws(kind: Callable[[], nn.Module]) -> None:
    network = kind()
    start = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    def updates(*, drops: bool) -> list[dict[str, Tensor]]:
        results = []
        for key in range(6):
            network.load_state_dict(start)
            results.append(train_one_step(network, key, drops=drops))
        return results

    first, *others = updates(drops=False)
    for other in others:
        assert all(torch.allclose(first[name], other[name], atol=1e-7) for name in first)
    dropped = updates(drops=True)
    assert any(not torch.allclose(dropped[0][name], other[name]) for other in dropped[1:] for name in first)


def test_a_network_that_draws_whatever_its_mode_is_refused() -> None:
    with pytest.raises(RunError, match=r"training.dropout = false: the model still gives other outputs .* ''"):
        train_one_step(AlwaysNoisy(), 0, drops=False)


def test_looking_for_layers_that_draw_changes_nothing() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    drawn = torch.random.get_rng_state()
    assert find_stochastic_layers(network, torch.ones(2, 4)) == ["2"]
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_functional_dropout_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    network = nn.Sequential(nn.Flatten(), Functional())
    known = KNOWN | {"input_shape": (1, 4, 4)}
    with caplog.at_level(logging.WARNING):
        fedsim.attack(
            network.state_dict(), step(network, torch.rand(1, 1, 4, 4)), model=network, attack="dlg",
            settings={"iterations": 1}, **known,
        )  # fmt: skip
    assert "'1' of the model draws at random while clients train" in caplog.text


def step(network: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return the weights after one step from those of `network`, which keeps its own."""
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.train().zero_grad()
    cross_entropy(network(inputs), torch.tensor([1])).backward()
    after = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    after |= {name: p.detach() - 0.1 * p.grad for name, p in network.named_parameters() if p.grad is not None}
    network.load_state_dict(before)
    return after


def test_instance_norm_with_running_statistics_is_followed() -> None:
    quality = []
    for tracked in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            network = nn.Sequential(
                nn.Conv2d(1, 12, 5, padding=2),
                nn.InstanceNorm2d(12, affine=True, track_running_stats=tracked),
                nn.Sigmoid(),
                nn.Conv2d(12, 12, 5, padding=2, stride=2),
                nn.Sigmoid(),
                nn.Flatten(),
                nn.Linear(192, 10),
            )
            torch.manual_seed(2)
            inputs = torch.rand(1, 1, 8, 8)
        settings = {"iterations": 80, "tv_weight": 0.0}
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        after = step(network, inputs)
        finding = fedsim.attack(before, after, model=network, attack="inverting-gradients", settings=settings, **KNOWN)
        quality.append(metrics.psnr(finding.data, inputs).item())
    assert quality[1] == pytest.approx(quality[0], abs=0.5)
    assert quality[0] > 15


def with_spectral_norm() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(64, 32)), nn.ReLU(), nn.Linear(32, 10))


def test_a_layer_that_computes_otherwise_in_training_is_refused_by_name() -> None:
    start = with_spectral_norm().state_dict()
    after = step(with_spectral_norm(), torch.rand(1, 1, 8, 8))
    with pytest.raises(AttackError, match=r"layer '1' \(Linear\) computes otherwise while a client trains"):
        fedsim.attack(start, after, model=with_spectral_norm(), attack="dlg", settings={"iterations": 1}, **KNOWN)


class Shuffled(nn.Module):
    """Shuffles its inputs, and leaves some weights out, by buffers that are drawn where it is built."""

    def __init__(self, *, sent: bool = True) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.register_buffer("order", torch.randperm(64), persistent=sent)
        self.register_buffer("mask", torch.rand(32, 64) < 0.5, persistent=sent)

    def forward(self, inputs: Tensor) -> Tensor:
        shuffled = inputs.flatten(1)[:, self.order]
        outputs: Tensor = self.head(linear(shuffled, self.first.weight * self.mask, self.first.bias).relu())
        return outputs


@pytest.mark.parametrize("averaged", [False, True])
def test_integers_and_booleans_that_the_server_sent_go_into_the_attacked_model(averaged: bool) -> None:
    """`averaged`: strategies make real numbers of them."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = Shuffled()
        inputs = torch.rand(1, 1, 8, 8)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    after = step(network, inputs)
    if averaged:
        before = {name: tensor.float() for name, tensor in before.items()}
    update = build_update(before, after)
    attacked = Shuffled()
    named_states(update, attacked, "here")
    assert torch.equal(attacked.order, network.order)
    assert torch.equal(attacked.mask, network.mask)
    range_of_inputs = torch.zeros(1), torch.ones(1)
    message = AttackedUpdate(
        model=Shuffled(), loss=cross_entropy, update=update, value_range=range_of_inputs, settings=None
    )
    assert message.similarities(inputs, torch.tensor([1]))[SIMILARITY_AT_BROADCAST] == pytest.approx(0, abs=1e-5)


def test_buffers_that_were_not_sent_and_differ_from_build_to_build_are_refused(tmp_path: Path) -> None:
    network = Shuffled()
    sent = {name: tensor for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
    after = {name: tensor - 0.1 for name, tensor in sent.items()}
    Recorder(tmp_path).write(1, [build_update(sent, after)])
    with pytest.raises(ConfigError, match=r"model: its buffer 'order' has other values each time it is built"):
        check_fit(Transcript(tmp_path), Knowledge(model=Shuffled))


class Scaled(nn.Module):
    """Has a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(16, 5), nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.scale * inputs)
        return outputs


def test_dp_sgd_takes_parameters_without_axes() -> None:
    network = Scaled()
    settings = LocalTraining(local_epochs=1, batch_size=4, learning_rate=0.1)
    after, _ = local_update(
        network, copy_state(network), torch.randn(8, 16), torch.arange(8) % 5, settings, key=(1,),
        defenses=[DpSgd(clip=1.0, noise_multiplier=1.0)],
    )  # fmt: skip
    assert after["scale"].shape == ()
    assert after["scale"].isfinite()


def test_the_variation_of_images_that_are_one_pixel_wide_is_a_number() -> None:
    column = torch.tensor([0.0, 1.0, 0.0]).reshape(1, 1, 3, 1)
    assert total_variation(column).item() == total_variation(column.mT).item() == 0.5


def test_weight_decay_is_simulated_of_the_parameters_that_optimizers_decay() -> None:
    class PartlyUsed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(16, 5))
            self.unused = nn.Linear(40, 40)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self[1](self[0](inputs))
            return outputs

    network = PartlyUsed()
    inputs, labels, before = torch.rand(4, 1, 4, 4), torch.arange(4), copy_state(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    known = Knowledge(
        model=lambda: network, loss=cross_entropy, input_shape=(1, 4, 4), value_range=((0.0,), (1.0,)),
        learning_rate=0.1, local_steps=2, batch_size=4, optimizer="sgd", weight_decay=0.5,
    )  # fmt: skip
    problem = build_problem(build_update(before, copy_state(network), num_examples=4), known)
    dummy = (inputs - problem.scaling.centre) / problem.scaling.scale
    simulated = FullBatchTraining().gradient(problem, {}, dummy, labels)
    assert len(simulated) == 2
    for step_size, sent in zip(simulated, problem.mean_gradient, strict=True):
        assert torch.allclose(step_size, sent, rtol=1e-4, atol=1e-5)


def test_a_network_that_writes_into_its_parameters_is_no_function_of_them() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(4, 3, max_norm=0.5), nn.Linear(48, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.head(self.table((3 * inputs.flatten(1)).long()).flatten(1))
            return outputs

    network = Normed()
    before = copy_state(network)
    after = {name: tensor + 0.1 for name, tensor in before.items()}
    known = Knowledge(
        model=Normed, loss=cross_entropy, input_shape=(1, 4, 4), value_range=((0.0,), (1.0,)), learning_rate=0.1
    )
    with pytest.raises(AttackError, match=r"writes into its parameter 'table\.weight'"):
        build_problem(build_update(before, after), known)
