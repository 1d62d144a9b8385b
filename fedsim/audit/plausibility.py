"""Check, before any work, that the statements of an attack file about a foreign app fit the recording."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from fedsim.audit.reply_warnings import (
    MAX_CLIENTS,
    warn_of_missing_statistics,
    warn_of_other_shapes,
    warn_of_repeated_replies,
    warn_of_replies,
    warn_of_still_layers,
    warn_of_update_ranks,
)
from fedsim.audit.stated_model import (
    check_constants,
    check_outputs,
    check_record_names,
    describe_shape_mismatch,
    find_private_names,
    shared_shapes,
)
from fedsim.base.errors import ConfigError, TranscriptError
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.following_models import describe_misread_round
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import Update, propose_format
from fedsim.training.settings import known_steps

_DISTANCE_TOLERANCE = 0.05
"""Share by which the distance that control variates tell may differ from that of the stated local steps."""
log = logging.getLogger(__name__)


def check_fit(transcript: Transcript, knowledge: Knowledge, *, holds_models: bool = True) -> None:
    """Check model and loss against the first recorded round; warn of replies that look wrong.

    Args:
        holds_models: whether messages are of models, which the server moves by what clients reply, and not answers.
    """
    updates = _first_updates(transcript)
    check_record_names(transcript)
    if holds_models:
        warn_of_replies(updates)
        if misreading := describe_misread_round(transcript, updates[0].round):
            log.warning("%s", misreading)
        warn_of_repeated_replies(transcript)
    warn_of_other_shapes(updates)
    if transcript.message_format.controls and not transcript.message_format.defended:
        check_control_distance(transcript, knowledge, updates)
    if knowledge.model is None:
        return
    network = knowledge.model()
    private_names = find_private_names(network, transcript.message_format.private, updates[0].before)
    check_constants(network, knowledge.model, updates[0].before, private_names)
    mismatch = describe_shape_mismatch(network, updates[0].before, private_names)
    if mismatch:
        remedy = propose_format(updates[0].before, shared_shapes(network, private_names)[::-1]) or (
            "give the model of that federation, or say what the messages mean with [app] prefix, record, frozen or "
            "private"
        )
        raise ConfigError(
            f"adversary.knowledge.model: does not fit round {updates[0].round} of client "
            f"{updates[0].client}: {mismatch}; {remedy}"
        )
    warn_of_still_layers(network, updates, private_names)
    warn_of_missing_statistics(network, updates)
    if knowledge.input_shape is not None and knowledge.value_range is not None:
        check_outputs(network, knowledge)
        warn_of_update_ranks(network, knowledge, updates)


def check_control_distance(transcript: Transcript, knowledge: Knowledge, updates: Sequence[Update]) -> None:
    """Check how far clients moved by their control variates, which tell nothing of a factor that all of them have.

    An app that divides by another number of steps, or by another learning rate, than its clients take, is read
    wrongly from the second round on, and its messages fit all the same.
    """
    for update in updates:
        fitted = transcript.fit_control_distance(update.round, update.client)
        steps = known_steps(knowledge, update.num_examples)
        where = update.name
        if not fitted:
            continue
        if steps is None or knowledge.learning_rate is None:
            log.warning(
                "[app] controls: %s moved %.3g times its mean step by its control variates, which has to be the number "
                "of local steps times their learning rate; nothing says whether it is, and where the app divides by "
                "another number, attacks on later rounds read its gradients wrongly; state learning_rate, batch_size "
                "and local_epochs under [adversary.knowledge], and it is checked",
                where,
                fitted,
            )
            return
        expected = steps * knowledge.learning_rate
        if not math.isclose(fitted, expected, rel_tol=_DISTANCE_TOLERANCE):
            raise ConfigError(
                f"[app] controls: {where} moved {fitted:.3g} times its mean step by its control variates, and "
                f"{steps} local steps of learning rate {knowledge.learning_rate:g} are {expected:.3g}; fix "
                "learning_rate, batch_size or local_epochs under [adversary.knowledge], or leave controls out and "
                "attack the first round, where the app divides by another number than its clients take steps"
            )


def _first_updates(transcript: Transcript) -> list[Update]:
    """Return the updates of the first readable round, of `MAX_CLIENTS` clients at most."""
    failures = 0
    last_error: TranscriptError | None = None
    for number in transcript.rounds:
        updates: list[Update] = []
        try:
            clients = transcript.clients(number)
            failures += len(transcript.header(number).failures)
        except TranscriptError as error:  # a damaged round is reported when it is attacked
            last_error = error
            continue
        for client in clients:
            try:
                if transcript.message_format.controls:  # whether they are there is said before any work
                    updates.append(transcript.update(number, client))
                else:
                    updates.append(transcript.message_format.read(transcript.recorded_update(number, client)))
            except TranscriptError as error:  # likewise
                last_error = error
            if len(updates) == MAX_CLIENTS:
                break
        if updates:
            return updates
    if last_error is not None:
        raise last_error
    raise TranscriptError(f"{transcript.folder}: holds no update; fedsim inspect --rows lists what failed ({failures})")
