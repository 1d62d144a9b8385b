"""Answers of apps are noised, cut and rounded as their settings say, and N is sent as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedsim
from fedsim.base.errors import ConfigError


def ask(defense: fedsim.AnswerDefense, counts: list[int]) -> RecordDict:
    """Return the defended reply of a client to a query."""
    app = ClientApp(mods=[fedsim.answer_mod(defense, np.random.default_rng(0))])

    @app.query()
    def query(message: Message, context: Any) -> Message:
        arrays = ArrayRecord({"ages": Array(np.array(counts))})
        metrics = MetricRecord({"num-examples": 9, "total": 7.0})
        return Message(RecordDict({"a": arrays, "m": metrics}), reply_to=message)

    (reply,) = fedsim.InProcessGrid(app).send_and_receive([Message(RecordDict(), 2, "query")])
    assert not reply.has_error(), reply.error
    return reply.content


@pytest.mark.usefixtures("server_task")
@pytest.mark.parametrize(
    ("settings", "ages", "total"),
    [({"smallest_cell": 5.0}, [0, 12, 5], 7.0), ({"rounded_to": 5.0}, [5, 10, 5], 5.0)],
)
def test_cells_are_cut_and_rounded(settings: dict[str, float], ages: list[int], total: float) -> None:
    content = ask(fedsim.AnswerDefense(**settings), [3, 12, 5])
    assert content["a"]["ages"].numpy().tolist() == ages
    assert (content["m"]["total"], content["m"]["num-examples"]) == (total, 9)


@pytest.mark.usefixtures("server_task")
@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_noise_has_the_deviation_that_an_attack_is_told(noise: Any) -> None:
    defense = fedsim.AnswerDefense(noise=noise, scale=2.0)
    ages = ask(defense, [10] * 20_000)["a"]["ages"].numpy()
    assert ages.std() == pytest.approx(defense.standard_deviation, rel=0.03)


def test_noise_without_a_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="name both a distribution and a scale"):
        fedsim.AnswerDefense(noise="laplace")
