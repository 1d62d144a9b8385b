"""What an exchange says of its messages stays true when another message joins it."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedsim.federation.engines.arrays import make_record
from fedsim.recording.wire_format import Update
from strategies.exchange import Exchange
from strategies.message_content import MessageContent

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


def test_a_bool_among_the_metrics_is_no_number_of_an_update() -> None:
    """Flower's legacy layer sends it; the recording of an update would hold 1, and who reads messages leaves it out."""
    exchange = single_message(1, epochs=1)
    (asked,) = exchange.server_messages
    metrics = ConfigRecord({"converged": True, "train_loss": 0.5})
    content = MessageContent.copy_of(
        RecordDict({"arrays": make_record({"w": torch.ones(2)}), "fitres.metrics": metrics})
    )
    update = exchange.update(1, asked, 0, content, {})
    assert isinstance(update, Update)
    assert update.metrics == {"train_loss": 0.5}
    assert not content.has_only_numbers  # so that it is recorded among the messages
