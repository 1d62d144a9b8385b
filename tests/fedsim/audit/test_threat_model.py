"""What the server sent along in the attacked round is what an attack gets of the protocol."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.threat_model import apply_headers, facts_in_headers, grant_knowledge
from fedsim.base.errors import AttackError, ConfigError, FedsimError
from fedsim.federation.adversary_tables import AdversaryTable
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.attack import Knowledge
from fedsim.recording.header import DIFFERS_BY_CLIENT, Header

DECLARED = frozenset({"learning_rate", "local_epochs", "local_steps", "batch_size", "optimizer", "momentum"})
OF_THE_FILE = Knowledge(learning_rate=0.1, local_epochs=2, batch_size=8, optimizer="sgd", momentum=0.0)


def header(number: int = 1, **config: Any) -> Header:
    said = {key.replace("_", "-"): value for key, value in config.items()}
    return Header(version=1, round=number, broadcasts=[], replies=[], failures={}, config=said)


def adversary(**knowledge: Any) -> AdversaryTable:
    return validate_tables(AdversaryTable, {"knowledge": knowledge}, "a.toml")


def known(*headers: Header, declared: frozenset[str] = DECLARED, **knowledge: Any) -> dict[str, Any]:
    found = apply_headers(OF_THE_FILE, adversary(**knowledge), headers, declared)
    return {name: getattr(found, name) for name in sorted(DECLARED) if getattr(found, name) is not None}


SAME = {"batch_size": 8, "learning_rate": 0.1, "local_epochs": 2, "momentum": 0.0, "optimizer": "sgd"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SAME),
        ({"learning_rate": 0.05, "momentum": 0.9}, SAME | {"learning_rate": 0.05, "momentum": 0.9}),
        ({"lr": 0.01, "optimizer": "Adam"}, SAME | {"learning_rate": 0.01, "optimizer": "adam"}),
        (
            {"local_steps": 5},
            {"batch_size": 8, "learning_rate": 0.1, "local_steps": 5, "momentum": 0.0, "optimizer": "sgd"},
        ),
        ({"local_steps": 1, "sends": "gradient"}, SAME | {"local_steps": 1}),
    ],
)
def test_the_header_goes_before_the_file(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert known(header(**config)) == expected


def test_a_fact_that_clients_were_not_sent_alike_is_not_taken_from_the_file() -> None:
    sent = header(momentum=0.9)
    sent = replace(sent, config={**sent.config, DIFFERS_BY_CLIENT: "learning-rate, whatever"})
    with pytest.raises(AttackError) as error:
        known(sent)
    assert str(error.value) == (
        "adversary.knowledge.learning_rate: in round 1 the server did not send all clients the same value, and the "
        "recording does not say which client got which; set the victim's, or withhold it (false)"
    )
    assert known(sent, declared=frozenset({"momentum"})) == SAME | {"momentum": 0.9}
    assert known(sent, learning_rate=False)["momentum"] == 0.9
    assert known(sent, learning_rate=0.1)["learning_rate"] == 0.1


def test_what_is_withheld_or_not_declared_is_not_taken_from_the_header() -> None:
    sent = header(learning_rate=0.05, momentum=0.9)
    assert known(sent, learning_rate=False)["learning_rate"] == 0.1  # that `grant` leaves out
    assert known(sent, declared=frozenset({"momentum"})) == SAME | {"momentum": 0.9}


def test_rounds_that_agree_are_one_fact_and_others_are_named() -> None:
    assert known(header(1, learning_rate=0.05), header(2, learning_rate=0.05))["learning_rate"] == 0.05
    sentence = (
        "adversary.knowledge.learning_rate: the server sent 0.05 in round 1, 0.02 in round 4, and this attack reads "
        "one value for all rounds; attack rounds that agree (adversary.rounds), or withhold it (false)"
    )
    with pytest.raises(AttackError, match=f"^{re.escape(sentence)}$"):
        known(header(1, learning_rate=0.05), header(4, learning_rate=0.02))
    assert known(header(1, learning_rate=0.05), header(4, learning_rate=0.02), declared=frozenset()) == SAME


def test_a_value_that_is_written_out_and_contradicts_the_header_is_refused() -> None:
    sentence = (
        "adversary.knowledge.learning_rate: 0.5 is written out, but the server sent 0.05 in round 3, as the recording "
        "says; leave the key out"
    )
    table = adversary(learning_rate=0.5)
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        apply_headers(
            grant_knowledge(table, ForeignRecording({}), Path()), table, [header(3, learning_rate=0.05)], DECLARED
        )
    agreed = apply_headers(
        grant_knowledge(table, ForeignRecording({}), Path()), table, [header(3, learning_rate=0.5)], DECLARED
    )
    assert agreed.learning_rate == 0.5


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"learning_rate": "fast"}, "learning-rate = 'fast', expected a finite value above 0"),
        ({"learning_rate": float("nan")}, "learning-rate = nan, expected a finite value above 0"),
        ({"learning_rate": True}, "learning-rate = True, expected a finite value above 0"),
        ({"local_epochs": 1.5}, "local-epochs = 1.5, expected at least 1"),
        ({"batch_size": 0}, "batch-size = 0, expected at least 1"),
        ({"optimizer": 3}, "optimizer = 3, expected a name, as sgd or adam"),
        ({"momentum": -1.0}, "momentum = -1.0, expected a finite value of at least 0"),
    ],
)
def test_a_header_that_says_nonsense_is_one_sentence(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(
        FedsimError, match=f"^round 1: the server sent {re.escape(sentence)}; withhold it with"
    ) as caught:
        known(header(**config))
    assert "\n" not in str(caught.value)


def test_a_recording_made_elsewhere_grants_what_its_headers_say() -> None:
    table = adversary()
    assert facts_in_headers([header(lr=0.01, whatever=1)]) == ["learning_rate"]
    assert (
        apply_headers(
            grant_knowledge(table, ForeignRecording({}), Path()), table, [header(lr=0.01)], DECLARED
        ).learning_rate
        == 0.01
    )
