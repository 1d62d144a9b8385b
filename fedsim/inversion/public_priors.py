"""Priors from public records that the recipe of any inversion can be given, by the setting `prior`."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedsim.base.errors import AttackError
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.parametrisations import DenoisedImages, Parametrisation, PublicComponents
from fedsim.inversion.priors import PatchMixture
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.public_fits import fit_components, fit_denoiser, fit_patches
from fedsim.inversion.recipe import Recipe

PriorName = Literal["none", "pca", "gmm", "denoiser"]
"""Principal components, a mixture of Gaussians of patches, or a denoiser."""
_START_SPREAD = 0.3
"""Standard deviation at the start of what is optimised in place of dummy data, in those of public examples."""


def add_public_prior(
    recipe: Recipe, problem: InversionProblem, prior: PriorName, weight: float, components: int, shape: tuple[int, ...]
) -> Recipe:
    """Return the recipe with a prior that is fitted to the auxiliary records of the problem.

    Each is the negative logarithm of a density of what is optimised, or has its gradient. So with a distance that is a
    log-likelihood a weight of 1 is Bayes' rule. For the denoiser that is about noisy images, and what it makes of the
    most probable ones is not exactly the most probable image.

    Args:
        recipe: whose other priors stay.
        problem: has the auxiliary records.
        prior: `pca` optimises coefficients of principal components in place of the dummy data, `denoiser` noisy
            images, and `gmm` is a term of the objective.
        weight: of the prior in the objective.
        components: principal components, or Gaussians of the mixture.
    """
    if prior == "none":
        return recipe
    if recipe.discrete_step is not None or type(problem.scaling) is not InputScaling:
        raise AttackError(
            f"{problem.where}: this attack finds its examples by words or by logits of categories, which a prior of "
            "numbers knows nothing of; set prior = 'none'"
        )
    if prior == "gmm":
        mixture = PatchMixture(components=components)
        fit_patches(problem, mixture.size, components, shape)
        return replace(recipe, priors=[*recipe.priors, (weight, mixture)])
    if recipe.parametrisation is not None:
        raise AttackError(
            f"{problem.where}: this attack has a parametrisation of its own, in whose place that of '{prior}' would "
            "be; set prior = 'gmm' or 'none'"
        )
    parametrisation: Parametrisation
    if prior == "denoiser":
        fit_denoiser(problem, shape)
        parametrisation = DenoisedImages(weight=weight, spread=_START_SPREAD)
    else:
        fit_components(problem, components, shape)
        parametrisation = PublicComponents(components=components, weight=weight, spread=_START_SPREAD)
    return replace(recipe, parametrisation=parametrisation)
