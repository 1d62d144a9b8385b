"""Interface of metrics: the facts of one metric, and how it measures claimed examples.

A metric is a plug-in of the group `fedsim.metrics`, declared once. Its name is that of its entry
point. Evaluation, reports, sweeps and comparisons ask `find_metric` and compare no names.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from fedsim.base.errors import FedsimError, PluginError, error_reason, one_line
from fedsim.plugins import registry
from fedsim.plugins.code_hashes import hash_plugin_code

if TYPE_CHECKING:
    from torch import Tensor

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")

Evidence = Literal["matches", "candidates", "victims", "few messages", "compared victims", "none"]
"""What the scores of victims say about leakage. `matches`: each example is matched or not, the floor
is how often chance does it, and a test over the examples of all victims decides, from one victim
on. `candidates`: each victim's value has a known spread by chance, see `Metric.chance_spread` and
`Metric.chance_tail`, so that one victim with many candidates is enough. `victims`: each speaks
for itself, and a sign test over them decides. `few messages`: likewise, but each is of one or a few
messages that are right or wrong. `compared victims`: victims are compared with one another, so that
nothing can be concluded from their number. `none`: the metric says nothing about leakage."""
ANY_NUMERIC = "numeric"
"""Stands in `ExampleMetric.modalities` for all modalities whose examples are numbers."""


@dataclass(frozen=True)
class Metric:
    """Facts of one metric; a metric that an evaluator computes itself declares nothing else.

    Class attributes:
        title: its name in tables and charts.
        unit: of its values, such as dB; empty for none.
        higher_is_better: whether a higher value means that the attack did better.
        lowest: smallest possible value.
        highest: largest possible value. What a perfect claim gets is the better one of the two,
            where it is finite.
        is_share: whether it is a share of something, in [0, 1].
        of_examples: whether single examples have a value; otherwise it is of all of them together.
        ranks_examples: whether a report sorts examples by it, or where it is of all together,
            findings.
        preference: its place among such metrics, and among the scores of one finding; the lowest
            comes first. Those of fedsim have 10 to 90.
        evidence: what its scores say about leakage, see `Evidence`.
        exact_from: of a metric whose higher values are better, the value from which on a claim counts
            as exact, which a page then says in place of the value; infinite for none.
        meaning: where it says nothing about leakage, what it says instead.
        reference: whose score stands in place of the best possible value; empty for none.
        explanations: sentences on how to read it and its floor; a report writes each once.
    """

    title: ClassVar[str]
    unit: ClassVar[str] = ""
    higher_is_better: ClassVar[bool]
    lowest: ClassVar[float] = -math.inf
    highest: ClassVar[float] = math.inf
    is_share: ClassVar[bool] = False
    of_examples: ClassVar[bool] = False
    ranks_examples: ClassVar[bool] = False
    preference: ClassVar[int] = 100
    evidence: ClassVar[Evidence] = "victims"
    exact_from: ClassVar[float] = math.inf
    meaning: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    explanations: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check_facts(type(self))

    @property
    def label(self) -> str:
        """Return the title with the unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def value_range(self) -> tuple[float, float]:
        """Return the smallest and the largest possible value."""
        return (0.0, 1.0) if self.is_share else (self.lowest, self.highest)

    @property
    def best_value(self) -> float | None:
        """Return the value of a perfect claim; None where there is no bound."""
        best = self.value_range[1] if self.higher_is_better else self.value_range[0]
        return best if math.isfinite(best) else None

    def chance_spread(self, count: int) -> tuple[float, float]:
        """Return how one victim's value spreads about the floor by chance.

        It is the standard deviation, and the step between two possible values. Only metrics whose
        evidence is `candidates` have them.

        Args:
            count: number of the victim's candidates.
        """
        raise NotImplementedError(f"{type(self).__name__} has no spread by chance; its evidence is '{self.evidence}'")

    def chance_tail(self, value: float, count: int) -> float | None:
        """Return how often chance gives one victim `value` or more; None if `chance_spread` gives it.

        Metrics whose evidence is `candidates` override it, beside `chance_spread`, where values by chance are skewed.

        Args:
            value: of one victim, or the mean of several.
            count: number of the victim's candidates.
        """
        return None

    @classmethod
    def describe_facts(cls) -> list[str]:
        """Return the lines about it that `fedsim show` prints."""
        metric = cls()
        # Ends that are not known are left out.
        ends = [
            f"{word} {end:g}"
            for word, end in zip(("from", "to"), metric.value_range, strict=True)
            if math.isfinite(end)
        ]
        direction = "higher" if cls.higher_is_better else "lower"
        return [
            f"in tables: {metric.label}",
            f"values: {' '.join(ends) or 'any number'}; {direction} is {'better' if cls.meaning else 'more leakage'}",
            f"of: {'single examples' if cls.of_examples else 'all examples together'}",
            *([f"says: {cls.meaning}"] if cls.meaning else []),
        ]


@dataclass(frozen=True, kw_only=True)
class ExampleContext:
    """What a metric may read besides the claimed and the true examples.

    Attributes:
        modality: name of their modality.
        padding: token that fills up short texts; None where there is none.
        weights: folder with weights of networks; None where there is none.
    """

    modality: str
    padding: int | None = None
    weights: Path | None = None


EXPLANATION_OF_GUESSES = (
    "For examples and labels, the floor is the score of the best of several guesses that do not use any update; a "
    "guess for each class uses the labels that the attack claims."
)
"""How to read a floor that is the best guess of examples."""


class ExampleMetric(Metric, ABC):
    """Metric of claimed examples, which is measured for claims, guesses and public examples alike.

    Its score is the mean over the true examples.

    Class attributes:
        modalities: names of the modalities that it is for, or `ANY_NUMERIC`.
    """

    of_examples: ClassVar[bool] = True
    ranks_examples: ClassVar[bool] = True
    explanations: ClassVar[tuple[str, ...]] = (EXPLANATION_OF_GUESSES,)
    modalities: ClassVar[frozenset[str]]

    @classmethod
    def describe_facts(cls) -> list[str]:
        """Return the lines about it that `fedsim show` prints."""
        return [*super().describe_facts(), f"modalities: {', '.join(sorted(cls.modalities))}"]

    @abstractmethod
    def measure(self, claimed: Tensor, true: Tensor, context: ExampleContext) -> Tensor | str:
        """Return `example`, the value of each claim, or a reason why there is none.

        Args:
            claimed: `example ...` in [0, 1], or tokens of texts, which are -1 where none is
                claimed; each stands where the true example does that it is assigned to.
            true: `example ...`, of the same shape. No text is empty.
            context: what else is known.
        """

    def find_matches(self, claimed: Tensor, examples: Tensor, context: ExampleContext) -> Tensor:
        """Return `claim example`, whether each claim matches each example.

        It is asked of metrics whose evidence is `matches`, about examples of the victim and of
        others, to learn how often claims match by chance. By default it is where `measure` gives 1.

        Args:
            claimed: `claim ...`, as for `measure`.
            examples: `example ...`.
            context: what else is known.
        """
        import torch  # which commands that only list metrics do not wait for

        rows = []
        for claim in claimed:
            values = self.measure(claim.expand_as(examples), examples, context)
            rows.append(torch.as_tensor(values) == 1)
        return torch.stack(rows)

    def depends_on_class(self, context: ExampleContext) -> bool:
        """Return whether a guess of the class makes matches likelier.

        Then chance is counted among examples of the same classes, otherwise among all.
        """
        return True

    def instrument(self, context: ExampleContext) -> str:
        """Name what the values depend on besides the examples, such as a network; empty for nothing.

        Scores by different instruments are not compared.
        """
        return ""


def find_metric(name: str) -> Metric:
    """Return the metric called `name`.

    A name of fedsim's own stays with it even if another package registers it, so no score is lost.

    Raises:
        PluginError: the name is not registered, or the metric does not load.

    >>> find_metric("psnr").label
    'PSNR, dB'
    """
    point = registry.find_builtin_entry_point("metrics", name) or registry.find_entry_point("metrics", name)
    return _make_metric(point)


def is_metric_name(name: str) -> bool:
    """Return whether `name` can be a column of a table: small letters, digits and underscores.

    >>> is_metric_name("tpr_at_1_in_100"), is_metric_name("edge-error")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


def describe_metric(name: str) -> Metric:
    """Return the metric called `name`, or where it is not installed one that has no facts.

    A run folder may hold scores by a metric of a package that this machine lacks.
    """
    try:
        return find_metric(name)
    except PluginError:
        return _make_unknown_metric(name)


def explain_no_verdict(name: str) -> str:
    """Return why scores by a metric say nothing about leakage here; empty where they do."""
    metric = describe_metric(name)
    if isinstance(metric, _UnknownMetric):
        return f"metric '{name}' is not installed here, so it is unknown what its scores mean; install its package"
    return metric.meaning


def sort_metrics(names: Iterable[str]) -> list[str]:
    """Return the names of metrics, the preferred one first.

    >>> sort_metrics(["mse", "psnr", "ssim"])
    ['psnr', 'ssim', 'mse']
    """
    return sorted(names, key=lambda name: (describe_metric(name).preference, name))


def find_example_metrics(modality: str, *, is_numeric: bool) -> dict[str, ExampleMetric]:
    """Return the metrics of examples of a modality by name, in the order of preference.

    Those that do not load are left out, see `list_metric_faults`.

    Args:
        modality: its name.
        is_numeric: whether its examples are numbers.
    """
    metrics: dict[str, ExampleMetric] = {}
    for name, metric in _load_metrics().items():
        if isinstance(metric, ExampleMetric):
            is_meant = modality in metric.modalities or (is_numeric and ANY_NUMERIC in metric.modalities)
            if is_meant:
                metrics[name] = metric
    return {name: metrics[name] for name in sort_metrics(metrics)}


def list_metric_faults() -> list[str]:
    """Return a sentence for each installed metric that cannot be used."""
    faults = []
    for name in registry.registered_names("metrics"):
        try:
            _make_metric(registry.find_entry_point("metrics", name))
        except PluginError as error:
            faults.append(str(error))
    return faults


def hash_metric_code() -> dict[str, str]:
    """Return the code hash of each installed metric that is not fedsim's own, by name."""
    hashes = {}
    for name, metric in _load_metrics().items():
        code = hash_plugin_code(type(metric))
        if code is not None:
            hashes[name] = code
    return hashes


def _load_metrics() -> dict[str, Metric]:
    """Return each installed metric that can be used, by name."""
    metrics = {}
    for name in registry.registered_names("metrics"):
        with suppress(PluginError):
            metrics[name] = find_metric(name)
    return metrics


@cache
def _make_metric(point: EntryPoint) -> Metric:
    owner = point.dist.name if point.dist else "?"
    where = f"metrics: '{point.name}' ({point.value}, from {owner})"
    if not is_metric_name(point.name):
        raise PluginError(f"{where} cannot be a column; name it by small letters, digits and underscores")
    try:
        cls = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(f"{where} does not load: {one_line(error_reason(error))}") from error
    if not (isinstance(cls, type) and issubclass(cls, Metric)):
        raise PluginError(f"{where} is not a class that derives from fedsim.Metric; correct its entry point")
    try:
        return cls()
    except (FedsimError, TypeError) as error:
        raise PluginError(f"{where} cannot be made: {one_line(str(error))}") from error


class _UnknownMetric(Metric):
    """Metric that is not installed; of its victims nothing is concluded, and no interval is given."""

    higher_is_better = True
    evidence = "compared victims"

    def __post_init__(self) -> None:
        pass  # a job that failed has a row without a metric, whose title stays empty


@cache
def _make_unknown_metric(name: str) -> Metric:
    cls: Any = type("_UnknownMetric", (_UnknownMetric,), {"__doc__": "", "title": name.replace("_", " ")})
    metric: Metric = cls()
    return metric


def _check_facts(cls: type[Metric]) -> None:
    """Raise PluginError where a fact is missing or of another kind."""
    if not isinstance(getattr(cls, "title", None), str) or not cls.title:
        raise PluginError(f"{cls.__name__}: has no title; add title = '...', as tables are to write it")
    if not isinstance(getattr(cls, "higher_is_better", None), bool):
        raise PluginError(
            f"{cls.__name__}: has no direction; add higher_is_better = True where a higher value means that the "
            "attack did better, or False"
        )
    _check_texts(cls)
    if cls.is_share and (cls.lowest, cls.highest) not in ((-math.inf, math.inf), (0.0, 1.0), (0.0, math.inf)):
        raise PluginError(
            f"{cls.__name__}: a share lies in [0, 1], but it declares {cls.lowest:g} to {cls.highest:g}; remove either"
        )
    if not cls.lowest < cls.highest:
        raise PluginError(f"{cls.__name__}: expected lowest below highest, got {cls.lowest} and {cls.highest}")
    if cls.evidence not in get_args(Evidence):
        raise PluginError(
            f"{cls.__name__}.evidence: expected one of {', '.join(get_args(Evidence))}, got {cls.evidence!r}"
        )
    if (cls.evidence == "none") != bool(cls.meaning):
        raise PluginError(f"{cls.__name__}: a metric has a meaning just where its evidence is 'none'; correct either")
    # A text would hold its parts too: 'series' is in 'timeseries'.
    modalities = getattr(cls, "modalities", None)
    if issubclass(cls, ExampleMetric) and not (modalities and isinstance(modalities, Set)):
        raise PluginError(
            f"{cls.__name__}: has no modalities; add modalities = frozenset({{'image'}}), say, or "
            f"frozenset({{'{ANY_NUMERIC}'}})"
        )


def _check_texts(cls: type[Metric]) -> None:
    """Raise PluginError where a text of a metric would break the line of a table or a terminal."""
    if not isinstance(cls.explanations, tuple):
        raise PluginError(f"{cls.__name__}.explanations: expected a tuple of sentences, got {cls.explanations!r}")
    for text in (cls.title, cls.unit, cls.meaning, cls.reference, *cls.explanations):
        if not (isinstance(text, str) and text.isprintable()):
            raise PluginError(f"{cls.__name__}: expected texts without line breaks and escapes, got {text!r}")
