"""Files of a dossier: `dossier.json` with its seal, `dossier.html`, and `dossier.junit.xml` for thresholds."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from pydantic import ValidationError

from fedsim.base.errors import ConfigError, RunError, first_line
from fedsim.base.files import check_no_link, parse_json, write_text
from fedsim.dossier.attack_results import list_reported
from fedsim.dossier.contents import (
    CANNOT_DECIDE,
    REACHED,
    Dossier,
    Result,
    SealedDossier,
    ThresholdResult,
    format_number,
    start_sentence,
)
from fedsim.interfaces.metric import describe_metric
from fedsim.recording.seals import require_seal, seal_text, signing_key
from fedsim.report.html import render_page
from fedsim.report.summary import EXACT

JSON_FILE, PAGE, JUNIT_FILE = "dossier.json", "dossier.html", "dossier.junit.xml"


def write_dossier_files(dossier: Dossier, folder: Path) -> Path:
    """Write the files of a dossier into `folder`, and return the page.

    Without thresholds there is no JUnit file; a former one is removed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be written ({error.strerror}); choose another --out") from error
    content = dossier.model_dump(mode="json")
    seal = seal_text(_sealed_text(content), signing_key())
    write_text(folder / JSON_FILE, json.dumps({"seal": seal, "dossier": content}, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / PAGE, render_dossier(dossier, seal))
    if dossier.thresholds:
        write_text(folder / JUNIT_FILE, format_junit(dossier.name, dossier.thresholds))
    else:
        (folder / JUNIT_FILE).unlink(missing_ok=True)
    return folder / PAGE


def read_dossier(path: Path) -> SealedDossier:
    """Read `dossier.json`, and check its seal."""
    if path.is_dir():
        path = path / JSON_FILE
    if not path.is_file():
        raise ConfigError(f"{path}: no such dossier; `fedsim dossier RUN` writes one")
    check_no_link(path)
    try:
        content = parse_json(path.read_bytes())
        require_seal(content["seal"], _sealed_text(content["dossier"]))
        return SealedDossier.model_validate(content)
    except ConfigError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: is not a dossier of this fedsim ({where}: {first['msg']}); write it again") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else first_line(error)
        raise RunError(f"{path}: was altered, or is not a dossier ({reason}); nothing that it says counts") from error


def _sealed_text(content: object) -> str:
    return json.dumps(content, sort_keys=True)


def render_dossier(dossier: Dossier, seal: Mapping[str, str]) -> str:
    """Render the page: two pages in plain words, and an annex."""
    return render_page(
        "dossier.html.j2",
        dossier=dossier,
        reported_results=list(itertools.chain.from_iterable(list_reported(dossier.results))),
        is_signed=len(seal) > 1,
        digest=seal["sha256"],
        sentence=start_sentence,
        number=format_number,
        mean_score=functools.partial(_format_mean, dossier.results),
        worst_score=_format_worst,
        explanations=_explain_metrics(dossier),
    )


_PLAIN_WORDS = {
    "exact": "Share of the examples that were recovered exactly.",
    "recovered": ("Share of the examples that were recovered well enough to be recognised; of texts, word for word."),
}
"""What metrics are whose own descriptions name constants of the program."""


def _explain_metrics(dossier: Dossier) -> dict[str, list[str]]:
    """Return by title what each metric is and how to read it; an explanation that several have stands once."""
    explanations: dict[str, list[str]] = {}
    explained = set[str]()
    for result in dossier.results:
        metric = describe_metric(result.metric)
        description = inspect.getdoc(type(metric)) or ""
        sentences = [_PLAIN_WORDS.get(result.metric) or description.partition("\n\n")[0]]
        sentences += [sentence for sentence in metric.explanations if sentence not in explained]
        explained.update(metric.explanations)
        explanations.setdefault(metric.title, list(filter(None, sentences)))
    return explanations


def _format_mean(results: Iterable[Result], result: Result) -> str:
    """Format the mean over victims; one that only exact claims have is called so, see `finds_exact_only`."""
    subject = result.setting, result.attack, result.victims, result.unscored
    shares = {
        other.mean
        for other in results
        if other.metric == EXACT and (other.setting, other.attack, other.victims, other.unscored) == subject
    }
    is_exact = describe_metric(result.metric).exact_from < math.inf and shares == {1}
    return EXACT if is_exact else format_number(result.mean)


def _format_worst(result: Result) -> str:
    """Format the score of the most exposed client; one of examples that are exact is called so."""
    if result.worst is None:
        return "–"
    is_exact = result.worst.is_exact and describe_metric(result.metric).exact_from < math.inf
    return EXACT if is_exact else format_number(result.worst.value)


def format_junit(name: str, thresholds: Sequence[ThresholdResult]) -> str:
    """Return thresholds as JUnit tests: one that is reached fails, one that cannot be decided is an error."""
    outcomes = [threshold.outcome for threshold in thresholds]
    suite = ElementTree.Element(
        "testsuite",
        name=f"fedsim dossier {name}",
        tests=str(len(outcomes)),
        failures=str(outcomes.count(REACHED)),
        errors=str(outcomes.count(CANNOT_DECIDE)),
    )
    for threshold in thresholds:
        case = ElementTree.SubElement(suite, "testcase", classname=f"dossier.{name}", name=threshold.threshold)
        if threshold.outcome == REACHED:
            ElementTree.SubElement(case, "failure", message=threshold.why)
        elif threshold.outcome == CANNOT_DECIDE:
            ElementTree.SubElement(case, "error", message=threshold.why)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
