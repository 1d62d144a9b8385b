"""Tables in the terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Column

from fedsim.cli.options import new_table


def test_a_label_that_is_too_long_goes_on_in_the_next_line() -> None:
    table = new_table("setting", "verdict", Column("command", no_wrap=True))
    table.add_row("strategy.learning_rate=0.001,strategy.momentum=0.9", "does not hold", "fedsim")
    screen = Console(width=40, file=io.StringIO())
    screen.print(table)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 4]
    assert "".join(cells) == "strategy.learning_rate=0.001,strategy.momentum=0.9"
