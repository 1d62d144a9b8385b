"""TimberStrike: records of a client from the trees that it sends [DiGennaro2025]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from adversaries.trees.candidates import Candidates, RecordSpace
from adversaries.trees.leaf_matching import LeafProblem, TreeSums, choose_amounts, round_choice
from fedsim.base.constraints import PositiveInt
from fedsim.base.errors import AttackError
from fedsim.base.papers import cite
from fedsim.interfaces.attack import ALL, CLIENT, Attack, Paper, Progress, RoundsNeeded, Subject, Target, warn
from fedsim.interfaces.findings import Reconstruction
from fedsim.recording.tree_models import LOGISTIC, Tree, TreeModel, parse_tree_state
from fedsim.recording.tree_sums import BoostingSettings, LeafCounts, count_leaves, find_thresholds, fit_settings

_CHILDREN_PER_CANDIDATE = 3
"""Recombined records of which one is kept as a candidate."""
_FITTED = 0.5
"""Total misfit, in records, below which nothing is left to bring closer."""
_UNUSED = 1e-9
"""Amount up to which a candidate counts as not chosen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeMessage:
    """Trees that the victim sent in one round.

    Attributes:
        where: round and client, for errors.
        before: the model that it trained on; None for the base score alone.
        model: what it sent.
        trees: those that it made.
        num_examples: N as it reports it; 0 where it does not.
    """

    where: str
    before: TreeModel | None
    model: TreeModel
    trees: Sequence[Tree]
    num_examples: int

    @property
    def starting_model(self) -> TreeModel:
        """Return the model that its first tree was trained on, which may have no trees."""
        return self.before or replace(self.model, trees=[])

    @property
    def has_earlier_trees(self) -> bool:
        """Return whether records had different predictions before its first tree."""
        return bool(self.starting_model.trees)


@dataclass(frozen=True, kw_only=True)
class TimberStrike(Attack):
    """Claim records that add up to the covers and values of all leaves of the victim's trees.

    1. Read the settings of training, which the message does not name, off inner nodes
       (`fit_settings`).
    2. First tree: covers and leaf values are counts of records and of labels (`count_leaves`). A
       client that was sent a model before its first tree has sums of Hessians instead; then N is
       what it reports.
    3. Choose records among candidates so that Hessians and gradients add up to covers and leaf
       values in all trees at once (`choose_amounts`). Candidates are auxiliary records; without
       such, rows of values between thresholds, each column drawn for itself.
    4. Drawn candidates are improved (`_improve`): chosen ones are recombined, and what would bring
       the sums closer is added, until all sums are right or `iterations` is over.
    5. Claim each candidate as often as it is chosen; counts of the first tree stay exact.

    The message has to be XGBoost's JSON with binary:logistic or reg:squarederror.

    Args:
        iterations: most linear programs, where candidates are drawn.
        candidates: number of new candidates for each.

    References:
        [DiGennaro2025]. Differs: its attacker is a client, which has to find out whose trees are
        whose, and completes rows by its own data; a server knows the senders, and has auxiliary
        records only where they are granted. The paper places records in the leaves of one tree
        after the other, each by an integer program; here one linear program has all trees, whose
        solution is rounded.
    """

    iterations: PositiveInt = 8
    candidates: PositiveInt = 1000
    paper: ClassVar[Paper] = cite("DiGennaro2025")
    needs: ClassVar[frozenset[str]] = frozenset({"columns", "value_range"})
    uses: ClassVar[frozenset[str]] = frozenset({"auxiliary"})
    reads: ClassVar[frozenset[str]] = frozenset({CLIENT})
    rounds_needed: ClassVar[RoundsNeeded] = ALL
    subject: ClassVar[Subject] = "trees"
    main_metric: ClassVar[str] = "columns_right"

    def _run(self, target: Target, progress: Progress) -> Reconstruction:
        messages = _read_messages(target)
        trees = [tree for message in messages for tree in message.trees]
        settings = fit_settings(trees, messages[0].where)
        problem = _state_problem(messages, settings)
        space = _describe_space(target, messages, settings)
        rng = np.random.default_rng(int(torch.randint(1 << 62, (1,), generator=target.rng)))
        chosen, misfits = self._improve(problem, space, rng, progress)
        labels = torch.from_numpy(chosen.labels)
        return Reconstruction(
            data=space.to_unit_range(chosen.rows),
            labels=labels.long() if space.are_classes else labels.float(),
            trace={"objective": torch.tensor(misfits)},
            claims="client",
        )

    def _improve(
        self, problem: LeafProblem, space: RecordSpace, rng: np.random.Generator, progress: Progress
    ) -> tuple[Candidates, list[float]]:
        """Return the records that fit the trees best, and the misfit of each program."""
        candidates, misfits = space.begin(self.candidates, rng), list[float]()
        while True:
            choice = choose_amounts(problem, candidates)
            misfits.append(choice.misfit)
            number, is_fitted = len(misfits), choice.misfit < _FITTED
            is_last = space.auxiliary is not None or number == self.iterations or is_fitted
            progress(number, number if is_last else self.iterations, {"objective": choice.misfit})
            if is_last:
                break
            # Keep what is chosen, and what would be chosen.
            parents = candidates.select(np.flatnonzero(choice.amounts > _UNUSED))
            children = space.recombine(parents, _CHILDREN_PER_CANDIDATE * self.candidates, rng)
            contributions, _ = problem.contributions(children)
            reduced_costs = choice.reduced_costs(contributions)
            best = np.argsort(reduced_costs, kind="stable")[: self.candidates]
            candidates = parents.join(children.select(best[reduced_costs[best] < 0]))
        times = round_choice(problem, candidates, choice.amounts)
        return candidates.select(np.repeat(np.arange(len(candidates)), times)), misfits


def _read_messages(target: Target) -> list[TreeMessage]:
    """Read the victim's trees of each round in which it made some."""
    messages: list[TreeMessage] = []
    for number in target.participation_rounds():
        update = target.read_update(number)
        where = f"round {number}, client {target.victim}"
        before = parse_tree_state(update.before, f"{where}: what it was sent")
        model = parse_tree_state(update.after, where)
        if model is None:
            raise AttackError(f"{where}: sent no model; choose other rounds")
        trees = model.new_trees(before)
        if trees:
            messages.append(
                TreeMessage(where=where, before=before, model=model, trees=trees, num_examples=update.num_examples)
            )
    if not messages:
        raise AttackError(f"client {target.victim}: its messages hold no tree of its own; choose other rounds")
    return messages


def _state_problem(messages: Sequence[TreeMessage], settings: BoostingSettings) -> LeafProblem:
    """Return the sums of all trees, and the number of records."""
    first = messages[0]
    num_records = first.num_examples
    counts, sampled_share = list[LeafCounts](), 1.0
    # The very first tree starts from one value for all records, so that its covers count them.
    if not first.has_earlier_trees:
        counts = count_leaves(first.trees[0], first.model, settings, first.where)
        num_counted = sum(count.records for count in counts)
        num_records = num_records or num_counted
        sampled_share = num_counted / num_records
        if num_counted > num_records:
            raise AttackError(
                f"{first.where}: its first tree counts {num_counted} of N = {num_records} records, so records have "
                "weights, which are not read; attack a client without weights"
            )
        if num_counted != num_records:
            warn(
                f"{first.where}: its first tree was made from {num_counted} of N = {num_records} records; covers are "
                "those of samples (subsample), and each tree has another sample"
            )
    if not num_records:
        raise AttackError(f"{first.where}: it reports no N, and its first tree does not count; set [app] num_examples")
    # Later trees have sums of gradients alone, at what the trees before them predict.
    sums: list[TreeSums] = []
    for message in messages:
        start = message.starting_model
        for index, tree in enumerate(message.trees):
            earlier = replace(start, trees=[*start.trees, *message.trees[:index]])
            leaves = tree.leaves
            sums.append(
                TreeSums(
                    tree=tree,
                    earlier=earlier,
                    covers=tree.covers[leaves] / sampled_share,
                    gradients=settings.gradient_sums(tree)[leaves] / sampled_share,
                    are_counts=not earlier.trees,
                )
            )
    is_exact = sampled_share == 1
    return LeafProblem(sums=sums, num_records=num_records, counts=counts if is_exact else ())


def _describe_space(target: Target, messages: Sequence[TreeMessage], settings: BoostingSettings) -> RecordSpace:
    """Return what is known of the victim's records beside its trees."""
    knowledge, model, last = target.knowledge, messages[0].model, messages[-1]
    widths = knowledge.columns or ()
    assert knowledge.value_range is not None
    low, high = (np.asarray(end, float).reshape(-1) for end in knowledge.value_range)
    if len(low) == 1:
        low, high = np.repeat(low, model.num_features), np.repeat(high, model.num_features)
    if sum(widths) != model.num_features or len(low) != model.num_features:
        raise AttackError(
            f"{messages[0].where}: its trees have {model.num_features} features, columns has {sum(widths)} and "
            f"value_range {len(low)}; fix columns or value_range"
        )
    # The last model that the victim was sent has trees of all clients.
    trees = [tree for message in messages for tree in message.trees]
    thresholds = find_thresholds([*trees, *last.starting_model.trees])
    are_classes = model.objective == LOGISTIC
    first_tree = messages[0].trees[0]
    leaf_means = model.base_score + first_tree.weights[first_tree.leaves] / settings.learning_rate
    return RecordSpace.describe(
        widths,
        (low, high),
        thresholds,
        np.array([0.0, 1.0]) if are_classes else leaf_means,
        knowledge.auxiliary,
        are_classes=are_classes,
    )
