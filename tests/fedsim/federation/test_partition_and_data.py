"""Data sets and who holds what of them."""

from __future__ import annotations

import gzip
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsim.base.errors import ConfigError, DataError
from fedsim.data import Column, Dataset, Examples
from fedsim.data.idx import Mnist
from fedsim.data.partitions import Indices
from fedsim.data.partitions.shares import Dirichlet, Iid
from fedsim.federation.federated_data import _BYTES_PER_TENSOR, FederatedData


def shared(digits: Dataset, **kwargs: Any) -> FederatedData:
    return FederatedData(**{"dataset": digits, "partition": Iid(), "clients": 5, "seed": 3, **kwargs})


# Digits.


def test_digits_are_real_and_public_without_a_download(digits: Dataset) -> None:
    assert (len(digits.train), len(digits.test)) == (1438, 359)
    assert digits.task.input_shape == (1, 8, 8)
    assert digits.num_classes == 10
    assert set(digits.train.labels.tolist()) == set(digits.test.labels.tolist()) == set(range(10))
    inputs = digits.train.inputs()
    assert inputs.dtype == torch.float32
    assert (inputs.min().item(), inputs.max().item()) == (0.0, 1.0)


def test_no_test_example_is_a_training_example(digits: Dataset) -> None:
    train = {tuple(row) for row in digits.train.raw.flatten(1).tolist()}
    test = {tuple(row) for row in digits.test.raw.flatten(1).tolist()}
    assert not train & test


def test_moments_are_those_of_the_training_inputs(digits: Dataset) -> None:
    mean, std = digits.moments
    inputs = digits.train.inputs()
    assert mean.tolist() == pytest.approx([inputs.mean().item()], rel=1e-5)
    assert std.tolist() == pytest.approx([inputs.std().item()], rel=1e-5)


def test_a_channel_without_any_contrast_is_not_divided_by_zero() -> None:
    examples = Examples(raw=torch.full((4, 2, 3, 3), 7, dtype=torch.uint8), labels=torch.zeros(4).long(), scale=1 / 255)
    flat = Dataset(name="flat", train=examples, test=examples, num_classes=1, source="", licence="")
    data = shared(flat, clients=2)
    assert torch.isfinite(data.to_model(examples.inputs())).all()


def test_features_are_standardised_in_whatever_unit_they_are() -> None:
    inputs = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    inputs[:30, 2] = 0.5  # never differs while clients train
    sent = []
    for unit in (2.0, 1e-6):
        parts = [
            Examples(raw=unit * rows, labels=torch.zeros(len(rows)).long(), scale=1.0) for rows in inputs.split(30)
        ]
        table = Dataset(
            name="t", train=parts[0], test=parts[1], num_classes=2, source="", licence="", value_range=(0.0, unit)
        )
        data = shared(table, clients=2)
        sent.append(data.to_model(torch.cat([part.inputs() for part in parts])))
    assert torch.allclose(sent[0], sent[1], rtol=1e-3, atol=1e-5)
    assert sent[1][:30, :2].std(0).tolist() == pytest.approx([1, 1], rel=1e-3)
    assert sent[1].abs().max() < 5


# MNIST, from files in LeCun's format.


def idx(array: np.ndarray[Any, Any], magic: int) -> bytes:
    return b"".join(int(n).to_bytes(4, "big") for n in (magic, *array.shape)) + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, packed: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    home = folder / "MNIST" / "raw"
    home.mkdir(parents=True)
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (6, 28, 28)), rng.integers(0, 10, 6)
    for stem in ("train", "t10k"):
        for kind, array, magic in (("images-idx3", images, 2051), ("labels-idx1", labels, 2049)):
            name, raw = f"{stem}-{kind}-ubyte", idx(array, magic)
            if packed:
                (home / f"{name}.gz").write_bytes(gzip.compress(raw))
            else:
                (home / name).write_bytes(raw)
    list_sums(folder)
    return images, labels


def list_sums(folder: Path) -> None:
    """Say that the files are meant to be as they are, though they are not the official ones."""
    home = folder / "MNIST" / "raw"
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  MNIST/raw/{p.name}\n" for p in sorted(home.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_from_torchvisions_layout(tmp_path: Path, packed: bool) -> None:
    images, labels = write_mnist(tmp_path, packed)
    data = Mnist().load(tmp_path)
    assert data.task.input_shape == (1, 28, 28)
    assert np.array_equal(data.train.raw[:, 0].numpy(), images)
    assert data.test.labels.tolist() == labels.tolist()
    assert data.train.inputs().max().item() <= 1.0


def test_mnist_without_a_folder_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'mnist' needs a data folder; give --data-dir DIR or set FEDSIM_DATA"):
        Mnist().load(None)
    with pytest.raises(DataError, match="does not exist"):
        Mnist().load(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte \(or .*\.gz\): no such file; .*--download"):
        Mnist().load(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("damage", ["empty", "cut", "head", "magic", "long"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str, packed: bool) -> None:
    write_mnist(tmp_path, packed)
    path = tmp_path / "MNIST" / "raw" / f"train-images-idx3-ubyte{'.gz' if packed else ''}"
    raw = path.read_bytes()
    path.write_bytes(
        {"empty": b"", "cut": raw[:-100], "head": raw[:6], "magic": b"\x07\x07" + raw[2:], "long": raw + b"xyz"}[damage]
    )
    with pytest.raises(DataError, match=r"is damaged or another file, its sha256 is .*SHA256SUMS") as caught:
        Mnist().load(tmp_path)
    assert path.name in str(caught.value)
    list_sums(tmp_path)  # whoever lists a damaged file is told by the parser
    with pytest.raises(DataError, match=r"is damaged \(.*\); download it again") as caught:
        Mnist().load(tmp_path)
    assert path.name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_images_and_labels_that_differ_in_number_are_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, packed=False)
    labels = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.zeros(5), 2049))
    list_sums(tmp_path)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte: holds 6 images, but .* holds 5 labels; get both"):
        Mnist().load(tmp_path)


# Shares.


def splits(data: FederatedData) -> list[tuple[Indices, Indices]]:
    """Return what each client trains on and what it holds out."""
    return [data.indices(client) for client in range(data.clients)]


def test_each_client_gets_the_same_number_give_or_take_one(digits: Dataset) -> None:
    shares = [len(shared(digits).train(client)[1]) for client in range(5)]
    assert sum(shares) == 1438
    assert max(shares) - min(shares) <= 1


def test_a_share_of_all_examples_is_not_rounded_up_by_a_rounding_error(digits: Dataset) -> None:
    data = shared(digits, clients=57, test_fraction=0.28)  # 0.28 * 25 is 7.000000000000001
    assert {len(train) + len(test): len(test) for train, test in splits(data)} == {25: 7, 26: 8}


def test_no_example_is_held_by_two_clients_or_both_trained_and_tested_on(digits: Dataset) -> None:
    data = shared(digits, partition=Dirichlet(alpha=0.5), test_fraction=0.25)
    indices = np.concatenate([part for split in splits(data) for part in split])
    assert len(indices) == len(set(indices.tolist())) == 1438
    for client, (train, test) in enumerate(splits(data)):
        assert len(test) == math.ceil(0.25 * (len(train) + len(test)))
        inputs, labels = data.test(client)
        assert torch.equal(inputs, digits.train.inputs(torch.from_numpy(test)))
        assert torch.equal(labels, digits.train.labels[torch.from_numpy(test)])


def test_the_number_of_examples_can_be_bounded(digits: Dataset) -> None:
    data = shared(digits, samples_per_client=24, test_fraction=0.5)
    assert all(len(data.train(client)[1]) == 24 for client in range(5))
    assert all(len(data.test(client)[1]) == 144 for client in range(5))
    assert len(shared(digits, samples_per_client=10**6).train(0)[1]) == 288


def test_the_bound_and_the_model_units_leave_the_split_alone(digits: Dataset) -> None:
    whole, few = shared(digits, test_fraction=0.2), shared(digits, test_fraction=0.2, samples_per_client=7)
    for client in range(5):
        assert np.array_equal(whole.indices(client)[1], few.indices(client)[1])
        assert set(few.indices(client)[0]) <= set(whole.indices(client)[0])


def test_a_split_follows_from_the_seed_alone(digits: Dataset) -> None:
    np.random.seed(1)  # noqa: NPY002 (must not matter)
    one = splits(shared(digits, partition=Dirichlet(alpha=0.5)))
    np.random.seed(2)  # noqa: NPY002
    same, other = shared(digits, partition=Dirichlet(alpha=0.5)), shared(digits, partition=Dirichlet(alpha=0.5), seed=4)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(one, splits(same), strict=True))
    assert not all(np.array_equal(a[0], b[0]) for a, b in zip(one, splits(other), strict=True))


def test_a_small_alpha_gives_few_classes_and_a_large_one_all(digits: Dataset) -> None:
    def classes(alpha: float) -> float:
        data = shared(digits, partition=Dirichlet(alpha=alpha), clients=10)
        shares = [data.train(client)[1].bincount(minlength=10).double() for client in range(10)]
        return float(np.mean([(share.max() / share.sum()).item() for share in shares]))

    assert classes(0.05) > 0.6
    assert classes(1000.0) < 0.2


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_an_alpha_that_cannot_be_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"^alpha"):
        Dirichlet(alpha=alpha)


@pytest.mark.parametrize("alpha", [1e-6, 1e-300])
def test_an_alpha_too_small_for_so_many_clients_is_one_sentence(digits: Dataset, alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"raise alpha, or lower min_examples or federation\.clients") as caught:
        shared(digits, partition=Dirichlet(alpha=alpha), clients=100).train(0)
    assert "\n" not in str(caught.value)


def test_more_clients_than_examples_is_refused(digits: Dataset) -> None:
    with pytest.raises(ConfigError, match="1439 clients for 1438 examples; lower it"):
        shared(digits, clients=1439).train(0)
    assert len(shared(digits, clients=1438).train(1437)[1]) == 1


# From [0, 1] to what the model sees.


def test_standardised_inputs_have_mean_zero_and_spread_one(digits: Dataset) -> None:
    inputs = shared(digits).to_model(digits.train.inputs())
    assert inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert inputs.std().item() == pytest.approx(1, abs=1e-4)
    raw = digits.train.inputs()
    assert shared(digits, standardise=False).to_model(raw) is raw


def test_the_value_range_is_what_black_and_white_become(digits: Dataset) -> None:
    low, high = shared(digits).value_range()
    inputs = shared(digits).to_model(digits.train.inputs())
    assert low == pytest.approx([inputs.min().item()])
    assert high == pytest.approx([inputs.max().item()])
    assert shared(digits, standardise=False).value_range() == ([0.0], [1.0])


def test_sorted_files_and_rare_categories_do_not_spoil_the_scale() -> None:
    """The first rows of a file may be all of one kind, and a category may be held by few."""
    count = 60_000
    number = torch.linspace(0, 1, count)
    rare = torch.zeros(count, 2)
    rare[:, 0], rare[:3, 0], rare[:3, 1] = 1, 0, 1
    columns = (Column(name="age", start=0), Column(name="kind", start=1, categories=("a", "b")))
    part = Examples(raw=torch.cat([number[:, None], rare], 1), labels=torch.arange(count) % 2, scale=1.0)
    table = Dataset(name="t", train=part, test=part, num_classes=2, source="", licence="", columns=columns)
    data = shared(table)
    inputs = data.to_model(part.inputs())
    assert inputs[:, 0].mean().item() == pytest.approx(0, abs=1e-3)
    assert inputs[:, 0].std().item() == pytest.approx(1, abs=1e-3)
    assert torch.equal(inputs[:, 1:], rare)
    mean, std = data.moments()
    assert mean == pytest.approx(inputs.mean(0).tolist(), abs=1e-3)
    assert std[0] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("standardise", [True, False])
def test_clients_are_fed_with_their_examples_in_model_units(digits: Dataset, standardise: bool) -> None:
    data = shared(digits, standardise=standardise)
    for clients in ([2, 0, 4], [0], [2, 2], [3, 4]):
        for client, (inputs, labels) in zip(clients, data.model_examples(clients), strict=True):
            own, expected = data.train(client)
            assert torch.equal(inputs, data.to_model(own))
            assert torch.equal(labels, expected)


def test_clients_who_train_a_third_time_are_not_prepared_again_as_long_as_memory_lasts(
    digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = shared(digits)
    overhead = 2 * _BYTES_PER_TENSOR
    sizes = [overhead + sum(tensor.nbytes for tensor in data.train(client)) for client in range(5)]
    monkeypatch.setattr("fedsim.federation.federated_data._CACHE_BYTES", sum(sizes[1:4]))
    data.model_examples(range(5))
    assert not data._cache  # whoever trains once
    first = {client: data.model_examples([client])[0][0] for client in (1, 2, 3, 4, 0)}
    again = {client: data.model_examples([client])[0][0] for client in (0, 1, 2, 3, 4)}
    assert [client for client in first if first[client] is again[client]] == [1, 2, 3]
    assert data._cache.size == sum(sizes[1:4])
    assert all(inputs.untyped_storage().nbytes() == inputs.nbytes for inputs, _ in data._cache.values())
