"""Say before a run with canaries what they can find, and warn where that is nothing."""

from __future__ import annotations

import logging
import math

from fedsim.federation.experiment import Experiment
from fedsim.privacy.audit_power import describe_canaries
from fedsim.privacy.ledger import state_guarantee, unique_labels
from fedsim.training.canaries import audited_hook

log = logging.getLogger(__name__)


def log_canary_power(experiment: Experiment) -> None:
    """Log what the canaries of each kind of client can find of each defense; nothing without [canaries]."""
    table, central = experiment.config.canaries, experiment.central_privacy
    if table is None:
        return
    # Noise of the server protects all clients alike.
    if central is not None:
        rounds = experiment.config.federation.rounds
        asked_rounds = rounds if central.cycle is None else math.ceil(rounds / central.cycle)
        mechanisms, proved = [central.mechanism(asked_rounds)], central.epsilon(asked_rounds)
        sentence, finds = describe_canaries(mechanisms, table.count, proved, central.delta, table.confidence)
        if central.rate is not None or central.correlation == "tree":
            sentence += "; they show less here, since noise and sampling are accounted for as if each were seen alone"
        _log_power(central.name, sentence, finds)
        return
    # Otherwise each client has its own defenses, and the bounds share the confidence.
    labels = unique_labels([defense.name for defense in experiment.config.defense])
    clients = experiment.config.canary_clients
    audited = sum(bool(audited_hook(defense)) for defense in experiment.client_defenses(clients[0]))
    confidence = 1 - (1 - table.confidence) / max(1, audited * len(clients))
    said = set[str]()
    for client in clients:
        participation = experiment.setting.participation(client)
        for label, defense in zip(labels, experiment.client_defenses(client), strict=True):
            guarantee = state_guarantee(defense, [participation]) if audited_hook(defense) else None
            if guarantee is None:
                continue
            mechanism = defense.mechanism(participation)
            mechanisms = [] if mechanism is None else [mechanism]
            sentence, finds = describe_canaries(mechanisms, table.count, guarantee.epsilon, guarantee.delta, confidence)
            if mechanism is not None and mechanism.rate < 1 and participation.steps > 1:
                sentence += f"; they show less here, since {participation.steps} steps a round are seen as one sum"
            elif mechanism is not None and mechanism.noise == "laplace" and participation.rounds > 1:
                sentence += "; they show less here, since Laplace noise is added up over rounds"
            if f"{label}: {sentence}" not in said:
                said.add(f"{label}: {sentence}")
                _log_power(label, sentence, finds)


def _log_power(label: str, sentence: str, finds: bool) -> None:
    if finds:
        log.info("canaries, %s: %s", label, sentence)
        return
    log.warning(
        "canaries, %s: %s; this audit is too small to find anything, so take more canaries, or clients or rounds for "
        "which less is proved",
        label,
        sentence,
    )
