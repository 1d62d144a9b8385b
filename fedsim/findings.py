"""What an attack claims to have found. A finding never contains truth; `fedsim.evaluation` judges it.

A kind of finding is a class here or in a stranger's package, and an evaluator (`fedsim.evaluation.kind`), which is a
plug-in of the group `fedsim.findings`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from fedsim.errors import AttackError
from fedsim.wire.messages import State, non_finite

Claims = Literal["update", "client", "federation"]
"""Whose examples a finding claims to hold. `update`: those that the attacked message was computed from (of several
rounds, the message of the first). `client`: all that the victim trains on. `federation`: all that any client trains
on."""

MOST_CLASSES = 1 << 24
"""Class indices and tokens are below this, because counting them takes memory in proportion to the largest."""
_CURVE = re.compile(r"\w[\w .+-]{0,39}")
_EVALUATORS = ("psnr",)
"""Names of curves that the report computes from the truth; an attack may not use them for its own curves."""
_ROUNDING = 1e-4
"""By how much the sum of shares may differ from 1."""


@dataclass(frozen=True, kw_only=True)
class Finding(ABC):
    """What an attack claims: a frozen dataclass that is checked when it is made.

    Attributes:
        kind: name of its evaluator among the plug-ins.
        trace: named curves, one value an iteration, e.g. `objective`, `l_sim`, `alpha`; NaN where there is none.
    """

    kind: ClassVar[str]
    trace: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_trace(self.trace)

    @property
    @abstractmethod
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`. What is wrong with them is a KeyError or an AttackError."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What is saved, by name."""
        return self.own_tensors | {f"trace/{name}": values for name, values in self.trace.items()}


@dataclass(frozen=True, kw_only=True)
class Reconstruction(Finding):
    """Data that the attack claims the victim trained on, in arbitrary order.

    It may claim fewer examples than there are, or more: see `fedsim.evaluation.scoring.score`.

    Each kind of finding is checked when it is made, so that all that is kept can be judged and drawn: a dense tensor
    of the right kind and number of axes, at least one example, as many labels, finite where it is compared.

    Attributes:
        data: `example channel height width`, float32 in [0, 1]; of tables `example feature`.
        labels: `example`, class index of each example, or of a regression its target (floating point).
        snapshots: `step example channel height width`, the data during the descent, in [0, 1].
        snapshot_iterations: `step`, the iteration after which each snapshot was taken.
        claims: whose examples they are, see `Claims`; of `Representatives` always the victim's.
        certified: `example`, whether the attack is sure that this example is exact; None where it cannot tell.
        entropy: `example column`, of tables, how unsure the attack is of each value: of a category from 0 to 1, of a
            number in nats, where its standard deviation is 1; None where it cannot tell.
    """

    kind = "reconstruction"
    data: Tensor
    labels: Tensor
    snapshots: Tensor | None = None
    snapshot_iterations: Tensor | None = None
    claims: Claims = "update"
    certified: Tensor | None = None
    entropy: Tensor | None = None

    def __post_init__(self) -> None:
        _check_unit_range("data", self.data)
        if self.data.ndim < 2:
            raise _wrong("data", self.data, "example by its axes, two or more in all")
        _check_labels(self.labels, len(self.data), "examples")
        self._check_snapshots()
        if (sure := self.certified) is not None:
            _check_tensor("certified", sure)
            if sure.dtype != torch.bool or sure.shape != (len(self.data),):
                raise _wrong("certified", sure, f"true or false for each of {len(self.data)} examples")
        if (unsure := self.entropy) is not None:
            _check_tensor("entropy", unsure)
            if unsure.ndim != 2 or len(unsure) != len(self.data) or not unsure.is_floating_point():
                raise _wrong("entropy", unsure, f"floating point numbers, {len(self.data)} examples by column")
            if not unsure.isfinite().all():
                raise AttackError("the attack claims an entropy that is NaN or infinite")
        super().__post_init__()
        _check_claims(self.claims)

    def _check_snapshots(self) -> None:
        taken, at = self.snapshots, self.snapshot_iterations
        if taken is None and at is None:
            return
        if taken is None or at is None:
            raise AttackError("the attack claims snapshots without snapshot_iterations, or the other way round")
        _check_unit_range("snapshots", taken)
        if taken.shape[1:] != self.data.shape:
            raise _wrong("snapshots", taken, f"(step, {', '.join(map(str, self.data.shape))})")
        _check_integers("snapshot_iterations", at, len(taken), 1 << 53)

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""
        own = {"data": self.data, "labels": self.labels} | _claimed(self.claims)
        if self.snapshots is not None and self.snapshot_iterations is not None:
            own |= {"snapshots": self.snapshots, "snapshot_iterations": self.snapshot_iterations}
        if self.certified is not None:
            own["certified"] = self.certified
        if self.entropy is not None:
            own["entropy"] = self.entropy
        return own

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`."""
        return cls(
            data=tensors["data"],
            labels=tensors["labels"],
            trace=trace,
            snapshots=tensors.get("snapshots"),
            snapshot_iterations=tensors.get("snapshot_iterations"),
            claims=_claims_in(tensors),
            certified=tensors.get("certified"),
            entropy=tensors.get("entropy"),
        )


@dataclass(frozen=True, kw_only=True)
class Texts(Finding):
    """Texts that the attack claims the victim trained on, in arbitrary order.

    Attributes:
        tokens: `example place`, integers; the data set says which words they mean.
        labels: `example`, class index of each text, or of a regression its target (floating point).
        claims: whose texts they are, see `Claims`.
    """

    kind = "texts"
    tokens: Tensor
    labels: Tensor
    claims: Claims = "update"

    def __post_init__(self) -> None:
        _check_tensor("tokens", self.tokens)
        if self.tokens.ndim != 2 or self.tokens.dtype not in _INTEGERS:
            raise _wrong("tokens", self.tokens, "integers, example by place")
        if (self.tokens < 0).any() or (self.tokens >= MOST_CLASSES).any():
            raise AttackError(f"the attack claims tokens below 0 or from {MOST_CLASSES} on")
        _check_labels(self.labels, len(self.tokens), "texts")
        super().__post_init__()
        _check_claims(self.claims)

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""
        return {"tokens": self.tokens, "labels": self.labels} | _claimed(self.claims)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`."""
        return cls(tokens=tensors["tokens"], labels=tensors["labels"], trace=trace, claims=_claims_in(tensors))


@dataclass(frozen=True, kw_only=True)
class Representatives(Reconstruction):
    """Data that the attack claims to be typical of a class at the victim's, fewer or more than it holds.

    Each is compared with all of the victim's examples of that class. Attributes are those of `Reconstruction`.
    """

    kind = "representatives"


@dataclass(frozen=True, kw_only=True)
class LocalModel(Finding):
    """The model that the attack claims the victim would have trained on its data alone.

    Attributes:
        state: under the names of the messages, in their order and shapes.
    """

    kind = "local-model"
    state: State

    def __post_init__(self) -> None:
        if not isinstance(self.state, Mapping) or not self.state:
            raise AttackError("the attack claims a model without tensors, expected a mapping of names to tensors")
        for name, tensor in self.state.items():
            _check_dense(f"a model whose {name} is", tensor)
        if broken := non_finite(self.state):
            raise AttackError(f"the attack claims a model whose {broken[0]} holds NaN or infinite values")
        super().__post_init__()

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""
        return {f"state/{name}": tensor for name, tensor in self.state.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`."""
        state = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        return cls(state=state, trace=trace)


@dataclass(frozen=True, kw_only=True)
class Inference(Finding):
    """Which of several candidates the attack claims to be true, for each record of the victim that it knows.

    Attributes:
        of: what is inferred, the client whom a record comes from (`source`) or its sensitive `attribute`.
        candidates: `candidate`, ids of clients, see `client_ids`, or indices into the categories of the attribute.
        scores: `record candidate`, the higher, the likelier; any scale.
    """

    kind = "inference"
    of: Literal["source", "attribute"]
    candidates: Tensor
    scores: Tensor

    def __post_init__(self) -> None:
        if self.of not in ("source", "attribute"):
            raise AttackError(f"the attack infers {self.of!r}, expected 'source' or 'attribute'")
        for what, tensor in (("candidates", self.candidates), ("scores", self.scores)):
            _check_tensor(what, tensor)
        if self.scores.ndim != 2 or self.candidates.ndim != 1 or self.scores.shape[1] != len(self.candidates):
            raise AttackError(
                f"the attack scores candidates as {tuple(self.scores.shape)}, expected records by "
                f"{self.candidates.numel()} candidates"
            )
        if len(self.candidates) < 2:
            raise AttackError(f"the attack chooses among {len(self.candidates)} candidates, expected at least 2")
        below, kinds = (1 << 64, _CLIENT_IDS) if self.of == "source" else (1 << 63, _INTEGERS)
        _check_integers("candidates", self.candidates, len(self.candidates), below, kinds)
        if len(set(self.candidates.tolist())) < len(self.candidates):
            raise AttackError("the attack names a candidate twice, expected each once")
        if not self.scores.is_floating_point():
            raise _wrong("scores", self.scores, "floating point numbers")
        if self.scores.isnan().any():
            raise AttackError("the attack claims scores that are NaN")
        super().__post_init__()

    @property
    def claimed(self) -> Tensor:
        """`record`, the likeliest candidate of each."""
        return self.candidates[self.scores.argmax(1)]

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""
        return {f"{self.of}/candidates": self.candidates, f"{self.of}/scores": self.scores}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`."""
        of: Literal["source", "attribute"] = "source" if "source/scores" in tensors else "attribute"
        return cls(of=of, candidates=tensors[f"{of}/candidates"], scores=tensors[f"{of}/scores"], trace=trace)


@dataclass(frozen=True, kw_only=True)
class Membership(Finding):
    """How likely the attack claims each candidate record to be one that the victim trained on.

    Attributes:
        scores: `candidate`, in the order in which candidates were granted; the higher, the likelier, on any scale.
    """

    kind = "membership"
    scores: Tensor

    def __post_init__(self) -> None:
        _check_tensor("scores", self.scores)
        if self.scores.ndim != 1 or not self.scores.is_floating_point():
            raise _wrong("scores", self.scores, "one floating point number a candidate")
        if self.scores.isnan().any():
            raise AttackError("the attack claims scores that are NaN")
        super().__post_init__()

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""
        return {"scores": self.scores}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`."""
        return cls(scores=tensors["scores"], trace=trace)


@dataclass(frozen=True, kw_only=True)
class LabelDistribution(Finding):
    """Which share of the victim's training examples the attack claims to be of each class.

    Attributes:
        rounds: `round`, the numbers of those that were read.
        shares: `round class`, floating point, what each round says: at least 0, and the sum over classes is 1.
    """

    kind = "label-distribution"
    rounds: Tensor
    shares: Tensor

    def __post_init__(self) -> None:
        _check_tensor("shares", self.shares)
        if self.shares.ndim != 2 or not self.shares.is_floating_point():
            raise _wrong("shares", self.shares, "floating point numbers, round by class")
        _check_integers("rounds", self.rounds, len(self.shares), 1 << 53)
        if not (self.shares >= 0).all() or not ((self.shares.sum(1) - 1).abs() < _ROUNDING).all():
            raise AttackError("the attack claims shares of classes that are below 0, NaN, or do not sum to 1")
        super().__post_init__()

    @property
    def claimed(self) -> Tensor:
        """`class`, float64, the mean over rounds, which is what the finding claims."""
        return self.shares.double().mean(0)

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""
        return {"rounds": self.rounds, "shares": self.shares}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`."""
        return cls(rounds=tensors["rounds"], shares=tensors["shares"], trace=trace)


@dataclass(frozen=True, kw_only=True)
class PropertyPresence(Finding):
    """How likely the attack claims that many of the examples behind each message have a property, and not few.

    Attributes:
        clients: `message`, who sent it, see `client_ids`; the victim, and others whose messages were read beside.
        rounds: `message`, when; of each client a round once.
        scores: `message`, in [0, 1], how likely its examples have the property in the larger share.
        shares: the smaller and the larger share of examples with the property that are told apart, in [0, 1].
    """

    kind = "property"
    clients: Tensor
    rounds: Tensor
    scores: Tensor
    shares: Tensor

    def __post_init__(self) -> None:
        for name in ("scores", "shares"):
            _check_tensor(name, getattr(self, name))
            if getattr(self, name).ndim != 1 or not getattr(self, name).is_floating_point():
                raise _wrong(name, getattr(self, name), "floating point numbers in one row")
            if not ((getattr(self, name) >= 0) & (getattr(self, name) <= 1)).all():
                raise AttackError(f"the attack claims {name} outside [0, 1], or NaN")
        if len(self.shares) != 2 or not self.shares[0] < self.shares[1]:
            raise AttackError(
                f"the attack tells shares {self.shares.tolist()} apart, expected a smaller and a larger one"
            )
        _check_integers("clients", self.clients, len(self.scores), 1 << 64, _CLIENT_IDS)
        _check_integers("rounds", self.rounds, len(self.scores), 1 << 63)
        if len(set(zip(self.clients.tolist(), self.rounds.tolist(), strict=True))) < len(self.scores):
            raise AttackError("the attack scores a message twice, expected each once")
        super().__post_init__()

    @property
    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved besides the trace, by name."""
        return {name: getattr(self, name) for name in ("clients", "rounds", "scores", "shares")}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """The inverse of `own_tensors`."""
        return cls(**{name: tensors[name] for name in ("clients", "rounds", "scores", "shares")}, trace=trace)


def client_ids(clients: Iterable[int]) -> Tensor:
    """Ids of clients, int64; uint64 where one does not fit, as half of the ids that Flower draws for its nodes."""
    ids = list(clients)
    return torch.tensor(ids, dtype=torch.uint64 if max(ids, default=0) >= 1 << 63 else torch.int64)


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CLIENT_IDS = (*_INTEGERS, torch.uint64)


def _check_dense(what: str, tensor: object) -> None:
    """Raise AttackError unless this is a tensor whose values are in memory, one after the other."""
    if not isinstance(tensor, Tensor):
        raise AttackError(f"the attack claims {what} of type {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
        raise _wrong(what, tensor, "a dense tensor of real numbers")


def _check_tensor(what: str, tensor: object) -> None:
    """Likewise, and something is in it."""
    _check_dense(what, tensor)
    assert isinstance(tensor, Tensor)
    if not tensor.numel():
        raise _wrong(what, tensor, "at least one value")


def _check_unit_range(what: str, tensor: Tensor) -> None:
    _check_tensor(what, tensor)
    if tensor.dtype != torch.float32:
        raise _wrong(what, tensor, "torch.float32")
    if not ((tensor >= 0) & (tensor <= 1)).all():
        raise AttackError(f"the attack claims {what} outside [0, 1], or NaN")


def _check_integers(
    what: str, tensor: Tensor, count: int, below: int, kinds: Sequence[torch.dtype] = _INTEGERS
) -> None:
    """Raise AttackError unless these are `count` integers from 0 to `below`, of one of these `kinds`."""
    _check_tensor(what, tensor)
    if tensor.ndim != 1 or len(tensor) != count or tensor.dtype not in kinds:
        raise _wrong(what, tensor, f"integers of shape ({count},)")
    numbers = tensor.tolist()  # torch has no minimum of uint64
    if min(numbers) < 0 or max(numbers) >= below:
        raise AttackError(f"the attack claims {what} below 0 or from {below} on")


def _check_labels(labels: Tensor, count: int, of: str) -> None:
    _check_tensor("labels", labels)
    if labels.ndim != 1:
        raise _wrong("labels", labels, f"one for each of {count} {of}")
    if len(labels) != count:
        raise AttackError(f"the attack claims {count} {of} but {len(labels)} labels")
    if not labels.is_floating_point():
        if labels.dtype not in _INTEGERS:
            raise _wrong("labels", labels, "integers, or of a regression floating point numbers")
        if int(labels.min()) < 0 or int(labels.max()) >= MOST_CLASSES:
            raise AttackError("the attack claims labels that are no class indices")
    elif not labels.isfinite().all():
        raise AttackError("the attack claims targets that are NaN or infinite")


def _check_trace(trace: Mapping[str, Tensor]) -> None:
    if not isinstance(trace, Mapping):
        raise AttackError(f"the attack returns a trace that is {type(trace).__name__}, expected names to curves")
    for name, values in trace.items():
        if not isinstance(name, str) or not _CURVE.fullmatch(name):
            raise AttackError(
                f"the attack calls a curve of its trace {name!r}, expected at most 40 letters, digits or any of ' .+-'"
            )
        if name in _EVALUATORS:
            raise AttackError(f"the attack calls a curve of its trace '{name}', which only the evaluator can know")
        _check_tensor(f"a curve '{name}'", values)
        if values.ndim != 1 or not values.is_floating_point():
            raise _wrong(f"a curve '{name}'", values, "one floating point number an iteration")


def _wrong(what: str, tensor: Tensor, expected: str) -> AttackError:
    kind = tensor.dtype if tensor.layout == torch.strided else f"{tensor.layout}, {tensor.dtype}"
    return AttackError(f"the attack claims {what} of {kind}, shape {tuple(tensor.shape)}, expected {expected}")


def _check_claims(claims: Claims) -> None:
    if claims not in get_args(Claims):
        raise AttackError(f"the attack claims examples of '{claims}', expected one of {', '.join(get_args(Claims))}")


def _claimed(claims: Claims) -> dict[str, Tensor]:
    """How `claims` is saved: `update`, the usual value, is not written."""
    return {} if claims == "update" else {"claims": torch.tensor(get_args(Claims).index(claims))}


def _claims_in(tensors: Mapping[str, Tensor]) -> Claims:
    """The inverse of `_claimed`."""
    known: tuple[Claims, ...] = get_args(Claims)
    saved = tensors.get("claims", torch.tensor(0))
    if saved.ndim or saved.dtype != torch.int64 or not 0 <= int(saved) < len(known):
        raise _wrong("claims", saved, f"one integer from 0 to {len(known) - 1}")
    return known[int(saved)]
