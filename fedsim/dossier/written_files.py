"""Compare the files of a dossier that people read with what its sealed `dossier.json` says."""

from __future__ import annotations

from pathlib import Path

from fedsim.base.files import check_no_link
from fedsim.dossier.contents import SealedDossier
from fedsim.dossier.files import JSON_FILE, JUNIT_FILE, PAGE, format_junit, render_dossier
from fedsim.dossier.recomputation import State, VerifiedValue
from fedsim.federation.settings import versions

_PACKAGE = "fedsim-curious"
_STATED, _OTHER = f"what {JSON_FILE} says", "other contents"


def compare_written_files(sealed: SealedDossier, folder: Path) -> list[VerifiedValue]:
    """Write the page and the JUnit file again, and compare them with those beside `dossier.json`."""
    dossier = sealed.dossier
    expected_page = render_dossier(dossier, sealed.seal)
    values = [_compare_file(folder / PAGE, expected_page)]
    if dossier.thresholds:
        values.append(_compare_file(folder / JUNIT_FILE, format_junit(dossier.name, dossier.thresholds)))
    elif (folder / JUNIT_FILE).exists():
        values.append(_make_value(JUNIT_FILE, "no thresholds, and so no such file", "a file", "differs"))
    # Another version may write the same contents in other words.
    written, now = dossier.versions.get(_PACKAGE, "unknown"), versions()[_PACKAGE]
    if written == now:
        return values
    why = f"it was written by fedsim {written}, this is {now}"
    return [
        _make_value(value.where, value.stated, value.found, "cannot be recomputed", value.why or why)
        if value.state == "differs"
        else value
        for value in values
    ]


def _compare_file(path: Path, expected: str) -> VerifiedValue:
    if not path.is_file():
        why = f"{path.name} is not next to {JSON_FILE}, so its contents are unknown"
        return _make_value(path.name, _STATED, "no file", "cannot be recomputed", why)
    check_no_link(path)
    is_equal = path.read_bytes() == expected.encode()
    return _make_value(path.name, _STATED, _STATED if is_equal else _OTHER, "equal" if is_equal else "differs")


def _make_value(where: str, stated: str, found: str, state: State, why: str = "") -> VerifiedValue:
    return VerifiedValue(where=where, stated=stated, found=found, state=state, is_number=False, why=why)
