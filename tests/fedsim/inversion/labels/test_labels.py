"""Labels counted from the movement of the last bias: exact where the protocol is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation.scoring import label_accuracy
from fedsim.base.errors import KnowledgeError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.data import Dataset
from fedsim.interfaces.attack import Knowledge
from fedsim.inversion.labels.updates import count_labels
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.sme import SmeCnn
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

SHAPE = (1, 8, 8)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp(hidden=(32,)).build(Task(SHAPE, 10))


def choose(digits: Dataset, counts: dict[int, int]) -> tuple[Tensor, Tensor]:
    """As many digits of each class as `counts` says, standardised."""
    index = torch.cat([torch.nonzero(digits.train.labels == c).flatten()[:n] for c, n in counts.items()])
    mean, std = digits.moments
    return (digits.train.inputs(index) - mean[0]) / std[0], digits.train.labels[index]


def trained(digits: Dataset, counts: dict[int, int], model: Any = mlp, **how: Any) -> tuple[Update, Tensor]:
    inputs, labels = choose(digits, counts)
    before = copy_state(model())
    plan = LocalTraining(**({"local_epochs": 2, "batch_size": 4, "learning_rate": 0.01} | how))
    after, _ = local_update(model(), before, inputs, labels, plan, key=("labels",))
    return build_update(before, after, num_examples=len(labels)), labels.sort().values


def known(digits: Dataset, **granted: Any) -> Knowledge:
    mean, std = (moment.item() for moment in digits.moments)
    return Knowledge(
        model=mlp,
        loss=cross_entropy,
        input_shape=SHAPE,
        num_classes=10,
        value_range=([-mean / std], [(1 - mean) / std]),
        **granted,
    )


def count(update: Update, knowledge: Knowledge, seed: int = 0, model: Callable[[], nn.Module] = mlp) -> Tensor:
    return count_labels(update, knowledge, model(), update.before, update.after, generator(seed))


PROTOCOL = {"learning_rate": 0.01, "local_epochs": 2, "batch_size": 4}
SOME = {2: 5, 3: 1, 7: 6}
ALL = dict(enumerate((3, 1, 4, 1, 5, 2, 6, 5, 3, 2)))


def test_labels_are_counted_by_the_steps_of_momentum_where_it_is_known(digits: Dataset) -> None:
    update, labels = trained(digits, ALL, momentum=0.9)
    right = [label_accuracy(count(update, known(digits, **PROTOCOL, momentum=m)), labels) for m in (0.9, None)]
    assert right[0] > 0.9 > right[1]


def test_a_number_of_steps_is_as_good_as_passes(digits: Dataset) -> None:
    update, labels = trained(digits, SOME, local_epochs=None, local_steps=6)
    facts = {"learning_rate": 0.01, "local_steps": 6}
    assert count(update, known(digits, **facts)).tolist() == labels.tolist()


@pytest.mark.parametrize("counts", [SOME, {4: 8}, {0: 1}], ids=["some", "one class", "one example"])
def test_labels_are_counted_exactly_where_the_protocol_is_known(digits: Dataset, counts: dict[int, int]) -> None:
    update, labels = trained(digits, counts)
    assert count(update, known(digits, **PROTOCOL)).tolist() == labels.tolist()


@pytest.mark.parametrize("counts", [ALL, dict.fromkeys(range(10), 2)], ids=["unequal", "equal"])
def test_with_every_class_present_at_most_one_label_is_wrong(digits: Dataset, counts: dict[int, int]) -> None:
    """The softmax of noise stands in for that of the data, and so many small shares are easily misrounded."""
    update, labels = trained(digits, counts)
    assert label_accuracy(count(update, known(digits, **PROTOCOL)), labels) >= 1 - 1 / len(labels)


def test_a_smaller_last_batch_costs_few_labels(digits: Dataset) -> None:
    """Its examples move the bias more than the others do, and nothing says which they were."""
    update, labels = trained(digits, ALL, batch_size=12)
    assert label_accuracy(count(update, known(digits, **PROTOCOL | {"batch_size": 12})), labels) >= 0.85


@pytest.mark.parametrize("counts", [SOME, {4: 8}, {0: 1}], ids=["some", "one class", "one example"])
def test_with_a_class_absent_the_protocol_need_not_be_known(digits: Dataset, counts: dict[int, int]) -> None:
    update, labels = trained(digits, counts)
    assert label_accuracy(count(update, known(digits)), labels) >= 0.8


def test_with_every_class_present_and_the_protocol_unknown_it_beats_guessing(digits: Dataset) -> None:
    """The limit that the docstring states; a class that occurs most is still told from one that does not."""
    counts = dict.fromkeys(range(9), 1) | {9: 23}
    update, labels = trained(digits, counts)
    floor = label_accuracy(torch.arange(len(labels)) % 10, labels)
    assert label_accuracy(count(update, known(digits)), labels) > floor + 0.2


@pytest.mark.parametrize("missing", ["learning_rate", "local_epochs", "batch_size"])
def test_a_protocol_known_in_part_counts_as_unknown(digits: Dataset, missing: str) -> None:
    update, _ = trained(digits, SOME)
    part = known(digits, **{key: value for key, value in PROTOCOL.items() if key != missing})
    assert torch.equal(count(update, part), count(update, known(digits)))


def test_many_local_steps_leave_most_labels_recoverable(digits: Dataset) -> None:
    update, labels = trained(digits, SOME, local_epochs=20)
    assert label_accuracy(count(update, known(digits, **PROTOCOL | {"local_epochs": 20})), labels) >= 0.75


def test_probabilities_are_taken_along_the_way_not_at_its_start_alone() -> None:
    """Of black images the bias alone learns: its path is known, and p at w_0 alone would claim 5, 3 and 2."""
    counts, rate, steps = torch.tensor([7.0, 2.0, 1.0]), 0.5, 10
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    before = {"1.weight": torch.zeros(3, 4), "1.bias": torch.zeros(3)}
    bias = before["1.bias"]
    for _ in range(steps):
        bias = bias - rate * (bias.softmax(0) - counts / 10)
    after = before | {"1.bias": bias}
    update = build_update(before, after, num_examples=10)
    protocol: dict[str, Any] = {"learning_rate": rate, "local_epochs": steps, "batch_size": 10}
    knowledge = Knowledge(input_shape=(1, 2, 2), num_classes=3, value_range=([0.0], [1.0]), **protocol)
    claimed = count_labels(update, knowledge, model, before, after, generator(1))
    assert claimed.bincount().tolist() == [7, 2, 1]


def test_a_delta_is_read_as_it_was_sent() -> None:
    """Next to so large a bias, w_t + delta is w_t."""
    counts = torch.tensor([7.0, 2.0, 1.0])
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    before = {"1.weight": torch.zeros(3, 4), "1.bias": torch.full((3,), 1e8)}
    delta = {"1.weight": torch.zeros(3, 4), "1.bias": -0.5 * (torch.full((3,), 1 / 3) - counts / 10)}
    update = Update(round=1, client=0, before=before, payload=Payload.from_dense(delta), num_examples=10)
    protocol: dict[str, Any] = {"learning_rate": 0.5, "local_epochs": 1, "batch_size": 10}
    knowledge = Knowledge(input_shape=(1, 2, 2), num_classes=3, value_range=([0.0], [1.0]), **protocol)
    assert torch.equal(update.after["1.bias"], before["1.bias"])
    claimed = count_labels(update, knowledge, model, before, update.after, generator(1))
    assert claimed.bincount().tolist() == [7, 2, 1]


LONG: dict[str, Any] = {"local_epochs": 50, "batch_size": 50, "learning_rate": 0.05}


@pytest.mark.parametrize(
    "counts",
    [
        {2: 5, 3: 1, 7: 4},
        pytest.param({0: 1, 2: 1, 3: 1, 4: 2, 6: 2, 8: 3}, marks=pytest.mark.thorough),
        pytest.param({1: 2, 5: 6, 9: 2}, marks=pytest.mark.thorough),
    ],
)
def test_fifty_steps_at_a_large_rate_leave_most_labels_recoverable_and_beat_guessing(
    digits: Dataset, counts: dict[int, int]
) -> None:
    """By what the model makes of noise 4 to 6 of the 10 are found."""
    update, labels = trained(digits, counts, **LONG)
    floor = label_accuracy(torch.arange(len(labels)) % 10, labels)
    assert label_accuracy(count(update, known(digits, **LONG)), labels) >= max(0.75, floor + 0.25)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return SmeCnn(channels=(4, 8), hidden=20).build(Task(SHAPE, 10))


@pytest.mark.parametrize("counts", [{2: 5, 3: 1, 7: 4}, pytest.param({1: 2, 5: 6, 9: 2}, marks=pytest.mark.thorough)])
def test_where_layers_below_change_features_the_whole_network_is_simulated(
    digits: Dataset, counts: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """By what the model makes of noise 7 of the 10 are found."""
    how: dict[str, Any] = LONG | {"learning_rate": 0.2}
    update, labels = trained(digits, counts, cnn, **how)
    assert label_accuracy(count(update, known(digits, **how), model=cnn), labels) >= 0.9
    assert not any("does not explain" in told for told in caplog.messages)


def test_few_steps_at_a_small_rate_are_not_warned_of(digits: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    update, labels = trained(digits, SOME, cnn)
    assert count(update, known(digits, **PROTOCOL), model=cnn).tolist() == labels.tolist()
    assert not caplog.messages


def test_an_update_that_no_simulation_explains_is_warned_of(digits: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    update, _ = trained(digits, SOME, **LONG)
    moved = {name: 4 * end - 3 * update.before[name] for name, end in update.after.items()}
    claimed = count(dataclasses.replace(update, payload=Payload.from_dense(moved, "weights")), known(digits, **LONG))
    assert len(claimed) == update.num_examples
    [told] = caplog.messages
    assert told.startswith("round 1, client 0: training that is simulated with the labels")


def test_training_long_enough_to_fit_the_data_is_warned_of(digits: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    """The simulated last layer explains this update, and less than half of the labels are right all the same."""
    update, labels = trained(digits, SOME, **LONG)
    assert label_accuracy(count(update, known(digits, **LONG)), labels) < 0.5
    [told] = caplog.messages
    assert told.startswith("round 1, client 0: learning rate x local steps is 2.5, long enough")


@given(counts=st.dictionaries(st.integers(0, 9), st.integers(1, 6), min_size=1, max_size=9))
@settings(max_examples=15)
def test_one_step_on_any_mixture_gives_its_labels_away(digits: Dataset, counts: dict[int, int]) -> None:
    how = {"local_epochs": 1, "batch_size": 100, "learning_rate": 0.01}
    update, labels = trained(digits, counts, **how)
    claimed = count(update, known(digits, **how))
    assert len(claimed) == len(labels)
    assert label_accuracy(claimed, labels) >= 0.9


@pytest.mark.parametrize("noise", [0.0, 1.0, 1e3])
def test_whatever_the_update_says_n_labels_come_back_in_order(digits: Dataset, noise: float) -> None:
    """A noisy or zero update still yields a claim of the right size."""
    update, labels = trained(digits, SOME)
    rng = generator("noise")
    after = {k: update.before[k] + noise * torch.randn(v.shape, generator=rng) for k, v in update.after.items()}
    for knowledge in (known(digits), known(digits, **PROTOCOL)):
        claimed = count(dataclasses.replace(update, payload=Payload.from_dense(after, "weights")), knowledge)
        assert len(claimed) == len(labels)
        assert torch.equal(claimed, claimed.sort().values)
        assert claimed.min() >= 0
        assert claimed.max() <= 9


def test_the_probes_follow_the_generator_and_nothing_is_changed(digits: Dataset) -> None:
    update, _ = trained(digits, SOME)
    before = {key: value.clone() for key, value in update.before.items()}
    torch.manual_seed(1)
    first = count(update, known(digits))
    torch.manual_seed(2)
    assert torch.equal(first, count(update, known(digits)))
    assert all(torch.equal(value, update.before[key]) for key, value in before.items())


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False)),
        lambda: nn.Sequential(nn.Conv2d(1, 10, 8), nn.Flatten()),
    ],
    ids=["no bias", "no linear layer"],
)
def test_without_a_final_bias_labels_must_be_granted(digits: Dataset, build: Callable[[], nn.Module]) -> None:
    state = copy_state(build())
    update = build_update(state, state, num_examples=3)
    with pytest.raises(
        KnowledgeError, match=r"labels .*: the model('s last linear layer has no bias| ends in).*; grant"
    ):
        count(update, known(digits), model=build)
