"""LEAF's format, LEAF's synthetic data and Reuters R8."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.base.errors import ConfigError, DataError
from fedsim.data import Dataset
from fedsim.data.leaf import Femnist, Leaf
from fedsim.data.leaf_files import LETTERS
from fedsim.data.leaf_synthetic import LeafSynthetic
from fedsim.data.reuters import ReutersR8
from tests.support.data_folder import find_data_folder

# LEAF's format.

Users = dict[str, tuple[list[Any], list[Any]]]


def content(users: Users) -> dict[str, Any]:
    return {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }


def write(folder: Path, train: Users | str, test: Users | str, inner: str = "data") -> Path:
    for part, users in (("train", train), ("test", test)):
        home = folder / "leaf" / "task" / inner / part
        home.mkdir(parents=True, exist_ok=True)
        (home / "all_data_0.json").write_text(users if isinstance(users, str) else json.dumps(content(users)))
    return folder


NUMBERS: Users = {"ann": ([[0.5, 2, 1e-3], [-1, 0, 3]], [0, 2]), "bob": ([[4, 5, 6.0]], [1.0])}
OTHERS: Users = {"bob": ([[1, 1, 1]], [1]), "cy": ([[7, -8, 9]], [0])}


@pytest.mark.parametrize("inner", ["data", "."])
@pytest.mark.parametrize("path", ["task", "leaf/task"])
def test_rows_of_numbers_become_a_table_as_they_are(tmp_path: Path, inner: str, path: str) -> None:
    dataset = Leaf(path=path).load(write(tmp_path, NUMBERS, OTHERS, inner))
    assert dataset.train.inputs().tolist() == [[0.5, 2, pytest.approx(1e-3)], [-1, 0, 3], [4, 5, 6]]
    assert dataset.test.inputs().tolist() == [[1, 1, 1], [7, -8, 9]]
    assert dataset.train.labels.tolist() == [0, 2, 1]
    assert (dataset.num_classes, dataset.value_range) == (3, (-8.0, 9.0))
    assert dataset.column("x1").values(dataset.train.inputs()).tolist() == [2, 0, 5]


def test_users_of_both_parts_are_groups_with_one_number_each(tmp_path: Path) -> None:
    dataset = Leaf(path=str(write(tmp_path, NUMBERS, OTHERS) / "leaf" / "task")).load(None)
    assert dataset.group_names == ("ann", "bob", "cy")
    assert dataset.train.groups is not None
    assert dataset.test.groups is not None
    assert (dataset.train.groups.tolist(), dataset.test.groups.tolist()) == ([0, 0, 1], [1, 2])


def test_several_files_are_one_task_and_users_without_examples_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, NUMBERS, OTHERS)
    more: Users = {"dee": ([[0, 0, 1]], [0]), "eve": ([], []), "ann": ([[9, 9, 9]], [1])}
    (tmp_path / "leaf/task/data/train/all_data_1.json").write_text(json.dumps(content(more)))
    dataset = Leaf(path="task").load(tmp_path)
    assert dataset.group_names == ("ann", "bob", "dee", "cy")
    assert dataset.train.groups is not None
    assert dataset.train.groups.tolist() == [0, 0, 1, 2, 0]


def test_squares_in_the_unit_range_are_images_unless_told_otherwise(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((4, 64)).round(3)
    write(tmp_path, {"ann": (rows[:3].tolist(), [0, 1, 1])}, {"ann": (rows[3:].tolist(), [0])})
    image = Leaf(path="task").load(tmp_path)
    assert image.task.input_shape == (1, 8, 8)
    assert image.value_range == (0.0, 1.0)
    assert not image.columns
    assert torch.equal(image.train.inputs().flatten(1), torch.tensor(rows[:3], dtype=torch.float32))
    assert Leaf(path="task", shape=(64,)).load(tmp_path).task.input_shape == (64,)
    assert Leaf(path="task", shape=(4, 4, 4), num_classes=5).load(tmp_path).task.input_shape == (4, 4, 4)
    write(tmp_path, {"ann": ((2 * rows[:3]).tolist(), [0, 1, 1])}, {"ann": (rows[3:].tolist(), [0])})
    assert Leaf(path="task").load(tmp_path).task.input_shape == (64,)
    with pytest.raises(ConfigError, match=r"shape: \[1, 7, 7\] is for 49 numbers, but .* has 64"):
        Leaf(path="task", shape=(1, 7, 7)).load(tmp_path)


def test_texts_are_leafs_eighty_characters(tmp_path: Path) -> None:
    write(
        tmp_path, {"LEAR": (["Nothing will", "come of noth"], ["\n", "i"])}, {"FOOL": (["[aside] {}}"[:6] * 2], ["}"])}
    )
    dataset = Leaf(path="task").load(tmp_path)
    assert len(LETTERS) == len(set(LETTERS)) == dataset.vocabulary == dataset.num_classes == 80
    spelled = ["".join(dataset.tokens[token] for token in row) for row in dataset.train.inputs().tolist()]
    assert spelled == ["Nothing will", "come of noth"]
    assert [dataset.class_names[label] for label in dataset.train.labels.tolist()] == ["\n", "i"]
    assert dataset.test.labels.tolist() == [79]
    assert (dataset.task.modality, dataset.task.input_shape, dataset.train.scale) == ("text", (12,), None)


def test_texts_may_have_classes_for_labels(tmp_path: Path) -> None:
    dataset = Leaf(path="task").load(write(tmp_path, {"a": (["ab", "cd"], [0, 3])}, {"a": (["ef"], [1])}))
    assert (dataset.vocabulary, dataset.num_classes, dataset.class_names) == (80, 4, ())
    with pytest.raises(ConfigError, match="shape: expected none for texts"):
        Leaf(path="task", shape=(2,)).load(tmp_path)


def broken(**changes: Any) -> str:
    return json.dumps({key: value for key, value in {**content(NUMBERS), **changes}.items() if value is not None})


def user(x: Any, y: Any) -> str:
    return json.dumps(content({"ann": (x, y)}))


BAD: dict[str, tuple[str, str]] = {
    "truncated": (json.dumps(content(NUMBERS))[:-30], "is no JSON text, or not as LEAF writes it"),
    "not an object": ("[1, 2]", "has no users, expected what LEAF writes"),
    "no user_data": (broken(user_data=None), "has no user_data, expected what LEAF writes"),
    "user without data": (broken(users=["ann", "bob", "dan"], num_samples=[2, 1, 1]), "user 'dan' has no user_data"),
    "data without user": (broken(users=["ann"], num_samples=[2]), "user_data holds 'bob', who is not among users"),
    "too few sizes": (broken(num_samples=[2]), "names 2 users but 1 num_samples"),
    "other size": (broken(num_samples=[2, 5]), "user 'bob': has 1 examples, but num_samples says 5"),
    "no x": (broken(users=["a"], num_samples=[1], user_data={"a": {"y": [1]}}), "user 'a': has no list x"),
    "x and y": (user([[1], [2]], [0]), "user 'ann': has 2 x but 1 y"),
    "nobody": (broken(users=[], num_samples=[], user_data={}), "holds no example"),
    "lengths": (user([[1, 2], [1, 2, 3]], [0, 1]), "user 'ann': an x is of length 3, expected 2"),
    "kinds": (user([[1, 2], "ab"], [0, 1]), "user 'ann': an x is a str, expected a list of numbers"),
    "other kinds": (user(["ab", [1, 2]], [0, 1]), "user 'ann': an x is a list, expected a text"),
    "tweets": (user([["4", "Mon", "@x", "hello"]], [1]), "user 'ann': x is a list of words or lists, which is not"),
    "nested": (user([[[1, 2], [3, 4]]], [1]), "user 'ann': x is a list of words or lists, which is not supported"),
    "images": (user(["0001.jpg"], [1]), "user 'ann': x names an image .0001.jpg., which is not supported"),
    "number": (user([3.5], [1]), "user 'ann': x is 3.5, expected a list of numbers or a text"),
    "empty x": (user([[]], [1]), r"user 'ann': x is \[\], expected a list of numbers or a text"),
    "no number": (user([[1, 2], [1, "b"]], [0, 1]), "user 'ann': x holds something that is not a number"),
    "nan": (user([[1, 2], [1, float("nan")]], [0, 1]), "user 'ann': x holds NaN, null or an infinite number"),
    "null": (user([[1, 2], [1, None]], [0, 1]), "user 'ann': x holds NaN, null or an infinite number"),
    "huge": (user([[1, 2], [1, 1e300]], [0, 1]), "user 'ann': x holds NaN, null or an infinite number"),
    "astronomical": (user([[1, 2], [1, 10**400]], [0, 1]), "user 'ann': x holds something that is not a number"),
    "large label": (user([[1, 2], [1, 1]], [0, 10**30]), "user 'ann': y is 10*, expected a class"),
    "listed twice": (broken(users=["ann", "ann"]), "names user 'ann' twice, whose examples would count twice"),
    "data listed twice": (
        '{"users": ["ann"], "num_samples": [1], "user_data": '
        '{"ann": {"x": [[1, 2]], "y": [0]}, "ann": {"x": [[3, 4]], "y": [1]}}}',
        "an object has the key 'ann' twice",
    ),
    "true label": (user([[1, 2], [1, 1]], [0, True]), "user 'ann': y is True, expected a class"),
    "deep": ("[" * 100_000, "is no JSON text, or not as LEAF writes it"),
    "numbered user": (broken(users=[1, 2]), "users holds 1, expected names in quotes"),
    "bare data": (broken(users=["a"], num_samples=[1], user_data={"a": [1]}), "user 'a': has no list x"),
    "half": (user([[1, 2], [1, 1]], [0, 1.5]), "user 'ann': y is 1.5, expected a class, a whole number"),
    "nan label": (user([[1, 2], [1, 1]], [0, float("nan")]), "user 'ann': y is nan, expected a class"),
    "infinite label": (user([[1, 2], [1, 1]], [0, float("inf")]), "user 'ann': y is inf, expected a class"),
    "negative": (user([[1, 2], [1, 1]], [0, -1]), "user 'ann': y is -1, expected a class, a whole number from 0 on"),
    "vector label": (user([[1, 2]], [[0, 1]]), r"user 'ann': y is \[0, 1\], expected a class"),
    "beyond": (user([[1, 2], [1, 1]], [0, 7]), r"user 'ann': y is 7, expected less than num_classes \(7\)"),
    "words": (user(["ab", "cd"], ["e", "fg"]), "user 'ann': y is 'fg', expected one character"),
    "foreign": (user(["ab", "c$"], ["e", "f"]), r"user 'ann': the text holds '\$', expected only LEAF's 80"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_leaf_would_not_write_is_an_error_of_one_sentence(name: str, tmp_path: Path) -> None:
    text, sentence = BAD[name]
    with pytest.raises(DataError, match=sentence) as caught:
        Leaf(path="task", num_classes=7).load(write(tmp_path, text, NUMBERS))
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")
    assert str(tmp_path / "leaf" / "task") in str(caught.value)


def test_a_user_whose_file_is_there_twice_does_not_count_twice(tmp_path: Path) -> None:
    folder = write(tmp_path, NUMBERS, OTHERS)
    home = folder / "leaf" / "task" / "data" / "train"
    (home / "copy.json").write_text((home / "all_data_0.json").read_text())
    with pytest.raises(DataError, match=r"copy.json: user 'ann': has the same examples in all_data_0.json, and they"):
        Leaf(path="task").load(folder)
    (home / "copy.json").unlink()
    os.mkfifo(home / "copy.json")  # which is not a file, and would be waited for
    assert len(Leaf(path="task").load(folder).train) == 3


def test_the_test_part_has_to_be_like_the_training_part(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"test.*user 'zed': an x is of length 2, expected 3"):
        Leaf(path="task").load(write(tmp_path, NUMBERS, {"zed": ([[1, 2]], [0])}))
    with pytest.raises(DataError, match=r"test.*user 'zed': an x is a str, expected a list of numbers"):
        Leaf(path="task").load(write(tmp_path, NUMBERS, {"zed": (["abc"], ["d"])}))
    with pytest.raises(DataError, match="each y is 0, expected at least two classes"):
        Leaf(path="task").load(write(tmp_path, {"a": ([[1.0]], [0])}, {"a": ([[2.0]], [0])}))


def test_a_label_that_would_make_a_billion_classes_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a y is 1000000000, which would make more than 100000 classes; correct"):
        Leaf(path="task").load(write(tmp_path, NUMBERS, {"zed": ([[1, 2, 3]], [10**9])}))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'leaf' needs a path"):
        Leaf().load(tmp_path)
    with pytest.raises(DataError, match=r"task/data/train: no such folder; correct data\.path"):
        Leaf(path="task").load(tmp_path)
    write(tmp_path, NUMBERS, OTHERS)
    for part in ("test", "train"):
        (tmp_path / "leaf" / "task" / "data" / part / "all_data_0.json").unlink()
        with pytest.raises(DataError, match=rf"data/{part}: holds no \.json file, expected the {part} part"):
            Leaf(path="task").load(tmp_path)
    with pytest.raises(
        DataError, match=r"femnist/data/train: no such folder; .*preprocess\.sh writes data/femnist/data"
    ):
        Femnist().load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"shape": (28, 28)}, r"shape: expected \[channels, height, width\] or \[features\], got \[28, 28\]"),
        ({"shape": (1, 0, 3)}, r"shape.1: expected at least 1, got 0"),
        ({"num_classes": 1}, "num_classes: expected at least 2, got 1"),
    ],
)
def test_settings_that_no_task_has_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Leaf(**settings)


@pytest.mark.thorough
def test_femnist_digits_are_dark_on_white_and_have_sixty_two_classes() -> None:
    folder = find_data_folder("leaf/femnist-digits")
    dataset = Femnist(folder="femnist-digits").load(folder)
    assert (len(dataset.train), len(dataset.test), dataset.num_classes) == (5393, 604, 62)
    assert dataset.class_names[9:12] == ("9", "A", "B")
    assert dataset.class_names[61] == "z"
    assert dataset.train.inputs()[:, 0, 0, 0].median() == 1.0
    assert dataset.train.inputs().mean() > 0.9
    file = next((folder / "leaf/femnist-digits/data/test").glob("*.json"))
    raw = json.loads(file.read_text())
    name = raw["users"][7]
    assert dataset.test.groups is not None
    own = dataset.test.groups == dataset.group_names.index(name)
    assert dataset.test.labels[own].tolist() == raw["user_data"][name]["y"]
    expected = torch.tensor(raw["user_data"][name]["x"]).reshape(-1, 1, 28, 28)
    assert torch.equal(dataset.test.inputs()[own], expected)


@pytest.mark.thorough
def test_shakespeare_and_mnist_by_writer_are_what_their_files_say() -> None:
    roles = Leaf(path="shakespeare").load(find_data_folder("leaf/shakespeare"))
    assert (len(roles.train), len(roles.test), len(roles.group_names)) == (4920, 600, 30)
    text = "".join(roles.tokens[token] for token in roles.train.inputs()[0].tolist())
    assert text.startswith("Now is the winter of our discontent Made glorious summer")
    assert roles.group_names[0] == "GLOUCESTER"
    writers = Leaf(path="mnist-by-writer").load(find_data_folder("leaf/mnist-by-writer"))
    assert (len(writers.train), len(writers.test), len(writers.group_names)) == (1971, 229, 20)
    assert writers.task.input_shape == (1, 28, 28)
    with pytest.raises(DataError, match=r"synthetic_1_1/data/train: no such folder"):
        Leaf(path="synthetic_1_1").load(find_data_folder("leaf/synthetic_1_1"))


# LEAF's synthetic data.

SMALL: dict[str, Any] = {"features": 6, "classes": 3, "clusters": 2, "clients": 4, "examples_per_client": 40}


def rows_of(dataset: Dataset, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert dataset.train.groups is not None
    own = dataset.train.groups == client
    return dataset.train.raw[own], dataset.train.labels[own]


def test_synthetic_defaults_are_lmras() -> None:
    dataset = LeafSynthetic().load(None)
    assert dataset.task.input_shape == (100,)
    assert dataset.train.groups is not None
    assert dataset.train.groups.bincount().tolist() == [2000] * 10
    assert dataset.test.groups is not None
    assert dataset.test.groups.bincount().tolist() == [500] * 10
    low, high = dataset.value_range
    both = torch.cat([dataset.train.inputs(), dataset.test.inputs()])
    assert (both.min().item(), both.max().item()) == (low, high)


def test_more_clients_or_examples_leave_those_there_are() -> None:
    first = LeafSynthetic(**SMALL).load(None)
    more = LeafSynthetic(**{**SMALL, "clients": 9, "examples_per_client": 70}).load(None)
    for client in range(4):
        for part, longer in zip(rows_of(first, client), rows_of(more, client), strict=True):
            assert torch.equal(part, longer[:40])
    assert not torch.equal(rows_of(first, 0)[0], rows_of(first, 1)[0])
    other = LeafSynthetic(**SMALL, seed=1).load(None)
    assert not torch.equal(rows_of(first, 0)[0], rows_of(other, 0)[0])
    test = {tuple(row) for row in first.test.raw.tolist()}
    assert not test & {tuple(row) for row in first.train.raw.tolist()}


@pytest.mark.parametrize("decay", [-1.2, 2.0])
def test_features_vary_around_their_centres_as_the_paper_says(decay: float) -> None:
    plugin = LeafSynthetic(features=8, clients=3, examples_per_client=20_000, decay=decay)
    dataset = plugin.load(None)
    for client in range(3):
        rows = rows_of(dataset, client)[0].double()
        expected = torch.arange(1, 9, dtype=torch.float64) ** decay
        assert torch.allclose(rows.var(0), expected, rtol=0.06)
        correlation = torch.corrcoef(rows.T) - torch.eye(8)
        assert correlation.abs().max() < 0.05


def test_centres_share_a_level_a_client_that_differs_between_clients() -> None:
    """v ~ N(B, 1) with B ~ N(0, 1): a client's mean varies with deviation 1, features within a client too."""
    dataset = LeafSynthetic(features=200, clients=300, examples_per_client=1, decay=-10).load(None)
    raw = dataset.train.raw[:, 3:].double()  # variances of at most 4^-10: examples are their centres
    assert raw.mean(1).std().item() == pytest.approx(1, abs=0.15)
    assert raw.std(1).mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.thorough
def test_labels_are_those_of_a_linear_model_a_client() -> None:
    """Without noise a linear classifier separates each client's examples, and clients of one cluster agree."""
    from sklearn.linear_model import LogisticRegression

    settings: dict[str, Any] = {**SMALL, "clusters": 1, "decay": 0.5, "examples_per_client": 3000, "noise": 0.0}
    dataset = LeafSynthetic(**settings).load(None)
    x, y = dataset.train.raw.numpy(), dataset.train.labels.numpy()
    joint = LogisticRegression(max_iter=2000, C=100).fit(x, y)
    assert joint.score(dataset.test.raw.numpy(), dataset.test.labels.numpy()) > 0.9
    clusters = LeafSynthetic(**{**settings, "clusters": 5, "clients": 12}).load(None)
    x, y = clusters.train.raw.numpy(), clusters.train.labels.numpy()
    assert LogisticRegression(max_iter=2000, C=100).fit(x, y).score(x, y) < 0.85, "clusters have models of their own"
    for client in range(12):
        rows, labels = rows_of(clusters, client)
        if len(set(labels.tolist())) > 1:
            own = LogisticRegression(max_iter=5000, C=1e4).fit(rows.numpy(), labels.numpy())
            assert own.score(rows.numpy(), labels.numpy()) > 0.98


@pytest.mark.thorough
def test_the_majority_class_of_a_client_is_as_large_as_in_another_generator() -> None:
    """The paper's model written a second time, with one generator and full covariance, over several seeds."""

    def reference(rng: np.random.Generator, d: int, classes: int, clusters: int, clients: int, n: int) -> float:
        q = rng.standard_normal((d + 1, classes, clusters))
        means = [rng.normal(rng.normal(), 1, clusters) for _ in range(clusters)]
        shares = []
        for _ in range(clients):
            side = rng.normal(means[rng.integers(clusters)], 0.1)
            level = rng.normal()
            centre = level + rng.standard_normal(d)
            x = rng.multivariate_normal(centre, np.diag(np.arange(1, d + 1) ** -1.2), n)
            logits = np.einsum("nd,dck,k->nc", np.c_[np.ones(n), x], q, side) + rng.normal(0, 0.1, (n, classes))
            shares.append(np.bincount(logits.argmax(1)).max() / n)
        return float(np.mean(shares))

    expected = np.mean([reference(np.random.default_rng(seed), 10, 5, 5, 30, 100) for seed in range(12)])
    ours = []
    for seed in range(12):
        made = LeafSynthetic(features=10, clients=30, examples_per_client=100, seed=seed).load(None)
        ours += [(rows_of(made, client)[1].bincount().max() / 100).item() for client in range(30)]
    assert np.mean(ours) == pytest.approx(expected, abs=0.06)


def test_noise_changes_labels_and_nothing_else() -> None:
    calm, loud = (LeafSynthetic(**SMALL, noise=noise).load(None) for noise in (0.0, 50.0))
    assert torch.equal(calm.train.raw, loud.train.raw)
    assert (calm.train.labels != loud.train.labels).float().mean() > 0.4


def test_leafs_sizes_are_from_5_to_1000_and_mostly_small() -> None:
    dataset = LeafSynthetic(**{**SMALL, "features": 2, "clients": 400, "examples_per_client": None}).load(None)
    assert dataset.train.groups is not None
    assert dataset.test.groups is not None
    sizes, tests = dataset.train.groups.bincount(), dataset.test.groups.bincount()
    assert (sizes.min() >= 5, sizes.max()) == (True, 1000)
    assert sizes.double().median().item() == pytest.approx(5 + np.exp(3), rel=0.35)
    assert torch.equal(tests, (sizes + 3) // 4)


def test_the_sensitive_attribute_is_a_coin_that_decides_labels_and_can_be_read_off_nothing_else() -> None:
    settings: dict[str, Any] = {**SMALL, "examples_per_client": 4000, "decay": 2.0}
    without, dataset = LeafSynthetic(**settings).load(None), LeafSynthetic(**settings, sensitive=True).load(None)
    column = dataset.column("sensitive")
    inputs = dataset.train.inputs()
    attribute = column.values(inputs)
    assert column.categories == ("0", "1")
    assert dataset.task.input_shape == (8,)
    assert inputs[:, column.features].sum(1).eq(1).all()
    assert attribute.double().mean().item() == pytest.approx(0.5, abs=0.02)
    others = torch.cat([inputs[:, :6].T, attribute[None]]).double()
    assert torch.equal(inputs[:, :6], without.train.inputs())
    assert torch.corrcoef(others)[-1, :-1].abs().max() < 0.03
    unchanged = dataset.train.labels == without.train.labels
    assert unchanged[attribute == 0].all(), "0 adds nothing"
    assert unchanged[attribute == 1].double().mean() < 0.9


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"features": 0}, "features: expected at least 1, got 0"),
        ({"classes": 1}, "classes: expected at least 2, got 1"),
        ({"clusters": 0}, "clusters: expected at least 1, got 0"),
        ({"clients": 0}, "clients: expected at least 1, got 0"),
        ({"examples_per_client": 0}, "examples_per_client: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected at least 0, got -1"),
        ({"noise": float("nan")}, "noise: expected a finite value, got nan"),
        ({"decay": float("inf")}, "decay: expected at most 10, got inf"),
    ],
)
def test_synthetic_settings_that_make_no_sense_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        LeafSynthetic(**settings)


# Reuters.


def write_r8(folder: Path, train: str | bytes, test: str = "acq\tbuys all\n") -> Path:
    (folder / "r8").mkdir(exist_ok=True)
    for part, text in (("train", train), ("test", test)):
        path = folder / "r8" / f"r8-{part}-all-terms.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def test_words_are_numbered_by_how_often_the_training_texts_use_them(tmp_path: Path) -> None:
    train = "earn\tNet net profit net up\nship\tport strike up \nearn\tprofit up net one two three four net\n"
    dataset = ReutersR8(length=4, vocabulary=6).load(write_r8(tmp_path, train, "ship\tnet unheard port\n"))
    assert dataset.tokens == ("<pad>", "<unk>", "net", "up", "profit", "four")
    assert dataset.train.inputs().tolist() == [[2, 2, 4, 2], [1, 1, 3, 0], [4, 3, 2, 1]]
    assert dataset.test.inputs().tolist() == [[2, 1, 1, 0]]
    assert [dataset.class_names[label] for label in dataset.train.labels.tolist()] == ["earn", "ship", "earn"]
    assert dataset.train.inputs().dtype == torch.int64
    assert ReutersR8(vocabulary=9999).load(tmp_path).vocabulary == len(ReutersR8().load(tmp_path).tokens) == 11


@pytest.mark.thorough
def test_r8_has_the_published_counts_and_the_first_text_of_the_paper() -> None:
    folder = find_data_folder("r8/r8-train-all-terms.txt")
    dataset = ReutersR8(length=31).load(folder)
    assert (len(dataset.train), len(dataset.test), dataset.vocabulary) == (5485, 2189, 5000)
    counts = dict(zip(dataset.class_names, dataset.train.labels.bincount().tolist(), strict=True))
    assert counts == {
        **{"acq": 1596, "crude": 253, "earn": 2840, "grain": 41},
        **{"interest": 190, "money-fx": 206, "ship": 108, "trade": 251},
    }
    first = [dataset.tokens[token] for token in dataset.train.inputs()[0].tolist()]
    # Table VIII of TGIAs-RO; what is rare is unknown.
    text = "champion products ch approves stock split champion products inc said its board of directors approved a two "
    text += "for one stock split of its common shares for shareholders of record as of"
    assert len(first) == len(text.split()) == 31
    assert {a for a, b in zip(first, text.split(), strict=True) if a != b} <= {"<unk>"}
    assert first.count("<unk>") <= 4
    words = Counter((folder / "r8" / "r8-train-all-terms.txt").read_text().replace("\t", " ").split())
    assert words[dataset.tokens[2]] == max(words.values())


BAD_R8: dict[str, tuple[str | bytes, str]] = {
    "no tab": ("earn\tnet\nearn net\n", "line 2 is not a class, tab and text"),
    "no text": ("earn\t \n", "line 1 is not a class, tab and text"),
    "other class": ("cocoa\tbeans\n", "line 1 is of class 'cocoa', expected one of acq, crude"),
    "empty": ("", "is empty; get the file again"),
    "not UTF-8": (b"earn\t\xff\xfe\n", "is no UTF-8 text .byte 5."),
}


@pytest.mark.parametrize("name", BAD_R8)
def test_a_damaged_r8_file_is_an_error_of_one_sentence(name: str, tmp_path: Path) -> None:
    text, sentence = BAD_R8[name]
    with pytest.raises(DataError, match=sentence) as caught:
        ReutersR8().load(write_r8(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert "r8-train-all-terms.txt" in str(caught.value)


def test_r8_settings_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="length: expected at least 1, got 0"):
        ReutersR8(length=0)
    with pytest.raises(ConfigError, match="vocabulary: expected a value above 2, got 2"):
        ReutersR8(vocabulary=2)
    with pytest.raises(DataError, match=r"r8-train-all-terms\.txt: no such file; get the R8 'all terms' files"):
        ReutersR8().load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"examples_per_client": 10**12},
            "data: 10000000000000 examples of 100 features take 20000000.0 GB, more than",
        ),
        ({"clients": 10**12, "examples_per_client": None}, "data: 5000000000000 examples of 100 features take"),
        ({"clusters": 10**12}, "data: features x classes x clusters take 4040000.0 GB, more than the"),
    ],
)
def test_leaf_synthetic_data_beyond_the_memory_are_refused_before_any_is_drawn(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LeafSynthetic(**settings).load(None)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith("of memory here; lower one of them")


def test_texts_beyond_the_memory_are_refused_before_they_are_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.length: 2 texts of 1000000000000 words take 8000.0 GB, more"):
        ReutersR8(length=10**12).load(write_r8(tmp_path, "earn\tnet\n"))
