"""Panel of a report: one section of the page of a run, and what an author of a section implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedsim.base.errors import PluginError

if TYPE_CHECKING:  # the value is made by the report, which stands above the interfaces
    from fedsim.report.reported_run import ReportedRun


@dataclass(frozen=True)
class Panel(ABC):
    """Base of all panels, the sections of `report.html`.

    A report shows the panels of all installed distributions, fedsim's own among them. The page puts
    the heading above what `render` returns, gives the section the panel's registered name as id, and
    names it in its navigation. If a panel raises, the page is written without it and says so.

    A panel has no settings. The page loads nothing and runs no script but fedsim's own, so images have to be `data:`
    addresses, and charts inline SVG, as those of `fedsim.report.charts`.

    Class attributes:
        title: heading of the section.
        link: a shorter text for the navigation; empty for the heading.
        order: where the section stands: the lowest comes first. By default it follows the scores of
            attacks, which have 50; fedsim's own panels have 10, 20, ... in the order of the page.
    """

    title: ClassVar[str]
    link: ClassVar[str] = ""
    order: ClassVar[int] = 55

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(getattr(self, "title", None), str) or not self.title:
            raise PluginError(f"{name}: has no title; add title = '...', the heading of its section")
        if not isinstance(self.link, str) or type(self.order) is not int:
            raise PluginError(
                f"{name}: expected a text as link and a whole number as order, got {self.link!r} and {self.order!r}"
            )

    @abstractmethod
    def render(self, run: ReportedRun) -> str | None:
        """Return the content of the section as HTML; None where there is nothing to show of `run`.

        A plain `str` is text, which the page escapes. HTML has to be a `markupsafe.Markup`, whose
        `format` escapes what it puts in, because names and texts of a run may be anybody's.

        >>> from markupsafe import Markup
        >>> Markup("<p>{} attacks</p>").format("<b>2</b>")
        Markup('<p>&lt;b&gt;2&lt;/b&gt; attacks</p>')
        """
