"""Garbage is collected less often during a federation, and as before after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fedsim.federation.engines.gc_pause import exclude_existing_objects


@pytest.fixture(autouse=True)
def restore_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # The tests themselves have frozen objects, so that the block would do nothing.
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize(("threshold", "within"), [(700, 20_000), (50_000, 50_000), (0, 0)])
def test_collection_is_rare_in_the_block_and_as_before_after_it(threshold: int, within: int) -> None:
    gc.set_threshold(threshold, 10, 10)
    with exclude_existing_objects():
        assert gc.get_threshold()[0] == within
    assert gc.get_threshold() == (threshold, 10, 10)
