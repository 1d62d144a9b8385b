"""LMRA of linear models: the client's optimal local model by linear algebra (Driouich et al. 2022, Sect. 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.local_updates import PAPER, read_updates, rounds_of
from adversaries.scene import STEPPING, warn_unless_plain
from fedsim.attack import Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError
from fedsim.findings import Finding, LocalModel
from fedsim.transcript import Transcript


@dataclass(frozen=True, kw_only=True)
class LinearLocalModel(Attack):
    """Compute the local model of a client in federated least squares from d + 1 of her messages.

    A client who takes any number of full-batch gradient steps on a quadratic loss moves by theta_t - theta_c,t =
    W theta_t - v (Eq. 15), with one W and v for the whole federation, and W theta* = v at her optimum. W and v are
    found by one least-squares solve over all messages in float64, which is exact with full batches and the ordinary
    least-squares estimate with mini-batches; then W theta* = v is solved.

    It knows nothing but the messages: neither the data, nor the step size, nor the number of steps. It is meant for
    linear models of d parameters (the bias is one of them); a network has far more than there are messages.

    References:
        Driouich et al.: Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022, Propositions
        1 and 3, Eqs. 15 and 31. Differs: all messages serve all rows of W, which the proof of Proposition 3 estimates
        from disjoint sets of messages to have them independent; models are centred first, so that the system is
        better conditioned; directions that are lost in the rounding of the messages count as missing.
    """

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset()
    uses: ClassVar[frozenset[str]] = STEPPING
    temporal: ClassVar[bool] = True

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        parameters = _parameters(transcript, victim)
        updates = read_updates(
            transcript,
            victim,
            fewest=parameters + 1,
            remedy=f"one more than the model's {parameters} parameters; record more rounds, or take attack lmra",
        )
        # With momentum, or FedProx's pull towards theta_t, steps are as linear, and end where they did.
        warn_unless_plain(self, knowledge, updates.where, simulated=("momentum", "proximal_mu"))
        moved = updates.before.double() - updates.after.double()
        optimum, residual = solve(updates.before, moved, updates.where)
        progress(1, 1, {"objective": residual})
        return LocalModel(state=updates.state(optimum), trace={"objective": torch.tensor([residual])})


def solve(before: Tensor, moved: Tensor, where: str = "messages") -> tuple[Tensor, float]:
    """theta* with W theta* = v, where W theta_t - v = theta_t - theta_c,t, and the mean squared residual of the fit.

    Args:
        before: `message parameter`, theta_t; what its type can tell apart counts as different.
        moved: `message parameter`, theta_t - theta_c,t.
        where: begins an error.

    Raises:
        AttackError: the models are too alike, or W is singular, within the rounding of `before`.
    """
    models, steps = before.double(), moved.double()
    mean, mean_step = models.mean(0), steps.mean(0)
    centred, centred_steps = models - mean, steps - mean_step
    rounding = torch.finfo(before.dtype).eps * float(models.norm())
    left, spread, right = torch.linalg.svd(centred, full_matrices=False)
    dimensions = before.shape[1]
    rank = int((spread > rounding).sum())
    if rank < dimensions:
        raise AttackError(
            f"{where}: the broadcast models are too alike: [theta, 1] has rank {rank + 1}, expected d + 1 = "
            f"{dimensions + 1}; record rounds in which they differ more (earlier ones, other clients taking part), or "
            "take attack lmra"
        )
    transposed = right.T @ ((left.T @ centred_steps) / spread.unsqueeze(1))  # W^T, rows of the least-squares solution
    residual = float((centred @ transposed - centred_steps).square().mean())
    strengths = torch.linalg.svdvals(transposed)
    certain = int((strengths > rounding / float(spread[-1])).sum())
    if certain < dimensions:
        raise AttackError(
            f"{where}: W is singular, of rank {certain} where {dimensions} is expected: the client's data do not "
            "determine a local model, or hardly move some parameters; record more rounds or choose another victim"
        )
    return mean - torch.linalg.solve(transposed.T, mean_step), residual


def _parameters(transcript: Transcript, victim: int) -> int:
    """d, from the victim's first message."""
    number = rounds_of(transcript, victim)[0]
    return read_updates(transcript.only([number]), victim, fewest=1, remedy="").before.shape[1]
