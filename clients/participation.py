"""Selection by a client's defenses of the examples that it trains on in a round, if any."""

from __future__ import annotations

import dataclasses
import logging

from flwr.app import Error, Message
from torch import Tensor

from clients.client_state import ClientMemories
from fedsim.base.errors import ends_training, error_reason, one_line
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.defense import overrides, pair_with_keys
from fedsim.interfaces.defense_calls import apply_on_data
from fedsim.interfaces.local_context import ClientRound
from fedsim.recording.header import straggler_reason
from fedsim.training.cohort import LocalData
from fedsim.training.local_round import LocalRound
from fedsim.training.settings import LocalTraining

log = logging.getLogger("fedsim." + __name__)
_SILENT = 2
"""Code of the error by which a client sends nothing."""


def select_examples(
    experiment: Experiment,
    client: int,
    share: LocalData,
    settings: LocalTraining,
    client_round: ClientRound,
    memories: ClientMemories,
) -> LocalData | None:
    """Return the share of the data that a client's defenses select; None where it sends nothing.

    A defense that fails makes the client silent, because an error would reveal more than silence; a device that
    fails ends the run.

    Args:
        experiment: the experiment, with the client's defenses.
        client_round: its w_t, randomness and memory in this round.
        memories: the memories of its defenses; what a failing one changed is discarded.
    """
    for defense, defense_key in pair_with_keys(experiment.client_defenses(client)):
        if not overrides(defense, "on_data"):
            continue
        model = experiment.model_with_state(client_round.broadcast)
        local = LocalRound.create(model, share, settings, experiment.client_loss)
        context = client_round.make_context("on_data", defense_key, defense.draws_in_common)
        try:
            with client_round.seed_globals(defense, "on_data", *defense_key):
                selected = apply_on_data(defense, local, context)
            memories.check()
        except (Exception, SystemExit) as error:  # its text may hold anything of the data
            if ends_training(error):
                raise
            reason = one_line(error_reason(error))
            name, number = type(defense).__name__, client_round.number
            log.warning("round %d, client %d sends nothing, %s failed: %s", number, client, name, reason)
            memories.discard(defense_key)
            return None
        if not len(selected):
            return None
        if len(selected) < len(local.labels):
            indices = local.indices[selected]
            share = _restrict_share(experiment, client_round.number, client, share, settings, indices)
    return share


def silent_reply(message: Message, number: int) -> Message:
    """Return the reply of a client that sends nothing in round `number`, whatever its reason."""
    return Message(Error(code=_SILENT, reason=straggler_reason(number)), reply_to=message)


def _restrict_share(
    experiment: Experiment, number: int, client: int, share: LocalData, settings: LocalTraining, indices: Tensor
) -> LocalData:
    """Return the share with only the examples at `indices`; for a gradient, they are its batch."""
    if settings.sends == "gradient":
        return dataclasses.replace(share, order=(indices,))
    return experiment.make_local_data(client, number, settings, share.inputs[indices], share.labels[indices])
