"""Hold what a truth file says that a client held against the message that the client sent.

Only the attack file says what a recording made elsewhere means: the model, the loss, whether clients send weights or
gradients, in which order arrays come. If one of these is wrong, attacks find nothing and the data look safe. The
victim's own data tell: trained as the file states, they give the message that was recorded.
"""

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

from fedsim.audit.evaluation.case import MAX_NAMES
from fedsim.audit.evaluation.doubts import raise_doubt
from fedsim.audit.evaluation.evaluator import EvaluationContext, FindingMetadata, first_round, group_members
from fedsim.audit.evaluation.local_optimum import match_state
from fedsim.audit.evaluation.measurement_cache import MeasurementCache
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import FedsimError, join_first
from fedsim.base.randomness import use_one_thread
from fedsim.base.task import Loss
from fedsim.federation.config import PUBLIC_KEY
from fedsim.interfaces.findings import Finding, LabelDistribution, Reconstruction, Representatives, Texts
from fedsim.interfaces.knowledge import FACTS, config_keys
from fedsim.recording.following_models import describe_misread_round
from fedsim.recording.wire_format import State, float_norm
from fedsim.training.loop import local_gradient, local_update
from fedsim.training.settings import LocalTraining

log = logging.getLogger(__name__)

_UNRELATED, _RELATED = 0.95, 0.5
"""One minus the cosine from which on examples do not explain an update, and up to which they do."""
_HARDLY, _AS_WELL = 0.8, 0.5
"""One minus the cosine from which on examples explain an update hardly, and the share of this cosine from which on
others explain it about as well."""
_OPPOSITE = 1.5
"""One minus the cosine from which on two messages point in opposite directions."""
_RETRAINED, _COMPARABLE, _CONTRADICTION = 0.02, 0.2, 0.5
"""One minus the cosine of a message and one trained anew, up to which they are equal, up to which their lengths are
compared, and from which on they differ; settings that nobody stated, such as weight decay, reach 0.4 of right files."""
_CLEARLY = 0.5
"""Share of a distance up to which the distance of another client's data is clearly smaller."""
_BEYOND_KNOWLEDGE = (
    "if clients do what cannot be stated there, as noise, clipping, compression or augmentation, say defended = true "
    "in [app]"
)
_SPREADS = 3
"""How many times farther from a message than from each other two trained anew may be."""
_LENGTH_TOLERANCE = 0.25
"""Share by which the length of a message may differ from that of one trained anew."""
_MAX_STALENESS = 3
"""Most earlier models that a message is compared with, where its own does not give it."""
_MAX_WORK = 2e9
"""Most examples times parameters that are trained anew for one message."""
_TRAINING = tuple(name for name in FACTS if name in LocalTraining.__dataclass_fields__)
"""Settings of local training that can be stated."""
_FAILURES = (FedsimError, RuntimeError, ValueError, IndexError, TypeError)
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
        return self.distance <= min(_RETRAINED + _SPREADS * self.spread, _UNRELATED)

    @property
    def contradicts(self) -> bool:
        """Return whether the message cannot be one of these data, if clients do nothing else."""
        return self.is_stated and self.distance > max(_CONTRADICTION, _COMPARABLE + _SPREADS * self.spread)


def shared_measurements(context: EvaluationContext) -> MeasurementCache:
    """Return what findings that are judged in `context` share."""
    cache: MeasurementCache = context.cached_values.setdefault("measurements", MeasurementCache())
    return cache


def read_attacked_update(about: FindingMetadata, context: EvaluationContext) -> AttackedUpdate | None:
    """Return the first update that a finding was read from, with what gradients need.

    None where the model is not known, or its inputs have no range.

    Raises:
        FedsimError: the update is not recorded.
    """
    knowledge = context.knowledge
    if knowledge.model is None or knowledge.value_range is None:
        return None
    assert knowledge.loss is not None
    low, high = (torch.tensor(end) for end in knowledge.value_range)
    update = context.transcript.update(first_round(about), int(about["victim"]))
    return AttackedUpdate(
        model=knowledge.model(),
        loss=knowledge.loss,
        update=update,
        value_range=(low, high),
        settings=context.case.training,
        device=knowledge.device,
    )


@use_one_thread()
def find_complaint(finding: Finding, about: FindingMetadata, context: EvaluationContext) -> str:
    """Say why the truth file of a victim cannot be the data behind its message; empty where it can.

    Warnings say what fits badly and is scored all the same. Who asks who took part in training, as after a removal,
    reads messages that the victim's own data need not explain, unless its training is stated.
    """
    victim = str(about["victim"])
    if not context.case.is_described_by_file or victim not in context.case.files:
        return ""
    _doubt_round(about, context)
    try:
        truth = context.case.truth(int(victim), None, group_members(about))
        message = read_attacked_update(about, context)
    except _FAILURES:  # whoever needs them says so
        return ""
    if truth is None or truth.answers:
        return ""
    if complaint := _describe_lacking_members(truth, about, context):
        return complaint
    _doubt_size(finding, truth, about, context)
    if truth.has_tokens or message is None:
        return ""
    retraining = _retrain(message, truth, about, context)
    if retraining is not None and retraining.fits:
        _warn_of_length(retraining, victim)
        return ""
    _doubt_channels(message, truth, victim, context)
    reads_examples = isinstance(finding, Reconstruction | LabelDistribution)
    complaint = _describe_unrelated(message, truth, about, context) if reads_examples else ""
    if complaint or retraining is None:
        return complaint
    sentence = (
        f"what truth.{victim} says that it held, trained as [adversary.knowledge] states, gives another message "
        f"(1 - cosine {retraining.distance:.3f}, with its batches in other orders {retraining.spread:.3f})"
        f"{_describe_sign(retraining.distance)}"
    )
    remedy = (
        "fix [truth], or what [app] and [adversary.knowledge] say of the model, the loss (weights of classes too), "
        f"local training and the order of arrays{_describe_unstated(message, context)}; {_BEYOND_KNOWLEDGE}"
    )
    if number := _find_stale_round(message, truth, about, context):
        sentence += (
            f", but from the w_t of round {number} it gives this one: the client answered with what it trained on an "
            "older model than it was sent, so that w_t - w_T is no update"
        )
        remedy = f"attack round {number}, or a client that keeps up"
    elif number := _find_explained_round(message, truth, about, context):
        sentence += (
            f", but not in round {number}, as where clients add a term that follows from earlier rounds, as FedDyn's, "
            "and attacks read wrong gradients here"
        )
        remedy = f"attack round {number}{_describe_unstated(message, context)}"
    if retraining.contradicts and not context.case.is_defended:
        return f"{sentence}; {remedy}"
    if not context.case.is_defended:
        raise_doubt("%s; findings are scored, but %s", sentence, remedy)
    return ""


def _doubt_round(about: FindingMetadata, context: EvaluationContext) -> None:
    """Raise a doubt where the models that the server sent later contradict the attacked messages."""
    if "attacker" in about:  # who sees the models alone
        return
    reasons: dict[int, str] = context.cached_values.setdefault("misread rounds", {})
    number = first_round(about)
    if number not in reasons:
        reasons[number] = describe_misread_round(context.transcript, number)
    if reasons[number]:
        raise_doubt(reasons[number])


def _describe_lacking_members(truth: Truth, about: FindingMetadata, context: EvaluationContext) -> str:
    """Say that the files of a sum hold fewer examples than it is over, so that some members' are not among them."""
    members, count = group_members(about), _read_count(about, context)
    if len(members) < 2 or count <= len(truth.data) or all(str(member) in context.case.files for member in members):
        return ""  # files of all may hold some of their examples
    return (
        f"the sum over clients {join_first(members, MAX_NAMES)} is over N = {count} examples, and "
        f"truth.{about['victim']} holds {len(truth.data)}; name a file of each of these clients, or one "
        "alone that holds the examples of all"
    )


def _doubt_size(finding: Finding, truth: Truth, about: FindingMetadata, context: EvaluationContext) -> None:
    """Raise a doubt where truth files hold more examples than the message is of, as of a mini-batch.

    No attack can find the others, which count as not found.
    """
    if not isinstance(finding, Reconstruction | Texts) or isinstance(finding, Representatives):
        return
    count = _read_count(about, context)
    if finding.claims == "update" and 0 < count < len(truth.data):
        raise_doubt(
            "%s, client %s: truth.%s holds %d examples and the message is of N = %d, so that others count as not "
            "found; name a file of the examples behind the message, or say N with [app] num_examples",
            *(about["attack"], about["victim"], about["victim"], len(truth.data), count),
        )


def _doubt_channels(message: AttackedUpdate, truth: Truth, victim: str, context: EvaluationContext) -> None:
    """Raise a doubt where images explain a message far better with their channels in reverse order."""
    if truth.data.ndim != 4 or truth.data.shape[1] != 3:
        return
    distance = _distance(message, truth, context)
    reversed_distance = _distance(message, replace(truth, data=truth.data.flip(1)), context)
    if distance > _RETRAINED and reversed_distance < _CLEARLY * distance:
        raise_doubt(
            "truth.%s: with the channels of its images in reverse order, as of BGR and RGB, it explains the message "
            "better (1 - cosine %.3f) than as it is (%.3f); write the images as the model is fed with them",
            *(victim, reversed_distance, distance),
        )


def _read_count(about: FindingMetadata, context: EvaluationContext) -> int:
    """Return N of the attacked message; 0 where it is not known."""
    try:
        reply = context.transcript.header(first_round(about)).find_reply(int(about["victim"]))
    except FedsimError:
        return 0
    return 0 if reply is None else context.transcript.message_format.num_examples_of(reply.client, reply.num_examples)


def _describe_unrelated(
    message: AttackedUpdate, truth: Truth, about: FindingMetadata, context: EvaluationContext
) -> str:
    """Say that no gradient of a victim's data, at any point of the line from w_t to w_T, is like its message."""
    victim, update = str(about["victim"]), message.update
    if update.gradient is not None and update.num_examples < len(truth.data):
        return ""  # a mini-batch of them
    distance = _distance(message, truth, context)
    if math.isnan(distance) or distance < _RELATED:
        return ""
    members = {str(member) for member in group_members(about)}
    distances = {}
    for client, file in context.case.files.items():
        if client != PUBLIC_KEY and client not in members:
            distances[client] = _distance(message, Truth.load(file), context)
    distances[victim] = distance
    nearest = min(distances, key=lambda client: distances[client])
    complaint = f"what truth.{victim} says that it held does not explain its message (1 - cosine {distance:.3f})"
    is_others = distances[nearest] < min(_RELATED, _CLEARLY * distance)
    # Many local steps turn an update away from any gradient, and noise may leave nothing of it.
    if not is_others and (distance < _UNRELATED or context.knowledge.defenses_in(first_round(about))):
        _warn_of_others(victim, distances, about, context)
        return ""
    if is_others:
        complaint += _describe_sign(distance)
        complaint += f", and what client {nearest} is said to have held does ({distances[nearest]:.3f})"
        remedy = f"fix {'[app] or ' if distance >= _OPPOSITE else ''}[truth]"
    else:
        complaint += f", nor does anybody else's{_describe_sign(distance)}"
        remedy = (
            "fix [truth], or what [app] and [adversary.knowledge] say of the model, the loss (weights of classes too) "
            f"and the messages{_describe_unstated(message, context)}; {_BEYOND_KNOWLEDGE}"
        )
    excuse = ""
    if len(truth.data) < update.num_examples:
        excuse = f"the file holds {len(truth.data)} of N = {update.num_examples} examples"
    elif not _keeps_digits(message, about, context):
        excuse = "rounding leaves little of its message"
    elif context.case.is_defended and not is_others:
        excuse = "the app is said to be defended"
    if excuse:
        raise_doubt("%s, client %s: %s; it is scored, since %s", about["attack"], victim, complaint, excuse)
        return ""
    return f"{complaint}; {remedy}"


def _warn_of_others(
    victim: str, distances: dict[str, float], about: FindingMetadata, context: EvaluationContext
) -> None:
    """Warn where a victim's data explain its message hardly, and about as well as those of another client."""
    others = {client: distance for client, distance in distances.items() if distance >= 0 and client != victim}
    if not others or distances[victim] < _HARDLY or context.case.is_defended:
        return
    nearest = min(others, key=lambda client: others[client])
    if 1 - others[nearest] >= _AS_WELL * (1 - distances[victim]):
        raise_doubt(
            "%s, client %s: what truth.%s says that it held explains its message hardly (1 - cosine %.3f), and hardly "
            "better than what client %s held (%.3f); see that [app] reads the messages rightly, as where clients "
            "train one of several models, or else it is long training that hides the data",
            *(about["attack"], victim, victim, distances[victim], nearest, others[nearest]),
        )


def _describe_sign(distance: float) -> str:
    if distance < _OPPOSITE:
        return ""
    return (
        ', and points the opposite way, as where a delta is w_t - w_T, which [app] replies = "gradient" reads, or a '
        'gradient has a minus sign, which "delta" reads'
    )


def _distance(message: AttackedUpdate, truth: Truth, context: EvaluationContext) -> float:
    """Return one minus the cosine between the update and the gradient of a truth file.

    It is the least along the line from w_t to w_T.
    """
    try:
        update = message.update
        compute = partial(message.similarities, truth.data, truth.labels)
        inputs = update.round, update.client, truth.data, truth.labels
        return min(shared_measurements(context).find(compute, "truth file", *inputs).values())
    except _FAILURES:  # of another shape, say
        return math.nan


def _retrain(
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
    if not _keeps_digits(message, about, context):
        return None
    found = list[Retraining]()
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
        found.append(retraining)
        if retraining.fits:
            break
    return min(found, key=lambda one: one.distance - _SPREADS * one.spread) if found else None


def _find_stale_round(message: AttackedUpdate, truth: Truth, about: FindingMetadata, context: EvaluationContext) -> int:
    """Return the latest earlier round from whose w_t training gives what a client answered; 0 for none."""
    transcript, update = context.transcript, message.update
    earlier = [number for number in transcript.rounds if number < update.round]
    for number in reversed(earlier[-_MAX_STALENESS:]):
        header = transcript.header(number)
        if not header.replies:
            continue
        reply = header.find_reply(update.client) or header.replies[0]
        before = transcript.update(number, reply.client).before
        stale = replace(message, update=replace(update, before=before))
        retraining = _retrain(stale, truth, about, context, base=number)
        if retraining is not None and retraining.fits:
            return number
    return 0


def _find_explained_round(
    message: AttackedUpdate, truth: Truth, about: FindingMetadata, context: EvaluationContext
) -> int:
    """Return the first round of the victim, if training gives its message there and the round is earlier; else 0."""
    transcript, update = context.transcript, message.update
    for number in transcript.rounds:
        if number < update.round and transcript.header(number).find_reply(update.client):
            first = replace(message, update=transcript.update(number, update.client))
            retraining = _retrain(first, truth, {**about, "first_round": number}, context)
            return number if retraining is not None and retraining.fits else 0
    return 0


def _keeps_digits(message: AttackedUpdate, about: FindingMetadata, context: EvaluationContext) -> bool:
    """Tell whether rounding, as to float16, left the direction of a message as it was.

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
                except _FAILURES:  # an optimizer of the app's own
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


def _describe_unstated(message: AttackedUpdate, context: EvaluationContext) -> str:
    """Ask for the settings of local training that nobody states; empty where all are."""
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
    if distance > _RETRAINED:
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


def _warn_of_length(retraining: Retraining, victim: str) -> None:
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
