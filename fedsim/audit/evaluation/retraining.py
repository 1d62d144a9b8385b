"""Compare a client's message with one trained anew on the examples that it is said to have held."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedsim.audit.evaluation.doubts import raise_doubt
from fedsim.audit.evaluation.evaluator import EvaluationContext, FindingMetadata, first_round, group_members
from fedsim.audit.evaluation.local_optimum import match_state
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import FedsimError, join_first
from fedsim.base.task import Loss
from fedsim.interfaces.knowledge import FACTS, config_keys
from fedsim.recording.wire_format import State, float_norm
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.settings import LocalTraining

log = logging.getLogger(__name__)

UNRELATED = 0.95
"""One minus the cosine from which on examples do not explain an update."""
RETRAINED, _COMPARABLE, _CONTRADICTION = 0.02, 0.2, 0.5
"""One minus the cosine of a message and one trained anew, up to which they are equal, up to which their lengths are
compared, and from which on they differ; unstated settings, such as weight decay, reach 0.4 of right files."""
_SPREADS = 3
"""How many times farther from a message than from each other two trained anew may be."""
_LENGTH_TOLERANCE = 0.25
"""Share by which the length of a message may differ from that of one trained anew."""
_MAX_WORK = 2e9
"""Most examples times parameters that are trained anew for one message."""
_TRAINING = tuple(name for name in FACTS if name in LocalTraining.__dataclass_fields__)
"""Settings of local training that can be stated."""
FAILURES = (FedsimError, RuntimeError, ValueError, IndexError, TypeError)
"""What code of an app and data of another shape raise; the attack or the evaluator says what is wrong with them."""


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """How a message compares with what the truth gives, trained as the attack file states.

    Attributes:
        distance: one minus the cosine of the two.
        spread: the same of two that are trained in different orders.
        length: of the message, in lengths of the one trained anew.
        is_stated: whether all that the message follows from is stated.
    """

    distance: float
    spread: float
    length: float
    is_stated: bool = True

    @property
    def fits(self) -> bool:
        """Return whether the message can be one of these data; dropout may spread messages so far that all would."""
        return self.distance <= min(RETRAINED + _SPREADS * self.spread, UNRELATED)

    @property
    def contradicts(self) -> bool:
        """Return whether the message cannot be one of these data, if clients do nothing else."""
        return self.is_stated and self.distance > max(_CONTRADICTION, _COMPARABLE + _SPREADS * self.spread)


def shared_measurements(context: EvaluationContext) -> MeasurementCache:
    """Return what findings that are judged in `context` share."""
    cache: MeasurementCache = context.cached_values.setdefault("measurements", MeasurementCache())
    return cache


def retrain(
    message: AttackedUpdate, truth: Truth, about: FindingMetadata, context: EvaluationContext, base: int = 0
) -> Retraining | None:
    """Train on the truth as the attack file and the header state; None where they do not state it all.

    Args:
        base: the round that `message.update.before` was taken from, where it is not its own.
    """
    update = message.update
    is_whole = not group_members(about) and len(truth.data) == update.num_examples
    moves_alone = update.gradient_move is None  # no control variate turned the steps
    if not is_whole or not moves_alone or context.knowledge.defenses_in(first_round(about)):
        return None
    if not keeps_digits(message, about, context):
        return None
    retrainings = list[Retraining]()
    for settings, is_stated in _stated_settings(message, context):
        compute = partial(_compare_retrained, message, truth, settings, is_stated)
        inputs = update.round, base, update.client, truth.data, truth.labels, repr(settings)
        try:
            retraining = shared_measurements(context).find(compute, "truth trained", *inputs)
        except Exception:  # anybody's network and loss
            log.debug("client %s: cannot be trained anew", about["victim"], exc_info=True)
            return None
        if retraining is None:
            return None
        retrainings.append(retraining)
        if retraining.fits:
            break
    return min(retrainings, key=lambda trained: trained.distance - _SPREADS * trained.spread) if retrainings else None


def find_explained_round(
    message: AttackedUpdate, truth: Truth, about: FindingMetadata, context: EvaluationContext
) -> int:
    """Return the first round of the victim, if training gives its message there and the round is earlier; else 0."""
    transcript, update = context.transcript, message.update
    for number in transcript.rounds:
        if number < update.round and transcript.header(number).find_reply(update.client):
            first = replace(message, update=transcript.update(number, update.client))
            retraining = retrain(first, truth, {**about, "first_round": number}, context)
            return number if retraining is not None and retraining.fits else 0
    return 0


def keeps_digits(message: AttackedUpdate, about: FindingMetadata, context: EvaluationContext) -> bool:
    """Return whether rounding, as to float16, left the direction of a message as it was.

    What was rounded may be recorded as float32.
    """
    update = message.update
    try:
        recorded = context.transcript.recorded_update(first_round(about), int(about["victim"]), update.message)
        sent, move = recorded.payload.arrays(), update.pseudo_gradient if update.payload.kind == "weights" else None
    except FedsimError:  # a part of the model came back
        return False
    tensors = [tensor for tensor in sent.values() if tensor.is_floating_point()]
    if not tensors or move is None:
        return bool(tensors)
    types = {tensor.dtype for tensor in tensors}
    for short in (torch.float16, torch.bfloat16):
        if all(torch.equal(tensor.to(short).to(tensor.dtype), tensor) for tensor in tensors):
            types.add(short)
    rounding = max(torch.finfo(dtype).eps for dtype in types) * float_norm(update.before)
    return rounding < 0.1 * float_norm(move)


def _stated_settings(message: AttackedUpdate, context: EvaluationContext) -> Iterator[tuple[LocalTraining, bool]]:
    """Yield the ways of local training that fit what is stated, each with whether that is all it takes.

    Nothing states how BatchNorm normalised, nor whether dropout was on.
    """
    update, stated = message.update, _read_stated(message, context)
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in message.model.modules())
    for batch_norm in ("train", "eval") if has_batch_norm else ("train",):
        for dropout in (True, False):
            modes: dict[str, Any] = {"batch_norm": batch_norm, "dropout": dropout}
            if update.gradient is not None:
                batch_size = stated.get("batch_size", update.num_examples)
                if batch_size < update.num_examples:
                    return
                smoothing = {"label_smoothing": stated.get("label_smoothing", 0.0)}
                yield LocalTraining(sends="gradient", local_steps=1, **smoothing, **modes), "batch_size" in stated
            elif {"learning_rate", "optimizer", "batch_size"} <= stated.keys() and (
                len({"local_epochs", "local_steps"} & stated.keys()) == 1
            ):
                try:
                    yield LocalTraining(**stated, **modes), True
                except FAILURES:  # an optimizer of the app's own
                    return


def _read_stated(message: AttackedUpdate, context: EvaluationContext) -> dict[str, Any]:
    """Return the settings of local training that the attack file states or the server sent along."""
    config, knowledge = message.update.config, context.knowledge
    stated = {name: getattr(knowledge, name) for name in _TRAINING if getattr(knowledge, name) is not None}
    for name in _TRAINING:
        for key in config_keys(name):
            if name not in stated and FACTS[name].accepts(config.get(key)):
                stated[name] = config[key]
    return stated


def describe_unstated(message: AttackedUpdate, context: EvaluationContext) -> str:
    """Ask for the settings of local training that are not stated; empty if all are."""
    stated = set(_read_stated(message, context))
    if stated & {"local_epochs", "local_steps"}:
        stated |= {"local_epochs", "local_steps"}
    asked = ("batch_size", "label_smoothing") if message.update.gradient is not None else _TRAINING
    unstated = [name for name in asked if name not in stated and name != "local_steps"]
    if not unstated:
        return ""
    return f", or state in [adversary.knowledge] what clients have of {join_first(unstated, len(_TRAINING))}"


def _compare_retrained(
    message: AttackedUpdate, truth: Truth, settings: LocalTraining, is_stated: bool
) -> Retraining | None:
    """Compare a message with training on the truth; None where that takes long or moves nothing."""
    count = len(truth.data)
    parameters = sum(parameter.numel() for parameter in message.model.parameters())
    work = parameters * (count if settings.sends == "gradient" else settings.steps(count) * settings.batch_size)
    sent = match_state(message.model, message.update.pseudo_gradient) if settings.sends == "weights" else None
    sent = message.update.gradient if settings.sends == "gradient" else sent
    if work > _MAX_WORK or sent is None:
        return None
    first = _train_anew(message, truth, settings, 1)
    names = [name for name, p in message.model.named_parameters() if p.requires_grad and name in sent and name in first]
    message_vector, first_vector = _flatten(sent, names), _flatten(first, names)
    lengths = float(message_vector.norm()), float(first_vector.norm())
    if not all(lengths) or not all(map(math.isfinite, lengths)):
        return None
    distance, spread = _cosine_distance(message_vector, first_vector), 0.0
    if distance > RETRAINED:
        second_vector = _flatten(_train_anew(message, truth, settings, 2), names)
        distance = min(distance, _cosine_distance(message_vector, second_vector))
        spread = _cosine_distance(first_vector, second_vector)
    return Retraining(distance=distance, spread=spread, length=lengths[0] / lengths[1], is_stated=is_stated)


def _train_anew(message: AttackedUpdate, truth: Truth, settings: LocalTraining, draw: int) -> State:
    """Return w_t - w_T, or the gradient, of a client with these data; `draw` numbers the orders of its batches."""
    before = match_state(message.model, message.update.before)
    assert before is not None
    before = {name: tensor.to(message.device, torch.float32) for name, tensor in before.items()}
    inputs, labels = message.to_model_units(truth.data), truth.labels.to(message.device)
    arguments = message.model, before, inputs, labels, settings
    loss = cast(Loss, message.loss)  # which is asked for means alone
    with torch.enable_grad():
        if settings.sends == "gradient":
            return local_gradient(*arguments, key=("truth", draw), loss=loss)[0]
        after, _ = local_update(*arguments, key=("truth", draw), loss=loss)
    return {name: before[name] - after[name] for name in before if name in after}


def warn_of_length(retraining: Retraining, victim: str) -> None:
    """Warn where a message points where it should, and is longer or shorter than it should be."""
    is_known = retraining.is_stated and retraining.distance < _COMPARABLE
    if is_known and abs(math.log(retraining.length)) > math.log1p(_LENGTH_TOLERANCE):
        raise_doubt(
            "client %s: its message is %.3g times as long as training on truth.%s as [adversary.knowledge] states "
            "gives, so that attacks which compare lengths expect another one; fix learning_rate or the number of "
            "local steps, or, where clients sum over their examples, name a loss that sums",
            victim,
            retraining.length,
            victim,
        )


def _flatten(state: State, names: list[str]) -> Tensor:
    return torch.cat([state[name].detach().double().cpu().flatten() for name in names])


def _cosine_distance(first: Tensor, second: Tensor) -> float:
    return 1 - float(first @ second / (first.norm() * second.norm()))
