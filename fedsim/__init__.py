"""fedsim: a federated-learning simulator with a pluggable honest-but-curious server.

The public names are imported when they are first used, so that importing fedsim itself loads
neither torch nor Flower.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsim import errors as errors

if TYPE_CHECKING:
    from fedsim.attacks import Attack, Knowledge, Paper
    from fedsim.datasets import Dataset, Examples
    from fedsim.defense import Defense, Guarantee, Participation, Poisson, Setting
    from fedsim.errors import FedsimError
    from fedsim.evaluation.kind import Evaluator
    from fedsim.evaluation.truth import write_truth
    from fedsim.experiments.config import Config
    from fedsim.findings import (
        Finding,
        Inference,
        LabelDistribution,
        LocalModel,
        Membership,
        PropertyPresence,
        Reconstruction,
        Representatives,
        Texts,
    )
    from fedsim.measure import Measure
    from fedsim.recording.transcript import Transcript
    from fedsim.task import Task
    from fedsim.wire.messages import Update
    from fedsim.wire.payloads import Payload
    from fedsim.workflow.comparing import Comparison, compare
    from fedsim.workflow.in_memory import attack
    from fedsim.workflow.runs import Run, open, run
    from fedsim.workflow.sweeping import Sweep, sweep

    Curious: Any
    CuriousGrid: Any
    audit: Any
    partition_mod: Any

_HOMES = {
    "Attack": "fedsim.attacks",
    "Comparison": "fedsim.workflow.comparing",
    "Config": "fedsim.experiments.config",
    "Curious": "strategies.curious",
    "CuriousGrid": "strategies.curious_grid",
    "Dataset": "fedsim.datasets",
    "Defense": "fedsim.defense",
    "Evaluator": "fedsim.evaluation.kind",
    "Examples": "fedsim.datasets",
    "FedsimError": "fedsim.errors",
    "Finding": "fedsim.findings",
    "Guarantee": "fedsim.defense",
    "Inference": "fedsim.findings",
    "Knowledge": "fedsim.attacks",
    "LabelDistribution": "fedsim.findings",
    "LocalModel": "fedsim.findings",
    "Measure": "fedsim.measure",
    "Membership": "fedsim.findings",
    "Paper": "fedsim.attacks",
    "Payload": "fedsim.wire.payloads",
    "Poisson": "fedsim.defense",
    "Participation": "fedsim.defense",
    "Setting": "fedsim.defense",
    "PropertyPresence": "fedsim.findings",
    "Reconstruction": "fedsim.findings",
    "Representatives": "fedsim.findings",
    "Run": "fedsim.workflow.runs",
    "Sweep": "fedsim.workflow.sweeping",
    "Task": "fedsim.task",
    "Texts": "fedsim.findings",
    "Transcript": "fedsim.recording.transcript",
    "Update": "fedsim.wire.messages",
    "attack": "fedsim.workflow.in_memory",
    "audit": "strategies.curious_grid",
    "compare": "fedsim.workflow.comparing",
    "open": "fedsim.workflow.runs",
    "partition_mod": "clients.mods",
    "run": "fedsim.workflow.runs",
    "sweep": "fedsim.workflow.sweeping",
    "write_truth": "fedsim.evaluation.truth",
}
"""Module of each public name."""
__all__ = [
    "Attack", "Comparison", "Config", "Curious", "CuriousGrid", "Dataset", "Defense", "Evaluator", "Examples",
    "FedsimError", "Finding", "Guarantee", "Inference", "Knowledge", "LabelDistribution", "LocalModel", "Measure",
    "Membership", "Paper", "Participation", "Payload", "Poisson", "PropertyPresence", "Reconstruction",
    "Representatives", "Run", "Setting", "Sweep", "Task", "Texts", "Transcript", "Update", "attack", "audit",
    "compare", "open", "partition_mod", "run", "sweep", "write_truth",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
