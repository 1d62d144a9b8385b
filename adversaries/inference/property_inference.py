"""Property inference: whether many of a client's examples have a property unrelated to the task."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_max_pool1d

from adversaries.simulated import SimulatedClients
from fedsim.base.constraints import PositiveShare, ShareBelowOne
from fedsim.base.errors import AttackError, ConfigError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import (
    ALL,
    CLIENT,
    Attack,
    Knowledge,
    Paper,
    Progress,
    PropertyRecords,
    RoundsNeeded,
    Target,
    warn,
)
from fedsim.interfaces.findings import PropertyPresence, client_ids
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.recording.wire_format import Update

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline


_MAX_FEATURES = 20_000
"""Features that the classifier takes; longer updates are pooled to this length."""
_MIN_LEAF_SIZE = 5
_MIN_TREES = 50
"""With fewer trees a simulated client may be in every bootstrap sample, out of bag of no tree."""


@dataclass(frozen=True, kw_only=True)
class PropertyInference(Attack):
    """Claim how likely each message's training data have a property, by a classifier of updates.

    In each round:

    1. Simulate the victim's training many times from the model that the server sent, on as many
       auxiliary records as it has examples. Half of the simulated clients have the property in a
       share `present` of their records, half in a share `absent` (`_Batches.draw`).
    2. Train a random forest to tell their updates apart (`_train_classifier`), from absolute values
       divided by their norm and standardised (`_update_features`).
    3. Classify the updates of the victim and of all other clients of the round, so that clients can
       be compared (`_client_features`).

    All clients are assumed to train alike: an update of a client with another number of examples
    than the victim is classified as if it had as many.

    Args:
        present: share of records with the property in a simulated client that has the property.
        absent: the same share in a simulated client that does not have it.
        same_classes: draw records with and without the property from the same classes, so that the
            classifier learns the property and not a correlated class. No effect in a regression.
        simulated: clients simulated a round, of either kind.
        trees: of the random forest, each with leaves of at least five simulated clients.

    References:
        [Melis2019], passive property inference; details as in the released code. Differs: the
        server attacks, who sees each client's update, where the paper's adversary is a client; a
        classifier for each round instead of one for all; classes are balanced, since properties of
        tables correlate with them; an update of more than 20 000 numbers is max-pooled.
    """

    present: PositiveShare = 0.5
    absent: ShareBelowOne = 0.0
    same_classes: bool = True
    simulated: Annotated[int, Ge(2 * _MIN_LEAF_SIZE)] = 100
    trees: Annotated[int, Ge(_MIN_TREES)] = 100

    paper: ClassVar[Paper] = cite("Melis2019")
    needs: ClassVar[frozenset[str]] = frozenset(
        {"model", "loss", "property_records", "learning_rate", "local_epochs", "batch_size"}
    )
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS | {"defenses", "num_classes", "value_range"}
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.absent >= self.present:
            raise ConfigError(f"absent: expected a smaller share than present = {self.present}, got {self.absent}")

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse records that do not all say whether they have the property, and training that is not simulated."""
        assert knowledge.property_records is not None
        SimulatedClients(knowledge)
        _Batches(knowledge.property_records, same=self.same_classes)

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that are not simulated."""
        SimulatedClients(knowledge).check_message(update)

    def _run(self, target: Target, progress: Progress) -> PropertyPresence:
        property_records = target.knowledge.property_records
        assert property_records is not None
        rounds = target.participation_rounds()
        clients = SimulatedClients(target.knowledge)
        batches = _Batches(property_records, same=self.same_classes)
        claims: list[tuple[int, int, float]] = []
        for rounds_so_far, number in enumerate(rounds, start=1):
            seed = int(torch.randint(1 << 32, (), generator=target.rng))
            update = target.read_update(number)
            classifier, error = self._train_classifier(clients, batches, update, seed)
            features = self._client_features(clients, target, number)
            probabilities = classifier.predict_proba(np.stack(list(features.values())))[:, 1]
            for client, probability in zip(features, probabilities, strict=True):
                claims.append((client, number, float(probability)))
            progress(rounds_so_far, len(rounds), {"objective": error})
        senders, numbers, scores = zip(*claims, strict=True)
        return PropertyPresence(
            clients=client_ids(senders),
            rounds=torch.tensor(numbers),
            scores=torch.tensor(scores),
            shares=torch.tensor([self.absent, self.present]),
        )

    def _client_features(
        self, clients: SimulatedClients, target: Target, number: int
    ) -> dict[int, NDArray[np.float32]]:
        """Return the features of a round's updates, without other clients' unreadable ones."""
        features = {}
        for client in target.transcript.clients(number):
            try:
                update = replace(target, victim=client).read_update(number)
                features[client] = _update_features(clients.flatten_update(update))
            except AttackError as error:
                if client == target.victim:
                    raise
                warn(f"{self.title} on client {target.victim}: leaves another out: {error}")
        return features

    def _train_classifier(
        self, clients: SimulatedClients, batches: _Batches, update: Update, seed: int
    ) -> tuple[Pipeline, float]:
        """Train a classifier of simulated updates; return it and its out-of-bag error."""
        from sklearn.ensemble import RandomForestClassifier  # takes seconds
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        where, count = update.name, update.num_examples
        if round(self.absent * count) == round(self.present * count):
            raise AttackError(
                f"{where}: N is {count}, and the shares {self.absent:g} and {self.present:g} of it are the same "
                "number of examples; choose shares that are further apart, or attack a client that holds more"
            )

        # Simulate clients without and with the property.
        has_property = np.repeat([False, True], self.simulated)
        features = []
        for index, has in enumerate(has_property):
            share = self.present if has else self.absent
            inputs, labels = batches.draw(count, share, (seed, index), where)
            simulated_update = clients.simulate_update(update, inputs, labels, ("property", seed, index))
            features.append(_update_features(simulated_update))

        forest = RandomForestClassifier(self.trees, min_samples_leaf=_MIN_LEAF_SIZE, random_state=seed, oob_score=True)
        classifier = make_pipeline(StandardScaler(), forest).fit(np.stack(features), has_property)
        return classifier, 1 - float(forest.oob_score_)


class _Batches:
    """Auxiliary records, from which batches with a given share of the property are drawn.

    Args:
        same: draw records with and without the property from the same classes.

    Raises:
        AttackError: a record lacks a label or a property value, or all records have the same one.
    """

    def __init__(self, records: PropertyRecords, *, same: bool) -> None:
        self._records, has = records, records.has.bool()
        if not len(records.inputs) == len(records.labels) == len(has):
            raise AttackError(
                f"of {len(records.inputs)} auxiliary records {len(records.labels)} have labels and {len(has)} say "
                "whether they have the property, expected all of them"
            )
        if has.all() or not has.any():
            raise AttackError(
                f"{'each' if has.all() else 'none'} of the {len(has)} auxiliary records has the property; grant "
                "records with it and records without it"
            )
        by_class = same and not records.labels.is_floating_point()
        self._classes = (records.labels if by_class else torch.zeros(len(has), dtype=torch.long)).numpy()

        # Group the indices of records by class and property.
        self._groups: dict[tuple[int, bool], NDArray[np.intp]] = {}
        for label in np.unique(self._classes).tolist():
            for value in (False, True):
                in_group = (self._classes == label) & (has.numpy() == value)
                self._groups[label, value] = np.flatnonzero(in_group)

    def draw(self, count: int, share: float, key: tuple[int, int], where: str) -> tuple[Tensor, Tensor]:
        """Draw inputs and labels of `count` records, `share` with the property, no record twice."""
        rng, num_having, num_records = np.random.default_rng(key), round(share * count), len(self._classes)
        if count > num_records:
            raise AttackError(
                f"{where}: N is {count}, and there are {num_records} auxiliary records; raise adversary.auxiliary, or "
                "attack a client that holds fewer"
            )

        # Draw class and property independently of each other.
        classes = self._classes[rng.permutation(num_records)[:count]]
        has = rng.permutation(count) < num_having

        # Draw records of each class and property.
        drawn = []
        for (label, value), group in self._groups.items():
            group_count = int(((classes == label) & (has == value)).sum())
            if group_count > len(group):
                raise AttackError(
                    f"{where}: a client as large as the victim takes {group_count} auxiliary records of class {label} "
                    f"{'with' if value else 'without'} the property, and there are {len(group)}; raise "
                    "adversary.auxiliary, choose other shares, or set same_classes = false"
                )
            drawn.append(rng.choice(group, group_count, replace=False))
        indices = torch.from_numpy(rng.permutation(np.concatenate(drawn)))
        return self._records.inputs[indices], self._records.labels[indices]


def _update_features(update: Tensor) -> NDArray[np.float32]:
    """Return absolute values divided by their norm, pooled to at most `_MAX_FEATURES`."""
    magnitudes = update.detach().abs()
    if len(magnitudes) > _MAX_FEATURES:
        magnitudes = adaptive_max_pool1d(magnitudes[None], _MAX_FEATURES)[0]
    norm = magnitudes.norm().clamp_min(torch.finfo(magnitudes.dtype).tiny)
    features: NDArray[np.float32] = (magnitudes / norm).cpu().numpy()
    return features
