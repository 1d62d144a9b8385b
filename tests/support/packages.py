"""Packages of strangers, as pip would install them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def write_package(site: Path, name: str, code: str, entries: Mapping[str, Mapping[str, str]]) -> None:
    """Write a package of one module into `site`; it is installed where that is on Python's path.

    Args:
        site: folder of installed packages.
        name: of the package and of its module.
        code: of the module.
        entries: by group, such as `metrics`, and name the attribute of the module.
    """
    about = site / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, attributes in entries.items():
        lines.append(f"[fedsim.{group}]")
        lines += [f"{entry} = {name}:{attribute}" for entry, attribute in attributes.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    (site / f"{name}.py").write_text(code)


def run_fedsim(work: Path, *words: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, beside the packages in its folder `site` where they are installed."""
    paths = [*([str(work / "site")] if installed else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [str(Path(sys.executable).with_name("fedsim")), *words],
        cwd=work, capture_output=True, text=True, check=False, timeout=200,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"},
    )  # fmt: skip
