"""Writes reference/settings.md out of the code: `python docs/settings_reference.py`.

A test sees that it is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedsim.api.tables import LISTS, TABLES, describe_class, describe_table, read_setting_texts
from fedsim.federation.app_file import AppFederationTable
from fedsim.plugins import registry
from fedsim.plugins.descriptions import describe_plugin

PAGE = Path(__file__).parent / "reference" / "settings.md"
HEAD = """# All settings

Every key of every table of experiment, attack and sweep files, and every setting of the plug-ins that come with fedsim.
Written by `python docs/settings_reference.py` out of the code, so that it cannot go stale. `fedsim show NAME` prints
the same of one table (`fedsim show training`) or plug-in (`fedsim show sme`), your own included.

Types and defaults are written as Python writes them: `True` is `true` in a file, and a key whose default is `None` is
left out there.
"""
RUN_CONFIG = """### `[run_config]` of a Flower app

Settings of the app that differ from those in its pyproject.toml, as in `flwr run --run-config`: the keys are the app's,
and one that it does not have is refused. Tables within are keys with dots.
"""
TITLES: dict[registry.Group, str] = {
    "attacks": "Attacks",
    "defenses": "Defenses",
    "strategies": "Strategies",
    "datasets": "Data sets",
    "partitions": "Partitions",
    "models": "Models",
    "measures": "Measures",
    "algorithms": "Client algorithms",
    "engines": "Engines",
}
"""Title of each group of plug-ins that a file can name."""
_FLOWER = "flwr"


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, "## Tables\n"]
    for name in TABLES:
        described = describe_table(name)
        heading = f"[[{name}]]" if name in LISTS else f"[{name}]"
        rows = [(key.name, key.kind, key.default, key.meaning) for key in described.keys]
        parts += [f"### `{heading}`\n", f"{described.text}\n", *_table("key", rows)]
    federation = describe_class("federation", AppFederationTable)
    rows = [(key.name, key.kind, key.default, key.meaning) for key in federation.keys]
    parts += ["### `[federation]` of a Flower app\n", f"{federation.text}\n", *_table("key", rows), RUN_CONFIG]
    for group, title in TITLES.items():
        parts += [f"## {title}\n", *_plugins(group)]
    return "\n".join(parts)


def _plugins(group: registry.Group) -> Iterator[str]:
    """Yield each plug-in of ours with its settings, and at the end the names of those without any."""
    plain, of_flower = [], []
    for name in registry.registered_names(group):
        if not registry.is_builtin(group, name):
            continue
        cls = registry.load(group, name)
        description = describe_plugin(group, name)
        if cls.__module__.startswith(_FLOWER):
            of_flower.append(f"`{name}`")
        elif description.settings:
            texts = read_setting_texts(cls)
            rows = [(key, kind, default, texts[key]) for key, kind, default in description.settings]
            yield f"### `{name}`\n"
            yield f"{description.text.splitlines()[0]}\n"
            yield from _table("setting", rows)
        else:
            plain.append(f"`{name}`")
    if of_flower:
        yield f"With the keyword arguments of Flower's class, which `fedsim show NAME` lists: {', '.join(of_flower)}.\n"
    if plain:
        yield f"Without settings: {', '.join(plain)}.\n"


def _table(first: str, rows: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield a table of names, types, defaults and meanings; nothing without rows."""
    if rows:
        lines = [f"| {first} | type | default | meaning |", "|---|---|---|---|"]
        for name, kind, default, meaning in rows:
            cells = [f"`{name}`", f"`{kind}`", f"`{default}`", f"{meaning[:1].upper()}{meaning[1:]}"]
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        yield "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
