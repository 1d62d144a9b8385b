"""A classification task whose clients differ by design: LEAF's synthetic data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.datasets import Column, Dataset, Examples
from fedsim.datasets.cache import cached
from fedsim.datasets.checks import beyond_memory
from fedsim.datasets.tabular import plain_columns
from fedsim.errors import ConfigError
from fedsim.paper import Paper
from fedsim.randomness import numpy_generator

_SPREAD = 0.1
"""Standard deviation of a client's side information around its cluster's mean."""

_BYTES = 20
"""What a feature takes while clients are joined: in double precision twice, in single precision once."""
_FEWEST = 5
"""Examples that LEAF gives each client at least."""
_KEY = "leaf-synthetic"
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LeafSynthetic:
    """Examples drawn from a random linear model a client: the synthetic task of LEAF (Caldas et al. 2018, App. A).

    With d features, C classes, K clusters and N(m, s) of standard deviation s: Q ~ N(0, 1) of d + 1 by C by K. Cluster
    k has a mean mu_k ~ N(m_k, 1)^K, m_k ~ N(0, 1). Client c belongs to a cluster k, each equally likely, and has side
    information u ~ N(mu_k, 0.1), weights W = Q u, and centres v ~ N(B, 1)^d, B ~ N(0, 1). Examples are x, feature
    i = 1 ... d of variance i^decay around v_i, and y = argmax (1, x) W + N(0, noise).

    The defaults are LMRA's (Driouich et al. 2023, App. C.1), except `classes`, which it does not give (5 is LEAF's
    default). Mind that centres outweigh the rest when features are many: of the ten clients, eight hold examples of
    one class only. With `decay = 2`, as in LMRA's released code, all hold all five.

    Clients are the natural groups. Each also has a quarter of its number of training examples (rounded up) to test
    on. Every client and part is drawn under a key of its own: more clients or more examples leave those there are.

    Args:
        features: d.
        classes: C.
        clusters: K.
        clients: number of clients.
        examples_per_client: training examples of each; None draws LEAF's sizes, min(1000, 5 + floor(lognormal(3, 2))).
        noise: standard deviation of what is added to the logits.
        decay: exponent of the variance of features; LEAF's is -1.2.
        sensitive: add a binary attribute to attack: 0 or 1 with equal chance, independent of all else; 1 adds to the
            logits Q' u, Q' ~ N(0, s) of C by K, s^2 being the sum of the features' variances. So it shifts them as far
            as all features do by one standard deviation. It becomes the column `sensitive`, two further features.
            Ours, for LMRA's "one synthetic binary attribute"; in its released code no label depends on it.
        seed: everything follows from it; LEAF's default.

    References:
        Caldas et al.: LEAF: A Benchmark for Federated Settings, 2018.
    """

    paper: ClassVar[Paper] = Paper(
        title="LEAF: A Benchmark for Federated Settings",
        authors="Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar",
        venue="arXiv",
        year=2018,
        url="https://arxiv.org/abs/1812.01097",
    )

    features: int = 100
    classes: int = 5
    clusters: int = 5
    clients: int = 10
    examples_per_client: int | None = 2000
    noise: float = 0.1
    decay: float = -1.2
    sensitive: bool = False
    seed: int = 931231

    def __post_init__(self) -> None:
        least = {"features": 1, "classes": 2, "clusters": 1, "clients": 1, "examples_per_client": 1, "seed": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"{name}: expected at least {lowest}, got {value}")
        if not 0 <= self.noise < float("inf"):
            raise ConfigError(f"noise: expected a finite number from 0 on, got {self.noise}")
        if not abs(self.decay) <= 10:
            raise ConfigError(f"decay: expected from -10 to 10, got {self.decay}")

    def load(self, folder: Path | None) -> Dataset:
        """See `DatasetPlugin`. Reads no file."""
        return cached(self, [], self._generate)

    def _check_memory(self) -> None:
        """Every client draws weights from the whole of Q, and all examples wait in memory until they are in the cache.

        Raises:
            ConfigError: Q or the examples are more than the memory.
        """
        examples = self.clients * (self.examples_per_client or _FEWEST)
        if complaint := beyond_memory(_BYTES * examples * self.features):
            raise ConfigError(f"data: {examples} examples of {self.features} features {complaint}; lower one of them")
        if complaint := beyond_memory(8 * (self.features + 1) * self.classes * self.clusters):
            raise ConfigError(f"data: features x classes x clusters {complaint}; lower one of them")

    def _generate(self) -> Dataset:
        self._check_memory()
        parts = {name: [self._examples(client, name) for client in range(self.clients)] for name in ("train", "test")}
        about: dict[str, Any] = {name: _joined(shares) for name, shares in parts.items()}
        ends = [end for name in parts for end in (about[name].raw.min().item(), about[name].raw.max().item())]
        columns = plain_columns(self.features)
        if self.sensitive:
            columns += (Column(name="sensitive", start=self.features, categories=("0", "1")),)
        return Dataset(
            name="leaf-synthetic",
            num_classes=self.classes,
            source=f"drawn after LEAF (Caldas et al. 2018), App. A, seed {self.seed}",
            licence="none needed",
            value_range=(min(ends), max(ends)),
            group_names=tuple(f"client {client}" for client in range(self.clients)),
            columns=columns,
            **about,
        )

    def _examples(self, client: int, part: str) -> tuple[Array, NDArray[np.int64]]:
        """Features and labels of `client`."""
        centres, weights, influence = self._model(client)
        count = self._count(client) if part == "train" else -(-self._count(client) // 4)
        x = centres + self._spread() * self._rng("x", client, part).normal(size=(count, self.features))
        logits = weights[0] + x @ weights[1:]
        logits += self.noise * self._rng("noise", client, part).normal(size=logits.shape)
        if self.sensitive:
            attribute = self._rng("sensitive", client, part).integers(2, size=count)
            logits += attribute[:, None] * influence
            x = np.concatenate([x, np.eye(2)[attribute]], axis=1)
        return x, logits.argmax(1)

    def _model(self, client: int) -> tuple[Array, Array, Array]:
        """Centres v, weights W and the influence W' of the sensitive attribute, of `client`."""
        own = self._rng("client", client)
        cluster = int(own.integers(self.clusters))
        of_cluster = self._rng("cluster", cluster)
        mean = of_cluster.normal(of_cluster.normal(), 1, self.clusters)
        side = own.normal(mean, _SPREAD)
        centres = own.normal(own.normal(), 1, self.features)
        weights = self._rng("Q").normal(size=(self.features + 1, self.classes, self.clusters)) @ side
        influence = self._rng("Q sensitive").normal(size=(self.classes, self.clusters)) @ side
        return centres, weights, influence * np.linalg.norm(self._spread())

    def _spread(self) -> Array:
        """Standard deviation of each feature around its centre."""
        return np.arange(1.0, self.features + 1) ** (self.decay / 2)

    def _count(self, client: int) -> int:
        if self.examples_per_client is not None:
            return self.examples_per_client
        return min(1000, _FEWEST + int(self._rng("size", client).lognormal(3, 2)))

    def _rng(self, *key: str | int) -> np.random.Generator:
        return numpy_generator(self.seed, _KEY, *key)


def _joined(shares: list[tuple[Array, NDArray[np.int64]]]) -> Examples:
    groups = np.repeat(np.arange(len(shares)), [len(labels) for _, labels in shares])
    return Examples(
        raw=torch.from_numpy(np.concatenate([x for x, _ in shares]).astype(np.float32)),
        labels=torch.from_numpy(np.concatenate([labels for _, labels in shares])),
        scale=1.0,
        groups=torch.from_numpy(groups),
    )
