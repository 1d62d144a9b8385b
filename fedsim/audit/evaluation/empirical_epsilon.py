"""Measure lower bounds of epsilon with canaries, beside the upper bounds that are proved.

The adversary is the server. It knows the positions of all canaries, and not which of them are in.

Where a defense promises something of each example, canaries were among the client's examples while
it trained. Each has two scores. One is the number at its position in the sum of the client's
updates. With plain SGD this is the sum of the noisy gradients, to which a canary that is in adds
the clipping bound each time that it is sampled. Momentum, Adam and other defenses of the update
blur it: then less is measured, and the bound still holds. The other score is how far that number
varies over rounds, which reveals noise that is the same each time.

Where a defense promises something of the whole update, there is one update a round and so one coin
toss, too few to measure anything. So after the run the client's own hook is called on canaries in
place of updates, as many times as there are canaries and for as many rounds as the client took part
in. Two updates that are far apart, in only one number, are the hardest to make indistinguishable; a
coin chooses between an update and its negative, or none where the defense declares that an update is
added or left out. These updates are never sent.

Where the server promises something of whole clients (`[central_privacy]`), each canary was a client
of its own in every round in which it was asked, and the adversary sees the models alone. It combines
the moves of all rounds as `fedsim.privacy.server_canaries` says.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedsim.audit.observers import read_final_model
from fedsim.base.errors import RunError, format_percent
from fedsim.base.progress import track
from fedsim.base.randomness import generator
from fedsim.federation.experiment import Experiment
from fedsim.federation.run_folder import RunFolder, read_ledger, read_rows
from fedsim.interfaces.defense import Defense
from fedsim.interfaces.defense_calls import apply_on_update
from fedsim.interfaces.local_context import LocalContext
from fedsim.interfaces.mechanism import Mechanism
from fedsim.privacy.canary_bounds import EpsilonBound, best_lower_bound
from fedsim.privacy.canary_scores import score_rounds
from fedsim.privacy.ledger import (
    Row,
    collect_by_round,
    collect_mechanisms,
    guarantee_delta,
    spending_by_client,
    unique_labels,
)
from fedsim.privacy.server_canaries import score_server_canaries
from fedsim.recording.payloads import Payload, State
from fedsim.recording.transcript import Transcript
from fedsim.training.canaries import CANARY_VALUE, Canaries, audited_hook, locate_coordinate
from fedsim.training.modes import trained_shapes

if TYPE_CHECKING:
    from fedsim.federation.open_run import OpenRun

log = logging.getLogger(__name__)

COLUMNS = (
    "client", "defense", "rounds", "proved", "delta", "measured", "uses_curve", "canaries", "guesses", "right",
    "confidence",
)  # fmt: skip
"""Columns of `empirical-epsilon.csv`."""
_COUNT_COLUMNS = ("rounds", "canaries", "guesses", "right")
_NUMBER_COLUMNS = tuple(name for name in COLUMNS if name not in ("defense", *_COUNT_COLUMNS))


@dataclass(frozen=True, kw_only=True)
class EpsilonComparison:
    """Proved and measured epsilon of one defense of one client.

    Attributes:
        client: its id; None where each canary is a separate client.
        rounds: number of rounds in which the client sent, or may have sent.
        proved: upper bound from the ledger; infinite where nothing is proved.
        confidence: that all lower bounds of the run hold at once.
    """

    client: int | None
    defense: str
    rounds: int
    proved: float
    delta: float
    measured: EpsilonBound
    confidence: float

    @property
    def is_broken(self) -> bool:
        """Return whether the measured lower bound exceeds the proved upper bound."""
        return self.measured.epsilon > self.proved

    @property
    def subject(self) -> str:
        """Return in words whose epsilon it is."""
        return "each client" if self.client is None else f"client {self.client}"

    @property
    def sentence(self) -> str:
        """Return the sentence that says what is wrong where the defense is broken."""
        return (
            f"{self.subject}: {self.defense} does not keep its promise: epsilon = {self.proved:.4g} is proved, "
            f"but at least {self.measured.epsilon:.4g} was measured (right guesses: {self.measured.evidence}; this "
            f"happens by chance in at most {1 - self.confidence:.2g} of runs); look for noise that is too small or "
            "added too early, and for another sampling rate than the proof has"
        )

    @property
    def conclusion(self) -> str:
        """Return what the canaries have shown, in a sentence that holds of broken programs as well."""
        proved = f"of {self.proved:.4g} proved" if math.isfinite(self.proved) else "where nothing is proved"
        return (
            f"{self.subject}, {self.defense}: {self.measured.canaries} canaries refute every epsilon below "
            f"{self.measured.epsilon:.4g}, {proved}, with a confidence of {format_percent(self.confidence, 'g')}; "
            "what they cannot see, such as noise that is known, or a defect in other clients, rounds and gradients, is "
            "not judged"
        )

    @property
    def row(self) -> dict[str, Any]:
        """Return the row of the table, by `COLUMNS`."""
        names = ("defense", "rounds", "proved", "delta", "confidence")
        return {name: getattr(self, name) for name in names} | {
            "client": "" if self.client is None else self.client,
            "measured": self.measured.epsilon,
            "uses_curve": int(self.measured.uses_curve),
            "canaries": self.measured.canaries,
            "guesses": self.measured.guesses,
            "right": self.measured.correct,
        }


def read_epsilons(folder: RunFolder) -> list[EpsilonComparison]:
    """Read `empirical-epsilon.csv`; empty where there is none."""
    rows = read_rows(folder.epsilons, COLUMNS, _NUMBER_COLUMNS, _COUNT_COLUMNS)
    try:  # read_rows lets numbers be missing, and takes 1.5 for one
        return [_parse_comparison(row) for row in rows]
    except ValueError as error:
        raise RunError(f"{folder.epsilons}: cannot be read ({error}); remove it, and attack the run again") from error


def _parse_comparison(row: Mapping[str, str]) -> EpsilonComparison:
    """Return the comparison in a row; ValueError where a number is none."""
    return EpsilonComparison(
        client=int(row["client"]) if row["client"] else None,
        defense=row["defense"],
        rounds=int(row["rounds"]),
        proved=float(row["proved"]),
        delta=float(row["delta"]),
        measured=EpsilonBound(
            epsilon=float(row["measured"]),
            canaries=int(row["canaries"]),
            guesses=int(row["guesses"]),
            correct=int(row["right"]),
            uses_curve=row["uses_curve"] == "1",
        ),
        confidence=float(row["confidence"]),
    )


def measure_epsilon(folder: OpenRun, experiment: Experiment) -> None:
    """Measure epsilon of the run in `folder`, whose clients carried canaries, and save the results."""
    if experiment.central_privacy is not None:
        comparisons = [_audit_server(experiment, folder)]
    else:
        comparisons = _compare_epsilons(experiment, folder.recording, read_ledger(folder))
    folder.write_table(folder.epsilons, COLUMNS, [comparison.row for comparison in comparisons])
    for result in comparisons:
        proved = f"{result.proved:.4g} proved" if math.isfinite(result.proved) else "none proved"
        log.info(
            "privacy: %s, %s: epsilon of at least %.4g measured, %s",
            result.subject, result.defense, result.measured.epsilon, proved,
        )  # fmt: skip


def _compare_epsilons(experiment: Experiment, transcript: Transcript, ledger: Sequence[Row]) -> list[EpsilonComparison]:
    """Measure epsilon of each client with canaries that sent something, and each audited defense."""
    table = experiment.config.canaries
    assert table is not None
    senders = set[int]()
    for number in transcript.rounds:
        senders.update(transcript.clients(number))
    audits: list[tuple[int, str, Defense]] = []
    defense_labels = unique_labels([defense.name for defense in experiment.config.defense])
    for client in experiment.config.canary_clients:
        if client not in senders:
            log.warning(
                "client %d: nothing that it sent is recorded, so its canaries measure nothing",
                client,
            )
            continue
        for label, defense in zip(defense_labels, experiment.client_defenses(client), strict=True):
            if audited_hook(defense):
                audits.append((client, label, defense))
    if not audits:
        raise RunError(
            "none of the clients with canaries sent anything that is recorded; name others in canaries.clients, or let "
            "more clients take part"
        )
    # Divide the error probability among the bounds, so that all hold at once (Bonferroni).
    confidence = 1 - (1 - table.confidence) / len(audits)
    return [
        _audit_defense(experiment, transcript, ledger, *audit, confidence=confidence)
        for audit in track(audits, "canaries", len(audits))
    ]


def _audit_defense(
    experiment: Experiment,
    transcript: Transcript,
    ledger: Sequence[Row],
    client: int,
    label: str,
    defense: Defense,
    *,
    confidence: float,
) -> EpsilonComparison:
    """Compare the epsilons of one client and defense; `confidence` is that of this bound only."""
    table = experiment.config.canaries
    assert table is not None
    budget = spending_by_client(ledger, label).get(client)
    rounds = _list_rounds(ledger, label, client) if budget else _list_recorded_rounds(transcript, client)
    canaries = Canaries(seed=experiment.seed, client=client, count=table.count)
    mechanisms = collect_mechanisms(ledger, label, client) or ()
    if audited_hook(defense) == "on_examples":
        scores = _update_scores(experiment, transcript, canaries, collect_by_round(ledger, label, client))
    else:
        is_added = any(mechanism.neighbours == "added or removed" for mechanism in mechanisms)
        left_out = 0.0 if is_added else -CANARY_VALUE
        scores = _shadow_scores(defense, label, canaries, experiment.setting.update, rounds, left_out)
    delta = budget.delta if budget else guarantee_delta(defense)
    return EpsilonComparison(
        client=client,
        defense=label,
        rounds=len(rounds),
        proved=budget.epsilon if budget else math.inf,
        delta=delta,
        measured=best_lower_bound(scores, canaries.is_included, delta, confidence, mechanisms),
        confidence=table.confidence,
    )


def _list_rounds(ledger: Sequence[Row], label: str, client: int) -> list[int]:
    """Return the rounds in which a client sent, or may have sent."""
    counted = (row for row in ledger if row["defense"] == label and str(row["counts"]) == "1")
    return [int(row["round"]) for row in counted if int(row["client"]) == client]


def _list_recorded_rounds(transcript: Transcript, client: int) -> list[int]:
    return [number for number in transcript.rounds if client in transcript.clients(number)]


def _audit_server(experiment: Experiment, folder: OpenRun) -> EpsilonComparison:
    """Compare the epsilons of one client under the server's mechanism, for who sees the models alone."""
    table, privacy, canaries = experiment.config.canaries, experiment.central_privacy, experiment.server_canaries
    assert table is not None
    assert privacy is not None
    assert canaries is not None
    rounds = experiment.config.federation.rounds
    asked_rounds = rounds if privacy.cycle is None else math.ceil(rounds / privacy.cycle)
    mechanism = privacy.mechanism(asked_rounds)
    scores = _model_scores(experiment, folder, canaries)
    return EpsilonComparison(
        client=None,
        defense=privacy.name,
        rounds=asked_rounds,
        proved=privacy.epsilon(asked_rounds),
        delta=privacy.delta,
        measured=best_lower_bound(
            scores, canaries.is_included, privacy.delta, table.confidence, [mechanism], curve_kinds=len(scores)
        ),
        confidence=table.confidence,
    )


def _model_scores(experiment: Experiment, folder: OpenRun, canaries: Canaries) -> Tensor:
    """Return `kind canary`, how likely each canary is in by how the number at its position moved."""
    positions = canaries.draw_coordinates(trained_shapes(experiment.model, experiment.training))
    recording = folder.recording
    models: list[State] = []
    rounds_before: list[int] = []
    for number in recording.rounds:
        replies = recording.header(number).replies
        if replies:
            models.append(recording.broadcast(number, replies[0].client, replies[0].message))
            rounds_before.append(number - 1)
    final = read_final_model(folder, recording)
    if final is not None:
        models.append(final.state)
        rounds_before.append(final.round)
    if len(models) < 2:
        raise RunError(
            "fewer than two models are recorded, so it is unknown what the canaries changed; record more rounds, or "
            "let more clients take part (strategy.fraction_train)"
        )
    values = []
    for model in models:
        values.append(torch.stack([model[name].flatten()[index] for name, index in positions]).double())
    moves = torch.stack(values).diff(dim=0)
    if experiment.training.sends == "gradient":
        moves = -moves
    assert experiment.central_privacy is not None
    return torch.from_numpy(score_server_canaries(moves.numpy(), rounds_before, experiment.central_privacy))


def _update_scores(
    experiment: Experiment, transcript: Transcript, canaries: Canaries, mechanisms: Mapping[int, Mechanism]
) -> Tensor:
    """Return `kind canary`, statistics of the number at each canary's position in w_t - w_T.

    They are the likelihood ratio of what is declared of the client's recorded rounds, where it is declared,
    their sum and, where there are several, the standard deviation over rounds: what a canary that is in adds
    depends on how often it was sampled, and noise that is the same each time does not vary.
    """
    positions = canaries.draw_coordinates(trained_shapes(experiment.model, experiment.training))
    rounds, declared = [], []
    for update in transcript.updates(canaries.client):
        flat = {name: tensor.flatten() for name, tensor in update.pseudo_gradient.items()}
        rounds.append(torch.stack([flat[name][index] for name, index in positions]).double())
        declared.append(mechanisms.get(update.round))
    if not rounds:
        return torch.zeros(1, canaries.count, dtype=torch.float64)
    moves = torch.stack(rounds)
    likelihoods = score_rounds(moves, declared)
    kinds = torch.stack([moves.sum(0), moves.std(0)]) if len(moves) > 1 else moves
    return kinds if likelihoods is None else torch.cat([likelihoods[None], kinds])


def _shadow_scores(
    defense: Defense, label: str, canaries: Canaries, zeros: State, rounds: Sequence[int], left_out: float
) -> Tensor:
    """Return `canary`, the score of each canary update that passed through `on_update`.

    The score is the number in which the canary differs from its negative, summed over rounds.

    Args:
        rounds: those in which the client sent, since a defense may act otherwise in others.
        left_out: the number in an update whose canary is out: 0 where a neighbour's update is left
            out, and the negative of the canary's where it is replaced.
    """
    scores = []
    for canary in range(canaries.count):
        scores.append(_shadow_score(defense, label, canaries, zeros, rounds, canary, left_out))
    return torch.tensor(scores)


def _shadow_score(
    defense: Defense, label: str, canaries: Canaries, zeros: State, rounds: Sequence[int], canary: int, left_out: float
) -> float:
    key = canaries.seed, "canary update", canaries.client, label, canary
    # Make an update that is zero but for one number at a random position.
    shapes = {name: tensor.shape for name, tensor in zeros.items()}
    size = sum(shape.numel() for shape in shapes.values())
    position = int(torch.randint(size, (), generator=generator(*key, "place")))
    name, index = locate_coordinate(shapes, position)
    update = {name: tensor.clone() for name, tensor in zeros.items()}
    update[name].view(-1)[index] = CANARY_VALUE if canaries.is_included[canary] else left_out
    # Pass it through the defense each round, and sum what is left of the number.
    memory: dict[str, Tensor] = {}
    total = 0.0
    for number in rounds:
        context = LocalContext(
            rng=generator(*key, number - 1),
            round=number,
            memory=memory,
            common_key=(*key, "common", number - 1) if defense.draws_in_common else None,
        )
        sent = apply_on_update(defense, update, context)
        values = sent.values("delta", zeros) if isinstance(sent, Payload) else sent
        total += values[name].flatten()[index].item()
    return total
