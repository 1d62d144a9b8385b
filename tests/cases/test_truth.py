"""The truth is held against the message that it is said to explain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import fedsim
from clients.defenses.update_noise import UpdateNoise
from fedsim.audit.audit import open_audit
from fedsim.audit.evaluation.doubts import collect_doubts, raise_doubt
from fedsim.audit.evaluation.evaluator import EvaluationContext
from fedsim.audit.evaluation.foreign_recording import ForeignRecording
from fedsim.audit.evaluation.retraining import Retraining
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.evaluation.truth_fit import find_complaint
from fedsim.audit.threat_model import full_knowledge
from fedsim.audit.truth_files import check_truth, warn_of_unmatched_names
from fedsim.base import table_metrics
from fedsim.base.errors import DataError
from fedsim.federation.config import AttackFile
from fedsim.federation.integrity import start_late_manifest
from fedsim.federation.open_run import OpenRun
from fedsim.federation.table_validation import validate_tables
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.payloads import Kind, Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.wire_format import Update
from fedsim.report.verdicts import score_readings
from tests.support.measurements import measure_claims
from tests.support.recordings import build_update, record_updates


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))


def held_by(client: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(client)
    return torch.rand((2, 1, 4, 4), generator=draw), torch.randint(3, (2,), generator=draw)


def record_weights(folder: Path, step: float = 0.1) -> None:
    updates = []
    for client in (0, 1):
        model, (inputs, labels) = make_model(), held_by(client)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        cross_entropy(model(inputs), labels).backward()
        after = {name: p.detach() - step * p.grad for name, p in model.named_parameters() if p.grad is not None}
        payload = Payload.from_dense(after, "weights")
        updates.append(Update(round=1, client=client, before=before, payload=payload, num_examples=2))
    Recorder(folder / "run" / "transcript").write(1, updates)


def describe_attack(folder: Path, truth: tuple[int, int], **others: Any) -> AttackFile:
    """An attack on client 0 with truth files that say of these clients that they are 0 and 1."""
    table = fedsim.write_truth(folder / "truth", lambda client: held_by(truth[int(client)]), [0, 1])
    known = {"model": "a_module:make_model", "input_shape": [1, 4, 4], "value_range": [0.0, 1.0], "num_classes": 3}
    tables: dict[str, Any] = {
        "adversary": {"workers": 1, "victims": [0], "knowledge": known},
        "attack": [{"name": "inverting-gradients", "iterations": 1}],
        "truth": table,
    }
    return validate_tables(AttackFile, tables | others, "attack.toml")


def scored_psnr(folder: Path, clients: tuple[int, int]) -> list[float]:
    record_weights(folder)
    audit = open_audit(folder / "run", describe_attack(folder, clients), folder)
    assert audit.run() == []
    return [float(row["value"]) for row in audit.score() if row["metric"] == "psnr"]


@pytest.fixture
def a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def make_model(): return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("a_module")
def test_a_finding_is_scored_as_its_messages_were_read(tmp_path: Path) -> None:
    record_weights(tmp_path)
    before = open_audit(tmp_path / "run", describe_attack(tmp_path, (0, 1)), tmp_path)
    assert before.run() == []
    scores = before.score()
    assert "l_sim" in {row["metric"] for row in scores}
    now = describe_attack(tmp_path, (0, 1), app={"replies": "gradient"}, attack=[{"name": "label-counts"}])
    # With and without the scores that are there; as texts, since NaN is no number.
    for _ in range(2):
        rows = open_audit(tmp_path / "run", now, tmp_path).score()
        assert [{name: str(row[name]) for name in scores[0]} for row in rows] == [
            {name: str(value) for name, value in row.items()} for row in scores
        ]
        (tmp_path / "run" / "score-inputs.json").unlink()


@pytest.mark.usefixtures("a_module")
def test_another_clients_truth_is_named_and_nothing_is_scored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(scored_psnr(tmp_path / "right", (0, 1))) == 1
    assert "not scored" not in caplog.text
    assert scored_psnr(tmp_path / "swapped", (1, 0)) == []
    assert "what truth.0 says that it held does not explain its message (1 - cosine" in caplog.text
    assert "and what client 1 is said to have held does (0.000); fix [truth]" in caplog.text


@pytest.mark.usefixtures("a_module")
@pytest.mark.parametrize("acts", [True, False])
def test_a_defense_excuses_a_truth_that_explains_nothing_in_its_rounds_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, acts: bool
) -> None:
    defense = UpdateNoise(noise_multiplier=1.0)
    monkeypatch.setattr(UpdateNoise, "acts_in", lambda self, number: acts)
    monkeypatch.setattr(
        "fedsim.audit.audit.full_knowledge", lambda *facts: replace(full_knowledge(*facts), defenses=[defense])
    )
    monkeypatch.setattr("fedsim.audit.evaluation.truth_fit.UNRELATED", 0.0)
    assert bool(scored_psnr(tmp_path / "others", (2, 3))) == acts
    assert ("nor do those of any other client" in caplog.text) == (not acts)


@pytest.mark.usefixtures("a_module")
@pytest.mark.parametrize("defended", [True, False])
def test_a_truth_that_explains_nothing_is_scored_where_the_app_is_said_to_be_defended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, defended: bool
) -> None:
    monkeypatch.setattr("fedsim.audit.evaluation.truth_fit.UNRELATED", 0.0)
    folder = tmp_path / "others"
    record_weights(folder)
    files = describe_attack(folder, (2, 3))
    before = open_audit(folder / "run", files, folder)
    assert before.run() == []
    assert not [row for row in before.score() if row["metric"] == "psnr"]
    assert "say defended = true in [app]" in caplog.text
    if defended:
        files = describe_attack(folder, (2, 3), app={"defended": True})
    after = open_audit(folder / "run", files, folder)
    assert len(after.run()) == 0, "the attack is not made again"
    assert bool([row for row in after.score() if row["metric"] == "psnr"]) == defended
    assert ("it is scored, since the app is said to be defended" in caplog.text) == defended


@pytest.mark.usefixtures("a_module")
def test_no_finding_of_any_kind_is_scored_against_a_truth_that_is_another_clients(tmp_path: Path) -> None:
    folder = tmp_path / "kinds"
    record_weights(folder)
    spec = describe_attack(folder, (1, 0), attack=[{"name": "label-counts"}])
    audit, failures = open_audit(folder / "run", spec, folder), list[str]()
    assert audit.run() == []
    assert audit.score(failures) == []
    assert "and what client 1 is said to have held does" in failures[0]


TRAINING = {"learning_rate": 0.1, "optimizer": "sgd", "batch_size": 2, "local_epochs": 1}


def complaint_about(
    folder: Path, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], reply: Kind = "weights", scale: float = 1.0
) -> str:
    """What is said of a truth file that holds the data of client 0 after a change."""
    model, (inputs, labels) = make_model(), held_by(0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cross_entropy(model(inputs), labels).backward()
    gradient = {name: scale * p.grad for name, p in model.named_parameters() if p.grad is not None}
    sent = gradient if reply == "gradient" else {name: before[name] - 0.1 * gradient[name] for name in before}
    update = build_update(before, sent, reply, num_examples=2)
    transcript = record_updates(folder / "transcript", [update])
    table = fedsim.write_truth(folder, lambda client: change(inputs, labels), [0])
    known = Knowledge(model=make_model, loss=cross_entropy, value_range=((0.0,), (1.0,)), **TRAINING)
    context = EvaluationContext(
        case=ForeignRecording({"0": Path(table["0"])}),
        open_recording=lambda: transcript,
        knowledge=known,
        optimum=lambda client, **options: {},
    )
    claim = Reconstruction(data=inputs, labels=labels)
    return find_complaint(claim, {"attack": "sme", "victim": 0, "first_round": 1, "members": []}, context)


@pytest.mark.parametrize(
    ("change", "reply", "scale", "words"),
    [
        (lambda x, y: (x, y), "weights", 1.0, ""),
        (lambda x, y: (x, y), "gradient", 1.0, ""),
        (lambda x, y: (1 - x, y), "weights", 1.0, "gives another message (1 - cosine"),
        (lambda x, y: (1 - x, y), "gradient", 1.0, "gives another message (1 - cosine"),
        (lambda x, y: (x, (y + 1) % 3), "weights", 1.0, "truth.0"),
        (lambda x, y: (x, y), "gradient", -1.0, "points the opposite way"),
        (lambda x, y: (x, y), "weights", -1.0, "points the opposite way"),
    ],
)
def test_the_truth_gives_the_message_or_is_not_scored(
    tmp_path: Path,
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    reply: Kind,
    scale: float,
    words: str,
) -> None:
    complaint = complaint_about(tmp_path, change, reply, scale)
    assert words in complaint
    assert bool(complaint) == bool(words)


def test_a_gradient_that_sums_over_examples_is_said_to_be_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert complaint_about(tmp_path, lambda x, y: (x, y), "gradient", 2.0) == ""
    assert "its message is 2 times as long as training on truth.0" in caplog.text


def test_numbers_that_public_rows_do_not_spread_are_right_where_they_are_exact() -> None:
    rows = torch.tensor([[0.25, 1.0, 0.0], [0.75, 0.0, 1.0]])
    for deviations in (torch.zeros(3), torch.full((3,), float("nan"))):
        assert table_metrics.find_correct_columns(rows, rows, [1, 2], deviations).all()
        assert not table_metrics.find_correct_columns(rows + torch.tensor([0.01, 0, 0]), rows, [1, 2], deviations)[
            :, 0
        ].any()


def test_words_behind_the_end_of_a_text_are_not_part_of_it() -> None:
    truth = Truth(data=torch.tensor([[5, 6, 0, 0]]), labels=torch.tensor([0]), padding=0)
    for claimed, whole in (([5, 6, 0, 0], 1.0), ([5, 6, 7, 0], 0.0)):
        found = measure_claims(torch.tensor([claimed]), truth, None)["recovered"]
        assert isinstance(found, Tensor)
        assert found.item() == whole


def case_of_sums(folder: Path, clients: Sequence[int], groups: Collection[tuple[int, ...]]) -> ForeignRecording:
    table = fedsim.write_truth(folder, held_by, clients)
    return ForeignRecording({client: Path(file) for client, file in table.items()}, groups=groups)


def test_a_sum_is_scored_against_the_examples_of_all_its_members(tmp_path: Path) -> None:
    case = case_of_sums(tmp_path, (0, 1, 2), [(0, 1), (0, 2)])
    for other in (1, 2):
        truth = case.truth(0, None, (0, other))
        assert truth is not None
        assert torch.equal(truth.data, torch.cat([held_by(0)[0], held_by(other)[0]]))


@pytest.mark.parametrize(
    ("clients", "groups", "sentence"),
    [
        ((0,), [(0, 1), (0, 2)], "in a sum over clients 0, 2, and one file cannot hold"),
        ((0,), [(0, 1), (0,)], "in its own messages, and one file cannot hold"),
        ((0, 1), [(0, 1, 2)], "several have a file, and 2 none"),
    ],
)
def test_a_file_that_cannot_hold_the_examples_of_a_sum_is_named(
    tmp_path: Path, clients: Sequence[int], groups: list[tuple[int, ...]], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        case_of_sums(tmp_path, clients, groups).truth(0, None, groups[0])


@pytest.mark.parametrize(("named", "is_warned"), [(("0", "7"), True), (("0", "1", "7"), False), (("0",), False)])
def test_names_that_are_none_of_the_recording_are_warned_of(
    caplog: pytest.LogCaptureFixture, named: Collection[str], is_warned: bool
) -> None:
    warn_of_unmatched_names("truth", named, ("0", "1"))
    expected = "truth: names client 7, of which nothing is recorded, and omits client 1"
    assert (expected in caplog.text) == is_warned


def test_one_file_of_a_sum_alone_holds_the_examples_of_all(tmp_path: Path) -> None:
    truth = case_of_sums(tmp_path, (0,), [(0, 1)]).truth(0, None, (0, 1))
    assert truth is not None
    assert len(truth.data) == 2


@pytest.mark.usefixtures("a_module")
def test_findings_of_another_recording_are_not_scored(tmp_path: Path) -> None:
    folder = tmp_path / "again"
    record_weights(folder)
    spec = describe_attack(folder, (0, 1), attack=[{"name": "label-counts"}])
    audit = open_audit(folder / "run", spec, folder)
    assert audit.run() == []
    assert audit.score()
    for path in [*(folder / "run/transcript").iterdir(), folder / "run/manifest.json"]:
        path.unlink()
    record_weights(folder, step=0.2)
    (folder / "run/manifest.json").unlink()
    start_late_manifest(OpenRun(folder / "run"), None)
    failures = list[str]()
    assert open_audit(folder / "run", spec, folder).score(failures) == []
    assert "round-1-client-0-repeat-0.safetensors: was found in another recording than is here" in failures[0]


def test_exchanged_files_of_clients_whose_data_are_alike_are_in_doubt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Either explains the message of the other well enough to be scored."""
    common, labels = held_by(0)

    def hold_like_data(client: int) -> tuple[Tensor, Tensor]:
        return (common + 0.4 * (held_by(client + 5)[0] - 0.5)).clamp(0, 1), labels

    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cross_entropy(model(hold_like_data(0)[0]), labels).backward()
    after = {name: before[name] - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    transcript = record_updates(tmp_path / "transcript", [build_update(before, after, num_examples=2)])
    for clients in ((0, 1), (1, 0)):
        caplog.clear()
        table = fedsim.write_truth(
            tmp_path / str(clients[0]), lambda client, order=clients: hold_like_data(order[client]), [0, 1]
        )
        context = EvaluationContext(
            case=ForeignRecording({client: Path(file) for client, file in table.items()}),
            open_recording=lambda: transcript,
            knowledge=Knowledge(model=make_model, loss=cross_entropy, value_range=((0.0,), (1.0,))),
            optimum=lambda client, **options: {},
        )
        about = {"attack": "sme", "victim": 0, "first_round": 1, "members": []}
        assert find_complaint(Reconstruction(data=common, labels=labels), about, context) == ""
        is_doubted = "client 1 is said to have held explains the message of client 0 better (1 - cosine" in caplog.text
        assert is_doubted == (clients == (1, 0))


def test_real_numbers_are_no_labels_of_classes(tmp_path: Path) -> None:
    inputs, labels = held_by(0)
    table = fedsim.write_truth(tmp_path, lambda client: (inputs, labels.float()), [0])
    truth, facts = Truth.load(Path(table["0"])), Knowledge(num_classes=3, loss=cross_entropy)
    with pytest.raises(DataError, match=r"^truth\.0: its labels are real numbers, expected classes from 0 to 2; write"):
        check_truth("0", truth, facts)
    check_truth("0", truth, replace(facts, loss=mse_loss))


def complaint_of_right_file(
    folder: Path, sent: Callable[[dict[str, Tensor]], dict[str, Tensor]], held: slice = slice(None), **stated: Any
) -> str:
    """What is said of a right truth file, of all examples of client 0 or of some, where others have files, too."""
    model, count = make_model(), 6
    parts = [[torch.cat(part) for part in zip(*map(held_by, range(at, at + 3)), strict=True)] for at in (0, 9)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cross_entropy(model(parts[0][0]), parts[0][1]).backward()
    moves = {name: -0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    after = {name: before[name] + move for name, move in sent(moves).items()}
    transcript = record_updates(folder / "transcript", [build_update(before, after, num_examples=count)])
    table = fedsim.write_truth(
        folder, lambda client: (parts[0][0][held], parts[0][1][held]) if client == 0 else tuple(parts[1]), [0, 1]
    )
    known = Knowledge(model=make_model, loss=cross_entropy, value_range=((0.0,), (1.0,)), **stated)
    case = ForeignRecording({client: Path(file) for client, file in table.items()})
    context = EvaluationContext(
        case=case, open_recording=lambda: transcript, knowledge=known, optimum=lambda client, **options: {}
    )
    claim = Reconstruction(data=parts[0][0], labels=parts[0][1])
    return find_complaint(claim, {"attack": "sme", "victim": 0, "first_round": 1, "members": []}, context)


@pytest.mark.parametrize(("distance", "fits"), [(0.7, True), (1.1, False)])
def test_a_message_of_dropout_is_not_explained_by_whatever_spreads_widely(distance: float, fits: bool) -> None:
    assert Retraining(distance=distance, spread=0.6, length=1.0).fits == fits


def test_some_examples_of_a_client_are_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("_RELATED", "UNRELATED"):  # as where few of many examples are held
        monkeypatch.setattr(f"fedsim.audit.evaluation.truth_fit.{name}", -1.0)
    assert complaint_of_right_file(tmp_path / "some", lambda moves: moves, slice(1)) == ""
    assert "it is scored, since the file holds 1 of N = 6 examples" in caplog.text
    assert "fix [truth]" in complaint_of_right_file(tmp_path / "all", lambda moves: moves)


def test_messages_that_were_rounded_contradict_nothing(tmp_path: Path) -> None:
    start = make_model().state_dict()

    def train_little(moves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: (start[name] + 1e-4 * move).half().float() - start[name] for name, move in moves.items()}

    assert complaint_of_right_file(tmp_path, train_little, **TRAINING | {"batch_size": 6}) == ""


@pytest.mark.parametrize("is_noisy", [False, True])
def test_later_models_put_no_message_in_doubt_that_the_truth_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_noisy: bool
) -> None:
    monkeypatch.setattr("fedsim.audit.evaluation.truth_fit.describe_misread_round", lambda *_: "round 1: it is odd")
    noise = torch.Generator().manual_seed(0)

    def add_noise(moves: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: move + is_noisy * move.norm() * torch.randn(move.shape, generator=noise)
            for name, move in moves.items()
        }

    with collect_doubts() as doubts:
        complaint_of_right_file(tmp_path, add_noise, **TRAINING | {"batch_size": 6})
    assert ("round 1: it is odd" in doubts) == is_noisy


@pytest.mark.parametrize(("share", "is_refused"), [(1.0, False), (3.0, True)])
def test_weight_decay_that_nobody_states_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, share: float, is_refused: bool
) -> None:
    start = make_model().state_dict()

    def decay(moves: dict[str, Tensor]) -> dict[str, Tensor]:
        norms = [torch.cat([t.flatten() for t in state.values()]).norm() for state in (moves, start)]
        return {name: move - share * norms[0] / norms[1] * start[name] for name, move in moves.items()}

    complaint = complaint_of_right_file(tmp_path, decay, **TRAINING | {"batch_size": 6})
    assert bool(complaint) == is_refused
    words = "or state in [adversary.knowledge] what clients have of momentum, weight_decay, proximal_mu"
    assert words in (complaint or caplog.text)


def test_files_of_all_members_of_a_sum_may_hold_some_of_their_examples(tmp_path: Path) -> None:
    about = {"victim": 0, "first_round": 1, "members": [0, 1]}
    before = make_model().state_dict()
    update = replace(build_update(before, before, num_examples=6), members=(0, 1))
    transcript = record_updates(tmp_path / "transcript", [update])
    for clients in ((0, 1), (0,)):
        case = case_of_sums(tmp_path, clients, [(0, 1)])
        context = EvaluationContext(
            case=case, open_recording=lambda: transcript, knowledge=Knowledge(), optimum=lambda client, **options: {}
        )
        complaint = find_complaint(Reconstruction(data=held_by(0)[0], labels=held_by(0)[1]), about, context)
        assert bool(complaint) == (clients == (0,))


@pytest.mark.usefixtures("a_module")
def test_doubts_are_kept_with_the_scores_and_stand_beside_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "doubted"
    record_weights(folder)
    audit = open_audit(folder / "run", describe_attack(folder, (0, 1)), folder)
    assert audit.run() == []
    monkeypatch.setattr("fedsim.audit.scores.find_complaint", lambda *_: raise_doubt("it is odd; fix it") or "")
    assert {row["doubt"] for row in audit.score()} == {"it is odd; fix it"}
    monkeypatch.undo()
    # What was judged before is not judged again.
    rows = open_audit(folder / "run", describe_attack(folder, (0, 1)), folder).score()
    readings = [reading for reading in score_readings(rows, {}) if reading.verdict and not reading.summary.missing]
    assert "psnr" in {reading.summary.metric for reading in readings}
    assert {reading.remark.partition("; ")[2] for reading in readings} == {"in doubt for 1 finding: it is odd"}


@pytest.mark.usefixtures("a_module")
@pytest.mark.parametrize("extra", [0, 3])
def test_a_truth_of_more_examples_than_the_message_is_of_is_in_doubt(tmp_path: Path, extra: int) -> None:
    folder = tmp_path / "more"
    record_weights(folder)
    spec = describe_attack(folder, (0, 1))
    inputs, labels = held_by(0)
    others = torch.rand((extra, 1, 4, 4), generator=torch.Generator().manual_seed(9))
    whole = torch.cat([inputs, others]), torch.cat([labels, torch.zeros(extra, dtype=torch.long)])
    fedsim.write_truth(folder / "truth", lambda client: whole, [0])
    audit = open_audit(folder / "run", spec, folder)
    assert audit.run() == []
    doubts = {row["doubt"] for row in audit.score() if row["metric"] == "psnr"}
    assert any("truth.0 holds 5 examples and the message is of N = 2" in doubt for doubt in doubts) == bool(extra)


@pytest.mark.parametrize("is_reversed", [False, True])
def test_images_whose_channels_are_reversed_put_scores_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reversed: bool
) -> None:
    (tmp_path / "coloured.py").write_text(
        "from torch import nn\n"
        "def make_model(): return nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.Linear(24, 3))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    images, labels = torch.rand((2, 3, 4, 4), generator=torch.Generator().manual_seed(3)), torch.tensor([0, 2])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.Linear(24, 3))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cross_entropy(model(images), labels).backward()
    after = {name: p.detach() - 0.1 * p.grad for name, p in model.named_parameters() if p.grad is not None}
    folder = tmp_path / "images"
    Recorder(folder / "run" / "transcript").write(1, [build_update(before, after, num_examples=2)])
    written = images.flip(1) if is_reversed else images
    table = fedsim.write_truth(folder / "truth", lambda client: (written, labels), [0])
    known = {"model": "coloured:make_model", "input_shape": [3, 4, 4], "value_range": [0.0, 1.0], "num_classes": 3}
    tables = {
        "adversary": {"workers": 1, "victims": [0], "knowledge": known},
        "attack": [{"name": "inverting-gradients", "iterations": 1}],
        "truth": table,
    }
    audit = open_audit(folder / "run", validate_tables(AttackFile, tables, "attack.toml"), folder)
    assert audit.run() == []
    doubts = {row["doubt"] for row in audit.score()}
    assert any("truth.0: with the channels of its images in reverse order" in text for text in doubts) == is_reversed
