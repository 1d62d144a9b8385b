"""Learned inversion: a network from messages to data, trained on simulated clients."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from torch import Tensor

from adversaries.inversion.message_inverter import InverterSettings, MessageInverter, check_record_count, train_inverter
from adversaries.simulated import SimulatedClients
from fedsim.base.constraints import NonNegativeInt, PositiveInt
from fedsim.base.content_hashes import hash_json
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import CLIENT, GROUP, Attack, Knowledge, Paper, Progress, Target, warn
from fedsim.interfaces.defense_checks import name_of_defense
from fedsim.interfaces.findings import Reconstruction
from fedsim.inversion.descent import iterate_descent, offset_progress, run_to_end
from fedsim.inversion.differentiability import check_differentiability
from fedsim.inversion.inversion_task import InversionTask
from fedsim.inversion.labels.problem_labels import find_labels
from fedsim.inversion.labels.updates import check_label_source
from fedsim.inversion.likelihoods import MessageLikelihood, with_known_noise
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.public_fits import (
    fit_components,
    hash_records,
    hash_tensors,
    remember_fit,
    warn_of_missing_classes,
)
from fedsim.inversion.recipe import INPUT_MOMENTS, MEAN_GRADIENT_FACTS, Recipe, cosine_schedule
from fedsim.inversion.restart import Restart, dummy_data
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.inversion.update_models import choose_training_model
from fedsim.recording.wire_format import Update

_STEP_SIZE = 0.1
"""Of the refinement, in expected errors."""
_MODEL_ERROR = 0.1
"""Error of the model of local training in the refinement, see `MessageLikelihood.model_error`."""


@dataclass(frozen=True, kw_only=True)
class LearnedInversion(Attack):
    """Estimate a client's examples by a network that is trained on simulated clients.

    1. Simulate clients that hold auxiliary records and train as the victim does, with the known
       defenses and fresh randomness (`train_inverter`).
    2. Compress their messages to principal components of messages without defenses
       (`MessageProjection`), and their examples to principal components of the auxiliary records.
    3. Train a network from the one to the other (`ExampleEstimator`). An example is compared with
       the one of the same client and class that it is most like, one with each, so that their order
       does not matter.
    4. Estimate the victim's examples in one pass, given its labels, which are granted or counted.
    5. Refine the estimate by matching (`_refine`): look for the most probable examples under the
       likelihood of the message, as `map` does, with the estimate and its expected error as prior.

    Where the victim stands for a sum over clients, such sums are simulated (`SimulatedClients`).
    What is trained is shared by all victims of a process that received the same model, hold as many
    examples and train alike. Clients are assumed to hold classes in the shares of the auxiliary
    records. The expected error is measured on simulated clients with auxiliary records of their
    own, before the refinement. Without the defenses (naive) clients are simulated without them.

    Args:
        simulated: clients to learn from; each trains once, so it takes as long as they do.
        features: principal components of the messages; fewer where there are fewer clients.
        components: principal components of the examples; what they leave out is not recovered.
        hidden: width of the network.
        epochs: passes over the simulated clients.
        refinements: steps of Adam of the refinement; 0 makes none.

    References:
        [Wu2023].
        Differs: one network for each example behind a linear layer that is solved for, where the
        paper trains one for a whole batch by thousands of passes; principal components in place of
        all numbers or a random hash of them; labels are known or counted; several local steps; the
        refinement.
    """

    simulated: Annotated[int, Ge(20)] = 4000
    features: PositiveInt = 1000
    components: PositiveInt = 100
    hidden: PositiveInt = 256
    epochs: PositiveInt = 10
    refinements: NonNegativeInt = 100

    paper: ClassVar[Paper] = cite("Wu2023")
    needs: ClassVar[frozenset[str]] = MEAN_GRADIENT_FACTS | {
        "model",
        "loss",
        "input_shape",
        "value_range",
        "auxiliary",
    }
    uses: ClassVar[frozenset[str]] = INPUT_MOMENTS | OPTIMIZER_FACTS | {"labels", "defenses", "num_classes"}
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT, GROUP})

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse fewer auxiliary records than clients with N examples are drawn from."""
        if num_examples is not None:
            assert knowledge.auxiliary is not None
            check_record_count(knowledge.auxiliary, num_examples, "the clients")

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that are not simulated, and labels that the last layer does not tell."""
        problem = build_problem(update, knowledge)
        if knowledge.labels is None:
            check_label_source(update, knowledge, problem.model)
        SimulatedClients(knowledge).check_message(update)

    def _run(self, target: Target, progress: Progress) -> Reconstruction:
        update, knowledge, total = target.read_update(), target.knowledge, self.epochs + self.refinements
        problem = build_problem(update, knowledge)
        # Estimate.
        inverter = self._find_inverter(update, problem, knowledge, offset_progress(progress, 0, total))
        labels = find_labels(problem, update, knowledge, target.rng).to(knowledge.device).sort(stable=True).values
        warn_of_missing_classes(problem, labels, self.title)
        problem = replace(problem, labels=labels)
        message = SimulatedClients(knowledge).flatten_update(update).to(knowledge.device)
        estimate = inverter.estimate(message, labels)
        neighbourhood = EstimateNeighbourhood(inverter=inverter, estimate=estimate)
        dummy = neighbourhood.dummy_data(problem, torch.zeros_like(estimate))
        # Refine.
        mixing = [name_of_defense(defense) for defense in problem.defenses if defense.mixes]
        if self.refinements and mixing:
            warn(f"{self.title} on {problem.where}: {mixing[0]} mixes examples, so the estimate is not refined")
        elif self.refinements:
            problem = with_known_noise(problem, self.title)
            refinement_progress = offset_progress(progress, self.epochs, total)
            dummy = self._refine(problem, neighbourhood, dummy, target.rng, refinement_progress)
        data = problem.scaling.to_unit_range(dummy)
        unit = (problem.scaling.high - problem.scaling.low).float().mean().item()
        spread = torch.full((len(data),), inverter.expected_error / unit)
        return Reconstruction(data=data, labels=labels.cpu(), spread=spread)

    def _find_inverter(
        self, update: Update, problem: InversionProblem, knowledge: Knowledge, progress: Progress
    ) -> MessageInverter:
        """Return the network for this model, N, training and defenses; train it if there is none."""
        fit = fit_components(problem, self.components, knowledge.input_shape)
        records, like = knowledge.auxiliary, problem.before[0]
        assert records is not None
        settings = InverterSettings(
            simulated=self.simulated, features=self.features, hidden=self.hidden, epochs=self.epochs
        )
        # Hash all that the network follows from, but for the code of the model and of the loss.
        granted = set(knowledge.granted_facts()) & self.declared_facts()
        names = granted - {"labels", "auxiliary", "model", "loss"}
        described = {name: repr(getattr(knowledge, name)) for name in names}
        kind = "gradient" if update.gradient is not None else "weights"
        parts = [hash_records(records), hash_tensors(update.before), kind, update.num_examples, described]
        if len(update.members) > 1:
            parts.append(len(update.members))
        content = hash_json([*parts, self.components, asdict(settings)])
        random_key = ("learned-inversion", content)
        key = (*random_key, repr(problem.model), problem.loss, like.device, like.dtype)
        return remember_fit(key, lambda: train_inverter(update, knowledge, fit, settings, random_key, progress))

    def _refine(
        self,
        problem: InversionProblem,
        neighbourhood: EstimateNeighbourhood,
        start: Tensor,
        rng: torch.Generator,
        progress: Progress,
    ) -> Tensor:
        """Return the most probable dummy data near the estimate; `start` where nothing is found."""
        likelihood = MessageLikelihood.from_problem(problem, _MODEL_ERROR)
        recipe = Recipe(
            update_model=choose_training_model(problem),
            distance=likelihood,
            step_size=_STEP_SIZE,
            schedule=cosine_schedule,
            parametrisation=neighbourhood,
        )
        restart = Restart(recipe, problem, tuple(start.shape), (), self.refinements, rng)
        target = likelihood.target(problem)
        task = InversionTask(recipe=recipe, problem=problem, target=target, restarts=[restart])

        def distance_of(values: dict[str, Tensor]) -> Tensor:
            gradient = recipe.update_model.gradient(problem, values, values["dummy"], problem.labels)
            return likelihood(problem.apply_defenses(gradient), target)

        try:
            check_differentiability(problem, {"dummy": start}, problem.labels, distance_of)
        except AttackError as error:
            warn(f"{self.title}: the estimate is not refined: {error}")
            return start
        trial = restart.make_trial(restart.make_step(task.restart_evaluation(restart)))
        ends = run_to_end(iterate_descent([trial], self.refinements, progress, where=problem.where))
        return dummy_data(recipe, problem, trial.point().detach()) if ends else start


@dataclass(frozen=True, kw_only=True, eq=False)
class EstimateNeighbourhood:
    """Parametrisation of dummy data by their distance from an estimate, in its expected errors.

    Attributes:
        inverter: made the estimate.
        estimate: `example component`.
    """

    inverter: MessageInverter
    estimate: Tensor

    def start(self, problem: InversionProblem, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Return the distance 0."""
        del problem, shape, rng
        return torch.zeros_like(self.estimate)

    def dummy_data(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return the dummy data at this distance."""
        values = self.inverter.components.inputs(self.estimate + coefficients * self.inverter.errors)
        inputs = values.reshape(len(values), *self.inverter.components.shape)
        return (inputs - problem.scaling.centre) / problem.scaling.scale

    def penalty(self, problem: InversionProblem, coefficients: Tensor) -> Tensor:
        """Return half the squared distance, the negative logarithm of a Gaussian prior."""
        del problem
        return coefficients.square().sum() / 2
