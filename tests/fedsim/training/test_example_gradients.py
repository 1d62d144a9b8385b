"""One gradient an example: the same training as by the mean gradient, and what a defense makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task, squared_error
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.plugins import registry
from fedsim.recording.wire_format import State
from fedsim.training import gradients
from fedsim.training.gradients import example_gradients
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.modes import set_modes
from tests.support.small_training import PAPER, Private, net, sgd, some_data

KEY = (3, "train", 1, 0)
IMAGES, TEXTS, TABLES = Task((3, 32, 32), 4), Task((12,), 4, 20), Task((5,), 0)
FAMILIES: dict[str, tuple[Task, dict[str, Any], int]] = {
    "linear": (TABLES, {}, 5),
    "mlp": (IMAGES, {"hidden": [8]}, 5),
    "sme-cnn": (IMAGES, {"channels": [4, 4], "hidden": 8}, 5),
    "lenet": (IMAGES, {}, 5),
    "lstm": (TEXTS, {"hidden": 8}, 5),
    "text-cnn": (TEXTS, {"kernels": [3], "channels": 8, "dimension": 6, "pool": 2}, 5),
    "transformer-encoder": (TEXTS, {"dim": 8, "heads": 2}, 5),
    "transformer-decoder": (TEXTS, {"dim": 8, "heads": 2}, 5),
    "vit-april": (IMAGES, {"patch": 8, "dim": 24, "heads": 2, "blocks": 2}, 3),
    "vit": (IMAGES, {"patch": 8, "dim": 24, "heads": 2, "blocks": 2}, 3),
    "resnet8": (IMAGES, {}, 3),
}


class Mean(Defense):
    """The default of `on_examples`, written down."""

    paper = PAPER

    def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
        return {name: each.sum(0) / expected for name, each in gradients.items()}


def material(family: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    task, settings, count = FAMILIES[family]
    with seed_globals("model"):
        model = registry.build("models", family, settings, "model").build(task)
    rng = generator("data")
    if task.vocabulary:
        inputs = torch.randint(0, task.vocabulary, (count, *task.input_shape), generator=rng)
    else:
        inputs = torch.randn(count, *task.input_shape, generator=rng)
    if task.num_classes:
        return model, inputs, torch.randint(0, task.num_classes, (count,), generator=rng), task.loss
    return model, inputs, torch.randn(count, generator=rng), task.loss


def train(model: nn.Module, *defenses: Defense, count: int = 10, **how: Any) -> dict[str, Tensor]:
    inputs, labels = some_data(count)
    return local_update(model, copy_state(model), inputs, labels, sgd(**how), key=KEY, defenses=defenses)[0]


# The gradients.


@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_of_the_examples_gradients_is_the_gradient_of_the_mean_loss(family: str) -> None:
    model, inputs, labels, loss = material(family)
    set_modes(model, sgd(dropout=False), inputs)
    each, losses = example_gradients(model, inputs, labels, loss)
    objective = loss(model(inputs), labels)
    slopes = torch.autograd.grad(objective, list(model.parameters()), materialize_grads=True)
    torch.testing.assert_close(losses.mean(), objective.detach())
    for (name, parameter), slope in zip(model.named_parameters(), slopes, strict=True):
        assert each[name].shape == (len(inputs), *parameter.shape)
        torch.testing.assert_close(each[name].mean(0), slope, rtol=1e-3, atol=1e-5 * (1 + slope.abs().max().item()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_defense_that_takes_the_mean_trains_as_without_one(family: str) -> None:
    model, inputs, labels, loss = material(family)
    before, how = copy_state(model), sgd(local_epochs=1, batch_size=2, learning_rate=0.01, dropout=False)
    plain, same = (
        local_update(model, before, inputs, labels, how, key=KEY, loss=loss, defenses=defenses)
        for defenses in ([], [Mean()])
    )
    assert plain[1] == pytest.approx(same[1], rel=1e-4)
    moved = torch.cat([(plain[0][name] - start).flatten() for name, start in before.items()]).norm()
    off = torch.cat([(plain[0][name] - same[0][name]).flatten() for name in before]).norm()
    assert off <= 1e-3 * moved
    assert moved > 0


@pytest.mark.parametrize("family", ["mlp", "lstm"])
def test_each_examples_gradient_is_that_of_a_batch_of_its_own(family: str) -> None:
    model, inputs, labels, loss = material(family)
    each, losses = example_gradients(model, inputs, labels, loss)
    for place in range(len(inputs)):
        own = loss(model(inputs[place : place + 1]), labels[place : place + 1])
        assert losses[place].item() == pytest.approx(own.item(), rel=1e-5)
        for name, slope in zip(each, torch.autograd.grad(own, list(model.parameters())), strict=True):
            torch.testing.assert_close(each[name][place], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["mlp", "lstm"])
def test_pieces_that_bound_the_memory_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, labels, loss = material(family)
    whole, losses = example_gradients(model, inputs, labels, loss)
    size = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(gradients, "_MAX_GRADIENT_NUMBERS", 2 * size)
    pieces, same = example_gradients(model, inputs, labels, loss)
    torch.testing.assert_close((pieces, same), (whole, losses))
    monkeypatch.setattr(gradients, "_MAX_GRADIENT_NUMBERS", 1)
    torch.testing.assert_close(example_gradients(model, inputs, labels, loss)[0], whole)


@pytest.mark.parametrize("family", ["mlp", "lstm"])
def test_an_empty_batch_has_gradients_of_no_examples(family: str) -> None:
    model, inputs, labels, loss = material(family)
    each, losses = example_gradients(model, inputs[:0], labels[:0], loss)
    assert losses.shape == (0,)
    assert {name: g.shape for name, g in each.items()} == {n: (0, *p.shape) for n, p in model.named_parameters()}


def test_targets_may_be_probabilities_and_frozen_parameters_are_left_out() -> None:
    model, (inputs, _) = net(), some_data(4)
    targets = torch.full((4, 3), 1 / 3)
    first = next(iter(dict(model.named_parameters())))
    model.get_parameter(first).requires_grad_(False)
    each, _ = example_gradients(model, inputs, targets, cross_entropy)
    assert first not in each
    trained = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(cross_entropy(model(inputs), targets), trained)
    for name, slope in zip(each, slopes, strict=True):
        torch.testing.assert_close(each[name].mean(0), slope)


def test_tied_parameters_have_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).tanh())
            return out

    model, inputs, labels = Tied(), torch.randn(3, 4, generator=generator(1)), torch.tensor([0, 1, 2])
    each, _ = example_gradients(model, inputs, labels, cross_entropy)
    slopes = torch.autograd.grad(cross_entropy(model(inputs), labels), list(model.parameters()))
    for name, slope in zip(each, slopes, strict=True):
        torch.testing.assert_close(each[name].mean(0), slope)


def test_dropout_draws_for_each_example_and_follows_the_key() -> None:
    first = train(net(dropout=0.5), Mean())
    torch.manual_seed(99)
    assert all(torch.equal(t, first[n]) for n, t in train(net(dropout=0.5), Mean()).items())
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(200, 1)).train()
    with seed_globals("dropout"):
        each, _ = example_gradients(model, torch.ones(2, 200), torch.ones(2), squared_error)
    assert not torch.equal(each["1.weight"][0] == 0, each["1.weight"][1] == 0)


def test_a_network_that_torch_func_cannot_compute_is_refused_in_a_sentence() -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    class Counts(nn.Linear):
        passes = torch.zeros(1)

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return super().forward(x)

    for model in (Branches(4, 3), Counts(4, 3)):
        with pytest.raises(
            RunError, match=r"^the model: torch\.func cannot compute the gradient of each .*; write"
        ) as error:
            example_gradients(model, torch.ones(2, 4), torch.tensor([0, 1]), cross_entropy)
        assert "\n" not in str(error.value)


def test_another_error_of_the_network_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        example_gradients(nn.Linear(5, 3), torch.ones(2, 4), torch.tensor([0, 1]), cross_entropy)


# The hook.


@pytest.mark.parametrize(
    "how",
    [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam"}, {"proximal_mu": 2.0}, {"local_steps": 3}],
    ids=str,
)
def test_optimizer_and_proximal_term_act_on_what_the_hook_returns(how: dict[str, Any]) -> None:
    plain, same = train(net(), **how), train(net(), Mean(), **how)
    for name in plain:
        torch.testing.assert_close(same[name], plain[name], rtol=1e-4, atol=1e-5)


def test_dp_sgd_by_its_hooks_is_dp_sgd_by_hand() -> None:
    """Clip each example's gradient, sum, divide by the size of the batch, one step."""
    model, (inputs, labels) = net(), some_data(4)
    before = copy_state(model)
    after = train(net(), Private(clip=0.2), count=4, local_steps=1)
    total = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    for x, y in zip(inputs, labels, strict=True):
        slopes = torch.autograd.grad(cross_entropy(model(x[None]), y[None]), list(model.parameters()))
        norm = math.sqrt(sum(slope.square().sum().item() for slope in slopes))
        assert norm > 0.2
        for name, slope in zip(total, slopes, strict=True):
            total[name] += slope * 0.2 / norm
    for name, start in before.items():
        torch.testing.assert_close(after[name], start - 0.1 * total[name] / 4)


def test_a_client_who_sends_a_gradient_sends_what_the_hook_returns() -> None:
    (inputs, labels), how = some_data(4), sgd(local_steps=1, sends="gradient")
    sent, _, loss = local_gradient(
        net(), copy_state(net()), inputs, labels, how, key=KEY, defenses=[Private(clip=0.2, noise=1.0)]
    )
    after = train(net(), Private(clip=0.2, noise=1.0), count=4, local_steps=1)
    for name, start in copy_state(net()).items():
        torch.testing.assert_close(sent[name], (start - after[name]) / 0.1, rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(cross_entropy(net()(inputs), labels).item())


def test_gradients_of_examples_come_before_the_hook_on_the_gradient() -> None:
    class Half(Defense):
        paper = PAPER

        def on_gradient(self, gradient: State, context: LocalContext) -> State:
            return {name: tensor / 2 for name, tensor in gradient.items()}

    once, half = train(net(), Mean(), local_steps=1), train(net(), Half(), Mean(), local_steps=1)
    for name, start in copy_state(net()).items():
        torch.testing.assert_close(2 * (half[name] - start), once[name] - start)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda each: None, "expected a dict of tensors by name back, got nothing"),
        (lambda each: each, "as a floating tensor of shape (6, 4) back, got float32 of shape (4, 6, 4)"),
        (lambda each: {}, "was left out"),
    ],
)
def test_what_is_no_gradient_of_the_model_is_not_learned_from(made: Any, expected: str) -> None:
    class Makes(Defense):
        paper = PAPER

        def on_examples(self, gradients: State, expected: float, context: LocalContext) -> State:
            return made(gradients)  # type: ignore[no-any-return]

    with pytest.raises(RunError) as error:
        train(net(), Makes())
    assert str(error.value).startswith("Makes.on_examples: ")
    assert expected in str(error.value)


# What does not go together.


def test_batch_norm_in_training_mixes_examples_and_is_refused_by_the_layers_name() -> None:
    with pytest.raises(ConfigError, match=r"Mean is to see .* layer '2' \(BatchNorm1d\) .* set training.batch_norm to"):
        train(net(batch_norm=True), Mean(), batch_norm="train")
    assert train(net(batch_norm=True), Mean(), batch_norm="eval")
    assert train(net(batch_norm=True), Mean(), batch_norm="frozen")


def test_batch_norm_without_statistics_mixes_examples_in_every_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ConfigError, match=r"layer '2' \(BatchNorm1d\) .* choose a model without BatchNorm"):
        train(model, Mean(), batch_norm="eval")


def test_two_defenses_cannot_both_make_one_gradient_of_the_examples() -> None:
    with pytest.raises(ConfigError, match=r"Mean and Private both make one gradient .*; leave the other out"):
        train(net(), Mean(), Private())


def test_a_batch_may_not_grow_where_each_example_counts() -> None:
    class Doubles(Defense):
        paper = PAPER

        def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
            return torch.cat([inputs, inputs]), torch.cat([labels, labels])

    with pytest.raises(RunError, match=r"^Doubles.on_batch: expected 4 examples back, got 8, but a defense sees"):
        train(net(), Doubles(), Mean())
    assert train(net(), Doubles())
