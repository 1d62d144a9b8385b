"""The table [app] of an attack file is the format in which messages are read."""

from __future__ import annotations

from typing import Any

import pytest

from fedsim.base.errors import ConfigError
from fedsim.federation.config import AttackFile, validate_tables
from fedsim.recording.message_format import MessageFormat


def read(**app: Any) -> MessageFormat:
    return validate_tables(AttackFile, {"app": app}, "a.toml").app


def test_the_table_is_the_format() -> None:
    assert AttackFile.model_fields["app"].annotation is MessageFormat
    assert read() == MessageFormat()
    assert read(names=["w", ""], shapes={"w": [2, 3]}) == MessageFormat(names=["w", ""], shapes={"w": [2, 3]})


def test_the_number_of_examples_is_one_for_all_or_one_for_each_client() -> None:
    assert read(num_examples=5).num_examples_of(3, 8) == 5
    some = read(num_examples={"3": 5, "07": 6})
    assert [some.num_examples_of(client, 8) for client in (3, 7, 4)] == [5, 6, 8]


@pytest.mark.parametrize(
    ("app", "sentence"),
    [
        ({"replies": "gradients"}, "replies: input should be 'weights', 'delta' or 'gradient', got 'gradients'"),
        ({"message": -1}, "message: expected at least 0, got -1"),
        ({"shapes": {"w": [0]}}, "shapes.w.0: expected at least 1, got 0"),
        ({"num_examples": {"x": 3}}, "num_examples: expected client ids as keys, got 'x'"),
        ({"preffix": "a"}, "preffix: unknown key, did you mean 'prefix'?"),
    ],
)
def test_what_no_format_can_be_is_refused_by_its_key(app: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**app)
    assert str(error.value) == f"a.toml: app.{sentence}"


def test_only_keys_about_updates_change_how_they_are_read() -> None:
    assert not read(messages="query", outputs="module:function", frozen=True).changes_updates
    for app in ({"record": "a"}, {"message": 2}, {"num_examples": 3}, {"transposed": True}, {"replies": "delta"}):
        assert read(**app).changes_updates, app
