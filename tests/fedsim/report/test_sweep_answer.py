"""The page of a sweep opens with which defense stops what, and at which cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fedsim.report.adaptive import HOLDS, NOT_CONCLUDED
from fedsim.report.defense_outcomes import WEAKENS
from fedsim.report.sweep_answer import SweepAnswer, answer_sweep, describe_epsilon
from fedsim.report.sweep_lead import SettingRow
from tests.support.sweep_tables import AT_FLOOR, HALVED, LEAKING, make_both, make_rows

LOWER = [value - 0.5 for value in AT_FLOOR]
Rows = list[dict[str, str]]


def answer(*parts: Rows, cells: Rows | None = None) -> SweepAnswer:
    return answer_sweep([row for part in parts for row in part], cells or [], ("defense",))


def row_of(found: SweepAnswer, name: str) -> SettingRow:
    [row] = [row for row in found.rows if row.name == name]
    return row


def test_the_lead_says_which_defense_holds_weakens_and_does_nothing() -> None:
    found = answer(
        make_both({False: AT_FLOOR, True: LOWER}, "strong", accuracy=0.7),
        make_both({False: HALVED, True: HALVED}, "middling", accuracy=0.85),
        make_both({False: LEAKING, True: LEAKING}, "weak"),
        make_rows(AT_FLOOR, "naive only"),
        make_rows(LEAKING),
    )
    assert found.lead == (
        "Without a defense, sme finds a leak. strong (accuracy -20.0 points) holds against sme. middling (accuracy "
        "-5.0 points) weakens sme, but is not shown to stop it: leakage is lower by PSNR, but there is still a leak. "
        "weak does nothing against sme: leakage is hardly lower, or not at all. Nothing is concluded about naive only "
        "against sme, because leakage is lower, but only the naive attack ran; grant defenses = true in "
        "[adversary.knowledge], or choose an attack that uses them."
    )
    assert found.rows[0].name == "none"  # what the others are compared with


def test_knowledge_that_is_granted_is_not_advised_to_attacks_that_cannot_use_it() -> None:
    found = answer(
        make_rows(LEAKING),
        make_both({False: AT_FLOOR, True: AT_FLOOR}, "noise"),
        make_rows(LEAKING, attack="spear-ica"),
        make_rows(AT_FLOOR, "noise", attack="spear-ica"),
    )
    reason = "leakage is lower, but only the naive attack ran; it cannot use the granted knowledge of this defense"
    assert reason in found.lead
    assert "grant defenses" not in found.lead


def test_defenses_and_attacks_of_one_outcome_share_a_sentence() -> None:
    both = {False: LEAKING, True: LEAKING}
    parts = [make_both(both, name, attack=attack) for name in ("a", "b") for attack in ("sme", "dlg")]
    found = answer(*parts, make_rows(LEAKING), make_rows(LEAKING, attack="dlg"))
    assert found.lead == (
        "Without a defense, sme and dlg find a leak. a and b do nothing against sme and dlg: leakage is hardly lower, "
        "or not at all."
    )


def test_many_defenses_are_not_all_named() -> None:
    parts = [make_both({False: LEAKING, True: LEAKING}, f"d{number}") for number in range(9)]
    assert "d0, d1, d2, d3, d4 and 4 other settings do nothing" in answer(*parts, make_rows(LEAKING)).lead


def test_where_nothing_leaks_without_a_defense_the_lead_says_what_to_change() -> None:
    found = answer(make_both({False: AT_FLOOR, True: LOWER}, "noise"), make_rows(AT_FLOOR))
    assert found.lead.startswith("Without a defense no attack shows a leak (sme; 6 victims), so that nothing")
    assert row_of(found, "noise").verdict == NOT_CONCLUDED


def test_a_row_has_leakage_beyond_the_guess_and_its_difference_to_no_defense() -> None:
    found = answer(make_both({False: HALVED, True: HALVED}, "noise"), make_rows(LEAKING))
    noise = row_of(found, "noise")
    assert noise.leakage == "+2.62 ± 0.35 dB (sme)"
    assert noise.difference.startswith("-2.72 ± ")
    assert noise.difference.endswith(" dB")
    assert (
        noise.reason
        == "sme (PSNR 15.3 without, 12.6 with, guess 10): leakage is lower by PSNR, but there is still a leak"
    )


def test_what_is_below_the_guess_is_at_the_guess() -> None:
    found = answer(make_both({False: AT_FLOOR, True: LOWER}, "noise"), make_rows(LEAKING))
    assert row_of(found, "noise").leakage == "at the guess (sme)"
    assert row_of(found, "noise").verdict == HOLDS


def test_who_is_got_back_all_the_same_stands_beside_the_mean() -> None:
    exposed = [25.0, *[7.0] * 19]
    rows = make_both({False: exposed, True: [value - 0.3 for value in exposed]}, "noise")
    row = row_of(answer(make_rows([15.0] * 20), rows), "noise")
    assert row.leakage == "at the guess on average, but beyond it for victim 0 (round 1, seed 0) (sme)"


def test_exact_claims_are_called_exact_and_a_difference_names_its_attack() -> None:
    """Without a defense another attack is the strongest one, which the defense stops from being made."""
    exact = make_rows([140.0, 138.0, 141.0, 139.0, 140.0, 142.0], attack="spear")
    exact += make_rows([1.0] * 6, attack="spear", metric="exact", floor=0.0)
    failed = make_rows(LEAKING, "noise", attack="spear", metric="", value="")
    found = answer(make_both({False: HALVED, True: HALVED}, "noise"), failed, make_rows(LEAKING), exact)
    assert row_of(found, "none").leakage == "exact (spear)"
    assert row_of(found, "noise").difference.endswith(" dB, to sme without a defense")


def test_a_setting_at_the_guess_by_one_metric_says_by_which_other_it_leaks() -> None:
    """Else noise that leaves nine of ten examples identifiable reads as a defense that stops the attack."""
    identified = []
    for attack, share in (("sme", 0.9), ("dlg", 0.95)):
        identified += [
            make_rows([share] * 6, *name, attack=attack, metric="identified", floor=0.1) for name in ((), ("noise",))
        ]
    told = [row | {"floor_guess": "chance among others"} for rows in identified for row in rows]
    found = answer(make_rows(LEAKING), make_rows([5.0] * 6, "noise"), told)
    assert row_of(found, "noise").leakage == "at the guess (sme); by share identified 95 %, guess 10 % (dlg)"


def test_a_mean_that_exact_claims_dominate_is_not_called_exact() -> None:
    mixed = make_rows([140.0] * 5 + [5.0]) + make_rows([1.0] * 5 + [0.0], metric="exact", floor=0.0)
    [row] = answer(mixed).rows
    assert row.leakage.startswith("+108")


def make_cells(states: Sequence[tuple[str, str, str]]) -> Rows:
    """Return rows of `cells.csv` by defense, attack and state."""
    cells = []
    for defense, attack, state in states:
        cell, control = f"{defense} {attack}", f"none {attack}"
        cells.append({
            "cell": cell, "control": control, "defense": defense, "attack": attack, "state": state, "no_control": "",
            "defense_limits": "", "open_rounds": "", "run": f"runs/{cell}", "reason": "",
        })  # fmt: skip
    return cells


def test_rounds_without_the_defense_are_said_once() -> None:
    rows = [row | {"cell": "early sme"} for row in make_rows(AT_FLOOR, "early")]
    cells = make_cells([("early", "sme", "done"), ("early", "sme", "done")])
    for cell in cells:
        cell["defense_limits"] = "censor does not act in round 2."
        cell["open_rounds"] = "2"
    assert answer(make_rows(LEAKING), rows, cells=cells).defense_limits == ["early: censor does not act in round 2."]


def test_the_lead_does_not_say_holds_of_rounds_that_nobody_attacked() -> None:
    rows = make_both({False: AT_FLOOR, True: LOWER}, "early")
    cells = make_cells([("early", "sme", "done")])
    cells[0] |= {"cell": rows[0]["cell"], "open_rounds": "2 3"}
    found = answer(make_rows(LEAKING), rows, cells=cells)
    row = row_of(found, "early")
    assert (row.verdict, "holds" in found.lead) == (WEAKENS, False)
    assert "it does not act in round 2, and no such round was attacked" in row.reason


def test_an_attack_that_fails_under_a_defense_alone_has_met_the_defense() -> None:
    cells = make_cells([("none", "sme", "done"), ("noise", "sme", "failed"), ("top-k", "sme", "failed")])
    cells[1]["reason"] = "sme, round 1, client 0: w_T equals w_0; sme, round 1, client 1: w_T equals w_0"
    rows = [row | {"cell": "none sme"} for row in make_rows(LEAKING)]
    assert answer(rows, cells=cells).failures == [
        "Under noise and top-k sme failed in 2 of 3 cells, and without a defense it did not, which says nothing of "
        "other attacks; the first reason: sme, round 1, client 0: w_T equals w_0."
    ]


def test_an_attack_is_not_said_to_fail_where_there_was_no_federation_to_attack() -> None:
    cells = make_cells([("none", "sme", "done"), ("noise", "sme", "failed")])
    cells[1] |= {"reason": "its federation failed: round 1: all 6 clients failed", "run": ""}
    rows = [row | {"cell": "none sme"} for row in make_rows(LEAKING)]
    assert answer(rows, cells=cells).failures == ["Results of some cells are missing (failed): sme in 1 of 2."]


def test_other_cells_without_results_are_lacking() -> None:
    cells = make_cells([("none", "sme", "failed"), ("noise", "sme", "failed"), ("top-k", "sme", "not done")])
    cells += make_cells([("none", "dlg", "done"), ("noise", "dlg", "does not apply"), ("top-k", "dlg", "failed")])
    rows = [row | {"cell": "top-k dlg"} for row in make_rows(LEAKING, "top-k", attack="dlg")]
    assert answer(rows, cells=cells).failures == [
        "Results of some cells are missing (failed, not done and failed in part): sme in 3 of 3 and dlg in 1 of 2."
    ]


def test_the_metrics_by_which_less_leaks_and_by_which_it_still_leaks_are_named() -> None:
    identified: dict[str, Any] = {"metric": "identified", "floor": 0.05, "examples": 10.0}
    found = answer(
        make_both({False: AT_FLOOR, True: LOWER}, "noise"),
        make_both({False: [0.5] * 6, True: [0.5] * 6}, "noise", **identified),
        make_rows(LEAKING),
        make_rows([0.5] * 6, **identified),
    )
    noise = row_of(found, "noise")
    assert (noise.verdict, noise.css) == (WEAKENS, "undecided")
    assert noise.reason == (
        "sme (PSNR 15.3 without, 9.25 with, guess 10): leakage is lower by PSNR, but there is still a leak "
        "by share identified"
    )


def with_accuracies(rows: Rows, by_client: Sequence[float], **columns: str) -> Rows:
    return [row | columns | {"client_accuracy": str(by_client[int(row["victim"])])} for row in rows]


def test_accuracy_is_paired_by_seed_and_by_client() -> None:
    def answer_for(seeds: int) -> SettingRow:
        parts = [make_rows(LEAKING, seed=seed, accuracy=0.3 + 0.3 * seed) for seed in range(seeds)]
        parts += [make_rows(LEAKING, "noise", seed=seed, accuracy=0.2 + 0.31 * seed) for seed in range(seeds)]
        return row_of(answer(*parts), "noise")

    row = answer_for(3)  # the seeds differ by 30 points, their differences by one
    assert (row.accuracy, row.accuracy_change) == ("51.0 % (0.0 to 100.0 %, 3 seeds)", "-9.0 ± 2.5 points")
    # An interval of two values reaches from nothing to all.
    row = answer_for(2)
    assert (row.accuracy, row.accuracy_change) == (
        "35.5 % (20.0 and 51.0, 2 seeds)", "-9.5 points: -10.0 and -9.0"
    )  # fmt: skip
    assert answer_for(1).accuracy == "20.0 % (1 seed)"
    nearly_equal = answer(make_rows(LEAKING, accuracy=0.5), make_rows(LEAKING, "noise", accuracy=0.4999))
    assert row_of(nearly_equal, "noise").accuracy_change == "+0.0 points"
    clients = [0.2, 0.9, 0.5, 0.4, 0.7, 0.6]
    held_out = with_accuracies(make_rows(LEAKING), clients)
    defended = with_accuracies(make_rows(LEAKING, "noise", accuracy=0.8), [value - 0.1 * value for value in clients])
    row = row_of(answer(held_out, defended), "noise")
    assert row.accuracy_change == "-10.0 points; of the attacked clients -5.5 ± 2.5 points"
    assert row.accuracy == "80.0 % (1 seed)"
    unshared = with_accuracies(make_rows(LEAKING), clients, accuracy="")
    assert answer(unshared).rows[0].accuracy == "of the attacked clients 55.0 %"


def test_why_there_is_no_control_is_said() -> None:
    rows = make_rows(LEAKING, "noise", control="")
    cells = make_cells([("noise", "sme", "done")])
    cells[0] |= {"cell": rows[0]["cell"], "no_control": "without the defense it reads tokens"}
    found = answer(rows, make_rows(LEAKING, "other", control=""), cells=cells)
    assert found.no_controls == ["noise has no control: without the defense it reads tokens."]
    assert row_of(found, "noise").verdict == NOT_CONCLUDED
    assert "because without the defense it reads tokens." in found.lead


def test_without_defenses_the_settings_that_leak_are_named() -> None:
    def undefended(values: Sequence[float], setting: str) -> Rows:
        return [row | {"control": row["cell"]} for row in make_rows(values, setting)]

    found = answer(undefended(LEAKING, "few"), undefended(AT_FLOOR, "many"))
    assert found.lead == "The messages leak in 1 of 2 settings: few."
    assert not found.defended
    assert [(row.verdict, row.css, row.accuracy_change) for row in found.rows] == [
        ("leaks", "leaks", ""),
        ("no better than guessing", "", ""),
    ]
    assert answer(undefended(LEAKING, "only")).lead == "The messages leak."
    assert answer(undefended(AT_FLOOR, "only")).lead == "No attack shows a leak in any setting."
    assert answer().lead == ""


def test_settings_in_which_no_attack_was_judged_are_not_said_to_keep_data() -> None:
    def undefended(values: Sequence[float], setting: str, metric: str) -> Rows:
        return [row | {"control": row["cell"], "metric": metric} for row in make_rows(values, setting)]

    refused, judged = undefended(AT_FLOOR, "refused", ""), undefended(AT_FLOOR, "judged", "psnr")
    assert answer(refused).lead == "No attack was judged in any setting, so that nothing is known of leaks."
    assert "in 1 of 2 settings; in the others none was judged: refused." in answer(refused, judged).lead


@pytest.mark.parametrize(
    ("epsilon", "word"),
    [(1.0, "strong"), (10.0, "weak"), (20.5, "hardly any"), (6.2e4, "none"), (float("inf"), "none")],
)
def test_an_epsilon_has_a_word_on_its_size(epsilon: float, word: str) -> None:
    assert describe_epsilon(epsilon) == word
    found = answer(make_rows(LEAKING, "noise", proved_epsilon=epsilon), make_rows(LEAKING))
    assert row_of(found, "noise").promise == word
    assert row_of(found, "none").promise == ""
