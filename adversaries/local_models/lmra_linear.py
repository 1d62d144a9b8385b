"""LMRA of linear models: the client's optimal local model by linear algebra (Driouich et al. 2022, Sect. 3.1)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adversaries.local_updates import PAPER, read_updates, rounds_of
from adversaries.scene import STEPPING, warn_unless_plain
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, Progress
from fedsim.errors import AttackError
from fedsim.findings import Finding, LocalModel
from fedsim.recording.transcript import Transcript

log = logging.getLogger("fedsim." + __name__)

_CERTAIN = 10.0  # times the rounding of the messages


@dataclass(frozen=True, kw_only=True)
class LinearLocalModel(Attack):
    """Compute the local model of a client in federated least squares from d + 1 of its messages, or more.

    A client that takes any number of full-batch gradient steps on a quadratic loss moves by theta_t - theta_c,t =
    W theta_t - v (Eq. 15), with one W and v for the whole federation, and W theta* = v at its optimum. W and v are
    found by one least-squares solve over all messages in float64, which is exact with full batches and the ordinary
    least-squares estimate with mini-batches; then W theta* = v is solved.

    It is exact only where the broadcast models differ in all d directions by more than the rounding of the messages.
    They do where each round samples other clients. Where all clients take part in each round, every broadcast model
    follows from the one before by the same linear map, so that all of them lie, up to rounding, in a few
    directions. Then, and where the client's data determine no single optimum, it claims what the messages do
    determine: W is symmetric, so each message gives one linear equation about the optimum, and of all models that
    satisfy these the one nearest to the model that the client returned last is taken. With full batches that is never
    farther from the optimum than the returned model is. The log says how many directions are determined, and the
    finding's trace `determined_directions`.

    With mini-batches W and v are only estimated: the error falls like one over the root of the number of messages
    (Proposition 3), where broadcast models are independent of the noise in earlier messages. Where they converge,
    as in a federation, there is little but that noise to tell them apart, and the claim may be far off.

    It reads only the messages, and needs neither the data, nor the step size, nor the number of steps. It is meant for
    linear models of d parameters (the bias is one of them); a network has far more than there are messages.

    References:
        Driouich et al.: Local Model Reconstruction Attacks in Federated Learning and their Uses, 2022, Propositions
        1 and 3, Eqs. 15 and 31. Differs: all messages serve all rows of W, which the proof of Proposition 3 estimates
        from disjoint sets of messages to have them independent; models are centred first, so that the system is
        better conditioned; directions that are lost in the rounding of the messages count as missing, and what the
        others determine is claimed, where the paper's d + 1 messages are independent by assumption.
    """

    paper: ClassVar[Paper] = PAPER
    needs: ClassVar[frozenset[str]] = frozenset()
    uses: ClassVar[frozenset[str]] = STEPPING
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
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
        moved = -updates.moves(dtype=torch.float64)
        solution = solve(updates.before, moved)
        optimum, residual, determined = solution or nearest(updates.before, moved)
        if not determined:
            raise AttackError(
                f"{updates.where}: the broadcast models are too alike: they differ by no more than rounding; record "
                "rounds in which they differ more (earlier ones, other clients taking part), or take attack lmra"
            )
        if solution is None:
            log.warning(
                "%s: the messages determine %d of %d directions of the local model; in the others it is claimed as it "
                "was returned last",
                updates.where,
                determined,
                parameters,
            )
        progress(1, 1, {"objective": residual})
        told = {"objective": residual, "determined_directions": float(determined)}
        return LocalModel(
            state=updates.state(optimum), trace={name: torch.tensor([value]) for name, value in told.items()}
        )


def solve(before: Tensor, moved: Tensor) -> tuple[Tensor, float, int] | None:
    """theta* with W theta* = v, where W theta_t - v = theta_t - theta_c,t; the mean squared residual of the fit; and d.

    None where the models are too alike to determine W, or W is singular, within the rounding of `before`.

    Args:
        before: `message parameter`, theta_t; what its type can tell apart counts as different.
        moved: `message parameter`, theta_t - theta_c,t.
    """
    mean, mean_step, centred, centred_steps = _centred(before, moved)
    left, spread, right = torch.linalg.svd(centred, full_matrices=False)
    rounding = _rounding(before)
    if int((spread > rounding).sum()) < before.shape[1]:
        return None
    transposed = right.T @ ((left.T @ centred_steps) / spread.unsqueeze(1))  # W^T, rows of the least-squares solution
    residual = float((centred @ transposed - centred_steps).square().mean())
    if int((torch.linalg.svdvals(transposed) > rounding / float(spread[-1])).sum()) < before.shape[1]:
        return None
    return mean - torch.linalg.solve(transposed.T, mean_step), residual, before.shape[1]


def nearest(before: Tensor, moved: Tensor) -> tuple[Tensor, float, int]:
    """Of all models that fit the messages, the one nearest to the last returned; residual; rank of the messages.

    W is symmetric, being a polynomial of the Hessian, so that for each message the centred step s_t = W x_t gives
    s_t . (theta* - mean) = x_t . W (theta* - mean) = -x_t . (mean step). These equations are solved for the change of
    the last returned model that has the least norm. Directions in which steps are within ten times the rounding of
    `before` count as not determined.

    Args:
        before: as in `solve`.
        moved: likewise.
    """
    mean, mean_step, centred, centred_steps = _centred(before, moved)
    last = before[-1].double() - moved[-1].double()
    wanted = -centred @ mean_step - centred_steps @ (last - mean)
    left, spread, right = torch.linalg.svd(centred_steps, full_matrices=False)
    known = spread > _CERTAIN * _rounding(before)
    change = right[known].T @ ((left[:, known].T @ wanted) / spread[known])
    return last + change, float((centred_steps @ change - wanted).square().mean()), int(known.sum())


def _centred(before: Tensor, moved: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The means of models and of steps, and both minus their means."""
    models, steps = before.double(), moved.double()
    mean, mean_step = models.mean(0), steps.mean(0)
    return mean, mean_step, models - mean, steps - mean_step


def _rounding(before: Tensor) -> float:
    return torch.finfo(before.dtype).eps * float(before.double().norm())


def _parameters(transcript: Transcript, victim: int) -> int:
    """d, from the victim's first message."""
    number = rounds_of(transcript, victim)[0]
    return read_updates(transcript.only([number]), victim, fewest=1, remedy="").before.shape[1]
