"""How far work is: what is told, how it looks in 80 columns, and how seldom elsewhere."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from rich.console import Console

from fedsim.api.logs import OnceFilter
from fedsim.base import progress
from fedsim.base.progress import ROUNDS, listen_to_progress, report_progress, track
from fedsim.cli import screen
from fedsim.cli.screen import PhaseDisplay, RoundFilter, VictimFilter, phase_bars
from fedsim.federation.engines.cohort import CohortGrid
from fedsim.federation.engines.deployed import ServerAppRelay
from fedsim.federation.engines.serial import InProcessGrid


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(screen, "time", clock)
    return clock


@pytest.fixture
def plain(clock: Clock) -> Iterator[io.StringIO]:
    """What is printed where there is no terminal."""
    out = io.StringIO()
    with listen_to_progress(PhaseDisplay(Console(file=out, width=80)).show_progress):
        yield out


def test_without_a_display_nothing_is_made_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert list(track("abc", "letters", 3)) == ["a", "b", "c"]
    assert caplog.records == []


def test_each_listener_hears_all_threads_until_it_ends() -> None:
    """Flower runs a ServerApp in a thread of its own."""
    first: list[object] = []
    second: list[object] = []
    with listen_to_progress(lambda *step: first.append(step)):
        with listen_to_progress(lambda *step: second.append(step)), listen_to_progress(None):
            thread = threading.Thread(target=report_progress, args=("rounds: 1 of 2", 1, 3))
            thread.start()
            thread.join()
        report_progress("rounds", 2, 3)
    report_progress("rounds", 3, 3)
    assert first == [("rounds: 1 of 2", 1, 3), ("rounds", 2, 3)]
    assert second == first[:1]


def test_an_error_of_a_listener_ends_the_work() -> None:
    """As a program stops a run."""

    def stop(*step: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listen_to_progress(stop):
        report_progress("rounds", 0, 3)
    report_progress("rounds", 0, 3)


def test_a_long_round_is_not_silent(clock: Clock, plain: io.StringIO) -> None:
    """539 clients of 0.15 s each, without a terminal: a line for each tenth, with the time left."""
    for _ in track(range(539), "clients", 539):
        clock.now += 0.15
    lines = plain.getvalue().splitlines()
    assert 8 <= len(lines) <= 10
    assert lines[0] == "clients: 54 of 539, about 1:13 left"


def test_fast_rounds_print_few_lines_and_the_last(clock: Clock) -> None:
    shown, filter = [], RoundFilter()
    for number in range(1, 201):
        clock.now += 0.125
        record = logging.LogRecord(ROUNDS, logging.INFO, "", 0, "round %d/200: 10 returned", (number,), None)
        shown += [number] if filter.filter(record) else []
    assert shown == [1, 41, 81, 121, 161, 200]
    assert filter.filter(logging.LogRecord("fedsim.audit.audit", logging.INFO, "", 0, "something else", (), None))


def test_what_is_said_of_each_client_is_shown_once() -> None:
    def make_record(text: str, level: int = logging.WARNING) -> logging.LogRecord:
        return logging.LogRecord("fedsim.adversaries", level, "", 0, text, (), None)

    once = VictimFilter()
    lines = [
        f"seed={seed}: spear-ica, round 1, client {client}: gap 1.{client}" for seed in (1, 2) for client in (0, 5)
    ]
    assert [once.filter(make_record(line)) for line in lines] == [True, False, False, False]
    assert once.filter(make_record("sme, round 1, client 0: gap 1.0"))  # another attack
    assert all(once.filter(make_record("round 3 was not attacked")) for _ in range(2))  # of no client
    assert all(once.filter(make_record("client 3: done", logging.INFO)) for _ in range(2))


def test_of_the_first_few_steps_no_time_left_is_told(clock: Clock) -> None:
    out = io.StringIO()
    phases = PhaseDisplay(Console(file=out, width=80))
    phases.show_progress("sme", 0, 1)
    clock.now += 30
    phases.show_part("sme", "update 1", 1, 1000)
    assert out.getvalue() == "sme: 0 of 1, iteration 1 of 1000\n"


def test_without_a_terminal_a_slow_attack_tells_its_iterations_twice_a_minute(clock: Clock) -> None:
    out = io.StringIO()
    phases = PhaseDisplay(Console(file=out, width=80))
    phases.show_progress("sme", 0, 1)
    for iteration in range(1, 101):
        clock.now += 2
        phases.show_part("sme", "update 1", iteration, 2000)
    lines = out.getvalue().splitlines()
    assert lines[0] == "sme: 0 of 1, iteration 15 of 2000"
    assert len(lines) == 6


def test_a_fast_attack_is_not_a_flood_of_lines(clock: Clock) -> None:
    out = io.StringIO()
    phases = PhaseDisplay(Console(file=out, width=80))
    for _ in range(10):
        phases.show_progress("sme", 0, 1)
        for iteration in range(1, 11):
            clock.now += 0.1
            phases.show_part("sme", "update 1", iteration, 10)
        phases.show_progress("sme", 1, 1)
    assert out.getvalue() == "sme: 0 of 1, iteration 1 of 10, about 0:01 left\n"


def test_an_attack_on_many_updates_is_one_phase_with_parts(clock: Clock) -> None:
    out = io.StringIO()
    phases = PhaseDisplay(Console(file=out, width=80))
    for done in (0, 1):
        phases.show_progress("sme", done, 4)
    clock.now += 30
    phases.show_part("sme", "update 2", 50, 100)
    assert out.getvalue() == "sme: 1 of 4, iteration 50 of 100, about 0:50 left\n"
    clock.now += 30
    phases.show_progress("sme", 4, 4)
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize("what", ["clients", "inverting-gradients with a label that is long, lr=0.1, of [somebody]"])
def test_the_time_left_is_whole_in_80_columns(what: str, clock: Clock) -> None:
    bars = phase_bars(Console(file=io.StringIO(), width=80, force_terminal=True))
    bars.get_time = clock.monotonic
    task = bars.add_task(what, total=10_000, done=0)
    for done in (1000, 2000, 3000):
        clock.now += 60
        bars.update(task, completed=done + 0.7, done=done)
    screen = Console(file=io.StringIO(), width=80)
    screen.print(bars.get_renderable())
    (line,) = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert line.rstrip().endswith("0:07:00 left")
    assert "3000/10000" in line  # not yet 3001, though that is nearly done
    assert what[:12] in line
    assert len(line) <= 80


@pytest.mark.parametrize("name", ["fedsim.data.cifar", "fedsim.data.partitions.flower"])
def test_a_notice_about_data_appears_once(name: str) -> None:
    """Every worker says it, too."""
    once = OnceFilter()
    notice = logging.LogRecord(name, logging.INFO, "", 0, "500 of 50000 are there", (), None)
    assert [once.filter(notice) for _ in range(5)] == [True, False, False, False, False]


def test_steps_of_a_deployed_server_arrive_once_and_whole(tmp_path: Path) -> None:
    relay, file, told = ServerAppRelay(tmp_path), tmp_path / "deployment" / "progress.jsonl", []
    file.parent.mkdir()
    with listen_to_progress(lambda *step: told.append(step)):
        relay()
        file.write_text('["clients: 1 of 2", 3, 12]\n["cli["clients", 4, 12]\n["clients"')
        relay()
        with file.open("a") as more:
            more.write(", 5, 12]\n")
        relay()
        relay()
    assert told == [("clients: 1 of 2", 3, 12), ("clients", 5, 12)]


def test_a_large_round_answers_in_steps() -> None:
    """One node had all clients in one message, and nothing was heard until it was done with the last of them."""

    def lengths(clients: int, steps: int, together: int = 1) -> list[int]:
        physical = InProcessGrid(ClientApp())
        grid = CohortGrid(physical, clients, ConfigRecord(), [1], min_messages=steps, group_size=together)
        content = RecordDict({"arrays": ArrayRecord()})
        return [len(order) for order in grid._split([Message(content, client, "train") for client in range(clients)])]

    assert lengths(539, 0) == [539]
    assert lengths(539, 32) == [17] * 31 + [12]
    assert lengths(539, 32, together=64) == [64] * 8 + [27]
    assert lengths(10, 32) == [10]
