"""Warnings of attacks: each is logged, and kept with the victim that the attack works on."""

from __future__ import annotations

import threading

import pytest

from fedsim.audit.job_log import JobClock, JobLog
from fedsim.interfaces.attack import warn


def test_a_warning_is_logged_and_kept_with_the_job_at_work(caplog: pytest.LogCaptureFixture) -> None:
    """Of several victims whose attacks take turns, from any thread, and each sentence once."""
    clock = JobClock()
    first, second = JobLog(clock), JobLog(clock)
    with first.record():
        warn("client 1: 5 %")
        with second.record():  # on behalf of another victim
            warn("client 2")
        warn("client 1: 5 %")
    with second.record():
        thread = threading.Thread(target=warn, args=("client 2, in a thread",))
        thread.start()
        thread.join()
    warn("of no victim")
    assert first.warnings == ["client 1: 5 %"]
    assert second.warnings == ["client 2", "client 2, in a thread"]
    assert caplog.messages == ["client 1: 5 %", "client 2", "client 1: 5 %", "client 2, in a thread", "of no victim"]
    assert {(record.name, record.levelname) for record in caplog.records} == {("fedsim.adversaries", "WARNING")}


def test_an_attack_that_fails_leaves_no_ear_behind() -> None:
    log = JobLog(JobClock())
    with pytest.raises(ZeroDivisionError), log.record():
        raise ZeroDivisionError
    warn("later")
    assert log.warnings == []
