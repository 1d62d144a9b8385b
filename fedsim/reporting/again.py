"""How to make a report again: files for `fedsim run` and `fedsim attack`, and what they need besides.

The files hold every setting that findings were made with, as their headers say it, so they make the same findings again
even where a later version has other defaults. A path is a place on the machine that made the run; they hold the names
of files alone, and `Again.needed` says where these have to be put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import tomli_w

from fedsim.auditing.audit import Audit
from fedsim.errors import FedsimError
from fedsim.experiments.config import AttackFile, check
from fedsim.reporting.attack_files import attack_files, attack_table, title
from fedsim.reporting.besides import Files, code_of
from fedsim.reporting.evidence import Found, Recording
from fedsim.reporting.summary import listed

AGAIN = "runs/again"
"""The run folder in the commands."""
_ELSEWHERE: Any = {"federation": {"address", "reply_memory"}, "truth": True, "app": True}
"""What an experiment file needs not say: where Flower or Ray listened, and the tables of a recording made elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Download:
    """A file that makes findings again, or the run itself.

    Attributes:
        attacks: the titles of the findings that it makes.
        command: what reads it.
    """

    name: str
    text: str
    attacks: Sequence[str]
    command: str


@dataclass(frozen=True, kw_only=True)
class Again:
    """How to make a report again.

    Attributes:
        downloads: the files, in the order of their commands.
        needed: a sentence for each thing that they need besides, or that no file can make again.
        hashes: of each finding, by name, the SHA-256 of what it claims.
        hash: SHA-256 over those; empty where there are none.
    """

    downloads: Sequence[Download]
    needed: Sequence[str]
    hashes: Sequence[tuple[str, str]]
    hash: str


def made_again(audit: Audit | None, recording: Recording, found: Sequence[Found]) -> Again:
    """The files with which the findings `found` are made again, each of them by one of the files.

    Args:
        audit: what the report was written with; None where nobody knows who attacked.
        recording: the rounds that were attacked.
    """
    own, files, failed = audit is not None and audit.experiment is not None, Files(), list[str]()
    downloads, told = list[Download](), list[Mapping[str, Any]]()
    for tables, items in _files(audit, recording, found, failed):
        plain = files.named_in(tables)
        try:
            check(AttackFile, {name: plain[name] for name in AttackFile.model_fields if name in plain}, "a file")
            downloads.append(_download(len(downloads), plain, titles(items), own=own))
            told.append(plain)
        except (FedsimError, TypeError, ValueError) as error:  # a stranger's finding may say anything of itself
            failed.append(f"{listed(titles(items))}: what is said of how it was made fits no file ({error}).")
    hashes = sorted((name_of(item), item.hash) for item in found)
    whole = sha256("".join(f"{name} {digest}\n" for name, digest in hashes).encode()).hexdigest()
    return Again(
        downloads=downloads,
        needed=[*files.sentences(), *code_of(told), *failed],
        hashes=hashes,
        hash=whole if hashes else "",
    )


def _files(
    audit: Audit | None, recording: Recording, found: Sequence[Found], failed: list[str]
) -> Iterator[tuple[dict[str, Any], list[Found]]]:
    """The tables of each file, and the findings that it makes: first the run's own file, then what findings say."""
    run, left = own_file(audit) if audit else None, list(found)
    if run:
        yield _whole(run, recording, left)
    if silent := _take(left, lambda item: item.about["knowledge"] is None):
        failed.append(f"{listed(titles(silent))}: findings of an earlier fedsim do not say what was granted.")
    for tables, items in attack_files(left, found, audit, _everyone(recording)):
        yield tables | ({"truth": audit.spec.truth} if audit and audit.spec.truth else {}), items


def _everyone(recording: Recording) -> dict[int, set[int]]:
    """By round, the clients that sent an update of their own."""
    return {
        header.round: {reply.client for reply in header.replies if not reply.members} for header in recording.headers
    }


def own_file(audit: Audit) -> Audit | None:
    """The audit that the run's own experiment describes; None for a recording made elsewhere."""
    if audit.experiment is None or audit.spec is audit.experiment.config:
        return audit if audit.experiment else None
    return replace(audit, spec=audit.experiment.config, beside=audit.folder.path)


def name_of(item: Found) -> str:
    """Which finding this is: attack, round, victim and start."""
    about = item.about
    return f"{about['attack']}, round {about['round']}, client {about['victim']}, start {int(about['repeat']) + 1}"


def titles(items: Iterable[Found]) -> list[str]:
    """What the attacks of these findings are called in the report."""
    return list(dict.fromkeys(str(item.about["attack"]) for item in items))


def _download(place: int, tables: Mapping[str, Any], attacks: Sequence[str], *, own: bool) -> Download:
    if own and place == 0:
        name, command = "experiment.toml", f"fedsim run experiment.toml --out {AGAIN}"
    else:
        name = f"attack-{place if own else place + 1}.toml"
        command = f"fedsim attack {AGAIN if own else 'RUN'} {name}"
    return Download(name=name, text=f"# {command}\n\n{tomli_w.dumps(tables)}", attacks=attacks, command=command)


def _whole(own: Audit, recording: Recording, left: list[Found]) -> tuple[dict[str, Any], list[Found]]:
    """The experiment file of a run, and the findings that it makes, which are taken out of `left`."""
    planned = _take(left, _planned(own, recording))
    tables = _without_empty(own.spec.model_dump(mode="json", exclude_none=True, exclude=_ELSEWHERE))
    if not planned or tables["adversary"]["when"] == "never":
        tables["adversary"]["when"] = "at-end" if planned else "never"
    return _written_out(tables, planned), planned


def _without_empty(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: table for name, table in tables.items() if table not in ([], {})}


def _written_out(tables: dict[str, Any], made: Sequence[Found]) -> dict[str, Any]:
    """The same file with all settings of the attacks that made something, not only those that its author chose."""
    known = {title(item.about): item.about for item in made}
    names = [(table, table.get("label") or table["name"]) for table in tables.get("attack", [])]
    full = [attack_table(known[name]) if name in known else table for table, name in names]
    return tables | ({"attack": full} if full else {})


def _take(left: list[Found], wanted: Callable[[Found], bool]) -> list[Found]:
    taken = list(map(wanted, left))
    here, elsewhere = (
        [item for item, is_here in zip(left, taken, strict=True) if is_here is what] for what in (True, False)
    )
    left[:] = elsewhere
    return here


def _planned(audit: Audit, recording: Recording) -> Callable[[Found], bool]:
    """Whether the file of `audit` has a finding made; nothing where its attacks cannot be built."""
    adversary = audit.spec.adversary
    try:
        attacks, variants = {table.title: attack for table, attack in audit.attacks}, audit.cache.variants
    except FedsimError:
        return lambda item: False
    recorded = sorted([*(header.round for header in recording.headers), *recording.damaged])
    chosen = recorded if adversary.rounds == "all" else adversary.rounds or recorded[:1]

    def victims(rounds: Sequence[int]) -> set[int]:
        replies = [reply for header in recording.headers if header.round in rounds for reply in header.replies]
        everyone = {client for reply in replies for client in (reply.client, *reply.members)}
        return everyone if adversary.victims == "all" else set(adversary.victims or sorted(everyone)[:1])

    def is_planned(item: Found) -> bool:
        about, attack = item.about, attacks.get(str(item.about["title"]))
        if attack is None or variants[str(about["title"])] != about["variant"]:
            return False
        rounds = list(about["rounds"])
        in_time = rounds == [r for r in chosen if r in recorded] if attack.temporal else set(rounds) <= set(chosen)
        whom = {about["victim"], *about["members"]}
        return in_time and about["repeat"] < adversary.repeats and bool(whom & victims(rounds))

    return is_planned
