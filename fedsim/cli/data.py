"""Command `fedsim data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.base.errors import ConfigError
from fedsim.cli.options import DataDir, Overrides, Trust, console


def show_data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set, or an experiment file (*.toml).")],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="The picture, a PNG; runs/data-NAME.png by default.")] = None,
    data_dir: DataDir = None,
    download: Annotated[bool, typer.Option("--download", help="Fetch it into the data folder first.")] = False,
    trust: Trust = False,
) -> None:
    """Describe a data set and its partition among clients, and draw a picture of both."""
    from fedsim.report.partition_picture import save_partition_picture
    from fedsim.report.partition_summary import client_table, dataset_table, load_partition_summary

    if out is not None and out.suffix != ".png":
        raise ConfigError(f"--out {out}: the picture is a PNG; name a file that ends in .png")
    summary = load_partition_summary(name, overrides or [], fetch=download, trust=trust)
    console.print(dataset_table(summary))
    console.print(client_table(summary))
    path = out or Path("runs") / f"data-{Path(name).stem}.png"
    save_partition_picture(path, summary)
    console.print(f"picture: {path}", soft_wrap=True, markup=False)
