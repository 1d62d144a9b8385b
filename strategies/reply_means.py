"""Weighted means of replies for a strategy that averages, which are quicker and need not all be in memory.

Flower's strategies ask for all replies at once: 24 GB for 100 000 clients with 60 000 parameters.
The mean of N values is the mean of about sqrt(N) means, each weighted by its sum of weights. As long
as memory holds all replies, there is one mean, which has the bits of Flower's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords
from numpy.typing import NDArray

from fedsim.federation.engines.arrays import LazyArray, array_bytes, view_values
from strategies.fedsgd import FedSgd

_AVERAGING = (FedAvg, FedProx, FedAvgM, FedAdagrad, FedAdam, FedYogi, FedSgd)
"""Strategies that see the weighted mean of the replies alone."""
_BLOCK = 1 << 15
"""Numbers that are multiplied at once."""
_GROUPS_FROM_BYTES = 512 << 20
"""Size of a round's replies above which they are averaged in groups.

Not a share of the free memory, because means of means are rounded otherwise.
"""


class ReplyCollector:
    """Collector of the replies of one round, which a strategy gets in the end: all, or means.

    Many replies are averaged in groups of about the square root of their number, in the order in
    which they come, so the result depends on nothing but the replies.

    Args:
        strategy: gets them.
        messages: that they answer.
        limit: bytes of replies above which there are means, where the strategy averages.
        groups_from: bytes of replies above which there are several means, not one.
    """

    def __init__(
        self,
        strategy: Strategy,
        messages: Sequence[Message],
        limit: float,
        *,
        groups_from: float = _GROUPS_FROM_BYTES,
    ) -> None:
        self._weight_key = _weight_key(strategy)
        self._group_size = 0
        num_bytes = len(messages) * _reply_bytes(messages)
        if self._weight_key and num_bytes > limit:
            self._group_size = math.isqrt(len(messages)) if num_bytes > groups_from else len(messages)
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
        (array_key,), (metric_key,) = contents[0].array_records, contents[0].metric_records
        weights: list[Any] = [content[metric_key][self._weight_key] for content in contents]
        metrics = self._average_metrics(contents, metric_key, weights)
        metrics[self._weight_key] = sum(weights)
        arrays = _average_arrays([content[array_key] for content in contents], weights)  # type: ignore[misc]
        content = RecordDict({array_key: arrays, metric_key: metrics})
        metadata = self._group[0].metadata
        self._replies.append(Message(content=content, metadata=metadata))  # type: ignore[call-overload]
        self._group = []

    def _average_metrics(self, contents: list[RecordDict], key: str, weights: Sequence[float]) -> MetricRecord:
        """Return the values of Flower's `aggregate_metricrecords`, which checks the type of each number."""
        total, sums = sum(weights), dict[str, Any]()
        for content, weight in zip(contents, weights, strict=True):
            for name, value in content[key].items():
                if isinstance(value, list):
                    return aggregate_metricrecords(contents, self._weight_key)
                if name != self._weight_key:
                    product = value * (weight / total)  # type: ignore[operator]
                    sums[name] = sums[name] + product if name in sums else product
        return MetricRecord(sums)


def _average_arrays(records: Sequence[ArrayRecord], weights: Sequence[float]) -> ArrayRecord:
    """Return the values of Flower's `aggregate_arrayrecords`, without a copy of each array and product."""
    total = sum(weights)
    sums: dict[str, NDArray[Any]] = {}
    products: dict[np.dtype[Any], NDArray[Any]] = {}  # memory for those of a block, by type of the values
    for record, weight in zip(records, weights, strict=True):
        for name, array in record.items():
            values = view_values(array)
            if name in sums:
                if values.dtype not in products:
                    products[values.dtype] = np.empty(_BLOCK, (values.reshape(-1)[:0] * (weight / total)).dtype)
                _add_product(sums[name], values, weight / total, products[values.dtype])
            else:
                sums[name] = np.asarray(values * (weight / total), order="C")
    return ArrayRecord({name: LazyArray(values) for name, values in sums.items()})


def _add_product(sums: NDArray[Any], values: NDArray[Any], factor: float, products: NDArray[Any]) -> None:
    """Add `values * factor` to `sums`, block by block, so that `products` of a block stay in the cache."""
    flat_sums, flat_values = sums.reshape(-1), values.reshape(-1)
    for start in range(0, sums.size, len(products)):
        block = flat_sums[start : start + len(products)]
        product = np.multiply(flat_values[start : start + len(products)], factor, out=products[: len(block)])
        np.add(block, product, out=block)


def _weight_key(strategy: Strategy) -> str:
    """Return the metric by which `strategy` weights replies; nothing where it needs each of them."""
    if not isinstance(strategy, FedAvg) or type(strategy) not in _AVERAGING:
        return ""
    if strategy.train_metrics_aggr_fn is not aggregate_metricrecords:
        return ""
    return str(strategy.weighted_by_key)


def _reply_bytes(messages: Sequence[Message]) -> int:
    return array_bytes(messages[0].content) if messages else 0
