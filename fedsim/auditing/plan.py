"""What an audit has to do: which attack is made on which victim in which rounds, and in which order."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from fedsim.attacks import NO_ATTACKS, OPTIMAL, Attack
from fedsim.auditing.sight import Sight
from fedsim.errors import AttackError, ConfigError, FedsimError, did_you_mean, some_of
from fedsim.experiments.config import AdversaryTable, AttackTable
from fedsim.recording.header import Header
from fedsim.recording.transcript import Transcript

log = logging.getLogger(__name__)

Named = Sequence[tuple[AttackTable, Attack]]
"""The attacks of a file, each with its table."""
ADAPTIVE = "adaptive"
"""How the title of an attack ends that knows the defenses of the clients."""
_SHOWN = 20
"""Most clients named in a sentence."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One attack on one victim's update (or updates, for an attack on several rounds), from one random start."""

    title: str
    plugin: str
    attack: Attack
    rounds: tuple[int, ...]
    victim: int
    repeat: int

    @property
    def round(self) -> str:
        """The round that is attacked, or `first-last` for an attack on several."""
        return "-".join(map(str, sorted({self.rounds[0], self.rounds[-1]})))

    @property
    def name(self) -> str:
        """File name without its ending, unique within the attack's folder."""
        return f"round-{self.round}-client-{self.victim}-repeat-{self.repeat}"


def jobs(
    transcript: Transcript, adversary: AdversaryTable, attacks: Named, only: Iterable[int] | None, failures: list[str]
) -> Iterator[Job]:
    """What to do, round by round; attacks on several rounds come first.

    Args:
        only: these of the rounds that are to be attacked; attacks on several rounds at once are then left out, because
            not all of their rounds are recorded yet.
        failures: gets a sentence for each round that cannot be read, and for each attack that does not apply to what
            the server saw.
    """
    present: dict[int, Header] = {}
    for number in chosen_rounds(transcript, adversary, only):
        try:
            present[number] = transcript.header(number)
        except FedsimError as error:
            failures.append(str(error))
            log.error("%s", error)
    views = [(tuple(present), True)] if present and only is None else []
    views += [((number,), False) for number in present]
    for numbers, temporal in views:
        sight = Sight([present[number] for number in numbers])
        made = [(table, attack) for table, attack in attacks if attack.temporal == temporal]
        victims = {table.title: sight.victims(attack, adversary.victims, failures) for table, attack in made}
        for victim in dict.fromkeys(itertools.chain.from_iterable(victims.values())):
            for table, attack in made:
                for repeat in range(adversary.repeats if victim in victims[table.title] else 0):
                    yield Job(
                        title=table.title,
                        plugin=table.name,
                        attack=attack,
                        rounds=numbers,
                        victim=victim,
                        repeat=repeat,
                    )


def adaptive_ones(attacks: Named) -> Named:
    """Those of `attacks` that read the defenses of the clients, as an adversary makes them who knows these.

    Raises:
        ConfigError: one of them would be called as another attack is.
    """
    titles = {table.title for table, _ in attacks}
    found = []
    for table, attack in attacks:
        if "defenses" not in attack.declared():
            continue
        title = f"{table.title} {ADAPTIVE}"
        if title in titles:
            raise ConfigError(
                f"attack: '{title}' is what '{table.title}' is called where it knows the defenses; choose another label"
            )
        found.append((table.model_copy(update={"label": title}), attack.adapted(title)))
    return found


def in_order(builds_on: Mapping[str, str | None], *, known: bool) -> list[list[str]]:
    """Titles of attacks in the order of work: an attack comes after those whose findings it builds on.

    Args:
        builds_on: by title, the attack from which an attack takes models, or `optimal` for optimal local models.
        known: whether the optimal local models can be computed.

    Raises:
        ConfigError: an attack builds on one that the file does not name, on itself by a circle, or on optimal local
            models where the clients' data are not known.
    """
    for title, source in builds_on.items():
        if source == OPTIMAL and not known:
            raise ConfigError(
                f"attack.{title}.source: '{OPTIMAL}' is for the run of an experiment, whose data are known; "
                "a recording made elsewhere has no optimal local models"
            )
        if source is not None and source != OPTIMAL and source not in builds_on:
            others = [name for name in builds_on if name != title]
            raise ConfigError(
                f"attack.{title}.source: there is no attack '{source}' in the file to take local models from, "
                f"{did_you_mean(source, [*others, *NO_ATTACKS])}"
            )
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for title, source in builds_on.items():
        sorter.add(title, *([source] if source is not None and source in builds_on else []))
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(f"attack: {' builds on '.join(reversed(error.args[1]))}; name another source") from error
    stages = []
    while ready := list(sorter.get_ready()):
        stages.append(sorted(ready, key=list(builds_on).index))
        sorter.done(*ready)
    return stages


def chosen_rounds(transcript: Transcript, adversary: AdversaryTable, only: Iterable[int] | None) -> Sequence[int]:
    """The rounds to attack; with `only`, those of them that are in `only` and are recorded already."""
    recorded = transcript.rounds
    chosen = recorded if adversary.rounds == "all" else adversary.rounds or recorded[:1]
    if only is not None:
        return [number for number in only if number in chosen and number in recorded]
    for number in chosen:
        if number not in recorded:
            raise ConfigError(f"adversary.rounds: round {number} is not recorded; recorded: {recorded}")
    return chosen


def check_victims(transcript: Transcript, adversary: AdversaryTable, chosen: Sequence[int]) -> None:
    """Raise ConfigError where a victim is named that is in no round, not even as a client that failed."""
    missing = set(adversary.victims) if isinstance(adversary.victims, list) else set()
    seen: set[int] = set()
    for number in dict.fromkeys([*chosen, *transcript.rounds]):
        if not missing:
            return
        try:
            header = transcript.header(number)
        except FedsimError:  # nobody knows which clients were in a damaged round; it is reported when it is attacked
            return
        present = {client for reply in header.replies for client in (reply.client, *reply.members)}
        present |= set(header.failures)
        missing -= present
        seen |= present
    if missing:
        told = some_of(sorted(seen), _SHOWN)
        raise ConfigError(f"adversary.victims: client {min(missing)} is not recorded; recorded: {told}")


def first_of(transcript: Transcript, job: Job) -> int:
    """The first of the job's rounds in which its victim took part, alone or in a group.

    It may not take part in each.

    Raises:
        AttackError, TranscriptError: it took part in none of them.
    """
    for number in job.rounds:
        if transcript.header(number).reply_of(job.victim) is not None:
            return number
    if len(job.rounds) == 1:
        transcript.update(job.rounds[0], job.victim)  # raises the error that says why it is not there
    raise AttackError(f"client {job.victim}: is recorded in none of the rounds {job.round}; attack another client")
