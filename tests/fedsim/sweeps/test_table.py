"""The tables of a sweep are read as they were written, or not at all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsim.base.errors import RunError
from fedsim.sweeps import table
from fedsim.sweeps.table import (
    CELLS,
    SCORES,
    SEAL,
    TABLE,
    read_cells,
    read_table,
    table_columns,
    write_cells,
    write_table,
)

PLACE = {"cell": "a1", "federation": "b2", "training.local_epochs": 5, "seed": 1, "attack": "sme"}
SCORE = PLACE | {
    "victim": 0,
    "round": "1-3",
    "metric": "psnr",
    "value": 12.5,
    "better": "higher",
    "examples": 4,
    "bytes": 100.0,
}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes beside these tests, so a table that does not agree with its seal is not waited for."""
    monkeypatch.setattr(table, "time", SimpleNamespace(sleep=lambda seconds: None))


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_table(tmp_path, ["training.local_epochs"], [SCORE])
    found = read_table(tmp_path)
    assert found.axes == ("training.local_epochs",)
    (row,) = found.rows
    assert (row["training.local_epochs"], row["attack"], row["round"]) == ("5", "sme", "1-3")
    assert float(row["value"]) == 12.5
    assert row["ceiling"] == ""


def test_cells_are_read_as_they_were_written_and_may_be_none(tmp_path: Path) -> None:
    write_cells(tmp_path, [], [PLACE | {"state": "failed", "reason": 'a "sentence", with commas'}][:0])
    assert read_cells(tmp_path).rows == []
    named = {key: value for key, value in PLACE.items() if "." not in key}
    write_cells(tmp_path, [], [named | {"state": "failed", "reason": 'a "sentence", with commas'}])
    assert read_cells(tmp_path).rows[0]["reason"] == 'a "sentence", with commas'


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (TABLE, "", "is not what the sweep wrote"),
        (TABLE, ",".join(table_columns((), SCORES)) + "\n", "is not what the sweep wrote"),
        (TABLE + SEAL, "{}", "cannot be read"),
        (TABLE + SEAL, None, "nothing vouches for the table"),
    ],
)
def test_an_edited_table_is_named_with_what_to_do(tmp_path: Path, name: str, text: str | None, complaint: str) -> None:
    write_table(tmp_path, [], [])
    write_table(tmp_path, ["training.local_epochs"], [])
    read_table(tmp_path)
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=complaint) as error:
        read_table(tmp_path)
    assert str(tmp_path / TABLE) in str(error.value)
    assert "fedsim sweep" in str(error.value)


def test_a_table_of_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, [], [])
    monkeypatch.setattr(table, "SCORES", (*SCORES, "new"))
    with pytest.raises(RunError, match="its columns are not"):
        read_table(tmp_path)


def test_with_a_key_a_table_is_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path, [], [])
    for name in ("one", "other"):
        (tmp_path / name).write_text(f"a secret that is long enough, {name}")
    monkeypatch.setenv("FEDSIM_KEY", str(tmp_path / "one"))
    with pytest.raises(RunError, match="it is not signed"):
        read_table(tmp_path)
    write_table(tmp_path, [], [])
    assert read_table(tmp_path).rows == []
    monkeypatch.setenv("FEDSIM_KEY", str(tmp_path / "other"))
    with pytest.raises(RunError, match="it is not signed with this key"):
        read_table(tmp_path)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=CELLS):
        read_cells(tmp_path)


def test_a_forged_table_is_vouched_for_by_no_later_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes there without the key, and keeps the seal that holds in between, has nothing of it."""
    (tmp_path / "key").write_text("a secret that is long enough")
    monkeypatch.setenv("FEDSIM_KEY", str(tmp_path / "key"))
    folder = tmp_path / "sweep"
    folder.mkdir()
    write_table(folder, [], [])
    forged = (folder / TABLE).read_text().replace("value", "forged")
    (folder / TABLE).write_text(forged)
    seals = list[str]()
    before = table.write_text

    def watched(path: Path, text: str) -> None:
        before(path, text)
        if path.name.endswith(SEAL):
            seals.append(text)

    monkeypatch.setattr(table, "write_text", watched)
    write_table(folder, [], [])
    assert len(seals) == 2
    for text in seals:
        (folder / TABLE).write_text(forged)
        (folder / (TABLE + SEAL)).write_text(text)
        with pytest.raises(RunError, match="is not what the sweep wrote"):
            read_table(folder)


def test_the_table_of_another_sweep_has_a_seal_of_another_sweep(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        write_table(tmp_path / name, [], [])
    for name in (TABLE, TABLE + SEAL):
        (tmp_path / "one" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(RunError, match="is not what the sweep wrote"):
        read_table(tmp_path / "one")


def test_a_label_may_hold_what_other_tools_take_for_the_end_of_a_line(tmp_path: Path) -> None:
    odd = "a\x0bb\u2028c\x85d"
    write_table(tmp_path, ["training.local_epochs"], [SCORE | {"training.local_epochs": odd}])
    assert read_table(tmp_path).rows[0]["training.local_epochs"] == odd
