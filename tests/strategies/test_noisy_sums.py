"""Sums under secure aggregation with noise: each client's part is bounded, and the noise is all there or nothing is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.federation.engines.arrays import make_record, read_state
from fedsim.federation.privacy_tables import SecureAggregationTable
from fedsim.privacy.distributed import DistributedPrivacy
from fedsim.recording.payloads import Payload
from strategies.secure_sum import SecureSum, clip_update

pytestmark = pytest.mark.usefixtures("server_task")
SIZE, BITS = 5000, 16
BEFORE = {"weight": torch.zeros(SIZE), "bias": torch.zeros(())}
FAINT = 1e-12
"""A noise multiplier whose shares are all 0."""


def noisy_sum(noise: float, *, clip: float = 1.0, reach: float = 1.0, shares: int = 3, bits: int = BITS) -> SecureSum:
    """Return a protocol; `reach` is the clipping range of single numbers."""
    table = SecureAggregationTable(clip=reach, bits=bits, threshold=0.1)
    privacy = DistributedPrivacy(
        delta=1e-5, clients=4, clip=clip, noise_multiplier=noise, step=2 * reach / (1 << bits), dimension=SIZE + 1,
        shares=shares,
    )  # fmt: skip
    return SecureSum(table=table, largest=40, seed=7, privacy=privacy)


def sum_updates(protocol: SecureSum, updates: Sequence[Tensor | None], counts: Sequence[int]) -> list[Message]:
    """Return the replies of one group; None for a client that drops out."""
    asked, answers = [], []
    for client, (update, count) in enumerate(zip(updates, counts, strict=True)):
        content = RecordDict({"arrays": make_record(BEFORE), "config": ConfigRecord({"server-round": 1})})
        message = Message(content, client, "train")
        asked.append(message)
        if update is None:
            answers.append(Message(Error(code=2, reason="late"), reply_to=message))
            continue
        sent = {"weight": update, "bias": torch.zeros(())}
        arrays = make_record(Payload.from_dense(sent, "delta").arrays())
        metrics = MetricRecord({"num-examples": count})
        answers.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message))
    return list(protocol.sum_groups(answers, asked, 1))


def mean_of(replies: Sequence[Message]) -> np.ndarray[Any, Any]:
    [reply] = [reply for reply in replies if not reply.has_error()]
    (record,) = reply.content.array_records.values()
    return np.asarray(Payload.from_arrays(read_state(record), BEFORE).values("delta", BEFORE)["weight"])


def one_hot(index: int, value: float) -> Tensor:
    update = torch.zeros(SIZE)
    update[index] = value
    return update


def test_all_clients_weigh_alike_and_none_adds_more_than_its_clip() -> None:
    """With weights N the first would count forty times the second."""
    replies = sum_updates(noisy_sum(FAINT, clip=0.5), [one_hot(0, 9.0), one_hot(1, 0.25), one_hot(2, -0.5)], [40, 1, 7])
    mean = mean_of(replies)
    assert mean[:3] == pytest.approx([0.5 / 3, 0.25 / 3, -0.5 / 3], abs=1e-4)
    assert np.abs(mean[3:]).max() == 0.0
    [reply] = replies
    assert next(iter(reply.content.metric_records.values()))["num-examples"] == 48


def test_an_update_is_clipped_over_all_its_arrays_together() -> None:
    clipped = clip_update({"a": np.array([3.0]), "b": np.array([[4.0]])}, 2.5)
    assert [float(values.item()) for values in clipped.values()] == [1.5, 2.0]
    assert clip_update({"a": np.zeros(2)}, 1.0)["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [1e-7, 1.0 / math.sqrt(SIZE)])
@pytest.mark.parametrize("bits", [6, 16])
def test_rounding_never_makes_an_update_longer_than_is_accounted_for(value: float, bits: int) -> None:
    """Many numbers far below a step are the worst: each becomes a whole step, or none."""
    protocol = noisy_sum(FAINT, bits=bits)
    assert protocol.privacy is not None
    update = clip_update({"weight": np.full(SIZE, value)}, 1.0)
    for client in range(5):
        _, integers = protocol.quantise(update, 40, 1, client)
        length = float(np.linalg.norm(np.asarray(integers) - (1 << bits) / 2))
        assert length <= protocol.privacy.distance
    if bits == 6 and value > 1e-6:
        assert length > 1.1 * 1.0 / protocol.privacy.step  # without the term for rounding the bound would not hold


def test_the_shares_of_the_fewest_clients_make_the_noise_that_is_accounted_for() -> None:
    protocol = noisy_sum(2.0, shares=3)
    privacy = protocol.privacy
    assert privacy is not None
    noise = 3 * mean_of(sum_updates(protocol, [torch.zeros(SIZE)] * 3, [5] * 3)) / privacy.step
    assert noise.std() == pytest.approx(2.0 * privacy.distance, rel=0.05)
    more = 4 * mean_of(sum_updates(protocol, [torch.zeros(SIZE)] * 4, [5] * 4)) / privacy.step
    assert more.std() == pytest.approx(math.sqrt(4 / 3) * 2.0 * privacy.distance, rel=0.05)


def test_no_two_clients_and_no_two_rounds_share_noise() -> None:
    protocol = noisy_sum(2.0)
    zeros = {"weight": np.zeros(SIZE)}
    drawn = [np.asarray(protocol.quantise(zeros, 40, *key)[1], dtype=float) for key in ((1, 0), (1, 1), (2, 0))]
    correlations = np.corrcoef(drawn)
    assert np.abs(correlations[~np.eye(3, dtype=bool)]).max() < 0.06


def test_a_sum_with_fewer_shares_than_are_accounted_for_is_lost() -> None:
    """The threshold of the protocol alone would let two through."""
    replies = sum_updates(noisy_sum(2.0, shares=3), [torch.zeros(SIZE), None, None, torch.zeros(SIZE)], [5] * 4)
    assert all(reply.has_error() for reply in replies)
    assert "its sum is lost: 2 of its group of 4 answered, 3 have to" in {reply.error.reason for reply in replies}


def test_a_sum_that_noise_takes_below_zero_is_read_rightly() -> None:
    """All send the lowest number, so about half of the noisy sums of integers are below 0."""
    protocol = noisy_sum(1.5e-8, clip=1e6, reach=0.1)
    mean = mean_of(sum_updates(protocol, [torch.full((SIZE,), -0.1)] * 4, [5] * 4))
    privacy = protocol.privacy
    assert privacy is not None
    deviation = math.sqrt(4 * privacy.share_variance) * privacy.step / 4
    assert abs(float(mean.mean()) + 0.1) < 0.1 * deviation
    assert float(mean.std()) == pytest.approx(deviation, rel=0.05)
