"""Metrics are declared once: their facts, what is refused, and what becomes of those of other packages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedsim.base.errors import PluginError
from fedsim.interfaces.metric import (
    describe_metric,
    explain_no_verdict,
    find_example_metrics,
    find_metric,
    hash_metric_code,
    list_metric_faults,
    sort_metrics,
)
from fedsim.plugins import registry
from tests.support.packages import write_package

Install = Callable[..., None]
SOUND = """
from fedsim.interfaces.metric import ExampleMetric, Metric

class Sound(ExampleMetric):
    title = "their error"
    unit = "px"
    higher_is_better = False
    lowest = 0.0
    modalities = frozenset({"image"})

    def measure(self, claimed, true, context):
        return (claimed - true).abs().flatten(1).amax(1)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a stranger's package of this code, with metrics `name = Class`."""

    def install_package(code: str, **entries: str) -> None:
        number = len(list(tmp_path.iterdir()))
        name = re.sub(r"\W", "_", f"stranger_{tmp_path.name}_{number}")
        write_package(tmp_path / name, name, code, {"metrics": entries})
        monkeypatch.syspath_prepend(tmp_path / name)
        registry._entry_points.cache_clear()

    yield install_package
    monkeypatch.undo()
    registry._entry_points.cache_clear()


def test_each_metric_of_ours_loads() -> None:
    assert list_metric_faults() == []
    assert hash_metric_code() == {}


@pytest.mark.parametrize(
    ("name", "label", "higher", "best"),
    [
        ("psnr", "PSNR, dB", True, None),
        ("ssim", "SSIM", True, 1.0),
        ("mse", "MSE", False, 0.0),
        ("lpips", "LPIPS", False, 0.0),
        ("recover_rate", "recover rate", True, 1.0),
        ("false_certificates", "false certificates", False, 0.0),
        ("l_sim", "L_sim", False, 0.0),
        ("zest", "Zest", True, 1.0),
        ("local_mape", "local MAPE, %", False, 0.0),
        ("tpr_at_1_in_1000", "TPR at FPR 0.1 %", True, 1.0),
        ("label_distance", "label distribution, total variation", False, 0.0),
        ("property_client_accuracy", "property of clients, accuracy", True, 1.0),
    ],
)
def test_the_facts_of_metrics_stand_in_one_place(name: str, label: str, higher: bool, best: float | None) -> None:
    metric = find_metric(name)
    assert (metric.label, metric.higher_is_better, metric.best_value) == (label, higher, best)


def test_a_share_lies_between_0_and_1() -> None:
    assert find_metric("local_accuracy").value_range == (0.0, 1.0)  # its base class is bounded below alone
    assert find_metric("local_loss").value_range == (0.0, float("inf"))


def test_images_and_tables_and_texts_have_metrics_of_their_own() -> None:
    images = ["psnr", "ssim", "mse", "lpips", "recovered", "exact"]
    assert list(find_example_metrics("image", is_numeric=True)) == images
    assert list(find_example_metrics("table", is_numeric=True)) == ["mse", "exact"]
    assert list(find_example_metrics("text", is_numeric=False)) == ["recover_rate", "tokens_found", "recovered"]


def test_a_strangers_metric_comes_after_ours_and_has_its_own_facts(install: Install) -> None:
    install(SOUND, their_error="Sound")
    assert list(find_example_metrics("image", is_numeric=True))[-1] == "their_error"
    assert "their_error" not in find_example_metrics("table", is_numeric=True)
    metric = find_metric("their_error")
    assert (metric.label, metric.best_value, metric.value_range) == ("their error, px", 0.0, (0.0, float("inf")))
    assert sort_metrics(["their_error", "exact", "psnr"]) == ["psnr", "exact", "their_error"]
    assert list(hash_metric_code()) == ["their_error"]


def test_the_hash_of_a_strangers_metric_follows_its_code(install: Install) -> None:
    install(SOUND, first="Sound")
    install(SOUND.replace("amax", "mean"), second="Sound")
    hashes = hash_metric_code()
    assert len(set(hashes.values())) == 2


@pytest.mark.parametrize(
    ("line", "changed", "sentence"),
    [
        ("    higher_is_better = False\n", "", "Sound: has no direction; add higher_is_better = True where a higher"),
        ("    higher_is_better = False\n", "    higher_is_better = 0\n", "Sound: has no direction"),
        ('    title = "their error"\n', "", "Sound: has no title; add title = "),
        ('    modalities = frozenset({"image"})\n', "", "Sound: has no modalities; add modalities = frozenset"),
        ("lowest = 0.0", "lowest = 2.0\n    highest = 1.0", "Sound: expected lowest below highest, got 2.0 and 1.0"),
        ("lowest = 0.0", 'evidence = "strong"', "Sound.evidence: expected one of matches, candidates, victims"),
        ("lowest = 0.0", 'evidence = "none"', "Sound: a metric has a meaning just where its evidence is 'none'"),
        ('frozenset({"image"})', '"timeseries"', "Sound: has no modalities; add modalities = frozenset"),
        ("lowest = 0.0", "is_share = True\n    lowest = -1.0", "Sound: a share lies in [0, 1], but it declares -1 to"),
        ('"px"', '"\\x1b[1m"', r"Sound: expected texts without line breaks and escapes, got '\x1b[1m'"),
        (
            'their error"',
            'their\\nerror"',
            r"expected texts without line breaks and escapes, got 'their\nerror'",
        ),
        (
            "lowest = 0.0",
            'explanations = "read it"',
            "explanations: expected a tuple of sentences, got 'read it'",
        ),
        ("def measure", "def measured", "Can't instantiate abstract class Sound"),
        ("(ExampleMetric)", "", "is not a class that derives from fedsim.Metric; correct its entry point"),
        ("import ExampleMetric, Metric", "import Nothing", "does not load: ImportError: cannot import name 'Nothing'"),
    ],
)
def test_a_metric_that_is_not_declared_well_is_one_sentence(
    install: Install, line: str, changed: str, sentence: str
) -> None:
    assert line in SOUND
    install(SOUND.replace(line, changed), their_error="Sound")
    with pytest.raises(PluginError) as refused:
        find_metric("their_error")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("metrics: 'their_error' (stranger_")
    assert "\n" not in str(refused.value)
    # It costs no other metric.
    assert list_metric_faults() == [str(refused.value)]
    assert "their_error" not in find_example_metrics("image", is_numeric=True)
    assert find_metric("psnr").label == "PSNR, dB"


def test_a_name_that_can_be_no_column_is_refused(install: Install) -> None:
    install(SOUND, **{"their-error": "Sound"})
    [fault] = list_metric_faults()
    assert fault.endswith("cannot be a column; name it by small letters, digits and underscores")


def test_a_name_of_ours_stays_ours_and_the_clash_is_said(install: Install) -> None:
    install(SOUND, psnr="Sound", their_error="Sound")
    assert find_metric("psnr").higher_is_better
    assert type(find_example_metrics("image", is_numeric=True)["psnr"]).__name__ == "Psnr"
    [fault] = list_metric_faults()
    assert re.fullmatch(
        r"metrics: 'psnr' is registered by fedsim-curious and stranger_\w+; uninstall one of them", fault
    )
    assert find_metric("their_error").label == "their error, px"


def test_a_name_of_two_strangers_is_refused(install: Install) -> None:
    install(SOUND, their_error="Sound")
    install(SOUND, their_error="Sound")
    with pytest.raises(PluginError, match=r"'their_error' is registered by .* and .*; uninstall one of them"):
        find_metric("their_error")
    assert len(list_metric_faults()) == 1
    assert "their_error" not in find_example_metrics("image", is_numeric=True)


def test_a_metric_that_is_not_installed_is_shown_by_its_name() -> None:
    metric = describe_metric("their_error")
    assert (metric.label, metric.ranks_examples, metric.best_value) == ("their error", False, None)
    assert explain_no_verdict("their_error").startswith("metric 'their_error' is not installed here")
    assert explain_no_verdict("psnr") == ""
    with pytest.raises(PluginError, match=r"metrics: nothing is called 'their_error'"):
        find_metric("their_error")
