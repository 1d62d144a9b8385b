"""Which of a client's examples take part in a round, as its defenses choose, and whether it sends anything at all."""

from __future__ import annotations

import dataclasses
import logging

from flwr.app import Error, Message, RecordDict
from torch import Tensor

from clients.memory import memory_of
from fedsim.defense import kept_examples, keyed, overrides
from fedsim.engines.cohort import silence
from fedsim.errors import one_line, what_it_said
from fedsim.experiments.build import Experiment
from fedsim.randomness import generator
from fedsim.training.cohort import Share
from fedsim.training.local_round import LocalRound
from fedsim.training.settings import LocalTraining
from fedsim.wire.payloads import State

log = logging.getLogger("fedsim." + __name__)
_SILENT = 2


def taking_part(
    experiment: Experiment,
    before: State,
    number: int,
    client: int,
    share: Share,
    settings: LocalTraining,
    state: RecordDict,
) -> Share | None:
    """What its defenses leave of the `share` of `client`, which was sent `before` in round `number`; None of nothing.

    What they keep goes to `state`. One that fails leaves nothing, for an error would say more than silence.
    """
    for defense, own in keyed(experiment.defenses_of(client)):
        if not overrides(defense, "on_data"):
            continue
        local = LocalRound.of(experiment.filled(before), share, settings, experiment.dataset.task.loss)
        rng = generator(*share.key, "defense", "on_data", *own)
        try:
            with memory_of(defense, "-".join(map(str, own)), state) as memory:
                kept = kept_examples(defense, local, rng, memory)
        except (Exception, SystemExit) as error:  # it may have read anything in the data
            why = one_line(what_it_said(error))
            log.warning("round %d, client %d sends nothing, %s failed: %s", number, client, type(defense).__name__, why)
            return None
        if not len(kept):
            return None
        if len(kept) < len(local.labels):
            share = _left(experiment, number, client, share, settings, local.places[kept])
    return share


def silent(message: Message, number: int) -> Message:
    """The answer of a client that sends nothing in round `number`: the same for every reason."""
    return Message(Error(code=_SILENT, reason=silence(number)), reply_to=message)


def _left(
    experiment: Experiment, number: int, client: int, share: Share, settings: LocalTraining, places: Tensor
) -> Share:
    """A share of the examples at `places` alone; of a mini-batch, whose gradient is sent, what is left of it."""
    if settings.sends == "gradient":
        return dataclasses.replace(share, order=(places,))
    return experiment.share(client, number, settings, share.inputs[places], share.labels[places])
