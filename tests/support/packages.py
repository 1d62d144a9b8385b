"""Packages of strangers, as pip would install them."""

from __future__ import annotations

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
