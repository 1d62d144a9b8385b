"""Command `fedsim geometry`."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Annotated

import typer
from rich.markup import escape

from fedsim.base.errors import ConfigError, list_rounds, number_of
from fedsim.cli.options import DataDir, Key, RunPath, Trust, console, new_table


def geometry(
    run: RunPath,
    rounds: Annotated[list[int] | None, typer.Option("--round", help="Rounds; the first recorded by default.")] = None,
    data_dir: DataDir = None,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Analyse how well one gradient can match each recorded update (SME, Sect. 5.1)."""
    from fedsim.base.files import write_bytes
    from fedsim.federation.experiment import Experiment
    from fedsim.federation.open_run import OpenRun
    from fedsim.report.geometry import draw_geometries, geometries_of_updates

    folder = OpenRun(run)
    folder.check_exists()
    with folder.hold_lock():
        folder.check_key()
        if (config := folder.read_experiment(trust=trust)) is None:
            raise ConfigError(f"{run}: was recorded elsewhere, so its clients' data are unknown; name a run of fedsim")
        transcript = folder.recording
        for number in rounds or ():
            if number not in transcript.rounds:
                raise ConfigError(f"geometry: round {number} is not recorded; recorded: {transcript.rounds}")
        geometries = list(geometries_of_updates(Experiment(config), transcript, rounds or transcript.rounds[:1]))
        rows = [{"round": number, "client": client, **item.summary} for number, client, item in geometries]
        folder.write_table(folder.geometry, list(rows[0]), rows)
        # Print the statistics over all updates, and draw them.
        named_rounds = list_rounds(sorted({number for number, _, _ in geometries}))
        title = f"{number_of(len(rows), 'update')}, {named_rounds} of {run}"
        table = new_table("", "mean", "deviation", "lowest", "highest", title=escape(title))
        for name in geometries[0][2].summary:
            values = [float(row[name]) for row in rows]
            statistics = fmean(values), pstdev(values), min(values), max(values)
            table.add_row(name, *(f"{value:.3f}" for value in statistics))
        console.print(table)
        for name, picture in draw_geometries([item for _, _, item in geometries]).items():
            path = run / f"geometry-{name}.png"
            write_bytes(path, picture)
            console.print(f"picture: {path}", soft_wrap=True, markup=False)
