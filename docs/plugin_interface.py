"""Writes reference/plugin-interface.md out of the code: `python docs/plugin_interface.py`.

A test sees that it is up to date.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedsim import data
from fedsim.audit.evaluation import case, display, evaluator, score, truth
from fedsim.base import constraints, task
from fedsim.data import partitions
from fedsim.exposure import measure
from fedsim.federation.engines import engine, serial
from fedsim.interfaces import (
    algorithm,
    attack,
    defense,
    findings,
    knowledge,
    local_context,
    mechanism,
    metric,
    modality,
    panel,
)
from fedsim.modalities import guesses
from fedsim.plugins.factories import RETURN_TYPES
from fedsim.recording import header, payloads, transcript, wire_format
from fedsim.report import charts, finding_views, recording_summary, reported_run, verdicts
from fedsim.training import local_round

PAGE = Path(__file__).parent / "reference" / "plugin-interface.md"
HEAD = """# The interface of plug-ins

What an author of a plug-in is handed and hands back, with every signature. Written by `python docs/plugin_interface.py`
out of the code, so that it cannot go stale. [Package your plug-ins](../how-to/package-plugins.md) walks through an
example; `fedsim show NAME` tells the settings of a plug-in.
"""
PARTS = {
    "Settings": (
        "Fields are settings, and their types say which values are accepted: "
        f"{', '.join(f'`{name}`' for name in constraints.__all__ if name.endswith(('Float', 'Int', 'Share', 'One')))} "
        "of `fedsim.base.constraints`, "
        "`Annotated` with a constraint of `annotated_types`, or `Literal`.",
        [constraints.CheckedSettings],
        [],
    ),
    "An attack": (
        "Derive a frozen dataclass from `Attack` and implement `_run`. Fields are settings.",
        [
            attack.Attack,
            attack.Target,
            knowledge.Knowledge,
            knowledge.Records,
            knowledge.KnownCandidates,
            knowledge.PartialRecords,
            knowledge.PropertyRecords,
            attack.Paper,
        ],
        [],
    ),
    "What the server saw": (
        "`target.transcript`, and what it gives.",
        [
            transcript.Transcript,
            header.Header,
            header.Reply,
            wire_format.Update,
            payloads.Payload,
            payloads.Sparse,
            payloads.Quantised,
        ],
        [],
    ),
    "What an attack claims": (
        "`_run` returns one of these. `labels` are `example`: class indices, or targets of a regression.",
        [
            findings.Reconstruction,
            findings.Representatives,
            findings.Texts,
            findings.LocalModel,
            findings.Inference,
            findings.Membership,
            findings.LabelDistribution,
            findings.PropertyPresence,
        ],
        [findings.client_ids],
    ),
    "A finding of a new kind": (
        "What none of these can claim is a kind of its own: a frozen dataclass that derives from `Finding`, and its "
        "evaluator, which `fedsim.findings` registers under the finding's `kind`. An attack returns the finding. The "
        "evaluator alone gets the truth. 1. `check_form` refuses, against a `FindingSpec`, a finding that cannot be "
        "judged. 2. `truth` says which of a victim's data it is about. 3. `judge` reads them by the "
        "`EvaluationContext` and returns scores, each by a declared metric ([A metric](#a-metric)) and beside the "
        "best guess. 4. `show` returns a `Display`, whose numbers, tables and matrices suit any kind. `my_finding.py`"
        " in "
        "[Write a kind of finding](../how-to/write-a-finding.md) is an example.",
        [
            findings.Finding,
            evaluator.Evaluator,
            evaluator.FindingSpec,
            evaluator.EvaluationContext,
            case.Case,
            truth.Truth,
            evaluator.Judgement,
            score.Score,
            display.Display,
            display.DisplayTable,
            display.DisplayMatrix,
            display.ImageGrid,
            display.TableRows,
            display.TextPair,
            display.ClaimedWord,
            display.RocCurve,
        ],
        [],
    ),
    "A defense": (
        "Derive a frozen dataclass from `Defense` and override a hook; each is the identity by default.",
        [
            defense.Defense,
            local_context.LocalContext,
            local_round.LocalRound,
            defense.Poisson,
            defense.Setting,
            defense.Participation,
            defense.Guarantee,
            mechanism.Mechanism,
        ],
        [],
    ),
    "A client algorithm": (
        "Derive a frozen dataclass from `ClientAlgorithm` and implement `train_client`. `[algorithm] name` names it.",
        [algorithm.ClientAlgorithm, algorithm.LocalClient, algorithm.ClientResult],
        [],
    ),
    "A measure": (
        "Derive a frozen dataclass from `Measure` and implement `_compute`.",
        [measure.Measure],
        [],
    ),
    "A metric": (
        "Derive a class from `ExampleMetric` and implement `measure`, or from `Metric` for what an evaluator computes. "
        "Each finding is scored by the metrics of all installed packages.",
        [metric.Metric, metric.ExampleMetric, metric.ExampleContext],
        [metric.find_metric],
    ),
    "An engine": (
        "Derive a frozen dataclass from `Engine` and implement `carry`. `[federation] engine` names it. A Grid of your "
        "own may derive from `InProcessGrid`, which is that of `serial`.",
        [engine.Engine, engine.FederationJob, serial.InProcessGrid],
        [],
    ),
    "A panel": (
        "Derive a class from `Panel` and implement `render`. Each report shows the panels of all installed packages.",
        [
            panel.Panel,
            reported_run.ReportedRun,
            recording_summary.Recording,
            finding_views.FindingView,
            verdicts.ScoreReading,
            charts.Curve,
            charts.ChartPoint,
            charts.HeatMapCell,
            charts.Look,
        ],
        [charts.draw_curves, charts.draw_points, charts.draw_heat_map],
    ),
    "A data set": (
        "A class with `load(folder: Path | None) -> Dataset`, or a function annotated to return "
        f"{RETURN_TYPES['datasets']}.",
        [data.Dataset, data.Examples, data.Column],
        [],
    ),
    "A modality": (
        "Derive a frozen dataclass without fields from `Modality` and implement `guess_examples`, and `draw_example` "
        "where a page is to draw. A data set names it.",
        [modality.Modality, modality.GuessMaterial, modality.PublicExamples],
        [guesses.general_guesses, guesses.class_means],
    ),
    "A partition": (
        "A class with `assign`, as a frozen dataclass whose fields are settings.",
        [partitions.Partition],
        [],
    ),
    "A model": (
        f"A class with `build(task: Task) -> nn.Module`, or a function annotated to return {RETURN_TYPES['models']}.",
        [task.Task],
        [],
    ),
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, (about, classes, functions) in PARTS.items():
        parts.append(f"## {title}\n\n{about}\n")
        parts += [described(cls) for cls in classes]
        parts += [f"```text\n{_signature(function)}\n```\n\n{_first(function)}\n" for function in functions]
    return "\n".join(parts)


def described(cls: type) -> str:
    """A class: its own fields, class attributes, properties and methods, and what its docstring says."""
    lines = [
        f"class {cls.__name__}({', '.join(b.__name__ for b in cls.__bases__ if b is not object)}):".replace("()", "")
    ]
    lines += [f"    {line}" for line in _fields(cls)]
    lines += [f"    {line}" for line in _methods(cls)]
    return f"### `{cls.__name__}`\n\n```text\n" + "\n".join(lines) + f"\n```\n\n```text\n{inspect.getdoc(cls)}\n```\n"


def _fields(cls: type) -> Iterable[str]:
    defaults = {f.name: f for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    for name, kind in vars(cls).get("__annotations__", {}).items():
        kind = kind if isinstance(kind, str) else inspect.formatannotation(kind)
        if name in defaults and defaults[name].default is not dataclasses.MISSING:
            about = defaults[name].metadata.get("fact")
            yield f"{name}: {kind} = {defaults[name].default!r}" + (f"  # {about.about}" if about else "")
        elif name in defaults and defaults[name].default_factory is not dataclasses.MISSING:
            yield f"{name}: {kind} = ...  # has a default"
        elif name not in defaults and name in vars(cls):
            yield f"{name}: {kind} = {_written(vars(cls)[name])}"
        else:
            yield f"{name}: {kind}"


def _written(value: Any) -> str:
    """As in code; what is in a set comes in the same order each time."""
    if isinstance(value, frozenset) and value:
        return f"frozenset({{{', '.join(map(repr, sorted(value)))}}})"
    return repr(value)


def _methods(cls: type) -> Iterable[str]:
    for name, member in vars(cls).items():
        if name.startswith("_") and name not in ("_run", "_compute"):
            continue
        if isinstance(member, property | functools.cached_property):
            getter = member.fget if isinstance(member, property) else member.func
            kind = inspect.signature(getter).return_annotation if getter else ""
            yield f"{name}: {kind}  # {_first(member)}"
        elif inspect.isfunction(member):
            yield f"{_signature(member)}  # {_first(member)}".rstrip(" #")
        elif isinstance(member, classmethod | staticmethod):
            yield f"@{type(member).__name__} {_signature(member.__func__)}  # {_first(member.__func__)}".rstrip(" #")


def _signature(function: Any) -> str:
    text = str(inspect.signature(function)).replace("'", "")
    return f"def {function.__name__}{text}"


def _first(thing: Any) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(thing) or "").split("\n")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
