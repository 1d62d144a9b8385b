"""Tables: Adult, flight prices and files of your own, against pandas and scikit-learn."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import make_column_transformer
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder

from fedsim.base.errors import ConfigError, DataError
from fedsim.data import Dataset
from fedsim.data.tables import Adult, Csv, FlightPrices
from fedsim.data.tabular import MAX_CATEGORIES, choose_test_rows
from tests.support.data_folder import find_data_folder
from tests.support.flight_prices import FLIGHT_FILE, write_thinned_flight_prices

NUMBERS = ["age", "capital-gain", "capital-loss", "hours-per-week"]


# Adult.

ROWS = [
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Peru",
    "50, Private, 83311, HS-grad, 9, Divorced, Sales, Husband, White, Female, 0, 0, 13, Cuba",
    "28, ?, 338409, Doctorate, 16, Divorced, ?, Wife, Black, Female, 0, 0, 80, Cuba",
    "20, Private, 200000, HS-grad, 9, Divorced, Sales, Husband, Black, Male, 500, 0, 30, ?",
]


def write_adult(folder: Path) -> Path:
    home = folder / "adult"
    home.mkdir()
    incomes = ["<=50K", ">50K", ">50K", "<=50K"]
    train = [f"{row}, {income}" for row, income in zip(ROWS, incomes, strict=True)]
    test = ["|1x3 Cross validator", f"{ROWS[1].replace('50,', '90,', 1)}, >50K.", f"{ROWS[2]}, <=50K."]
    (home / "adult.data").write_text("\n".join(train) + "\n\n")
    (home / "adult.test").write_text("\n".join(test) + "\n")
    list_sums(folder)
    return folder


def list_sums(folder: Path) -> None:
    """Say that the files are meant to differ from the official ones."""
    files = sorted((folder / "adult").iterdir())
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  adult/{path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))


def reference_adult(folder: Path, columns: list[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    names = "age workclass fnlwgt education education-num marital-status occupation relationship race sex "
    names += "capital-gain capital-loss hours-per-week native-country income"
    read = {"header": None, "names": names.split(), "skipinitialspace": True, "na_values": "?"}
    parts = [pd.read_csv(folder / "adult" / "adult.data", **read)]
    parts.append(pd.read_csv(folder / "adult" / "adult.test", skiprows=1, **read))
    return tuple(part[[*columns, "income"]].dropna() for part in parts)  # type: ignore[return-value]


@pytest.mark.thorough
def test_adult_equals_pandas_and_scikit_learn() -> None:
    folder = find_data_folder("adult/adult.data")
    dataset = Adult().load(folder)
    names = [column.name for column in dataset.columns]
    train, test = reference_adult(folder, names)
    texts = [name for name in names if name not in NUMBERS]
    encoder = make_column_transformer(
        (MinMaxScaler(clip=True), NUMBERS), (OneHotEncoder(sparse_output=False), texts), verbose_feature_names_out=False
    ).fit(train)
    order = {name: place for place, name in enumerate(encoder.get_feature_names_out())}
    wanted = [
        order[f"{column.name}_{category}" if category else column.name]
        for column in dataset.columns
        for category in column.categories or ("",)
    ]
    for part, reference in ((dataset.train, train), (dataset.test, test)):
        assert np.array_equal(part.inputs().numpy(), encoder.transform(reference)[:, wanted].astype(np.float32))
        assert part.labels.tolist() == reference["income"].str.startswith(">50K").tolist()
    assert (len(dataset.train), len(dataset.test)) == (30162, 15060)
    assert dataset.task.input_shape == (102,)


@pytest.mark.thorough
def test_adult_has_the_62_features_of_the_code_of_lmra_without_country() -> None:
    dataset = Adult(drop=("fnlwgt", "native-country"), max_examples=500).load(find_data_folder("adult/adult.data"))
    assert dataset.task.input_shape == (62,)
    assert len(dataset.train) == 500


def test_an_adult_column_gives_the_cells_of_the_file(tmp_path: Path) -> None:
    dataset = Adult(missing="category").load(write_adult(tmp_path))
    inputs = dataset.train.inputs()
    assert dataset.column("age").values(inputs).tolist() == pytest.approx([39, 50, 28, 20])
    job = dataset.column("workclass")
    assert [job.categories[place] for place in job.values(inputs)] == ["State-gov", "Private", "?", "Private"]
    assert dataset.train.labels.tolist() == [0, 1, 1, 0]
    assert dataset.column("age").high == 50
    assert dataset.test.inputs()[0, dataset.column("age").start] == 1.0, "90 years are beyond the training file's"
    assert dataset.value_range == (0.0, 1.0)


def test_people_with_something_unknown_are_left_out_if_it_is_a_column_in_use(tmp_path: Path) -> None:
    folder = write_adult(tmp_path)
    assert (len(Adult().load(folder).train), len(Adult().load(folder).test)) == (2, 1)
    assert len(Adult(drop=("native-country",)).load(folder).train) == 3
    assert all("?" not in column.categories for column in Adult().load(folder).columns)


def test_a_smaller_choice_is_part_of_a_larger_one_scaled_alike(tmp_path: Path) -> None:
    folder = write_adult(tmp_path)
    every = Adult(missing="category").load(folder)
    rows = [
        {tuple(row) for row in Adult(missing="category", max_examples=n).load(folder).train.raw.tolist()}
        for n in (1, 3)
    ]
    assert [len(part) for part in rows] == [1, 3]
    assert rows[0] < rows[1] < {tuple(row) for row in every.train.raw.tolist()}


def test_adult_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"adult\.data: no such file; get https://archive"):
        Adult().load(tmp_path)
    with pytest.raises(ConfigError, match="drop: Adult has no column 'fnlwgd', did you mean 'fnlwgt'"):
        Adult(drop=("fnlwgd",))
    with pytest.raises(ConfigError, match="max_examples: expected at least 1, got 0"):
        Adult(max_examples=0)
    folder = write_adult(tmp_path)
    (folder / "SHA256SUMS").unlink()
    with pytest.raises(DataError, match=r"adult\.data: .*its md5 is .* but the official file has 5d7c39d7b880"):
        Adult().load(folder)
    with (folder / "adult" / "adult.data").open("a") as file:
        file.write(f"{ROWS[0]}, rich\n")
    list_sums(folder)
    with pytest.raises(DataError, match="income 'rich' is neither"):
        Adult().load(folder)


# Flight prices.


@pytest.fixture(scope="module")
def flight_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with each 60th row of the real file, which hold all categories."""
    return write_thinned_flight_prices(find_data_folder(f"{FLIGHT_FILE}.gz"), tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_the_real_file_has_so_many_flights() -> None:
    dataset = FlightPrices().load(find_data_folder(f"{FLIGHT_FILE}.gz"))
    assert (len(dataset.train), len(dataset.test)) == (240122, 60031)


def test_flight_prices_equal_the_file_row_by_row(flight_folder: Path) -> None:
    dataset = FlightPrices().load(flight_folder)
    assert dataset.task.input_shape == (31,)
    frame = pd.read_csv(flight_folder / FLIGHT_FILE)
    assert len(dataset.train) + len(dataset.test) == len(frame) == 5002
    assert len(dataset.test) == pytest.approx(1000, abs=100)
    decoded = []
    for part in (dataset.train, dataset.test):
        assert part.groups is not None
        inputs = part.inputs()
        table = {"airline": np.array(dataset.group_names, object)[part.groups.numpy()]}
        for column in dataset.columns:
            values = column.values(inputs).numpy()
            table[column.name] = np.array(column.categories, object)[values] if column.categories else values.round(2)
        mean, std = dataset.target
        table["price"] = (part.labels.double().numpy() * std + mean).round().astype(int)
        decoded.append(pd.DataFrame(table))
    ours, theirs = pd.concat(decoded), frame.drop(columns="flight")[decoded[0].columns]
    assert ours["price"].sum() == theirs["price"].sum()
    keys = list(ours.columns)
    # Durations and days are float32 times a range: compare what they round to.
    counts = [
        part.assign(duration=part["duration"].astype(float).round(2), days_left=part["days_left"].astype(float).round())
        .groupby(keys)
        .size()
        .sort_index()
        for part in (ours, theirs)
    ]
    assert counts[0].equals(counts[1])


def test_flight_targets_are_standardised_and_airlines_are_groups(flight_folder: Path) -> None:
    dataset = FlightPrices().load(flight_folder)
    assert dataset.train.labels.double().mean().item() == pytest.approx(0, abs=1e-6)
    assert dataset.train.labels.double().std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert dataset.group_names == ("AirAsia", "Air_India", "GO_FIRST", "Indigo", "SpiceJet", "Vistara")
    assert dataset.num_classes == 0
    assert "airline" not in [column.name for column in dataset.columns]


def test_flight_prices_load_as_kaggle_writes_them_with_a_nameless_column(tmp_path: Path) -> None:
    (tmp_path / "flight-prices").mkdir()
    head = (
        ",airline,flight,source_city,departure_time,stops,arrival_time,destination_city,class,duration,days_left,price"
    )
    rows = [f"{n},A{n % 2},F-{n},Delhi,Night,zero,Night,Mumbai,Economy,{n / 2},{n},{100 * n}" for n in range(10)]
    (tmp_path / "flight-prices" / "Clean_Dataset.csv").write_text("\n".join([head, *rows]))
    dataset = FlightPrices().load(tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.group_names) == (8, 2, ("A0", "A1"))
    some = FlightPrices(max_examples=5).load(tmp_path)
    assert (len(some.train), len(some.test)) == (5, 2)
    assert training_rows(some) < training_rows(dataset)
    assert some.target == dataset.target


def training_rows(dataset: Dataset) -> set[tuple[float, ...]]:
    part = dataset.train
    assert part.groups is not None
    joined = torch.cat([part.raw, part.labels[:, None], part.groups[:, None]], dim=1)
    return {tuple(row) for row in joined.tolist()}


def test_flight_prices_name_the_column_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; get the Kaggle data set 'Flight Price Prediction'"):
        FlightPrices().load(tmp_path)
    with pytest.raises(ConfigError, match="max_examples: expected at least 1, got -1"):
        FlightPrices(max_examples=-1)
    (tmp_path / "flight-prices").mkdir()
    (tmp_path / "flight-prices" / "Clean_Dataset.csv").write_text("airline,prize\nA,1\n")
    with pytest.raises(DataError, match=r"Clean_Dataset\.csv: has no column 'source_city'"):
        FlightPrices().load(tmp_path)


# Any table.

PEOPLE = "name,age,rooms,town,owner\n" + "".join(
    f"p{n},{20 + n % 40},{n % 3},{'Ulm' if n % 4 else 'Bonn'},{'yes' if n % 5 > 2 else 'no'}\n" for n in range(50)
)


def csv(folder: Path, text: str | bytes = PEOPLE, **settings: Any) -> Dataset:
    (folder / "own.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return Csv(**{"path": "own.csv", "target": "owner", "drop": ("name",), **settings}).load(folder)


@pytest.mark.parametrize("cells", [("<30", ">=30"), ("18+", "65+"), ("24.12.2026", "1.1.2026"), ("1.10.2", "1.9.0")])
def test_comparisons_dates_and_versions_are_categories(tmp_path: Path, cells: tuple[str, str]) -> None:
    text = "a,y\n" + "".join(f"{cells[n % 2]},{n // 2 % 2}\n" for n in range(20))
    dataset = csv(tmp_path, text, target="y", drop=())
    assert dataset.column("a").categories == tuple(sorted(cells))


def test_a_table_of_ones_own_becomes_features_classes_and_groups(tmp_path: Path) -> None:
    dataset = csv(tmp_path, group="town", categorical=("rooms",))
    assert (len(dataset.train), len(dataset.test)) == (40, 10)
    assert dataset.class_names == ("no", "yes")
    assert dataset.group_names == ("Bonn", "Ulm")
    assert [column.name for column in dataset.columns] == ["age", "rooms"]
    assert dataset.column("rooms").categories == ("0", "1", "2")
    seen = []
    for part in (dataset.train, dataset.test):
        inputs = part.inputs()
        assert part.groups is not None
        ages = dataset.column("age").values(inputs).round().long().tolist()
        rooms = dataset.column("rooms").values(inputs).tolist()
        seen += list(zip(ages, rooms, part.groups.tolist(), part.labels.tolist(), strict=True))
    expected = [(20 + n % 40, n % 3, int(n % 4 > 0), int(n % 5 > 2)) for n in range(50)]
    assert sorted(seen) == sorted(expected)


def test_neither_the_order_of_the_rows_nor_gzip_decides_who_is_tested_on(tmp_path: Path) -> None:
    head, *rows = PEOPLE.splitlines()
    first = csv(tmp_path)
    second = csv(tmp_path, "\n".join([head, *reversed(rows)]))
    assert torch.equal(first.train.raw, second.train.raw.flip(0))
    assert torch.equal(first.test.labels, second.test.labels.flip(0))
    (tmp_path / "own.csv.gz").write_bytes(gzip.compress(PEOPLE.encode()))
    packed = Csv(path=str(tmp_path / "own.csv.gz"), target="owner", drop=("name",)).load(None)
    assert torch.equal(first.train.raw, packed.train.raw)


def test_equal_rows_stay_on_one_side_and_one_row_at_least_on_each(tmp_path: Path) -> None:
    table = pd.DataFrame({"a": [str(n // 10) for n in range(300)]}, dtype=object)
    sides = pd.Series(choose_test_rows(table, 0.2)).groupby(table["a"]).nunique()
    assert (sides > 1).sum() <= 1
    assert choose_test_rows(table, 0.2).sum() == 60
    for fraction in (0.001, 0.999):
        assert choose_test_rows(table.iloc[:2], fraction).sum() == 1


def test_a_regression_predicts_a_standardised_number(tmp_path: Path) -> None:
    dataset = csv(tmp_path, target="age", task="regression")
    mean, std = dataset.target
    parts = [part.labels.double() * std + mean for part in (dataset.train, dataset.test)]
    assert sorted(torch.cat(parts).round().long().tolist()) == sorted(20 + n % 40 for n in range(50))
    assert dataset.train.labels.mean().item() == pytest.approx(0, abs=1e-6)
    assert dataset.train.labels.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert (dataset.num_classes, dataset.train.labels.dtype) == (0, torch.float32)


def test_test_values_stay_within_the_range_of_training_and_a_constant_column_is_zero(tmp_path: Path) -> None:
    text = "a,b,y\n" + "".join(f"{n**3},7,{n % 2}\n" for n in range(60))
    dataset = csv(tmp_path, text, target="y", drop=(), test_fraction=0.9)
    inputs = dataset.test.inputs()
    assert (inputs[:, 0].min(), inputs[:, 0].max()) == (0.0, 1.0)
    assert dataset.train.inputs()[:, 1].tolist() == [0.0] * 6
    assert dataset.column("b").values(inputs).tolist() == [7.0] * 54


def test_texts_that_are_spelt_in_two_ways_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cities, classes, groups = ("Caf\u00e9", "Cafe\u0301", "bar"), ("yes", "no"), ("North", "south", "north")
    lines = [f"{n},{cities[n % 3]},{groups[n % 3]},{classes[n % 2]}" for n in range(60)]
    data = csv(tmp_path, "n,city,area,y\n" + "\n".join(lines), target="y", group="area", drop=())
    assert (len(data.column("city").categories), len(data.group_names)) == (3, 3)
    assert "column 'city' has both" in caplog.text
    assert "column 'area' has both 'North' and 'north', which count as two" in caplog.text
    assert "column 'y'" not in caplog.text


def test_a_share_of_all_rows_is_not_rounded_up_by_a_rounding_error(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{n},{n % 2}\n" for n in range(100))
    assert len(csv(tmp_path, text, target="y", drop=(), test_fraction=0.07).test) == 7


def test_classes_that_are_numbers_are_sorted_by_size(tmp_path: Path) -> None:
    text = "a,y\n" + "".join(f"{n},{n % 12}\n" for n in range(60))
    assert csv(tmp_path, text, target="y", drop=()).class_names == tuple(map(str, range(12)))


def test_other_separators_quotes_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    text = "\ufeffa;b;y\n" + "".join(f'{n};"x;{n % 2}"; {n % 2}\n\n' for n in range(10))
    dataset = csv(tmp_path, text, target="y", drop=(), separator=";")
    assert dataset.column("b").categories == ("x;0", "x;1")
    assert dataset.column("a").high in (8.0, 9.0)
    assert dataset.num_classes == 2


MANY = "a,y\n" + "".join(f"k{n},{n % 2}\n" for n in range(MAX_CATEGORIES + 1))
LINES = "a,y\n1,0\n2,1\n"
BAD: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    "unknown target": (PEOPLE, {"target": "ownr"}, "has no column 'ownr', did you mean 'owner'"),
    "unknown group": (PEOPLE, {"group": "twn"}, "has no column 'twn', did you mean 'town'"),
    "unknown categorical": (PEOPLE, {"categorical": ("room",)}, "has no column 'room', did you mean 'rooms'"),
    "unknown drop": (PEOPLE, {"drop": ("nam",)}, "has no column 'nam', did you mean 'name'"),
    "empty cell": (LINES + ",1\n", {"target": "y", "drop": ()}, "column 'a' has no value in line 4 .1 in all"),
    "nan": (LINES + "\n5,NaN\n", {"target": "y", "drop": ()}, "column 'y' has no value in line 5"),
    "infinite": (LINES + "-inf,1\n", {"target": "y", "drop": ()}, "column 'a' holds '-inf' in line 4, expected a fin"),
    "huge": (LINES + "1e300,1\n", {"target": "y", "drop": ()}, "column 'a' holds '1e300' in line 4, expected a fin"),
    "mixed": (LINES + "x,1\n", {"target": "y", "drop": ()}, "column 'a' holds 'x' in line 4.*categorical"),
    "decimal comma": (
        "a;y\n1,5;0\n-2,25;1\n",
        {"target": "y", "drop": (), "separator": ";"},
        "column 'a' holds numbers with other signs, such as '.*,.*'; write digits, a point and a minus alone",
    ),
    **{
        f"numbers with {sign}": (
            "a,y\n" + "".join(f"{cell},{index % 2}\n" for index, cell in enumerate(cells)),
            {"target": "y", "drop": ()},
            f"column 'a' holds numbers with other signs, such as '({'|'.join(map(re.escape, cells))})'",
        )
        for sign, cells in {
            "per cent": ("5%", "7.5 %"),
            "a currency": ("$4", "$1.50"),
            "a typographic minus": ("\N{MINUS SIGN}3", "\N{MINUS SIGN}4"),
        }.items()
    },
    "text target": (PEOPLE, {"task": "regression"}, "column 'owner' holds 'no' in line 2"),
    "one class": ("a,y\n1,0\n2,0\n", {"target": "y", "drop": ()}, "the target 'y' is '0' in every line"),
    "one number": (
        "a,y\n1,3\n2,3\n4,3\n",
        {"target": "y", "drop": (), "task": "regression"},
        "the target 'y' is 3.0 in every line",
    ),
    "one row": ("a,y\n1,0\n", {"target": "y", "drop": ()}, "holds 1 rows, expected at least 2"),
    "no row": ("a,y\n", {"target": "y", "drop": ()}, "holds 0 rows, expected at least 2"),
    "no feature": ("y\n1\n0\n", {"target": "y", "drop": ()}, "has no column besides the target"),
    "empty": ("", {}, "is empty; its first line has to name the columns"),
    "two of a name": ("a,a,y\n1,2,0\n", {"target": "y", "drop": ()}, "two columns are called 'a'; rename"),
    "no name": (",y\n1,2\n2,3\n", {"target": "y", "drop": ()}, "a column has no name; write one"),
    "ragged": (LINES + "1,2,3\n", {"target": "y", "drop": ()}, "line 4 has 3 cells, expected 2"),
    "latin-1": ("a,y\nä,0\nö,1\n".encode("latin-1"), {"target": "y", "drop": ()}, "is no UTF-8 text .byte 4"),
    "open quote": ('a,y\n"1,0\n', {"target": "y", "drop": ()}, r"is not readable \(unexpected end of data\)"),
    "many categories": (MANY, {"target": "y", "drop": ()}, "column 'a' holds 1001 different values.*name it in drop"),
    "many classes": (MANY, {"target": "a", "drop": ()}, "column 'a' holds 1001 different.*set task to regression"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_is_not_clean_is_an_error_of_one_sentence(name: str, tmp_path: Path) -> None:
    text, settings, sentence = BAD[name]
    with pytest.raises(DataError, match=sentence) as caught:
        csv(tmp_path, text, **settings)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(".")
    assert "own.csv" in str(caught.value)


def test_a_dropped_column_need_not_be_clean_nor_have_a_name(tmp_path: Path) -> None:
    dataset = csv(tmp_path, ",a,b,y\n0,1,,0\n1,2,inf,1\n2,3,nan,1\n", target="y", drop=("b", ""))
    assert [column.name for column in dataset.columns] == ["a"]


def test_a_damaged_archive_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "own.csv.gz").write_bytes(gzip.compress(PEOPLE.encode())[:-20])
    with pytest.raises(DataError, match=r"own\.csv\.gz: is not readable"):
        Csv(path="own.csv.gz", target="owner").load(tmp_path)
    with pytest.raises(DataError, match=r"other\.csv: no such file; correct data\.path"):
        Csv(path="other.csv", target="owner").load(tmp_path)
    with pytest.raises(DataError, match="'csv' needs a path"):
        Csv().load(tmp_path)
    with pytest.raises(DataError, match="'csv' needs a target"):
        Csv(path="own.csv").load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"separator": "::"}, "separator: expected one character"),
        ({"separator": '"'}, "separator: expected one character"),
        ({"test_fraction": 1.0}, "test_fraction: expected a value below 1, got 1.0"),
        ({"target": "y", "group": "y"}, "group: expected another column than the target, got 'y'"),
        ({"target": "y", "drop": ("y",)}, "drop: expected columns that are not in use, got 'y'"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Csv(**settings)


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    first = csv(tmp_path)
    assert torch.equal(csv(tmp_path).train.raw, first.train.raw)
    assert len(csv(tmp_path, PEOPLE + "p50,30,1,Ulm,yes\n").train) + 11 == 51


def test_a_number_is_not_taken_for_classes(tmp_path: Path) -> None:
    rows = "".join(f"{i},{i * 1.37}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("a,price\n" + rows)
    with pytest.raises(DataError, match="'price' has 40 values in 40 lines, too many to be classes; set task to regr"):
        Csv(path=str(tmp_path / "t.csv"), target="price").load(None)
    assert Csv(path=str(tmp_path / "t.csv"), target="price", task="regression").load(None).num_classes == 0


def test_ids_of_many_digits_stay_apart(tmp_path: Path) -> None:
    """As floats all four are the same owner, and the same two classes one."""
    first = 1_234_567_890_123_456_000
    lines = [f"{row / 20},{first + row % 4},{first + row % 2}" for row in range(20)]
    dataset = csv(tmp_path, "\n".join(["a,owner,y", *lines]), target="y", group="owner", drop=())
    assert dataset.group_names == tuple(str(first + owner) for owner in range(4))
    assert dataset.class_names == (str(first), str(first + 1))
    with pytest.raises(DataError, match=r"'owner' holds different numbers near 1.23457e.18, which 64 bits round"):
        csv(tmp_path, "\n".join(["a,owner,y", *lines]), target="y", drop=())


def test_ids_that_would_each_be_a_feature_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = "".join(f"P{number},{number % 3},{'ab'[number % 2]}\n" for number in range(30))
    csv(tmp_path, "patient,stage,owner\n" + lines, drop=())
    assert "column 'patient' has 30 different texts in 30 rows" in caplog.text
    caplog.clear()
    csv(tmp_path, "patient,stage,owner\n" + lines, drop=("patient",))
    assert not caplog.text


def test_a_file_in_the_current_folder_is_named_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, data = tmp_path / "here", tmp_path / "data"
    here.mkdir()
    data.mkdir()
    (here / "own.csv").write_text(PEOPLE)
    monkeypatch.chdir(here)
    with pytest.raises(DataError, match=f"for the one in the current folder, set data.path to {here / 'own.csv'}"):
        Csv(path="own.csv", target="owner").load(data)
