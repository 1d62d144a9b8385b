"""How exposed clients are at chosen states of training, with no server and no attack: the work of `fedsim expose`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsim.errors import ConfigError
from fedsim.experiments.build import Experiment, a_gauge
from fedsim.experiments.config import Config, MeasureTable, Table, check
from fedsim.experiments.reading import override_in
from fedsim.experiments.states import States
from fedsim.experiments.training_states import make_states
from fedsim.exposure.of_clients import Gauge, reason, rows_of
from fedsim.plugins import registry
from fedsim.recording.transcript import Transcript
from fedsim.training.settings import LocalTraining
from fedsim.wire.payloads import State

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A state of training, and the clients that are about to send.

    Attributes:
        state: what it is called, as in `[states]`: `round-0` is the one that the federation starts from.
        number: the round in which they send, which says what mini-batches they use.
        clients: who sends.
        training: how they train in this round.
        before: by client, the model that it is sent.
    """

    state: str
    number: int
    clients: Sequence[int]
    training: LocalTraining
    before: Callable[[int], State]


class _Measures(Table):
    measure: list[MeasureTable]


def chosen_tables(config: Config, names: Sequence[str], overrides: Iterable[str]) -> list[MeasureTable]:
    """What is to be measured: nothing where neither `names` nor the experiment says so.

    Args:
        names: of tables of the experiment, or of measures with their default settings.
        overrides: `measure.NAME.key=value`.

    Raises:
        ConfigError: a setting is wrong, or a measure is named twice.
    """
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"--measure {twice[0]}: is named twice; name each once")
    known = {table.title: table.model_dump() for table in config.measure}
    tables = [known.get(name, {"name": name}) for name in names] if names else list(known.values())
    given: dict[str, Any] = {"measure": tables}
    for override in overrides:
        override_in(given, override)
    return check(_Measures, given, "expose").measure


def all_that_apply(experiment: Experiment, *, each: bool) -> list[Gauge]:
    """Every measure that applies to the experiment; why one is left out goes to the log.

    Args:
        each: of each example, too, where it applies to single ones.
    """
    kept, local = [], experiment.trial()
    for name in registry.names("measures"):
        try:
            gauge = a_gauge(MeasureTable(name=name))
            gauge.try_out(local)
            kept.append(gauge)
            if each:
                (alone := replace(gauge, each=True)).try_out(local)
                kept[-1] = alone
        except (Exception, SystemExit) as error:  # a stranger's measure may raise anything, and the others go on
            what = "of single examples " if kept and kept[-1].title == name else ""
            log.info("%s%s is left out: %s", what, name, reason(error))
    return kept


def moments_of_file(experiment: Experiment, name: str, states: Sequence[str], clients: Sequence[int]) -> list[Moment]:
    """What an experiment file describes: the state that it starts from, or those that `states` name.

    Args:
        name: of the file, by which trained states are kept in the cache.
        states: of `[states]`, which are trained if they are not there, or files.
        clients: ids; all if there are none.

    Raises:
        ConfigError: there is no such state or client.
        RunError: training failed.
    """
    table = experiment.config.states
    kept = [*(f"round-{number}" for number in table.rounds), *(f"epoch-{number}" for number in table.epochs)]

    def folder() -> States:
        return make_states(experiment.config, name, None)

    started = [_moment(experiment, "round-0", experiment.initial_state(), clients)] if not states else []
    return _distinct([*started, *_named(experiment, states, kept, folder, clients)])


def moments_of_run(
    experiment: Experiment, folder: Path, states: Sequence[str], rounds: Sequence[int], clients: Sequence[int]
) -> list[Moment]:
    """What a run recorded: clients in `rounds`, by default in the first recorded one, or at `states` that it kept.

    Args:
        clients: ids; those who sent if there are none.

    Raises:
        ConfigError: there is no such round, state or client.
        TranscriptError: nothing is recorded, or a round is damaged.
    """
    kept = States(folder / "states")
    found = _named(experiment, states, list(kept.manifest().get("states", {})), lambda: kept, clients)
    if states and not rounds:
        return _distinct(found)
    transcript = Transcript(folder)
    for number in rounds:
        if number not in transcript.rounds:
            raise ConfigError(f"expose: round {number} is not recorded; recorded: {transcript.rounds}")
    return _distinct(
        [*(_recorded(experiment, transcript, n, clients) for n in rounds or transcript.rounds[:1]), *found]
    )


def exposed(
    experiment: Experiment, moments: Iterable[Moment], gauges: Sequence[Gauge]
) -> Iterator[Iterator[dict[str, Any]]]:
    """The rows of each client at each moment, as they are computed."""
    loss = experiment.dataset.task.loss
    for moment in moments:
        where = {"round": moment.number, "state": moment.state}
        for client in moment.clients:
            (share,) = experiment.shares([client], moment.number, moment.training)
            model = experiment.filled(moment.before(client))
            found = rows_of(gauges, model, share, moment.training, loss)
            yield ({**where, "client": client, **row} for row in found)


def _named(
    experiment: Experiment,
    names: Sequence[str],
    kept: Sequence[str],
    folder: Callable[[], States],
    clients: Sequence[int],
) -> list[Moment]:
    """A moment for each of `names`: states that are `kept` in `folder`, or files."""
    found = []
    for name in names:
        path = folder().path(name) if name in kept else Path(name)
        if name not in kept and path.suffix != ".safetensors":
            raise ConfigError(
                f"--state {name}: expected a safetensors file, or a state that is kept "
                f"({', '.join(kept) or 'none is'}); [states] says which are"
            )
        try:
            state = experiment.state_in(path)
        except ConfigError as error:
            raise ConfigError(f"--state {name}: {str(error).removeprefix('model.start: ')}") from error
        found.append(_moment(experiment, path.stem, state, clients))
    return found


def _moment(experiment: Experiment, name: str, state: State, clients: Sequence[int]) -> Moment:
    """Clients at a state that no message says anything about; after round N comes round N + 1, and all else is 1."""
    kind, _, number = name.partition("-")
    mu = getattr(experiment.new_strategy(), "proximal_mu", 0.0)  # FedProx's server tells it its clients
    return Moment(
        state=name,
        number=int(number) + 1 if kind == "round" and number.isdecimal() else 1,
        clients=_checked(clients, range(experiment.config.federation.clients), name),
        training=replace(experiment.training, proximal_mu=float(mu)),
        before=lambda _: state,
    )


def _recorded(experiment: Experiment, transcript: Transcript, number: int, clients: Sequence[int]) -> Moment:
    """Clients in a recorded round, sums over groups taken apart into those who sent."""
    header = transcript.header(number)
    reply_of = {sender: reply.client for reply in header.replies for sender in reply.senders}
    told = vars(experiment.training) | {key.replace("-", "_"): value for key, value in header.config.items()}

    def before(client: int) -> State:
        return transcript.recorded(number, reply_of[client]).before

    return Moment(
        state=f"round-{number - 1}",
        number=number,
        clients=_checked(clients, sorted(reply_of), f"round {number}"),
        training=LocalTraining.told(told),
        before=before,
    )


def _checked(chosen: Sequence[int], known: Sequence[int], where: str) -> Sequence[int]:
    """`chosen`, or all that are `known`."""
    for client in chosen:
        if client not in known:
            raise ConfigError(f"--client {client}: is not among the {len(known)} clients of {where}; name another")
    return list(dict.fromkeys(chosen)) or known


def _distinct(moments: list[Moment]) -> list[Moment]:
    for state, count in Counter(moment.state for moment in moments).items():
        if count > 1:
            raise ConfigError(f"expose: {state} is asked for {count} times; name each state once")
    return moments
