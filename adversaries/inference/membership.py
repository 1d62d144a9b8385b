"""Membership inference by an honest-but-curious server.

Each attack chooses one statistic of `CandidateScorer` and averages it over the victim's rounds,
by itself or relative to the other clients of the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from adversaries.inference.usable_rounds import compute_by_round
from adversaries.loadable_network import LoadableNetwork, match_state
from adversaries.local_models.model_sources import compute_losses, compute_outputs, returned_weights, unpack_records
from fedsim.base.errors import AttackError
from fedsim.base.loss_term import add_model_term, prediction_loss
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, Attack, Knowledge, Progress, RoundsNeeded, Target
from fedsim.interfaces.findings import Membership
from fedsim.inversion.named_states import named_states
from fedsim.recording.wire_format import State, Update
from fedsim.training.gradients import example_gradients, flatten_examples

MIN_CLIENTS_PER_ROUND = 3
"""The victim and two other clients, the fewest that have a mean and a standard deviation."""
PASSIVE_INFERENCE_PAPER = cite("Li2023a")
_GRADIENT_CHUNK_NUMEL = 1 << 25
"""Most numbers in the candidates' gradients that are in memory at once, 128 MB."""
_FORWARD_CHUNK = 1000
"""Candidates in one forward pass."""
_DEFAULT_LAYERS = 3
"""Number of last layers whose gradients are features where `layers` is None."""
_GRADIENT_REMEDY = "take an attack that reads gradients, as membership-cosine"
_MIN_GRADIENT_NORM = 1e-8
"""Least gradient norm before the logarithm; a memorised example has gradient 0 in float32."""

CandidateStatistic = Callable[[Sequence[Update]], Tensor]
"""`messages of one round -> client candidate`, higher where the client trained on the candidate."""


class GradientProducts(NamedTuple):
    """Products of clients' updates I = w_t - w_k and candidates' loss gradients g at w_t.

    Attributes:
        inner_products: `client candidate`, the inner product of I and g.
        update_norms: `client`, the L2 norm of I.
        gradient_norms: `candidate`, the L2 norm of g.
    """

    inner_products: Tensor
    update_norms: Tensor
    gradient_norms: Tensor


def _load_per_example(network: LoadableNetwork, state: State, where: str) -> nn.Module:
    """Load `state` and check that each candidate has its own gradient."""
    model = network.load(state, where)
    if match_state(model, state, where)[1]:
        raise AttackError(
            f"{where}: the model normalises by the batch, and clients do not share BatchNorm's running statistics, so "
            "that a candidate has no gradient of its own; take an attack on losses, as membership-loss"
        )
    return model


@dataclass(frozen=True, kw_only=True)
class CandidateAttack(Attack):
    """Base of the attacks that score candidates by the losses or the gradients of a victim's models."""

    rounds_needed: ClassVar[RoundsNeeded] = ALL
    needs_num_examples: ClassVar[bool] = False

    @property
    def reads_gradients(self) -> bool:
        """Return whether it reads a gradient of each candidate."""
        return True

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that do not send the whole model, and gradients where a batch is normalised as a whole."""
        load = _load_per_example if self.reads_gradients else LoadableNetwork.load
        load(LoadableNetwork(knowledge), update.before, update.name)


class CandidateScorer:
    """Candidate records, with the statistics that membership attacks compute on them.

    Raises:
        AttackError: there are none, or some have no label.
    """

    def __init__(self, knowledge: Knowledge) -> None:
        assert knowledge.candidates is not None
        if not len(knowledge.candidates.inputs):
            raise AttackError("there are no candidate records; grant some under adversary.knowledge.candidates")
        self._inputs, self._labels = unpack_records(knowledge.candidates, knowledge.device)
        self._loss, self._network = knowledge.loss, LoadableNetwork(knowledge)

    def negative_losses(self, updates: Sequence[Update]) -> Tensor:
        """Return minus each candidate's loss on each returned model, `client candidate`."""
        return -torch.stack([self._losses(logits, where) for logits, where in self._iterate_outputs(updates)])

    def loss_decreases(self, updates: Sequence[Update]) -> Tensor:
        """Return by how much each candidate's loss is smaller on the returned model than on the broadcast one."""
        rows = list[Tensor]()
        for update, returned in zip(updates, self.negative_losses(updates), strict=True):
            where = update.name
            rows.append(self._losses(self._compute_logits(update.before, where), where) + returned)
        return torch.stack(rows)

    def _losses(self, logits: Tensor, where: str) -> Tensor:
        loss = prediction_loss(self._loss)
        assert loss is not None
        # A loss is a mean over examples by contract, so a batch of one gives the example's loss.
        example_loss = vmap(lambda output, label: loss(output[None], label[None]))
        return compute_losses(example_loss, logits, self._labels, where)

    def confidence_log_odds(self, updates: Sequence[Update]) -> Tensor:
        """Return log p / (1 - p) of candidates' classes on returned models, `client candidate`."""
        rows = []
        for logits, where in self._iterate_outputs(updates):
            if not self._are_class_logits(logits):
                raise AttackError(
                    f"{where}: {tuple(logits.shape)} outputs are not confidences in the classes of the candidates; "
                    "take membership-loss"
                )
            rows.append(_class_log_odds(logits, self._labels))
        return torch.stack(rows)

    def white_box_features(self, update: Update, layers: int | None) -> Tensor:
        """Compute white-box features of each candidate on the model that the client returned.

        They are the loss, log10 of its gradient's norm in each of the last `layers` trained
        modules, and for a classifier log p / (1 - p) of the candidate's class and the entropy of
        the prediction.

        Args:
            layers: None takes three, or all where there are fewer.

        Returns:
            `candidate feature`.
        """
        assert self._loss is not None
        [(logits, where)] = self._iterate_outputs([update])
        network = _load_per_example(self._network, returned_weights(update, _GRADIENT_REMEDY), where)

        # Choose the last trained modules.
        trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in trained))
        if layers is not None and layers > len(modules):
            raise AttackError(
                f"{where}: layers is {layers}, and the network has {len(modules)} layers with weights that are "
                "trained; name fewer"
            )
        modules = modules[-(layers or _DEFAULT_LAYERS) :]
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(name in trained and name.rpartition(".")[0] in modules)

        # Compute each candidate's loss and its gradient norm in each module.
        objective = add_model_term(self._loss, network)
        gradients, loss = example_gradients(network, self._inputs, self._labels, objective)
        columns = [loss.detach()]
        for module in modules:
            module_gradients = [
                flatten_examples(gradient) for name, gradient in gradients.items() if name.rpartition(".")[0] == module
            ]
            norms = torch.cat(module_gradients, 1).norm(dim=1)
            columns.append(norms.clamp_min(_MIN_GRADIENT_NORM).log10())

        if self._are_class_logits(logits):
            entropy = torch.special.entr(logits.softmax(1)).sum(1)
            columns += [_class_log_odds(logits, self._labels), entropy]
        return torch.stack(columns, 1)

    def _are_class_logits(self, logits: Tensor) -> bool:
        class_labels = not self._labels.is_floating_point()
        return class_labels and logits.ndim == 2 and int(self._labels.max()) < logits.shape[1]

    def _iterate_outputs(self, updates: Sequence[Update]) -> Iterator[tuple[Tensor, str]]:
        """Yield each returned model's outputs `candidate output`, and the message's description."""
        for update in updates:
            where = update.name
            yield self._compute_logits(returned_weights(update, _GRADIENT_REMEDY), where), where

    @torch.no_grad()
    def _compute_logits(self, state: State, where: str) -> Tensor:
        network = self._network.load(state, where)
        return torch.cat(
            [compute_outputs(network, chunk, where) for chunk in split_evenly(self._inputs, _FORWARD_CHUNK)]
        )

    def gradient_cosines(self, updates: Sequence[Update]) -> Tensor:
        """Return the cosine of update and gradient, `client candidate`; 0 where either is zero."""
        products = self.gradient_products(updates)
        norms = products.update_norms[:, None] * products.gradient_norms
        return products.inner_products / norms.clamp_min(torch.finfo(torch.float64).tiny)

    def gradient_products(self, updates: Sequence[Update]) -> GradientProducts:
        """Compute the products of one round's updates and the candidates' gradients, in float64."""
        assert self._loss is not None
        network = _load_per_example(self._network, updates[0].before, updates[0].name)
        client_updates = self._stack_updates(updates, network)

        # Compute the candidates' gradients in chunks that fit in memory.
        chunk_size = max(1, _GRADIENT_CHUNK_NUMEL // sum(rows.shape[1] for rows in client_updates.values()))
        input_chunks = split_evenly(self._inputs, chunk_size)
        label_chunks = split_evenly(self._labels, chunk_size)
        inner_products, squared_norms = [], []
        for inputs, labels in zip(input_chunks, label_chunks, strict=True):
            objective = add_model_term(self._loss, network)
            gradients, _ = example_gradients(network, inputs, labels, objective)
            rows = {name: flatten_examples(gradient) for name, gradient in gradients.items()}
            by_parameter = [client_updates[name] @ gradient.T for name, gradient in rows.items()]
            inner_products.append(torch.stack(by_parameter).sum(0))
            squares = [gradient.square().sum(1) for gradient in rows.values()]
            squared_norms.append(torch.stack(squares).sum(0))

        update_squares = [rows.double().square().sum(1) for rows in client_updates.values()]
        return GradientProducts(
            torch.cat(inner_products, 1).double(),
            torch.stack(update_squares).sum(0).sqrt(),
            torch.cat(squared_norms).double().sqrt(),
        )

    def _stack_updates(self, updates: Sequence[Update], network: nn.Module) -> dict[str, Tensor]:
        """Return the update I of each trained parameter, `client number`."""
        client_states = [named_states(update, network, update.name) for update in updates]
        parameters = dict(network.named_parameters())
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        stacked = {}
        for name in trained:
            directions = [states.direction(name).flatten() for states in client_states]
            stacked[name] = torch.stack(directions)
        for index, update in enumerate(updates):
            if not all(rows[index].isfinite().all() for rows in stacked.values()):
                raise AttackError(
                    f"{update.name}: its update holds NaN or infinite values; inspect other rounds or "
                    "attack another victim"
                )
        return {name: rows.to(parameters[name]) for name, rows in stacked.items()}


def score_victim(target: Target, statistic: CandidateStatistic, progress: Progress) -> Membership:
    """Score candidates by the mean of a statistic over the victim's rounds."""

    def score_round(number: int) -> Tensor:
        return statistic([target.transcript.update(number, target.victim)])[0]

    return _average_rounds(target.participation_rounds(), score_round, progress)


def score_against_other_clients(
    target: Target,
    statistic: CandidateStatistic,
    progress: Progress,
    *,
    pooled: bool = False,
    probability: bool = False,
) -> Membership:
    """Score candidates by how far the victim's statistic lies above that of other clients.

    The victim's value is expressed in standard deviations from the mean of the other clients'
    values for the same candidate; the score is the mean over the victim's rounds. Rounds with
    fewer than two other clients are left out.

    Args:
        pooled: one deviation a round, the root mean square over candidates, not one a candidate.
        probability: score with the one-tailed normal probability of the deviation instead.
    """
    transcript, victim = target.transcript, target.victim
    rounds = [
        number for number in target.participation_rounds() if len(transcript.clients(number)) >= MIN_CLIENTS_PER_ROUND
    ]
    if not rounds:
        raise AttackError(
            f"client {victim}: in none of its rounds at least {MIN_CLIENTS_PER_ROUND - 1} other clients are recorded, "
            "which it is compared with; record more clients, or take membership-cosine, which reads the victim alone"
        )

    def score_round(number: int) -> Tensor:
        clients = [victim, *(client for client in transcript.clients(number) if client != victim)]
        values = statistic([transcript.update(number, client) for client in clients]).double()
        victim_value, other_values = values[0], values[1:]
        variance = other_values.var(0)
        deviation = (variance.mean() if pooled else variance).sqrt()
        tiny = torch.finfo(torch.float32).tiny
        standardised = (victim_value - other_values.mean(0)) / deviation.clamp_min(tiny)
        return torch.special.ndtr(standardised) if probability else standardised

    return _average_rounds(rounds, score_round, progress)


def _average_rounds(rounds: Sequence[int], score_round: Callable[[int], Tensor], progress: Progress) -> Membership:
    """Return the mean of the scores of all rounds that can be scored."""

    def score_finitely(number: int) -> Tensor:
        scores = score_round(number).double().cpu()
        if not scores.isfinite().all():
            raise AttackError(f"round {number}: the score of a candidate is NaN or infinite; inspect other rounds")
        return scores

    total, count = torch.zeros((), dtype=torch.float64), 0
    for number, scores in compute_by_round(rounds, score_finitely):
        total, count = total + scores, count + 1
        progress(rounds.index(number) + 1, len(rounds), {"objective": float(-total.mean() / count)})
    return Membership(scores=total / count)


def _class_log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log p / (1 - p) of each record's class, from outputs `record class`."""
    classes = labels[:, None]
    other_logits = logits.scatter(1, classes, -torch.inf)
    return logits.gather(1, classes).squeeze(1) - other_logits.logsumexp(1)


def split_evenly(values: Tensor, max_size: int) -> tuple[Tensor, ...]:
    """Split `example ...` into chunks of nearly equal size, at most `max_size` examples each.

    A small last chunk would be normalised differently where BatchNorm normalises by the batch.

    >>> [len(chunk) for chunk in split_evenly(torch.zeros(10, 2), max_size=4)]
    [4, 3, 3]
    """
    return values.tensor_split(max(1, math.ceil(len(values) / max_size)))
