"""Check truth files against the model, and against the numbers of examples that a recording states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedsim.audit.evaluation.truth import Truth
from fedsim.audit.stated_model import MAX_NAMES
from fedsim.base.errors import ConfigError, DataError, TranscriptError, join_first
from fedsim.interfaces.knowledge import Knowledge
from fedsim.recording.transcript import Transcript

log = logging.getLogger(__name__)


def check_truths(files: Mapping[str, Path], counts: Mapping[str, set[int]], knowledge: Knowledge) -> None:
    """Check the truth file of each client, and that at least one of them is recorded.

    Args:
        files: by client.
        counts: see `count_examples`.

    Raises:
        ConfigError: none of them is recorded.
    """
    for client, file in files.items():
        truth = Truth.load(file)
        if truth.answers:  # which are no examples
            continue
        check_truth(client, truth, knowledge)
        warn_of_truth_size(client, len(truth.data), counts)
    if files and not counts.keys() & files.keys():
        raise ConfigError(
            f"truth: none of its clients ({', '.join(files)}) is recorded; recorded: "
            f"{join_first(counts, MAX_NAMES)}; clients are called by their partition id where they "
            'report it (fedsim.partition_mod in the ClientApp), else by their node; "#1" is the first'
        )


def check_truth(client: str, truth: Truth, knowledge: Knowledge) -> None:
    """Raise DataError where a truth file cannot be data that this model was trained on."""
    shape, classes = knowledge.input_shape, knowledge.num_classes
    if shape is not None and tuple(truth.data.shape[1:]) != tuple(shape):
        raise DataError(
            f"truth.{client}: its examples have shape {tuple(truth.data.shape[1:])}, input_shape is {tuple(shape)}; "
            "mend one of them"
        )
    if classes is None or truth.labels.is_floating_point() or not len(truth.labels):
        return
    low, high = int(truth.labels.min()), int(truth.labels.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"truth.{client}: its labels are from {low} to {high}, expected 0 to {classes - 1}, as num_classes is "
            f"{classes}; mend one of them"
        )


def count_examples(transcript: Transcript) -> dict[str, set[int]]:
    """Map each client to the numbers of examples N of its updates."""
    counts: dict[str, set[int]] = {}
    for number in transcript.rounds:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            for reply in transcript.header(number).replies:
                num_examples = transcript.message_format.num_examples_of(reply.client, reply.num_examples)
                counts.setdefault(str(reply.client), set()).add(num_examples)
    return counts


def warn_of_truth_size(client: str, size: int, counts: Mapping[str, set[int]]) -> None:
    """Warn where a client's truth file holds another number of examples than N.

    Args:
        size: examples in the file.
        counts: see `count_examples`.
    """
    reported = counts.get(client)
    if reported and size not in reported:
        log.warning(
            "truth.%s: has %d examples, and N is %s; if clients count batches, say N with [app] num_examples",
            client,
            size,
            join_first(sorted(reported), MAX_NAMES),
        )
