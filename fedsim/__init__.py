"""fedsim: a federated-learning simulator with a pluggable honest-but-curious server.

The public names are imported when they are first used, so that importing fedsim itself loads
neither torch nor Flower.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsim.base import errors as errors

if TYPE_CHECKING:
    from fedsim.api.app_runs import run_app
    from fedsim.api.comparing import Comparison, compare
    from fedsim.api.dossiers import verify_dossier, write_dossier
    from fedsim.api.in_memory import attack
    from fedsim.api.linting import lint
    from fedsim.api.runs import Run, open, run
    from fedsim.api.scoring import ClaimScores, score
    from fedsim.api.sweeping import Sweep, sweep
    from fedsim.api.tuning import Tuning, tune
    from fedsim.audit.evaluation.display import Display, DisplayMatrix, DisplayTable
    from fedsim.audit.evaluation.evaluator import EvaluationContext, Evaluator, FindingSpec, Judgement
    from fedsim.audit.evaluation.score import Score
    from fedsim.audit.evaluation.truth import write_answers, write_truth
    from fedsim.base.errors import FedsimError
    from fedsim.base.loss_term import with_loss_term
    from fedsim.base.task import Task
    from fedsim.data import Dataset, Examples
    from fedsim.exposure.measure import Measure
    from fedsim.federation.config import Config
    from fedsim.federation.engines.engine import Engine, FederationJob
    from fedsim.federation.engines.serial import InProcessGrid
    from fedsim.interfaces.algorithm import ClientAlgorithm, ClientResult, LocalClient
    from fedsim.interfaces.answer_findings import AnsweredValues
    from fedsim.interfaces.attack import Attack, Knowledge, Paper, Target
    from fedsim.interfaces.count_findings import ExampleCount
    from fedsim.interfaces.defense import Defense, Guarantee, Participation, Poisson, Setting
    from fedsim.interfaces.findings import (
        ExampleGroups,
        Finding,
        Inference,
        LabelDistribution,
        Linkage,
        LocalModel,
        Membership,
        PropertyPresence,
        Reconstruction,
        Representatives,
        Texts,
    )
    from fedsim.interfaces.local_context import LocalContext
    from fedsim.interfaces.metric import ExampleContext, ExampleMetric, Metric
    from fedsim.interfaces.modality import Modality
    from fedsim.interfaces.panel import Panel
    from fedsim.recording.exchange_files import import_exchange
    from fedsim.recording.payloads import Payload
    from fedsim.recording.transcript import Transcript
    from fedsim.recording.wire_format import Update
    from fedsim.report.reported_run import ReportedRun

    Curious: Any
    CuriousGrid: Any
    AnswerDefense: Any
    answer_mod: Any
    as_mod: Any
    partition_mod: Any
    record_app: Any

_HOMES = {
    "AnsweredValues": "fedsim.interfaces.answer_findings",
    "Attack": "fedsim.interfaces.attack",
    "ClaimScores": "fedsim.api.scoring",
    "ClientAlgorithm": "fedsim.interfaces.algorithm",
    "ClientResult": "fedsim.interfaces.algorithm",
    "Comparison": "fedsim.api.comparing",
    "Config": "fedsim.federation.config",
    "Curious": "strategies.curious",
    "CuriousGrid": "strategies.curious_grid",
    "Dataset": "fedsim.data",
    "Display": "fedsim.audit.evaluation.display",
    "DisplayMatrix": "fedsim.audit.evaluation.display",
    "DisplayTable": "fedsim.audit.evaluation.display",
    "Defense": "fedsim.interfaces.defense",
    "Engine": "fedsim.federation.engines.engine",
    "EvaluationContext": "fedsim.audit.evaluation.evaluator",
    "Evaluator": "fedsim.audit.evaluation.evaluator",
    "ExampleContext": "fedsim.interfaces.metric",
    "ExampleCount": "fedsim.interfaces.count_findings",
    "ExampleGroups": "fedsim.interfaces.findings",
    "ExampleMetric": "fedsim.interfaces.metric",
    "Examples": "fedsim.data",
    "FederationJob": "fedsim.federation.engines.engine",
    "FedsimError": "fedsim.base.errors",
    "Finding": "fedsim.interfaces.findings",
    "FindingSpec": "fedsim.audit.evaluation.evaluator",
    "Guarantee": "fedsim.interfaces.defense",
    "InProcessGrid": "fedsim.federation.engines.serial",
    "Inference": "fedsim.interfaces.findings",
    "Judgement": "fedsim.audit.evaluation.evaluator",
    "Knowledge": "fedsim.interfaces.attack",
    "LabelDistribution": "fedsim.interfaces.findings",
    "Linkage": "fedsim.interfaces.findings",
    "LocalClient": "fedsim.interfaces.algorithm",
    "LocalContext": "fedsim.interfaces.local_context",
    "LocalModel": "fedsim.interfaces.findings",
    "Measure": "fedsim.exposure.measure",
    "Membership": "fedsim.interfaces.findings",
    "Metric": "fedsim.interfaces.metric",
    "Modality": "fedsim.interfaces.modality",
    "Panel": "fedsim.interfaces.panel",
    "Paper": "fedsim.interfaces.attack",
    "Payload": "fedsim.recording.payloads",
    "Poisson": "fedsim.interfaces.defense",
    "Participation": "fedsim.interfaces.defense",
    "Score": "fedsim.audit.evaluation.score",
    "Setting": "fedsim.interfaces.defense",
    "PropertyPresence": "fedsim.interfaces.findings",
    "Reconstruction": "fedsim.interfaces.findings",
    "ReportedRun": "fedsim.report.reported_run",
    "Representatives": "fedsim.interfaces.findings",
    "Run": "fedsim.api.runs",
    "Sweep": "fedsim.api.sweeping",
    "Target": "fedsim.interfaces.attack",
    "Task": "fedsim.base.task",
    "Texts": "fedsim.interfaces.findings",
    "Transcript": "fedsim.recording.transcript",
    "Tuning": "fedsim.api.tuning",
    "Update": "fedsim.recording.wire_format",
    "AnswerDefense": "clients.answer_mods",
    "answer_mod": "clients.answer_mods",
    "with_loss_term": "fedsim.base.loss_term",
    "as_mod": "clients.mods",
    "attack": "fedsim.api.in_memory",
    "compare": "fedsim.api.comparing",
    "import_exchange": "fedsim.recording.exchange_files",
    "lint": "fedsim.api.linting",
    "open": "fedsim.api.runs",
    "partition_mod": "clients.mods",
    "record_app": "strategies.curious_grid",
    "run": "fedsim.api.runs",
    "run_app": "fedsim.api.app_runs",
    "score": "fedsim.api.scoring",
    "sweep": "fedsim.api.sweeping",
    "tune": "fedsim.api.tuning",
    "verify_dossier": "fedsim.api.dossiers",
    "write_answers": "fedsim.audit.evaluation.truth",
    "write_dossier": "fedsim.api.dossiers",
    "write_truth": "fedsim.audit.evaluation.truth",
}
"""Module of each public name."""
__all__ = [
    "AnswerDefense", "AnsweredValues", "Attack", "ClaimScores", "ClientAlgorithm", "ClientResult", "Comparison",
    "Config", "Curious", "CuriousGrid", "Dataset", "Defense", "Display", "DisplayMatrix", "DisplayTable", "Engine",
    "EvaluationContext", "Evaluator", "ExampleContext", "ExampleCount", "ExampleGroups",
    "ExampleMetric", "Examples", "FederationJob", "FedsimError", "Finding", "FindingSpec",
    "Guarantee", "InProcessGrid", "Inference", "Judgement", "Knowledge", "LabelDistribution", "Linkage",
    "LocalClient", "LocalContext", "LocalModel", "Measure", "Membership", "Metric", "Modality", "Panel", "Paper",
    "Participation", "Payload", "Poisson", "PropertyPresence", "Reconstruction", "ReportedRun",
    "Representatives", "Run", "Score", "Setting", "Sweep", "Target", "Task", "Texts",
    "Transcript", "Tuning", "Update", "answer_mod", "as_mod", "attack", "compare", "import_exchange", "lint", "open",
    "partition_mod", "record_app", "run", "run_app", "score", "sweep", "tune", "verify_dossier", "with_loss_term",
    "write_answers", "write_dossier", "write_truth",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ImportError:
        from fedsim.plugins.registry import check_installation

        check_installation()  # an app may have a module that is called as one of fedsim's packages
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
