"""The server releases a mean that no client moves by more than its clip, under the noise that is accounted for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray

from fedsim.base.errors import RunError
from fedsim.privacy.central import CentralPrivacy
from fedsim.privacy.correlated_noise import count_nodes
from strategies.central_privacy import CentrallyPrivate
from strategies.fedsgd import FedSgd

pytestmark = pytest.mark.usefixtures("server_task")
SIZE = 40_000
FAINT: dict[str, Any] = {"clip": 2.0, "noise_multiplier": 1e-9, "delta": 1e-5, "clients": 10, "expected": 4.0}
"""Settings whose noise is too small to be seen."""


class AllNodes:
    """A grid of ten nodes that are always there."""

    def get_node_ids(self) -> Sequence[int]:
        return range(10)


def record(**arrays: NDArray[Any]) -> ArrayRecord:
    return ArrayRecord({name.replace("__", "/"): Array(np.asarray(values)) for name, values in arrays.items()})


def make_reply(client: int, count: int, **arrays: NDArray[Any]) -> Message:
    asked = Message(RecordDict(), dst_node_id=client, message_type=MessageType.TRAIN)
    content = RecordDict({"arrays": record(**arrays), "metrics": MetricRecord({"num-examples": count})})
    return Message(content, reply_to=asked)


def release(
    strategy: CentrallyPrivate, before: ArrayRecord, replies: Sequence[Message], number: int = 1
) -> ArrayRecord:
    list(strategy.configure_train(number, before, ConfigRecord(), AllNodes()))  # type: ignore[arg-type]
    after, _ = strategy.aggregate_train(number, replies)
    assert after is not None
    return after


def private(strategy: FedAvg | None = None, **settings: Any) -> CentrallyPrivate:
    return CentrallyPrivate(strategy or FedAvg(), CentralPrivacy(**{**FAINT, **settings}), seed=5)


def test_each_client_adds_at_most_its_clip_whatever_it_counts() -> None:
    """The first update has norm 5 and is cut to 2, the second has norm 1; neither N nor the drop-out matters."""
    before = record(a=np.array([1.0, 1.0]), b=np.array([[2.0]]))
    replies = [
        make_reply(0, 1_000_000, a=np.array([4.0, 1.0]), b=np.array([[6.0]])),
        make_reply(1, 1, a=np.array([1.0, 0.0]), b=np.array([[2.0]])),
        Message(Error(code=2, reason="late"), reply_to=Message(RecordDict(), dst_node_id=2, message_type="train")),
    ]
    after = release(private(), before, replies)
    np.testing.assert_allclose(after["a"].numpy(), [1 + 3 * 0.4 / 4, 1 - 1 / 4], atol=1e-7)
    np.testing.assert_allclose(after["b"].numpy(), [[2 + 4 * 0.4 / 4]], atol=1e-7)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_an_update_that_cannot_be_clipped_adds_nothing(value: float, caplog: pytest.LogCaptureFixture) -> None:
    before = record(a=np.zeros(2))
    replies = [make_reply(7, 3, a=np.array([value, 0.0])), make_reply(1, 3, a=np.zeros(2))]
    after = release(private(quantile=0.0, count_noise=1e-6), before, replies)
    np.testing.assert_allclose(after["a"].numpy(), [0.0, 0.0], atol=1e-7)
    assert "client 7 sent NaN or infinite values" in caplog.text


def test_the_noise_is_that_which_is_accounted_for() -> None:
    strategy = private(noise_multiplier=3.0)
    before = record(a=np.zeros(SIZE, dtype=np.float32))
    noise = release(strategy, before, [make_reply(0, 5, a=np.zeros(SIZE))])["a"].numpy()
    assert noise.dtype == np.float32
    assert noise.std() == pytest.approx(3.0 * 2.0 / 4, rel=0.03)
    assert noise.mean() == pytest.approx(0.0, abs=0.04)
    fresh = release(strategy, before, [make_reply(0, 5, a=np.zeros(SIZE))], number=2)["a"].numpy()
    assert abs(np.corrcoef(noise, fresh)[0, 1]) < 0.03  # else the difference of two rounds would have no noise
    again = release(private(noise_multiplier=3.0), before, [make_reply(0, 5, a=np.zeros(SIZE))])["a"].numpy()
    np.testing.assert_array_equal(noise, again)


def test_a_round_without_any_answer_releases_noise_as_well() -> None:
    after = release(private(noise_multiplier=3.0), record(a=np.zeros(SIZE)), [])
    assert after["a"].numpy().std() == pytest.approx(3.0 * 2.0 / 4, rel=0.03)


def test_the_noise_follows_the_clip_by_which_updates_were_clipped_and_not_the_next_one() -> None:
    """All are clipped, so the clip grows tenfold after the round; the noise is made before."""
    settings = {"quantile": 1.0, "clip_learning_rate": math.log(10), "count_noise": 0.1, "noise_multiplier": 0.1}
    strategy = private(**settings)
    before = record(a=np.zeros(SIZE))
    replies = [make_reply(client, 1, a=np.full(SIZE, 9.0)) for client in range(4)]
    z_sum = (0.1**-2 - 0.2**-2) ** -0.5
    for number in (1, 2):
        clip = strategy.clip
        noise = release(strategy, before, replies, number)["a"].numpy() - clip / math.sqrt(SIZE)
        assert noise.std() == pytest.approx(z_sum * clip / 4, rel=0.03)
        assert strategy.clip > 8 * clip


def test_the_clip_moves_to_the_quantile_and_a_drop_out_counts_half() -> None:
    """Of four clients one is not clipped, two are, one drops out: a share of (1 + 1/2) / 4 = 3/8."""
    strategy = private(quantile=0.5, clip_learning_rate=0.2, count_noise=1e-6, noise_multiplier=1e-9)
    updates = [np.array([2.0]), np.array([2.5]), np.array([-7.0])]
    replies = [make_reply(client, 1, a=update) for client, update in enumerate(updates)]
    release(strategy, record(a=np.zeros(1)), replies)
    assert strategy.clip == pytest.approx(2.0 * math.exp(-0.2 * (3 / 8 - 1 / 2)), rel=1e-5)


def test_the_count_has_the_noise_that_is_accounted_for() -> None:
    shares = []
    for seed in range(150):
        privacy = CentralPrivacy(**{**FAINT, "quantile": 0.0, "count_noise": 2.0})
        strategy = CentrallyPrivate(FedAvg(), privacy, seed)
        release(strategy, record(a=np.zeros(1)), [])
        shares.append(-math.log(strategy.clip / 2.0) / 0.2)
    assert np.mean(shares) == pytest.approx(0.5, abs=0.1)
    assert np.std(shares) == pytest.approx(2.0 / 4, rel=0.15)


def test_clients_are_drawn_independently_each_with_the_same_probability() -> None:
    strategy = private(rate=0.3)
    drawn = np.zeros((300, 10), dtype=bool)
    for number in range(300):
        messages = strategy.configure_train(number, record(a=np.zeros(1)), ConfigRecord(), AllNodes())  # type: ignore[arg-type]
        drawn[number, [message.metadata.dst_node_id for message in messages]] = True
    assert drawn.mean(0) == pytest.approx(np.full(10, 0.3), abs=0.1)
    sizes = drawn.sum(1)
    assert sizes.var() == pytest.approx(10 * 0.3 * 0.7, rel=0.3)  # a fixed number of them would have none
    assert sizes.min() == 0
    again = [
        message.metadata.dst_node_id
        for message in private(rate=0.3).configure_train(7, record(a=np.zeros(1)), ConfigRecord(), AllNodes())  # type: ignore[arg-type]
    ]
    assert again == drawn[7].nonzero()[0].tolist()


@pytest.mark.parametrize(("seed", "clip"), [(5, "inf"), (1, "0")])
def test_a_clip_beyond_all_numbers_ends_the_run(seed: int, clip: str) -> None:
    settings = {"quantile": 0.5, "clip_learning_rate": 10.0, "count_noise": 1e6, "noise_multiplier": 1.0}
    strategy = CentrallyPrivate(FedAvg(), CentralPrivacy(**{**FAINT, **settings}), seed=seed)
    with pytest.raises(RunError, match=f"the clip is {clip}, moved by the noise of the count; lower"):
        release(strategy, record(a=np.zeros(2)), [make_reply(0, 1, a=np.zeros(2))])


def test_gradients_are_clipped_and_integers_stay() -> None:
    strategy = CentrallyPrivate(FedSgd(learning_rate=1.0), CentralPrivacy(**FAINT), seed=5, gradients=["a"])
    before = record(a=np.array([10.0, 10.0]), steps=np.array(3))
    after = release(strategy, before, [make_reply(0, 2, gradient__a=np.array([0.0, -8.0]), steps=np.array(90))])
    np.testing.assert_allclose(after["a"].numpy(), [10.0, 10.5], atol=1e-7)
    assert after["steps"].numpy() == 3


def test_in_turns_each_client_is_asked_once_before_any_is_asked_again() -> None:
    strategy = private(cycle=5, expected=2.0)
    asked = []
    for number in range(1, 11):
        messages = strategy.configure_train(number, record(a=np.zeros(1)), ConfigRecord(), AllNodes())  # type: ignore[arg-type]
        asked.append([message.metadata.dst_node_id for message in messages])
    assert [len(clients) for clients in asked] == [2] * 10
    assert sorted(client for clients in asked[:5] for client in clients) == list(range(10))
    assert asked[5:] == asked[:5]
    assert asked[0] != [0, 1]


def test_the_noise_of_a_tree_cancels_in_the_sum_over_rounds() -> None:
    """After k rounds of a cycle of six, the sum has the noise of as many nodes as k has bits, not of k rounds."""
    strategy = private(noise_multiplier=3.0, cycle=6, correlation="tree", expected=2.0)
    before = record(a=np.zeros(SIZE))
    noise = [release(strategy, before, [], number)["a"].numpy() for number in range(1, 13)]
    deviation = 3.0 * 2.0 / 2.0
    for cycle in (noise[:6], noise[6:]):
        for rounds, nodes in ((1, 1), (2, 1), (3, 2), (4, 1), (5, 2), (6, 2)):
            assert np.sum(cycle[:rounds], axis=0).std() == pytest.approx(deviation * math.sqrt(nodes), rel=0.03)
    first, second = np.sum(noise[:6], axis=0), np.sum(noise[6:], axis=0)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_no_difference_of_rounds_has_less_noise_than_the_nodes_that_a_client_is_in() -> None:
    """What is known of round k is in nodes alone, each with noise of its own: the best test has z / sqrt(nodes)."""
    cycle, size = 6, 40_000
    strategy = private(noise_multiplier=1.0, clip=1.0, cycle=cycle, correlation="tree", expected=1.0)
    noise = np.array(
        [release(strategy, record(a=np.zeros(size)), [], number)["a"].numpy() for number in range(1, cycle + 1)]
    )
    covariance = np.cov(noise)
    for index in range(cycle):
        signal = np.eye(cycle)[index]
        distance = math.sqrt(signal @ np.linalg.solve(covariance, signal))
        assert distance < math.sqrt(count_nodes(cycle)) * 1.03
    assert distance > 0
