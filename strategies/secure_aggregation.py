"""What a server learns under Flower's SecAgg+: no client's update, but the sum over those that answered.

The server sees the public keys, the masked vectors and the shares of secrets that unmask their sum; see
`flwr.server.workflow.SecAggPlusWorkflow` and Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead", CCS 2020. All that is done here is what that server does itself, with Flower's own functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from fedsim.wire.messages import Update
from fedsim.wire.payloads import Payload
from strategies.exchange import Content, Exchange

_RECORD = "secaggplus_configs"
_SETUP, _COLLECT, _UNMASK = "setup", "collect_masked_vectors", "unmask"
Vector = list[NDArray[Any]]


class MaskedSum:
    """Follows the stages of a round of SecAgg+ and unmasks the sum when the last is done."""

    def __init__(self) -> None:
        self._stages: dict[str, Exchange] = {}

    def of(self, exchange: Exchange, number: int, names: Mapping[int, int]) -> Update | None:
        """The sum over the group as an update of round `number`, once `exchange` is the stage that unmasks it.

        It has the weighted mean of what the clients returned, and the sum of their N.

        Args:
            names: what clients are called, by their nodes.

        Raises:
            ValueError: shares are missing, so nobody can unmask it.
        """
        stage = _said(exchange.asked[0].content).get("stage")
        if stage == _SETUP:
            self._stages = {}
        if stage in (_SETUP, _COLLECT):
            self._stages[str(stage)] = exchange
        if stage != _UNMASK or set(self._stages) != {_SETUP, _COLLECT}:
            return None
        collected = self._stages[_COLLECT]
        vectors = {asked.node: said for asked, said in collected.replies if isinstance(said, Content) and _said(said)}
        mean = _unmasked(self._stages[_SETUP], exchange, vectors)
        asked = collected.asked[0]
        weights = {
            name: torch.from_numpy(values).to(tensor.dtype).reshape(tensor.shape)
            for (name, tensor), values in zip(asked.before.items(), mean, strict=True)
        }
        return Update(
            round=number,
            client=min(names.get(node, node) for node in vectors),
            before=asked.before,
            payload=Payload.dense(weights, "weights"),
            num_examples=sum(collected.count(said) for said in vectors.values()),
            config=asked.content.facts(),
            members=tuple(sorted(names.get(node, node) for node in vectors)),
        )


def _unmasked(setup: Exchange, unmasking: Exchange, vectors: Mapping[int, Content]) -> Vector:
    """The weighted mean of the vectors that clients quantised, masked and sent."""
    from flwr.common import bytes_to_ndarray
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        get_parameters_shape,
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    rules = _said(setup.asked[0].content)
    total: Vector = []
    for said in vectors.values():
        vector = [bytes_to_ndarray(part) for part in _said(said)["masked_params"]]
        total = parameters_addition(total, vector) if total else vector
    total, shapes = parameters_mod(total, rules["mod_range"]), get_parameters_shape(total)
    given = _shares(unmasking)
    for node in sorted(_masking(unmasking)):
        shares = given.get(node, [])
        if len(shares) < rules["threshold"]:
            raise ValueError(f"{len(shares)} shares of client {node} came back, {rules['threshold']} are needed")
        secret = combine_shares(shares)
        if node in vectors:
            total = parameters_subtraction(total, pseudo_rand_gen(secret, rules["mod_range"], shapes))
            continue
        for other, seed in _pairs(setup, unmasking, node, secret):  # it dropped out: its masks are in those of others
            undo = parameters_addition if node > other else parameters_subtraction
            total = undo(total, pseudo_rand_gen(seed, rules["mod_range"], shapes))
    unmasked = parameters_mod(total, rules["mod_range"])
    return weighted_mean(unmasked, len(vectors), rules["clipping_range"], rules["target_range"])


def weighted_mean(total: Vector, count: int, clip: float, levels: int) -> Vector:
    """The weighted mean of what was quantised, in float64.

    Args:
        total: the sum, modulo the ring's size, of the weights of `count` clients and of their weighted arrays.
        clip: the clipping range.
        levels: into which `[-clip, clip]` is cut; weights are multiples of one over it.
    """
    from flwr.common.secure_aggregation.ndarrays_arithmetic import factor_extract
    from flwr.common.secure_aggregation.quantization import dequantize

    weight, arrays = factor_extract(total)
    offset = (count - 1) * clip
    return [(part - offset) * (levels / weight) for part in dequantize(arrays, clip, levels)]


def _masking(unmasking: Exchange) -> set[int]:
    """The nodes whose masks are in the sum: those that sent a vector, and those that dropped out before."""
    asked = [_said(asked.content) for asked in unmasking.asked]
    return {node for said in asked for key in ("active_nids", "dead_nids") for node in said[key]}


def _shares(unmasking: Exchange) -> dict[int, list[bytes]]:
    """By node, the shares of its secret that the others gave to the server."""
    found: dict[int, list[bytes]] = {}
    for _, said in unmasking.replies:
        if isinstance(said, Content) and "nids" in _said(said):
            for node, share in zip(_said(said)["nids"], _said(said)["shares"], strict=True):
                found.setdefault(node, []).append(share)
    return found


def _pairs(setup: Exchange, unmasking: Exchange, gone: int, secret: bytes) -> list[tuple[int, bytes]]:
    """The neighbours of a client that dropped out, each with the seed of the mask that it shares with it."""
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    keys = {asked.node: _said(said)["pk1"] for asked, said in setup.replies if isinstance(said, Content)}
    neighbours = [asked.node for asked in unmasking.asked if gone in _said(asked.content)["dead_nids"]]
    own = bytes_to_private_key(secret)
    return [(node, generate_shared_key(own, bytes_to_public_key(keys[node]))) for node in neighbours]


def _said(content: Content) -> Mapping[str, Any]:
    return content.config.get(_RECORD, {})
