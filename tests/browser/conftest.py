"""Pages in a real browser, Debian's Chromium; where there is none, these tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WORST = ("serious", "critical")
PHONE = 390
WAYS = ({}, {"scheme": "dark"}, {"width": PHONE})
"""How a page is looked at: in light, in the dark, on a phone."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium that is there already; none is downloaded."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed, so no page is looked at")
    if (found := next(filter(None, map(shutil.which, BROWSERS)), None)) is None:
        pytest.skip("no Chromium is installed (apt install chromium), so no page is looked at")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=list(FLAGS))
        yield chromium
        chromium.close()


class Look:
    """A page in a window, what it asked for besides itself, and what went wrong in it."""

    def __init__(self, browser: Any, path: Path, width: int, **context: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, **context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(5000)
        self.address = path.resolve().as_uri()
        self.asked: list[str] = []
        self.wrong: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.goto(self.address)

    @property
    def asked_elsewhere(self) -> list[str]:
        """Addresses that are neither the page nor in it."""
        own = (self.address, "data:", "blob:")
        return [address for address in self.asked if not address.startswith(own)]

    def findings(self) -> list[str]:
        """What axe-core holds against the page and calls serious or critical."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {rule['help']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for rule in found
            for node in rule["nodes"]
            if rule["impact"] in WORST
        ]


@pytest.fixture
def is_for_everybody(look: Callable[..., Look]) -> Callable[[Path], None]:
    """`is_for_everybody(path)` fails where the page asks for anything else, is too wide for a phone, or shuts out."""

    def check(path: Path) -> None:
        for way in WAYS:
            seen = look(path, **way)
            seen.page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
            assert seen.findings() == [], way
            width = seen.page.evaluate("document.scrollingElement.scrollWidth")
            assert width <= way.get("width", 1280), way
            assert (seen.asked_elsewhere, seen.wrong) == ([], []), way

    return check


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Look]]:
    """`look(path, scheme="light", width=1280, javascript=True)`: the page in a window of its own."""
    opened: list[Look] = []

    def opening(path: Path, *, scheme: str = "light", width: int = 1280, javascript: bool = True) -> Look:
        opened.append(Look(browser, path, width, color_scheme=scheme, java_script_enabled=javascript))
        return opened[-1]

    yield opening
    for one in opened:
        one.context.close()
