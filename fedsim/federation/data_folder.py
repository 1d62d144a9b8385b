"""Find the folders of data sets and of trained networks."""

from __future__ import annotations

import os
from pathlib import Path

from fedsim.base.errors import ConfigError, first_line


def find_data_folder() -> Path | None:
    """Return the folder named by FEDSIM_DATA, where data sets and weights are looked for."""
    path = os.environ.get("FEDSIM_DATA")
    try:
        return Path(path).expanduser() if path else None
    except RuntimeError as error:
        raise ConfigError(f"FEDSIM_DATA: {path}: {first_line(error)}; write the path out") from error


WEIGHTS_FOLDER = Path("$FEDSIM_DATA/weights")
"""Where trained networks are looked for, as texts name it where no data folder is set."""


def find_weights_folder() -> Path | None:
    """Return the folder in which trained networks are looked for, such as those of LPIPS."""
    folder = find_data_folder()
    return None if folder is None else folder / WEIGHTS_FOLDER.name
