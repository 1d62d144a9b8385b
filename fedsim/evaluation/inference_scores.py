"""How good local models, inferences about records, and representatives of classes are.

Like `fedsim.evaluation.scoring`, this is where claims meet the truth; no attack may import it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim import metrics
from fedsim.datasets import Column
from fedsim.errors import AttackError, DataError
from fedsim.evaluation.imputation import IMPUTED, Guess
from fedsim.evaluation.local_optimum import state_for
from fedsim.evaluation.score import Public, Score
from fedsim.evaluation.zest import model_outputs, pieces_of, signature, zest
from fedsim.findings import Inference, Representatives
from fedsim.recording.transcript import hash_state
from fedsim.task import Loss
from fedsim.training.loop import evaluate, forward, load_state, set_evaluation_modes
from fedsim.wire.messages import State

_CLOSENESS: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], float | None]] = {
    "class_ssim": (metrics.ssim, 1.0),
    "class_psnr": (metrics.psnr, None),
}
REFERENCES, MASKS, DRAWS = 64, 500, 3
"""Of Zest, half of its paper's 128 and 1000, and how often so many references are drawn: the mean counts."""
_KEPT = 32
"""Models whose explanations are kept from victim to victim."""
_BETWEEN = (0.25, 0.5, 0.75)
"""Where on the segment between two proxies models are judged, too."""
_HIGHER = ("zest", "zest_other_start", "zest_of_optima", "local_accuracy")
_MISSING = {
    **dict.fromkeys(("zest", "zest_other_start"), "texts have no mean that a masked word could be replaced with"),
    "local_mape": "a true target is 0, to which no error is relative",
}


@dataclass(frozen=True)
class Memory:
    """Of models that come again: proxies are the same for each attack, and some of them for each victim.

    Attributes:
        signatures: of the first models, by the hash of the state, for to explain a model takes seconds; and megabytes
            to keep, so of some only.
        judged: metrics by the hashes of the state and of the victim's optimum.
    """

    signatures: dict[str, list[Tensor]] = field(default_factory=dict)
    judged: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)


def score_local_model(
    claimed: State,
    optimum: State,
    proxies: Mapping[str, State],
    *,
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    loss: Loss = cross_entropy,
    references: Sequence[Tensor],
    elsewhere: State | None = None,
    columns: Sequence[Column] = (),
    target: tuple[float, float] = (0.0, 1.0),
    memory: Memory | None = None,
) -> list[Score]:
    """Judge a claimed local model by the victim's true optimal one, next to what proxies get.

    `parameter_distance` is |claimed - optimum| / |optimum| over all parameters, `zest` the similarity of what the two
    answer (`fedsim.evaluation.zest`, not of texts), `local_loss` the mean loss on the victim's training data, and on
    the same data `local_accuracy` is the share of classes that are right, `local_mape` the mean absolute error of a
    regression relative to the true target, in percent (LMRA, Table 9).

    The optimum is trained from w_0, as some attacks train what they claim, so a small distance may tell no more than
    that both began at one place. `zest_other_start` therefore compares with the answers of a second optimum, of the
    same data from other random weights, and `zest_of_optima` says how alike the two optima answer: where that is
    low, the data do not determine what is measured.

    The floor is the best, by each metric and for each client, of the proxies and of what lies between two of them: the
    models at a quarter, the middle and three quarters of the segment from one to the other and, of the distance, the
    point of the segment that is nearest. The truth chooses it. So it is stricter than any adversary's own choice, who
    knows the proxies but not which of these points is best; an attack above it has found something that is not
    on the way from one model that was sent to another.

    Args:
        claimed: what the attack returned.
        optimum: theta_c*, see `fedsim.evaluation.local_optimum`.
        proxies: models that anybody has who reads the messages, by what they are called: the global one, the victim's
            last-returned one, the first one, w_0.
        model: lends its architecture.
        inputs: `example ...`, the victim's training data in model units.
        labels: `example`, class indices or standardised targets.
        loss: what it minimises.
        references: `example ...` each, draws of public examples in model units. Zest is the mean over them.
        elsewhere: the second optimum; None leaves `zest_other_start` out.
        columns: of a table.
        target: mean and standard deviation that targets were standardised with.
        memory: for further calls with the same references, see `Memory`.

    Raises:
        AttackError: the claimed model is none of this architecture.
        DataError: the optimum or a proxy is none, or there are no references.
    """
    truth = _LocalTruth(
        model=model,
        optimum=_of_architecture(model, optimum, "the optimal local model"),
        inputs=inputs,
        labels=labels,
        loss=loss,
        references=references,
        elsewhere=None if elsewhere is None else _of_architecture(model, elsewhere, "the optimum of another start"),
        columns=columns,
        target=target,
        memory=Memory() if memory is None else memory,
    )
    found = state_for(model, claimed)
    if found is None:
        raise AttackError("the attack claims a model of another architecture than the victim's: names or shapes differ")
    own, best = truth.metrics(found), truth.metrics(truth.optimum)
    others = truth.proxies({name: _of_architecture(model, state, f"the {name}") for name, state in proxies.items()})
    both = best.get("zest_other_start")
    ceilings = best if both is None or math.isnan(both) else {**best, "zest_other_start": 1.0}
    scores = [
        _against_proxies(metric, value, {name: values[metric] for name, values in others.items()}, ceilings[metric])
        for metric, value in own.items()
    ]
    return scores if both is None else [*scores, _against_proxies("zest_of_optima", both, {}, 1.0)]


def _of_architecture(model: nn.Module, state: State, what: str) -> State:
    found = state_for(model, state)
    if found is None:
        raise DataError(f"{what} is of another architecture than the victim's model; attack the recording it is from")
    return found


@dataclass(frozen=True, kw_only=True)
class _LocalTruth:
    """What models are compared with; attributes as in `score_local_model`."""

    model: nn.Module
    optimum: State
    inputs: Tensor
    labels: Tensor
    loss: Loss
    references: Sequence[Tensor]
    elsewhere: State | None
    columns: Sequence[Column]
    target: tuple[float, float]
    memory: Memory
    explained: dict[str, list[Tensor]] = field(default_factory=dict)

    def metrics(self, state: State) -> dict[str, float]:
        """By name, computed once for this model and this victim, whom its optimum stands for."""
        whose = hash_state(state), hash_state(self.optimum)
        if whose not in self.memory.judged:
            self.memory.judged[whose] = self._metrics(state)
        return self.memory.judged[whose]

    def _metrics(self, state: State) -> dict[str, float]:
        on_data = evaluate(self.model, state, self.inputs, self.labels, self.loss)
        values = {
            "parameter_distance": self._distance(state),
            "zest": self._zest(state, self.optimum),
            **({} if self.elsewhere is None else {"zest_other_start": self._zest(state, self.elsewhere)}),
            "local_loss": on_data["loss"],
        }
        if "accuracy" in on_data:
            return values | {"local_accuracy": on_data["accuracy"]}
        return values | {"local_mape": self._mape(state)}

    def proxies(self, states: Mapping[str, State]) -> dict[str, dict[str, float]]:
        """Of each proxy, and of the best points between each two of them."""
        found = {name: self.metrics(state) for name, state in states.items()}
        for (one, start), (other, end) in itertools.combinations(states.items(), 2):
            points = [self.metrics(_blend(start, end, share)) for share in _BETWEEN]
            best = {metric: _best(metric)(point[metric] for point in points) for metric in points[0]}
            best["parameter_distance"] = self._distance(_blend(start, end, self._nearest(start, end)))
            found[f"between the {one} and the {other}"] = best
        return found

    def _zest(self, state: State, other: State) -> float:
        if not all(draw.is_floating_point() for draw in self.references):
            return math.nan
        return fmean(map(zest, self._signatures(state), self._signatures(other)))

    def _signatures(self, state: State) -> list[Tensor]:
        """One a draw of references."""
        key = hash_state(state)
        for known in (self.explained, self.memory.signatures):
            if key in known:
                return known[key]
        self.explained[key] = [self._explain(state, draw) for draw in self.references]
        if len(self.memory.signatures) < _KEPT:
            self.memory.signatures[key] = self.explained[key]
        return self.explained[key]

    def _explain(self, state: State, references: Tensor) -> Tensor:
        pieces = pieces_of(references.shape[1:], self.columns)
        outputs = model_outputs(self.model, state, references)
        return signature(outputs, references, pieces, masks=max(MASKS, 2 * int(pieces.max() + 1)))

    def _distance(self, state: State) -> float:
        optimum = self._flat(self.optimum)
        return float((self._flat(state) - optimum).norm() / optimum.norm())

    def _nearest(self, start: State, end: State) -> float:
        """Where on the segment, from 0 to 1, the point is that is nearest to the optimum."""
        along, wanted = self._flat(end) - self._flat(start), self._flat(self.optimum) - self._flat(start)
        length = float(along @ along)
        return min(1.0, max(0.0, float(wanted @ along) / length)) if length else 0.0

    def _flat(self, state: State) -> Tensor:
        return torch.cat([state[name].flatten().double() for name, _ in self.model.named_parameters()])

    @torch.no_grad()
    def _mape(self, state: State) -> float:
        """In percent; infinite where a true target is 0."""
        load_state(self.model, state)
        set_evaluation_modes(self.model, state)
        mean, std = self.target
        true = self.labels * std + mean
        found = forward(self.model, self.inputs).squeeze(-1) * std + mean
        return 100 * ((found - true).abs() / true.abs()).mean().item()


def _blend(start: State, end: State, share: float) -> State:
    """The model so far on the way from one to the other; of what both hold."""
    return {name: torch.lerp(tensor, end[name], share) for name, tensor in start.items() if name in end}


def _best(metric: str) -> Callable[[Iterable[float]], float]:
    return max if metric in _HIGHER else min


def _against_proxies(metric: str, value: float, proxies: Mapping[str, float], optimum: float) -> Score:
    higher = metric in _HIGHER
    if not math.isfinite(optimum):
        return Score(metric=metric, value=math.nan, missing=_MISSING.get(metric, ""), higher_is_better=higher)
    best = (max if higher else min)(proxies, key=lambda name: proxies[name], default="")
    return Score(
        metric=metric,
        value=value,
        floor=proxies.get(best, math.nan),
        floor_guess=best,
        ceiling=optimum,
        higher_is_better=higher,
    )


def score_inference(inference: Inference, truth: Tensor, imputed: Guess | None = None) -> list[Score]:
    """Judge what an attack infers of each record of the victim.

    Where several candidates are the likeliest, each counts by chance alone: as if one of them were drawn.

    Of sources, `source_accuracy` is the share of records whose claimed client holds the record; the floor is a client
    drawn at random, the ceiling lower than 1 where nobody among the candidates holds a record.

    Of an attribute, `attribute_accuracy` is the share of records whose category is right; its floor is the better of
    two guesses: the most frequent category among the victim's own records, which takes its data to know, and what
    public records of the same kind say of each of them, see `fedsim.evaluation.imputation`.
    `attribute_balanced_accuracy` is the mean of that share over the categories that the victim has, so that a rare one
    counts as much as a frequent one; whoever says the same of all records gets 1 over the number of those categories.

    Args:
        truth: of sources `record candidate`, whether the candidate holds the record, candidates in the order of the
            inference; of an attribute `record`, the index of its category.
        imputed: of an attribute, the guess from public records; None where there are none, which the floor then says.

    Raises:
        DataError: the inference is about other records or candidates than the truth.
    """
    likeliest = inference.scores == inference.scores.max(1, keepdim=True).values
    chosen = likeliest.double() / likeliest.sum(1, keepdim=True)  # record candidate: probability of being claimed
    if inference.of == "source":
        _check_shape(inference, truth, tuple(inference.scores.shape))
        return [_source_accuracy(chosen, truth)]
    _check_shape(inference, truth, tuple(inference.scores.shape[:1]))
    if imputed is not None:
        _check_shape(inference, imputed.likeliest, tuple(truth.shape))
    return _attribute_accuracy(chosen, inference.candidates, truth, imputed)


def _check_shape(inference: Inference, truth: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(truth.shape) != expected:
        raise DataError(
            f"truth: the attack infers the {inference.of} of {expected[0]} records among "
            f"{len(inference.candidates)} candidates, but the truth is of shape {tuple(truth.shape)}, expected "
            f"{expected}"
        )


def _source_accuracy(chosen: Tensor, holders: Tensor) -> Score:
    holds = holders.double()
    return Score(
        metric="source_accuracy",
        value=(chosen * holds).sum(1).mean().item(),
        floor=holds.mean().item(),
        floor_guess="random source",
        ceiling=holders.bool().any(1).double().mean().item(),
    )


def _attribute_accuracy(chosen: Tensor, candidates: Tensor, truth: Tensor, imputed: Guess | None) -> list[Score]:
    counts = truth.bincount()
    present = counts.nonzero().flatten().tolist()

    def balanced(right: Tensor) -> float:
        return torch.stack([right[truth == category].mean() for category in present]).mean().item()

    right = (chosen * (candidates == truth[:, None])).sum(1)
    guesses = {"majority attribute": counts.max().item() / len(truth)}
    balanced_guesses = {"one attribute for all": 1 / len(present)}
    if imputed is not None:
        guesses[IMPUTED] = (imputed.likeliest == truth).double().mean().item()
        balanced_guesses[IMPUTED] = balanced((imputed.balanced == truth).double())
    return [
        _against_guesses("attribute_accuracy", right.mean().item(), guesses),
        _against_guesses("attribute_balanced_accuracy", balanced(right), balanced_guesses),
    ]


def _against_guesses(metric: str, value: float, guesses: Mapping[str, float]) -> Score:
    best = max(guesses, key=lambda name: guesses[name])
    told = best if IMPUTED in guesses else f"{best}; there are no public data to impute from"
    return Score(metric=metric, value=value, floor=guesses[best], floor_guess=told, ceiling=1.0)


def score_representatives(
    found: Representatives, data: Tensor, labels: Tensor, *, public: Public | None, rng: torch.Generator
) -> list[Score]:
    """Judge images claimed to be typical of a class at the victim's.

    `class_ssim` is the mean over claims of the best SSIM to any of its images of the claimed class, `class_psnr` of
    the best PSNR in dB; the claim of a class that it has no image of counts 0. The guesses are judged by the same
    rule, as claims of the same classes: the mean of all public images (`mean face`), noise, and mid-grey. Public images
    of the class itself are no guess, for whoever has them need not attack; the most alike of them stand beside the
    score as `nearest_public`.

    Args:
        data: `example channel height width`, its images in [0, 1].
        labels: `example`, their classes.
        public: public images of the same kind, if there are any.
        rng: draws the noise.

    Raises:
        DataError: claims and its images differ in shape, or are of a regression.
    """
    if found.labels.is_floating_point() or labels.is_floating_point():
        raise DataError("truth: representatives are of classes, and a regression has none; attack a classifier")
    if data.ndim != 4:
        raise DataError(
            f"truth: the victim held data of shape {tuple(data.shape[1:])}, and representatives of classes are "
            "compared as images; for tables, attack their attributes (aia-model, aia-gradient)"
        )
    if found.data.shape[1:] != data.shape[1:]:
        raise DataError(
            f"truth: the victim held data of shape {tuple(data.shape[1:])}, the attack claims representatives of shape "
            f"{tuple(found.data.shape[1:])}; expected images of one shape, check input_shape"
        )
    guesses, other = _guesses(found, public, rng), None if public is None else _nearest(found, public, data, labels)
    scores = []
    for metric, (closeness, ceiling) in _CLOSENESS.items():
        if metric == "class_ssim" and (why := metrics.no_ssim(data)):
            scores.append(Score(metric=metric, value=math.nan, missing=why))
            continue
        own = _closest(closeness, found.data, found.labels, data, labels)
        floors = {n: _closest(closeness, g, found.labels, data, labels).mean().item() for n, g in guesses.items()}
        best = max(floors, key=lambda guess: floors[guess])
        scores.append(
            Score(
                metric=metric,
                value=own.mean().item(),
                floor=floors[best],
                floor_guess=best,
                nearest_public=math.nan if other is None else other[metric],
                ceiling=ceiling,
                per_image=tuple(own.tolist()),
            )
        )
    return scores


def _guesses(found: Representatives, public: Public | None, rng: torch.Generator) -> dict[str, Tensor]:
    shape = found.data.shape
    guesses = {"noise": torch.rand(shape, generator=rng), "mid-grey": torch.full(shape, 0.5)}
    if public is not None:
        guesses["mean face"] = public.data.mean(0).expand(shape)
    return guesses


def _nearest(found: Representatives, public: Public, data: Tensor, labels: Tensor) -> dict[str, float]:
    """What the public images of each claimed class would get that are nearest to the victim's by squared error."""
    values = {name: torch.zeros(len(found.labels)) for name in _CLOSENESS}
    for place, kind in enumerate(found.labels.tolist()):
        held, known = data[labels == kind], public.data[public.labels == kind]
        if len(held) and len(known):
            chosen = known[torch.cdist(held.flatten(1), known.flatten(1)).argmin(1)]
            for name, (closeness, _) in _CLOSENESS.items():
                values[name][place] = closeness(chosen, held).max()
    return {name: own.mean().item() for name, own in values.items()}


def _closest(
    closeness: Callable[[Tensor, Tensor], Tensor], claims: Tensor, classes: Tensor, data: Tensor, labels: Tensor
) -> Tensor:
    """`claim`: the best `closeness` to any of the images in `data` of the claim's class, 0 where there is none."""
    best = torch.zeros(len(claims))
    for place, (claim, kind) in enumerate(zip(claims, classes.tolist(), strict=True)):
        held = data[labels == kind]
        if len(held):
            best[place] = closeness(claim.expand_as(held), held).max()
    return best
