"""Hold the replies of a round against the models that the server sent after it.

A server averages what clients reply, so the next model tells whether w_t and the replies are read as they were meant.
Where they are not, attacks find nothing, and the clients look safe. Server optimisers move the model by other lengths
and in other metrics, but never against what most clients did in the first round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.base.errors import FedsimError
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State, float_norm

_MAX_REPLIES = 16
"""Most replies of a round that are read; so many of all tell the direction."""
_MAX_LATER_ROUNDS = 50
"""Most later rounds whose models are compared with that of a round."""
_AGAINST = -0.5
"""Cosine of two moves up to which they point in opposite directions."""
_EQUAL, _OTHER = 1e-2, 0.1
"""Distance from a mean move, in its lengths, up to which a model is the aggregate, and from which on it is not."""
_ROUNDING = 1e-6
"""Length of a move, relative to the model's, up to which rounding may make it."""
_MAX_SENTENCES = 1000
_sentences: dict[tuple[str, str, int], str] = {}
"""What `describe_misread_round` found, by messages, format and round."""
_Move = Mapping[str, Tensor]


def describe_misread_round(transcript: Transcript, number: int) -> str:
    """Say what speaks against w_t or the replies of a round as they are read; empty where nothing does.

    It is computed once for the same messages in the same format, as attacks are checked before they are made and again
    when they are scored.
    """
    try:
        earlier = [other for other in transcript.rounds if other < number]
        later = [other for other in transcript.rounds if other >= number][: _MAX_LATER_ROUNDS + 1]
        headers = transcript.hash_headers([*earlier[:2], *earlier[-1:], *later])
    except FedsimError:  # whoever needs them says so
        return ""
    key = headers, repr(transcript.message_format), number
    if key not in _sentences:
        if len(_sentences) >= _MAX_SENTENCES:
            _sentences.clear()
        _sentences[key] = _describe_round(transcript, number)
    return _sentences[key]


def _describe_round(transcript: Transcript, number: int) -> str:
    try:
        round_moves = _read_moves(transcript, number)
        if round_moves is None:
            return ""
        before, after, later = (_read_broadcast(transcript, number + distance) for distance in (-1, 1, 2))
        stays = not round_moves.are_gradients and _stays_the_same(transcript, number)
        opposed = after is not None and round_moves.is_opposed_by(after) and _starts_opposite(transcript)
    except FedsimError:  # whoever needs them says so
        return ""
    reason = round_moves.describe_early_mean(before if after is None else after)
    if not reason and stays:
        reason = (
            "all later rounds begin with the same model, though clients moved; where the server aggregates, what is "
            "recorded as sent is not what was sent, and moves are read from the wrong model"
        )
    elif not reason and opposed:
        reason = (
            "the next model went the opposite way of the replies as they are read; see that [app] replies says "
            "what clients send: a delta w_T - w_t, or a gradient, which the server subtracts"
        )
    elif not reason and after is not None and later is not None:
        reason = round_moves.describe_following(after, later)
    return f"round {number}: {reason}" if reason else ""


@dataclass(frozen=True, kw_only=True)
class _RoundMoves:
    """Moves of the replies of a round, in float64.

    Attributes:
        before: w_t.
        means: mean of the moves, with equal weights and by N; of gradients, the negative mean.
        mean_direction: mean of the moves, each of length 1.
        longest: length of the longest move.
        are_whole: whether these are all replies of several clients.
        are_gradients: whether clients sent gradients, in place of weights or deltas.
    """

    before: State
    means: Sequence[_Move]
    mean_direction: _Move
    longest: float
    are_whole: bool
    are_gradients: bool

    def describe_early_mean(self, neighbour: State | None) -> str:
        """Say that w_t is the mean of the replies, so that it was written after the aggregation.

        Args:
            neighbour: the model of the next round or the one before. Where it is the same, training has converged, and
                clients move from w_t in all directions.
        """
        if not self.are_whole or self.are_gradients or min(map(float_norm, self.means)) > _EQUAL * self.longest:
            return ""
        if neighbour is not None and float_norm(self._move_to(neighbour)) < _OTHER * self.longest:
            return ""
        return (
            "what is recorded as sent is the mean of what clients answered to it, as where it is written after the "
            "server aggregated, so that each move is read from the wrong model; write it when it is sent"
        )

    def is_opposed_by(self, after: State) -> bool:
        """Return whether the model after the round is in the opposite direction of what clients did.

        Of few clients that move far, as poisoned ones, a robust server goes another way; but not of most of them.
        """
        step = self._move_to(after)
        return max(_cosine(step, mean) for mean in (*self.means, self.mean_direction)) <= _AGAINST

    def describe_following(self, after: State, later: State) -> str:
        """Say how the model after the round, and the one after that, contradict the replies."""
        if not float_norm(self._move_to(after)):
            return ""  # a server may wait for more replies, or refuse these
        if not self.are_whole or self.are_gradients:
            return ""
        distances = [
            min(float_norm(_subtract(self._move_to(model), mean)) / float_norm(mean) for mean in self.means)
            for model in (after, later)
        ]
        if distances[0] >= _OTHER and distances[1] <= _EQUAL:
            return (
                "the mean of the replies is the model that was sent two rounds later, not in the next, so that what is "
                "recorded as sent is a round old and moves are read from the wrong model; write it when it is sent"
            )
        return ""

    def _move_to(self, model: State) -> _Move:
        return {name: model[name].double() - self.before[name].double() for name in self.means[0] if name in model}


def _read_moves(transcript: Transcript, number: int) -> _RoundMoves | None:
    """Read the moves of a round; None where clients were sent several models, or moved by more than the replies say."""
    header = transcript.header(number)
    if len(header.broadcasts) != 1 or transcript.adds_known_terms(number):
        return None
    updates = [transcript.update(number, client) for client in transcript.clients(number)[:_MAX_REPLIES]]
    if not updates:
        return None
    before = updates[0].before
    names = [name for name, tensor in before.items() if tensor.is_floating_point()]
    for update in updates:
        gradients = update.pseudo_gradient
        names = [name for name in names if name in gradients and gradients[name].shape == before[name].shape]
    moves = [{name: -update.pseudo_gradient[name].double() for name in names} for update in updates]
    weights = [[1.0] * len(updates), [float(update.num_examples) for update in updates]]
    means = [_mean(moves, of_replies) for of_replies in weights if sum(of_replies)]
    lengths = [float_norm(move) for move in moves]
    scale = float_norm({name: before[name].double() for name in names})
    if not all(map(math.isfinite, lengths)) or max(lengths) <= _ROUNDING * scale:  # nobody trained, say
        return None
    return _RoundMoves(
        before=before,
        means=means,
        mean_direction=_mean(moves, [1 / length if length else 0.0 for length in lengths]),
        longest=max(lengths),
        are_whole=len(updates) == len(header.replies) > 1 and not header.failures,
        are_gradients=any(update.gradient is not None for update in updates),
    )


def _starts_opposite(transcript: Transcript) -> bool:
    """Return whether the model after the first round is in the opposite direction of what clients did.

    Momentum of a server may carry it there in a later round.
    """
    first = transcript.rounds[0]
    moves, after = _read_moves(transcript, first), _read_broadcast(transcript, first + 1)
    return moves is not None and after is not None and moves.is_opposed_by(after)


def _stays_the_same(transcript: Transcript, number: int) -> bool:
    """Return whether the rounds after this one are recorded to begin with its model, each of them."""
    later = [other for other in transcript.rounds if other > number]
    sent = transcript.header(number).broadcasts
    return bool(later) and all(transcript.header(other).broadcasts == sent for other in later[:_MAX_LATER_ROUNDS])


def _read_broadcast(transcript: Transcript, number: int) -> State | None:
    """Return the model that all clients were sent in a round; None where it is not recorded, or there were several."""
    if number not in transcript.rounds:
        return None
    header = transcript.header(number)
    if len(header.broadcasts) != 1 or not header.replies:
        return None
    return transcript.update(number, header.replies[0].client).before


def _mean(moves: Sequence[_Move], weights: Sequence[float]) -> _Move:
    mean = {}
    for name in moves[0]:
        weighted = [weight * move[name] for weight, move in zip(weights, moves, strict=True)]
        mean[name] = torch.stack(weighted).sum(0) / sum(weights)
    return mean


def _subtract(first: _Move, second: _Move) -> _Move:
    return {name: tensor - second[name] for name, tensor in first.items()}


def _cosine(first: _Move, second: _Move) -> float:
    lengths = float_norm(first) * float_norm(second)
    product = sum(float((tensor * second[name]).sum()) for name, tensor in first.items())
    return product / lengths if lengths else 0.0
