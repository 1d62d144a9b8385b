"""What an attack claims to have found. A finding never contains truth; `fedsim.scoring` judges it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.errors import AttackError, RunError, TranscriptError
from fedsim.files import in_one_step


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Data that the attack claims the victim trained on, in arbitrary order.

    Attributes:
        data: `example channel height width`, values in [0, 1].
        labels: `example`, class index of each example, or of a regression its target (floating point).
        trace: named curves, one value an iteration, e.g. `objective`, `l_sim`, `alpha`.
        snapshots: `step example channel height width`, the data on the way there, in [0, 1].
        snapshot_iterations: `step`, the iteration after which each snapshot was taken.
    """

    data: Tensor
    labels: Tensor
    trace: Mapping[str, Tensor] = field(default_factory=dict)
    snapshots: Tensor | None = None
    snapshot_iterations: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.data) != len(self.labels):
            raise AttackError(f"the attack claims {len(self.data)} examples but {len(self.labels)} labels")
        if not ((self.data >= 0) & (self.data <= 1)).all():
            raise AttackError("the attack claims data outside [0, 1], or NaN")
        if self.labels.is_floating_point():
            if not self.labels.isfinite().all():
                raise AttackError("the attack claims targets that are NaN or infinite")
        elif (self.labels < 0).any():
            raise AttackError("the attack claims labels that are no class indices")


Finding = Reconstruction
"""What `Attack.run` returns. Local models and inferences join here with the attacks that make them."""


def save_finding(finding: Finding, path: Path, about: Mapping[str, object]) -> None:
    """Write `finding` and the facts `about` it in one step, as safetensors.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    tensors = {"data": finding.data, "labels": finding.labels}
    tensors |= {f"trace/{name}": values for name, values in finding.trace.items()}
    if finding.snapshots is not None and finding.snapshot_iterations is not None:
        tensors |= {"snapshots": finding.snapshots, "snapshot_iterations": finding.snapshot_iterations}
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_one_step(path) as temporary:
            save_file(own, temporary, metadata={"about": json.dumps(dict(about), sort_keys=True)})
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be written ({error}); make room and attack again") from error


def load_finding(path: Path) -> tuple[Finding, dict[str, object]]:
    """Read what `save_finding` wrote.

    Raises:
        TranscriptError: the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        finding = Reconstruction(
            data=tensors["data"],
            labels=tensors["labels"],
            trace={k.removeprefix("trace/"): v for k, v in tensors.items() if k.startswith("trace/")},
            snapshots=tensors.get("snapshots"),
            snapshot_iterations=tensors.get("snapshot_iterations"),
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise TranscriptError(f"{path}: is damaged ({error}); remove it and attack again") from error
    return finding, about
