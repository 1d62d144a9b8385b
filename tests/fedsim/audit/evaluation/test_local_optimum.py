"""Optimal local models: where the minimum is known, and where it is not."""

from __future__ import annotations

import copy
import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation.local_optimum import local_optimum, match_state
from fedsim.base.errors import DataError, RunError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task, squared_error
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.table_validation import validate_tables
from fedsim.training.local_optimum import train_to_convergence
from fedsim.training.loop import evaluate
from fedsim.training.model_state import copy_state
from fedsim.training.models.linear import Linear
from fedsim.training.models.mlp import Mlp
from tests.support.tensors import draw_normal

EXAMPLES, FEATURES = 200, 5
REGRESSION, CLASSES = Task((FEATURES,), 0), Task((FEATURES,), 3)


INPUTS = draw_normal(EXAMPLES, FEATURES)
TARGETS = INPUTS @ torch.arange(FEATURES).float() + 0.3 + 0.5 * draw_normal(EXAMPLES, seed=1)
NOISY = (INPUTS[:, :3] + draw_normal(EXAMPLES, 3, seed=2)).argmax(1)  # no plane separates them
PLAIN = (INPUTS[:, 0] * INPUTS[:, 1] > 0).long() + (INPUTS[:, 2] > 1).long()  # a network separates them


def built(task: Task, *hidden: int, batch_norm: bool = False, bias: bool = True) -> nn.Module:
    with seed_globals(0, "model"):
        return Mlp(hidden=hidden, batch_norm=batch_norm).build(task) if hidden else Linear(bias=bias).build(task)


def accuracy(model: nn.Module, state: dict[str, Tensor]) -> float:
    return evaluate(model, state, INPUTS, PLAIN)["accuracy"]


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_regression_is_solved_by_least_squares(bias: bool) -> None:
    model = built(REGRESSION, bias=bias).double()
    found = local_optimum(model, copy_state(model), INPUTS, TARGETS, squared_error)
    design = np.concatenate([INPUTS.numpy(), np.ones((EXAMPLES, 1))], 1) if bias else INPUTS.numpy()
    expected = np.linalg.lstsq(design.astype(np.float64), TARGETS.double().numpy(), rcond=None)[0]
    solution = torch.cat([tensor.flatten() for tensor in found.values()])
    assert solution.dtype == torch.float64
    np.testing.assert_allclose(solution.numpy(), expected, rtol=1e-10)


def test_of_many_least_squares_solutions_it_is_the_shortest() -> None:
    """Fewer records than features: numpy's, too, is that of least norm."""
    inputs, targets = draw_normal(6, 20).double(), draw_normal(6).double()
    model = built(Task((20,), 0), bias=False).double()
    found = local_optimum(model, copy_state(model), inputs, targets, squared_error)["1.weight"].flatten()
    expected = np.linalg.pinv(inputs.numpy()) @ targets.numpy()
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_a_solution_has_the_names_and_types_of_the_start() -> None:
    model = built(REGRESSION)
    start = dict(reversed(copy_state(model).items()))
    found = local_optimum(model, start, INPUTS, TARGETS, squared_error)
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(start, torch.float32)
    double = {name: tensor.double() for name, tensor in start.items()}
    assert {t.dtype for t in local_optimum(model, double, INPUTS, TARGETS, squared_error).values()} == {torch.float64}


def test_logistic_regression_reaches_its_minimum() -> None:
    """The gradient is gone, and the probabilities are those of scikit-learn without a penalty."""
    model = built(CLASSES).double()
    found = local_optimum(model, copy_state(model), INPUTS.double(), NOISY)
    model.load_state_dict(found)
    gradient = torch.autograd.grad(cross_entropy(model(INPUTS.double()), NOISY), list(model.parameters()))
    assert torch.cat([g.flatten() for g in gradient]).norm() < 1e-6
    reference = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(INPUTS.double().numpy(), NOISY.numpy())
    theirs = reference.predict_proba(INPUTS.double().numpy())
    np.testing.assert_allclose(model(INPUTS.double()).softmax(1).detach().numpy(), theirs, atol=1e-4)


def test_the_minimum_does_not_depend_on_the_start_where_there_is_one() -> None:
    model = built(CLASSES)
    far = {name: 3 * tensor + 1 for name, tensor in copy_state(model).items()}
    one, other = (local_optimum(model, start, INPUTS, NOISY) for start in (copy_state(model), far))
    for name in ("1.weight", "1.bias"):  # a constant added to all classes changes nothing
        torch.testing.assert_close(one[name] - one[name].mean(0), other[name] - other[name].mean(0), atol=1e-4, rtol=0)


def test_a_network_learns_its_data_by_heart_and_comes_to_rest() -> None:
    model = built(CLASSES, 64, 64)
    start = copy_state(model)
    found = local_optimum(model, start, INPUTS, PLAIN)
    before, after = evaluate(model, start, INPUTS, PLAIN), evaluate(model, found, INPUTS, PLAIN)
    assert before["accuracy"] < 0.6
    assert after["accuracy"] > 0.98
    assert after["loss"] < 0.1 * before["loss"]


def shrink_batches(patch: pytest.MonkeyPatch, batch_size: int) -> None:
    patch.setattr("fedsim.training.local_optimum._MAX_BATCH_SIZE", batch_size)


def shorten_training(patch: pytest.MonkeyPatch, iterations: int) -> None:
    shorter = functools.partial(train_to_convergence, iterations=iterations)
    patch.setattr("fedsim.audit.evaluation.local_optimum.train_to_convergence", shorter)


def test_a_network_ends_up_the_same_each_time_and_the_model_is_only_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_training(monkeypatch, iterations=20)
    shrink_batches(monkeypatch, 64)
    model = built(CLASSES, 8)
    kept = copy.deepcopy(model.state_dict())
    start = {name: tensor + 0.01 for name, tensor in copy_state(model).items()}
    one = local_optimum(model, start, INPUTS, PLAIN)
    with seed_globals("somebody else's draws"):
        other = local_optimum(model, start, INPUTS, PLAIN)
    assert all(torch.equal(one[name], other[name]) for name in start)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_the_first_step_is_one_of_gradient_descent_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the gradient of all examples."""
    shorten_training(monkeypatch, iterations=1)
    model = built(CLASSES, 8).double()
    start = copy_state(model)
    gradient = torch.autograd.grad(cross_entropy(model(INPUTS.double()), PLAIN), list(model.parameters()))
    found = local_optimum(model, start, INPUTS.double(), PLAIN)
    for (name, tensor), slope in zip(start.items(), gradient, strict=True):
        torch.testing.assert_close(found[name], tensor - 0.1 * slope, atol=1e-10, rtol=0)


def test_where_steps_are_too_long_they_become_shorter() -> None:
    """Inputs thirty times as long make the loss a thousand times as curved; it must fall all the same."""
    model = built(CLASSES, 8)
    start, inputs = copy_state(model), 30 * INPUTS
    before = evaluate(model, start, inputs, PLAIN)["loss"]
    trained, curve = train_to_convergence(model, inputs, PLAIN, cross_entropy)
    assert max(curve) <= 1.2 * curve[0]
    assert curve[-1] < 0.5 * before
    assert evaluate(model, copy_state(trained), inputs, PLAIN)["loss"] == pytest.approx(curve[-1], rel=0.05)


def test_strides_that_leap_out_of_the_valley_become_shorter() -> None:
    """From 0.1 the loss rises by more than a tenth of its first value, though not above it."""
    leap, calm = [2.0] + 30 * [1.0] + [1.21], [2.0] + 30 * [1.0] + [1.19, 0.2]
    told = iter([2.0, *leap, 2.0, *calm])  # both begin with a look at all examples

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return 0 * outputs.sum() + next(told)

    _, curve = train_to_convergence(built(CLASSES, 8), INPUTS, PLAIN, loss, iterations=33)
    assert curve == pytest.approx(calm)


def test_momentum_may_swing_back_at_the_start() -> None:
    """A valley a hundred times steeper across than along: the loss falls, and rises by a third of the first."""
    inputs = torch.tensor([[3.0, 0.0], [0.0, 0.3]]).repeat(10, 1)
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    trained, curve = train_to_convergence(model, inputs, torch.zeros(20), squared_error)
    assert max(after - min(curve[: place + 1]) for place, after in enumerate(curve)) > 0.3 * curve[0]
    assert trained.weight.abs().max() < 0.1  # type: ignore[operator]


def test_strides_that_leave_no_unit_alive_become_shorter() -> None:
    """What inputs have in common is four times what differs: from 0.1 the network ends up saying the same of all."""
    rng = generator("valley")
    inputs = 0.5 * torch.randn(60, 400, generator=rng) + 2 * torch.randn(400, generator=rng)
    labels = torch.randint(10, (60,), generator=rng)
    with seed_globals("valley"):
        model = nn.Sequential(nn.Linear(400, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))
    _, curve = train_to_convergence(model, inputs, labels, cross_entropy)
    assert curve[-1] < 0.5 * curve[0]


def test_batches_that_differ_are_not_taken_for_leaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few targets are large, so that the loss of a batch is often far above the lowest."""
    rng = generator("tails")
    inputs, targets = torch.randn(400, 4, generator=rng), torch.randn(400, generator=rng)
    targets[::40] *= 10
    shrink_batches(monkeypatch, 50)
    _, curve = train_to_convergence(nn.Linear(4, 1), inputs, targets, squared_error)
    assert max(curve[8:]) > min(curve) + 0.5 * curve[0]


def test_a_pass_over_several_batches_that_leaps_is_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, but here the whole pass rises by more than a tenth of the first loss."""
    leap, calm = [2.0, 2.0] + 30 * [1.0] + [0.9, 1.6], [2.0, 2.0] + 30 * [1.0] + [0.9, 1.4, 0.2, 0.2]
    told = iter([2.0, 2.0, *leap, 2.0, 2.0, *calm])

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return 0 * outputs.sum() + next(told)

    shrink_batches(monkeypatch, len(INPUTS) // 2)
    _, curve = train_to_convergence(built(CLASSES, 8), INPUTS, PLAIN, loss, iterations=36)
    assert curve == pytest.approx(calm)


def test_a_regression_by_a_network_approaches_its_targets() -> None:
    model = built(REGRESSION, 32)
    targets = (INPUTS[:, 0].sin() + INPUTS[:, 1] ** 2) / 2
    found = local_optimum(model, copy_state(model), INPUTS, targets, squared_error)
    assert evaluate(model, found, INPUTS, targets, squared_error)["loss"] < 0.05 * targets.var()


@pytest.mark.parametrize("shared", [True, False])
def test_batch_norm_uses_the_clients_own_statistics(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Withheld, they are in no state; shared, they are those of its data at the optimum."""
    shorten_training(monkeypatch, iterations=60)
    model = built(CLASSES, 16, batch_norm=True)
    start = copy_state(model, statistics=shared)
    found = local_optimum(model, start, INPUTS, PLAIN)
    assert list(found) == list(start)
    assert accuracy(model, found) > accuracy(model, dict(start)) + 0.1
    if shared:
        model.load_state_dict(found, strict=False)
        first = model[1](INPUTS).detach()  # type: ignore[index]
        torch.testing.assert_close(found["2.running_mean"], first.mean(0))
        torch.testing.assert_close(found["2.running_var"], first.var(0))


def test_one_example_too_many_for_a_batch_does_not_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """201 examples in batches of 100 are three of 67, which can be normalised."""
    shorten_training(monkeypatch, iterations=6)
    shrink_batches(monkeypatch, 100)
    model = built(CLASSES, 8, batch_norm=True)
    inputs, labels = torch.cat([INPUTS, INPUTS[:1]]), torch.cat([PLAIN, PLAIN[:1]])
    local_optimum(model, copy_state(model), inputs, labels)


def test_states_are_taken_by_name_or_by_order() -> None:
    model = built(CLASSES, 8, batch_norm=True)
    whole = copy_state(model)
    bare = copy_state(model, statistics=False)
    assert list(match_state(model, dict(reversed(whole.items()))) or {}) == list(whole)
    assert list(match_state(model, bare) or {}) == list(bare)
    numbered = {str(place): tensor for place, tensor in enumerate(bare.values())}
    assert list(match_state(model, numbered) or {}) == list(bare)
    assert match_state(model, {"1.weight": bare["1.weight"]}) is None


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (DataError, "the client holds no examples", {"inputs": INPUTS[:0], "labels": PLAIN[:0]}),
        (DataError, "another architecture", {"start": {"weight": torch.ones(3)}}),
        (RunError, "unstable even with a step size of 0.0003; standardise", {"inputs": INPUTS * float("inf")}),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_sentence(
    error: type[Exception], message: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_training(monkeypatch, iterations=3)
    model = built(CLASSES, 8)
    arguments = {"start": copy_state(model), "inputs": INPUTS, "labels": PLAIN} | options
    with pytest.raises(error, match=message) as caught:
        local_optimum(model, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")


@pytest.mark.slow
def test_on_adult_the_optimum_fits_far_better_than_where_it_began() -> None:
    """The client of LMRA's Table 9: a tenth of 12 300 people, three layers of 256 units."""
    home = os.environ.get("FEDSIM_DATA")
    if home is None or not (Path(home) / "adult").is_dir():
        pytest.skip("needs Adult under $FEDSIM_DATA")
    from fedsim.data.tables import Adult

    dataset = Adult(max_examples=1400).load(Path(home))
    inputs, labels = dataset.train.inputs(), dataset.train.labels
    with seed_globals(0, "model"):
        model = Mlp(hidden=(256, 256, 256)).build(dataset.task)
    found = local_optimum(model, copy_state(model), inputs, labels)
    after = evaluate(model, found, inputs, labels)
    assert after["accuracy"] > 0.9
    assert after["loss"] < 0.2


@pytest.mark.thorough
def test_a_client_of_att_faces_is_not_thrown_out_of_its_valley() -> None:
    """Steps of 0.1 leap here, though never above 1.2 times the first loss, and end at a loss of 1.3."""
    home = os.environ.get("FEDSIM_DATA")
    if home is None or not (Path(home) / "att_faces").is_dir():
        pytest.skip("needs AT&T faces under $FEDSIM_DATA")
    tables = {
        "data": {"name": "att-faces"},
        "partition": {"name": "att-faces-by-person"},
        "model": {"name": "mlp", "hidden": [32, 32, 32]},
        "federation": {"engine": "serial", "clients": 20, "seed": 1},
    }
    config = validate_tables(Config, tables, "faces")
    experiment = Experiment(config)
    inputs, labels = experiment.data.train(2)
    inputs, model = experiment.data.to_model(inputs), experiment.new_model()
    found = local_optimum(model, experiment.initial_state(), inputs, labels)
    assert evaluate(model, found, inputs, labels)["loss"] < 0.01
