"""Selection by a client's defenses of the examples that it trains on in a round, if any."""

from __future__ import annotations

import dataclasses
import logging

from flwr.app import Error, Message, RecordDict
from torch import Tensor

from clients.client_state import open_memory
from fedsim.base.errors import error_reason, one_line
from fedsim.base.randomness import generator
from fedsim.federation.build import Experiment
from fedsim.federation.engines.cohort import straggler_reason
from fedsim.interfaces.defense import apply_on_data, overrides, pair_with_keys
from fedsim.recording.payloads import State
from fedsim.training.cohort import LocalData
from fedsim.training.local_round import LocalRound
from fedsim.training.settings import LocalTraining

log = logging.getLogger("fedsim." + __name__)
_SILENT = 2
"""Code of the error by which a client sends nothing."""


def select_examples(
    experiment: Experiment,
    before: State,
    number: int,
    client: int,
    share: LocalData,
    settings: LocalTraining,
    state: RecordDict,
) -> LocalData | None:
    """Return the share of the data that a client's defenses select; None where it sends nothing.

    A defense that fails makes the client silent, because an error would reveal more than silence.

    Args:
        experiment: the experiment, with the client's defenses.
        before: w_t, the state that the client received.
        number: the round.
        client: the client.
        share: its data.
        settings: settings of its local training.
        state: its `Context.state`, where the memory of its defenses is kept.
    """
    for defense, defense_key in pair_with_keys(experiment.client_defenses(client)):
        if not overrides(defense, "on_data"):
            continue
        local = LocalRound.create(experiment.model_with_state(before), share, settings, experiment.dataset.task.loss)
        rng = generator(*share.key, "defense", "on_data", *defense_key)
        try:
            with open_memory(defense, "-".join(map(str, defense_key)), state) as memory:
                selected = apply_on_data(defense, local, rng, memory)
        except (Exception, SystemExit) as error:  # its text may hold anything of the data
            reason = one_line(error_reason(error))
            name = type(defense).__name__
            log.warning("round %d, client %d sends nothing, %s failed: %s", number, client, name, reason)
            return None
        if not len(selected):
            return None
        if len(selected) < len(local.labels):
            share = _restrict_share(experiment, number, client, share, settings, local.indices[selected])
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
