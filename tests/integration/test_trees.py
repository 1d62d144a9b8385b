"""A Flower app that trains trees: recorded, what it says in clear, attacked and scored beside public records."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic

import fedsim
from fedsim.base.errors import ConfigError
from tests.support.commands import call_fedsim
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.recordings import record_updates
from tests.support.trees import grow_tree, model_bytes, tree_update

xgboost = pytest.importorskip("xgboost")
RNG = np.random.default_rng(1)
ROWS = RNG.integers(0, 20, size=(160, 4)).astype(np.float32)
LABELS = (ROWS[:, 0] + ROWS[:, 1] + RNG.normal(size=160) * 4 > 20).astype(int)
PARAMETERS = {"objective": "binary:logistic", "max_depth": 3, "nthread": 1}
CLIENTS, EACH = 3, 40
KNOWLEDGE = """
[adversary]
rounds = "all"
victims = "all"

[adversary.knowledge]
model = false
input_shape = [4]
columns = [1, 1, 1, 1]
value_range = [[0.0, 0.0, 0.0, 0.0], [20.0, 20.0, 20.0, 20.0]]
num_classes = 2
auxiliary = {auxiliary}

[[attack]]
name = "timberstrike"

[truth]
{truth}
"""


def load_data(client: int) -> tuple[Any, Any]:
    """Return the records of a client, or after the last one those that no client has."""
    mine = slice(EACH * client, EACH * (client + 1))
    return ROWS[mine], LABELS[mine]


def make_app(*, whole: bool) -> ClientApp:
    """Return an app that sends its new tree, or the whole model."""
    app = ClientApp(mods=[fedsim.partition_mod])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        rows, labels = load_data(context.node_config["partition-id"])
        sent = message.content["arrays"]["0"].numpy().tobytes()
        model = xgboost.Booster(PARAMETERS)
        matrix = xgboost.DMatrix(rows, label=labels)
        if sent:
            model.load_model(bytearray(sent))
            model.update(matrix, model.num_boosted_rounds())
            model = model if whole else model[model.num_boosted_rounds() - 1 :]
        else:
            model = xgboost.train(PARAMETERS, matrix, num_boost_round=1)
        arrays = ArrayRecord([np.frombuffer(model.save_raw("json"), np.uint8)])
        metrics = MetricRecord({"num-examples": len(labels)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


@pytest.fixture(scope="module", params=["bagging", "cyclic"])
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a recording of six rounds, with the attack files beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    whole = request.param == "cyclic"
    strategy = (FedXgbCyclic if whole else FedXgbBagging)(fraction_evaluate=0.0)
    grid = fedsim.InProcessGrid(make_app(whole=whole), CLIENTS)
    nothing = ArrayRecord([np.frombuffer(b"", np.uint8)])
    fedsim.Curious(strategy, folder / "recording").start(grid, nothing, num_rounds=6)
    limits = [0.0] * 4, [20.0] * 4
    table = fedsim.write_truth(
        folder / "truth", load_data, range(CLIENTS), value_range=limits, public=load_data(CLIENTS)
    )
    truth = "\n".join(f'{client} = "{path}"' for client, path in table.items())
    for auxiliary in ("true", "false"):
        (folder / f"{auxiliary}.toml").write_text(KNOWLEDGE.format(auxiliary=auxiliary, truth=truth))
    return folder


def first_client(recording: Path) -> int:
    """Return the client that made the first tree, whose records are counted."""
    return fedsim.open(recording / "recording").transcript.clients(1)[0]


@pytest.mark.parametrize("auxiliary", ["true", "false"])
def test_records_are_claimed_and_scored_beside_public_ones(recording: Path, auxiliary: str, tmp_path: Path) -> None:
    shutil.copytree(recording / "recording", tmp_path / "recording")
    victim = first_client(recording)
    run = fedsim.open(tmp_path / "recording", file=recording / f"{auxiliary}.toml")
    finding = run.attack("timberstrike", victim=victim)
    assert len(finding.data) == EACH
    scores = run.scores.set_index("metric")
    assert scores.loc["label_accuracy", "value"] == 1.0
    # The best guess from public records has about half of the values.
    assert scores.loc["columns_right", "floor"] > 0.4
    if auxiliary == "true":
        assert scores.loc["columns_right", "value"] > 0.4
        claims = {tuple(row) for row in (20 * finding.data).round().int().tolist()}
        assert claims <= {tuple(row) for row in load_data(CLIENTS)[0].astype(int).tolist()}


def test_what_is_in_clear_is_inspected(recording: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = call_fedsim("inspect", recording / "recording", capfd=capfd).stdout
    client = first_client(recording)
    row = next(line for line in text.splitlines() if line.startswith(f"│ {client} "))
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[2] == "0.3, 1"
    assert cells[4:6] == [str(EACH), str(int(load_data(client)[1].sum()))]
    assert "came with shape" not in text


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content = model_bytes([grow_tree(ROWS, LABELS, (0, 9.0, None, None))], 4).replace(b"binary:logistic", b"rank:map")
    record_updates(tmp_path / "transcript", [tree_update(b"", content, num_examples=160)])
    text = call_fedsim("inspect", tmp_path, capfd=capfd).stdout
    assert "not read: round 1, client 0: its objective is 'rank:map', expected binary:logistic" in text


def test_a_data_set_has_public_records_of_its_own(tmp_path: Path) -> None:
    run_serial(make_tiny_config(), tmp_path / "run")
    (tmp_path / "attack.toml").write_text('[truth]\npublic = "nothing.safetensors"\n\n[[attack]]\nname = "dlg"\n')
    with pytest.raises(ConfigError, match=r"truth\.public: the data set of this run has test examples"):
        fedsim.open(tmp_path / "run", file=tmp_path / "attack.toml").attack("dlg")


def test_auxiliary_records_need_a_public_file(recording: Path, tmp_path: Path) -> None:
    text = (recording / "true.toml").read_text()
    (tmp_path / "attack.toml").write_text(re.sub("public = .*", "", text))
    with pytest.raises(ConfigError, match=r"or name a file of auxiliary ones as truth\.public"):
        fedsim.open(recording / "recording", file=tmp_path / "attack.toml").attack("timberstrike")
