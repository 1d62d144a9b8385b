"""Tables of experiment files are described key by key, and `fedsim show` prints that."""

from __future__ import annotations

import pytest

from fedsim.api.tables import LISTS, TABLES, describe_table
from fedsim.federation.config import Config
from tests.support.commands import Call

CHECKED_BY_SHOW = {
    "learning_rate": "finite float > 0; default 0.01  Step size of the optimizer.",
    "local_epochs": "int >= 1, <= 1000000 | None; default None  E, passes over the local data, each in a new order.",
}


def test_every_table_that_a_file_may_have_is_described() -> None:
    assert set(TABLES) == {*Config.model_fields, "adversary.knowledge", "sweep"}
    lists = {name for name, field in Config.model_fields.items() if "list[" in str(field.annotation)}
    assert lists == set(LISTS)


@pytest.mark.parametrize("name", TABLES)
def test_every_key_has_a_meaning_in_whole_sentences_and_a_readable_type(name: str) -> None:
    described = describe_table(name)
    assert described.text[0].isupper()
    assert [key.name for key in described.keys] == list(TABLES[name].model_fields)
    for key in described.keys:
        assert key.meaning.endswith("."), key
        assert not key.meaning[0].islower(), key
        assert not any(word in key.kind for word in ("fedsim", "typing", "Annotated", "Field")), key


def test_ranges_belong_to_the_numbers_of_a_union_and_to_items_of_a_list() -> None:
    kinds = {key.name: key.kind for name in ("partition", "states", "app") for key in describe_table(name).keys}
    assert kinds["samples_per_client"] == "int >= 1 | None"
    assert kinds["rounds"] == "list[int >= 0]"
    assert kinds["num_examples"] == "int >= 1 | dict[str, int >= 1] | None"


def test_a_table_is_shown_a_line_a_key(call: Call) -> None:
    lines = call("show", "training").stdout.splitlines()
    assert lines[0] == "training  (a table of experiment files)"
    for name, text in CHECKED_BY_SHOW.items():
        assert any(line.split(maxsplit=1) == [name, text] for line in lines), name


def test_a_required_key_is_said_to_be_so(call: Call) -> None:
    assert "count       int >= 20, <= 1000000; required  Number of canaries" in call("show", "canaries").stdout


def test_a_name_of_a_table_and_a_plug_in_shows_both(call: Call) -> None:
    text = call("show", "recording").stdout
    assert text.index("recording  (a table of experiment files)") < text.index(
        "recording  (panels, from fedsim-curious)"
    )


def test_an_unknown_name_is_compared_with_tables_too(call: Call) -> None:
    result = call("show", "adversary.knowlege")
    assert result.returncode == 2
    assert result.stderr == "fedsim: nothing is called 'adversary.knowlege', did you mean 'adversary.knowledge'?\n"
