"""TAG and LAMP: their distances by hand, words put into order, a transformer's words, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from adversaries.text.embedding_space import EmbeddingSpace
from adversaries.text.lamp import EmbeddingNormPrior, Lamp, WordReordering, _draw_order
from adversaries.text.tag import Tag
from adversaries.text.texts import TextLeakage
from fedsim.base import text_metrics
from fedsim.base.errors import ConfigError, KnowledgeError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import Texts
from fedsim.inversion.distances import MeanCosine, SquaredAndAbsolute
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.recording.payloads import Payload
from fedsim.recording.recorder import Recorder
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from fedsim.training.models.transformer import TransformerDecoder, TransformerEncoder

TRUE, LABELS = torch.tensor([[7, 3, 21, 12, 29, 5], [2, 22, 9, 14, 16, 18]]), torch.tensor([2, 0])
TASK = Task((6,), 4, vocabulary=30, padding=0)


def build() -> nn.Module:
    with seed_globals("matching baselines"):
        return TransformerEncoder(dim=48, heads=2).build(TASK).eval()


KNOWN = Knowledge(
    model=build, loss=cross_entropy, input_shape=(6,), num_classes=4, learning_rate=0.1, local_epochs=1, batch_size=2
)


def make_update() -> Update:
    model = build()
    slopes = torch.autograd.grad(cross_entropy(model(TRUE), LABELS), list(model.parameters()))
    before = {name: p.detach() for name, p in model.named_parameters()}
    gradient = Payload.from_dense(dict(zip(before, slopes, strict=True)), "gradient")
    return Update(round=1, client=5, before=before, payload=gradient, num_examples=2)


def run(attack: Any, folder: Path, knowledge: Knowledge = KNOWN) -> Tensor:
    Recorder(folder / "transcript").write(1, [make_update()])
    finding = attack.run(
        Target(transcript=Transcript(folder / "transcript"), victim=5, knowledge=knowledge, rng=generator(0))
    )
    assert isinstance(finding, Texts)
    return text_metrics.pair_texts(finding.tokens, TRUE, None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(Tag(iterations=150, step_size=0.3), marks=pytest.mark.thorough),
        Lamp(iterations=40, candidates=10, every=20, tries=4),
    ],
)
def test_words_of_an_encoder_are_found_far_beyond_chance(attack: Any, tmp_path: Path) -> None:
    """Chance is one place of 29; guesses of the likeliest words are no better, as all words occur once."""
    assert float((run(attack, tmp_path) == TRUE).double().mean()) >= 0.4


def test_the_learning_rate_is_needed_for_sizes_and_not_for_directions(tmp_path: Path) -> None:
    withheld = Knowledge(model=build, loss=cross_entropy, input_shape=(6,), num_classes=4)
    with pytest.raises(KnowledgeError, match=r"^Tag needs batch_size, learning_rate, local_epochs, which the threat"):
        run(Tag(iterations=1), tmp_path / "tag", withheld)
    assert run(Lamp(iterations=1, candidates=1), tmp_path / "lamp", withheld).shape == TRUE.shape


@pytest.mark.parametrize("network", [TransformerEncoder, pytest.param(TransformerDecoder, marks=pytest.mark.thorough)])
def test_dlg_reads_a_transformer_whose_slopes_are_transposed(network: Any, tmp_path: Path) -> None:
    def built() -> nn.Module:
        with seed_globals("transposed"):
            module: nn.Module = network(dim=16, heads=2).build(TASK)
            return module.eval()

    model = built()
    slopes = torch.autograd.grad(cross_entropy(model(TRUE), LABELS), list(model.parameters()))
    before = {name: p.detach() for name, p in model.named_parameters()}
    gradient = Payload.from_dense(dict(zip(before, slopes, strict=True)), "gradient")
    update = Update(round=1, client=5, before=before, payload=gradient, num_examples=2)
    Recorder(tmp_path / "transcript").write(1, [update])
    recorded = Transcript(tmp_path / "transcript")
    found = TextLeakage(iterations=1).run(
        Target(transcript=recorded, victim=5, knowledge=replace(KNOWN, model=built), rng=generator(0))
    )
    assert isinstance(found, Texts)
    assert found.tokens.shape == TRUE.shape


def test_distances_by_hand() -> None:
    gradient, target = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.tensor([0.0, 4.0]), torch.tensor([1.0])]
    assert float(SquaredAndAbsolute(0.1)(gradient, target)) == pytest.approx(1 + 4 + 4 + 0.1 * 3 + 0.05 * 2)
    unit = [torch.tensor([0.6, 0.8]), torch.tensor([1.0]), torch.zeros(2)]  # the last did not move
    gradient = [torch.tensor([3.0, 0.0]), torch.tensor([-2.0]), torch.ones(2)]
    assert float(MeanCosine()(gradient, unit)) == pytest.approx((0.4 + 2) / 2)


def scene() -> tuple[InversionProblem, Tensor]:
    """Behind the embedding, and the vectors of the true texts in its units."""
    given = EmbeddingSpace.from_update(make_update(), KNOWN, words="vocabulary", nearest="cosine")
    found = replace(build_problem(given.convert_update(make_update()), given.knowledge), labels=LABELS)
    points = given.lexicon.token_vectors(TRUE).transpose(1, 2)
    return found, (points - found.scaling.centre) / found.scaling.scale


def test_what_is_matched_is_zero_at_the_truth_though_biases_of_keys_move_by_rounding() -> None:
    around, true = scene()
    distance = MeanCosine()
    target = distance.target(around)
    assert [name for name, t in zip(around.parameter_names, target, strict=True) if not t.any()] == [
        "blocks.0.attention.key.bias",
        "blocks.1.attention.key.bias",
    ]
    assert float(distance(around.gradient(around.before, true, LABELS), target).detach()) == pytest.approx(0, abs=1e-5)


def slopes(tokens: Tensor) -> dict[str, Tensor]:
    """Of the whole model, without the embedding of words."""
    model = build()
    named = {name: p for name, p in model.named_parameters() if name != "embedding.weight"}
    found = torch.autograd.grad(cross_entropy(model(tokens), LABELS), list(named.values()))
    return {name: slope.double() for name, slope in zip(named, found, strict=True)}


def objective(attack: Any, tokens: Tensor) -> float:
    """What the attack minimises, at the vectors of these words."""
    around, _ = scene()
    words = build().state_dict()["embedding.weight"][tokens].transpose(1, 2)
    dummy, recipe = (words - around.scaling.centre) / around.scaling.scale, attack._recipe(around)
    gradient = around.gradient(around.before, dummy, LABELS)
    priors = [weight * prior(around, dummy, dummy) for weight, prior in recipe.priors]
    return float((recipe.distance(gradient, recipe.distance.target(around)) + sum(priors)).detach())


def test_what_tag_minimises_is_written_out() -> None:
    wrong = TRUE.flip(1)
    true, other = slopes(TRUE).values(), slopes(wrong).values()
    apart = [one - another for one, another in zip(true, other, strict=True)]
    squares = sum(float(difference.square().sum()) for difference in apart)
    falling = sum(float(d.abs().sum()) * (1 - place / len(apart)) for place, d in enumerate(apart))
    for absolute in (0.0, 0.3):
        assert objective(Tag(absolute=absolute), wrong) == pytest.approx(squares + absolute * falling, rel=1e-4)
    assert objective(Tag(absolute=0.3), TRUE) == pytest.approx(0, abs=1e-4)


def test_what_lamp_minimises_is_written_out() -> None:
    """The mean over tensors that moved of one minus the cosine, and how much too long vectors are, as a share."""
    short = build().state_dict()["embedding.weight"].norm(dim=1).argsort()[1:7].repeat(2, 1)  # the shortest is padding
    true, other = slopes(TRUE), slopes(short)
    moved = [name for name in true if not name.endswith("key.bias")]
    cosines = [float(nn.functional.cosine_similarity(true[n].flatten(), other[n].flatten(), dim=0)) for n in moved]
    lengths = build().state_dict()["embedding.weight"].double().norm(dim=1)
    assert float(lengths[0]) == 0
    share = float(lengths[short].mean() / (lengths.sum() / 29))
    assert share < 0.95
    expected = 1 - sum(cosines) / len(moved)
    for weight in (0.0, 2.0):
        found = objective(Lamp(norm_weight=weight), short)
        assert found == pytest.approx(expected + weight * (share - 1) ** 2, rel=1e-4)


def test_steps_are_as_large_as_the_settings_say() -> None:
    around, _ = scene()
    tag, lamp = Tag(step_size=0.3)._recipe(around), Lamp(step_size=0.4, decay=0.5)._recipe(around)
    assert (tag.step_size, lamp.step_size) == (0.3, 0.4)
    assert [tag.schedule(iteration, 1000) for iteration in (0, 500, 999)] == [1, 1, 1]
    assert [lamp.schedule(iteration, 1000) for iteration in (0, 49, 50, 149, 150)] == [1, 1, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    "attack", [Tag(iterations=1), pytest.param(Lamp(iterations=1, candidates=1), marks=pytest.mark.thorough)]
)
def test_an_update_of_several_steps_is_warned_of(attack: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(attack, tmp_path / "one")
    assert "assumes one local step" not in caplog.text
    update = make_update()
    assert update.gradient is not None
    after = {name: before - 0.1 * update.gradient[name] for name, before in update.before.items()}
    moved = replace(update, payload=Payload.from_dense(after, "weights"))
    Recorder(tmp_path / "weights" / "transcript").write(1, [moved])
    recorded = Transcript(tmp_path / "weights" / "transcript")
    attack.run(Target(transcript=recorded, victim=5, knowledge=replace(KNOWN, optimizer="sgd"), rng=generator(0)))
    assert "assumes one local step" not in caplog.text
    attack.run(
        Target(
            transcript=recorded, victim=5, knowledge=replace(KNOWN, local_epochs=3, optimizer="sgd"), rng=generator(0)
        )
    )
    assert "assumes one local step, the update is of 3" in caplog.text


def test_lamp_rearranges_while_it_descends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = list[int]()
    monkeypatch.setattr(
        WordReordering, "__call__", lambda self, scene, dummy, taken, iterations, rng: turns.append(taken)
    )
    run(Lamp(iterations=5), tmp_path)
    assert turns == [0, 1, 2, 3, 4, 5]


@pytest.mark.thorough
def test_words_in_a_wrong_order_are_put_right_where_that_matches_better() -> None:
    around, true = scene()
    attack = Lamp(iterations=100, every=10, burn_in=0.2, tries=40)
    dummy = true.clone()
    dummy[0] = true[0][:, [0, 3, 2, 1, 4, 5]]
    dummy[1] = true[1][:, [2, 3, 4, 5, 0, 1]]
    wrong, rng = dummy.clone(), generator("orders")
    for early in (1, 10, 25):  # before the burn-in, or between two turns
        WordReordering(attack)(around, dummy, early, 100, rng)
        assert torch.equal(dummy, wrong)
    WordReordering(attack)(around, dummy, 20, 100, rng)
    assert torch.equal(dummy, true)
    WordReordering(replace(attack, tries=8))(around, dummy, 30, 100, rng)
    assert torch.equal(dummy, true)  # nothing matches better


@pytest.mark.thorough
def test_the_best_start_of_several_has_vectors_as_long_as_words() -> None:
    around, true = scene()
    distance, prior = MeanCosine(), EmbeddingNormPrior()
    target, started = distance.target(around), []
    for candidates in (1, 30):
        dummy = torch.zeros_like(true)
        WordReordering(Lamp(candidates=candidates))(around, dummy, 0, 100, generator(0))
        assert float(prior(around, dummy, dummy)) == pytest.approx(0, abs=1e-8)
        started.append(float(distance(around.gradient(around.before, dummy, LABELS), target).detach()))
    assert started[1] < started[0]
    assert float(prior(around, true, true)) == pytest.approx(0, abs=0.05)


def test_the_start_is_the_best_of_all_noise_and_then_the_best_of_its_orders() -> None:
    around, true = scene()
    rng, distance, count = generator("starts"), MeanCosine(), 6
    target = distance.target(around)

    def best(tried: list[Tensor]) -> Tensor:
        return min(
            tried, key=lambda dummy: float(distance(around.gradient(around.before, dummy, LABELS), target).detach())
        )

    noise = best([torch.randn(true.shape, generator=rng) for _ in range(count)])
    ordered = best([noise, *(noise[..., torch.randperm(true.shape[2], generator=rng)] for _ in range(count))])
    assert not torch.equal(ordered, noise)
    found = torch.zeros_like(true)
    WordReordering(Lamp(candidates=count))(around, found, 0, 100, generator("starts"))
    points = around.scaling.to_model(ordered), around.scaling.to_model(found)
    assert torch.allclose(nn.functional.cosine_similarity(*points, dim=1), torch.ones(2, 6), atol=1e-5)


def moves(length: int, sizes: range) -> set[tuple[int, ...]]:
    """All orders in which so many neighbours are somewhere else."""
    plain, found = tuple(range(length)), set()
    for size in sizes:
        for first in range(length - size + 1):
            left = plain[:first] + plain[first + size :]
            found |= {(*left[:at], *plain[first : first + size], *left[at:]) for at in range(len(left) + 1)}
    return found


def test_each_kind_of_rearrangement_makes_all_that_it_can() -> None:
    rng, length = generator("kinds"), 6
    made = [{tuple(_draw_order(kind + 4 * turn, length, rng).tolist()) for turn in range(2000)} for kind in range(4)]
    plain = tuple(range(length))
    swapped = {tuple({one: other, other: one}.get(place, place) for place in plain) for one in plain for other in plain}
    assert made[0] == swapped
    assert made[1] == moves(length, range(1, 2))
    assert made[2] == moves(length, range(1, length + 1))
    assert made[3] == {(*plain[first:], *plain[:first]) for first in plain}


def test_rearrangements_keep_all_words() -> None:
    rng = generator(0)
    for length in (1, 2, 7):
        for kind in range(40):
            assert sorted(_draw_order(kind, length, rng).tolist()) == list(range(length))


@pytest.mark.parametrize(
    ("attack", "settings"),
    [
        (Tag, {"step_size": 0.0}),
        (Tag, {"absolute": -1.0}),
        (Lamp, {"decay": 0.0}),
        (Lamp, {"norm_weight": -1.0}),
        (Lamp, {"candidates": 0}),
        (Lamp, {"every": 0}),
        (Lamp, {"tries": -1}),
        (Lamp, {"burn_in": 1.5}),
    ],
)
def test_settings_that_make_no_sense_are_refused(attack: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(settings))}: expected a"):
        attack(**settings)
