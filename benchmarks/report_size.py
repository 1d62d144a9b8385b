"""How large the report of a large run is, how long it takes to write it, and how soon a browser shows it.

    python benchmarks/report_size.py [--clients 100] [--data handwriting] [--keep runs/report-size]

All clients of one round are attacked by ten attacks of a few iterations each: what they find is poor, and takes as much
room as what a long attack finds. With `--keep` the run stays, and is not made again. Needs Chromium and the packages of
the extra `dev`; the times are medians over several openings in a fresh window.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import fedsim
from fedsim.api import pipeline
from fedsim.federation.open_run import OpenRun

ITERATED = ("inverting-gradients", "sme", "dlg", "sapag", "dlfa")
ATTACKS = [
    *({"name": name, "iterations": 20} for name in ITERATED),
    *(
        {"name": "inverting-gradients", "label": f"tv {weight}", "tv_weight": weight, "iterations": 20}
        for weight in (0.0, 0.1, 1.0)
    ),
    {"name": "sme", "label": "sme half", "alpha": 0.25, "iterations": 20},
    {"name": "spear-ica"},
]
OPENINGS = 5
SHOWN = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({
  loaded: performance.getEntriesByType('navigation')[0].loadEventEnd,
  nodes: document.querySelectorAll('*').length,
}))))"""


def experiment(clients: int, data: str) -> dict[str, object]:
    """All clients of a round attacked by all attacks."""
    return {
        "data": {"name": data},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.05},
        "federation": {"engine": "serial", "seed": 1, "clients": clients, "rounds": 3},
        "adversary": {"victims": "all", "rounds": [1], "knowledge": {"labels": True}},
        "attack": ATTACKS,
    }


def opened(page: Path) -> dict[str, float]:
    """Median seconds until the page is loaded, and until it is painted after that; the number of its elements."""
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    loaded, painted, nodes = [], [], 0
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=flags)
        for _ in range(OPENINGS):
            window = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
            started = time.perf_counter()
            window.goto(page.resolve().as_uri())
            said = window.evaluate(SHOWN)
            painted.append(time.perf_counter() - started)
            loaded.append(said["loaded"] / 1000)
            nodes = said["nodes"]
            window.context.close()
        chromium.close()
    return {"loaded": statistics.median(loaded), "painted": statistics.median(painted), "nodes": nodes}


def main() -> None:
    """Make the run, write its report, open it, and print what that took."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--data", default="handwriting")
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = arguments.keep or Path(temporary) / "run"
        if not (path / "scores.csv").is_file():
            fedsim.run(experiment(arguments.clients, arguments.data), out=path)
        started, busy = time.perf_counter(), time.process_time()
        pipeline.report(OpenRun(path))
        written, busy = time.perf_counter() - started, time.process_time() - busy
        page = path / "report.html"
        findings = len(list(path.glob("findings/*/*.safetensors")))
        pictures = len(re.findall("data:image", page.read_text(encoding="utf-8")))
        seen = opened(page)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{findings} findings about {arguments.clients} clients; {platform.processor() or platform.machine()}, "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}"
        )
        print(f"written in {written:.1f} s, {busy:.1f} of the processor, with at most {memory:.0f} MB of memory")
        print(f"{page.stat().st_size / 1e6:.1f} MB, {pictures} pictures, {seen['nodes']:.0f} elements")
        print(f"loaded in {seen['loaded']:.2f} s, painted in {seen['painted']:.2f} s (medians of {OPENINGS})")


if __name__ == "__main__":
    main()
