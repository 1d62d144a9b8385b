"""A sweep file that cannot be is refused in one sentence that names what is wrong, before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.base.errors import ConfigError
from fedsim.sweeps.file import SweepFile, parse_sweep, read_sweep

SME = {"attack": [{"name": "sme"}]}


def of(tmp_path: Path, text: str) -> SweepFile:
    (tmp_path / "study.toml").write_text(text, encoding="utf-8")
    return read_sweep(tmp_path / "study.toml")


def test_axes_may_be_written_with_and_without_quotes(tmp_path: Path) -> None:
    file = of(
        tmp_path,
        "[sweep.axes]\n'training.batch_size' = [1]\ntraining.local_epochs = [1, 5]\nmodel = [{ name = 'mlp' }]",
    )
    assert list(file.sweep.axes) == ["training.batch_size", "training.local_epochs", "model"]


def test_the_base_is_beside_the_sweep_file_and_its_paths_beside_the_base(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    (tmp_path / "bases" / "base.toml").write_text('[model]\nstart = "trained.safetensors"\n', encoding="utf-8")
    file = of(tmp_path, '[sweep]\nbase = "bases/base.toml"\n')
    assert file.base["model"]["start"] == str((tmp_path / "bases" / "trained.safetensors").resolve())


def test_changes_reach_the_base_and_the_sweep_itself(tmp_path: Path) -> None:
    tables = {"sweep": {"seeds": [1, 2]}, "federation": {"rounds": 1}}
    changes = [("sweep.seeds", [5]), ("federation.rounds", 3), ("training.local_epochs", 2)]
    file = parse_sweep(tables, "sweep", tmp_path, changes=changes)
    assert file.sweep.seeds == [5]
    assert file.base == {"federation": {"rounds": 3}, "training": {"local_epochs": 2}}


def test_a_change_may_name_another_base(tmp_path: Path) -> None:
    for clients in (2, 3):
        (tmp_path / f"base-{clients}.toml").write_text(f"[federation]\nclients = {clients}\n", encoding="utf-8")
    tables = {"sweep": {"base": "base-2.toml"}}
    file = parse_sweep(tables, "sweep", tmp_path, changes=[("federation.rounds", 1), ("sweep.base", "base-3.toml")])
    assert file.base == {"federation": {"clients": 3, "rounds": 1}}


def test_a_change_of_the_whole_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^set sweep: name a key of it, such as sweep\.seeds$"):
        parse_sweep({"sweep": {}}, "sweep", tmp_path, changes=[("sweep", 3)])


def test_what_is_kept_of_a_file_is_the_same_sweep(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[federation]\nclients = 3\n", encoding="utf-8")
    file = of(tmp_path, '[sweep]\nbase = "base.toml"\nseeds = [1]\n[sweep.axes]\n"training.local_epochs" = [1, 5]\n')
    again = parse_sweep(file.tables, "again", tmp_path)
    assert again.sweep.axes == file.sweep.axes
    assert again.base == file.base


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[federation]\nrounds = 1", ["has no [sweep] table", "fedsim run"]),
        ("[sweep]\nseed = [1]", ["sweep: seed", "unknown key", "did you mean 'seeds'?"]),
        ("[sweep]\nseeds = []", ["seeds", "the list is empty"]),
        ("[sweep]\nseeds = [1, 2, 1]", ["seeds", "1 is named twice"]),
        ("[sweep]\nseeds = [-1]", ["seeds"]),
        ("[sweep.axes]\ntrainig.local_epochs = [1]", ["'trainig.local_epochs' names no key", "'training'?"]),
        ("[sweep.axes]\n'training.local_epochs' = []", ["'training.local_epochs'", "the list is empty"]),
        ("[sweep.axes]\n'training.local_epochs' = 5", ["training.local_epochs"]),
        ("[sweep.axes]\n'federation.seed' = [1]", ["federation.seed", "seeds = [...]"]),
        ("[sweep.axes]\nfederation = [{clients = 3}, {seed = 4}]", ["'federation'", "seeds = [...]"]),
        ("[sweep.axes]\n'federation.engine' = ['ray']", ["'federation.engine' is the same in all cells"]),
        ("[sweep.axes]\nfederation = [{actors = 2}]", ["'federation.actors' is the same in all cells"]),
        ("[sweep.axes]\n'adversary.workers' = [1, 2]", ["'adversary.workers' is the same in all cells"]),
        ("[sweep.axes]\n'training..x' = [1]", ["expected a key"]),
        ("[sweep]\naddress = 'auto'", ["address", "on = \"ray\""]),
        ("[sweep]\nzip = [['model', 'defense']]\n[sweep.axes]\nmodel = [{}]", ["zip", "'defense' is not an axis"]),
        (
            "[sweep]\nzip = [['training.batch_size', 'training.local_epochs']]\n[sweep.axes]\n"
            "'training.batch_size' = [1, 2]\n'training.local_epochs' = [1]",
            ["zip", "'training.batch_size' has 2 values", "equally many"],
        ),
        ("[sweep]\nzip = [['model'], ['model']]\n[sweep.axes]\nmodel = [{}]", ["'model' is named twice"]),
        ("[sweep]\nbase = 'nowhere.toml'", ["nowhere.toml", "cannot be read"]),
        ("[sweep]\nbase = 'study.toml'", ["sweep.base: ", "study.toml is a sweep"]),
        (
            "[sweep.axes]\ntraining.local_epochs = [1]\n'training.local_epochs' = [2]",
            ["'training.local_epochs' is there twice", "with quotes and without"],
        ),
        ("[sweep]\n[[exclude]]\nattack = 'sme'", ["exclude: is a key of the sweep; write [[sweep.exclude]]"]),
        ("[sweep]\nbase = 'base.toml'\n[axes]\nmodel = [{}]", ["axes: is a key of the sweep; write [sweep.axes]"]),
        ("seeds = [1]\n[sweep]", ["seeds: is a key of the sweep; write seeds below [sweep]"]),
        ("[sweep]\nbase = 'base.toml'\n[federation]\nrounds = 2", ["federation", "base.toml (sweep.base)"]),
    ],
)  # fmt: skip
def test_bad_input_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        of(tmp_path, text)
    assert [
        word for word in ["study.toml" if "nowhere" not in text else "nowhere", *words] if word not in str(error.value)
    ] == []
