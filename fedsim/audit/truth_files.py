"""Check truth files against the model, and against the numbers of examples that a recording states."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.stated_model import MAX_NAMES
from fedsim.base.errors import ConfigError, DataError, TranscriptError, join_first
from fedsim.base.task import goal_of
from fedsim.federation.config import PUBLIC_KEY
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.transcript import Transcript

log = logging.getLogger(__name__)


def check_truths(files: Mapping[str, Path], counts: Mapping[tuple[int, ...], set[int]], knowledge: Knowledge) -> None:
    """Check the truth file of each client, and that at least one of them is recorded."""
    sizes: dict[str, int] = {}
    for client, file in files.items():
        truth = Truth.load(file)
        if truth.answers:  # which are no examples
            continue
        check_truth(client, truth, knowledge)
        sizes[client] = len(truth.data)
    for group, reported in counts.items():
        warn_of_truth_size(group, sizes, reported)
    recorded = {str(member): None for group in counts for member in group}
    if files and not recorded.keys() & files.keys():
        raise ConfigError(
            f"truth: none of its clients ({', '.join(files)}) is recorded; recorded: "
            f"{join_first(recorded, MAX_NAMES)}; clients are called by their partition id where they "
            'report it (fedsim.partition_mod in the ClientApp), else by their node; "#1" is the first'
        )
    warn_of_unmatched_names("truth", files.keys() - {PUBLIC_KEY}, recorded)


def warn_of_unmatched_names(table: str, named: Collection[str], recorded: Collection[str]) -> None:
    """Warn where a table names clients that are not recorded, and leaves out some that are.

    A table for all clients of which only some were recorded is no error; names that are none of the recording's are.
    """
    unknown = [client for client in named if client not in recorded]
    left_out = [client for client in recorded if client not in named]
    if unknown and left_out:
        log.warning(
            "%s: names %s, of which nothing is recorded, and omits %s; use the names that fedsim inspect --rows prints",
            table,
            join_first([f"client {client}" for client in sorted(unknown)], MAX_NAMES),
            join_first([f"client {client}" for client in left_out], MAX_NAMES),
        )


def check_truth(client: str, truth: Truth, knowledge: Knowledge) -> None:
    """Raise DataError where a truth file cannot be data that this model was trained on."""
    shape, classes = knowledge.input_shape, knowledge.num_classes
    if shape is not None and tuple(truth.data.shape[1:]) != tuple(shape):
        raise DataError(
            f"truth.{client}: its examples have shape {tuple(truth.data.shape[1:])}, input_shape is {tuple(shape)}; "
            "fix one of them"
        )
    if classes is None or not len(truth.labels):
        return
    if truth.labels.is_floating_point():
        if goal_of(knowledge.loss) == "classes":
            raise DataError(
                f"truth.{client}: its labels are real numbers, expected classes from 0 to {classes - 1}; write them as "
                "integers"
            )
        return
    low, high = int(truth.labels.min()), int(truth.labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"truth.{client}: its labels are from {low} to {high}, expected 0 to {classes - 1}, as num_classes is "
            f"{classes}; fix one of them"
        )


def count_group_examples(transcript: Transcript) -> dict[tuple[int, ...], set[int]]:
    """Map the clients of each message, one or the members of a sum, to the numbers of examples N of these messages."""
    counts: dict[tuple[int, ...], set[int]] = {}
    for number in transcript.rounds:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            for reply in transcript.header(number).replies:
                num_examples = transcript.message_format.num_examples_of(reply.client, reply.num_examples)
                counts.setdefault(tuple(reply.members) or (reply.client,), set()).add(num_examples)
    return counts


def count_examples(group_counts: Mapping[tuple[int, ...], set[int]]) -> dict[str, set[int]]:
    """Map each client, a sum counting as its first member, to the numbers of examples N of its updates."""
    counts: dict[str, set[int]] = {}
    for group, of_group in group_counts.items():
        counts.setdefault(str(group[0]), set()).update(of_group)
    return counts


def warn_of_truth_size(group: Sequence[int], sizes: Mapping[str, int], reported: Collection[int]) -> None:
    """Warn where the files of a client, or of the members of a sum, hold another number of examples than N."""
    named = [str(member) for member in group if str(member) in sizes]
    size = sum(sizes[client] for client in named)
    if not named or size in reported:
        return
    counts = join_first([str(count) for count in sorted(reported)], MAX_NAMES)
    if len(group) == 1:
        log.warning(
            "truth.%s: has %d examples, and N is %s; if clients %s, say N with [app] num_examples",
            named[0],
            size,
            counts,
            "count batches" if any(reported) else "report none",
        )
    else:
        log.warning(
            "truth.%s: the sum over clients %s is over N = %s examples, and %s; name a file of each of these clients, "
            "or one alone that holds the examples of all",
            named[0],
            join_first(map(str, group), MAX_NAMES),
            counts,
            f"the file holds {size}" if len(named) == 1 else f"their {len(named)} files hold {size}",
        )
