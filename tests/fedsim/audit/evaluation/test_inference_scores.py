"""Local models, inferences and representatives meet the truth: values, floors, ceilings, and claims that are none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation.imputation import ImputedCategories
from fedsim.audit.evaluation.inferences import score_inference
from fedsim.audit.evaluation.local_models import ModelCache, _proxies, score_local_model
from fedsim.audit.evaluation.representatives import score_representatives
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.zest import interpretable_pieces, model_outputs, signature, zest
from fedsim.base import metrics
from fedsim.base.errors import AttackError, DataError
from fedsim.base.randomness import generator, seed_globals
from fedsim.base.task import Task, squared_error
from fedsim.data import Column
from fedsim.interfaces.findings import Inference, Representatives
from fedsim.interfaces.modality import PublicExamples
from fedsim.recording.wire_format import State
from fedsim.training.model_state import copy_state
from fedsim.training.models.mlp import Mlp
from tests.support.recordings import build_update, record_updates
from tests.support.tensors import draw_normal

FEATURES = 5
CLASSES, REGRESSION = Task((FEATURES,), 3), Task((FEATURES,), 0)


INPUTS, REFERENCES = draw_normal(30, FEATURES), draw_normal(8, FEATURES, seed=1)
LABELS = torch.arange(30) % 3
COLUMNS = (Column(name="a", start=0, categories=("x", "y")), *(Column(name=f"n{i}", start=i) for i in (2, 3, 4)))


def built(task: Task = CLASSES, seed: int = 0, batch_norm: bool = False) -> nn.Module:
    with seed_globals(seed, "model"):
        return Mlp(hidden=(8,), batch_norm=batch_norm).build(task)


def judge(claimed: State, proxies: dict[str, State], optimum: State | None = None, **options: Any) -> dict[str, Score]:
    model = built()
    settings: dict[str, Any] = {
        "model": model, "inputs": INPUTS, "labels": LABELS, "references": [REFERENCES], "columns": COLUMNS
    }  # fmt: skip
    scores = score_local_model(
        claimed, copy_state(model) if optimum is None else optimum, proxies, **settings | options
    )
    return {item.metric: item for item in scores}


def away(state: State, size: float, seed: int = 9) -> dict[str, Tensor]:
    return {name: tensor + size * draw_normal(*tensor.shape, seed=seed) for name, tensor in state.items()}


OPTIMUM = copy_state(built())
PROXIES: dict[str, State] = {"global model": away(OPTIMUM, 0.3), "last-returned model": away(OPTIMUM, 0.1)}


def test_a_state_in_float64_is_scored_as_it_is_in_float32() -> None:
    """Clients send a buffer in the type that the network has it in."""
    wide = {name: {key: tensor.double() for key, tensor in state.items()} for name, state in PROXIES.items()}
    narrow = judge(PROXIES["global model"], PROXIES)
    assert judge(PROXIES["global model"], wide | {"global model": PROXIES["global model"]}).keys() == narrow.keys()


def test_a_proxy_is_no_message_of_a_round_between_the_attacked_ones(tmp_path: Path) -> None:
    """The victim sent something in rounds 1 and 2, of which the attack read the first."""
    sent = {number: away(OPTIMUM, 0.1 * number) for number in (1, 2, 3)}
    updates = [
        build_update(OPTIMUM, sent[number], round=number, client=client)
        for number, client in ((1, 0), (1, 1), (2, 0), (3, 1))
    ]
    experiment: Any = SimpleNamespace(initial_model_state=lambda: OPTIMUM)
    proxies = _proxies(record_updates(tmp_path, updates), [1, 3], 0, experiment)
    torch.testing.assert_close(proxies["last-returned model"], sent[1])


def test_the_optimum_itself_reaches_every_ceiling() -> None:
    scores = judge(OPTIMUM, PROXIES)
    assert list(scores) == ["parameter_distance", "zest", "local_loss", "local_accuracy"]
    for item in scores.values():
        assert item.value == pytest.approx(item.ceiling, abs=1e-12)
    assert scores["parameter_distance"].ceiling == 0
    assert scores["zest"].ceiling == pytest.approx(1, abs=1e-12)
    directions = {name: item.higher_is_better for name, item in scores.items()}
    assert directions == {"parameter_distance": False, "zest": True, "local_loss": False, "local_accuracy": True}


def test_a_claim_is_measured_as_the_formulas_say() -> None:
    claimed = away(OPTIMUM, 0.2)
    scores = judge(claimed, PROXIES)
    far = sum(float((claimed[n] - OPTIMUM[n]).square().sum()) for n in OPTIMUM)
    size = sum(float(tensor.square().sum()) for tensor in OPTIMUM.values())
    assert scores["parameter_distance"].value == pytest.approx((far / size) ** 0.5, rel=1e-5)
    model = built()
    model.load_state_dict(claimed)
    outputs = model(INPUTS)
    assert scores["local_loss"].value == pytest.approx(cross_entropy(outputs, LABELS).item(), rel=1e-5)
    assert scores["local_accuracy"].value == pytest.approx((outputs.argmax(1) == LABELS).float().mean().item())
    pieces = interpretable_pieces((FEATURES,), COLUMNS)
    one, other = (
        signature(model_outputs(built(), state, REFERENCES), REFERENCES, pieces, masks=500)
        for state in (claimed, OPTIMUM)
    )
    assert scores["zest"].value == pytest.approx(zest(one, other), abs=1e-9)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_floor_is_the_better_proxy(swapped: bool) -> None:
    """Each proxy, claimed itself, gets what the floor says of it."""
    names = ["global model", "last-returned model"]
    states = [PROXIES[name] for name in names]
    proxies = dict(zip(names, reversed(states) if swapped else states, strict=True))
    best = names[0] if swapped else names[1]
    scores = judge(OPTIMUM, proxies)
    for metric in ("parameter_distance", "zest"):
        assert scores[metric].floor_guess == best
        assert scores[metric].floor == pytest.approx(judge(proxies[best], {})[metric].value, rel=1e-9)
    each = {name: judge(state, {})["local_loss"].value for name, state in proxies.items()}
    assert scores["local_loss"].floor == pytest.approx(min(each.values()))
    alone = judge(OPTIMUM, {})["zest"]
    assert math.isnan(alone.floor)
    assert alone.floor_guess == ""


def test_the_floor_of_the_distance_is_the_nearest_point_of_the_segments_between_proxies() -> None:
    """The optimum lies beside the segment of two proxies, at a tenth of it, where no quarter point is."""
    along, beside = away(OPTIMUM, 1.0, seed=3), away(OPTIMUM, 0.1, seed=4)
    proxies = {
        name: {n: OPTIMUM[n] + (along[n] - OPTIMUM[n]) * place + (beside[n] - OPTIMUM[n]) for n in OPTIMUM}
        for name, place in (("first model", -0.1), ("last-returned model", 0.9))
    }
    item = judge(OPTIMUM, proxies)["parameter_distance"]
    shares = torch.linspace(0, 1, 401)
    tried = [
        judge({n: torch.lerp(*(proxies[name][n] for name in proxies), share) for n in OPTIMUM}, {})[
            "parameter_distance"
        ]
        for share in (0.0, 0.25, 1.0)
    ]
    assert item.floor < min(each.value for each in tried)
    ends = [torch.cat([t.flatten().double() for t in proxies[name].values()]) for name in proxies]
    true = torch.cat([tensor.flatten().double() for tensor in OPTIMUM.values()])
    fine = min(float((ends[0] + float(share) * (ends[1] - ends[0]) - true).norm() / true.norm()) for share in shares)
    assert fine * (1 - 1e-3) < item.floor <= fine * (1 + 1e-6)
    assert item.floor_guess == "between the first model and the last-returned model"


def test_whoever_claims_a_point_between_two_proxies_is_not_above_the_floor() -> None:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        claimed = {n: torch.lerp(PROXIES["global model"][n], PROXIES["last-returned model"][n], share) for n in OPTIMUM}
        for item in judge(claimed, PROXIES).values():
            gain = (item.value - item.floor) * (1 if item.higher_is_better else -1)
            assert gain <= 1e-9, (share, item.metric)


def test_a_second_optimum_tells_whether_a_claim_answers_alike_wherever_training_began() -> None:
    other = copy_state(built(seed=5))
    scores = judge(away(OPTIMUM, 0.05), PROXIES, other_optimum=other)
    assert judge(other, PROXIES, other_optimum=other)["zest_other_start"].value == pytest.approx(1, abs=1e-9)
    assert scores["zest_of_optima"].value == judge(other, {})["zest"].value
    assert math.isnan(scores["zest_of_optima"].floor)  # it is about no attack
    assert scores["zest_other_start"].ceiling == 1  # the first optimum is no bound, proxies may be above it
    assert (
        scores["zest_other_start"].floor
        >= judge(PROXIES["global model"], {}, other_optimum=other)["zest_other_start"].value
    )
    assert "zest_other_start" not in judge(OPTIMUM, PROXIES)


def test_zest_is_the_mean_over_draws_of_references() -> None:
    claimed, draws = away(OPTIMUM, 0.3), [REFERENCES[:4], REFERENCES[4:]]
    each = [judge(claimed, {}, references=[draw])["zest"].value for draw in draws]
    assert abs(each[0] - each[1]) > 1e-3
    assert judge(claimed, {}, references=draws)["zest"].value == pytest.approx(sum(each) / 2, abs=1e-9)


def test_what_is_remembered_of_models_changes_no_score() -> None:
    memory = ModelCache()
    for _ in range(2):
        again = [judge(claim, PROXIES, cache=memory) for claim in (OPTIMUM, away(OPTIMUM, 0.2))]
        assert again == [judge(claim, PROXIES) for claim in (OPTIMUM, away(OPTIMUM, 0.2))]
    assert len(memory.metrics) == 7  # two claims, one of them the optimum, two proxies and three points between


def test_the_error_of_a_regression_is_relative_and_in_its_own_units() -> None:
    """Table 9 of LMRA: mean of |y - found| / |y|, in percent; prices are 500 + 100 times what the model says."""
    model = built(REGRESSION)
    optimum = copy_state(model)
    targets = draw_normal(30, seed=4)
    scores = judge(
        away(optimum, 0.2), {"global model": optimum}, optimum, model=model, labels=targets, loss=squared_error,
        target=(500.0, 100.0), columns=(),
    )  # fmt: skip
    assert list(scores) == ["parameter_distance", "zest", "local_loss", "local_mape"]
    model.load_state_dict(away(optimum, 0.2))
    true = (500 + 100 * targets).tolist()
    found = (500 + 100 * model(INPUTS)[:, 0]).tolist()
    expected = 100 * sum(abs(t - f) / abs(t) for t, f in zip(true, found, strict=True)) / 30
    assert scores["local_mape"].value == pytest.approx(expected, rel=1e-4)
    assert not scores["local_mape"].higher_is_better
    assert scores["local_mape"].floor == scores["local_mape"].ceiling
    nothing = judge(
        optimum, {}, optimum, model=model, labels=torch.zeros(30), loss=squared_error, columns=()
    )["local_mape"]  # fmt: skip
    assert math.isnan(nothing.value)
    assert "true target is 0" in nothing.missing


def test_parameters_alone_make_the_distance() -> None:
    """Running statistics are no part of it, and where they are withheld models still compare."""
    model = built(batch_norm=True)
    whole = copy_state(model)
    other = {n: t + 1 if "running" in n else t for n, t in whole.items()}
    assert judge(other, {}, whole, model=model)["parameter_distance"].value == 0
    bare = copy_state(model, statistics=False)
    scores = judge(away(bare, 0.1), {"global model": bare}, bare, model=model)
    assert 0 < scores["parameter_distance"].value < 1
    assert scores["zest"].floor == pytest.approx(1, abs=1e-9)


def test_models_of_texts_have_no_explanations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 3))
    optimum, tokens = copy_state(model), torch.arange(30).reshape(10, 3) % 7
    scores = judge(
        away(optimum, 0.1), {"global model": optimum}, optimum, model=model, inputs=tokens, labels=LABELS[:10],
        references=[tokens], columns=(),
    )  # fmt: skip
    assert math.isnan(scores["zest"].value)
    assert scores["zest"].missing.startswith("texts have no mean")
    assert scores["local_loss"].floor == scores["local_loss"].ceiling
    assert all(not item.missing for name, item in scores.items() if name != "zest")


def test_models_of_another_architecture_are_refused() -> None:
    wrong = {"weight": torch.ones(2)}
    with pytest.raises(AttackError, match="claims a model of another architecture"):
        judge(wrong, {})
    with pytest.raises(DataError, match="the global model is of another architecture"):
        judge(OPTIMUM, {"global model": wrong})
    with pytest.raises(DataError, match="the optimal local model is of another architecture"):
        judge(OPTIMUM, {}, wrong)


def inference(of: Any, scores: list[list[float]], candidates: list[int] | None = None) -> Inference:
    numbers = torch.tensor(scores, dtype=torch.float32)
    chosen = torch.arange(numbers.shape[1]) if candidates is None else torch.tensor(candidates)
    return Inference(of=of, candidates=chosen, scores=numbers)


HOLDERS = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=torch.bool)


def test_clients_that_sent_nothing_lower_no_floor_of_sources() -> None:
    holders, claim = torch.tensor([[True, False, False, False]] * 4), inference("source", [[3, 0, 0, 0]] * 4)
    (item,) = score_inference(claim, holders, has_sent=torch.tensor([True, True, False, False]))
    assert (item.floor, item.floor_guess) == (0.5, "one of 2 clients that sent something")
    (item,) = score_inference(claim, holders, has_sent=torch.ones(4, dtype=torch.bool))
    assert (item.floor, item.floor_guess) == (0.25, "one of 4 clients at random")


def test_a_source_is_right_if_it_holds_the_record() -> None:
    """Claims 0, 1, 0, 2: the first two hold theirs; nobody holds the last. Chance: 1/3, 2/3, 1/3, 0."""
    found = inference("source", [[3, 0, 0], [0, 3, 0], [3, 0, 0], [0, 0, 3]], [7, 4, 9])
    (item,) = score_inference(found, HOLDERS)
    assert item.metric == "source_accuracy"
    assert item.value == pytest.approx(2 / 4)
    assert item.floor == pytest.approx((1 + 2 + 1 + 0) / 12)
    assert item.floor_guess == "one of 3 clients at random"
    assert item.ceiling == pytest.approx(3 / 4)
    assert item.higher_is_better


def test_a_victim_that_is_no_candidate_has_all_records_wrong_and_so_has_the_guess() -> None:
    """Over all clients, guessing among nine of ten is right for a tenth, as if ten could be claimed."""
    clients, candidates = 10, list(range(9))
    found = inference("source", [[1.0, *[0.0] * 8]] * 5, candidates)
    scores = [score_inference(found, torch.tensor([[own == c for c in candidates]] * 5))[0] for own in range(clients)]
    assert [item.value for item in scores] == [1.0, *[0.0] * 9]
    assert (scores[9].floor, scores[9].ceiling) == (0, 0)
    assert sum(item.floor for item in scores) / clients == pytest.approx(1 / clients)
    assert {item.floor_guess for item in scores} == {"one of 9 clients at random"}


def test_candidates_that_are_equally_likely_count_by_chance() -> None:
    """An attack that cannot tell them apart must not profit from the order of the candidates."""
    (item,) = score_inference(inference("source", [[0, 0, 0]] * 4), HOLDERS)
    assert item.value == pytest.approx(item.floor)
    (item,) = score_inference(inference("source", [[1, 1, 0]] * 4), HOLDERS)
    assert item.value == pytest.approx((1 / 2 + 1 + 0 + 0) / 4)
    accuracy, balanced = score_inference(inference("attribute", [[0, 0]] * 4), torch.tensor([0, 0, 0, 1]))
    assert accuracy.value == pytest.approx(1 / 2)
    assert balanced.value == pytest.approx(1 / 2)


def test_an_attribute_is_compared_with_the_majority_among_the_clients_own_records() -> None:
    """Of five records four hold category 2, one category 0; candidates stand in another order."""
    truth = torch.tensor([2, 2, 0, 2, 2])
    found = inference("attribute", [[9, 0, 0], [0, 9, 0], [0, 9, 0], [9, 0, 0], [0, 0, 9]], [2, 0, 1])
    accuracy, balanced = score_inference(found, truth)
    assert accuracy.metric == "attribute_accuracy"
    assert accuracy.value == pytest.approx(3 / 5)
    nothing = "; there are no public data to impute from"
    assert (accuracy.floor, accuracy.floor_guess, accuracy.ceiling) == (4 / 5, f"majority attribute{nothing}", 1)
    assert balanced.metric == "attribute_balanced_accuracy"
    assert balanced.value == pytest.approx((2 / 4 + 1) / 2)
    assert (balanced.floor, balanced.floor_guess, balanced.ceiling) == (1 / 2, f"one attribute for all{nothing}", 1)


def test_public_data_are_the_floor_of_an_attribute_where_they_say_more_than_the_majority() -> None:
    """Four of five records are of category 2; imputed are all five, then three of them."""
    truth = torch.tensor([2, 2, 0, 2, 2])
    found = inference("attribute", [[0, 0, 9]] * 5)
    accuracy, balanced = score_inference(found, truth, ImputedCategories(likeliest=truth, balanced=truth))
    assert (accuracy.value, accuracy.floor, accuracy.floor_guess) == (4 / 5, 1, "imputed from public data")
    assert (balanced.value, balanced.floor, balanced.floor_guess) == (1 / 2, 1, "imputed from public data")
    rare = torch.tensor([0, 0, 0, 2, 2])
    accuracy, balanced = score_inference(found, truth, ImputedCategories(likeliest=rare, balanced=rare))
    assert (accuracy.floor, accuracy.floor_guess) == (4 / 5, "majority attribute")
    assert (balanced.floor, balanced.floor_guess) == (pytest.approx((2 / 4 + 1) / 2), "imputed from public data")


def test_a_guess_about_other_records_is_refused() -> None:
    few = torch.zeros(3).long()
    with pytest.raises(DataError, match=r"the attribute of 5 records"):
        score_inference(
            inference("attribute", [[1, 0]] * 5), torch.ones(5).long(), ImputedCategories(likeliest=few, balanced=few)
        )


def test_balanced_accuracy_is_scikit_learns() -> None:
    numbers, truth = draw_normal(60, 4), torch.arange(60) % 3  # of the fourth category it has none
    _, balanced = score_inference(Inference(of="attribute", candidates=torch.arange(4), scores=numbers), truth)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        expected = balanced_accuracy_score(truth.numpy(), numbers.argmax(1).numpy())
    assert balanced.value == pytest.approx(expected)
    assert balanced.floor == pytest.approx(1 / 3)


def images(count: int, seed: int = 0) -> Tensor:
    return torch.rand((count, 1, 20, 16), generator=torch.Generator().manual_seed(seed))


HELD, CLASSES_HELD = images(6), torch.tensor([0, 0, 0, 1, 1, 4])
PUBLIC = PublicExamples(data=images(20, seed=3), labels=torch.arange(20) % 5)


def represent(data: Tensor, labels: list[int], public: PublicExamples | None = PUBLIC) -> dict[str, Score]:
    found = Representatives(data=data, labels=torch.tensor(labels))
    return {s.metric: s for s in score_representatives(found, HELD, CLASSES_HELD, public=public, rng=generator(1))}


def test_a_representative_is_compared_with_the_clients_nearest_image_of_its_class() -> None:
    """One claim is an image of the victim's, one is of the wrong class, one of a class that it does not hold."""
    claims = torch.stack([HELD[1], HELD[5], HELD[3]])
    scores = represent(claims, [0, 1, 2])
    other = max(metrics.ssim(HELD[5:6], HELD[i : i + 1]).item() for i in (3, 4))
    assert scores["class_ssim"].per_image == pytest.approx([1, other, 0], abs=1e-6)
    assert scores["class_ssim"].value == pytest.approx((1 + other) / 3, abs=1e-6)
    assert scores["class_ssim"].ceiling == 1
    noisy = (claims + 0.1).clamp(0, 1)
    expected = [max(-10 * math.log10((noisy[0] - HELD[i]).square().mean().item()) for i in (0, 1, 2))]
    expected += [max(-10 * math.log10((noisy[1] - HELD[i]).square().mean().item()) for i in (3, 4)), 0]
    psnr = represent(noisy, [0, 1, 2])["class_psnr"]
    assert psnr.per_image == pytest.approx(expected, rel=1e-4)
    assert psnr.value == pytest.approx(sum(expected) / 3, rel=1e-4)
    assert psnr.ceiling is None
    assert psnr.higher_is_better


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("mean face", lambda: PUBLIC.data.mean(0).expand(2, -1, -1, -1)),
        ("mid-grey", lambda: torch.full((2, 1, 20, 16), 0.5)),
        ("noise", lambda: torch.rand((2, 1, 20, 16), generator=generator(1))),
    ],
)
def test_the_floor_of_representatives_is_the_best_guess(name: str, guess: Callable[[], Tensor]) -> None:
    """Were a guess the very images that the victim holds, it would be the floor, at the ceiling."""
    found = Representatives(data=images(2, seed=8), labels=torch.tensor([0, 1]))
    scores = score_representatives(found, guess().clone(), torch.tensor([0, 1]), public=PUBLIC, rng=generator(1))
    assert {item.floor_guess for item in scores} == {name}
    assert scores[0].floor == pytest.approx(1, abs=1e-4)


def test_a_guess_is_claimed_for_the_same_classes() -> None:
    """A class that the victim does not hold costs the guess as much as the attack."""
    both, one = represent(images(2, seed=8), [0, 2]), represent(images(1, seed=8), [0])
    assert both["class_psnr"].floor == pytest.approx(one["class_psnr"].floor / 2, rel=1e-2)
    guess, remark = represent(images(2), [0, 1], None)["class_ssim"].floor_guess.split("; ")
    assert guess in ("noise", "mid-grey")
    assert remark == "there are no public data to guess by"


def test_public_images_of_the_class_stand_beside_and_are_no_guess() -> None:
    """Its own are public: that would be a perfect answer, but no floor; of a class that is not public there is none."""
    public = PublicExamples(data=HELD[:3], labels=torch.tensor([0, 0, 0]))
    scores = represent(images(2, seed=8), [0, 1], public)
    assert scores["class_ssim"].nearest_public == pytest.approx(0.5, abs=1e-4)
    assert scores["class_ssim"].floor < 0.4
    assert math.isnan(represent(images(2), [0, 1], None)["class_psnr"].nearest_public)


def test_representatives_smaller_than_the_window_of_ssim_are_judged_by_psnr_alone() -> None:
    found = Representatives(data=torch.rand(1, 1, 4, 4), labels=torch.tensor([0]))
    ssim, psnr = score_representatives(
        found, torch.rand(2, 1, 4, 4), torch.zeros(2).long(), public=None, rng=generator(1)
    )
    assert "smaller than its window" in ssim.missing
    assert math.isfinite(psnr.value)


def test_a_class_that_is_not_public_is_guessed_by_the_mean_of_all() -> None:
    few = PublicExamples(data=PUBLIC.data[:2], labels=torch.tensor([3, 4]))
    item = represent(images(1, seed=8), [0], few)["class_psnr"]
    mean = few.data.mean(0)
    expected = max(-10 * math.log10((mean - HELD[i]).square().mean().item()) for i in (0, 1, 2))
    grey = max(-10 * math.log10((0.5 - HELD[i]).square().mean().item()) for i in (0, 1, 2))
    assert item.floor == pytest.approx(max(expected, grey), rel=1e-4)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("4 records among 3 candidates", lambda: score_inference(inference("source", [[1, 2, 3]] * 4), HOLDERS[:2])),
        ("a regression has none", lambda: score_representatives(
            Representatives(data=images(1), labels=torch.tensor([0.5])), HELD, CLASSES_HELD, public=None,
            rng=generator(1))),
        ("representatives of shape", lambda: represent(torch.rand(1, 1, 8, 8), [0])),
        ("and representatives of classes are compared as images; for tables, attack", lambda: score_representatives(
            Representatives(data=torch.rand(2, 22), labels=torch.arange(2)), torch.rand(3, 22), CLASSES_HELD,
            public=None, rng=generator(1), modality="table")),
        (r"3 records among 2 candidates, but the truth is of shape \(0,\), expected \(3,\)", lambda: score_inference(
            inference("attribute", [[1, 0]] * 3), torch.ones(0).long())),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_is_said_in_a_sentence(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(DataError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("sentence", "make"),
    [
        (
            "the attack claims scores of torch.float32, shape (0, 2), expected at least one value",
            lambda: Inference(of="attribute", candidates=torch.arange(2), scores=torch.ones(0, 2)),
        ),
        (
            "the attack claims scores of torch.int64, shape (3, 2), expected floating point numbers",
            lambda: Inference(of="source", candidates=torch.arange(2), scores=torch.ones(3, 2).long()),
        ),
        (
            "the attack claims data of torch.float32, shape (0, 1, 20, 16), expected at least one value",
            lambda: Representatives(data=images(0), labels=torch.arange(0)),
        ),
    ],
)
def test_what_could_not_be_judged_cannot_be_claimed(sentence: str, make: Callable[[], object]) -> None:
    with pytest.raises(AttackError) as caught:
        make()
    assert str(caught.value) == sentence
