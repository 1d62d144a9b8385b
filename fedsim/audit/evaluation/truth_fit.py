"""Hold what a truth file says that a client held against the message that the client sent.

Only the attack file says what a recording made elsewhere means: the model, the loss, whether clients send weights or
gradients, in which order arrays come. If one of these is wrong, attacks find nothing and the data look safe. The
victim's own data tell: trained as the file states, they give the message that was recorded.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial

import torch

from fedsim.audit.evaluation.case import MAX_NAMES
from fedsim.audit.evaluation.doubts import raise_doubt
from fedsim.audit.evaluation.evaluator import EvaluationContext, FindingMetadata, first_round, group_members
from fedsim.audit.evaluation.retraining import (
    FAILURES,
    RETRAINED,
    UNRELATED,
    describe_unstated,
    find_explained_round,
    keeps_digits,
    retrain,
    shared_measurements,
    warn_of_length,
)
from fedsim.audit.evaluation.similarity import AttackedUpdate
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.errors import FedsimError, join_first
from fedsim.base.randomness import use_one_thread
from fedsim.federation.config import PUBLIC_KEY
from fedsim.interfaces.answer_findings import AnsweredValues
from fedsim.interfaces.findings import Finding, LabelDistribution, Reconstruction, Representatives, Texts
from fedsim.interfaces.row_findings import RowFeatures, RowLabels
from fedsim.recording.following_models import describe_misread_round

log = logging.getLogger(__name__)

_RELATED = 0.5
"""One minus the cosine up to which examples explain an update."""
_HARDLY, _AS_WELL = 0.8, 0.5
"""One minus the cosine from which on examples explain an update hardly, and the share of this cosine from which on
others explain it about as well."""
_OPPOSITE = 1.5
"""One minus the cosine from which on two messages point in opposite directions."""
_CLEARLY = 0.5
"""Share of a distance up to which the distance of another client's data is clearly smaller."""
_BEYOND_KNOWLEDGE = (
    "if clients do what cannot be stated there, as noise, clipping, compression or augmentation, say defended = true "
    "in [app]"
)
_MOST_OTHERS = 20
"""Clients that a victim's data are compared with where they explain its message, those next to it in [truth]."""
_MAX_STALENESS = 3
"""Most earlier models that a message is compared with, where its own does not give it."""


def read_attacked_update(about: FindingMetadata, context: EvaluationContext) -> AttackedUpdate | None:
    """Return the first update that a finding was read from, with what gradients need.

    None where the model is not known, or its inputs have no range.
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
    try:
        truth = context.case.truth(int(victim), None, group_members(about))
        message = read_attacked_update(about, context)
    except FAILURES:  # whoever needs them says so
        truth = message = None
    if truth is None or truth.answers:
        _doubt_round(finding, about, context)
        return ""
    if complaint := _describe_lacking_members(truth, about, context):
        return complaint
    _doubt_size(finding, truth, about, context)
    retraining = None if truth.has_tokens or message is None else retrain(message, truth, about, context)
    if retraining is not None and retraining.fits:  # so that w_t and the reply are read rightly
        warn_of_length(retraining, victim)
        return ""
    _doubt_round(finding, about, context)
    if truth.has_tokens or message is None:
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
        "fix [truth], or what [app] and [adversary.knowledge] say about the model, the loss (weights of classes too), "
        f"local training and the order of arrays{describe_unstated(message, context)}; {_BEYOND_KNOWLEDGE}"
    )
    if number := _find_stale_round(message, truth, about, context):
        sentence += (
            f", but from the w_t of round {number} it gives this one: the client answered with what it trained on an "
            "older model than it was sent, so that w_t - w_T is no update"
        )
        remedy = f"attack round {number}, or a client that keeps up"
    elif number := find_explained_round(message, truth, about, context):
        sentence += (
            f", but not in round {number}, as where clients add a term that follows from earlier rounds, as FedDyn's, "
            "and attacks read wrong gradients here"
        )
        remedy = f"attack round {number}{describe_unstated(message, context)}"
    if retraining.contradicts and not context.case.is_defended:
        return f"{sentence}; {remedy}"
    if not context.case.is_defended:
        raise_doubt("%s; findings are scored, but %s", sentence, remedy)
    return ""


def _doubt_round(finding: Finding, about: FindingMetadata, context: EvaluationContext) -> None:
    """Raise a doubt where the models that the server sent later contradict the attacked messages."""
    # Whoever attacks may see the models alone, and answers to queries and embeddings move no model.
    if "attacker" in about or isinstance(finding, AnsweredValues | RowFeatures | RowLabels):
        return
    reasons: dict[int, str] = context.cached_values.setdefault("misread rounds", {})
    number = first_round(about)
    if number not in reasons:
        try:
            reasons[number] = describe_misread_round(context.transcript, number)
        except FAILURES:  # whoever needs the transcript says so
            reasons[number] = ""
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
    if distance > RETRAINED and reversed_distance < _CLEARLY * distance:
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
        if not group_members(about):
            _doubt_exchange(message, truth, victim, context)
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
    if not is_others and (distance < UNRELATED or context.knowledge.defenses_in(first_round(about))):
        _warn_of_others(victim, distances, about, context)
        return ""
    if is_others:
        complaint += _describe_sign(distance)
        complaint += f", and what client {nearest} is said to have held does ({distances[nearest]:.3f})"
        remedy = f"fix {'[app] or ' if distance >= _OPPOSITE else ''}[truth]"
    else:
        complaint += f", nor do those of any other client{_describe_sign(distance)}"
        remedy = (
            "fix [truth], or what [app] and [adversary.knowledge] say about the model, the loss (weights of classes "
            f"too) and the messages{describe_unstated(message, context)}; {_BEYOND_KNOWLEDGE}"
        )
    excuse = ""
    if len(truth.data) < update.num_examples:
        excuse = f"the file holds {len(truth.data)} of N = {update.num_examples} examples"
    elif not keeps_digits(message, about, context):
        excuse = "rounding leaves little of its message"
    elif context.case.is_defended and not is_others:
        excuse = "the app is said to be defended"
    if excuse:
        raise_doubt("%s, client %s: %s; it is scored, since %s", about["attack"], victim, complaint, excuse)
        return ""
    return f"{complaint}; {remedy}"


def _doubt_exchange(message: AttackedUpdate, truth: Truth, victim: str, context: EvaluationContext) -> None:
    """Raise a doubt where the data of another client explain a message far better than those of the victim.

    Clients whose data are alike explain one another's messages, and exchanged files would go unnoticed.
    """
    distance = _distance_at_broadcast(message, truth)
    if not RETRAINED < distance < _RELATED:
        return
    clients = [client for client in context.case.files if client != PUBLIC_KEY]
    position = clients.index(victim)
    others = sorted((client for client in clients if client != victim), key=lambda c: abs(clients.index(c) - position))
    distances = {
        client: _distance_at_broadcast(message, Truth.load(context.case.files[client]))
        for client in others[:_MOST_OTHERS]
    }
    nearest = min(distances, key=lambda client: distances[client], default="")
    if nearest and distances[nearest] < _CLEARLY * distance:
        raise_doubt(
            "truth.%s: what client %s is said to have held explains the message of client %s better (1 - cosine %.3f) "
            "than its own data (%.3f), as where files were exchanged; name each client's own file",
            *(victim, nearest, victim, distances[nearest], distance),
        )


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
    except FAILURES:  # of another shape, say
        return math.nan


def _distance_at_broadcast(message: AttackedUpdate, truth: Truth) -> float:
    """Return one minus the cosine between the update and the gradient of a truth file at w_t; infinite for none."""
    try:
        return message.similarity_at_broadcast(truth.data, truth.labels)
    except FAILURES:  # of another shape, say
        return math.inf


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
        retraining = retrain(stale, truth, about, context, base=number)
        if retraining is not None and retraining.fits:
            return number
    return 0
