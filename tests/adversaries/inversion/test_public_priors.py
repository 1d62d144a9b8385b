"""Priors from public digits in the recipe of any inversion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from adversaries.inversion.inverting_gradients import InvertingGradients
from adversaries.inversion.maximum_a_posteriori import MaximumAPosteriori
from adversaries.inversion.see_through_gradients import SeeThroughGradients
from adversaries.inversion.surrogate_model import SurrogateModelExtension
from adversaries.inversion.tableak import RelaxedScaling
from adversaries.inversion.unmixing import Unmixing
from adversaries.text.tag import Tag
from clients.defenses.update_noise import UpdateNoise
from fedsim.base.errors import AttackError, ConfigError, KnowledgeError
from fedsim.base.papers import Paper
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Knowledge, Records
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion import batched_restarts, compiled_objective, denoisers, matching, public_fits
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.public_priors import add_public_prior
from fedsim.inversion.recipe import Recipe
from tests.support.digit_clients import DIGITS, data, floor, knowledge, make_update, public, quality
from tests.support.recordings import record_updates, run_attack

NOISE = UpdateNoise(clip=1.0, noise_multiplier=0.01)
IG = InvertingGradients(iterations=60, step_size=0.1)
PRIORS = ("pca", "gmm", "denoiser")


@dataclass(frozen=True, kw_only=True)
class Composed(GradientInversion):
    """Recipe of a user's own."""

    paper: ClassVar[Paper] = InvertingGradients.paper

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(priors=[(0.01, TotalVariation())], step_size=0.1)


@pytest.fixture(autouse=True)
def short_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A denoiser of digits takes seconds; the cache and the fits are of this test."""
    monkeypatch.setattr(denoisers, "_EXAMPLES", 6_400)
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(public_fits, "_fits", {})


def with_prior(method: Any, prior: str, weight: float = 1e-3) -> Any:
    """Return the attack with a small prior."""
    components = {} if prior == "denoiser" else {"components": 20}
    return replace(method, prior=prior, prior_weight=weight, **components)


def attack(method: GradientInversion, facts: Knowledge | None = None, victim: int = 0) -> Reconstruction:
    facts = (facts or knowledge(victim, NOISE)).restrict_to(method.readable_facts())
    return method.invert(make_update(victim, NOISE), facts, generator("attack"), lambda *_: None)


@pytest.mark.parametrize("prior", ["pca", "gmm", pytest.param("denoiser", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "method",
    [
        Composed(iterations=60),
        pytest.param(IG, marks=pytest.mark.thorough),
        pytest.param(
            SurrogateModelExtension(iterations=60, step_size=0.1),
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            SeeThroughGradients(iterations=60, restarts=2, bn_weight=0.0),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=lambda method: type(method).__name__,
)
def test_under_noise_any_recipe_finds_more_with_a_prior(method: Any, prior: Any) -> None:
    """By half a dB at least."""
    weight = 1e-2 if isinstance(method, SeeThroughGradients) else 1e-3
    assert quality(attack(with_prior(method, prior, weight)), 0) > quality(attack(method), 0) + 0.5


@pytest.mark.parametrize("prior", ["pca", pytest.param("gmm", marks=pytest.mark.thorough), "denoiser"])
def test_a_prior_alone_is_worth_no_more_than_the_floor(prior: Any) -> None:
    """Neither noise alone nor another client's update gives anything of the victim."""
    only_noise = UpdateNoise(clip=1e-6, noise_multiplier=1e4)
    method, facts = with_prior(IG, prior), knowledge(0, only_noise)
    facts = facts.restrict_to(method.readable_facts())
    for update in (make_update(0, only_noise), make_update(5)):
        finding = method.invert(update, facts, generator("attack"), lambda *_: None)
        assert quality(finding, 0) < floor(0) + 0.3


def test_map_has_the_three_priors() -> None:
    for prior in PRIORS:
        finding = attack(with_prior(MaximumAPosteriori(iterations=5, draws=1), prior, 1.0))
        assert finding.spread is not None
        assert finding.data.isfinite().all()


def test_a_denoiser_makes_more_of_a_noisy_image_than_a_linear_filter() -> None:
    """It makes most of it where it is told the right class."""
    denoiser = public_fits.fit_denoiser(build_problem(make_update(0), knowledge(0)), (1, 8, 8))
    clean, labels = (torch.cat(parts) for parts in zip(*(data(victim) for victim in range(25)), strict=True))
    noise = denoiser.level * torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    errors = {}
    for name, told in {"right": labels, "wrong": (labels + 1) % 10, "none": torch.full_like(labels, 10)}.items():
        errors[name] = (denoiser(clean + noise, told) - clean).square().mean().item()
    filtered = denoiser.mean + (clean + noise - denoiser.mean) / (1 + denoisers._LEVEL**2)
    assert errors["right"] < errors["none"] < 0.8 * (filtered - clean).square().mean().item()
    assert errors["right"] < 0.8 * errors["wrong"]


def test_a_class_without_records_counts_as_unknown_to_a_denoiser() -> None:
    """Its embedding was never trained."""
    records = public()
    is_told = records.labels != 3
    without = Records(inputs=records.inputs[is_told], labels=records.labels[is_told])
    denoiser = public_fits.fit_denoiser(build_problem(make_update(0), knowledge(0, auxiliary=without)), (1, 8, 8))
    noisy = data(0)[0] + denoiser.level
    images = [denoiser(noisy, torch.full((len(noisy),), label)) for label in (3, 10, 4)]
    assert torch.equal(images[0], images[1])
    assert not torch.allclose(images[1], images[2])


def test_a_denoiser_is_trained_once_for_all_processes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file of the cache that is damaged is said to be, and made again; other records have another one."""
    problem = build_problem(make_update(0), knowledge(0))
    trained: list[str] = []
    train = denoisers._train
    monkeypatch.setattr(denoisers, "_train", lambda *given: (trained.append("again"), train(*given)))

    def fit(problem: InversionProblem = problem) -> dict[str, torch.Tensor]:
        public_fits._fits.clear()  # as in another process
        return public_fits.fit_denoiser(problem, (1, 8, 8)).state_dict()

    first, second = fit(), fit()
    assert len(trained) == 1
    assert all(torch.equal(first[name], second[name]) for name in first)
    (path,) = (denoisers.cache_folder() / "denoisers").glob("*.safetensors")
    path.write_bytes(b"damaged")
    third = fit()
    assert len(trained) == 2
    assert all(torch.equal(first[name], third[name]) for name in first)
    assert "is damaged" in caplog.text
    records = public()
    fewer = Records(inputs=records.inputs[:-1], labels=records.labels[:-1])
    fit(replace(problem, auxiliary=fewer))
    assert len(trained) == 3


def test_a_compiled_graph_is_of_one_set_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the prior weighs so little that another one gives nearly the same objective."""
    monkeypatch.setattr(torch, "compile", lambda graph, **how: graph)
    monkeypatch.setattr(compiled_objective, "_cache", [])
    method = replace(with_prior(IG, "gmm", 1e-8), iterations=5)
    records = public()
    few = Records(inputs=records.inputs[-400:], labels=records.labels[-400:])
    attack(replace(method, compile=True))
    other = knowledge(0, NOISE, auxiliary=few)
    assert torch.equal(attack(method, other).data, attack(replace(method, compile=True), other).data)


def test_what_a_setting_needs_is_declared_by_it(tmp_path: Any) -> None:
    """Without a prior no public record is read; with one, the attack is refused without them."""
    assert "auxiliary" not in IG.facts_to_grant()
    method = replace(IG, prior="pca")
    assert "auxiliary" in method.facts_to_grant()
    facts = replace(knowledge(0), auxiliary=None)
    transcript = record_updates(tmp_path, [make_update(0)])
    run_attack(IG, transcript, facts)
    with pytest.raises(KnowledgeError, match="InvertingGradients needs auxiliary, which the threat model withholds"):
        run_attack(method, transcript, facts)


@pytest.mark.parametrize("prior", PRIORS)
def test_records_of_another_shape_are_refused(prior: Any) -> None:
    others = Records(inputs=torch.rand(20, 1, 6, 6), labels=torch.arange(20) % 10)
    with pytest.raises(AttackError, match=r"auxiliary records are of shape \(1, 6, 6\), and the victim's of"):
        attack(replace(IG, prior=prior), knowledge(0, auxiliary=others))


@pytest.mark.parametrize("prior", ["pca", "denoiser"])
def test_records_that_do_not_differ_are_refused(prior: Any) -> None:
    """Their prior would be certain of what it claims, and expect no error."""
    same = Records(inputs=public().inputs[:1].repeat(20, 1, 1, 1), labels=torch.arange(20) % 10)
    with pytest.raises(AttackError, match=r"no two auxiliary records of a class differ, so that .*; grant more"):
        attack(replace(IG, prior=prior), knowledge(0, auxiliary=same))


def test_a_mixture_is_not_fitted_to_one_patch_over_and_over() -> None:
    same = Records(inputs=torch.full((300, 1, 8, 8), 0.5), labels=torch.arange(300) % 10)
    with pytest.raises(AttackError, match=r"20 different patches at least, and the auxiliary records have 1; grant"):
        attack(replace(IG, prior="gmm", components=10), knowledge(0, auxiliary=same))


def test_texts_have_no_prior_of_numbers() -> None:
    with pytest.raises(ConfigError, match="'pca' is a prior of numbers, and this attack finds texts"):
        Tag(prior="pca")


def test_mixtures_have_no_prior_of_records() -> None:
    with pytest.raises(ConfigError, match="'denoiser' is a prior of records, and this attack reconstructs mixtures"):
        Unmixing(prior="denoiser")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (InvertingGradients, {"prior_weight": 1.0}),
        (Tag, {"components": 5}),
        (InvertingGradients, {"prior": "denoiser", "components": 5}),
        (MaximumAPosteriori, {"prior": "denoiser", "components": 5}),
    ],
)
def test_a_setting_that_the_prior_does_not_read_is_refused(method: Any, settings: dict[str, Any]) -> None:
    name = list(settings)[-1]
    with pytest.raises(ConfigError, match=f"^{name}: does nothing where prior = '{settings.get('prior', 'none')}'"):
        method(**settings)


def test_the_auxiliary_records_of_these_tests_are_nobodys() -> None:
    """The priors are fitted to digits that no client of these tests holds."""
    held = DIGITS.train.inputs(slice(0, 60)).flatten(1)
    distances = torch.cdist(held, public().inputs.flatten(1))
    assert distances.min() > 0


def test_rows_of_categories_have_no_prior_of_numbers() -> None:
    """The dummy data of TabLeak are logits, which components of rows would be taken for."""
    problem = build_problem(make_update(0), knowledge(0))
    scaling = problem.scaling
    relaxed = RelaxedScaling(
        centre=scaling.centre, scale=scaling.scale, low=scaling.low, high=scaling.high, columns=(64,)
    )
    with pytest.raises(AttackError, match="by words or by logits of categories, which a prior of numbers"):
        add_public_prior(Recipe(), replace(problem, scaling=relaxed), "pca", 1.0, 5, (1, 8, 8))


@pytest.mark.thorough
@pytest.mark.parametrize("prior", PRIORS)
def test_restarts_at_once_have_the_prior_too(prior: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method = replace(with_prior(IG, prior), restarts=3, iterations=4)
    one_by_one = attack(method)
    monkeypatch.setattr(matching, "batching_is_faster", lambda device: True)
    monkeypatch.setattr(batched_restarts, "warn", pytest.fail)
    at_once = attack(method)
    assert torch.allclose(one_by_one.data, at_once.data, atol=1e-3)
