"""How long lists are cut in sentences, and which names are proposed."""

from __future__ import annotations

import pytest

from fedsim.base.errors import did_you_mean, join_first


@pytest.mark.parametrize(
    ("things", "told"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3], "1, 2, 3"),
        ([1, 2, 3, 4], "1, 2, 3 and 1 more"),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, "a, b, c and 2 more"),
    ],
)
def test_of_many_things_the_first_few_are_named_and_the_others_counted(things: list[int], told: str) -> None:
    assert join_first(things, 3) == told
    assert join_first(things, 3, "; ") == told.replace(",", ";")


@pytest.mark.parametrize(
    ("name", "remark"),
    [
        ("sotera", "did you mean 'soteria'?"),
        ("nothere", "known: npz, soteria"),  # four letters in common with soteria, in order
        ("nope", "known: npz, soteria"),
    ],
)
def test_a_name_is_proposed_only_where_it_is_similar(name: str, remark: str) -> None:
    assert did_you_mean(name, ["soteria", "npz"]) == remark
