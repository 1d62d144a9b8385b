"""What an adversary is handed does not lead to the seed from which the truth follows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.auditing import audit
from fedsim.randomness import adversary_key, generator, seed_for


def test_the_seed_of_an_attack_is_not_that_of_a_key_of_the_runs_seed(
    tiny_config: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = []

    def note(*key: Any) -> Any:
        drawn = generator(*key)
        handed.append(drawn.initial_seed())
        return drawn

    monkeypatch.setattr(audit, "generator", note)
    adversary = {"victims": [0], "when": "at-end"}
    tables = tiny_config(federation={"rounds": 1}, adversary=adversary).model_dump(mode="json", exclude_none=True)
    tables["attack"] = [{"name": "label-counts"}]
    fedsim.run({key: value for key, value in tables.items() if value != []}, out=tmp_path / "run")
    (seed,) = handed
    assert seed not in {seed_for(guess, "attack", 1, 0, 0) for guess in range(1000)}
    assert seed == seed_for(adversary_key(3), "attack", 1, 0, 0)
    assert adversary_key(3) != adversary_key(4)
