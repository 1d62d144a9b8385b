"""Recordings of somebody's Flower app: what the auditor says of them, and what is refused without any truth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import fedsim
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from fedsim import CuriousGrid, Transcript
from fedsim.audit.attack_cost import warn_of_cost
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.evaluation.truth import write_truth
from fedsim.audit.finding_files import load_claim
from fedsim.audit.threat_model import grant_knowledge
from fedsim.base.errors import ConfigError, DataError, FedsimError, TranscriptError
from fedsim.federation.config import AttackFile
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Inference
from fedsim.recording.message_format import MessageFormat
from fedsim.recording.messages import RecordedExchange, RecordedMessage, write_messages
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import State, Update
from tests.adversaries.exact.test_exact_attacks import digits
from tests.support.experiments import make_tiny_config, run_serial
from tests.support.recordings import build_update

COUNT, CLASSES = 6, 10
MODELS = """
import torch
from torch import nn

def mlp(out=10, hidden=120):
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, out))

def binary(): return mlp(1)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()
    def forward(self, inputs): return {"features": inputs, "logits": self.inner(inputs)}

def logits(returned, inputs): return returned["logits"]

class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp(64)
    def forward(self, inputs): return self.inner(inputs)

def frozen_head():
    model = mlp()
    model[3].requires_grad_(False)
    return model

def fresh_head():
    model = frozen_head()
    nn.init.normal_(model[3].weight, generator=torch.Generator().manual_seed(torch.seed() % 1000))
    return model

class Auxiliary(nn.Sequential):
    def __init__(self):
        super().__init__(*mlp())
        self.head = nn.Linear(120, 3)
    def forward(self, inputs):
        for layer in list(self)[:4]: inputs = layer(inputs)
        return inputs

def auxiliary(): return Auxiliary()

class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(64, 10)
    def forward(self, inputs):
        rows = inputs.flatten(1)[:, None]
        return self.last(torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)[:, 0])

def attentive(): return Attentive()

def wide(): return mlp(10, 130)
def one_per_example(outputs, labels): return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
def as_training(outputs, labels): return torch.nn.functional.cross_entropy(outputs, labels)
"""


KNOWN = {"model": "models_of_an_app:mlp", "input_shape": [1, 8, 8], "value_range": [0.0, 1.0]}


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "models_of_an_app.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("models_of_an_app", None)


def built(name: str) -> nn.Module:
    module: nn.Module = getattr(__import__("models_of_an_app"), name)()
    return module


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def plain_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    outputs = model(inputs)
    return cross_entropy(outputs["logits"] if isinstance(outputs, dict) else outputs, labels)


def trained(model: nn.Module, key: int = 0, loss: Loss = plain_loss, steps: int = 4) -> tuple[State, State, Tensor]:
    """w_t, w_T and the images that a client trained on."""
    inputs, labels = digits(COUNT, key)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    moving = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(steps):
        moving.zero_grad()
        loss(model, inputs, labels).backward()
        moving.step()
    return before, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}, inputs


def record(folder: Path, before: State, sent: State, num_examples: int = COUNT, **also: Any) -> None:
    """What a curious server of that app would write: the arrays as they are."""
    payload = Payload.from_dense(sent, "weights")
    update = Update(round=1, client=7, before=before, payload=payload, num_examples=num_examples, **also)
    Recorder(folder / "transcript").write(1, [update])


def attacked(folder: Path, app: dict[str, Any] | None = None, truth: dict[str, str] | None = None, **known: Any) -> Any:
    """Scores of `spear-ica` on that recording, and the failures."""
    knowledge = KNOWN | {"num_classes": CLASSES} | known
    tables = {
        "adversary": {"workers": 1, "knowledge": {k: v for k, v in knowledge.items() if v is not None}},
        "attack": [{"name": "spear-ica"}],
        "app": app or {},
        "truth": truth or {},
    }
    audit = open_audit(folder, validate_tables(AttackFile, tables, "attack.toml"), folder.parent)
    failures = audit.run()
    return audit.score(), failures


def psnr_of(folder: Path, inputs: Tensor, app: dict[str, Any] | None = None, **known: Any) -> float:
    truth = write_truth(folder.parent / "truth", lambda client: (inputs, torch.zeros(len(inputs)).long()), [7])
    rows, failures = attacked(folder, app, truth, **known)
    assert failures == []
    (row,) = [row for row in rows if row["metric"] == "psnr"]
    return float(row["value"])


def delta(before: State, after: State) -> State:
    return {name: after[name] - tensor for name, tensor in before.items()}


# What the auditor may say.


def test_replies_that_are_deltas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, inputs = trained(built("mlp"))
    record(tmp_path / "run", before, delta(before, after))
    assert psnr_of(tmp_path / "run", inputs, {"replies": "delta"}) > 60
    assert "looks like a delta" not in caplog.text
    attacked(tmp_path / "run")
    assert 'it looks like a delta or a gradient, which [app] replies = "delta" or "gradient" says' in caplog.text


def test_weights_that_are_read_as_deltas(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, _ = trained(built("mlp"))
    record(tmp_path / "run", before, after)
    attacked(tmp_path / "run", {"replies": "delta"})
    assert "its reply is read as a delta, and looks like the weights that it was sent" in caplog.text


def test_replies_that_are_gradients(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"), steps=1)
    record(tmp_path / "run", before, {name: -20 * t for name, t in delta(before, after).items()})
    assert psnr_of(tmp_path / "run", inputs, {"replies": "gradient"}) > 60


def test_names_with_a_prefix_in_one_of_two_records_in_double_precision(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    sent = [{f"m/_orig_mod.{n}": t.double() for n, t in state.items()} for state in (before, after)]
    control = {"c/x": torch.ones(2)}
    record(tmp_path / "run", sent[0] | control, sent[1] | control, records=("m", "c"))
    app = {"record": "m", "prefix": "_orig_mod."}
    assert psnr_of(tmp_path / "run", inputs, app) > 60
    for changed, words in (
        ({"record": ""}, r"which of them holds the model is not said; name one with \[app\] record"),
        ({"record": "x"}, "none is called 'x'"),
        ({"prefix": "x."}, r"no tensor has a name that begins with 'x.', but for instance '_orig_mod.1.weight'; fix"),
        ({"prefix": ""}, "the model has no '_orig_mod.1.weight'"),
    ):
        with pytest.raises(FedsimError, match=words):
            attacked(tmp_path / "run", app | changed)


def test_arrays_that_are_not_of_the_model_and_a_reply_of_the_trained_part(tmp_path: Path) -> None:
    """Arrays without names of the model, one of which is a counter; the part that is trained alone comes back."""
    before, after, inputs = trained(built("frozen_head"))
    names = list(before)
    extra = {"counter": torch.ones(3)}
    sent = {str(place): tensor for place, tensor in enumerate([*extra.values(), *before.values()])}
    numbers = {name: str(place + 1) for place, name in enumerate(names)}
    back = {numbers[name]: tensor for name, tensor in after.items() if name.startswith("1.")} | {"0": torch.ones(3)}
    record(tmp_path / "run", sent, back)
    app = {"names": ["", *names], "frozen": True}
    assert psnr_of(tmp_path / "run", inputs, app, model="models_of_an_app:frozen_head") > 60
    with pytest.raises(FedsimError, match=r'"" for those that are not of the model'):
        attacked(tmp_path / "run", app | {"names": names}, model="models_of_an_app:frozen_head")


def test_updates_in_answers_to_queries_are_attacked_as_others(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    arrays = [{"model": {name: tensor.numpy() for name, tensor in state.items()}} for state in (before, after)]
    sent, reply = (RecordedMessage(node=7, client=7, arrays=held) for held in arrays)
    messages = RecordedExchange(number=1, kind="query.step", round=0, recorded_as=0, sent=[sent], replies=[reply])
    write_messages(tmp_path / "run" / "messages", messages)
    with pytest.raises(ConfigError, match="holds no recording"):
        attacked(tmp_path / "run")
    app = {"messages": "query.step", "num_examples": COUNT}
    assert psnr_of(tmp_path / "run", inputs, app) > 60
    assert psnr_of(tmp_path / "run", inputs, app) > 60  # from what was recorded the first time


def test_a_part_of_the_model_by_the_names_that_it_has_there(tmp_path: Path) -> None:
    before, after, inputs = trained(built("frozen_head"))
    sent = [
        {name.removeprefix("1."): t for name, t in state.items() if name.startswith("1.")} for state in (before, after)
    ]
    record(tmp_path / "run", *sent)
    app = {"module": "1", "frozen": True}
    assert psnr_of(tmp_path / "run", inputs, app, model="models_of_an_app:frozen_head") > 60


def test_sources_among_clients_whose_ids_do_not_fit_into_int64(tmp_path: Path) -> None:
    """Flower draws ids of nodes from all of 64 bits."""
    nodes = [(1 << 63) + 5, (1 << 64) - 1]
    (before, after, _), (_, other, _) = (trained(built("mlp"), key, steps=200) for key in (0, 1))
    sent = [build_update(before, s, client=c, num_examples=COUNT) for c, s in zip(nodes, (after, other), strict=True)]
    Recorder(tmp_path / "run" / "transcript").write(1, sent)
    truth = write_truth(tmp_path / "truth", lambda client: digits(COUNT, nodes.index(int(client))), nodes)
    adversary = {"workers": 1, "victims": nodes, "knowledge": {"records": True, **KNOWN, "num_classes": CLASSES}}
    tables = {"adversary": adversary, "attack": [{"name": "sia"}], "truth": truth}
    audit = open_audit(tmp_path / "run", validate_tables(AttackFile, tables, "attack.toml"), tmp_path)
    assert audit.run() == []
    for node in nodes:
        finding, about = load_claim(audit.folder.findings / "sia" / f"round-1-client-{node}-repeat-0.safetensors")
        assert isinstance(finding, Inference)
        assert about["victim"] == node
        assert finding.candidates.tolist() == nodes
        assert finding.predictions.tolist() == [node] * COUNT


def test_arrays_in_another_order_with_inputs_first(tmp_path: Path) -> None:
    """As Flax and scikit-learn have them; through `Run.attack` as well, which knows what the attack file says."""
    before, after, inputs = trained(built("mlp"))
    names = ["1.bias", "1.weight", "3.bias", "3.weight"]
    sent = [{f"{k}": state[name].t().contiguous() for k, name in enumerate(names)} for state in (before, after)]
    record(tmp_path / "run", *sent)
    app = {"names": names, "transposed": True}
    assert psnr_of(tmp_path / "run", inputs, app) > 60
    with pytest.raises(ConfigError, match=r"'1.weight' \(120, 64\) is recorded as \(64, 120\)"):
        attacked(tmp_path / "run", app | {"transposed": False})
    with pytest.raises(TranscriptError, match=r"4 tensors were sent, and \[app\] names has 3; name each"):
        attacked(tmp_path / "run", app | {"names": names[:3]})
    (tmp_path / "attack.toml").write_text(
        '[adversary.knowledge]\nmodel = "models_of_an_app:mlp"\ninput_shape = [1, 8, 8]\nvalue_range = [0.0, 1.0]\n'
        f"num_classes = 10\n[app]\nnames = {names}\ntransposed = true\n"
    )
    finding = fedsim.open(tmp_path / "run", file=tmp_path / "attack.toml").attack("spear-ica")
    assert finding.certified.all()


def test_readings_of_images_of_more_dimensions() -> None:
    kernel = torch.rand(3, 5, 2, 7)  # height width input output
    assert torch.equal(MessageFormat(transposed=True)._transpose(kernel)[4, 1], kernel[..., 1, 4])


def test_a_number_of_examples_that_nobody_reported(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    record(tmp_path / "run", before, after, num_examples=0)
    _, failures = attacked(tmp_path / "run")
    assert "it reported no number of examples that it trained on; say it with [app] num_examples" in failures[0]
    assert psnr_of(tmp_path / "run", inputs, {"num_examples": {"7": COUNT}}) > 60
    # Under another name it is a metric.
    record(tmp_path / "named", before, after, num_examples=0, metrics={"loss": 2.5, "n_samples": 6.0})
    _, failures = attacked(tmp_path / "named")
    assert "trained on, but n_samples 6, of which one may be it; say it with" in failures[0]
    # A client that stops early sends back what it was sent.
    record(tmp_path / "still", before, before, num_examples=0)
    _, failures = attacked(tmp_path / "still")
    assert "it answered with the model that it was sent, and no number of examples: it did not train" in failures[0]
    record(tmp_path / "other", before, after, num_examples=0)
    assert psnr_of(tmp_path / "other", inputs, {"num_examples": COUNT}) > 60


def test_outputs_that_are_no_tensor(tmp_path: Path) -> None:
    before, after, inputs = trained(built("Two"))
    record(tmp_path / "run", before, after)
    with pytest.raises(ConfigError, match="returns a dict, expected a tensor of logits; say how to make one of it"):
        attacked(tmp_path / "run", model="models_of_an_app:Two")
    found = psnr_of(tmp_path / "run", inputs, {"outputs": "models_of_an_app:logits"}, model="models_of_an_app:Two")
    assert found > 60


def test_parameters_that_are_frozen_and_not_sent(tmp_path: Path) -> None:
    before, after, inputs = trained(built("frozen_head"))
    sent = [{name: t for name, t in state.items() if name.startswith("1.")} for state in (before, after)]
    record(tmp_path / "run", *sent)
    model = "models_of_an_app:frozen_head"
    with pytest.raises(ConfigError, match=r"does not fit round 1 of client 7: '3.weight' \(10, 120\) is not there"):
        attacked(tmp_path / "run", model=model)
    assert psnr_of(tmp_path / "run", inputs, {"frozen": True}, model=model) > 60


def test_parameters_that_are_sent_and_not_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, inputs = trained(built("frozen_head"))
    record(tmp_path / "run", before, after)
    assert psnr_of(tmp_path / "run", inputs, model="models_of_an_app:frozen_head") > 60
    assert "moved in no reply" not in caplog.text
    attacked(tmp_path / "run")  # with a model of which all is trained
    assert "round 1: 3.weight, 3.bias moved in no reply; if clients do not train them" in caplog.text


@pytest.mark.parametrize("loss", ["bce", "models_of_an_app:as_training"])
def test_another_loss(tmp_path: Path, loss: str) -> None:
    def binary(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(model(inputs).squeeze(1), (labels > 4).float())

    name = "binary" if loss == "bce" else "mlp"
    before, after, inputs = trained(built(name), loss=binary if loss == "bce" else plain_loss)
    record(tmp_path / "run", before, after)
    known = {"model": f"models_of_an_app:{name}", "num_classes": 2 if loss == "bce" else CLASSES, "loss": loss}
    assert psnr_of(tmp_path / "run", inputs, **known) > 60


def test_binary_cross_entropy_is_that_of_two_logits_of_which_one_is_zero(tmp_path: Path) -> None:
    tables = {"knowledge": {"model": "models_of_an_app:binary", "loss": "bce"}}
    spec = validate_tables(AttackFile, {"adversary": tables, "attack": [{"name": "spear-ica"}]}, "x")
    known = grant_knowledge(spec.adversary, ForeignRecording({}), tmp_path)
    assert known.model is not None
    assert known.loss is not None
    inputs, labels = digits(5)[0], torch.tensor([0, 1, 1, 0, 1])
    expected = binary_cross_entropy_with_logits(built("binary")(inputs).squeeze(1), labels.float())
    assert torch.allclose(known.loss(known.model()(inputs), labels), expected)


# What is refused before anything is attacked.


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (
            {"model": "models_of_an_app:wide"},
            r"'1.weight' \(130, 64\) is recorded as \(120, 64\); '1.bias' \(130,\) is recorded as \(120,\); '3.weight'",
        ),
        ({"model": "models_of_an_app:Autoencoder"}, "the model has no '1.weight'"),
        ({"num_classes": 4}, r"gives outputs of shape \(2, 10\) for 2 examples, expected \(2, 4\)"),
        ({"input_shape": [1, 9, 9]}, r"does not take 2 inputs of shape \(1, 9, 9\)"),
        ({"loss": "models_of_an_app:one_per_example"}, r"gives shape \(2,\) for 2 examples, expected one number"),
        ({"loss": "crossentropy"}, "'crossentropy' is unknown to fedsim, did you mean 'cross-entropy'"),
        ({"loss": "models_of_an_app:nothing"}, "nothing"),
    ],
)
def test_what_cannot_be_the_apps_model_or_loss(tmp_path: Path, known: dict[str, Any], words: str) -> None:
    record(tmp_path / "run", *trained(built("mlp"))[:2])
    with pytest.raises(FedsimError, match=words):
        attacked(tmp_path / "run", **known)
    assert not list((tmp_path / "run").glob("findings/*/*"))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"data": torch.rand(6, 1, 9, 9), "labels": torch.zeros(6).long()}, r"have shape \(1, 9, 9\), input_shape is"),
        ({"data": torch.rand(6, 1, 8, 8), "labels": torch.full((6,), 11)}, "its labels are from 11 to 11, expected 0"),
    ],
    ids=["shape", "labels"],
)
def test_truth_that_cannot_be_of_this_model(tmp_path: Path, tensors: dict[str, Tensor], words: str) -> None:
    record(tmp_path / "run", *trained(built("mlp"))[:2])
    save_file(tensors, tmp_path / "held.safetensors")
    with pytest.raises(DataError, match=words):
        attacked(tmp_path / "run", truth={"7": "held.safetensors"})


def test_tables_that_only_recordings_of_others_have(tmp_path: Path) -> None:
    for tables in ({"app": {"replies": "delta"}}, {"adversary": {"knowledge": {"loss": "mse"}}}):
        with pytest.raises(ConfigError, match=r"a federation (has|defines)"):
            fedsim.run({"model": {"name": "mlp"}, **tables}, out=tmp_path / "run")


def test_replies_that_are_all_identical_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, _ = trained(built("mlp"))
    updates = [build_update(before, after, client=k, num_examples=COUNT) for k in (7, 8)]
    Recorder(tmp_path / "run" / "transcript").write(1, updates)
    attacked(tmp_path / "run")
    assert "round 1: all 2 replies are identical" in caplog.text


def test_a_long_attack_is_told_of_with_the_setting_that_shortens_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "run", *trained(built("mlp"))[:2])
    known = fedsim.Knowledge(
        model=lambda: built("mlp"), input_shape=(1, 8, 8), value_range=([0.0], [1.0]), num_classes=CLASSES
    )
    warn_of_cost([("sme", SurrogateModelExtension(iterations=10))], Transcript(tmp_path / "run"), known)
    assert caplog.text == ""
    monkeypatch.setattr("fedsim.audit.attack_cost._measure_pass", lambda *_: (1 << 40, 1.0))
    monkeypatch.setattr("fedsim.audit.attack_cost.free_memory", lambda: 2_000_000_000)  # in a container, say
    warn_of_cost([("sme", SurrogateModelExtension(iterations=1000))], Transcript(tmp_path / "run"), known)
    assert "an attack on 6 examples takes about 6597.1 GB, 2.0 GB are free" in caplog.text
    assert (
        "sme: about 25 minutes for a client with 6 examples; attack.sme.iterations (now 1000) lowers that"
        in caplog.text
    )


# Truth, by what clients are called.


def test_a_partition_mod_names_the_client_and_leaves_the_metrics_alone(tmp_path: Path) -> None:
    app = ClientApp(mods=[fedsim.partition_mod])

    @app.train()
    def train(message: Message, context: Any) -> Message:
        arrays = ArrayRecord({"w": Array(torch.ones(2).numpy())})
        return Message(RecordDict({"a": arrays, "m": MetricRecord({"num-examples": 5})}), reply_to=message)

    grid = CuriousGrid(InProcessGrid(app, 3), tmp_path)
    content = RecordDict({"a": ArrayRecord({"w": Array(torch.zeros(2).numpy())}), "c": ConfigRecord()})
    replies = list(grid.send_and_receive([Message(content, node, "train") for node in grid.get_node_ids()]))
    assert all(dict(reply.content.metric_records["m"]) == {"num-examples": 5} for reply in replies)
    assert Transcript(tmp_path).clients(1) == [0, 1, 2]
    assert not (tmp_path / "run-1" / "messages").exists()


def test_truth_by_order_of_appearance(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    record(tmp_path / "run", before, after)
    (path,) = write_truth(tmp_path / "truth", lambda client: (inputs, torch.zeros(COUNT).long()), [7]).values()
    rows, _ = attacked(tmp_path / "run", truth={"#1": path})
    assert any(row["metric"] == "psnr" and float(row["value"]) > 60 for row in rows)
    with pytest.raises(ConfigError, match=r"truth.#2: 1 clients are recorded; expected #1 to #1"):
        attacked(tmp_path / "run", truth={"#2": path})


def test_truth_is_written_of_whatever_gives_inputs_and_labels(tmp_path: Path) -> None:
    inputs, labels = digits(5)
    held: list[Any] = [
        ((inputs - 0.5) * 2, labels),
        [((x - 0.5) * 2, y) for x, y in zip(inputs, labels, strict=True)],
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset((inputs - 0.5) * 2, labels), batch_size=2),
    ]
    table = write_truth(tmp_path, lambda client: held[client], range(3), value_range=(-1.0, 1.0))
    for path in table.values():
        found = load_file(path)
        assert torch.allclose(found["data"], inputs, atol=1e-6)
        assert torch.equal(found["labels"], labels)
    with pytest.raises(DataError, match=r"client 0: its inputs lie in \[-1, 1\], value_range is \[0.0, 1.0\]"):
        write_truth(tmp_path, lambda client: held[client], [0])
    with pytest.raises(DataError, match="client 0: its data are not inputs and labels"):
        write_truth(tmp_path, lambda client: 3, [0])


def test_a_recording_without_updates_says_what_it_holds(tmp_path: Path) -> None:
    app = ClientApp()
    app.query()(lambda message, context: Message(RecordDict(), reply_to=message))
    with CuriousGrid(InProcessGrid(app, 2), tmp_path) as grid:
        list(grid.send_and_receive([Message(RecordDict(), node, "query") for node in grid.get_node_ids()]))
    with pytest.raises(TranscriptError, match="holds no recording of updates, but 1 other exchange of messages"):
        attacked(tmp_path / "run-1")
    (query,) = fedsim.open(tmp_path / "run-1").messages
    assert (query.kind, [reply.node for reply in query.replies]) == ("query", [2, 3])


def test_a_recording_of_failures_alone_is_said(tmp_path: Path) -> None:
    Recorder(tmp_path / "run" / "transcript").write(1, [], {3: "no reply"})
    with pytest.raises(TranscriptError, match=r"holds no update; fedsim inspect --rows lists what failed \(1\)"):
        attacked(tmp_path / "run")


def test_one_odd_client_or_round_does_not_keep_the_others_from_being_attacked(tmp_path: Path) -> None:
    before, after, inputs = trained(built("mlp"))
    kept = {"m/" + name: tensor for name, tensor in before.items()}
    fine = Payload.from_dense({"m/" + name: tensor for name, tensor in after.items()}, "weights")
    odd = Payload.from_dense({"z/w": torch.ones(2)}, "weights")
    updates = [
        Update(round=2, client=7, before=kept, payload=fine, num_examples=COUNT, records=("m",)),
        Update(round=2, client=8, before=kept, payload=odd, num_examples=COUNT, records=("z",)),
    ]
    Recorder(tmp_path / "run" / "transcript").write(2, updates)
    (tmp_path / "run" / "transcript" / "round-000001.safetensors").write_bytes(b"damaged")
    truth = write_truth(tmp_path / "truth", lambda client: (inputs, torch.zeros(len(inputs)).long()), [7])
    tables = {
        "adversary": {"workers": 1, "rounds": [2], "victims": [7], "knowledge": {**KNOWN, "num_classes": CLASSES}},
        "attack": [{"name": "spear-ica"}],
        "app": {"record": "m"},
        "truth": truth,
    }
    audit = open_audit(tmp_path / "run", validate_tables(AttackFile, tables, "attack.toml"), tmp_path)
    assert audit.run() == []
    assert [row["value"] > 60 for row in audit.score() if row["metric"] == "psnr"] == [True]


def test_what_the_estimate_of_cost_cannot_compute_stops_no_attack(tmp_path: Path) -> None:
    before, after, inputs = trained(built("auxiliary"))
    record(tmp_path / "run", before, after)
    assert psnr_of(tmp_path / "run", inputs, model="models_of_an_app:auxiliary") > 60
    transcript = Transcript(tmp_path / "run")
    for name in ("auxiliary", "attentive"):
        known = {**KNOWN, "model": f"models_of_an_app:{name}", "num_classes": CLASSES}
        table = validate_tables(AttackFile, {"adversary": {"knowledge": known}}, "attack.toml").adversary
        warn_of_cost(
            [("sme", SurrogateModelExtension(iterations=10))],
            transcript,
            grant_knowledge(table, ForeignRecording({}), tmp_path),
        )


def test_all_is_sent_and_the_trained_part_comes_back(tmp_path: Path) -> None:
    before, after, inputs = trained(built("frozen_head"))
    returned = {name: tensor for name, tensor in after.items() if name.startswith("1.")}
    record(tmp_path / "run", before, returned)
    model = "models_of_an_app:frozen_head"
    assert psnr_of(tmp_path / "run", inputs, {"frozen": True}, model=model) > 60
    record(tmp_path / "other", before | {"3.weight": torch.ones(10, 120)}, returned)
    with pytest.raises(ConfigError, match=r"its frozen '3.weight' has other values than the server sent; load"):
        attacked(tmp_path / "other", {"frozen": True}, model=model)


def test_constants_that_differ_each_time_that_the_model_is_built(tmp_path: Path) -> None:
    before, after, _ = trained(built("frozen_head"))
    sent = [{name: t for name, t in state.items() if name.startswith("1.")} for state in (before, after)]
    record(tmp_path / "run", *sent)
    with pytest.raises(ConfigError, match=r"its frozen '3.weight' has other values each time it is built"):
        attacked(tmp_path / "run", {"frozen": True}, model="models_of_an_app:fresh_head")


def test_another_precision_than_the_model(tmp_path: Path) -> None:
    """Attacks compute in one type; of float64 weights the difference is taken first."""
    before, after, inputs = trained(built("mlp").double(), loss=lambda m, x, y: plain_loss(m, x.double(), y))
    record(tmp_path / "run", before, after)
    assert psnr_of(tmp_path / "run", inputs, {}) > 60


def test_truth_of_nobody_of_one_twice_and_of_another_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, after, inputs = trained(built("mlp"))
    record(tmp_path / "run", before, after)
    (file,) = write_truth(tmp_path / "truth", lambda client: (inputs[:3], torch.zeros(3).long()), [7]).values()
    with pytest.raises(ConfigError, match=r"truth: none of its clients \(99\) is recorded; recorded: 7; clients are"):
        attacked(tmp_path / "run", truth={"99": file})
    with pytest.raises(ConfigError, match=r"truth\.#1: names client 7, as another key does"):
        attacked(tmp_path / "run", truth={"7": file, "#1": file})
    attacked(tmp_path / "run", truth={"7": file})
    assert "truth.7: has 3 examples, and N is 6; if clients count batches, say N" in caplog.text


def test_a_run_of_fedsim_needs_nobody_to_say_what_it_means(tmp_path: Path) -> None:
    run = run_serial(make_tiny_config(partition={"samples_per_client": 8}), tmp_path / "own")
    with pytest.raises(ConfigError, match=r"whose messages are known; leave \[app\] out"):
        attacked(run.path, {"replies": "gradient"}, model=None, input_shape=None, value_range=None, num_classes=None)
