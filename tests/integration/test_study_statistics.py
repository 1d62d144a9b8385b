"""Statistics of studies: shares of an oracle's gain with their permutations, and correlations with controls held."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from studies.gate.study import CLIENTS, STRENGTHS, Numbers, compare_choices
from studies.gate_choice.study import saved_by
from studies.lavp.controls import correlate_held
from studies.lmra.study import distance_to_span
from studies.lmra_defenses import study as lmra_defenses
from studies.lmra_models.study import attack_table, format_mean
from studies.lmra_sweeps.study import BASE, change_setting, format_columns
from tests.support.recordings import build_update

LEAKS = np.random.default_rng(0).gamma(2.0, size=(2, CLIENTS))
"""What leaks without a gate, `federation client`."""


def leak_rows(leaks: Numbers, strength: float) -> list[dict[str, str]]:
    rows = []
    for (seed, client), leak in np.ndenumerate(leaks):
        rows.append({"seed": str(seed), "client": str(client), "strength": str(strength), "leak": str(leak)})
    return rows


@pytest.mark.parametrize(
    ("sign", "expected"),
    [
        pytest.param(-1, "+1.00 (p 0.001)", id="those that leak most, as the oracle"),
        pytest.param(1, "-1.00 (p 1.000)", id="those that leak least"),
    ],
)
def test_a_gate_is_judged_between_the_oracle_and_its_reverse(sign: int, expected: str) -> None:
    closed = (sign * LEAKS).argsort(axis=1).argsort(axis=1) < CLIENTS // 2
    random = [row for strength in STRENGTHS for row in leak_rows((1 - strength) * LEAKS, strength)]
    means, share = compare_choices(leak_rows(np.where(closed, 0, LEAKS), 0.5), random)
    assert share == expected
    assert means.endswith(f"({LEAKS.mean() / 2:.2f}, {np.sort(LEAKS)[:, : CLIENTS // 2].sum() / LEAKS.size:.2f})")


def test_p_of_gates_that_close_at_random_is_even() -> None:
    rng = np.random.default_rng(1)
    random = [row for strength in STRENGTHS for row in leak_rows((1 - strength) * LEAKS, strength)]
    found = []
    for _ in range(60):
        closed = rng.permuted(np.tile(np.arange(CLIENTS) < CLIENTS // 2, (2, 1)), axis=1)
        _, share = compare_choices(leak_rows(np.where(closed, 0, LEAKS), 0.5), random)
        found.append(float(share.partition("(p ")[2].rstrip(")")))
    assert 0.35 < np.mean(found) < 0.65
    assert np.mean(np.array(found) < 0.2) < 0.4


def test_silence_of_those_that_leak_most_saves_the_most() -> None:
    most = np.sort(LEAKS)[:, CLIENTS // 2 :].sum(1).mean()
    assert saved_by(LEAKS, LEAKS) == pytest.approx(most)
    assert saved_by(-LEAKS, LEAKS) == pytest.approx(LEAKS.sum(1).mean() - most)


def test_a_held_control_gives_the_partial_correlation() -> None:
    first, second, control = np.random.default_rng(2).standard_normal((3, 40))
    first, second = first + control, second + control
    of = np.corrcoef([first, second, control])
    partial = (of[0, 1] - of[0, 2] * of[1, 2]) / np.sqrt((1 - of[0, 2] ** 2) * (1 - of[1, 2] ** 2))
    assert correlate_held(first[None], second[None], [control[None]])[0] == pytest.approx(partial)


def test_a_client_at_several_seeds_counts_once() -> None:
    """Three clients hold the same data at both seeds; counted as six, the difference would be significant."""
    rows = []
    for client, value in enumerate((0.3, 0.4, 0.8)):
        for seed in ("1", "2"):
            about = {"data": "adult", "batch_norm": "False", "seed": seed, "victim": str(client), "metric": "zest"}
            rows.append(about | {"attack": "decoded", "value": str(value), "floor": "0.2"})
            refused = seed == "2" and client == 1
            score = {"metric": "refused"} if refused else {"value": str(value - 0.1), "floor": "0.2"}
            rows.append(about | {"attack": "other"} | score)
    columns = {"ours": "decoded", "other": "other"}
    table = attack_table(rows, columns, {"Zest": ("zest", "")}, [("ours", "floor"), ("ours", "other")])
    assert table.splitlines()[2:] == [
        "| Adult | 3 x 2 | Zest | .200 | .500 ± .657 | .400 ± .657 (5 of 6) | +.300 ± .657 (3) | **+.100 ± .000** (3) |"
    ]


def test_an_attack_refuses_only_what_others_are_scored_by() -> None:
    about = {"victim": "0", "seed": "1", "floor": "0.2"}
    cell = {("sent", "zest"): [about | {"value": "0.5"}], ("lmra", "refused"): [about]}
    assert format_mean(cell, "lmra", "zest") == "refused"
    assert format_mean(cell, "lmra", "local_mape") == ""


def test_a_setting_is_compared_with_another_at_the_same_clients() -> None:
    """Values of clients differ by .1 to .8; each gains .1 or .2 by the setting, which only pairs show."""
    about = {"seed": "1", "floor": "0.2"}

    def cell(*values: float) -> dict[tuple[str, ...], list[dict[str, str]]]:
        rows = [{**about, "victim": str(client), "value": str(value)} for client, value in enumerate(values)]
        return {("aia", "attribute_accuracy"): rows}

    base, changed = cell(0.1, 0.5, 0.8), cell(0.3, 0.6, 0.9)
    columns = [("", "aia", "attribute_accuracy", shown) for shown in ("its floor", "", BASE, "floor")]
    assert format_columns(changed, base, columns) == [".200", ".600 ± .745", "+.133 ± .143 (3)", "+.400 ± .745 (3)"]
    assert format_columns(base, base, columns)[2] == ""


def test_more_local_epochs_leave_training_and_messages_as_many() -> None:
    base, changed = change_setting("adult", "batch_size", 512), change_setting("adult", "local_epochs", 10)
    for tables in (base, changed):
        assert tables["training"]["local_epochs"] * tables["federation"]["rounds"] == 1000
        assert tables["federation"]["rounds"] / tables["recording"]["every"] == 100


def test_the_distance_to_a_span_is_that_to_the_nearest_combination_of_all_messages() -> None:
    """Three models in the plane z = 1, of which two do not reach; the optimum is 2 above it."""
    models = [{"w": torch.tensor(values)} for values in ([0.0, 0.0, 1.0], [1.0, 0.0, 1.0], [0.0, 3.0, 1.0])]
    updates = [build_update(models[0], models[1], round=1), build_update(models[0], models[2], round=2)]
    optimum = torch.tensor([5.0, -7.0, 3.0], dtype=torch.float64)
    assert distance_to_span(optimum, updates, lambda state: state["w"].double()) == pytest.approx(2, rel=1e-6)


def test_a_defended_client_is_compared_with_itself_undefended() -> None:
    rows = []
    for defense, loss in (("none", 0.0), ("DP", 0.2)):
        cell = {"data": "adult", "defense": defense, "seed": "1"}
        rows.append({**cell, "attack": "federation", "metric": "accuracy", "victim": "", "value": "0.9", "floor": ""})
        for client, value in enumerate((0.4, 0.6, 0.9)):
            score = {"metric": "zest", "victim": str(client), "value": str(value - loss), "floor": "0.3"}
            rows.append({**cell, "attack": "global", **score})
    table = lmra_defenses.tables(rows)["local"].splitlines()
    assert table[2].startswith("| Adult | no defense | | .633 ± .625 | |")
    assert table[3].startswith("| | DP | | .433 ± .625 | -.200 ± .000 (0) |")
