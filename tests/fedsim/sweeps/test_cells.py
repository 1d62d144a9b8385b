"""A cell is found again by what it follows from, and by nothing else; what cannot be is told from what is mistyped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsim.audit import score_reuse
from fedsim.base.errors import ConfigError, DataError, FedsimError, PluginError
from fedsim.data import Dataset
from fedsim.data.digits import Digits
from fedsim.plugins import code_hashes, registry
from fedsim.sweeps import cells as cells_module
from fedsim.sweeps.cells import InvalidPoint, SweepCell, build_cells
from fedsim.sweeps.file import parse_sweep
from fedsim.sweeps.grid import build_grid
from tests.support.packages import write_package

SME, IG = {"name": "sme"}, {"name": "inverting-gradients"}
BASE: dict[str, Any] = {
    "partition": {"name": "iid", "samples_per_client": 8},
    "model": {"name": "mlp", "hidden": [8]},
    "federation": {"clients": 4, "rounds": 2},
    "attack": [SME],
}


def cells(axes: dict[str, list[Any]] | None = None, folder: Path = Path("/nowhere"), **tables: Any) -> list[Any]:
    merged = {name: {**BASE.get(name, {}), **t} if isinstance(t, dict) else t for name, t in tables.items()}
    sweep = {"sweep": {"axes": axes or {}}, **BASE, **merged}
    return build_cells(build_grid(parse_sweep(sweep, "study.toml", folder)), trust=False)


def the_cell(**tables: Any) -> SweepCell:
    (cell,) = cells(**tables)
    assert isinstance(cell, SweepCell)
    return cell


def test_cells_of_one_federation_share_it_and_differ() -> None:
    found = cells({"attack": [SME, {**SME, "iterations": 9}, IG], "adversary.victims": [[0], [1]]})
    assert len({cell.federation for cell in found}) == 1
    assert len({cell.key for cell in found}) == 6


@pytest.mark.parametrize(
    "tables",
    [
        {"federation": {"engine": "ray", "actors": 2}},
        {"adversary": {"workers": 4, "when": "in-round"}},
        {"attack": [{**SME, "label": "theirs"}]},
        {"model": {"batch_norm": False}},  # its default, written out
        {"recording": {"fsync": True}},
    ],
)
def test_what_changes_no_result_changes_no_key(tables: dict[str, Any]) -> None:
    assert the_cell(**tables).key == the_cell().key


@pytest.mark.parametrize(
    "tables",
    [
        {"federation": {"rounds": 3}},
        {"federation": {"seed": 1}},
        {"federation": {"evaluate_every": 2}},
        {"model": {"hidden": [9]}},
        {"defense": [{"name": "top-k"}]},
        {"recording": {"rounds": [1]}},
        {"secure_aggregation": {"groups": 2}},
    ],
)
def test_what_changes_a_federation_changes_both_keys(tables: dict[str, Any]) -> None:
    assert the_cell(**tables).federation != the_cell().federation
    assert the_cell(**tables).key != the_cell().key


@pytest.mark.parametrize("tables", [{"adversary": {"repeats": 2}}, {"adversary": {"knowledge": {"labels": True}}}])
def test_what_changes_an_adversary_changes_the_cell_alone(tables: dict[str, Any]) -> None:
    assert the_cell(**tables).federation == the_cell().federation
    assert the_cell(**tables).key != the_cell().key


def test_a_file_that_a_setting_names_counts_by_its_content(tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    keys = []
    for value in (0.0, 1.0):
        save_file({"w": torch.full((2,), value)}, start)
        keys.append(the_cell(folder=tmp_path, model={"start": "start.safetensors"}).federation)
    assert keys[0] != keys[1]
    start.unlink()
    with pytest.raises(ConfigError, match=r"model\.start: .*start\.safetensors: cannot be read"):
        the_cell(folder=tmp_path, model={"start": "start.safetensors"})


def test_a_cell_runs_in_one_process_and_its_federation_attacks_nobody() -> None:
    cell = the_cell(federation={"engine": "ray", "actors": 2}, adversary={"victims": [1]})
    assert (cell.config.federation.engine, cell.config.adversary.workers) == ("serial", 1)
    assert cell.federation_config.attack == []
    assert cell.federation_config.adversary.when == "never"


def test_an_attack_brings_those_that_it_builds_on() -> None:
    sia = {"name": "sia", "source": "decoded"}
    lmra = {"name": "lmra", "label": "decoded"}
    for found in (cells(attack=[lmra, sia]), cells({"attack": [lmra, sia]})):
        alone, both = found
        assert [table.title for table in alone.config.attack] == ["lmra"]
        assert [table.title for table in both.config.attack] == ["decoded", "sia"]
        assert both.title == "sia"


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        ({"name": "sia", "source": "optimal"}, True),
        ({"name": "shared-model"}, True),
        ({"name": "sia"}, False),
        ({"name": "lmra"}, False),
        (SME, False),
    ],
)
def test_what_reads_a_model_that_nobody_had_to_attack_is_a_baseline(attack: dict[str, Any], expected: bool) -> None:
    assert the_cell(attack=[attack]).is_baseline is expected


def test_a_contradiction_of_two_values_leaves_a_cell_out() -> None:
    found = cells({"federation.clients": [4, 8], "adversary.victims": [[0], [7]]})
    (odd,) = (item for item in found if isinstance(item, InvalidPoint))
    assert (odd.point.labels["federation.clients"], odd.point.labels["adversary.victims"]) == ("4", "[7]")
    assert "expected clients from 0 to 3, got 7" in odd.reason


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"training.local_epoch": [1, 5]}, "training.local_epoch: unknown key, did you mean 'local_epochs'?"),
        ({"training.local_epochs": [1, 0]}, "local_epochs"),
        ({"strategy": [{"name": "fedavg"}, {"name": "fedavg", "fraction_train": 7}]}, "fraction_train"),
        ({"attack": [IG, {**SME, "iteration": 3}]}, "attack.sme.iteration: unknown setting"),
        ({"model": [{"name": "mlp", "hiden": [2]}]}, "hiden"),
        ({"attack.smee.iterations": [1]}, "no tables are called 'smee', did you mean 'sme'?"),
        ({"attack": [{"nme": "sme"}]}, "name"),
        ({"defense": [[{"name": "top-q"}], []]}, "did you mean 'top-k'?"),
        ({"attack": [{"name": "sia", "source": "lmar"}, {"name": "lmra"}]}, "there is no attack 'lmar'"),
    ],
)
def test_a_value_with_which_no_cell_can_be_is_a_mistake(axes: dict[str, list[Any]], words: str) -> None:
    with pytest.raises(FedsimError) as error:
        cells(axes)
    assert isinstance(error.value, ConfigError | PluginError)
    assert words in str(error.value)
    assert isinstance(error.value, PluginError) or str(error.value).startswith("study.toml: ")


def test_two_cells_with_the_same_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="same settings") as error:
        cells({"model": [{"name": "mlp"}, {"name": "mlp", "hidden": [200]}]})
    assert "model=mlp, attack=sme, seed=0; and model=mlp hidden=[200], attack=sme, seed=0" in str(error.value)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ({"name": "femnist", "folder": "mine"}, [f"leaf/mine/{part}/a.json" for part in ("train", "test")]),
        (
            {"name": "mnist"},
            [f"MNIST/raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")],
        ),
    ],
)
def test_data_count_by_what_is_in_their_files_wherever_the_folder_is(
    data: dict[str, Any], names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for folder, content in (("a", "{}"), ("b", "{}"), ("b", "{ }")):
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_text(content)
        monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / folder))
        keys.append(the_cell(data=data).federation)
    assert keys[0] == keys[1] != keys[2]
    (tmp_path / "b" / names[-1]).unlink()
    with pytest.raises(DataError, match="b/"):
        the_cell(data=data)


def test_scores_by_another_network_are_of_another_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LPIPS by AlexNet and by SqueezeNet cannot be compared, so a sweep scores its cells anew."""
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "squeezenet1_1-a.pth").write_text("squeeze")
    by_squeeze = the_cell()
    (tmp_path / "weights" / "alexnet-a.pth").write_text("alex")
    by_alex = the_cell()
    assert by_alex.key != by_squeeze.key
    assert by_alex.federation == by_squeeze.federation


def test_scores_by_other_code_of_a_metric_are_of_another_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = the_cell()
    keys = set()
    for code in ("ab", "cd"):
        monkeypatch.setattr(score_reuse, "hash_metric_code", lambda code=code: {"their_error": code})
        cell = the_cell()
        assert cell.federation == plain.federation
        keys.add(cell.key)
    assert len(keys | {plain.key}) == 3


@pytest.mark.parametrize("group", ["modalities", pytest.param("findings", marks=pytest.mark.thorough)])
def test_scores_by_other_code_of_a_modality_or_an_evaluator_are_of_another_cell(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = registry.PLUGIN_METHODS[group]  # type: ignore[index]
    plain, keys = the_cell(), set()
    for number in (1, 2):
        name = f"judge_{tmp_path.name}_{number}"
        code = f"class Judge:\n    def {method}(self):\n        return {number}\n"
        write_package(tmp_path / name, name, code, {group: {"theirs": "Judge"}})
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / name)
            registry._entry_points.cache_clear()
            cell = the_cell()
        registry._entry_points.cache_clear()
        assert cell.federation == plain.federation
        keys.add(cell.key)
    assert len(keys | {plain.key}) == 3


def test_data_that_come_in_no_file_count_by_their_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    before, load = the_cell().federation, Digits.load

    def relabelled(self: Digits, folder: Path | None) -> Dataset:
        found = load(self, folder)
        return replace(found, train=replace(found.train, labels=found.train.labels.roll(1)))

    monkeypatch.setattr(Digits, "load", relabelled)
    assert the_cell().federation != before
    monkeypatch.undo()
    assert the_cell().federation == before


def test_a_cell_is_not_found_again_after_fedsim_was_edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = the_cell()
    for folder in ("fedsim/plugins", "adversaries"):
        (tmp_path / folder).mkdir(parents=True)
    module = tmp_path / "fedsim/plugins/code_hashes.py"
    monkeypatch.setattr(code_hashes, "__file__", str(module))
    hash_own_checkout = code_hashes.hash_own_checkout.__wrapped__
    assert hash_own_checkout() is None, "a release says by its version what it is"
    (tmp_path / "pyproject.toml").touch()
    for code in ("a = 1", "a = 2"):
        (tmp_path / "adversaries/sme.py").write_text(code)
        monkeypatch.setattr(cells_module, "hash_own_checkout", hash_own_checkout)
        after = the_cell()
        assert after.key != before.key
        assert after.federation != before.federation
        before = after
