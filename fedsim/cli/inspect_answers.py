"""Part of `fedsim inspect`: what clients' answers to queries say in clear, without any attack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fedsim.base.errors import number_of, one_line
from fedsim.cli.options import console

if TYPE_CHECKING:
    from fedsim.recording.messages import RecordedExchange
    from fedsim.recording.transcript import Transcript

_MAX_SENTENCES = 12
"""Most sentences of one client, and most clients, unless all rows are asked for."""


def show_answers(exchanges: Iterable[RecordedExchange], transcript: Transcript | None, *, rows: bool) -> None:
    """Say in one sentence each which numbers of how many people clients answered.

    Args:
        transcript: updates, which may be histograms; None where there are none.
    """
    from fedsim.recording.answers_in_clear import describe_answers, read_first_updates

    by_client = describe_answers(exchanges)
    if not by_client and transcript is not None:
        by_client = describe_answers(read_first_updates(transcript))
    if not by_client:
        return
    console.print("in the clear: answers to queries", style="bold")
    limit = None if rows else _MAX_SENTENCES
    for client, sentences in list(by_client.items())[:limit]:
        for sentence in sentences[:limit]:
            console.print(f"client {client}: {one_line(sentence)}", soft_wrap=True, markup=False)
        if left_out := len(sentences) - len(sentences[:limit]):
            console.print(f"client {client}: {number_of(left_out, 'more answer')} (--rows)", markup=False)
    if left_out := len(by_client) - len(list(by_client)[:limit]):
        console.print(f"{number_of(left_out, 'more client')} (--rows)")
