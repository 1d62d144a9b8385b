"""A defense under audit: its hook as the server sees it, on inputs that the auditor chooses.

What differs between two contexts of one audit is the client's secret randomness alone. Global
generators are set alike before each call, because who runs the experiment knows their seed, and so
is what clients draw in common. Noise from them therefore counts as known to the server.
"""

from __future__ import annotations

import random
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedsim.base.errors import ConfigError
from fedsim.base.randomness import generator
from fedsim.interfaces.defense import Defense, Participation
from fedsim.interfaces.defense_calls import apply_on_examples, apply_on_update
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.recording.payloads import Payload
from fedsim.training.canaries import audited_hook

SHAPES = {
    "first.weight": torch.Size([24, 20]),
    "last.weight": torch.Size([10, 24]),
    "last.bias": torch.Size([10]),
}
"""Shapes of the layers whose gradients and updates the auditor makes up."""
SIZE = sum(shape.numel() for shape in SHAPES.values())
LOAD = Participation(num_examples=100, batch_size=10, steps=3, rounds=2, num_classes=10)
"""What the client under audit does."""
FULL_BATCHES = replace(LOAD, batch_size=LOAD.num_examples, steps=1)
"""The same without sampling, where guesses tell most of noise."""
LARGE = 1e6
"""Norm of the largest inputs; a guarantee holds for inputs of any norm."""


@dataclass(frozen=True, kw_only=True)
class AuditedDefense:
    """Defense of one client, called as training calls it, with inputs as flat vectors.

    Attributes:
        defense: as the client uses it.
        clients: number of clients whose messages are summed before the server sees them; 1 where it
            sees each message.
        survivors: how many of them send theirs.
        load: how the client trains.
        seed: of all clients' secret randomness.
    """

    defense: Defense
    clients: int = 1
    survivors: int = 1
    load: Participation = LOAD
    seed: int = 0

    @classmethod
    def from_defense(
        cls, defense: Defense, *, clients: int = 1, survivors: int | None = None, seed: int = 0
    ) -> AuditedDefense:
        """Return the audit's view of a defense."""
        if not audited_hook(defense):
            raise ConfigError(
                f"{type(defense).__name__} promises nothing that an audit could refute: it needs a 'guarantee', and "
                "'on_examples' or 'on_update'; for what it lets through, measure attacks instead"
            )
        survivors = clients if survivors is None else survivors
        if not 1 <= survivors <= clients:
            raise ConfigError(f"--survivors: expected 1 to {clients}, the number of --clients, got {survivors}")
        if clients > 1 and audited_hook(defense) != "on_update":
            raise ConfigError("--clients: gradients of examples are not summed over clients; leave it out")
        return cls(defense=defense.of_client(LOAD), clients=clients, survivors=survivors, seed=seed)

    def with_full_batches(self) -> AuditedDefense:
        """Return the same defense of a client that trains on all examples in each step."""
        return replace(self, load=FULL_BATCHES)

    @property
    def hook(self) -> str:
        """Return the hook to which the promise refers."""
        return audited_hook(self.defense)

    @property
    def mechanism(self) -> Mechanism | None:
        """Return what the defense declares of the audited steps and rounds."""
        return self.defense.mechanism(self.load)

    @property
    def releases(self) -> int:
        """Return how many sums the client sends, or the server gets."""
        return self.load.rounds if self.hook == "on_update" else self.load.steps * self.load.rounds

    @property
    def rate(self) -> float:
        """Return the rate at which training samples examples; 1 where it draws none at random."""
        sampling = self.defense.sampling(self.load.num_examples, self.load.batch_size)
        return 1.0 if sampling is None or self.hook == "on_update" else sampling.rate

    @property
    def divisor(self) -> float:
        """Return the number of examples that sums are divided by."""
        return 1.0 if self.hook == "on_update" else self.rate * self.load.num_examples

    def new_client(self, *key: int | str) -> AuditedClient:
        """Return a client with secret randomness of its own, at the begin of its first round."""
        return AuditedClient(key=(self.seed, *key), steps_per_round=self.load.steps)

    def release(self, rows: Tensor, client: AuditedClient) -> Tensor:
        """Return what the server sees of one step or round, `number`.

        Args:
            rows: `example number`, gradients of a batch; of an update, one row.
            client: whose randomness and memory are used.
        """
        if self.hook == "on_examples":
            return self._release_gradient(rows, client.step())
        total = torch.zeros(SIZE, dtype=torch.float64)
        # The audited client's update is `rows`; the others' are zero, which costs least noise.
        for number in range(self.survivors):
            update = rows.sum(0) if number == 0 else torch.zeros(SIZE)
            total += self._release_update(update, client.round(number, draws_in_common=self.defense.draws_in_common))
        return total

    def _release_gradient(self, rows: Tensor, context: LocalContext) -> Tensor:
        parameters = split_vector(torch.zeros(SIZE))
        gradients = {name: rows[:, part].view(len(rows), *SHAPES[name]) for name, part in _slices().items()}
        _seed_global_generators()
        sent = apply_on_examples(self.defense, gradients, self.divisor, parameters, context)
        return torch.cat([tensor.flatten() for tensor in sent.values()]).double() * self.divisor

    def _release_update(self, update: Tensor, context: LocalContext) -> Tensor:
        state = split_vector(update)
        _seed_global_generators()
        sent = apply_on_update(self.defense, state, context)
        values = sent.values("delta", state) if isinstance(sent, Payload) else sent
        return torch.cat([values[name].flatten() for name in SHAPES]).double()


@dataclass(kw_only=True)
class AuditedClient:
    """Secret randomness and memory of a client over its steps and rounds.

    Attributes:
        key: of its randomness; all else is the same for all clients of an audit.
        steps_per_round: local steps that it makes in each round.
        number: of the current round, from 1 on.
        steps: local steps made in this round.
    """

    key: tuple[int | str, ...]
    steps_per_round: int
    number: int = 1
    steps: int = 0
    _memories: dict[int, MutableMapping[str, Tensor]] = field(default_factory=dict)
    _context: LocalContext | None = None

    def step(self) -> LocalContext:
        """Return the context of the next local step, a new round's after the last step."""
        if self._context is None or self.steps == self.steps_per_round:
            self.number += 0 if self._context is None else 1
            self.steps = 0
            self._context = self._make_context(0, draws_in_common=False)
        self._context.step = self.steps
        self.steps += 1
        return self._context

    def round(self, client: int, *, draws_in_common: bool) -> LocalContext:
        """Return the context of this round's update of one of the clients; the first one begins it."""
        if client == 0:
            self.number += 0 if self._context is None else 1
        self._context = self._make_context(client, draws_in_common=draws_in_common)
        return self._context

    def _make_context(self, client: int, *, draws_in_common: bool) -> LocalContext:
        return LocalContext(
            rng=generator("defense audit", *self.key, client, self.number),
            round=self.number,
            broadcast=split_vector(torch.zeros(SIZE)),
            memory=self._memories.setdefault(client, {}),
            common_key=("defense audit", "common", self.number) if draws_in_common else None,
        )


def _seed_global_generators() -> None:
    """Seed the global generators; an audit puts them back at its end."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.default_generator.manual_seed(0)  # torch.manual_seed takes a millisecond


def split_vector(vector: Tensor) -> dict[str, Tensor]:
    """Return the layers of a flat vector."""
    return {name: vector[part].view(SHAPES[name]).clone() for name, part in _slices().items()}


def _slices() -> dict[str, slice]:
    """Return where each layer is in a flat vector."""
    slices, start = {}, 0
    for name, shape in SHAPES.items():
        slices[name] = slice(start, start + shape.numel())
        start += shape.numel()
    return slices


LAYERS = _slices()
"""Where each layer is in a flat vector."""
