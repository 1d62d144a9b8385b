"""Command `fedsim inspect`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedsim.base.errors import FedsimError, TranscriptError, number_of, one_line
from fedsim.cli.inspect_adversary import describe_adversary
from fedsim.cli.inspect_answers import show_answers
from fedsim.cli.inspect_trees import show_trees
from fedsim.cli.options import Key, RunPath, console, finish, new_table

if TYPE_CHECKING:
    from fedsim.recording.header import Reply
    from fedsim.recording.messages import RecordedExchange
    from fedsim.recording.transcript import Transcript
    from fedsim.recording.wire_format import Update


def inspect(
    run: RunPath,
    hash: Annotated[bool, typer.Option("--hash", help="Print one SHA-256 of the whole recording.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Show a row for each update as well.")] = False,
    key: Key = None,
) -> None:
    """Summarise a recording: what clients sent in the clear, the updates, and whether the files are intact."""
    from fedsim.federation.integrity import compare_with_manifest
    from fedsim.federation.open_run import OpenRun
    from fedsim.recording.messages import MESSAGES_FOLDER as MESSAGES
    from fedsim.recording.messages import read_messages
    from fedsim.recording.recording_folder import find_run

    folder = OpenRun(run)
    folder.check_exists()
    folder.check_kinds()
    try:
        transcript = folder.recording
    except TranscriptError as error:
        exchanges = read_messages(find_run(run) / MESSAGES)
        if hash or (first := next(exchanges, None)) is None:
            raise
        _show_clear_text(chain([first], exchanges), rows=rows)
        show_answers(read_messages(find_run(run) / MESSAGES), None, rows=rows)
        console.print(f"no updates: {error}", soft_wrap=True, markup=False)
        verdict = compare_with_manifest(OpenRun(find_run(run)))
        if not verdict.differences:
            console.print(verdict.text, soft_wrap=True, markup=False)
        finish(verdict.differences)
        return
    if hash:
        print(transcript.hash())  # noqa: T201
        return
    # Read the updates of each round, then the other messages.
    table = None
    if rows:
        table = new_table(
            "round", "client", "N", "reported", "bytes", "update norm", title=escape(str(transcript.folder))
        )
    failures, totals = list[str](), _Totals()
    for number in transcript.rounds:
        try:
            _read_round(transcript, number, table, totals)
        except FedsimError as error:
            failures.append(str(error))
    try:
        _show_clear_text(read_messages(transcript.folder.parent / MESSAGES), rows=rows)
        show_answers(read_messages(transcript.folder.parent / MESSAGES), transcript, rows=rows)
    except FedsimError as error:
        failures.append(str(error))
    if table is not None:
        console.print(table)
    summary = _summary_table(transcript, totals)
    try:
        for row in describe_adversary(folder):
            summary.add_row(*row)
    except FedsimError as error:
        failures.append(str(error))
    console.print(summary)
    show_trees(transcript)
    for remark, count in totals.remarks.most_common():
        console.print(f"odd: {remark} ({number_of(count, 'update')})", soft_wrap=True, markup=False)
    # Compare with the manifest.
    verdict = compare_with_manifest(folder)
    failures += verdict.differences
    if not failures:
        console.print(f"intact: {_count_text(transcript)}, each verified by its SHA-256")
        if totals.left_out:
            console.print(
                f"{number_of(totals.left_out, 'update')} of these are stored as their SHA-256, which is verified when "
                "they are recomputed (`fedsim materialise`)",
                soft_wrap=True,
                markup=False,
            )
        console.print(verdict.text, soft_wrap=True, markup=False)
    finish(failures)


@dataclass
class _Totals:
    """Totals over the readable rounds of a recording.

    Attributes:
        sizes: N of each update; 0 where it is not known.
        norms: of each update that has a finite one.
        broken: number of updates with NaN or infinite values.
        sent: bytes by client, for each round; of sums those of the sums, for what clients sent is not recorded.
        missing: number of clients that sent nothing, over all rounds.
        sums: whether updates are sums over groups.
        remarks: how often each remark was made on an update.
        left_out: number of updates by recipe, of which the files hold the hash alone.
    """

    clients: set[int] = field(default_factory=set)
    sizes: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    broken: int = 0
    sent: list[Mapping[int, int]] = field(default_factory=list)
    missing: int = 0
    sums: bool = False
    remarks: Counter[str] = field(default_factory=Counter)
    left_out: int = 0

    def add(self, reply: Reply, norm: float | None) -> None:
        """Count one update."""
        self.sizes.append(reply.num_examples)
        self.clients.update(reply.senders)
        self.sums |= bool(reply.members)
        self.remarks.update(reply.remarks)
        if norm is not None and not math.isfinite(norm):
            self.broken += 1
        elif norm is not None:
            self.norms.append(norm)


def _read_round(transcript: Transcript, number: int, table: Table | None, totals: _Totals) -> None:
    """Count the updates of a round and the clients that sent none; add a row to `table` for each of them."""
    header, bytes_by_client = transcript.header(number), transcript.upload_sizes(number)
    num_answers = Counter(reply.client for reply in header.replies)
    if header.replies:
        transcript.broadcast(number, header.replies[0].client)  # verify it even where no update is read
    for reply in header.replies:
        norm, kind = None, ""
        if transcript.holds_arrays(number, reply):
            norm, kind = _norm(transcript.recorded_update(number, reply.client, reply.message))
        else:
            totals.left_out += 1
        totals.add(reply, norm)
        if table is not None:
            norm_text = "-" if norm is None else f"{norm:.4g}{kind}"
            size = str(bytes_by_client[reply.client])
            cells = _describe_reply(reply, show_message=num_answers[reply.client] > 1)
            table.add_row(str(number), *cells, size, norm_text)
    if table is not None:
        for client, reason in header.failures.items():
            table.add_row(str(number), str(client), "-", f"failed: {escape(reason)}", "-", "-", style="yellow")
    totals.missing += len(header.failures)
    totals.sent.append(bytes_by_client)


def _describe_reply(reply: Reply, *, show_message: bool) -> tuple[str, str, str]:
    """Return for a row of a table who sent an update, N, and the metrics that came with it."""
    name = f"{reply.client}, the sum of {len(reply.members)} clients" if reply.members else str(reply.client)
    if show_message:
        name += f", message {reply.message}"
    metrics = ", ".join(f"{key} {value:.4g}" for key, value in reply.metrics.items())
    return name, str(reply.num_examples or "-"), escape(one_line(metrics))


def _show_clear_text(exchanges_read: Iterable[RecordedExchange], *, rows: bool) -> None:
    """Show what clients told the server in clear besides plain updates; with `rows` each set of messages as well."""
    from fedsim.recording.clear_text import find_clear_texts

    message_rows = list[tuple[str, ...]]()

    def read_and_note() -> Iterator[RecordedExchange]:
        for messages in exchanges_read:
            message_rows.append(_message_row(messages))
            yield messages

    if texts := find_clear_texts(read_and_note()):
        table = new_table("kind", "name", "what", "clients", title="What clients sent in the clear, besides updates")
        for text in texts:
            warning = "[bold red]A ROW FOR EACH EXAMPLE[/]: " if text.per_example else ""
            cells = escape(one_line(text.kind)), escape(one_line(text.name)), warning + escape(text.description)
            table.add_row(*cells, str(len(text.clients)))
        console.print(table)
        if per_example := [text for text in texts if text.per_example]:
            console.print(
                f"{number_of(len(per_example), 'name')} with a row for each example of a client, readable without an "
                "attack",
                style="bold red",
            )
    if rows and message_rows:
        columns = "message", "kind", "round", "to", "answers", "clients also sent"
        exchanges = new_table(*columns, title="all messages that are not plain updates")
        for row in message_rows:
            exchanges.add_row(*row)
        console.print(exchanges)
    elif message_rows:
        console.print(
            f"{number_of(len(message_rows), 'exchange')} of messages that are not plain updates; --rows shows them"
        )


def _message_row(messages: RecordedExchange) -> tuple[str, ...]:
    """Describe a set of messages in a few words: what clients said in clear, by the names of it."""
    names: dict[str, None] = {}
    for reply in messages.replies:
        for records in (reply.metrics, reply.config):
            for record, values in records.items():
                names |= dict.fromkeys(f"{record}.{key}" for key in values)
        for record, arrays in reply.arrays.items():
            names[f"{record} ({number_of(len(arrays), 'array')})"] = None
    answers = sum(not reply.error for reply in messages.replies)
    round_text = str(messages.recorded_as or messages.round or "-")
    return (
        str(messages.number),
        escape(one_line(messages.kind)),
        round_text,
        str(len(messages.sent)),
        str(answers),
        escape(one_line(", ".join(names) or "-")),
    )


def _summary_table(transcript: Transcript, totals: _Totals) -> Table:
    """Summarise the readable rounds of a recording in a few lines."""
    from fedsim.federation.secure_aggregation import SENT_MASKED

    clients, sums = totals.clients, totals.sums
    table = new_table(show_header=False, box=None, title=escape(str(transcript.folder)), title_justify="left")
    numbers = transcript.rounds
    size = sum(file.stat().st_size for file in transcript.folder.glob("round-*.safetensors")) / 1e6
    table.add_row("rounds", f"{len(numbers)}, {numbers[0]} to {numbers[-1]}" if numbers else "none")
    table.add_row("clients", f"{len(clients)}, {min(clients)} to {max(clients)}" if clients else "none")
    failures = number_of(totals.missing, "failure")
    table.add_row("sums over groups" if sums else "updates", f"{len(totals.sizes)}, and {failures}")
    if totals.left_out:
        table.add_row("by recipe", f"{number_of(totals.left_out, 'update')}, recomputed when they are read")
    known_sizes = [count for count in totals.sizes if count]
    unknown = len(totals.sizes) - len(known_sizes)
    remark = f"; not known of {number_of(unknown, 'update')}" if unknown and known_sizes else ""
    table.add_row("N", f"{_range_and_mean(known_sizes)}{remark}")
    table.add_row("update norm", _range_and_mean(totals.norms))
    if totals.broken:
        broken = f"[bold red]{number_of(totals.broken, 'update')} with NaN or infinite values[/]"
        table.add_row("", f"{broken}, left out of the norm")
    round_bytes = [sum(sizes.values()) for sizes in totals.sent]
    message_bytes = [message_size for sizes in totals.sent for message_size in sizes.values()]
    traffic = f"{sum(message_bytes)}, a round {_range_and_mean(round_bytes, '.0f')}" if message_bytes else "-"
    table.add_row("bytes of the sums" if sums else "bytes sent", traffic)
    table.add_row("bytes of a sum" if sums else "bytes of an update", _range_and_mean(message_bytes, ".0f"))
    if sums:
        table.add_row("", SENT_MASKED)
    table.add_row("size", f"{size:.1f} MB")
    return table


def _range_and_mean(values: Sequence[float], form: str = ".4g") -> str:
    return f"{min(values):{form}} to {max(values):{form}}, {fmean(values):{form}} on average" if values else "-"


def _count_text(transcript: Transcript) -> str:
    updates = sum(len(transcript.header(number).replies) for number in transcript.rounds)
    return f"{number_of(updates, 'update')} of {number_of(len(transcript.rounds), 'round')}"


def _norm(update: Update) -> tuple[float | None, str]:
    """Compute the L2 norm of w_t - w_T over all tensors, or of a gradient, with a word for what it is the norm of.

    None where the client returned other tensors.
    """
    if update.gradient is not None or update.sends_delta:
        kind = update.payload.kind
        return sum(t.double().square().sum().item() for t in update.pseudo_gradient.values()) ** 0.5, f" ({kind})"
    after = update.after
    if any(name not in after or after[name].shape != tensor.shape for name, tensor in update.before.items()):
        return None, ""
    differences = (tensor.double() - after[name].double() for name, tensor in update.before.items())
    return sum(t.square().sum().item() for t in differences) ** 0.5, ""
