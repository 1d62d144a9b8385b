"""Weighted means of many replies, for a strategy that averages, so that memory need not hold all.

Flower's strategies ask for all replies at once: 24 GB for 100 000 clients with 60 000 parameters.
The mean of N values is the mean of about sqrt(N) means, each weighted by its sum of weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords, aggregate_metricrecords

from fedsim.federation.engines.arrays import array_bytes
from strategies.fedsgd import FedSgd

_AVERAGING = (FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedSgd)
"""Strategies that see the weighted mean of the replies alone."""


class ReplyCollector:
    """Collector of the replies of one round, which a strategy gets in the end: all, or means.

    The replies are averaged in groups of about the square root of their number, in the order in
    which they come, so the result depends on nothing but the replies.

    Args:
        strategy: gets them.
        messages: that they answer.
        limit: bytes of replies above which there are means, where the strategy averages.
    """

    def __init__(self, strategy: Strategy, messages: Sequence[Message], limit: float) -> None:
        self._weight_key = _weight_key(strategy)
        self._group_size = 0
        if self._weight_key and len(messages) * _reply_bytes(messages) > limit:
            self._group_size = math.isqrt(len(messages))
        self._group: list[Message] = []
        self._replies: list[Message] = []

    def add(self, reply: Message) -> None:
        """Take in a reply, which can be read by the strategy; errors are not averaged."""
        if not self._group_size or reply.has_error():
            self._replies.append(reply)
            return
        self._group.append(reply)
        if len(self._group) == self._group_size:
            self._close_group()

    def take(self) -> list[Message]:
        """Return the replies for the strategy."""
        if self._group:
            self._close_group()
        return self._replies

    def _close_group(self) -> None:
        contents = [reply.content for reply in self._group]
        arrays = aggregate_arrayrecords(contents, self._weight_key)
        metrics = aggregate_metricrecords(contents, self._weight_key)
        weights: list[Any] = []
        for content in contents:
            (record,) = content.metric_records.values()
            weights.append(record[self._weight_key])
        metrics[self._weight_key] = sum(weights)
        (array_key,), (metric_key,) = contents[0].array_records, contents[0].metric_records
        self._replies.append(_with_content(self._group[0], RecordDict({array_key: arrays, metric_key: metrics})))
        self._group = []


def _weight_key(strategy: Strategy) -> str:
    """Return the metric by which `strategy` weights replies; nothing where it needs each of them."""
    if not isinstance(strategy, FedAvg) or type(strategy) not in _AVERAGING:
        return ""
    if strategy.train_metrics_aggr_fn is not aggregate_metricrecords:
        return ""
    return str(strategy.weighted_by_key)


def _reply_bytes(messages: Sequence[Message]) -> int:
    return array_bytes(messages[0].content) if messages else 0


def _with_content(reply: Message, content: RecordDict) -> Message:
    return Message(content=content, metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]
