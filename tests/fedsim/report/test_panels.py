"""Panels of strangers in a report: where they stand, what is escaped, and what becomes of one that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from markupsafe import Markup

from fedsim.api import pipeline
from fedsim.audit.evaluation.score import Score
from fedsim.base.errors import PluginError
from fedsim.contract.panels import write_runs
from fedsim.federation.open_run import OpenRun
from fedsim.interfaces.panel import Panel
from fedsim.plugins import registry
from fedsim.report.page import write_report
from fedsim.report.panels.scores import ScoresPanel
from fedsim.report.recording_summary import Recording
from fedsim.report.reported_run import ReportedRun, open_reported_run
from fedsim.report.verdicts import score_readings
from tests.support.packages import write_package
from tests.support.silent_messages import row_of

Install = Callable[..., None]

HEAD = "from markupsafe import Markup\nimport fedsim\n"
SOUND = """
class Sound(fedsim.Panel):
    title = "Rounds & clients"
    link = "Rounds"

    def render(self, run):
        return Markup("<p class='theirs'>{} rounds of {}</p>").format(len(run.recording.headers), "<i>x</i>")
"""


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A run folder with a recording that somebody else made."""
    return write_runs(tmp_path)["a recording without an experiment"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a stranger's package of this code, with panels `name = Class`."""

    def install_package(code: str, **panels: str) -> None:
        package = f"stranger_{len(list(tmp_path.glob('site*')))}_{tmp_path.name.replace('-', '_')}"
        site = tmp_path / f"site-{package}"
        names = {name.replace("_", "-"): cls for name, cls in panels.items()}
        write_package(site, package, HEAD + code, {"panels": names})
        monkeypatch.syspath_prepend(site)
        registry._entry_points.cache_clear()

    yield install_package
    monkeypatch.undo()
    registry._entry_points.cache_clear()


def write_page(run: Path, failures: list[str] | None = None) -> str:
    return write_report(OpenRun(run), None, failures).read_text(encoding="utf-8")


def list_sections(page: str) -> list[str]:
    return re.findall('<section id="(.*?)">', page)


def test_each_section_has_an_entry_in_the_navigation_in_the_order_of_the_page(recording: Path) -> None:
    page = write_page(recording)
    assert list_sections(page) == ["scores", "run", "recording", "reproduction"]
    [navigation] = re.findall("(?s)<nav.*?</nav>", page)
    assert re.findall('href="#(.*?)"', navigation) == list_sections(page)


def test_a_strangers_panel_stands_after_the_scores_with_its_heading_and_link(recording: Path, install: Install) -> None:
    install(SOUND, their_rounds="Sound")
    page = write_page(recording)
    assert list_sections(page) == ["scores", "their-rounds", "run", "recording", "reproduction"]
    assert '<a href="#their-rounds">Rounds</a>' in page
    assert (
        '<section id="their-rounds">\n<h2>Rounds &amp; clients</h2>\n'
        "<p class='theirs'>2 rounds of &lt;i&gt;x&lt;/i&gt;</p>\n</section>" in page
    )


def test_a_panel_stands_where_its_order_says(recording: Path, install: Install) -> None:
    install(SOUND + "class Last(Sound):\n    order = 1000\nclass First(Sound):\n    order = -1\n", z="First", a="Last")
    assert list_sections(write_page(recording)) == ["z", "scores", "run", "recording", "reproduction", "a"]


def test_a_text_that_is_no_markup_is_escaped(recording: Path, install: Install) -> None:
    install(SOUND.replace("Markup(", "str("), their_rounds="Sound")
    page = write_page(recording)
    assert "&lt;p class=&#39;theirs&#39;&gt;2 rounds of &lt;i&gt;x" in page
    assert "<p class='theirs'>" not in page


@pytest.mark.parametrize("content", ["None", "''", "Markup('  \\n')"])
def test_a_panel_with_nothing_to_show_has_neither_section_nor_link(
    recording: Path, install: Install, content: str
) -> None:
    install(SOUND + f"class Empty(Sound):\n    def render(self, run):\n        return {content}\n", theirs="Empty")
    failures = list[str]()
    assert "theirs" not in write_page(recording, failures)
    assert failures == []


BROKEN = {
    "raises": (
        "class Theirs(Sound):\n    def render(self, run):\n        return 1 / 0\n",
        r"the panel 'theirs' is left out of the page: ZeroDivisionError: division by zero \(.*stranger_.*\.py:12\)",
    ),
    "exits": (
        "import sys\nclass Theirs(Sound):\n    def render(self, run):\n        sys.exit(4)\n",
        r"the panel 'theirs' is left out of the page: it called sys.exit\(4\) \(.*\.py:13\)",
    ),
    "returns a number": (
        "class Theirs(Sound):\n    def render(self, run):\n        return 3\n",
        "the panel 'theirs' is left out of the page: 'render' of Theirs returns int, expected text",
    ),
    "refuses": (
        "class Theirs(Sound):\n    def render(self, run):\n        raise fedsim.FedsimError('no; ask me')\n",
        r"the panel 'theirs' is left out of the page: no; ask me$",
    ),
    "has no title": (
        "class Theirs(fedsim.Panel):\n    def render(self, run):\n        return 'x'\n",
        "the panel 'theirs' is left out of the page: Theirs: has no title; add title = '...'",
    ),
    "has a text as order": (
        "class Theirs(Sound):\n    order = 'first'\n",
        "Theirs: expected a text as link and a whole number as order, got 'Rounds' and 'first'",
    ),
    "is not a panel": (
        "class Theirs:\n    title, link, order = 'x', 'x', 1\n    def render(self, run):\n        return 'x'\n",
        "the panel 'theirs' is left out of the page: Theirs does not derive from fedsim.Panel",
    ),
    "does not import": (
        "import a_module_that_nobody_has\n",
        "the panel 'theirs' is left out of the page: panels: 'theirs' .* does not load: ModuleNotFoundError",
    ),
}


@pytest.mark.parametrize(("code", "sentence"), BROKEN.values(), ids=list(BROKEN))
def test_a_panel_that_fails_is_left_out_and_the_page_says_so(
    recording: Path, install: Install, code: str, sentence: str
) -> None:
    """It is a failure of the command, too."""
    install(SOUND, sound="Sound")
    install(SOUND + code, theirs="Theirs")
    result = pipeline.report(OpenRun(recording))
    [failure] = result.failures
    assert re.search(sentence, failure)
    page = (recording / "report.html").read_text(encoding="utf-8")
    assert list_sections(page) == ["scores", "sound", "run", "recording", "reproduction"]
    [note] = re.findall('<p class="note">(The panel .*?)</p>', page)
    assert unescape(note).startswith("The panel 'theirs' is left out of the page: ")


def test_a_name_that_two_distributions_register_is_left_out_and_both_are_named(
    recording: Path, install: Install
) -> None:
    install(SOUND, scores="Sound")
    failures = list[str]()
    assert list_sections(write_page(recording, failures)) == ["run", "recording", "reproduction"]
    [failure] = failures
    assert re.search("'scores' is registered by fedsim-curious and stranger_.*; uninstall one of them", failure)


def test_what_a_panel_asks_for_is_read_once(recording: Path) -> None:
    run = open_reported_run(OpenRun(recording))
    assert run.recording is run.recording
    assert run.findings is run.findings
    assert (run.experiment, run.config, run.audit) == (None, None, None)
    assert [header.round for header in run.recording.headers] == [1, 2]


def test_a_panel_without_a_title_is_refused_where_it_is_made() -> None:
    class Untitled(Panel):
        title = ""

        def render(self, run: ReportedRun) -> str | None:
            return Markup("x")

    with pytest.raises(PluginError, match="Untitled: has no title; add title"):
        Untitled()


@pytest.mark.parametrize(
    ("num_recorded", "advice"),
    [(3, 'Set adversary.victims to "all" to attack more.'), (2, "All that were recorded are attacked;")],
)
def test_all_victims_are_asked_for_only_where_not_all_were_attacked(num_recorded: int, advice: str) -> None:
    scores = [row_of(Score.against_guesses("psnr", 20.0, {"noise": 10.0}), victim, 4) for victim in range(2)]
    readings = score_readings(scores, {})
    replies = [SimpleNamespace(client=client) for client in range(num_recorded)]
    recording = Recording(headers=[SimpleNamespace(replies=replies)])  # type: ignore[list-item]
    run = SimpleNamespace(
        readings=readings,
        merged_readings=readings,
        recording=recording,
        findings=[],
        other_attackers=[],
        experiment=None,
        audit=None,
        attack_files=[],
        config=None,
    )
    text = unescape(re.sub("<.*?>", "", ScoresPanel().render(run)))  # type: ignore[arg-type]
    assert advice in text
