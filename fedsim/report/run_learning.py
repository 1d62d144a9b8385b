"""Whether the model of a run has learnt: by its evaluations, by how far training moved it, or by what clients say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from fedsim.audit.evaluation.statistics import binomial_interval
from fedsim.base.errors import FedsimError, format_percent
from fedsim.federation.open_run import OpenRun
from fedsim.federation.run_folder import TESTED_COLUMNS, read_rows
from fedsim.recording.messages import MESSAGES_FOLDER
from fedsim.recording.reported_accuracy import ReportedAccuracy, describe_tested_examples, read_reported_accuracy
from fedsim.recording.sealed_files import read_sealed_file
from fedsim.recording.wire_format import State
from fedsim.report.learning import NoLearning, begin_sentence, examine_evaluations

_LEAST_MOVEMENT = 1e-5
"""Share of the norm of its weights by which a model moves at least where it learns; a trained head moves it more."""
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Ends of names of what moves without any training: the means of batch normalisation."""
_VARIANCE = "running_var"
_MODEL = "model/"
"""Begin of the names of the model's tensors in a checkpoint."""


def examine_learning(folder: OpenRun, rows: Sequence[Mapping[str, str]]) -> NoLearning:
    """Return whether anything shows that the model of a run has not learnt.

    Args:
        rows: its `metrics.csv`; where there are none, as of another's app, what its clients reported counts.
    """
    if not rows:
        return _examine_reported(folder, find_reported_accuracy(folder))
    if not any(row.get("accuracy") or row.get("loss") for row in rows):
        return NoLearning()
    losses = [row["loss"] for row in rows if row["client"] == "server" and row.get("loss")]
    if losses and math.isnan(float(losses[-1])) and (name := _find_negative_variance(folder)):
        return NoLearning(
            sentence=(
                f"The model cannot be evaluated: '{name}', the running variance of a BatchNorm layer, is below 0, as "
                "noise makes it, or a strategy that steps along it as along weights; set "
                'training.batch_norm_statistics to "withheld", or choose a model without such layers.'
            )
        )
    movement = math.nan
    with suppress(FedsimError):  # a damaged file is told of elsewhere
        movement = measure_movement(folder)
    if not movement < _LEAST_MOVEMENT:
        return examine_evaluations(rows)
    return NoLearning(
        sentence=(
            f"The model has not learnt: training moved its weights by {movement:.2g} of their norm, so that it is as "
            "good as the one that it began with; try a larger training.learning_rate."
        ),
        remedy="larger steps",
    )


def find_reported_accuracy(folder: OpenRun) -> ReportedAccuracy | None:
    """Return what clients of another's app reported last; None where none did, or where it cannot be read."""
    with suppress(FedsimError):  # `fedsim inspect` names what is damaged
        reported = read_reported_accuracy(folder.path / MESSAGES_FOLDER)
        counts = read_rows(folder.tested_examples, TESTED_COLUMNS, TESTED_COLUMNS, TESTED_COLUMNS)
        if reported is None or not counts:
            return reported
        tested, trained = (int(counts[0][name]) for name in TESTED_COLUMNS)
        return replace(reported, remark=describe_tested_examples(tested, trained))
    return None


def measure_movement(folder: OpenRun) -> float:
    """Return the norm by which training moved the weights, as a share of their own; NaN where that is not known.

    It takes the recording of the first round and the checkpoint after the last one.
    """
    if not folder.checkpoint.is_file() or not folder.transcript.is_dir():
        return math.nan
    transcript = folder.recording
    if not transcript.rounds or transcript.rounds[0] != 1 or not transcript.header(1).replies:
        return math.nan
    initial = transcript.broadcast(1, transcript.header(1).replies[0].client)
    _, arrays = read_sealed_file(folder.checkpoint)
    moved, size = 0.0, 0.0
    for name, tensor in initial.items():
        final = arrays.get(f"{_MODEL}{name}")
        if final is None or final.shape != tuple(tensor.shape) or not tensor.is_floating_point():
            continue
        if not name.endswith(_STATISTICS):
            before = tensor.double().numpy()
            moved += float(((final - before) ** 2).sum())
            size += float((before**2).sum())
    return math.sqrt(moved / size) if size else math.nan


def _find_negative_variance(folder: OpenRun) -> str:
    """Return the name of a running variance of the last model that has a value below 0; empty where none has."""
    with suppress(FedsimError):  # a damaged file is told of elsewhere
        if folder.checkpoint.is_file():
            _, arrays = read_sealed_file(folder.checkpoint)
            for name, array in arrays.items():
                if name.startswith(_MODEL) and name.endswith(_VARIANCE) and (array < 0).any():
                    return name.removeprefix(_MODEL)
    return ""


def _examine_reported(folder: OpenRun, reported: ReportedAccuracy | None) -> NoLearning:
    """Return whether what clients reported is no better than guessing among the outputs of the model."""
    if reported is None or not reported.examples:
        return NoLearning()
    outputs = 0
    with suppress(FedsimError):  # a damaged round is told of elsewhere
        outputs = _count_outputs(folder)
    if outputs < 2:
        return NoLearning()
    chance = 1 / outputs
    low, high = binomial_interval(round(reported.accuracy * reported.examples), reported.examples)
    if low > chance:
        return NoLearning()
    return NoLearning(
        sentence=(
            f"{begin_sentence(is_worse=reported.accuracy <= chance)}: the accuracy that its clients reported on "
            f"{reported.examples} examples, {format_percent(reported.accuracy)} (95 % interval {100 * low:.1f} to "
            f"{format_percent(high)}), is not beyond the {format_percent(chance)} that guessing among the {outputs} "
            "outputs of the model gets."
        )
    )


def _count_outputs(folder: OpenRun) -> int:
    """Return the number of outputs of the recorded model; 0 where its last tensors are no linear layer."""
    transcript = folder.recording
    number = transcript.rounds[-1]
    replies = transcript.header(number).replies
    state: State = transcript.broadcast(number, replies[0].client) if replies else {}
    *_, before_last, last = [(), (), *(tuple(tensor.shape) for tensor in state.values())]
    # A weight and its bias, in either order; of a weight alone, the side that makes chance smaller.
    bias, weight = sorted((before_last, last), key=len)
    if len(weight) != 2:
        return 0
    if len(bias) == 1 and bias[0] in weight:
        return bias[0]
    return max(last) if len(last) == 2 else 0
