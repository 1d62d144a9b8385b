"""Panel of the images that attacks claim."""

from __future__ import annotations

from markupsafe import Markup

from fedsim.interfaces.metric import describe_metric
from fedsim.interfaces.panel import Panel
from fedsim.report.html import render_fragment
from fedsim.report.image_scores import sort_by_preference
from fedsim.report.pictures import Gallery
from fedsim.report.reported_run import ReportedRun


class PicturesPanel(Panel):
    """Show the images of each victim: originals, what each attack claims, and the best guess."""

    title = "Pictures"
    order = 10

    def render(self, run: ReportedRun) -> Markup | None:
        """Return a grid of images for each victim; None where no attack claims images."""
        if not run.gallery.grids:
            return None
        return render_fragment("pictures.html.j2", gallery=run.gallery, orders=_sort_metrics(run.gallery))


def _sort_metrics(gallery: Gallery) -> list[tuple[str, str, str]]:
    """Return the metrics by which images can be sorted, with their titles and which values are better."""
    scored_by = {metric for grid in gallery.grids.values() for metric in grid.scores}
    metrics = []
    for name in sort_by_preference(scored_by):
        facts = describe_metric(name)
        metrics.append((name.replace("_", "-"), facts.title, "higher" if facts.higher_is_better else "lower"))
    return metrics
