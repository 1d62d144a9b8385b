"""Panel of how to make the page again, and what to cite."""

from __future__ import annotations

import json
from contextlib import suppress

from markupsafe import Markup

from fedsim.base.errors import FedsimError
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import RunFolder
from fedsim.interfaces.panel import Panel
from fedsim.report.citations import bibtex, papers
from fedsim.report.html import render_fragment
from fedsim.report.reported_run import ReportedRun
from fedsim.report.reproduction import reproduction_of


class ReproductionPanel(Panel):
    """Offer the files that reproduce the page, say what else they need, and what to cite."""

    title = "How to reproduce this page"
    link = "Reproduce"
    order = 130

    def render(self, run: ReportedRun) -> Markup:
        """Return the files, their commands, hashes of what they make, and a bibliography."""
        reproduction = reproduction_of(run)
        cited_papers = papers(run.config, run.attacks, recorded=bool(run.recording.headers))
        return render_fragment(
            "reproduction.html.j2",
            reproduction=reproduction,
            identity=_identity(run, reproduction.hash),
            recording=run.recording,
            has_experiment=run.experiment is not None,
            papers=cited_papers,
            bibliography="\n\n".join(bibtex(paper) for _, paper in cited_papers),
        )


def _identity(run: ReportedRun, findings_hash: str) -> dict[str, str]:
    """Return what identifies this run, and a run that should equal it."""
    recording = run.recording
    return {
        "Run": _run_id(run.folder),
        "Seed": str(run.config.federation.seed) if run.config else "",
        "Versions": _versions(run.folder),
        f"SHA-256 of the {'intact rounds' if recording.damaged else 'recording'}": recording.hash,
        "SHA-256 of all findings": findings_hash,
    }


def _versions(folder: RunFolder) -> str:
    try:
        versions = json.loads((folder.path / "versions.json").read_text(encoding="utf-8"))
        return ", ".join(f"{name} {version}" for name, version in versions.items())
    except (OSError, ValueError, AttributeError):
        return ""


def _run_id(folder: OpenRun) -> str:
    with suppress(FedsimError):  # the facts say under Integrity what was altered
        manifest = folder.manifest.contents
        return manifest.run if manifest else ""
    return ""
