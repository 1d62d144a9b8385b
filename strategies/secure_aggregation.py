"""Unmasking of the sum that a server learns under Flower's SecAgg+, instead of single updates.

The server sees public keys, masked vectors, and the shares of secrets that unmask the sum of these
vectors; see `flwr.server.workflow.SecAggPlusWorkflow` and [Bell2020]. The computation here is the
server's own, with Flower's functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from fedsim.recording.payloads import Payload
from fedsim.recording.wire_format import Update
from strategies.exchange import Exchange
from strategies.message_content import MessageContent

_RECORD = "secaggplus_configs"
_SETUP, _COLLECT, _UNMASK = "setup", "collect_masked_vectors", "unmask"
Vector = list[NDArray[Any]]


class MaskedSum:
    """Record of the stages of one SecAgg+ round, from the last of which the sum is unmasked."""

    def __init__(self) -> None:
        self._stages: dict[str, Exchange] = {}

    def follow_stage(self, exchange: Exchange, number: int, names: Mapping[int, int]) -> Update | None:
        """Note a stage; after the last, return the group's sum as an update of round `number`.

        The update holds the weighted mean of the weights that the clients returned, and the sum of
        their N.

        Args:
            names: node to the id of its client.

        Raises:
            ValueError: too few shares came back to unmask the sum.
        """
        stage = _secagg_values(exchange.server_messages[0].content).get("stage")
        if stage == _SETUP:
            self._stages = {}
        if stage in (_SETUP, _COLLECT):
            self._stages[str(stage)] = exchange
        if stage != _UNMASK or set(self._stages) != {_SETUP, _COLLECT}:
            return None
        collected = self._stages[_COLLECT]
        vectors: dict[int, MessageContent] = {}
        for message, reply in collected.replies:
            if isinstance(reply, MessageContent) and _secagg_values(reply):
                vectors[message.node] = reply
        mean = _unmask_mean(self._stages[_SETUP], exchange, vectors)
        broadcast = collected.server_messages[0]
        weights = {
            name: torch.from_numpy(values).to(tensor.dtype).reshape(tensor.shape)
            for (name, tensor), values in zip(broadcast.before.items(), mean, strict=True)
        }
        return Update(
            round=number,
            client=min(names.get(node, node) for node in vectors),
            before=broadcast.before,
            payload=Payload.from_dense(weights, "weights"),
            num_examples=sum(collected.count_examples(reply) for reply in vectors.values()),
            config=broadcast.content.facts(),
            members=tuple(sorted(names.get(node, node) for node in vectors)),
        )


def _unmask_mean(setup: Exchange, unmasking: Exchange, vectors: Mapping[int, MessageContent]) -> Vector:
    """Return the weighted mean of the vectors that clients quantised, masked and sent.

    Args:
        setup: the first stage, which tells the protocol's parameters and public keys.
        unmasking: the last stage, in which clients return shares of the secrets.
        vectors: node to its reply with a masked vector.
    """
    from flwr.common import bytes_to_ndarray
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares
    from flwr.common.secure_aggregation.ndarrays_arithmetic import (
        get_parameters_shape,
        parameters_addition,
        parameters_mod,
        parameters_subtraction,
    )
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    # Sum the masked vectors.
    protocol = _secagg_values(setup.server_messages[0].content)
    total: Vector = []
    for reply in vectors.values():
        vector = [bytes_to_ndarray(array) for array in _secagg_values(reply)["masked_params"]]
        total = parameters_addition(total, vector) if total else vector
    total, shapes = parameters_mod(total, protocol["mod_range"]), get_parameters_shape(total)

    # Reconstruct the secret of each node, and remove the masks that are drawn from it.
    shares_of_node = _collect_shares(unmasking)
    for node in sorted(_masking_nodes(unmasking)):
        shares = shares_of_node.get(node, [])
        if len(shares) < protocol["threshold"]:
            raise ValueError(f"{len(shares)} shares of client {node} came back, {protocol['threshold']} are needed")
        secret = combine_shares(shares)
        if node in vectors:
            total = parameters_subtraction(total, pseudo_rand_gen(secret, protocol["mod_range"], shapes))
            continue
        # A node that dropped out shares a mask with each neighbour, whose vector still contains it.
        for neighbour, seed in _pairwise_seeds(setup, unmasking, node, secret):
            undo_mask = parameters_addition if node > neighbour else parameters_subtraction
            total = undo_mask(total, pseudo_rand_gen(seed, protocol["mod_range"], shapes))
    unmasked = parameters_mod(total, protocol["mod_range"])
    return weighted_mean(unmasked, len(vectors), protocol["clipping_range"], protocol["target_range"])


def weighted_mean(total: Vector, count: int, clip: float, levels: int) -> Vector:
    """Dequantise a sum of weighted updates, and return their weighted mean in float64.

    Args:
        total: the sum over `count` clients of their weight and their weighted arrays, modulo the
            ring's size.
        count: the number of clients in the sum.
        clip: the clipping range.
        levels: the number of levels in `[-clip, clip]`; weights are multiples of 1 / levels.
    """
    from flwr.common.secure_aggregation.ndarrays_arithmetic import factor_extract
    from flwr.common.secure_aggregation.quantization import dequantize

    weight, arrays = factor_extract(total)
    offset = (count - 1) * clip
    return [(array - offset) * (levels / weight) for array in dequantize(arrays, clip, levels)]


def _masking_nodes(unmasking: Exchange) -> set[int]:
    """Return the nodes whose masks are in the sum: of those that answered or dropped out."""
    nodes = set[int]()
    for message in unmasking.server_messages:
        values = _secagg_values(message.content)
        nodes |= {*values["active_nids"], *values["dead_nids"]}
    return nodes


def _collect_shares(unmasking: Exchange) -> dict[int, list[bytes]]:
    """Return for each node the shares of its secret that other nodes sent to the server."""
    shares_of_node: dict[int, list[bytes]] = {}
    for _, reply in unmasking.replies:
        if isinstance(reply, MessageContent) and "nids" in _secagg_values(reply):
            values = _secagg_values(reply)
            for node, share in zip(values["nids"], values["shares"], strict=True):
                shares_of_node.setdefault(node, []).append(share)
    return shares_of_node


def _pairwise_seeds(setup: Exchange, unmasking: Exchange, dropped: int, secret: bytes) -> list[tuple[int, bytes]]:
    """Return the neighbours of a node that dropped out, with the seeds of the masks they share."""
    from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
    from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

    public_keys: dict[int, bytes] = {}
    for message, reply in setup.replies:
        if isinstance(reply, MessageContent):
            public_keys[message.node] = _secagg_values(reply)["pk1"]
    private_key = bytes_to_private_key(secret)
    seeds: list[tuple[int, bytes]] = []
    for message in unmasking.server_messages:
        if dropped in _secagg_values(message.content)["dead_nids"]:
            public_key = bytes_to_public_key(public_keys[message.node])
            seeds.append((message.node, generate_shared_key(private_key, public_key)))
    return seeds


def _secagg_values(content: MessageContent) -> Mapping[str, Any]:
    return content.config.get(_RECORD, {})
