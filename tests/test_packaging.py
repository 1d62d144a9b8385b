"""What is installed, under which names, and who may import whom."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest

import fedsim
from tests.support.forks import fork_python

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedsim", "strategies", "adversaries", "clients")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
{code}
"""


CORE = [
    *("fedsim.interfaces.attack", "fedsim.interfaces.defense", "fedsim.data", "fedsim.cli.main"),
    *("fedsim.audit.audit", "fedsim.audit.evaluation.scoring", "fedsim.base.metrics"),
    *("fedsim.federation.config", "fedsim.federation.federated_data", "fedsim.training.loop", "fedsim.training.models"),
    *("fedsim.recording.recorder", "fedsim.recording.transcript", "fedsim.recording.payloads"),
    "clients.defenses.update_noise",
]
"""What works on a recording, beside the plug-ins."""


def python(code: str, cwd: Path, missing: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return fork_python(WITHOUT.format(missing=missing, code=code), cwd=cwd, forget=missing)


def declared() -> list[tuple[str, str, str]]:
    groups = PROJECT["project"]["entry-points"]
    return [(group, name, value) for group, entries in groups.items() for name, value in entries.items()]


@pytest.mark.parametrize(("group", "name", "value"), declared(), ids=lambda part: str(part).replace(":", "-"))
def test_every_declared_entry_point_is_installed_and_loads(group: str, name: str, value: str) -> None:
    installed = {entry.name: entry for entry in entry_points(group=group)}
    assert installed[name].value == value, "pyproject.toml changed: install again (`pip install -e .`)"
    assert installed[name].load()


def test_the_program_is_installed() -> None:
    [script] = [e for e in distribution("fedsim-curious").entry_points if e.group == "console_scripts"]
    assert (script.name, script.value) == ("fedsim", "fedsim.cli.program:run_program")


def test_the_rooms_lie_beside_the_core_and_say_whose_they_are() -> None:
    for name in PACKAGES:
        module = importlib.import_module(name)
        assert Path(str(module.__file__)).parent == ROOT / name
        if name != "fedsim":
            assert module.PART_OF == "fedsim"


def test_no_public_name_is_that_of_a_package() -> None:
    """Which would take its place as soon as it is imported."""
    assert not set(fedsim.__all__) & {module.name for module in pkgutil.iter_modules(fedsim.__path__)}


def test_the_core_reaches_the_rooms_by_name_only() -> None:
    """Not even an import inside a function; import-linter sees those, but not strings."""
    for path in (ROOT / "fedsim").rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not re.match(r"\s*(from|import) (strategies|adversaries|clients)\b", line), f"{path}: {line}"
            assert not re.search(r"import_module\(\s*[\"'](strategies|adversaries|clients)", line), f"{path}: {line}"


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert re.search(r"Contracts: [3-9] kept, 0 broken", result.stdout)


def test_an_attack_that_looks_at_the_truth_breaks_the_contract(tmp_path: Path) -> None:
    """The contract is not vacuous: with one such import added, it fails and names it."""
    for name in PACKAGES:
        copy = tmp_path / name
        copy.mkdir()
        for path in (ROOT / name).rglob("*.py"):
            target = copy / path.relative_to(ROOT / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(path.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    with (tmp_path / "adversaries" / "simulated.py").open("a") as file:
        file.write("\nfrom fedsim.audit.evaluation.truth import Truth\n")
    result = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "No attack can reach the truth BROKEN" in result.stdout
    assert "adversaries.simulated -> fedsim.audit.evaluation.truth" in result.stdout


def test_no_test_folder_but_the_builders_is_a_package() -> None:
    """A package `tests/clients` could be imported in place of `clients`; a folder without `__init__.py` cannot."""
    assert list((ROOT / "tests").rglob("__init__.py")) == [ROOT / "tests" / "support" / "__init__.py"]


@pytest.mark.thorough
def test_attacks_models_measures_scores_and_recordings_work_without_flower_ray_and_torchvision(tmp_path: Path) -> None:
    groups = ("fedsim.attacks", "fedsim.models", "fedsim.measures")
    plugins = sorted({value.partition(":")[0] for group, _, value in declared() if group in groups})
    assert len(plugins) >= 60
    code = f"""
import importlib
for name in {[*plugins, *CORE]}:
    importlib.import_module(name)
from fedsim.plugins import registry
assert registry.registered_names("attacks")
"""
    result = python(code, tmp_path, ("flwr", "ray", "torchvision", "torchmetrics", "sklearn"))
    assert result.returncode == 0, result.stderr


def test_without_flower_a_federation_says_what_to_install(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from fedsim.federation.config import Config
from fedsim.base.errors import FedsimError
from fedsim.federation.open_run import OpenRun
from fedsim.federation.simulation import run_federation
try:
    run_federation(Config(), OpenRun(Path("run")))
except FedsimError as error:
    print(type(error).__name__, error.exit_code, error)
"""
    result = python(code, tmp_path, ("flwr", "ray"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
    assert " 2 " in result.stdout
    assert "pip install 'fedsim-curious[federation]'" in result.stdout
    assert not (tmp_path / "run").exists()


COMPILER_REFUSED = """
import sys
import torch
for name in list(sys.modules):
    if name.startswith(("torch._dynamo", "torchvision")):
        del sys.modules[name]
for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
    vars(method.__wrapped__).pop("__dynamo_disable", None)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("torch._dynamo", "torchvision", "ray.", "sklearn.", "pandas", "scipy.stats")):
            raise ImportError("refused: " + name)
sys.meta_path.insert(0, Refuse())
"""
"""Code after which whoever imports torch's compiler, torchvision, or what else takes long gets an error."""


@pytest.mark.thorough
def test_a_run_imports_neither_a_compiler_nor_what_it_has_no_use_for(tmp_path: Path) -> None:
    """Torch's compiler, Ray, scikit-learn and pandas take seconds in each process."""
    (tmp_path / "experiment.toml").write_text(
        """
data = { name = "digits" }
partition = { name = "iid", samples_per_client = 2 }
model = { name = "mlp", hidden = [8] }
federation = { engine = "serial", clients = 2, rounds = 1 }
strategy = { name = "fedavg" }
adversary = { victims = [0] }
attack = [{ name = "sme", iterations = 2 }, { name = "inverting-gradients", iterations = 2 }]
"""
    )
    commands = """
try:
    torch.optim.LBFGS([torch.ones(1, requires_grad=True)])
except ImportError as error:
    print(error)
from fedsim.audit.evaluation.perceptual_distance import PerceptualNetwork
from fedsim.training.optimizers import LBFGS
PerceptualNetwork("squeeze")
optimizer = LBFGS([torch.ones(1, requires_grad=True)])
optimizer.zero_grad()
optimizer.step(lambda: torch.zeros(()))
from fedsim.cli.main import main
sys.argv = ["fedsim", "run", "experiment.toml", "--out", "run", "--quiet"]
main()
"""
    result = python(COMPILER_REFUSED + commands, tmp_path)
    assert result.returncode == 0, result.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").exists()
    assert "refused: torch._dynamo" in result.stdout, "the code to refuse imports refuses none"


@pytest.mark.thorough
def test_importing_changes_nothing_global(tmp_path: Path) -> None:
    code = """
import torch, numpy, logging, os
states = torch.random.get_rng_state(), str(numpy.random.get_state()), dict(os.environ)
handlers = list(logging.getLogger().handlers)
threads = torch.get_num_threads()
import fedsim.cli.main, fedsim.audit.audit, fedsim.federation.simulation
import adversaries.inversion.surrogate_model, clients.defenses.update_noise
assert torch.equal(states[0], torch.random.get_rng_state())
assert states[1] == str(numpy.random.get_state())
assert states[2] == dict(os.environ), set(os.environ) ^ set(states[2])
assert handlers == logging.getLogger().handlers
assert threads == torch.get_num_threads()
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr


def test_the_distribution_cannot_be_uploaded_by_accident() -> None:
    """The import name is taken on the public index by another simulator."""
    assert "Private :: Do Not Upload" in PROJECT["project"]["classifiers"]
    assert PROJECT["project"]["name"] == "fedsim-curious"
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"": "."}


def test_typed_and_templated_files_are_packaged() -> None:
    assert (ROOT / "fedsim" / "py.typed").is_file()
    packaged = PROJECT["tool"]["setuptools"]["package-data"]["fedsim"]
    for path in (ROOT / "fedsim").iterdir():
        if path.is_file() and path.suffix != ".py":
            assert any(path.match(pattern) for pattern in packaged), f"{path.name} would be left out of a wheel"


@pytest.mark.thorough
def test_a_wheel_holds_all_that_the_packages_do(tmp_path: Path) -> None:
    """And nothing else: no tests, no benchmarks, and no entry point less than are declared."""
    pytest.importorskip("setuptools", minversion="77")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    inside = {str(path.relative_to(tmp_path)) for name in PACKAGES for path in (tmp_path / name).rglob("*.*")}
    built = python("from setuptools import build_meta; build_meta.build_wheel('.')", tmp_path)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        told = {name for name in file.namelist() if ".dist-info/" not in name}
        [entries] = [name for name in file.namelist() if name.endswith("entry_points.txt")]
        text = file.read(entries).decode()
    assert told == inside
    assert text.count(" = ") == len(declared()) + len(PROJECT["project"]["scripts"])


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_says_that_it_is_typed(name: str) -> None:
    assert (ROOT / name / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][name]


def test_pillow_which_reads_images_is_declared() -> None:
    assert any(line.startswith("pillow") for line in PROJECT["project"]["dependencies"])
    assert "\npillow==" in (ROOT / "constraints.txt").read_text()
