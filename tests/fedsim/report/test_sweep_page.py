"""The page of a sweep: which numbers it shows, where they lead, and that it escapes what it shows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from html import unescape
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsim.base.errors import RunError
from fedsim.report.summary import interval
from fedsim.report.sweep_groups import ScoreGroup, group_scores
from fedsim.report.sweep_page import write_sweep_page
from fedsim.report.trade_off import pareto_front
from fedsim.sweeps.table import read_table, write_cells, write_table

AXES = ("defense", "training.local_epochs")


def rows(scores: Mapping[tuple[str, str, int], float], accuracy: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """PSNR by defense, epochs and seed, of two victims that differ by 2 dB."""
    for ((defense, epochs, seed), value), victim in product(scores.items(), (0, 1)):
        yield {
            "cell": f"{defense}-{epochs}-{seed}", "federation": "f", "control": f"none-{epochs}-{seed}",
            "defense": defense,
            "training.local_epochs": epochs, "seed": seed, "attack": "sme", "knows_defenses": 0, "baseline": 0,
            "victim": victim, "round": "1", "repeat": 0, "metric": "psnr", "value": value + 2 * victim,
            "floor": 10.0, "floor_guess": "noise", "ceiling": "", "better": "higher", "examples": 4.0,
            "accuracy": accuracy[defense], "client_accuracy": "", "guess": 0.11,
            "num_evaluated": 400, "proved_epsilon": "",
            "measured_epsilon": "", "bytes": 100.0, "seconds": 1.0, "run": f"../cells/{defense}",
        }  # fmt: skip


def write(folder: Path, found: list[dict[str, Any]], cells: list[dict[str, Any]] | None = None) -> str:
    """The page of a sweep with these scores."""
    write_table(folder, AXES, found)
    write_cells(folder, AXES, cells or [])
    (folder / "sweep.toml").write_text("[sweep]\nseeds = [1]\n")
    return write_sweep_page(folder).read_text()


@pytest.fixture
def grid() -> list[dict[str, Any]]:
    """Noise costs accuracy and lowers leakage; top-k costs more and protects less."""
    psnr = {"none": 20.0, "noise": 14.0, "top-k": 18.0}
    scores = {(d, e, s): value + s for (d, value), e, s in product(psnr.items(), ("1", "5"), (1, 2))}
    return list(rows(scores, {"none": 0.9, "noise": 0.8, "top-k": 0.7}))


def test_scores_are_grouped_by_attack_and_setting(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    write_table(tmp_path, AXES, grid)
    found = group_scores(read_table(tmp_path).rows, AXES, "psnr")
    assert [(one.attack, one.labels) for one in found][:3] == [
        ("sme", ("none", "1")), ("sme", ("none", "5")), ("sme", ("noise", "1")),
    ]  # fmt: skip
    first = found[0]
    assert first.mean == pytest.approx((21 + 23 + 22 + 24) / 4)
    assert (first.gain, first.count, first.accuracy[0]) == (pytest.approx(12.5), (2, 2), pytest.approx(0.9))
    assert first.low < first.mean < first.high


def test_a_mean_says_on_how_many_victims_the_attack_failed(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    grid[1] |= {"metric": "", "value": "", "floor": ""}
    assert "failed on 1)" in write(tmp_path, grid)
    found = group_scores(read_table(tmp_path).rows, AXES, "psnr")
    assert [(one.failed, one.missing) for one in found] == [(1, 0)] + [(0, 0)] * 5
    assert found[0].mean == pytest.approx((21 + 22 + 24) / 3)


@pytest.mark.parametrize("lacks", [{"metric": ""}, {}])
def test_a_victim_with_a_score_in_one_of_two_rounds_is_not_whole(
    grid: list[dict[str, Any]], tmp_path: Path, lacks: dict[str, Any]
) -> None:
    grid.insert(2, grid[1] | {"round": "2", "value": "", "floor": ""} | lacks)
    assert "(some rounds or starts of 1 without a score)" in write(tmp_path, grid)
    found = group_scores(read_table(tmp_path).rows, AXES, "psnr")
    assert [(one.failed, one.missing, one.partial) for one in found] == [(0, 0, 1)] + [(0, 0, 0)] * 5


def test_a_metric_that_could_not_be_computed_is_no_failure_of_the_attack(
    grid: list[dict[str, Any]], tmp_path: Path
) -> None:
    grid[1] |= {"value": "", "floor": ""}
    assert "(not computed for 1)" in (page := write(tmp_path, grid))
    assert "failed on" not in page
    [found, *others] = group_scores(read_table(tmp_path).rows, AXES, "psnr")
    assert (found.failed, found.missing) == (0, 1)
    assert {(one.failed, one.missing) for one in others} == {(0, 0)}


def shares(values: Mapping[tuple[int, int], float], metric: str = "recover_rate") -> ScoreGroup:
    """The group of one attack with these shares by victim and seed, and with accuracies of 0.99 and 0.7."""
    (row, *_) = rows({("none", "1", 1): 0.0}, {"none": 0.99})
    table = [
        row | {"metric": metric, "value": value, "victim": victim, "seed": seed, "accuracy": 0.7 if seed else 0.99}
        for (victim, seed), value in values.items()
    ]
    (found,) = group_scores([{key: str(value) for key, value in row.items()} for row in table], AXES, metric)
    return found


def test_intervals_stay_in_the_range_of_the_metric() -> None:
    three = shares({(victim, 0): value for victim, value in enumerate((1.0, 1.0, 0.75))})
    assert (three.low, three.high) == interval("recover_rate", np.array([1.0, 1.0, 0.75]))  # as in the run's report
    uneven = {(victim, seed): 0.75 if victim == seed else 1.0 for victim in range(3) for seed in range(2)}
    for metric in ("recover_rate", "membership_auc", "ssim"):
        found = shares(uneven, metric)
        assert 0 < found.low < found.mean < found.high <= 1
    assert found.accuracy[0] == pytest.approx(0.845)
    assert found.accuracy[1:] == (0.0, 1.0)  # Student's margin of two seeds is 1.8
    assert shares(uneven, "psnr").high > 1


def test_equal_shares_have_an_interval() -> None:
    for seeds in (1, 2):
        found = shares({(victim, seed): 1.0 for victim in range(5) for seed in range(seeds)})
        assert 0.4 < found.low < 0.5
        assert found.text == "1 (0.48 to 1)"
    assert shares({(0, 0): 1.0}).text == "1"


def test_victims_that_are_compared_with_one_another_have_an_interval_over_seeds_alone() -> None:
    scores = {(victim, seed): 0.6 + 0.1 * seed for victim in range(4) for seed in range(3)}
    assert math.isnan(shares({key: value for key, value in scores.items() if key[1] == 0}, "property_auc").low)
    found = shares(scores, "property_auc")
    assert (found.low, found.high) == interval("membership_auc", np.array([0.6, 0.7, 0.8]))


def test_a_label_that_sounds_adaptive_is_not_averaged_with_an_adaptive_attack(grid: list[dict[str, Any]]) -> None:
    own = [row | {"attack": "sme adaptive", "value": 0.0} for row in grid]
    known = [row | {"knows_defenses": 1} for row in grid]
    found = group_scores([{key: str(value) for key, value in row.items()} for row in own + known], AXES, "psnr")
    assert [one.name for one in found] == ["sme adaptive"] * 12
    assert sorted({one.mean for one in found}) == [0.0, 16.5, 20.5, 22.5]


def estimates(*values: tuple[float, float], margin: float = 0.01) -> list[Any]:
    """Accuracies and secrecies with intervals of this margin."""
    return [tuple((value, value - margin, value + margin) for value in pair) for pair in values]


def test_settings_that_another_beats_in_both_are_not_on_the_front() -> None:
    same = [{"sme"}] * 3
    assert pareto_front(estimates((0.9, -20), (0.8, -14), (0.7, -18)), same) == [True, True, False]
    assert pareto_front(estimates((0.9, -20), (0.9, -19)), same[:2]) == [False, True]


def test_there_is_no_front_where_no_setting_is_better_beyond_uncertainty() -> None:
    same = [{"sme"}] * 2
    assert pareto_front(estimates((0.9, -20), (0.9, -20)), same) == [False, False]
    assert pareto_front(estimates((0.9, -20), (0.89, -19), margin=1.0), same) == [False, False]
    assert pareto_front(estimates((0.9, -20), (0.89, -19), margin=math.nan), same) == [False, False]
    assert pareto_front(estimates((0.9, -20), (0.9, -17), margin=1.0), same) == [False, True]


def test_only_what_was_attacked_as_much_beats_a_setting() -> None:
    values = estimates((0.9, -20), (0.9, -10))
    assert pareto_front(values, [{"sme", "ig"}, {"sme"}]) == [False, False]
    assert pareto_front(values, [{"sme"}, {"sme", "ig"}]) == [False, True]
    assert pareto_front(values, [{"sme"}, {"ig"}]) == [False, False]


def test_a_setting_that_lacks_an_attack_is_marked_and_named(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    weak = [row | {"accuracy": 0.6 if row["defense"] == "none" else 0.7} for row in grid]
    strong = [row | {"attack": "strong", "value": row["value"] + 9} for row in weak if row["defense"] != "top-k"]
    text = write(tmp_path, weak + strong)
    marked = re.findall(r'<g class="mark marked"[^>]*><title>([^:]*):', text)
    assert {name.rpartition(",")[0] for name in marked} == {
        f"{defense}, local_epochs {epochs}{star}"
        for epochs in (1, 5)
        for defense, star in (("noise", ""), ("top-k", "*"))
    }
    legend = text[text.index('<ul class="legend">') :].partition("</ul>")[0]
    assert re.findall(r"</svg>([^<]*)", legend) == ["none", "noise", "top-k*"]  # the chart may lack room for stars
    assert "may leak more than is drawn: top-k, local_epochs 1 (no strong); top-k, local_epochs 5 (no strong)." in text


def test_a_setting_whose_model_has_not_learnt_is_said_to_be_so(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    text = write(tmp_path, [row | ({"accuracy": 0.12} if row["defense"] == "noise" else {}) for row in grid])
    notes = re.findall(
        r"<strong>([^<]*)\.</strong> It is not shown that the model has learnt: its accuracy on 400", text
    )
    assert notes == ["noise, local_epochs 1", "noise, local_epochs 5"]
    one_seed_learnt = [
        row | ({"accuracy": 0.12} if row["defense"] == "noise" and row["seed"] == 1 else {}) for row in grid
    ]
    assert "has learnt" not in write(tmp_path, one_seed_learnt)
    assert "has not learnt" not in write(tmp_path, [row | {"accuracy": 0.1, "guess": ""} for row in grid])


def test_baselines_are_shown_but_are_not_the_strongest_attack(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    optimal = [row | {"attack": "optimal", "baseline": 1, "value": 99.0} for row in grid if row["defense"] == "none"]
    text = write(tmp_path, grid + optimal)
    assert not re.search(r'class="mark[^>]*><title>[^<]*optimal', text)
    assert "may leak more" not in text
    heat = text[text.index('class="heat"') :]
    (row,) = re.findall(r'<th scope="row">optimal \(baseline\)</th>(.*)', heat)
    assert "--shade: 0.000" in row
    assert "--shade: 1.000" not in row
    assert "--shade: 1.000" in heat  # the strongest attack has the darkest cell
    assert "all scores are of baselines" in write(tmp_path, optimal)


def test_bytes_that_nobody_sees_are_not_zero(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    assert "<td>100</td></tr>" in write(tmp_path, grid)
    text = write(tmp_path, [row | {"bytes": ""} for row in grid])
    assert "<td>–</td></tr>" in text
    assert "<td>0</td>" not in text


def test_the_page_opens_with_the_answer_and_ends_with_the_cells(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    cells = [
        {"state": "done", "added": added, "no_control": "", "defense_limits": "", "open_rounds": ""} for added in (0, 1)
    ]
    text = " ".join(write(tmp_path, grid, cells).split())
    order = ['<p class="lead">', '<table class="answer">', 'class="mark', 'class="heat"', "2 cells done; 1 of them was"]
    assert sorted(order, key=text.index) == order
    assert "1 of them was added as a control without a defense." in text


def test_the_picture_has_the_guess_and_the_most_frequent_class_as_lines(
    grid: list[dict[str, Any]], tmp_path: Path
) -> None:
    text = write(tmp_path, grid)
    assert re.findall(r'<g class="guide">.*?>([^<>]+)</text>', text) == ["most frequent class", "best guess"]
    without_guess = write(tmp_path, [row | {"guess": ""} for row in grid])
    assert re.findall(r'<g class="guide">.*?>([^<>]+)</text>', without_guess) == ["best guess"]


def test_points_below_the_guess_are_said_to_be_at_the_guess(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    text = write(tmp_path, [row | ({"value": 9.0} if row["defense"] == "noise" else {}) for row in grid])
    assert "noise, local_epochs 1, sme (at the guess): " in text
    assert "none, local_epochs 1, sme: " in text


def test_without_a_front_the_page_says_that_no_setting_is_better(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    text = write(tmp_path, [row | {"accuracy": 0.7} for row in grid])  # two victims that differ have wide intervals
    assert "No front is drawn" in text
    assert 'class="front"' not in text


def test_every_metric_of_every_attack_stands_beside_its_control(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    text = write(tmp_path, grid)
    details = text[text.index("Every attack with and without") : text.index("Differences are counted towards")]
    assert details.count("<tr><th") == 1 + 4  # noise and top-k at two numbers of epochs


def test_the_page_marks_the_front_and_links_the_runs(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    text = write(tmp_path, grid)
    marked = re.findall(r'<g class="mark marked"[^>]*><title>([^:]*):', text)
    assert {name.split(",")[0] for name in marked} == {"none", "noise"}
    assert 'href="../cells/top-k/report.html"' in text


def test_an_adaptive_attack_stands_below_the_naive_one(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    other = [{**row, "attack": "ig"} for row in grid]
    text = write(tmp_path, grid + other + [{**row, "knows_defenses": 1, "value": row["value"] + 1} for row in grid])
    names = re.findall(r'<th scope="row">([a-z ]+)</th>', text[text.index('class="heat"') :])
    assert names[:3] == ["sme", "sme adaptive", "ig"]
    assert "noise, local_epochs 1, sme adaptive: " in text  # the strongest one is drawn against accuracy


def test_perfect_claims_and_unmeasured_accuracy_are_told_and_not_drawn(tmp_path: Path) -> None:
    found = list(rows({("none", "1", 1): math.inf, ("noise", "1", 1): 12.0}, {"none": 0.9, "noise": 0.8}))
    shares = {"none": 1.0, "noise": 0.0}
    found += [row | {"metric": "exact", "value": shares[row["defense"]], "floor": 0.0} for row in found]
    text = write(tmp_path, found)
    assert "the mean is infinite: none (sme)" in text
    assert ">exact</a>" in text
    unmeasured = write(tmp_path, [{**row, "accuracy": ""} for row in found])
    assert "no setting has both as finite numbers" in unmeasured


def test_what_the_adversaries_were_told_is_said(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    told = "granted knowledge that most servers do not have: labels, defenses."
    assert told not in write(tmp_path, grid)
    (tmp_path / "sweep.toml").write_text("[adversary.knowledge]\nlabels = true\ndefenses = true\nmodel = true\n")
    assert told in write_sweep_page(tmp_path).read_text()


def test_what_does_not_apply_and_failed_is_told_and_escaped(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    place = {"defense": "<b>x</b>", "training.local_epochs": "1", "seed": 1, "attack": "dager"}
    cells = [
        place | {"state": "does not apply", "reason": "needs <attention>"},
        place | {"state": "failed", "reason": "it broke"},
    ]
    text = write(tmp_path, [{**row, "defense": f"<i>{row['defense']}"} for row in grid], cells)
    assert "needs &lt;attention&gt;" in text
    assert "1 cell left out, which cannot be made, 1 cell failed" in " ".join(text.split())
    assert f"Results of some cells are missing (failed): {place['attack']} in 1 of 1." in text
    assert "<b>x" not in text
    assert "<i>n" not in text


def test_a_sweep_of_attacks_alone_has_a_page(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    found = [row for row in grid if (row["defense"], row["training.local_epochs"]) == ("none", "1")]
    write_table(tmp_path, (), [{key: value for key, value in row.items() if key not in AXES} for row in found])
    write_cells(tmp_path, (), [])
    (tmp_path / "sweep.toml").write_text("[sweep]\nseeds = [1]\n")
    text = write_sweep_page(tmp_path).read_text()
    assert "the only setting, sme: " in text
    assert ">22.5 ± " in text


def test_a_sweep_without_scores_says_so(tmp_path: Path) -> None:
    assert "No attack has scores yet" in write(tmp_path, [])


def test_metrics_that_say_nothing_about_leakage_are_left_out(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    text = write(tmp_path, grid + [{**row, "metric": "l_sim"} for row in grid])
    assert "L_sim" not in text


def test_the_page_says_which_code_of_others_its_file_needs(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    write(tmp_path, grid)
    (tmp_path / "sweep.toml").write_text(
        """
        attack = [{ name = "mine:Attack" }, { name = "sme" }]
        federation.engine = { name = "absent-engine" }
        data = { name = "digits", modality = "absent-kind" }
        [[sweep.axes.case]]
        label = "small"
        "model.name" = "nets:build"
        [sweep.axes]
        defense = [[], [{ name = "cover:Noise" }]]
        "partition.name" = ["iid", "shares:Uneven"]
        """
    )
    page = unescape(write_sweep_page(tmp_path).read_text(encoding="utf-8"))
    listed = page.partition("Also needed:")[2].partition("</ul>")[0]
    assert re.findall(r"put (\w+\.py) into", listed) == ["mine.py", "nets.py", "cover.py", "shares.py"]
    assert "'absent-engine', one of the engines, is of a package that is not installed here." in listed
    assert "'absent-kind', one of the modalities, is of a package that is not installed here." in listed
    assert listed.count("<li>") == 6


def test_a_page_whose_file_needs_nothing_else_names_no_need(grid: list[dict[str, Any]], tmp_path: Path) -> None:
    assert "Needed besides" not in write(tmp_path, grid)


@pytest.mark.parametrize("name", ["sweep.csv", "cells.csv", "sweep.toml"])
def test_a_missing_file_is_named(grid: list[dict[str, Any]], tmp_path: Path, name: str) -> None:
    write(tmp_path, grid)
    (tmp_path / name).unlink()
    with pytest.raises(RunError, match=f"{name}: cannot be read"):
        write_sweep_page(tmp_path)
