"""L_sim is computed from what is claimed, whatever the attack declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedsim.audit.evaluation.guess_similarities import measure_guess_similarities
from fedsim.audit.evaluation.line_search import LineFunction, LinePoint, minimise_coarsely
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.scoring import score_examples
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import DataError
from fedsim.interfaces.findings import Reconstruction
from fedsim.interfaces.modality import PublicExamples
from fedsim.training.loop import local_update
from fedsim.training.model_state import copy_state, load_state
from fedsim.training.settings import LocalTraining
from tests.support.recordings import build_update

RANGE = (torch.tensor([-0.5]), torch.tensor([2.0]))
LABELS = torch.tensor([0, 1, 2, 1])


def images(count: int, seed: int = 0) -> Tensor:
    return torch.rand((count, 1, 6, 6), generator=torch.Generator().manual_seed(seed))


def network(**layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), *layers.values(), nn.Sigmoid(), nn.Linear(8, 3))


def message(model: nn.Module | None = None, **how: Any) -> AttackedUpdate:
    """What a client sends who holds `images(4)`, in model units."""
    model = model or network()
    plan = LocalTraining(**({"local_epochs": 1, "batch_size": 4, "learning_rate": 0.5} | how))
    before = copy_state(model)
    inputs = RANGE[0] + (RANGE[1] - RANGE[0]) * images(4)
    after, _ = local_update(model, before, inputs, LABELS, plan, key=("similarity",))
    update = build_update(before, after, num_examples=4)
    return AttackedUpdate(model=model, loss=cross_entropy, update=update, value_range=RANGE, settings=plan)


def by_hand(sent: AttackedUpdate, data: Tensor, alpha: float) -> float:
    before, after = sent.update.before, sent.update.after
    load_state(sent.model, {name: alpha * before[name] + (1 - alpha) * after[name] for name in before})
    loss = cross_entropy(sent.model(-0.5 + 2.5 * data), LABELS)
    names, weights = zip(*sent.model.named_parameters(), strict=True)
    gradient = torch.cat([slope.flatten() for slope in torch.autograd.grad(loss, weights)])
    moved = torch.cat([(before[name] - after[name]).flatten() for name in names])
    return 1 - cosine_similarity(gradient, moved, dim=0).item()


def scores_by_metric(
    data: Tensor, sent: AttackedUpdate | None, trace: Mapping[str, Tensor] | None = None
) -> dict[str, Score]:
    finding = Reconstruction(data=data, labels=LABELS, trace=trace or {})
    truth, public = (
        Truth(data=images(4), labels=LABELS),
        PublicExamples(data=images(9, seed=5), labels=torch.arange(9) % 3),
    )
    scores = score_examples(finding, truth, public=public, rng=torch.Generator().manual_seed(1), message=sent)
    return {item.metric: item for item in scores}


def test_what_the_client_held_explains_one_step_wholly() -> None:
    found = message().similarities(images(4), LABELS)
    assert found == {"l_sim": pytest.approx(0, abs=1e-6), "l_sim_line": pytest.approx(0, abs=1e-6)}


def test_short_integers_are_labels_as_others_are() -> None:
    truth = Truth(data=images(4), labels=LABELS)
    finding = Reconstruction(data=images(4), labels=LABELS.int())
    scores = score_examples(finding, truth, public=None, rng=torch.Generator(), message=message())
    values = {score.metric: score.value for score in scores}
    assert values["l_sim"] == pytest.approx(0, abs=1e-6)


def test_it_is_the_cosine_at_w_t_and_the_best_one_on_the_line() -> None:
    sent, data = message(local_epochs=40, batch_size=2), images(4, seed=3)
    found = sent.similarities(data, LABELS)
    grid = [by_hand(sent, data, place / 200) for place in range(201)]
    assert found["l_sim"] == pytest.approx(by_hand(sent, data, 1.0), abs=1e-6)
    assert found["l_sim_line"] == pytest.approx(min(grid), abs=1e-4)
    assert found["l_sim_line"] < found["l_sim"] - 0.01


def test_a_gradient_that_was_sent_has_no_line() -> None:
    sent = message()
    gradient = {name: (sent.update.before[name] - tensor) / 0.5 for name, tensor in sent.update.after.items()}
    update = build_update(sent.update.before, gradient, "gradient", num_examples=4)
    alone = AttackedUpdate(model=sent.model, loss=cross_entropy, update=update, value_range=RANGE)
    assert alone.similarities(images(4), LABELS) == {"l_sim": pytest.approx(0, abs=1e-6)}


def test_batch_norm_normalises_as_the_client_did() -> None:
    found = message(network(norm=nn.BatchNorm1d(8))).similarities(images(4), LABELS)
    assert found["l_sim"] == pytest.approx(0, abs=1e-5)


def test_what_an_attack_says_of_its_own_loss_is_not_believed() -> None:
    boast = {"l_sim": torch.zeros(3)}
    assert "l_sim" not in scores_by_metric(images(4, seed=3), None, boast)
    sent = message(local_epochs=40)
    item = scores_by_metric(images(4, seed=3), sent, boast)["l_sim"]
    assert item.value == pytest.approx(by_hand(sent, images(4, seed=3), 1.0), abs=1e-6)
    assert not item.higher_is_better


def test_the_floor_is_the_best_guess_by_the_same_rule() -> None:
    sent = message(local_epochs=5)
    scores = scores_by_metric(images(4, seed=3), sent)
    noise, public = torch.Generator().manual_seed(1), images(9, seed=5)
    guesses = {
        "noise": torch.rand((4, 1, 6, 6), generator=noise),
        "mid-grey": torch.full((4, 1, 6, 6), 0.5),
        "public mean": public.mean(0).expand(4, -1, -1, -1),
        "random public examples": public[torch.randint(9, (4,), generator=noise)],
        "public class mean": torch.stack([public[torch.arange(9) % 3 == c].mean(0) for c in LABELS.tolist()]),
    }
    floors = {name: by_hand(sent, data, 1.0) for name, data in guesses.items()}
    best = min(floors, key=lambda name: floors[name])
    assert (scores["l_sim"].floor, scores["l_sim"].floor_guess) == (pytest.approx(floors[best], abs=1e-6), best)
    assert scores["l_sim_line"].floor <= scores["l_sim"].floor
    assert scores["l_sim"].per_image == ()


class Stubborn(nn.Linear):
    """Takes nothing."""

    def forward(self, inputs: Tensor) -> Tensor:
        raise RuntimeError("no.\nreally")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"after": None}, "the update is zero, which nothing explains"),
        ({"model": nn.Linear(36, 3)}, "the recorded update is not one of the model that is known"),
        ({"model": nn.Sequential(nn.Flatten(), Stubborn(36, 8), nn.Sigmoid(), nn.Linear(8, 3))}, "RuntimeError: no"),
    ],
)
def test_where_there_is_none_the_reason_stands_there_and_the_others_are_scored(
    change: dict[str, Any], sentence: str
) -> None:
    sent = message()
    update = sent.update
    if "after" in change:
        update = build_update(update.before, update.before, num_examples=4)
    broken = AttackedUpdate(model=change.get("model", sent.model), loss=cross_entropy, update=update, value_range=RANGE)
    scores = scores_by_metric(images(4, seed=3), broken)
    assert sentence in scores["l_sim"].missing
    assert math.isfinite(scores["psnr"].value)


def test_a_zero_update_is_an_error() -> None:
    sent = message()
    update = build_update(sent.update.before, sent.update.before, num_examples=4)
    with pytest.raises(DataError, match="is zero"):
        AttackedUpdate(model=sent.model, loss=cross_entropy, update=update, value_range=RANGE).similarities(
            images(4), LABELS
        )


def test_a_guess_that_cannot_be_measured_leaves_no_floor_on_the_line_either(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = AttackedUpdate.similarity_at_broadcast

    def refuse_grey(self: AttackedUpdate, data: Tensor, labels: Tensor) -> float:
        if bool((data == 0.5).all()):
            raise DataError("the gradient of grey is not finite")
        return compute(self, data, labels)

    monkeypatch.setattr(AttackedUpdate, "similarity_at_broadcast", refuse_grey)
    scores = scores_by_metric(images(4, seed=3), message())
    assert scores["l_sim"].missing == "the guess 'mid-grey' has no value: the gradient of grey is not finite"
    assert scores["l_sim_line"].missing == "the guess 'mid-grey' has no value: it could not be measured"


def at_each(function: Callable[[float], float]) -> LineFunction:
    return lambda positions: [function(position) for position in positions]


def exact_line(sent: AttackedUpdate, data: Tensor) -> float:
    return min(by_hand(sent, data, place / 200) for place in range(201))


@pytest.mark.parametrize("epochs", [1, 5, 40])
def test_a_coarse_search_is_near_the_exact_one_never_below_it_and_three_times_as_short(
    epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, data = message(local_epochs=epochs, batch_size=2), images(4, seed=3)
    compute, positions = AttackedUpdate._distance, list[float]()

    def count(self: AttackedUpdate, alpha: float, inputs: Tensor, labels: Tensor) -> float:
        positions.append(alpha)
        return compute(self, alpha, inputs, labels)

    monkeypatch.setattr(AttackedUpdate, "_distance", count)
    coarse = sent.search_line(data, LABELS, sent.similarity_at_broadcast(data, LABELS), None).value
    assert len(positions) <= 6
    exact = exact_line(sent, data)
    assert exact - 1e-6 <= coarse <= exact + 0.01


@pytest.mark.parametrize("bend", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("lowest", [-0.2, 0.0, 0.1, 0.45, 0.8, 1.0, 1.3])
def test_a_coarse_search_finds_valleys_of_any_width_and_ends(lowest: float, bend: float) -> None:
    def function(position: float) -> float:
        positions.append(position)
        return 1 - 0.7 * math.exp(-bend * (position - lowest) ** 2)

    positions: list[float] = []
    coarse, exact = minimise_coarsely(at_each(function), function(1.0)), function(min(max(lowest, 0.0), 1.0))
    assert exact <= coarse.value <= exact + 0.003
    assert coarse.value == function(coarse.position)
    positions.pop()
    assert len(positions) <= 8
    assert all(0 <= position <= 1 for position in positions)


@pytest.mark.parametrize("epochs", [1, 5, 40])
@pytest.mark.parametrize("seed", [3, 4])
def test_the_best_point_of_the_line_is_found(epochs: int, seed: int) -> None:
    sent, data = message(local_epochs=epochs, batch_size=2), images(4, seed=seed)
    similarities = sent.similarities(data, LABELS)
    assert similarities["l_sim"] == sent.similarity_at_broadcast(data, LABELS)
    assert similarities["l_sim_line"] == pytest.approx(exact_line(sent, data), abs=2e-5)


def test_the_floor_on_the_line_is_that_of_the_best_guess_to_a_hundredth() -> None:
    sent = message(local_epochs=20, batch_size=2)
    score = scores_by_metric(images(4, seed=3), sent)["l_sim_line"]
    noise = torch.rand((4, 1, 6, 6), generator=torch.Generator().manual_seed(1))
    public = images(9, seed=5)
    guesses = [noise, torch.full_like(noise, 0.5), public.mean(0).expand(4, -1, -1, -1)]
    guesses.append(torch.stack([public[torch.arange(9) % 3 == label].mean(0) for label in LABELS.tolist()]))
    assert score.floor <= min(exact_line(sent, guess) for guess in guesses) + 0.01


def test_a_rival_that_is_not_beaten_where_it_is_best_ends_a_search() -> None:
    def function(position: float) -> float:
        positions.append(position)
        return 1 - 0.7 * math.exp(-((position - 0.3) ** 2))

    positions: list[float] = []
    assert minimise_coarsely(at_each(function), function(1.0), LinePoint(0.2, 0.4)) == (function(0.4), 0.4)
    assert positions == [1.0, 0.4, 0.4]
    # One that is worse there is searched for as if there were none.
    found = minimise_coarsely(at_each(function), function(1.0), LinePoint(0.5, 0.4))
    assert 0.3 <= found.value <= 0.303


def test_of_several_guesses_the_best_one_alone_is_searched_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = message(local_epochs=20, batch_size=2)
    compute, positions = AttackedUpdate._distance, list[float]()

    def count(self: AttackedUpdate, alpha: float, inputs: Tensor, labels: Tensor) -> float:
        positions.append(alpha)
        return compute(self, alpha, inputs, labels)

    monkeypatch.setattr(AttackedUpdate, "_distance", count)
    guesses = {f"{seed}": 0.5 + 0.3 * (images(4, seed=seed) - 0.5) for seed in range(3, 8)}
    values = measure_guess_similarities(sent, guesses, LABELS, MeasurementCache())
    line_values = [values[name]["l_sim_line"] for name in guesses]
    floor = min(value.item() for value in line_values if isinstance(value, Tensor))
    # Five at w_t, one search, which looks at w_T, and one gradient each of the other four.
    assert len(positions) <= 5 + 8 + 4
    assert positions.count(0.0) == 1
    exact = [exact_line(sent, guess) for guess in guesses.values()]
    assert min(exact) - 1e-6 <= floor <= min(exact) + 0.01
    for value, least in zip(line_values, exact, strict=True):
        assert isinstance(value, Tensor)
        assert value.item() >= least - 1e-6


def test_findings_about_one_victim_share_what_guesses_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[str, Tensor]] = []
    for name in ("similarity_on_line", "search_line", "similarity_at_broadcast"):
        compute = getattr(AttackedUpdate, name)

        def count(self: AttackedUpdate, data: Tensor, *given: Any, compute: Any = compute, **how: Any) -> Any:
            computed.append((compute.__name__, data))
            return compute(self, data, *given, **how)

        monkeypatch.setattr(AttackedUpdate, name, count)
    sent, cache = message(), MeasurementCache()
    truth, public = (
        Truth(data=images(4), labels=LABELS),
        PublicExamples(data=images(9, seed=5), labels=torch.arange(9) % 3),
    )

    def score(data: Tensor, labels: Tensor, cache: MeasurementCache | None) -> list[Score]:
        computed.clear()
        finding, rng = Reconstruction(data=data, labels=labels), torch.Generator().manual_seed(1)
        return score_examples(finding, truth, public=public, rng=rng, message=sent, cache=cache)

    score(images(4, seed=3), LABELS, cache)
    assert len(computed) > 5
    claims = images(4, seed=4)
    shared = score(claims, LABELS, cache)
    assert [name for name, _ in computed] == ["similarity_at_broadcast", "similarity_on_line"]
    assert all(torch.equal(data, claims) for _, data in computed)
    assert repr(shared) == repr(score(claims, LABELS, None))
    # Guesses explain the message by the labels that are claimed.
    assert repr(score(claims, LABELS.flip(0), cache)) == repr(score(claims, LABELS.flip(0), None))
    assert repr(shared) != repr(score(claims, LABELS.flip(0), cache))
