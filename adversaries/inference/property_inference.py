"""Property inference: do many of the examples behind a client's message have a property that the task does not need?"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_max_pool1d

from adversaries.local_updates import rounds_of
from adversaries.scene import STEPPING
from adversaries.simulated import SimulatedClients
from fedsim.attacks import CLIENT, Attack, Knowledge, Paper, Progress, PropertyRecords, single_update
from fedsim.errors import AttackError, ConfigError
from fedsim.findings import Finding, PropertyPresence, client_ids
from fedsim.recording.transcript import Transcript
from fedsim.wire.messages import Update

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

log = logging.getLogger("fedsim." + __name__)

_WIDTH = 20_000
"""Numbers of an update that the classifier is shown; longer ones are pooled."""
_LEAF = 5
_LEAST = {"simulated": 2 * _LEAF, "trees": 50}
"""With fewer trees some simulated client would be in all samples, and nobody could be asked about it."""


@dataclass(frozen=True, kw_only=True)
class PropertyInference(Attack):
    """Claim how likely many of the examples behind each message have a property, by a classifier of simulated clients.

    In each round, from the model that the server sent, the victim's training is simulated many times on as many
    auxiliary records as it has examples. Half of the simulated clients hold the property in a share `present`, half in
    a share `absent`. A random forest learns to tell their updates apart (absolute values over their length,
    standardised), and is shown the update of the victim and those of all others in the round, so that clients can be
    compared. What else it knows of the clients is that they train alike: one with another number of examples than the
    victim is read as if it had as many.

    Args:
        present: share of records with the property among those of a simulated client that has it.
        absent: likewise of one that has not.
        same_classes: draw records of both kinds from each class alike, so that the classifier learns the property,
            and not the classes that go along with it. Of a regression there are none.
        simulated: clients of either kind a round.
        trees: of the random forest, each with leaves of at least five simulated clients.

    References:
        Melis et al.: Exploiting Unintended Feature Leakage in Collaborative Learning, IEEE S&P 2019, passive property
        inference; details as in the released code. Differs: the server attacks, who sees each client's update, where
        the paper's adversary is a client; a classifier for each round instead of one for all; classes are drawn alike,
        since properties of tables go along with them; an update of more than 20 000 numbers is pooled by the largest
        of neighbours.
    """

    present: float = 0.5
    absent: float = 0.0
    same_classes: bool = True
    simulated: int = 100
    trees: int = 100

    paper: ClassVar[Paper] = Paper(
        title="Exploiting Unintended Feature Leakage in Collaborative Learning",
        authors="Melis, Song, De Cristofaro, Shmatikov",
        venue="IEEE S&P",
        year=2019,
        url="https://arxiv.org/abs/1805.04049",
    )
    needs: ClassVar[frozenset[str]] = frozenset(
        {"model", "loss", "property_records", "learning_rate", "local_epochs", "batch_size"}
    )
    uses: ClassVar[frozenset[str]] = STEPPING | {"defenses", "num_classes", "value_range"}
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    temporal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.absent < self.present <= 1:
            raise ConfigError(
                f"absent: expected shares with 0 <= absent < present <= 1, got {self.absent} and {self.present}"
            )
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name}: expected at least {least}, got {getattr(self, name)}")

    def _run(
        self, transcript: Transcript, knowledge: Knowledge, victim: int, rng: torch.Generator, progress: Progress
    ) -> Finding:
        assert knowledge.property_records is not None
        rounds, found = rounds_of(transcript, victim), list[tuple[int, int, float]]()
        clients, batches = SimulatedClients(knowledge), _Batches(knowledge.property_records, same=self.same_classes)
        for done, number in enumerate(rounds, start=1):
            only = transcript.only([number])
            seed = int(torch.randint(1 << 32, (), generator=rng))
            classifier, error = self._taught(clients, batches, single_update(only, victim), seed)
            seen = self._seen(clients, only, victim)
            likely = classifier.predict_proba(np.stack(list(seen.values())))[:, 1]
            found += [(client, number, float(score)) for client, score in zip(seen, likely, strict=True)]
            progress(done, len(rounds), {"objective": error})
        senders, numbers, scores = zip(*found, strict=True)
        return PropertyPresence(
            clients=client_ids(senders),
            rounds=torch.tensor(numbers),
            scores=torch.tensor(scores),
            shares=torch.tensor([self.absent, self.present]),
        )

    def _seen(self, clients: SimulatedClients, only: Transcript, victim: int) -> dict[int, NDArray[np.float32]]:
        """What the clients of a round sent; others than the victim whose message says nothing are left out."""
        found = {}
        for client in only.clients(only.rounds[0]):
            try:
                found[client] = _features(clients.read(single_update(only, client)))
            except AttackError as broken:
                if client == victim:
                    raise
                log.warning("%s on client %d: leaves another out: %s", self.called, victim, broken)
        return found

    def _taught(
        self, clients: SimulatedClients, batches: _Batches, update: Update, seed: int
    ) -> tuple[Pipeline, float]:
        """A classifier of updates, and the share of simulated clients that it takes for the other kind, out of bag."""
        from sklearn.ensemble import RandomForestClassifier  # takes seconds
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        where, made = f"round {update.round}, client {update.client}", []
        count = update.num_examples
        if round(self.absent * count) == round(self.present * count):
            raise AttackError(
                f"{where}: N is {count}, of which {self.absent:g} and {self.present:g} are as many examples; choose "
                "shares that are further apart, or attack a client that holds more"
            )
        kinds = np.repeat([False, True], self.simulated)
        for place, kind in enumerate(kinds):
            share = self.present if kind else self.absent
            inputs, labels = batches.drawn(count, share, (seed, place), where)
            made.append(_features(clients.send(update, inputs, labels, ("property", seed, place))))
        forest = RandomForestClassifier(self.trees, min_samples_leaf=_LEAF, random_state=seed, oob_score=True)
        return make_pipeline(StandardScaler(), forest).fit(np.stack(made), kinds), 1 - float(forest.oob_score_)


class _Batches:
    """Auxiliary records, drawn with and without the property.

    Args:
        same: whether the property is to tell nothing of the class.

    Raises:
        AttackError: some record has no label, or nobody says whether it has the property, or all have it, or none.
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
        alike = same and not records.labels.is_floating_point()
        self._classes = (records.labels if alike else torch.zeros(len(has), dtype=torch.long)).numpy()
        self._places = {
            (label, kind): np.flatnonzero((self._classes == label) & (has.numpy() == kind))
            for label in np.unique(self._classes).tolist()
            for kind in (False, True)
        }

    def drawn(self, count: int, share: float, key: tuple[int, int], where: str) -> tuple[Tensor, Tensor]:
        """`count` of them, inputs and labels, `share` with the property, no record twice."""
        rng, having, known = np.random.default_rng(key), round(share * count), len(self._classes)
        if count > known:
            raise AttackError(
                f"{where}: N is {count}, and there are {known} auxiliary records; raise adversary.auxiliary, or attack "
                "a client that holds fewer"
            )
        classes, has = self._classes[rng.permutation(known)[:count]], rng.permutation(count) < having
        chosen = []
        for (label, kind), places in self._places.items():
            wanted = int(((classes == label) & (has == kind)).sum())
            if wanted > len(places):
                raise AttackError(
                    f"{where}: a client as large as the victim takes {wanted} auxiliary records of class {label} "
                    f"{'with' if kind else 'without'} the property, and there are {len(places)}; raise "
                    "adversary.auxiliary, choose other shares, or set same_classes = false"
                )
            chosen.append(rng.choice(places, wanted, replace=False))
        index = torch.from_numpy(rng.permutation(np.concatenate(chosen)))
        return self._records.inputs[index], self._records.labels[index]


def _features(moved: Tensor) -> NDArray[np.float32]:
    """Absolute values over their length, at most `_WIDTH` of them."""
    size = moved.detach().abs()
    if len(size) > _WIDTH:
        size = adaptive_max_pool1d(size[None], _WIDTH)[0]
    scaled: NDArray[np.float32] = (size / size.norm().clamp_min(torch.finfo(size.dtype).tiny)).cpu().numpy()
    return scaled
