"""The most exposed client is that of the metric by which something leaks, as in the headline of the same page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedsim.audit.evaluation.matches import CHANCE
from fedsim.audit.evaluation.score import Score
from fedsim.dossier.attack_results import describe_coverage, describe_worst, list_reported, make_result
from fedsim.dossier.contents import Result
from fedsim.dossier.limits import describe_changes, describe_extent
from fedsim.report.verdicts import GUESSING, LEAKS, score_readings
from tests.support.silent_messages import row_of


def make_results(psnr: float, ssim: float, identified: float) -> list[Result]:
    """Return the results of an attack on six victims by three metrics."""
    rows = []
    for victim in range(6):
        scores = [
            Score.against_guesses("psnr", psnr + 0.01 * victim, {"noise": 10.0}),
            Score.against_guesses("ssim", ssim, {"noise": 0.2}),
            Score.against_guesses("identified", identified, {CHANCE: 0.05}),
        ]
        rows += [row_of(score, victim, 10) | {"seed": "1"} for score in scores]
    results = []
    for position, reading in enumerate(score_readings(rows, {})):
        results.append(make_result(reading, rows, is_first=position == 0, is_main=position == 0))
    return results


def test_metrics_by_which_more_leaks_than_by_the_first_are_reported_beside_it() -> None:
    [reported] = list_reported(make_results(9.0, 0.1, 0.8))
    assert [(result.metric, result.verdict) for result in reported] == [("psnr", GUESSING), ("identified", LEAKS)]
    [reported] = list_reported(make_results(15.0, 0.5, 0.05))
    assert [(result.metric, result.verdict) for result in reported] == [("psnr", LEAKS)]


def test_the_most_exposed_client_is_named_by_a_metric_that_leaks() -> None:
    [sentence] = describe_worst(make_results(9.0, 0.1, 0.8))
    assert ": share identified is 0.8, where a guess without any message gets 0.05." in sentence
    [sentence] = describe_worst(make_results(15.0, 0.5, 0.8))
    assert "is client 5, in round" in sentence
    assert ": PSNR is 15.05 dB, where a guess without any message gets 10 dB." in sentence


def test_a_sweep_is_proposed_only_where_there_is_an_experiment() -> None:
    [own] = describe_changes(LEAKS, [], [], [])
    [of_app] = describe_changes(LEAKS, [], [], [], can_sweep=False)
    assert own.endswith("have to be attacked again; `fedsim sweep` compares them with these.")
    assert "sweep" not in of_app
    assert of_app.endswith("the app has to be run and recorded with them, and that recording attacked in the same way.")


def test_members_of_a_sum_are_attacked_with_it_and_rounds_that_are_not_recorded_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedsim.dossier.attack_results.list_granted_facts", lambda *_: [])
    monkeypatch.setattr("fedsim.dossier.attack_results.attack_classes", lambda *_, **__: {})
    replies = [SimpleNamespace(client=0, members=(0, 1, 2))]
    headers = [SimpleNamespace(round=number, replies=replies) for number in (1, 3, 5)]
    run: Any = SimpleNamespace(recording=SimpleNamespace(headers=headers), audit=None, trust=False)
    of_sum = {"victim": 0, "members": [0, 1, 2], "round": "1-5", "rounds": [1, 3, 5]}
    coverage = describe_coverage(run, [of_sum])
    assert describe_extent(coverage) == ["3 of 3 recorded clients were attacked, in 3 of 3 recorded rounds."]
    coverage = describe_coverage(run, [of_sum | {"members": [], "rounds": [1, 5]}])
    [extent] = describe_extent(coverage)
    assert extent.startswith("1 of 3 recorded clients was attacked, in 2 of 3 recorded rounds; nothing is known")
