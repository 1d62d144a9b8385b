"""How large the report of a large run is, how long it takes to write it, and how soon a browser shows it.

    python benchmarks/report_size.py [--clients 100] [--data handwriting] [--keep runs/report-size] [--out FILE.json]

All clients of one round are attacked by ten attacks of a few iterations each: what they find is poor, and takes as much
room as what a long attack finds. With `--keep` the run stays, and is not made again. The times of opening need Chromium
and the packages of the extra `dev`; they are medians over several openings in a fresh window.
"""

from __future__ import annotations

import re
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from measuring import make_parser, publish_rows

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
SHOWN = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done({
  loaded: performance.getEntriesByType('navigation')[0].loadEventEnd,
  nodes: document.querySelectorAll('*').length,
}))))"""


def build_tables(clients: int, data: str) -> dict[str, object]:
    """Return an experiment in which all attacks are made on all clients of a round."""
    return {
        "data": {"name": data},
        "partition": {"name": "iid", "samples_per_client": 8},
        "model": {"name": "mlp", "hidden": [64]},
        "training": {"local_epochs": 1, "batch_size": 4, "learning_rate": 0.05},
        "federation": {"engine": "serial", "seed": 1, "clients": clients, "rounds": 3},
        "adversary": {"victims": "all", "rounds": [1], "knowledge": {"labels": True}},
        "attack": ATTACKS,
    }


def open_page(page: Path, openings: int) -> dict[str, float]:
    """Return median seconds until the page is loaded and until it is painted, and the number of its elements."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        print("the page is not opened: Chromium is not on the PATH")
        return {}
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    loaded, painted, elements = [], [], 0
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=flags)
        for _ in range(openings):
            window = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
            started = time.perf_counter()
            window.goto(page.resolve().as_uri())
            measured = window.evaluate(SHOWN)
            painted.append(time.perf_counter() - started)
            loaded.append(measured["loaded"] / 1000)
            elements = measured["nodes"]
            window.context.close()
        chromium.close()
    return {"loaded, s": statistics.median(loaded), "painted, s": statistics.median(painted), "elements": elements}


def main() -> None:
    """Make the run, write its report and open it."""
    parser = make_parser(__doc__, repeats=5)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--data", default="handwriting")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = options.keep or Path(temporary) / "run"
        if not (path / "scores.csv").is_file():
            fedsim.run(build_tables(options.clients, options.data), out=path)
        started, busy = time.perf_counter(), time.process_time()
        pipeline.report(OpenRun(path))
        row = {"written, s": time.perf_counter() - started, "of the processor": time.process_time() - busy}
        page = path / "report.html"
        row["memory, MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        row["findings"] = len(list(path.glob("findings/*/*.safetensors")))
        row["MB"] = page.stat().st_size / 1e6
        row["pictures"] = len(re.findall("data:image", page.read_text(encoding="utf-8")))
        publish_rows([row | open_page(page, options.repeats)], options.out)


if __name__ == "__main__":
    main()
