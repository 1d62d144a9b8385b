"""Make the pictures of the README: run its commands and photograph the pages that they write.

`python docs/readme_pictures.py` makes quickstart.png and does-it-stop.png in pictures/, in a few minutes; with one
of these names, that one alone. It needs Playwright and a Chromium. Each picture keeps the words that it shows as its
description, by which a test sees that the commands still lead to it.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = Path(__file__).parent
PICTURES_FOLDER = DOCS / "pictures"
README = DOCS.parent / "README.md"
MARGIN = 24
"""Around what is shown, in pixels of the page."""
SHARPNESS = 1.5
"""Pixels of a picture for one of the page."""


@dataclass(frozen=True)
class Picture:
    """A part of a page.

    Attributes:
        page: writes the page in an empty folder by the commands of the README, and says where it is.
        parts: selectors of what is shown, from the first to the last.
        width: of the window.
    """

    page: Callable[[Path], Path]
    parts: tuple[str, ...]
    width: int

    def taken(self, browser: Any, page: Path) -> tuple[Image.Image, str]:
        """The picture of a page that was written, and its words."""
        context = browser.new_context(viewport={"width": self.width, "height": 900}, device_scale_factor=SHARPNESS)
        seen = context.new_page()
        seen.goto(page.resolve().as_uri())
        shown = [seen.locator(part).first for part in self.parts]
        first, last = shown[0].bounding_box(), shown[-1].bounding_box()
        top, end = max(0, first["y"] - MARGIN), last["y"] + last["height"] + MARGIN / 2  # no words of what follows
        clip = {"x": 0, "y": top, "width": self.width, "height": end - top}
        picture = Image.open(io.BytesIO(seen.screenshot(clip=clip, full_page=True))).convert("RGB")
        words = "\n".join(part.inner_text() for part in shown)
        context.close()
        return picture, words


def quickstart(folder: Path) -> Path:
    """The report of the demo; in one process, which gives the same as its own engine and is quicker."""
    _fedsim(folder, "run", str(DOCS.parent / "examples" / "quickstart.toml"), "--set", 'federation.engine="serial"')
    return folder / "runs" / "quickstart" / "report.html"


def does_it_stop(folder: Path) -> Path:
    """The page of the second recipe's sweep."""
    [sweep] = re.findall(r"^```toml\n# does-it-stop.toml\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    (folder / "does-it-stop.toml").write_text(sweep, encoding="utf-8")
    _fedsim(folder, "new", "experiment", "my-audit")
    _fedsim(folder, "sweep", "does-it-stop.toml", "--set", "adversary.knowledge.defenses=true")
    return folder / "runs" / "does-it-stop" / "sweep.html"


PICTURES = {
    "quickstart": Picture(quickstart, (".kicker", "h1", ".lead", ".cards"), width=1000),
    "does-it-stop": Picture(does_it_stop, (".kicker", "h1", ".lead", ".answer"), width=1000),
}


def main() -> None:
    """Read the command line, and make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME")
    names = parser.parse_args().names or list(PICTURES)
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        raise SystemExit("no Chromium is installed (apt install chromium)")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        for name in names:
            picture, words = PICTURES[name].taken(browser, PICTURES[name].page(Path(folder)))
            about = PngInfo()
            about.add_itxt("Description", words)
            picture.save(PICTURES_FOLDER / f"{name}.png", optimize=True, pnginfo=about)
        browser.close()


def _fedsim(folder: Path, *words: str) -> None:
    """One command, without a folder of data."""
    environment = {key: value for key, value in os.environ.items() if key != "FEDSIM_DATA"}
    program = str(Path(sys.executable).with_name("fedsim"))
    subprocess.run([program, *words], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
