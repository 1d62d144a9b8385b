"""TGIAs-RO: its aggregation and optimiser against references, Algorithm 1 against a loop, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import trim_mean
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from adversaries.inversion.tgias_ro import TemporalInversion
from fedsim.base.errors import AttackError, ConfigError, FedsimError, KnowledgeError
from fedsim.base.metrics import match_examples, psnr
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge, Target
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion import aggregation
from fedsim.inversion.lbfgs import minimise
from fedsim.recording.payloads import Payload
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update
from tests.support.networks import compute_gradient
from tests.support.recordings import Record, build_update, run_attack

SHAPE, LABELS = (1, 8, 8), torch.tensor([1, 4, 4])
QUICK: dict[str, Any] = {"optimizer": "adam", "distance": "cosine", "layers": "equal", "step_size": 0.5}


def build(*, seed: int = 0, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Sigmoid(), nn.Linear(24, 10, bias=bias))


KNOWN = Knowledge(model=build, loss=cross_entropy, input_shape=SHAPE, value_range=([0.0], [1.0]))


def truth(count: int = 3) -> Tensor:
    return torch.rand((count, *SHAPE), generator=generator("truth", count))


def make_updates(rounds: int = 4, *, rate: float = 0.1, bias: bool = True) -> list[Update]:
    """What a client with one mini-batch sends while the server takes plain steps along its gradients."""
    model, updates = build(bias=bias), []
    for number in range(1, rounds + 1):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradient = compute_gradient(model, truth(), LABELS)
        updates.append(build_update(before, gradient, "gradient", round=number, client=5, num_examples=len(LABELS)))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= rate * gradient[name]
    return updates


def run(transcript: Transcript, knowledge: Knowledge = KNOWN, seed: int = 0, **settings: Any) -> Reconstruction:
    attack = TemporalInversion(**{"gradients": len(transcript.rounds), "similarity": 0.6, "labels": "bias", **settings})
    return run_attack(attack, transcript, knowledge, 5, seed)


def quality(finding: Reconstruction, true: Tensor) -> float:
    return psnr(finding.data[match_examples(finding.data, true)], true).mean().item()


# Aggregation.


@pytest.mark.parametrize("count", [3, 4, 10, 11])
def test_median_and_means_are_those_of_numpy_and_scipy(count: int) -> None:
    estimates = torch.randn((count, 2, 3), generator=generator(count), dtype=torch.float64)
    rows = estimates.numpy()
    assert np.allclose(aggregation.median(estimates), np.median(rows, 0), atol=1e-14)
    assert np.allclose(aggregation.mean(estimates), rows.mean(0), atol=1e-14)
    for trim in (0.0, 0.1, 0.2, 0.3, 0.49):
        assert np.allclose(aggregation.trimmed_mean(estimates, trim=trim), trim_mean(rows, trim, 0), atol=1e-14)


@pytest.mark.parametrize("invalid", [0, 1, 3])
def test_krum_is_the_estimate_with_the_closest_neighbours(invalid: int) -> None:
    estimates = torch.randn((9, 2, 3), generator=generator(invalid))
    scores = []
    for a in range(9):
        distances = sorted(float((estimates[a] - estimates[b]).square().sum()) for b in range(9) if b != a)
        scores.append(sum(distances[: 9 - invalid - 2]))
    assert torch.equal(aggregation.krum(estimates, invalid=invalid), estimates[int(np.argmin(scores))])


def test_krum_counts_neither_a_neighbour_more_nor_one_less() -> None:
    """Of five with one invalid two neighbours count: by them 0 is closest, by three 1, by one 3."""
    estimates = torch.tensor([-1.0, 0.0, 1.0, 3.0, 3.2])[:, None]
    assert aggregation.krum(estimates, invalid=1).item() == 0


def test_krum_wants_enough_gradients() -> None:
    with pytest.raises(AttackError, match="krum: 2 invalid among 6 gradients, expected at least 7 gradients"):
        aggregation.krum(torch.zeros(6, 1), invalid=2)


# Optimisation.


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_lbfgs_of_many_problems_is_torchs_of_each(steps: int) -> None:
    rng = generator("lbfgs")
    bowls = torch.randn((3, 6, 6), generator=rng, dtype=torch.float64)
    bowls = bowls @ bowls.mT + torch.eye(6)
    starts = torch.randn((3, 6), generator=rng, dtype=torch.float64)

    def value(point: Tensor, bowl: Tensor) -> Tensor:
        return point @ bowl @ point / 2 + point.cos().sum()

    def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            points = points.detach().requires_grad_(True)
            values = torch.stack([value(p, b) for p, b in zip(points, bowls, strict=True)])
            return values.detach(), torch.autograd.grad(values.sum(), points)[0]

    found, first = minimise(evaluate, starts, steps=steps, step_size=0.7)
    for problem in range(3):
        point = starts[problem].clone().requires_grad_(True)
        own = torch.optim.LBFGS([point], lr=0.7, max_iter=steps, max_eval=99, tolerance_grad=0, tolerance_change=0)

        def closure(point: Tensor = point, own: torch.optim.Optimizer = own, bowl: Tensor = bowls[problem]) -> Tensor:
            own.zero_grad()
            at = value(point, bowl)
            at.backward()
            return at

        own.step(closure)  # type: ignore[arg-type]
        assert torch.allclose(found[problem], point, atol=1e-10)
        assert torch.allclose(first[problem], value(starts[problem], bowls[problem]))


def weighted_distance(state: Mapping[str, Tensor], sent: Mapping[str, Tensor], dummy: Tensor) -> Tensor:
    """f_t with weights 1, 2, 3, 4 over their mean, divided by the recorded gradient's own."""
    weights = {name: p.detach().requires_grad_(True) for name, p in state.items()}
    loss = cross_entropy(functional_call(build(), weights, (dummy,)), LABELS)
    slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    pairs = list(zip(slopes, sent.values(), strict=True))
    apart = sum(w / 2.5 * (a - b).square().sum() for w, (a, b) in enumerate(pairs, 1))
    return apart / sum(w / 2.5 * b.square().sum() for w, (_, b) in enumerate(pairs, 1))  # type: ignore[no-any-return]


def by_hand(updates: Sequence[Update], rounds: int, local: int, rate: float) -> Tensor:
    """Algorithm 1 with torch's L-BFGS and NumPy's median, in pixels with half a range to either side."""
    estimate = torch.randn((3, *SHAPE), generator=generator(0)).double()
    for _ in range(rounds):
        ends = []
        for update in updates:
            assert update.gradient is not None
            point = estimate.clone().requires_grad_(True)
            own = torch.optim.LBFGS([point], lr=rate, max_iter=local, max_eval=99, tolerance_grad=0, tolerance_change=0)
            state, slopes = ({k: v.double() for k, v in given.items()} for given in (update.before, update.gradient))

            def closure(
                point: Tensor = point,
                own: torch.optim.Optimizer = own,
                state: Mapping[str, Tensor] = state,
                slopes: Mapping[str, Tensor] = slopes,
            ) -> Tensor:
                own.zero_grad()
                value = weighted_distance(state, slopes, 0.5 + 0.25 * point)
                value.backward()
                return value

            own.step(closure)  # type: ignore[arg-type]
            ends.append(point.detach().numpy())
        estimate = torch.from_numpy(np.median(np.stack(ends), 0)).clamp(-2, 2)
    return 0.5 + 0.25 * estimate


@pytest.mark.parametrize("vectorise", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("rounds", "local", "rate"), [(2, 3, 1.0), pytest.param(3, 1, 1000.0, marks=pytest.mark.thorough)]
)
def test_the_attack_is_algorithm_1_written_as_a_loop(
    record: Record, vectorise: bool, rounds: int, local: int, rate: float
) -> None:
    knowledge = dataclasses.replace(KNOWN, labels=LABELS)
    updates = spoilt(make_updates(3), [2])  # so that the median is not the mean; some pixels reach their bounds
    settings: dict[str, Any] = {"iterations": rounds, "local_iterations": local, "step_size": rate, "align": False}
    finding = run(record(updates), knowledge, vectorise=vectorise, **settings)
    expected = by_hand(updates, rounds, local, rate)
    assert torch.allclose(finding.data.double(), expected, atol=1e-3)
    assert ((expected == 0) | (expected == 1)).any()
    mean = run(record(updates), knowledge, vectorise=vectorise, **settings | {"aggregation": "mean"})
    assert not torch.allclose(mean.data.double(), expected, atol=0.1)
    if local == 1:
        assert not torch.allclose(by_hand(updates, rounds - 1, local, rate), expected, atol=0.01)
    start = 0.5 + 0.25 * torch.randn((3, *SHAPE), generator=generator(0))
    first = [weighted_distance(u.before, u.gradient or {}, start).item() for u in updates]
    assert finding.trace["objective"][0].item() == pytest.approx(np.mean(first), rel=1e-4)


@pytest.mark.parametrize("settings", [QUICK, QUICK | {"distance": "l2"}, {"local_iterations": 4}])
def test_one_call_for_all_gradients_finds_what_a_loop_finds(record: Record, settings: dict[str, Any]) -> None:
    transcript = record(make_updates(3))
    settings = settings | {"iterations": 1, "align": False}
    together, apart = run(transcript, **settings), run(transcript, vectorise=False, **settings)
    assert torch.allclose(together.data, apart.data, atol=1e-2)
    assert torch.allclose(together.trace["objective"], apart.trace["objective"], rtol=1e-3)


@pytest.mark.parametrize(
    "settings", [{"iterations": 12}, pytest.param(QUICK | {"iterations": 200}, marks=pytest.mark.thorough)]
)
def test_the_mini_batch_and_its_labels_are_found(record: Record, settings: dict[str, Any]) -> None:
    finding = run(record(make_updates(3)), **settings)
    assert quality(finding, truth()) > 22
    assert finding.labels.tolist() == LABELS.tolist()
    assert finding.trace["objective"][-1] < 0.05 * finding.trace["objective"][0]
    assert finding.snapshots is not None
    assert torch.equal(finding.snapshots[-1], finding.data)


def roughness(images: Tensor) -> float:
    return float(
        (images[..., 1:] - images[..., :-1]).abs().mean() + (images[..., 1:, :] - images[..., :-1, :]).abs().mean()
    )


@pytest.mark.thorough
def test_total_variation_makes_images_smoother(record: Record) -> None:
    transcript, settings = record(make_updates(3)), QUICK | {"iterations": 20, "align": False}
    plain, smooth = (run(transcript, tv_weight=weight, **settings) for weight in (0.0, 1.0))
    assert roughness(smooth.data) < 0.9 * roughness(plain.data)


def test_with_lbfgs_total_variation_is_a_term_of_the_objective(record: Record) -> None:
    transcript, settings = record(make_updates(3)), {"iterations": 1, "local_iterations": 1, "align": False}
    plain, smooth = (run(transcript, tv_weight=weight, **settings) for weight in (0.0, 0.5))
    start = torch.randn((3, *SHAPE), generator=generator(0))
    added = smooth.trace["objective"][0] - plain.trace["objective"][0]
    assert float(added) == pytest.approx(0.5 * roughness(start) / 2, rel=1e-4)


def test_total_variation_of_what_is_no_image_is_refused(record: Record) -> None:
    flat = dataclasses.replace(KNOWN, input_shape=(64,), labels=LABELS)
    with pytest.raises(AttackError, match="tv_weight is a prior on images and series, and the inputs are neither"):
        run(record(make_updates(2)), flat, align=False, tv_weight=0.1)


def spoilt(updates: list[Update], places: Sequence[int]) -> list[Update]:
    """The gradients at these places are noise, as long as they were."""
    result = list(updates)
    for place in places:
        given = updates[place].gradient or {}
        noise = {k: torch.randn(v.shape, generator=generator(k, place)) for k, v in given.items()}
        noise = {k: v * given[k].norm() / v.norm() for k, v in noise.items()}
        result[place] = dataclasses.replace(updates[place], payload=Payload.from_dense(noise, "gradient"))
    return result


@pytest.mark.thorough
def test_the_median_survives_a_minority_of_invalid_gradients_and_no_majority(record: Record) -> None:
    """Theorem 1's cliff, m < T / 2."""
    knowledge = dataclasses.replace(KNOWN, labels=LABELS)
    settings = QUICK | {"iterations": 80, "align": False}
    found = {
        m: quality(run(record(spoilt(make_updates(5), range(5 - m, 5))), knowledge, **settings), truth())
        for m in (0, 2, 3)
    }
    assert found[0] > 20
    assert found[2] > found[3] + 4


@pytest.mark.thorough
@pytest.mark.parametrize("robust", ["median", "trimmed-mean", "krum"])
def test_robust_aggregation_beats_the_mean_with_two_invalid_gradients_of_ten(record: Record, robust: str) -> None:
    knowledge = dataclasses.replace(KNOWN, labels=LABELS)
    transcript = record(spoilt(make_updates(10), (8, 9)))
    settings: dict[str, Any] = {"iterations": 15, "local_iterations": 8, "align": False}
    plain = run(transcript, knowledge, aggregation="mean", **settings)
    assert quality(run(transcript, knowledge, aggregation=robust, **settings), truth()) > quality(plain, truth()) + 1


def test_an_estimate_that_diverges_is_left_out_and_all_that_do_end_the_attack(record: Record) -> None:
    attack = TemporalInversion(aggregation="mean")
    estimates = torch.stack([torch.ones(2), torch.tensor([torch.nan, 1.0]), 3 * torch.ones(2)])
    scenes: Any = [type("S", (), {"where": f"round {n}, client 5"}) for n in (1, 2, 3)]
    assert attack._aggregate(estimates, scenes, 1).tolist() == [2, 2]
    with pytest.raises(AttackError, match="client 5, rounds 1, 2, 3: all estimates diverged at iteration 7; lower"):
        attack._aggregate(estimates * torch.nan, scenes, 7)


# Which gradients.


def of_another_batch(update: Update, labels: Tensor, count: int = 3) -> Update:
    model = build()
    model.load_state_dict(dict(update.before))
    inputs = torch.rand((count, *SHAPE), generator=generator("other"))
    return dataclasses.replace(
        update, payload=Payload.from_dense(compute_gradient(model, inputs, labels), "gradient"), num_examples=count
    )


def test_gradients_of_other_mini_batches_are_not_used(record: Record) -> None:
    updates = make_updates(4)
    updates[2] = of_another_batch(updates[2], torch.tensor([0, 7, 8]))
    settings = QUICK | {"gradients": 3, "iterations": 5, "labels": "bias"}
    mixed, alone = run(record(updates), **settings), run(record([updates[0], updates[1], updates[3]]), **settings)
    assert mixed.labels.tolist() == LABELS.tolist()
    assert torch.equal(mixed.data, alone.data)


def test_too_few_gradients_of_the_mini_batch_are_named(record: Record) -> None:
    updates = make_updates(3)
    updates[1] = of_another_batch(updates[1], torch.tensor([0, 7, 8]))
    told = r"client 5: .* there are 2 gradients \(rounds 1, 3\) among 3 that were sent, expected 10; attack more rounds"
    with pytest.raises(AttackError, match=told):
        run(record(updates), gradients=10)
    assert run(record(updates), gradients=10, fewest=2, iterations=1).data.shape == (3, *SHAPE)


def test_a_client_who_was_sampled_once_is_refused_unless_one_gradient_is_asked_for(record: Record) -> None:
    transcript = record(make_updates(1))
    with pytest.raises(AttackError, match=r"there is 1 gradient \(round 1\) among 1 that were sent, expected 10"):
        run(transcript, gradients=10)
    assert run(transcript, gradients=1, iterations=1).data.shape == (3, *SHAPE)


def test_mini_batches_of_several_sizes_without_alignment_are_refused(record: Record) -> None:
    updates = make_updates(2)
    updates[1] = of_another_batch(updates[1], torch.tensor([0, 7]), count=2)
    with pytest.raises(AttackError, match=r"client 5: N differs between rounds \(2, 3\).*; set align = true"):
        run(record(updates), align=False)


def test_gradients_of_other_labels_without_alignment_are_named(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    updates = make_updates(3)
    updates[1] = of_another_batch(updates[1], torch.tensor([0, 7, 8]))
    granted = dataclasses.replace(KNOWN, labels=LABELS)
    run(record(updates), granted, align=False, iterations=1)
    assert "client 5, round 2: the gradient seems to be of examples with other labels" in caplog.text
    caplog.clear()
    run(record(make_updates(3)), granted, align=False, iterations=1)
    assert not caplog.text


def test_weights_instead_of_gradients_are_refused(record: Record) -> None:
    updates = make_updates(2)
    updates[1] = dataclasses.replace(updates[1], payload=Payload.from_dense(updates[0].before, "weights"))
    with pytest.raises(
        AttackError, match="round 2, client 5: weights were sent, expected a gradient; attack rounds of"
    ):
        run(record(updates))


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (torch.nan, "the gradient of 1.weight holds NaN or infinite values"),
        pytest.param(0.0, "the gradient is zero", marks=pytest.mark.thorough),
    ],
)
def test_a_gradient_that_is_of_no_use_is_left_out_unless_it_is_the_first(
    record: Record, caplog: pytest.LogCaptureFixture, factor: float, told: str
) -> None:
    updates = make_updates(3)

    def broken(update: Update) -> Update:
        return dataclasses.replace(
            update, payload=Payload.from_dense({k: v * factor for k, v in (update.gradient or {}).items()}, "gradient")
        )

    settings = QUICK | {"gradients": 2, "iterations": 5}
    with_it = run(record([updates[0], broken(updates[1]), updates[2]]), **settings)
    assert f"round 2, client 5: {told}; the round is left out" in caplog.text
    assert torch.equal(with_it.data, run(record([updates[0], updates[2]]), **settings).data)
    with pytest.raises(AttackError, match=f"round 1, client 5: {told}, and its mini-batch is the attacked one"):
        run(record([broken(updates[0]), *updates[1:]]), **settings)


def test_the_first_mini_batch_may_be_rarer_than_another_which_is_named(record: Record) -> None:
    updates = make_updates(4)
    updates[0] = of_another_batch(updates[0], torch.tensor([0, 7, 8]))
    told = r"there is 1 gradient \(round 1\) .*; there are 3 of another one, set adversary.rounds to \[2, 3, 4\]"
    with pytest.raises(AttackError, match=told):
        run(record(updates), gradients=3)


def test_one_network_is_built_for_all_rounds(record: Record) -> None:
    built = []

    def build_and_keep() -> nn.Module:
        built.append(build())
        return built[-1]

    run(record(make_updates(4)), dataclasses.replace(KNOWN, model=build_and_keep), **QUICK, iterations=1)
    assert len(built) == 1


# BatchNorm.


def normalising(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = (nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, 10))
    return nn.Sequential(*layers)


def sent_in_training(rounds: int = 4, *, shared: bool = True, by_batch: bool = True) -> list[Update]:
    """As `make_updates`, by a client whose BatchNorm layers normalise by the batch; it returns their statistics."""
    model, updates = normalising().train(by_batch), []
    statistics = {name for name, t in model.state_dict().items() if shared and t.is_floating_point()}
    names = statistics | {name for name, _ in model.named_parameters()}
    kept = [name for name, _ in model.named_buffers() if name in names]
    for number in range(1, rounds + 1):
        before = {name: t.clone() for name, t in model.state_dict().items() if name in names}
        gradient = compute_gradient(model, truth(), LABELS)
        after = {name: model.state_dict()[name].clone() for name in kept}
        updates.append(
            Update(
                round=number,
                client=5,
                before=before,
                payload=Payload.from_dense(gradient, "gradient") | Payload.from_dense(after, "weights"),
                num_examples=len(LABELS),
            )
        )
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * gradient[name]
    return updates


@pytest.mark.parametrize(
    ("shared", "by_batch"),
    [
        pytest.param(True, True, marks=pytest.mark.thorough),
        (False, True),
        pytest.param(True, False, marks=pytest.mark.thorough),
    ],
)
def test_batch_norm_normalises_as_it_did_for_the_client(record: Record, shared: bool, by_batch: bool) -> None:
    knowledge = dataclasses.replace(KNOWN, model=normalising, labels=LABELS)
    transcript = record(sent_in_training(2, shared=shared, by_batch=by_batch))
    settings = QUICK | {"iterations": 60, "align": False, "aggregation": "mean"}
    own = quality(run(transcript, knowledge, **settings), truth())
    assert own > 20
    if shared:
        other = run(transcript, knowledge, batch_statistics=not by_batch, **settings)
        assert own > quality(other, truth()) + 3
    else:
        with pytest.raises(
            AttackError, match=r"the model normalises with 1.running_mean, which clients .* do not share"
        ):
            run(transcript, knowledge, batch_statistics=False, **settings)


@pytest.mark.thorough
def test_the_prior_on_batch_norm_vanishes_at_the_truth(record: Record) -> None:
    """The statistics of the mini-batch follow from those sent and returned."""
    knowledge = dataclasses.replace(KNOWN, model=normalising, labels=LABELS)
    transcript = record(sent_in_training(2))
    settings = QUICK | {"iterations": 60, "align": False, "aggregation": "mean"}
    plain, prior = (run(transcript, knowledge, bn_weight=weight, **settings) for weight in (0.0, 0.01))
    assert quality(prior, truth()) > quality(plain, truth()) - 1
    assert prior.trace["objective"][-1] < 0.01 * prior.trace["objective"][0]


def test_a_client_who_never_took_part_is_named(record: Record) -> None:
    attack = TemporalInversion()
    with pytest.raises(AttackError, match="client 9: took part in none of the 2 rounds to be attacked; choose another"):
        attack.run(Target(transcript=record(make_updates(2)), victim=9, knowledge=KNOWN, rng=generator(0)))


def test_labels_that_do_not_fit_the_mini_batch_are_refused(record: Record) -> None:
    with pytest.raises(AttackError, match="round 1, client 5: 2 labels are granted, but the client reported N = 3"):
        run(record(make_updates(2)), dataclasses.replace(KNOWN, labels=torch.tensor([1, 2])))


def test_counting_labels_by_a_bias_that_is_not_there_is_refused(record: Record) -> None:
    knowledge = dataclasses.replace(KNOWN, model=lambda: build(bias=False))
    with pytest.raises(KnowledgeError, match="the last linear layer has no bias to count labels by"):
        run(record(make_updates(2, bias=False)), knowledge)
    assert (
        run(record(make_updates(2, bias=False)), knowledge, iterations=1, labels="optimisation").labels.tolist()
        == LABELS.tolist()
    )


def test_a_prior_on_batch_norm_wants_statistics(record: Record) -> None:
    with pytest.raises(AttackError, match="bn_weight is a prior on BatchNorm layers, and the model has none; set"):
        run(record(make_updates(2)), bn_weight=0.1)


def test_other_buffers_that_came_back_are_no_statistics() -> None:
    problem: Any = SimpleNamespace(
        model=nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2)), returned_buffers={"table": torch.ones(1)}, where="c"
    )
    with pytest.raises(AttackError, match=r"c: bn_weight is .*, and the client returned no statistics of theirs"):
        TemporalInversion(bn_weight=0.1)._check_priors([problem], torch.zeros(1))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gradients": 0}, "gradients: expected at least 1, got 0"),
        ({"iterations": 0}, "iterations: expected at least 1, got 0"),
        ({"local_iterations": 0}, "local_iterations: expected at least 1, got 0"),
        ({"fewest": 11}, "fewest: expected at most gradients = 10, got 11"),
        ({"trim": 0.5}, "trim: expected a value below 0.5, got 0.5"),
        ({"invalid": -1}, "invalid: expected at least 0, got -1"),
        ({"aggregation": "medain"}, "aggregation: expected 'median', 'trimmed-mean', 'krum' or 'mean', got 'medain'"),
        ({"labels": "bais"}, "labels: expected 'optimisation', 'bias' or 'column', got 'bais'"),
        ({"aggregation": "krum", "fewest": 6}, "fewest: krum with invalid = 2 needs at least 7, got 6"),
        ({"aggregation": "krum", "invalid": 4}, "gradients: krum with invalid = 4 needs at least 11, got 10"),
        ({"similarity": 1.5}, "similarity: expected at most 1, got 1.5"),
        ({"step_size": 0.0}, "step_size: expected a value above 0, got 0.0"),
        ({"tv_weight": -1.0}, "tv_weight: expected at least 0, got -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^{told}$"):
        TemporalInversion(**settings)


def test_every_sentence_begins_small_and_ends_without_a_stop(record: Record) -> None:
    for settings in ({"gradients": 10}, {"bn_weight": 0.1}):
        with pytest.raises(FedsimError) as caught:
            run(record(make_updates(2)), **settings)
        text = str(caught.value)
        assert text[0].islower()
        assert not text.endswith(".")
        assert "\n" not in text
