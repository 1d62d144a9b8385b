"""Soteria: the last layer's gradient is that of other features, everything else is as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clients.defenses.dp_sgd import DpSgd
from clients.defenses.soteria import Soteria, feature_gradient_norms
from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense, Setting
from fedsim.interfaces.defense_checks import check_setting
from fedsim.interfaces.local_context import ClientRound, LocalContext
from fedsim.recording.wire_format import State
from fedsim.training.cohort import can_vectorise
from fedsim.training.features import find_last_linear
from fedsim.training.hooks import TrainingHooks
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining
from tests.support.experiments import make_tiny_config

KEY = ("soteria",)
PLAN = LocalTraining(local_epochs=2, batch_size=3, learning_rate=0.1)


def data(count: int = 6, shape: tuple[int, ...] = (1, 8, 8)) -> tuple[Tensor, Tensor]:
    return torch.randn((count, *shape), generator=generator("data")), torch.arange(count) % 3


def cnn() -> nn.Module:
    with seed_globals("cnn"):
        return SmeCnn().build(Task((1, 8, 8), 3))


def gradient(model: nn.Module, *defenses: Defense, inputs: Tensor | None = None, labels: Tensor | None = None) -> State:
    given, wanted = data()
    inputs, labels = given if inputs is None else inputs, wanted if labels is None else labels
    found, _, _ = local_gradient(model, copy_state(model), inputs, labels, PLAN, key=KEY, defenses=defenses)
    return found


def by_hand(rows: list[list[float]]) -> nn.Sequential:
    """Features `rows` x, then a layer of two classes with weights of zero, so that each class has 1/2."""
    model = nn.Sequential(nn.Linear(2, len(rows), bias=False), nn.Linear(len(rows), 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(rows))
        model[1].weight.zero_()
        model[1].bias.zero_()
    return model


def test_the_feature_is_left_out_whose_absence_moves_the_data_most() -> None:
    """Features of x = (1, 2): 3, 2 and -4, with slopes of norm 3, 1 and 4: 1, 2 and 1 of distance; the second goes."""
    model, inputs = by_hand([[3.0, 0.0], [0.0, 1.0], [-4.0, 0.0]]), torch.tensor([[1.0, 2.0]])
    found = gradient(model, Soteria(pruned=0.3), inputs=inputs, labels=torch.tensor([0]))
    torch.testing.assert_close(found["1.weight"], torch.tensor([[-1.5, 0.0, 2.0], [1.5, 0.0, -2.0]]))
    torch.testing.assert_close(found["1.bias"], torch.tensor([-0.5, 0.5]))


def test_a_batch_has_one_set_of_features_by_the_mean_over_its_examples() -> None:
    """|r| / slope of the three features: (1, 2, 0) and (5, 2, 0), so (3, 2, 0) in the mean; the first goes."""
    model = by_hand([[3.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    inputs, labels = torch.tensor([[1.0, 2.0], [-5.0, 2.0]]), torch.tensor([0, 0])
    features = inputs.clone().requires_grad_(True)
    assert feature_gradient_norms(model[0](features), features).tolist() == [[3.0, 1.0, 0.0]] * 2
    found = gradient(model, Soteria(pruned=0.01), inputs=inputs, labels=labels)
    assert found["1.weight"].tolist() == [[0.0, -1.0, 0.0], [0.0, 1.0, 0.0]]


def test_slopes_of_all_features_at_once_are_those_of_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = cnn(), data()[0].requires_grad_(True)
    features = model[:-1](inputs)  # type: ignore[index]
    each = [torch.autograd.grad(f.sum(), inputs, retain_graph=True)[0].flatten(1).norm(dim=1) for f in features.mT]
    for at_once in (1, 1 << 12, 1 << 24):
        monkeypatch.setattr("clients.defenses.soteria._MAX_DERIVATIVES", at_once)
        torch.testing.assert_close(feature_gradient_norms(features, inputs), torch.stack(each, 1))


def test_the_forward_pass_and_all_other_gradients_keep_the_true_features() -> None:
    model = cnn()
    plain, defended = gradient(model), gradient(model, Soteria(pruned=0.4))
    name = f"{find_last_linear(model)[0]}.weight"  # type: ignore[index]
    for key, tensor in plain.items():
        torch.testing.assert_close(defended[key] if key != name else tensor, tensor)
    gone = (defended[name] == 0).all(0)
    assert gone.sum() >= round(0.4 * len(gone))
    torch.testing.assert_close(defended[name][:, ~gone], plain[name][:, ~gone])
    assert plain[name][:, gone].any(), "what is left out was there"


@pytest.mark.parametrize("how", ["gradient", "update"])
def test_at_strength_zero_nothing_changes_to_the_bit(how: str) -> None:
    model, (inputs, labels) = cnn(), data()
    if how == "gradient":
        one, other = gradient(model), gradient(model, Soteria(pruned=0.0))
    else:
        one, other = (
            local_update(cnn(), copy_state(model), inputs, labels, PLAN, key=KEY, defenses=own)[0]
            for own in ([], [Soteria(pruned=0.0)])
        )
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_proximal_term_is_added_to_what_the_defense_made() -> None:
    """Its slope is mu (w - w_t), zero at w_t; the weights of a feature that is always left out stay there."""
    model, (inputs, labels) = cnn(), data(3)
    plan = LocalTraining(local_steps=3, batch_size=3, learning_rate=0.1, proximal_mu=1.0)
    name, start = f"{find_last_linear(model)[0]}.weight", copy_state(model)  # type: ignore[index]
    after, _ = local_update(model, start, inputs, labels, plan, key=KEY, defenses=[Soteria(pruned=0.5)])
    plain, _ = local_update(model, start, inputs, labels, plan, key=KEY)
    still = (after[name] == start[name]).all(0)
    assert still.any()
    assert not (plain[name] == start[name]).all(0)[still].all()


def test_clients_are_not_trained_at_once_beside_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert can_vectorise(model, LocalTraining(local_epochs=1), [])
    assert not can_vectorise(model, LocalTraining(local_epochs=1), [Soteria()])


@dataclass(frozen=True, kw_only=True)
class Returns(Defense):
    """Replaces features by what it is made with."""

    make: Callable[[Tensor], Any]
    paper = Paper(title="none", authors="nobody", venue="none", year=2000, url="")

    def on_features(self, features: Tensor, inputs: Tensor, context: LocalContext) -> Tensor:
        return self.make(features)  # type: ignore[no-any-return]


def test_features_that_a_defense_changes_in_place_change_the_weights_gradient_alone() -> None:
    model = cnn()
    plain, defended = gradient(model), gradient(model, Returns(make=lambda features: features.mul_(2)))
    name = f"{find_last_linear(model)[0]}.weight"  # type: ignore[index]
    for key, tensor in plain.items():
        torch.testing.assert_close(defended[key], 2 * tensor if key == name else tensor)


@dataclass(frozen=True, kw_only=True)
class Differentiates(Defense):
    """Halve features after their derivatives, by `backward` as in the authors' code, and write to the inputs."""

    by_backward: bool
    paper = Paper(title="none", authors="nobody", venue="none", year=2000, url="")

    def on_features(self, features: Tensor, inputs: Tensor, context: LocalContext) -> Tensor:
        if self.by_backward:
            features.sum().backward(retain_graph=True)
            slopes = inputs.grad
        else:
            (slopes,) = torch.autograd.grad(features.sum(), inputs, retain_graph=True)
        assert slopes is not None
        mask = (slopes.flatten(1).norm(dim=1, keepdim=True) > 0).float()
        if self.by_backward:
            inputs.data.mul_(3)
            with torch.no_grad():
                inputs.zero_()
        return features * mask / 2


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_a_defense_that_calls_backward_or_writes_to_inputs_changes_no_other_gradient(mu: float) -> None:
    (inputs, labels), model = data(), cnn()
    plan = LocalTraining(local_steps=3, batch_size=3, learning_rate=0.1, proximal_mu=mu)
    start, inputs_before, results = copy_state(model), inputs.clone(), []
    for by_backward in (True, False):
        own = [Differentiates(by_backward=by_backward)]
        results.append(local_update(model, start, inputs, labels, plan, key=KEY, defenses=own)[0])
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())
    assert torch.equal(inputs, inputs_before)
    gradients = [gradient(cnn(), Differentiates(by_backward=by_backward)) for by_backward in (True, False)]
    assert all(torch.equal(tensor, gradients[1][name]) for name, tensor in gradients[0].items())


class Recurrent(nn.Module):
    """Has matrices beside its linear layer, of a layer that is defined before that or after it."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        layers = {"recurrent": nn.RNN(8, 4, batch_first=True), "head": nn.Linear(4, 3)}
        for name in reversed(layers) if after else layers:
            self.add_module(name, layers[name])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.recurrent(inputs[:, 0])[0][:, -1])  # type: ignore[no-any-return]


def test_an_adversary_finds_the_layer_that_training_takes() -> None:
    """The columns that were left out are those that the adversary leaves out of a gradient of ones, in one tensor."""
    model = Recurrent(after=False)
    defended = gradient(model, Soteria(pruned=0.5))
    seen = Soteria(pruned=0.5).adversary_view({name: torch.ones_like(t) for name, t in defended.items()}, defended)
    assert [name for name, tensor in seen.items() if not tensor.all()] == ["head.weight"]
    assert (seen["head.weight"] == 0).all(0).sum() == 2
    assert torch.equal(seen["head.weight"] != 0, defended["head.weight"] != 0)


def test_a_matrix_behind_the_last_linear_layer_is_refused_for_an_adversary_would_take_that_one() -> None:
    with pytest.raises(ConfigError, match=r"soteria replaces .* define its last linear layer after all others"):
        gradient(Recurrent(after=True), Soteria())
    found = find_last_linear(Recurrent(after=False))
    assert found is not None
    assert found[0] == "head"


def test_of_what_is_trained_the_last_linear_layer_is_taken() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    found = find_last_linear(model)
    assert found is not None
    assert found[0] == "0"


class Twice(nn.Module):
    """Uses its last linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.layer(inputs))  # type: ignore[no-any-return]


class Wide(Twice):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs[:, None]).squeeze(1)  # type: ignore[no-any-return]


class Unused(Twice):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.layer.bias


class Cut(Twice):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs.detach())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Twice(), "a linear layer is used after it"),
        (Wide(), r"expected `example feature`, but it is given a tensor of shape \(2, 1, 2\)"),
        (Unused(), "the model does not use this layer"),
        (Cut(), "the features of the model have no gradient in its inputs"),
    ],
)
def test_a_model_whose_features_cannot_be_replaced_is_named(model: nn.Module, words: str) -> None:
    with pytest.raises(RunError, match=words):
        gradient(model, Soteria(), inputs=torch.ones(2, 2), labels=torch.tensor([0, 1]))


def test_integers_have_no_slope() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Flatten(), nn.Linear(2, 2))
    with pytest.raises(RunError, match="the inputs are integers and have no derivative"):
        gradient(model, Soteria(), inputs=torch.tensor([[0], [1]]), labels=torch.tensor([0, 1]))


@pytest.mark.parametrize("made", [lambda r: r[:1], lambda r: r.long(), lambda r: None])
def test_features_of_another_form_are_refused(made: Callable[[Tensor], Any]) -> None:
    with pytest.raises(RunError, match=r"Returns.on_features: expected features of shape \(6, \d+\) back, got"):
        gradient(cnn(), Returns(make=made))


def test_it_is_refused_before_work_where_it_cannot_act() -> None:
    with pytest.raises(ConfigError, match="pruned: expected a value below 1, got 1"):
        Soteria(pruned=1.0)
    with pytest.raises(
        ConfigError, match="soteria replaces the features of a whole batch, and dp-sgd sees the gradient"
    ):
        TrainingHooks([Soteria(), DpSgd(noise_multiplier=1.0)], cnn(), PLAN, 6, ClientRound(key=KEY))
    with pytest.raises(ConfigError, match="the last matrix that is trained is not the weights of one; choose another"):
        TrainingHooks([Soteria()], nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()), PLAN, 6, ClientRound(key=KEY))
    texts = Setting(update={}, task=Task((5,), 2, vocabulary=9), training=PLAN, rounds=1, clients=1, num_examples=[6])
    with pytest.raises(ConfigError, match="defense: soteria: replaces features by how they change with the inputs"):
        check_setting(Soteria(), texts)
    Experiment(make_tiny_config(defense=[{"name": "soteria"}])).check()
