"""`fedsim run --app`: somebody's Flower app gets what runs have."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid

import fedsim
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import ConfigError, FedsimError, RunError, TrustError
from fedsim.base.randomness import use_one_thread
from fedsim.dossier.recomputation import compose_epsilons_again
from fedsim.federation import app_run
from fedsim.federation.app_file import AppFile
from fedsim.federation.app_ledger import prove_by_messages
from fedsim.federation.flower_app import read_app
from fedsim.federation.integrity import compare_with_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.report.reported_run import open_reported_run
from tests.support.commands import Call
from tests.support.flower_apps import ATTACK, CLIENT, PROJECT, SERVER, write_app


@pytest.fixture(autouse=True)
def fresh_modules() -> Iterator[None]:
    """Forget the modules of the app, which attacks import here, and where they are."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in ("small_task", "small_client", "small_server"):
        sys.modules.pop(name, None)


def hashes(run: Path) -> list[str]:
    """What the clients sent, by round and client."""
    transcript = Transcript(run)
    return [reply.sha256 for number in transcript.rounds for reply in transcript.header(number).replies]


def run(folder: Path, out: Path, **settings: Any) -> list[str]:
    fedsim.run_app(
        folder, None, out, set={"federation.clients": 3} | {k.replace("__", "."): v for k, v in settings.items()}
    )
    return hashes(out)


def test_an_app_is_run_recorded_attacked_and_scored(tmp_path: Path, call: Call) -> None:
    app = write_app(tmp_path / "app")
    sys.path.insert(0, str(app))
    truth = fedsim.write_truth(tmp_path / "truth", __import__("small_task").load_partition, range(3))
    table = "".join(f'{client} = "{path}"\n' for client, path in truth.items())
    (app / "attack.toml").write_text(f"{ATTACK}[truth]\n{table}")
    done = call(
        *("run", "--app", app, app / "attack.toml", "--out", tmp_path / "run"),
        *("--set", "run_config.num-server-rounds=2", "--set", "run_config.evaluate=1.0"),
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())  # lines are as wide as the terminal
    assert "As 3 clients reported in round 2, the model's accuracy on their 18 examples is" in said
    assert said.count("Clients train on 18 of the 18 examples that this app tests on") == 2, "and beside its accuracy"
    transcript = Transcript(tmp_path / "run")
    assert transcript.rounds == [1, 2]
    assert transcript.clients(1) == [0, 1, 2]
    scores = fedsim.open(tmp_path / "run").scores
    assert (scores[scores.metric == "psnr"].value > 60).sum() == 3
    text = (tmp_path / "run" / "report.html").read_text()
    for words in ("small-app, 3 clients", "num-server-rounds 2", "none, except for those of the app itself"):
        assert words in text
    assert "Clients train on 18 of the 18 examples" in text
    # The same file serves `fedsim attack`, unless it says that the app was run otherwise.
    again = call("attack", tmp_path / "run", app / "attack.toml")
    assert (again.returncode, "nothing new" in again.stdout) == (0, True), again.stderr
    (app / "attack.toml").write_text((app / "attack.toml").read_text().replace("clients = 3", "clients = 4"))
    other = call("attack", tmp_path / "run", app / "attack.toml")
    assert (other.returncode, "run it again with `fedsim run --app`" in other.stderr) == (2, True)


def test_an_app_that_changes_the_working_folder_is_recorded_where_it_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = write_app(Path("app"), small_server=f"import os\nos.makedirs('data')\nos.chdir('data')\n{SERVER}")
    assert len(run(app, Path("run"))) == 3
    assert not any((tmp_path / "data").iterdir())


def test_rows_that_clients_send_in_clear_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = CLIENT.replace("import ArrayRecord,", "import ArrayRecord, ConfigRecord,").replace(
        'RecordDict({"arrays"', 'RecordDict({"notes": ConfigRecord({"key": "x", "labels": labels.tolist()}), "arrays"'
    )
    run(write_app(tmp_path / "app", small_client=client), tmp_path / "run")
    assert "clients send 'notes.labels' in clear, with a row for each example" in caplog.text


def test_the_recording_changes_no_byte_and_the_seed_all(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    first, again = (run(app, tmp_path / name, run_config__evaluate=0.5) for name in "ab")
    other = run(app, tmp_path / "c", run_config__evaluate=0.5, federation__seed=1)
    assert first == again
    assert not set(first) & set(other)
    # Each client gets a message of its own, as over a network.
    assert {Transcript(tmp_path / "a").update(1, client).metrics["lr"] for client in range(3)} == {0.1}
    # As it is, without anybody who records: the same clients send the same.
    sent: dict[int, torch.Tensor] = {}
    file = AppFile.model_validate({"federation": {"clients": 3}})
    loaded = read_app(app)
    with use_one_thread():
        app_run._seed_process(0)
        server, client = loaded.load("serverapp"), loaded.load("clientapp")

        class Noting(app_run.ClientGrid):
            def answer_message(self, message: Any) -> Any:
                reply = super().answer_message(message)
                if message.metadata.message_type == "train":
                    state = reply.content["arrays"].to_torch_state_dict()
                    sent[self.partitions[message.metadata.dst_node_id]] = state["1.weight"]
                return reply

        settings = loaded.merge_config({"evaluate": 0.5})
        grid: Grid = Noting(client, file, settings)
        app_run._seed_process(0)
        server(grid, Context(1, 1, {}, RecordDict(), settings))
    transcript = Transcript(tmp_path / "a")
    assert sorted(sent) == transcript.clients(1)
    for client_id, tensor in sent.items():
        assert torch.equal(transcript.update(1, client_id).after["1.weight"], tensor)


def test_clients_are_called_by_their_partition_whatever_they_report(tmp_path: Path) -> None:
    """An app that counts clients from 1 would be scored against the truth of others, and have a ledger of others."""
    app = write_app(tmp_path / "app")
    client = (app / "small_client.py").read_text()
    reported = '"partition-id": 1 + context.node_config["partition-id"], "train_loss"'
    (app / "small_client.py").write_text(client.replace('"train_loss"', reported))
    run(app, tmp_path / "run", defense=[{"name": "update-noise", "noise_multiplier": 1.0}])
    recorded = fedsim.open(tmp_path / "run")
    assert Transcript(tmp_path / "run").clients(1) == sorted(recorded.ledger.client) == [0, 1, 2]


@pytest.mark.usefixtures("server_task")
def test_a_run_of_which_a_part_is_not_recorded_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Recorder, "write", fail)
    app = read_app(write_app(tmp_path / "app"))
    file = AppFile.model_validate({"federation": {"clients": 2}})
    job = app_run.AppJob(app=app, run_config=app.merge_config({}), file=file, recording=tmp_path / "transcript")
    with pytest.raises(RunError, match=r"not all that the app sent is recorded, .*; the first: .* no space left"):
        app_run.run_app_here(job)


LEGACY_CLIENT = """
import torch
from flwr.client import ClientApp, NumPyClient
from small_task import load_partition, make_model

class Small(NumPyClient):
    def fit(self, parameters, config):
        return [array + torch.randn(array.shape).numpy() for array in parameters], 6, {}

app = ClientApp(client_fn=lambda context: Small().to_client())
"""
LEGACY_SERVER = """
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from small_task import make_model

def server_fn(context):
    arrays = [tensor.numpy() for tensor in make_model().state_dict().values()]
    strategy = FedAvg(
        fraction_evaluate=0.0, min_available_clients=6, initial_parameters=ndarrays_to_parameters(arrays)
    )
    rounds = context.run_config["num-server-rounds"]
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds))

app = ServerApp(server_fn=server_fn)
"""


def test_a_server_of_the_legacy_api_aggregates_in_the_same_order(tmp_path: Path) -> None:
    """It asks in threads and keeps replies in a set, of which each run would make another sum."""
    app = write_app(tmp_path / "app", small_client=LEGACY_CLIENT, small_server=LEGACY_SERVER)
    changes = {"federation.clients": 6, "run_config.num-server-rounds": 2}
    broadcasts = set()
    for name in "abc":
        fedsim.run_app(app, None, tmp_path / name, set=changes)
        transcript = Transcript(tmp_path / name)
        assert [len(transcript.clients(number)) for number in transcript.rounds] == [6, 6]
        broadcasts.add(tuple(transcript.header(2).broadcasts))
    assert len(broadcasts) == 1


def test_settings_that_differ_from_the_file_are_those_of_the_run(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app", attack=ATTACK.replace('[[attack]]\nname = "spear-ica"\n', ""))
    changes = {"federation.clients": 2, "adversary.knowledge.num_classes": 9}
    done = fedsim.run_app(app, app / "attack.toml", tmp_path / "run", set=changes)
    assert done.transcript.clients(1) == [0, 1]
    assert done._file.spec is not None
    assert done._file.spec.adversary.knowledge.num_classes == 9


def test_what_a_client_draws_does_not_depend_on_the_others(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    few = run(app, tmp_path / "three")
    many = run(app, tmp_path / "five", federation__clients=5)
    assert few == many[:3]


def test_defenses_act_on_what_each_client_sends(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    clip = {"name": "update-noise", "clip": 0.01}
    plain = run(app, tmp_path / "plain")
    assert plain != run(app, tmp_path / "clipped", defense=[clip])
    for client in range(3):
        update = Transcript(tmp_path / "clipped").update(1, client)
        norm = torch.cat([tensor.flatten() for tensor in update.pseudo_gradient.values()]).norm()
        assert norm == pytest.approx(0.01, rel=1e-4)
    noisy = [{**clip, "noise_multiplier": 1.0}]
    first, again = (run(app, tmp_path / name, defense=noisy) for name in "ab")
    other = run(app, tmp_path / "c", defense=noisy, federation__seed=1)
    assert first == again != other
    # Of each client another draw: noise that is the same could be subtracted.
    moves = [Transcript(tmp_path / "a").update(1, client).pseudo_gradient["1.weight"] for client in range(3)]
    assert not torch.allclose(moves[0], moves[1], atol=1e-3)
    fedsim.run_app(app, None, tmp_path / "top", set={"federation.clients": 3, "defense": [{"name": "top-k"}]})
    assert Transcript(tmp_path / "top").update(1, 0).sends_delta  # and FedAvg gets it decoded
    assert "top-k" in (tmp_path / "top" / "report.html").read_text()


def test_an_app_has_a_privacy_ledger_where_the_number_of_messages_proves_something(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    noise = {"name": "update-noise", "clip": 0.5, "noise_multiplier": 8.0}
    out = tmp_path / "noisy"
    settings = {"federation.clients": 3, "defense": [noise], "run_config.num-server-rounds": 2}
    done = fedsim.run_app(app, None, out, set=settings)
    guarantee = prove_by_messages(UpdateNoise(clip=0.5, noise_multiplier=8.0), 2)
    assert guarantee is not None
    assert list(done.ledger.groupby("client").epsilon.max()) == [guarantee.epsilon] * 3
    page = (out / "report.html").read_text()
    assert f"ε = {guarantee.epsilon:.3g}, δ = 1e-05 after 2 rounds" in page
    assert compare_with_manifest(OpenRun(out)).differences == []
    assert [value.state for value in compose_epsilons_again(open_reported_run(OpenRun(out)))] == ["equal"] * 6
    dossier = fedsim.write_dossier(out)
    assert f"{guarantee.epsilon:.3g}" in dossier.page.read_text()
    # A clip alone proves nothing, and neither does what depends on how the app trains.
    clip = noise | {"noise_multiplier": 0.0}
    fedsim.run_app(app, None, tmp_path / "clip", set={"federation.clients": 3, "defense": [clip]})
    assert not (tmp_path / "clip" / "ledger.csv").exists()
    assert "the number of messages alone gives no guarantee" in (tmp_path / "clip" / "report.html").read_text()


def test_nothing_is_proved_of_what_clients_send_undefended(tmp_path: Path) -> None:
    settings = {"federation.clients": 3, "defense": [{"name": "update-noise", "clip": 0.5, "noise_multiplier": 8.0}]}
    # An app that catches all errors, and goes on, does not have its arrays passed for defended ones.
    ask = """
    from flwr.app import Message, RecordDict
    try:
        grid.send_and_receive([Message(RecordDict({"arrays": arrays}), n, "query.step") for n in grid.get_node_ids()])
    except Exception:
        pass
"""
    answer = """
@app.query("step")
def answer(message, context):
    return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)
"""
    app = write_app(tmp_path / "app", small_client=CLIENT + answer, small_server=SERVER + ask)
    with pytest.raises(RunError, match=r"clients reply to 'query.step' with arrays, and update-noise acts only on"):
        fedsim.run_app(app, None, tmp_path / "a", set=settings)
    assert not (tmp_path / "a" / "ledger.csv").exists()
    # Nor are bytes, whatever the message that they answer.
    answers = CLIENT.replace('"accuracy": accuracy})}', '"accuracy": accuracy}), "c": ConfigRecord({"w": b"1"})}')
    answers = answers.replace("import ArrayRecord,", "import ArrayRecord, ConfigRecord,")
    packed = write_app(tmp_path / "packed", small_client=answers)
    fedsim.run_app(packed, None, tmp_path / "b", set=settings | {"run_config.evaluate": 1.0})
    assert "clients also send 'c.w' as lists or bytes, on which no" in (tmp_path / "b" / "log.txt").read_text()
    assert not (tmp_path / "b" / "ledger.csv").exists()


def test_an_attack_may_be_told_of_the_defenses_of_an_app(tmp_path: Path) -> None:
    app = write_app(tmp_path / "app")
    sys.path.insert(0, str(app))
    truth = fedsim.write_truth(tmp_path / "truth", __import__("small_task").load_partition, range(3))
    table = "".join(f'{client} = "{path}"\n' for client, path in truth.items())
    attack = ATTACK.replace("[[attack]]", "defenses = true\nlabels = true\n[[attack]]", 1)
    attack = attack.replace('"spear-ica"', '"inverting-gradients"\niterations = 3')
    (app / "attack.toml").write_text(f"{attack}[truth]\n{table}")
    kept = {"name": "top-k", "fraction": 0.2}
    told = fedsim.run_app(app, app / "attack.toml", tmp_path / "told", set={"defense": [kept]})
    assert set(told.scores.attack) == {"inverting-gradients", "inverting-gradients adaptive"}
    values = told.scores[told.scores.metric == "mse"].groupby("attack").value.mean()
    assert values.nunique() == 2, "the adaptive form passes its gradients through the defense"
    with pytest.raises(ConfigError, match="fedsim puts no defense around the clients"):
        fedsim.run_app(app, app / "attack.toml", tmp_path / "plain")
    assert not (tmp_path / "plain").exists(), "said before the app runs"


def test_under_secure_aggregation_the_server_sees_sums(tmp_path: Path, call: Call) -> None:
    app = write_app(tmp_path / "app")
    run(app, tmp_path / "plain")
    fedsim.run_app(
        app, None, tmp_path / "sums", set={"federation.clients": 3, "secure_aggregation": {"groups": "all"},
        "run_config.num-server-rounds": 2},
    )  # fmt: skip
    plain, sums = Transcript(tmp_path / "plain"), Transcript(tmp_path / "sums")
    assert sums.rounds == [1, 2]
    assert sums.clients(1) == [0]
    total = sums.update(1, 0)
    assert (total.members, total.num_examples) == ((0, 1, 2), 18)
    assert dict(sums.header(1).failures) == {}
    assert not (tmp_path / "sums" / "messages").exists()  # which would say that members did not reply
    mean = torch.stack([plain.update(1, client).pseudo_gradient["1.weight"] for client in range(3)]).mean(0)
    assert torch.allclose(total.pseudo_gradient["1.weight"], mean, atol=1e-5)
    assert "sums over groups of all clients" in (tmp_path / "sums" / "report.html").read_text()
    krum = write_app(tmp_path / "krum", small_server=SERVER.replace("FedAvg", "Krum"))
    with pytest.raises(ConfigError, match="of this app, Krum, chooses among the updates of single clients"):
        fedsim.run_app(krum, None, tmp_path / "k", set={"secure_aggregation": {"groups": "all"}})


def test_updates_that_no_defense_would_act_on_are_refused(tmp_path: Path) -> None:
    defended = {"federation.clients": 3, "defense": [{"name": "top-k"}]}
    asks = CLIENT.replace("@app.train()", '@app.query("step")')
    server = SERVER.replace("strategy.start(", "(lambda *a, **k: grid.send_and_receive(ask(grid, arrays, config)))(")
    server += """
def ask(grid, arrays, config):
    from flwr.app import Message, RecordDict
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({"lr": config["lr"]})})
    return [Message(content, node, "query.step") for node in grid.get_node_ids()]
"""
    query = write_app(tmp_path / "query", small_client=asks, small_server=server)
    with pytest.raises(RunError, match=r"clients reply to 'query.step' with arrays, and top-k acts only on replies"):
        fedsim.run_app(query, None, tmp_path / "a", set=defended)
    fedsim.run_app(query, None, tmp_path / "b", set={"federation.clients": 3})  # undefended, it is recorded
    packed = CLIENT.replace('"arrays": ArrayRecord(model.state_dict()), ', '"packed": ConfigRecord({"w": [1.0]}), ')
    packed = packed.replace("import ArrayRecord,", "import ConfigRecord,")
    beside = CLIENT.replace("import ArrayRecord,", "import ArrayRecord, ConfigRecord,").replace(
        '"metrics": metrics}', '"metrics": metrics, "packed": ConfigRecord({"w": b"1", "name": "x"})}'
    )
    fedsim.run_app(write_app(tmp_path / "beside", small_client=beside), None, tmp_path / "d", set=defended)
    assert "clients also send 'packed.w' as lists or bytes, on which no" in (tmp_path / "d" / "log.txt").read_text()
    in_config = write_app(tmp_path / "packed", small_client=packed)
    with pytest.raises(RunError, match="has no record of arrays, so that no update in it would be defended"):
        fedsim.run_app(in_config, None, tmp_path / "c", set=defended)


def test_deltas_are_not_defended_as_if_they_were_weights(tmp_path: Path) -> None:
    """Of w_T - w_t, read as w_T, a clip would leave the start model."""
    before = 'before = message.content["arrays"].to_torch_state_dict()'
    sends = CLIENT.replace("    inputs, labels =", f"    {before}\n    inputs, labels =", 1)
    sends = sends.replace(
        "ArrayRecord(model.state_dict())", "ArrayRecord({n: t - before[n] for n, t in model.state_dict().items()})"
    )
    app = write_app(tmp_path / "app", small_client=sends)
    clip = {"federation.clients": 3, "defense": [{"name": "update-noise", "clip": 0.01}]}
    with pytest.raises(RunError, match=r"all clients failed, .* look like w_T - w_t or a gradient"):
        fedsim.run_app(app, None, tmp_path / "run", set=clip)
    with pytest.raises(RunError, match="defenses and sums read them as w_T"):
        fedsim.run_app(app, None, tmp_path / "sums", set={"secure_aggregation": {"groups": "all"}})
    with pytest.raises(ConfigError, match="clients send a delta, and fedsim's defenses and sums read"):
        fedsim.run_app(app, None, tmp_path / "stated", set={**clip, "app.replies": "delta"})
    fedsim.run_app(app, None, tmp_path / "plain", set={"federation.clients": 3, "app.replies": "delta"})


BROKEN = {
    "pyproject": ("[tool.x]\n", r"has no table \[tool.flwr.app\], so it is of no Flower app"),
    "no clientapp": (PROJECT.replace("clientapp", "other"), "names no clientapp, expected `clientapp = "),
    "no module": (PROJECT.replace("small_client:app", "no_such:app"), "'no_such:app' does not load: ModuleNotFound"),
    "no attribute": (
        PROJECT.replace("small_client:app", "small_client:nothing"),
        "'small_client:nothing' does not load",
    ),
    "swapped": (PROJECT.replace("small_client:app", "small_server:app"), "is a ServerApp, expected a ClientApp"),
    "list": (PROJECT + "sizes = [1]\n", "config.sizes: expected a number, a text, true or false"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_folders_that_are_no_app_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    text, words = BROKEN[name]
    with pytest.raises(FedsimError, match=words):
        fedsim.run_app(write_app(tmp_path / "app", pyproject=text), None, tmp_path / "run")


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "key": (
        {"run_config.rounds": 3},
        r"run_config.rounds: is not a setting of the app .*, known: evaluate, lr, num-server",
    ),
    "type": ({"run_config.lr": "x"}, "run_config.lr: expected float, as in the app's pyproject.toml, got 'x'"),
    "hook": (
        {"defense": [{"name": "dp-sgd", "noise_multiplier": 1.0}]},
        "'dp-sgd' cannot act on the update of an app: DpSgd: .* acts inside local",
    ),
    "attack": ({"attack": [{"name": "sem"}]}, "did you mean 'sme'"),
    "groups": (
        {"secure_aggregation": {"groups": 20}},
        "groups: expected at most federation.clients = 10, and 2 clients or more, got 20",
    ),
    "threshold": (
        {"secure_aggregation": {"threshold": 11}},
        "threshold: 11 of a group have to answer, but federation.clients is 10; lower it",
    ),
    "victims": ({"adversary.victims": [10]}, "adversary.victims: expected clients from 0 to 9, got 10"),
    "masked top-k": (
        {"secure_aggregation": {"groups": "all"}, "defense": [{"name": "top-k"}]},
        "top-k sends the update in another form",
    ),
    "data": ({"data.name": "digits"}, "data: unknown key"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_an_app_cannot_have_are_refused_before_it_runs(tmp_path: Path, name: str) -> None:
    changes, words = SETTINGS[name]
    with pytest.raises(FedsimError, match=words):
        fedsim.run_app(write_app(tmp_path / "app"), None, tmp_path / "run", set=changes)
    assert not (tmp_path / "run").exists()


def test_what_an_app_does_wrong_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    broken = CLIENT.replace("    model = make_model()", "    raise ValueError('no data')", 1)
    with pytest.raises(RunError, match=r"all clients failed, .* client \d, message 'train': .*no data"):
        fedsim.run_app(write_app(tmp_path / "a", small_client=broken), None, tmp_path / "run-a")
    simulation = SERVER.replace(
        "    config = context", "    from flwr.simulation import run_simulation as r; r()\n    config = context"
    )
    with pytest.raises(ConfigError, match="the app starts its own simulation"):
        fedsim.run_app(write_app(tmp_path / "b", small_server=simulation), None, tmp_path / "run-b")
    ends = SERVER.replace("    config = context", "    raise SystemExit(3)\n    config = context")
    with pytest.raises(RunError, match="its serverapp ended before its last round"):
        fedsim.run_app(write_app(tmp_path / "c", small_server=ends), None, tmp_path / "run-c")
    waiting = SERVER.replace(
        "    strategy.start(", "    while len(list(grid.get_node_ids())) < 11: pass\n    strategy.start("
    )
    with pytest.raises(RunError, match=r"federation\.clients: the server of this app waits for more than 10 clients"):
        fedsim.run_app(write_app(tmp_path / "w", small_server=waiting), None, tmp_path / "run-w")
    idle = SERVER.replace("    strategy.start(", "    return\n    strategy.start(")
    with pytest.raises(RunError, match="sent no message to any client"):
        fedsim.run_app(write_app(tmp_path / "d", small_server=idle), None, tmp_path / "run-d")


def test_code_in_a_run_folder_is_not_run_unasked(tmp_path: Path, call: Call) -> None:
    (tmp_path / "shared" / "transcript").mkdir(parents=True)
    (tmp_path / "shared" / "transcript" / "round-000001.safetensors").touch()
    marker = tmp_path / "ran"
    app = write_app(tmp_path / "shared" / "app", small_task=f"open({str(marker)!r}, 'w')\nraise ValueError\n")
    with pytest.raises(TrustError, match="in a run folder, whose code is not run unasked; pass --trust"):
        fedsim.run_app(app, None, tmp_path / "run")
    assert call("run", "--app", app, "--out", tmp_path / "run").returncode == 2
    assert not marker.exists()
    assert call("run", "--app", app, "--out", tmp_path / "run", "--trust").returncode == 2  # it raises ValueError
    assert marker.exists()
    assert "cannot be resumed" in call("run", "--app", app, "--resume", tmp_path / "run").stderr
