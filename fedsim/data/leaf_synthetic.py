"""A classification task whose clients differ by design: LEAF's synthetic data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le
from numpy.typing import NDArray

from fedsim.base.constraints import CheckedSettings, NonNegativeFloat, NonNegativeInt, PositiveInt
from fedsim.base.errors import ConfigError
from fedsim.base.papers import Paper, cite
from fedsim.base.randomness import numpy_generator
from fedsim.data import Column, Dataset, Examples
from fedsim.data.cache import load_cached
from fedsim.data.checks import memory_complaint
from fedsim.data.tabular import numeric_columns

_SIDE_INFORMATION_STD = 0.1
"""Standard deviation of a client's side information around its cluster's mean."""

_BYTES_PER_VALUE = 20
"""Bytes a feature of an example while clients are joined: twice float64, once float32."""
_MIN_EXAMPLES = 5
"""Fewest examples of a client in LEAF."""
_KEY = "leaf-synthetic"
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LeafSynthetic(CheckedSettings):
    """LEAF's synthetic task ([Caldas2018], App. A): a random linear model for each client.

    With d features, C classes, K clusters and N(m, s) of standard deviation s: Q ~ N(0, 1) of d + 1
    by C by K. Cluster k has a mean mu_k ~ N(m_k, 1)^K, m_k ~ N(0, 1). Client c belongs to a cluster
    k, each equally likely, and has side information u ~ N(mu_k, 0.1), weights W = Q u, and centres
    v ~ N(B, 1)^d, B ~ N(0, 1). Examples are x, with feature i = 1 ... d of variance i^decay around
    v_i, and y = argmax (1, x) W + N(0, noise).

    The defaults are LMRA's ([Driouich2022], App. C.1), except `classes`, which it does not give (5
    is LEAF's default). With many features the centres outweigh the rest: of the ten clients, eight
    hold examples of one class only. With `decay = 2`, as in LMRA's released code, all hold all
    five.

    Clients are the natural groups. Each also has a quarter of its number of training examples
    (rounded up) to test on. Every client and part has its own key of random numbers: more clients
    or more examples do not change the others.

    Args:
        features: d.
        classes: C.
        clusters: K.
        clients: number of clients.
        examples_per_client: training examples of each; None draws LEAF's sizes,
            min(1000, 5 + floor(lognormal(3, 2))).
        noise: standard deviation of the noise on the logits.
        decay: exponent of the variance of features; LEAF's is -1.2.
        sensitive: add a binary attribute to attack: 0 or 1 with equal chance, independent of all
            else. A 1 adds Q' u to the logits, Q' ~ N(0, s) of C by K, s^2 being the sum of the
            features' variances: it shifts them as far as all features do by one standard deviation.
            It becomes the column `sensitive`, two further features. Ours, for LMRA's "one synthetic
            binary attribute"; in its released code no label depends on it.
        seed: seed of all random numbers; LEAF's default.

    References:
        [Caldas2018].
    """

    paper: ClassVar[Paper] = cite("Caldas2018")

    features: PositiveInt = 100
    classes: Annotated[int, Ge(2)] = 5
    clusters: PositiveInt = 5
    clients: PositiveInt = 10
    examples_per_client: PositiveInt | None = 2000
    noise: NonNegativeFloat = 0.1
    decay: Annotated[float, Ge(-10), Le(10)] = -1.2
    sensitive: bool = False
    seed: NonNegativeInt = 931231

    def load(self, folder: Path | None) -> Dataset:
        """Generate the examples; no file is read."""
        return load_cached(self, [], self._generate)

    def _check_memory(self) -> None:
        """Check that Q and all examples, which are first generated and then cached, fit."""
        examples = self.clients * (self.examples_per_client or _MIN_EXAMPLES)
        if complaint := memory_complaint(_BYTES_PER_VALUE * examples * self.features):
            raise ConfigError(f"data: {examples} examples of {self.features} features {complaint}; lower one of them")
        if complaint := memory_complaint(8 * (self.features + 1) * self.classes * self.clusters):
            raise ConfigError(f"data: features x classes x clusters {complaint}; lower one of them")

    def _generate(self) -> Dataset:
        self._check_memory()
        parts = {}
        for name in ("train", "test"):
            parts[name] = _join_clients([self._draw_examples(client, name) for client in range(self.clients)])
        lowest = min(part.raw.min().item() for part in parts.values())
        highest = max(part.raw.max().item() for part in parts.values())
        columns = numeric_columns(self.features)
        if self.sensitive:
            columns += (Column(name="sensitive", start=self.features, categories=("0", "1")),)
        return Dataset(
            name="leaf-synthetic",
            modality="table",
            num_classes=self.classes,
            source=f"drawn after LEAF (Caldas et al. 2018), App. A, seed {self.seed}",
            licence="none needed",
            value_range=(lowest, highest),
            group_names=tuple(f"client {client}" for client in range(self.clients)),
            columns=columns,
            train=parts["train"],
            test=parts["test"],
        )

    def _draw_examples(self, client: int, part: str) -> tuple[Array, NDArray[np.int64]]:
        """Return features and labels of one client's part."""
        centres, weights, influence = self._draw_model(client)
        count = self._training_count(client)
        if part == "test":
            count = -(-count // 4)
        noise = self._make_rng("x", client, part).normal(size=(count, self.features))
        x = centres + self._feature_stds() * noise
        logits = weights[0] + x @ weights[1:]
        logits += self.noise * self._make_rng("noise", client, part).normal(size=logits.shape)
        if self.sensitive:
            attribute = self._make_rng("sensitive", client, part).integers(2, size=count)
            logits += attribute[:, None] * influence
            x = np.concatenate([x, np.eye(2)[attribute]], axis=1)
        return x, logits.argmax(1)

    def _draw_model(self, client: int) -> tuple[Array, Array, Array]:
        """Return a client's centres v, weights W and the attribute's influence Q' u."""
        client_rng = self._make_rng("client", client)
        cluster = int(client_rng.integers(self.clusters))
        cluster_rng = self._make_rng("cluster", cluster)
        mean = cluster_rng.normal(cluster_rng.normal(), 1, self.clusters)
        side_information = client_rng.normal(mean, _SIDE_INFORMATION_STD)
        centres = client_rng.normal(client_rng.normal(), 1, self.features)
        q = self._make_rng("Q").normal(size=(self.features + 1, self.classes, self.clusters))
        weights = q @ side_information
        q_sensitive = self._make_rng("Q sensitive").normal(size=(self.classes, self.clusters))
        influence = q_sensitive @ side_information
        return centres, weights, influence * np.linalg.norm(self._feature_stds())

    def _feature_stds(self) -> Array:
        """Return the standard deviation of each feature around its centre."""
        return np.arange(1.0, self.features + 1) ** (self.decay / 2)

    def _training_count(self, client: int) -> int:
        if self.examples_per_client is not None:
            return self.examples_per_client
        return min(1000, _MIN_EXAMPLES + int(self._make_rng("size", client).lognormal(3, 2)))

    def _make_rng(self, *key: str | int) -> np.random.Generator:
        return numpy_generator(self.seed, _KEY, *key)


def _join_clients(clients: list[tuple[Array, NDArray[np.int64]]]) -> Examples:
    """Join the features and labels of all clients, each of which is a group."""
    groups = np.repeat(np.arange(len(clients)), [len(labels) for _, labels in clients])
    return Examples(
        raw=torch.from_numpy(np.concatenate([x for x, _ in clients]).astype(np.float32)),
        labels=torch.from_numpy(np.concatenate([labels for _, labels in clients])),
        scale=1.0,
        groups=torch.from_numpy(groups),
    )
