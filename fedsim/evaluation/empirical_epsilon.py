"""What is measured of the privacy of a run's clients, beside what is proved of their defenses.

The adversary is the server. It knows the places of all canaries, and not which of them are in.

Where a defense promises something of each example, canaries were among those of the client while it trained. Each has
two scores. One is the number at its place in the sum of what the client sent. With plain SGD this is the sum of the
noisy gradients, to which a canary that is in adds the clip each time that it was sampled. Momentum, Adam and other
defenses of the update blur it: then less is measured, and the bound still holds. The other is how far that number
varies over rounds, by which noise that is the same each time is seen.

Where a defense promises something of the whole update, there is one update a round and so one coin, too few to measure
anything. So after the run the client's own hook is called on canaries in the place of updates, as many times as there
are canaries and for as many rounds as the client took part in. Two updates that are far apart, in one number alone, are
the hardest to make alike; the coin chooses between an update and its negative. Nothing of this is sent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsim.defense import Defense, agrees, remembers, replaced_update
from fedsim.errors import RunError
from fedsim.experiments.build import Experiment
from fedsim.experiments.run_folder import RunFolder, read_rows, spendings
from fedsim.privacy.auditing import Measured, measured
from fedsim.privacy.ledger import Row, delta_of, labels, spent
from fedsim.progress import tracked
from fedsim.randomness import generator
from fedsim.recording.transcript import Transcript
from fedsim.training.canaries import SIZE, Canaries, audited_at, located
from fedsim.training.modes import trained
from fedsim.wire.payloads import Payload, State

log = logging.getLogger(__name__)


COLUMNS = (
    "client", "defense", "rounds", "proved", "delta", "measured", "canaries", "guesses", "right", "confidence",
)  # fmt: skip
_NUMBERS = tuple(name for name in COLUMNS if name != "defense")


@dataclass(frozen=True, kw_only=True)
class Epsilons:
    """Proved and measured epsilon of one defense of one client.

    Attributes:
        client: its id.
        defense: what the ledger calls it.
        rounds: in which the client sent, or may have.
        proved: upper bound, of the ledger; infinite where nothing is proved.
        delta: of both.
        measured: lower bound.
        confidence: with which all lower bounds of the run hold together.
    """

    client: int
    defense: str
    rounds: int
    proved: float
    delta: float
    measured: Measured
    confidence: float

    @property
    def broken(self) -> bool:
        """Whether the defense does not keep its promise."""
        return self.measured.epsilon > self.proved

    @property
    def sentence(self) -> str:
        """What is wrong, where it is broken."""
        return (
            f"client {self.client}: {self.defense} does not keep its promise: epsilon = {self.proved:.4g} is proved, "
            f"but at least {self.measured.epsilon:.4g} was measured ({self.measured.right} of {self.measured.guesses} "
            f"guesses right; in at most {1 - self.confidence:.2g} of runs this happens by chance); look for noise that "
            "is too small or added too early, and for another sampling rate than the proof has"
        )

    @property
    def row(self) -> dict[str, Any]:
        """By `COLUMNS`."""
        own = {name: getattr(self, name) for name in ("client", "defense", "rounds", "proved", "delta", "confidence")}
        of = self.measured
        return own | {"measured": of.epsilon, "canaries": of.canaries, "guesses": of.guesses, "right": of.right}


def written(folder: RunFolder) -> list[Epsilons]:
    """What `empirical-epsilon.csv` says; nothing where there is none.

    Raises:
        RunError: it is damaged.
    """
    return [
        Epsilons(
            client=int(row["client"]),
            defense=row["defense"],
            rounds=int(row["rounds"]),
            proved=float(row["proved"]),
            delta=float(row["delta"]),
            measured=Measured(
                epsilon=float(row["measured"]),
                canaries=int(row["canaries"]),
                guesses=int(row["guesses"]),
                right=int(row["right"]),
            ),
            confidence=float(row["confidence"]),
        )
        for row in read_rows(folder.epsilons, COLUMNS, _NUMBERS)
    ]


def measure(folder: RunFolder, experiment: Experiment) -> None:
    """Measure epsilon of the run in `folder`, whose clients carried canaries, and write down what was found.

    Raises:
        TranscriptError: a round is damaged.
        RunError: the ledger is, a defense failed, or no client with canaries sent anything.
    """
    found = epsilons(experiment, Transcript(folder.path), spendings(folder))
    folder.write_table(folder.epsilons, COLUMNS, [item.row for item in found])
    folder.settle()
    for item in found:
        proved = f"{item.proved:.4g} proved" if math.isfinite(item.proved) else "none proved"
        log.info(
            "privacy: client %d, %s: epsilon of at least %.4g measured, %s",
            item.client, item.defense, item.measured.epsilon, proved,
        )  # fmt: skip


def epsilons(experiment: Experiment, transcript: Transcript, ledger: Sequence[Row]) -> list[Epsilons]:
    """Of each client with canaries that sent something, and each of its defenses that canaries measure.

    Args:
        transcript: of all that was recorded of the run.
        ledger: what clients did and what is proved of that, see `fedsim.privacy.ledger`.

    Raises:
        TranscriptError: a round is damaged.
        RunError: no client with canaries sent anything that is recorded.
    """
    table = experiment.config.canaries
    assert table is not None
    seen = {client for number in transcript.rounds for client in transcript.clients(number)}
    audits, called = [], labels([defense.name for defense in experiment.config.defense])
    for client in experiment.config.carriers:
        if client not in seen:
            log.warning("client %d: nothing that it sent is recorded, so its canaries measure nothing", client)
            continue
        named = zip(called, experiment.defenses_of(client), strict=True)
        audits += [(client, label, defense) for label, defense in named if audited_at(defense)]
    if not audits:
        raise RunError(
            "none of the clients with canaries sent anything that is recorded; name others in canaries.clients, or let "
            "more clients take part"
        )
    each = 1 - (1 - table.confidence) / len(audits)
    return [
        _audited(experiment, transcript, ledger, *audit, confidence=each)
        for audit in tracked(audits, "canaries", len(audits))
    ]


def _audited(
    experiment: Experiment,
    transcript: Transcript,
    ledger: Sequence[Row],
    client: int,
    label: str,
    defense: Defense,
    *,
    confidence: float,
) -> Epsilons:
    """Of one client and defense; `confidence` is that of this bound alone."""
    table = experiment.config.canaries
    assert table is not None
    known = spent(ledger, label).get(client)
    rounds = known.rounds if known else sum(client in transcript.clients(number) for number in transcript.rounds)
    canaries = Canaries(seed=experiment.seed, client=client, count=table.count)
    if audited_at(defense) == "on_examples":
        scores = scores_of_updates(experiment, transcript, canaries)
    else:
        scores = scores_of_shadows(defense, label, canaries, experiment.setting.update, rounds)
    delta = known.delta if known else delta_of(defense)
    return Epsilons(
        client=client,
        defense=label,
        rounds=rounds,
        proved=known.epsilon if known else math.inf,
        delta=delta,
        measured=measured(scores, canaries.inside, delta, confidence),
        confidence=table.confidence,
    )


def scores_of_updates(experiment: Experiment, transcript: Transcript, canaries: Canaries) -> Tensor:
    """`kind canary`, two statistics of the number at its place in w_t - w_T of each recorded round of the client.

    The sum over rounds; and where there are several, how far the number varies from round to round: what a canary that
    is in adds depends on how often it was sampled, and noise that is the same each time does not vary.
    """
    places = canaries.places(trained(experiment.model, experiment.training))
    rounds = []
    for update in transcript.updates(canaries.client):
        slopes = {name: tensor.flatten() for name, tensor in update.pseudo_gradient.items()}
        rounds.append(torch.stack([slopes[name][place] for name, place in places]).double())
    if not rounds:
        return torch.zeros(1, canaries.count, dtype=torch.float64)
    told = torch.stack(rounds)
    return torch.stack([told.sum(0), told.std(0)] if len(rounds) > 1 else [told.sum(0)])


def scores_of_shadows(defense: Defense, label: str, canaries: Canaries, zeros: State, rounds: int) -> Tensor:
    """`canary`, the number in which it differs from its negative, summed over what `on_update` makes of it each round.

    Args:
        label: what the ledger calls the defense.
        zeros: in the form of an update.
        rounds: in which the client sent.
    """
    return torch.tensor([_shadow(defense, label, canaries, zeros, rounds, canary) for canary in range(canaries.count)])


def _shadow(defense: Defense, label: str, canaries: Canaries, zeros: State, rounds: int, canary: int) -> float:
    key = canaries.seed, "canary update", canaries.client, label, canary
    shapes = {name: tensor.shape for name, tensor in zeros.items()}
    numbers = sum(shape.numel() for shape in shapes.values())
    name, place = located(shapes, int(torch.randint(numbers, (), generator=generator(*key, "place"))))
    update = {name: tensor.clone() for name, tensor in zeros.items()}
    update[name].view(-1)[place] = SIZE if canaries.inside[canary] else -SIZE
    memory: dict[str, Tensor] | None = {} if remembers(defense) else None
    total = 0.0
    for number in range(rounds):
        common = generator(*key, "common", number) if agrees(defense) else None
        sent = replaced_update(defense, update, generator(*key, number), memory, common)
        values = sent.values("delta", zeros) if isinstance(sent, Payload) else sent
        total += values[name].flatten()[place].item()
    return total
