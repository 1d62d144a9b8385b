"""Columns of a feature party from its embeddings, as the party with labels gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from fedsim.base.constraints import PositiveFloat, PositiveInt
from fedsim.base.errors import AttackError, first_line
from fedsim.base.papers import cite
from fedsim.base.randomness import seed_globals
from fedsim.interfaces.attack import ALL, CLIENT, Attack, Knowledge, Paper, Progress, RoundsNeeded, Subject, Target
from fedsim.interfaces.row_findings import RowFeatures
from fedsim.recording.split_steps import SplitStep, read_split_steps
from fedsim.training.optimizers import Adam

_GRID, _FINE_GRID = 65, 33
"""Values of a number that are tried: from lowest to highest, and up to one step away from the last one."""


@dataclass(frozen=True, kw_only=True)
class FeatureReconstruction(Attack):
    """Base of attacks of a label party: claim the columns of a feature party's rows by their embeddings."""

    paper: ClassVar[Paper] = cite("He2019")
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    needs_num_examples: ClassVar[bool] = False
    subject: ClassVar[Subject] = "embeddings"
    main_metric: ClassVar[str] = "row_columns_right"


@dataclass(frozen=True, kw_only=True)
class EmbeddingInversion(FeatureReconstruction):
    """Find rows whose embeddings match, with the bottom model known: the label party sent its weights.

    1. Begin with several rows: numbers relaxed by a sigmoid and categories by a softmax, of which Adam
       matches the embeddings, then rounded; and, where they are granted, the auxiliary rows whose
       embeddings are nearest.
    2. From each, exchange the value of one column at a time for the one that matches best, until
       nothing changes or `sweeps` are over. Claim what matches best.

    Only steps right before which weights were sent are attacked; `knowledge.model` builds the bottom
    model of the attacked party. Rows that are known are left out.

    Args:
        iterations: steps of Adam.
        learning_rate: of Adam, on the relaxed rows.
        starts: relaxed rows to begin with, and likewise auxiliary rows.
        sweeps: most passes over the columns from each.

    References:
        [He2019], Sect. 4 (white-box, rMLE). Differs: it inverts images by gradient descent alone,
        with their total variation as a prior; rows of a table have categories, which are searched.
    """

    iterations: PositiveInt = 300
    learning_rate: PositiveFloat = 0.1
    starts: PositiveInt = 4
    sweeps: PositiveInt = 10
    needs: ClassVar[frozenset[str]] = frozenset({"model", "columns", "value_range"})
    uses: ClassVar[frozenset[str]] = frozenset({"auxiliary", "known_rows"})

    def _run(self, target: Target, progress: Progress) -> RowFeatures:
        steps = [step for step in _read_steps(target) if step.bottom]
        if not steps:
            raise AttackError(
                f"client {target.victim}: the label party sends no weights in these rounds; attack the first round "
                "(adversary.rounds), or choose embedding-regression"
            )
        features = dict[int, Tensor]()
        for step in steps:
            embed = _load_bottom(target.knowledge, step, target.victim)
            rows = self._match(step.embeddings, embed, target.knowledge, target.rng, progress)
            features |= dict(zip(step.rows.tolist(), rows, strict=True))
        if target.knowledge.known_rows is not None:
            for row in target.knowledge.known_rows.rows.tolist():
                features.pop(row, None)
        if not features:
            raise AttackError(f"client {target.victim}: all rows of these steps are known; grant fewer")
        return RowFeatures(
            rows=torch.tensor(list(features)), data=torch.stack(list(features.values())), counted=steps[0].counted
        )

    def _match(
        self,
        embeddings: Tensor,
        embed: Callable[[Tensor], Tensor],
        knowledge: Knowledge,
        rng: torch.Generator,
        progress: Progress,
    ) -> Tensor:
        """Return `row feature` in [0, 1] whose embeddings are near."""
        columns = _read_columns(knowledge)
        # A single row has no deviation.
        scale = embeddings.std(0).clamp_min(1e-6) if len(embeddings) > 1 else torch.ones(embeddings.shape[1])

        def misfit(rows: Tensor) -> Tensor:
            # A value of each row; leading axes are kept.
            return ((embed(rows) - embeddings) / scale).square().sum(-1)

        raw = torch.randn(self.starts, len(embeddings), sum(columns), generator=rng)
        raw.requires_grad_()
        optimizer = Adam([raw], self.learning_rate)
        for iteration in range(1, self.iterations + 1):
            optimizer.zero_grad()
            loss = misfit(_relax(raw, columns)).mean()
            loss.backward()
            optimizer.step()
            progress(iteration, self.iterations, {"objective": loss.item()})
        with torch.no_grad():
            candidates = [*_round_categories(_relax(raw, columns), columns)]
            if knowledge.auxiliary is not None:
                public = _to_unit(knowledge.auxiliary.inputs, knowledge)
                distances = torch.cdist(embeddings / scale, embed(public) / scale)
                nearest = distances.topk(min(self.starts, len(public)), 1, largest=False).indices
                candidates += [*public[nearest.T]]
            found = torch.stack([self._search_columns(rows, columns, misfit) for rows in candidates])
            return found[misfit(found).argmin(0), torch.arange(len(embeddings))]

    def _search_columns(self, rows: Tensor, columns: Sequence[int], misfit: Callable[[Tensor], Tensor]) -> Tensor:
        """Exchange single values while that brings embeddings closer."""
        best = misfit(rows)
        for _ in range(self.sweeps):
            before = best
            start = 0
            for width in columns:
                values = torch.eye(width)[:, None] if width > 1 else _list_numbers(rows[:, start : start + 1])
                trials = rows.expand(len(values), -1, -1).clone()
                trials[:, :, start : start + width] = values
                trial_misfits = torch.cat([misfit(trials), best[None]])
                chosen = trial_misfits.argmin(0)
                best = trial_misfits.min(0).values
                trials = torch.cat([trials, rows[None]])
                rows = trials[chosen, torch.arange(len(rows))]
                start += width
            if torch.equal(best, before):
                break
        return rows


@dataclass(frozen=True, kw_only=True)
class EmbeddingRegression(FeatureReconstruction):
    """Learn from rows that are known in full to read columns off embeddings; no model is known.

    1. Pair embeddings of known rows with their columns, in all steps.
    2. Train a small network on the pairs, which also gets how far training has gone, since the
       bottom model changes.
    3. Claim the columns of all other rows; those of several steps are averaged.

    Args:
        hidden: units of the network's hidden layer.
        iterations: steps of Adam on all pairs.
        learning_rate: of Adam.

    References:
        [He2019], Sect. 5 (black-box, inverse network). Differs: it asks the bottom model for
        embeddings of chosen inputs, which a label party cannot; here some of the party's own rows
        are known.
    """

    hidden: PositiveInt = 64
    iterations: PositiveInt = 400
    learning_rate: PositiveFloat = 0.01
    needs: ClassVar[frozenset[str]] = frozenset({"known_rows", "columns", "value_range"})

    def _run(self, target: Target, progress: Progress) -> RowFeatures:
        knowledge = target.knowledge
        assert knowledge.known_rows is not None
        columns = _read_columns(knowledge)
        steps = _read_steps(target)
        rows = torch.cat([step.rows for step in steps])
        embeddings = torch.cat([step.embeddings for step in steps])
        times = torch.cat([torch.full((len(step.rows), 1), float(step.number)) for step in steps])
        inputs = torch.cat([_standardise(embeddings), _standardise(times)], 1)

        index_of_known = {row: index for index, row in enumerate(knowledge.known_rows.rows.tolist())}
        known_indices = torch.tensor([index_of_known.get(row, -1) for row in rows.tolist()])
        is_known = known_indices >= 0
        if not is_known.any() or is_known.all():
            raise AttackError(
                f"client {target.victim}: of the rows in these rounds {int(is_known.sum())} of {len(rows)} are known; "
                "attack rounds with known and other rows (adversary.rounds)"
            )
        true = _to_unit(knowledge.known_rows.inputs, knowledge)[known_indices[is_known]]
        predictions = self._regress(inputs[is_known], true, inputs[~is_known], columns, target.rng, progress)

        # Average what several steps say of a row.
        ids, positions = torch.unique(rows[~is_known], return_inverse=True)
        sums = torch.zeros(len(ids), sum(columns)).index_add(0, positions, predictions)
        means = sums / positions.bincount()[:, None]
        data = _round_categories(means.clamp(0, 1), columns)
        return RowFeatures(rows=ids, data=data, counted=steps[0].counted)

    def _regress(
        self,
        inputs: Tensor,
        true: Tensor,
        others: Tensor,
        columns: Sequence[int],
        rng: torch.Generator,
        progress: Progress,
    ) -> Tensor:
        """Return `row feature` for `others`: numbers, and probabilities of categories."""
        with seed_globals("embedding regression", int(torch.randint(1 << 62, (1,), generator=rng))):
            network = nn.Sequential(
                nn.Linear(inputs.shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, true.shape[1])
            )
        optimizer = Adam(network.parameters(), self.learning_rate, weight_decay=1e-4)
        parts = list(torch.split(true, list(columns), 1))
        for iteration in range(1, self.iterations + 1):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for predicted, part in zip(torch.split(network(inputs), list(columns), 1), parts, strict=True):
                if part.shape[1] > 1:
                    loss = loss + cross_entropy(predicted, part.argmax(1))
                else:
                    loss = loss + (predicted - part).square().mean() / part.var().clamp_min(1e-4)
            loss.backward()
            optimizer.step()
            progress(iteration, self.iterations, {"objective": loss.item()})
        with torch.no_grad():
            predicted_parts = torch.split(network(others), list(columns), 1)
            return torch.cat([part.softmax(1) if part.shape[1] > 1 else part for part in predicted_parts], 1)


def _read_steps(target: Target) -> list[SplitStep]:
    return read_split_steps([target.read_update(number) for number in target.participation_rounds()])


def _read_columns(knowledge: Knowledge) -> tuple[int, ...]:
    """Return the widths of columns."""
    assert knowledge.columns is not None
    assert knowledge.value_range is not None
    width = len(knowledge.value_range[0])
    if width not in (1, sum(knowledge.columns)):
        raise AttackError(
            f"columns has {sum(knowledge.columns)} features, and value_range {width} values; fix one of them"
        )
    return tuple(knowledge.columns)


def _range(knowledge: Knowledge) -> tuple[Tensor, Tensor]:
    assert knowledge.value_range is not None
    low, high = (torch.tensor([*map(float, end)]) for end in knowledge.value_range)
    return low, high


def _to_unit(inputs: Tensor, knowledge: Knowledge) -> Tensor:
    """Return inputs of the model in [0, 1]."""
    low, high = _range(knowledge)
    return ((inputs - low) / (high - low)).clamp(0, 1)


def _load_bottom(knowledge: Knowledge, step: SplitStep, party: int) -> Callable[[Tensor], Tensor]:
    """Return the function that embeds `row feature` in [0, 1] with the weights that the party was sent."""
    assert knowledge.model is not None
    assert knowledge.columns is not None
    network = deepcopy(knowledge.model()).float().eval().requires_grad_(False)
    low, high = _range(knowledge)

    def embed(rows: Tensor) -> Tensor:
        embeddings: Tensor = network(low + rows * (high - low))
        return embeddings

    try:
        network.load_state_dict({name: tensor.float() for name, tensor in step.bottom.items()})
        width = embed(torch.zeros(1, sum(knowledge.columns))).shape[-1]
    except RuntimeError as error:
        raise AttackError(
            f"round {step.number}, client {party}: model does not fit the weights that it was sent, or columns "
            f"({first_line(error)}); give the bottom model of this party"
        ) from error
    if width != step.embeddings.shape[1]:
        raise AttackError(
            f"round {step.number}, client {party}: model has {width} outputs, and embeddings "
            f"{step.embeddings.shape[1]} units; give the bottom model of this party"
        )
    return embed


def _list_numbers(numbers: Tensor) -> Tensor:
    """Return values to try in place of `row 1` numbers, `value row 1`: over the range, and close by."""
    anywhere = torch.linspace(0, 1, _GRID)[:, None, None].expand(-1, len(numbers), 1)
    steps = torch.linspace(-1, 1, _FINE_GRID)[:, None, None] / (_GRID - 1)
    return torch.cat([anywhere, (numbers + steps).clamp(0, 1)])


def _relax(raw: Tensor, columns: Sequence[int]) -> Tensor:
    """Return `... feature` in [0, 1]."""
    parts = torch.split(raw, list(columns), -1)
    return torch.cat([part.softmax(-1) if part.shape[-1] > 1 else part.sigmoid() for part in parts], -1)


def _round_categories(rows: Tensor, columns: Sequence[int]) -> Tensor:
    parts = []
    for part in torch.split(rows, list(columns), -1):
        width = part.shape[-1]
        parts.append(one_hot(part.argmax(-1), width).float() if width > 1 else part)
    return torch.cat(parts, -1)


def _standardise(values: Tensor) -> Tensor:
    return (values - values.mean(0)) / values.std(0).clamp_min(1e-6)
