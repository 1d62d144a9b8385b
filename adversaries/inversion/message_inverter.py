"""Training of a network that inverts messages, on clients simulated with auxiliary records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from adversaries.inversion.example_estimator import ClientMessages, ExampleEstimator, match_errors, train_estimator
from adversaries.simulated import SimulatedClients
from fedsim.base.errors import AttackError
from fedsim.base.randomness import generator, seed_globals
from fedsim.interfaces.attack import Knowledge, Progress, Records
from fedsim.inversion.public_fits import ComponentFit
from fedsim.recording.wire_format import Update

_LEAST_RECORDS = 10
"""Auxiliary records for each example of a client."""
_HELD_OUT_SHARE = 0.1
"""Share of the auxiliary records on which the expected error is measured."""
_HELD_OUT_CLIENTS = 100
"""Clients that are simulated on them at most."""
_FIRST_CLIENTS = 50
"""Clients, with and without defenses, that show which numbers of a message differ."""
_CLIENTS_FOR_FEATURE = 1.5
"""Clients without defenses for each component of the messages."""
_LEAST_DEVIATION = 1e-4
"""Least standard deviation of a component of the examples, as a share of the largest."""
_CHUNK = 200
"""Messages that are projected at once."""

Key = tuple[int | str, ...]
_MOST_NUMBERS = 32_768
"""Numbers of a message that are kept."""
_LEAST_VARIANCE = 1e-6
"""Least variance of a principal component, as a share of the largest; less is an error of float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InverterSettings:
    """How a network that inverts messages is trained.

    Attributes:
        simulated: clients to learn from.
        features: components of the messages.
        hidden: width of the network.
        epochs: passes over the clients.
    """

    simulated: int
    features: int
    hidden: int
    epochs: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ExampleComponents:
    """Principal components of examples, all in the units in which they vary by 1 on average.

    Attributes:
        shape: of one example.
        mean: `value`, of public examples, in model units.
        basis: `component value`.
        class_means: `class component`, and the mean of all in a last row, for other classes; one row of
            zeros where there are no classes.
        left_out: mean variance of a value that the components leave out.
    """

    shape: tuple[int, ...]
    mean: Tensor
    basis: Tensor
    class_means: Tensor
    left_out: float

    @classmethod
    def from_fit(cls, fit: ComponentFit, records: Records) -> ExampleComponents:
        """Return the components of a fit to auxiliary records."""
        norms = fit.total.norm(dim=1, keepdim=True)
        varies = norms[:, 0] > _LEAST_DEVIATION * norms.max()
        norms = norms[varies]
        basis = fit.total[varies] / norms * norms.mean()
        centred = records.inputs.to(fit.mean).flatten(1) - fit.mean
        left_out = centred.square().mean() - norms.square().sum() / len(fit.mean)
        components = cls(
            shape=fit.shape,
            mean=fit.mean,
            basis=basis,
            class_means=basis.new_zeros(1, len(basis)),
            left_out=max(0.0, left_out.item()),
        )
        if fit.class_means is None:
            return components
        return replace(components, class_means=components.coefficients(fit.class_means))

    def coefficients(self, inputs: Tensor) -> Tensor:
        """Return `example component` for `example ...` in model units."""
        centred = inputs.to(self.mean).flatten(1) - self.mean
        return centred @ self.basis.T / self.basis.square().sum(1)

    def inputs(self, coefficients: Tensor) -> Tensor:
        """Return `example value` in model units, without what the components leave out."""
        return self.mean + coefficients @ self.basis

    def classes(self, labels: Tensor) -> Tensor:
        """Return the rows of `class_means` of examples with these labels."""
        if labels.is_floating_point():
            return torch.zeros_like(labels, dtype=torch.int64)
        return labels.clamp_max(len(self.class_means) - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageInverter:
    """Network from a message to a client's examples.

    Attributes:
        projection: compresses messages.
        components: of the examples.
        estimator: the network between them.
        errors: `component`, root mean square errors of its estimates for simulated clients.
    """

    projection: MessageProjection
    components: ExampleComponents
    estimator: ExampleEstimator
    errors: Tensor

    @torch.no_grad()
    def estimate(self, message: Tensor, labels: Tensor) -> Tensor:
        """Return the coefficients of the examples, `example component`.

        Args:
            message: `number`, as of `SimulatedClients.flatten_update`.
            labels: `example`, ascending.
        """
        features = self.projection.project(message[self.projection.kept][None])
        return self.estimator.estimate(features, self.components.classes(labels)[None])[0]

    @property
    def expected_error(self) -> float:
        """Return the root mean square error of a value, in model units."""
        explained = (self.errors.square() * self.components.basis.square().sum(1)).sum() / len(self.components.mean)
        return float((explained + self.components.left_out).sqrt().item())


def train_inverter(
    update: Update, knowledge: Knowledge, fit: ComponentFit, settings: InverterSettings, key: Key, progress: Progress
) -> MessageInverter:
    """Simulate clients that train as the victim of an update does, and train a network on them.

    Args:
        fit: components of the auxiliary records.
        key: of all that is random.

    Raises:
        AttackError: there are too few auxiliary records, or clients cannot be simulated.
    """
    assert knowledge.auxiliary is not None
    components = ExampleComponents.from_fit(fit, knowledge.auxiliary)
    clients = _ClientDraws(update, knowledge, components, key)
    # Find the components of messages, from clients without defenses.
    kept = clients.choose_numbers()
    clean_count = min(round(_CLIENTS_FOR_FEATURE * settings.features), settings.simulated)
    drawn = list(clients.simulate("clean", clean_count, kept))
    clean = torch.cat([messages for _, messages in drawn])
    projection = MessageProjection.fit(kept, clean, settings.features)
    # Simulate the clients to learn from; without defenses the first are some of them.
    described = []
    if not knowledge.defenses_in(update.round):
        described = [clients.describe(rows, projection.project(messages)) for rows, messages in drawn]
    missing = settings.simulated - sum(len(part.labels) for part in described)
    described += clients.describe_all("defended", missing, projection)
    learning = _join_messages(described)
    # Train.
    with seed_globals(*key, "network"):
        estimator = ExampleEstimator(learning, components.class_means, settings.hidden).to(learning.features)
    train_estimator(estimator, learning, settings.epochs, (*key, "order"), progress)
    # Measure the error on records that were not learnt from.
    count = min(_HELD_OUT_CLIENTS, settings.simulated)
    held_out = _join_messages(clients.describe_all("held-out", count, projection))
    estimates = estimator.estimate(held_out.features, held_out.labels)
    errors = match_errors(estimates, held_out).mean((0, 1)).sqrt()
    return MessageInverter(projection=projection, components=components, estimator=estimator, errors=errors)


def check_record_count(records: Records, num_examples: int, where: str) -> None:
    """Raise AttackError where clients with N examples cannot be drawn from the records."""
    needed, total = _LEAST_RECORDS * num_examples, len(records.inputs)
    if total < needed:
        raise AttackError(
            f"{where}: a network is trained on clients with N = {num_examples} examples each, for which {needed} "
            f"auxiliary records are needed and {total} are granted; grant more with [adversary] auxiliary"
        )


class _ClientDraws:
    """Clients that hold auxiliary records, drawn by a key."""

    def __init__(self, update: Update, knowledge: Knowledge, components: ExampleComponents, key: Key) -> None:
        assert knowledge.auxiliary is not None
        self._update, self._records, self._components, self._key = update, knowledge.auxiliary, components, key
        self._count = update.num_examples
        check_record_count(self._records, self._count, update.name)
        total = len(self._records.inputs)
        order = torch.randperm(total, generator=generator(*key, "held-out"))
        held_out = max(self._count, round(_HELD_OUT_SHARE * total))
        self._held_out, self._learnt = order[:held_out], order[held_out:]
        self._defended = SimulatedClients(knowledge)
        self._clean = SimulatedClients(replace(knowledge, defenses=None))

    def choose_numbers(self) -> Tensor:
        """Return the positions of the numbers of a message to look at."""
        clean, defended = (
            torch.cat([messages for _, messages in self.simulate(part, _FIRST_CLIENTS)])
            for part in ("clean", "defended")
        )
        kept = choose_numbers(clean, defended)
        if not len(kept):
            raise AttackError(
                f"round {self._update.round}, client {self._update.client}: clients that are simulated on different "
                "auxiliary records all send the same; attack without the defenses, or grant other records"
            )
        return kept

    def simulate(self, part: str, count: int, kept: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield chunks of the records of clients, `client example`, and of their messages, `client number`.

        Args:
            part: `clean` without defenses, `defended`, or `held-out`, defended with other records.
            kept: positions of the numbers of a message; None keeps all.
        """
        simulation = self._clean if part == "clean" else self._defended
        available = self._held_out if part == "held-out" else self._learnt
        for start in range(0, count, _CHUNK):
            rows, messages = [], []
            for number in range(start, min(start + _CHUNK, count)):
                key = (*self._key, part, number)
                order = torch.randperm(len(available), generator=generator(*key, "records"))
                indices = available[order[: self._count]]
                inputs, labels = self._records.inputs[indices], self._records.labels[indices]
                message = simulation.simulate_update(self._update, inputs, labels, key)
                messages.append(message if kept is None else message[kept])
                rows.append(indices)
            yield torch.stack(rows), torch.stack(messages)

    def describe_all(self, part: str, count: int, projection: MessageProjection) -> list[ClientMessages]:
        """Simulate clients, see `simulate`, and compress what they send."""
        parts = []
        for rows, messages in self.simulate(part, count, projection.kept):
            parts.append(self.describe(rows, projection.project(messages)))
        return parts

    def describe(self, rows: Tensor, features: Tensor) -> ClientMessages:
        """Return the compressed messages of clients with what they were made of, sorted by label."""
        labels = self._components.classes(self._records.labels[rows])
        labels, order = labels.sort(dim=1, stable=True)
        rows = torch.gather(rows, 1, order)
        coefficients = self._components.coefficients(self._records.inputs[rows.flatten()])
        return ClientMessages(
            features=features,
            labels=labels.to(features.device),
            coefficients=coefficients.reshape(*rows.shape, -1),
        )


def _join_messages(parts: list[ClientMessages]) -> ClientMessages:
    return ClientMessages(
        features=torch.cat([part.features for part in parts]),
        labels=torch.cat([part.labels for part in parts]),
        coefficients=torch.cat([part.coefficients for part in parts]),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageProjection:
    """Principal components of messages.

    Attributes:
        kept: positions of the numbers that are kept.
        mean: `kept`, of all messages.
        basis: `kept component`, of norm 1, the one with the largest variance first.
    """

    kept: Tensor
    mean: Tensor
    basis: Tensor

    @classmethod
    def fit(cls, kept: Tensor, messages: Tensor, count: int) -> MessageProjection:
        """Fit components to messages, of which there are fewer than numbers.

        Args:
            kept: positions of the numbers.
            messages: `message kept`.
            count: of components at most.
        """
        mean = messages.mean(0)
        centred = messages - mean
        variances, vectors = torch.linalg.eigh((centred @ centred.T).double().cpu())
        variances, vectors = variances.flip(0)[:count], vectors.flip(1)[:, :count]
        enough = variances > _LEAST_VARIANCE * variances[0]
        scaled = (vectors[:, enough] / variances[enough].sqrt()).to(messages)
        return cls(kept=kept, mean=mean, basis=centred.T @ scaled)

    def project(self, messages: Tensor) -> Tensor:
        """Return `message component` for `message kept`."""
        return (messages - self.mean) @ self.basis


def choose_numbers(clean: Tensor, defended: Tensor) -> Tensor:
    """Return the positions of the numbers that differ most between clients, and that defenses let through.

    >>> choose_numbers(torch.tensor([[0.0, 1, 5], [0, 2, 7]]), torch.tensor([[1.0, 1, 0], [2, 2, 0]]))
    tensor([1])

    Args:
        clean: `message number`, without defenses.
        defended: `message number`.
    """
    variances = clean.var(0)
    variances = torch.where(defended.var(0) > 0, variances, 0.0)
    count = min(_MOST_NUMBERS, int((variances > 0).sum()))
    return variances.topk(count).indices.sort().values
