"""Draw the pictures of gallery.md that commands write: `python docs/gallery_pictures.py`.

This takes a minute and needs no network. It runs examples/quickstart.toml in an empty folder and
calls the commands of the page on that run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.toml"
PICTURE_OF_COMMAND = {
    "data.png": "data.png",
    "exposure.png": "exposure/clients-*.png",
    "geometry.png": "run/geometry-cosines.png",
    "claims.png": "run/findings/sme/*.png",
}
"""Where, in the folder, a command writes each picture; of several, the first is taken."""


def main() -> None:
    """Call the commands, and keep what they draw."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(QUICKSTART)
        _call_fedsim(folder, "run", file, "--out", "run", "--set", "federation.engine=serial")
        _call_fedsim(folder, "geometry", "run")
        _call_fedsim(folder, "data", "digits", "--set", "partition.name=dirichlet", "--out", "data.png")
        _call_fedsim(folder, "expose", file, "--measure", "gradient-norm", "--out", "exposure")
        for name, pattern in PICTURE_OF_COMMAND.items():
            drawn = sorted(Path(folder).glob(pattern))
            if not drawn:
                raise SystemExit(f"{name}: no command drew {pattern}")
            shutil.copy(drawn[0], PICTURES / name)


def _call_fedsim(folder: str, *words: str) -> None:
    """Run one command quietly."""
    program = str(Path(sys.executable).with_name("fedsim"))
    subprocess.run([program, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
