"""What tests of several families of attacks share."""

from __future__ import annotations

import pytest
import torch

from fedsim.recording import payloads


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks compute in float64, so that equalities and slopes show to many digits."""
    monkeypatch.setattr(payloads, "WORKING_TYPE", torch.float64)
