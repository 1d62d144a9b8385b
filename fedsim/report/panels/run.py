"""Panel of what was run."""

from __future__ import annotations

from contextlib import suppress
from statistics import fmean
from typing import Any

from markupsafe import Markup

from fedsim.base.errors import FedsimError
from fedsim.federation.run_folder import RunFolder, read_rows
from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.partition_table import SharingTable, sharing_table
from fedsim.report.reported_run import ReportedRun
from fedsim.report.run_facts import defense_promises, run_facts


class RunPanel(Panel):
    """Say which data, model and training were run, what defenses promise, and who holds what."""

    title = "What was run"
    link = "The run"
    order = 100

    def render(self, run: ReportedRun) -> Markup:
        """Return the facts term by term, promises, shares of the data, and the geometry of updates."""
        return render_fragment(
            "run.html.j2",
            facts=run_facts(run) | {"Integrity": run.integrity},
            promises=defense_promises(run),
            sharing=_sharing(run),
            geometry=_geometry(run.folder),
        )


def _sharing(run: ReportedRun) -> SharingTable | None:
    """Return the partition of the data, with the attacked clients marked; None if it is unknown."""
    if run.experiment is None:
        return None
    attacked = {int(str(finding.about["victim"])) for finding in run.findings}
    with suppress(FedsimError):  # the data set is missing, which a note says already
        return sharing_table(run.experiment, attacked)
    return None


def _geometry(folder: RunFolder) -> dict[str, Any] | None:
    """Summarise what `fedsim geometry` wrote; None if it did not run."""
    rows = read_rows(folder.geometry, ("round", "client"))
    if not rows:
        return None
    statistics = []
    for name in rows[0]:
        if name not in ("round", "client"):
            values = [float(row[name]) for row in rows]
            statistics.append((name, (fmean(values), min(values), max(values))))
    return {"count": len(rows), "rows": statistics}
