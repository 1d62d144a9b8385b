"""The chart of ROC curves: its axes, its values, and attacks that find nobody."""

from __future__ import annotations

import torch

from fedsim.audit.evaluation.display import RocCurve
from fedsim.report.finding_views import FindingView
from fedsim.report.panels.memberships import draw_roc_chart


def make_view(attack: str, true: list[float]) -> FindingView:
    """Of ten others."""
    curve = RocCurve(false_positive_rates=torch.linspace(0, 1, 11), true_positive_rates=torch.tensor(true))
    return FindingView(about={"attack": attack}, hash="", curves={}, num_examples=0, has_truth=True, roc=curve)


def test_without_such_findings_nothing_is_drawn() -> None:
    alone = FindingView(about={"attack": "sme"}, hash="", curves={}, num_examples=0, has_truth=True)
    assert draw_roc_chart([alone], ["sme"]) is None


def test_a_chart_tells_the_mean_over_victims_with_its_extremes_and_chance() -> None:
    rising = [0.2 + 0.08 * step for step in range(11)]
    high = [min(1.0, share + 0.2) for share in rising]
    chart = draw_roc_chart([make_view("fedmia", rising), make_view("fedmia", high)], ["sme", "fedmia"])
    assert "false-positive rate 0.1: fedmia 0.38 (0.28 to 0.48); chance 0.1" in str(chart)
    assert "sme" not in str(chart)


def test_an_attack_that_finds_nobody_at_low_rates_is_drawn_at_the_share_of_one_member() -> None:
    late = [0.0] * 6 + [0.2, 0.4, 0.6, 0.8, 1.0]
    chart = draw_roc_chart([make_view("membership-loss", late)], ["membership-loss"])
    assert "false-positive rate 0.1: membership-loss 0.2; chance 0.1" in str(chart)
