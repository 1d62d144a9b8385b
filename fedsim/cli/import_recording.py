"""Command `fedsim import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsim.base.errors import number_of
from fedsim.cli.options import Key, console


def import_recording(
    exchange: Annotated[
        Path,
        typer.Argument(help="A folder of round-1, round-2, ..., with files such as broadcast.npz and client-7.npz."),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder to make.")],
    key: Key = None,
) -> None:
    """Import the messages that the server of another framework (NVFlare, your own loop) wrote."""
    from fedsim.recording.exchange_files import import_exchange

    transcript = import_exchange(exchange, run)
    headers = [transcript.header(number) for number in transcript.rounds]
    replies = [reply for header in headers for reply in header.replies]
    lacking = sum(not reply.num_examples for reply in replies)
    text = f"{number_of(len(replies), 'update')} in {number_of(len(headers), 'round')} written into {run}"
    if lacking:
        text += f"; {lacking} of them without N, which an attack file states as [app] num_examples"
    console.print(f"{text}\nnext: fedsim inspect {run}", soft_wrap=True, markup=False)
