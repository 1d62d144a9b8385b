"""Local training against hand-written loops, and the hooks and mods round it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.defenses.update_noise import UpdateNoise
from clients.mods import as_mod
from fedsim.base.errors import ConfigError, RunError
from fedsim.base.randomness import derive_seed, generator
from fedsim.base.task import squared_error
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.local_context import LocalContext
from fedsim.recording.wire_format import State, match_names, non_finite_names
from fedsim.training.loop import evaluate, local_update
from fedsim.training.model_state import copy_state, load_broadcast, load_state
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update
from tests.support.small_training import PAPER, net, some_data
from tests.support.tensors import are_equal

KEY = (3, "train", 1, 0)


def train(model: nn.Module, *, count: int = 10, key: Any = KEY, defenses: Any = (), **kwargs: Any) -> dict[str, Tensor]:
    inputs, labels = some_data(count)
    training = LocalTraining(**{"local_epochs": 2, "batch_size": 4, "learning_rate": 0.1, **kwargs})
    return local_update(model, copy_state(model), inputs, labels, training, key=key, defenses=defenses)[0]


class Spy(nn.Module):
    """Notes the size and the rows of each batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.sizes: list[int] = []
        self.rows: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.rows += x[:, 0, 0, 0].tolist()
        out: Tensor = self.inner(x)
        return out


# Epochs, batches, steps.


@pytest.mark.parametrize(
    ("kwargs", "count", "sizes"),
    [
        ({"local_epochs": 2, "batch_size": 4}, 10, [4, 4, 2] * 2),
        ({"local_epochs": 1, "batch_size": 5}, 10, [5, 5]),
        ({"local_epochs": 3, "batch_size": 100}, 7, [7, 7, 7]),
        ({"local_epochs": 1, "batch_size": 1}, 3, [1, 1, 1]),
        ({"local_steps": 2, "batch_size": 4}, 10, [4, 4]),
        ({"local_steps": 5, "batch_size": 4}, 10, [4, 4, 2, 4, 4]),
        ({"local_steps": 7, "batch_size": 9}, 3, [3] * 7),
    ],
)
def test_steps_and_batch_sizes_follow_from_epochs_and_batch_size(
    kwargs: dict[str, int], count: int, sizes: list[int]
) -> None:
    spy = Spy(net())
    train(spy, count=count, **({"local_epochs": None} | kwargs))
    assert spy.sizes == sizes
    assert LocalTraining(**kwargs).steps(count) == len(sizes)


def test_each_epoch_shows_every_example_once_in_an_order_of_its_own() -> None:
    spy = Spy(net())
    train(spy, local_epochs=2, batch_size=4)
    first, second = spy.rows[:10], spy.rows[10:]
    assert sorted(first) == sorted(second) == sorted(some_data()[0][:, 0, 0, 0].tolist())
    assert first != second


def test_local_steps_go_on_across_epochs() -> None:
    spy = Spy(net())
    train(spy, local_epochs=None, local_steps=5, batch_size=4)
    assert len(set(spy.rows[:10])) == 10
    assert len(set(spy.rows[10:])) == 8


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"local_epochs": 1, "local_steps": 1},
        {"local_epochs": 0},
        {"local_steps": -1},
        {"local_epochs": 1, "batch_size": 0},
        {"local_epochs": 1, "learning_rate": -0.1},
        {"local_epochs": 1, "learning_rate": math.nan},
        {"local_epochs": 1, "weight_decay": math.inf},
        {"local_epochs": 1, "momentum": 0.9, "optimizer": "adam"},
    ],
)
def test_settings_that_cannot_be_are_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"training"):
        LocalTraining(**kwargs)


# The same numbers as a loop written by hand.

OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "weight decay": ({"weight_decay": 0.5}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5)),
    "adam": ({"optimizer": "adam"}, lambda p: torch.optim.Adam(p, lr=0.1)),
    "adam decay": (
        {"optimizer": "adam", "weight_decay": 0.5},
        lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5),
    ),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.5}, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_a_loop_written_by_hand(name: str) -> None:
    kwargs, make = OPTIMIZERS[name]
    model, theirs = net(), net()
    inputs, labels = some_data()
    optimizer = make(theirs.parameters())
    order = generator(*KEY, "order")
    losses = []
    for _ in range(2):
        permutation = torch.randperm(10, generator=order)
        for start in (0, 4, 8):
            chosen = permutation[start : start + 4]
            optimizer.zero_grad()
            loss = cross_entropy(theirs(inputs[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    training = LocalTraining(local_epochs=2, batch_size=4, learning_rate=0.1, **kwargs)
    after, loss_mean = local_update(model, copy_state(net()), inputs, labels, training, key=KEY)
    assert are_equal(after, copy_state(theirs))
    assert loss_mean == pytest.approx(np.mean(losses), abs=1e-6)


def test_one_step_of_sgd_written_as_arithmetic() -> None:
    """w_T = w_t - lr (softmax(xW + b) - onehot) x, for one linear layer and one example."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    inputs, labels = some_data(1)
    before = copy_state(model)
    after, _ = local_update(model, before, inputs, labels, LocalTraining(local_epochs=1, learning_rate=0.5), key=KEY)
    x = inputs.flatten()
    signal = torch.softmax(before["1.weight"] @ x + before["1.bias"], 0)
    signal[labels[0]] -= 1
    torch.testing.assert_close(after["1.bias"], before["1.bias"] - 0.5 * signal)
    torch.testing.assert_close(after["1.weight"], before["1.weight"] - 0.5 * torch.outer(signal, x))


def test_momentum_begins_anew_each_round() -> None:
    model = net()
    state = copy_state(model)
    inputs, labels = some_data()
    training = LocalTraining(local_epochs=1, batch_size=4, learning_rate=0.1, momentum=0.9)
    first, _ = local_update(model, state, inputs, labels, training, key=KEY)
    second, _ = local_update(model, state, inputs, labels, training, key=KEY)
    assert are_equal(first, second)


def test_the_proximal_term_pulls_towards_the_broadcast_model() -> None:
    model, theirs = net(), net()
    anchor = {name: p.detach().clone() for name, p in theirs.named_parameters()}
    inputs, labels = some_data(4)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    order = generator(*KEY, "order")
    for _ in range(3):
        chosen = torch.randperm(4, generator=order)
        optimizer.zero_grad()
        cross_entropy(theirs(inputs[chosen]), labels[chosen]).backward()
        for name, p in theirs.named_parameters():
            assert p.grad is not None
            p.grad += 2.0 * (p.detach() - anchor[name])
        optimizer.step()
    after = train(model, count=4, local_epochs=3, proximal_mu=2.0)
    for name, tensor in copy_state(theirs).items():
        torch.testing.assert_close(after[name], tensor)
    assert not are_equal(after, train(net(), count=4, local_epochs=3))


def test_a_strong_proximal_term_keeps_the_model_where_it_is() -> None:
    before = copy_state(net())

    def distance(after: State) -> float:
        return sum((after[n] - t).square().sum().item() for n, t in before.items()) ** 0.5

    free = distance(train(net(), local_epochs=20, learning_rate=0.01))
    held = distance(train(net(), local_epochs=20, learning_rate=0.01, proximal_mu=50.0))
    assert held < free / 5


def test_the_reported_loss_leaves_the_proximal_term_out() -> None:
    inputs, labels = some_data()
    training = LocalTraining(local_epochs=1, batch_size=10, learning_rate=1e-9, proximal_mu=5.0)
    _, loss = local_update(net(), copy_state(net()), inputs, labels, training, key=KEY)
    assert loss == pytest.approx(cross_entropy(net()(inputs), labels).item(), abs=1e-6)


# Layers with two modes.


def test_batch_norm_in_training_uses_the_batch_and_moves_its_statistics() -> None:
    model = net(batch_norm=True)
    before = copy_state(model)
    after = train(model, count=4, local_epochs=1, batch_size=4, learning_rate=0.1)
    inputs, _ = some_data(4)
    hidden = nn.functional.linear(inputs.flatten(1), before["1.weight"], before["1.bias"])
    torch.testing.assert_close(after["2.running_mean"], 0.1 * hidden.mean(0))
    torch.testing.assert_close(after["2.running_var"], 0.9 * torch.ones(6) + 0.1 * hidden.var(0))


def test_frozen_batch_norm_leaves_its_statistics_and_trains_its_scale() -> None:
    model = net(batch_norm=True)
    before = copy_state(model)
    after = train(model, batch_norm="eval", local_epochs=1)
    for name in ("2.running_mean", "2.running_var"):
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["2.weight"], before["2.weight"])
    assert not are_equal(after, train(net(batch_norm=True), local_epochs=1))


def test_frozen_batch_norm_trains_on_single_examples() -> None:
    assert not non_finite_names(train(net(batch_norm=True), batch_norm="eval", batch_size=1))


def test_wholly_frozen_batch_norm_is_a_constant_and_the_rest_is_trained() -> None:
    model = net(batch_norm=True)
    before = copy_state(model)
    after = train(model, batch_norm="frozen", local_epochs=1)
    for name in ("2.weight", "2.bias", "2.running_mean", "2.running_var"):
        assert torch.equal(after[name], before[name])
    assert not torch.equal(after["1.weight"], before["1.weight"])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_withheld_statistics_are_in_no_update_and_change_no_weight() -> None:
    shared = train(net(batch_norm=True), local_epochs=2)
    withheld = train(net(batch_norm=True), local_epochs=2, batch_norm_statistics="withheld")
    assert set(shared) - set(withheld) == {"2.running_mean", "2.running_var"}
    assert all(torch.equal(withheld[name], shared[name]) for name in withheld)


def test_evaluation_without_statistics_normalises_by_the_batch() -> None:
    model, (inputs, labels) = net(batch_norm=True), some_data(12)
    state = {name: tensor for name, tensor in copy_state(model).items() if "running" not in name}
    measured = evaluate(model, state, inputs, labels)
    expected = cross_entropy(net(batch_norm=True).train()(inputs), labels).item()
    assert measured["loss"] == pytest.approx(expected, rel=1e-5)
    assert measured["loss"] != pytest.approx(evaluate(model, copy_state(net(batch_norm=True)), inputs, labels)["loss"])


def test_one_example_alone_has_no_statistics() -> None:
    with pytest.raises(RunError, match=r"a batch of one example .* training\.batch_size"):
        train(net(batch_norm=True), count=9, batch_size=4)


def test_statistics_that_are_withheld_cannot_be_normalised_by() -> None:
    with pytest.raises(ConfigError, match="'eval' normalises by running statistics, but they are withheld"):
        LocalTraining(local_epochs=1, batch_norm="eval", batch_norm_statistics="withheld")


def test_a_regression_is_trained_and_evaluated_by_its_squared_error() -> None:
    inputs, truth = torch.randn(64, 3, generator=generator(1)), torch.tensor([1.0, -2.0, 0.5])
    targets, model = inputs @ truth, nn.Linear(3, 1)
    settings = LocalTraining(local_epochs=40, batch_size=8, learning_rate=0.1)
    after, loss = local_update(model, copy_state(model), inputs, targets, settings, key=(1,), loss=squared_error)
    torch.testing.assert_close(after["weight"][0], truth, atol=1e-3, rtol=0)
    measured = evaluate(model, after, inputs, targets, squared_error)
    assert set(measured) == {"loss"}
    assert measured["loss"] < 1e-5 < loss


def test_integer_buffers_do_not_travel() -> None:
    model = net(batch_norm=True)
    assert "2.num_batches_tracked" in model.state_dict()
    assert "2.num_batches_tracked" not in copy_state(model)
    assert "2.num_batches_tracked" not in train(model)
    load_state(model, copy_state(model))


class CenteredLinear(nn.Linear):
    """A layer that keeps the mean of its weights, beside the tensors that are sent."""

    mean = math.nan

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.mean = self.weight.mean().item()


def test_a_network_that_acts_on_loading_does_so_with_each_broadcast() -> None:
    layer, totals = CenteredLinear(2, 1), []
    model = nn.Sequential(layer)
    model.register_load_state_dict_post_hook(lambda module, _: totals.append(module[0].weight.sum().item()))
    for value in (1.0, 3.0):
        load_broadcast(model, {"0.weight": torch.full((1, 2), value), "0.bias": torch.zeros(1)})
        assert layer.mean == value
    assert totals == [2.0, 6.0]
    layer = CenteredLinear(2, 1)  # without a hook
    load_broadcast(layer, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
    assert layer.mean == 1.0


def test_integer_buffers_carry_nothing_from_one_client_to_the_next() -> None:
    """BatchNorm with momentum = None averages over all batches that it ever counted."""
    model = net(batch_norm=True)
    model[2].momentum = None
    fresh, state = copy_state(model), copy_state(model)
    inputs, labels = some_data()
    training = LocalTraining(local_epochs=1, batch_size=5)
    first, _ = local_update(model, fresh, inputs, labels, training, key=KEY)
    second, _ = local_update(model, state, inputs, labels, training, key=KEY)
    assert are_equal(first, second)


def test_dropout_follows_the_key_and_nothing_else() -> None:
    model = net(dropout=0.5)
    first = train(model)
    torch.manual_seed(99)
    random.seed(99)
    assert are_equal(first, train(net(dropout=0.5)))
    for dropout, close in ((0.0, True), (0.5, False)):  # one full batch, so its order does not matter
        one, two = (train(net(dropout=dropout), key=(seed, "train"), count=4, local_epochs=1) for seed in (1, 2))
        assert all(torch.allclose(one[name], two[name]) for name in one) == close


def test_dropout_draws_apart_from_the_batch_order() -> None:
    """With dropout off, a model with dropout layers trains as one without them."""
    off = train(net(dropout=0.5), dropout=False)
    plain = train(net())
    assert [t.tolist() for t in off.values()] == [t.tolist() for t in plain.values()]
    assert not are_equal(off, train(net(dropout=0.5)))


def test_training_leaves_the_global_generators_as_they_were() -> None:
    def where() -> tuple[Any, ...]:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002
        return torch.random.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest

    before = where()
    train(net(dropout=0.5), defenses=[UpdateNoise(noise_multiplier=1.0)])
    assert where() == before
    with pytest.raises(RunError):
        train(net(dropout=0.5), learning_rate=1e30, local_epochs=5)
    assert where() == before


def test_the_models_own_weights_and_mode_do_not_matter() -> None:
    state, inputs, labels = copy_state(net()), *some_data()
    training = LocalTraining(local_epochs=1)
    used = net()
    with torch.no_grad():
        for p in used.parameters():
            p.fill_(float("nan"))
    used.eval()
    first, _ = local_update(used, state, inputs, labels, training, key=KEY)
    second, _ = local_update(net(), state, inputs, labels, training, key=KEY)
    assert are_equal(first, second)


def test_training_changes_neither_the_broadcast_state_nor_the_data() -> None:
    model = net(batch_norm=True)
    before, (inputs, labels) = copy_state(model), some_data()
    kept = {name: tensor.clone() for name, tensor in before.items()}
    kept_inputs, kept_labels = inputs.clone(), labels.clone()
    after, _ = local_update(model, before, inputs, labels, LocalTraining(local_epochs=2), key=KEY)
    assert are_equal(before, kept)
    assert torch.equal(inputs, kept_inputs)
    assert torch.equal(labels, kept_labels)
    load_state(model, before)
    assert not are_equal(after, before)


@pytest.mark.parametrize(("rate", "epochs"), [(1e30, 5), (1e38, 5)])
def test_weights_that_are_no_numbers_end_the_clients_round(rate: float, epochs: int) -> None:
    with pytest.raises(RunError, match=r"local training diverged: .* is NaN or infinite after 15 steps"):
        train(net(), learning_rate=rate, local_epochs=epochs)


def test_a_model_that_was_broadcast_broken_is_not_blamed_on_the_clients_learning_rate_alone() -> None:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e30)  # as noise would
    with pytest.raises(RunError, match=r"diverged before its first step, whose loss is .*, noise of defenses"):
        train(model)


def test_evaluation_is_the_mean_over_all_examples() -> None:
    model = net(batch_norm=True, dropout=0.5)
    inputs, labels = some_data(1203)
    measured = evaluate(model, copy_state(model), inputs, labels)
    loss, accuracy = measured["loss"], measured["accuracy"]
    model.eval()
    logits = model(inputs)
    assert loss == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


# Keys of randomness.


def test_seeds_differ_for_every_part_of_a_key() -> None:
    keys = [(3, "train", 1, 0), (3, "train", 0, 1), (3, "train", 10), (31, "train", 0), (3, "train", "1", 0)]
    assert len({derive_seed(*key) for key in keys}) == len(keys)
    assert all(0 <= derive_seed(*key) < 2**63 for key in keys)


# Defenses inside training.


@dataclass(frozen=True, kw_only=True)
class Idle(Defense):
    """Hands back what it is given."""

    paper = PAPER

    def on_update(self, update: State, context: LocalContext) -> State:
        return update


@dataclass(frozen=True, kw_only=True)
class Meddler(Defense):
    """Drops an example of each batch, and halves gradients."""

    paper = PAPER

    def on_batch(self, inputs: Tensor, labels: Tensor, context: LocalContext) -> tuple[Tensor, Tensor]:
        return inputs[1:], labels[1:]

    def on_gradient(self, gradient: State, context: LocalContext) -> State:
        return {name: tensor / 2 for name, tensor in gradient.items()}


def test_a_defense_without_hooks_in_local_training_changes_nothing_there() -> None:
    assert are_equal(train(net(), defenses=[Idle(), Idle()]), train(net()))


def test_the_batch_and_gradient_hooks_take_effect() -> None:
    spy = Spy(net())
    after = train(spy, count=4, local_epochs=1, batch_size=4, defenses=[Meddler()])
    assert spy.sizes == [3]
    theirs = net()
    inputs, labels = some_data(4)
    chosen = torch.randperm(4, generator=generator(*KEY, "order"))[1:]
    cross_entropy(theirs(inputs[chosen]), labels[chosen]).backward()
    for name, p in theirs.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(after[f"inner.{name}"], p.detach() - 0.1 * p.grad / 2)


# Clipping and noise.

updates = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=12).map(
    lambda values: {"a": torch.tensor(values[:5]), "b": torch.tensor(values[5:]), "c": torch.tensor(values[0])}
)


def norm(update: State) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in update.values()))


@given(update=updates, clip=st.floats(1e-3, 1e3))
def test_clipping_bounds_the_norm_keeps_the_direction_and_is_idempotent(update: State, clip: float) -> None:
    defense = UpdateNoise(clip=clip)
    once = defense.on_update(update, LocalContext(rng=torch.Generator()))
    assert norm(once) <= clip * (1 + 1e-6)
    twice = defense.on_update(once, LocalContext(rng=torch.Generator()))
    for name in update:
        torch.testing.assert_close(once[name], twice[name], rtol=1e-6, atol=0)
    if norm(update) > clip:
        assert norm(once) == pytest.approx(clip, rel=1e-5)
    dot = sum((once[n].double() * update[n].double()).sum().item() for n in update)
    assert dot == pytest.approx(norm(once) * norm(update), rel=1e-4, abs=1e-12)


@given(update=updates)
def test_without_noise_and_with_a_large_clip_nothing_changes(update: State) -> None:
    defended = UpdateNoise(clip=1e9).on_update(update, LocalContext(rng=torch.Generator()))
    assert are_equal(defended, update)


def test_the_noise_has_the_promised_spread() -> None:
    update = {"a": torch.zeros(100, 100), "b": torch.zeros(10_000)}
    noise = UpdateNoise(clip=0.5, noise_multiplier=3.0).on_update(update, LocalContext(rng=generator("noise")))
    for tensor in noise.values():
        assert tensor.std().item() == pytest.approx(1.5, rel=0.03)
        assert tensor.mean().item() == pytest.approx(0.0, abs=0.06)


def test_a_zero_update_stays_zero_and_breaks_nothing() -> None:
    update = {"a": torch.zeros(3)}
    sent = UpdateNoise(clip=0.1).on_update(update, LocalContext(rng=torch.Generator()))
    assert torch.equal(sent["a"], torch.zeros(3))


def test_noise_follows_the_generator_it_is_given() -> None:
    update = {"a": torch.ones(5)}
    defense = UpdateNoise(noise_multiplier=1.0)
    first = defense.on_update(update, LocalContext(rng=generator(1)))
    assert torch.equal(first["a"], defense.on_update(update, LocalContext(rng=generator(1)))["a"])
    assert not torch.equal(first["a"], defense.on_update(update, LocalContext(rng=generator(2)))["a"])


@pytest.mark.parametrize("kwargs", [{"clip": 0.0}, {"clip": math.inf}, {"clip": math.nan}, {"noise_multiplier": -1.0}])
def test_strengths_that_cannot_be_are_refused(kwargs: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"^(clip|noise_multiplier): "):
        UpdateNoise(**kwargs)


# The mod in a plain Flower ClientApp.


def answer(
    mod: Any, before: dict[str, np.ndarray[Any, Any]], after: dict[str, np.ndarray[Any, Any]] | str, kind: str = "train"
) -> Message:
    """What a plain ClientApp with `mod` sends back when its function returns `after` to `before`."""
    app = ClientApp(mods=[mod])

    def function(message: Message, context: Context) -> Message:
        if isinstance(after, str):
            return Message(Error(code=1, reason=after), reply_to=message)
        arrays = ArrayRecord({name: Array(value) for name, value in after.items()})
        content = RecordDict({"weights": arrays, "metrics": MetricRecord({"num-examples": 3})})
        return Message(content, reply_to=message)

    app.train()(function)
    app.evaluate()(function)
    arrays = ArrayRecord({name: Array(value) for name, value in before.items()})
    grid = InProcessGrid(app)
    (reply,) = grid.send_and_receive([Message(RecordDict({"model": arrays}), 2, kind)])
    return reply


BEFORE = {
    "weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "scale": np.array(0.3, dtype=np.float64),
    "count": np.array(7),
}
AFTER = {"weight": BEFORE["weight"] + np.float32(0.37), "scale": np.array(0.9), "count": np.array(8)}


def read_weights(reply: Message) -> dict[str, np.ndarray[Any, Any]]:
    assert not reply.has_error(), reply.error
    return {name: array.numpy() for name, array in reply.content.array_records["weights"].items()}


def test_the_mod_clips_the_update_and_lets_integers_pass() -> None:
    got = read_weights(answer(as_mod(UpdateNoise(clip=0.25)), BEFORE, AFTER))
    moved = {name: got[name].astype(np.float64) - BEFORE[name] for name in ("weight", "scale")}
    assert math.sqrt(sum((m**2).sum() for m in moved.values())) == pytest.approx(0.25, rel=1e-5)
    assert got["count"] == 8
    assert {name: (a.dtype, a.shape) for name, a in got.items()} == {n: (a.dtype, a.shape) for n, a in AFTER.items()}


def test_a_mod_that_changes_nothing_sends_the_very_same_bytes() -> None:
    got = read_weights(answer(as_mod(Idle()), BEFORE, AFTER))
    assert {name: a.tobytes() for name, a in got.items()} == {name: a.tobytes() for name, a in AFTER.items()}


def test_a_mod_without_a_seed_never_repeats_its_noise() -> None:
    defense = UpdateNoise(noise_multiplier=1.0)
    one, two = (read_weights(answer(as_mod(defense), BEFORE, AFTER))["weight"] for _ in range(2))
    assert not np.array_equal(one, two)
    same = [read_weights(answer(as_mod(defense, generator(5)), BEFORE, AFTER))["weight"] for _ in range(2)]
    assert np.array_equal(*same)


def test_the_mod_leaves_evaluation_and_errors_alone() -> None:
    mod = as_mod(UpdateNoise(clip=1e-9))
    got = read_weights(answer(mod, BEFORE, AFTER, kind="evaluate"))
    assert np.array_equal(got["weight"], AFTER["weight"])
    assert answer(mod, BEFORE, "broken").error.reason == "broken"


def test_an_array_that_was_never_broadcast_does_not_leave_undefended() -> None:
    reply = answer(as_mod(UpdateNoise(clip=0.1)), BEFORE, {**AFTER, "control": np.ones(3, np.float32)})
    assert reply.has_error()
    assert "control" in str(reply.error.reason)
    assert "UpdateNoise" in str(reply.error.reason)


def test_a_defense_that_yields_no_numbers_is_an_error_not_an_update() -> None:
    broken = {**AFTER, "weight": AFTER["weight"] * np.float32("inf")}
    reply = answer(as_mod(UpdateNoise(clip=0.1)), BEFORE, broken)
    assert reply.has_error()
    assert "NaN" in str(reply.error.reason)


# What crosses the wire.


def test_the_pseudo_gradient_is_what_was_subtracted() -> None:
    before = copy_state(net())
    update = build_update(before, train(net()), num_examples=10)
    for name, tensor in update.pseudo_gradient.items():
        torch.testing.assert_close(before[name] - tensor, update.after[name])


def test_states_without_names_are_matched_by_order() -> None:
    shapes = {name: tensor.shape for name, tensor in copy_state(net()).items()}
    state = copy_state(net())
    numbered = {str(place): tensor for place, tensor in enumerate(state.values())}
    shuffled = {key: numbered[key] for key in sorted(numbered, reverse=True)}
    for given_state in (state, numbered, shuffled, {**state, "extra": torch.zeros(1)}):
        found = match_names(given_state, shapes)
        assert found is not None
        assert are_equal(found, state)
    assert match_names({**state, "1.bias": torch.zeros(99)}, shapes) is None
    assert match_names({key: numbered[key] for key in list(numbered)[:-1]}, shapes) is None
    assert match_names({}, shapes) is None


@settings(max_examples=20)
@given(count=st.integers(1, 30), epochs=st.integers(1, 3), batch=st.integers(1, 12))
def test_the_number_of_steps_is_what_the_server_computes(count: int, epochs: int, batch: int) -> None:
    spy = Spy(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    train(spy, count=count, local_epochs=epochs, batch_size=batch)
    assert len(spy.sizes) == LocalTraining(local_epochs=epochs, batch_size=batch).steps(count)
    assert sum(spy.sizes) == epochs * count
