"""GIML: gradient inversion through a generator that is learnt from the recorded updates themselves [Jeon2021]."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Gt, Le
from torch import Tensor

from adversaries.inversion.transcript_generator import (
    GeneratedImages,
    ImageGenerator,
    MetaSettings,
    TunedGenerators,
    draw_generator,
    learn_generator,
)
from fedsim.base.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from fedsim.base.content_hashes import hash_json
from fedsim.base.errors import AttackError, KnowledgeError
from fedsim.base.files import cache_folder
from fedsim.base.papers import cite
from fedsim.base.randomness import generator
from fedsim.interfaces.attack import ALL, CLIENT, Attack, Knowledge, Paper, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import Finding
from fedsim.inversion.cached_networks import load_or_train
from fedsim.inversion.descent import offset_progress
from fedsim.inversion.labels.problem_labels import find_labels
from fedsim.inversion.labels.updates import check_label_source
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.priors import TotalVariation
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.public_fits import remember_fit
from fedsim.inversion.recipe import INPUT_MOMENTS, MEAN_GRADIENT_FACTS, Recipe, step_decay_schedule
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.recording.wire_format import Update

_VERSION = 1
"""Raise it when the same recording makes another generator."""


@dataclass(frozen=True, kw_only=True)
class TranscriptPrior(Attack):
    """Learn a generator of images from all recorded updates, without public data, and invert through it.

    1. Invert the recorded updates one after another through one generator, which each of them moves a bit, so that the
       next needs fewer steps (`learn_generator`). It begins random, and is shared by all victims of a recording.
    2. Look for latent vectors whose images match the victim's update, in its first attacked round (`_search`).
    3. Keep these, and tune a copy of the generator for each example (`_search`).

    Images are compared by the cosine distance of the gradient at w_t, plus total variation. All updates of single
    clients in the attacked rounds are used, the victim's too, so what is learnt is worth as much as they are many: one
    more client is needed at least. The labels of others are counted, as the server is not told them. Updates that
    cannot be inverted, such as zero ones, are left out with a warning.

    Args:
        tasks: updates that are inverted to learn the generator; 0 leaves it as it was drawn.   [released code: 200]
        task_latent_steps: steps for the latent vectors of such an update.                      [released code: 1000]
        task_tuning_steps: steps for the generator after them.                                  [released code: 500]
        meta_step_size: share of the way to the tuned generator, falls to 0 linearly.           [ours]
        latent_iterations: steps of the latent search on the victim.                            [released code: 1000]
        tuning_iterations: steps of the tuning on the victim.                                   [released code: 5000]
        step_size: Adam's for latent vectors.                                                   [released code: 0.1]
        tuning_step_size: Adam's for a generator.                                               [released code: 0.001]
        latent_weight: of half the squared norm of a latent vector.                             [released code: 0.001]
        tv_weight: of the total variation.                                                      [released code: 1e-4]

    References:
        [Jeon2021], GIML to learn and GIAS to attack, as in the released code. Differs: a generator of 70 thousand
        weights without normalisation, far fewer steps, and Reptile's step in place of Adam's in its direction. There
        each update is of fresh weights or moves along a training; here of the rounds that were recorded. The released
        code penalises the norm of latent vectors, not its square, and only while it learns; it adds the total variation
        of both directions, whose mean is taken here. On the same generator the two take the same steps (study
        `giml_parity`).
    """

    tasks: NonNegativeInt = 200
    task_latent_steps: PositiveInt = 20
    task_tuning_steps: PositiveInt = 10
    meta_step_size: Annotated[float, Gt(0), Le(1)] = 0.5
    latent_iterations: PositiveInt = 100
    tuning_iterations: PositiveInt = 200
    step_size: PositiveFloat = 0.1
    tuning_step_size: PositiveFloat = 0.003
    latent_weight: NonNegativeFloat = 0.001
    tv_weight: NonNegativeFloat = 1e-4

    paper: ClassVar[Paper] = cite("Jeon2021")
    needs: ClassVar[frozenset[str]] = GradientInversion.needs
    uses: ClassVar[frozenset[str]] = INPUT_MOMENTS | MEAN_GRADIENT_FACTS | OPTIMIZER_FACTS | {"labels", "num_classes"}
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    clients_needed: ClassVar[int] = 2
    needs_client_ids: ClassVar[bool] = False

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse examples that are no images."""
        if len(shape := knowledge.input_shape or ()) != 3:
            raise AttackError(f"it generates images, and examples are of shape {shape}; choose 'inverting-gradients'")

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse a network of which a part stays with the clients, and labels that its last layer does not tell."""
        problem = build_problem(update, knowledge)
        try:
            check_label_source(update, knowledge, problem.model)
        except KnowledgeError as error:  # its remedy, to grant them, does not help
            reason = str(error).partition(";")[0]
            raise AttackError(
                f"{reason}, and those of other clients are not granted; choose 'inverting-gradients'"
            ) from error

    def _run(self, target: Target, progress: Progress) -> Finding:
        self.check_facts(target.knowledge)
        shape = tuple(target.knowledge.input_shape or ())
        update = target.read_update(target.participation_rounds()[0])
        total = self.tasks + self.latent_iterations + self.tuning_iterations
        network = self._find_generator(target, shape, offset_progress(progress, 0, total))
        # Search latent vectors, then tune the generators.
        latent_matcher = _ImageMatcher(
            parametrisation=GeneratedImages(network=network, weight=self.latent_weight),
            iterations=self.latent_iterations,
            step_size=self.step_size,
            tv_weight=self.tv_weight,
        ).with_title(self.title)
        latents = latent_matcher.find_latents(update, target, offset_progress(progress, self.tasks, total))
        tuned = TunedGenerators(network=network, latents=latents)
        tuning_matcher = replace(
            latent_matcher,
            parametrisation=tuned,
            iterations=self.tuning_iterations,
            step_size=self.tuning_step_size,
        ).with_title(self.title)
        tuning_progress = offset_progress(progress, self.tasks + self.latent_iterations, total)
        return tuning_matcher.invert(update, target.knowledge, target.rng, tuning_progress)

    def _find_generator(self, target: Target, shape: tuple[int, ...], progress: Progress) -> ImageGenerator:
        """Return the generator of this recording: of this process, from the cache, or else learnt and kept there."""
        transcript, knowledge = target.transcript, target.knowledge
        # Hash all that the generator follows from, but for the code of the model and of the loss.
        names = set(knowledge.granted_facts()) & self.declared_facts() - {"labels", "model", "loss"}
        described = {name: repr(getattr(knowledge, name)) for name in names}
        settings = MetaSettings(
            tasks=self.tasks,
            latent_steps=self.task_latent_steps,
            tuning_steps=self.task_tuning_steps,
            step_size=self.step_size,
            tuning_step_size=self.tuning_step_size,
            meta_step_size=self.meta_step_size,
            latent_weight=self.latent_weight,
            tv_weight=self.tv_weight,
        )
        assert knowledge.model is not None
        model = repr(knowledge.model())
        rounds = transcript.hash_headers(transcript.rounds)
        # What is drawn is the same on all devices, and what is kept is of one kind of device.
        random_key = hash_json([_VERSION, torch.__version__, rounds, described, asdict(settings), model])
        key = hash_json([random_key, knowledge.device.type])

        def find() -> ImageGenerator:
            network = draw_generator(shape, random_key)
            path = cache_folder() / "transcript-generators" / f"{key}.safetensors"

            def learn() -> bool:
                tasks = _list_tasks(target)
                return learn_generator(network.to(knowledge.device), tasks, settings, random_key, progress)

            if self.tasks:
                load_or_train(network, path, learn)
            return network.to(knowledge.device)

        return remember_fit(("transcript generator", key, knowledge.loss, knowledge.device), find)


def _list_tasks(target: Target) -> list[Callable[[], InversionProblem]]:
    """Return what reads each update of a single client, and makes an inversion problem with counted labels of it."""
    transcript, knowledge = target.transcript, replace(target.knowledge, labels=None)

    def read(number: int, client: int) -> InversionProblem:
        update = transcript.update(number, client)
        problem = build_problem(update, knowledge)
        rng = generator("transcript labels", number, client)
        return replace(problem, labels=find_labels(problem, update, knowledge, rng).to(knowledge.device))

    tasks, clients = list[Callable[[], InversionProblem]](), set[int]()
    for number in transcript.rounds:
        for client in transcript.clients(number):
            reply = transcript.header(number).find_reply(client)
            if reply is not None and not reply.members:
                tasks.append(partial(read, number, client))
                clients.add(client)
    if not clients - {target.victim}:
        raise AttackError(
            f"client {target.victim}: the generator is learnt from updates of several clients, and the attacked rounds "
            "have no other client's; attack rounds in which others take part (adversary.rounds), where there are any, "
            "or choose 'inverting-gradients'"
        )
    return tasks


@dataclass(frozen=True, kw_only=True)
class _ImageMatcher(GradientInversion):
    """Inversion of one update through a generator.

    Args:
        parametrisation: what is optimised in place of the images.
        step_size: Adam's, for it.
        tv_weight: of the total variation of the images.
    """

    parametrisation: Any
    step_size: float
    tv_weight: float

    paper: ClassVar[Paper] = cite("Jeon2021")

    def find_latents(self, update: Update, target: Target, progress: Progress) -> Tensor:
        """Return what is optimised at the end of the restart that matches best."""
        _, trial = self._best_restart(update, target.knowledge, target.rng, progress)
        return trial.point().detach().clone()

    def _warn_of_mismatch(
        self, recipe: Recipe, problem: InversionProblem, update: Update, knowledge: Knowledge
    ) -> None:
        if not isinstance(self.parametrisation, TunedGenerators):  # the search for latent vectors has warned
            super()._warn_of_mismatch(recipe, problem, update, knowledge)

    def _recipe(self, problem: InversionProblem) -> Recipe:
        return Recipe(
            parametrisation=self.parametrisation,
            priors=[(self.tv_weight, TotalVariation())],
            step_size=self.step_size,
            schedule=step_decay_schedule,
        )
