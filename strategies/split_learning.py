"""Split learning of a table whose columns are held by several parties [Li2022]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.base.errors import ConfigError, DataError, RunError, join_first
from fedsim.base.randomness import generator
from fedsim.recording.split_steps import BOTTOM, ROWS

_MAX_IDS = 3
"""Most ids of rows that a sentence names."""


class SumHead(nn.Module):
    """Head without weights: logits are the sum of the embeddings, which have as many units as there are classes.

    Args:
        parties: number of feature parties.
    """

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.parties = parties

    def forward(self, embeddings: Tensor) -> Tensor:
        """Return `row class` logits of `row party*class` embeddings."""
        return embeddings.reshape(len(embeddings), self.parties, -1).sum(1)


class SplitLearning(Strategy):
    """Train a head on embeddings of feature parties; a round is one step on one mini-batch of rows.

    The server is the label party. It sends each feature party the ids of the rows of a step
    together with the gradients of its last embeddings, and in the first round the weights of its
    bottom model. `clients.feature_party` plays the other side. Before the first round, it asks all
    parties which rows they hold, and refuses to train where these are not the rows with labels.

    Steps take rows without replacement until fewer than `batch_size` are left, which this pass leaves
    out, in an order that is keyed by the seed, and then in another order again. Loss and accuracy of
    a step are of its rows before it is taken.

    Args:
        bottoms: bottom model of each feature party, in the order of `partition-id`.
        head: computes logits from the joined embeddings of all parties; it is trained in place, in
            evaluation mode, as bottom models are.
        labels: label by the id of its row; class indices.
        batch_size: rows of a step.
        learning_rate: step size of the head's SGD.
        gradient_noise: standard deviation of the noise on gradients of embeddings, so that the
            expected norm of a row's noise is this many times the largest norm of a row's gradient
            in the step.
        seed: of rows and noise.

    References:
        [Li2022], Sect. 3; noise of its `iso`. Differs: there is one party with features beside
        the label party; here any number, and the label party has no features.
    """

    def __init__(
        self,
        *,
        bottoms: Sequence[nn.Module],
        head: nn.Module,
        labels: Mapping[int, int],
        batch_size: int,
        learning_rate: float,
        gradient_noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("learning_rate", learning_rate, 0.0)):
            if not least <= value < math.inf:
                raise ConfigError(f"{name}: expected a finite value of at least {least}, got {value}")
        if not 0 <= gradient_noise < math.inf:
            raise ConfigError(f"gradient_noise: expected a finite value of at least 0, got {gradient_noise}")
        if batch_size > len(labels):
            raise ConfigError(f"batch_size: {batch_size} rows of {len(labels)} with labels; take fewer")
        if texts := [row for row in labels if not isinstance(row, Integral)]:
            raise ConfigError(f"labels: {texts[0]!r} is no whole number; number the rows, alike in all parties' tables")
        self.bottoms, self.head, self.labels = list(bottoms), head.eval(), dict(labels)
        self.batch_size, self.learning_rate = batch_size, learning_rate
        self.gradient_noise, self.seed = gradient_noise, seed
        self._party_of_node: dict[int, int] = {}
        self._gradients: list[Tensor] = []
        self._rows = np.zeros(0, np.int64)

    def summary(self) -> None:
        """Log nothing: the settings are in the program that made them."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return for each party the rows of this step and the gradients of the last one.

        Raises:
            DataError: parties hold other rows than those with labels.
            RunError: there are other parties than bottom models.
        """
        if server_round == 1:
            self._party_of_node = self._align_parties(grid)
        self._rows = self._choose_rows(server_round)
        config["server-round"] = server_round
        messages = []
        for node, party in self._party_of_node.items():
            content = {ROWS: Array(self._rows)}
            if server_round == 1:
                for name, tensor in self.bottoms[party].state_dict().items():
                    content[f"{BOTTOM}{name}"] = Array(tensor.numpy())
            else:
                content["gradient"] = Array(self._gradients[party].numpy())
            record = RecordDict({"arrays": ArrayRecord(content), "config": config})
            messages.append(Message(record, dst_node_id=node, message_type="train"))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take one step of the head, and keep the gradients of all embeddings for the next round.

        Raises:
            RunError: a party failed, or answered for other rows.
        """
        embeddings = self._read_embeddings(server_round, replies)
        joined = torch.cat(embeddings, 1).requires_grad_()
        labels = torch.tensor([self.labels[row] for row in self._rows.tolist()])
        logits = self.head(joined)
        loss = cross_entropy(logits, labels)
        weights = list(self.head.parameters())
        gradient, *weight_gradients = torch.autograd.grad(loss, [joined, *weights])
        with torch.no_grad():
            for weight, weight_gradient in zip(weights, weight_gradients, strict=True):
                weight.sub_(self.learning_rate * weight_gradient)
        parts = torch.split(gradient, [part.shape[1] for part in embeddings], 1)
        self._gradients = [self._add_noise(part, server_round, party) for party, part in enumerate(parts)]
        accuracy = float((logits.argmax(1) == labels).float().mean())
        return ArrayRecord(self.head.state_dict()), MetricRecord({"loss": float(loss.detach()), "accuracy": accuracy})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask for nothing: steps are evaluated before they are taken."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing."""
        return None

    def _align_parties(self, grid: Grid) -> dict[int, int]:
        """Return the party that each node plays, after checking that all hold the rows with labels."""
        nodes = list(grid.get_node_ids())
        messages = [Message(RecordDict(), dst_node_id=node, message_type="query.rows") for node in nodes]
        parties = {}
        for reply in grid.send_and_receive(messages):
            if reply.has_error():
                raise RunError(
                    f"node {reply.metadata.src_node_id}: did not say which rows it holds ({reply.error.reason})"
                )
            party = int(reply.content["metrics"]["partition-id"])  # type: ignore[arg-type]
            self._check_rows(party, reply.content["arrays"][ROWS].numpy())  # type: ignore[union-attr]
            parties[reply.metadata.src_node_id] = party
        if sorted(parties.values()) != list(range(len(self.bottoms))):
            raise RunError(
                f"parties {sorted(parties.values())} answered, and there are {len(self.bottoms)} bottom models; give "
                "one for each party, in the order of partition-id"
            )
        return dict(sorted(parties.items(), key=lambda item: item[1]))

    def _check_rows(self, party: int, rows: np.ndarray) -> None:
        ids, counts = np.unique(rows, return_counts=True)
        held, with_label = set(ids.tolist()), set(self.labels)
        faults = (
            ("holds rows twice", ids[counts > 1].tolist()),
            ("lacks rows that have labels", sorted(with_label - held)),
            ("holds rows that have no label", sorted(held - with_label)),
        )
        for fault, found in faults:
            if found:
                raise DataError(
                    f"party {party}: {fault}: {join_first(found, _MAX_IDS)}; align the parties' tables by id, so that "
                    "all hold the same rows"
                )

    def _choose_rows(self, server_round: int) -> np.ndarray:
        """Return the ids of the rows of a step."""
        ids = sorted(self.labels)
        steps = len(ids) // self.batch_size
        epoch, step = divmod(server_round - 1, steps)
        order = torch.randperm(len(ids), generator=generator(self.seed, "split learning", "rows", epoch))
        chosen = order[step * self.batch_size : (step + 1) * self.batch_size]
        return np.array([ids[index] for index in chosen.tolist()], np.int64)

    def _read_embeddings(self, server_round: int, replies: Iterable[Message]) -> list[Tensor]:
        """Return the embeddings of each party, in the order of parties."""
        by_party: dict[int, Tensor] = {}
        for reply in replies:
            party = self._party_of_node[reply.metadata.src_node_id]
            if reply.has_error():
                raise RunError(
                    f"round {server_round}: party {party} failed ({reply.error.reason}); a step takes all parties"
                )
            arrays = reply.content["arrays"]
            if not np.array_equal(arrays[ROWS].numpy(), self._rows):  # type: ignore[union-attr]
                raise RunError(
                    f"round {server_round}: party {party} answered for other rows, or in another order, than it was "
                    "asked; its embeddings would be joined with other people's"
                )
            by_party[party] = torch.from_numpy(arrays["embedding"].numpy().copy())  # type: ignore[union-attr]
        if len(by_party) != len(self.bottoms):
            raise RunError(f"round {server_round}: {len(by_party)} of {len(self.bottoms)} parties answered")
        return [by_party[party] for party in sorted(by_party)]

    def _add_noise(self, gradient: Tensor, server_round: int, party: int) -> Tensor:
        scale = self.gradient_noise * float(gradient.norm(dim=1).max()) / math.sqrt(gradient.shape[1])
        rng = generator(self.seed, "split learning", "gradient noise", server_round, party)
        return gradient + scale * torch.randn(gradient.shape, generator=rng)
