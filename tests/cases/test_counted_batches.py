"""A recording made elsewhere whose clients say how many batches they had, not how many examples."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.audit.reply_warnings import warn_of_update_ranks
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from tests.support.recordings import build_update

BATCHES, BATCH_SIZE, EPOCHS = 4, 8, 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def trained() -> dict[str, Tensor]:
    """The weights of a client after some epochs of mini-batches."""
    model, inputs = deepcopy(network()), torch.rand(BATCHES * BATCH_SIZE, 1, 8, 8)
    labels = torch.randint(0, 10, (len(inputs),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(inputs)).split(BATCH_SIZE):
            optimizer.zero_grad()
            cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("told", "warns"), [(BATCHES, True), (BATCHES * BATCH_SIZE, False)])
def test_an_update_of_a_rank_above_n_is_said_to_be_of_more_examples(
    told: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(1)
    before = dict(network().state_dict())
    update = build_update(before, trained(), num_examples=told)
    knowledge = Knowledge(model=network, input_shape=(1, 8, 8), value_range=([0.0], [1.0]))
    warn_of_update_ranks(network(), knowledge, [update])
    assert ("if clients count batches, say N with [app] num_examples" in caplog.text) == warns
    assert ("N is 4, but the update of '1.weight' has rank 32" in caplog.text) == warns


@pytest.mark.parametrize("told", [0, BATCHES])
def test_of_an_update_with_nan_or_without_n_nothing_is_said(told: int, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)
    after = trained()
    if told:
        after["1.weight"][0, 0] = torch.nan
    payload = Payload.from_dense(after, "weights")
    update = Update(round=1, client=0, before=dict(network().state_dict()), payload=payload, num_examples=told)
    knowledge = Knowledge(model=network, input_shape=(1, 8, 8), value_range=([0.0], [1.0]))
    warn_of_update_ranks(network(), knowledge, [update])
    assert caplog.text == ""


def test_counters_of_batches_count_as_no_rounding_of_weights(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(1)

    def with_counter() -> nn.Module:
        return network().append(nn.BatchNorm1d(10))

    before = dict(with_counter().state_dict())
    before["4.num_batches_tracked"] = torch.tensor(10**7)
    update = build_update(before, {**before, **trained()}, num_examples=BATCHES)
    knowledge = Knowledge(model=with_counter, input_shape=(1, 8, 8), value_range=([0.0], [1.0]))
    warn_of_update_ranks(with_counter(), knowledge, [update])
    assert "N is 4, but the update of '1.weight' has rank 32" in caplog.text
