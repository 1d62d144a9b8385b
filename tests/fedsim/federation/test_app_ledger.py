"""What is proved of an app's clients follows from the number of their training messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from clients.defenses.dp_sgd import DpSgd
from clients.defenses.top_k import TopK
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import ConfigError
from fedsim.federation.app_ledger import make_app_ledger, prove_by_messages
from fedsim.federation.experiment import Experiment
from fedsim.federation.resolve import resolve
from fedsim.interfaces.defense import Participation
from fedsim.interfaces.defense_checks import check_setting
from fedsim.privacy.ledger import spending_by_client
from fedsim.recording.header import FORMAT_VERSION, Header, Reply
from tests.support.experiments import make_tiny_config

NOISE = UpdateNoise(clip=0.5, noise_multiplier=4.0)


def make_header(number: int, *replies: Reply, failed: tuple[int, ...] = ()) -> Header:
    failures = dict.fromkeys(failed, "late")
    return Header(version=FORMAT_VERSION, round=number, broadcasts=["0"], replies=replies, failures=failures, config={})


def make_reply(client: int, **fields: object) -> Reply:
    return Reply(client=client, num_examples=3, broadcast=0, sha256="0", kind="weights", metrics={}, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [NOISE, UpdateNoise(noise_multiplier=2.0, noise="laplace")])
def test_noise_on_whole_updates_proves_by_the_number_of_messages(noise: UpdateNoise) -> None:
    expected = noise.guarantee(Participation(num_examples=7, batch_size=2, steps=9, rounds=3), 1e-5)
    assert prove_by_messages(noise, 3) == expected
    assert expected is not None


def test_what_depends_on_training_proves_nothing_here() -> None:
    assert prove_by_messages(DpSgd(noise_multiplier=1.0), 3) is None
    assert prove_by_messages(TopK(), 3) is None
    assert make_app_ledger([make_header(1, make_reply(0))], {"dp-sgd": DpSgd(noise_multiplier=1.0)}) == []


@dataclass(frozen=True, kw_only=True)
class LateNoise(UpdateNoise):
    """Acts from round 2 on."""

    def acts_in(self, number: int) -> bool:
        return number > 1


def test_nothing_is_proved_of_a_defense_that_lets_a_round_through() -> None:
    late = LateNoise(noise_multiplier=4.0)
    first, second = (make_header(number, make_reply(0)) for number in (1, 2))
    assert make_app_ledger([first, second], {"late": late}) == []
    assert len(make_app_ledger([second], {"late": late})) == 1
    with pytest.raises(ConfigError, match="LateNoise: it has a guarantee, and does not act in round 1"):
        check_setting(late, Experiment(resolve(make_tiny_config())).setting)


def test_each_message_counts_whether_or_not_it_was_answered_or_recorded() -> None:
    headers = [
        make_header(1, make_reply(0), make_reply(1), make_reply(1, message=2), failed=(2,)),
        make_header(2, make_reply(0, members=(0, 1)), failed=(1,)),
    ]
    rows = make_app_ledger(headers, {"noise": NOISE}, {0: 2, 1: 4, 2: 3})
    spending = spending_by_client(rows, "noise")
    assert {client: spent.rounds for client, spent in spending.items()} == {0: 2, 1: 4, 2: 3}
    for spent in spending.values():
        guarantee = prove_by_messages(NOISE, spent.rounds)
        assert guarantee is not None
        assert spent.epsilon == guarantee.epsilon
    assert [row["round"] for row in rows if row["client"] == 2] == [1, 2, 2]  # two that nobody recorded
