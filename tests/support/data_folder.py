"""The folder with real data sets, which not every machine has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def find_data_folder(*names: str) -> Path:
    """Return the data folder if it holds `names`; skip the test if not."""
    if "FEDSIM_DATA" not in os.environ:
        pytest.skip("needs FEDSIM_DATA, a folder with real data sets")
    folder = Path(os.environ["FEDSIM_DATA"])
    for name in names:
        if not (folder / name).exists():
            pytest.skip(f"FEDSIM_DATA ({folder}) holds no {name}")
    return folder
