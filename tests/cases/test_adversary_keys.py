"""What an adversary is handed does not lead to the seed from which the truth follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedsim
from fedsim.audit import targets
from fedsim.base.randomness import adversary_key, derive_seed, generator
from tests.support.experiments import make_tiny_config


def test_the_seed_of_an_attack_is_not_that_of_a_key_of_the_runs_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed = []

    def note(*key: Any) -> Any:
        handed.append(key)
        return generator(*key)

    monkeypatch.setattr(targets, "generator", note)
    adversary = {"victims": [0], "when": "at-end"}
    tables = make_tiny_config(federation={"rounds": 1}, adversary=adversary).model_dump(mode="json", exclude_none=True)
    tables["attack"] = [{"name": "label-counts"}]
    fedsim.run({key: value for key, value in tables.items() if value != []}, out=tmp_path / "run")
    ((first, *others),) = handed
    assert first == adversary_key(3) != adversary_key(4)
    assert derive_seed(first, *others) not in {derive_seed(guess, *others) for guess in range(1000)}
