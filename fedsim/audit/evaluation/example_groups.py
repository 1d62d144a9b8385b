"""Judge which examples an attack claims to be of the same client."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.audit.evaluation.case import Case
from fedsim.audit.evaluation.display import Display, DisplayMatrix
from fedsim.audit.evaluation.evaluator import (
    EvaluationContext,
    Evaluator,
    FindingMetadata,
    FindingSpec,
    Judgement,
    group_members,
)
from fedsim.audit.evaluation.examples import check_kinds, display_examples, judge_examples
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base import metrics
from fedsim.interfaces.findings import ExampleGroups
from fedsim.interfaces.metric import Metric

_MAX_SQUARED_ERROR = 1e-2
"""Mean squared error (20 dB) from which on a claim is of no client's example."""
_MAX_GROUPS_SHOWN = 40
_EXPLANATION = (
    "Pairs are of recovered examples. The floor is what pairs have by chance, or what grouping the recovered examples "
    "by k-means into as many groups as there are clients gets, whichever is better."
)


class PairsRight(Metric):
    """Share of the pairs of examples claimed to be of one client that are of one client."""

    title = "pairs of one client, right"
    higher_is_better = True
    is_share = True
    evidence = "candidates"
    preference = 166
    explanations = (_EXPLANATION,)

    def chance_spread(self, count: int) -> tuple[float, float]:
        """Return a bound for any grouping with so many links, a group of m examples having m - 1.

        A share of random pairs has at most the variance of one of so many independent ones, 1/4
        each, for clients of equal size.
        """
        return 0.5 / math.sqrt(count), 1 / count


class PairsFound(Metric):
    """Share of the pairs of recovered examples of one client that are claimed to be of one client."""

    title = "pairs of one client, found"
    higher_is_better = True
    is_share = True
    preference = 167
    explanations = (
        "For pairs that are found, the floor is what groups of the same sizes get with examples drawn at random.",
    )


class RandIndex(Metric):
    """Adjusted Rand index of claimed groups and clients: 0 by chance, 1 if all examples are grouped right."""

    title = "adjusted Rand index"
    higher_is_better = True
    lowest = -0.5
    highest = 1.0
    preference = 168
    explanations = (_EXPLANATION,)


@dataclass(frozen=True)
class ExampleGroupsEvaluator(Evaluator[ExampleGroups]):
    """Judge of recovered examples and of which of them are claimed to be of the same client."""

    finding = ExampleGroups

    def check_form(self, finding: ExampleGroups, spec: FindingSpec) -> None:
        """Check that the examples have the federation's shape and kind."""
        check_kinds(finding, spec)

    def truth(self, finding: ExampleGroups, about: FindingMetadata, case: Case) -> Truth | None:
        """Return the training data of all members of the attacked group, and who holds each."""
        members = group_members(about) or (int(about["victim"]),)
        parts = list[Truth]()
        for member in members:
            part = case.truth(member, None)
            if part is None:
                return None
            parts.append(part)
        sizes = torch.tensor([len(part.labels) for part in parts])
        return replace(
            parts[0],
            data=torch.cat([part.data for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
            holders=torch.tensor(members).repeat_interleave(sizes),
        )

    def judge(self, finding: ExampleGroups, about: FindingMetadata, context: EvaluationContext) -> Judgement:
        """Score the groups, see `score_groups`, and the examples as those of any reconstruction."""
        truth = self.truth(finding, about, context.case)
        if truth is None:
            return Judgement()
        groups, data = finding.clients, finding.data
        is_single = ~_have_several_holders(finding, truth)
        holders = _find_holders(finding, truth)
        scores = score_groups(groups[is_single], holders[is_single], data[is_single])
        examples = judge_examples(finding, about, context, None)
        return replace(examples, scores=[*scores, *examples.scores])

    def show(self, finding: ExampleGroups, truth: Truth | None, tokens: Sequence[str], metric: str) -> Display:
        """Display the examples, and how many of each client are in each group of several."""
        display = display_examples(finding, truth)
        sizes = Counter(finding.clients.tolist())
        groups = [group for group, size in sizes.most_common() if size > 1]
        numbers = {"recovered examples": float(len(finding.clients)), "groups of several": float(len(groups))}
        if truth is None or not len(groups):
            return replace(display, numbers=numbers)
        holders = _find_holders(finding, truth)
        clients = torch.tensor(sorted(set(holders[holders >= 0].tolist())))
        counts = []
        for group in groups[:_MAX_GROUPS_SHOWN]:
            counts.append((holders[finding.clients == group][:, None] == clients).sum(0))
        matrix = DisplayMatrix(
            title="Examples of each client in each group of several: the darker a cell, the more",
            values=torch.stack(counts).double(),
            columns=[str(client) for client in clients.tolist()],
            corner="group / client",
        )
        return replace(display, numbers=numbers, matrices=[matrix])


def _find_holders(finding: ExampleGroups, truth: Truth) -> Tensor:
    """Return for each claim the client that holds the true example next to it, or a number below 0.

    Claims that are near no true example have different numbers, so that no two are of one client.
    """
    assert truth.holders is not None
    errors, nearest = metrics.mean_squared_errors(finding.data, truth.data).min(0)
    no_holder = -1 - torch.arange(len(errors))
    return torch.where(errors <= _MAX_SQUARED_ERROR, truth.holders[nearest], no_holder)


def _have_several_holders(finding: ExampleGroups, truth: Truth) -> Tensor:
    """Return for each claim whether several clients hold that example, so that either group would be right."""
    assert truth.holders is not None
    is_near = metrics.mean_squared_errors(finding.data, truth.data) <= _MAX_SQUARED_ERROR
    lowest = torch.where(is_near, truth.holders[:, None], torch.iinfo(torch.int64).max).min(0).values
    highest = torch.where(is_near, truth.holders[:, None], -1).max(0).values
    return is_near.any(0) & (lowest != highest)


def score_groups(groups: Tensor, holders: Tensor, data: Tensor) -> list[Score]:
    """Score which examples are claimed to be of one client.

    Args:
        data: `example ...`, the recovered examples, for the guess by k-means.
    """
    from sklearn.metrics import adjusted_rand_score  # takes a second

    together, true = _count_pairs(groups, groups), _count_pairs(holders, holders)
    pairs = len(groups) * (len(groups) - 1) / 2
    if not true or true == pairs:
        reason = "the recovered examples are all of one client, or no two are, so there is nothing to group"
        return [Score.from_reason(name, reason) for name in ("pairs_right", "pairs_found", "rand_index")]
    right = _count_pairs(groups, holders)
    clusters = _cluster_by_value(data, len(set(holders[holders >= 0].tolist())))
    shares = {"chance": true / pairs, "k-means": _count_pairs(clusters, holders) / _count_pairs(clusters, clusters)}
    if together:
        precision = replace(
            Score.against_guesses("pairs_right", right / together, shares),
            count=len(groups) - len(set(groups.tolist())),
        )
    else:
        precision = Score.from_reason("pairs_right", "the attack claims of no two examples that they are of one client")
    recall = Score.against_guesses("pairs_found", right / true, {"groups at random": together / pairs})
    agreements = {"chance": 0.0, "k-means": float(adjusted_rand_score(holders, clusters))}
    agreement = Score.against_guesses("rand_index", float(adjusted_rand_score(holders, groups)), agreements)
    return [precision, recall, agreement]


def _count_pairs(first: Tensor, second: Tensor) -> float:
    """Return the number of pairs of examples that are in one group by both groupings."""
    sizes = Counter(zip(first.tolist(), second.tolist(), strict=True)).values()
    return float(sum(math.comb(size, 2) for size in sizes))


def _cluster_by_value(data: Tensor, count: int) -> Tensor:
    """Return `example`, the cluster of each by k-means."""
    from sklearn.cluster import KMeans

    values = data.flatten(1).double().numpy()
    clusters = KMeans(n_clusters=max(1, min(count, len(values) - 1)), n_init=10, random_state=0).fit_predict(values)
    return torch.from_numpy(clusters).long()
