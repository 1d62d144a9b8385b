"""`fedsim inspect`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fedsim.cli.options import Key, RunPath, console, finish, number_of, use_key
from fedsim.errors import FedsimError, TranscriptError, one_line

if TYPE_CHECKING:
    from fedsim.recording.messages import Messages
    from fedsim.recording.transcript import Transcript
    from fedsim.wire.messages import Update


def inspect(
    run: RunPath,
    hash: Annotated[bool, typer.Option("--hash", help="Print one SHA-256 of the whole recording.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Show a row for each update as well.")] = False,
    key: Key = None,
) -> None:
    """Say what clients told the server in clear, what a recording holds, and whether it is still what was written."""
    from fedsim.experiments.integrity import held_against_manifest
    from fedsim.experiments.run_folder import RunFolder
    from fedsim.recording.messages import FOLDER as MESSAGES
    from fedsim.recording.messages import read_messages
    from fedsim.recording.transcript import Transcript, the_run

    use_key(key)
    if run.is_dir():
        RunFolder(run).check_kinds()
    try:
        transcript = Transcript(run)
    except TranscriptError as error:
        exchanges = read_messages(the_run(run) / MESSAGES)
        if hash or (first := next(exchanges, None)) is None:
            raise
        _show(chain([first], exchanges), rows=rows)
        console.print(f"no updates: {error}", soft_wrap=True, markup=False)
        verdict = held_against_manifest(the_run(run))
        if not verdict.differences:
            console.print(verdict.text, soft_wrap=True, markup=False)
        finish(verdict.differences)
        return
    if hash:
        print(transcript.hash())  # noqa: T201
        return
    table = Table("round", "client", "N", "reported", "bytes", "update norm", title=escape(str(transcript.folder)))
    failures, sizes, norms, sent = [], list[int](), list[float](), list[dict[int, int]]()
    clients, missing, broken, sums, remarks = set[int](), 0, 0, False, Counter[str]()
    for number in transcript.rounds:
        try:
            header, bytes_of = transcript.header(number), transcript.sizes(number)
            answers = Counter(reply.client for reply in header.replies)
            for reply in header.replies:
                client, update = reply.client, transcript.recorded(number, reply.client, reply.message)
                remarks.update(update.remarks)
                reported = ", ".join(f"{key} {value:.4g}" for key, value in update.metrics.items())
                norm, what = _norm(update)
                told = "-" if norm is None else f"{norm:.4g}{what}"
                called = f"{client}, the sum of {len(update.members)} clients" if update.members else str(client)
                called += f", message {update.message}" if answers[client] > 1 else ""
                said, size = escape(one_line(reported)), bytes_of[client]
                table.add_row(str(number), called, str(update.num_examples), said, str(size), told)
                sizes.append(update.num_examples)
                clients.update(update.members or (client,))
                sums |= bool(update.members)
                if norm is not None and not math.isfinite(norm):
                    broken += 1
                elif norm is not None:
                    norms.append(norm)
            for client, why in header.failures.items():
                table.add_row(str(number), str(client), "-", f"failed: {escape(why)}", "-", "-", style="yellow")
            missing += len(header.failures)
            sent.append(bytes_of)
        except FedsimError as error:
            failures.append(str(error))
    try:
        _show(read_messages(transcript.folder.parent / MESSAGES), rows=rows)
    except FedsimError as error:
        failures.append(str(error))
    if rows:
        console.print(table)
    console.print(_summary_of(transcript, clients, sizes, norms, broken, sent, missing, sums))
    for remark, often in remarks.most_common():
        console.print(f"odd: {remark} ({number_of(often, 'update')})", soft_wrap=True, markup=False)
    verdict = held_against_manifest(run)
    failures += verdict.differences
    if not failures:
        console.print(f"intact: {_counted(transcript)}, each as it was recorded (by SHA-256)")
        console.print(verdict.text, soft_wrap=True, markup=False)
    finish(failures)


def _show(others: Iterable[Messages], *, rows: bool) -> None:
    """What clients told the server besides plain updates, in clear; with `rows` each set of messages as well.

    Args:
        others: read one by one, for their arrays may be large.
    """
    from fedsim.recording.clear_text import clear_texts

    shown = list[tuple[str, ...]]()

    def read_and_note() -> Iterator[Messages]:
        for messages in others:
            shown.append(_row_of(messages))
            yield messages

    if said := clear_texts(read_and_note()):
        table = Table("kind", "name", "what", "clients", title="What clients told the server in clear, besides updates")
        for one in said:
            loud = "[bold red]A ROW FOR EACH EXAMPLE[/]: " if one.per_example else ""
            cells = escape(one_line(one.kind)), escape(one_line(one.name)), loud + escape(one.what)
            table.add_row(*cells, str(len(one.clients)))
        console.print(table)
        if loudest := [one for one in said if one.per_example]:
            console.print(
                f"{number_of(len(loudest), 'name')} with a row for each example of a client; that takes no attack",
                style="bold red",
            )
    if rows and shown:
        columns = "message", "kind", "round", "to", "answers", "clients also said"
        exchanges = Table(*columns, title="all messages that are no plain updates")
        for row in shown:
            exchanges.add_row(*row)
        console.print(exchanges)
    elif shown:
        console.print(f"{number_of(len(shown), 'exchange')} of messages beside plain updates; --rows shows them")


def _row_of(messages: Messages) -> tuple[str, ...]:
    """One set of messages in a few words: what clients said in clear, by the names of it."""
    said: dict[str, None] = {}
    for reply in messages.replies:
        for records in (reply.metrics, reply.config):
            said |= {f"{record}.{key}": None for record, values in records.items() for key in values}
        said |= {f"{record} ({number_of(len(arrays), 'array')})": None for record, arrays in reply.arrays.items()}
    answers = sum(not reply.error for reply in messages.replies)
    told = str(messages.recorded_as or messages.round or "-")
    numbers = str(messages.number), escape(one_line(messages.kind)), told, str(len(messages.sent)), str(answers)
    return *numbers, escape(one_line(", ".join(said) or "-"))


def _summary_of(
    transcript: Transcript,
    clients: Collection[int],
    sizes: Sequence[int],
    norms: Sequence[float],
    broken: int,
    sent: Sequence[Mapping[int, int]],
    missing: int,
    sums: bool,
) -> Table:
    """What the readable rounds of a recording hold, in a few lines.

    `broken` is the number of updates that have no norm; `sent` are bytes by client, a mapping for each round; where
    updates are `sums` over groups, they are those of the sums, for what each client sent is not recorded.
    """
    from fedsim.experiments.secure_aggregation import SENT_MASKED

    def spread(values: Sequence[float], form: str = ".4g") -> str:
        return f"{min(values):{form}} to {max(values):{form}}, {fmean(values):{form}} on average" if values else "-"

    table = Table(show_header=False, box=None, title=escape(str(transcript.folder)), title_justify="left")
    numbers = transcript.rounds
    size = sum(file.stat().st_size for file in transcript.folder.glob("round-*.safetensors")) / 1e6
    table.add_row("rounds", f"{len(numbers)}, {numbers[0]} to {numbers[-1]}" if numbers else "none")
    table.add_row("clients", f"{len(clients)}, {min(clients)} to {max(clients)}" if clients else "none")
    table.add_row("sums over groups" if sums else "updates", f"{len(sizes)}, and {number_of(missing, 'failure')}")
    table.add_row("N", spread(sizes))
    table.add_row("update norm", spread(norms))
    if broken:
        table.add_row(
            "", f"[bold red]{number_of(broken, 'update')} with NaN or infinite values[/], left out of the norm"
        )
    rounds, each = [sum(of.values()) for of in sent], [size for of in sent for size in of.values()]
    traffic = f"{sum(each)}, a round {spread(rounds, '.0f')}" if each else "-"
    table.add_row("bytes of the sums" if sums else "bytes sent", traffic)
    table.add_row("bytes of a sum" if sums else "bytes of an update", spread(each, ".0f"))
    if sums:
        table.add_row("", SENT_MASKED)
    table.add_row("size", f"{size:.1f} MB")
    return table


def _counted(transcript: Transcript) -> str:
    updates = sum(len(transcript.header(number).replies) for number in transcript.rounds)
    return f"{number_of(updates, 'update')} of {number_of(len(transcript.rounds), 'round')}"


def _norm(update: Update) -> tuple[float | None, str]:
    """L2 norm of w_t - w_T, all tensors together, or of a gradient, and a word for that.

    None where the client returned other tensors.
    """
    if update.gradient is not None or update.sends_delta:
        what = update.payload.kind
        return sum(t.double().square().sum().item() for t in update.pseudo_gradient.values()) ** 0.5, f" ({what})"
    after = update.after
    if any(name not in after or after[name].shape != tensor.shape for name, tensor in update.before.items()):
        return None, ""
    moved = (tensor.double() - after[name].double() for name, tensor in update.before.items())
    return sum(t.square().sum().item() for t in moved) ** 0.5, ""
