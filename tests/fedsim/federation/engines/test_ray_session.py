"""What ends the start of Ray ends the command as an interrupt does."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import fedsim.federation.engines.ray_session

pytest.importorskip("ray")


def test_sigterm_while_ray_starts_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handler, which it sets before it has started, calls sys.exit."""

    def exit_as_ray_does(*arguments: Any) -> None:
        raise SystemExit(signal.SIGTERM)

    monkeypatch.setattr(fedsim.federation.engines.ray_session, "_connect", exit_as_ray_does)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), fedsim.federation.engines.ray_session.ray_session(None, 1):
        pass
    assert signal.getsignal(signal.SIGTERM) is handler


def test_sigterm_after_ray_was_started_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedsim.federation.engines.ray_session, "_connect", lambda *arguments: None)
    monkeypatch.setattr(
        fedsim.federation.engines.ray_session, "compare_hosts", lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    monkeypatch.setattr(fedsim.federation.engines.ray_session, "check_port", lambda *arguments: None)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), fedsim.federation.engines.ray_session.ray_session("127.0.0.1:1", 1):
        pass
    assert signal.getsignal(signal.SIGTERM) is handler
