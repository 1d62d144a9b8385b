"""Event files say, round by round, what the tables of a run say."""

from __future__ import annotations

import importlib.util
from statistics import fmean

import pandas as pd
import pytest

import fedsim
from fedsim.api import pipeline
from fedsim.base.errors import ConfigError
from fedsim.federation.config import AttackFile
from fedsim.federation.open_run import OpenRun
from fedsim.report.tensorboard import _as_folder, check_installed

TABLES = {
    "data": {"name": "digits"},
    "partition": {"name": "iid", "samples_per_client": 6, "test_fraction": 0.2},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"local_epochs": 1, "batch_size": 3, "learning_rate": 0.1},
    "federation": {"engine": "serial", "seed": 3, "clients": 2, "rounds": 2},
    "measure": [{"name": "gradient-norm"}],
    "adversary": {"victims": "all", "rounds": "all", "workers": 1},
    "attack": [{"name": "analytic"}],
    "report": {"tensorboard": True},
}


def read(folder):
    """By folder and tag, the value of each round."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for place in folder.iterdir():
        events = EventAccumulator(str(place)).Reload()
        for tag in events.Tags()["scalars"]:
            found[place.name, tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedsim.run(TABLES, out=tmp_path_factory.mktemp("events") / "run")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_event_files_hold_what_the_tables_of_the_run_hold(run):
    found = read(run.path / "tensorboard")
    assert {name for name, _ in found} == {"server", "clients", "analytic", "analytic, floor"}
    metrics = pd.read_csv(run.path / "metrics.csv")
    for who, whose in (("server", metrics.client == "server"), ("clients", metrics.client != "server")):
        for name in ("accuracy", "loss"):
            assert found[who, name] == pytest.approx(metrics[whose].groupby("round")[name].mean().to_dict())
    scores = run.scores[run.scores.metric == "psnr"]
    assert found["analytic", "score/psnr"] == pytest.approx(
        scores.groupby(scores["round"].astype(int)).value.mean().to_dict()
    )
    assert set(found["analytic, floor", "score/psnr"]) == {1, 2}
    exposed = pd.read_csv(run.path / "exposure.csv")
    whole = exposed[exposed["round"] == 2]
    assert found["clients", "exposure/gradient-norm norm"][2] == pytest.approx(fmean(whole.value))


@pytest.mark.parametrize(
    ("algorithm", "folders", "label"),
    [
        ("ditto", {"server", "own models of clients"}, "of the shared model)"),
        ("fedper", {"own models of clients, weighted mean", "own models of clients"}, "of the clients' own models)"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_accuracy_of_the_clients_own_models_is_labelled(algorithm, folders, label, tmp_path):
    tables = {name: table for name, table in TABLES.items() if name not in ("attack", "measure")}
    run = fedsim.run(tables | {"algorithm": {"name": algorithm}}, out=tmp_path / "run")
    assert {name for name, tag in read(run.path / "tensorboard") if tag == "accuracy"} == folders
    assert repr(run).endswith(label)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_new_report_replaces_the_event_files(run):
    before = read(run.path / "tensorboard")
    pipeline.report(OpenRun(run.path))
    files = list((run.path / "tensorboard").glob("*/*"))
    assert len(files) == len({file.parent for file in files})
    assert read(run.path / "tensorboard") == before


def test_a_run_that_does_not_ask_for_them_gets_none(tmp_path):
    tables = {name: table for name, table in TABLES.items() if name not in ("report", "attack", "measure")}
    run = fedsim.run(tables, out=tmp_path / "run")
    assert not (run.path / "tensorboard").exists()


@pytest.mark.thorough
def test_a_run_folder_with_event_files_can_be_overwritten(run):
    fedsim.run(TABLES, out=run.path, overwrite=True)


def test_titles_of_attacks_lead_out_of_no_folder_and_share_none():
    plain = ["server", "sme (alpha=0.5), floor"]
    assert [_as_folder(name) for name in plain] == plain
    odd = ["../../x", "..", "mod:Class", "mod_Class", "/etc", ""]
    folders = [_as_folder(name) for name in odd]
    assert len(set(folders)) == len(odd)
    assert not any("/" in folder or folder.startswith(".") or not folder for folder in folders)


def test_a_missing_package_is_told_before_any_work(tmp_path, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(
        "fedsim.report.tensorboard.find_spec", lambda name: None if name == "tensorboard" else there(name)
    )
    with pytest.raises(ConfigError, match="'tensorboard' is not installed; run `pip install tensorboard`"):
        fedsim.run(TABLES, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    check_installed(AttackFile())
