"""Score how close a claimed local model is to the optimal one, and how alike both answer."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.audit.evaluation.evaluator import EvaluationContext, Evaluator, FindingMetadata, FindingSpec, Judgement
from fedsim.audit.evaluation.local_optimum import match_state
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.zest import draw_references, interpretable_pieces, model_outputs, signature, zest
from fedsim.base.errors import AttackError, DataError, RunError, join_first
from fedsim.base.task import Loss
from fedsim.data import Column
from fedsim.federation.experiment import Experiment
from fedsim.interfaces.findings import LocalModel
from fedsim.interfaces.metric import find_metric
from fedsim.recording.header import Header, hash_state
from fedsim.recording.transcript import Transcript
from fedsim.recording.wire_format import State
from fedsim.training.loop import evaluate
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_evaluation_modes

log = logging.getLogger(__name__)

REFERENCES, MASKS, DRAWS = 64, 500, 3
"""Reference examples and masks of Zest, half of its paper's 128 and 1000; and the number of draws of
references, over which the mean is taken."""
_MAX_NAMES = 4
"""Most tensors that a sentence names."""
_MAX_SIGNATURES = 32
"""Most models whose explanations are kept from victim to victim."""
_SEGMENT_POINTS = (0.25, 0.5, 0.75)
"""Points on the segment between two proxies that are judged, too."""
_MISSING_REASONS = {
    **dict.fromkeys(("zest", "zest_other_start"), "texts have no mean that a masked word could be replaced with"),
    "local_mape": "a true target is 0, to which no error is relative",
    "parameter_distance": "all weights of the optimal local model are 0, to which no distance is relative",
    "local_loss": "the loss of the optimal local model is not finite",
}


@dataclass(frozen=True)
class LocalModelEvaluator(Evaluator[LocalModel]):
    """Judge of claimed local models."""

    finding = LocalModel

    def check_form(self, finding: LocalModel, spec: FindingSpec) -> None:
        """Check that the model has the tensors of the broadcast, in their types and shapes."""
        if spec.before is None:
            return
        broadcast = spec.before()
        for name in (*broadcast, *finding.state):
            claimed = _describe_tensor(finding.state.get(name))
            expected = _describe_tensor(broadcast.get(name))
            spec.expect(f"a model whose {name} is", claimed, expected)

    def judge(self, finding: LocalModel, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score a local model, see `score_local_model`."""
        victim, experiment = int(about["victim"]), context.case.require_experiment()
        if experiment.private_names:
            names = join_first(sorted(experiment.private_names), _MAX_NAMES)
            raise AttackError(
                f"{names} of the model stay with each client, so that messages hold no whole local model, and none is "
                "compared with the optimal one; attack an algorithm whose clients send the whole model"
            )
        data, dataset = experiment.data, experiment.dataset
        inputs, labels = data.train(victim)
        other_optimum, reason = _other_optimum(experiment, context, victim)
        references = []
        for indices in _reference_draws(experiment, context):
            references.append(data.to_model(dataset.test.inputs(indices)))
        scores = score_local_model(
            finding.state,
            context.optimum(victim),
            _proxies(context.transcript, about["rounds"], victim, experiment),
            model=experiment.new_model(),
            inputs=data.to_model(inputs),
            labels=labels,
            loss=experiment.loss,
            references=references,
            other_optimum=other_optimum,
            columns=dataset.columns,
            modality=dataset.task.modality,
            target=dataset.target,
            cache=context.cached_values.setdefault("models", ModelCache()),
        )
        if reason:
            scores.append(Score.from_reason("zest_other_start", reason))
        return Judgement(scores=scores, examples=len(labels))


def _describe_tensor(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"of {tensor.dtype}, shape {tuple(tensor.shape)}"


def _proxies(
    transcript: Transcript, attacked: Collection[int], victim: int, experiment: Experiment
) -> dict[str, State]:
    """Return the models that anybody has who reads the messages of the attacked rounds, by name."""
    headers: dict[int, Header] = {}
    for number in transcript.rounds:
        if number in attacked:
            header = transcript.header(number)
            if header.replies:
                headers[number] = header
    # The newest broadcast.
    newest = max(headers)
    any_client = headers[newest].replies[0].client
    proxies = {"global model": transcript.update(newest, any_client).before}
    # The newest reply of the victim, or the mean of its group.
    with_victim = [n for n, header in headers.items() if header.find_reply(victim) is not None]
    reply = headers[max(with_victim)].find_reply(victim)
    assert reply is not None
    update = transcript.update(max(with_victim), reply.client)
    if update.gradient is None:
        name = "last mean of its group" if reply.members else "last-returned model"
        proxies[name] = update.after
    proxies["first model"] = experiment.initial_model_state()  # w_0, which the server knows whatever was recorded
    return proxies


def _other_optimum(experiment: Experiment, context: EvaluationContext, victim: int) -> tuple[State | None, str]:
    """Return the optimum from other random weights, and the reason why there is none.

    For texts, which Zest cannot compare, there is neither.
    """
    if experiment.dataset.vocabulary:
        return None, ""
    try:
        return context.optimum(victim, other_start=True), ""
    except RunError as error:
        log.warning("client %d: no optimum from other random weights: %s", victim, error)
        return None, f"there is no optimum from other random weights ({error})"


def _reference_draws(experiment: Experiment, context: EvaluationContext) -> list[Tensor]:
    """Draw indices of public examples for Zest; once where it takes all of them."""
    if "references" not in context.cached_values:
        test, seed = experiment.dataset.test, experiment.seed
        draws = DRAWS if len(test) > REFERENCES else 1
        context.cached_values["references"] = [draw_references(test, REFERENCES, seed, draw) for draw in range(draws)]
    references: list[Tensor] = context.cached_values["references"]
    return references


@dataclass(frozen=True)
class ModelCache:
    """Results for models that are judged again: the proxies are the same for each attack.

    Some proxies are also the same for each victim.

    Attributes:
        signatures: by the hash of the state. Explaining a model takes seconds, and keeping the
            explanation megabytes, so only those of the first models are kept.
        metrics: by the hashes of the state and of the victim's optimum.
    """

    signatures: dict[str, list[Tensor]] = field(default_factory=dict)
    metrics: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)


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
    other_optimum: State | None = None,
    columns: Sequence[Column] = (),
    modality: str = "",
    target: tuple[float, float] = (0.0, 1.0),
    cache: ModelCache | None = None,
) -> list[Score]:
    """Score a claimed local model against the victim's optimal one, with proxies as floors.

    `parameter_distance` is |claimed - optimum| / |optimum| over all parameters. `zest` is how alike
    the two models answer (`fedsim.audit.evaluation.zest`; not for texts). `local_loss` is the mean loss
    on the victim's training data; on the same data `local_accuracy` is the share of classes that
    are right, and `local_mape` the mean absolute error of a regression relative to the true target,
    in percent (LMRA, Table 9).

    The optimum is trained from w_0, as some attacks train what they claim, so a small distance may
    only mean that both began at the same weights. `zest_other_start` therefore compares with a
    second optimum, of the same data from other random weights, and `zest_of_optima` is how alike
    the two optima answer: where that is low, the data do not determine what is measured.

    The floor is the best, by each metric and for each client, of the proxies and of points between
    each two of them: the models at a quarter, the middle and three quarters of the segment and, for
    the distance, the point of the segment that is nearest. The truth chooses it. So it is stricter
    than the choice of any adversary, who knows the proxies but not which of these points is best;
    an attack above it has found something that is not on the way from one sent model to another.

    Args:
        optimum: theta_c*, see `fedsim.audit.evaluation.local_optimum`.
        proxies: models that anybody has who reads the messages, by name: the global one, the
            victim's last-returned one, the first one w_0.
        inputs: `example ...`, the victim's training data in model units.
        labels: `example`, class indices or standardised targets.
        references: `example ...` each, draws of public examples in model units. Zest is the mean
            over them.
        other_optimum: the second optimum; None leaves `zest_other_start` out.
        modality: name of the kind of examples; inferred where it is empty.
        target: mean and standard deviation that targets were standardised with.
    """
    optimum_state = _checked_state(model, optimum, "the optimal local model")
    other_state = None
    if other_optimum is not None:
        other_state = _checked_state(model, other_optimum, "the optimum of another start")
    comparison = _ModelComparison(
        model=model,
        optimum=optimum_state,
        inputs=inputs,
        labels=labels,
        loss=loss,
        references=references,
        other_optimum=other_state,
        columns=columns,
        modality=modality,
        target=target,
        cache=ModelCache() if cache is None else cache,
    )
    claimed_state = match_state(model, claimed)
    if claimed_state is None:
        raise AttackError("the attack claims a model of another architecture than the victim's: names or shapes differ")
    values = comparison.metrics(claimed_state)
    ceilings = comparison.metrics(comparison.optimum)
    proxy_states: dict[str, State] = {}
    for name, state in proxies.items():
        proxy_states[name] = _checked_state(model, state, f"the {name}")
    proxy_values = comparison.proxy_metrics(proxy_states)
    # How alike the two optima answer is no ceiling: a claim may be more like the second one.
    zest_of_optima = ceilings.get("zest_other_start")
    if zest_of_optima is not None and not math.isnan(zest_of_optima):
        ceilings = {**ceilings, "zest_other_start": 1.0}
    scores = []
    for metric, value in values.items():
        floors = {name: metrics[metric] for name, metrics in proxy_values.items()}
        scores.append(_score_against_proxies(metric, value, floors, ceilings[metric]))
    if zest_of_optima is not None:
        scores.append(_score_against_proxies("zest_of_optima", zest_of_optima, {}, 1.0))
    return scores


def _checked_state(model: nn.Module, state: State, name: str) -> State:
    """Return `state` under the names of `model`; raise DataError where it does not fit."""
    checked = match_state(model, state)
    if checked is None:
        raise DataError(f"{name} is of another architecture than the victim's model; attack the recording it is from")
    return checked


@dataclass(frozen=True, kw_only=True)
class _ModelComparison:
    """Comparison of models with the optimum of one victim; attributes as in `score_local_model`."""

    model: nn.Module
    optimum: State
    inputs: Tensor
    labels: Tensor
    loss: Loss
    references: Sequence[Tensor]
    other_optimum: State | None
    columns: Sequence[Column]
    modality: str
    target: tuple[float, float]
    cache: ModelCache
    signatures: dict[str, list[Tensor]] = field(default_factory=dict)

    def metrics(self, state: State) -> dict[str, float]:
        """Return the metrics of a model by name; each model is judged once for this optimum."""
        key = hash_state(state), hash_state(self.optimum)
        if key not in self.cache.metrics:
            self.cache.metrics[key] = self._compute_metrics(state)
        return self.cache.metrics[key]

    def _compute_metrics(self, state: State) -> dict[str, float]:
        on_data = evaluate(self.model, state, self.inputs, self.labels, self.loss)
        values = {
            "parameter_distance": self._distance(state),
            "zest": self._zest(state, self.optimum),
        }
        if self.other_optimum is not None:
            values["zest_other_start"] = self._zest(state, self.other_optimum)
        values["local_loss"] = on_data["loss"]
        if "accuracy" in on_data:
            return values | {"local_accuracy": on_data["accuracy"]}
        # Targets of several numbers have no unit in common.
        return values | ({"local_mape": self._mape(state)} if self.labels.ndim == 1 else {})

    def proxy_metrics(self, states: Mapping[str, State]) -> dict[str, dict[str, float]]:
        """Return the metrics of each proxy, and of the best points between each two of them."""
        values = {name: self.metrics(state) for name, state in states.items()}
        for (name, start), (other_name, end) in itertools.combinations(states.items(), 2):
            points = [self.metrics(_blend(start, end, share)) for share in _SEGMENT_POINTS]
            best: dict[str, float] = {}
            for metric in points[0]:
                best[metric] = _choose_comparison(metric)(point[metric] for point in points)
            nearest = _blend(start, end, self._nearest_share(start, end))
            best["parameter_distance"] = self._distance(nearest)
            values[f"between the {name} and the {other_name}"] = best
        return values

    def _zest(self, state: State, optimum: State) -> float:
        if not all(draw.is_floating_point() for draw in self.references):
            return math.nan
        return fmean(map(zest, self._state_signatures(state), self._state_signatures(optimum)))

    def _state_signatures(self, state: State) -> list[Tensor]:
        """Return a signature for each draw of references."""
        key = hash_state(state)
        for cached in (self.signatures, self.cache.signatures):
            if key in cached:
                return cached[key]
        self.signatures[key] = [self._compute_signature(state, draw) for draw in self.references]
        if len(self.cache.signatures) < _MAX_SIGNATURES:
            self.cache.signatures[key] = self.signatures[key]
        return self.signatures[key]

    def _compute_signature(self, state: State, references: Tensor) -> Tensor:
        pieces = interpretable_pieces(references.shape[1:], self.columns, self.modality)
        outputs = model_outputs(self.model, state, references)
        return signature(outputs, references, pieces, masks=max(MASKS, 2 * int(pieces.max() + 1)))

    def _distance(self, state: State) -> float:
        optimum = self._flatten(self.optimum)
        return float((self._flatten(state) - optimum).norm() / optimum.norm())

    def _nearest_share(self, start: State, end: State) -> float:
        """Return the share, in [0, 1], of the segment at which it is nearest to the optimum."""
        segment = self._flatten(end) - self._flatten(start)
        to_optimum = self._flatten(self.optimum) - self._flatten(start)
        squared_length = float(segment @ segment)
        if not squared_length:
            return 0.0
        return min(1.0, max(0.0, float(to_optimum @ segment) / squared_length))

    def _flatten(self, state: State) -> Tensor:
        names = [name for name, _ in self.model.named_parameters()]
        return torch.cat([state[name].flatten().double() for name in names])

    @torch.no_grad()
    def _mape(self, state: State) -> float:
        """Return the mean absolute error in percent; infinite where a true target is 0."""
        load_state(self.model, state)
        set_evaluation_modes(self.model, state)
        mean, std = self.target
        true = self.labels * std + mean
        predicted = forward(self.model, self.inputs).squeeze(-1) * std + mean
        return 100 * ((predicted - true).abs() / true.abs()).mean().item()


def _blend(start: State, end: State, share: float) -> State:
    """Return the model at a share of the way from `start` to `end`."""
    return {name: torch.lerp(tensor, end[name].to(tensor), share) for name, tensor in start.items() if name in end}


def _choose_comparison(metric: str) -> Callable[[Iterable[float]], float]:
    return max if find_metric(metric).higher_is_better else min


def _score_against_proxies(metric: str, value: float, proxies: Mapping[str, float], optimum: float) -> Score:
    if not math.isfinite(optimum):
        return Score.from_reason(metric, _MISSING_REASONS[metric])
    return Score.against_guesses(metric, value, proxies, ceiling=optimum)
