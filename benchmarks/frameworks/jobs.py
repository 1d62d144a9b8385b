"""What is trained: the same networks, the same synthetic images and the same steps in every framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

BATCH = 10
LEARNING_RATE = 0.05
CLASSES = 10
SHAPE = (1, 28, 28)
SCALE = 1 / 255
SEED = 0
ACTORS = 2
"""Of Ray."""


@dataclass(frozen=True)
class Job:
    """A network and how many examples a client has; one epoch of batches of `BATCH` is a client's work."""

    build: Callable[[], nn.Module]
    examples: int

    def network(self) -> nn.Module:
        """Build the network with the weights that every framework starts from."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.build()

    def images(self, clients: int) -> tuple[Tensor, Tensor]:
        """Return `client example channel height width` as bytes, and `client example` labels."""
        rng = torch.Generator().manual_seed(SEED)
        labels = torch.randint(CLASSES, (clients, self.examples), generator=rng)
        patterns = torch.randint(128, (CLASSES, *SHAPE), generator=rng, dtype=torch.uint8)
        noise = torch.randint(128, (clients, self.examples, *SHAPE), generator=rng, dtype=torch.uint8)
        return patterns[labels] + noise, labels

    def data(self, clients: int) -> tuple[Tensor, Tensor]:
        """Return the same as floats in [0, 1]."""
        raw, labels = self.images(clients)
        return raw * SCALE, labels

    @torch.no_grad()
    def loss(self, state: Mapping[str, Tensor], clients: int) -> float:
        """Return what `state` has learnt: its loss on what the first 100 clients train on."""
        network = self.network()
        network.load_state_dict(dict(state))
        inputs, labels = self.data(clients)
        return float(cross_entropy(network(inputs[:100].flatten(0, 1)), labels[:100].flatten()))


def _mlp(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def _lenet() -> nn.Module:
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    layers = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES)]
    return nn.Sequential(*convolutions, nn.AvgPool2d(2), nn.Flatten(), *layers)


def _cnn() -> nn.Module:
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    second = [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(3136, 320), nn.ReLU(), nn.Linear(320, CLASSES))


JOBS = {
    "mlp": Job(lambda: _mlp(75), examples=BATCH),  # 59 635 parameters, 1 step
    "mlp-10": Job(lambda: _mlp(75), examples=10 * BATCH),  # 10 steps
    "broad": Job(lambda: _mlp(500), examples=BATCH),  # 397 510 parameters, 1 step
    "wide": Job(lambda: _mlp(1260), examples=BATCH),  # 1 001 710 parameters, 1 step
    "wider": Job(lambda: _mlp(12600), examples=BATCH),  # 10 017 010 parameters, 1 step
    "lenet": Job(_lenet, examples=10 * BATCH),  # 61 706 parameters, 10 steps
    "cnn": Job(_cnn, examples=10 * BATCH),  # 1 025 866 parameters, 10 steps
}


@dataclass(frozen=True)
class Task:
    """One federation.

    Attributes:
        job: a name in `JOBS`.
        clients: how many there are.
        rounds: how many are run.
        warm_up: how many of them are not measured.
        sampled: clients that train in each round, all where it is 0; only fedsim is asked for fewer.
        engine: of fedsim.
        record: fedsim's curious server records every round, instead of the first alone.
        loop: fedsim's clients train one after the other, small networks too.
        skewed: fedsim's clients have a Dirichlet share of the data (alpha 1), some more and some less.
    """

    job: str
    clients: int
    rounds: int
    warm_up: int = 2
    sampled: int = 0
    engine: str = "serial"
    record: bool = False
    loop: bool = False
    skewed: bool = False

    @property
    def trained(self) -> int:
        """Return how many clients train in each round."""
        return self.sampled or self.clients

    @property
    def work(self) -> Job:
        """Return the network and the data."""
        return JOBS[self.job]
