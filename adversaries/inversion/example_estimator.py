"""Estimates of examples: least squares for the sum of a class, and a network that separates it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, one_hot

from fedsim.base.randomness import generator
from fedsim.interfaces.attack import Progress
from fedsim.training.optimizers import Adam

_FOLDS = 5
"""Parts of the clients, for each of which sums are predicted by a fit to the others."""
_PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Weights of the L2 penalty that are tried, in units of the largest variance of a feature."""
_BATCH = 128
"""Clients in a step."""
_STEP_SIZE = 1e-3
_WARM_UP = 50
"""Steps in which the step size rises."""
_WEIGHT_DECAY = 1e-2
_FORBIDDEN = 1e9
"""Cost of a match of two examples of different classes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientMessages:
    """Messages of simulated clients, and what they were made of.

    Attributes:
        features: `client feature`, of the message.
        labels: `client example`, ascending.
        coefficients: `client example component`, of the examples.
    """

    features: Tensor
    labels: Tensor
    coefficients: Tensor

    def select(self, clients: Tensor) -> ClientMessages:
        """Return those of the clients at these indices."""
        return ClientMessages(
            features=self.features[clients], labels=self.labels[clients], coefficients=self.coefficients[clients]
        )


class ExampleEstimator(nn.Module):
    """Estimates the coefficients of each example of a client from its message and its labels.

    1. The sum of the examples of each class, less the mean of the class, is estimated by least
       squares with an L2 penalty, linear in the features and in the counts of labels (`fit_sums`).
    2. A network takes the mean that follows for an example's class, the class, the number of its
       examples and which of them it is, and returns the example (`train_estimator`). It is the
       same network for all examples.

    Args:
        messages: the class means and the scales of features come from these.
        class_means: `class component`.
        hidden: width of the network.
    """

    feature_mean: Tensor
    feature_scale: Tensor
    class_means: Tensor
    sum_weights: Tensor

    def __init__(self, messages: ClientMessages, class_means: Tensor, hidden: int) -> None:
        super().__init__()
        num_examples, components = messages.coefficients.shape[1:]
        classes = len(class_means)
        self.register_buffer("feature_mean", messages.features.mean(0))
        self.register_buffer("feature_scale", messages.features.std(0).max().clamp_min(1e-30))
        self.register_buffer("class_means", class_means)
        self.register_buffer("sum_weights", torch.zeros(0))
        self._from_mean = nn.Linear(components, hidden)
        self._of_class = nn.Embedding(classes, hidden)
        self._of_count = nn.Embedding(num_examples + 1, hidden)
        self._of_rank = nn.Embedding(num_examples, hidden)
        self._middle = nn.Linear(hidden, hidden)
        self._last = nn.Linear(hidden, components)
        for embedding, deviation in ((self._of_class, 0.3), (self._of_count, 0.3), (self._of_rank, 0.5)):
            nn.init.normal_(embedding.weight, 0, deviation)
        nn.init.zeros_(self._last.weight)
        nn.init.zeros_(self._last.bias)

    def fit_sums(self, messages: ClientMessages) -> Tensor:
        """Fit the sums of classes.

        Returns:
            `client example component`, the estimated mean of each example's class less the class
            mean, where a client's are predicted by a fit to other clients.
        """
        inputs, sums = self._sum_inputs(messages.features, messages.labels), self._class_sums(messages)
        fold = torch.arange(len(inputs)) % _FOLDS
        # Choose the penalty by the error on one part.
        rest, part = (fold != 0).nonzero().flatten(), (fold == 0).nonzero().flatten()
        errors = []
        for penalty, weights in _fit_ridges(inputs[rest], sums[rest], _PENALTIES).items():
            errors.append((((inputs[part] @ weights) - sums[part]).square().mean().item(), penalty))
        penalty = min(errors)[1]
        # Predict each part by the others.
        means = torch.empty_like(messages.coefficients)
        for number in range(_FOLDS):
            rest, part = (fold != number).nonzero().flatten(), (fold == number).nonzero().flatten()
            (weights,) = _fit_ridges(inputs[rest], sums[rest], (penalty,)).values()
            means[part] = self._example_means(inputs[part] @ weights, messages.labels[part])
        (self.sum_weights,) = _fit_ridges(inputs, sums, (penalty,)).values()
        return means

    def estimate(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return `client example component`, the coefficients of examples.

        Args:
            features: `client feature`.
            labels: `client example`, ascending.
        """
        sums = self._sum_inputs(features, labels) @ self.sum_weights
        result: Tensor = self(self._example_means(sums, labels), labels)
        return result

    def forward(self, means: Tensor, labels: Tensor) -> Tensor:
        """Return the coefficients of examples, given the estimated means of their classes."""
        counts, ranks = _count_equal(labels), _rank_equal(labels)
        hidden = self._from_mean(means) + self._of_class(labels) + self._of_count(counts)
        hidden = gelu(hidden + self._of_rank(ranks) * (counts > 1)[..., None])
        hidden = hidden + gelu(self._middle(hidden))
        result: Tensor = self.class_means[labels] + means + self._last(hidden)
        return result

    def _sum_inputs(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the inputs of the least squares, `client input`."""
        counts = one_hot(labels, len(self.class_means)).sum(1)
        scaled = (features - self.feature_mean) / self.feature_scale
        return torch.cat([scaled, counts.to(scaled), torch.ones_like(scaled[:, :1])], 1)

    def _class_sums(self, messages: ClientMessages) -> Tensor:
        """Return the sums of the examples of each class less the class means, `client (class component)`."""
        differences = messages.coefficients - self.class_means[messages.labels]
        clients, _, components = differences.shape
        sums = differences.new_zeros(clients, len(self.class_means), components)
        positions = messages.labels[..., None].expand_as(differences)
        return sums.scatter_add_(1, positions, differences).flatten(1)

    def _example_means(self, sums: Tensor, labels: Tensor) -> Tensor:
        """Return the means of the classes of examples, `client example component`."""
        by_class = sums.reshape(len(sums), len(self.class_means), -1)
        positions = labels[..., None].expand(-1, -1, by_class.shape[2])
        return torch.gather(by_class, 1, positions) / _count_equal(labels)[..., None]


def train_estimator(
    estimator: ExampleEstimator, messages: ClientMessages, epochs: int, key: tuple[int | str, ...], progress: Progress
) -> None:
    """Fit the sums, and train the network with examples in the order that suits its estimates.

    Args:
        estimator: is changed in place.
        epochs: passes over them.
        key: of the order in which clients come.
    """
    means = estimator.fit_sums(messages)
    optimizer = Adam(estimator.parameters(), _STEP_SIZE, weight_decay=_WEIGHT_DECAY, decoupled=True)
    rng, count = generator(*key), len(means)
    step, steps = 0, epochs * math.ceil(count / _BATCH)
    for epoch in range(1, epochs + 1):
        losses = []
        for batch in torch.split(torch.randperm(count, generator=rng).to(means.device), _BATCH):
            # Rise for a while, then fall along a cosine.
            step += 1
            factor = min(1.0, step / _WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.param_groups[0]["lr"] = _STEP_SIZE * factor
            chosen = messages.select(batch)
            estimates = estimator(means[batch], chosen.labels)
            loss = match_errors(estimates, chosen).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        progress(epoch, epochs, {"objective": torch.stack(losses).mean().item()})
    estimator.requires_grad_(False)


def match_errors(estimates: Tensor, messages: ClientMessages) -> Tensor:
    """Return `client example component`, squared errors of estimates in the order that suits them best.

    An example is matched with one of the same class, one with each.
    """
    from scipy.optimize import linear_sum_assignment  # takes a while

    true, labels = messages.coefficients, messages.labels
    costs = torch.cdist(estimates.detach(), true).square()
    costs = costs + _FORBIDDEN * (labels[:, :, None] != labels[:, None, :])
    orders = []
    for client_costs in costs.cpu().numpy():
        orders.append(torch.from_numpy(linear_sum_assignment(client_costs)[1]))
    order = torch.stack(orders)
    positions = order.to(true.device)[..., None].expand_as(true)
    return (estimates - torch.gather(true, 1, positions)).square()


def _fit_ridges(inputs: Tensor, targets: Tensor, penalties: tuple[float, ...]) -> dict[float, Tensor]:
    """Return the weights of least squares with each L2 penalty, in units of the clients."""
    gram = (inputs.T @ inputs).double().cpu()
    moments = (inputs.T @ targets).double().cpu()
    weights = {}
    for penalty in penalties:
        regular = gram + penalty * len(inputs) * torch.eye(len(gram), dtype=gram.dtype)
        weights[penalty] = torch.linalg.solve(regular, moments).to(inputs)
    return weights


def _count_equal(labels: Tensor) -> Tensor:
    """Return for each label how many of its client's are equal to it, itself included."""
    return (labels[:, :, None] == labels[:, None, :]).sum(2)


def _rank_equal(labels: Tensor) -> Tensor:
    """Return for each label how many of its client's before it are equal to it."""
    equal = labels[:, :, None] == labels[:, None, :]
    return equal.tril(-1).sum(2)
