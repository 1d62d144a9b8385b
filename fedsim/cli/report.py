"""Command `fedsim report`."""

from __future__ import annotations

from fedsim.cli.options import DataDir, Key, RunPath, Trust, finish_with_report


def report(run: RunPath, data_dir: DataDir = None, trust: Trust = False, key: Key = None) -> None:
    """Write report.html again from the files of a run folder."""
    from fedsim.api import pipeline
    from fedsim.federation.open_run import OpenRun

    finish_with_report(pipeline.report(OpenRun(run), trust=trust))
