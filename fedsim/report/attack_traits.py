"""What the report needs to know of the attacks of a run: names, main metrics, classes, and the scores themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from fedsim.audit.attacked_rounds import parse_rounds
from fedsim.audit.audit import Audit
from fedsim.audit.finding_files import read_facts
from fedsim.audit.scores import read_score_rows
from fedsim.audit.variants import variant_columns, variant_names
from fedsim.base.errors import FedsimError, RunError
from fedsim.federation.run_folder import RunFolder
from fedsim.plugins import registry
from fedsim.report.verdicts import AttackTraits

log = logging.getLogger(__name__)


def find_main_metric(plugin: str, *, audit: Audit | None, trust: bool) -> str:
    """Return the main metric of an attack; empty if it names none, or the attack is unknown."""
    return str(getattr(_find_attack_class(plugin, audit, trust), "main_metric", ""))


def attack_classes(audit: Audit | None, findings: Sequence[Mapping[str, Any]], *, trust: bool) -> dict[str, Any]:
    """Return by title the class of each attack, None if it is unknown; the order fixes the colours."""
    titles_of_findings = {finding["title"] for finding in findings}
    planned = audit.spec.attack if audit else []
    names = {table.title: table.name for table in planned if table.title not in titles_of_findings}
    names |= {str(finding["attack"]): str(finding["plugin"]) for finding in findings}
    return {title: _find_attack_class(name, audit, trust) for title, name in names.items()}


def read_scores(folder: RunFolder) -> list[dict[str, str]]:
    """Read the rows of `scores.csv`."""
    rows = read_score_rows(folder.scores)
    for row in rows:
        row.update({name: "nan" for name in ("value", "floor", "nearest_public") if not row[name]})
    try:
        for text in {row["round"] for row in rows}:
            parse_rounds(text)
    except ValueError as error:
        raise RunError(f"{folder.scores}: {error}; remove it, and attack again") from error
    return rows


def name_attacks(
    score_rows: Iterable[Mapping[str, str]], findings: Iterable[Mapping[str, Any]]
) -> dict[tuple[str, str], str]:
    """Return by title and variant the name of each attack that is scored or has a finding.

    Tables, pictures and curves share these names: a finding may be drawn and not be scored, or its score outlive it.
    """
    return variant_names([*score_rows, *({**about, **variant_columns(about)} for about in findings)])


def find_attack_traits(
    names: Mapping[tuple[str, str], str],
    findings: Iterable[Mapping[str, Any]],
    audit: Audit | None,
    *,
    trust: bool = False,
) -> dict[tuple[str, str], AttackTraits]:
    """Return by title and variant of each attack what has to be known about it to read its scores."""
    main_metric = cache(partial(find_main_metric, audit=audit, trust=trust))
    traits = {key: AttackTraits(name=name) for key, name in names.items()}
    for about in findings:
        key, source = attack_key(about), str(about["settings"].get("source", ""))
        traits[key] = replace(traits[key], main_metric=main_metric(str(about["plugin"])), source=source)
    return traits


def read_attack_traits(
    folder: RunFolder, score_rows: Iterable[Mapping[str, str]], *, trust: bool = False, audit: Audit | None = None
) -> dict[tuple[str, str], AttackTraits]:
    """Return `find_attack_traits` of a run folder, whose scores were read."""
    findings = list(read_metadata(folder))
    return find_attack_traits(name_attacks(score_rows, findings), findings, audit, trust=trust)


def read_metadata(folder: RunFolder) -> Iterator[dict[str, Any]]:
    """Yield what each readable finding declares."""
    for path in sorted(folder.findings.rglob("*.safetensors")):
        with suppress(FedsimError):  # it is not scored either
            about = read_facts(path)
            yield about


def attack_key(about: Mapping[str, Any]) -> tuple[str, str]:
    """Return title and variant of the attack that made a finding."""
    return about["attack"], about["variant"]


def _find_attack_class(name: str, audit: Audit | None, trust: bool) -> Any:
    """Return the class of an attack; None if it is unknown, or a finding names untrusted code."""
    trusted = trust or (audit is not None and (audit.trust or name in [table.name for table in audit.spec.attack]))
    if ":" in name and not trusted:
        log.warning("the attack '%s' is code that a finding names, and is not run unasked; pass --trust", name)
        return None
    try:
        return registry.load("attacks", name)
    except FedsimError as error:
        log.warning("%s", error)
        return None
