"""Pages of one file each, which need no network: text is escaped, scripts are our own and named by their hash."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedsim.reporting.besides import placeless
from fedsim.reporting.summary import listed

TEMPLATES = Path(__file__).parent / "templates"


def page(template: str, scripts: Sequence[str] = (), **values: Any) -> str:
    """The whole page that `template`, which extends `base.html.j2`, makes of `values`.

    Args:
        template: name of a file in `templates/`.
        scripts: names of JavaScript files there. The page's Content-Security-Policy lets no other script run, and
            nothing be loaded.
        values: what the template names.
    """
    code = [(TEMPLATES / name).read_text(encoding="utf-8") for name in scripts]
    allowed = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in code)
    own = {"scripts": [Markup(text) for text in code], "allowed": allowed or "'none'"}  # our own files, nothing else
    return environment().get_template(template).render(own | values)


def fragment(template: str, **values: Any) -> Markup:
    """A part of a page, to be put into another template as it is."""
    return Markup(environment().get_template(template).render(values))  # the template has escaped what is in it


@cache
def environment() -> Environment:
    """What all templates share; whatever is put into one is escaped unless it is Markup."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"png": png, "download": download, "listed": listed, "grouped": grouped}
    made.filters |= {"placeless": placeless, "script_number": script_number, "decibel": decibel, "mean_of": mean_of}
    made.filters |= {"headed": headed}
    return made


def png(picture: bytes) -> str:
    """A PNG as the address of an image."""
    return "data:image/png;base64," + b64encode(picture).decode()


def download(text: str, kind: str) -> str:
    """A file of this media type, as the address of a link."""
    return f"data:{kind};base64,{b64encode(text.encode()).decode()}"


def grouped(number: int) -> str:
    """Digits in groups of three."""
    return f"{number:,}".replace(",", "\u202f")


def script_number(value: float) -> str:
    """A number that JavaScript reads."""
    return f"{value:.6g}".replace("inf", "Infinity").replace("nan", "NaN")


def decibel(value: float) -> str:
    """A PSNR; that of an image that is the same is infinite."""
    return f"{value:.1f}".replace("inf", "∞")


def mean_of(values: Sequence[float]) -> str:
    """The mean of PSNRs."""
    return decibel(fmean(values))


def victim_and_round(about: Mapping[str, Any]) -> str:
    """Which victim and message a finding is about, from what it says of itself: `client 0, rounds 1-5`."""
    return f"{about['who']}, round{'s' * ('-' in str(about['round']))} {about['round']}"


def headed(about: Mapping[str, Any]) -> str:
    """The same as a heading."""
    text = victim_and_round(about)
    return text[:1].upper() + text[1:]
