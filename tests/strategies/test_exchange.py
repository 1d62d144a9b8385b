"""What an exchange says of its messages stays true when another message joins it."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedsim.federation.engines.arrays import make_record
from strategies.exchange import Exchange

pytestmark = pytest.mark.usefixtures("server_task")


def single_message(node: int, epochs: int) -> Exchange:
    config = ConfigRecord({"server-round": 1, "epochs": epochs})
    content = RecordDict({"arrays": make_record({"w": torch.zeros(2)}), "config": config})
    return Exchange([Message(content, dst_node_id=node, message_type="train")])


def test_a_fact_is_common_until_a_client_is_sent_another() -> None:
    exchange = single_message(1, epochs=1)
    facts, differing = exchange.facts
    assert (facts["epochs"], differing, exchange.fits_in_updates) == (1, "", True)

    assert exchange.absorb(single_message(2, epochs=1))
    assert exchange.facts == (facts, "")

    assert exchange.absorb(single_message(3, epochs=2))
    facts, differing = exchange.facts
    assert (differing, exchange.fits_in_updates) == ("epochs", False)
    assert "epochs" not in facts
