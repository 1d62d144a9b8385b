"""Update noise: what Laplace noise and a clip that follows the norms do, and what is proved of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import kstest, laplace, norm
from torch import Tensor

from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator
from fedsim.interfaces.defense import Guarantee, Participation
from fedsim.interfaces.local_context import LocalContext

UPDATE = {"a": torch.tensor([[3.0, -4.0], [0.0, 12.0]]), "b": torch.tensor([5.0])}
L1, L2 = 24.0, math.sqrt(194.0)


def defended_update(defense: UpdateNoise, update: dict[str, Tensor] = UPDATE, seed: int = 0) -> dict[str, Tensor]:
    return dict(defense.on_update(dict(update), LocalContext(rng=generator(seed))))


def promised(defense: UpdateNoise, rounds: int = 1, delta: float = 1e-5) -> Guarantee:
    got = defense.guarantee(Participation(num_examples=10, batch_size=5, steps=2, rounds=rounds), delta)
    assert got is not None
    return got


def test_rounds_in_which_clients_trained_otherwise_count_like_all_others() -> None:
    kinds = [Participation(num_examples=10, batch_size=b, steps=2, rounds=b) for b in (1, 2, 4)]
    defense = UpdateNoise(noise_multiplier=20.0)
    assert defense.compose_guarantees(kinds, 1e-5) == promised(defense, rounds=7)


def test_laplace_noise_goes_with_the_l1_norm() -> None:
    clipped = defended_update(UpdateNoise(noise="laplace", clip=6.0))
    for name, tensor in UPDATE.items():
        torch.testing.assert_close(clipped[name], tensor * 6.0 / L1)
    torch.testing.assert_close(defended_update(UpdateNoise(clip=7.0))["b"], UPDATE["b"] * 7.0 / L2)


@pytest.mark.parametrize(("noise", "law"), [("laplace", laplace), ("gaussian", norm)])
def test_the_noise_is_of_the_promised_kind_and_scale(noise: Any, law: Any) -> None:
    zeros = {"a": torch.zeros(100, 100), "b": torch.zeros(10_000)}
    drawn = defended_update(UpdateNoise(noise=noise, clip=0.5, noise_multiplier=3.0), zeros)
    assert kstest(torch.cat([t.flatten() for t in drawn.values()]).numpy(), law(scale=1.5).cdf).pvalue > 0.01


def test_laplace_noise_promises_the_sum_of_the_rounds_without_a_delta() -> None:
    got = promised(UpdateNoise(noise="laplace", noise_multiplier=8.0), rounds=3)
    assert (got.epsilon, got.delta) == (pytest.approx(3 * 2 / 8), 0.0)


def test_many_rounds_of_laplace_noise_cost_less_with_a_delta() -> None:
    got = promised(UpdateNoise(noise="laplace", noise_multiplier=20.0), rounds=2000)
    assert got.delta == 1e-5
    assert got.epsilon < 2000 * 2 / 20


@pytest.mark.parametrize(("noise", "law"), [("laplace", laplace), ("gaussian", norm)])
@pytest.mark.parametrize(
    ("sigma", "rounds"), [(2.0, 1), (10.0, 30), pytest.param(20.0, 200, marks=pytest.mark.thorough)]
)
def test_no_more_is_promised_than_holds_of_two_updates_that_are_2c_apart(
    noise: Any, law: Any, sigma: float, rounds: int
) -> None:
    """The hockey-stick divergence of the rounds together, by sampling privacy losses of one coordinate moved by 2C."""
    delta, moved = 1e-2, 2 / sigma
    got = promised(UpdateNoise(noise=noise, noise_multiplier=sigma), rounds, delta)
    drawn = law.rvs(size=(10_000, rounds), random_state=1)
    losses = (law.logpdf(drawn) - law.logpdf(drawn - moved)).sum(1)
    divergence = (1 - torch.exp(got.epsilon - torch.from_numpy(losses))).clamp(min=0)
    assert divergence.mean().item() <= got.delta + 1e-9
    too_little = (1 - torch.exp(0.5 * got.epsilon - torch.from_numpy(losses))).clamp(min=0)
    assert too_little.mean().item() > delta, "half of the promise would hold, too; the bound is of no use"


def rounds_of(defense: UpdateNoise, norms: list[float]) -> list[float]:
    """C after each round of a client whose updates have these norms."""
    memory: dict[str, Tensor] = {}
    clips = []
    for number, length in enumerate(norms):
        defense.on_update({"a": torch.tensor([length])}, LocalContext(rng=generator(number), memory=memory))
        clips.append(memory["clip"].item())
    return clips


def test_the_clip_takes_the_step_of_the_paper() -> None:
    defense = UpdateNoise(clip=2.0, quantile=0.75, clip_rate=0.2)
    grown = 2.0 * math.exp(0.2 * 0.75)
    assert rounds_of(defense, [5.0, 1.0]) == pytest.approx([grown, grown * math.exp(-0.2 * 0.25)])


@pytest.mark.parametrize(
    "quantile", [pytest.param(0.2, marks=pytest.mark.thorough), 0.5, pytest.param(0.9, marks=pytest.mark.thorough)]
)
def test_the_clip_goes_to_the_quantile_of_a_clients_norms(quantile: float) -> None:
    norms = (10 * torch.rand(1500, generator=generator("norms"))).tolist()
    clips = rounds_of(UpdateNoise(quantile=quantile, clip_rate=0.05), norms)
    assert sum(clips[500:]) / 1000 == pytest.approx(10 * quantile, rel=0.1)


def test_the_next_round_is_clipped_to_the_clip_that_is_remembered() -> None:
    defense = UpdateNoise(clip=2.0, quantile=0.5)
    memory: dict[str, Tensor] = {"clip": torch.tensor(0.5, dtype=torch.float64)}
    got = defense.on_update(UPDATE, LocalContext(rng=generator(0), memory=memory))
    torch.testing.assert_close(got["b"], UPDATE["b"] * 0.5 / L2)


def test_the_clip_stays_where_noise_can_be_drawn() -> None:
    assert min(rounds_of(UpdateNoise(clip=1.0, quantile=0.5, clip_rate=1.0), [0.0] * 100)) == pytest.approx(1e-6)
    assert max(rounds_of(UpdateNoise(clip=1.0, quantile=0.5, clip_rate=1.0), [1e30] * 100)) == pytest.approx(1e6)


def test_a_clip_that_tells_of_private_norms_has_no_guarantee_and_hiding_them_costs() -> None:
    client = Participation(num_examples=10, batch_size=5, steps=2, rounds=5)
    assert UpdateNoise(noise_multiplier=4.0, quantile=0.5).guarantee(client, 1e-5) is None
    fixed, following = UpdateNoise(noise_multiplier=4.0), UpdateNoise(noise_multiplier=4.0, quantile=0.5, bit_noise=2.0)
    rho = 5 * (2 / 4.0**2 + 1 / (2 * 2.0**2))
    assert promised(following, 5).epsilon == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e5)))
    assert promised(following, 5).epsilon > promised(fixed, 5).epsilon
    pure = UpdateNoise(noise="laplace", noise_multiplier=8.0, quantile=0.5, bit_noise=10.0)
    assert promised(pure, 2).epsilon == pytest.approx(2 * (2 / 8 + 1 / 10))


def test_noise_on_the_bit_moves_the_clip() -> None:
    still, noisy = UpdateNoise(quantile=0.5), UpdateNoise(quantile=0.5, bit_noise=3.0)
    assert rounds_of(still, [5.0])[0] == pytest.approx(math.exp(0.1))
    steps = [math.log(rounds_of(noisy, [5.0] * k)[-1]) for k in (1, 2)]
    assert len({*steps, 0.1, 0.2}) == 4


def test_an_update_within_the_norm_is_sent_as_it_is() -> None:
    update = {"a": torch.tensor([-0.0, 0.25])}
    got = defended_update(UpdateNoise(clip=1.0), update)
    assert got["a"].numpy().tobytes() == update["a"].numpy().tobytes()


@pytest.mark.parametrize(("noise", "length"), [("gaussian", L2), ("laplace", L1)])
def test_an_adversary_who_knows_it_sees_the_mean_of_what_is_sent(noise: Any, length: float) -> None:
    defense = UpdateNoise(noise=noise, clip=3.0, noise_multiplier=0.1)
    seen = defense.adversary_view(UPDATE, UPDATE)
    mean = sum(defended_update(defense, seed=seed)["a"] for seed in range(500)) / 500
    torch.testing.assert_close(seen["a"], UPDATE["a"] * 3.0 / length)
    torch.testing.assert_close(seen["a"], mean, atol=0.1, rtol=0)


def test_the_view_of_a_gradient_of_zero_has_a_slope() -> None:
    gradient = {"a": torch.zeros(3, requires_grad=True)}
    UpdateNoise(clip=3.0).adversary_view(gradient, gradient)["a"].sum().backward()
    assert torch.equal(gradient["a"].grad, torch.ones(3))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"noise": "cauchy"}, "noise: expected 'gaussian' or 'laplace', got 'cauchy'"),
        ({"quantile": 1.0}, "quantile: expected a value below 1, got 1.0"),
        ({"quantile": -0.5}, "quantile: expected at least 0, got -0.5"),
        ({"quantile": math.nan}, "quantile: expected at least 0, got nan"),
        ({"quantile": 0.5, "clip_rate": 0.0}, "clip_rate: expected a value above 0, got 0.0"),
        ({"quantile": 0.5, "bit_noise": -1.0}, "bit_noise: expected at least 0"),
        ({"bit_noise": 1.0}, "bit_noise: expected 0 where the clip does not follow the norms, got 1.0; set quantile"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        UpdateNoise(**settings)
