"""How near a claimed local model is to what the victim would have trained alone, and what it answers."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedsim.datasets import Column
from fedsim.errors import AttackError, DataError, RunError
from fedsim.evaluation.kind import About, Bench, Evaluator, Judgement, Owed
from fedsim.evaluation.local_optimum import state_for
from fedsim.evaluation.score import Score
from fedsim.evaluation.zest import draw_references, model_outputs, pieces_of, signature, zest
from fedsim.experiments.build import Experiment
from fedsim.findings import LocalModel
from fedsim.recording.header import hash_state
from fedsim.recording.transcript import Transcript
from fedsim.task import Loss
from fedsim.training.loop import evaluate
from fedsim.training.model_state import load_state
from fedsim.training.modes import forward, set_evaluation_modes
from fedsim.wire.messages import State

log = logging.getLogger(__name__)

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
    "parameter_distance": "all weights of the optimal local model are 0, to which no distance is relative",
    "local_loss": "the loss of the optimal local model is not finite",
}


@dataclass(frozen=True)
class LocalModels(Evaluator[LocalModel]):
    """Decoded local models."""

    finding = LocalModel

    def form(self, finding: LocalModel, owed: Owed) -> None:
        """The tensors of the model that the server sent."""
        if owed.before is None:
            return
        before = owed.before()
        for name in (*before, *finding.state):
            got, expected = (_form(of.get(name)) for of in (finding.state, before))
            owed.expect(f"a model whose {name} is", got, expected)

    def judge(self, finding: LocalModel, about: About, bench: Bench) -> Judgement:
        """See `score_local_model`."""
        victim, experiment = int(about["victim"]), bench.case.experiment
        if experiment is None:
            log.warning(
                "%s, client %d: not scored: only an experiment says what the victim held", about["attack"], victim
            )
            return Judgement()
        data, dataset = experiment.data, experiment.dataset
        inputs, labels = data.train(victim)
        other, why = _other_optimum(experiment, bench, victim)
        scores = score_local_model(
            finding.state,
            bench.optimum(victim),
            _proxies(bench.transcript, str(about["round"]), victim, experiment),
            model=experiment.new_model(),
            inputs=data.to_model(inputs),
            labels=labels,
            loss=experiment.loss,
            references=[data.to_model(dataset.test.inputs(drawn)) for drawn in _references(experiment, bench)],
            elsewhere=other,
            columns=dataset.columns,
            target=dataset.target,
            memory=bench.kept.setdefault("models", Memory()),
        )
        return Judgement(
            scores=[*scores, Score.not_computed("zest_other_start", why)] if why else scores,
            examples=len(labels),
        )


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"of {tensor.dtype}, shape {tuple(tensor.shape)}"


def _proxies(transcript: Transcript, rounds: str, victim: int, experiment: Experiment) -> dict[str, State]:
    """Models that anybody has who reads the messages of the inspected rounds, by what they are called."""
    first, _, last = rounds.partition("-")
    inspected = (n for n in transcript.rounds if int(first) <= n <= int(last or first))
    present = {number: header for number in inspected if (header := transcript.header(number)).replies}
    newest = max(present)
    proxies = {"global model": transcript.update(newest, present[newest].replies[0].client).before}
    seen = max(number for number, header in present.items() if header.reply_of(victim) is not None)
    reply = present[seen].reply_of(victim)
    assert reply is not None
    returned = transcript.update(seen, reply.client)
    if returned.gradient is None:
        proxies["last mean of its group" if reply.members else "last-returned model"] = returned.after
    proxies["first model"] = experiment.initial_state()  # w_0, which the server knows whatever was recorded
    return proxies


def _other_optimum(experiment: Experiment, bench: Bench, victim: int) -> tuple[State | None, str]:
    """The optimum from other random weights, or why there is none; of texts, which Zest cannot compare, neither."""
    if experiment.dataset.vocabulary:
        return None, ""
    try:
        return bench.optimum(victim, elsewhere=True), ""
    except RunError as error:
        log.warning("client %d: no optimum from other random weights: %s", victim, error)
        return None, f"there is no optimum from other random weights ({error})"


def _references(experiment: Experiment, bench: Bench) -> list[Tensor]:
    """Which public examples Zest explains models on, a draw each; one draw where it takes them all."""
    if "references" not in bench.kept:
        test, seed = experiment.dataset.test, experiment.seed
        draws = DRAWS if len(test) > REFERENCES else 1
        bench.kept["references"] = [draw_references(test, REFERENCES, seed, draw) for draw in range(draws)]
    references: list[Tensor] = bench.kept["references"]
    return references


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

    The optimum is trained from w_0, as some attacks train what they claim, so a small distance may say no more than
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
        return Score.not_computed(metric, _MISSING[metric], higher_is_better=higher)
    return Score.beside(metric, value, proxies, ceiling=optimum, higher_is_better=higher)
