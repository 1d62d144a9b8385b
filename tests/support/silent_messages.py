"""Scores of attacks on messages that say nothing, of each kind of evidence: what chance alone gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedsim.audit.evaluation.identification import score_identification
from fedsim.audit.evaluation.matches import Pool
from fedsim.audit.evaluation.score import Score
from fedsim.audit.evaluation.truth import Truth
from fedsim.base.randomness import generator
from fedsim.interfaces.modality import PublicExamples
from fedsim.report.summary import summarise
from fedsim.report.verdicts import LEAKS, judge_summary

SilentScore = Callable[[torch.Generator], tuple[Score, int]]
"""Draw the score of one victim whose message says nothing, and the number of examples behind it."""


def identify_mean_claims(rng: torch.Generator, examples: int = 10, others: int = 40) -> tuple[Score, int]:
    """Claims are blurred means, which are nearer to all examples than those are to one another."""
    data = torch.rand(others + examples, 1, 4, 4, generator=rng)
    labels = torch.zeros(others + examples).long()
    truth = Truth(data=data[others:], labels=labels[others:])
    pool = Pool.from_truth(truth, PublicExamples(data=data[:others], labels=labels[:others]))
    claims = data.mean(0) + 0.1 * torch.randn(examples, 1, 4, 4, generator=rng)
    return score_identification(claims, truth, pool), examples


def identify_one_claim(rng: torch.Generator) -> tuple[Score, int]:
    """The victim has one example, among few others."""
    return identify_mean_claims(rng, examples=1, others=25)


def identify_in_styles(rng: torch.Generator) -> tuple[Score, int]:
    """Each client's examples are alike, so that claims pick out all of the victim's, or none."""
    styles = torch.rand(8, 1, 1, 4, 4, generator=rng)
    data = (styles + 0.01 * torch.rand(8, 6, 1, 4, 4, generator=rng)).flatten(0, 1)
    labels = torch.zeros(48).long()
    truth = Truth(data=data[42:], labels=labels[42:])
    pool = Pool.from_truth(truth, PublicExamples(data=data[:42], labels=labels[:42]))
    claims = torch.rand(1, 1, 4, 4, generator=rng) + 0.005 * torch.randn(6, 1, 4, 4, generator=rng)
    return score_identification(claims, truth, pool), 6


def order_candidates(count: int) -> SilentScore:
    """Membership scores are in any order."""

    def draw(rng: torch.Generator) -> tuple[Score, int]:
        ranks_of_members = torch.randperm(count, generator=rng)[: count // 2].double() + 1
        pairs_in_order = float(ranks_of_members.sum()) - count / 4 * (count / 2 + 1)
        return Score.against_guesses("membership_auc", pairs_in_order / (count / 2) ** 2, {"chance": 0.5}), count

    return draw


def claim_half(count: int) -> SilentScore:
    """Any half of the candidates is claimed to be members."""

    def draw(rng: torch.Generator) -> tuple[Score, int]:
        members_found = int((torch.randperm(count, generator=rng)[: count // 2] < count // 2).sum())
        return Score.against_guesses("membership_accuracy", 2 * members_found / count, {"chance": 0.5}), count

    return draw


def find_members(rng: torch.Generator, candidates: int = 200) -> tuple[Score, int]:
    """Members score as others do, and those above all others but one are found."""
    half = candidates // 2
    scores = torch.rand(2, half, generator=rng)
    value = float((scores[0] > scores[1].sort().values[-2]).double().mean())
    return Score.against_guesses("tpr_at_1_in_100", value, {"chance": 2 / (half + 1)}), candidates


def toss_coins(rng: torch.Generator) -> tuple[Score, int]:
    """Reconstructions are better than the best guess for half of all victims."""
    value = float(torch.randn((), generator=rng))
    return Score.against_guesses("psnr", 10 + value, {"mid-grey": 10.0}), 10


def guess_majority(rng: torch.Generator) -> tuple[Score, int]:
    """The kind of most clients is claimed of each, which is right in 7 of 10 cases."""
    is_right = float(torch.rand((), generator=rng) < 0.7)
    return Score.against_guesses("property_client_accuracy", is_right, {"the kind of most": 0.7}), 1


KINDS: dict[str, SilentScore] = {
    "`identified`, ten examples per victim": identify_mean_claims,
    "`identified`, one example per victim": identify_one_claim,
    "`identified`, examples alike within a client": identify_in_styles,
    "membership AUC, 20 candidates": order_candidates(20),
    "membership AUC, 200 candidates": order_candidates(200),
    "membership accuracy, 20 candidates": claim_half(20),
    "membership accuracy, 200 candidates": claim_half(200),
    "membership TPR at FPR 1 %, 200 candidates": find_members,
    "PSNR and other scores of victims": toss_coins,
    "property of a client, 7 of 10 alike": guess_majority,
}


def row_of(score: Score, victim: int, examples: int) -> dict[str, Any]:
    """Return the row of `scores.csv`."""
    return {
        "attack": "a", "title": "a", "variant": "v", "victim": victim, "round": 1, "repeat": 0,
        "metric": score.metric, "value": score.value, "floor": score.floor, "floor_guess": score.floor_guess,
        "nearest_public": "nan", "ceiling": "", "higher_is_better": str(score.higher_is_better),
        "missing": score.missing,
        "settings": "{}", "granted": "", "instrument": "", "examples": examples,
    }  # fmt: skip


def count_false_leaks(kind: str, victims: int, runs: int) -> int:
    """Return in how many of `runs` an attack on so many victims is said to leak."""
    leaks, rng = 0, generator("silent messages", kind, victims)
    for _ in range(runs):
        scores = [KINDS[kind](rng) for _ in range(victims)]
        rows = [row_of(score, victim, examples) for victim, (score, examples) in enumerate(scores)]
        (summary,) = summarise(rows)
        leaks += judge_summary(summary)[0] == LEAKS
    return leaks
