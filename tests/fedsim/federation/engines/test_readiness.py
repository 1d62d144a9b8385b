"""Before the first round: who is missing, who differs, who cannot work."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

import fedsim.federation.engines.readiness
from clients.app import app as client_app
from fedsim.base.errors import RunError
from fedsim.federation.config import Config
from fedsim.federation.engines.readiness import (
    READY,
    TROUBLE,
    check_nodes,
    explain_difference,
    host_versions,
    summarise_failure,
    wait_for_nodes,
)
from fedsim.federation.engines.serial import InProcessGrid
from tests.support.experiments import make_tiny_config

SIMULATION = ConfigRecord({"experiment": "{}"})


class Arriving(InProcessGrid):
    """Nodes connect one poll after the other, as `polls` says; the last answer stays."""

    def __init__(self, *polls: list[int]) -> None:
        super().__init__(ClientApp(), 0)
        self.polls = list(polls)
        self.asked = 0

    def get_node_ids(self) -> Iterable[int]:
        self.asked += 1
        return self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.readiness, "_TO_CONNECT", 0.3)
    monkeypatch.setattr(fedsim.federation.engines.readiness, "_TO_ANSWER", 0.3)


def assert_one_sentence(error: RunError) -> None:
    assert "\n" not in str(error)
    assert error.exit_code == 1


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("<class 'builtins.ValueError'>:<'no such\n  thing'>", "ValueError: no such"),
        ("<class 'ValueError'>:<''>", "ValueError: no reason given"),
        ("<class 'ray.exceptions.ActorDiedError'>:<'The actor died\n\tpid 7'>", "ActorDiedError: The actor died"),
        (
            "<class 'ray.exceptions.RayTaskError(ClientAppException)'>:<'ray::ClientAppActor.run() (pid=7)\n"
            '  File "x.py", line 1\nClientAppException: \nException OSError occurred. Message: no file here\n\'>',
            "Exception OSError occurred. Message: no file here",
        ),
        ("two\nlines", "two"),
        (" \n", "no reason given"),
    ],
)
def test_why_a_node_failed_is_one_line_without_wrapping(reason: str, line: str) -> None:
    assert summarise_failure(reason) == line


# Waiting.


def test_it_waits_until_as_many_have_come_as_were_announced() -> None:
    grid = Arriving([], [7], [7], [7], [3, 7])
    assert wait_for_nodes(grid, 2) == [3, 7]
    assert grid.asked == 6, "once more, to see that nobody else comes"


def test_it_takes_all_who_come_and_waits_until_no_more_do() -> None:
    grid = Arriving([], [4], [4, 2], [4, 2, 8], [2, 4, 8], [1])
    assert wait_for_nodes(grid, 1) == [2, 4, 8]


def test_too_few_supernodes_are_counted(impatient: None) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=r"^1 of 3 nodes connected within 0 s; start the others") as caught:
        wait_for_nodes(Arriving([], [5]), 3)
    assert 0.2 < time.monotonic() - started < 1
    assert "federation.supernodes" in str(caught.value)
    assert_one_sentence(caught.value)


def test_no_node_at_all_is_said(impatient: None) -> None:
    with pytest.raises(RunError, match="0 of 1 nodes connected within 0 s") as caught:
        wait_for_nodes(Arriving([]), 1)
    assert_one_sentence(caught.value)


def test_a_node_that_left_again_does_not_count(impatient: None) -> None:
    with pytest.raises(RunError, match="1 of 2 nodes connected"):
        wait_for_nodes(Arriving([1], [2], [1]), 2)


# Asking.


Answer = Callable[[Message], Message]


def asked(*answers: Answer | None) -> tuple[InProcessGrid, list[int]]:
    """A grid whose k-th node gives the k-th answer, or none."""
    app = ClientApp()

    @app.query(READY.split(".")[1])
    def ready(message: Message, context: Context) -> Message:
        answer = answers[int(context.node_config["partition-id"])]
        assert answer is not None
        return answer(message)

    class Partly(InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            return super().push_messages([m for m in messages if answers[nodes.index(m.metadata.dst_node_id)]])

    grid = Partly(app, len(answers))
    nodes = list(grid.get_node_ids())
    return grid, nodes


def says(**more: Any) -> Answer:
    content = ConfigRecord({"host": "there", **host_versions(), **more})
    return lambda message: Message(RecordDict({"node": content}), reply_to=message)


def test_nodes_that_are_ready_are_no_trouble() -> None:
    grid, nodes = asked(says(), says())
    check_nodes(grid, nodes, SIMULATION)


def test_every_node_is_asked_and_told_what_is_to_be_simulated() -> None:
    seen = []

    def answer(message: Message) -> Message:
        seen.append((message.metadata.dst_node_id, dict(message.content.config_records["simulation"])))
        return says()(message)

    grid, nodes = asked(answer, answer, answer)
    check_nodes(grid, nodes[:2], SIMULATION)
    assert seen == [(node, dict(SIMULATION)) for node in nodes[:2]]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (says(**{TROUBLE: "mnist: not found"}), "a node on 'there' cannot take part: mnist: not found"),
        (says(torch="0.4.1"), "a node on 'there' cannot take part: it has torch 0.4.1, the server has "),
        (says(**{TROUBLE: "no data", "torch": "0.4.1"}), "a node on 'there' cannot take part: it has torch 0.4.1"),
        (
            lambda message: Message(Error(code=7, reason="no such function"), reply_to=message),
            "a node cannot take part: no such function",
        ),
    ],
    ids=["trouble", "version", "version before trouble", "error"],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_node_that_cannot_take_part_says_why(answer: Answer, sentence: str, place: int) -> None:
    grid, nodes = asked(*([answer, says()] if place == 0 else [says(), answer]))
    with pytest.raises(RunError) as caught:
        check_nodes(grid, nodes, SIMULATION)
    assert str(caught.value).startswith(sentence)
    assert_one_sentence(caught.value)


def test_silence_is_counted(impatient: None) -> None:
    grid, nodes = asked(says(), None, None)
    with pytest.raises(RunError, match=r"^2 of 3 nodes did not answer within 0 s; restart them$"):
        check_nodes(grid, nodes, SIMULATION)


@pytest.mark.parametrize("content", [RecordDict(), RecordDict({"node": ConfigRecord()})])
def test_a_node_that_answers_something_else_is_one_sentence(content: RecordDict) -> None:
    """Another app listens there, or another version of this one."""
    grid, nodes = asked(lambda message: Message(content, reply_to=message))
    with pytest.raises(RunError, match=r"a node .*cannot take part") as caught:
        check_nodes(grid, nodes, SIMULATION)
    assert_one_sentence(caught.value)


def test_the_clientapp_itself_is_ready_or_says_why_not() -> None:
    grid = InProcessGrid(client_app, nodes=2)
    nodes = list(grid.get_node_ids())

    def check(config: Config) -> None:
        check_nodes(grid, nodes, ConfigRecord({"experiment": config.model_dump_json()}))

    check(make_tiny_config())
    with pytest.raises(RunError, match=r"a node on '.*' cannot take part: .*no-such-data"):
        check(make_tiny_config(data={"name": "no-such-data"}))


# Comparing.


def test_the_same_versions_do_not_differ() -> None:
    assert explain_difference(host_versions()) is None
    assert explain_difference({**host_versions(), "host": "there", "numpy": "1.0"}) is None


@pytest.mark.parametrize("name", ["python", "fedsim-curious", "flwr", "torch"])
def test_each_version_that_differs_is_named_with_both(name: str) -> None:
    sentence = explain_difference({**host_versions(), name: "0.0.1"})
    assert sentence is not None
    assert f"it has {name} 0.0.1, the server has {host_versions()[name]}; install the same versions" in sentence


def test_a_version_that_is_not_said_differs() -> None:
    there = {name: text for name, text in host_versions().items() if name != "torch"}
    assert "torch None" in str(explain_difference(there))


def test_the_versions_are_those_that_run() -> None:
    import torch

    found = host_versions()
    assert platform.python_version().startswith(found["python"] + ".")
    assert torch.__version__.startswith(found["torch"].split("+")[0])
    assert set(found) == {"python", "fedsim-curious", "flwr", "torch"}
