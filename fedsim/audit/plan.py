"""Plan an audit: which attack is made on which victim in which rounds, and in which order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from fedsim.audit.attacked_rounds import write_rounds
from fedsim.audit.visibility import ObservedClients
from fedsim.base.errors import ConfigError, FedsimError, did_you_mean, join_first
from fedsim.federation.adversary_tables import AdversaryTable, AttackTable
from fedsim.federation.config import Config
from fedsim.interfaces.attack import BASELINE_SOURCES, OPTIMAL, Attack
from fedsim.recording.header import Header
from fedsim.recording.transcript import Transcript

log = logging.getLogger(__name__)

ReportJobProgress = Callable[["AttackJob", int, int, Mapping[str, float]], None]
"""Callback `progress(job, iteration, iterations, values)`."""
TitledAttacks = Sequence[tuple[AttackTable, Attack]]
"""The attacks of a file, each with its table."""
ADAPTIVE = "adaptive"
"""Ending of the title of an attack that knows the defenses of the clients."""
_MAX_CLIENTS = 20
"""Most clients named in a sentence."""


@dataclass(frozen=True, kw_only=True)
class AttackJob:
    """One attack on one victim, from one random start.

    It reads the victim's update of one round, or its updates of several rounds.
    """

    title: str
    plugin: str
    attack: Attack
    rounds: tuple[int, ...]
    victim: int
    repeat: int

    @property
    def round(self) -> str:
        """Return the attacked rounds as text, see `write_rounds`."""
        return write_rounds(self.rounds)

    @property
    def span(self) -> str:
        """Return the first and the last attacked round, which file names and random keys have: a name has no gaps."""
        return "-".join(map(str, sorted({self.rounds[0], self.rounds[-1]})))

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Return title, rounds, victim and random start."""
        return self.title, self.round, self.victim, self.repeat

    @property
    def name(self) -> str:
        """Return the file name without its ending, unique within the attack's folder."""
        return f"round-{self.span}-client-{self.victim}-repeat-{self.repeat}"


def plan_jobs(
    transcript: Transcript,
    adversary: AdversaryTable,
    attacks: TitledAttacks,
    only: Iterable[int] | None,
    failures: list[str],
) -> Iterator[AttackJob]:
    """Plan the jobs, round by round; attacks on several rounds come first.

    Args:
        only: leave out rounds other than these, and attacks on several rounds at once, because not
            all of their rounds are recorded yet; None plans everything.
        failures: gets a sentence for each round that cannot be read, and for each attack that does
            not apply to what the server saw.
    """
    present: dict[int, Header] = {}
    for number in rounds_to_attack(transcript, adversary, only):
        try:
            present[number] = transcript.header(number)
        except FedsimError as error:
            failures.append(str(error))
            log.error("%s", error)
    # Pair the rounds of each step with whether its attacks read one round.
    steps = [(tuple(present), False)] if present and only is None else []
    steps += [((number,), True) for number in present]
    for numbers, is_one_round in steps:
        observed = ObservedClients([present[number] for number in numbers])
        step_attacks = []
        for table, attack in attacks:
            if attack.reads_one_round() == is_one_round:
                step_attacks.append((table, attack))
        victims: dict[str, Sequence[int]] = {}
        for table, attack in step_attacks:
            victims[table.title] = observed.victims(attack, adversary.victims, failures)
        for victim in dict.fromkeys(itertools.chain.from_iterable(victims.values())):
            for table, attack in step_attacks:
                if victim not in victims[table.title]:
                    continue
                for repeat in range(adversary.repeats):
                    yield AttackJob(
                        title=table.title,
                        plugin=table.name,
                        attack=attack,
                        rounds=numbers,
                        victim=victim,
                        repeat=repeat,
                    )


def adaptive_attacks(attacks: TitledAttacks) -> TitledAttacks:
    """Return the adaptive form of each attack that reads the clients' defenses."""
    titles = {table.title for table, _ in attacks}
    adapted = []
    for table, attack in attacks:
        if "defenses" not in attack.declared_facts():
            continue
        title = f"{table.title} {ADAPTIVE}"
        if title in titles:
            raise ConfigError(
                f"attack: '{title}' is what '{table.title}' is called where it knows the defenses; choose another label"
            )
        adapted.append((table.model_copy(update={"label": title}), attack.adaptive_copy(title)))
    return adapted


def work_stages(builds_on: Mapping[str, str | None], *, has_optima: bool) -> list[list[str]]:
    """Group the titles of attacks into stages: an attack comes after the attack that it builds on.

    Args:
        builds_on: by title, the attack from which an attack takes models, or `optimal` for optimal
            local models.
        has_optima: whether the optimal local models can be computed.

    >>> work_stages({"aia": "decoder", "dlg": None, "decoder": None}, has_optima=True)
    [['dlg', 'decoder'], ['aia']]
    """
    for title, source in builds_on.items():
        if source == OPTIMAL and not has_optima:
            raise ConfigError(
                f"attack.{title}.source: '{OPTIMAL}' is for the run of an experiment, whose data are known; "
                "a recording made elsewhere has no optimal local models"
            )
        if source is not None and source != OPTIMAL and source not in builds_on:
            other_titles = [name for name in builds_on if name != title]
            raise ConfigError(
                f"attack.{title}.source: there is no attack '{source}' in the file to take local models from, "
                f"{did_you_mean(source, [*other_titles, *BASELINE_SOURCES])}"
            )
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for title, source in builds_on.items():
        if source is not None and source in builds_on:
            sorter.add(title, source)
        else:
            sorter.add(title)
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"attack: {' builds on '.join(reversed(error.args[1]))}; name another source") from error
    stages = []
    while ready := list(sorter.get_ready()):
        stages.append(sorted(ready, key=list(builds_on).index))
        sorter.done(*ready)
    return stages


def rounds_to_attack(transcript: Transcript, adversary: AdversaryTable, only: Iterable[int] | None) -> Sequence[int]:
    """Return the rounds to attack.

    Args:
        only: leave out other rounds than these, and those that are not recorded yet.
    """
    recorded = transcript.rounds
    chosen = recorded if adversary.rounds == "all" else adversary.rounds or recorded[:1]
    if only is not None:
        return [number for number in only if number in chosen and number in recorded]
    for number in chosen:
        if number not in recorded:
            raise ConfigError(f"adversary.rounds: round {number} {transcript.explain_absence(number)}")
    return chosen


def check_victims_are_recorded(config: Config) -> None:
    """Raise ConfigError where a federation that is still to run will not record a victim."""
    victims, recorded = config.adversary.victims, config.recording.clients
    if not isinstance(victims, list) or recorded is None or config.secure_aggregation is not None:
        return
    if missing := sorted(set(victims).difference(recorded)):
        raise ConfigError(
            f"adversary.victims: client {missing[0]} will not be recorded (recording.clients = {recorded}); add it "
            "there, or name other victims"
        )


def check_victims(transcript: Transcript, adversary: AdversaryTable, chosen: Sequence[int]) -> None:
    """Raise ConfigError where a victim is named that no round has, not even as a failed client."""
    missing = set(adversary.victims) if isinstance(adversary.victims, list) else set()
    seen: set[int] = set()
    for number in dict.fromkeys([*chosen, *transcript.rounds]):
        if not missing:
            return
        try:
            header = transcript.header(number)
        except FedsimError:
            # The clients of a damaged round are not known; it is reported when it is attacked.
            return
        present = set(header.failures)
        for reply in header.replies:
            present.update((reply.client, *reply.members))
        missing -= present
        seen |= present
    if missing:
        recorded = join_first(sorted(seen), _MAX_CLIENTS)
        raise ConfigError(f"adversary.victims: client {min(missing)} is not recorded; recorded: {recorded}")
