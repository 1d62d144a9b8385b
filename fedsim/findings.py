"""What an attack claims to have found. A finding never contains truth; `fedsim.scoring` judges it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedsim.errors import AttackError, RunError, TranscriptError
from fedsim.files import in_one_step
from fedsim.messages import State, non_finite


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
        _check_labels(self.labels)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is saved, by name."""
        data = "representatives" if isinstance(self, Representatives) else "data"
        own = {data: self.data, "labels": self.labels} | _prefixed(self.trace)
        if self.snapshots is not None and self.snapshot_iterations is not None:
            own |= {"snapshots": self.snapshots, "snapshot_iterations": self.snapshot_iterations}
        return own


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Texts that the attack claims the victim trained on, in arbitrary order.

    Attributes:
        tokens: `example place`, integers; what they stand for is the data set's business.
        labels: `example`, class index of each text, or of a regression its target (floating point).
        trace: named curves, one value an iteration, e.g. `objective`.
    """

    tokens: Tensor
    labels: Tensor
    trace: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.is_floating_point() or self.tokens.is_complex():
            raise AttackError(
                f"the attack claims texts as {self.tokens.dtype} of shape {tuple(self.tokens.shape)}, expected "
                "integers, example by place"
            )
        if len(self.tokens) != len(self.labels):
            raise AttackError(f"the attack claims {len(self.tokens)} texts but {len(self.labels)} labels")
        if (self.tokens < 0).any():
            raise AttackError("the attack claims tokens below 0")
        _check_labels(self.labels)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is saved, by name."""
        return {"tokens": self.tokens, "labels": self.labels} | _prefixed(self.trace)


@dataclass(frozen=True, kw_only=True)
class Representatives(Reconstruction):
    """Data that the attack claims to be typical of a class at the victim's, fewer or more than she holds.

    Each is to be compared with any of her examples of that class. Attributes are those of `Reconstruction`.
    """


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """The model that the attack claims the victim would have trained on her data alone.

    Attributes:
        state: under the names of the messages, in their order and shapes.
        trace: named curves, one value an iteration, e.g. `objective`.
    """

    state: State
    trace: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if broken := non_finite(self.state):
            raise AttackError(f"the attack claims a model whose {broken[0]} holds NaN or infinite values")

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is saved, by name."""
        return {f"state/{name}": tensor for name, tensor in self.state.items()} | _prefixed(self.trace)


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Which of several candidates the attack claims to be true of each record of the victim that it knows.

    Attributes:
        of: what is inferred, the client whom a record comes from (`source`) or its sensitive `attribute`.
        candidates: `candidate`, client ids, or indices into the categories of the attribute.
        scores: `record candidate`, the higher, the likelier; any scale.
        trace: named curves, one value an iteration, e.g. `objective`.
    """

    of: Literal["source", "attribute"]
    candidates: Tensor
    scores: Tensor
    trace: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or self.candidates.ndim != 1 or self.scores.shape[1] != len(self.candidates):
            raise AttackError(
                f"the attack scores candidates as {tuple(self.scores.shape)}, expected records by "
                f"{len(self.candidates)} candidates"
            )
        if len(self.candidates) < 2:
            raise AttackError(f"the attack chooses among {len(self.candidates)} candidates, expected at least 2")
        if self.scores.isnan().any():
            raise AttackError("the attack claims scores that are NaN")

    @property
    def claimed(self) -> Tensor:
        """`record`, the likeliest candidate of each."""
        return self.candidates[self.scores.argmax(1)]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is saved, by name."""
        own = {"candidates": self.candidates, "scores": self.scores}
        return {f"{self.of}/{name}": tensor for name, tensor in own.items()} | _prefixed(self.trace)


Finding = Reconstruction | Texts | LocalModel | Inference
"""What `Attack.run` returns; `Representatives` are a kind of Reconstruction."""


def _check_labels(labels: Tensor) -> None:
    if labels.is_floating_point():
        if not labels.isfinite().all():
            raise AttackError("the attack claims targets that are NaN or infinite")
    elif (labels < 0).any():
        raise AttackError("the attack claims labels that are no class indices")


def _prefixed(trace: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"trace/{name}": values for name, values in trace.items()}


def save_finding(finding: Finding, path: Path, about: Mapping[str, object]) -> None:
    """Write `finding` and the facts `about` it in one step, as safetensors.

    Raises:
        RunError: the disk is full or the folder cannot be written.
    """
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in finding.tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_one_step(path) as temporary:
            metadata = {"about": json.dumps(dict(about), sort_keys=True), "order": json.dumps(list(own))}
            save_file(own, temporary, metadata=metadata)
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
            order = json.loads(file.metadata().get("order", "[]")) or file.keys()  # the file sorts by name
            tensors: dict[str, torch.Tensor] = {key: file.get_tensor(key) for key in order}
        finding = _finding(tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise TranscriptError(f"{path}: is damaged ({error}); remove it and attack again") from error
    return finding, about


def _finding(tensors: Mapping[str, Tensor]) -> Finding:
    """The inverse of a finding's `tensors`."""
    trace = {name.removeprefix("trace/"): t for name, t in tensors.items() if name.startswith("trace/")}
    if "tokens" in tensors:
        return Texts(tokens=tensors["tokens"], labels=tensors["labels"], trace=trace)
    for of in ("source", "attribute"):
        if f"{of}/scores" in tensors:
            own = {"candidates": tensors[f"{of}/candidates"], "scores": tensors[f"{of}/scores"]}
            return Inference(of=of, trace=trace, **own)
    if state := {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}:
        return LocalModel(state=state, trace=trace)
    kind = Representatives if "representatives" in tensors else Reconstruction
    return kind(
        data=tensors["representatives" if kind is Representatives else "data"],
        labels=tensors["labels"],
        trace=trace,
        snapshots=tensors.get("snapshots"),
        snapshot_iterations=tensors.get("snapshot_iterations"),
    )
