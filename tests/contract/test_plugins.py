"""Each plug-in of this distribution keeps to the contract; a new one is tested by being registered.

The checks are those of `fedsim check`, which tells strangers the same of their plug-ins.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.contract.checks import run_checks
from fedsim.contract.partitions import CLIENTS, EXAMPLES
from fedsim.federation.experiment_file import load_config
from fedsim.interfaces.metric import is_metric_name
from fedsim.plugins import registry
from tests.support.data_folder import find_data_folder
from tests.support.flight_prices import FLIGHT_FILE, write_thinned_flight_prices

HOUSE = "fedsim-curious"
KEBAB = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
SETTINGS: dict[str, dict[str, Any]] = {
    "aia-gradient": {"iterations": 1},
    "alexnet": {"channels": [8, 8, 12, 12, 8]},
    "angular-lipschitz": {"noises": 40},
    "client-size": {"simulated": 20},
    "convnet": {"width": 4},
    "dlg": {"iterations": 1},
    "dlg-text": {"iterations": 1},
    "dp-sgd": {"noise_multiplier": 1.0},
    "emnist": {"files": "test"},
    "expected-error": {"steps": 2},
    "femnist": {"folder": "femnist-digits"},
    "gate": {"measure": "gradient-norm", "above": 0.0},
    "giml": {"tasks": 2, "task_latent_steps": 2, "latent_iterations": 2, "tuning_iterations": 2},
    "idlg": {"iterations": 1},
    "image-folder": {"path": "imagenet-sample-224/val"},
    "jacobian-norm": {"probes": 4},
    "lamp": {"candidates": 2, "every": 100, "tries": 2},
    "lavp": {"steps": 3},
    "layer-freeze": {"layers": ["[a1]*"]},
    "leaf": {"path": "leaf/shakespeare"},
    "learned-inversion": {"simulated": 20, "features": 10, "components": 5, "epochs": 1, "refinements": 2},
    "lmra": {"hidden": "16x1", "learning_rate": 1e-2, "epochs": 30, "minimise_epochs": 5},
    "lmra-dummy-data": {"sets": 2, "iterations": 2, "training_iterations": 2},
    "property-inference": {"simulated": 10, "trees": 50},
    "resnet18": {"channels": 8},
    "resnet8": {"channels": [4, 8, 8], "hidden": 20},
    "see-through-gradients": {"bn_weight": 0.0, "restarts": 2},  # the network here has no BatchNorm
    "spear": {"draws": 5000},
    "spear-ica": {"passes": 2},
    "spear-ica-rounds": {"passes": 2},
    "tableak": {"restarts": 3},
    "tgias-ro": {"gradients": 2, "iterations": 1, "local_iterations": 1, "labels": "bias"},
    "tgias-ro-text": {"gradients": 2, "refinements": 1, "iterations": 1, "local_iterations": 1, "labels": "bias"},
    "vgg9": {"channels": [8, 8, 12, 12, 16, 16], "hidden": [24, 24]},
    "vit": {"dim": 32, "blocks": 2},
    "vit-april": {"dim": 32, "blocks": 2},
}
"""What a plug-in needs set, to find what is at hand or to be quick."""
ROWS = "age,town,paid\n" + "".join(f"{20 + row},{'AB'[row % 2]},{'no' if row % 3 else 'yes'}\n" for row in range(40))
"""A table of a number, a category and the class."""
OPEN = {"adult-by-age"}
"""What makes sense of one data set only, so that the tiny one is refused; it has tests of its own."""

NEEDS_FILES = {"lpips"}
"""What works only where files lie that are too large to come with fedsim."""


@cache
def ours(group: registry.Group) -> list[str]:
    """Names that this distribution registers."""
    owners = {name: registry.find_entry_point(group, name).dist for name in registry.registered_names(group)}
    return [name for name, owner in owners.items() if owner is not None and owner.name == HOUSE]


THOROUGH = {
    "attacks": "aia-gradient cocktail-party dager dlfa dlg dlg-text fedleak fedmia giml idlg inverting-gradients-text "
    "label-counts lamp learned-inversion lmra lmra-dummy-data long-strides map membership-combined membership-cosine "
    "inverting-gradients joint-inversion membership-white-box nl-sme property-inference sapag see-through-gradients "
    "spear-ica spear-ica-rounds sra-gradient tableak tag tgias-ro tgias-ro-text unmixing",
    "datasets": "adult att-faces cifar10 cifar100 femnist image-folder mnist reuters-r8",
    "measures": "expected-error jacobian-norm lavp lipschitz sensitivity spectrum",
    "models": "alexnet resnet18 resnet8 shufflenet-v2 torchvision vgg9 vit",
    "panels": "attacks ceilings displays drawings epsilons exposure memberships recording records reproduction run "
    "scores texts threats",
    "strategies": "bulyan fedadagrad fedadam fedmedian fedyogi multikrum qfedavg",
}
"""Of each group, the plug-ins whose checks take long; the fast suite checks the others, which take the same paths."""


def list_marks(group: registry.Group, name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of the checks of a plug-in."""
    if group == "engines" and name in ("ray", "flower"):  # these start processes
        return [pytest.mark.slow]
    return [pytest.mark.thorough] if name in THOROUGH.get(group, "").split() else []


PLUGINS = [
    pytest.param(group, name, id=f"{group}-{name}", marks=list_marks(group, name))
    for group in registry.GROUPS
    for name in ours(group)
]


@pytest.mark.parametrize(("group", "name"), PLUGINS)
def test_a_plugin_of_ours_keeps_to_the_contract(
    group: registry.Group, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.get(name, {})
    if name == "csv":
        (tmp_path / "table.csv").write_text(ROWS)
        settings = {"path": str(tmp_path / "table.csv"), "target": "paid"}
    if name == "flight-prices":
        data_folder = find_data_folder(f"{FLIGHT_FILE}.gz")
        monkeypatch.setenv("FEDSIM_DATA", str(write_thinned_flight_prices(data_folder, tmp_path)))
    if name == "index-file":
        shares = {client: list(range(client, EXAMPLES, CLIENTS)) for client in range(CLIENTS)}
        (tmp_path / "shares.json").write_text(json.dumps(shares))
        settings = {"path": str(tmp_path / "shares.json")}
    if name == "npz":
        series = np.random.default_rng(0).random((20, 2, 16))
        np.savez(tmp_path / "series.npz", x=series, y=np.arange(20) % 3)
        settings = {"path": str(tmp_path / "series.npz")}
    found = list(run_checks(group, name, settings))
    assert len(found) > 1 or not found[0].is_good, "nothing was checked"
    assert not [f"{outcome.requirement}: {outcome.reason}" for outcome in found if outcome.verdict == "failed"]
    if unknown := [outcome.reason for outcome in found if outcome.verdict == "not checked"]:
        assert group == "datasets" or name in OPEN | NEEDS_FILES, unknown
        if group == "datasets" or name in NEEDS_FILES:
            pytest.skip(unknown[0])
    assert "passed" in [outcome.verdict for outcome in found]


@pytest.mark.parametrize(("group", "name"), [plugin.values for plugin in PLUGINS])
def test_a_plugin_of_ours_is_in_the_style_of_the_house(group: registry.Group, name: str) -> None:
    cls = registry.load(group, name)
    assert is_metric_name(name) if group == "metrics" else KEBAB.fullmatch(name)
    if group in ("attacks", "defenses"):
        assert "Differs:" in inspect.getdoc(cls)
        assert 1980 < cls.paper.year < 2100
    if group == "defenses":
        assert cls.promise, "what it proves, or the words 'no formal guarantee'"
        assert cls.against, "against whom it defends"
        assert cls.cost, "what it costs"


def test_a_plugin_is_named_in_a_file_and_found(tmp_path: Path) -> None:
    lines = [f'[[attack]]\nname = "{name}"\n' for name in ours("attacks")]
    (tmp_path / "all.toml").write_text("".join(lines))
    tables: Any = load_config(tmp_path / "all.toml").attack
    assert [table.name for table in tables] == ours("attacks")
