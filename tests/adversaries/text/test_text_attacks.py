"""Texts: words read back from gradients of a network behind an embedding, judged by hand, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool1d

from adversaries.text.embedding import Lexicon, find_token_embedding
from adversaries.text.embedding_space import EmbeddingSpace, embedding_space_model
from adversaries.text.lamp import Lamp
from adversaries.text.tag import Tag
from adversaries.text.texts import EmbeddingRows, TemporalTextInversion, TextInvertingGradients, TextLeakage
from adversaries.text.word_exchange import exchange_words
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.finding_files import load_finding, save_finding
from fedsim.base import text_metrics
from fedsim.base.errors import AttackError, ConfigError, DataError, FedsimError, KnowledgeError, TranscriptError
from fedsim.base.randomness import generator
from fedsim.base.task import Task
from fedsim.interfaces.attack import Attack, Knowledge, Target
from fedsim.interfaces.findings import Reconstruction, Texts
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.models.lstm import Lstm
from fedsim.training.models.mlp import Mlp
from fedsim.training.models.text_cnn import TextCnn
from tests.support.networks import compute_gradient
from tests.support.recordings import Record, build_update, run_attack

WORDS, LENGTH, CLASSES = 40, 8, 4
TRUE = torch.tensor([[7, 3, 21, 12, 30, 3, 18, 5], [2, 33, 9, 14, 7, 26, 11, 38]])
LABELS = torch.tensor([2, 0])
NETWORK = TextCnn(kernels=(3,), channels=32, dimension=24, pool=2)
QUICK: dict[str, Any] = {
    "optimizer": "adam", "distance": "cosine", "layers": "relative", "aggregation": "mean", "step_size": 0.1,
    "iterations": 60, "labels": "bias",
}  # fmt: skip


def build(network: Any = NETWORK, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return network.build(Task((LENGTH,), CLASSES, WORDS)).eval()  # type: ignore[no-any-return]


KNOWN = Knowledge(model=build, loss=cross_entropy, input_shape=(LENGTH,), num_classes=CLASSES)
ONE_STEP = dataclasses.replace(KNOWN, learning_rate=0.1, local_epochs=1, batch_size=2)


def make_updates(
    rounds: int = 1, network: Any = NETWORK, tokens: Tensor = TRUE, labels: Tensor = LABELS
) -> list[Update]:
    """What a client sends of one mini-batch while the server steps along its gradients."""
    model, updates = build(network), []
    for number in range(1, rounds + 1):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradient = compute_gradient(model, tokens, labels)
        updates.append(build_update(before, gradient, "gradient", round=number, client=5, num_examples=len(labels)))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.05 * gradient[name]
    return updates


def run(attack: Attack, transcript: Transcript, knowledge: Knowledge = KNOWN, seed: int = 0) -> Texts:
    finding = run_attack(attack, transcript, knowledge, 5, seed)
    assert isinstance(finding, Texts)
    return finding


def claimed_texts(finding: Texts, true: Tensor = TRUE) -> Tensor:
    """The claimed texts in the order of the true ones."""
    return text_metrics.pair_texts(finding.tokens, true, None)


# The attacks.


@pytest.mark.parametrize(
    ("attack", "knowledge"),
    [
        (TemporalTextInversion(gradients=1, **QUICK), KNOWN),
        pytest.param(
            TemporalTextInversion(gradients=1, iterations=8, layers="relative", labels="bias"),
            KNOWN,
            marks=pytest.mark.thorough,
        ),
        (TextLeakage(iterations=5, step_size=0.5), ONE_STEP),
        (TextInvertingGradients(iterations=150, step_size=0.1), KNOWN),
        (Tag(iterations=60, step_size=0.3), ONE_STEP),
        (Lamp(iterations=60, candidates=10, every=20, tries=8), KNOWN),
    ],
    ids=["tgias-ro-text-adam", "tgias-ro-text-lbfgs", "dlg-text", "inverting-gradients-text", "tag", "lamp"],
)
def test_the_words_of_two_texts_are_read_from_one_gradient(
    record: Record, attack: Attack, knowledge: Knowledge
) -> None:
    finding = run(attack, record(make_updates()), knowledge)
    assert finding.tokens.dtype == torch.int64
    assert finding.labels.sort().values.tolist() == [0, 2]
    right = (claimed_texts(finding) == TRUE).double().mean()
    assert right >= 0.75
    assert len(finding.trace["objective"]) > 0
    assert finding.trace["objective"][-1] < finding.trace["objective"][0]


@pytest.mark.thorough
def test_refined_words_are_exact(record: Record) -> None:
    attack = TemporalTextInversion(gradients=2, fewest=1, refinements=2, align=False, **QUICK)
    seen: list[int] = []
    finding = attack.run(
        Target(transcript=record(make_updates(rounds=2)), victim=5, knowledge=KNOWN, rng=generator(0)),
        lambda i, n, _: seen.append(i),
    )
    assert isinstance(finding, Texts)
    assert torch.equal(claimed_texts(finding), TRUE)
    assert seen[-1] == len(finding.trace["objective"]) == 3 * QUICK["iterations"]
    assert seen == sorted(set(seen))


def test_words_that_are_not_touched_are_not_claimed(record: Record) -> None:
    attack = TemporalTextInversion(gradients=1, words="touched", **(QUICK | {"iterations": 3}))
    finding = run(attack, record(make_updates()))
    assert set(finding.tokens.flatten().tolist()) <= set(TRUE.flatten().tolist())
    free = run(dataclasses.replace(attack, words="vocabulary"), record(make_updates()))
    assert not set(free.tokens.flatten().tolist()) <= set(TRUE.flatten().tolist())


def test_the_embeddings_rows_are_the_words(record: Record) -> None:
    model, (update,) = build(), make_updates()
    assert update.gradient is not None
    rows = update.gradient["embedding.weight"]
    told = {token for token in range(WORDS) if rows[token].abs().sum() > 0}
    finding = run(EmbeddingRows(), record([update]))
    assert set(finding.tokens.flatten().tolist()) == told <= set(TRUE.flatten().tolist())
    norms = rows[finding.tokens.flatten()].norm(dim=1)[: len(told)]
    assert (norms[:-1] >= norms[1:]).all()
    assert finding.tokens.shape == TRUE.shape
    assert finding.labels.sort().values.tolist() == [0, 2]
    after = {name: p.detach() - 0.1 * update.gradient[name] for name, p in model.named_parameters()}
    trained = dataclasses.replace(update, payload=Payload.from_dense(after, "weights"))
    again = run(EmbeddingRows(), record([trained]), dataclasses.replace(KNOWN, labels=torch.tensor([0, 2])))
    assert set(again.tokens.flatten().tolist()) == told


def test_a_model_without_its_embedding_says_the_same_of_vectors_as_of_tokens(record: Record) -> None:
    for network in (NETWORK, Lstm()):
        model = build(network)
        layer = find_token_embedding(dataclasses.replace(KNOWN, model=lambda model=model: model))[1]
        vectors = model.get_submodule(layer).weight.detach()
        rest = embedding_space_model(model, layer, Lexicon(torch.arange(WORDS), vectors, "cosine"))
        assert torch.equal(rest(vectors[TRUE].transpose(1, 2)), model(TRUE))
        assert f"{layer}.weight" not in dict(rest.named_parameters())
        assert f"{layer}.weight" in dict(model.named_parameters())


def test_the_attack_within_reads_the_message_without_the_embedding_bit_for_bit() -> None:
    (update,) = make_updates()
    given = EmbeddingSpace.from_update(update, KNOWN, words="touched", nearest="cosine")
    rest = given.convert_update(update)
    assert update.gradient is not None
    assert rest.gradient is not None
    names = [name for name in update.before if name != "embedding.weight"]
    assert list(rest.before) == list(rest.gradient) == names
    for name in names:
        assert torch.equal(rest.before[name], update.before[name])
        assert torch.equal(rest.gradient[name], update.gradient[name])
    assert (rest.round, rest.client, rest.num_examples) == (update.round, update.client, update.num_examples)
    assert set(given.lexicon.tokens.tolist()) == set(TRUE.flatten().tolist())
    assert given.knowledge.input_shape == (24, LENGTH)


def test_an_app_that_sends_a_plain_list_of_arrays_is_attacked_too(record: Record) -> None:
    (update,) = make_updates()
    assert update.gradient is not None
    plain = dataclasses.replace(
        update,
        before={str(place): t for place, t in enumerate(update.before.values())},
        payload=Payload.from_dense({str(place): t for place, t in enumerate(update.gradient.values())}, "gradient"),
    )
    attack = TemporalTextInversion(gradients=1, **(QUICK | {"iterations": 5}))
    assert torch.equal(run(attack, record([plain])).tokens, run(attack, record([update])).tokens)


@pytest.mark.parametrize("by", ["euclidean", "cosine"])
def test_the_nearest_word_is_that_of_a_search_through_all(by: Any) -> None:
    vectors, points = torch.randn(9, 4, generator=generator("v")), torch.randn(2, 5, 4, generator=generator("p"))
    tokens = torch.tensor([1, 3, 4, 8, 11, 12, 20, 21, 30])
    lexicon = Lexicon(tokens, vectors, by)
    for i, j in itertools.product(range(2), range(5)):
        if by == "cosine":
            distances = [-torch.dot(points[i, j], v) / v.norm() for v in vectors]
        else:
            distances = [(points[i, j] - v).norm() for v in vectors]
        best = min(range(9), key=lambda k, d=distances: float(d[k]))
        assert lexicon.nearest_tokens(points)[i, j] == tokens[best]
    assert torch.equal(lexicon.token_vectors(torch.tensor([[4, 30]])), vectors[[2, 8]][None])


def test_texts_of_one_label_exchange_words_until_the_distance_is_least() -> None:
    true = torch.arange(24).reshape(3, 8)
    mixed = true.clone()
    mixed[0, 3:6], mixed[1, 3:6] = true[1, 3:6], true[0, 3:6]
    asked: list[Tensor] = []

    def distance(tokens: Tensor) -> float:
        """How many neighbours do not belong together."""
        asked.append(tokens)
        return float((tokens.diff(dim=1) != 1).sum())

    tokens, now = exchange_words(mixed, torch.tensor([1, 1, 0]), distance)
    assert now == 0
    assert sorted(tokens.tolist()) == true.tolist()
    assert all(torch.equal(tried[2], true[2]) for tried in asked)
    alone, _ = exchange_words(mixed, torch.tensor([1, 2, 0]), distance)
    assert torch.equal(alone, mixed)


def test_single_words_are_exchanged_again_and_again_while_that_helps() -> None:
    true = torch.arange(16).reshape(2, 8)
    mixed = true.clone()
    mixed[0, [2, 5]], mixed[1, [2, 5]] = true[1, [2, 5]], true[0, [2, 5]]

    def distance(tokens: Tensor) -> float:
        """Place 2 matters only where 5 is right, so it is found in a second sweep; all other places matter more."""
        wrong = (tokens != true).any(0)
        return 10.0 * float(wrong.sum() - wrong[[2, 5]].sum()) + (2.0 if wrong[5] else float(wrong[2]))

    tokens, now = exchange_words(mixed, torch.tensor([1, 1]), distance)
    assert now == 0
    assert torch.equal(tokens, true)
    assert exchange_words(mixed, torch.tensor([1, 1]), distance, sweeps=1)[1] == 1


def test_a_pool_over_few_places_is_the_network_by_hand() -> None:
    model = build()
    state = model.state_dict()
    vectors = state["embedding.weight"][TRUE].transpose(1, 2)
    windows = vectors.unfold(2, 3, 1)
    conv = torch.einsum("ndpk,cdk->ncp", windows, state["blocks.0.0.weight"]) + state["blocks.0.0.bias"][:, None]
    pooled = max_pool1d(conv.sigmoid(), 2).flatten(1)
    logits = pooled @ state["linear.weight"].T + state["linear.bias"]
    assert logits.shape == (2, CLASSES)
    assert torch.allclose(model(TRUE), logits, atol=1e-6)
    with pytest.raises(ConfigError, match=r"^pool: expected at least 0, got -1$"):
        TextCnn(pool=-1)
    with pytest.raises(ConfigError, match="takes texts of at least 9 tokens"):
        TextCnn(kernels=(3,), pool=7).build(Task((LENGTH,), CLASSES, WORDS))


# What is refused.


def two_embeddings() -> nn.Module:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Embedding(WORDS, 4), nn.Embedding(WORDS, 4)
            self.linear = nn.Linear(4, CLASSES)

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.linear((self.one(tokens) + self.two(tokens)).mean(1))
            return logits

    return Twice()


def an_image_model() -> nn.Module:
    return Mlp(hidden=(4,)).build(Task((1, 4, 4), CLASSES))


@pytest.mark.parametrize("attack", [EmbeddingRows(), TemporalTextInversion(gradients=1), TextInvertingGradients()])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_shape": (1, 4, 4)}, "input_shape: expected the length of a text, one number, got (1, 4, 4); attack"),
        (
            {"model": an_image_model},
            "the model has no nn.Embedding, expected one, whose vectors can be found; attack a",
        ),
        ({"model": two_embeddings}, "2 layers nn.Embedding read the tokens, expected one, whose vectors"),
        ({"input_shape": (2,)}, "the model does not take texts of 2 tokens ("),
    ],
)
def test_what_is_no_text_is_refused_in_one_sentence(
    record: Record, attack: Attack, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(AttackError) as caught:
        run(attack, record(make_updates()), dataclasses.replace(KNOWN, **change))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_update_that_says_nothing_of_words_is_refused(record: Record) -> None:
    (update,) = make_updates()
    assert update.gradient is not None
    still = update.gradient | {"embedding.weight": torch.zeros(WORDS, 24)}
    with pytest.raises(AttackError, match=r"^round 1, client 5: the embedding did not move, so it says nothing of"):
        run(EmbeddingRows(), record([dataclasses.replace(update, payload=Payload.from_dense(still, "gradient"))]))
    broken = {**update.before, "embedding.weight": torch.full((WORDS, 24), torch.nan)}
    with pytest.raises(AttackError, match=r"^round 1, client 5: embedding.weight holds NaN or infinite values; choose"):
        run(TemporalTextInversion(gradients=1), record([dataclasses.replace(update, before=broken)]))
    with pytest.raises(
        AttackError, match=r"^client 9: took part in none of the 1 rounds to be attacked; choose another"
    ):
        TemporalTextInversion().run(
            Target(transcript=record(make_updates()), victim=9, knowledge=KNOWN, rng=generator(0))
        )
    other = dataclasses.replace(KNOWN, model=lambda: build(TextCnn(channels=8, dimension=24)))
    with pytest.raises(
        TranscriptError, match=r"^round 1, client 5: the recorded weights w_0 have blocks\.0\.0\.weight of shape"
    ):
        run(EmbeddingRows(), record(make_updates()), other)
    with pytest.raises(
        KnowledgeError, match="TemporalTextInversion needs input_shape, which the threat model withholds"
    ):
        run(TemporalTextInversion(), record(make_updates()), dataclasses.replace(KNOWN, input_shape=None))
    with pytest.raises(ConfigError, match=r"^refinements: expected at least 0, got -1$"):
        TemporalTextInversion(refinements=-1)


# Findings.


@pytest.mark.parametrize(
    ("tokens", "labels", "message"),
    [
        (torch.rand(2, 3), torch.zeros(2).long(), "the attack claims tokens of torch.float32, shape (2, 3), expected"),
        (
            torch.zeros(3).long(),
            torch.zeros(3).long(),
            "the attack claims tokens of torch.int64, shape (3,), expected",
        ),
        (torch.zeros(2, 3).long(), torch.zeros(1).long(), "the attack claims 2 texts but 1 labels"),
        (torch.full((1, 3), -1), torch.zeros(1).long(), "the attack claims tokens below 0"),
        (torch.zeros(1, 3).long(), torch.tensor([-1]), "the attack claims labels that are not class indices"),
    ],
)
def test_texts_are_checked_when_they_are_claimed(tokens: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(AttackError) as caught:
        Texts(tokens=tokens, labels=labels)
    assert str(caught.value).startswith(message)


def test_texts_are_saved_without_pickle_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "finding.safetensors"
    finding = Texts(tokens=TRUE, labels=LABELS, trace={"objective": torch.tensor([2.0, 1.0])})
    save_finding(finding, path, {"attack": "a"})
    again, about = load_finding(path)
    assert isinstance(again, Texts)
    assert torch.equal(again.tokens, TRUE)
    assert torch.equal(again.labels, LABELS)
    assert again.trace["objective"].tolist() == [2.0, 1.0]
    assert about == {"attack": "a"}
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["labels", "tokens", "trace/objective"]


# Scores.


def test_texts_are_scored_by_hand() -> None:
    true = torch.tensor([[5, 6, 5, 7], [8, 9, 0, 0]])  # 0 is padding
    claimed = torch.tensor([[0, 8, 9, 0], [5, 5, 5, 1]])
    truth = Truth(data=true, labels=torch.tensor([0, 1]), padding=0)
    public = PublicExamples(data=torch.tensor([[5, 5, 5, 5], [9, 8, 0, 0]]), labels=torch.tensor([0, 1]))
    finding = Texts(tokens=claimed, labels=torch.tensor([1, 0]))
    scores = {s.metric: s for s in score_examples(finding, truth, public=public, rng=generator(0))}
    assert list(scores) == ["recover_rate", "tokens_found", "recovered", "words_found", "identified", "label_accuracy"]
    # Text 0 gets claim 1: places 0 and 2 of four; of 5, 5, 6, 7 both fives. Text 1 gets claim 0: no place, both words.
    assert scores["recover_rate"].per_image == (0.5, 0.0)
    assert scores["tokens_found"].per_image == (0.5, 1.0)
    assert scores["words_found"].value == pytest.approx(3 / 5)
    assert scores["label_accuracy"].value == 1
    assert [scores[name].ceiling for name in ("recover_rate", "tokens_found", "words_found")] == [1, 1, 1]
    assert scores["recover_rate"].nearest_public == pytest.approx((0.5 + 0) / 2)
    assert scores["tokens_found"].nearest_public == pytest.approx((0.5 + 1) / 2)
    # For class 1 the likeliest tokens are 8 and 9, for class 0 fives.
    assert scores["tokens_found"].floor == pytest.approx((0.5 + 1) / 2)
    perfect = score_examples(Texts(tokens=true.flip(0), labels=LABELS), truth, public=None, rng=generator(0))
    assert [s.value for s in perfect if s.metric not in ("identified", "label_accuracy")] == [1, 1, 1, 1]


def test_guesses_of_tokens_are_those_that_texts_hold_most_on_average() -> None:
    public = torch.tensor([[4, 4, 1, 0], [4, 4, 2, 0], [4, 1, 3, 0]])
    # Of a first 4 there is one in all texts, of a second 4 in two of three, as of a 1.
    assert sorted(text_metrics.likeliest_tokens(public, 3, 0).tolist()) == [1, 4, 4]
    assert text_metrics.frequent_words(public, 6, 0).tolist() == [4, 1, 2, 3, 4, 1]
    assert text_metrics.likeliest_tokens(torch.zeros(2, 3).long(), 2, 0).tolist() == [0, 0]


def test_texts_and_numbers_are_not_compared() -> None:
    numbers = Reconstruction(data=torch.rand(2, 8), labels=LABELS)
    with pytest.raises(DataError, match=r"^truth: the victim held texts, the attack claims numbers; check the attack"):
        score_examples(numbers, Truth(data=TRUE, labels=LABELS), public=None, rng=generator(0))
    with pytest.raises(DataError, match=r"^truth: the victim held numbers, the attack claims texts; check the attack"):
        score_examples(Texts(tokens=TRUE, labels=LABELS), Truth(data=torch.rand(2, 8), labels=LABELS), public=None,
              rng=generator(0))  # fmt: skip


def test_a_truth_file_may_hold_texts(tmp_path: Path) -> None:
    path = tmp_path / "truth.safetensors"
    save_file({"tokens": TRUE.int(), "labels": LABELS, "padding": torch.tensor(3)}, path)
    truth = Truth.load(path)
    assert truth.has_tokens
    assert truth.data.dtype == torch.int64
    assert truth.padding == 3
    for tokens in (TRUE.float(), TRUE - 9, TRUE[:1], TRUE[0]):
        save_file({"tokens": tokens.contiguous(), "labels": LABELS}, path)
        with pytest.raises(FedsimError, match=r"expected tokens of shape \(example, place\), integers of at least 0"):
            Truth.load(path)
