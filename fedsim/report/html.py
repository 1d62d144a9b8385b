"""Self-contained pages that need no network: text is escaped, scripts are our own and named by their hash."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedsim.base.errors import format_percent
from fedsim.report.reproduction_needs import strip_folders
from fedsim.report.summary import join_titles

TEMPLATES = Path(__file__).parent / "templates"
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that no page may hold, or that turn the direction of a text, so that it is read as another one."""
_PERCENTAGE = re.compile(r"<(script|style|pre|code)\b.*?</\1>|(?<=\d) %", re.DOTALL)
"""The space of a percentage, or a part of a page whose spaces stay: the hash of a script allows it, code is copied."""


def render_page(template: str, scripts: Sequence[str] = (), **values: Any) -> str:
    """Render a whole page.

    Control characters, which a stranger's name may have, are shown as �. No line ends between a number and its %.

    Args:
        scripts: names of JavaScript files there. The page's Content-Security-Policy lets no other script run, and
            nothing be loaded.
    """
    script_texts = [(TEMPLATES / name).read_text(encoding="utf-8") for name in scripts]
    allowed = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in script_texts)
    base_values = {
        "scripts": [Markup(text) for text in script_texts],
        "allowed": allowed or "'none'",
    }  # our own files, nothing else
    page = environment().get_template(template).render(base_values | values)
    page = _PERCENTAGE.sub(lambda match: match[0] if match[1] else "\u00a0%", page)
    return _UNSEEN.sub("\ufffd", page)


def render_fragment(template: str, **values: Any) -> Markup:
    """Render a part of a page, to be put into another template as it is."""
    return Markup(environment().get_template(template).render(values))  # the template has escaped what is in it


@cache
def environment() -> Environment:
    """Return the environment of all templates; whatever is put into one is escaped unless it is Markup."""
    templates = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "png": png_address,
        "download": download_address,
        "listed": join_titles,
        "grouped": group_digits,
        "percent": format_percent,
    }
    templates.filters |= {
        "placeless": strip_folders,
        "script_number": script_number,
        "decibel": format_psnr,
        "mean_of": format_mean_psnr,
    }
    templates.filters |= {"headed": finding_heading}
    return templates


def png_address(picture: bytes) -> str:
    """Return a PNG as the address of an image."""
    return "data:image/png;base64," + b64encode(picture).decode()


def download_address(text: str, kind: str) -> str:
    """Return a file of this media type as the address of a link."""
    return f"data:{kind};base64,{b64encode(text.encode()).decode()}"


def group_digits(number: int) -> str:
    """Format a number with its digits in groups of three."""
    return f"{number:,}".replace(",", "\u202f")


def script_number(value: float) -> str:
    """Format a number for JavaScript.

    >>> script_number(float("inf"))
    'Infinity'
    """
    return f"{value:.6g}".replace("inf", "Infinity").replace("nan", "NaN")


def format_psnr(value: float) -> str:
    """Format a PSNR, which is infinite for an identical image."""
    return f"{value:.1f}".replace("inf", "∞")


def format_mean_psnr(values: Sequence[float]) -> str:
    """Format the mean of PSNRs."""
    return format_psnr(fmean(values))


def victim_and_round(about: Mapping[str, Any]) -> str:
    """Say which victim and rounds a finding is about, from its metadata: `client 0, rounds 1-5`."""
    rounds = "rounds" if len(about["rounds"]) > 1 else "round"
    return f"{about['who']}, {rounds} {about['round']}"


def finding_heading(about: Mapping[str, Any]) -> str:
    """Return the victim and rounds of a finding as a heading."""
    text = victim_and_round(about)
    return text[:1].upper() + text[1:]
