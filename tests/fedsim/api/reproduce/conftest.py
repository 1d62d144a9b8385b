"""A paper of three tables on the digits, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsim.api.reproduce import papers as read
from fedsim.api.reproduce import recipes, running

PAPER = """
title = "P"
key = "Zhu2019"
[table.plane]
title = "Table 1"
setting = "theirs"
quantities.best = { title = "largest cosine", tolerance = 0.5 }
quantities.start = { title = "cosine at w_0", tolerance = 0.5 }
rows = { "fresh" = { best = ".99", start = ".990" }, "trained" = { best = ".99", start = "3.0" } }
[table.images]
title = "Table 2"
setting = "theirs"
quantities.mean = { title = "accuracy", better = "near", tolerance = 1 }
rows = { "one" = { mean = ".5" }, "two" = { mean = ".5" } }
[table.typed]
title = "Table 3"
setting = "theirs"
script = { command = "python benchmarks/by_hand.py", minutes = 5 }
quantities.mean = { title = "accuracy" }
rows = { "one" = { mean = ".5" } }
"""
EXPERIMENT = """
[{of}data]
name = "digits"
[{of}partition]
name = "iid"
samples_per_client = 24
[{of}model]
name = "mlp"
hidden = [16]
[{of}training]
batch_size = 8
local_epochs = 2
[{of}federation]
clients = 3
rounds = 1
"""
SCALES = """
quick = { minutes = 1, note = "Two clients.", tables.federation.clients = 2 }
full = { minutes = 240, note = "Three clients." }
"""
PLANE = f"""{EXPERIMENT.format(of="")}
[adversary]
when = "never"
[reproduce]
spread = "standard deviation"
rows = {{ "fresh" = {{}}, "trained" = {{ "model.start" = "round-1.safetensors" }} }}
geometry = {{ best = "max cosine", start = "cosine at w_0" }}
{SCALES}{EXPERIMENT.format(of="reproduce.train.")}
[reproduce.train.states]
rounds = [1]
"""
IMAGES = f"""{EXPERIMENT.format(of="")}
[sweep]
seeds = [1]
workers = 1
[sweep.axes]
"training.local_epochs" = [1, 2]
attack = [{{ name = "shared-model", source = "global" }}]
[adversary]
rounds = [1]
[reproduce]
rows = {{ "one" = {{ "training.local_epochs" = 1 }}, "two" = {{ "training.local_epochs" = 2 }} }}
quantities.mean = {{ attack = "shared-model", metric = "local_accuracy" }}
{SCALES}"""


@pytest.fixture
def small_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Takes the place of the five papers; the working folder is empty."""
    for path, text in (("papers/p", PAPER), ("sweeps/p-plane", PLANE), ("sweeps/p-images", IMAGES)):
        file = tmp_path / "package" / f"{path}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for module in (read, recipes, running):
        monkeypatch.setattr(module, "PACKAGE_FOLDER", tmp_path / "package")
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    cached = (read.read_papers, read.read_results, recipes.find_recipe)
    for function in cached:
        function.cache_clear()
    yield tmp_path / "work"
    for function in cached:
        function.cache_clear()
