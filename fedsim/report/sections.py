"""Sections of a report: what the installed panels have to show of a run, in the order of the page."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fedsim.base.errors import FedsimError, PluginError, error_reason, one_line
from fedsim.interfaces.panel import Panel
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import locate_error
from fedsim.report.reported_run import ReportedRun

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Section of a page.

    Attributes:
        name: its id, the name of the panel.
        content: what is below the heading; the page escapes it unless it is Markup.
    """

    name: str
    title: str
    link: str
    content: str


def render_sections(run: ReportedRun) -> list[Section]:
    """Return the sections of all installed panels that have something to show, in the order of the page.

    A panel that fails is left out, which becomes a note and a failure of the run.
    """
    panels = []
    for name in registry.registered_names("panels"):
        with _note_failure(name, run):
            panel = check_panel(registry.build("panels", name, {}, name))
            panels.append((panel.order, name, panel))
    sections = []
    for _, name, panel in sorted(panels, key=lambda entry: entry[:2]):
        with _note_failure(name, run):
            section = render_section(name, panel, run)
            if section is not None:
                sections.append(section)
    return sections


def render_section(name: str, panel: Panel, run: ReportedRun) -> Section | None:
    """Return what one panel shows of a run; None where that is nothing.

    Raises:
        Exception: whatever a stranger's panel raises.
    """
    content = panel.render(run)
    if content is None:
        return None
    if not isinstance(content, str):
        raise PluginError(
            f"'render' of {type(panel).__name__} returns {type(content).__name__}, expected text, markupsafe.Markup "
            "or None"
        )
    content = content.strip()
    return Section(name=name, title=panel.title, link=panel.link or panel.title, content=content) if content else None


def check_panel(panel: object) -> Panel:
    """Return `panel`; raise PluginError where it is none."""
    if not isinstance(panel, Panel):
        raise PluginError(f"{type(panel).__name__} does not derive from fedsim.Panel")
    return panel


@contextmanager
def _note_failure(name: str, run: ReportedRun) -> Iterator[None]:
    """Write a note and a failure in place of any error that a panel raises."""
    try:
        yield
    except (Exception, SystemExit) as error:
        is_sentence = isinstance(error, FedsimError)
        reason = str(error)
        if not is_sentence:
            reason = f"{error_reason(error)} ({locate_error(error, registry.load('panels', name))})"
        failure = f"the panel '{name}' is left out of the page: {one_line(reason)}"
        run.failures.append(failure)
        run.notes.append(f"{failure[0].upper()}{failure[1:]}.")
        log.error("%s", failure, exc_info=None if is_sentence else error)
