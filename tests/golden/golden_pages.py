"""What fedsim prints and writes for people, as text with every number taken out: pages, tables, lists, errors.

    python tests/golden/golden_pages.py        # make pages/*.txt anew, after a change of words

The figures themselves are held by golden.py; here it is words, order and structure that must not move unseen.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import os
import re
import sys
import tempfile
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import typer.main

from fedsim.cli.main import main
from fedsim.cli.options import console
from fedsim.plugins import registry

HERE = Path(__file__).parent
PAGES = HERE / "pages"

_SWEEP = """\
[sweep]
seeds = [1, 2]
[sweep.axes]
defense = [[], [{ name = "update-noise", clip = 2.0, noise_multiplier = 0.01 }]]
"""
_BAD_SETTINGS = {
    "unknown section": "[dataa]\nname = 'digits'\n",
    "unknown plug-in": "[data]\nname = 'digitz'\n",
    "unknown setting": "[data]\nname = 'digits'\nsize = 3\n",
    "wrong type": "[federation]\nclients = 'four'\n",
    "negative": "[training]\nlocal_epochs = 1\nlearning_rate = -1\n",
    "not finite": "[training]\nlearning_rate = nan\n",
    "no round": "[federation]\nrounds = 0\n",
    "victim that is not there": "[federation]\nclients = 2\n[adversary]\nvictims = [7]\n[[attack]]\nname = 'dlg'\n",
    "attack without its need": "[[attack]]\nname = 'membership-lira'\n",
    "setting of an attack": "[[attack]]\nname = 'sme'\niterations = 0\n",
    "defense twice": "[[defense]]\nname = 'top-k'\nfraction = 2.0\n",
    "engine": "[federation]\nengine = 'rey'\n",
    "not TOML": "[data\n",
}


class _Text(HTMLParser):
    """Collects what a browser would show, a line an element."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style", "svg")
        self.lines += [f"({name} {value})" for name, value in attrs if name in ("alt", "title", "aria-label") and value]

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.lines.append(" ".join(data.split()))


def mask(text: str, *folders: Path) -> str:
    """Return a text without numbers, folders, versions and hashes, which differ from machine to machine."""
    for folder in folders:
        text = text.replace(str(folder), "FOLDER")
    text = re.sub(r"\b[0-9a-f]{12,}\b", "HASH", text)
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"[-+−]?(\d[\d,]*)?\.?\d+(e[-+]?\d+)?( ?± ?[\d.]+)?", "#", text)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip() + "\n"


def page_text(page: Path) -> str:
    """Return the words of an HTML page, a line an element."""
    parser = _Text()
    parser.feed(page.read_text())
    return "\n".join(parser.lines)


_build_command = functools.cache(typer.main.get_command)
"""Builds commands and their options once: typer would for each call."""


def fedsim(*words: str | Path) -> str:
    """Run the command line in this process; return what it printed, its exit code last."""
    output = io.StringIO()
    wide = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        patch.object(sys, "argv", ["fedsim", *map(str, words)]),
        patch.object(typer.main, "get_command", _build_command),
        patch.dict(os.environ, wide),
        patch.object(console, "_width", 120),  # it reads COLUMNS once, when it is made
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
    ):
        try:
            main()
            code: object = 0
        except SystemExit as end:
            code = end.code or 0
    return f"{output.getvalue().rstrip()}\n[exit {code}]\n"


def lists(_: Path) -> str:
    """Return what `fedsim list` prints."""
    return fedsim("list")


def plugins(_: Path) -> str:
    """Return what `fedsim show` prints of each plug-in of ours, but for the docstring."""
    texts = []
    for group in registry.GROUPS:
        for name in registry.registered_names(group):
            shown = [line for line in fedsim("show", name).splitlines() if re.match(r"│|needs|uses|\[exit", line)]
            texts.append("\n".join([f"$ fedsim show {name}", *(re.sub(r" +", " ", line) for line in shown)]))
    return "\n".join(texts)


def errors(folder: Path) -> str:
    """Return what experiments with one fault each are answered."""
    texts = []
    for title, settings in _BAD_SETTINGS.items():
        file = folder / "bad.toml"
        file.write_text(settings)
        texts.append(f"# {title}\n{mask(fedsim('run', file, '--out', folder / 'bad', '-q'), folder)}")
    return "\n".join(texts)


def report(folder: Path) -> str:
    """Return the words of a run's page, and the columns and names of its scores."""
    run = folder / "run"
    fedsim("run", HERE / "fedavg.toml", "--out", run, "-q", "--set", "adversary.knowledge.labels=true")
    return f"{page_text(run / 'report.html')}\n{table_names(run / 'scores.csv')}"


def sweep(folder: Path) -> str:
    """Return the words of a sweep's page, and the columns and names of its table."""
    file, out = folder / "sweep.toml", folder / "sweep"
    # DLG is left out: its L-BFGS turns rounding, of which a sweep has more, into other words.
    experiment, _, last_attack = (HERE / "fedavg.toml").read_text().rpartition("[[attack]]")
    assert 'name = "dlg"' in last_attack
    file.write_text(_SWEEP + experiment)
    fedsim("sweep", file, "--out", out, "--cells", folder / "cells", "-q")
    return f"{page_text(out / 'sweep.html')}\n{table_names(out / 'sweep.csv')}"


def table_names(path: Path) -> str:
    """Return the header of a table and what its first column and its metric say, a line a row."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    names = [" ".join(row[key] for key in ("attack", "metric") if key in row) for row in rows]
    return "\n".join([",".join(rows[0]), *sorted(set(names))])


TEXTS: dict[str, Callable[[Path], str]] = {
    "list": lists,
    "show": plugins,
    "errors": errors,
    "report": report,
    "sweep": sweep,
}


def text_of(name: str, folder: Path) -> str:
    """Return one of the texts, made in an empty folder, with its numbers taken out."""
    return mask(TEXTS[name](folder), folder, HERE)


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name in TEXTS:
        with tempfile.TemporaryDirectory() as folder:
            (PAGES / f"{name}.txt").write_text(text_of(name, Path(folder)))
