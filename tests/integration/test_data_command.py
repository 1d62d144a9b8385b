"""`fedsim data`: what it says, what it draws, and how it fails."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from fedsim.data import Dataset, Examples
from fedsim.data.partitions import Partition
from fedsim.data.partitions.natural import Natural
from fedsim.data.partitions.shares import Dirichlet, Iid
from fedsim.federation.config import Config
from fedsim.federation.federated_data import FederatedData
from fedsim.report.partition_picture import draw_partition
from fedsim.report.partition_summary import PartitionSummary, client_table, dataset_table, load_partition_summary
from tests.support.commands import Call, call_fedsim


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """`fedsim data ...` in an empty working folder, on a terminal of 80 columns, without a data folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSIM_DATA", raising=False)
    return functools.partial(call, "data", columns=80)


@pytest.fixture
def blank_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command draws an empty picture, as drawing a full one takes longer than all else."""
    monkeypatch.setattr("fedsim.report.partition_picture.draw_partition", lambda summary: Figure(figsize=(1, 1)))


def cells(output: str) -> list[list[str]]:
    """The rows of the table of clients."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]


def make_summary(
    kind: str,
    clients: int,
    *,
    names: tuple[str, ...] = (),
    partition: Partition | None = None,
    test_fraction: float = 0.1,
) -> PartitionSummary:
    """20 examples a client: images, rows of a table or a regression, of groups called `names`."""
    draw_from, count = np.random.default_rng(0), 20 * clients
    shape = (1, 8, 6) if kind == "image" else (5,)
    labels = draw_from.normal(size=count).astype(np.float32) if kind == "prices" else draw_from.integers(0, 10, count)
    train = Examples(
        raw=torch.from_numpy(draw_from.random((count, *shape), dtype=np.float32)),
        labels=torch.from_numpy(labels),
        scale=1.0,
        groups=torch.from_numpy(np.arange(count) % len(names)) if names else None,
    )
    dataset = Dataset(
        name=kind,
        train=train,
        test=train,
        num_classes=0 if kind == "prices" else 10,
        source="here",
        licence="free",
        group_names=names,
        target=(1000.0, 50.0) if kind == "prices" else (0.0, 1.0),
    )
    data = FederatedData(
        dataset=dataset, partition=partition or Iid(), clients=clients, seed=0, test_fraction=test_fraction
    )
    return PartitionSummary(config=Config(), data=data, seconds=0.0)


def printed(what: Any) -> str:
    from rich.console import Console

    console = Console(width=80)
    with console.capture() as caught:
        console.print(what)
    return caught.get()


DRAWN_FAST = [("image", 3), ("table", 41), ("prices", 1)]
"""Pictures of few and of many clients, one of each kind."""


# What it says.


@pytest.mark.usefixtures("blank_picture")
def test_a_data_set_is_described_and_its_clients_are_counted(call: Call) -> None:
    result = call("digits", "--set", "partition.test_fraction=0.25", "--set", "federation.clients=4")
    assert result.returncode == 0, result.stderr
    for fact in (
        "images of 1 x 8 x 8",
        "values from 0 to 1",
        "10 classes",
        "1 438 to train, 359 to test",
        "CC BY 4.0 (UCI)",
        "via scikit-learn",
    ):
        assert fact in result.stdout
    assert re.search(r"groups\s+unknown\s", result.stdout)
    assert re.search(r"digits, loaded in \d+\.\d\d s", result.stdout)
    assert "iid, 4 clients, which hold 1 438 of 1 438 training examples" in result.stdout
    rows = cells(result.stdout)
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "smallest", "median", "largest"]
    assert [(int(row[1]), int(row[2])) for row in rows[:4]] == [(270, 90), (270, 90), (269, 90), (269, 90)]
    assert [row[3] for row in rows[:4]] == ["10"] * 4
    assert "all examples of a client, those that it holds out among them" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("blank_picture")
def test_the_table_counts_what_the_clients_of_a_run_hold(call: Call) -> None:
    words = ("partition.name=dirichlet", "partition.alpha=0.2", "federation.seed=9", "federation.clients=6")
    result = call("digits", *(part for word in words for part in ("--set", word)))
    data = load_partition_summary("digits", words).data
    for client, row in enumerate(cells(result.stdout)[:6]):
        counts = data.train(client)[1].bincount()
        share = counts.max().item() / counts.sum().item()
        assert row == [
            str(client), str(int(counts.sum())), "0", str(int((counts > 0).sum())), f"{100 * share:.0f} %"
        ]  # fmt: skip


@pytest.mark.usefixtures("blank_picture")
def test_an_experiment_file_says_which_data_and_clients(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[data]\nname = "digits"\n[partition]\nname = "dirichlet"\nsamples_per_client = 9\n[federation]\nclients = 3\n'
    )
    result = call("mine.toml", "--set", "federation.clients=5")
    assert result.returncode == 0, result.stderr
    assert "dirichlet, 5 clients, which hold 45 of 1 438" in result.stdout
    assert result.stdout.splitlines()[-1] == "picture: runs/data-mine.png"
    assert (tmp_path / "runs" / "data-mine.png").is_file()


@pytest.mark.usefixtures("blank_picture")
def test_many_clients_are_summed_up_in_80_columns(call: Call) -> None:
    result = call("digits", "--set", "federation.clients=300")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = cells(result.stdout)
    assert [row[0] for row in rows] == [*map(str, range(20)), "280 more", "smallest", "median", "largest"]
    assert [row[1] for row in rows[-3:]] == ["4", "5", "5"]


def test_groups_with_long_names_and_markup_stay_in_80_columns() -> None:
    names = ("[bold]THE_LIFE_OF_KING_HENRY_THE_FIFTH_ROLE", "\n", "two\nlines", "x")
    output = printed(client_table(make_summary("table", 4, names=names, partition=Natural())))
    rows = cells(output)
    assert [row[1] for row in rows[:3]] == ["[bold]THE_LIFE_OF_K…", "'\\n'", "'two\\nlines'"]
    assert max(map(len, output.splitlines())) <= 80


def test_a_regression_is_told_in_its_own_unit() -> None:
    holdings = make_summary("prices", 3)
    text = printed(dataset_table(holdings))
    assert "a number (regression); mean 1 000, standard deviation 50" in text
    row = cells(printed(client_table(holdings)))[0]
    targets = np.concatenate([part[1].numpy() for part in (holdings.data.train(0), holdings.data.test(0))])
    assert float(row[3].replace(" ", "")) == pytest.approx(1000 + 50 * targets.mean(), abs=1)
    assert float(row[4]) == pytest.approx(50 * targets.std(), abs=0.01)


@pytest.mark.usefixtures("blank_picture")
def test_who_only_tests_is_counted_apart(call: Call) -> None:
    by_client = ("--set", "partition.test_by=client", "--set", "partition.test_fraction=0.2")
    result = call("digits", "--set", "federation.clients=4", *by_client)
    assert "iid, 4 clients that train and 1 that test" in " ".join(result.stdout.split())
    rows = cells(result.stdout)
    assert [row[1:3] for row in rows] == [
        ["288", "-"], ["288", "-"], ["288", "-"], ["287", "-"], ["-", "287"],
        ["287", "287"], ["288", "287"], ["288", "287"],
    ]  # fmt: skip


@pytest.mark.usefixtures("blank_picture")
def test_natural_groups_are_clients_unless_one_says_otherwise(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fedsim.data.digits import Digits

    names = tuple(f"writer {number}" for number in range(30))
    dataset = make_summary("table", 30, names=names).dataset
    monkeypatch.setattr(Digits, "load", lambda self, folder: dataset)
    assert "natural, 30 clients, which hold 600 of 600" in call("digits").stdout
    assert "natural, 7 clients, which hold 140 of" in call("digits", "--set", "federation.clients=7").stdout
    assert "iid, 10 clients, which" in call("digits", "--set", "partition.name=iid").stdout
    by_client = ("--set", "partition.test_by=client", "--set", "partition.test_fraction=0.1")
    assert "natural, 27 clients that train and 3 that test, which hold 600" in " ".join(
        call("digits", *by_client).stdout.split()
    )
    assert "30 to whom training examples belong by nature, 20 each" in call("digits").stdout
    result = call("digits", "--set", "federation.clients=31")
    assert result.returncode == 2
    assert "31 clients, but 'table' has 30 natural groups" in result.stderr


def test_examples_that_several_hold_are_said_to_be(tmp_path: Path) -> None:
    class Overlapping:
        def assign(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> list[Any]:
            return [np.arange(30)] * clients

    text = " ".join(
        printed(dataset_table(make_summary("table", 3, partition=Overlapping(), test_fraction=0.0))).split()
    )
    assert "3 clients, which hold 30 of 60 training examples, some by several (90 in all)" in text


@pytest.mark.usefixtures("blank_picture")
def test_a_download_is_asked_for_before_the_data_are_read(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import fedsim.data.download as module

    asked: list[tuple[str, Path]] = []
    monkeypatch.setattr(module, "download", lambda name, folder: asked.append((name, folder)))
    assert call("digits", "--download", "--data-dir", tmp_path).returncode == 0
    assert asked == [("digits", tmp_path)]
    assert call("digits", "--data-dir", tmp_path).returncode == 0
    assert len(asked) == 1


# What it draws.


def test_the_picture_is_a_png_where_it_was_asked_for(
    call: Call, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert call("digits").stdout.splitlines()[-1] == "picture: runs/data-digits.png"
    with Image.open(tmp_path / "runs" / "data-digits.png") as image:
        assert image.format == "PNG"
        assert image.width > 1400
        assert np.asarray(image).std() > 10
    request.getfixturevalue("blank_picture")
    assert call("digits", "--out", "deep/er/mine.png").returncode == 0
    assert (tmp_path / "deep" / "er" / "mine.png").is_file()
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["mine.png"]


@pytest.mark.parametrize(
    ("kind", "clients"),
    [
        pytest.param(kind, clients, marks=() if (kind, clients) in DRAWN_FAST else pytest.mark.thorough)
        for kind in ("image", "table", "prices")
        for clients in (1, 3, 40, 41, 539)
    ],
)
def test_nothing_is_cut_off(kind: str, clients: int) -> None:
    names = tuple(f"A_$LONG$_NAME_OF_{number}" for number in range(clients))
    figure = draw_partition(make_summary(kind, clients, names=names, partition=Natural()))
    inside(figure)


def inside(figure: Figure) -> None:
    """Every artist lies within the picture, and the axes beside each other do not overlap."""
    figure.draw_without_rendering()
    box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= width
    assert box.y1 <= height
    shown = [axes.get_tightbbox() for axes in figure.axes if axes.get_label() != "<colorbar>"]
    for place, one in enumerate(shown):
        for other in shown[place + 1 :]:
            assert one is not None
            assert other is not None
            wide = min(one.x1, other.x1) - max(one.x0, other.x0)
            high = min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(wide, high) < 6, (one, other)  # pixels: a label may stand out a little


def test_the_shades_are_the_shares_of_the_classes() -> None:
    holdings = make_summary("table", 6, partition=Dirichlet(alpha=0.3))
    figure = draw_partition(holdings)
    spread, sizes = figure.axes[0], figure.axes[1]
    shades = np.asarray(spread.images[0].get_array())
    for client in range(6):
        labels = torch.cat([holdings.data.train(client)[1], holdings.data.test(client)[1]])
        expected = 100 * labels.bincount(minlength=10).numpy() / len(labels)
        assert shades[client] == pytest.approx(expected)
    widths = [bar.get_width() for bar in sizes.patches]
    assert widths[:6] == [len(holdings.data.train(client)[1]) for client in range(6)]
    assert widths[6:] == [len(holdings.data.test(client)[1]) for client in range(6)]
    assert [axis.get_xlabel() for axis in (spread, sizes)] == ["class", "examples"]
    assert spread.get_ylabel() == "client"
    numbers = {(round(text.get_position()[0]), round(text.get_position()[1])): text.get_text() for text in spread.texts}
    assert numbers == {(c, r): str(holdings.counts[r, c]) for r, c in np.argwhere(holdings.counts)}


def test_the_shades_can_be_told_apart_without_colour() -> None:
    """One hue from light to dark: brightness alone orders the shares."""
    image = draw_partition(make_summary("table", 50)).axes[0].images[0]
    colours = image.get_cmap()(np.linspace(0, 1, 50))[:, :3]
    brightness = colours @ [0.299, 0.587, 0.114]
    assert (np.diff(brightness) < 0).all()


def test_images_in_the_strip_are_those_of_the_client_beside_them() -> None:
    holdings = make_summary("image", 3)
    strip = draw_partition(holdings).axes[-1]
    canvas = np.asarray(strip.images[0].get_array())
    assert [label.get_text() for label in strip.get_yticklabels()] == ["0", "1", "2"]
    for client in range(3):
        first = holdings.data.train(client)[0][0, 0].numpy()
        top = client * 9  # a gap of one pixel
        assert canvas[top : top + 8, :6, 0] == pytest.approx(first)


def test_histograms_of_a_regression_have_one_height_and_the_same_bins() -> None:
    holdings = make_summary("prices", 3)
    axes = draw_partition(holdings).axes[0]
    steps = [patch.get_data() for patch in axes.patches]
    assert len(steps) == 3
    for client, step in enumerate(steps):
        assert np.array_equal(step.edges, steps[0].edges)
        expected = np.histogram(holdings.targets(holdings.clients[client].all_indices), step.edges)[0]
        drawn = client + 0.45 - step.values
        assert drawn / drawn.max() == pytest.approx(expected / expected.max())
    assert axes.get_xlabel() == "target"


# How it fails.


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["digitz"], "datasets: nothing is called 'digitz', did you mean 'digits'?"),
        (["none.toml"], "none.toml: cannot be read (No such file or directory)"),
        (["mnist"], "data: 'mnist' needs a data folder; give --data-dir DIR or set FEDSIM_DATA"),
        (["mnist", "--download"], "data: a download needs a data folder to go to; give --data-dir DIR or set"),
        (["mnist", "--data-dir", "nowhere"], "/nowhere does not exist; give --data-dir DIR"),
        (["digits", "--set", "data.name=mnist"], "--set data.name=mnist: the data set is 'digits' already"),
        (["digits", "--set", "data.sise=3"], "data.sise: unknown setting for 'digits', known: targets"),
        (["digits", "--set", "data=3"], "--set: data: "),
        (["digits", "--set", "partition=3"], "--set: partition: "),
        (["digits", "--set", "federation=3"], "--set: federation: "),
        (["digits", "--set", "federation.client=3"], "unknown key, did you mean 'clients'?"),
        (["digits", "--set", "partition.name=dirichle"], "nothing is called 'dirichle', did you mean 'dirichlet'?"),
        (["digits", "--set", "partition.name=natural"], "the owners of the examples of 'digits' are unknown"),
        (["digits", "--set", "partition.name=index-file"], "partition.path: index-file needs a file, which is not set"),
        (["digits", "--set", "federation.clients=1439"], "1439 clients for 1438 examples; lower it"),
        (["digits", "--out", "picture.jpg"], "--out picture.jpg: the picture is a PNG; name a file that ends in .png"),
        (["digits", "--out", "taken/mine.png"], "--out taken/mine.png: cannot be written (File exists); name another"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_is_one_sentence(call: Call, tmp_path: Path, words: list[str], complaint: str) -> None:
    (tmp_path / "taken").write_text("a file")
    result = call(*words)
    assert result.returncode == 2, result.stdout + result.stderr
    assert complaint in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not list(tmp_path.glob("**/*.png"))


def test_partitions_are_listed_and_shown(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["list", "partitions"], ["show", "quantity-skew"]):
        assert not call_fedsim(*words).returncode
    output = capfd.readouterr().out
    assert "does not load" not in output
    for name in ("natural", "pathological", "quantity-skew", "adult-by-age", "att-faces-by-person", "index-file"):
        assert re.search(rf"^{name} +\S", output, re.MULTILINE)
    assert "growth" in output
