"""A table held in halves: recorded the same each time, labels and columns claimed, bad input refused."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

import fedsim
from clients.feature_party import make_feature_party
from fedsim.base.errors import AttackError, ConfigError, DataError, KnowledgeError, RunError, TranscriptError
from fedsim.base.randomness import generator, seed_globals
from fedsim.federation.engines.serial import InProcessGrid
from fedsim.recording.payloads import Payload
from fedsim.recording.split_steps import read_split_steps
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from strategies.split_learning import SplitLearning, SumHead
from tests.support.commands import Call, call_fedsim

pytestmark = pytest.mark.usefixtures("server_task")
ROWS, UNITS, PARTIES = 300, 8, 2
NUMBERS = torch.rand(ROWS + 100, 2, 2, generator=generator("numbers"))
CATEGORIES = torch.eye(3)[torch.randint(0, 3, (ROWS + 100, 2), generator=generator("categories"))]
INPUTS = torch.cat([NUMBERS, CATEGORIES], 2)
"""`row party feature`: two numbers and a column of three categories each."""
LABELS = (NUMBERS.sum((1, 2)) > 2.4).long()
IDS = 10 + 3 * torch.arange(ROWS)
ATTACK_FILE = """
[adversary]
who = "{who}"
rounds = "all"

[adversary.knowledge]
model = "tests.integration.test_vertical:build_first_bottom"
input_shape = [5]
columns = [1, 1, 3]
value_range = [0.0, 1.0]
num_classes = 2
known_rows = 60
auxiliary = true

{attacks}
[truth]
{truth}
"""


def load_rows(party: int) -> tuple[Tensor, Tensor]:
    """Return ids and columns; the second party has its rows in another order."""
    order = torch.arange(ROWS) if party == 0 else torch.arange(ROWS).flip(0)
    return IDS[order], INPUTS[:ROWS][order, party]


def build_bottom(party: int, units: int = UNITS) -> nn.Module:
    """Return the bottom model of a party, whose dropout plays no part."""
    with seed_globals("bottom", party):
        return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, units))


def build_first_bottom() -> nn.Module:
    """Return the bottom model of the victim, as the attack file names it."""
    return build_bottom(0)


def train(
    folder: Path, *, load: Any = load_rows, sums: bool = False, gradient_noise: float = 0.0, noise: float = 0.0
) -> Path:
    """Record twelve steps; return the run."""
    units = 2 if sums else UNITS
    with seed_globals("head"):
        head = nn.Sequential(nn.Linear(PARTIES * UNITS, 16), nn.ReLU(), nn.Linear(16, 2))
    strategy = SplitLearning(
        bottoms=[build_bottom(party, units) for party in range(PARTIES)],
        head=SumHead(PARTIES) if sums else head,
        labels=dict(zip(IDS.tolist(), LABELS[:ROWS].tolist(), strict=True)),
        batch_size=60,
        learning_rate=0.5,
        gradient_noise=gradient_noise,
        seed=3,
    )
    app = make_feature_party(
        lambda party: build_bottom(party, units), load, learning_rate=0.5, embedding_noise=noise, seed=3
    )
    grid = InProcessGrid(app, PARTIES)
    fedsim.Curious(strategy, folder / "recording").start(grid, ArrayRecord(), num_rounds=12)
    return folder / "recording" / "run-1"


def attack(run: Path, who: str, *names: str, load: Any = load_rows) -> dict[tuple[str, str], tuple[float, float]]:
    """Return score and floor by attack and metric."""
    folder = run.parent.parent
    public = INPUTS[ROWS:, 0], LABELS[ROWS:]
    truth = fedsim.write_truth(
        folder / "truth",
        lambda party: (load(party)[1], LABELS[:ROWS]),
        [0],
        public=public,
        rows=lambda party: load(party)[0],
    )
    table = "".join(f'{key} = "{path}"\n' for key, path in truth.items())
    attacks = "".join(f'[[attack]]\nname = "{name}"\n' for name in names)
    file = folder / f"{who}.toml"
    file.write_text(ATTACK_FILE.format(who=who, attacks=attacks, truth=table))
    audit = fedsim.open(run, file=file)
    for name in names:
        audit.attack(name, victim=0)
    scores = audit.scores
    return {(row.attack, row.metric): (float(row.value), float(row.floor)) for row in scores.itertuples()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("vertical"))


def test_a_recording_is_the_same_each_time_and_noise_changes_it(run: Path, tmp_path: Path) -> None:
    first, second = (Transcript(folder / "transcript") for folder in (run, train(tmp_path / "again")))
    assert [first.sha256(number) for number in first.rounds] == [second.sha256(number) for number in second.rounds]
    noised = Transcript(train(tmp_path / "noise", noise=0.1) / "transcript")
    sent, clear = noised.update(1, 0).after["embedding"], first.update(1, 0).after["embedding"]
    assert 0.05 < float((sent - clear).std()) < 0.2


def test_gradients_are_those_of_the_embeddings_that_a_party_sent(run: Path) -> None:
    transcript = Transcript(run / "transcript")
    steps = [read_split_steps([transcript.update(number, party) for number in transcript.rounds]) for party in (0, 1)]
    first, second = steps[0][0], steps[1][0]
    assert torch.equal(first.rows, second.rows)
    assert steps[0][-1].gradients is None
    # The first step again: bottom models as sent, the head as seeded, and the loss of the rows' labels.
    with seed_globals("head"):
        head = nn.Sequential(nn.Linear(PARTIES * UNITS, 16), nn.ReLU(), nn.Linear(16, 2))
    joined = torch.cat([first.embeddings, second.embeddings], 1).requires_grad_()
    labels = LABELS[(first.rows - 10) // 3]
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(head(joined), labels), joined)
    assert first.gradients is not None
    assert second.gradients is not None
    assert torch.allclose(torch.cat([first.gradients, second.gradients], 1), gradient, atol=1e-6)
    bottom = build_bottom(1).eval()
    bottom.load_state_dict(dict(second.bottom))
    assert torch.allclose(bottom(INPUTS[(second.rows - 10) // 3, 1]), second.embeddings, atol=1e-6)


def test_labels_follow_from_gradients_unless_noise_hides_them(run: Path, tmp_path: Path) -> None:
    scores = attack(run, "feature-party", "label-norm", "label-direction")
    assert scores["label-direction", "row_label_auc"] == (pytest.approx(1.0, abs=0.01), 0.5)
    assert scores["label-norm", "row_label_auc"][0] > 0.8
    accuracy, majority = scores["label-direction", "row_label_accuracy"]
    share = LABELS[:ROWS].double().mean().item()
    assert majority == pytest.approx(max(share, 1 - share))
    assert accuracy > majority + 0.1
    hidden = attack(train(tmp_path, gradient_noise=30.0), "feature-party", "label-direction")
    assert abs(hidden["label-direction", "row_label_auc"][0] - 0.5) < 0.15


def test_labels_that_are_exchanged_are_not_called_safe(run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(run, tmp_path / "recording" / "run-1"))
    attack(run, "feature-party", "label-direction")
    audit = fedsim.open(run, file=run.parent.parent / "feature-party.toml")
    audit.attack("label-direction", victim=0, rarer_label=0)
    reasons = audit.scores["missing"].dropna().tolist()
    assert len(reasons) == 2
    assert all("distinguishes labels but exchanges them (AUC 0" in reason for reason in reasons)


def test_a_head_that_adds_up_gives_every_label(tmp_path: Path) -> None:
    scores = attack(train(tmp_path, sums=True), "feature-party", "label-sign")
    assert scores["label-sign", "row_label_accuracy"][0] == 1.0


def test_columns_follow_from_embeddings(run: Path) -> None:
    scores = attack(run, "server", "embedding-inversion", "embedding-regression")
    for name, least in (("embedding-inversion", 0.9), ("embedding-regression", 0.6)):
        right, floor = scores[name, "row_columns_right"]
        assert right > least > floor + 0.2


def test_known_rows_alone_are_no_leak(tmp_path: Path) -> None:
    """Noise hides all; people are unlike the public, so that what is usual of them is a better guess."""

    def load(party: int) -> tuple[Tensor, Tensor]:
        ids, inputs = load_rows(party)
        inputs = inputs.clone()
        inputs[:, 2:] = torch.eye(3)[torch.where(NUMBERS[:ROWS, 1, 0] > 0.1, 2, 1)]
        return ids, inputs

    scores = attack(train(tmp_path, load=load, noise=5.0), "server", "embedding-regression", load=load)
    right, floor = scores["embedding-regression", "row_columns_right"]
    assert floor > 0.4
    assert right < floor + 0.05


def test_who_attacks_has_to_be_who_sees_it(run: Path) -> None:
    with pytest.raises(KnowledgeError, match="set who = 'feature-party'"):
        attack(run, "server", "label-norm")
    with pytest.raises(KnowledgeError, match="a feature party sees its own messages alone"):
        attack(run, "feature-party", "embedding-inversion")


def test_attacks_that_do_not_fit_are_refused(run: Path) -> None:
    with pytest.raises(AttackError, match="8 units, and there are 2 classes"):
        attack(run, "feature-party", "label-sign")
    with suppress(KnowledgeError):
        attack(run, "server", "label-norm")  # writes the file of a server
    audit = fedsim.open(run, file=run.parent.parent / "server.toml")
    with pytest.raises(AttackError, match="sends no weights in these rounds; attack the first round"):
        audit.attack("embedding-inversion", victim=0, round=[5, 6])
    with pytest.raises(AttackError, match="300 of 300 rows would be known"):
        audit.attack("embedding-regression", victim=0, knowledge={"known_rows": 300})


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda ids: torch.cat([ids[:-1], ids[:1]]), "party 1: holds rows twice: 907; align"),
        (lambda ids: ids[1:], "party 1: lacks rows that have labels: 907; align"),
        (lambda ids: torch.cat([ids, torch.tensor([5])]), "party 1: holds rows that have no label: 5; align"),
    ],
)
def test_rows_that_do_not_align_are_refused(spoil: Any, sentence: str, tmp_path: Path) -> None:
    def load(party: int) -> tuple[Tensor, Tensor]:
        ids, inputs = load_rows(party)
        return (spoil(ids), inputs[:1].expand(len(spoil(ids)), -1)) if party else (ids, inputs)

    with pytest.raises(DataError, match=sentence):
        train(tmp_path, load=load)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda ids: [f"id {number}" for number in ids], "party 1: ids of rows are a list, expected a tensor of whole"),
        (lambda ids: ids.double(), "party 1: ids of rows are a tensor of torch.float64, expected a tensor of whole"),
    ],
)
def test_ids_that_are_no_numbers_are_not_called_missing_rows(spoil: Any, sentence: str, tmp_path: Path) -> None:
    def load(party: int) -> tuple[Tensor, Tensor]:
        ids, inputs = load_rows(party)
        return (spoil(ids), inputs) if party else (ids, inputs)

    with pytest.raises(RunError, match=sentence):
        train(tmp_path, load=load)
    with pytest.raises(ConfigError, match="labels: 'id 907' is no whole number; number the rows, alike in all"):
        SplitLearning(bottoms=[], head=nn.Identity(), labels={"id 907": 1}, batch_size=1, learning_rate=0.5)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda inputs: inputs[1:], "party 1: holds 300 ids and the columns of 299 rows; return one id for each row"),
        (lambda inputs: inputs / 0, "party 1: row 907 holds NaN or infinite numbers; fill in what is missing"),
    ],
)
def test_columns_that_are_missing_are_refused_before_the_first_step(spoil: Any, sentence: str, tmp_path: Path) -> None:
    def load(party: int) -> tuple[Tensor, Tensor]:
        ids, inputs = load_rows(party)
        return (ids, spoil(inputs)) if party else (ids, inputs)

    with pytest.raises(RunError, match=sentence):
        train(tmp_path, load=load)


@pytest.mark.parametrize("is_answered", [False, True])
def test_gradients_in_messages_of_their_own_are_paired_with_embeddings(
    is_answered: bool, tmp_path: Path, call: Call
) -> None:
    """As Flower's vertical example: a query for embeddings, then gradients that nobody answers, or with no arrays.

    After every fourth step none are sent, and those of the step before are not taken for them.
    """
    app, server = ClientApp(), ServerApp()
    gradients = [torch.full((4, 2), step + 1.0) if step % 4 < 3 else None for step in range(12)]

    @app.query("embed")
    def embed(message: Message, context: Context) -> Message:
        arrays = ArrayRecord({"embedding": Array(torch.eye(4)[:, :2].numpy().copy())})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    @app.train("apply")
    def apply(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        node = next(iter(grid.get_node_ids()))
        for gradient in gradients:  # more than may wait for replies
            list(grid.send_and_receive([Message(RecordDict(), node, "query.embed")]))
            if gradient is not None:
                content = RecordDict({"gradients": ArrayRecord({"local": Array(gradient.numpy())})})
                send = grid.send_and_receive if is_answered else grid.push_messages
                list(send([Message(content, node, "train.apply")]))

    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    fedsim.record_app(server, tmp_path / "recording")(InProcessGrid(app, 1), context)
    file = tmp_path / "attack.toml"
    file.write_text(
        '[adversary]\nwho = "feature-party"\nrounds = "all"\n'
        "[adversary.knowledge]\nmodel = false\nnum_classes = 2\nnum_examples = false\n"
        '[app]\nmessages = "query.embed"\nrecord = "arrays"\n'
        'broadcast_messages = "train.apply"\nbroadcast_record = "gradients"\n[[attack]]\nname = "label-norm"\n'
    )
    assert call_fedsim("attack", "-q", tmp_path / "recording", file).returncode == 0
    transcript = Transcript(tmp_path / "recording")
    client = transcript.clients(1)[0]
    steps = read_split_steps([transcript.update(number, client) for number in transcript.rounds])
    assert len(steps) == len(gradients)
    for step, gradient in zip(steps[:-1], gradients, strict=False):
        assert (step.gradients is None) == (gradient is None)
        assert step.gradients is None or gradient is None or torch.equal(step.gradients, gradient)
    # No message names rows, so a truth of other people than those of a step is refused.
    fedsim.write_truth(tmp_path, lambda _: (torch.rand(9, 5), torch.arange(9) % 2), [client])
    file.write_text(file.read_text() + f'[truth]\n{client} = "client-{client}.safetensors"\n')
    evaluated = call("attack", "-q", tmp_path / "recording", file)
    assert evaluated.returncode == 1
    assert "messages name no rows, a step is about 4, and the file has 9" in evaluated.stderr


def make_pipeline(*, names_rows: bool, first: Tensor | None = None) -> list[Update]:
    """Return four messages of a party whose gradients return one step late; `first` takes the place of none."""
    updates = []
    for number in (1, 2, 3, 4):
        before = {"rows": torch.arange(2) + 2 * number}
        gradient = torch.full((2, 3), float(number - 2)) if number > 2 else first if number == 2 else None
        if gradient is not None:
            before["gradient"] = gradient
            if names_rows:
                before["gradient_rows"] = torch.arange(2) + 2 * (number - 2)
        after = {"rows": before["rows"], "embedding": torch.full((2, 3), float(number))}
        payload = Payload.from_dense(after, "weights")
        updates.append(Update(round=number, client=0, before=before, payload=payload, num_examples=2))
    return updates


def test_gradients_of_a_pipeline_are_paired_by_their_rows_or_refused() -> None:
    steps = read_split_steps(make_pipeline(names_rows=True))
    assert [None if step.gradients is None else float(step.gradients[0, 0]) for step in steps] == [1.0, 2.0, None, None]
    with pytest.raises(TranscriptError, match="comes after 2 answers, as in a pipeline"):
        read_split_steps(make_pipeline(names_rows=False))
    with pytest.raises(TranscriptError, match="is zero, as in a pipeline"):
        read_split_steps(make_pipeline(names_rows=False, first=torch.zeros(2, 3)))
    with pytest.raises(TranscriptError, match=r"is 2.4e-12 large, and the next one 2.4e\+00, as in a pipeline"):
        read_split_steps(make_pipeline(names_rows=False, first=torch.full((2, 3), 1e-12)))
    partly = make_pipeline(names_rows=True)
    del partly[3].before["gradient_rows"]  # type: ignore[attr-defined]
    with pytest.raises(TranscriptError, match="with some of the gradients that it was sent and not with others"):
        read_split_steps(partly)
    unknown = make_pipeline(names_rows=True)
    unknown[2].before["gradient_rows"] = torch.tensor([90, 91])  # type: ignore[index]
    with pytest.raises(TranscriptError, match="of no answer that still lacks one"):
        read_split_steps(unknown)
