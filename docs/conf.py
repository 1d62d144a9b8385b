"""How Sphinx builds the site of these pages: `make docs`. A warning is an error, and no network is needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import fedsim  # noqa: F401  (imported here as a program does, or autodoc would import it as a type checker does)
from fedsim.base.papers import list_citations
from fedsim.interfaces.knowledge import FACTS, Knowledge

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "fedsim"
extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "pydata_sphinx_theme"
html_title = "fedsim"
html_static_path, html_css_files = ["_static"], ["style.css"]
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_nav_level": 2,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_sidebars = {"index": [], "gallery": []}
html_copy_source = html_show_copyright = html_show_sourcelink = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
default_role = "code"  # `name` in a docstring is code
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"LocalRound": "fedsim.training.local_round.LocalRound"}  # imported for annotations alone
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "params_style")]

nitpicky = True  # a reference that leads nowhere is an error: each type of ours in a signature has to be on these pages
nitpick_ignore_regex = [
    (r"py:.*", r"(?!fedsim\.|strategies\.|adversaries\.|clients\.).*\..*"),  # of other packages
    (r"py:class", r"P|Tensor|Generator|LocalTraining|NoneType|optional|(dict|Mapping)\[str|tuple\[int \| str"),
    (r"py:.*", r"fedsim\..*\.([A-Z]|FindingT)"),  # type variables
    (r"py:class", r"strategies\.wrapped_grid\.WrappedGrid"),  # a base that adds nothing to Flower's Grid
]


def _leave_out_links_to_code(app: Sphinx, page: str, source: list[str]) -> None:
    """Links out of docs/ lead somewhere in the repository alone."""
    way_out = re.escape("../" * (1 + page.count("/")))
    source[0] = re.sub(rf"(?<!!)\[([^]]+)\]\({way_out}[^)]+\)", r"\1", source[0])


def _prepare(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """What napoleon cannot know of a docstring."""
    if what in ("attribute", "data", "property"):
        lines.insert(0, "\\ ")  # it would take what is before a colon in the first line for a type
    if drawn := [place for place, line in enumerate(lines) if line.startswith(("├", "│", "└"))]:
        tree = slice(drawn[0] - 1, drawn[-1] + 1)
        lines[tree] = ["::", "", *(f"   {line}" for line in lines[tree])]
    if thing is Knowledge:
        at = lines.index("Attributes:") + 1
        lines[at:at] = [f"    {fact}: {about.about}." for fact, about in FACTS.items()]
    # Papers that the docstring quotes by key follow in full.
    for citation in list_citations("\n".join(lines)):
        lines += ["", f"- {citation}"]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _leave_out_links_to_code)
    app.connect("autodoc-process-docstring", _prepare, priority=400)
