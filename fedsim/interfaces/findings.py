"""The findings of attacks: frozen dataclasses, one class for each kind of claim.

A finding never contains the truth; `fedsim.audit.evaluation` judges it. A kind of finding consists of a
class, here or in another package, and an evaluator (`fedsim.audit.evaluation.evaluator`), which is a
plug-in of the group `fedsim.findings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from fedsim.base.errors import AttackError
from fedsim.base.short_repr import describe_fields
from fedsim.interfaces.finding_checks import (
    CLIENT_ID_DTYPES,
    INTEGER_DTYPES,
    MAX_CLASSES,
    check_dense,
    check_integers,
    check_labels,
    check_messages,
    check_tensor,
    check_trace,
    check_unit_range,
    tensor_error,
)
from fedsim.recording.wire_format import State, non_finite_names

ClaimScope = Literal["update", "client", "federation"]
"""The set of examples that a finding claims to come from. `update`: the examples from which the
attacked message was computed (for several rounds, the message of the first). `client`: all training
examples of the victim. `federation`: all training examples of all clients."""
_CLAIM_SCOPES = (ClaimScope, "ClaimScope")
"""Types of such a field; a text where annotations are not evaluated."""
_SHARE_TOLERANCE = 1e-4
"""Largest difference of a sum of shares from 1."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Claim of an attack: a frozen dataclass whose constructor checks it.

    Attributes:
        kind: name of its evaluator among the plug-ins.
        trace: curves by name, one value for each iteration, e.g. `objective`, `l_sim`, `alpha`; NaN
            where there is none.
    """

    kind: ClassVar[str]
    trace: Mapping[str, Tensor] = field(default_factory=dict)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__repr__" not in vars(cls):
            # Otherwise the decorator makes one that prints all tensors.
            cls.__repr__ = Finding.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        check_trace(self.trace)

    def __repr__(self) -> str:
        return describe_fields(self)

    @property
    def claim_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved for the claim, by name, without the trace.

        Here they are the fields: tensors, of which None stands for one that is missing, integers, floats, and a
        `ClaimScope`; a class with other fields overrides this and `from_tensors`.
        """
        tensors: dict[str, Tensor] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "trace" or value is None:
                continue
            if item.type in _CLAIM_SCOPES:
                if value != "update":  # the usual value is not saved
                    tensors[item.name] = torch.tensor(get_args(ClaimScope).index(value))
            else:
                tensors[item.name] = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """Make the finding from its `claim_tensors`.

        Raises:
            KeyError: a tensor is missing.
            AttackError: a tensor is invalid.
        """
        values: dict[str, Any] = {}
        for item in fields(cls):
            name = item.name
            if name == "trace":
                continue
            if item.type in _CLAIM_SCOPES:
                values[name] = _read_claims(name, tensors.get(name))
            elif item.default is None:
                values[name] = tensors.get(name)
            elif item.type in (int, "int", float, "float"):
                values[name] = _read_number(name, tensors[name], is_integer=item.type in (int, "int"))
            else:
                values[name] = tensors[name]
        return cls(**values, trace=trace)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that are saved, by name."""
        return self.claim_tensors | {f"trace/{name}": values for name, values in self.trace.items()}


@dataclass(frozen=True, kw_only=True)
class Reconstruction(Finding):
    """Data on which the attack claims the victim trained, in arbitrary order.

    It may claim fewer examples than there are, or more: see `fedsim.audit.evaluation.scoring.score_examples`. The
    constructor checks that the tensors are dense and have valid types and shapes, at least one
    example, one label for each, and finite values.

    Attributes:
        data: `example channel height width`, float32 in [0, 1]; for tables `example feature`.
        labels: `example`, class index of each example, or its target for a regression (floating
            point); of several labels (0 or 1) or numbers `example target`, floating point.
        snapshots: `step example channel height width`, the data during the optimisation, in [0, 1].
        snapshot_iterations: `step`, the iteration after which each snapshot was taken.
        claims: the set that the examples come from, see `ClaimScope`; for `Representatives` always
            the victim's.
        certified: `example`, whether the attack is sure that the example is exact; None where it
            cannot tell.
        entropy: `example column`, for tables, how unsure the attack is of each value: from 0 to 1
            for a category; in nats for a number, where its standard deviation is 1. None where it
            cannot tell.
        spread: `example`, the root mean square error that the attack itself expects of the values
            of an example, in [0, 1]; None where it cannot tell.
    """

    kind = "reconstruction"
    data: Tensor
    labels: Tensor
    snapshots: Tensor | None = None
    snapshot_iterations: Tensor | None = None
    claims: ClaimScope = "update"
    certified: Tensor | None = None
    entropy: Tensor | None = None
    spread: Tensor | None = None

    def __post_init__(self) -> None:
        check_unit_range("data", self.data)
        if self.data.ndim < 2:
            raise tensor_error("data", self.data, "example by its axes, two or more in all")
        check_labels(self.labels, len(self.data), "examples")
        self._check_snapshots()
        if self.certified is not None:
            self._check_certified(self.certified)
        if self.entropy is not None:
            self._check_entropy(self.entropy)
        if self.spread is not None:
            self._check_spread(self.spread)
        super().__post_init__()
        _check_claims(self.claims)

    def _check_snapshots(self) -> None:
        snapshots, iterations = self.snapshots, self.snapshot_iterations
        if snapshots is None and iterations is None:
            return
        if snapshots is None or iterations is None:
            raise AttackError("the attack claims snapshots without snapshot_iterations, or the other way round")
        check_unit_range("snapshots", snapshots)
        if snapshots.shape[1:] != self.data.shape:
            raise tensor_error("snapshots", snapshots, f"(step, {', '.join(map(str, self.data.shape))})")
        check_integers("snapshot_iterations", iterations, len(snapshots), 1 << 53)

    def _check_certified(self, certified: Tensor) -> None:
        count = len(self.data)
        check_tensor("certified", certified)
        if certified.dtype != torch.bool or certified.shape != (count,):
            raise tensor_error("certified", certified, f"true or false for each of {count} examples")

    def _check_entropy(self, entropy: Tensor) -> None:
        count = len(self.data)
        check_tensor("entropy", entropy)
        if entropy.ndim != 2 or len(entropy) != count or not entropy.is_floating_point():
            raise tensor_error("entropy", entropy, f"floating point numbers, {count} examples by column")
        if not entropy.isfinite().all():
            raise AttackError("the attack claims an entropy that is NaN or infinite")

    def _check_spread(self, spread: Tensor) -> None:
        check_tensor("spread", spread)
        if spread.shape != (len(self.data),) or not spread.is_floating_point():
            raise tensor_error("spread", spread, f"floating point numbers, one for each of {len(self.data)} examples")
        if not (spread.isfinite() & (spread >= 0)).all():
            raise AttackError("the attack claims a spread that is negative, NaN or infinite")


@dataclass(frozen=True, kw_only=True)
class Texts(Finding):
    """Texts on which the attack claims the victim trained, in arbitrary order.

    Attributes:
        tokens: `example position`, integers; the data set maps them to words.
        labels: `example`, class index of each text, or its target for a regression (floating
            point).
        claims: the set that the texts come from, see `ClaimScope`.
    """

    kind = "texts"
    tokens: Tensor
    labels: Tensor
    claims: ClaimScope = "update"

    def __post_init__(self) -> None:
        check_tensor("tokens", self.tokens)
        if self.tokens.ndim != 2 or self.tokens.dtype not in INTEGER_DTYPES:
            raise tensor_error("tokens", self.tokens, "integers, example by place")
        if (self.tokens < 0).any() or (self.tokens >= MAX_CLASSES).any():
            raise AttackError(f"the attack claims tokens below 0 or from {MAX_CLASSES} on")
        check_labels(self.labels, len(self.tokens), "texts")
        super().__post_init__()
        _check_claims(self.claims)


@dataclass(frozen=True, kw_only=True)
class Representatives(Reconstruction):
    """Data that the attack claims to be typical of a class in the victim's data, in any number.

    Each is compared with all of the victim's examples of that class. Attributes are those of
    `Reconstruction`.
    """

    kind = "representatives"


@dataclass(frozen=True, kw_only=True)
class ExampleGroups(Reconstruction):
    """Data of several clients, with claims of which examples belong to the same client.

    Further attributes are those of `Reconstruction`.

    Attributes:
        clients: `example`, integers of at least 0; equal ones mean the same client.
    """

    kind = "example-groups"
    clients: Tensor

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers("clients", self.clients, len(self.data), MAX_CLASSES)


@dataclass(frozen=True, kw_only=True)
class LocalModel(Finding):
    """Model that the attack claims the victim would have trained on its data alone.

    Attributes:
        state: tensors with the names, order and shapes of the messages.
    """

    kind = "local-model"
    state: State

    def __post_init__(self) -> None:
        if not isinstance(self.state, Mapping) or not self.state:
            raise AttackError("the attack claims a model without tensors, expected a mapping of names to tensors")
        for name, tensor in self.state.items():
            check_dense(f"a model whose {name} is", tensor)
        if invalid := non_finite_names(self.state):
            raise AttackError(f"the attack claims a model whose {invalid[0]} holds NaN or infinite values")
        super().__post_init__()

    @property
    def claim_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved for the claim, by name, without the trace."""
        return {f"state/{name}": tensor for name, tensor in self.state.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """Make the finding from its `claim_tensors`."""
        state = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        return cls(state=state, trace=trace)


@dataclass(frozen=True, kw_only=True)
class Inference(Finding):
    """Choice among several candidates for each known record of the victim.

    Attributes:
        of: the inferred quantity: the client that a record comes from (`source`), or its sensitive
            `attribute`.
        candidates: `candidate`, ids of clients (see `client_ids`), or indices into the categories
            of the attribute.
        scores: `record candidate`, higher is more likely, on any scale.
    """

    kind = "inference"
    of: Literal["source", "attribute"]
    candidates: Tensor
    scores: Tensor

    def __post_init__(self) -> None:
        if self.of not in ("source", "attribute"):
            raise AttackError(f"the attack infers {self.of!r}, expected 'source' or 'attribute'")
        check_tensor("candidates", self.candidates)
        check_tensor("scores", self.scores)
        if self.scores.ndim != 2 or self.candidates.ndim != 1 or self.scores.shape[1] != len(self.candidates):
            raise AttackError(
                f"the attack scores candidates as {tuple(self.scores.shape)}, expected records by "
                f"{self.candidates.numel()} candidates"
            )
        if len(self.candidates) < 2:
            raise AttackError(f"the attack chooses among {len(self.candidates)} candidates, expected at least 2")
        limit, dtypes = (1 << 64, CLIENT_ID_DTYPES) if self.of == "source" else (1 << 63, INTEGER_DTYPES)
        check_integers("candidates", self.candidates, len(self.candidates), limit, dtypes)
        if len(set(self.candidates.tolist())) < len(self.candidates):
            raise AttackError("the attack names a candidate twice, expected each once")
        if not self.scores.is_floating_point():
            raise tensor_error("scores", self.scores, "floating point numbers")
        if self.scores.isnan().any():
            raise AttackError("the attack claims scores that are NaN")
        super().__post_init__()

    @property
    def predictions(self) -> Tensor:
        """Return `record`, the most likely candidate of each."""
        return self.candidates[self.scores.argmax(1)]

    @property
    def claim_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved for the claim, by name, without the trace."""
        return {f"{self.of}/candidates": self.candidates, f"{self.of}/scores": self.scores}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], trace: Mapping[str, Tensor]) -> Self:
        """Make the finding from its `claim_tensors`."""
        of: Literal["source", "attribute"] = "source" if "source/scores" in tensors else "attribute"
        return cls(of=of, candidates=tensors[f"{of}/candidates"], scores=tensors[f"{of}/scores"], trace=trace)


@dataclass(frozen=True, kw_only=True)
class Membership(Finding):
    """Scores for each candidate record to be a training record of the victim.

    Attributes:
        scores: `candidate`, in the order in which candidates were granted; higher is more likely,
            on any scale.
    """

    kind = "membership"
    scores: Tensor

    def __post_init__(self) -> None:
        check_tensor("scores", self.scores)
        if self.scores.ndim != 1 or not self.scores.is_floating_point():
            raise tensor_error("scores", self.scores, "one floating point number a candidate")
        if self.scores.isnan().any():
            raise AttackError("the attack claims scores that are NaN")
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class LabelDistribution(Finding):
    """Share of each class among the victim's training examples.

    Attributes:
        rounds: `round`, the numbers of the rounds that were attacked.
        shares: `round class`, floating point, the estimate from each round: at least 0, with a sum
            over classes of 1.
    """

    kind = "label-distribution"
    rounds: Tensor
    shares: Tensor

    def __post_init__(self) -> None:
        check_tensor("shares", self.shares)
        if self.shares.ndim != 2 or not self.shares.is_floating_point():
            raise tensor_error("shares", self.shares, "floating point numbers, round by class")
        check_integers("rounds", self.rounds, len(self.shares), 1 << 53)
        sums_to_one = ((self.shares.sum(1) - 1).abs() < _SHARE_TOLERANCE).all()
        if not (self.shares >= 0).all() or not sums_to_one:
            raise AttackError("the attack claims shares of classes that are below 0, NaN, or do not sum to 1")
        super().__post_init__()

    @property
    def mean_shares(self) -> Tensor:
        """Return `class`, float64, the mean over rounds, which is the claim that is scored."""
        return self.shares.double().mean(0)


@dataclass(frozen=True, kw_only=True)
class PropertyPresence(Finding):
    """Scores for each message that many, not few, of its examples have a property.

    Attributes:
        clients: `message`, the ids of the senders (see `client_ids`): the victim, and other clients
            whose messages were attacked as well.
        rounds: `message`, the number of the round; each pair of client and round stands once.
        scores: `message`, in [0, 1], how likely the larger of the two shares of
            its examples has the property.
        shares: the smaller and the larger share of examples with the property, between which the
            attack decides, in [0, 1].
    """

    kind = "property"
    clients: Tensor
    rounds: Tensor
    scores: Tensor
    shares: Tensor

    def __post_init__(self) -> None:
        for name in ("scores", "shares"):
            values = getattr(self, name)
            check_tensor(name, values)
            if values.ndim != 1 or not values.is_floating_point():
                raise tensor_error(name, values, "floating point numbers in one row")
            if not ((values >= 0) & (values <= 1)).all():
                raise AttackError(f"the attack claims {name} outside [0, 1], or NaN")
        if len(self.shares) != 2 or not self.shares[0] < self.shares[1]:
            raise AttackError(
                f"the attack distinguishes the shares {self.shares.tolist()}, expected a smaller and a larger one"
            )
        check_messages(self.clients, self.rounds, len(self.scores))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class Linkage(Finding):
    """Scores for each message of later rounds that the sender of the victim's first message sent it.

    Ids of clients name messages, as they do in the recording.

    Attributes:
        first_round: round of the victim's message with which the others are compared.
        clients: `message`, the ids of the senders (see `client_ids`).
        rounds: `message`, the number of the round, after `first_round`; each pair of client and
            round stands once.
        scores: `message`, any finite numbers; a higher one means that the victim is likelier the
            sender.
    """

    kind = "linkage"
    first_round: int
    clients: Tensor
    rounds: Tensor
    scores: Tensor

    def __post_init__(self) -> None:
        check_tensor("scores", self.scores)
        if self.scores.ndim != 1 or not self.scores.is_floating_point():
            raise tensor_error("scores", self.scores, "floating point numbers in one row")
        if not self.scores.isfinite().all():
            raise AttackError("the attack claims scores that are NaN or infinite")
        check_messages(self.clients, self.rounds, len(self.scores))
        if int(self.rounds.min()) <= self.first_round:
            raise AttackError(
                f"the attack scores a message of round {int(self.rounds.min())}, expected rounds after "
                f"{self.first_round}, whose message it links"
            )
        super().__post_init__()


def client_ids(clients: Iterable[int]) -> Tensor:
    """Return ids of clients as int64, or as uint64 where one does not fit.

    Half of the ids that Flower draws for its nodes do not fit into int64.
    """
    ids = list(clients)
    return torch.tensor(ids, dtype=torch.uint64 if max(ids, default=0) >= 1 << 63 else torch.int64)


def _read_number(name: str, tensor: Tensor, *, is_integer: bool) -> int | float:
    """Return the number that a tensor saves."""
    if tensor.ndim or (tensor.dtype != torch.int64 if is_integer else not tensor.is_floating_point()):
        raise tensor_error(name, tensor, "one integer" if is_integer else "one floating point number")
    return tensor.item()


def _check_claims(claims: ClaimScope) -> None:
    if claims not in get_args(ClaimScope):
        raise AttackError(
            f"the attack claims examples of '{claims}', expected one of {', '.join(get_args(ClaimScope))}"
        )


def _read_claims(name: str, tensor: Tensor | None) -> ClaimScope:
    """Return the scope that a tensor saves, `update` for none."""
    known: tuple[ClaimScope, ...] = get_args(ClaimScope)
    if tensor is None:
        return "update"
    if tensor.ndim or tensor.dtype != torch.int64 or not 0 <= int(tensor) < len(known):
        raise tensor_error(name, tensor, f"one integer from 0 to {len(known) - 1}")
    return known[int(tensor)]
