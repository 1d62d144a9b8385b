"""What a server that only listens measures of candidate records, to tell which of them a client trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from adversaries.local_models.model_sources import Network, known, losses, matched, outputs, returned
from adversaries.local_updates import rounds_of
from adversaries.named_states import named_states
from fedsim.attacks import Knowledge, Paper, Progress
from fedsim.errors import AttackError
from fedsim.findings import Membership
from fedsim.recording.transcript import Transcript
from fedsim.training.gradients import example_gradients, rows_of_examples
from fedsim.wire.messages import State, Update

_FEWEST = 3
"""Clients in a round: the victim, and two others, which have a mean and a deviation."""
PASSIVE = Paper(
    title="Effective Passive Membership Inference Attacks in Federated Learning against Overparameterized Models",
    authors="Li, Li, Ribeiro",
    venue="ICLR",
    year=2023,
    url="https://openreview.net/forum?id=QsCSLPP55Ku",
)
_AT_ONCE = 1 << 25
"""Most numbers in the gradients of candidates that are held at once, 128 MB."""
_WIDTH = 1000
"""Candidates in a forward pass."""
_LAYERS = 3
"""Of how many of the last layers gradients are features, where nobody says."""
_INSTEAD = "take an attack that reads gradients, as membership-cosine"
_SHORTEST = 1e-8
"""Length of a gradient at which its logarithm is cut off; what is learnt by heart has none in float32."""

Measure = Callable[[Sequence[Update]], Tensor]
"""From messages of one round to `client candidate`, higher for what the client trained on."""


class Products(NamedTuple):
    """What relates the gradient g of a candidate's loss at w_t to what a client did, I = w_t - w_k.

    Attributes:
        inner: `client candidate`, the inner product of I and g.
        moves: `client`, the length of I.
        slopes: `candidate`, the length of g.
    """

    inner: Tensor
    moves: Tensor
    slopes: Tensor


class Candidates:
    """The candidate records, and a network that each model is put into in turn.

    Raises:
        AttackError: there are none, or some have no label.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        assert knowledge.candidates is not None
        if not len(knowledge.candidates.inputs):
            raise AttackError("there are no candidate records; grant some under adversary.knowledge.candidates")
        self._inputs, self._labels = known(knowledge.candidates, knowledge.device)
        self._loss, self._network = knowledge.loss, Network(knowledge)

    def fits(self, updates: Sequence[Update]) -> Tensor:
        """`client candidate`, minus the loss of each on the model that each client returned."""
        loss = self._loss
        assert loss is not None
        # A loss is a mean by contract, so that of one record is the mean over it alone.
        each = vmap(lambda output, label: loss(output[None], label[None]))
        return -torch.stack([losses(each, made, self._labels, where) for made, where in self._answers(updates)])

    def margins(self, updates: Sequence[Update]) -> Tensor:
        """`client candidate`, log p / (1 - p) of each one's class on the model that each client returned."""
        rows = []
        for made, where in self._answers(updates):
            if not self._of_classes(made):
                raise AttackError(
                    f"{where}: {tuple(made.shape)} outputs are no confidences in the classes of the candidates; take "
                    "membership-loss"
                )
            rows.append(_margins(made, self._labels))
        return torch.stack(rows)

    def features(self, update: Update, layers: int | None) -> Tensor:
        """`candidate feature`, of the model that the client returned.

        The loss, log10 of the length of its gradient in each of the last `layers` modules that are trained (None is
        three, or all of fewer), and where the model tells classes log p / (1 - p) of the candidate's own and the
        entropy of all.

        Raises:
            AttackError: there are not so many, or BatchNorm needs more than one candidate.
        """
        assert self._loss is not None
        [(made, where)] = self._answers([update])
        network = self._alone(returned(update, _INSTEAD), where)
        trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in trained))
        if layers is not None and layers > len(modules):
            raise AttackError(
                f"{where}: layers is {layers}, and the network has {len(modules)} layers with weights that are "
                "trained; name fewer"
            )
        modules = modules[-(layers or _LAYERS) :]
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in trained and name.rpartition(".")[0] in modules)
        found, loss = example_gradients(network, self._inputs, self._labels, self._loss)  # type: ignore[arg-type]
        columns = [loss.detach()]
        for module in modules:
            own = [rows_of_examples(gradient) for name, gradient in found.items() if name.rpartition(".")[0] == module]
            columns.append(torch.cat(own, 1).norm(dim=1).clamp_min(_SHORTEST).log10())
        if self._of_classes(made):
            columns += [_margins(made, self._labels), torch.special.entr(made.softmax(1)).sum(1)]
        return torch.stack(columns, 1)

    def _of_classes(self, made: Tensor) -> bool:
        whole = not self._labels.is_floating_point()
        return whole and made.ndim == 2 and int(self._labels.max()) < made.shape[1]

    @torch.no_grad()
    def _answers(self, updates: Sequence[Update]) -> Iterator[tuple[Tensor, str]]:
        """`candidate output` of what each client returned."""
        for update in updates:
            where = _where(update)
            network = self._network.holding(returned(update, _INSTEAD), where)
            yield torch.cat([outputs(network, part, where) for part in equal_parts(self._inputs, _WIDTH)]), where

    def cosines(self, updates: Sequence[Update]) -> Tensor:
        """`client candidate`, the cosine of I and g, see `Products`; 0 where either is zero."""
        found = self.products(updates)
        return found.inner / (found.moves[:, None] * found.slopes).clamp_min(torch.finfo(torch.float64).tiny)

    def products(self, updates: Sequence[Update]) -> Products:
        """Of the messages of one round, in float64.

        Raises:
            AttackError: the messages hold NaN, or BatchNorm needs more than one candidate.
        """
        assert self._loss is not None
        network = self._alone(updates[0].before, _where(updates[0]))
        moves = self._moves(updates, network)
        width = max(1, _AT_ONCE // sum(rows.shape[1] for rows in moves.values()))
        inner, slopes = [], []
        for inputs, labels in zip(equal_parts(self._inputs, width), equal_parts(self._labels, width), strict=True):
            found, _ = example_gradients(network, inputs, labels, self._loss)  # type: ignore[arg-type]
            flat = {name: rows_of_examples(gradient) for name, gradient in found.items()}
            inner.append(torch.stack([moves[name] @ gradient.T for name, gradient in flat.items()]).sum(0))
            slopes.append(torch.stack([gradient.square().sum(1) for gradient in flat.values()]).sum(0))
        lengths = torch.stack([rows.double().square().sum(1) for rows in moves.values()]).sum(0).sqrt()
        return Products(torch.cat(inner, 1).double(), lengths, torch.cat(slopes).double().sqrt())

    def _alone(self, state: State, where: str) -> nn.Module:
        """The network with the weights of `state`, in which each candidate has a gradient of its own."""
        network = self._network.holding(state, where)
        if matched(network, state, where)[1]:
            raise AttackError(
                f"{where}: the model normalises by the batch, and clients do not share BatchNorm's running statistics, "
                "so that a candidate has no gradient of its own; take an attack on losses, as membership-loss"
            )
        return network

    def _moves(self, updates: Sequence[Update], network: nn.Module) -> dict[str, Tensor]:
        """`client number` of each trained parameter: I."""
        named = [named_states(update, network, _where(update)) for update in updates]
        trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        moves = {name: torch.stack([one.direction(name).flatten() for one in named]) for name in trained}
        for place, update in enumerate(updates):
            if not all(rows[place].isfinite().all() for rows in moves.values()):
                raise AttackError(
                    f"{_where(update)}: its update holds NaN or infinite values; inspect other rounds or attack "
                    "another victim"
                )
        like = dict(network.named_parameters())
        return {name: rows.to(like[name]) for name, rows in moves.items()}


def of_victim(transcript: Transcript, victim: int, measure: Measure, progress: Progress) -> Membership:
    """The mean of what is measured of the victim's messages over its rounds."""
    return _mean(
        rounds_of(transcript, victim), lambda number: measure([transcript.update(number, victim)])[0], progress
    )


def beside_others(
    transcript: Transcript,
    victim: int,
    measure: Measure,
    progress: Progress,
    *,
    pooled: bool = False,
    probability: bool = False,
) -> Membership:
    """The mean, over the victim's rounds, of how far it stands out from all other clients of a round.

    What is measured of the victim is told in standard deviations from the mean of what is measured of the other
    clients, for the same candidate. Rounds in which fewer than two others took part are left out.

    Args:
        pooled: one deviation a round, the root mean square over candidates, instead of one a candidate.
        probability: the one-tailed probability of so many deviations under a normal distribution, in their place.

    Raises:
        AttackError: there is no such round.
    """
    rounds = [number for number in rounds_of(transcript, victim) if len(transcript.clients(number)) >= _FEWEST]
    if not rounds:
        raise AttackError(
            f"client {victim}: in none of its rounds at least {_FEWEST - 1} other clients are recorded, which it is "
            "compared with; record more clients, or take membership-cosine, which reads the victim alone"
        )

    def of_round(number: int) -> Tensor:
        others = [client for client in transcript.clients(number) if client != victim]
        found = measure([transcript.update(number, client) for client in (victim, *others)]).double()
        spread = found[1:].var(0)
        spread = (spread.mean() if pooled else spread).sqrt()
        deviations = (found[0] - found[1:].mean(0)) / spread.clamp_min(torch.finfo(torch.float32).tiny)
        return torch.special.ndtr(deviations) if probability else deviations

    return _mean(rounds, of_round, progress)


def _mean(rounds: Sequence[int], score: Callable[[int], Tensor], progress: Progress) -> Membership:
    """The mean of `score(round)`, `candidate`, over rounds."""
    total: Tensor | None = None
    for done, number in enumerate(rounds, start=1):
        found = score(number).double().cpu()
        if not found.isfinite().all():
            raise AttackError(f"round {number}: what is measured of candidates is infinite; inspect other rounds")
        total = found if total is None else total + found
        progress(done, len(rounds), {"objective": float(-total.mean() / done)})
    assert total is not None
    return Membership(scores=total / len(rounds))


def _margins(made: Tensor, labels: Tensor) -> Tensor:
    """`record`, log p / (1 - p) of its class, of outputs `record class`."""
    own = labels[:, None]
    return made.gather(1, own).squeeze(1) - made.scatter(1, own, -torch.inf).logsumexp(1)


def _where(update: Update) -> str:
    return f"round {update.round}, client {update.client}"


def equal_parts(values: Tensor, most: int) -> tuple[Tensor, ...]:
    """Cut `example ...` into parts of nearly one size and at most `most` examples.

    A network that normalises by the batch would treat a few that are left over otherwise than all others.
    """
    return values.tensor_split(max(1, math.ceil(len(values) / most)))
