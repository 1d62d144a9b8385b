"""LMRA for linear models: the optimal local model by linear algebra [Driouich2022]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.interfaces.attack import ALL, CLIENT, Attack, MessageKind, Paper, Progress, RoundsNeeded, Target, warn
from fedsim.interfaces.findings import LocalModel
from fedsim.inversion.local_updates import PAPER, check_update, flatten_state, read_updates
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS, warn_unless_plain_sgd

_MIN_SIGNAL = 10.0
"""Least singular value of a direction that counts as determined, in roundings of the messages."""


@dataclass(frozen=True, kw_only=True)
class LinearLocalModel(Attack):
    """Compute a client's local model in federated least squares from d + 1 or more messages.

    A client that takes any number of full-batch gradient steps on a quadratic loss moves by
    theta_t - theta_c,t = W theta_t - v (Eq. 15), with the same W and v in all rounds, and its
    optimum satisfies W theta* = v.

    1. Estimate W and v by least squares over all messages, in float64 (`solve_optimum`). The
       estimate is exact with full batches.
    2. Solve W theta* = v.
    3. If the messages do not determine W, or W is singular, claim the nearest model that fits them
       (`nearest_solution`).

    The result is exact only if the broadcast models differ in all d directions by more than the
    rounding of the messages. They do if each round samples other clients. If all clients take part
    in each round, every broadcast model follows from the one before by the same linear map, so that
    all of them lie, up to rounding, in a few directions. Then, and if the client's data determine
    no single optimum, step 3 claims what the messages do determine: W is symmetric, so each message
    gives one linear equation about the optimum, and of all models that satisfy these the one
    nearest to the model that the client returned last is taken. With full batches that is never
    farther from the optimum than the returned model is. The log and the finding's trace
    `determined_directions` state how many directions are determined.

    With mini-batches W and v are only estimated: the error decreases as one over the root of the
    number of messages (Proposition 3), if broadcast models are independent of the noise in earlier
    messages. If they converge, as in a federation, they differ by little but that noise, and the
    claim may be far off.

    The attack reads only the messages, and needs neither the data, nor the step size, nor the
    number of steps. It is meant for linear models of d parameters (including the bias); a network
    has far more parameters than there are messages.

    References:
        [Driouich2022], Propositions 1 and 3, Eqs. 15 and 31. Differs: all messages are used for all
        rows of W, which the proof of Proposition 3 estimates from disjoint sets of messages to have
        them independent; models are centred first, so that the system is better conditioned;
        directions that are lost in the rounding of the messages count as missing, and what the
        others determine is claimed, where the paper's d + 1 messages are independent by assumption.
    """

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset()
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    message_kind: ClassVar[MessageKind] = "weights"

    def count_fewest_rounds(self, num_parameters: int | None) -> int:
        """Return d + 1."""
        return 1 if num_parameters is None else num_parameters + 1

    def _run(self, target: Target, progress: Progress) -> LocalModel:
        num_parameters = _count_parameters(target)
        updates = read_updates(target)
        # Momentum and FedProx's proximal term keep steps linear and the optimum where it is.
        warn_unless_plain_sgd(self, target.knowledge, updates.location, simulated=("momentum", "proximal_mu"))
        steps = -updates.compute_deltas(dtype=torch.float64)
        solution = solve_optimum(updates.before, steps)
        optimum, residual, num_determined = solution or nearest_solution(updates.before, steps)
        if not num_determined:
            raise AttackError(
                f"{updates.location}: the broadcast models are too alike: they differ by no more than rounding; record "
                "rounds in which they differ more (earlier ones, other clients taking part), or take attack lmra"
            )
        if solution is None:
            warn(
                f"{updates.location}: the messages determine {num_determined} of {num_parameters} "
                "directions of the local model; in the others it is claimed as it was returned "
                "last"
            )
        progress(1, 1, {"objective": residual})
        trace = {"objective": torch.tensor([residual]), "determined_directions": torch.tensor([float(num_determined)])}
        return LocalModel(state=updates.to_state(optimum), trace=trace)


def solve_optimum(before: Tensor, steps: Tensor) -> tuple[Tensor, float, int] | None:
    """Solve W theta* = v, with W and v from the least-squares fit of W theta_t - v to the steps.

    Args:
        before: `message parameter`, theta_t, in the precision of the messages.
        steps: `message parameter`, theta_t - theta_c,t.

    Returns:
        theta*, the mean squared residual of the fit, and d; None if the models are too similar to
        determine W, or W is singular, within the rounding of `before`.
    """
    mean, mean_step, centred, centred_steps = _centre(before, steps)
    left_vectors, singular_values, right_vectors = torch.linalg.svd(centred, full_matrices=False)
    rounding = _rounding_error(before)
    if int((singular_values > rounding).sum()) < before.shape[1]:
        return None
    transposed_w = right_vectors.T @ ((left_vectors.T @ centred_steps) / singular_values.unsqueeze(1))
    residual = float((centred @ transposed_w - centred_steps).square().mean())
    w_rounding = rounding / float(singular_values[-1])
    if int((torch.linalg.svdvals(transposed_w) > w_rounding).sum()) < before.shape[1]:
        return None
    return mean - torch.linalg.solve(transposed_w.T, mean_step), residual, before.shape[1]


def nearest_solution(before: Tensor, steps: Tensor) -> tuple[Tensor, float, int]:
    """Return the model nearest to the last returned one among all that fit the messages.

    W is symmetric, being a polynomial of the Hessian, so that for each message the centred step
    s_t = W x_t gives s_t . (theta* - mean) = x_t . W (theta* - mean) = -x_t . (mean step). These
    equations are solved for the change of the last returned model that has the least norm.
    Directions in which steps are within ten times the rounding of `before` count as not determined.

    Args:
        before: as in `solve_optimum`.
        steps: likewise.

    Returns:
        The model, the mean squared residual of the equations, and the number of determined
        directions.
    """
    mean, mean_step, centred, centred_steps = _centre(before, steps)
    last = before[-1].double() - steps[-1].double()
    right_side = -centred @ mean_step - centred_steps @ (last - mean)
    left_vectors, singular_values, right_vectors = torch.linalg.svd(centred_steps, full_matrices=False)
    determined = singular_values > _MIN_SIGNAL * _rounding_error(before)
    change = right_vectors[determined].T @ ((left_vectors[:, determined].T @ right_side) / singular_values[determined])
    residual = float((centred_steps @ change - right_side).square().mean())
    return last + change, residual, int(determined.sum())


def _centre(before: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return mean model, mean step, centred models and centred steps, in float64."""
    models, steps = before.double(), steps.double()
    mean, mean_step = models.mean(0), steps.mean(0)
    return mean, mean_step, models - mean, steps - mean_step


def _rounding_error(before: Tensor) -> float:
    return torch.finfo(before.dtype).eps * float(before.double().norm())


def _count_parameters(target: Target) -> int:
    """Return d, from the victim's first message."""
    rounds = target.participation_rounds()
    first_update = check_update(target.transcript.update(rounds[0], target.victim), None)
    num_parameters = len(flatten_state(first_update, first_update.before))
    if len(rounds) <= num_parameters:
        count = "1 message is" if len(rounds) == 1 else f"{len(rounds)} messages are"
        raise AttackError(
            f"client {target.victim}: {count} recorded, expected at least {num_parameters + 1}; one "
            f"more than the model's {num_parameters} parameters; record more rounds, or take attack "
            "lmra"
        )
    return num_parameters
