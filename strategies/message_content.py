"""Content of a message as it passed, and what it says of its sender, its tensors and its failure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedsim.base.errors import error_reason, one_line
from fedsim.federation.engines.arrays import LazyArray, read_state
from fedsim.recording.header import MAX_CLIENT_ID, RECORDABLE, is_number, parse_count
from fedsim.recording.wire_format import State

_RecordT = TypeVar("_RecordT", ArrayRecord, MetricRecord)
PARTITION_KEY = "partition-id"
"""Metric, or config value, in which a client reports its partition id, which names the client."""
GROUP_RECORD, MEMBERS_KEY = "fedsim.group", "members"
"""Config record, and its key, in which the sum over a group names its clients."""
_EMPTY_KEY = "_empty"
"""Placeholder that Flower's legacy layer puts into a record that holds no arrays."""
_ARRAYS_AND_METRICS = {ArrayRecord, MetricRecord}
"""Types of the records that Flower's strategies need."""
_STATUS_RECORD, _METRICS_RECORD = "fitres.status", "fitres.metrics"
"""ConfigRecords of Flower's legacy layer, with the status of a client and its metrics."""


@dataclass(frozen=True)
class MessageContent:
    """Copy of a message's content as it passed; its receiver may change the original afterwards.

    Arrays are shared with the original.

    Attributes:
        arrays: record to its arrays by name; records without arrays are left out.
        metrics: record to its metrics.
        config: record to its values.
    """

    arrays: Mapping[str, Mapping[str, Array]]
    metrics: Mapping[str, Mapping[str, Any]]
    config: Mapping[str, Mapping[str, Any]]

    @classmethod
    def copy_of(cls, content: RecordDict) -> MessageContent:
        """Copy what is in `content` now."""
        arrays: dict[str, dict[str, Array]] = {}
        metrics: dict[str, dict[str, Any]] = {}
        config: dict[str, dict[str, Any]] = {}
        for key, record in content.items():
            if isinstance(record, ConfigRecord):
                config[key] = dict(record.items())
            elif isinstance(record, MetricRecord):
                metrics[key] = dict(record.items())
            elif named_arrays := {name: array for name, array in record.items() if name != _EMPTY_KEY}:
                arrays[key] = named_arrays
        return cls(arrays=arrays, metrics=metrics, config=config)

    @cached_property
    def metric_values(self) -> Mapping[str, Any]:
        """Return all metrics by key; a key that two records share is RECORD.KEY in the second."""
        metrics: dict[str, Any] = {}
        legacy_metrics = self.config.get(_METRICS_RECORD, {})
        for name, record in (*self.metrics.items(), (_METRICS_RECORD, legacy_metrics)):
            metrics |= {key if key not in metrics else f"{name}.{key}": value for key, value in record.items()}
        return metrics

    def facts(self) -> dict[str, Any]:
        """Return the config values that are booleans, numbers or texts."""
        facts: dict[str, Any] = {}
        for record in self.config.values():
            facts |= {key: value for key, value in record.items() if isinstance(value, bool | int | float | str)}
        return facts

    @property
    def has_only_numbers(self) -> bool:
        """Return whether a client sent only arrays, numbers and its partition id, or a sum its members."""
        config_keys = {key for name, record in self.config.items() if name != GROUP_RECORD for key in record}
        return config_keys <= {PARTITION_KEY} and all(is_number(value) for value in self.metric_values.values())


def read_reply(reply: Message) -> MessageContent | str:
    """Return a copy of what a reply holds now, or the reason of its error."""
    if reply.has_error():
        return one_line(reply.error.reason or "no reason given")
    return MessageContent.copy_of(reply.content) if reply.has_content() else "neither content nor an error"


def client_name(content: MessageContent, node: int) -> int:
    """Return the id of the client: the partition id that it reports, or else the id of its node."""
    partitions = [record[PARTITION_KEY] for record in content.config.values() if PARTITION_KEY in record]
    reported = content.metric_values.get(PARTITION_KEY, partitions[0] if partitions else node)
    return parse_count(reported, node, MAX_CLIENT_ID)


def group_members(content: MessageContent) -> tuple[int, ...]:
    """Return the clients whose sum a reply is; none where it does not name a list of clients."""
    members = content.config.get(GROUP_RECORD, {}).get(MEMBERS_KEY, ())
    if not isinstance(members, list):
        return ()
    is_valid = all(type(client) is int and 0 <= client <= MAX_CLIENT_ID for client in members)
    return tuple(sorted(set(members))) if is_valid else ()


def describe_wrong_records(content: RecordDict) -> str | None:
    """Return why a reply lacks the record of arrays and that of metrics, of each one, or None.

    Flower's strategies need both.
    """
    records = list(content.values())
    if set(map(type, records)) == _ARRAYS_AND_METRICS and len(records) == 2:
        return None  # nearly always
    for kind, record_type in (("arrays", ArrayRecord), ("metrics", MetricRecord)):
        count = sum(isinstance(record, record_type) for record in records)
        if count != 1:
            return f"it sent {count} records of {kind}, expected one"
    return None


def single_record(content: RecordDict, record_type: type[_RecordT]) -> _RecordT:
    """Return the only record of a type, where `describe_wrong_records` has nothing to say."""
    (record,) = (record for record in content.values() if isinstance(record, record_type))
    return record


def read_tensors(content: MessageContent, sender: str, *, several: bool | None = None) -> tuple[State, list[str]]:
    """Return the arrays as tensors, and for each that cannot be recorded the reason.

    Args:
        sender: its sender, for the reasons.
        several: whether arrays are called RECORD/NAME; by default where there are several records.
    """
    if several is None:
        several = len(content.arrays) > 1
    if not several and len(content.arrays) == 1:
        (arrays,) = content.arrays.values()
        with suppress(Exception):  # what it raises is told below, of the array that it is about
            tensors = read_state(arrays)
            if all(tensor.dtype in RECORDABLE for tensor in tensors.values()):
                return tensors, []  # nearly always
    state: dict[str, Tensor] = {}
    reasons: list[str] = []
    for record, arrays in content.arrays.items():
        for name, array in arrays.items():
            try:
                tensor = read_state({name: array})[name]
            except Exception as error:  # NumPy may raise almost anything at bytes that are no array
                reasons.append(one_line(f"{sender} sent '{name}', which cannot be read: {error_reason(error)}"))
                continue
            if tensor.dtype in RECORDABLE:
                state[f"{record}/{name}" if several else name] = tensor
            else:
                reasons.append(one_line(f"{sender} sent '{name}' as {tensor.dtype}, which cannot be recorded"))
    return state, reasons


def array_identity(content: MessageContent) -> object:
    """Return a key that is equal for messages that hold the very same arrays."""
    return tuple(
        (record, name, id(array if isinstance(array, LazyArray) else array.data))
        for record, arrays in content.arrays.items()
        for name, array in arrays.items()
    )


def failure_reason(content: MessageContent) -> str | None:
    """Return the reason of a client of Flower's legacy API that reports a failure, or None."""
    status = content.config.get(_STATUS_RECORD, {})
    if status.get("code", 0) == 0:
        return None
    return one_line(str(status.get("message") or f"its status is {status['code']}"))
