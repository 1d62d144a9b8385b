"""Rows of `scores.csv`, made by hand."""

from __future__ import annotations

import math
from typing import Any


def make_score(value: float | str, **keys: Any) -> dict[str, Any]:
    """Return the PSNR of what SME claims of victim 0 beside a floor of 10, with keys replaced or added."""
    return {
        "attack": "sme",
        "victim": 0,
        "round": 1,
        "metric": "psnr",
        "value": value,
        "floor": 10.0,
        "floor_guess": "noise",
        "nearest_public": math.nan,
        "ceiling": "",
        "higher_is_better": True,
        "examples": 10,
        "missing": "",
        "instrument": "",
        "variant": "0a1b",
        "settings": "{}",
        "granted": "",
    } | keys
