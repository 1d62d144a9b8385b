"""Command `fedsim materialise`."""

from __future__ import annotations

from typing import Annotated

import typer

from fedsim.base.errors import ConfigError, RunError, join_first, number_of
from fedsim.base.files import write_remedy
from fedsim.cli.options import DataDir, Key, RunPath, Trust, console

_MAX_LISTED = 10
"""Most clients that a sentence names."""


def materialise(
    run: RunPath,
    clients: Annotated[list[int] | None, typer.Option("--client", "--clients", help="Clients; all by default.")] = None,
    rounds: Annotated[
        list[int] | None, typer.Option("--round", "--rounds", help="Recorded rounds; all by default.")
    ] = None,
    data_dir: DataDir = None,
    trust: Trust = False,
    key: Key = None,
) -> None:
    """Write updates that were recorded by recipe into the recording, so that reading them needs no data."""
    from fedsim.federation.open_run import OpenRun

    folder = OpenRun(run)
    folder.check_exists()
    with folder.hold_lock():
        if folder.read_experiment(trust=trust) is None:
            raise ConfigError(
                f"{run}: was recorded elsewhere, so its updates cannot be computed here; name a run of fedsim"
            )
        transcript = folder.recording
        chosen_rounds = rounds or transcript.rounds
        recorded = set[int]()
        for number in chosen_rounds:
            if number not in transcript.rounds:
                raise ConfigError(f"--round {number}: is not recorded; recorded: {transcript.rounds}")
            recorded.update(transcript.clients(number))
        if missing := sorted(set(clients or ()) - recorded):
            known = join_first(sorted(recorded), _MAX_LISTED)
            raise ConfigError(f"--client {missing[0]}: sent nothing that is recorded; recorded: {known}")

        # Write round after round, each in one step: what is done stays, should a later one fail.
        written = left = 0
        for number in chosen_rounds:
            before = transcript.count_left_out(number)
            path = transcript.round_path(number)
            if before:
                try:
                    transcript.write_out(number, path, set(clients) if clients else None)
                except OSError as error:
                    raise RunError(
                        f"{path}: cannot be written ({error.strerror}); {write_remedy(error)} and try again"
                    ) from error
            after = transcript.count_left_out(number)
            written += before - after
            left += after
    text = f"{number_of(written, 'update')} written into {transcript.folder}"
    console.print(
        f"{text}; updates of these rounds that are still stored as hashes only: {left}", soft_wrap=True, markup=False
    )
