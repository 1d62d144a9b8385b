"""Warn of recorded replies that do not look like what they are read as."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from contextlib import suppress

import torch
from torch import nn

from fedsim.audit.stated_model import MAX_NAMES, grey_inputs, shared_shapes
from fedsim.base.errors import AttackError, TranscriptError, join_first
from fedsim.base.randomness import generator
from fedsim.interfaces.knowledge import Knowledge
from fedsim.inversion.named_states import named_states, running_statistic_names
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, Update, compare_states, float_norm, match_any_names
from fedsim.training.first_layer import find_first_layer, measure_rank
from fedsim.training.model_state import sendable_shapes

log = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""Most clients whose first updates are compared with the model and with each other."""
_MAX_REPEAT_ROUNDS = 50
"""Most rounds in which replies are looked for that a client has sent before."""
_MAX_RANKS = 4
"""Most updates whose rank is computed."""
_LEAST_RESEMBLANCE = 0.5
"""Cosine of the matrices that a client was sent and that it returned, below which they may be of two models."""


def warn_of_replies(updates: Sequence[Update]) -> None:
    """Warn where replies do not look like the weights that they are read as."""
    first = updates[0]
    # Models before and after removals of clients are imported as one reply to different broadcasts.
    copies = [
        _are_states_equal(first.payload.arrays(), update.payload.arrays())
        and _are_states_equal(first.before, update.before)
        for update in updates[1:]
    ]
    if copies and all(copies):
        log.warning(
            "round %d: %s %d replies are identical; either no client trains, or these are copies of an aggregate",
            first.round,
            "all" if len(updates) < MAX_CLIENTS else "the first",
            len(updates),
        )
    for update in updates:
        if update.payload.kind != "weights":
            if _looks_like_weights(update):
                log.warning(
                    "round %d, client %d: its reply is read as a %s, and looks like the weights that it was sent; if "
                    'clients send w_T, say replies = "weights" in [app]',
                    update.round,
                    update.client,
                    update.payload.kind,
                )
                return
            continue
        if not _has_equal_shapes(update):
            continue
        # A delta read as weights is small, and differs from the broadcast by about the broadcast.
        broadcast_norm, reply_norm = float_norm(update.before), float_norm(update.after)
        distance = float_norm(update.pseudo_gradient)
        if broadcast_norm > 0 and distance > 0.8 * broadcast_norm and reply_norm < 0.5 * broadcast_norm:
            log.warning(
                "round %d, client %d: its reply has norm %.3g, what it was sent %.3g, their difference %.3g; it looks "
                'like a delta or a gradient, which [app] replies = "delta" or "gradient" says',
                update.round,
                update.client,
                reply_norm,
                broadcast_norm,
                distance,
            )
            return
    _warn_of_other_models(updates)


def warn_of_repeated_replies(transcript: Transcript) -> None:
    """Warn where a client answers another model with the bytes of its earlier reply, which is no update of that."""
    earlier: dict[tuple[int, str], tuple[int, str]] = {}
    repeats = list[tuple[int, int, int]]()
    for number in transcript.rounds[:_MAX_REPEAT_ROUNDS]:
        with suppress(TranscriptError):  # a damaged round is reported when it is attacked
            header = transcript.header(number)
            for reply in header.replies:
                broadcast = header.broadcasts[reply.broadcast]
                first_round, first_broadcast = earlier.setdefault((reply.client, reply.sha256), (number, broadcast))
                if first_broadcast != broadcast:
                    repeats.append((number, reply.client, first_round))
    if not repeats:
        return
    number, client, first_round = repeats[0]
    log.warning(
        "round %d, client %d: its reply is byte for byte that of round %d, and it was sent another model: it answers "
        "with what it trained before, so that w_t - w_T is no update (%d such in the first %d rounds); attack earlier "
        "rounds or others",
        *(number, client, first_round, len(repeats), len(transcript.rounds[:_MAX_REPEAT_ROUNDS])),
    )


def warn_of_other_shapes(updates: Sequence[Update]) -> None:
    """Warn where clients are sent models of several shapes, as parts of one that fit each device."""
    shapes = [{name: tensor.shape for name, tensor in update.before.items()} for update in updates]
    differing = [update for update, sent in zip(updates, shapes, strict=True) if sent != shapes[0]]
    if not differing:
        return
    log.warning(
        "round %d: clients are sent models of different shapes, %s another one than client %d; attack each size in a "
        "file of its own, with its model and adversary.victims",
        updates[0].round,
        join_first([f"client {update.client}" for update in differing], MAX_NAMES),
        updates[0].client,
    )


def _warn_of_other_models(updates: Sequence[Update]) -> None:
    """Warn where replies have nothing of what they are compared with, as those of one of several models.

    Scales and statistics of norm layers are alike in all models, so that matrices alone are compared.
    """
    strangers = []
    for update in updates:
        if update.payload.kind != "weights" or not _has_equal_shapes(update):
            continue
        sent = {name: tensor for name, tensor in update.before.items() if tensor.ndim > 1}
        product, square, returned_square = compare_states(sent, update.after)
        norms = math.sqrt(square) * math.sqrt(returned_square)
        if norms > 0 and product < _LEAST_RESEMBLANCE * norms:
            strangers.append((update, product / norms))
    if not strangers:
        return
    update, cosine = strangers[0]
    log.warning(
        "round %d, client %d: its reply hardly resembles what it was sent (cosine %.2g), like %d of %d replies; it "
        "may be of another model, if the server sends several ([app] message or names chooses one), or training may "
        "have replaced the weights that were sent",
        *(update.round, update.client, cosine, len(strangers), len(updates)),
    )


def warn_of_update_ranks(network: nn.Module, knowledge: Knowledge, updates: Sequence[Update]) -> None:
    """Warn where the update of a first linear layer has a larger rank than N, see `measure_rank`."""
    assert knowledge.input_shape is not None
    grey = grey_inputs(network, knowledge, 2)
    rng = generator("first layer")
    noise = torch.rand(grey.shape, generator=rng, dtype=grey.dtype).to(grey.device)
    layer = find_first_layer(network, noise)
    if layer is None:
        return
    for update in updates[:_MAX_RANKS]:  # singular values of a wide layer take half a second
        change = None
        with suppress(TranscriptError):  # an update that does not fit is reported when it is attacked
            change = (match_any_names(update.pseudo_gradient, sendable_shapes(network)) or {}).get(layer.weight)
        if change is None or not torch.isfinite(change).all():
            continue
        if not 0 < update.num_examples < min(change.shape):
            continue
        # The difference of two weights carries the rounding of both.
        rounding = 0.0
        if update.payload.kind == "weights":
            rounding = torch.finfo(torch.float32).eps * float_norm(update.before)
        rank, _ = measure_rank(change, rounding)
        if rank > update.num_examples:
            log.warning(
                "round %d, client %d: N is %d, but the update of '%s' has rank %d, more than so many examples make; if "
                "clients count batches, say N with [app] num_examples; other reasons are an optimiser that scales "
                "each weight (Adam), weight decay, or noise",
                *(update.round, update.client, update.num_examples, layer.weight, rank),
            )
            return


def warn_of_still_layers(network: nn.Module, updates: Sequence[Update], private_names: Collection[str]) -> None:
    """Warn of parameters that no reply changed, though `network` says that clients train them.

    Args:
        private_names: tensors that stay with the clients.
    """
    changed, orders = set[str](), shared_shapes(network, private_names)
    for update in updates:
        with suppress(TranscriptError):  # an update that does not fit is reported when it is attacked
            pseudo_gradient = match_any_names(update.pseudo_gradient, orders) or {}
            changed |= {name for name, tensor in pseudo_gradient.items() if tensor.any()}
    parameters = [(name, parameter) for name, parameter in network.named_parameters() if name not in private_names]
    trained = [name for name, parameter in parameters if parameter.requires_grad]
    unchanged = [name for name in trained if name not in changed]
    if unchanged and changed:
        log.warning(
            "round %d: %s moved in no reply; if clients do not train them, set requires_grad = False on them in the "
            "function that adversary.knowledge.model names, or attacks expect that they move",
            updates[0].round,
            join_first(unchanged, MAX_NAMES),
        )


def warn_of_missing_statistics(network: nn.Module, updates: Sequence[Update]) -> None:
    """Warn where BatchNorm's running statistics are sent to clients and do not come back.

    Where they do, they tell whether a client normalised by the batch: then they moved.
    """
    for update in updates:
        with suppress(TranscriptError, AttackError):  # an update that does not fit is reported when it is attacked
            states = named_states(update, network, "", body_alone=True)
            missing = [name for name in running_statistic_names(network) if name in states.before]
            if missing and not any(name in states.after for name in missing):
                log.warning(
                    "round %d, client %d: it was sent %s and returned no running statistics, so that nothing tells "
                    "whether it normalises by the batch as it trains; attacks take it that it does not: if it does, "
                    "choose one that is told so, as see-through-gradients with exact_statistics = true, or tgias-ro "
                    "with batch_statistics = true, and expect little of others",
                    update.round,
                    update.client,
                    join_first(missing, MAX_NAMES),
                )
                return


def _are_states_equal(first: State, second: State) -> bool:
    if first.keys() != second.keys():
        return False
    return all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def _looks_like_weights(update: Update) -> bool:
    """Return whether what is read as a delta or a gradient is nearly w_t, which no move is."""
    moves = update.payload.values(update.payload.kind, update.before)
    product, square, broadcast_square = compare_states(moves, update.before)
    if not square or not broadcast_square:
        return False
    return product > 0.9 * math.sqrt(square * broadcast_square) and 0.25 < square / broadcast_square < 4


def _has_equal_shapes(update: Update) -> bool:
    """Return whether the reply has the broadcast's floating-point tensors and shapes."""
    return all(
        name in update.after and update.after[name].shape == tensor.shape and tensor.is_floating_point()
        for name, tensor in update.before.items()
    )
