"""Who holds what, as the report tells it."""

from __future__ import annotations

import re
from html import unescape

import pytest
from sklearn.datasets import load_digits

from fedsim.federation.config import Config
from fedsim.federation.experiment import Experiment
from fedsim.report.panels.run import MAX_CLIENTS, sharing_table


def shared(attacked=(), **tables):
    config = {
        "data": {"name": "digits"},
        "partition": {"name": "iid", "samples_per_client": 6},
        "model": {"name": "mlp", "hidden": (4,)},
        "federation": {"clients": 3, "rounds": 1, "seed": 5},
    } | tables
    return sharing_table(Experiment(Config.model_validate(config)), attacked)


def rows(found):
    """Name and cells of each client."""
    lines = re.findall(r"<tr>(.*?)</tr>", str(found.table), re.DOTALL)
    return [[unescape(cell).strip() for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line)] for line in lines][1:]


def test_it_says_which_part_of_the_data_set_is_used():
    size = len(load_digits().target)
    numbers = re.findall(r"\d[\d.]*", shared().summary.replace("\u202f", ""))
    held, of, percent, public = map(float, (number.rstrip(".") for number in numbers))
    assert (held, of + public) == (18, size)
    assert percent == round(100 * held / of, 1)


def test_the_classes_of_each_client_are_counted_and_who_was_attacked_is_told():
    found = rows(shared([1]))
    assert [row[0] for row in found] == ["0", "1, attacked", "2"]
    for row in found:
        assert row[1:3] == ["6", "0"]
        assert sum(int(cell or 0) for cell in row[3:]) == 6


def test_what_clients_hold_out_is_counted_too():
    found = shared(partition={"name": "iid", "samples_per_client": 6, "test_fraction": 0.25})
    held_out = [int(row[2]) for row in rows(found)]
    assert min(held_out) > 0
    assert f"{sum(held_out)} of them to test on" in found.summary.replace("\u202f", "")
    for row in rows(found):
        assert sum(int(cell or 0) for cell in row[3:]) == int(row[1]) + int(row[2])
    assert "with those that it holds out" in str(found.table)
    assert "with those that it holds out" not in str(shared([1]).table)


def test_natural_groups_are_named_beside_their_clients():
    found = shared([0], data={"name": "handwriting"}, partition={"name": "natural", "samples_per_client": 6})
    assert "client (group)" in str(found.table)
    assert all(re.fullmatch(r"\d+ \(\d+\)(, attacked)?", row[0]) for row in rows(found))


def test_of_many_clients_the_attacked_ones_are_shown_first_of_all():
    found = shared([33], federation={"clients": 35, "rounds": 1, "seed": 5})
    names = [row[0] for row in rows(found)]
    assert len(names) == MAX_CLIENTS
    assert names[-1] == "33, attacked"
    assert found.omitted_clients == 5


def test_targets_of_a_regression_have_a_mean_and_a_deviation(tmp_path):
    lines = [f"{row},{10 * row}" for row in range(40)]
    (tmp_path / "table.csv").write_text("\n".join(["x,y", *lines]))
    data = {"name": "csv", "path": str(tmp_path / "table.csv"), "target": "y", "task": "regression"}
    found = shared(data=data)
    assert "standard deviation" in str(found.table)
    for row in rows(found):
        assert row[1:3] == ["6", "0"]
        assert 6 * float(row[3]) / 10 == pytest.approx(round(6 * float(row[3]) / 10), abs=0.05)  # in the file's unit
        assert 0 < float(row[4]) < 200
