"""Check the drawings of examples, so that a page shows shapes and text and runs nothing.

Modalities draw, and what they draw may hold a stranger's names or numbers. Only elements and
attributes that draw are let through; a script, a link or a reference to another file is an error.
"""

from __future__ import annotations

from xml.etree import ElementTree

from fedsim.base.errors import PluginError

_NAMESPACE = "{http://www.w3.org/2000/svg}"
_ELEMENTS = frozenset(
    [
        *("svg", "g", "path", "line", "polyline", "polygon", "rect", "circle", "ellipse", "text"),
        *("tspan", "title", "desc"),
    ]
)
_ATTRIBUTES = frozenset(
    [
        *("class", "d", "points", "x", "y", "x1", "y1", "x2", "y2", "dx", "dy", "cx", "cy", "r"),
        *("rx", "ry", "width", "height", "viewBox", "transform", "preserveAspectRatio", "opacity"),
        *("fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray"),
        *("stroke-linecap", "stroke-linejoin", "font-size", "text-anchor"),
    ]
)


def clean_drawing(svg: str, label: str, owner: str) -> str:
    """Return a drawing that can stand in a page, with `label` for readers who cannot see it.

    Args:
        svg: an SVG element as text.
        label: what it shows.
        owner: who drew it, for errors.

    Raises:
        PluginError: it is not a well-formed SVG, or does more than draw.

    >>> clean_drawing('<svg viewBox="0 0 1 1"><path d="M0,0 L1,1"/></svg>', "a line", "mine")
    '<svg viewBox="0 0 1 1" role="img" aria-label="a line"><path d="M0,0 L1,1" /></svg>'
    """
    try:
        root = ElementTree.fromstring(svg)
    except (ElementTree.ParseError, TypeError, ValueError) as error:
        raise PluginError(
            f"modalities: what '{owner}' draws is not a well-formed SVG ({error}); escape names and text"
        ) from error
    for element in root.iter():
        element.tag = str(element.tag).removeprefix(_NAMESPACE)
        _check_element(element, owner)
    if root.tag != "svg":
        raise PluginError(f"modalities: '{owner}' draws a <{root.tag}>, expected an <svg>")
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _check_element(element: ElementTree.Element, owner: str) -> None:
    """Raise PluginError where an element is no shape or text, or refers to something."""
    if element.tag not in _ELEMENTS:
        raise PluginError(
            f"modalities: '{owner}' draws with <{element.tag}>, which no page lets through; use one of "
            f"{', '.join(sorted(_ELEMENTS))}"
        )
    for name, value in element.attrib.items():
        if name not in _ATTRIBUTES or "url(" in value.lower():
            raise PluginError(
                f"modalities: '{owner}' draws a <{element.tag}> with {name}=\"{value[:40]}\", which no page lets "
                "through; leave it out, or use a class"
            )
