"""A stranger's package: installed into a scratch folder, found by name, checked, run, scored and cited.

The package is the one that docs/how-to/package-plugins.md and the pages beside it walk through, so they are tested too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest

from fedsim.audit.finding_files import load_finding
from fedsim.federation.run_folder import read_rows
from tests.support.commands import Call
from tests.support.forks import fork_fedsim
from tests.support.packages import write_package
from tests.support.shared import make_once

pytestmark = pytest.mark.isolated

PAGES = Path(__file__).parents[2] / "docs" / "how-to"

BROKEN = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "broken-plugins"
version = "0.1.0"

[tool.setuptools]
py-modules = ["broken_plugins"]

[project.entry-points."fedsim.engines"]
does-not-import = "broken_plugins:Engine"

[project.entry-points."fedsim.defenses"]
sign-only = "broken_plugins:Defense"
"""


def files_of_the_pages() -> dict[str, str]:
    """File name to content, of every code block that a file name introduces."""
    texts = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    return dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", texts, re.DOTALL | re.MULTILINE))


@dataclass(frozen=True)
class Site:
    """A folder of installed packages, and one to work in."""

    packages: Path
    work: Path

    def copy(self, source: Path) -> None:
        """Leave the modules and entry points that `install` would, which takes seconds."""
        tables = tomllib.loads((source / "pyproject.toml").read_text())
        for module in tables["tool"]["setuptools"]["py-modules"]:
            shutil.copy(source / f"{module}.py", self.packages)
        project = tables["project"]
        about = self.packages / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        about.mkdir()
        head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        (about / "METADATA").write_text(head)
        lines = []
        for group, entries in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (about / "entry_points.txt").write_text("\n".join(lines))

    def install(self, source: Path) -> None:
        """Without a network, and beside the packages of this environment."""
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
        offline = ("--no-deps", "--no-build-isolation", "--no-index")
        done = subprocess.run(
            [*pip, *offline, "--target", str(self.packages), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def fedsim(self, *words: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.packages), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        return fork_fedsim(*words, cwd=self.work, environment={"PYTHONPATH": path, "COLUMNS": "200"})


def make_site(home: Path) -> None:
    """Install the package of the pages, and run their experiment, shortened."""
    source = home / "my-plugins"
    site = Site(packages=home / "site", work=home / "work")
    for folder in (source, site.packages, site.work):
        folder.mkdir()
    files = files_of_the_pages()
    assert set(files) >= {"pyproject.toml", "my_plugins.py", "compare.toml"}
    for name in files:
        if name == "pyproject.toml" or name.startswith("my_"):
            (source / name).write_text(files[name])
    (site.work / "compare.toml").write_text(files["compare.toml"])
    site.copy(source)
    shorter = ("training.local_epochs=2", "partition.samples_per_client=6", "attack.sme.iterations=5")
    shorter += ("model.hidden=[16]", "adversary.victims=[0, 1]", "adversary.workers=1")
    done = site.fedsim("run", "compare.toml", *(word for setting in shorter for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The package of the pages, installed; their experiment file, and its run, in the working folder."""
    home = make_once(tmp_path_factory, "stranger", make_site)
    return Site(packages=home / "site", work=home / "work")


@pytest.mark.thorough
def test_pip_installs_it(site: Site, tmp_path: Path) -> None:
    installed = Site(packages=tmp_path, work=site.work)
    installed.install(site.packages.parent / "my-plugins")
    modules = {path.name for path in tmp_path.glob("*.py")}
    assert modules == {path.name for path in site.packages.glob("*.py")}
    entries = []
    for folder in (site.packages, tmp_path):
        [distribution] = distributions(path=[str(folder)])
        entries.append(sorted((entry.group, entry.name, entry.value) for entry in distribution.entry_points))
    assert entries[0] == entries[1]
    listed = installed.fedsim("list", "attacks")
    assert "[my-plugins]" in listed.stdout


def test_it_is_listed_and_shown_beside_ours(site: Site) -> None:
    listed = site.fedsim("list", "engines")  # the fewest plug-ins to import
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert lines.keys() >= {"serial", "ray", "threads"}
    assert lines["threads"].endswith("[my-plugins]")
    assert "Play the clients in threads of this process" in lines["threads"]
    shown = site.fedsim("show", "first-layer-mean")
    assert "attacks, from my-plugins" in shown.stdout
    for word in ("contrast", "finite float > 0", "1.0", "needs: input_shape, value_range", "An example", "References:"):
        assert word in shown.stdout, word


def test_it_runs_by_name_and_its_findings_are_saved(site: Site) -> None:
    for client in (0, 1):
        path = site.work / f"runs/compare/findings/first-layer-mean/round-1-client-{client}-repeat-0.safetensors"
        finding, about = load_finding(path)
        assert finding.data.shape == (6, 1, 8, 8)
        assert dict(about["settings"]) == {"contrast": 1.5}  # type: ignore[call-overload]


def test_it_is_scored_under_the_same_rules(site: Site) -> None:
    rows = read_rows(site.work / "runs" / "compare" / "scores.csv")
    theirs = [row for row in rows if row["attack"] == "first-layer-mean"]
    metrics = ["psnr", "ssim", "mse", "lpips", "recovered", "exact", "edge_error", "l_sim", "l_sim_line"]
    assert [row["metric"] for row in theirs] == [*metrics, "identified", "label_accuracy"] * 2
    assert all(row["floor"] and row["floor_guess"] for row in theirs if not row["missing"])
    ours = {(r["victim"], r["metric"]): r for r in rows if r["attack"] == "sme"}
    for row in theirs:  # these guesses do not depend on what an attack claims, so they are the same for everyone
        other = ours[row["victim"], row["metric"]]
        if {row["floor_guess"], other["floor_guess"]} <= {"noise", "mid-grey", "mean of public data"}:
            assert row["floor"] == other["floor"]


def test_the_report_names_and_cites_it(site: Site) -> None:
    page = (site.work / "runs" / "compare" / "report.html").read_text()
    for word in ("first-layer-mean", "sign-only", "An example", "Nobody"):
        assert word in page, word


def test_the_report_has_its_panel(site: Site) -> None:
    page = (site.work / "runs" / "compare" / "report.html").read_text()
    [section] = re.findall('(?s)<section id="weak-victims">(.*?)</section>', page)
    assert "<h2>Who leaked most</h2>" in section
    assert re.search(r"<li>sme by PSNR, dB: [01] \(", section)
    assert '<a href="#weak-victims">Weakest</a>' in page


@pytest.mark.thorough
def test_its_settings_are_checked_like_ours(site: Site) -> None:
    wrong = site.fedsim("run", "compare.toml", "--set", "attack.first-layer-mean.contarst=2", "--out", "x")
    assert wrong.returncode == 2
    assert "attack.first-layer-mean.contarst: unknown setting" in wrong.stderr
    assert "did you mean 'contrast'?" in wrong.stderr
    assert not (site.work / "x").exists()


def test_a_broken_package_breaks_only_itself(site: Site, tmp_path: Path) -> None:
    """One module that does not import, and one name that another distribution has already."""
    (tmp_path / "pyproject.toml").write_text(BROKEN)
    (tmp_path / "broken_plugins.py").write_text("import a_module_that_nobody_has\n")
    both = Site(packages=tmp_path / "site", work=site.work)
    both.packages.mkdir()
    both.copy(tmp_path)
    env = f"{both.packages}{os.pathsep}{site.packages}"
    joined = Site(packages=Path(env), work=site.work)

    listed = joined.fedsim("list", "engines")
    assert listed.returncode == 0
    lines = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert "does not load" in lines["does-not-import"]
    assert "a_module_that_nobody_has" in lines["does-not-import"]
    assert "broken-plugins" in lines["does-not-import"]
    assert "does not load" not in lines["serial"] + lines["threads"]

    refused = joined.fedsim("run", "compare.toml", "--out", "y")
    assert refused.returncode == 2
    assert "'sign-only' is registered by broken-plugins and my-plugins; uninstall one of them" in refused.stderr
    assert not (site.work / "y").exists()


@pytest.mark.thorough
def test_broken_metrics_of_a_package_cost_no_other_score(site: Site, tmp_path: Path) -> None:
    scores = site.work / "runs" / "compare" / "scores.csv"
    before = read_rows(scores)
    entries = {"nothing": "Nothing", "psnr": "Psnr"}
    write_package(tmp_path, "their_metrics", "import a_module_that_nobody_has\n", {"metrics": entries})
    joined = Site(packages=Path(f"{tmp_path}{os.pathsep}{site.packages}"), work=site.work)
    again = joined.fedsim("attack", "runs/compare")
    assert again.returncode == 1
    assert "metrics: 'nothing' (their_metrics:Nothing, from their_metrics) does not load: Module" in again.stderr
    assert "metrics: 'psnr' is registered by fedsim-curious and their_metrics; uninstall one of them" in again.stderr
    assert read_rows(scores) == before


@pytest.mark.parametrize(
    "names",
    [
        ["sign-only", "weak-victims", "edge_error"],
        pytest.param(
            [
                "first-layer-mean",
                "input-spread",
                "brightness",
                "dim",
                "stripes",
                "one-layer",
                "threads",
                "brightness_error",
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["few", "others"],
)
def test_each_plugin_of_the_page_keeps_to_the_contract(names: list[str], site: Site) -> None:
    done = site.fedsim("check", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = re.split(r"^([\w-]+)  \(\w+, from my-plugins\)\n", done.stdout, flags=re.MULTILINE)
    assert parts[1::2] == names
    for part in parts[2::2]:
        lines = part.splitlines()
        assert len(lines) >= 4
        assert all(line.startswith(("passed", "does not apply")) for line in lines)
        assert any(line.startswith("passed") for line in lines)


@pytest.mark.thorough
def test_settings_are_those_of_one_plugin(site: Site) -> None:
    done = site.fedsim("check", "stripes", "dim", "--set", "count=2")
    assert done.returncode == 2
    assert "--set: applies to one plug-in, but 2 are named; check one at a time" in done.stderr


def test_a_broken_plugin_and_an_unknown_one_have_other_exit_codes(site: Site, call: Call) -> None:
    wrong = site.fedsim("check", "stripes", "--set", "count=0")
    assert wrong.returncode == 1
    assert "failed" in wrong.stdout
    assert "fedsim: 'stripes' fails" in wrong.stderr
    unknown = call("check", "mixpu")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "nothing is called 'mixpu', did you mean 'mixup'?" in unknown.stderr


def test_its_metric_is_measured_for_claims_guesses_and_public_images(site: Site) -> None:
    folder = site.work / "runs" / "compare"
    images = read_rows(folder / "image-scores.csv")
    for row in read_rows(folder / "scores.csv"):
        if row["metric"] != "edge_error":
            continue
        assert (row["higher_is_better"], row["ceiling"]) == ("False", "0.0")
        assert row["floor_guess"]
        assert 0 < float(row["floor"]) < 2
        assert 0 < float(row["nearest_public"]) < 2
        key = ("attack", "victim", "metric")
        values = [float(image["value"]) for image in images if all(image[name] == row[name] for name in key)]
        assert len(values) == 6
        assert sum(values) / 6 == pytest.approx(float(row["value"]), rel=1e-5)
    page = (folder / "report.html").read_text()
    assert '<option value="edge-error" data-better="lower">edge error, best first</option>' in page
    assert '<td data-label="More leakage is">lower, at least 0</td>' in page
    assert "&#39;edge_error&#39;, one of the metrics, is of the package my-plugins 0.1.0." in page
    # It is the main metric of this attack, whose line it opens.
    first = re.search(r'data-value="first-layer-mean">.*?</th>\s*<td data-label="Metric" data-value="([^"]+)"', page)
    assert first
    assert first[1] == "edge error"


SWEPT = """
[data]
name = "digits"

[partition]
name = "iid"
samples_per_client = 4

[model]
name = "mlp"
hidden = [8]

[training]
local_epochs = 1
batch_size = 4

[federation]
clients = 2

[adversary]
victims = [0, 1]
workers = 1

[[attack]]
name = "inverting-gradients"

[sweep]
workers = 1

[sweep.axes]
"attack.inverting-gradients.iterations" = [1, 2]
"""


@pytest.mark.thorough
def test_its_metric_is_in_sweeps_and_comparisons(site: Site) -> None:
    (site.work / "swept.toml").write_text(SWEPT)
    done = site.fedsim("sweep", "swept.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_rows(site.work / "runs" / "swept" / "sweep.csv")
    edges = [row for row in rows if row["metric"] == "edge_error"]
    settings = [(row["attack.inverting-gradients.iterations"], row["victim"]) for row in edges]
    assert sorted(settings) == [("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]
    assert {row["better"] for row in edges} == {"lower"}
    page = (site.work / "runs" / "swept" / "sweep.html").read_text()
    assert "edge error" in page
    cells = list(dict.fromkeys(site.work / "runs" / "swept" / row["run"] for row in edges))
    compared = site.fedsim("compare", *map(str, cells), "--out", "comparison.html")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert re.search(r"^ +edge_error +\d", compared.stdout, re.MULTILINE), compared.stdout
    assert "edge error" in (site.work / "comparison.html").read_text()


ALL = """
[data]
name = "stripes"

[partition]
name = "iid"
samples_per_client = 6

[model]
name = "one-layer"

[training]
local_epochs = 1
batch_size = 6

[federation]
clients = 2
engine = { name = "threads", threads = 2 }

[adversary]
victims = [0]
workers = 1

[[defense]]
name = "sign-only"

[[attack]]
name = "dim"

[[attack]]
name = "first-layer-mean"
"""


@pytest.mark.thorough
def test_one_run_uses_them_all(site: Site) -> None:
    (site.work / "all.toml").write_text(ALL)
    done = site.fedsim("run", "all.toml")
    assert done.returncode == 0, done.stderr
    rows = read_rows(site.work / "runs" / "all" / "scores.csv")
    assert {row["attack"] for row in rows} == {"dim", "first-layer-mean"}
    assert "brightness_error" in {row["metric"] for row in rows}
    # The numbers, the table and the matrix that its evaluator shows.
    page = (site.work / "runs" / "all" / "report.html").read_text()
    assert "<dt>claimed brightness</dt><dd>0.25</dd>" in page
    assert re.search(r"<caption>Brightness of each image</caption>\s*<thead><tr><th scope=\"col\">image</th>", page)
    assert "<caption>Mean image: the darker a cell, the brighter its pixel</caption>" in page
    assert "0, threads" in page  # seed and engine
