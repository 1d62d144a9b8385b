"""Measure the exposure of clients at chosen states, without a server (`fedsim expose`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedsim.base.errors import ConfigError
from fedsim.exposure.of_clients import MeasureSchedule, failure_reason, measure_client
from fedsim.federation.build_plugins import build_measure
from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.federation.experiment_file import apply_override
from fedsim.federation.federation_tables import MeasureTable
from fedsim.federation.open_run import OpenRun
from fedsim.federation.states import TrainingStates
from fedsim.federation.table import Table
from fedsim.federation.table_validation import validate_tables
from fedsim.federation.training_states import make_states
from fedsim.plugins import registry
from fedsim.recording.header import Header
from fedsim.recording.payloads import State
from fedsim.recording.transcript import Transcript
from fedsim.training.settings import LocalTraining

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingMoment:
    """State of training, and the clients that are about to send from it.

    Attributes:
        state: name of the state, as in `[states]`: `round-0` is the one that the federation starts
            from.
        number: round in which the clients send, which determines their mini-batches.
        clients: ids of the clients that send.
        training: settings of local training in this round.
        before: returns the broadcast that a client receives.
    """

    state: str
    number: int
    clients: Sequence[int]
    training: LocalTraining
    before: Callable[[int], State]


class _MeasureList(Table):
    measure: list[MeasureTable]


def choose_measures(config: Config, names: Sequence[str], overrides: Iterable[str]) -> list[MeasureTable]:
    """Return the tables of the measures to compute, by default those of the experiment.

    Args:
        names: titles of tables of the experiment, or names of measures with their default settings.
        overrides: `measure.NAME.key=value`.
    """
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"--measure {duplicates[0]}: is named twice; name each once")
    by_title = {table.title: table.model_dump() for table in config.measure}
    measure_tables = list(by_title.values())
    if names:
        measure_tables = [by_title.get(name, {"name": name}) for name in names]
    tables: dict[str, Any] = {"measure": measure_tables}
    for override in overrides:
        apply_override(tables, override)
    return validate_tables(_MeasureList, tables, "expose").measure


def find_applicable_measures(experiment: Experiment, *, each: bool) -> list[MeasureSchedule]:
    """Return every measure that applies to the experiment; the log says why others do not.

    Args:
        each: measure single examples, too, where the measure applies to them.
    """
    applicable, local = [], experiment.trial_round()
    for name in registry.registered_names("measures"):
        try:
            schedule = build_measure(MeasureTable(name=name))
            schedule.compute_once(local)
            applicable.append(schedule)
            if each:
                schedule_of_examples = replace(schedule, per_example=True)
                schedule_of_examples.compute_once(local)
                applicable[-1] = schedule_of_examples
        except (Exception, SystemExit) as error:  # a measure of another package may raise anything
            scope = "of single examples " if applicable and applicable[-1].title == name else ""
            log.info("%s%s is left out: %s", scope, name, failure_reason(error))
    return applicable


def file_moments(
    experiment: Experiment, name: str, states: Sequence[str], clients: Sequence[int]
) -> list[TrainingMoment]:
    """Return the moments of an experiment file: its initial state, or those that `states` name.

    Args:
        name: of the file, under which trained states are stored in the cache.
        states: names in `[states]`, which are trained where they are missing, or files.
        clients: ids; an empty list means all.
    """
    if not states:
        return [_unrecorded_moment(experiment, "round-0", experiment.initial_model_state(), clients)]
    table = experiment.config.states
    names = [f"round-{number}" for number in table.rounds]
    names += [f"epoch-{number}" for number in table.epochs]
    make_folder = partial(make_states, experiment.config, name, None)
    return _check_distinct(_state_moments(experiment, states, names, make_folder, clients))


def run_moments(
    experiment: Experiment,
    folder: OpenRun,
    states: Sequence[str],
    rounds: Sequence[int],
    clients: Sequence[int],
) -> list[TrainingMoment]:
    """Return the moments of a run: recorded rounds, by default the first one, or saved states.

    Args:
        states: names of states that the run saved, or files.
        clients: ids; an empty list means all that sent.
    """
    saved = TrainingStates(folder.states)
    saved_names = list(saved.manifest().get("states", {}))
    state_moments = _state_moments(experiment, states, saved_names, lambda: saved, clients)
    if states and not rounds:
        return _check_distinct(state_moments)
    transcript = folder.recording
    for number in rounds:
        if number not in transcript.rounds:
            raise ConfigError(f"expose: round {number} is not recorded; recorded: {transcript.rounds}")
    chosen_rounds = rounds or transcript.rounds[:1]
    recorded = [_recorded_moment(experiment, transcript, number, clients) for number in chosen_rounds]
    return _check_distinct([*recorded, *state_moments])


def measure_moments(
    experiment: Experiment, moments: Iterable[TrainingMoment], schedules: Sequence[MeasureSchedule]
) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the rows of each client at each moment, as they are computed."""
    loss = experiment.client_loss
    for moment in moments:
        where = {"round": moment.number, "state": moment.state}
        for client in moment.clients:
            (share,) = experiment.local_data([client], moment.number, moment.training)
            model = experiment.model_with_state(moment.before(client))
            rows = measure_client(schedules, model, share, moment.training, loss)
            yield ({**where, "client": client, **row} for row in rows)


def _state_moments(
    experiment: Experiment,
    names: Sequence[str],
    saved_names: Sequence[str],
    get_folder: Callable[[], TrainingStates],
    clients: Sequence[int],
) -> list[TrainingMoment]:
    """Return a moment for each of `names`: saved states, or files."""
    moments: list[TrainingMoment] = []
    for name in names:
        path = get_folder().path(name) if name in saved_names else Path(name)
        if name not in saved_names and path.suffix != ".safetensors":
            raise ConfigError(
                f"--state {name}: expected a safetensors file, or a state that is kept "
                f"({', '.join(saved_names) or 'none is'}); [states] says which are"
            )
        try:
            state = experiment.read_state_file(path)
        except ConfigError as error:
            raise ConfigError(f"--state {name}: {str(error).removeprefix('model.start: ')}") from error
        moments.append(_unrecorded_moment(experiment, path.stem, state, clients))
    return moments


def _unrecorded_moment(experiment: Experiment, name: str, state: State, clients: Sequence[int]) -> TrainingMoment:
    """Return clients at a state without messages: `round-N` precedes round N + 1, all else 1."""
    kind, _, number = name.partition("-")
    mu = getattr(experiment.new_strategy(), "proximal_mu", 0.0)  # FedProx's server sends it to clients
    return TrainingMoment(
        state=name,
        number=int(number) + 1 if kind == "round" and number.isdecimal() else 1,
        clients=_choose_clients(clients, range(experiment.config.federation.clients), name),
        training=replace(experiment.training, proximal_mu=float(mu)),
        before=lambda _: state,
    )


def _recorded_moment(
    experiment: Experiment, transcript: Transcript, number: int, clients: Sequence[int]
) -> TrainingMoment:
    """Return clients in a recorded round; a sum over a group counts for each of its members."""
    header = transcript.header(number)
    reply_ids = {sender: reply.client for reply in header.replies for sender in reply.senders}

    def broadcast_to(client: int) -> State:
        return transcript.broadcast(number, reply_ids[client])

    return TrainingMoment(
        state=f"round-{number - 1}",
        number=number,
        clients=_choose_clients(clients, sorted(reply_ids), f"round {number}"),
        training=read_training(experiment, header),
        before=broadcast_to,
    )


def read_training(experiment: Experiment, header: Header) -> LocalTraining:
    """Return the local training of a recorded round, as the server's message asks for it."""
    server_settings = {key.replace("-", "_"): value for key, value in header.config.items()}
    return LocalTraining.from_message(vars(experiment.training) | server_settings)


def _choose_clients(chosen: Sequence[int], known: Sequence[int], where: str) -> Sequence[int]:
    """Return `chosen` without repetitions, or all that are `known`."""
    for client in chosen:
        if client not in known:
            raise ConfigError(f"--client {client}: is not among the {len(known)} clients of {where}; name another")
    return list(dict.fromkeys(chosen)) or known


def _check_distinct(moments: list[TrainingMoment]) -> list[TrainingMoment]:
    for state, count in Counter(moment.state for moment in moments).items():
        if count > 1:
            raise ConfigError(f"expose: {state} is asked for {count} times; name each state once")
    return moments
