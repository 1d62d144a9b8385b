"""What is measured of the privacy of a run's clients, beside what is proved of their defenses.

The adversary is the server. It knows the places of all canaries, and not which of them are in.

Where a defense promises something of each example, canaries were among those of the client while it trained. The score
of each is the number at its place in the sum of what the client sent. With plain SGD this is the sum of the noisy
gradients, to which a canary that is in adds the clip each time that it was sampled. Momentum, Adam and other defenses
of the update blur it: then less is measured, and the bound still holds.

Where a defense promises something of the whole update, there is one update a round and so one coin, too few to measure
anything. So after the run the client's own hook is called on canaries in the place of updates, as many times as there
are canaries and for as many rounds as the client took part in. Two updates that are far apart, in one number alone, are
the hardest to make alike; the coin chooses between an update and its negative. Nothing of this is sent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.defense import Defense, agrees, keyed, remembers, replaced_update
from fedsim.experiments.build import Experiment
from fedsim.privacy.auditing import Measured, measured
from fedsim.progress import tracked
from fedsim.randomness import generator
from fedsim.recording.transcript import Transcript
from fedsim.training.canaries import SIZE, Canaries, audited_at, located
from fedsim.training.modes import trained
from fedsim.wire.payloads import Payload, State

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Epsilons:
    """Proved and measured epsilon of one defense of one client.

    Attributes:
        client: its id.
        defense: class of the defense.
        rounds: in which the client took part.
        proved: upper bound; None where nothing is proved.
        delta: of both.
        measured: lower bound.
        confidence: with which all lower bounds of the run hold together.
    """

    client: int
    defense: str
    rounds: int
    proved: float | None
    delta: float
    measured: Measured
    confidence: float

    @property
    def broken(self) -> bool:
        """Whether the defense does not keep its promise."""
        return self.proved is not None and self.measured.epsilon > self.proved

    @property
    def sentence(self) -> str:
        """What is wrong, where it is broken."""
        return (
            f"client {self.client}: {self.defense} does not keep its promise: epsilon = {self.proved:.4g} is proved, "
            f"but at least {self.measured.epsilon:.4g} was measured ({self.measured.right} of {self.measured.guesses} "
            f"guesses right; by chance in at most {1 - self.confidence:.2g} of runs); look for noise that is too small "
            "or added too early, and for another sampling rate than the proof has"
        )


def epsilons(experiment: Experiment, transcript: Transcript, delta: float) -> list[Epsilons]:
    """Of each client with canaries that sent something, and each of its defenses that canaries measure.

    Args:
        transcript: of all that was recorded of the run.
        delta: at which epsilon is stated.
    """
    table, seen = experiment.config.canaries, _rounds_of(transcript)
    assert table is not None
    audits = []
    for client in experiment.config.carriers:
        if client not in seen:
            log.warning("client %d: nothing that it sent is recorded, so its canaries measure nothing", client)
            continue
        audits += [(client, *named) for named in keyed(experiment.defenses_of(client)) if audited_at(named[0])]
    found, each = [], 1 - (1 - table.confidence) / max(1, len(audits))
    for client, defense, own in tracked(audits, "canaries", len(audits)):
        done = experiment.setting.participation(client, _taken(experiment, seen[client]))
        proved = defense.guarantee(done, delta)
        canaries = Canaries(seed=experiment.seed, client=client, count=table.count)
        if audited_at(defense) == "on_examples":
            scores = scores_of_updates(experiment, transcript, canaries)
        else:
            scores = scores_of_shadows(defense, own, canaries, experiment.setting.update, done.rounds)
        at = delta if proved is None else proved.delta
        found.append(
            Epsilons(
                client=client,
                defense=type(defense).__name__,
                rounds=done.rounds,
                proved=None if proved is None else proved.epsilon,
                delta=at,
                measured=measured(scores, canaries.inside, at, each),
                confidence=table.confidence,
            )
        )
    return found


def scores_of_updates(experiment: Experiment, transcript: Transcript, canaries: Canaries) -> Tensor:
    """`canary`, the number at its place in the sum of w_t - w_T over the recorded rounds of the client."""
    places = canaries.places(trained(experiment.model, experiment.training))
    total = torch.zeros(canaries.count, dtype=torch.float64)
    for update in transcript.updates(canaries.client):
        slopes = {name: tensor.flatten() for name, tensor in update.pseudo_gradient.items()}
        total += torch.stack([slopes[name][place] for name, place in places])
    return total


def scores_of_shadows(
    defense: Defense, own: Sequence[str | int], canaries: Canaries, zeros: State, rounds: int
) -> Tensor:
    """`canary`, the number in which it differs from its negative, summed over what `on_update` makes of it each round.

    Args:
        own: the end of the defense's key.
        zeros: in the form of an update.
        rounds: in which the client took part.
    """
    return torch.tensor([_shadow(defense, own, canaries, zeros, rounds, canary) for canary in range(canaries.count)])


def _shadow(
    defense: Defense, own: Sequence[str | int], canaries: Canaries, zeros: State, rounds: int, canary: int
) -> float:
    key, shapes = (
        (canaries.seed, "canary update", canaries.client, canary, *own),
        {n: t.shape for n, t in zeros.items()},
    )
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


def _rounds_of(transcript: Transcript) -> dict[int, int]:
    """By client, in how many recorded rounds it took part."""
    seen: dict[int, int] = {}
    for number in transcript.rounds:
        for client in transcript.clients(number):
            seen[client] = seen.get(client, 0) + 1
    return seen


def _taken(experiment: Experiment, recorded: int) -> int:
    """In how many rounds a client took part at most, of which so many are recorded."""
    plan = experiment.config.recording
    return recorded if plan.rounds is None and plan.every == 1 else experiment.config.federation.rounds
