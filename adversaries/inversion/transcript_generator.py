"""Generators of images that are learnt from a recording alone, by inverting its updates one by one [Jeon2021]."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedsim.base.errors import FedsimError, TranscriptError
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.attack import warn
from fedsim.inversion.distances import Cosine
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.update_models import GradientAtBroadcast
from fedsim.training.optimizers import Adam

_LATENTS = 32
"""Numbers that an image is generated from."""
_WIDTHS = (32, 16)
"""Channels at a quarter and at half of the resolution."""


class ImageGenerator(nn.Module):
    """Deconvolution network from latent vectors to images, as that of DCGAN without its normalisation.

    Attributes:
        shape: `channel height width` of an image.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        channels, height, width = shape
        self._quarter = (math.ceil(height / 4), math.ceil(width / 4))
        first, second = _WIDTHS
        self.begin = nn.Linear(_LATENTS, first * math.prod(self._quarter))
        self.to_half = nn.ConvTranspose2d(first, second, 4, stride=2, padding=1)
        self.to_full = nn.ConvTranspose2d(second, second, 4, stride=2, padding=1)
        self.end = nn.Conv2d(second, channels, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        """Return images in [0, 1], `example channel height width`, of `example latent`."""
        features = self.begin(latents).relu().reshape(len(latents), _WIDTHS[0], *self._quarter)
        features = self.to_full(self.to_half(features).relu()).relu()
        images: Tensor = self.end(features).sigmoid()
        return images[..., : self.shape[1], : self.shape[2]]


Weights = Mapping[str, Tensor]
"""Parameters of a generator by their names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratedImages:
    """Parametrisation of dummy images by latent vectors of a generator, whose weights stay as they are.

    Attributes:
        weight: of half the squared norm of the latent vectors, which is a Gaussian prior's negative logarithm.
    """

    network: ImageGenerator
    weight: float

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Draw the latent vectors, `example latent`, from a standard normal distribution."""
        return torch.randn((shape[0], _LATENTS), generator=rng).to(problem.before[0])

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return the generated images, in the units of the dummy data."""
        return problem.scaling.from_unit_range(self.network(coefficients))

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return half the mean squared norm of the latent vectors, times the weight."""
        del problem
        return self.weight / 2 * coefficients.square().sum(1).mean()


@dataclass(frozen=True, kw_only=True, eq=False)
class TunedGenerators:
    """Parametrisation of dummy images by the weights of a generator for each, from latent vectors that stay.

    Attributes:
        network: the generator that all begin as.
        latents: `example latent`.
    """

    network: ImageGenerator
    latents: Tensor

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Return the distance 0 from the generator, `example weight`."""
        del problem, shape, rng
        total = sum(parameter.numel() for parameter in self.network.parameters())
        return self.latents.new_zeros((len(self.latents), total))

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return what each example's generator makes of its latent vector, in the units of the dummy data."""
        shapes = {name: parameter.shape for name, parameter in self.network.named_parameters()}
        sizes = [shape.numel() for shape in shapes.values()]
        weights = dict(self.network.named_parameters())

        def generate(offsets: Tensor, latents: Tensor) -> Tensor:
            tuned = {}
            for (name, shape), part in zip(shapes.items(), torch.split(offsets, sizes), strict=True):
                tuned[name] = weights[name] + part.reshape(shape)
            images: Tensor = functional_call(self.network, tuned, latents[None])
            return images[0]

        return problem.scaling.from_unit_range(vmap(generate)(coefficients, self.latents))

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return 0: that few steps are made keeps the generators near their start."""
        del problem
        return coefficients.new_zeros(())


@dataclass(frozen=True, kw_only=True)
class MetaSettings:
    """How a generator is learnt from updates.

    Attributes:
        tasks: updates that are inverted, one after another; 0 leaves the generator as it was drawn.
        latent_steps: steps of Adam for the latent vectors of an update.
        tuning_steps: steps of Adam for the generator after them.
        step_size: of the latent vectors.
        tuning_step_size: of the generator.
        meta_step_size: share of the way to the tuned generator that is gone after each update; falls to 0 linearly.
        latent_weight: see `GeneratedImages`.
        tv_weight: of the total variation.
    """

    tasks: int
    latent_steps: int
    tuning_steps: int
    step_size: float
    tuning_step_size: float
    meta_step_size: float
    latent_weight: float
    tv_weight: float


def draw_generator(shape: tuple[int, ...], key: str) -> ImageGenerator:
    """Return a generator as it is before it learns, for images of this shape."""
    with seed_globals("transcript generator", key):
        network = ImageGenerator(shape)
    return network.requires_grad_(False)


@torch.enable_grad()
def learn_generator(
    network: ImageGenerator,
    tasks: Sequence[Callable[[], InversionProblem]],
    settings: MetaSettings,
    random_key: str,
    progress: Callable[[int, int, Mapping[str, float]], None],
) -> bool:
    """Move a generator to where few steps make it generate what updates were computed on (Reptile).

    1. Draw an update, and latent vectors for its examples.
    2. Move the latent vectors by `latent_steps`, so that the generated images match the update.
    3. Move a copy of the generator by `tuning_steps`.
    4. Move the generator a share of the way to the copy.

    Args:
        network: is changed.
        tasks: make the inversion problems of the recorded updates, with labels.

    Returns:
        Whether all updates that were drawn could be read. Those that are damaged, or that cannot be inverted, are
        left out with a warning.

    Raises:
        FedsimError: no update can be inverted; what is wrong with the first that was drawn.
    """
    rng = generator("transcript generator", random_key)
    order = torch.cat(
        [torch.randperm(len(tasks), generator=rng) for _ in range(math.ceil(settings.tasks / len(tasks)))]
    )
    drawn, faults = order[: settings.tasks].tolist(), dict[int, FedsimError]()
    for done, index in enumerate(drawn):
        if index in faults:
            continue
        try:
            problem = tasks[index]()
        except FedsimError as error:
            faults[index] = error
            continue
        distance = _adapt(network, problem, settings, 1 - done / settings.tasks, rng)
        progress(done + 1, settings.tasks, {"objective": distance})
    if len(faults) == len(set(drawn)):
        raise next(iter(faults.values()))
    for fault in faults.values():
        warn(f"{fault}; the generator is learnt without this update")
    return not any(isinstance(fault, TranscriptError) for fault in faults.values())


def _adapt(
    network: ImageGenerator, problem: InversionProblem, settings: MetaSettings, factor: float, rng: torch.Generator
) -> float:
    """Fit latent vectors and a copy of the generator to one update, and move the generator; return the distance.

    An update by which the copy diverges does not move it.
    """
    images = GeneratedImages(network=network, weight=settings.latent_weight)
    latents = images.start(problem, (len(problem.labels),), rng).requires_grad_(True)
    target, variation = Cosine().target(problem), TotalVariation()

    def objective(weights: Weights) -> tuple[Tensor, Tensor]:
        generated = functional_call(network, dict(weights), latents)
        dummy = problem.scaling.from_unit_range(generated)
        distance = Cosine()(GradientAtBroadcast().gradient(problem, {}, dummy, problem.labels), target)
        prior = settings.tv_weight * variation(problem, dummy, dummy) + images.penalty(problem, latents)
        return distance + prior, distance

    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    optimizer = Adam([latents], settings.step_size)
    for _ in range(settings.latent_steps):
        (latents.grad,) = torch.autograd.grad(objective(weights)[0], [latents])
        optimizer.step()
    tuned = {name: weight.clone().requires_grad_(True) for name, weight in weights.items()}
    optimizer = Adam(tuned.values(), settings.tuning_step_size)
    for _ in range(settings.tuning_steps):
        total, distance = objective(tuned)
        for weight, gradient in zip(tuned.values(), torch.autograd.grad(total, list(tuned.values())), strict=True):
            weight.grad = gradient
        optimizer.step()
    if not torch.stack([weight.isfinite().all() for weight in tuned.values()]).all():
        warn(f"{problem.where}: the search for its images diverged; the generator is learnt without this update")
        return distance.item()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.lerp_(tuned[name], settings.meta_step_size * factor)
    return distance.item()
