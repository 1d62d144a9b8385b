"""Gradient inversion: find data whose update looks like the recorded one.

An attack derives from `GradientInversion` and returns a `Recipe`, which is made of parts. Each
is a small class with one method or two; take one of those here, or write your own.

======================  ==========================================================================
`UpdateModel`           computes the update of the dummy data: at which weights, in how many steps
`Distance`              compares it with the recorded update
`Prior`                 a term of the objective that is small for data that look like data
`Parametrisation`       makes dummy data of what is optimised in their place
the descent             optimizer, step sizes, bounds: fields of the `Recipe`
======================  ==========================================================================

All of them read an `InversionProblem`: the victim's update as tensors in the order of the model's
parameters, and what the adversary knows of the client's training. Dummy data are standardised;
`InversionProblem.scaling` maps them to the model's inputs.

The objective is the distance plus each prior times its weight. `GradientInversion` draws the dummy
data, descends from several random starts, batches them on an accelerator, and claims the start that
matches best. Nothing here can reach the truth.

>>> import torch
>>> from fedsim import inversion
>>> gradient, target = [torch.tensor([2.0, 0.0])], [torch.tensor([0.0, 1.0])]
>>> inversion.Cosine()(gradient, target)
tensor(1.)
>>> inversion.Recipe(distance=inversion.SquaredL2(), step_size=0.1).optimizer
'adam'
"""

from fedsim.inversion.descent import Trial, descend, make_optimizer_step
from fedsim.inversion.distances import (
    Cosine,
    Distance,
    GaussianKernel,
    MeanCosine,
    PartialCosine,
    SquaredAndAbsolute,
    SquaredL2,
    global_norm,
)
from fedsim.inversion.input_scaling import InputScaling
from fedsim.inversion.likelihoods import MessageLikelihood, with_known_noise
from fedsim.inversion.matching import GradientInversion
from fedsim.inversion.parametrisations import DenoisedImages, Parametrisation, PublicComponents
from fedsim.inversion.priors import (
    BatchNormStatistics,
    EpochConsistency,
    GroupConsistency,
    MeanSquare,
    PatchMixture,
    Prior,
    SoftBounds,
    SquaredTotalVariation,
    TotalVariation,
    total_variation,
)
from fedsim.inversion.problem import InversionProblem
from fedsim.inversion.problem_builder import build_problem
from fedsim.inversion.recipe import (
    INPUT_MOMENTS,
    MEAN_GRADIENT_FACTS,
    DiscreteStep,
    Recipe,
    constant_schedule,
    cosine_schedule,
    step_decay_schedule,
)
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.inversion.update_models import (
    FullBatchTraining,
    GradientAtBroadcast,
    MidpointTraining,
    OptimisedVariable,
    SurrogateCurve,
    SurrogatePoint,
    UnrolledTraining,
    UpdateModel,
    choose_training_model,
    simulate_known_training,
)

__all__ = [
    "INPUT_MOMENTS", "MEAN_GRADIENT_FACTS", "OPTIMIZER_FACTS", "BatchNormStatistics", "Cosine",
    "DenoisedImages", "DiscreteStep", "Distance", "EpochConsistency", "FullBatchTraining", "GaussianKernel",
    "GradientAtBroadcast", "GradientInversion", "GroupConsistency", "InputScaling", "InversionProblem",
    "MeanCosine", "MeanSquare", "MessageLikelihood", "MidpointTraining", "OptimisedVariable",
    "Parametrisation", "PartialCosine", "PatchMixture", "Prior", "PublicComponents", "Recipe", "SoftBounds",
    "SquaredAndAbsolute", "SquaredL2", "SquaredTotalVariation", "SurrogateCurve", "SurrogatePoint",
    "TotalVariation", "Trial", "UnrolledTraining", "UpdateModel", "build_problem", "choose_training_model",
    "constant_schedule", "cosine_schedule", "descend", "global_norm", "make_optimizer_step", "simulate_known_training",
    "step_decay_schedule", "total_variation", "with_known_noise",
]  # fmt: skip
