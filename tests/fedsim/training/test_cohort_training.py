"""Clients that train at once end where they would have ended one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clients.defenses.dp_sgd import DpSgd
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import RunError
from fedsim.base.randomness import seed_globals
from fedsim.base.task import Task, label_loss, squared_error
from fedsim.interfaces.attack import Paper
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State
from fedsim.training.cohort import TOLERANCE, LocalData, can_vectorise, group_size, local_updates
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.lenet import LeNet
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining

PAPER = Paper(title="none", authors="nobody", venue="none", year=2000, url="")


def net(hidden: Sequence[int] = (6,), **kwargs: Any) -> nn.Module:
    with seed_globals("test-model"):
        return Mlp(hidden=tuple(hidden), **kwargs).build(Task((1, 2, 3), 3))


def share(count: int, seed: int = 0, client: int = 0) -> LocalData:
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 1, 2, 3, generator=rng)
    return LocalData(inputs=inputs, labels=torch.randint(0, 3, (count,), generator=rng), key=(seed, "train", 1, client))


def sgd(**kwargs: Any) -> LocalTraining:
    length = {} if "local_steps" in kwargs else {"local_epochs": 2}
    return LocalTraining(**{**length, "batch_size": 4, "learning_rate": 0.1, **kwargs})


def one_by_one(model: nn.Module, before: State, who: LocalData, how: LocalTraining) -> tuple[dict[str, Tensor], float]:
    return local_update(model, before, who.inputs, who.labels, how, key=who.key)


def distance(left: State, right: State, before: State) -> float:
    """L2 distance relative to the update `right - before`."""
    off = math.sqrt(sum((left[n].double() - right[n].double()).square().sum().item() for n in right))
    size = math.sqrt(sum((right[n].double() - before[n].double()).square().sum().item() for n in right))
    return off / size


def assert_same_as_the_loop(model: nn.Module, shares: Sequence[LocalData], how: LocalTraining) -> None:
    before = copy_state(model)
    for who, done in zip(shares, local_updates(model, before, shares, how), strict=True):
        assert done is not None
        after, loss = one_by_one(model, before, who, how)
        assert list(done[0]) == list(after)
        assert distance(done[0], after, before) < TOLERANCE
        assert done[1] == pytest.approx(loss, rel=1e-4, abs=1e-6)


# Beside the loop.


@pytest.mark.parametrize("loss", [label_loss, squared_error])
def test_rows_of_targets_train_at_once_as_one_by_one(loss: Any) -> None:
    model, how = net(), sgd()
    before = copy_state(model)
    rng = torch.Generator().manual_seed(1)
    shares = []
    for client, count in enumerate((7, 3, 12)):  # some are padded
        targets = torch.randint(0, 2, (count, 3), generator=rng).float()
        shares.append(replace(share(count, client, client), labels=targets))
    for who, done in zip(shares, local_updates(model, before, shares, how, loss=loss), strict=True):
        assert done is not None
        after, mean_loss = local_update(model, before, who.inputs, who.labels, how, key=who.key, loss=loss)
        assert distance(done[0], after, before) < TOLERANCE
        assert done[1] == pytest.approx(mean_loss, rel=1e-4)


@settings(max_examples=20)
@given(
    counts=st.lists(st.integers(1, 23), min_size=1, max_size=7),
    batch_size=st.integers(1, 12),
    length=st.one_of(
        st.fixed_dictionaries({"local_epochs": st.integers(1, 3)}),
        st.fixed_dictionaries({"local_steps": st.integers(1, 12)}),
    ),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    proximal_mu=st.sampled_from([0.0, 0.1, 2.0]),
    hidden=st.lists(st.integers(1, 8), max_size=3),
    seed=st.integers(0, 999),
)
def test_training_at_once_is_training_one_by_one(
    counts: list[int],
    batch_size: int,
    length: dict[str, int],
    momentum: float,
    weight_decay: float,
    proximal_mu: float,
    hidden: list[int],
    seed: int,
) -> None:
    how = LocalTraining(
        **length,
        batch_size=batch_size,
        learning_rate=0.05,
        momentum=momentum,
        weight_decay=weight_decay,
        proximal_mu=proximal_mu,
    )
    shares = [share(count, seed + client, client) for client, count in enumerate(counts)]
    assert_same_as_the_loop(net(hidden), shares, how)


def two_layers(*between: nn.Module) -> nn.Module:
    with seed_globals("two layers"):
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), *between, nn.Linear(5, 3))


@pytest.mark.parametrize(
    "between",
    [
        [nn.ReLU()],
        [nn.ReLU(inplace=True)],
        [nn.Tanh(), nn.Identity()],
        [nn.Sigmoid()],
        [nn.GELU()],
        [nn.LeakyReLU(0.2)],
        [nn.Sequential(nn.Linear(5, 5, bias=False), nn.ReLU())],
    ],
    ids=repr,
)
def test_every_layer_that_fits_trains_as_in_the_loop(between: list[nn.Module]) -> None:
    model, how = two_layers(*between), sgd(momentum=0.9, weight_decay=0.01)
    assert can_vectorise(model, how, [])
    assert_same_as_the_loop(model, [share(count, client, client) for client, count in enumerate((9, 2, 5))], how)


CUDA = torch.device("cuda")


def convolutions(*layers: nn.Module) -> nn.Module:
    """A network of these layers between two of its own, of inputs of one channel."""
    with seed_globals("convolutions"):
        body = nn.Sequential(*layers, nn.Tanh(), nn.Flatten())
        return nn.Sequential(body, nn.Linear(body(torch.zeros(1, 1, 2, 3)).shape[1], 3))


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(1, 4, 2, padding=1), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1, groups=2, bias=False)],
        [nn.Conv2d(1, 3, (1, 2), stride=(1, 2), padding="valid"), nn.Conv2d(3, 6, 3, padding="same", groups=3)],
        [nn.Conv2d(1, 2, 2, padding=2, dilation=2), nn.AvgPool2d(2)],
        [nn.Flatten(2), nn.Conv1d(1, 2, 3), nn.AvgPool1d(2)],
        [nn.Unflatten(1, (1, 1)), nn.Conv3d(1, 2, (1, 2, 2))],
    ],
    ids=["pooled", "strided", "dilated", "one axis", "three axes"],
)
def test_convolutions_train_as_in_the_loop(layers: list[nn.Module]) -> None:
    model, how = convolutions(*layers), sgd(momentum=0.9, weight_decay=0.01, proximal_mu=0.1)
    assert_same_as_the_loop(model, [share(count, client, client) for client, count in enumerate((9, 2, 5))], how)


@pytest.mark.parametrize(
    "model",
    [
        SmeCnn(channels=(64, 128), hidden=200).build(Task((3, 32, 32), 100)),
        LeNet().build(Task((1, 28, 28), 10)),
        Mlp(hidden=(640,)).build(Task((1, 28, 28), 10)),
    ],
    ids=["sme-cnn", "lenet", "large"],
)
def test_convolutions_and_larger_networks_train_at_once_on_an_accelerator_alone(model: nn.Module) -> None:
    assert can_vectorise(model, sgd(), [], CUDA)
    assert not can_vectorise(convolutions(nn.Conv2d(1, 2, 2)), sgd(), [])
    assert group_size(model, CUDA) == 128


def test_what_a_product_cannot_compute_is_left_to_the_loop_on_an_accelerator() -> None:
    circular = convolutions(nn.Conv2d(1, 2, 2, padding=1, padding_mode="circular"))
    for model in (circular, convolutions(nn.ConvTranspose2d(1, 2, 2)), convolutions(nn.BatchNorm2d(1))):
        assert not can_vectorise(model, sgd(), [], CUDA)
    clipping = DpSgd(noise_multiplier=1.0)
    assert can_vectorise(net(), sgd(), [clipping], CUDA)
    assert not can_vectorise(convolutions(nn.Conv2d(1, 2, 3, padding="same")), sgd(), [clipping], CUDA)


def test_fewer_train_at_once_where_their_weights_are_many() -> None:
    def wide(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 1 << 13, bias=False, device="meta"))

    assert group_size(wide(1 << 12), CUDA) == 8
    assert can_vectorise(wide(1 << 14), sgd(), [], CUDA)
    assert not can_vectorise(wide(1 << 15), sgd(), [], CUDA)  # two do not fit


def test_a_client_alone_and_clients_alike_are_no_special_case() -> None:
    assert_same_as_the_loop(net(), [share(1)], sgd(batch_size=1))
    one, two, three = local_updates(net(), copy_state(net()), [share(5)] * 3, sgd())
    assert one is not None
    assert two is not None
    assert three is not None
    assert all(torch.equal(one[0][n], two[0][n]) and torch.equal(one[0][n], three[0][n]) for n in one[0])


def test_it_keeps_the_order_of_names_and_the_shapes() -> None:
    before = copy_state(net((4, 5)))
    ((after, _),) = (done for done in local_updates(net((4, 5)), before, [share(3)], sgd()) if done)
    assert [(n, t.shape, t.dtype) for n, t in after.items()] == [(n, t.shape, t.dtype) for n, t in before.items()]


def test_the_broadcast_is_not_written_to() -> None:
    model = net()
    before = copy_state(model)
    copy = {name: tensor.clone() for name, tensor in before.items()}
    shares = [share(count, client, client) for client, count in enumerate((9, 2, 5))]
    data = [(who.inputs.clone(), who.labels.clone()) for who in shares]
    local_updates(model, before, shares, sgd(momentum=0.9, weight_decay=0.1, proximal_mu=1.0))
    assert all(torch.equal(before[name], tensor) for name, tensor in copy.items())
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in copy.items())
    for who, (inputs, labels) in zip(shares, data, strict=True):
        assert torch.equal(who.inputs, inputs)
        assert torch.equal(who.labels, labels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_broadcast_of_another_width_is_trained_from_as_in_the_loop(dtype: torch.dtype) -> None:
    """FedAdam and its like broadcast float64 from the second round on; the network stays float32."""
    model, how = net(), sgd(momentum=0.9, weight_decay=0.1, proximal_mu=1.0)
    before = {name: tensor.to(dtype) for name, tensor in copy_state(model).items()}
    shares = [share(count, client, client) for client, count in enumerate((9, 2, 5))]
    for who, done in zip(shares, local_updates(model, before, shares, how), strict=True):
        assert done is not None
        after, _ = one_by_one(model, before, who, how)
        assert {name: tensor.dtype for name, tensor in done[0].items()} == {n: t.dtype for n, t in after.items()}
        assert distance(done[0], after, before) < TOLERANCE


def test_it_draws_nothing_from_the_global_generators() -> None:
    before = torch.default_generator.get_state()
    local_updates(net(), copy_state(net()), [share(5), share(3, 1)], sgd())
    assert torch.equal(torch.default_generator.get_state(), before)


# Nobody's result depends on who trains beside it.


@settings(max_examples=15)
@given(data=st.data(), counts=st.lists(st.integers(1, 15), min_size=2, max_size=6))
def test_a_client_ends_at_the_same_weights_in_any_place_and_company(data: st.DataObject, counts: list[int]) -> None:
    model, how = net(), sgd(momentum=0.5, proximal_mu=0.1)
    before = copy_state(model)
    shares = [share(count, client, client) for client, count in enumerate(counts)]
    order = data.draw(st.permutations(range(len(shares))))
    some = order[: data.draw(st.integers(1, len(order)))]
    all_of_them = local_updates(model, before, shares, how)
    for place, done in zip(some, local_updates(model, before, [shares[i] for i in some], how), strict=True):
        expected = all_of_them[place]
        assert done is not None
        assert expected is not None
        assert distance(done[0], expected[0], before) < TOLERANCE
        assert done[1] == pytest.approx(expected[1], rel=1e-4)


def test_another_clients_data_and_key_change_nobody_elses_weights_by_a_bit() -> None:
    model, how = net(), sgd()
    before = copy_state(model)
    one = local_updates(model, before, [share(5), share(9, 1), share(2, 2)], how)
    other = local_updates(model, before, [share(5), share(9, 77), share(2, 2)], how)
    for place in (0, 2):
        left, right = one[place], other[place]
        assert left is not None
        assert right is not None
        assert all(torch.equal(left[0][name], right[0][name]) for name in before)
        assert left[1] == right[1]
    assert one[1] is not None
    assert other[1] is not None
    assert distance(one[1][0], other[1][0], before) > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_who_diverges_is_none_and_the_others_are_as_ever(place: int, value: float) -> None:
    model, how = net(), sgd(momentum=0.9)
    before = copy_state(model)
    shares = [share(count, client, client) for client, count in enumerate((9, 2, 5))]
    shares[place] = LocalData(
        inputs=torch.full_like(shares[place].inputs, value), labels=shares[place].labels, key=shares[place].key
    )
    with pytest.raises(RunError, match="diverged"):
        one_by_one(model, before, shares[place], how)
    for i, done in enumerate(local_updates(model, before, shares, how)):
        if i == place:
            assert done is None
        else:
            assert done is not None
            after, loss = one_by_one(model, before, shares[i], how)
            assert distance(done[0], after, before) < TOLERANCE
            assert done[1] == pytest.approx(loss, rel=1e-4)


def test_who_ends_early_does_not_go_on_with_its_momentum() -> None:
    """The other takes 20 times as many steps; weight decay and momentum would carry it on."""
    how = sgd(local_epochs=1, batch_size=1, momentum=0.9, weight_decay=0.1, proximal_mu=0.1, learning_rate=0.02)
    assert_same_as_the_loop(net(), [share(1), share(20, 1, 1)], how)


@pytest.mark.parametrize("label", [99, 3, -1])
def test_a_broken_label_is_not_swallowed(label: int) -> None:
    bad = share(4)
    bad.labels[2] = label
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        local_updates(net(), copy_state(net()), [share(4, 1), bad], sgd())


# Who may train at once.


@dataclass(frozen=True, kw_only=True)
class OnBatch(Defense):
    paper = PAPER

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        return -inputs, labels


@dataclass(frozen=True, kw_only=True)
class OnGradient(Defense):
    paper = PAPER

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        return {}


@dataclass(frozen=True, kw_only=True)
class Inherits(OnGradient):
    pass


class MyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x.flatten(1))


@pytest.mark.parametrize(
    "model",
    [
        net(dropout=0.5),
        net(batch_norm=True),
        SmeCnn(channels=(2, 2), hidden=4).build(Task((1, 8, 8), 3)),
        two_layers(nn.LayerNorm(5)),
        two_layers(nn.Dropout(0.0)),
        two_layers(nn.GroupNorm(1, 5)),
        two_layers(MyLinear(5, 5)),
        Root(),
        Mlp(hidden=(640,)).build(Task((1, 28, 28), 10)),
    ],
    ids=["dropout", "batch norm", "conv", "layer norm", "no dropout", "group norm", "subclass", "own class", "large"],
)
def test_other_networks_are_left_to_the_loop(model: nn.Module) -> None:
    assert not can_vectorise(model, sgd(), [])


@pytest.mark.parametrize("hidden", [(), (3,), (200,), (64, 64, 64)])
def test_small_fully_connected_networks_train_at_once(hidden: tuple[int, ...]) -> None:
    assert can_vectorise(Mlp(hidden=hidden).build(Task((1, 28, 28), 10)), sgd(), [])


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_other_optimizers_are_left_to_the_loop(optimizer: Any) -> None:
    assert not can_vectorise(net(), sgd(optimizer=optimizer), [])


@pytest.mark.parametrize(
    "how",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"proximal_mu": 1.0},
        {"local_steps": 3},
        {"batch_size": 1},
        {"batch_norm": "eval"},
        {"dropout": False},
    ],
)
def test_every_setting_of_sgd_fits(how: dict[str, Any]) -> None:
    assert can_vectorise(net(), sgd(**how), [])


def test_defenses_of_the_update_fit_and_those_inside_training_do_not() -> None:
    noise = UpdateNoise(noise_multiplier=0.1)
    assert can_vectorise(net(), sgd(), [noise])
    for defense in (OnBatch(), OnGradient(), Inherits()):
        assert not can_vectorise(net(), sgd(), [defense])
        assert not can_vectorise(net(), sgd(), [noise, defense])


def frozen() -> nn.Module:
    model = two_layers(nn.ReLU())
    next(model.parameters()).requires_grad_(False)
    return model


def with_buffer() -> nn.Module:
    model = two_layers(nn.ReLU())
    model.register_buffer("scale", torch.ones(2))
    return model


def tied() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(6, 3))


def hooked() -> nn.Module:
    """Does something else once it has been evaluated and not yet trained again."""
    model = two_layers(nn.ReLU())
    model[1].register_forward_hook(lambda module, args, out: 2 * out if module.training else out)  # type: ignore[index]
    return model.eval()


@pytest.mark.parametrize("make", [frozen, with_buffer, tied, hooked])
def test_what_fits_trains_as_in_the_loop(make: Any) -> None:
    """A plug-in's network of known layers may still be more than its layers."""
    model, how = make(), sgd(weight_decay=0.1)
    if can_vectorise(model, how, []):
        assert_same_as_the_loop(model, [share(count, client, client) for client, count in enumerate((9, 2, 5))], how)


@pytest.mark.parametrize("odd", ["more", "missing", "one element"])
def test_a_broadcast_that_is_not_the_models_gets_the_same_answer_at_once_and_in_the_loop(odd: str) -> None:
    """Control variates, say, travel beside the model: whoever does not use them must not pass over them."""
    model = net()
    before = dict(copy_state(model))
    name = next(iter(before))
    if odd == "more":
        before["control/" + name] = torch.zeros(2)
    elif odd == "missing":
        del before[name]
    else:
        before[name] = torch.ones(1)
    said = []
    for train in (
        lambda: local_updates(model, before, [share(8)], sgd()),
        lambda: one_by_one(model, before, share(8), sgd()),
    ):
        with pytest.raises(RunError, match=name) as caught:
            train()
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "\n" not in said[0]
