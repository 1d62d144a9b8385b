"""Client size: how many examples a client trained on, from what it sends."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from numpy.typing import NDArray
from torch import Tensor

from adversaries.simulated import SimulatedClients
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.base.randomness import numpy_generator
from fedsim.interfaces.attack import (
    CLIENT,
    Attack,
    Knowledge,
    Outcome,
    Paper,
    Progress,
    Records,
    Target,
    VictimTask,
    run_sequentially,
    warn,
)
from fedsim.interfaces.count_findings import ExampleCount
from fedsim.interfaces.knowledge import TRAINING_FACTS
from fedsim.inversion.batch_norm import used_batch_statistics
from fedsim.inversion.training_mismatch import OPTIMIZER_FACTS
from fedsim.recording.wire_format import Update
from fedsim.training.first_layer import find_first_layer, measure_rank

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

_TRIALS = 5
"""Simulated clients of each of two sizes that decide whether ranks are believed."""
_LEAST_CONCENTRATION, _MOST_CONCENTRATION = 0.1, 100.0
"""Of the Dirichlet distribution of simulated clients' classes: from few classes to nearly all alike."""
_SINGULAR_VALUES = 8
"""Of each weight, singular values that are features."""
_DEVIATIONS = 1.645
"""Standard deviations on either side of a claim within which nine claims of ten lie."""


@dataclass(frozen=True, kw_only=True)
class ClientSize(Attack):
    """Claim N, how many examples the victim trained on, without reading it in the message.

    1. Each step adds combinations of inputs to a first linear layer, so that the rank of its update is at most N,
       and usually N while N is below the layer's width. The rank is claimed where clients that are simulated
       on auxiliary records show that it tells N here: all of those with as many examples have it, and all
       of those with one more have a higher one. Then the attack is sure.
    2. Otherwise, simulate clients of all sizes up to the number of auxiliary records, evenly in log N, with class
       shares from few classes to all alike, and regress log N on norms and singular values of their updates by a
       Gaussian process. The range holds nine of ten simulated clients.

    N in messages is never read. The simulated clients of a round are those of all victims that got the same model;
    their randomness depends on the round alone.

    Args:
        simulated: clients simulated for the regression.

    References:
        [Salama2024]: norms and singular values of fine-tuned weights tell how many examples they are tuned on.
        Differs: updates of all layers instead of adapters; a Gaussian process instead of nearest neighbours, whose
        error was twice as large here; the rank comes first; simulated clients are of unlike classes.
    """

    simulated: Annotated[int, Ge(20)] = 100

    paper: ClassVar[Paper] = cite("Salama2024")
    needs: ClassVar[frozenset[str]] = frozenset(
        {"model", "loss", "auxiliary", "learning_rate", "local_epochs", "batch_size"}
    )
    uses: ClassVar[frozenset[str]] = OPTIMIZER_FACTS | {"defenses", "num_classes", "value_range"}
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    needs_num_examples: ClassVar[bool] = False

    def check_facts(self, knowledge: Knowledge, num_examples: int | None = None, granted: Collection[str] = ()) -> None:
        """Refuse too few auxiliary records, and training that is not simulated."""
        SimulatedClients(knowledge)
        if (count := len(knowledge.auxiliary.inputs if knowledge.auxiliary else ())) < 2:
            raise AttackError(
                f"there are {count} auxiliary records, and clients of unlike sizes are simulated on them; raise "
                "adversary.auxiliary"
            )

    def check_message(self, update: Update, knowledge: Knowledge) -> None:
        """Refuse clients that are not simulated."""
        SimulatedClients(knowledge).check_message(update)

    def _run(self, target: Target, progress: Progress) -> ExampleCount:
        self.check_facts(target.knowledge)
        update = target.read_update()
        return self._claim_count(update, progress, _Sizes(target.knowledge, update, self.simulated))

    def _run_several(self, tasks: Iterable[VictimTask]) -> Iterator[tuple[VictimTask, Outcome]]:
        """Attack one victim after the other; those that got the same model share simulated clients."""
        latest: list[_Sizes] = []

        def claim_count(task: VictimTask) -> ExampleCount:
            update = task.target.read_update()
            if not latest or not latest[0].fits(task.target.knowledge, update):
                self.check_facts(task.target.knowledge)
                latest[:] = [_Sizes(task.target.knowledge, update, self.simulated)]
            return self._claim_count(update, task.progress, latest[0])

        return run_sequentially(tasks, claim_count)

    def _claim_count(self, update: Update, progress: Progress, sizes: _Sizes) -> ExampleCount:
        flat = sizes.clients.flatten_update(update)
        rank = sizes.measure_rank(flat)
        if rank and sizes.ranks_tell(rank):
            progress(1, 1, {"objective": 0.0})
            return ExampleCount(count=rank, lowest=rank, highest=rank)
        log_count, spread = sizes.regress(flat)
        progress(1, 1, {"objective": spread})
        ends = (log_count - _DEVIATIONS * spread, log_count, log_count + _DEVIATIONS * spread)
        lowest, count, highest = (sizes.to_count(end) for end in ends)
        if highest == sizes.largest:
            warn(
                f"{self.title}: {update.name}: N may be above {sizes.largest}, the "
                "number of auxiliary records, up to which clients were simulated; raise adversary.auxiliary"
            )
        return ExampleCount(count=count, lowest=lowest, highest=highest)


class _Sizes:
    """Simulated clients of many sizes that got the same model as `template`."""

    def __init__(self, knowledge: Knowledge, template: Update, simulated: int) -> None:
        records = knowledge.auxiliary
        assert records is not None
        assert knowledge.model is not None
        self.clients = SimulatedClients(knowledge)
        self.largest = len(records.inputs)
        self._knowledge, self._template, self._simulated = knowledge, template, simulated
        self._records = records
        model = knowledge.model().to(knowledge.device)
        self._shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        first_layer = find_first_layer(model.eval(), records.inputs[:2].to(knowledge.device))
        self._by_batch = used_batch_statistics(template, model)
        self._first_layer = first_layer.weight if first_layer and first_layer.weight in self._shapes else None
        # The difference of two weights carries the rounding of both.
        before = torch.cat([tensor.double().flatten() for tensor in template.before.values()])
        self._rounding = torch.finfo(torch.float32).eps * float(before.norm()) if template.gradient is None else 0.0
        self._rank_verdicts = dict[int, bool]()
        self._regression: Pipeline | None = None

    def fits(self, knowledge: Knowledge, update: Update) -> bool:
        """Return whether clients simulated for another victim are those for this one, too."""
        before, own = update.before, self._template.before
        return (
            update.round == self._template.round
            and (update.gradient is None) == (self._template.gradient is None)
            and all(getattr(knowledge, name) == getattr(self._knowledge, name) for name in TRAINING_FACTS)
            and before.keys() == own.keys()
            and all(torch.equal(before[name], own[name]) for name in own)
        )

    def to_count(self, log_count: float) -> int:
        """Return the number of examples, which is at most that of the auxiliary records."""
        return round(math.exp(min(max(log_count, 0.0), math.log(self.largest))))

    def measure_rank(self, flat: Tensor) -> int:
        """Return the rank of the first layer's update, or 0 where there is no such layer or it is full or unclear."""
        if self._first_layer is None:
            return 0
        change = self._split(flat)[self._first_layer]
        rank, is_clear = measure_rank(change, self._rounding)
        return rank if is_clear and rank < min(change.shape) else 0

    def ranks_tell(self, rank: int) -> bool:
        """Return whether simulated clients of `rank` examples all have this rank, and larger ones all another."""
        if rank not in self._rank_verdicts:
            sizes = [size for size in (rank, rank + 1) for _ in range(_TRIALS)]
            can_tell = rank < self.largest and self._can_train(rank) and self._can_train(rank + 1)
            self._rank_verdicts[rank] = can_tell and all(
                (self.measure_rank(self._simulate(size, ("rank", size, trial))) == rank) == (size == rank)
                for trial, size in enumerate(sizes)
            )
        return self._rank_verdicts[rank]

    def regress(self, flat: Tensor) -> tuple[float, float]:
        """Return log N and its standard deviation, by the simulated clients."""
        if self._regression is None:
            self._regression = self._fit_regression()
        means, deviations = self._regression.predict(self._compute_features(flat)[None], return_std=True)
        return float(means[0]), float(deviations[0])

    def _fit_regression(self) -> Pipeline:
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor  # takes seconds
        from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, WhiteKernel
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        log_counts, features = [], []
        for index, log_count in enumerate(np.linspace(0, math.log(self.largest), self._simulated).tolist()):
            if self._can_train(count := self.to_count(log_count)):
                log_counts.append(log_count)
                features.append(self._compute_features(self._simulate(count, ("regression", index))))
        length = math.sqrt(len(features[0]))
        kernel = ConstantKernel() * RBF(length, (1e-1, 1e3)) + DotProduct() + WhiteKernel(0.1)
        regression = make_pipeline(StandardScaler(), GaussianProcessRegressor(kernel, normalize_y=True))
        with warnings.catch_warnings():  # that a length of the kernel is at its bound harms nobody
            warnings.simplefilter("ignore", ConvergenceWarning)
            return regression.fit(np.stack(features), log_counts)

    def _can_train(self, count: int) -> bool:
        """Return whether no batch of a client with `count` examples is a single one that BatchNorm cannot normalise."""
        batch_size = self._knowledge.batch_size
        assert batch_size is not None
        return not self._by_batch or (count % batch_size != 1 and batch_size > 1)

    def _simulate(self, count: int, key: tuple[int | str, ...]) -> Tensor:
        """Return the update of a client with `count` auxiliary records, of randomly few or many classes."""
        key = ("client size", self._template.round, *key)
        indices = torch.from_numpy(_draw_records(self._records, count, numpy_generator(*key, "records")))
        inputs, labels = self._records.inputs[indices], self._records.labels[indices]
        return self.clients.simulate_update(self._template, inputs, labels, key).cpu()

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the update of each trained parameter."""
        parts = torch.split(flat, [shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _compute_features(self, flat: Tensor) -> NDArray[np.float64]:
        """Return logarithms of the norms of all parameters' updates, and of their spectra relative to these."""
        features: list[float] = []
        for update in self._split(flat.detach().double()).values():
            matrix = update.reshape(len(update), -1) if update.ndim else update.reshape(1, 1)
            if matrix.shape[0] > matrix.shape[1]:
                matrix = matrix.T
            # The smaller Gram matrix is quicker than singular values of a large one.
            values = torch.linalg.eigvalsh(matrix @ matrix.T).clamp_min(0).sqrt().flip(0)
            norm = values.norm().clamp_min(torch.finfo(torch.float32).tiny)
            features.append(float(norm.log()))
            if len(values) > 1:
                shares = values / norm
                places = np.unique(np.geomspace(1, len(values), _SINGULAR_VALUES).round().astype(int)) - 1
                features += shares[places].clamp_min(1e-6).log().tolist()
                energies = shares.square()
                features.append(float(-torch.special.xlogy(energies, energies).sum()))
        return np.array(features)


def _draw_records(records: Records, count: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw `count` records, none twice; of class labels with class shares from a Dirichlet distribution."""
    log_weights = np.zeros(len(records.labels))
    if not records.labels.is_floating_point():
        _, classes, sizes = np.unique(records.labels.numpy(), return_inverse=True, return_counts=True)
        bounds = math.log(_LEAST_CONCENTRATION), math.log(_MOST_CONCENTRATION)
        shares = rng.dirichlet(np.full(len(sizes), math.exp(rng.uniform(*bounds))))
        log_weights = np.log(shares / sizes + np.finfo(np.float32).tiny)[classes]
    # The largest sums of log weights and Gumbel noise are a draw without replacement by these weights.
    ranked: NDArray[np.intp] = np.argsort(-(log_weights + rng.gumbel(size=len(log_weights))))
    return ranked[:count]
